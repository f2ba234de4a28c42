"""Records int4 as compressed-tensors writes and reads it: products, and checkpoints with the logits of
transformers on their decoded weights. Run in this folder:

    python3 int4.py        # torch 2.11.0, compressed-tensors 0.20.0, transformers 5.23.0

Products are sums of exact f64 products, `CASE.{x, ENCODING.codes, ENCODING.scale, ENCODING.zero, y}`; zero
points are a byte each there. Weights are decoded with the scales widened to f32, which is exact; with scales
of 16 bits that tool rounds to 16 bits.
"""
import json
import pathlib
import shutil

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Packed
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

FORMAT = "pack-quantized"


def scheme(group, symmetric):
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **strategy)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def packed(weight, of, decoded_as=torch.float32):
    """What is stored for a weight, and the weight that it decodes to."""
    size = of.weights.group_size if (of.weights.group_size or -1) > 0 else weight.shape[1]
    groups = weight.unflatten(-1, (-1, size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), of.weights)
    state = {"weight": weight, "weight_scale": scale}
    if not of.weights.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    state = Packed.compress(state, of)
    wide = {**state, "weight_scale": state["weight_scale"].to(decoded_as)}
    return state, Packed.decompress(wide, of)["weight"]


def products():
    torch.manual_seed(6)
    file = {}
    for label, group, symmetric, dtype in [
        ("int4.128.bf16", 128, True, torch.bfloat16),
        ("int4.32.f16", 32, True, torch.float16),
        ("int4-asym.128.f16", 128, False, torch.float16),
    ]:
        for m, n, k in [(1, 64, 128), (5, 48, 384), (33, 24, 256)]:
            # Rows up to 2^10 apart, off zero where there are zero points.
            weight = (torch.randn(n, k) + (0 if symmetric else 0.7)) * 2.0 ** torch.randint(-9, 2, (n, 1))
            of = scheme(group, symmetric)
            state, back = packed(weight.to(dtype), of)
            # The tool's own rounding to 16 bits, and nothing else, lies between.
            assert torch.equal(packed(weight.to(dtype), of, dtype)[1], back.to(dtype))
            x = torch.randn(m, k)
            name, under = f"{label.replace('.', '_')}_m{m}n{n}k{k}", f"{label}."
            file |= {f"{name}.x": x, f"{name}.{under}codes": state["weight_packed"].view(torch.uint8)}
            file[f"{name}.{under}scale"] = state["weight_scale"]
            if not symmetric:
                shape = torch.Size((n, k // group))
                zero = unpack_from_int32(state["weight_zero_point"], 4, shape, packed_dim=0)
                file[f"{name}.{under}zero"] = (zero + 8).to(torch.uint8).contiguous()
            file[f"{name}.{under}y"] = x.double() @ back.double().T
    save_file(file, "int4_products.safetensors", {"title": "int4 linear references, float64 accumulation"})


def checkpoint(source, out, of):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    file, decoded = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            state, decoded[name] = packed(tensor.bfloat16(), of)
            file |= {name.removesuffix("weight") + part: value.contiguous() for part, value in state.items()}
        else:
            file[name] = decoded[name] = tensor.bfloat16()
    save_file(file, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": FORMAT, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "format": FORMAT,
                                      "weights": json.loads(of.weights.model_dump_json()),
                                      "input_activations": None, "output_activations": None}},
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32).eval()
    missing = model.load_state_dict({k: v.float() for k, v in decoded.items()}, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys, missing
    model.tie_weights()
    ids = load_file(source / "expected.safetensors")["inputs.ids.len33"]
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    save_file({"ids": ids, "logits": logits.float().contiguous()}, out / "expected.safetensors")


products()
tiny = pathlib.Path("qwen3_tiny_a")
checkpoint(tiny, tiny / "int4_ct", scheme(32, True))
checkpoint(tiny, tiny / "int4_asym_ct", scheme(64, False))
checkpoint(tiny, tiny / "int4_channel_ct", scheme(None, True))
