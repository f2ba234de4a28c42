"""Records int4 as GPTQ and AWQ pack it: checkpoints that AutoRound's packers wrote, with the logits of
transformers on the weights that its readers decode. Run in this folder:

    python3 int4_words.py        # torch 2.11.0, auto-round 0.16.1, transformers 5.23.0

Scales are widened to f32 before weights are decoded, which is exact; those tools decode in 16 bits.
"""
import json
import pathlib
import shutil

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM


def grid(weight, group, symmetric):
    """f16 scales and zero points `[n, groups]`, no zero point 0, which GPTQ's first form cannot store."""
    groups = weight.unflatten(-1, (-1, group))
    if symmetric:
        scale = groups.abs().amax(-1) / 7.5
        return scale.half().float(), torch.full_like(scale, 8.0)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    return scale, (-low / scale).round().clamp(1, 15)


def linear(weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return layer


def gptq(weight, group, symmetric, version):
    n, k = weight.shape
    scale, zero = grid(weight, group, symmetric)
    layer = QuantLinear(4, group, k, n, False)
    layer.pack(linear(weight), scale, zero)
    layer.scales = layer.scales.float()
    back = layer(torch.eye(k)).T.contiguous()
    zeros = layer.qzeros
    if version == 2:
        # As GPTQModel turns the one into the other; nothing overflows, for no zero point is 16.
        zeros = zeros + 0x11111111
    index = (torch.arange(k) // group).to(torch.int32)
    return {"qweight": layer.qweight, "qzeros": zeros, "scales": layer.scales.half(), "g_idx": index}, back


def awq(weight, group):
    scale, zero = grid(weight, group, False)
    layer = WQLinear_GEMM.from_linear(linear(weight), 4, group, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
    back = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group).T.contiguous()
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}, back


def checkpoint(source, out, packed, quantization):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    file, decoded = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            state, decoded[name] = packed(tensor.float())
            file |= {name.removesuffix("weight") + part: value.contiguous() for part, value in state.items()}
        else:
            file[name] = decoded[name] = tensor.half()
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


tiny = pathlib.Path("qwen3_tiny_a")
both = {"bits": 4, "desc_act": False, "damp_percent": 0.1, "true_sequential": True, "lm_head": False}
checkpoint(tiny, tiny / "gptq", lambda w: gptq(w, 32, True, 1), {**both, "quant_method": "gptq", "group_size": 32, "sym": True})
checkpoint(tiny, tiny / "gptq_v2", lambda w: gptq(w, 64, False, 2), {
    **both, "quant_method": "gptq", "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2",
    "meta": {"quantizer": ["gptqmodel:7.7.0"]}})
checkpoint(tiny, tiny / "awq", lambda w: awq(w, 32), {
    "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True, "backend": "autoawq",
    "modules_to_not_convert": None})
checkpoint(tiny, tiny / "auto_round", lambda w: gptq(w, 64, False, 1), {
    "quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "data_type": "int", "iters": 200,
    "packing_format": "auto_round:auto_gptq", "autoround_version": "0.16.1", "block_name_to_quantize": "model.layers"})
