"""Reads what bench/first-day.sh left, asks the demo model, prints the rows of bench/results/first-day.json."""

import argparse
import json
import os
import pathlib
import re
import subprocess
import tempfile

from rows import ROOT, Tests, row, run, said, write

NOT_RUN = "it did not run, or failed"


def work_kept(tests):
    ways = set(re.findall(r"way to lose work: (.+)$", tests.text, re.M))
    row("ways-to-lose-work", len(ways) or None, "tried, each refused or survived", ">= 40")
    row("ways-that-lose", tests.failures("lost") if ways else None, "tests of them that failed", "0")
    ends = tests.numbers(r"signals (\d+), .*ends compared (\d+)")
    asked, equal = map(int, ends.groups()) if ends and tests.passed("asked_to_end") else (None, None)
    row("signals", asked, "SIGTERMs and SIGINTs at random moments", ">= 100")
    row("signals-ends-equal", equal, "ends compared with an uninterrupted run's bytes, none differed", ">= 100")


def limits(args, shape):
    tests = Tests(args.work / f"limits-{shape}")
    kept = [float(x) for x in re.findall(r"peak +\d+ +([\d.]+) of the limit", tests.text)]
    refused = re.findall(r"^limit +\d+ +refused: (.+)$", tests.text, re.M)
    passed = tests.passed("a_file_keeps_its_limit")
    row(f"limits-{shape}", passed and len(kept) + len(refused), "limits tried", ">= 20")
    row(f"limits-{shape}-totals", passed and len(set(refused)), "totals that refusals name", "1")
    row(f"limits-{shape}-worst", passed and max(kept), "largest resident share of a limit that was kept", "<= 1.05")


def training_limits(args):
    """A run of two steps of the demo's model on the CPU, under limits around its plan."""
    names = ["limits-training", "limits-training-totals", "limits-training-worst"]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        must_write = run(args.train, "--write-corpus", folder / "corpus", "--corpus-seed", "1")[1]
        if must_write.returncode:
            return [row(name, None, "", "", must_write.stderr.strip()) for name in names]

        def train(number, *more):
            sets = [
                f"data.train={folder}/corpus/train.jsonl",
                f"data.valid={folder}/corpus/valid.jsonl",
                f"checkpoint.dir={folder}/ck-{number}",
                "train.steps=2",
                "schedule.warmup=0",
                "data.rows=16",
                "eval.every=0",
                "sample.every=0",
                "model.device=cpu",
            ]
            words = [word for s in sets for word in ("--set", s)]
            command = [args.train, ROOT / "trainer/configs/demo.toml", "--threads", "2", "--json", *words, *more]
            out, err = folder / "out", folder / "err"
            with open(out, "w") as to, open(err, "w") as told:
                process = subprocess.Popen(list(map(str, command)), stdout=to, stderr=told)
                _, status, usage = os.wait4(process.pid, 0)
            code, text = os.waitstatus_to_exitcode(status), out.read_text()
            return code, json.loads(text or "{}"), 1024 * usage.ru_maxrss, err.read_text()

        code, plan, _, err = train("plan", "--dry-run")
        if code:
            return [row(name, None, "", "", err.strip()[-300:]) for name in names]
        phases = [[part["bytes"] for part in phase["parts"]] for phase in plan["plan"]["phases"]]
        planned = max(map(sum, phases))
        kept, refused = [], []
        for i in range(1, 21):
            limit = planned * i // 10
            code, report, peak, err = train(i, "--memory-limit", str(limit))
            if code == 7:
                refused.append(report["need"])
            elif code == 0:
                kept.append(peak / limit)
            else:
                return [row(name, None, "", "", err.strip()[-300:]) for name in names]
    row(names[0], len(kept) + len(refused), "limits tried", ">= 20")
    row(names[1], len(set(refused)), "totals that refusals name", "1")
    row(names[2], round(max(kept), 3), "largest resident share of a limit that was kept", "<= 1.05")


def templates(args):
    def counts(name):
        path = args.work / name
        found = re.findall(r"^\{.*\}$", path.read_text(), re.M) if path.exists() else []
        return json.loads(found[-1]) if found else None

    engine = counts("engine")
    row("engine-cases", engine and engine["cases"], "cases against Jinja2", ">= 2700", NOT_RUN)
    same = engine and engine["same"] + engine["both refuse"]
    row("engine-same", same, "the same text, or refused by both", "the rest is in docs/templates.md", NOT_RUN)
    for name in ("QWEN3", "CODER"):
        model = counts(f"template-{name}")
        why = NOT_RUN if (args.work / f"template-{name}").exists() else f"Q4_TEMPLATE_{name} names no folder"
        row(f"template-{name.lower()}", model and model["cases"], "random conversations", ">= 2000", why)
        row(f"template-{name.lower()}-same", model and model["same"], "of them as transformers has them", "all", why)


def command_line(tests):
    options = len(re.findall(r"^\| `-", (ROOT / "docs/cli.md").read_text(), re.M))
    row("options-with-examples", options if tests.passed("documented::") else None, "options, each run", "all")
    row("schema-table", tests.passed("schemas::"), "tests, none failed", ">= 1")
    row("chat-in-a-terminal", tests.passed("chat::hands"), "tests in a pseudo-terminal, none failed", ">= 5")


def demo(args, tests):
    folder = ROOT / "cli/demo"
    size = sum(f.stat().st_size for f in folder.iterdir() if f.name not in ("README.md", "reference.py"))
    row("demo-size", round(size / 1e6, 2), "MB", "< 5")
    judged = [line.split("\t") for line in (ROOT / "bench/first-prompts.tsv").read_text().splitlines()]
    good = 0
    for prompt, answer, verdict in judged:
        out = run(args.q4, "-q", "generate", "demo", "-p", prompt, "--temperature", "0")[1].stdout.strip()
        # A judgment is of the answer that was seen.
        good += verdict == "good" and out.replace("\n", " ") == answer
    row("demo-first-prompts", len(judged), "prompts outside its corpus", ">= 60")
    row("demo-first-prompts-good", good, "of them sensible or honest, judged by hand", ">= 50")
    former = tests.numbers(r"former questions (\d+) of (\d+)")
    share = int(former[1]) / int(former[2]) if former else None
    row("demo-former-suite", share and round(share, 4), "share of what the demo before it answered", ">= 0.99")


def builds(args):
    path = args.work / "cross"
    text = path.read_text(errors="replace") if path.exists() else ""
    # Windows is the last one, and what is refused there the last thing tried.
    passed = re.findall(r"(\d+) passed", text)
    row("windows-under-wine", int(passed[0]) if passed else None, "cases of L1 passed under wine", ">= 1", NOT_RUN)
    failed = len(re.findall(r"^error", text, re.M)) if text else None
    row("cross-build-errors", failed, "errors for aarch64-apple-darwin and x86_64-pc-windows-gnu", "0", NOT_RUN)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--q4", type=pathlib.Path, required=True)
    p.add_argument("--train", type=pathlib.Path, required=True)
    p.add_argument("--work", type=pathlib.Path, required=True, help="what first-day.sh kept")
    args = p.parse_args()
    trainer, command = Tests(args.work / "trainer"), Tests(args.work / "command")
    work_kept(trainer)
    for shape in ("0.6b", "4b"):
        limits(args, shape)
    training_limits(args)
    templates(args)
    command_line(command)
    demo(args, trainer)
    builds(args)
    row("fresh-users", None, "minutes and stumbles", "in words", "people are not measured by a script")
    write(q4=said(args.q4, "--version"), rustc=said("rustc", "--version"))


main()
