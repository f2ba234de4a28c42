"""What bench/h200.sh runs. Every row: name, q4, peer, ratio, floor, fraction, unit; see docs/benchmarks.md.

Peers that cannot run here were recorded once on such a card, with the versions named in PEERS; cuBLAS runs in this script."""
import json, os, platform, subprocess, sys, tempfile, time

Q4 = os.environ["Q4"]
OUT = sys.argv[1]
SHAPE = "qwen3-4b"
# llama.cpp 0c1e570 (CUDA graphs, flash attention), random-weight Qwen3-4B, Q4_0 with a Q6_K head; tok/s.
PEERS = {"decode": 380, "decode at 4096": 342, "prefill 512": 15008, "prefill 4096": 15842,
         "batch 8": 1615, "batch 16": 2414, "batch 64": 5145}
# The best of Marlin (vLLM, NVFP4) and bitsandbytes (NF4) a product, us, at M = 1, 8, 16, 64, 512, 4096.
PRODUCTS = {"qkv": [9.8, 9.9, 10.7, 22.9, 41.9, 180], "o": [9.7, 13.1, 14.0, 22.3, 29.2, 119],
            "gate_up": [16.5, 16.8, 18.5, 29.1, 127.6, 565], "down": [16.1, 16.0, 17.4, 45.2, 65.7, 276],
            "lm_head": [95.5, 95.0, 107, 191, 911]}
ROWS = [1, 8, 16, 64, 512, 4096]
SIZES = {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728), "lm_head": (151936, 2560)}
rows, failures, notes = [], [], []


def row(name, q4, peer=None, floor=None, unit="tok/s", peer_is="recorded", lower_is_better=False):
    ratio = None if not peer else (peer / q4 if lower_is_better else q4 / peer)
    fraction = None if not floor else (floor / q4 if lower_is_better else q4 / floor)
    rows.append({"name": name, "q4": q4, "peer": peer, "peer_is": peer_is if peer else None, "ratio": ratio,
                 "floor": floor, "fraction": fraction, "unit": unit})


def q4(*args, check=True, env=None, timeout=300):
    start = time.time()
    p = subprocess.run([Q4, *args], capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})})
    p.seconds = time.time() - start
    if check and p.returncode != 0:
        failures.append({"command": " ".join(args), "exit": p.returncode, "stderr": p.stderr[-2000:]})
    return p


def doc(*args, **kw):
    p = q4(*args, "--json", **kw)
    try:
        return json.loads(p.stdout)
    except ValueError:
        return {}


def conformance():
    for backend in ["nvfp4-kernel", "nf4-kernel", "dequant-matmul"]:
        d = doc("conformance", "--device", "cuda", "--backend", backend, "--profile", "inference", "--no-certificate")
        row(f"conformance {backend}: failed", d.get("failed"), unit="cases")
        row(f"conformance {backend}: passed", d.get("passed"), unit="cases")
        row(f"conformance {backend}: worst error over bound", d.get("max_error_over_bound"), unit="ratio")


def agreement():
    asked = ["Who are you?", "What color is the sky?", "What is 7 plus 8?", "你是誰"]
    same = 0
    for p in asked:
        texts = [doc("--device", d, "generate", "demo", "-p", p, "--temperature", "0").get("text") for d in ("cpu", "cuda")]
        same += texts[0] is not None and texts[0] == texts[1]
    row("demo: greedy texts equal on CPU and CUDA", same, unit=f"of {len(asked)}")


def cublas():
    """us of a bf16 product, graph replays over rotated weights larger than four times the cache."""
    try:
        import torch
    except ImportError:
        notes.append("no torch here: cuBLAS did not run")
        return {}
    times = {}
    for name, (n, k) in SIZES.items():
        copies = max(1, -(-240_000_000 // (n * k * 2)))
        w = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        for m in ROWS:
            if name == "lm_head" and m > 512:
                continue
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            for c in w:
                torch.mm(x, c.t(), out=y)
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                for c in w:
                    torch.mm(x, c.t(), out=y)
            us = []
            for _ in range(7):
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record(); g.replay(); b.record(); b.synchronize()
                us.append(a.elapsed_time(b) * 1e3 / copies)
            times[name, m] = sorted(us)[3]
        del w
    torch.cuda.empty_cache()
    return times


def speed():
    dense = cublas()
    for activations in ["native", "int8", "nvfp4"]:
        first = activations == "native"
        # The head of each is NVFP4; `native` is what the bars are about, the others stand beside it.
        d = doc("--device", "cuda", "--activations", activations, "bench", "--shape", SHAPE, "--prefill", "512,4096",
                "--decode", "128", "--depth", "4096", "--batch", "8,16,64", *(["--kernels"] if first else []), timeout=400)
        for r in d.get("results", []):
            what, unit = r["what"], r["unit"]
            if unit == "us":
                name, m = what.split(" m=")
                i = ROWS.index(int(m))
                best = PRODUCTS[name][i] if i < len(PRODUCTS[name]) else None
                row(f"{what}, {activations}", r["median"], best, r["roofline"], "us", lower_is_better=True)
                if (name, int(m)) in dense:
                    row(f"{what}, {activations}, against cuBLAS bf16", r["median"], dense[name, int(m)], r["roofline"], "us",
                        "cuBLAS, this run", True)
                continue
            name = {"pp512": "prefill 512", "pp4096": "prefill 4096", "tg128": "decode", "tg128 at 4096": "decode at 4096"}.get(what, what)
            row(f"{name}, NVFP4 {activations}", r["median"], PEERS.get(name), r["roofline"])
        m = d.get("memory")
        if m and first:
            need = m["packed_bytes"] + m["embedding_bytes"] + m["kv_bytes"]
            row("device memory beyond weights and KV", (m["used_bytes"] - need) / 1e6, unit="MB")
    d = doc("--device", "cuda", "bench", "--shape", SHAPE, "--format", "nf4", "--prefill", "512,4096", "--decode", "128", timeout=400)
    for r in d.get("results", []):
        name = {"pp512": "prefill 512", "pp4096": "prefill 4096", "tg128": "decode"}.get(r["what"], r["what"])
        row(f"{name}, NF4 native", r["median"], PEERS.get(name), r["roofline"])


def first_token():
    with tempfile.TemporaryDirectory() as folder:
        model = os.path.join(folder, "model")
        if q4("bench", "--shape", SHAPE, "--write", model, timeout=200).returncode:
            return
        cold = os.path.join(folder, "cubins")
        for name, cache in [("first token, cubins not compiled yet", cold), ("first token, cubins cached", cold)]:
            d = doc("--device", "cuda", "bench", model, "--first-token", "--repetitions", "1", env={"Q4_CUBIN_CACHE": cache})
            if "work_s" in d:
                row(name, d["load_s"] + d["first_s"], unit="s")


def missing():
    """What is named and cannot be had stops with exit 6 and says why; the next run works."""
    none = {"CUDA_VISIBLE_DEVICES": ""}
    p = q4("--device", "cuda", "generate", "demo", "-p", "Hi", check=False, env=none)
    row("exit code with no device visible", p.returncode, unit="code")
    p = q4("--device", "cuda", "bench", "--shape", SHAPE, "--prefill", "16", "--decode", "1", "--depth", "4000000", check=False)
    row("exit code with a context larger than the card", p.returncode, unit="code")
    notes.append(p.stderr[-600:])
    p = q4("--device", "cuda", "generate", "demo", "-p", "Hi", "--max-tokens", "4")
    row("exit code of the run after", p.returncode, unit="code")


def write(start, host):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
                         capture_output=True, text=True).stdout.strip()
    with open(OUT, "w") as f:
        json.dump({"schema": "q4.bench-h200/1", "machine": platform.processor() or platform.machine(), "gpu": smi,
                   "commit": os.environ.get("Q4_COMMIT", commit), "seconds": round(time.time() - start), "figures": rows,
                   "failures": failures, "notes": notes, "host": host}, f, indent=1, ensure_ascii=False)
        f.write("\n")


def main():
    start = time.time()
    host = doc("diagnose").get("host")
    for step in (speed, agreement, first_token, missing, conformance):
        try:
            step()
        except Exception as e:  # a step that breaks must not lose the others
            failures.append({"command": step.__name__, "exit": None, "stderr": repr(e)})
        write(start, host)
    for r in rows:
        show = lambda v, s="": "" if v is None else f"{v:,.2f}{s}" if isinstance(v, float) else f"{v}{s}"
        print(f"{r['name']:<60} {show(r['q4']):>12} {r['unit']:<8} peer {show(r['peer']):>10} x{show(r['ratio']):<6} floor {show(r['floor']):>12} {show(r['fraction'])}")
    for f in failures:
        print("FAILED", f["command"], f["exit"], f["stderr"][-400:])
    sys.exit(1 if failures else 0)


main()
