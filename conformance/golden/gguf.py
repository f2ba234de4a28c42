"""Writes the weights of two checkpoints of qwen3_tiny_a as GGUF with the gguf package: the same codes and scales,
in blocks. Run in this folder:

    python3 gguf.py         # gguf 0.19.0, numpy 2
"""
import json
import pathlib
import sys

sys.path.remove(str(pathlib.Path(__file__).resolve().parent))  # this file has the package's name
import gguf
import numpy as np

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


def write(folder, out):
    config = json.loads((TINY / folder / "config.json").read_text())
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
            kind, data = file[name]
            floats = data.view(np.float32) if kind == "F32" else (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            w.add_tensor(f"{renamed(layer)}.weight", floats)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


write("mxfp4_ct", TINY / "mxfp4.gguf")
write("nvfp4_modelopt", TINY / "nvfp4.gguf")
