"""Has packages write checkpoints at the shapes of a published model, and holds what q4 reads of each against
the package's own decoding, bit for bit, and its logits against the package's model in f32; prints rows for
bench/writers.py.

    published.py --q4 PROGRAM --layers PROGRAM --peers FOLDER --work FOLDER
"""

import argparse
import pathlib
import sys

import numpy as np
from rows import must, row, run, timed
from safetensors.numpy import load_file
from writers import Peers, Q4, near

SHAPE = "qwen3-0.6b"
# Who writes, and the files.
WRITERS = {
    "formats": [
        "ct-sym-128",
        "ct-sym-32",
        "ct-asym-32",
        "ct-channel",
        "ct-mxfp4",
        "ct-fp8-channel",
        "gptq-sym-128",
        "gptq-asym-64",
        "awq-128",
        "gguf-mxfp4",
        "gguf-nvfp4",
        "gguf-q4_0",
        "gguf-q8_0",
    ],
    "gptqmodel": ["gptqmodel-gptq", "gptqmodel-awq"],
    "modelopt": ["modelopt-nvfp4", "modelopt-w4a16", "modelopt-mixed"],
    "llm-compressor": [
        "llmc-nvfp4a16",
        "llmc-mxfp4a16",
        "llmc-w4a16",
        "llmc-w4a16-asym",
        "llmc-fp8-dynamic",
        "llmc-fp8-block",
    ],
    "mlx": ["mlx-affine-64", "mlx-affine-128", "mlx-affine-32", "mlx-mxfp4", "mlx-nvfp4"],
    "transformers": ["bnb-nf4", "bnb-nf4-dq", "torchao-nvfp4", "torchao-nvfp4-one-level", "transformers-fp8"],
}
# Who decodes what it wrote, by the first part of a name; others' are AutoRound's.
DECODERS = {
    "ct": "compressed-tensors",
    "gguf": "gguf",
    "modelopt": "modelopt",
    "llmc": "llm-compressor",
    "bnb": "bitsandbytes",
    "torchao": "torchao",
    "mlx": "mlx",
    "transformers": "transformers",
}
# Written beside them, and to be refused: the words that the refusal has.
REFUSED = {"torchao-int4": ["IntxUnpackedToInt8Tensor", "NVFP4Tensor"]}
# What q4's logits may be apart from those of the peer's model in f32.
LOGITS = 1e-3


def decoder(name):
    return DECODERS.get(name.split("-")[0], "auto-round")


def written(work, name):
    return next((path for path in [work / name, work / f"{name}.gguf"] if path.exists()), None)


def main():
    parser = argparse.ArgumentParser()
    for name in ["q4", "layers", "peers", "work"]:
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    args = parser.parse_args()
    work = args.work / SHAPE
    work.mkdir(exist_ok=True)
    peers, q4 = Peers(args.peers, work), Q4(args.q4, work)
    # What is there already is of a run that was stopped.
    for writer, files in WRITERS.items():
        if not all(written(work, name) for name in files):
            peers.ask(writer, "make", work, *([SHAPE] if writer == "formats" else []))
    names = [name for of in WRITERS.values() for name in of]
    models = {name: path for name in names if (path := written(work, name))}
    for peer in sorted({decoder(name) for name in models}):
        own = [path for name, path in models.items() if decoder(name) == peer]
        peers.load_all(peer, {str(path) for path in own if peers.load(peer, path) is None})
    equal = close = 0
    worst = 0.0
    for name, path in models.items():
        found = peers.load(decoder(name), path)
        if found is None:
            continue
        out = work / f"layers-{name}.safetensors"
        must(args.layers, path, out)
        own = load_file(out)
        wrong = [k for k in own if not np.array_equal(own[k], found[f"{k}.weight"])]
        distance = near(q4.logits(path), found["logits"])
        print(f"{name}: {len(wrong)} of {len(own)} layers differ, logits {distance:.2g}", file=sys.stderr)
        equal, close, worst = equal + (not wrong), close + (distance <= LOGITS), max(worst, distance)
        out.unlink()
    at = f"at the layers of {SHAPE}"
    row(f"{at}: files that peers wrote", len(models), f"of {len(names)}: {', '.join(models)}", "at least 12")
    every = f"of {len(models)}"
    row(
        f"{at}: of those, every decoded weight the peer's own, bit for bit but for signs of zero",
        equal,
        every,
        len(models),
    )
    row(
        f"{at}: of those, logits within {LOGITS:g} of the largest of the peer's model in f32",
        close,
        every,
        len(models),
    )
    row(f"{at}: largest difference of logits", round(worst, 9), "of the largest", f"at most {LOGITS:g}")
    refused(args.q4, work)
    timed()


def refused(program, work):
    """Files of formats that q4 does not read: told by name."""
    for name, words in REFUSED.items():
        path, why, value = written(work, name), "its package wrote none", None
        if path:
            _, done = run(program, "verify", path)
            told = all(word in done.stdout + done.stderr for word in words)
            value = int(done.returncode != 0 and told)
            print(f"{name}: {done.returncode}: {done.stdout}{done.stderr}", file=sys.stderr)
        row(f"{name}, which q4 does not read: refused by the name of its format", value, "of 1", 1, why)


main()
