"""Writes the weights of two checkpoints of qwen3_tiny_a as GGUF with the gguf package: the same codes and scales,
in blocks. Then those of qwen3_tiny_a as that package quantises them to Q4_0 and Q8_0, with the logits of
transformers on what it decodes, a model of random blocks with scales of scales with the same, and random
blocks of integers with what it decodes them to. Run in this folder:

    python3 gguf.py         # gguf 0.19.0, numpy 2, torch 2.11.0, transformers 5.23.0, safetensors
"""
import json
import pathlib
import sys

sys.path.remove(str(pathlib.Path(__file__).resolve().parent))  # this file has the package's name
import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

TINY = pathlib.Path("qwen3_tiny_a")
NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def renamed(layer):
    if layer == "model.embed_tokens":
        return "token_embd"
    if layer == "model.norm":
        return "output_norm"
    _, _, number, module = layer.split(".", 3)
    return f"blk.{number}.{NAMES[module]}"


def halves(codes, run):
    """Codes, low nibble first, in bytes that hold element j and j + `run` of 2 * `run`."""
    each = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1, 2 * run)
    return (each[..., :run] | each[..., run:] << 4).astype(np.uint8)


def blocks(codes, scales, run, count):
    """`count` scales of a block, then its codes."""
    rows = codes.shape[0]
    codes = halves(codes, run).reshape(rows, -1, count * run)
    return np.concatenate([scales.reshape(rows, -1, count), codes], -1).reshape(rows, -1)


def read(path):
    """Types and bytes; those of the last extent are neighbours."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)

    def array(entry):
        start, end = (8 + length + at for at in entry["data_offsets"])
        rows = entry["shape"][0] if len(entry["shape"]) == 2 else 1
        flat = np.frombuffer(data[start:end], np.uint8)
        return entry["dtype"], flat.reshape(rows, -1) if len(entry["shape"]) == 2 else flat

    return {name: array(entry) for name, entry in header.items()}


def writer(folder, out):
    return configured(json.loads((TINY / folder / "config.json").read_text()), out)


def configured(config, out):
    w = gguf.GGUFWriter(out, "qwen3")
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(float(config["rope_theta"]))
    w.add_vocab_size(config["vocab_size"])
    return w


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def floats_of(kind, data):
    return data.view(np.float32) if kind == "F32" else (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def write(folder, out):
    w = writer(folder, out)
    file = read(TINY / folder / "model.safetensors")
    for name in sorted(file):
        layer, part = name.rsplit(".", 1)
        raw = lambda name: file[name][1]
        if part == "weight_packed":
            data = blocks(raw(name), raw(f"{layer}.weight_scale"), 16, 1)
            w.add_tensor(f"{renamed(layer)}.weight", data, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        elif part == "weight_scale_2":
            data = blocks(raw(f"{layer}.weight"), raw(f"{layer}.weight_scale"), 8, 4)
            w.add_tensor(f"{renamed(layer)}.weight", data, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
            w.add_tensor(f"{renamed(layer)}.scale", raw(name).view(np.float32).reshape(1))
        elif part == "weight" and f"{layer}.weight_scale" not in file:
            w.add_tensor(f"{renamed(layer)}.weight", floats_of(*file[name]))
    finish(w)


def quantised(out):
    """Layers in Q4_0, the embedding, which is the head too, in Q8_0."""
    w, decoded = writer("", out), {}
    for name, (kind, data) in sorted(read(TINY / "model.safetensors").items()):
        floats, to = floats_of(kind, data), f"{renamed(name.removesuffix('.weight'))}.weight"
        kinds = gguf.GGMLQuantizationType
        kind = kinds.Q4_0 if name.endswith("_proj.weight") else kinds.Q8_0 if "embed" in name else kinds.F32
        packed = quantize(floats, kind) if floats.ndim == 2 else floats
        w.add_tensor(to, packed, raw_dtype=kind)
        decoded[name] = torch.from_numpy((dequantize(packed, kind) if floats.ndim == 2 else floats).copy())
    finish(w)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY), dtype=torch.float32).eval()
    missing = model.load_state_dict(decoded, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys, missing
    model.tie_weights()
    ids = load_file(TINY / "expected.safetensors")["inputs.ids.len33"]
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0].float().numpy()
    save_file({"ids": ids, "logits": logits}, out.with_suffix(".expected.safetensors"))


def plausible(kind, shape, rng):
    """Blocks of any codes, with scales that make weights about 1 / sqrt(k), whatever scales groups have."""
    kinds, (n, k) = gguf.GGMLQuantizationType, shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n * k // block, size), dtype=np.uint8)
    floats = {kinds.Q4_K: [(0, 1 / 170), (2, 1 / 22)], kinds.Q5_K: [(0, 1 / 340), (2, 1 / 22)],
              kinds.Q6_K: [(208, 1 / 1370)], kinds.Q8_0: [(0, 1 / 74)]}[kind]
    for place, size in floats:
        scales = (rng.uniform(0.8, 1.2, len(blocks)) * size / np.sqrt(k)).astype(np.float16)
        blocks[:, place:place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(n, -1)


def k_quants(out):
    """A model of hidden size 256 whose matrices are blocks of any codes: Q4_K, with Q6_K, Q5_K and Q8_0 in
    between as mixtures have them; the embedding, which is the head too, is Q6_K."""
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256,
              "head_dim": 32, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
              "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
              "tie_word_embeddings": True}
    rng, kinds = np.random.default_rng(4), gguf.GGMLQuantizationType
    mixed = {"blk.0.attn_v": kinds.Q6_K, "blk.0.ffn_down": kinds.Q6_K, "blk.1.attn_output": kinds.Q8_0,
             "blk.1.ffn_gate": kinds.Q5_K, "blk.1.ffn_up": kinds.Q5_K, "token_embd": kinds.Q6_K}
    torch_config = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(torch_config, dtype=torch.float32).eval()
    w, decoded = configured(config, out), {}
    for name, weight in sorted(model.state_dict().items()):
        if name == "lm_head.weight":
            continue
        to = renamed(name.removesuffix(".weight"))
        if weight.ndim == 1:
            values = rng.uniform(0.8, 1.2, weight.shape).astype(np.float32)
            w.add_tensor(f"{to}.weight", values)
            decoded[name] = torch.from_numpy(values)
            continue
        kind = mixed.get(to, kinds.Q4_K)
        packed = plausible(kind, weight.shape, rng)
        w.add_tensor(f"{to}.weight", packed, raw_dtype=kind)
        decoded[name] = torch.from_numpy(dequantize(packed, kind).astype(np.float32).copy())
    finish(w)
    missing = model.load_state_dict(decoded, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys, missing
    model.tie_weights()
    ids = rng.integers(0, 256, 33)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0].float().numpy()
    save_file({"ids": ids, "logits": logits}, out.with_suffix(".expected.safetensors"))


def record(path):
    """Blocks of any bytes, with finite scales of both signs, and what the package decodes them to."""
    rng, all = np.random.default_rng(21), {}
    kinds = gguf.GGMLQuantizationType
    for name, kind, size, places, count in [
        ("q4_0", kinds.Q4_0, 18, [0], 256), ("q8_0", kinds.Q8_0, 34, [0], 256),
        ("q6_k", kinds.Q6_K, 210, [208], 64), ("q4_k", kinds.Q4_K, 144, [0, 2], 64), ("q5_k", kinds.Q5_K, 176, [0, 2], 64)
    ]:
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
        for place in places:
            signs = rng.integers(0, 2, count).astype(np.uint16) << 15
            scales = rng.integers(0, 0x7C00, count).astype(np.uint16) | signs
            first = 6 if place == 2 else 0
            scales[first:first + 6] = [0, 0x8000, 1, 0x8001, 0x3FF, 0x7BFF]
            blocks[:, place:place + 2] = scales.view(np.uint8).reshape(-1, 2)
        all |= {f"{name}.blocks": blocks, f"{name}.dequant": dequantize(blocks, kind).astype(np.float32)}
    save_file(all, path)


def products(path):
    """`CASE.{x, ENCODING.blocks, ENCODING.y}`: sums of exact f64 products with what the package decodes."""
    rng, file, kinds = np.random.default_rng(8), {}, gguf.GGMLQuantizationType
    for kind in [kinds.Q4_K, kinds.Q5_K, kinds.Q6_K, kinds.Q8_0]:
        name = kind.name.lower()
        for m, n, k in [(1, 48, 256), (5, 24, 512), (33, 16, 256)]:
            blocks, x = plausible(kind, (n, k), rng), rng.standard_normal((m, k)).astype(np.float32)
            y = x.astype(np.float64) @ dequantize(blocks, kind).astype(np.float64).T
            case = f"{name}_m{m}n{n}k{k}"
            file |= {f"{case}.x": x, f"{case}.{name}.blocks": blocks, f"{case}.{name}.y": y}
    save_file(file, path)


record(pathlib.Path("gguf_integers.safetensors"))
products(pathlib.Path("ggml_products.safetensors"))
quantised(TINY / "q4_0.gguf")
k_quants(pathlib.Path("k_quants.gguf"))
write("mxfp4_ct", TINY / "mxfp4.gguf")
write("nvfp4_modelopt", TINY / "nvfp4.gguf")
