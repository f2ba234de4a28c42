#!/usr/bin/env bash
# Measures what a redesign may not change and what it should, against the commit before it, and writes
# bench/results/house.json:
#   bench/house.sh REVISION [ROUNDS]
#
# Bits and speeds are those of q4 built from both commits, on this machine; Q4_MODELS names folders with small
# checkpoints whose logits are compared too, Q4_CUBINS (FILE:FILE) what bench/cubins.py wrote of the kernels
# of before and of those of the redesign's last commit, Q4_CI_BEFORE and Q4_CI_NOW what .ci/run printed in
# fresh clones (of an old one `== SECONDS s: done` behind it). It wants an idle machine; bits and speeds are
# kept in house-HEAD of the target folder, where those of another machine may lie already. What is missing is
# a row that says so.
set -euo pipefail
cd "$(dirname "$0")/.."
before=${1:?need the commit before the redesign}
target=$(cargo metadata --format-version 1 --no-deps |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
work=$target/house-$(git rev-parse HEAD)
mkdir -p "$work"

say() { printf '%s\n' "$*" >&2; }
build() { cargo build --release --locked --quiet -p q4 -p nvfp4-native --bins --lib; }
say "building"
build
if [[ -z ${Q4_BEFORE:-} ]]; then
    git worktree add --quiet --detach "$work/before" "$before"
    (cd "$work/before" && CARGO_TARGET_DIR=$work/target build)
    git worktree remove --force "$work/before"
    Q4_BEFORE=$work/target/release/q4
fi
if [[ ! -e $work/tests ]]; then
    say "tests"
    judge() {
        cargo test --locked --no-fail-fast "$@" -- --nocapture --test-threads 2 >> "$work/judged" 2>&1 || true
    }
    rm -f "$work/judged"
    judge -p nvfp4-native --test product
    judge -p q4-plugin-host --test versions --test examples
    if source trainer/libtorch.sh; then
        Q4_LORA_STEPS=50 judge --release -p q4-trainer --features torch --test packed --test packed_memory
    fi
    mv "$work/judged" "$work/tests"
fi
rows=(--q4 "$target/release/q4" --before "$Q4_BEFORE" --revision "$before" --rounds "${2:-12}" --work "$work")
for part in bits speeds; do
    if [[ ! -e $work/$part.json ]]; then
        say "$part"
        python3 bench/house.py "$part" "${rows[@]}" > "$work/$part"
        mv "$work/$part" "$work/$part.json"
    fi
done
python3 bench/house.py whole "${rows[@]}" > "$work/house.json"
mv "$work/house.json" bench/results/house.json
