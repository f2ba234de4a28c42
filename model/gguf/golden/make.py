"""Writes the golden files beside it: make.py DEMO, the folder of the demo model.

Made with gguf 0.19.0, tokenizers 0.23.3 and numpy 2.4.6.

qwen2.gguf has the demo's vocabulary behind the pre-tokenizer of Qwen2, with added tokens that are text and with fillers;
gpt2.gguf has the demo's tokenizer as it is. texts.json has texts, and the ids that the tokenizers they were made from give.
"""
import json
import pathlib
import random
import sys

import numpy as np
from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

HERE = pathlib.Path(__file__).parent
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RANGES = [(0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xA00), (0x2000, 0x2070),
          (0x20A0, 0x2200), (0x3000, 0x3100), (0x4E00, 0x5000), (0xAC00, 0xAD00), (0xFB00, 0xFB10), (0x1F300, 0x1F650)]


def qwen2(vocab, merges, special, text):
    """A tokenizer as Qwen publishes it: `special` and `text` are added behind the vocabulary."""
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, continuing_subword_prefix="", end_of_word_suffix=""))
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    t.add_tokens([AddedToken(s, normalized=False, special=False) for s in text])
    return t


def add_tokenizer(w, source, pre, rows, filler=TokenType.UNUSED):
    """The metadata of the tokenizer in the text `source` of a tokenizer.json, as converters write them."""
    source = json.loads(source)
    added = {t["id"]: t for t in source["added_tokens"]}
    texts = {i: t for t, i in source["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    kinds = []
    for i in range(rows):
        if i in added:
            kinds.append(TokenType.CONTROL if added[i]["special"] else TokenType.USER_DEFINED)
        else:
            kinds.append(TokenType.NORMAL if i in texts else filler)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(rows)])
    w.add_token_types(kinds)
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in source["model"]["merges"]])


def add_config(w, hidden, layers, inner, heads, kv_heads, head_dim, positions, theta):
    w.add_embedding_length(hidden)
    w.add_block_count(layers)
    w.add_feed_forward_length(inner)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_context_length(positions)
    w.add_rope_freq_base(theta)
    w.add_layer_norm_rms_eps(1e-6)


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def random_text(rng, longest):
    make = rng.choice(["word", "digits", "space", "any", "range", "marks"])
    n = rng.randint(1, longest)
    if make == "word":
        return "".join(rng.choice("etaoinshrdlu'TAS ") for _ in range(n))
    if make == "digits":
        return "".join(rng.choice("0123456789.,-٣४") for _ in range(n))
    if make == "space":
        return "".join(rng.choice(" \t\n\r\v\u00a0\u3000\u200ba") for _ in range(n))
    if make == "marks":
        return "".join(rng.choice("aeioucnAEI") + rng.choice("\u0301\u0308\u0327\u0323\u030a") for _ in range(n))
    low, high = rng.choice(RANGES) if make == "range" else (0x20, 0x11_0000)
    return "".join(c for c in (chr(rng.randrange(low, high)) for _ in range(n)) if not 0xD800 <= ord(c) < 0xE000)


def random_texts(rng, count, longest, special, prose):
    """A text is a few pieces: random characters of one kind, words of `prose`, added tokens and what resembles them."""
    for _ in range(count):
        pieces = []
        for _ in range(rng.randint(1, 4)):
            kind = rng.random()
            if kind < 0.15:
                s = rng.choice(special)
                pieces.append(rng.choice([s, s[:-1], s + " ", " " + s]))
            elif kind < 0.5:
                at = rng.randrange(len(prose))
                pieces.append(prose[at:at + rng.randint(1, longest)])
            else:
                pieces.append(random_text(rng, longest))
        yield "".join(pieces)


def main(demo):
    demo = pathlib.Path(demo)
    own = (demo / "tokenizer.json").read_text()
    model = json.loads(own)["model"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    text = ["<think>", "</think>", "<tool_call>"]
    made = qwen2(model["vocab"], [tuple(m) for m in model["merges"]], special, text)
    rows = 1448

    w = GGUFWriter(HERE / "qwen2.gguf", "qwen3")
    w.add_type("model")
    add_config(w, 2, 1, 4, 1, 1, 2, 2048, 1e6)
    add_tokenizer(w, made.to_str(), "qwen2", rows)
    w.add_bos_token_id(0)
    w.add_eos_token_id(2)
    w.add_pad_token_id(0)
    w.add_add_bos_token(False)
    w.add_chat_template((demo / "chat_template.jinja").read_text())
    w.add_tensor("token_embd.weight", np.arange(rows * 2, dtype=np.float16).reshape(rows, 2))
    w.add_tensor("output_norm.weight", np.array([0.5, -1.25], np.float32))
    finish(w)

    w = GGUFWriter(HERE / "gpt2.gguf", "qwen3")
    add_tokenizer(w, own, "gpt-2", len(model["vocab"]))
    finish(w)

    rng = random.Random(4)
    prose = (demo / "README.md").read_text()
    texts = ["", " ", "Who are you?", "don't DON'T we'LL", "1234567890", "\r\n \n\n x", "e\u0301 \u00e9 \u212b \ufb01",
             "<|im_start|>user\nHello<|im_end|>\n", "<think>\n\n</think>\n\n", "[PAD1445]", "<|im_end", "你好，世界 🦀"]
    texts += random_texts(rng, 500 - len(texts), 16, special + text, prose)
    demo_tokenizer = Tokenizer.from_str(own)
    ids = {"qwen2": [made.encode(t).ids for t in texts], "gpt2": [demo_tokenizer.encode(t).ids for t in texts]}
    lines = [json.dumps([t, ids["qwen2"][i], ids["gpt2"][i]], separators=(",", ":")) for i, t in enumerate(texts)]
    (HERE / "texts.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
