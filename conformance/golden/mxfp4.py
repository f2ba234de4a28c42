"""Records MXFP4 as compressed-tensors writes and reads it: products, and a checkpoint with the logits of
transformers on its decoded weights. Run in this folder:

    python3 mxfp4.py        # torch 2.11.0, compressed-tensors 0.20.0, transformers 5.23.0

Products are sums of exact f64 products, `CASE.{x, w.codes, w.scale, w_dequant, y}`.
"""
import json
import pathlib
import shutil

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SCHEME: QuantizationScheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
FORMAT = "mxfp4-pack-quantized"


def packed(weight):
    """Codes and scales of a weight, and the weight that they decode to."""
    groups = weight.unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME.weights)
    state = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, SCHEME)
    back = MXFP4PackedCompressor.decompress(dict(state), SCHEME)["weight"]
    return state["weight_packed"], state["weight_scale"], back


def products():
    torch.manual_seed(4)
    file = {}
    for m, n, k in [(1, 64, 64), (5, 96, 160), (33, 48, 224)]:
        # Rows up to 2^16 apart, as no row of a trained weight is.
        weight = torch.randn(n, k) * 2.0 ** torch.randint(-12, 5, (n, 1))
        codes, scales, back = packed(weight.bfloat16())
        x = torch.randn(m, k)
        name = f"linear_m{m}n{n}k{k}"
        file |= {f"{name}.x": x, f"{name}.w.codes": codes, f"{name}.w.scale": scales, f"{name}.w_dequant": back.float()}
        file[f"{name}.y"] = x.double() @ back.double().T
    save_file(file, "mxfp4_products.safetensors", {"title": "MXFP4 linear references, float64 accumulation"})


def checkpoint(source, out):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    file, decoded = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            codes, scales, decoded[name] = packed(tensor.bfloat16())
            layer = name.removesuffix("weight")
            file |= {f"{layer}weight_packed": codes, f"{layer}weight_scale": scales}
        else:
            file[name] = decoded[name] = tensor.bfloat16()
    save_file(file, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    weights = json.loads(SCHEME.weights.model_dump_json())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": FORMAT, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "format": FORMAT, "weights": weights,
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
checkpoint(pathlib.Path("qwen3_tiny_a"), pathlib.Path("qwen3_tiny_a/mxfp4_ct"))
