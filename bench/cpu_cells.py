"""Runs q4 held to one instruction set beside the peer of each format, built for the same, in turns, and writes a row
for each cell of shape, format, activations and phase. bench/cpu.sh --isa NAME prepares what this needs."""

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
# Formats, their activations, and who is beside them: llama.cpp with a type of its own, and OpenVINO, which multiplies
# int4 groups of 128. It cannot be held to a set: bench/cpu.sh leaves it out where the processor has a wider one.
RUNS = [
    ("nvfp4", "native", ["Q4_0"]), ("nvfp4", "int8", ["Q4_0", "OpenVINO"]),
    ("nf4", "native", ["Q4_0"]), ("nf4", "int8", ["Q4_0"]),
    ("Q4_0.gguf", "native", ["Q4_0"]), ("Q4_0.gguf", "int8", ["Q4_0"]),
    ("Q4_K.gguf", "native", ["Q4_K"]), ("Q4_K.gguf", "int8", ["Q4_K"]),
    ("int4", "native", ["OpenVINO"]), ("int4", "int8", ["OpenVINO"]),
]
LONG = 4096
# Phases as cpu.py calls them and as rows do.
PHASES = {
    "decode": "decode", "prefill": f"prompt-{cpu.PREFILL}",
    f"decode at {LONG}": f"decode-at-{LONG}", f"prefill {LONG}": f"prompt-{LONG}",
}
# Tokens to decode, samples a run, rounds; of long contexts, which take minutes each.
SHORT_PLAN = {"qwen3-4b": (64, 1, 5), "qwen3-0.6b": (128, 3, 4)}
LONG_PLAN = {"qwen3-4b": (16, 1, 1), "qwen3-0.6b": (48, 1, 2)}
# Formats that long contexts are measured with.
LONG_FORMATS = {"nvfp4", "nf4"}
# Of the floor; of the rate without what is in the cache.
DECODE, PROMPT, DEEP = 0.85, {"native": 0.85, "int8": 0.65}, 0.7
OUT = rows.ROOT / "bench/results"


def programs(args, long):
    """Peers of each shape, and ours."""
    all_ = []
    for shape in SHAPES:
        if args.shape not in (None, shape):
            continue
        mine, wanted = [], set()
        for format, activations, peers in runs(long):
            program = ours(shape, format, activations, long)
            if re.search(args.only or "", program.name):
                mine.append(program)
                wanted.update(name for name in peers if who(name) not in args.without)
        all_ += [peer(shape, name, args, long) for name in sorted(wanted)] + mine
    return all_


def runs(long):
    """All, or those with long contexts, which OpenVINO does not run."""
    return [(format, activations, [p for p in peers if p != "OpenVINO" or not long])
            for format, activations, peers in RUNS if not long or format in LONG_FORMATS]


def ours(shape, format, activations, long):
    if format.endswith(".gguf"):
        return cpu.Q4File(shape, format.removesuffix(".gguf"), activations, long)
    return cpu.Q4(shape, format, activations, long)


def peer(shape, name, args, long):
    return cpu.OpenVino(shape) if name == "OpenVINO" else cpu.Llama(shape, name, False, SETS[args.isa], long)


def who(name):
    """Whose a peer is, by the name it has in RUNS."""
    return name if name == "OpenVINO" else "llama.cpp"


def key(p):
    """Of a program, as `cells` looks for it."""
    if isinstance(p, cpu.OpenVino):
        return p.shape, "OpenVINO"
    if isinstance(p, cpu.Llama):
        return p.shape, p.type_name
    return p.shape, p.format + ".gguf" * isinstance(p, cpu.Q4File), p.activations


def cells(isa, measured, others, spoilt):
    """Rows for each cell of a set: from this run, from `others` where they are kept, or why there are none."""
    for shape, (what, phase) in itertools.product(SHAPES, PHASES.items()):
        for format, activations, names in runs(str(LONG) in phase):
            q4 = measured.get((shape, format, activations))
            beside = {name: measured.get((shape, name)) for name in names}
            tried = q4 and (q4.refused or q4.median(what))
            for title, value, *rest, why in cell(isa, shape, format, activations, phase, what, q4, beside):
                if tried:
                    print(f"{title:<62}{'-' if value is None else value:>8}  {rest[0]}; need {rest[1]}")
                if title in others and (spoilt or not tried):
                    rows.ROWS.append(others[title])
                elif tried:
                    rows.row(title, None if spoilt else value, *rest, spoilt or q4.refused or why)
                else:
                    rows.row(title, None, *rest, f"bench/cpu.sh --isa {isa} did not measure it")


def cell(isa, shape, format, activations, phase, what, q4, beside):
    """The rate, its share of the floor, of that without a context, and of the peers' rates: as far as there are such."""
    title = "-".join((isa, shape, format, activations, phase))
    value, share = (q4 and q4.median(w) for w in (what, what + " fraction"))
    decodes, deep = what.startswith("decode"), str(LONG) in what
    if decodes:
        limit, bar = "reads and arithmetic allow", DECODE
    else:
        instructions = {"int8": "dots", "native": "multiply-adds"}[activations]
        limit, bar = f"reads and {instructions} allow", PROMPT[activations]
    yield title, value and round(value, 2), "tok/s", "no bound", None
    yield f"{title}-of-floor", share and round(share, 3), f"of what {limit}", f">= {bar}", None
    if deep:
        short = q4 and q4.median("decode" if decodes else "prefill")
        unit = "of the rate at position 0" if decodes else f"of the rate of a prompt of {cpu.PREFILL}"
        yield f"{title}-of-short", value and short and round(value / short, 3), unit, f">= {DEEP}", "it did not run"
    for name, other in beside.items():
        theirs = other and other.median(what)
        ratio = round(value / theirs, 3) if value and theirs else None
        unit = f"of the rate of {who(name)}, {'int4 groups of 128' if name == 'OpenVINO' else name}"
        why = other and other.refused or f"{who(name)} did not run beside it"
        yield f"{title}-of-{who(name)}", ratio, unit, lead(isa, format, activations, name, decodes, deep), why


def lead(isa, format, activations, name, decodes, deep):
    """How many times the peer's rate is promised. Peers multiply int8 inputs, whatever they are given, and so does
    q4 in GGUF files unless somebody names other ones; OpenVINO does on processors with VNNI, on AVX2 it
    multiplies floats (its logits are the same bits with its dynamic quantisation off)."""
    if deep:
        return ">= 2"
    if format == "nvfp4" and name == "OpenVINO":
        return "no bound" if decodes else "> 1"
    if format.endswith(".gguf"):
        return ">= 1" if decodes else {"int8": ">= 1.5", "native": "no bound"}[activations]
    if format == "int4":
        rounded = isa != "avx2"
        return "no bound" if rounded and activations == "native" and not decodes else ">= 1"
    if decodes:
        return "> 1"
    return ">= 2" if (format, activations) == ("nvfp4", "int8") else "> 1, or a floor that is behind"


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
    where.add_argument("--out", type=pathlib.Path,
                       help="where rows go [bench/results/cpu-cells-ISA.local.json, which is not tracked]")
    where.add_argument("--record", action="store_true", help="write bench/results/cpu-cells-ISA.json")
    args = p.parse_args()
    args.out = args.out or OUT / f"cpu-cells-{args.isa}{'' if args.record else '.local'}.json"
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
            at = key(p)
            if at in measured:
                measured[at].series.update(p.series)
            else:
                measured[at] = p
    share = bystanders.share()
    of_all = cpu.versions(list(measured.values()), args)
    versions = {k: of_all[k] for k in ("q4", "rustc", "c++", "llama.cpp", "openvino")}
    others = kept(args.out, versions)
    spoilt = None
    if share is None or share > cpu.Bystanders.ALLOWED:
        taken = "an unknown share" if share is None else f"{share:.0%}"
        spoilt = f"others took {taken} of the processors' time: run again on a quiet machine"
        cpu.say(spoilt)
    cells(args.isa, measured, others, spoilt)
    rows.row(f"{args.isa}-bystanders", share and round(share, 3),
             "of the processors' time went to others; beyond, no figure counts", f"<= {cpu.Bystanders.ALLOWED}",
             "the system does not say")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        rows.write(**versions)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text.getvalue())


if __name__ == "__main__":
    main()
