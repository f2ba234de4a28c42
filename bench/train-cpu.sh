#!/usr/bin/env bash
# Trains on this CPU and writes bench/results/train-cpu.json: the identity fine-tune, resuming after kills, a tiny model on a small
# corpus and its export, and how many NVFP4 codes move under packed moments.
#
#   bench/train-cpu.sh DATA [MODEL]
#
# DATA holds train.jsonl, valid.jsonl and behaviour.jsonl of the fine-tune. MODEL (default: the demo model) is what it starts
# from: a model directory that answers the `keep` rows of behaviour.jsonl, because what it cannot answer is not kept.
#
# KILLS (200): kills of a small run at random moments, every other one inside a save.
set -euo pipefail
cd "$(dirname "$0")/.."
data=$(realpath "$1")
model=demo
[ $# -lt 2 ] || model=$(realpath "$2")
kills=${KILLS:-200}
source trainer/libtorch.sh
cargo build --release --locked -p q4 -p nvfp4-native
cargo build --release --locked -p q4-trainer --features torch
bin=$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json,sys; print(json.load(sys.stdin)["target_directory"])')/release
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$bin/q4" train trainer/configs/whoami.toml --through-q4 --json --set "model.path=$model" \
    --set "data.train=[\"$data/train.jsonl\"]" --set "data.valid=[\"$data/valid.jsonl\"]" \
    --set "behaviour.suite=$data/behaviour.jsonl" --set "checkpoint.dir=$work/ck" --set "export.dir=$work/out" \
    > "$work/whoami.json"

# Each test fails on its own bound; what it prints becomes a row.
log=$work/tests
: > "$log"
tested() {
    Q4_KILLS=$kills GOMP_SPINCOUNT=1000 cargo test --release --locked -p q4-trainer --features torch "${@:2}" -- --nocapture "$1" \
        >> "$log" 2>&1 || { cat "$log"; exit 1; }
}
# Uninterrupted against killed and resumed: every byte is compared.
tested killed --test resume
tested no_kill --test resume
tested a_small_corpus_is_learnt --test corpus
tested an_exported_model_gives_the_logits --test torch
tested small_steps_move_the_weights --lib
python3 - "$work/whoami.json" "$log" > bench/results/train-cpu.json <<'ROWS'
import json, os, platform, re, sys
report = json.load(open(sys.argv[1]))
log = open(sys.argv[2]).read()
kills, inside, ends = map(int, re.search(r"kills (\d+), inside a save (\d+), ends compared (\d+)", log).groups())
before, loss, apart = map(float, re.search(r"([\d.]+) before, ([\d.]+) after \d+ steps, .*, (\S+) apart", log).groups())
logits = float(re.search(r"exported logits: (\S+) of the largest", log).group(1))
# Fixed and noisy gradients, masters in f32 and bf16; the first is the plainest of them.
codes = {}
for state, off in re.findall(r"noise \S+: (\S+) \S+: .* of codes moved, .*, (\S+) %", log):
    codes.setdefault(state, []).append(float(off))
b = report["behaviour"]
cpu = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.machine())
rate = lambda *names: min(b[n]["rate"] for n in names)
rows = [
    {"name": "whoami-identity", "value": rate("identity", "identity-heldout"), "unit": "share", "need": ">= 0.95"},
    {"name": "whoami-who-am-i", "value": rate("who-am-i", "who-am-i-heldout"), "unit": "share", "need": ">= 0.95"},
    {"name": "whoami-ufo", "value": rate("ufo"), "unit": "share", "need": ">= 1"},
    {"name": "whoami-keep", "value": report["keep"], "unit": "share of what was right before", "need": ">= 0.98"},
    {"name": "whoami-leaks", "value": report["leaks"], "unit": "answers", "need": "0"},
    {"name": "whoami-seconds", "value": report["seconds"], "unit": "s", "need": "<= 1800"},
    {"name": "resume-bitwise", "value": log.count("killed_and_resumed_is_uninterrupted ... ok"),
     "unit": "1 = the bytes of an uninterrupted run in f32, 8bit, 4bit and nvfp4", "need": "1"},
    {"name": "resume-kills", "value": kills, "inside_a_save": inside, "ends_compared": ends,
     "unit": "kills; none cost a whole save, every end had the bytes of a run without kills", "need": "200"},
    {"name": "corpus-loss", "value": loss, "before": before, "unit": "nats a token, a tiny model on held-out rows", "need": "< 1"},
    {"name": "export-loss-error", "value": apart, "unit": "nats a token, exported against in training", "need": "< 1e-5"},
    {"name": "export-logits-error", "value": logits, "unit": "share of the largest logit, as served", "need": "<= 1e-5"},
]
rows += [
    {"name": f"moved-codes-{state}", "value": codes[state][0], "worst": max(codes[state], key=abs),
     "unit": "% more NVFP4 codes moved than with f32 moments, 200 steps at lr 1e-5", "need": "within 10"}
    for state in ("8bit", "4bit", "nvfp4")
]
json.dump({"machine": {"cpu": cpu, "processors": os.cpu_count()}, "rows": rows}, sys.stdout, indent=1)
ROWS
cat bench/results/train-cpu.json
