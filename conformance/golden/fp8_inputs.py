"""Records inputs that compressed-tensors rounds to FP8, and logits of transformers on them. Run in this folder, after
fp8.py:

    python3 fp8_inputs.py  # torch 2.11.0, compressed-tensors 0.20.0, transformers 5.23.0

Weights are those of the checkpoints, decoded in f32; the input of each of the seven linears of a layer is quantised
and dequantised first: with a scale a token, with one for each 128 in features of it, with a stored one.
"""
import json
import pathlib

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

TINY = pathlib.Path("qwen3_tiny_a")
# Past 448 of it some inputs are cut.
STORED = 0.004


def rounded(x, strategy):
    if strategy == "block":
        parts = torch.split(x, 128, -1)
        return torch.cat([rounded(part, "token") for part in parts], -1)
    if strategy == "stored":
        args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=False)
        scale = torch.tensor([STORED])
    else:
        args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="token", dynamic=True)
        scale, _ = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), args)
    return fake_quantize(x, scale, torch.zeros_like(scale), args)


def logits(folder, strategy):
    """Of a checkpoint whose scales are one, one a row, or tiles that cover a whole matrix or are cut."""
    stored, decoded = load_file(folder / "model.safetensors"), {}
    for name, tensor in stored.items():
        if tensor.dtype != torch.float8_e4m3fn:
            if "_scale" not in name:
                decoded[name] = tensor.float()
            continue
        scale = stored.get(f"{name}_scale", stored.get(f"{name}_scale_inv")).float()
        rows, columns = tensor.shape
        if scale.ndim == 2 and scale.shape != (rows, 1):
            scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        decoded[name] = tensor.float() * scale
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY), dtype=torch.float32).eval()
    missing = model.load_state_dict(decoded, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys, missing
    model.tie_weights()
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, x: (rounded(x[0], strategy),))
    ids = load_file(TINY / "expected.safetensors")["inputs.ids.len33"]
    with torch.no_grad():
        return ids, model(ids[None]).logits[0].float().contiguous()


torch.manual_seed(12)
# Rows up to 2^40 apart, and values up to 2^20 apart in one, so that codes below the normal range are met.
x = torch.randn(24, 272) * 2.0 ** torch.randint(-20, 20, (24, 1)) * 2.0 ** torch.randint(-20, 1, (24, 272))
x[3] = 0
out = {"x": x}
for strategy in ["token", "block", "stored"]:
    out[f"{strategy}.values"] = rounded(x, strategy).contiguous()
for strategy, folder in ("token", "fp8_channel_ct"), ("block", "fp8_blocks"), ("stored", "fp8_tensor_ct"):
    out["ids"], out[f"{strategy}.logits"] = logits(TINY / folder, strategy)
save_file(out, TINY / "fp8_inputs.safetensors", {"title": "FP8 inputs", "stored": json.dumps(STORED)})
