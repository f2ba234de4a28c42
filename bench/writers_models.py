"""Peers that quantise a whole model, as their users call them: what each writes and decodes that to in f32.

bench/writers_peers.py runs them, each in the environment that has its package.
"""

import json
import sys

from writers_dense import on_weights, packed, save


def each(folder, files):
    """Writes every file that can be written: some are better than none."""
    for name, write in files.items():
        try:
            write(folder / name)
        except Exception as error:
            print(f"{name}: {error!r}", file=sys.stderr)


def source(folder, **kwargs):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "dense", **{"dtype": "auto", **kwargs})


def tokens():
    """A few prompts of random ids, for scales of inputs."""
    import torch

    torch.manual_seed(3)
    return [torch.randint(3, 400, (1, 64)) for _ in range(4)]


def make_modelopt(folder):
    """NVFP4 with inputs and without, and FP8 attention beside an NVFP4 MLP, which is `MIXED_PRECISION`."""
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    mixed = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    of_fp8 = {"num_bits": (4, 3), "axis": None}
    for side in ["weight_quantizer", "input_quantizer"]:
        mixed["quant_cfg"].append({"quantizer_name": f"*self_attn*{side}", "cfg": of_fp8})

    def write(config):
        def one(path):
            model = source(folder)
            mtq.quantize(model, config, lambda model: [model(ids) for ids in tokens()])
            export_hf_checkpoint(model, export_dir=path)

        return one

    each(
        folder,
        {
            "modelopt-nvfp4": write(mtq.NVFP4_DEFAULT_CFG),
            "modelopt-w4a16": write(mtq.W4A16_NVFP4_CFG),
            "modelopt-mixed": write(mixed),
        },
    )


def load_modelopt(path, ids):
    import torch
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file

    file, out = load_file(path / "model.safetensors"), {}
    for name in [n.removesuffix(".weight_scale") for n in file if n.endswith(".weight_scale")]:
        codes, scale = file[f"{name}.weight"], file[f"{name}.weight_scale"]
        if codes.dtype == torch.uint8:
            shape = (codes.shape[0], 2 * codes.shape[1])
            tensor = NVFP4QTensor(shape, torch.float32, codes)
            scales = {"scale": scale, "double_scale": file[f"{name}.weight_scale_2"]}
            weight = tensor.dequantize(dtype=torch.float32, block_sizes={-1: 16}, **scales)
        else:
            tensor = FP8QTensor(codes.shape, torch.float32, codes)
            weight = tensor.dequantize(dtype=torch.float32, scale=scale)
        out[f"{name}.weight"] = weight.contiguous()
    return {**out, "logits": on_weights(path, file, out, ids)}


def make_llm_compressor(folder):
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    def write(scheme):
        def one(path):
            model = source(folder)
            recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
            oneshot(model=model, recipe=recipe)
            model.save_pretrained(path, save_compressed=True)

        return one

    schemes = ["NVFP4A16", "MXFP4A16", "W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "FP8_BLOCK"]
    each(folder, {f"llmc-{scheme.lower().replace('_', '-')}": write(scheme) for scheme in schemes})


def make_transformers(folder):
    """bitsandbytes and torchao through transformers, and its own FP8."""
    import torch
    from torchao.prototype.mx_formats.inference_workflow import NVFP4WeightOnlyConfig
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup
    from transformers import BitsAndBytesConfig, TorchAoConfig

    def write(config, **more):
        def one(path):
            model = source(folder, quantization_config=config, device_map="cpu", **more)
            model.save_pretrained(path)

        return one

    def nf4(double):
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double
        )

    nvfp4 = lambda two_levels: NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=two_levels)
    int4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    each(
        folder,
        {
            "bnb-nf4": write(nf4(False)),
            "bnb-nf4-dq": write(nf4(True)),
            "torchao-nvfp4": write(TorchAoConfig(nvfp4(True)), dtype=torch.bfloat16),
            "torchao-nvfp4-one-level": write(TorchAoConfig(nvfp4(False)), dtype=torch.bfloat16),
            "torchao-int4": write(TorchAoConfig(int4)),
            "transformers-fp8": lambda path: fine_grained(folder / "dense", path),
        },
    )


class FineGrained:
    """What transformers' operations on FP8 ask of its quantiser, which itself wants a GPU."""

    def __init__(self):
        from transformers import FineGrainedFP8Config

        self.quantization_config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"])


def fine_grained(dense, path):
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    quantizer = FineGrained()
    pack = lambda weight: {
        name.removeprefix("l."): value
        for name, value in Fp8Quantize(quantizer).convert({"l.weight": weight}).items()
    }
    save(path, dense, packed(dense, pack), quantizer.quantization_config.to_dict())


def load_transformers(path, ids):
    """Of FP8."""
    from safetensors.torch import load_file
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    file, out = load_file(path / "model.safetensors"), {}
    for name in [n.removesuffix("_scale_inv") for n in file if n.endswith(".weight_scale_inv")]:
        stored = {"weight": file[name], "weight_scale_inv": file[f"{name}_scale_inv"]}
        out[name] = Fp8Dequantize(FineGrained()).convert(stored)["weight"].float()
    return {**out, "logits": on_weights(path, file, out, ids)}


def load_bitsandbytes(path, ids):
    import torch
    from bitsandbytes.functional import QuantState, dequantize_4bit
    from safetensors.torch import load_file

    file, out = load_file(path / "model.safetensors"), {}
    for name in [n.removesuffix(".absmax") for n in file if n.endswith(".weight.absmax")]:
        parts = {n: v for n, v in file.items() if n.startswith(f"{name}.")}
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        state.dtype = torch.float32
        out[name] = dequantize_4bit(file[name], state).contiguous()
    return {**out, "logits": on_weights(path, file, out, ids)}


def load_torchao(path, ids):
    import torch
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    with safe_open(path / "model.safetensors", framework="pt") as file:
        stored, said = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    tensors, _ = unflatten_tensor_state_dict(stored, said)
    plain = {n: v for n, v in tensors.items() if type(v) is torch.Tensor}
    out = {n: v.dequantize(torch.float32).contiguous() for n, v in tensors.items() if n not in plain}
    return {**out, "logits": on_weights(path, plain, out, ids)}
