"""What mlx-lm writes in each mode, and what mlx decodes that to in f32; its environment has no torch."""

import shutil


def make(folder):
    import mlx.core as mx
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    mx.set_default_device(mx.cpu)
    for name, group, mode, dtype in [
        ("mlx-affine-64", 64, "affine", mx.bfloat16),
        ("mlx-affine-128", 128, "affine", mx.float16),
        ("mlx-affine-32", 32, "affine", mx.float16),
        ("mlx-mxfp4", 32, "mxfp4", mx.bfloat16),
        ("mlx-nvfp4", 16, "nvfp4", mx.bfloat16),
    ]:
        model, config = load_model(folder / "dense")
        model.set_dtype(dtype)
        model, config = quantize_model(model, config, group, 4, mode=mode)
        save_model(folder / name, model)
        save_config(config, folder / name / "config.json")
        shutil.copy(folder / "dense" / "tokenizer.json", folder / name)


def load(path, ids):
    import mlx.core as mx
    import mlx.nn as nn
    import numpy as np
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(path)
    wide = lambda a: a.astype(mx.float32) if a.dtype in (mx.bfloat16, mx.float16) else a
    out, plain = {}, {}
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            biases = layer.get("biases")
            weight = mx.dequantize(
                layer.weight,
                wide(layer.scales),
                None if biases is None else wide(biases),
                group_size=layer.group_size,
                bits=layer.bits,
                mode=layer.mode,
                dtype=mx.float32,
            )
            if isinstance(layer, nn.QuantizedEmbedding):
                plain[name] = nn.Embedding(*weight.shape)
            else:
                plain[name] = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                out[f"{name}.weight"] = np.array(weight)
            plain[name].weight = weight
    for name, layer in plain.items():
        *way, last = name.split(".")
        parent = model
        for part in way:
            parent = parent[int(part)] if part.isdigit() else getattr(parent, part)
        setattr(parent, last, layer)
    model.update(tree_map(wide, model.parameters()))
    return {**out, "logits": np.array(model(mx.array([ids]))[0].astype(mx.float32))}
