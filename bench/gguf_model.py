"""Writes a Qwen3 GGUF of a published size with random weights: gguf_model.py SHAPE TYPE OUT [TOKENIZER].

TYPE is that of the linear layers, or Q4_K_M, which mixes Q4_K and Q6_K; the tied embedding and head are Q6_K,
as llama.cpp's own quantiser leaves them. TOKENIZER is a tokenizer.json of byte-level BPE; without it the file
has no words, which is enough where nobody asks for text.
"""
import json
import os
import sys

import gguf
import numpy as np
from gguf import GGUFWriter, GGMLQuantizationType, quant_shape_to_byte_shape

VOCAB, HEAD_DIM = 151_936, 128
# layers, hidden, intermediate, heads, kv heads
SHAPES = {"qwen3-0.6b": (28, 1024, 3072, 16, 8), "qwen3-4b": (36, 2560, 9728, 32, 8)}
RANDOM = np.random.Generator(np.random.SFC64(1))
F32 = GGMLQuantizationType.F32


def f16(values):
    return values.astype("<f2")[..., None].view(np.uint8)


def random_blocks(kind, n, k):
    """Valid blocks whose values have a spread of about 1/sqrt(k), so that products keep the size of their inputs."""
    shape = quant_shape_to_byte_shape((n, k), kind)
    raw = np.frombuffer(RANDOM.bytes(shape[0] * shape[1]), np.uint8).reshape(shape).copy()
    spread = RANDOM.uniform(0.8, 1.2, 64) / np.sqrt(k)
    if kind == GGMLQuantizationType.Q4_0:  # f16 scale, 32 nibbles less 8
        blocks = raw.reshape(-1, 18)
        blocks[:, :2] = f16(np.resize(spread / 4.6, len(blocks)))
    elif kind == GGMLQuantizationType.Q4_K:  # f16 of scales and of minima, 8 of each in 6 bits, 256 nibbles
        blocks = raw.reshape(-1, 144)
        # Scales and minima are alike, 32 and up, so that 7.5 scales are a minimum.
        upper = blocks[:, 4:8] & 31 | 32 | blocks[:, 4:8] & 64 | 128
        blocks[:, 4:8] = blocks[:, 8:12] = upper
        blocks[:, 12:16] = blocks[:, 12:16] & 15 | blocks[:, 12:16] << 4
        scale = np.resize(spread / (4.6 * 48), len(blocks))
        blocks[:, :2], blocks[:, 2:4] = f16(scale), f16(7.5 * scale)
    elif kind == GGMLQuantizationType.Q6_K:  # 256 values of 6 bits less 32, 16 int8 scales, f16 scale
        blocks = raw.reshape(-1, 210)
        blocks[:, 192:208] = 32 + (blocks[:, 192:208] & 31)
        blocks[:, 208:] = f16(np.resize(spread / (18.5 * 48), len(blocks)))
    elif kind == GGMLQuantizationType.NVFP4:  # 4 unsigned E4M3 scales, 64 E2M1 nibbles
        blocks = raw.reshape(-1, 36)
        blocks[:, :4] = 0x34 + (blocks[:, :4] & 7)
    return raw


def add_words(w, path):
    with open(path) as file:
        found = json.load(file)
    words, special = found["model"]["vocab"], {t["id"] for t in found["added_tokens"] if t["special"]}
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(sorted(words, key=words.get))
    w.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(words))])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in found["model"]["merges"]])
    w.add_eos_token_id(words["<|im_end|>"])
    w.add_add_bos_token(False)


def main(shape, type_name, out, tokenizer=None):
    layers, hidden, inner, heads, kv_heads = SHAPES[shape]
    mixes = type_name == "Q4_K_M"
    kind = GGMLQuantizationType["Q4_K" if mixes else type_name]
    tensors = [("token_embd.weight", GGMLQuantizationType.Q6_K, (VOCAB, hidden)), ("output_norm.weight", F32, (hidden,))]
    for i in range(layers):
        for name, n, k in [
            ("attn_q", heads * HEAD_DIM, hidden), ("attn_k", kv_heads * HEAD_DIM, hidden),
            ("attn_v", kv_heads * HEAD_DIM, hidden), ("attn_output", hidden, heads * HEAD_DIM),
            ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner),
        ]:
            is_wider = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2
            wide = mixes and is_wider and name in ("attn_v", "ffn_down")
            tensors.append((f"blk.{i}.{name}.weight", GGMLQuantizationType.Q6_K if wide else kind, (n, k)))
            if kind == GGMLQuantizationType.NVFP4:
                tensors.append((f"blk.{i}.{name}.scale", F32, (1,)))
        for name, n in [("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", HEAD_DIM), ("attn_k_norm", HEAD_DIM)]:
            tensors.append((f"blk.{i}.{name}.weight", F32, (n,)))

    w = GGUFWriter(out + ".partial", "qwen3")
    w.add_block_count(layers)
    w.add_context_length(40_960)
    w.add_embedding_length(hidden)
    w.add_feed_forward_length(inner)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(HEAD_DIM)
    w.add_value_length(HEAD_DIM)
    w.add_rope_freq_base(1e6)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_vocab_size(VOCAB)
    if tokenizer:
        add_words(w, tokenizer)
    else:
        w.add_tokenizer_model("none")
    for name, kind_, dims in tensors:
        if kind_ == F32:
            w.add_tensor_info(name, dims, np.dtype(np.float32), 4 * int(np.prod(dims)))
        else:
            bytes_ = quant_shape_to_byte_shape(dims, kind_)
            w.add_tensor_info(name, bytes_, np.dtype(np.uint8), int(np.prod(bytes_)), raw_dtype=kind_)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for name, kind_, dims in tensors:
        if name.endswith(".scale"):
            data = np.full(dims, 0.3 / np.sqrt(hidden), np.float32)
        elif kind_ == F32:
            data = np.ones(dims, np.float32)
        else:
            data = random_blocks(kind_, *dims)
        w.write_tensor_data(data)
    w.close()
    os.rename(out + ".partial", out)


if __name__ == "__main__":
    main(*sys.argv[1:])
