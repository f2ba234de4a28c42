"""Has q4 convert what peers' packages wrote, there and back, and has those packages load what it wrote; prints
the rows of bench/results/checkpoints.json.

A peer writes a file and loads it again; q4 writes the same values in another layout, whose package loads
that. What is compared: q4's hash of decoded values at every step, bytes of tensors at the end, decoded
weights and logits.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
from rows import ROOT, row, run, take, write
from safetensors.numpy import load_file

HERE = pathlib.Path(__file__).resolve().parent
IDS = [5, 17, 3, 200, 41, 9, 77, 120]
# Rates beside llama.cpp and OpenVINO, which bench/cpu.sh --isa records on a machine that does nothing else.
CELLS = [ROOT / f"bench/results/cpu-cells-{isa}.json" for isa in ("avx2", "avx512vnni")]
# Mutants and the suite, which bench/proof.sh records.
PROOF = ROOT / "bench/results/proof.json"
# What peers write, the layout it has, and where q4 takes it on its way back.
MADE = [
    ("ct-sym-128", "compressed-tensors", ["gptq", "awq"]),
    ("ct-sym-32", "compressed-tensors", ["gptq", "awq", "gguf"]),
    ("ct-asym-32", "compressed-tensors", ["awq"]),
    ("ct-channel", "compressed-tensors", ["gptq", "awq"]),
    ("ct-mxfp4", "compressed-tensors", ["gguf"]),
    ("gptq-sym-128", "gptq", ["compressed-tensors", "awq"]),
    ("gptq-asym-64", "gptq", ["compressed-tensors", "awq"]),
    ("gptqmodel-gptq", "gptq", ["compressed-tensors", "awq"]),
    ("gptqmodel-awq", "awq", ["compressed-tensors"]),
    ("awq-128", "awq", ["compressed-tensors", "gptq"]),
    ("gguf-mxfp4", None, ["compressed-tensors"]),
    ("gguf-nvfp4", None, ["modelopt"]),
    ("gguf-q4_0", None, ["compressed-tensors", "gptq", "awq"]),
]
BF16 = ["ct-sym-128", "ct-sym-32", "ct-asym-32", "ct-channel", "gptqmodel-awq"]
# Packages that load a layout.
LOADERS = {
    "compressed-tensors": ["compressed-tensors"],
    "gptq": ["auto-round", "gptqmodel"],
    "awq": ["auto-round", "gptqmodel"],
    "gguf": ["gguf", "llama.cpp"],
}
# Files whose own package computes logits.
PEERS_OWN = {
    "gptqmodel-gptq": "gptqmodel",
    "gptqmodel-awq": "gptqmodel",
    "gguf-mxfp4": "llama.cpp",
    "gguf-nvfp4": "llama.cpp",
    "gguf-q4_0": "llama.cpp",
}
# Peers that compute in f32 on what they decode in f32; the others round weights or inputs.
WHOLE = 3e-2
CLOSE = {"compressed-tensors": 1e-4, "auto-round": 1e-4, "gguf": 1e-4, "gptqmodel": 2e-2, "llama.cpp": 5e-2}


class Peers:
    def __init__(self, folder, work):
        self.folder, self.work, self.why = folder, work, {}
        self.env = {
            "LLAMA_CPP_LIB_PATH": str(folder / "build-server" / "bin"),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(next(folder.glob("llama_cpp_python-*"), folder)),
        }

    def python(self, name):
        own = {"llama.cpp": "llama", "modelopt": "modelopt", "llm-compressor": "llm-compressor", "mlx": "mlx"}
        env = own.get(name, "formats")
        return self.folder / env / "bin" / "python"

    def ask(self, name, *words):
        """Whether that peer did it; why not, if it did not."""
        python = self.python(name)
        if not python.exists():
            self.why[name] = "it cannot be installed here"
            return False
        # A folder of llama.cpp's would hide packages of the others.
        env = self.env if name == "llama.cpp" else {**self.env, "PYTHONPATH": ""}
        _, done = run(python, HERE / "writers_peers.py", name, *words, env=env, cwd=self.work)
        if done.returncode:
            self.why[name] = " ".join(done.stderr.strip().splitlines()[-1:])[-300:]
            print(f"{name} {words}: {done.stdout}{done.stderr}", file=sys.stderr)
        return not done.returncode

    def load_all(self, name, models):
        """Has a peer load models in one go: its packages take long to start."""
        if models and self.ask(name, "load", self.work, json.dumps(IDS), *sorted(models)):
            said = self.work / f"{name}-errors.json"
            for model, error in json.loads(said.read_text()).items():
                self.why[name] = error
                print(f"{name}, {model}: {error}", file=sys.stderr)

    def load(self, name, model):
        """Logits, and decoded weights where the peer shows them, of what it loaded."""
        out = self.work / f"{name}-{model.name}.safetensors"
        return load_file(out) if out.exists() else None


class Q4:
    def __init__(self, program, work):
        self.program, self.work, self.refused, self.known = program, work, [], {}

    def convert(self, source, layout, name):
        """What was written, and its hash."""
        out = self.work / (f"{name}.gguf" if layout == "gguf" else name)
        words = ["--tokenizer", self.work / "dense"] if layout == "gguf" else []
        _, done = run(self.program, "--json", "convert", source, out, "--layout", layout, *words)
        if done.returncode:
            self.refused.append(f"{source.name} -> {layout}: {done.stderr.strip()}")
            print(self.refused[-1], file=sys.stderr)
            return None, None
        report = json.loads(done.stdout)
        return out, report["sha256_decoded"] if report["lossless"] else None

    def logits(self, model):
        if model not in self.known:
            self.known[model] = self.compute(model)
        return self.known[model]

    def compute(self, model):
        out = self.work / f"q4-{model.name}.safetensors"
        out.unlink(missing_ok=True)
        ids = ",".join(map(str, IDS))
        _, done = run(self.program, "logits", model, "--ids", ids, "--activations", "native", "--out", out)
        if done.returncode:
            sys.exit(f"{model}: {done.stderr}")
        return load_file(out)["logits"]


def tensors(model):
    """Bytes of the tensors of packed layers by name."""
    data = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    place = lambda e: data[8 + length + e["data_offsets"][0] : 8 + length + e["data_offsets"][1]]
    return {name: (e["dtype"], e["shape"], place(e)) for name, e in header.items() if "_proj." in name}


def round_trips(q4, models):
    """Hashes that are one at every step, and files that are what the peer wrote."""
    asked = whole = same = comparable = 0
    written = []
    for name, layout, ways in MADE:
        if name not in models:
            continue
        for way in ways:
            asked += 1
            there, first = q4.convert(models[name], way, f"{name}-{way}")
            if there is None:
                continue
            written.append((name, way, there))
            back, second = q4.convert(there, layout or "gguf", f"{name}-{way}-back")
            if back and not layout:
                written.append((name, "gguf", back))
            whole += first is not None and first == second
            # Where scales are bf16, those that come back were f16 in between.
            if layout and back and name not in BF16:
                comparable += 1
                same += tensors(models[name]) == tensors(back)
    row(
        "conversions of files that peers wrote, there and back, with one hash at every step",
        whole,
        f"of {asked}",
        asked,
    )
    row(
        "of those whose scales have one type, packed layers that are byte for byte the peer's at the end",
        same,
        f"of {comparable}",
        comparable,
    )
    return written


def near(a, b):
    """The largest difference, in largest values."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def loads(q4, peers, models, written):
    """Each package on what q4 wrote against the same package on what a peer wrote of the same values, and q4."""
    decoded = {name: peers.load(original(name), model) for name, model in models.items()}
    for loader in ["compressed-tensors", "auto-round", "gptqmodel", "gguf", "llama.cpp"]:
        tolerance = CLOSE.get(loader)
        ours = [(name, path) for name, way, path in written if loader in LOADERS.get(way, [])]
        loaded = close = weights = with_weights = with_logits = 0
        worst, whole = 0.0, []
        for name, path in ours:
            found = peers.load(loader, path)
            if found is None:
                continue
            loaded += 1
            parts = {k: v for k, v in found.items() if k not in ("logits", "whole")}
            if parts and decoded.get(name):
                with_weights += 1
                want = decoded[name]
                weights += all(k in want and np.array_equal(v, want[k]) for k, v in parts.items())
            if "whole" in found:
                whole.append(near(found["whole"], found["logits"]))
            if "logits" in found:
                with_logits += 1
                distance = near(found["logits"], q4.logits(path))
                worst, close = max(worst, distance), close + (distance <= tolerance)
        why = peers.why.get(loader, "nothing was written for it")
        row(
            f"{loader}: files of q4 loaded",
            loaded if ours and loaded else None,
            f"of {len(ours)}",
            len(ours),
            why,
        )
        if with_weights:
            row(
                f"{loader}: of those, every decoded weight that of the file of the peer, bit for bit",
                weights,
                f"of {with_weights}",
                with_weights,
            )
        if with_logits:
            row(
                f"{loader}: of those, logits within {tolerance:g} of the largest of q4's",
                close,
                f"of {with_logits}",
                with_logits,
            )
            row(
                f"{loader}: largest difference of logits",
                round(worst, 7),
                "of the largest",
                f"at most {tolerance:g}",
            )
        if whole:
            row(
                f"{loader}: whole folders without zero points through transformers, logits within {WHOLE:g} of the largest",
                sum(distance <= WHOLE for distance in whole),
                f"of {len(whole)}; the worst {max(whole):.2g}",
                len(whole),
            )


def original(name):
    """The package that decodes what a peer wrote in f32."""
    return {"ct": "compressed-tensors", "gguf": "gguf"}.get(name.split("-")[0], "auto-round")


def same_peer(q4, peers, models):
    """The logits of one package on its own file and on q4's of the same values in the same layout: bit for bit."""
    for loader in ["gptqmodel", "llama.cpp"]:
        names = [name for name, of in PEERS_OWN.items() if of == loader]
        pairs = [
            [peers.load(loader, path) for path in [models[name], back_of(q4, name)]]
            for name in names
            if name in models
        ]
        pairs = [(a["logits"], b["logits"]) for a, b in pairs if a and b]
        row(
            f"{loader}: logits of a file of its package's and of q4's of the same values, bit for bit the same",
            sum(np.array_equal(a, b) for a, b in pairs) if pairs else None,
            f"of {len(names)}",
            len(names),
            peers.why.get(loader, "it wrote none"),
        )


def back_of(q4, name):
    """The same values as q4 wrote them, in the layout that they had."""
    way, layout = next((ways[0], layout) for n, layout, ways in MADE if n == name)
    return q4.work / (f"{name}-{way}-back" if layout else f"{name}-{way}-back.gguf")


def quantise(q4):
    """What `q4 quantize` writes in those layouts."""
    written = []
    for form, layout in [
        ("int4", "compressed-tensors"),
        ("int4", "gptq"),
        ("int4", "awq"),
        ("mxfp4", "compressed-tensors"),
    ]:
        out = q4.work / f"quantized-{form}-{layout}"
        _, done = run(q4.program, "quantize", q4.work / "dense", out, "--format", form, "--layout", layout)
        if done.returncode:
            sys.exit(f"{form} as {layout}: {done.stderr}")
        written.append((form, layout, out))
    return written


def quantised(q4, peers, written):
    """Loaded by the packages of their layouts."""
    for form, layout, out in written:
        for loader in LOADERS[layout]:
            found = peers.load(loader, out)
            distance = None if found is None else round(near(found["logits"], q4.logits(out)), 7)
            row(
                f"q4 quantize --format {form} --layout {layout}, logits of {loader}",
                distance,
                "of the largest of q4's",
                f"at most {CLOSE[loader]:g}",
                peers.why.get(loader, "it did not load"),
            )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--q4", type=pathlib.Path, required=True)
    parser.add_argument("--peers", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--decoders", type=pathlib.Path, required=True)
    parser.add_argument("--published", type=pathlib.Path, required=True)
    args = parser.parse_args()
    peers, q4 = Peers(args.peers, args.work), Q4(args.q4, args.work)
    if not peers.ask("formats", "make", args.work):
        sys.exit("no files of peers")
    peers.ask("gptqmodel", "make", args.work)
    models = {
        name: path
        for name, *_ in MADE
        for path in [args.work / name, args.work / f"{name}.gguf"]
        if path.exists()
    }
    row("files that peers wrote", len(models), f"of {len(MADE)}", len(MADE))
    written = round_trips(q4, models)
    quantized = quantise(q4)
    for loader in CLOSE:
        own = [
            path for name, path in models.items() if original(name) == loader or PEERS_OWN.get(name) == loader
        ]
        ours = [path for _, way, path in written if loader in LOADERS.get(way, [])]
        ours += [path for _, layout, path in quantized if loader in LOADERS[layout]]
        backs = [back_of(q4, name) for name, of in PEERS_OWN.items() if of == loader and name in models]
        peers.load_all(loader, {str(path) for path in own + ours + backs if path.exists()})
    loads(q4, peers, models, written)
    same_peer(q4, peers, models)
    quantised(q4, peers, quantized)
    take(args.published)
    take(args.decoders)
    for cells in CELLS:
        take(cells, r"-(Q4_0\.gguf|Q4_K\.gguf|int4)-")
    take(PROOF, r"^(mutants(-caught|-missed)?|false-alarm.*|suite-all-seconds)$")
    versions = {}
    for name in ["formats", "llama.cpp", "modelopt", "llm-compressor", "mlx"]:
        out = args.work / f"versions-{name}.json"
        if peers.ask(name, "versions", out):
            versions |= json.loads(out.read_text())
    write(**versions)


if __name__ == "__main__":
    main()
