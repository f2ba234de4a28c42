"""Answers in a form: whether they keep to it, and what that costs. Schemas and judge are bench/schemas.py."""

import json
import statistics

from rows import ROOT, row, run

from . import model
from .crowd import Work, bodies, crowd
from .load import WORDS, WORK
from .server import Server, say

SCRIPT = ROOT / "bench/schemas.py"
COUNT, SEEDS = 500, 20
# Texts, numbers and words that go on as long as the answer.
ITEM = {
    "type": "object", "required": ["name", "count", "done"],
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "done": {"type": "boolean"}},
    "additionalProperties": False,
}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "items", "schema": {"type": "array", "minItems": 64, "items": ITEM}},
}


def missing(args, server=None):
    """Why nothing can be measured, if so."""
    if not SCRIPT.exists():
        return "bench/schemas.py is not there"
    if not args.venvs or not (args.venvs / "jsonschema/bin/python").exists():
        return "jsonschema was not installed"
    body = {"prompt": "a", "max_tokens": 1, "response_format": {"type": "json_object"}}
    if server and server.ask("POST", "/v1/completions", body)[0] == 400:
        return "the server keeps no answer to a form"
    return None


def schemas(args):
    """Schemas and seeds on the demo model, each answer judged by somebody else."""
    need = f"{COUNT * SEEDS}, less those that are cut and say so"
    with Server(args.q4, "--parallel", 16, isa=args.isa) as server:
        if why := missing(args, server):
            return row("schemas-valid", None, "answers", need, why)
        differences = args.work / "schemas-differences.jsonl"
        words = ["--url", server.url, "--count", COUNT, "--seeds", SEEDS, "--differences", differences]
        done = run(args.venvs / "jsonschema/bin/python", SCRIPT, *words)[1]
    say(done.stdout[-2000:], done.stderr[-2000:])
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return row("schemas-valid", None, "answers", need, f"it broke: {done.stderr[-300:]}")
    unit = f"of {COUNT} schemas x {SEEDS} seeds"
    row("schemas-valid", found["valid"], f"answers {unit}", "said")
    row("schemas-cut", found["cut"], f"answers {unit} that are cut by their length and say so", "said")
    row("schemas-refused", found["refused"], f"answers {unit} that are refused (400)", "said")
    row("schemas-invalid", found["invalid"], f"answers {unit} that are invalid", "0")
    row("schemas-failed", found["failed"], f"answers {unit} that are none", "0")


def mask(args):
    """A step of one user whose answer keeps to a form beside one of a user whose answer is free, in turns."""
    need = "< 3"
    folder = model.shaped(args.q4, args.models)
    with Server(args.q4, *WORDS, model=folder, isa=args.isa) as server:
        if why := missing(args, server):
            return row("mask", None, "% more for a step", need, why)
        more = []
        for turn in range(-1, 2 * args.rounds):
            gaps = {}
            for name in ("free", "formed")[:: 1 if turn % 2 else -1]:
                form = {"response_format": FORM} if name == "formed" else {}
                asked = [{**body, **form} for body in bodies(2, Work(16, WORK.answer), seed=turn + 1)]
                gaps[name] = statistics.median(crowd(server.port, 1, 2, asked).gaps)
            # The first makes the automaton.
            more += [gaps["formed"] / gaps["free"] - 1] * (turn >= 0)
    say("more for a step:", [f"{x:.1%}" for x in more])
    unit = f"% more for a step of one user under a JSON schema, median of {len(more)} pairs in turns"
    row("mask", round(100 * statistics.median(more), 1), unit, need)
