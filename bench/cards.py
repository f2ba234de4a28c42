"""Times the host of a card, reads what bench/h200.sh measured, prints bench/results/cards.json."""

import argparse
import json
import os
import pathlib
import subprocess

import card_ranks
from rows import ROOT, ROWS, must, row, said, timed, write
from serve.card import card

Q4 = os.environ.get("Q4", "target/release/q4")
SHAPES = ["qwen3-0.6b", "qwen3-4b"]
THREADS = [1, 2, 4, 8, 16]
# Of bench/h200.sh; of the last, by whom.
STEPS = ["speed", "kernels", "first_token", "exits", "agreement"]
JUDGED = ["nvfp4-kernel", "nf4-kernel", "dequant-matmul"]
FORMATS = ["int4", "mxfp4", "fp8"]
NO_SERVER = "the server was not measured"
NO_RANKS = "ranks did not run on cards"
NO_CARDS = "eight cards were not lent"
NO_PEER = "the peer is not installed on the host of a card"


def host(args):
    """Rates of the processors beside the card, and their share of what reads and arithmetic allow."""
    lowest = {}
    for shape in SHAPES:
        for threads in THREADS:
            if threads > (os.cpu_count() or 1):
                continue
            for activations in ("native", "int8"):
                of = "" if activations == "native" else f"-{activations}"
                report = bench(threads, activations, "--shape", shape)
                for part in report["results"]:
                    what = PHASES[part["what"][:2]]
                    name = f"host-{what}-{shape}{of}-{threads}"
                    need = "no bound" if what == "prompt" else ">= 0.85 of the floor"
                    row(name, round(part["max"], 1), f"tok/s, {isa(report)}", "no bound")
                    row(f"{name}-of-floor", round(part["max"] / part["roofline"], 3), "of the floor", need)
            for what, (q4, llama) in beside_llama(args, shape, threads).items():
                name = f"host-{what}-{shape}-Q4_0-{threads}"
                row(name, round(q4, 1), "tok/s, int8", "no bound")
                row(f"{name}-llama.cpp", round(q4 / llama, 3), f"of {llama:.1f} tok/s, llama.cpp", ">= 1")
                lowest[name] = q4 / llama
    worst = min(lowest, key=lowest.get, default=None)
    unit = "times llama.cpp, the lowest" + (f": {worst}" if worst else "")
    row("host-llama.cpp", worst and round(lowest[worst], 3), unit, ">= 1", NO_PEER)
    timed()


PHASES = {"pp": "prompt", "tg": "decode"}


def bench(threads, activations, *model):
    words = ["--json", "--device", "cpu", "--threads", threads, "--activations", activations, "bench", *model]
    return json.loads(must(Q4, *words, "-r", 3, "--prefill", 256, "--decode", 16)[1])


def beside_llama(args, shape, threads):
    """The best of three of either, in turns, on one file, with int8 inputs, which llama.cpp takes; nothing where
    LLAMA_BENCH names no program, or where the file, of bench/gguf_model.py, is not in the work folder."""
    program, file = os.environ.get("LLAMA_BENCH"), args.work / f"{shape}-Q4_0.gguf"
    if not program or not file.exists():
        return {}
    best = {}
    for _ in range(2):
        for part in bench(threads, "int8", file)["results"]:
            rates = best.setdefault(PHASES[part["what"][:2]], [0.0, 0.0])
            rates[0] = max(rates[0], part["max"])
        lines = must(program, "-m", file, "-t", threads, "-p", 256, "-n", 16, "-r", 3, "-o", "jsonl")[1]
        for line in map(json.loads, lines.splitlines()):
            what = "prompt" if line["n_prompt"] else "decode"
            best[what][1] = max(best[what][1], *line["samples_ts"])
    return best


def isa(report):
    """The instruction set that was used."""
    return report.get("isa", "instruction set not told")


# Figures that what came later may lose nothing of.
BEFORE = "199158f"


class Card:
    """What bench/h200.sh wrote."""

    def __init__(self, text):
        self.all = json.loads(text or "{}")
        self.figures = {f["name"]: f for f in self.all.get("figures", [])}

    def value(self, name):
        figure = self.figures.get(name)
        return None if figure is None else figure["q4"]

    def rate(self, name, figure, need, of=None):
        """A rate, or how many times another one it is."""
        value = self.value(figure)
        floor = self.figures.get(figure, {}).get("floor")
        unit = f"tok/s; floor {floor:.0f}" if floor else "tok/s"
        if of is not None:
            other = self.value(of)
            value, unit = (value / other if value and other else None), f"of {of}"
        row(name, value and round(value, 3), unit, need, "bench/h200.sh did not come so far")



def read(path):
    return path.read_text() if path.exists() else ""


def git(*words):
    """What git prints; nothing in a copy without its history, as a lent machine has."""
    return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout


def promised(card):
    """What bench/h200.sh promises of itself."""
    done = bool(card.figures)
    judged = [f for f in card.figures.values() if f["met"] is not None]
    missed = [f["name"] for f in judged if not f["met"]]
    left = [s for s in STEPS if s not in card.all.get("steps", {})]
    left += [f"conformance of {b}" for b in JUDGED if card.value(f"conformance {b}: failed") is None]
    row("card-steps-not-run", len(left), f"steps: {', '.join(left) or 'none'}", "0")
    row("card-bars", len(judged) or None, "bars", "> 0", "bench/h200.sh did not run")
    row("card-bars-missed", len(missed) if done else None, f"bars: {'; '.join(missed) or 'none'}", "0")
    row("card-failures", len(card.all["failures"]) if done else None, "commands that failed", "0")
    for what, need in [
        ("decode", ">= 1000, then 1250 and 1480, on an H200"),
        ("decode at 4096", ">= 870"),
        ("prefill 512", ">= 70000"),
        ("prefill 4096", ">= 70000"),
        ("batch 64", "no bound"),
    ]:
        card.rate(f"{what.replace(' ', '-')}-4b", f"{what}, NVFP4 native", need)
    recorded = Card(git("show", f"{BEFORE}:bench/results/h200.json"))
    name = lambda c: c.all.get("gpu", "").split(",")[0]
    same = bool(name(card)) and name(card) == name(recorded)
    rates = {n: f for n, f in recorded.figures.items() if f["unit"] == "tok/s" and card.value(n)}
    least = min((card.value(n) / f["q4"] for n, f in rates.items()), default=None) if same else None
    why = f"{name(card) or 'nothing'} was measured; the recorded figures are of {name(recorded) or 'a history that is not here'}"
    row("card-lost", least and round(least, 3), f"of the rate recorded in {BEFORE}, the lowest", ">= 0.98", why)


def kernels(card):
    card.rate("decode-4b-nf4", "decode, NF4 native", ">= 900")
    for activations in ("nvfp4", "int8"):
        for what in ("prefill 512", "prefill 4096"):
            of = f"{what}, NVFP4 native"
            card.rate(f"{what.replace(' ', '-')}-{activations}", f"{what}, NVFP4 {activations}", ">= 1", of)


def formats(card):
    """Formats whose kernels ran beside peers in one run."""
    for name in FORMATS:
        for what in ("decode", "prefill 512", "prefill 4096", "batch 64"):
            card.rate(f"{what.replace(' ', '-')}-{name}", f"{what}, {name} native", "no bound")
            if name == "fp8":
                card.rate(f"{what.replace(' ', '-')}-fp8-inputs", f"{what}, fp8 with fp8 inputs", "no bound")
        # Marlin's weights have half of FP8's bytes.
        for peer in ("cuBLAS bf16",) if name == "fp8" else ("Marlin on NVFP4", "cuBLAS bf16"):
            of = [f for n, f in card.figures.items() if n.endswith(f", {name}, beside {peer}")]
            worst = min(of, key=lambda f: f["ratio"], default=None)
            unit = f"of {peer}, the lowest of {len(of)} products" + (f": {worst['name'].split(',')[0]}" if worst else "")
            row(f"products-{name}-{peer.split()[0].lower()}", worst and round(worst["ratio"], 3), unit, ">= 1", "not run")
        for what, need in (("failed", "0"), ("passed", "said")):
            row(f"conformance-{name}-{what}", card.value(f"conformance {name}-kernel: {what}"), "cases", need, "not run")


def missing():
    """What nothing was built for yet."""
    for name, unit, need, why in [
        ("cards-8-step", "times the rate of one", ">= 7", NO_CARDS),
        ("host-int8-openvino", "times OpenVINO", ">= 1", NO_PEER),
    ]:
        row(name, None, unit, need, why)


def server(args):
    """The server on the card."""
    card(Q4, args.work)
    timed()


def trained(args):
    """The trainer on one card and on two."""
    card_ranks.ranks()
    timed()


def kept(args, part):
    """What a part measured, and where; none where it did not run."""
    found = part_of(args, part)
    ROWS.extend(found.get("rows", []))
    return found.get("machine")


def part_of(args, part):
    there = args.work / f"{part}.json"
    return json.loads(there.read_text()) if there.exists() else {}


def whole(args):
    of_card = Card(read(args.work / "card.json"))
    promised(of_card)
    kernels(of_card)
    formats(Card(read(args.work / "formats.json")))
    beside = kept(args, "host")
    if not beside:
        row("host", None, "tok/s", ">= 0.85 of the floor", "the processors were not timed")
        row("host-llama.cpp", None, "times llama.cpp, the lowest", ">= 1", NO_PEER)
    if not kept(args, "server"):
        row("server-64-users", None, "of the rate of bench", ">= 0.9", NO_SERVER)
        row("server-first-token", None, "ms, 99 of 100", "< 250", NO_SERVER)
        row("server-1000-answers", None, "with --reproducible", "refused", NO_SERVER)
    if not kept(args, "ranks"):
        row("cards-2-bytes", None, "files that differ", "0", NO_RANKS)
        row("cards-2-step", None, "times the rate of one", ">= 1.85", NO_RANKS)
        row("cards-resume", None, "runs that differ", "0", NO_RANKS)
    missing()
    parts = ("card", "formats", "host", "server", "ranks")
    measured = {part: (part_of(args, part).get("commit") or "")[:7] or "not said" for part in parts}
    write(at=beside, q4=said(Q4, "--version"), gpu=of_card.all.get("gpu"), measured=measured)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("part", choices=["host", "server", "ranks", "whole"])
    p.add_argument("--work", type=pathlib.Path, required=True, help="where card.json and host.json are")
    args = p.parse_args()
    {"host": host, "server": server, "ranks": trained, "whole": whole}[args.part](args)


main()
