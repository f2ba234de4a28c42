#!/usr/bin/env bash
# Measures what a first day with q4 promises, and writes bench/results/first-day.json:
#   bench/first-day.sh
#
# Takes half an hour; an interrupted run goes on. It wants libtorch (trainer/libtorch.sh fetches it), and, where they are
# named: Q4_PYTHON, a Python with transformers and jinja2; Q4_TEMPLATE_QWEN3 and Q4_TEMPLATE_CODER, folders with the
# published chat templates. What is missing is a row that says so.
set -euo pipefail
cd "$(dirname "$0")/.."
source trainer/libtorch.sh
target=$(cargo metadata --format-version 1 --no-deps |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
work=$target/first-day-$(git rev-parse HEAD)
mkdir -p "$work"
python=${Q4_PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }
# once NAME COMMAND...: what it printed is in $work/NAME, unless it was there already.
once() {
    [[ -e $work/$1 ]] && return
    say "$1"
    "${@:2}" > "$work/$1.part" 2>&1 || say "$1: status $?"
    mv "$work/$1.part" "$work/$1"
}
judge() { cargo test --locked --no-fail-fast "$@" --nocapture --test-threads 2; }
sized() { Q4_MEMORY_SHAPE=$1 judge -p q4 --test command -- memory::a_file_keeps_its_limit; }

say "building"
cargo build --release --locked --quiet -p q4 -p nvfp4-native --bins --lib
cargo build --release --locked --quiet -p q4-trainer --features torch --bins
once limits-0.6b sized qwen3-0.6b
once limits-4b sized qwen3-4b
once command judge -p q4 --test command --
once trainer env Q4_SIGNALS=100 cargo test --locked --no-fail-fast -p q4-trainer --features torch -- --nocapture
once cross .ci/cross
once engine "$python" bench/templates.py engine --q4 "$target/release/q4"
for name in QWEN3 CODER; do
    variable=Q4_TEMPLATE_$name
    [[ -z ${!variable:-} ]] || once "template-$name" "$python" bench/templates.py model \
        --q4 "$target/release/q4" --template "${!variable}"
done
python3 bench/first-day.py --q4 "$target/release/q4" --train "$target/release/q4-train" --work "$work" \
    > "$work/first-day.json"
mv "$work/first-day.json" bench/results/first-day.json
