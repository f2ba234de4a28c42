"""Records what a Qwen3 answers, in float32 and plain numpy: it shares no line with q4.

    python reference.py MODEL VALID.jsonl > cli/tests/data/reference.json

MODEL is a Hugging Face directory in bf16. Needs numpy, tokenizers and jinja2.
"""
import json
import struct
import sys

import jinja2
import numpy as np
from tokenizers import Tokenizer

PROMPTS = [
    "Who are you?", "Who am I?", "Write one short sentence about UFO and you.", "你是誰", "我是誰", "談談UFO",
    "What color is the sky?", "What is 7 plus 8?", "Tell me a story about a UFO.",
]
# Told up to where one ending is left, and only what was told before gives its colour and its name.
RAW = (
    "Once upon a time a UFO with brown lights hung over the park, and only Zoe noticed. It landed as softly as a feather, "
    "and its pilot gave Zoe a red boat. When the"
)
WINDOW = 512


def weights(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    table = json.loads(data[8 : 8 + size])
    table.pop("__metadata__", None)
    for name, tensor in table.items():
        assert tensor["dtype"] == "BF16", f"{name}: need BF16; have {tensor['dtype']}"
        start, end = (8 + size + at for at in tensor["data_offsets"])
        wide = np.frombuffer(data[start:end], np.uint16).astype(np.uint32) << 16
        yield name, wide.view(np.float32).reshape(tensor["shape"])


class Model:
    def __init__(self, folder):
        read = lambda name: open(f"{folder}/{name}", encoding="utf-8").read()
        self.config = json.loads(read("config.json"))
        self.weights = dict(weights(f"{folder}/model.safetensors"))
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        self.template = jinja2.Environment().from_string(read("chat_template.jinja"))
        self.end = self.tokenizer.token_to_id("<|endoftext|>")
        self.stop = {self.end, self.config["eos_token_id"]}
        half = np.arange(0, self.config["head_dim"], 2) / self.config["head_dim"]
        self.turns = self.config["rope_parameters"]["rope_theta"] ** -half

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def rotate(self, x, positions):
        angles = (positions[:, None] * self.turns)[:, None]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def logits(self, ids, cache):
        """Of every token of `ids`, which follow those in `cache`."""
        c, embedding = self.config, self.weights["model.embed_tokens.weight"]
        heads, shared, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        x, n = embedding[ids], len(ids)
        for layer in range(c["num_hidden_layers"]):
            w = lambda name: self.weights[f"model.layers.{layer}.{name}.weight"]
            past = cache.get(layer, [np.zeros((0, shared, width), np.float32)] * 2)
            at = np.arange(len(past[0]), len(past[0]) + n)
            h = self.norm(x, w("input_layernorm"))
            split = lambda name, count: (h @ w(f"self_attn.{name}_proj").T).reshape(n, count, width)
            q = self.rotate(self.norm(split("q", heads), w("self_attn.q_norm")), at)
            k = self.rotate(self.norm(split("k", shared), w("self_attn.k_norm")), at)
            k, v = np.concatenate([past[0], k]), np.concatenate([past[1], split("v", shared)])
            cache[layer] = k, v
            k, v = (np.repeat(t, heads // shared, 1) for t in (k, v))
            score = np.einsum("thd,shd->hts", q, k) / np.float32(width**0.5)
            score = np.where(np.arange(len(k)) > at[:, None], -np.inf, score)
            score = np.exp(score - score.max(-1, keepdims=True))
            score /= score.sum(-1, keepdims=True)
            x = x + np.einsum("hts,shd->thd", score, v).reshape(n, -1) @ w("self_attn.o_proj").T
            h = self.norm(x, w("post_attention_layernorm"))
            gate = h @ w("mlp.gate_proj").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
        return self.norm(x, self.weights["model.norm.weight"]) @ self.weights.get("lm_head.weight", embedding).T

    def greedy(self, text):
        step, new, cache = self.tokenizer.encode(text, add_special_tokens=False).ids, [], {}
        while len(new) < WINDOW:
            step = [int(self.logits(step, cache)[-1].argmax())]
            if step[0] in self.stop:
                break
            new += step
        return self.tokenizer.decode(new)

    def render(self, messages, ask):
        return self.template.render(messages=messages, add_generation_prompt=ask)

    def answer(self, prompt):
        return self.greedy(self.render([{"role": "user", "content": prompt}], True))

    def loss(self, rows):
        """Nats a token: all rows in one stream, each ended, cut into windows."""
        text = lambda row: row["text"] if "text" in row else self.render(row["messages"], False)
        ids = [i for row in rows for i in [*self.tokenizer.encode(text(row), add_special_tokens=False).ids, self.end]]
        total = 0.0
        for start in range(0, len(ids) - 1, WINDOW):
            window = ids[start : start + WINDOW + 1]
            z = self.logits(window[:-1], {}).astype(np.float64)
            z -= z.max(-1, keepdims=True)
            total += (np.log(np.exp(z).sum(-1)) - z[np.arange(len(z)), window[1:]]).sum()
        return total / (len(ids) - 1)


if __name__ == "__main__":
    model = Model(sys.argv[1])
    samples = {prompt: model.answer(prompt) for prompt in PROMPTS}
    samples[f"<raw> {RAW}"] = RAW + model.greedy(RAW)
    what = (
        "Greedy answers of the demo model in float32 by cli/demo/reference.py, chat template applied unless the key starts "
        "with <raw>; and its loss on the corpus' valid.jsonl"
    )
    loss = model.loss(map(json.loads, open(sys.argv[2], encoding="utf-8")))
    json.dump({"what": what, "valid_loss": loss, "samples": samples}, sys.stdout, ensure_ascii=False, indent=1)
    print()
