"""Many users at once, beside one, and beside the engine without a server."""

import json
import statistics
from dataclasses import replace

from rows import must, row

from . import model
from .asked import of_batch
from .crowd import Work, bodies, crowd, middle, share, together
from .server import Server, say

# Users who have nothing in common, and users of one assistant.
WORK = Work(prompt=96, answer=64)
SHARED = Work(prompt=128, answer=128, shared=96)
MOST = 32
# Pairs of one step, for each round.
TURNS = 5
WORDS = ("--parallel", MOST, "--context", 512)
# What products multiply by: floats, as the model declares, or int8, as llama.cpp always does.
INPUTS = {"": (), "int8-": ("--activations", "int8")}


def load(args):
    """1, 8 and 32 users of q4, in turns."""
    for prefix, inputs in INPUTS.items():
        loaded(args, prefix, inputs, WORK)


def shared(args):
    """The same where all prompts begin alike, which is kept of the first."""
    for prefix, inputs in INPUTS.items():
        loaded(args, f"{prefix}shared-", inputs, SHARED)


def loaded(args, prefix, inputs, work):
    folder = model.shaped(args.q4, args.models)
    runs = {1: [], 8: [], MOST: []}
    with Server(args.q4, *WORDS, *inputs, model=folder, isa=args.isa) as server:
        crowd(server.port, 8, 1, bodies(8, replace(work, answer=8)))
        for turn in range(args.rounds):
            for users, done in runs.items():
                asked = bodies(users * args.answers, work, seed=100 * turn + users)
                done.append(crowd(server.port, users, args.answers, asked))
                say(f"{prefix}{users} users: {done[-1].rate:.1f} tok/s")
    for users, done in runs.items():
        name = f"{prefix}users-{users}"
        firsts, gaps = together(done)
        unit = f"tok/s of all answers, median of {args.rounds}; {work}"
        row(f"{name}-rate", round(middle(done), 1), unit, "said")
        first = statistics.median(firsts)
        row(f"{name}-first", round(1000 * first, 1), "ms to the first token, median", "said")
        # Nobody waits for a place where there are as many places as users.
        row(f"{name}-first-most", round(max(firsts) / first, 2), "of that, the longest", "said")
        row(f"{name}-next", round(1000 * statistics.median(gaps), 2), "ms between tokens", "said")
        row(f"{name}-next-99", round(1000 * share(gaps, 0.99), 1), "ms, 99 of 100 below", "said")
    ratio = middle(runs[MOST]) / middle(runs[1])
    row(f"{prefix}users-{MOST}-to-1", round(ratio, 2), f"rate of {MOST} users to one's", ">= 3")


def cost_step(args):
    """What HTTP and scheduling cost one user: the server beside the engine without it, in turns."""
    folder = model.shaped(args.q4, args.models)
    env = {"Q4_ISA": args.isa} if args.isa else {}
    short = 16  # tokens, behind which the bench decodes too
    for prefix, inputs in INPUTS.items():
        steps = []
        bench = ["--json", "bench", folder, *inputs, "--prefill", short, "--decode", WORK.answer, "-r", 1]
        with Server(args.q4, *WORDS, *inputs, model=folder, isa=args.isa) as server:
            crowd(server.port, 1, 1, bodies(1, Work(short, 8)))
            # Seconds apart, for what neighbours leave of the processor changes from minute to minute.
            for turn in range(TURNS * args.rounds):
                one = crowd(server.port, 1, 1, bodies(1, Work(short, WORK.answer), seed=turn))
                report = json.loads(must(args.q4, *bench, env=env)[1])
                rate = next(r["median"] for r in report["results"] if r["what"].startswith("tg"))
                steps.append(statistics.median(one.gaps) * rate - 1)
        say(f"{prefix}more for a step:", *(f"{step:.1%}" for step in steps))
        unit = f"% more for a step of one user over HTTP than in q4 bench, in turns, median of {len(steps)} pairs"
        row(f"{prefix}cost-step", round(100 * statistics.median(steps), 1), unit, "<= 3")


def cost_all(args):
    """The same of 32 users, beside a batch."""
    folder = model.shaped(args.q4, args.models)
    kept = ("prompt", "max_tokens", "temperature")
    for prefix, inputs in INPUTS.items():
        batches = []
        bound = ("--ignore-eos", *WORDS, *inputs, folder)
        for turn in range(args.rounds):
            asked = bodies(2 * MOST, WORK, seed=turn)
            with Server(args.q4, *WORDS, *inputs, model=folder, isa=args.isa) as server:
                crowd(server.port, 1, 1, bodies(1, Work(16, 8)))
                all_ = crowd(server.port, MOST, 2, asked)
            lines = [{name: body[name] for name in kept} for body in asked]
            # Loading is none of it.
            least, _ = of_batch(args.q4, [{**lines[0], "max_tokens": 1}], args.isa, *bound)
            seconds, answers = of_batch(args.q4, lines, args.isa, *bound)
            assert sum(tokens for *_, tokens in answers) == all_.tokens, "the answers are not as long"
            batches.append(all_.seconds / (seconds - least) - 1)
            say(f"{prefix}more for all: {batches[-1]:.1%}")
        unit = f"% more for {2 * MOST} answers to {MOST} users than by generate --batch, without loading"
        row(f"{prefix}cost-{MOST}", round(100 * statistics.median(batches), 1), unit, "<= 3")
