"""Runs q4 held to one instruction set beside llama.cpp built for the same, in turns, and writes a row for each cell
of shape, format, activations and phase. bench/cpu.sh --isa NAME prepares what this needs."""

import contextlib
import io
import itertools
import json
import os
import pathlib
import re
import sys

import cpu
import rows

# Instruction sets, and where the llama.cpp that was built for the same is.
SETS = {"avx512vnni": "build", "avx2": "build-avx2"}
SHAPES = ["qwen3-0.6b", "qwen3-4b"]
RUNS = [("nvfp4", "native"), ("nvfp4", "int8"), ("nf4", "native"), ("nf4", "int8")]
LONG = 4096
# Phases as cpu.py calls them and as rows do.
PHASES = {
    "decode": "decode", "prefill": f"prompt-{cpu.PREFILL}",
    f"decode at {LONG}": f"decode-at-{LONG}", f"prefill {LONG}": f"prompt-{LONG}",
}
# Tokens to decode, samples a run, rounds; of long contexts, which take minutes each.
SHORT_PLAN = {"qwen3-4b": (16, 1, 3), "qwen3-0.6b": (48, 3, 4)}
LONG_PLAN = {"qwen3-4b": (16, 1, 1), "qwen3-0.6b": (48, 1, 2)}
DECODE, PROMPT = 0.85, {"native": 0.85, "int8": 0.65}
OUT = rows.ROOT / "bench/results/cpu-cells.json"


def programs(args, long):
    """A peer of each shape, and ours."""
    all_ = []
    for shape in SHAPES:
        if args.shape not in (None, shape):
            continue
        if "llama.cpp" not in args.without:
            all_.append(cpu.Llama(shape, "Q4_0", False, SETS[args.isa], long))
        all_ += [cpu.Q4(shape, *run, long) for run in RUNS]
    return [p for p in all_ if re.search(args.only or "", p.name)]


def cells(measured, others, spoilt):
    """A row for each cell of every set: from this run, from `others` where they are kept, or why there is none."""
    for isa, shape, run, (what, name) in itertools.product(SETS, SHAPES, RUNS, PHASES.items()):
        q4, peer = measured.get((isa, shape, *run)), measured.get((isa, shape))
        for row in cell("-".join((isa, shape, *run, name)), what, q4, peer):
            name, value, *rest = row
            tried = q4 and (q4.refused or q4.median(what))
            if tried:
                print(f"{name:<58}{'-' if value is None else value:>8}  {rest[0]}; need {rest[1]}")
            if name in others and (spoilt or not tried):
                rows.ROWS.append(others[name])
            elif tried:
                no_peer = peer and peer.refused or "llama.cpp did not run beside it"
                rows.row(name, None if spoilt else value, *rest, spoilt or q4.refused or no_peer)
            else:
                rows.row(*row, f"bench/cpu.sh --isa {isa} did not measure it")


def cell(name, what, q4, peer):
    """The rate, its share of the floor, and how many times the peer's it is: as far as there are such."""
    value, share = (q4 and q4.median(w) for w in (what, what + " fraction"))
    theirs = peer and peer.median(what)
    ratio = value / theirs if value and theirs else None
    if what.startswith("decode"):
        limit, bar, lead = "reads and arithmetic allow", DECODE, "> 1"
    else:
        activations = "int8" if "-int8-" in name else "native"
        instructions = {"int8": "dots", "native": "multiply-adds"}[activations]
        limit, bar, lead = f"reads and {instructions} allow", PROMPT[activations], "no bound"
    return [
        (name, value and round(value, 2), "tok/s", "no bound"),
        (f"{name}-of-floor", share and round(share, 3), f"of what {limit}", f">= {bar}"),
        (f"{name}-of-llama.cpp", ratio and round(ratio, 3), "of the rate of llama.cpp Q4_0", lead),
    ]


def kept(path, versions):
    """Rows of an earlier run of the same commit on this machine, of other cells than this run has."""
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    now = {"machine": rows.machine(), "commit": rows.said("git", "rev-parse", "HEAD"), "versions": versions}
    same = all(before[k] == now[k] for k in now)
    return {r["name"]: r for r in before["rows"]} if same else {}


def arguments():
    p = cpu.parser(__doc__)
    p.add_argument("--isa", choices=list(SETS), required=True, help="the instruction set of both")
    p.add_argument("--quick", action="store_true", help=f"one round, and nothing of {LONG} tokens")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--out", type=pathlib.Path, default=OUT.with_suffix(".local.json"),
                       help="where rows go [bench/results/cpu-cells.local.json, which is not tracked]")
    where.add_argument("--record", action="store_const", dest="out", const=OUT,
                       help="write bench/results/cpu-cells.json")
    args = p.parse_args()
    args.without = args.without.split()
    if args.quick:
        args.rounds = args.rounds or 1
    cpu.choose_processors(p, args)
    # llama.cpp has no such variable, and is built for the set.
    os.environ.update(Q4_ISA=args.isa)
    return args


def main():
    args = arguments()
    bystanders, measured = cpu.Bystanders(), {}
    for long, plan in ((None, SHORT_PLAN), (LONG, LONG_PLAN)):
        if long and args.quick:
            continue
        some = programs(args, long)
        cpu.measure(some, args, plan)
        for p in some:
            mine = isinstance(p, cpu.Q4)
            if mine and not p.refused and p.facts["isa"] != args.isa:
                sys.exit(f"{p.name} ran on {p.facts['isa']}, not on {args.isa}")
            key = (args.isa, p.shape, p.format, p.activations) if mine else (args.isa, p.shape)
            if key in measured:
                measured[key].series.update(p.series)
            else:
                measured[key] = p
    share = bystanders.share()
    of_all = cpu.versions(list(measured.values()), args)
    versions = {k: of_all[k] for k in ("q4", "rustc", "c++", "llama.cpp")}
    others = kept(args.out, versions)
    spoilt = None
    if share is None or share > cpu.Bystanders.ALLOWED:
        taken = "an unknown share" if share is None else f"{share:.0%}"
        spoilt = f"others took {taken} of the processors' time: run again on a quiet machine"
        cpu.say(spoilt)
    cells(measured, others, spoilt)
    unit = "of the processors' time went to others; beyond, no figure counts"
    for isa in SETS:
        name, value = f"{isa}-bystanders", share if isa == args.isa else None
        why = "the system does not say" if isa == args.isa else f"bench/cpu.sh --isa {isa} did not run"
        if isa != args.isa and name in others:
            rows.ROWS.append(others[name])
        else:
            rows.row(name, value and round(value, 3), unit, f"<= {cpu.Bystanders.ALLOWED}", why)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        rows.write(**versions)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text.getvalue())


if __name__ == "__main__":
    main()
