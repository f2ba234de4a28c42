"""Trains on one card and on two of a machine, for bench/cards.sh: the same bytes, a rank that is killed, the step of a 4B.

Q4_TRAIN is a built q4-train, LD_LIBRARY_PATH has the folders of a full libtorch 2.11 and of NCCL.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from rows import ROOT, must, row, run

TRAIN = os.environ.get("Q4_TRAIN", "q4-train")
STEPS, EVERY = 60, 20
# Of the 4B: the first steps find memory and kernels, and those behind them are timed.
FIRST, LAST = 12, 24
LARGE = ["--preset", "full-128g", "--set", "model.shape=qwen3-4b", "--set", "model.init=random"]
LARGE += ["--set", "data.seq=2048", "--set", "data.rows=4", "--set", f"train.steps={LAST}"]


def line(data, ranks, folder, *more):
    """The demo model's training, with two micro-batches a step however many ranks share them."""
    sets = {
        "data.train": json.dumps([f"{data}/train.jsonl"]), "data.valid": json.dumps([f"{data}/valid.jsonl"]),
        "train.steps": STEPS, "schedule.warmup": 10, "data.rows": 64, "sample.every": 0, "eval.every": 30,
        "train.accumulate": 2 // ranks, "checkpoint.dir": folder, "checkpoint.every": EVERY,
    }
    words = [TRAIN, str(ROOT / "trainer/configs/demo.toml"), "--quiet", "--device", "cuda"]
    words += [w for name, value in sets.items() for w in ("--set", f"{name}={value}")]
    return words + (["--gpus", str(ranks)] if ranks > 1 else []) + list(more)


def end(folder):
    """Masters and moments of the last step."""
    step = pathlib.Path(folder) / f"step-{STEPS:09}"
    return [(step / name).read_bytes() for name in ("masters.bin", "states.bin")]


def differ(one, other):
    return sum(a != b for a, b in zip(end(one), end(other)))


def killed(data, folder):
    """Seconds from the death of rank 1 to the end of the run, and how that ended."""
    job = subprocess.Popen(line(data, 2, folder), stderr=subprocess.DEVNULL, start_new_session=True)
    while not (pathlib.Path(folder) / f"step-{EVERY:09}").exists():
        if job.poll() is not None:
            return None, job.returncode
        time.sleep(0.002)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    begun = time.perf_counter()
    os.kill(int(children[-1]), signal.SIGKILL)
    status = job.wait(60)
    return time.perf_counter() - begun, status


def step(ranks):
    """Seconds of a step of the 4B, 8192 tokens a rank, by what the run says while it lasts, and what ranks keep of moments."""
    gpus = ["--gpus", str(ranks)] if ranks > 1 else []
    _, done = run(TRAIN, "--json", "--device", "cuda", *gpus, *LARGE)
    if done.returncode:
        sys.exit(done.stderr)
    # Tokens a second since the first step.
    rate = {int(n): float(r) for n, r in re.findall(r"step (\d+)/\d+ .*?([\d.]+) tok/s", done.stderr)}
    begun, ended = (8192 * ranks * n / rate[n] for n in (FIRST, LAST))
    return (ended - begun) / (LAST - FIRST), json.loads(done.stdout)["ranks"]


def ranks():
    with tempfile.TemporaryDirectory() as work:
        data = f"{work}/data"
        must(TRAIN, "--write-corpus", data)
        at = lambda name: f"{work}/{name}"
        for name, count in [("one", 1), ("two", 2), ("again", 2)]:
            must(*line(data, count, at(name)))
        of = "files of masters and moments of the demo model after 60 steps that differ"
        row("cards-2-bytes", differ(at("one"), at("two")), f"{of}, two ranks from one with two micro-batches", "0")
        row("cards-2-again", differ(at("two"), at("again")), f"{of}, two runs", "0")
        differing = 0
        for name, count in [("killed-2", 2), ("killed-1", 1)]:
            seconds, status = killed(data, at(name))
            row(f"cards-{name}", seconds and round(seconds, 2), f"s from a kill -9 of rank 1 to exit {status}", "< 10, exit 8")
            must(*line(data, count, at(name), "--resume"))
            differing += differ(at("two"), at(name)) > 0
        row("cards-resume", differing, "of 2 runs gone on with, by two ranks and by one, that end otherwise", "0")
    (one, _), (two, kept) = step(1), step(2)
    row("cards-1-seconds", round(one, 4), f"s a step of the 4B, full fine-tune, 8192 tokens, mean of steps {FIRST + 1} to {LAST}", "said")
    row("cards-2-seconds", round(two, 4), "s a step of two ranks, 8192 tokens each", "said")
    row("cards-2-step", round(2 * one / two, 3), "times the rate of one", ">= 1.85")
    planned, have = (max(of[name] for of in kept) for name in ("planned_state_bytes", "state_bytes"))
    row("cards-2-moments", round(have / planned, 4), "of the moments that are planned a rank", "0.95 to 1.05")


def version():
    """Of NCCL, as torch says."""
    return run("python3", "-c", "import torch; print(torch.__version__, torch.cuda.nccl.version())")[1].stdout.strip()
