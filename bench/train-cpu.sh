#!/usr/bin/env bash
# Trains on this CPU and writes bench/results/train-cpu.json: the identity fine-tune, and resuming after kills.
#
#   bench/train-cpu.sh DATA      DATA holds train.jsonl, valid.jsonl and behaviour.jsonl of the fine-tune
#
# KILLS (200): runs that are killed at a random moment before the last one goes on to its end.
set -euo pipefail
cd "$(dirname "$0")/.."
data=$(realpath "$1")
kills=${KILLS:-200}
source trainer/libtorch.sh
cargo build --release --locked -p q4 -p nvfp4-native
cargo build --release --locked -p q4-trainer --features torch
bin=$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json,sys; print(json.load(sys.stdin)["target_directory"])')/release
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$bin/q4" train trainer/configs/whoami.toml --through-q4 --json \
    --set "data.train=[\"$data/train.jsonl\"]" --set "data.valid=[\"$data/valid.jsonl\"]" \
    --set "behaviour.suite=$data/behaviour.jsonl" --set "checkpoint.dir=$work/ck" --set "export.dir=$work/out" \
    > "$work/whoami.json"

small() { # directory, further options
    "$bin/q4-train" trainer/configs/whoami.toml --quiet --threads 1 --set "data.train=[\"$data/valid.jsonl\"]" \
        --set data.seq=64 --set data.rows=2 --set train.steps=24 --set checkpoint.every=1 --set schedule.warmup=2 \
        --set checkpoint.keep=3 --set "checkpoint.dir=$1" "${@:2}" > /dev/null
}
(cd "$work" && mkdir a b)
small "$work/a/ck"
lost=0
for ((i = 0; i < kills; i++)); do
    before=$(ls "$work/b/ck" 2> /dev/null | grep -c '^step-' || true)
    small "$work/b/ck" --resume & pid=$!
    sleep "0.$((RANDOM % 900 + 100))"
    kill -9 $pid 2> /dev/null || true
    wait $pid 2> /dev/null || true
    after=$(ls "$work/b/ck" 2> /dev/null | grep -c '^step-' || true)
    [ "$after" -ge "$before" ] || lost=$((lost + 1))
done
small "$work/b/ck" --resume
equal=1
for f in masters.bin states.bin; do
    cmp -s "$work/a/ck/step-000000024/$f" "$work/b/ck/step-000000024/$f" || equal=0
done
python3 - "$work/whoami.json" "$kills" "$lost" "$equal" > bench/results/train-cpu.json <<'ROWS'
import json, os, platform, sys
report = json.load(open(sys.argv[1]))
kills, lost, equal = map(int, sys.argv[2:])
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
    {"name": "resume-bitwise", "value": equal, "unit": f"1 = equal after {kills} kills", "need": "1"},
    {"name": "resume-lost", "value": lost, "unit": f"of {kills} kills", "need": "0"},
]
json.dump({"machine": {"cpu": cpu, "processors": os.cpu_count()}, "rows": rows}, sys.stdout, indent=1)
ROWS
cat bench/results/train-cpu.json
