"""The server on a card: what many users get of the engine's rate, how long a prompt waits beside others, and
whose answers are those of one sequence."""

import json
import subprocess

from rows import must, row, run

from . import model
from .asked import asked, compared, of_batch
from .crowd import Work, bodies, share
from .long import until_first
from .server import Server, say

CARD = ("--device", "cuda")
SHAPE = "qwen3-4b"
# At once, tokens of a prompt and of an answer: nearly all steps decode for everybody.
SLOTS, SHORT, ANSWER = 64, 16, 256
WORK = f"prompts of about {SHORT} tokens, answers of {ANSWER}"
# Prompts that come while others decode.
OTHERS, PROMPT, PROMPTS = 32, 512, 200
ANSWERS = 1000


def card(q4, work):
    folder = model.shaped(q4, work, SHAPE)
    with Server(q4, *CARD, "--parallel", SLOTS, "--context", 1024, model=folder) as server:
        many(q4, folder, server)
        beside(q4, server)
    same(q4)


def users(q4, server, *words):
    """The words of a crowd of the same program."""
    head = [q4, "--json", "bench", "--server", server.url, "--prompt-tokens", SHORT]
    return [str(word) for word in (*head, *words)]


def many(q4, folder, server):
    """The rate of 64 users to that of 64 sequences without a server."""
    words = ("--users", SLOTS, "--requests", 4 * SLOTS, "--answer-tokens", ANSWER)
    seen = [json.loads(must(*users(q4, server, *words))[1])["results"][0] for _ in range(2)][-1]
    bench = ("--json", *CARD, "bench", folder, "--batch", SLOTS, "--prefill", PROMPT, "--decode", 64, "-r", 3)
    report = json.loads(must(q4, *bench)[1])
    alone = next(r["median"] for r in report["results"] if r["what"] == f"batch {SLOTS}")
    say(f"{SLOTS} users: {seen['tok_s']:.0f} tok/s; without a server {alone:.0f}")
    failed = seen["failed"] + seen["short"]
    row("server-64-failed", failed, f"of {seen['requests']} answers failed or short", "0")
    row("server-64-rate", round(seen["tok_s"]), f"tok/s of all answers; {WORK}", "said")
    unit = f"of {alone:.0f} tok/s, {SLOTS} sequences in q4 bench"
    row("server-64-users", round(seen["tok_s"] / alone, 3), unit, ">= 0.9")


def beside(q4, server):
    """Prompts of 512 tokens, one after the other, beside 32 users who decode."""
    words = ("--users", OTHERS, "--requests", 100 * OTHERS, "--answer-tokens", 900)
    others = subprocess.Popen(users(q4, server, *words), stdout=subprocess.DEVNULL)
    try:
        while server.metric("num_requests_running") < OTHERS:
            assert others.poll() is None, "the others ended"
        firsts = []
        for body in bodies(PROMPTS, Work(PROMPT, 1), seed=5):
            begun, first = until_first(server.port, body["prompt"])
            firsts.append(first - begun)
        assert others.poll() is None, "the others ended"
    finally:
        others.kill()
        others.wait()
    unit = f"ms to the first token of a prompt of {PROMPT} beside {OTHERS} users, 99 of 100 below"
    row("server-first-token", round(1000 * share(firsts, 0.99), 1), unit, "< 250")
    row("server-first-token-median", round(1000 * share(firsts, 0.5), 1), "ms, the median of them", "said")


def same(q4):
    """Answers of 32 at once beside those of one sequence at a time, on the same card."""
    requests = asked(ANSWERS)
    for dtype, need in (("float32", "said"), ("bfloat16", "said")):
        words = (*CARD, "--dtype", dtype)
        want = of_batch(q4, requests, "", *words, "--parallel", 1)[1]
        with Server(q4, *words, "--parallel", 32) as server:
            equal, made = compared(server, requests, want, seed=1)
        unit = f"of {made} answers are those of one sequence at a time, 32 at once, {dtype}"
        row(f"server-1000-{dtype}", equal, unit, need)
    done = run("timeout", 60, q4, "serve", *CARD, "--reproducible", "--port", 0)[1]
    told = "refused" if done.returncode == 6 and "--reproducible" in done.stderr else done.stderr
    row("server-1000-answers", told, "with --reproducible, whose rows would depend on their company", "refused")
