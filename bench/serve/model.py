"""The model of the parts that are about speed: a shape with random weights, and the words of the demo model,
so that every server cuts texts into the same tokens."""

import json
import os
import shutil

from rows import ROOT, must

DEMO = ROOT / "cli/demo"
VOCAB = 151_936


def vocabulary():
    """The demo's tokenizer, in which every id of a large model is a word."""
    found = json.loads((DEMO / "tokenizer.json").read_text())
    words = found["model"]["vocab"]
    for token in range(max(words.values()) + 1, VOCAB):
        words[f"Ġw{token}"] = token
    return found


def shaped(q4, folder, shape="qwen3-0.6b"):
    """Writes the model as q4 reads it, unless it is there; its folder."""
    out = folder / shape
    if out.exists():
        return out
    partial = folder / f"{shape}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    must(q4, "bench", "--shape", shape, "--write", partial)
    (partial / "tokenizer.json").write_text(json.dumps(vocabulary(), ensure_ascii=False))
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, partial)
    os.rename(partial, out)
    return out


def gguf(python, folder, kind, shape="qwen3-0.6b"):
    """Writes the same as llama.cpp reads it, by a Python that has gguf and numpy; its file."""
    out = folder / f"{shape}-{kind}-words.gguf"
    if not out.exists():
        words = folder / "words.json"
        words.write_text(json.dumps(vocabulary(), ensure_ascii=False))
        must(python, ROOT / "bench/gguf_model.py", shape, kind, out, words)
    return out
