"""Records FP8 as compressed-tensors and transformers write and read it: products, and checkpoints with the logits
of transformers on their decoded weights. Run in this folder:

    python3 fp8.py         # torch 2.11.0, compressed-tensors 0.20.0, transformers 5.23.0

Products are sums of exact f64 products, `CASE.{x, ENCODING.codes, ENCODING.scale, ENCODING.y}`. Weights are decoded
with the scales widened to f32, which is exact for those of 16 bits; compressed-tensors rounds to 16 bits then.
"""
import json
import pathlib
import shutil

import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor as Float
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor as Fp4
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

FORMAT = "float-quantized"


def scheme(strategy):
    block = {"block_structure": [128, 128]} if strategy == "block" else {}
    weights = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, **block)
    return QuantizationScheme(targets=["Linear"], weights=weights, format=FORMAT)


def tiles(weight, strategy):
    """The largest and the least of every tile."""
    rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": (128, 128)}[strategy]
    pad = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
    grid = torch.nn.functional.pad(weight, pad).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return grid.amin((1, 3)), grid.amax((1, 3))


def packed(weight, strategy, scales=None, decoded_as=torch.float32):
    """What is stored for a weight, and the weight that it decodes to."""
    of = scheme(strategy)
    scale, _ = calculate_qparams(*tiles(weight, strategy), of.weights)
    scale = scale.to(scales or weight.dtype)
    if strategy == "tensor":
        scale = scale.reshape(1)
    state = Float.compress({"weight": weight, "weight_scale": scale}, of)
    wide = {**state, "weight_scale": state["weight_scale"].to(decoded_as)}
    return state, Float.decompress(wide, of)["weight"]


def products():
    torch.manual_seed(8)
    file = {}
    for label, strategy, dtype in [
        ("fp8.128x128.bf16", "block", torch.bfloat16),
        ("fp8.channel.bf16", "channel", torch.bfloat16),
        ("fp8.tensor.f32", "tensor", torch.float32),
    ]:
        for m, n, k in [(1, 64, 128), (5, 160, 384), (33, 144, 272)]:
            # Rows up to 2^10 apart, so that codes below the normal range are met.
            weight = torch.randn(n, k) * 2.0 ** torch.randint(-9, 2, (n, 1))
            state, back = packed(weight.to(dtype), strategy)
            assert state["weight"].dtype == torch.float8_e4m3fn
            # The tool's own rounding to 16 bits, and nothing else, lies between.
            assert torch.equal(packed(weight.to(dtype), strategy, decoded_as=dtype)[1], back.to(dtype))
            x = torch.randn(m, k)
            name, under = f"{label.replace('.', '_')}_m{m}n{n}k{k}", f"{label}."
            file |= {f"{name}.x": x, f"{name}.{under}codes": state["weight"].contiguous().view(torch.uint8)}
            file[f"{name}.{under}scale"] = state["weight_scale"].contiguous()
            file[f"{name}.{under}y"] = x.double() @ back.double().T
    save_file(file, "fp8_products.safetensors", {"title": "FP8 linear references, float64 accumulation"})


class Quantizer:
    quantization_config = FineGrainedFP8Config()


def fine_grained(weight):
    """As transformers quantises a weight whose extents its tiles divide, and as it decodes that."""
    state = Fp8Quantize(Quantizer).convert({"l.weight": weight})
    stored = {"weight": state["l.weight"], "weight_scale_inv": state["l.weight_scale_inv"]}
    decoded = Fp8Dequantize(Quantizer).convert(dict(stored))["weight"]
    return stored, decoded.float()


def fp4(weight):
    """NVFP4 as compressed-tensors writes it, decoded in f32."""
    weights = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16,
                               scale_dtype=torch.float8_e4m3fn)
    of = QuantizationScheme(targets=["Linear"], weights=weights, format="nvfp4-pack-quantized")
    weight = weight.float()
    top = generate_gparam(weight.amin(), weight.amax())
    grid = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(grid.amin(-1), grid.amax(-1), weights, global_scale=top)
    state = Fp4.compress({"weight": weight, "weight_scale": scale, "weight_global_scale": top.reshape(1)}, of)
    # What Fp4.decompress does, in f32 instead of bfloat16.
    wide = unpack_fp4_from_uint8(state["weight_packed"], *weight.shape, dtype=torch.float32)
    scale, top = state["weight_scale"].float(), state["weight_global_scale"]
    decoded = dequantize(x_q=wide, scale=scale, args=weights, global_scale=top, dtype=torch.float32)
    assert torch.equal(Fp4.decompress({**state}, of)["weight"].float(), decoded.bfloat16().float())
    return state, decoded, weights


def checkpoint(source, out, pack, quantization):
    """`pack`: of a layer's name and weight, what is stored and what it decodes to."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    file, decoded = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            state, decoded[name] = pack(name, tensor)
            file |= {name.removesuffix("weight") + part: value.contiguous() for part, value in state.items()}
        else:
            file[name] = decoded[name] = tensor.bfloat16()
    save_file(file, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32).eval()
    missing = model.load_state_dict({k: v.float() for k, v in decoded.items()}, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys, missing
    model.tie_weights()
    ids = load_file(source / "expected.safetensors")["inputs.ids.len33"]
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    save_file({"ids": ids, "logits": logits.float().contiguous()}, out / "expected.safetensors")


def group(targets, format, weights, inputs):
    return {"targets": targets, "format": format, "weights": json.loads(weights.model_dump_json()),
            "input_activations": inputs, "output_activations": None}


def declared(groups, format):
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {f"group_{i}": g for i, g in enumerate(groups)}}


products()
tiny = pathlib.Path("qwen3_tiny_a")
tokens = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
for strategy in ["channel", "tensor"]:
    checkpoint(tiny, tiny / f"fp8_{strategy}_ct", lambda _, w: packed(w.bfloat16(), strategy),
               declared([group(["Linear"], FORMAT, scheme(strategy).weights, tokens)], FORMAT))
# Attention in FP8, the rest in 4 bits: the first group that has a layer counts.
mixed = [group(["re:.*self_attn\\.(q|k|v|o)_proj$"], FORMAT, scheme("channel").weights, tokens),
         group(["Linear"], "nvfp4-pack-quantized", fp4(torch.randn(16, 16))[2], None)]
checkpoint(tiny, tiny / "mixed_ct", lambda name, w: packed(w.bfloat16(), "channel") if "attn" in name else fp4(w)[:2],
           declared(mixed, "mixed-precision"))


def small(weight):
    """Tiles of 128 by 128 that no extent of the tiny model fills: one for all of it, or as they are cut."""
    return packed(weight.float(), "block")


checkpoint(tiny, tiny / "fp8_blocks",
           lambda _, w: (lambda s, d: ({"weight": s["weight"], "weight_scale_inv": s["weight_scale"]}, d))(*small(w)),
           {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
# Transformers' own quantiser and decoder, where its tiles fit.
torch.manual_seed(9)
weight = torch.randn(256, 384) * 2.0 ** torch.randint(-9, 2, (256, 1))
stored, decoded = fine_grained(weight)
save_file({**{k: v.contiguous() for k, v in stored.items()}, "decoded": decoded.contiguous()}, "fp8_transformers.safetensors")
