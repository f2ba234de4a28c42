"""Times what bench/proof.sh is about, reads what tests printed, prints bench/results/proof.json."""

import argparse
import json
import pathlib
import re
import shutil
import statistics

from rows import ROOT, Tests, must, row, said, take, timed, write


def mutants(args):
    liars = json.loads((args.work / "liars.json").read_text())
    row("mutants", liars["liars"], "mutants", ">= 167: 60 more than the 107 there were")
    row("mutants-caught", liars["caught"] / liars["liars"], "share", "1")
    row("mutants-missed", len(liars["missed"]), "mutants", "0")
    row("false-alarms", liars["false_alarms"], "cases", "0")
    row("false-alarm-seeds", liars["seeds"], "seeds", ">= 200")
    row("mutants-kept-back-caught", None, "share", ">= 0.9", "the set is kept by somebody else")


def suite(args):
    # A bound for the formats that there were when it was set, and one for all.
    first = [word for kind in ("nvfp4*", "nf4*", "dense*") for word in ("--claim", kind)]
    rows = [
        ("suite-seconds", first, "s, NVFP4, NF4 and dense products", "< 60"),
        ("suite-all-seconds", [], "s, every format", "< 120"),
        ("suite-L1-seconds", ["--level", "L1"], "s, every format", "< 3"),
    ]
    for name, words, unit, need in rows:
        seconds = min(must(args.q4, "conformance", "--no-certificate", *words)[0] for _ in range(2))
        row(name, round(seconds, 2), unit, need)


def hostile(tests):
    variants = set(re.findall(r"hostile library: (.+)$", tests.text, re.M))
    row("hostile-plugins", len(variants) or None, "libraries with a fault of their own", ">= 30")
    row("hostile-tests-passed", tests.passed("attack"), "tests", ">= 25, none failed")
    row("hostile-certified-or-believed", tests.failures("attack"), "tests of them that failed", "0")


def narrow(tests):
    kinds = (
        set(re.findall(r"narrow backend: ([^:]+):", tests.text)) if tests.passed("narrow_backends") else None
    )
    row("narrow-backends-certified", kinds and len(kinds), "backends, each with its limits", ">= 9")
    row("narrow-liar-refused", tests.passed("a_refusal_inside_the_limits_is_a_failure"), "backends", "1")


def tools(tests):
    for name, test, tool in [
        ("gdb-source-lines", "gdb_shows_source_lines_of_one_case", "gdb"),
        ("replay-under-valgrind", "valgrind_finds_a_read_past_the_end", "valgrind"),
        ("replay-under-asan", "the_head_of_a_sanitizers_report_is_shown", "cc"),
    ]:
        there = shutil.which(tool)
        row(
            name,
            tests.passed(test),
            "tests, none failed",
            "1",
            "the test did not pass" if there else f"{tool} is not installed",
        )


def vendor(args):
    for language, build, library in [
        ("c", ["make"], "libvolta.so"),
        ("cpp", ["make"], "libvolta.so"),
        ("rust", ["cargo", "build", "--release", "--offline"], "target/release/libvolta.so"),
    ]:
        folder = args.work / f"new-{language}"
        folder.mkdir()
        env = {"XDG_DATA_HOME": str(folder / "data"), "XDG_CACHE_HOME": str(folder / "cache")}
        env["CARGO_TARGET_DIR"] = "target"
        seconds = must(args.q4, "plugin", "new", "--lang", language, "volta", cwd=folder, env=env)[0]
        seconds += must(*build, cwd=folder / "volta", env=env)[0]
        plugin = ["--plugin", f"volta/{library}", "--backend", "volta"]
        seconds += must(args.q4, *plugin, "conformance", cwd=folder, env=env)[0]
        row(
            f"new-to-certificate-{language}",
            round(seconds / 60, 2),
            "min",
            "no bound; commands: plugin new, build, conformance",
        )
    # The certified C project carries on: what isolation costs.
    env = {"XDG_DATA_HOME": str(args.work / "new-c/data"), "XDG_CACHE_HOME": str(args.work / "new-c/cache")}
    plugin = ["--plugin", str(args.work / "new-c/volta/libvolta.so"), "--backend", "volta"]
    rates = {way: [] for way in ("within", "apart")}
    for _ in range(5):
        for way, words in (("within", []), ("apart", ["--isolate"])):
            report = json.loads(
                must(
                    args.q4,
                    "--json",
                    *plugin,
                    *words,
                    "bench",
                    "demo",
                    "--prefill",
                    "128",
                    "--decode",
                    "64",
                    "-r",
                    "3",
                    env=env,
                )[1]
            )
            rates[way].append(rate(report, "decode"))
    ratio = statistics.median(rates["apart"]) / statistics.median(rates["within"])
    row("isolate-decode-demo", round(ratio, 3), "of the rate without", "no bound; the price is said")


def rate(report, phase, of="median"):
    """Tokens per second of one part of `q4 --json bench`."""
    return next(
        r[of]
        for r in report["results"]
        if r["what"].startswith({"decode": "tg", "prefill": "pp"}[phase])
    )


def files(tests):
    crafted = tests.numbers(
        r"(\d+) crafted files, (\d+) refused; slowest ([\d.]+) s .*, largest resident (\d+) MiB"
    )
    why = "the test did not pass"
    count, _, slowest, peak = (
        crafted.groups() if crafted and tests.passed("crafted_text_files") else [None] * 4
    )
    row("crafted-files", count and int(count), "files, no abort", ">= 100", why)
    row("crafted-slowest", slowest and float(slowest), "s", "<= 2", why)
    row("crafted-largest", peak and int(peak), "MiB resident", "<= 256", why)
    row(
        "verify-3-whenever-generate-4",
        tests.passed("verify_names_what_generate_refuses"),
        "tests, none failed",
        ">= 1",
    )
    told = re.findall(r"^(\d+) of (\d+) told$", tests.text, re.M)
    kinds = sorted((int(all_), int(n)) for n, all_ in told)
    for name, total, need in [
        ("plantings-in-files", 28, ">= 20 of the first 23"),
        ("plantings-in-runs", 25, ">= 18"),
    ]:
        row(
            name,
            next((n for all_, n in kinds if all_ == total), None),
            f"of {total} kinds noticed",
            need,
            why,
        )
    healthy = tests.numbers(r"(\d+) healthy checkpoints, (\d+) alarms")
    count, alarms = map(int, healthy.groups()) if healthy else (None, None)
    row("healthy-checkpoints", count, "checkpoints tried", ">= 1", why)
    row("healthy-alarms", alarms, "alarms on them", "0", why)


def tables(tests):
    count = len(list((ROOT / "cli/tests/snapshots").glob("decision_table*.snap")))
    row("decision-tables", count if tests.passed("machine") else None, "snapshots that pass", ">= 5")


def ratios(args, words, pairs, env):
    """Of the fastest runs of two processes, one after the other, of each phase; either is the first in turns."""
    found = {"decode": [], "prefill": []}
    for i in range(pairs):
        rates = {}
        for which in ("before", "now") if i % 2 else ("now", "before"):
            binary = args.before if which == "before" else args.q4
            bench = [*CPU, "--json", "bench", *words, "--prefill", "128"]
            report = json.loads(must(binary, *bench, env=env)[1])
            rates[which] = {phase: rate(report, phase, "max") for phase in found}
        for phase, of in found.items():
            of.append(rates["now"][phase] / rates["before"][phase])
    return found


def start(args):
    home = args.work / "home"
    env = {"XDG_CACHE_HOME": str(home / "cache"), "XDG_DATA_HOME": str(home / "data")}
    words = ["--threads", "2", "generate", "demo", "-p", "Who are you?"]
    words += ["--max-tokens", "1", "--temperature", "0"]
    must(args.q4, *words, env=env)
    times = [must(args.q4, *words, env=env)[0] for _ in range(21)]
    row("start-demo-remembered", round(1000 * statistics.median(times), 1), "ms, whole process", "<= 60")
    if not args.before:
        row("first-start-0.6b", None, "ms more than before", "<= 300", NO_REVISION)
        return
    model = args.work / "qwen3-0.6b"
    must(args.q4, "bench", "--shape", "qwen3-0.6b", "--write", model)
    first = {}
    for i in range(args.rounds + 1):
        for which in ("before", "now"):
            binary = args.before if which == "before" else args.q4
            fresh = args.work / f"fresh-{which}-{i}"
            env = {"XDG_CACHE_HOME": str(fresh / "cache"), "XDG_DATA_HOME": str(fresh / "data")}
            first.setdefault(which, []).append(
                must(binary, *CPU, "--json", "bench", model, "--first-token", "-r", "1", env=env)[0]
            )
    more = 1000 * (min(first["now"]) - min(first["before"]))
    of = f"ms more than {args.revision}, best of {args.rounds + 1} in turns"
    row("first-start-0.6b", round(more, 1), of, "<= 300")


def speed(args):
    # Where others have the machine too, its speed swings by more than the bound from one minute to the next, and
    # both sides of a pair have the same minute. What is left of its luck goes into the median of many.
    many = [("demo", ["demo", "-r", "20", "--decode", "32"], 10 * args.rounds)]
    many += [("0.6b", ["--shape", "qwen3-0.6b", "-r", "4", "--decode", "8"], 16 * args.rounds)]
    home = args.work / "home"
    env = {"XDG_CACHE_HOME": str(home / "cache"), "XDG_DATA_HOME": str(home / "data")}
    for label, words, pairs in many:
        found = ratios(args, words, pairs, env) if args.before else {}
        for phase, name in (("decode", "decode"), ("prefill", "prompt")):
            unit = f"of the rate of {args.revision or 'before'}, median of {pairs} pairs of processes"
            ratio = round(statistics.median(found[phase]), 3) if found else None
            row(f"{name}-{label}", ratio, unit, ">= 0.99", NO_REVISION)


NO_REVISION = "no revision to compare with was named"
# Where there is a card, the later of two programs may take it by itself.
CPU = ["--device", "cpu"]
TIMED = {"suite": suite, "start": start, "speed": speed, "vendor": vendor}


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("part", choices=[*TIMED, "whole"], help="what needs an idle machine, or everything")
    p.add_argument("--q4", type=pathlib.Path, required=True)
    p.add_argument(
        "--work", type=pathlib.Path, required=True, help="where liars.json, tests and what was timed are"
    )
    p.add_argument("--before", type=pathlib.Path, help="the q4 to compare speeds with")
    p.add_argument("--revision")
    p.add_argument("--rounds", type=int, default=12)
    args = p.parse_args()
    args.q4, args.work = args.q4.resolve(), args.work.resolve()
    if args.part in TIMED:
        TIMED[args.part](args)
        return timed()
    tests = Tests(args.work / "tests")
    mutants(args)
    hostile(tests)
    narrow(tests)
    tools(tests)
    files(tests)
    tables(tests)
    for part in TIMED:
        take(args.work / f"{part}.json")
    others = {tool: said(tool, "--version") for tool in ("rustc", "cc", "gdb", "valgrind")}
    write(q4=said(args.q4, "--version"), **others)


main()
