"""What bench/h200.sh runs. A figure: name, q4, unit; peer, peer_is, ratio; floor, fraction; bar, met. See docs/cuda.md.

`peer` is what another program needs for the same, `ratio` how many times better q4 is, `floor` what the machine allows,
`fraction` how much of that is reached. `bar` is the promise, as text; `met` whether it is kept, null where nothing is
promised. Peers that cannot run here were recorded on such a card; cuBLAS runs in this script."""
import json, os, platform, shutil, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

Q4 = os.environ["Q4"]
OUT = sys.argv[1]
SHAPE = "qwen3-4b"
# llama.cpp 0c1e570 (CUDA graphs, flash attention), random-weight Qwen3-4B, Q4_0 with a Q6_K head; tok/s.
LLAMA = {"decode": 380, "decode at 4096": 342, "prefill 512": 15008, "prefill 4096": 15842,
         "batch 8": 1615, "batch 16": 2414, "batch 64": 5145}
ROWS = [1, 8, 16, 64, 512, 4096]
SIZES = {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728), "lm_head": (151936, 2560)}
# us a product, graph replays over rotated weights, at ROWS. Marlin: vLLM's kernel on NVFP4 weights; bitsandbytes 0.50.2: NF4.
MARLIN = {"qkv": [9.8, 9.9, 10.7, 22.9, 58.0, 418], "o": [13.3, 13.1, 14.0, 43.4, 40.2, 257],
          "gate_up": [16.5, 16.8, 18.5, 29.1, 163.9, 1264], "down": [16.1, 16.0, 17.4, 48.4, 81.2, 594],
          "lm_head": [95.5, 95.0, 107, 191, 1475]}
BITSANDBYTES = {"qkv": [11.6, 30.9, 31.2, 27.0, 41.9, 180], "o": [9.7, 20.2, 20.4, 22.3, 29.2, 119],
                "gate_up": [31.9, 62.2, 62.9, 86.9, 127.6, 565], "down": [20.2, 48.3, 45.0, 45.2, 65.7, 276],
                "lm_head": [215, 345, 348, 479, 911]}
# Promises in tokens a second, and in times the rate of one sequence.
AT_LEAST = {"decode": 1000, "decode at 4096": 850, "prefill 512": 40_000, "prefill 4096": 45_000}
TIMES = {"batch 8": 4, "batch 16": 6, "batch 64": 12}
rows, failures, notes, steps = [], [], [], {}


def row(name, q4, unit="tok/s", peer=None, peer_is=None, floor=None, bar=None, met=None):
    less = unit in ("us", "s", "MB")
    better = lambda than: (than / q4 if less else q4 / than) if than and q4 else None
    of = lambda best: (best / q4 if less else q4 / best) if best and q4 else None
    rows.append({"name": name, "q4": q4, "unit": unit, "peer": peer, "peer_is": peer_is if peer else None,
                 "ratio": better(peer), "floor": floor, "fraction": of(floor),
                 "bar": bar, "met": None if bar is None else bool(met)})


def q4(*args, check=True, env=None, timeout=300, before=()):
    start = time.time()
    p = subprocess.run([*before, Q4, *args], capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})})
    p.seconds = time.time() - start
    if check and p.returncode != 0:
        failures.append({"command": " ".join(args), "exit": p.returncode, "stderr": p.stderr[-2000:]})
    return p


def doc(*args, **kw):
    p = q4(*args, "--json", **kw)
    try:
        return {**json.loads(p.stdout), "wall_s": p.seconds}
    except ValueError:
        return {}


def conformance_of(backend):
    def conformance():
        d = doc("conformance", "--device", "cuda", "--backend", backend, "--profile", "inference", "--no-certificate", timeout=600)
        failed, worst = d.get("failed"), d.get("max_error_over_bound")
        row(f"conformance {backend}: failed", failed, "cases", bar="0", met=failed == 0)
        row(f"conformance {backend}: passed", d.get("passed"), "cases")
        row(f"conformance {backend}: worst error over bound", worst, "ratio", bar="<= 1", met=worst is not None and worst <= 1)
    return conformance


def agreement():
    asked = ["Who are you?", "What color is the sky?", "What is 7 plus 8?", "你是誰"]
    texts = {d: [doc("--device", d, "generate", "demo", "-p", p, "--temperature", "0").get("text") for p in asked]
             for d in ("cpu", "cuda")}
    same = sum(a is not None and a == b for a, b in zip(texts["cpu"], texts["cuda"]))
    row("demo: greedy texts equal on CPU and CUDA", same, f"of {len(asked)}", bar=f"{len(asked)}", met=same == len(asked))
    tiny = [os.path.join(GOLDEN, t, c) for t in ("qwen3_tiny_a", "qwen3_tiny_b") for c in sorted(os.listdir(os.path.join(GOLDEN, t)))
            if os.path.isdir(os.path.join(GOLDEN, t, c))]
    cases = [("demo model", ["demo"], "auto")] + [(f"tiny models, {a} activations", tiny, a) for a in ("native", "auto")]
    for what, models, activations in cases:
        worst, greedy, same16, times = 0, 0, 0, 0
        for m in models:
            with ThreadPoolExecutor(4) as pool:
                one = dict(pool.map(lambda c: (c, logits(m, activations, *c)),
                                    [(d, t) for d in ("cpu", "cuda") for t in ("float32", "bfloat16")]))
            (a, ids_a), (b, ids_b) = one["cpu", "float32"], one["cuda", "float32"]
            worst = max(worst, max(abs(x - y) for x, y in zip(a, b)) / max(map(abs, a)))
            greedy += ids_a == ids_b
            same16 += one["cuda", "bfloat16"][1] == ids_a
            times = max(times, rms(b, one["cuda", "bfloat16"][0]) / rms(a, one["cpu", "bfloat16"][0]))
        n = len(models)
        row(f"{what}: CPU and CUDA in float32, largest difference of a logit over the largest", worst, "ratio",
            bar=f"<= {CLOSE}", met=worst <= CLOSE)
        row(f"{what}: greedy tokens equal in float32", greedy, f"of {n}", bar=f"{n}", met=greedy == n)
        # Activations of 4 bits turn any rounding into other codes (docs/numerics.md), and random models have near ties.
        chaotic, trained = activations == "auto" and models != ["demo"], models == ["demo"]
        row(f"{what}: what bfloat16 changes on CUDA over what it changes on the CPU, rms", times, "ratio",
            bar=None if chaotic else f"<= {ROUNDINGS}", met=times <= ROUNDINGS)
        row(f"{what}: greedy tokens in bfloat16 on CUDA as in float32 on the CPU", same16, f"of {n}",
            bar=f"{n}" if trained else None, met=same16 == n)


GOLDEN = "conformance/golden"
# As the tests of the CPU against recorded logits have it: sums in another order, and inputs that round the other way.
CLOSE = 1e-3
# The CPU rounds what a product writes, CUDA also what it reads: two roundings for one are sqrt(2), and a little for the rest.
ROUNDINGS = 2


def logits(model, activations, device, dtype):
    """A model's logits at 33 positions, and 16 greedy tokens."""
    ids = ",".join(str(i * 37 % 181 + 3) for i in range(33))
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "logits")
        d = doc("--threads", "4", "--device", device, "--dtype", dtype, "--activations", activations, "logits", model, "--ids",
                ids, "--greedy", "16", "--out", out)
        return floats(out), d.get("greedy_ids")


def rms(a, b):
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / len(a)) ** 0.5


def floats(path):
    """The one float32 tensor of a safetensors file."""
    import array
    with open(path, "rb") as f:
        header = int.from_bytes(f.read(8), "little")
        f.seek(8 + header)
        return array.array("f", f.read())


def replayed(multiply, weights):
    """us of a product: the median replay of a graph that goes over `weights`."""
    import torch
    for w in weights:
        multiply(w)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for w in weights:
            multiply(w)
    us = []
    for _ in range(7):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); b.synchronize()
        us.append(a.elapsed_time(b) * 1e3 / len(weights))
    return sorted(us)[3]


def timed(prepare):
    """us of a peer's products by name and rows, measured as q4 measures its own: weights rotate over more than four times the
    cache, many rows of every product come after few, and a replay has as many: what draws more power for longer runs slower.
    `prepare(x, n, k, head)`: what makes a weight, what multiplies with one, a weight's bytes."""
    import torch
    times = {}
    for m, (what, (n, k)) in [(m, s) for m in ROWS for s in SIZES.items()]:
        head = what == "lm_head"
        if head and m > 512:
            continue
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        weight, multiply, size = prepare(x, n, k, head)
        copies = [weight() for _ in range(max(1, -(-240_000_000 // size)))]
        times[what, m] = replayed(multiply, [copies[i % len(copies)] for i in range(1 if head else 36)])
        del copies
    torch.cuda.empty_cache()
    return times


def cublas():
    """us of a bf16 product. Outputs are q4's: bf16, and f32 of the head."""
    try:
        import torch
    except ImportError:
        notes.append("no torch here: cuBLAS did not run")
        return {}

    def prepare(x, n, k, head):
        y = torch.empty(len(x), n, device="cuda", dtype=torch.bfloat16)
        weight = lambda: torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        multiply = lambda w: torch.mm(x, w.t(), out_dtype=torch.float32) if head else torch.mm(x, w.t(), out=y)
        return weight, multiply, n * k * 2
    return timed(prepare)


def bitsandbytes():
    """us of its NF4 product of bf16, blocks of 64 with f32 scales; None where it is not installed."""
    try:
        import torch, bitsandbytes as bnb
    except ImportError:
        notes.append("no bitsandbytes here: its figures are those recorded")
        return None

    def prepare(x, n, k, head):
        packed, state = bnb.functional.quantize_4bit(
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16), blocksize=64, quant_type="nf4")
        return packed.clone, lambda w: bnb.matmul_4bit(x, w, state), n * k // 2
    times = timed(prepare)
    notes.append(f"bitsandbytes {bnb.__version__} ran here")
    return times


def bench(what, *args, peers=LLAMA, bars=True):
    """Rates of a model; `what` names its format and activations."""
    d = doc("--device", "cuda", *args, timeout=400)
    one = None
    for r in d.get("results", []):
        if r["unit"] == "us":
            continue
        name = {"pp512": "prefill 512", "pp4096": "prefill 4096", "tg128": "decode",
                "tg128 at 4096": "decode at 4096"}.get(r["what"], r["what"])
        rate = r["median"]
        one = rate if name == "decode" else one
        bar = met = None
        if bars and name in AT_LEAST:
            bar, met = f">= {AT_LEAST[name]}", rate >= AT_LEAST[name]
        elif bars and name in TIMES and one:
            bar, met = f">= {TIMES[name]} x decode", rate >= TIMES[name] * one
        row(f"{name}, {what}", rate, peer=peers.get(name), peer_is="llama.cpp, recorded", floor=r["roofline"], bar=bar, met=met)
    return d


def products(what, peers, *args):
    """Single products beside every peer of `(name, times, least of its speed)`: never slower, and from 512 rows up not 10 %
    slower than cuBLAS."""
    d = doc("--device", "cuda", "--activations", "native", "bench", "--shape", SHAPE, *args, "--kernels", "--prefill", "16",
            "--decode", "0", timeout=400)
    for r in d.get("results", []):
        if r["unit"] != "us":
            continue
        name, m = r["what"].split(" m=")
        m, us = int(m), r["median"]
        for who, times in peers:
            if (name, m) in times:
                peer, least = times[name, m], 0.9 if m >= 512 and who.startswith("cuBLAS") else 1.0
                row(f"{r['what']}, {what}, beside {who.split(',')[0]}", us, "us", peer, who, r["roofline"],
                    f"{least} x", peer / us >= least)


def recorded(table):
    return {(name, m): us for name, all in table.items() for m, us in zip(ROWS, all)}


def speed():
    shape = ["bench", "--shape", SHAPE, "--prefill", "512,4096", "--decode", "128", "--depth", "4096"]
    d = bench("NVFP4 native", "--activations", "native", *shape, "--batch", "8,16,64")
    m = d.get("memory")
    if m:
        more = (m["used_bytes"] - m["packed_bytes"] - m["embedding_bytes"] - m["kv_bytes"]) / 1e6
        row("device memory beyond weights and KV", more, "MB", bar="<= 300", met=more <= 300)
        loading = (m["loaded_bytes"] - m["packed_bytes"] - m["embedding_bytes"]) / 1e6
        row("  of it by loading", loading, "MB")
        row("  of it by a context", (m["context_bytes"] - m["kv_bytes"]) / 1e6, "MB")
        row("  not in it, before anything was loaded: driver, CUDA context, kernels", m["before_bytes"] / 1e6, "MB")
    few = ["--batch", "8,16,64", "--repetitions", "3"]  # nothing is promised for these
    for activations in ["int8", "nvfp4"]:
        bench(f"NVFP4 {activations}", "--activations", activations, *shape, *few, bars=False)
    bench("NF4 native", "--activations", "native", *shape, "--format", "nf4", *few, bars=False)


def kernels():
    dense = ("cuBLAS bf16, this run", cublas())
    theirs = bitsandbytes()
    nf4 = ("bitsandbytes, this run", theirs) if theirs else ("bitsandbytes, recorded", recorded(BITSANDBYTES))
    products("NVFP4", [("Marlin, recorded", recorded(MARLIN)), nf4, dense])
    products("NF4", [nf4, dense], "--format", "nf4")


def formats():
    """What other formats have kernels for: rates, single products, and whether they are right."""
    dense = ("cuBLAS bf16, this run", cublas())
    few = ["bench", "--shape", SHAPE, "--prefill", "512,4096", "--decode", "128", "--batch", "8,16,64", "--repetitions", "3"]
    names = os.environ.get("Q4_FORMATS", "int4,mxfp4,fp8").split(",")
    for name in names:
        bench(f"{name} native", "--activations", "native", *few, "--format", name, bars=False)
        if name == "fp8":
            bench("fp8 with fp8 inputs", "--activations", "fp8", *few, "--format", name, bars=False)
        # Marlin's weights have half of FP8's bytes.
        four = [] if name == "fp8" else [("Marlin on NVFP4, recorded", recorded(MARLIN))]
        products(name, [*four, dense], "--format", name)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: conformance_of(f"{name}-kernel")(), names))


def first_token():
    """From the start of the process to the first token, checkpoint in the page cache. Cold: neither q4's cache of compiled
    kernels nor the compiler's own."""
    with tempfile.TemporaryDirectory() as folder:
        model = os.path.join(folder, "model")
        if q4("bench", "--shape", SHAPE, "--write", model, timeout=200).returncode:
            return
        env = {"Q4_CUBIN_CACHE": os.path.join(folder, "cubins"), "CUDA_CACHE_DISABLE": "1"}
        for name, limit in [("first token, the first time ever", 6), ("first token, kernels compiled before", 3)]:
            d = doc("--device", "cuda", "bench", model, "--first-token", "--repetitions", "1", env=env)
            if "work_s" in d:
                # The wall time has everything, also what the process does before the verb and the repetition after it.
                s = d["wall_s"] - sum(d["again_s"])
                row(name, s, "s", bar=f"< {limit}", met=s < limit)
                notes.append(f"{name}: {d['load_s']:.2f} s to load, {d['first_s']:.2f} s for the first prompt")


def hiding(library):
    """A command before a command for which every copy of a library is an empty file; None where we may not."""
    folders = os.environ.get("Q4_CUDA_LIBS", "").split(":") + os.environ.get("LD_LIBRARY_PATH", "").split(":")
    found = {os.path.join(f, n) for f in folders if os.path.isdir(f) for n in os.listdir(f) if n.startswith(library)}
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    found |= {line.split("=> ")[1] for line in known.splitlines() if library in line and "=> " in line}
    files = sorted({os.path.realpath(f) for f in found})
    script = "".join(f"mount --bind /dev/null '{f}' && " for f in files) + 'exec "$@"'
    before = ["unshare", "-m", "bash", "-c", script, "-"]
    try:
        return before if subprocess.run([*before, "true"], capture_output=True).returncode == 0 else None
    except FileNotFoundError:
        return None


def exits():
    """What is named and cannot be had stops with exit 6 or 7 and says why; the next run works."""
    def code(name, want, *args, env=None, saying="", before=()):
        p = q4(*args, check=False, env=env, before=before)
        met = p.returncode in want and saying in p.stderr
        row(f"exit code {name}", p.returncode, "code", bar=" or ".join(map(str, want)), met=met)
        notes.append(f"{name}: {p.stderr[-600:]}")
    run = ["--device", "cuda", "generate", "demo", "-p", "Hi", "--max-tokens", "4"]
    code("with no device visible", [6], *run, env={"CUDA_VISIBLE_DEVICES": ""}, saying="cuda:0")
    code("with a device that is not there", [6], "--device", "cuda:77", *run[2:], saying="cuda:77")
    with tempfile.TemporaryDirectory() as empty:
        hidden = hiding("libnvrtc")
        if hidden is None:
            notes.append("no right to hide NVRTC here: exit code without a compiler not tried")
        else:
            code("with neither compiler nor compiled kernels", [6], *run, env={"Q4_CUBIN_CACHE": empty}, saying="NVRTC",
                 before=hidden)
    code("with a context larger than the card", [7], "--device", "cuda", "bench", "--shape", SHAPE, "--prefill", "16",
         "--decode", "1", "--depth", "4000000", saying="free")
    code("of the run after", [0], *run)
    # The test of faults, where its executable was brought too: `cargo test --release -p q4-cuda --test fault --no-run`.
    if fault := os.environ.get("Q4_FAULT_TEST"):
        p = subprocess.run([fault, "--nocapture"], capture_output=True, text=True, timeout=120)
        met = p.returncode == 0 and "skipped" not in p.stdout
        row("a kernel fault ends in exit code 6, is named, and the next run works: tests failed", p.returncode, "code",
            bar="0", met=met)
        notes.append(f"faults: {p.stdout[-1500:]}")


def write(start, host):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else None
    text = json.dumps({"schema": "q4.bench-h200/2", "machine": platform.processor() or platform.machine(), "gpu": smi,
                       "commit": os.environ.get("Q4_COMMIT", commit), "seconds": round(time.time() - start), "steps": steps,
                       "figures": rows, "failures": failures, "notes": notes, "host": host}, indent=1, ensure_ascii=False)
    # Where things lie on this machine is nobody's business.
    places = {f: "Q4_CUDA_LIBS" for f in os.environ.get("Q4_CUDA_LIBS", "").split(":") if f}
    places |= {os.environ[v]: v for v in ("Q4_CUBIN_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME") if os.environ.get(v)}
    for place, name in {**places, os.path.dirname(os.path.abspath(Q4)): "Q4", os.path.expanduser("~"): "~"}.items():
        text = text.replace(place, name)
    with open(OUT, "w") as f:
        f.write(text + "\n")


def show(v):
    return "" if v is None else f"{v:,.2f}" if isinstance(v, float) else str(v)


def main():
    start = time.time()
    host = doc("diagnose").get("host")
    lock = Lock()

    def run(step):
        name = step.__name__
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            return
        began = time.time()
        try:
            step()
        except Exception as e:  # a step that breaks must not lose the others
            failures.append({"command": name, "exit": None, "stderr": repr(e)})
        with lock:
            steps[name] = max(steps.get(name, 0), round(time.time() - began))
            write(start, host)

    # The last ones take no times, so they run side by side.
    checks = agreement, *map(conformance_of, ["nvfp4-kernel", "nf4-kernel", "dequant-matmul"])
    for together in (speed,), (kernels,), (formats,), (first_token,), (exits,), checks:
        with ThreadPoolExecutor(len(together)) as pool:
            list(pool.map(run, together))
    for r in rows:
        verdict = {None: "", True: "met", False: "MISSED"}[r["met"]]
        print(f"{r['name']:<66} {show(r['q4']):>12} {r['unit']:<6} peer {show(r['peer']):>9} x{show(r['ratio']):<6}"
              f" floor {show(r['floor']):>11} {show(r['fraction']):>5}  {r['bar'] or '':<16} {verdict}")
    missed = [r["name"] for r in rows if r["met"] is False]
    print(f"{sum(r['met'] is True for r in rows)} bars met, {len(missed)} missed, {round(time.time() - start)} s")
    for f in failures:
        print("FAILED", f["command"], f["exit"], f["stderr"][-400:])
    sys.exit(1 if failures else 0)


main()
