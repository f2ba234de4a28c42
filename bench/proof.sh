#!/usr/bin/env bash
# Measures what the proof promises, and what it costs, and writes bench/results/proof.json:
#   bench/proof.sh [REVISION [ROUNDS]]
#
# With a REVISION (a commit of this repository), speeds are measured in turns, ROUNDS times, against q4 built
# from it; without one those rows say that they were not measured. It wants an idle machine, gdb, valgrind and
# a C++ compiler; what is missing is a row that says so.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(cargo metadata --format-version 1 --no-deps |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
# What is there of this commit is not measured again: a run that was interrupted goes on.
work=$target/proof-$(git rev-parse HEAD)
mkdir -p "$work"

say() { printf '%s\n' "$*" >&2; }
build() { cargo build --release --locked --quiet "$@" --bins --lib; }
say "building"
build -p q4 -p q4-conformance -p nvfp4-native
before=()
if [[ $# -gt 0 ]]; then
    if [[ -z ${Q4_BEFORE:-} ]]; then
        git worktree add --quiet --detach "$work/before" "$1"
        (cd "$work/before" && CARGO_TARGET_DIR=$work/target build -p q4 -p nvfp4-native)
        git worktree remove --force "$work/before"
        Q4_BEFORE=$work/target/release/q4
    fi
    before=(--before "$Q4_BEFORE" --revision "$(git rev-parse --short "$1")" --rounds "${2:-12}")
fi
rows=(--q4 "$target/release/q4" --work "$work" "${before[@]}")

for part in suite start speed vendor; do
    if [[ ! -e $work/$part.json ]]; then
        say "times: $part"
        rm -rf "$work"/new-* "$work"/fresh-* "$work/qwen3-0.6b"
        python3 bench/proof.py "$part" "${rows[@]}" > "$work/$part"
        mv "$work/$part" "$work/$part.json"
    fi
done

if [[ ! -e $work/liars.json ]]; then
    say "mutants, and 200 seeds of correct backends"
    "$target/release/liars" --json > "$work/liars" || true
    mv "$work/liars" "$work/liars.json"
fi

# Tests print what they count; each fails on its own bound.
judge() {
    cargo test --locked --no-fail-fast "$@" -- --nocapture --test-threads 2 >> "$work/judged" 2>&1 || true
}
if [[ ! -e $work/tests ]]; then
    say "tests"
    rm -f "$work/judged"
    judge -p q4 --test command --test decision_table
    judge -p q4-model --test plantings
    judge -p q4-plugin-host --tests
    judge -p q4-conformance --test narrow
    mv "$work/judged" "$work/tests"
fi

python3 bench/proof.py whole "${rows[@]}" > "$work/proof.json"
mv "$work/proof.json" bench/results/proof.json
