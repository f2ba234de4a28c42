#!/usr/bin/env bash
# Measures q4 train against the programs people read its files with and start its ranks with, and writes
# bench/results/trainer-scale.json:
#   bench/trainer-scale.sh
#
# Q4_PEERS names a Python that has datasets, peft, tensorboard, torch, transformers and trl (CPU is enough);
# without it they are installed beside the build. mpirun is Debian's (openmpi-bin).
# Q4_BEFORE names an earlier q4-train, whose rate with short rows is compared: rows of the file Q4_SHORT_ROWS, else
# of the corpus.
set -euo pipefail
cd "$(dirname "$0")/.."
source trainer/libtorch.sh
target=$(cargo metadata --format-version 1 --no-deps |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
if [[ -z ${Q4_TRAIN:-} ]]; then
    cargo build --release --locked --quiet -p q4-trainer --features torch
    Q4_TRAIN=$target/release/q4-train
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ -z ${Q4_PEERS:-} ]]; then
    python3 -m venv "$target/peers"
    "$target/peers/bin/pip" install --quiet datasets peft tensorboard torch transformers trl
    Q4_PEERS=$target/peers/bin/python
fi
HF_HUB_OFFLINE=1 "$Q4_PEERS" bench/trainer-scale.py "$Q4_TRAIN" "$work" > "$work/rows.json"
mv "$work/rows.json" bench/results/trainer-scale.json
cat bench/results/trainer-scale.json
