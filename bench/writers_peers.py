"""What bench/writers.py has peers do, each in the environment that has its package:

writers_peers.py PEER make FOLDER [SHAPE] | load FOLDER IDS MODEL... | versions OUT
"""

import importlib.metadata
import json
import os
import pathlib
import sys

import writers_mlx
import writers_models
from writers_dense import dense, on_weights, packed, plain_logits, save

# The packages that a peer's row is about.
VERSIONS = {
    "formats": [
        "auto-round",
        "bitsandbytes",
        "compressed-tensors",
        "gguf",
        "gptqmodel",
        "torch",
        "torchao",
        "transformers",
    ],
    "llama.cpp": [],
    "modelopt": ["nvidia-modelopt"],
    "llm-compressor": ["llmcompressor"],
    "mlx": ["mlx", "mlx-lm"],
}


def compressed(source, folder):
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def one(name, form, args):
        args = QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.load_from_registry(form)

        def pack(weight):
            weight = weight.bfloat16()
            size = args.group_size if (args.group_size or -1) > 0 else weight.shape[1]
            groups = weight.unflatten(-1, (-1, size))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            state = {"weight": weight, "weight_scale": scale}
            if not args.symmetric:
                state["weight_zero_point"] = zero.to(torch.int8)
            return compressor.compress(state, scheme)

        weights = json.loads(args.model_dump_json())
        group = {
            "targets": ["Linear"],
            "format": form,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
        save(
            folder / name,
            source,
            packed(source, pack),
            {
                "quant_method": "compressed-tensors",
                "format": form,
                "quantization_status": "compressed",
                "ignore": ["lm_head"],
                "config_groups": {"group_0": group},
            },
        )

    ints = {"num_bits": 4, "type": "int"}
    for name, args in [
        ("ct-sym-128", {"symmetric": True, "strategy": "group", "group_size": 128}),
        ("ct-sym-32", {"symmetric": True, "strategy": "group", "group_size": 32}),
        ("ct-asym-32", {"symmetric": False, "strategy": "group", "group_size": 32}),
        ("ct-channel", {"symmetric": True, "strategy": "channel"}),
    ]:
        one(name, "pack-quantized", {**ints, **args})
    one(
        "ct-mxfp4",
        "mxfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": torch.uint8,
        },
    )
    one("ct-fp8-channel", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"})


def auto_round(source, folder):
    import torch
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    def grid(weight, group, symmetric):
        """Scales in f16 and zero points `[n, groups]`, of 1 to 15."""
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

    def gptq(group, symmetric):
        def pack(weight):
            n, k = weight.shape
            layer = QuantLinear(4, group, k, n, False)
            layer.pack(linear(weight), *grid(weight, group, symmetric))
            index = (torch.arange(k) // group).to(torch.int32)
            return {
                "qweight": layer.qweight,
                "qzeros": layer.qzeros,
                "scales": layer.scales.half(),
                "g_idx": index,
            }

        return pack

    def awq(weight):
        scale, zero = grid(weight, 128, False)
        layer = WQLinear_GEMM.from_linear(
            linear(weight), 4, 128, scales=scale.T.contiguous(), zeros=zero.T.contiguous()
        )
        return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}

    both = {
        "quant_method": "gptq",
        "bits": 4,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    save(
        folder / "gptq-sym-128",
        source,
        packed(source, gptq(128, True)),
        {**both, "group_size": 128, "sym": True},
    )
    save(
        folder / "gptq-asym-64",
        source,
        packed(source, gptq(64, False)),
        {**both, "group_size": 64, "sym": False},
    )
    save(
        folder / "awq-128",
        source,
        packed(source, awq),
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["lm_head"],
        },
    )


BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    once = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in once:
        return once[name]
    _, _, number, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{number}.{BLOCK[module]}.weight"


def gguf_files(source, folder):
    import gguf
    import numpy as np
    from gguf.quants import quantize
    from safetensors.numpy import load_file

    rng = np.random.default_rng(5)

    def nvfp4(tensor):
        """Random blocks, which that package decodes and does not make: four scales of 0.5 to 1.9, 64 codes."""
        blocks = rng.integers(0, 256, (tensor.size // 64, 36), dtype=np.uint8)
        blocks[:, :4] = 0x30 | blocks[:, :4] & 15
        return blocks.reshape(tensor.shape[0], -1)

    c = json.loads((source / "config.json").read_text())
    words = json.loads((source / "tokenizer.json").read_text())
    vocab = sorted(words["model"]["vocab"], key=words["model"]["vocab"].get)
    special = {t["id"] for t in words["added_tokens"]}
    kinds = gguf.GGMLQuantizationType
    for kind in [kinds.MXFP4, kinds.NVFP4, kinds.Q4_0, kinds.Q8_0]:
        w = gguf.GGUFWriter(folder / f"gguf-{kind.name.lower()}.gguf", "qwen3")
        w.add_context_length(c["max_position_embeddings"])
        w.add_embedding_length(c["hidden_size"])
        w.add_block_count(c["num_hidden_layers"])
        w.add_feed_forward_length(c["intermediate_size"])
        w.add_head_count(c["num_attention_heads"])
        w.add_head_count_kv(c["num_key_value_heads"])
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
        w.add_rope_freq_base(10000.0)
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-2")
        rows = c["vocab_size"]
        w.add_token_list(vocab + [f"[PAD{i}]" for i in range(len(vocab), rows)])
        types = gguf.TokenType
        w.add_token_types(
            [types.CONTROL if i in special else types.NORMAL for i in range(len(vocab))]
            + [types.UNUSED] * (rows - len(vocab))
        )
        w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in words["model"]["merges"]])
        w.add_bos_token_id(0)
        w.add_eos_token_id(2)
        w.add_add_bos_token(False)
        for name, tensor in sorted(load_file(source / "model.safetensors").items()):
            to, tensor = gguf_name(name), tensor.astype(np.float32)
            if name.endswith("_proj.weight"):
                w.add_tensor(
                    to, nvfp4(tensor) if kind == kinds.NVFP4 else quantize(tensor, kind), raw_dtype=kind
                )
                if kind == kinds.NVFP4:
                    w.add_tensor(to.replace(".weight", ".scale"), np.array([0.03125 * 1.25], np.float32))
            else:
                w.add_tensor(to, tensor)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()


def make(peer, folder, shape="small"):
    if peer in MAKE:
        return MAKE[peer](folder)
    dense(folder / "dense", shape)
    for maker in [compressed, auto_round, gguf_files]:
        maker(folder / "dense", folder)


def gptqmodel():
    """The package, whose pools of threads want more processors than small machines have."""
    os.cpu_count = lambda: 4
    import gptqmodel

    return gptqmodel


def make_gptqmodel(folder):
    import torch

    GPTQModel, QuantizeConfig = gptqmodel().GPTQModel, gptqmodel().QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    torch.manual_seed(3)
    some = [
        {"input_ids": torch.randint(3, 400, (1, 64)), "attention_mask": torch.ones(1, 64, dtype=torch.long)}
        for _ in range(16)
    ]
    for name, method, form, symmetric in [
        ("gptqmodel-gptq", METHOD.GPTQ, FORMAT.GPTQ, True),
        ("gptqmodel-awq", METHOD.AWQ, FORMAT.GEMM, False),
    ]:
        config = QuantizeConfig(
            bits=4, group_size=128, desc_act=False, sym=symmetric, quant_method=method, format=form
        )
        try:
            model = GPTQModel.load(str(folder / "dense"), config, device="cpu")
            model.quantize(some, batch_size=1)
            model.save(str(folder / name))
        except Exception as error:  # one of the two is better than none
            print(f"{name}: {error!r}", file=sys.stderr)


def load_compressed(path, ids):
    import torch
    from transformers import AutoModelForCausalLM

    found, weights = decompressed(path, ids)
    if weights.symmetric:
        # The whole folder through transformers, which reads no zero points of this layout, its own neither.
        # It rounds to the type it computes in, which is bf16 for MXFP4.
        dtype = torch.bfloat16 if weights.type == "float" else torch.float32
        found["whole"] = plain_logits(AutoModelForCausalLM.from_pretrained(path, dtype=dtype), ids)
    return found


def decompressed(path, ids):
    """Decoded weights with their logits, and what the weights are said to be."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file

    said = json.loads((path / "config.json").read_text())["quantization_config"]
    group = QuantizationScheme.model_validate(said["config_groups"]["group_0"])
    compressor = BaseCompressor.load_from_registry(said["format"])
    file, out = load_file(path / "model.safetensors"), {}
    codes = ".weight_packed" if any(n.endswith(".weight_packed") for n in file) else "_proj.weight"
    for name in [n.removesuffix(".weight_packed").removesuffix(".weight") for n in file if n.endswith(codes)]:
        state = {n.removeprefix(f"{name}."): v for n, v in file.items() if n.startswith(f"{name}.")}
        if state["weight_scale"].is_floating_point():
            state["weight_scale"] = state["weight_scale"].float()
        if "weight_global_scale" in state:
            out[f"{name}.weight"] = fp4(state, group.weights)
        else:
            out[f"{name}.weight"] = compressor.decompress(state, group)["weight"].float()
    return {**out, "logits": on_weights(path, file, out, ids)}, group.weights


def fp4(state, args):
    """What the compressor of NVFP4 does in bf16, in f32."""
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    n, half = state["weight_packed"].shape
    codes = unpack_fp4_from_uint8(state["weight_packed"], n, 2 * half, dtype=torch.float32)
    scales = {"scale": state["weight_scale"], "global_scale": state["weight_global_scale"]}
    return dequantize(x_q=codes, **scales, args=args, dtype=torch.float32)


def load_auto_round(path, ids):
    import torch
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    from safetensors.torch import load_file

    said = json.loads((path / "config.json").read_text())["quantization_config"]
    file, out = load_file(path / "model.safetensors"), {}
    for name in [n.removesuffix(".qweight") for n in file if n.endswith(".qweight")]:
        part = lambda of: file[f"{name}.{of}"]
        scales = part("scales").float()
        size = said["group_size"]
        if said["quant_method"] == "awq":
            k = part("qweight").shape[0]
            size = k if size == -1 else size
            weight = dequantize_gemm(part("qweight"), part("qzeros"), scales, 4, size).T
        else:
            k, n = part("qweight").shape[0] * 8, part("qweight").shape[1]
            layer = QuantLinear(4, k if size == -1 else size, k, n, False)
            layer.qweight, layer.qzeros, layer.scales = part("qweight"), part("qzeros"), scales
            weight = layer(torch.eye(k)).T
        out[f"{name}.weight"] = weight.contiguous()
    return {**out, "logits": on_weights(path, file, out, ids)}


def load_gptqmodel(path, ids):
    package = gptqmodel()
    model = package.GPTQModel.load(str(path), backend=package.BACKEND.TORCH, device="cpu")
    return {"logits": plain_logits(model.model.eval(), ids)}


def load_gguf(path, ids):
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import load_file

    reader = GGUFReader(path)
    names, out = {v: k for k, v in BLOCK.items()}, {}
    scales = {t.name.removesuffix(".scale"): t.data[0] for t in reader.tensors if t.name.endswith(".scale")}
    for t in reader.tensors:
        if (
            t.name.startswith("blk.")
            and ("attn_" in t.name or "ffn_" in t.name)
            and "norm" not in t.name
            and t.name.endswith(".weight")
        ):
            _, number, module, _ = t.name.split(".")
            values = dequantize(t.data, t.tensor_type).astype(np.float32)
            values = values * np.float32(scales.get(t.name.removesuffix(".weight"), 1))
            out[f"model.layers.{number}.{names[module]}.weight"] = torch.from_numpy(values.copy())
    # What is not in blocks is that of the model that all were made from.
    source = path.parent / "dense"
    return {**out, "logits": on_weights(source, load_file(source / "model.safetensors"), out, ids)}


def load_llama(path, ids):
    import numpy as np
    from llama_cpp import Llama

    llama = Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    llama.eval(ids)
    return {"logits": np.array(llama.scores[: len(ids)], dtype=np.float32)}


MAKE = {
    "gptqmodel": make_gptqmodel,
    "modelopt": writers_models.make_modelopt,
    "llm-compressor": writers_models.make_llm_compressor,
    "transformers": writers_models.make_transformers,
    "mlx": writers_mlx.make,
}
LOAD = {
    "compressed-tensors": load_compressed,
    "auto-round": load_auto_round,
    "gptqmodel": load_gptqmodel,
    "gguf": load_gguf,
    "llama.cpp": load_llama,
    "modelopt": writers_models.load_modelopt,
    "llm-compressor": lambda path, ids: decompressed(path, ids)[0],
    "transformers": writers_models.load_transformers,
    "bitsandbytes": writers_models.load_bitsandbytes,
    "torchao": writers_models.load_torchao,
    "mlx": writers_mlx.load,
}


def keep(found, out):
    """As safetensors; one of the environments has numpy alone."""
    arrays = {
        name: value if hasattr(value, "nbytes") and not hasattr(value, "numpy") else value.numpy()
        for name, value in found.items()
    }
    header, at = {}, 0
    for name, value in arrays.items():
        assert value.dtype.name == "float32", (name, value.dtype)
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    out.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in arrays.values())
    )


def main():
    peer, verb, *rest = sys.argv[1:]
    if verb == "make":
        make(peer, pathlib.Path(rest[0]), *rest[1:])
    elif verb == "load":
        folder, ids, errors = pathlib.Path(rest[0]), json.loads(rest[1]), {}
        for model in map(pathlib.Path, rest[2:]):
            try:
                keep(LOAD[peer](model, ids), folder / f"{peer}-{model.name}.safetensors")
            except Exception as error:  # the others are loaded all the same
                errors[model.name] = repr(error)[:300]
        (folder / f"{peer}-errors.json").write_text(json.dumps(errors))
    else:
        known = {}
        for name in VERSIONS[peer]:
            try:
                known[name.replace("-", "_")] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                pass
        if peer == "llama.cpp":
            import llama_cpp

            known = {"llama_cpp_python": llama_cpp.__version__}
        pathlib.Path(rest[0]).write_text(json.dumps(known))


main()
