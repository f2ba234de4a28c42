"""Beside llama-server: the same requests, in turns, by a client of our own and by guidellm."""

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import time

from rows import must, row, said

from . import model
from .crowd import bodies, crowd, middle, together
from .load import INPUTS, MOST, WORDS, WORK
from .server import Program, Server, say


PEER = "llama-server"
# The peer's own file in q4, which rounds inputs of such files to 8 bits by itself.
SAME = "file-users"


class LlamaServer(Program):
    """llama-server, ready to be asked, with a sequence for each of `MOST` users."""

    def __init__(self, binary, file):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        threads = len(os.sched_getaffinity(0))
        command = [
            binary, "--model", file, "--host", "127.0.0.1", "--port", self.port, "--parallel", MOST,
            "--ctx-size", 512 * MOST, "--threads", threads, "--threads-batch", threads, "--cache-ram", 0,
        ]
        self.process = subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 300
        while not self.is_healthy():
            if self.process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise RuntimeError(f"{binary} does not serve {file}")
            time.sleep(0.2)

    def is_healthy(self):
        try:
            return self.ask("GET", "/health")[0] == 200
        except OSError:
            return False


@contextlib.contextmanager
def servers(args):
    """llama-server, and q4 for each kind of inputs and with the same file, which have answered once."""
    folder = model.shaped(args.q4, args.models)
    file = model.gguf(args.llama_python, args.models, args.gguf)
    with contextlib.ExitStack() as stack:
        there = {PEER: stack.enter_context(LlamaServer(args.llama, file))}
        ours = {f"{prefix}users": (folder, inputs) for prefix, inputs in INPUTS.items()} | {SAME: (file, ())}
        for who, (of, inputs) in ours.items():
            server = Server(args.q4, *WORDS, *inputs, model=of, isa=args.isa)
            there[who] = stack.enter_context(server)
        for server in there.values():
            crowd(server.port, 8, 1, bodies(8, dataclasses.replace(WORK, answer=8)))
        yield there


def beside(args, who):
    """The peer, and what it computes with."""
    return f"{PEER} ({args.gguf}{', the same file' if who == SAME else ''})"


def turns(rounds, runs):
    """Each of the runs in every round; every other round goes backwards."""
    for turn in range(rounds):
        for key, done in list(runs.items())[:: -1 if turn % 2 else 1]:
            yield turn, key, done


def why_not(args, program=None):
    """Why nothing can be measured, if so."""
    if not args.llama:
        return "llama-server was not built"
    if program and not (args.venvs and (args.venvs / program).exists()):
        return f"{program.split('/')[0]} was not installed"
    return None


def peer(args):
    """The same token ids for all, by a client of our own."""
    if why := why_not(args):
        return row(f"int8-users-{MOST}-to-{PEER}", None, "of its rate", ">= 1.5", why)
    with servers(args) as there:
        runs = {(who, users): [] for users in (1, MOST) for who in there}
        for turn, (who, users), done in turns(args.rounds, runs):
            asked = bodies(users * args.answers, WORK, seed=100 * turn + users)
            done.append(crowd(there[who].port, users, args.answers, asked))
            assert done[-1].tokens == users * args.answers * WORK.answer, f"{who}: {done[-1].tokens} tokens"
            say(f"{who}, {users}: {done[-1].rate:.1f} tok/s")
    for users, need in ((MOST, ">= 1.5"), (1, "said")):
        theirs = runs.pop((PEER, users))
        for who in (who for who, some in list(runs) if some == users):
            ratio = middle(runs[who, users]) / middle(theirs)
            unit = f"of the rate of {beside(args, who)}, a client of our own, in turns; {WORK}"
            row(f"{who}-{users}-to-{PEER}", round(ratio, 2), unit, need)
        row(f"{PEER}-{users}-rate", round(middle(theirs), 1), "tok/s of all answers", "said")
        firsts = together(theirs)[0]
        first = statistics.median(firsts)
        row(f"{PEER}-{users}-first", round(1000 * first, 1), "ms to the first token, median", "said")
        row(f"{PEER}-{users}-first-most", round(max(firsts) / first, 2), "of that, the longest", "said")


def guided(args):
    """The same texts for all, which all cut into the same tokens, as guidellm makes and measures them."""
    program = "guidellm/bin/guidellm"
    if why := why_not(args, program):
        return row(f"int8-users-{MOST}-guidellm", None, "of the rate of llama-server", ">= 1.5", why)
    program = args.venvs / program
    with servers(args) as there:
        runs = {who: [] for who in there}
        for turn, who, done in turns(args.rounds, runs):
            done.append(by_guidellm(args, program, who, there[who].url, turn))
            say(f"guidellm, {who}: {done[-1]:.1f} tok/s")
    theirs = statistics.median(runs.pop(PEER))
    version = said(program, "--version")
    for who, done in runs.items():
        ours = statistics.median(done)
        texts = f"{2 * MOST} texts of {WORK.prompt} tokens"
        unit = f"of the rate of {beside(args, who)} by {version}, in turns; {texts}"
        row(f"{who}-{MOST}-guidellm", round(ours / theirs, 2), unit, ">= 1.5")
        row(f"{who}-{MOST}-guidellm-rate", round(ours, 1), "tok/s of answers", "said")


def by_guidellm(args, program, who, url, turn):
    """Tokens of answers a second."""
    report = args.work / f"guidellm-{who}.json"
    must(
        program, "run",
        "--backend", f"kind=openai_http,target={url},model=any,request_format=/v1/completions",
        "--profile", f"kind=concurrent,streams={MOST}",
        "--constraint", f"kind=max_requests,count={2 * MOST}",
        "--data", f"kind=synthetic_text,prompt_tokens={WORK.prompt},output_tokens={WORK.answer}",
        "--tokenizer", f"kind=huggingface_auto,model={model.DEMO}", "--seed", f"kind=static,value={turn}",
        "--output", f"kind=json,path={report}", "--disable-console",
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    done = metrics["request_totals"]["successful"]
    assert done == 2 * MOST, f"{done} of {2 * MOST} requests to {who} succeeded"
    return metrics["output_tokens_per_second"]["successful"]["mean"]
