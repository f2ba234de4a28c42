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
# What the program did not do before, and the lines it took: the rest of the difference is the redesign's.
# Commits that mend what a user met, and the documentation of errors and contracts, count as what was not
# there.
FEATURES = {
    "a8ef6c1": "plugins fuse, take options, say sizes",
    "e2c1531": "mutants of fused products",
    "c891efb": "devices of a plugin's own",
    "9a77b57": "their proof",
    "175ea45": "adapters beside a packed base",
    "8b26f58": "sums that leave the range",
    "0c952a0": "long products",
    "f8823df": "contract, NullBackend",
    "c790c19": "errors documented",
    "08b9883": "errors documented",
    "3ac0d24": "errors documented",
    "864f43d": "nothing left behind",
    "1c5da73": "told to a plugin's author",
    "2566ee9": "told to newcomers",
    "e83de64": "told to newcomers",
}
# Files that each extension took, by hand and outside its own folder or file; snapshots that tests write are
# not counted. Branches that were not kept: E3M0 in blocks of 32, the family Qwen2, a device of compute
# capability 11.0, AVX-VNNI, a list of layers. Nothing here measures them again.
DONE = {"format": (1, 10), "family": (4, 5), "device": (3, 3), "instruction-set": (6, 6), "verb": (4, 4)}
# The first commit behind the redesign: what came later is not of it.
LAST = "36152f6"
# Kernels whose text had to change, by their program, and why.
CHANGED = {
    "nvfp4-gemv": "sums that leave the range are taken again (8b26f58)",
    "nvfp4-row": "sums that leave the range are taken again (8b26f58)",
}
REMOVED = {"q4_expand": "q4_expand, of an interface that went (eb97fe6)"}
# What stood more than once: how it is told, where it is looked for, and how often it may be there. Tests are
# not looked at but for what they are said to share; nor are examples and templates of plugins, which stand
# alone, and what a platform has that lacks something.
CONCEPTS = {
    "instruction sets": (r"^pub enum Isa\b", "*.rs", 1),
    "reader of Q4_ISA": (r'= "Q4_ISA";', "*.rs", 1),
    "tables of C functions": (r"^pub struct Q4\w*V1\b", "*.rs", 1),
    "contract of libNVFP4": (r"nvfp4\.h\b", "*.h", 0),
    "reader of ELF files": (r"^(pub )?(struct|fn) \w*[Ee]lf\w*[ ({<]", "*.rs", 1),
    "sixteen lanes": (r"^pub trait Vector\b", "*.rs", 1),
    "types of device code": (r"^typedef unsigned char u8;", "*.cu*", 1),
    "planner of decode steps": (r"^ *(pub )?fn plan_of\b", "*.rs", 1),
    "table of architectures": (r"^pub const ARCHS\b", "*.rs", 1),
    "shared memory of a block": (r"232_?448", "*.[rc]*", 0),
    "bytes of a unit, Rust": (r"= 1152;", "*.rs", 1),
    "bytes of a unit, CUDA": (r"UNIT = 1152\b", "*.cu*", 1),
    "dealing of tiles": (r"^struct Work\b", "*.cu*", 1),
    "codec of E4M3, CUDA": (r"\b(e4m3_encode|e4m3_of)\(float \w+\) \{", "*.cu*", 1),
    "positional launches": (r"\bargs!\[", "*.rs", 0),
    "fused or composed gates": (r"fn gated_mlp\b", "*.rs", 1),
    "agreement of a backend": (r"^pub fn agree\b", "*.rs", 1),
    "placement of weights": (r"\bfn (place\(self, role|grant\(self)", "*.rs", 1),
    "schema by its text": (r"default_target\(\"", "*.rs", 0),
}
SHARED_BY_TESTS = {
    "counting allocators": (r"GlobalAlloc for", "*.rs", 1),
    "generators of stored weights": (r"^struct Stored \{", "*.rs", 0),
}
NOT_COUNTED = re.compile(r"^plugins/examples/|^cli/templates/|_unknown\.rs$")
# Files that a product of one row on AVX-512 goes through, from the call of a layer to the sums: the layer,
# both sides of a plugin's table with their guards, as a debugger's stack has them, what drives the kernels,
# where the instruction set is picked, the loop.
CROSSED = {
    "nvfp4": [
        "core/src/linear.rs",
        "plugins/host/src/calls.rs",
        "plugins/sdk/src/export/calls.rs",
        "backends/nvfp4-kernel/native/src/forward.rs",
        "backends/nvfp4-kernel/native/src/kernels.rs",
        "backends/nvfp4-kernel/native/src/kernels/avx512.rs",
    ],
    "nf4": [
        "core/src/linear.rs",
        "backends/base/codebook/src/forward.rs",
        "backends/base/codebook/src/kernel.rs",
        "backends/base/simd/src/lib.rs",
        "backends/base/codebook/src/simd.rs",
        "backends/base/simd/src/avx512.rs",
    ],
}


# Tests with a hash of all bits that every instruction set has to come to.
RECORDED = ["backends/nf4-kernel/tests/products.rs", "backends/nvfp4-kernel/native/tests/product.rs"]


def recorded(file, revision="HEAD"):
    """That hash, of a revision."""
    found = re.search(r"const RECORDED: u64 = (0x[0-9a-f_]+);", git("show", f"{revision}:{file}"))
    return found and found[1]


def bits(args):
    """Every combination that both programs serve: what they answer, byte for byte."""
    models = ["demo", *os.environ.get("Q4_MODELS", "").split()]
    compared, same, only = 0, 0, 0
    ids = ",".join(str(5 + i) for i in range(19))
    for model in models:
        for isa in ISAS:
            for backend in BACKENDS:
                for activations in ("native", "int8", "nvfp4"):
                    chosen = ["--backend", backend, "--activations", activations]
                    answers = [answer(binary, model, ids, chosen, isa) for binary in (args.before, args.q4)]
                    only += (answers[0] is None) != (answers[1] is None)
                    if all(answers):
                        compared += 1
                        same += answers[0] == answers[1]
    names = f"models ({len(models)}) x backends x activations x instruction sets"
    row("bits-compared", compared, names, ">= 20")
    row("bits-equal", same, "of them byte for byte", "all")
    row("served-by-one-alone", only, "combinations that one program serves and the other does not", "0")


def answer(binary, model, ids, chosen, isa):
    """Logits as they are written; none where the program refuses."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "logits"
        words = ["logits", model, "--ids", ids, "--greedy", "4", "--chunk", "11", "--out", out]
        run(binary, *words, *chosen, env={"Q4_ISA": isa})
        return out.read_bytes() if out.exists() else None


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
                    rates[which] = rate(binary, words, isa)
                for what, now in rates["now"].items():
                    found.setdefault(what, []).append(now / rates["before"][what])
            runs = words[words.index("-r") + 1]
            unit = f"of the rate of {args.revision}, median of {args.rounds} pairs of {runs} runs"
            for what, ratios in sorted(found.items()):
                row(f"{name}-{isa or 'best'}-{what}", round(statistics.median(ratios), 3), unit, ">= 0.97")


def rate(binary, words, isa):
    """Tokens a second of each phase, the best of the runs."""
    bench = ["--device", "cpu", "--json", "bench", *words, "--prefill", "128", "--decode", "32"]
    report = json.loads(must(binary, *bench, env={"Q4_ISA": isa})[1])
    return {r["what"]: r["max"] for r in report["results"]}


def git(*words):
    return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=True).stdout


def without_tests(name, text):
    """A source as far as it is no test; nothing of a file of tests."""
    path = pathlib.PurePath(name)
    if "tests" in path.parts or path.name.startswith("tests.") or path.name.endswith("_tests.rs"):
        return ""
    # Tests of a file are its end.
    return re.split(r"^#\[cfg\(.*\btest\b.*\)\]\nmod \w+ \{", text, maxsplit=1, flags=re.M)[0]


def lines(revision):
    """Lines of Rust, CUDA and C outside of tests."""
    total = 0
    for name in git("ls-tree", "-r", "--name-only", revision).splitlines():
        path = pathlib.PurePath(name)
        if path.suffix not in (".rs", ".cu", ".c", ".h", ".cpp", ".hpp", ".cuh"):
            continue
        if "tests" in path.parts or path.name == "tests.rs":
            continue
        text = git("show", f"{revision}:{name}")
        # Tests of a file are its end.
        parts = re.split(r"^#\[cfg\(.*\btest\b.*\)\]\nmod \w+ \{", text, maxsplit=1, flags=re.M)
        total += len(parts[0].splitlines())
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
    circles = 0 if found.returncode == 0 else len(found.stdout.splitlines())
    row("circles", circles, "of imports between files", "0")


def once():
    """What the reading before the redesign found more than once, in the tree as it is."""
    names = git("ls-files", "*.rs", "*.cu", "*.cuh", "*.h", "*.c").splitlines()
    texts = {n: (ROOT / n).read_text(errors="replace") for n in names if not NOT_COUNTED.search(n)}
    bare = {n: without_tests(n, text) for n, text in texts.items()}
    # What is left of a file without its tests is its start.
    tests = {n: text[len(bare[n]) :] for n, text in texts.items()}
    twice = []
    for concepts, sources in ((CONCEPTS, bare), (SHARED_BY_TESTS, tests)):
        for what, (pattern, files, most) in concepts.items():
            of = {n: text for n, text in sources.items() if pathlib.PurePath(n).match(files)}
            at = [n for n, text in of.items() for _ in re.finditer(pattern, text, re.M)]
            if len(at) > most:
                twice.append(f"{what} ({len(at)}: {', '.join(sorted(set(at)))})")
    all_of = len(CONCEPTS) + len(SHARED_BY_TESTS)
    unit = f"of {all_of} concepts that stood more than once" + "".join(f"; {t}" for t in twice)
    row("concepts-twice", len(twice), unit, "0")


def cubins():
    """Kernels of the tree before, and of the last commit of the redesign, as bench/cubins.py compiled them."""
    names = os.environ.get("Q4_CUBINS", "").split(":")
    if len(names) != 2:
        why = "Q4_CUBINS does not name two files of cubins.py"
        row("cubins-equal", None, "kernels with the instructions they had", "said", why)
        row("cubins-unexplained", None, "kernels that differ in text, registers or frame", "0", why)
        return
    old, new = (json.loads(pathlib.Path(name).read_text()) for name in names)
    places = lambda programs: {
        (program.split()[1], found["hash"]) for program in programs for found in programs[program]["kernels"].values()
    }
    kept, archs = places(new), {arch for arch, _ in places({p: new[p] for p in new if p.startswith("rows ")})}
    count = dict.fromkeys(("equal", "moved", "removed", "not-compared", "unexplained"), 0)
    changed = {}
    for program, what in old.items():
        name, arch, *options = program.split()
        after = new.get(program, {"kernels": {}})["kernels"]
        for kernel, was in what["kernels"].items():
            now = after.get(kernel)
            if now == was:
                count["equal"] += 1
            elif now and name in CHANGED:
                changed.setdefault((name, " ".join(options[2:])), []).append((was, now))
            elif now:
                count["unexplained"] += 1
            elif (arch, was["hash"]) in kept:
                count["moved"] += 1
            elif kernel in REMOVED:
                count["removed"] += 1
            else:
                count["unexplained" if arch in archs else "not-compared"] += 1
    row("cubins", len(old), "programs that NVRTC compiles for every architecture, before and after", "said")
    row("cubins-equal", count["equal"], "kernels with the instructions they had", "said")
    row("cubins-moved", count["moved"], "kernels that another program has, with the instructions they had", "said")
    row("cubins-removed", count["removed"], f"kernels: {'; '.join(REMOVED.values())}", "said")
    row("cubins-not-compared", count["not-compared"], "kernels that moved to programs not compiled for their architecture", "said")
    for (name, options), pairs in sorted(changed.items()):
        size = [now["bytes"] / was["bytes"] for was, now in pairs]
        registers = [now["registers"] - was["registers"] for was, now in pairs]
        frame = max(now["frame"] - was["frame"] for was, now in pairs)
        shared = max(now["shared"] - was["shared"] for was, now in pairs)
        unit = (
            f"kernels of {name} {options}: {CHANGED[name]}. Instructions x {min(size):.2f} to {max(size):.2f},"
            f" registers {min(registers):+d} to {max(registers):+d}, frames up to {frame:+d} bytes, shared memory {shared:+d}"
        )
        row(f"cubins-changed-{name}{options.replace('-D', '-').replace('=', '').replace(' ', '')}", len(pairs), unit, "said")
    row("cubins-unexplained", count["unexplained"], "kernels that differ or are gone", "0")


def interface(args, tests):
    library = args.q4.parent / "libNVFP4.so"
    report = json.loads(must(args.q4, "--json", "conformance", "--plugin", library, "--no-certificate")[1])
    row("libnvfp4-as-plugin", report["passed"], "cases of the suite passed", "and none failed")
    row("libnvfp4-as-plugin-failed", report["failed"], "cases", "0")
    row("built-for-1.0-and-1.1", tests.passed("earlier_minors"), "tests, none failed", "1")
    row("examples", tests.passed("example"), "tests of both example plugins, none failed", ">= 1")
    fused = tests.passed("fuse_a_gate_and_a_residual")
    row("examples-fuse", fused, "tests that both examples fuse a gate and a residual, none failed", "1")
    row("recorded-bits", tests.passed("vector_kernels_agree"), "tests, none failed", "1")
    same = sum(recorded(file) == recorded(file, args.revision) is not None for file in RECORDED)
    row("recorded-bits-same", same, "hashes of all bits of a format's kernels that the tests hold them to", f"{len(RECORDED)}, as before")
    for name, files in CROSSED.items():
        missing = [f for f in files if not (ROOT / f).exists()]
        unit = "files that a product on the CPU goes through, by reading"
        count = None if missing else len(files)
        need = f"<= {len(CROSSED['nf4'])}, as NF4's" if name == "nvfp4" else "said"
        row(f"files-crossed-{name}", count, unit, need, f"gone: {', '.join(missing)}")


def adapters(tests):
    """Training beside a packed base against training on its decoded values."""
    number = r"([\d.e+-]+)"
    for name in ("nvfp4", "nf4"):
        curve = tests.numbers(
            rf"lora curve {name}: (\d+) steps.*largest difference {number}, bound {number}, exact products "
            rf"differ by {number}; seconds a step packed {number} decoded {number}"
        )
        base = tests.numbers(rf"lora base {name}: (\d+) bytes packed, (\d+) stored, (\d+) decoded")
        if not tests.passed("the_curve_is") or not tests.passed("the_base_takes"):
            curve = base = None
        of = lambda found, i: float(found[i]) if found else None
        steps = f"nats in {curve[1]} steps of the demo model" if curve else "nats"
        need = f"<= {curve[3]}, the bound of rounding" if curve else "within the bound of rounding"
        row(f"lora-{name}-curve", of(curve, 2), f"{steps}, largest difference to decoded values", need)
        row(f"lora-{name}-rounding", of(curve, 4), "nats that exact products differ by, 6 steps", "said")
        stored = f"{base[2] if base else 'as'} stored, + 2 %"
        row(f"lora-{name}-base", of(base, 1), "bytes of base weights, in the report by phase", stored)
        row(f"lora-{name}-base-decoded", of(base, 3), "bytes of base weights", "said")
        row(f"lora-{name}-step", of(curve, 5), "seconds a step, packed", "said")
        row(f"lora-{name}-step-decoded", of(curve, 6), "seconds a step, decoded", "said")
    none = 0 if tests.passed("nothing_of_a_packed_base") else None
    row("lora-dense-copies", none, "allocations of a dense size", "0")


def whole_run():
    """Seconds of .ci/run in fresh clones, from what it printed: Q4_CI_BEFORE and Q4_CI_NOW name the files."""
    seconds = {}
    for name in ("BEFORE", "NOW"):
        path = os.environ.get(f"Q4_CI_{name}")
        text = pathlib.Path(path).read_text(errors="replace") if path else ""
        ended = re.search(r"^== (\d+) s: done$", text, re.M)
        seconds[name] = int(ended[1]) if ended else None
    why = "Q4_CI_BEFORE and Q4_CI_NOW name no output of a .ci/run that came to its end"
    row("ci-run-before", seconds["BEFORE"], "s, .ci/run in a fresh clone", "said", why)
    need = f"<= {seconds['BEFORE']}, as before" if seconds["BEFORE"] else "no more than before"
    row("ci-run", seconds["NOW"], "s, .ci/run in a fresh clone, every stage passed", need, why)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("part", choices=["bits", "speeds", "once", "whole"], help="what takes long, or everything")
    p.add_argument("--q4", type=pathlib.Path, required=True)
    p.add_argument("--before", type=pathlib.Path, required=True)
    p.add_argument("--revision", required=True)
    p.add_argument("--rounds", type=int, default=12)
    p.add_argument("--work", type=pathlib.Path, required=True, help="what house.sh kept")
    args = p.parse_args()
    if args.part != "whole":
        {"bits": bits, "speeds": speeds, "once": lambda _: once()}[args.part](args)
        return timed()
    tests = Tests(args.work / "tests")
    interface(args, tests)
    smaller(args)
    once()
    cubins()
    for part in ("bits", "speeds"):
        take(args.work / f"{part}.json")
    adapters(tests)
    for what, (files, most) in DONE.items():
        unit = "files outside its folder, counted by hand on a branch"
        row(f"extending-{what}", files, unit, f"<= {most}", "nobody counted one")
    whole_run()
    write(q4=said(args.q4, "--version"), before=args.revision, rustc=said("rustc", "--version"))


main()
