"""Runs q4 and its peers in turns and writes what came of it as JSON. bench/cpu.sh prepares what this needs."""
import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Ratios to llama.cpp Q4_0 that q4 promises: shape, phase, format, activations.
BARS = {
    (shape, phase, format, activations): bar
    for shape in ("qwen3-4b", "qwen3-0.6b")
    for phase, format, activations, bar in [
        ("decode", "nvfp4", "int8", 1.8), ("decode", "nvfp4", "native", 1.4), ("decode", "nf4", "native", 1.4),
        ("prefill", "nvfp4", "int8", 2.5), ("prefill", "nvfp4", "nvfp4", 2.4), ("prefill", "nvfp4", "native", 0.8),
    ]
}
LOADED_BYTES = 4_500_000_000  # more than either program loads
FIRST_TOKEN_BAR_S = 1.0
Q4_RUNS = [("nvfp4", "int8"), ("nvfp4", "nvfp4"), ("nvfp4", "native"), ("nf4", "native"), ("nf4", "int8")]
PREFILL = 512
# Tokens to decode, samples a run, rounds: the small shape is fast, so it affords more.
PLAN = {"qwen3-4b": (16, 1, 3), "qwen3-0.6b": (48, 3, 4)}


class Refused(Exception):
    """A program does not offer what was asked."""


def run(command, args, env=None):
    """Runs to the end on the chosen processors: stdout lines with the time each came, peak bytes, exit status."""
    start, lines = time.monotonic(), []
    child = subprocess.Popen(
        [str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **(env or {})}, preexec_fn=lambda: os.sched_setaffinity(0, args.processors))
    for line in child.stdout:
        lines.append((time.monotonic() - start, line))
    error = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise Refused(f"{pathlib.Path(command[0]).name}: exit {child.returncode}: {error.strip().splitlines()[-1:]}")
    return lines, usage.ru_maxrss * 1024


class Series:
    """Samples of one quantity over the rounds."""

    def __init__(self):
        self.values = []

    def add(self, *values):
        self.values.extend(values)

    def summary(self):
        v = self.values
        return {"median": statistics.median(v), "min": min(v), "max": max(v), "samples": len(v)} if v else None


class Program:
    """One way to run one shape; collects its figures."""

    def __init__(self, name, shape):
        self.name, self.shape = name, shape
        self.series, self.facts, self.refused = {}, {}, None

    def add(self, what, *values):
        self.series.setdefault(what, Series()).add(*values)

    def median(self, what):
        return self.series[what].summary()["median"] if what in self.series else None


def phase(prompt, depth):
    """What a figure of so many tokens at once, or of one after another behind so many, is called."""
    if prompt:
        return "prefill" if prompt == PREFILL else f"prefill {prompt}"
    return f"decode at {depth}" if depth else "decode"


class Q4(Program):
    def __init__(self, shape, format, activations, long=None):
        super().__init__(f"q4 {format} {activations}", shape)
        self.format, self.activations, self.long = format, activations, long

    def model(self, _args):
        """Words that name the model: random weights of its own."""
        return ["--shape", self.shape, "--format", self.format]

    def measure(self, args, decode, repetitions):
        """A prompt and decoding, or those of `long` tokens."""
        depths = ["--depth", self.long] if self.long else []
        command = [args.q4, "--json", "--threads", args.threads, "--compute", "kernel-only", "--activations",
                   self.activations, "bench", *self.model(args), "--prefill", self.long or PREFILL,
                   "--decode", decode, *depths, "-r", repetitions, "--no-warm-up"]
        lines, peak = run(command, args)
        body = json.loads(lines[-1][1])
        for row in body["results"]:
            kind, tokens, depth = re.fullmatch(r"(pp|tg)(\d+)(?: at (\d+))?", row["what"]).groups()
            what = phase(int(tokens) if kind == "pp" else None, depth)
            if self.long and str(self.long) not in what:
                continue
            self.add_row(what, row)
        self.add("read_gb_s", body["read_gb_s"])
        self.add("gmac_s", body["gmac_s"])
        self.add("peak_bytes", peak)
        self.facts = {"memory": body["memory"], "executed": body["executed"], "isa": body["isa"]}

    def add_row(self, what, row):
        self.add(what, row["median"])
        self.add(what + " floor", row["roofline"])
        self.add(what + " fraction", row["fraction"])


class Q4File(Q4):
    """The file that llama.cpp reads too; `format` is the type of its linear layers."""

    def model(self, args):
        return [args.cache / f"{self.shape}-{self.format}.gguf"]


class Llama(Program):
    def __init__(self, shape, type_name, amx, build="build", long=None):
        super().__init__(f"llama.cpp {type_name}" + (" AMX" if amx else ""), shape)
        self.type_name, self.amx, self.build, self.long = type_name, amx, build, long

    def command(self, args, *rest):
        cache = args.cache
        env = {"LD_LIBRARY_PATH": str(cache / "build-amx/bin")} if self.amx else None
        model, bench = cache / f"{self.shape}-{self.type_name}.gguf", cache / self.build / "bin/llama-bench"
        return [bench, "-m", model, "-t", args.threads, "-o", "jsonl", "--no-warmup", *rest], env

    def measure(self, args, decode, repetitions):
        """A prompt and decoding; of `long` tokens one call each, for a depth is one of prompts too."""
        calls = [["-p", PREFILL, "-n", decode]]
        if self.long:
            calls = [["-p", self.long, "-n", 0], ["-p", 0, "-n", decode, "-d", self.long]]
        for words in calls:
            command, env = self.command(args, *words, "-r", repetitions)
            lines, peak = run(command, args, env)
            for row in (json.loads(line) for _, line in lines if line.startswith("{")):
                self.add(phase(row["n_prompt"], row.get("n_depth")), statistics.median(row["samples_ts"]))
                self.facts = {"commit": row["build_commit"]}
            self.add("peak_bytes", peak)

    def first_token(self, args):
        """Seconds from the start of the process to the first token, less a warm prompt."""
        command, env = self.command(args, "-p", 16, "-n", 0, "-r", 3)
        lines, peak = run(command, args, env)
        at, row = next((at, json.loads(line)) for at, line in lines if line.startswith("{"))
        samples = [ns / 1e9 for ns in row["samples_ns"]]
        return at - sum(samples) + samples[0] - min(samples), peak


class OpenVino(Program):
    def __init__(self, shape):
        super().__init__("OpenVINO int4 g128", shape)

    def measure(self, args, decode, repetitions):
        script = ROOT / "bench/openvino_run.py"
        command = [args.cache / "venv/bin/python", script, args.cache / f"{self.shape}-int4.xml", args.threads,
                   PREFILL, decode, repetitions]
        lines, peak = run(command, args)
        for phase, rates in json.loads(lines[-1][1]).items():
            self.add(phase, statistics.median(rates))
        self.add("peak_bytes", peak)


def programs(shape, args):
    amx = (args.cache / "build-amx/done").exists() and not args.without_amx
    peers = []
    if "llama.cpp" not in args.without:
        peers += [Llama(shape, "Q4_0", False)] + ([Llama(shape, "Q4_0", True)] if amx else [])
        if shape == "qwen3-0.6b":
            peers.append(Llama(shape, "NVFP4", False))
    if "OpenVINO" not in args.without and shape == "qwen3-0.6b" and not args.without_amx:
        peers.append(OpenVino(shape))
    ours = [Q4(shape, *r) for r in Q4_RUNS]
    # A peer between every two of ours, as long as there are any.
    turns = []
    while peers or ours:
        turns += [queue.pop(0) for queue in (peers, ours) if queue]
    return turns


def measure(all_, args, plan=None):
    for shape, (decode, repetitions, rounds) in (plan or PLAN).items():
        mine = [p for p in all_ if p.shape == shape]
        for round_ in range(args.rounds or rounds):
            for p in mine if round_ % 2 == 0 else reversed(mine):
                if p.refused:
                    continue
                say(f"{shape} round {round_ + 1}: {p.name}")
                try:
                    p.measure(args, decode, repetitions)
                except Refused as e:
                    p.refused = str(e)
                    say(f"  left out: {e}")


def best_peer(all_, shape, phase):
    rows = [p for p in all_ if p.shape == shape and p.name.startswith("llama.cpp Q4_0") and p.median(phase)]
    return max(rows, key=lambda p: p.median(phase), default=None)


def figures(all_):
    rows = []
    for p in all_:
        if not isinstance(p, Q4) or p.refused:
            continue
        for phase in ("decode", "prefill"):
            peer = best_peer(all_, p.shape, phase)
            plain = next((o for o in all_ if o.shape == p.shape and o.name == "llama.cpp Q4_0"), None)
            theirs = peer and peer.series[phase].summary()
            ours = p.series[phase].summary()
            ratio = theirs and ours["median"] / theirs["median"]
            bar = BARS.get((p.shape, phase, p.format, p.activations))
            rows.append({
                "name": f"{p.shape} {phase} {p.format} {p.activations}", "unit": "tok/s",
                "q4": ours["median"], "peer": theirs and theirs["median"], "ratio": ratio,
                "floor": p.median(phase + " floor"), "fraction": p.median(phase + " fraction"),
                "peer_name": peer and peer.name, "bar": bar, "met": ratio >= bar if bar and ratio else None,
                "ratio_without_amx": plain and plain.median(phase) and ours["median"] / plain.median(phase),
                "q4_spread": ours, "peer_spread": theirs, "executed": p.facts["executed"],
            })
    return rows


def first_token(all_, args):
    """The 4-bit 4B checkpoint from the page cache, in turns with llama.cpp's loading of its own."""
    model, work, outside, theirs, memory = args.cache / "qwen3-4b-nvfp4", Series(), Series(), {}, None
    peers = [p for p in all_ if isinstance(p, Llama) and p.shape == "qwen3-4b" and not p.refused]
    for path in [*model.glob("*.safetensors"), *args.cache.glob("qwen3-4b-Q4_0.gguf")]:
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass
    cold = None
    for round_ in range(-1, args.rounds or 3):
        say(f"first token, round {round_ + 1}")
        if round_ >= 0:
            own_memory(LOADED_BYTES)
        command = [args.q4, "--json", "--threads", args.threads, "--activations", "int8", "--compute", "kernel-only",
                   "bench", model, "--first-token", "-r", 2]
        lines, peak = run(command, args)
        at, body = lines[-1][0], json.loads(lines[-1][1])
        seconds = at - sum(body["again_s"]) - body["warm_s"]
        if round_ < 0:
            cold = seconds
            continue
        work.add(body["work_s"])
        outside.add(seconds)
        memory = {**body["memory"], "peak_bytes": peak}
        for p in peers:
            own_memory(LOADED_BYTES)
            theirs.setdefault(p.name, Series()).add(p.first_token(args)[0])
    peers = {name: s.summary() for name, s in theirs.items()}
    median = outside.summary()["median"]
    peer = min((s["median"] for s in peers.values()), default=None)
    return {
        "name": "qwen3-4b first token from the page cache, beyond the prompt", "unit": "s", "q4": median, "peer": peer,
        "ratio": peer and peer / median, "floor": None, "fraction": None, "bar": FIRST_TOKEN_BAR_S,
        "met": median < FIRST_TOKEN_BAR_S, "q4_spread": outside.summary(), "peer_spread": peers,
        "inside_the_process": work.summary(), "on_memory_the_host_took_back_s": cold, "memory": memory,
    }


def own_memory(size):
    """Has the host of a virtual machine back `size` bytes of it: pages that it took back cost seconds a GiB, whoever asks."""
    subprocess.run([sys.executable, "-c", f"b'1' * {size}"], check=True)


def memory_rows(all_, first):
    rows = [(f"{p.shape} {p.name}", p.facts["memory"]) for p in all_ if isinstance(p, Q4) and p.facts]
    rows.append(("qwen3-4b q4 nvfp4 int8, from a file", first["memory"]) if first else None)
    out = []
    for name, m in filter(None, rows):
        parts = m["packed_bytes"] + m["embedding_bytes"] + m["kv_bytes"]
        limit = round(1.05 * parts + 100e6)
        out.append({"name": name, "peak_bytes": m["peak_bytes"], "limit_bytes": limit, "packed_bytes": m["packed_bytes"],
                    "embedding_bytes": m["embedding_bytes"], "kv_bytes": m["kv_bytes"], "met": m["peak_bytes"] <= limit})
    return out


def output(*command, **kwargs):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, **kwargs).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine(args):
    info = pathlib.Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    model = re.search(r"model name\s*:\s*(.*)", info)
    flags = set(re.search(r"flags\s*:\s*(.*)", info)[1].split()) if "flags" in info else set()
    shown = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512vbmi", "avx512_bf16", "avx512_fp16", "amx_int8")
    pages = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "processor": model[1] if model else platform.processor(), "processors": os.cpu_count(), "threads": args.threads,
        "instructions": [f for f in shown if f in flags and not (args.without_amx and f.startswith("amx"))],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "system": platform.platform(),
        "huge_pages": pages.read_text().strip() if pages.exists() else None,
    }


def versions(all_, args):
    source = next((p.name for p in args.cache.glob("llama_cpp_python-*") if p.is_dir()), None)
    commit = next((p.facts["commit"] for p in all_ if isinstance(p, Llama) and p.facts), None)
    dirty = output("git", "status", "--porcelain", "--untracked-files=no")
    return {
        # Q4_COMMIT where the executable was built elsewhere, beside a copy without history.
        "q4": os.environ.get("Q4_COMMIT") or (output("git", "rev-parse", "HEAD") or "unknown") + (" with changes" if dirty else ""),
        "rustc": output("rustc", "--version"), "c++": (output("c++", "--version") or "").splitlines()[:1],
        "llama.cpp": commit and f"{commit} from {source}",
        "openvino": output(str(args.cache / "venv/bin/python"), "-c", "import openvino; print(openvino.__version__)"),
    }


def table(result):
    def cell(v, form):
        return format(v, form) if v is not None else "-"
    print(f"{'':<42}{'q4':>8}{'peer':>8}{'ratio':>7}{'bar':>6}  {'':<7}{'floor':>7}{'of it':>7}  peer")
    for f in result["figures"]:
        verdict = {True: "met", False: "MISSED", None: ""}[f["met"]]
        bar = f["bar"] if f["unit"] == "tok/s" else None
        print(f"{f['name'][:41]:<42}{cell(f['q4'], '.2f'):>8}{cell(f['peer'], '.2f'):>8}{cell(f['ratio'], '.2f'):>7}"
              f"{cell(bar, '.1f'):>6}  {verdict:<7}{cell(f['floor'], '.1f'):>7}{cell(f['fraction'], '.0%'):>7}"
              f"  {f.get('peer_name') or ''}")
    for p in result["peers"]:
        rates = ", ".join(f"{k} {v['median']:.1f}" for k, v in p["figures"].items() if k in ("prefill", "decode"))
        print(f"{p['shape']} {p['name']}: {rates or p['left_out']}")
    for m in result["memory"]:
        print(f"{m['name']}: peak {m['peak_bytes'] / 1e9:.2f} GB, limit {m['limit_bytes'] / 1e9:.2f} GB: "
              f"{'met' if m['met'] else 'MISSED'}")
    limits = result["limits"]
    print("limits: " + ", ".join(f"{k} {v['median']:.1f} ({v['min']:.1f} to {v['max']:.1f})" for k, v in limits.items()))
    for note in result["notes"]:
        print("note: " + note)


def limits(all_):
    out = {}
    for p in all_:
        if isinstance(p, Q4) and not p.refused:
            kind = "f32_gmac_s" if p.activations == "native" else "int8_gmac_s"
            out.setdefault("read_gb_s", Series()).add(*p.series["read_gb_s"].values)
            out.setdefault(kind, Series()).add(*p.series["gmac_s"].values)
    return {k: s.summary() for k, s in out.items()}


class Bystanders:
    """Share of the processors' time that went to others since the start: more than a little spoils every figure."""

    ALLOWED = 0.05

    def __init__(self):
        self.start = self.now()

    @staticmethod
    def now():
        try:
            ticks = [int(v) for v in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        except OSError:
            return None
        total, idle, own = sum(ticks), ticks[3] + ticks[4], os.times()
        return total, total - idle, (own[0] + own[1] + own[2] + own[3]) * os.sysconf("SC_CLK_TCK")

    def share(self):
        """0 to 1; None where the system does not say."""
        now = self.now()
        if now is None or self.start is None:
            return None
        total, busy, own = (b - a for a, b in zip(self.start, now))
        return max(0.0, (busy - own) / total) if total else None


def say(text):
    print(text, file=sys.stderr, flush=True)


def parser(description=__doc__):
    p = argparse.ArgumentParser(
        prog="bench/cpu.sh", description=description,
        epilog="bench/cpu.sh --no-peers measures q4 alone and needs no network.")
    p.add_argument("--q4", help="the executable to measure [built by bench/cpu.sh]")
    p.add_argument("--cache", type=pathlib.Path, help="where peers and models are")
    p.add_argument("--without", default="", help="peers that are not there, separated by spaces")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, help="the same number for both shapes")
    p.add_argument("--shape", choices=list(PLAN), help="this one only")
    p.add_argument("--only", help="programs whose name this regular expression finds")
    return p


def arguments():
    p = parser()
    p.add_argument("--isa", metavar="NAME", help="cells of one instruction set instead: bench/cpu.sh --isa avx2 --help")
    p.add_argument("--without-amx", action="store_true", help="as on a processor without AMX: no program uses it")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--out", type=pathlib.Path, default=ROOT / "bench/results/cpu.local.json",
                       help="where results go [bench/results/cpu.local.json, which is not tracked]")
    where.add_argument("--record", action="store_const", dest="out", const=ROOT / "bench/results/cpu.json",
                       help="write bench/results/cpu.json, whose figures the documents show: "
                            "Q4_WRITE_FIGURES=1 cargo test -p q4 --test figures puts them there")
    args = p.parse_args()
    if args.isa:
        p.error("--isa: bench/cpu_cells.py does that")
    args.without = args.without.split()
    choose_processors(p, args)
    # Where there is none, all programs do without it by themselves.
    args.without_amx &= "amx_int8" in pathlib.Path("/proc/cpuinfo").read_text()
    if args.without_amx:
        os.environ.update(Q4_ISA="avx512vnni")
    return args


def choose_processors(p, args):
    args.processors = sorted(os.sched_getaffinity(0))[: args.threads]
    if len(args.processors) < args.threads:
        p.error(f"--threads {args.threads}: this process may use {len(args.processors)} processors")


def main():
    args, begin = arguments(), time.monotonic()
    all_ = [p for shape in PLAN if args.shape in (None, shape) for p in programs(shape, args)]
    all_ = [p for p in all_ if re.search(args.only or "", p.name)]
    bystanders = Bystanders()
    measure(all_, args)
    first = first_token(all_, args) if args.shape != "qwen3-0.6b" and not args.only else None
    notes = [f"{p.shape} {p.name}: {p.refused}" for p in all_ if p.refused]
    notes += [f"{name} is not on this machine: no figures of it" for name in args.without]
    if args.without_amx:
        notes.append("no program was allowed AMX; OpenVINO is left out: held back from AMX where there is one, it does "
                     "not run as on a processor without it")
    rows, share = figures(all_) + ([first] if first else []), bystanders.share()
    if share is None or share > Bystanders.ALLOWED:
        for row in rows:
            row["met"] = None
        taken = "an unknown share" if share is None else f"{share:.0%}"
        notes.append(f"others took {taken} of the processors' time: no verdict, run again on a quiet machine")
    result = {
        "schema": "q4.bench-cpu/1", "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begin), "machine": machine(args), "versions": versions(all_, args),
        "bystanders": share, "limits": limits(all_), "figures": rows,
        "peers": [{"name": p.name, "shape": p.shape, "left_out": p.refused, "facts": p.facts,
                   "figures": {k: s.summary() for k, s in p.series.items()}} for p in all_ if not isinstance(p, Q4)],
        "memory": memory_rows(all_, first), "notes": notes,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    table(result)


if __name__ == "__main__":
    main()
