#!/usr/bin/env bash
# Trains on one CUDA device and writes bench/results/train-h200.json: the demo model from nothing, and one step of a 4 B shape.
#
#   bench/train-h200.sh Q4_TRAIN LIBRARIES DATA [RESULT]
#
# Q4_TRAIN: a built q4-train (trainer/libtorch.sh). LIBRARIES: the lib folders of a full libtorch 2.11, as LD_LIBRARY_PATH.
# DATA: holds train.jsonl and valid.jsonl; the loss that is needed was recorded on other data than `q4 train --write-corpus` writes.
# Needs no Rust.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
train=$(realpath "$1")
export LD_LIBRARY_PATH=$2
data=$(realpath "$3")
result=$(realpath -m "${4:-$here/results/train-h200.json}")
config=${CONFIG:-$here/../trainer/configs/demo.toml}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

demo=(--json --set "data.train=[\"$data/train.jsonl\"]" --set "data.valid=[\"$data/valid.jsonl\"]")
"$train" "$config" "${demo[@]}" --set "export.dir=$work/out" > "$work/demo.json"
for device in cuda cpu; do
    "$train" "$config" "${demo[@]}" --eval-only --device $device --set "model.path=$work/out/modelopt" \
        --set model.init=checkpoint --set quant.weights=none > "$work/eval-$device.json"
done
for preset in full-24g full-128g lora-8g; do
    "$train" --json --quiet --device cuda --preset $preset --set model.shape=qwen3-4b --set model.init=random \
        --set data.seq=2048 --set data.rows=1 --set train.steps=4 --set 'train.profile=[2]' > "$work/$preset.json"
done
python3 - "$work" > "$result" <<'ROWS'
import json, subprocess, sys
load = lambda name: json.load(open(f"{sys.argv[1]}/{name}.json"))
demo = load("demo")
rows = [
    {"name": "demo-valid-loss", "value": demo["valid_loss"], "unit": "nats a token", "need": "0.2167 +- 0.004"},
    {"name": "demo-valid-loss-exported-cuda", "value": load("eval-cuda")["valid_loss"], "unit": "nats a token"},
    {"name": "demo-valid-loss-exported-cpu", "value": load("eval-cpu")["valid_loss"], "unit": "nats a token"},
    {"name": "demo-tokens-per-s", "value": demo["tokens_per_s"], "unit": "tokens/s", "reference": 881530},
]
for preset in ("full-24g", "full-128g", "lora-8g"):
    r = load(preset)
    step = [p for p in r["phases"] if p["step"] == 2]
    peak = max(p["device_peak"] for p in step)
    rows += [
        {"name": "step-4b-peak-gb", "preset": preset, "value": peak / 1e9, "unit": "GB", "predicted": r["predicted_peak_bytes"] / 1e9},
        {"name": "step-4b-seconds", "preset": preset, "value": step[-1]["seconds"], "unit": "s for 2048 tokens"},
    ]
gpu = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()
json.dump({"machine": {"gpu": gpu}, "rows": rows}, sys.stdout, indent=1)
ROWS
cat "$result"
