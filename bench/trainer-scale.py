"""What others make of what `q4 train` writes, and it of theirs: adapters in PEFT, events in TensorBoard, rows in
datasets and trl; and ranks that share a run. Run by bench/trainer-scale.sh."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import rows  # noqa: E402
import trainer_ranks  # noqa: E402

Q4, WORK = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
MODEL = rows.ROOT / "cli/demo"
TRAIN = ["--threads", "2", "--quiet", "--json", "--set", "data.rows=4", "--set", "data.seq=64"]


def train(*words, q4=Q4):
    done = subprocess.run([q4, *map(str, TRAIN), *map(str, words)], capture_output=True, text=True, cwd=WORK)
    if done.returncode:
        sys.exit(f"{words}: {done.stderr}")
    return json.loads(done.stdout)


def data():
    text = "".join(
        json.dumps({"messages": [{"role": "user", "content": f"What is {i} plus 1?"},
                                 {"role": "assistant", "content": f"{i} plus 1 is {i + 1}."}]}) + "\n"
        for i in range(40))
    (WORK / "data.jsonl").write_text(text)


def dense():
    """The demo model as bf16, which transformers reads: its decoded values are exact there."""
    train("--set", "data.train=data.jsonl", "--set", "export.dir=dense", "--set", "export.layouts=bf16",
          "--set", "optimizer.lr=1e-30", "--set", "optimizer.weight_decay=0", "--set", "train.steps=1")
    return WORK / "dense/bf16"


def loss_of(model, tokens):
    """Mean loss of the learnt tokens, as transformers computes it in f32, and the logits."""
    import torch
    total, count, logits = 0.0, 0, []
    with torch.no_grad():
        for ids, mask in tokens:
            out = model(torch.tensor([ids])).logits[0].float()
            logits.append(out)
            logp = out.log_softmax(-1)
            for i in range(1, len(ids)):
                if mask[i]:
                    total -= logp[i - 1, ids[i]].item()
                    count += 1
    return total / count, logits


def tokens_of_preview():
    shown = train("--set", "data.train=data.jsonl", "--preview", 40)["preview"]
    from transformers import PreTrainedTokenizerFast
    tok = PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"))
    out = []
    for row in shown:
        mask = []
        for span in row["spans"]:
            n = len(tok.encode(span["text"], add_special_tokens=False))
            mask += [span["learnt"]] * n
        assert len(mask) == len(row["ids"]), row["place"]
        out.append((row["ids"], mask))
    return out


def adapters():
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM
    base_dir = dense()
    tokens = tokens_of_preview()
    load = lambda: AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32).eval()
    more = ["--set", f"model.path={base_dir}", "--set", "data.train=data.jsonl", "--set", "data.valid=data.jsonl",
            "--set", "lora.base=decoded", "--set", "train.steps=20", "--set", "optimizer.lr=1e-2"]
    worst = 0.0
    for name, targets in (("all", "[]"), ("some", '["q_proj", "v_proj", "down_proj"]')):
        trained = train(*more, "--set", f"lora.targets={targets}", "--set", f"export.dir=out-{name}")
        model = PeftModel.from_pretrained(load(), WORK / f"out-{name}/peft").eval()
        loss, _ = loss_of(model, tokens)
        worst = max(worst, abs(loss - trained["valid_loss"]))
    rows.row("adapters written here, loaded in peft: difference of the mean loss", worst, "nats", "<= 1e-5")
    # Theirs, with every half random, so that nothing is zero by luck.
    torch.manual_seed(1)
    theirs = get_peft_model(load(), LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "up_proj"],
                                               task_type="CAUSAL_LM")).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.05)
    theirs.save_pretrained(WORK / "theirs")
    want, logits = loss_of(theirs, tokens)
    got = train(*more, "--set", "lora.init=theirs", "--eval-only")["valid_loss"]
    rows.row("adapters of peft, loaded here: difference of the mean loss", abs(got - want), "nats", "<= 1e-5")
    # Out again without a step that moves anything, and into peft: the same logits.
    train(*more, "--set", "lora.init=theirs", "--set", "export.dir=back", "--set", "optimizer.lr=1e-30",
          "--set", "optimizer.weight_decay=0", "--set", "train.steps=1")
    back = PeftModel.from_pretrained(load(), WORK / "back/peft").eval()
    _, again = loss_of(back, tokens)
    apart = max((a - b).abs().max().item() for a, b in zip(logits, again))
    rows.row("adapters of peft, in, out and back in peft: largest difference of a logit", apart, "", "<= 1e-5")
    plain, _ = loss_of(load(), tokens)
    rows.row("by which those adapters change the loss", abs(want - plain), "nats", "> 0.01")


def events():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    words = ["--set", "data.train=data.jsonl", "--set", "data.valid=data.jsonl", "--set", "checkpoint.dir=ck",
             "--set", "checkpoint.every=4", "--set", "eval.every=4"]
    train(*words, "--set", "train.steps=8")
    train(*words, "--set", "train.steps=12", "--resume")
    read = EventAccumulator(str(WORK / "ck/tensorboard"))
    read.Reload()
    lines = [json.loads(l) for l in (WORK / "ck/metrics.ndjson").read_text().splitlines()]
    for kind, tag in (("train", "train/loss"), ("eval", "eval/loss")):
        want = [(l["step"], l["loss"]) for l in lines if l["kind"] == kind]
        got = [(e.step, e.value) for e in read.Scalars(tag)]
        same = [s for s, _ in want] == [s for s, _ in got] and \
            all(abs(a - b) <= 1e-6 * abs(a) for (_, a), (_, b) in zip(want, got))
        rows.row(f"steps of {tag} that TensorBoard reads as they were logged, a run gone on with among them",
                 len(got) if same else 0, "steps", f"= {len(want)}")
    walls = [e.wall_time for e in read.Scalars("train/loss")]
    rows.row("wall times that go backwards", sum(b < a for a, b in zip(walls, walls[1:])), "events", "= 0")


def layouts():
    """The same rows as trl turns them into messages (ShareGPT), and as datasets reads the files."""
    import datasets
    from trl import maybe_convert_to_chatml
    talk = [[("user", f"q{i}"), ("assistant", f"a{i}")] for i in range(20)]
    sharegpt = [{"conversations": [{"from": r, "value": t} for r, t in turns]} for turns in talk]
    pairs = [{"prompt": [{"role": "user", "content": a[1]}], "completion": [{"role": "assistant", "content": b[1]}]}
             for a, b in talk]
    from_trl = [maybe_convert_to_chatml(dict(r))["messages"] for r in sharegpt]
    (WORK / "messages.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in from_trl))
    want = [r["ids"] for r in train("--set", "data.train=messages.jsonl", "--preview", 20)["preview"]]
    same = 0
    for name, made in (("sharegpt", sharegpt), ("pairs", pairs)):
        d = datasets.Dataset.from_list(made)
        d.to_json(WORK / f"{name}.jsonl")
        d.to_parquet(WORK / f"{name}.parquet")
        (WORK / f"{name}.json").write_text(json.dumps(made, indent=1))
        for ending in ("jsonl", "parquet", "json"):
            got = [r["ids"] for r in train("--set", f"data.train={name}.{ending}", "--preview", 20)["preview"]]
            same += sum(a == b for a, b in zip(got, want))
    rows.row("rows that are what trl makes of them, from files that datasets wrote", same, "rows", "= 120")


def short_rows():
    """What padding and packing cost beside an earlier q4-train (Q4_BEFORE): rows of Q4_SHORT_ROWS, else of the corpus."""
    file = os.environ.get("Q4_SHORT_ROWS")
    if not file:
        rows.must(Q4, "--write-corpus", WORK / "corpus")
        file = WORK / "corpus/train.jsonl"
    lines = [l for l in pathlib.Path(file).read_text().splitlines() if "messages" in l and len(l) < 250]
    (WORK / "talk.jsonl").write_text("\n".join(lines[:2000]))
    shown = train("--set", "data.train=talk.jsonl", "--set", "data.seq=128", "--preview", 2000)["preview"]
    length = statistics.mean(r["tokens"] for r in shown)
    words = ["--set", "data.train=talk.jsonl", "--set", "data.seq=128", "--set", "data.rows=32", "--set", "train.steps=9"]
    words += ["--set", "train.profile=[4,6,8]", "--set", "schedule.warmup=1"]

    def seconds(q4, packing):
        out = tempfile.mkdtemp(dir=WORK)
        told = train(*words, "--set", f"data.packing={packing}", "--set", f"export.dir={out}/model", q4=q4)["phases"]
        return statistics.median(max(p["seconds"] for p in told if p["step"] == step) for step in (4, 6, 8))

    before = os.environ.get("Q4_BEFORE")
    for packing, need in (("rows", ">= 2"), ("documents", "said")):
        ratios = []
        for i in range(3 if before else 0):
            # Whoever comes second finds another machine: turns change.
            pair = [seconds(q4, packing) for q4 in ((before, Q4), (Q4, before))[i % 2]]
            ratios.append(pair[0] / pair[1] if i % 2 == 0 else pair[1] / pair[0])
        unit = f"times those of an earlier q4-train, batches of 32 x 128, rows of {length:.0f}, median of 3 pairs"
        rows.row(f"tokens a second of short rows, packing = {packing}",
                 round(statistics.median(ratios), 3) if ratios else None, unit, need, "Q4_BEFORE names none")


data()
short_rows()
adapters()
events()
layouts()
trainer_ranks.all_of(Q4, WORK)
import datasets, peft, tensorboard, torch, transformers, trl  # noqa: E401, E402
rows.write(**{m.__name__: m.__version__ for m in (datasets, peft, tensorboard, torch, transformers, trl)})
