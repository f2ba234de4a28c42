"""Holds q4's reading of GGUF against ggml and tokenizers; prints rows for bench/writers.py.

    decoders.py --layers PROGRAM --ids PROGRAM --ggml LIBRARY --tokenizer FILE --tests LOG --work FOLDER

PROGRAMs are the examples of q4-model, LOG what tests printed. Blocks hold random codes; of
their scales every f16 there is comes once at least, every 6-bit and 8-bit one, and every byte of E8M0 and
E4M3 that is a scale. The file is a model, so that its blocks take the way of a model's.
"""

import argparse
import ctypes
import json
import pathlib
import random
import re
import subprocess
import sys

import gguf
import numpy as np
from rows import ROOT, Tests, must, row, timed

# The texts and metadata of the golden files.
sys.path.insert(0, str(ROOT / "model" / "gguf" / "golden"))
import make

KINDS = gguf.GGMLQuantizationType
# Type, ggml's function, and the bytes of f16 scales in a block.
BLOCKS = [
    (KINDS.Q4_0, "q4_0", [0]),
    (KINDS.Q8_0, "q8_0", [0]),
    (KINDS.Q4_K, "q4_K", [0, 2]),
    (KINDS.Q5_K, "q5_K", [0, 2]),
    (KINDS.Q6_K, "q6_K", [208]),
    (KINDS.MXFP4, "mxfp4", []),
    (KINDS.NVFP4, "nvfp4", []),
]
# Heads are as many as the width takes, so that all matrices are large; 65536 blocks of 256 at least.
HIDDEN, INNER, HEAD = 1024, 4608, 128
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, HIDDEN),
    "attn_v": (HIDDEN, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def file(path, vocabulary):
    w = gguf.GGUFWriter(path, "qwen3")
    heads = HIDDEN // HEAD
    make.add_config(w, HIDDEN, 1, INNER, heads, heads, HEAD, 512, 1e6)
    w.add_tensor("token_embd.weight", np.zeros((vocabulary, HIDDEN), np.float16))
    for name, width in [
        ("output_norm", HIDDEN),
        ("blk.0.attn_norm", HIDDEN),
        ("blk.0.ffn_norm", HIDDEN),
        ("blk.0.attn_q_norm", HEAD),
        ("blk.0.attn_k_norm", HEAD),
    ]:
        w.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    return w


def random_blocks(kind, halves, rng):
    """Every matrix's blocks, one after the other, and how many distinct scales they have."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    count = sum(n * k for n, k in SHAPES.values()) // elements
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    scales = 0
    for i, place in enumerate(halves):
        # In order for the one, in another for the second: each is there, with many of the other.
        each = np.resize(np.arange(1 << 16, dtype=np.uint16), count)
        each = each if i == 0 else rng.permutation(each)
        blocks[:, place : place + 2] = each.view(np.uint8).reshape(-1, 2)
        scales = len(np.unique(each))
    # 0xff is no E8M0 scale, nor is E4M3's NaN or a negative one, which q4 refuses by name.
    if kind == KINDS.MXFP4:
        blocks[:, 0] = np.resize(np.arange(255), count)
        scales = len(np.unique(blocks[:, 0]))
    if kind == KINDS.NVFP4:
        blocks[:, :4] = rng.integers(0, 127, (count, 4), dtype=np.uint8)
        scales = len(np.unique(blocks[:, :4]))
    return blocks, scales


def blocks(layers, ggml, work):
    rng = np.random.default_rng(2121)
    for kind, function, halves in BLOCKS:
        elements, _ = gguf.GGML_QUANT_SIZES[kind]
        every, scales = random_blocks(kind, halves, rng)
        path, out = work / f"blocks-{function}.gguf", work / f"blocks-{function}.safetensors"
        w, parts, at = file(path, 8), {}, 0
        for name, (n, k) in SHAPES.items():
            count = n * k // elements
            parts[name] = np.ascontiguousarray(every[at : at + count])
            w.add_tensor(f"blk.0.{name}.weight", parts[name].reshape(n, -1), raw_dtype=kind)
            at += count
        make.finish(w)
        must(layers, path, out)
        decode = getattr(ggml, f"dequantize_row_{function}")
        decode.argtypes, decode.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        wrong, signs, got = 0, 0, decoded(out)
        for name, (n, k) in SHAPES.items():
            want = np.empty(n * k, np.float32)
            decode(parts[name].ctypes.data, want.ctypes.data, n * k)
            have = got[f"model.layers.0.{NAMES[name]}"].reshape(-1)
            same = (want.view(np.uint32) == have.view(np.uint32)) | (np.isnan(want) & np.isnan(have))
            # Code 8 of E2M1 is a zero with a sign, which ggml's table of integers does not have.
            zeros = ~same & (want == 0) & (have == 0)
            wrong += int((~same & ~zeros).sum())
            signs += int(zeros.sum())
        path.unlink()
        out.unlink()
        row(
            f"{kind.name}: values of random blocks that are not ggml's, bit for bit",
            wrong,
            f"of {len(every) * elements} in {len(every)} blocks with {scales} scales"
            + (f"; {signs} zeros have a sign that ggml's lack" if signs else ""),
            0,
        )


def decoded(path):
    data = np.memmap(path, np.uint8, "r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    body = data[8 + length :]
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])].tobytes(), np.float32)
        for name, entry in header.items()
    }


def tokenizer(ids, source, work, count):
    """Ids by q4 of what the metadata rebuild, and by tokenizers of the file that they were made from."""
    if not source.exists():
        why = "its tokenizer.json cannot be had here"
        row("texts with other ids than the original tokenizer's", None, f"of {count}", 0, why)
        return
    import tokenizers

    original = tokenizers.Tokenizer.from_file(str(source))
    said = json.loads(source.read_text())
    vocabulary = 1 + max(original.get_vocab().values())
    path = work / "tokenizer.gguf"
    w = file(path, vocabulary)
    make.add_tokenizer(w, source.read_text(), "qwen2", vocabulary)
    make.finish(w)
    special = [token["content"] for token in said["added_tokens"]]
    prose = "\n".join(p.read_text() for p in sorted((ROOT / "docs").glob("*.md")))
    texts = list(make.random_texts(random.Random(7), count, 48, special, prose))
    lines = work / "texts.jsonl"
    lines.write_text("".join(json.dumps(text) + "\n" for text in texts))
    with lines.open() as given, (work / "ids.jsonl").open("w") as out:
        subprocess.run([str(ids), str(path)], stdin=given, stdout=out, check=True)
    want = [e.ids for e in original.encode_batch(texts, add_special_tokens=False)]
    got = [json.loads(line) for line in (work / "ids.jsonl").read_text().splitlines()]
    wrong = [text for text, a, b in zip(texts, want, got, strict=True) if a != b]
    for text in wrong[:5]:
        print(f"other ids: {text!r}", file=sys.stderr)
    unit = f"of {len(texts)} texts, {sum(map(len, want))} tokens, {vocabulary} in the vocabulary"
    row("texts with other ids than the original tokenizer's", len(wrong), unit, 0)


def damage(log):
    text = log.read_text(errors="replace") if log.exists() else ""
    for pattern, what in [
        (r"(\d+) read, (\d+) refused, at most ([\d.]+) bytes", "GGUF headers"),
        (
            r"(\d+) opened, (\d+) refused, at most ([\d.]+) bytes",
            "headers of GGUF and safetensors models, opened whole",
        ),
    ]:
        found = re.search(pattern, text)
        # Printed when all were looked at; a panic, or more memory, fails the test behind it.
        ended = found and re.search(r"^test result: (\w+)", text[found.end() :], re.MULTILINE)
        passed = ended and ended[1] == "ok"
        count = int(found[1]) + int(found[2]) if passed else None
        need = 1_000_000 if what == "GGUF headers" else 100_000
        row(f"damaged {what} without a panic", count, f"{found[1]} of them read" if passed else "", need)
        row(
            f"damaged {what}: most memory for a byte of the file",
            float(found[3]) if passed else None,
            "bytes" if what == "GGUF headers" else "bytes, beyond 1 MiB",
            "at most 16" if what == "GGUF headers" else "at most 4",
        )


def contradictions(tests):
    """Crafted files that are refused, and healthy ones that are not; nothing of a test that failed."""
    for test, pattern, name, need in [
        (
            "each_is_refused",
            r"(\d+) contradictions of s",
            "contradictions of safetensors, refused with both places",
            40,
        ),
        ("so_is_each", r"(\d+) contradictions of G", "contradictions of GGUF, refused with both places", 1),
        ("healthy_files", r"(\d+) healthy files", "healthy files of every layout without a complaint", 25),
        ("they_load_and", r"(\d+) published", "published configurations with the logits of their weights", 1),
    ]:
        said = tests.numbers(pattern)
        row(name, int(said[1]) if said and tests.passed(test) else None, "files", f"at least {need}")


def main():
    parser = argparse.ArgumentParser()
    for name in ["layers", "ids", "ggml", "tokenizer", "tests", "work"]:
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--texts", type=int, default=100_000)
    args = parser.parse_args()
    if args.ggml.exists():
        blocks(args.layers, ctypes.CDLL(str(args.ggml)), args.work)
    else:
        row(
            "values of random blocks that are not ggml's, bit for bit", None, "", 0, "llama.cpp cannot be had"
        )
    tokenizer(args.ids, args.tokenizer, args.work, args.texts)
    damage(args.tests)
    contradictions(Tests(args.tests))
    timed()


main()
