"""Records MLX's quantised weights as mlx writes and decodes them: products, and checkpoints that mlx-lm wrote
with its own logits on decoded weights in f32. Run in this folder:

    python3 mlx_modes.py         # mlx 0.32.4, mlx-lm 0.32.2, on a CPU

Products are sums of exact f64 products, `CASE.{x, ENCODING.codes, ENCODING.scale, ENCODING.bias, y}`.
Weights are decoded with scales and biases widened to f32; mlx rounds to their type otherwise.
"""
import json
import pathlib
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

mx.set_default_device(mx.cpu)


def widen(array):
    return array.astype(mx.float32) if array.dtype in (mx.bfloat16, mx.float16) else array


def decoded(layer):
    """A layer's weight in f32, by mlx."""
    biases = layer.get("biases")
    biases = biases if biases is None else widen(biases)
    said = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    scales = widen(layer.scales)
    return mx.dequantize(layer.weight, scales, biases, **said, dtype=mx.float32)


def products():
    rng = np.random.default_rng(13)
    file = {}
    for label, group, dtype in [
        ("int4-affine.64.bf16", 64, mx.bfloat16),
        ("int4-affine.32.f16", 32, mx.float16),
    ]:
        for m, n, k in [(1, 64, 128), (5, 48, 384), (33, 24, 256)]:
            # Rows up to 2^10 apart, off zero.
            weight = (rng.standard_normal((n, k)) + 0.7) * 2.0 ** rng.integers(-9, 2, (n, 1))
            codes, scale, bias = mx.quantize(mx.array(weight.astype(np.float32)).astype(dtype), group, 4)
            back = mx.dequantize(codes, widen(scale), widen(bias), group, 4)
            assert back.dtype == mx.float32 and mx.all(scale.astype(mx.float32) != 0)
            x = rng.standard_normal((m, k)).astype(np.float32)
            y = x.astype(np.float64) @ np.array(back).astype(np.float64).T
            name, under = f"{label.replace('.', '_')}_m{m}n{n}k{k}", f"{label}."
            file |= {f"{name}.x": x, f"{name}.{under}y": y}
            file |= {f"{name}.{under}codes": np.array(codes).view(np.uint8)}
            file |= {f"{name}.{under}scale": scale, f"{name}.{under}bias": bias}
    title = "Linear references of MLX's affine mode, float64 accumulation"
    write(file, "mlx_products.safetensors", {"title": title})


def write(tensors, path, metadata):
    """As safetensors, f64 too, which mlx has none of."""
    names = {"float64": "F64", "float32": "F32", "uint8": "U8", "int64": "I64"}
    header, data = {"__metadata__": metadata}, b""
    for name, value in tensors.items():
        if isinstance(value, mx.array):
            kind = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32"}[value.dtype]
            raw = np.array(value.view(mx.uint16) if value.dtype != mx.float32 else value)
        else:
            kind, raw = names[value.dtype.name], value
        raw = np.ascontiguousarray(raw)
        offsets = [len(data), len(data) + raw.nbytes]
        header[name] = {"dtype": kind, "shape": list(raw.shape), "data_offsets": offsets}
        data += raw.tobytes()
    text = json.dumps(header).encode()
    pathlib.Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


def checkpoint(source, out, group, mode):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    model, config = load_model(source)
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config, group, 4, mode=mode)
    save_model(out, model)
    save_config(config, out / "config.json")
    for extra in ["README.md"]:
        (out / extra).unlink(missing_ok=True)
    # Read again as mlx-lm reads it, and decoded.
    model, _ = load_model(out)
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            weight = decoded(layer)
            if isinstance(layer, nn.QuantizedEmbedding):
                dense = nn.Embedding(*weight.shape)
            else:
                dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            dense.weight = weight
            parent = model
            *path, last = name.split(".")
            for part in path:
                parent = parent[int(part)] if part.isdigit() else getattr(parent, part)
            setattr(parent, last, dense)
    model.update(tree_map(widen, model.parameters()))
    assert all(value.dtype == mx.float32 for _, value in tree_flatten(model.parameters()))
    ids = mx.load(str(source / "expected.safetensors"))["inputs.ids.len33"].astype(mx.int64)
    logits = model(ids[None])[0]
    expected = {"ids": np.array(ids), "logits": np.array(logits)}
    write(expected, out / "expected.safetensors", {"title": "mlx-lm in f32"})


if __name__ == "__main__":
    products()
    tiny = pathlib.Path("qwen3_tiny_a")
    for group, mode in [(64, "affine"), (32, "mxfp4"), (16, "nvfp4")]:
        checkpoint(tiny, tiny / f"mlx_{mode}", group, mode)
