#!/usr/bin/env bash
# Everything measured on a Hopper card: conformance, agreement with the CPU, decode, prefill, batches, single products,
# first token, memory, and what happens when something is missing. Writes bench/results/h200.local.json,
# which is not tracked; bench/h200.sh bench/results/h200.json records what the documents show.
#
#   bench/h200.sh [OUT.json [STEP...]]
#   STEP: speed, kernels, formats, agreement, first_token, exits, conformance; all where none is named.
#   Q4=path of q4 (default target/release/q4); PYTHON with torch for cuBLAS beside us;
#   Q4_FAULT_TEST=executable of q4-cuda's test of faults, run where it is named
#
# Needs no network and no Rust: build with `cargo build --release` where there is one, and bring target/release and the
# repository. `Q4_WRITE_FIGURES=1 cargo test -p q4 --test figures` puts what it wrote into the documents.
set -euo pipefail
cd "$(dirname "$0")/.."
export Q4="${Q4:-$PWD/target/release/q4}"
out="${1:-bench/results/h200.local.json}"
mkdir -p "$(dirname "$out")"
shift || true
exec "${PYTHON:-python3}" bench/h200.py "$out" "$@"

