"""The model that bench/writers_peers.py has peers pack, and logits of transformers on what they decode."""

import json


# Extents of a model: small ones, and those of the layers of a published one, of which there are two.
SHAPES = {
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64},
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "head_dim": 128,
    },
}


def dense(folder, shape):
    """A Qwen3 of random weights in f16, with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(17)
    config = Qwen3Config(
        vocab_size=512,
        **SHAPES[shape],
        num_hidden_layers=2,
        num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        rope_theta=10000.0,
    )
    model = Qwen3ForCausalLM(config)
    for name, p in model.named_parameters():
        # Rows up to a few binades apart, off zero, so that zero points have something to do.
        if name.endswith("_proj.weight"):
            p.data = (torch.randn_like(p) + 0.3) * 0.04 * 2.0 ** torch.randint(-2, 2, (p.shape[0], 1))
        else:
            p.data = 1 + 0.1 * torch.randn_like(p) if "norm" in name else 0.05 * torch.randn_like(p)
    model.half().save_pretrained(folder)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    words.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog, again and again and again"] * 50, trainer
    )
    words.save(str(folder / "tokenizer.json"))
    return model.float()


def save(folder, source, state, quantization, config="config.json"):
    """A checkpoint of `state`, with what else `source` has."""
    import shutil

    from safetensors.torch import save_file

    folder.mkdir()
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "tokenizer.json", folder)
    said = json.loads((source / "config.json").read_text())
    said["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(said, indent=1))


def packed(source, pack):
    """The tensors of `source`, in f16 where they are not packed."""
    from safetensors.torch import load_file

    out = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            out |= {name.removesuffix("weight") + part: value for part, value in pack(tensor.float()).items()}
        else:
            out[name] = tensor
    return out


def plain_logits(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().contiguous()


def on_weights(path, file, decoded, ids):
    """Logits of transformers on decoded weights in f32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {
        k: v.float() for k, v in file.items() if v.is_floating_point() and k.endswith(".weight")
    } | decoded
    missing = model.load_state_dict(state, strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys, missing
    return plain_logits(model, ids)
