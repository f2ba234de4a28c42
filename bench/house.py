"""Compares q4 with q4 before a redesign, prints the rows of bench/results/house.json; `bits` and `speeds` are
measured apart, speeds on whatever machine is idle, with nothing but Python and both programs."""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from rows import ROOT, Tests, must, row, run, said, take, timed, write

ISAS = ["amx", "avx512vnni", "avx512", "avx2", "neoni8mm", "neondotprod", "neon", "portable"]
BACKENDS = ["nvfp4-kernel", "nf4-kernel", "dequant-matmul", "reference"]
# What the program did not do before, and the lines it took: the rest of the difference is the redesign's. Commits
# that mend what a user met, and the documentation of errors and contracts, count as what was not there.
FEATURES = {
    "a8ef6c1": "plugins fuse, take options, say sizes", "e2c1531": "mutants of fused products",
    "c891efb": "devices of a plugin's own", "9a77b57": "their proof", "175ea45": "adapters beside a packed base",
    "8b26f58": "sums that leave the range", "0c952a0": "long products", "f8823df": "contract, NullBackend",
    "c790c19": "errors documented", "08b9883": "errors documented", "3ac0d24": "errors documented",
    "864f43d": "nothing left behind", "1c5da73": "told to a plugin's author", "2566ee9": "told to newcomers",
    "e83de64": "told to newcomers",
}
# Files that each extension took, by hand and outside its own folder or file; snapshots that tests write are not
# counted. Branches that were not kept: E3M0 in blocks of 32, the family Qwen2, a device of compute capability 11.0,
# AVX-VNNI, a list of layers. Nothing here measures them again.
DONE = {"format": (1, 10), "family": (4, 5), "device": (3, 3), "instruction-set": (6, 6), "verb": (4, 4)}
# The first commit behind the redesign: what came later is not of it.
LAST = "36152f6"


def bits(args):
    """Every combination that both programs serve: what they answer, byte for byte."""
    models = ["demo", *os.environ.get("Q4_MODELS", "").split()]
    compared, same, only = 0, 0, 0
    ids = ",".join(str(5 + i) for i in range(19))
    for model in models:
        for isa in ISAS:
            for backend in BACKENDS:
                for activations in ("native", "int8", "nvfp4"):
                    answers = []
                    for binary in (args.before, args.q4):
                        with tempfile.TemporaryDirectory() as folder:
                            out = pathlib.Path(folder) / "logits"
                            words = ["logits", model, "--ids", ids, "--greedy", "4", "--chunk", "11", "--out", out]
                            chosen = ["--backend", backend, "--activations", activations]
                            run(binary, *words, *chosen, env={"Q4_ISA": isa})
                            answers.append(out.read_bytes() if out.exists() else None)
                    only += (answers[0] is None) != (answers[1] is None)
                    if all(answers):
                        compared += 1
                        same += answers[0] == answers[1]
    names = f"models ({len(models)}) x backends x activations x instruction sets"
    row("bits-compared", compared, names, ">= 20")
    row("bits-equal", same, "of them byte for byte", "all")
    row("served-by-one-alone", only, "combinations that one program serves and the other does not", "0")


def speeds(args):
    cells = {
        "demo": ["demo", "-r", "12"],
        "0.6b-nvfp4-native": ["--shape", "qwen3-0.6b", "-r", "4"],
        "0.6b-nvfp4-int8": ["--shape", "qwen3-0.6b", "-r", "4", "--activations", "int8"],
        "0.6b-nf4-native": ["--shape", "qwen3-0.6b", "-r", "4", "--format", "nf4"],
    }
    for isa in ("", "avx2"):
        for name, words in cells.items():
            found = {}
            for i in range(args.rounds):
                # Whoever comes second finds another machine: turns change.
                rates = {}
                for which in ("before", "now") if i % 2 else ("now", "before"):
                    binary = args.before if which == "before" else args.q4
                    bench = ["--device", "cpu", "--json", "bench", *words, "--prefill", "128", "--decode", "32"]
                    report = json.loads(must(binary, *bench, env={"Q4_ISA": isa})[1])
                    rates[which] = {r["what"]: r["max"] for r in report["results"]}
                for what, now in rates["now"].items():
                    found.setdefault(what, []).append(now / rates["before"][what])
            for what, ratios in sorted(found.items()):
                unit = f"of the rate of {args.revision}, median of {args.rounds} pairs of {words[words.index('-r') + 1]} runs"
                row(f"{name}-{isa or 'best'}-{what}", round(statistics.median(ratios), 3), unit, ">= 0.97")


def lines(revision):
    """Lines of Rust, CUDA and C outside of tests."""
    def git(*words):
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=True).stdout

    total = 0
    for name in git("ls-tree", "-r", "--name-only", revision).splitlines():
        path = pathlib.PurePath(name)
        if path.suffix not in (".rs", ".cu", ".c", ".h", ".cpp", ".hpp", ".cuh"):
            continue
        if "tests" in path.parts or path.name == "tests.rs":
            continue
        text = git("show", f"{revision}:{name}")
        # Tests of a file are its end.
        total += len(re.split(r"^#\[cfg\(.*\btest\b.*\)\]\nmod \w+ \{", text, maxsplit=1, flags=re.M)[0].splitlines())
    return total


def smaller(args):
    before, now = lines(args.revision), lines(LAST)
    features = {commit: lines(commit) - lines(f"{commit}^") for commit in FEATURES}
    row("lines-before", before, "of Rust, CUDA and C outside of tests", "said")
    row("lines-after", now, f"counted the same way at {LAST}", "said")
    for commit, count in features.items():
        row(f"lines-{commit}", count, f"lines of what was not there: {FEATURES[commit]}", "said")
    row("lines-fewer", before + sum(features.values()) - now, "lines, features unchanged", ">= 4000")
    found = run(ROOT / ".ci/circles")[1]
    row("circles", 0 if found.returncode == 0 else len(found.stdout.splitlines()), "of imports between files", "0")
    old = os.environ.get("Q4_CUBINS")
    said_by = run(sys.executable, ROOT / "bench/cubins.py", args.work / "cubins.json", "--against", old)[1] if old else None
    differs = re.search(r"^(\d+) kernels differ", said_by.stdout, re.M) if said_by else None
    why = "Q4_CUBINS names no file of cubins.py" if not old else said_by.stderr
    row("cubins", int(differs[1]) if differs else None, "kernels that differ in text, registers or frame", "0", why)


def interface(args, tests):
    library = args.q4.parent / "libNVFP4.so"
    report = json.loads(must(args.q4, "--json", "conformance", "--plugin", library, "--no-certificate")[1])
    row("libnvfp4-as-plugin", report["passed"], "cases of the suite passed", "and none failed")
    row("libnvfp4-as-plugin-failed", report["failed"], "cases", "0")
    row("built-for-1.0-and-1.1", tests.passed("earlier_minors"), "tests, none failed", "1")
    row("examples", tests.passed("example"), "tests of both example plugins, none failed", ">= 1")
    row("recorded-bits", tests.passed("vector_kernels_agree"), "tests, none failed", "1")


def adapters(tests):
    """Training beside a packed base against training on its decoded values."""
    number = r"([\d.e+-]+)"
    for name in ("nvfp4", "nf4"):
        curve = tests.numbers(
            rf"lora curve {name}: (\d+) steps.*largest difference {number}, bound {number}, exact products differ by "
            rf"{number}; seconds a step packed {number} decoded {number}")
        base = tests.numbers(rf"lora base {name}: (\d+) bytes packed, (\d+) stored, (\d+) decoded")
        if not tests.passed("the_curve_is") or not tests.passed("the_base_takes"):
            curve = base = None
        of = lambda found, i: float(found[i]) if found else None
        steps = f"nats in {curve[1]} steps of the demo model" if curve else "nats"
        need = f"<= {curve[3]}, the bound of rounding" if curve else "within the bound of rounding"
        row(f"lora-{name}-curve", of(curve, 2), f"{steps}, largest difference to decoded values", need)
        row(f"lora-{name}-rounding", of(curve, 4), "nats that exact products differ by, 6 steps", "said")
        row(f"lora-{name}-base", of(base, 1), "bytes of base weights", f"{base[2] if base else 'as'} stored, + 2 %")
        row(f"lora-{name}-base-decoded", of(base, 3), "bytes of base weights", "said")
        row(f"lora-{name}-step", of(curve, 5), "seconds a step, packed", "said")
        row(f"lora-{name}-step-decoded", of(curve, 6), "seconds a step, decoded", "said")
    row("lora-dense-copies", 0 if tests.passed("nothing_of_a_packed_base") else None, "allocations of a dense size", "0")


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("part", choices=["bits", "speeds", "whole"], help="what takes long, or everything")
    p.add_argument("--q4", type=pathlib.Path, required=True)
    p.add_argument("--before", type=pathlib.Path, required=True)
    p.add_argument("--revision", required=True)
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--work", type=pathlib.Path, required=True, help="what house.sh kept")
    args = p.parse_args()
    if args.part != "whole":
        {"bits": bits, "speeds": speeds}[args.part](args)
        return timed()
    tests = Tests(args.work / "tests")
    interface(args, tests)
    smaller(args)
    for part in ("bits", "speeds"):
        take(args.work / f"{part}.json")
    adapters(tests)
    for what, (files, most) in DONE.items():
        unit = "files outside its folder, counted by hand on a branch"
        row(f"extending-{what}", files, unit, f"<= {most}", "nobody counted one")
    write(q4=said(args.q4, "--version"), before=args.revision, rustc=said("rustc", "--version"))


main()
