#!/usr/bin/env bash
# Measures what `q4 serve` promises, and writes bench/results/serve.json:
#   bench/serve.sh [PART...]
#
# `bench/serve.sh list` names the parts; `bits` is every part that begins so, and without a name all are
# measured, each in less than ten minutes. What is measured of this commit is kept in serve-HEAD of the target
# folder and not measured again: a run that was interrupted goes on with the part it was in. What is missing
# is a row that says so. It wants an idle machine, Chromium, node and a C++ compiler.
#   Q4_BIN        q4 to measure, else it is built
#   Q4_SERVE_ISA  instruction set of the parts but bits, preempted and reproducible
#   Q4_PEERS      folder with environments of clients and llama-server, made there from PyPI and npm where
#                 they are missing [serve-peers of the target folder]; about 5 GB
#   Q4_REQUESTS [1000], Q4_MALFORMED [1000000], Q4_DISCONNECTS [10000]  how many
#   Q4_SOAK [480], Q4_OPENAPI [540]                                     seconds; 3600 is an hour's soak
#   Q4_LONG [30016]                                                     tokens of the long prompt
#   Q4_ANSWERS [2], Q4_ROUNDS [3]                                       of load, cost and peer
#   Q4_GGUF [Q4_0]                                                      what llama-server computes with
set -euo pipefail
cd "$(dirname "$0")/.."
source bench/peers.sh
target=$(cargo metadata --format-version 1 --no-deps |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
work=$target/serve-$(git rev-parse HEAD)
peers=${Q4_PEERS:-$target/serve-peers}
mkdir -p "$work" "$peers"

if [[ -z ${Q4_BIN:-} ]]; then
    say "building"
    cargo build --release --locked --quiet -p q4 -p nvfp4-native --bins --lib
    Q4_BIN=$target/release/q4
fi
export PYTHONPATH=bench
serve() { python3 -m serve "$1" --q4 "$Q4_BIN" "${words[@]}"; }
words=(--work "$work" --models "$peers/models" --venvs "$peers" --isa "${Q4_SERVE_ISA:-}"
    --requests "${Q4_REQUESTS:-1000}" --malformed "${Q4_MALFORMED:-1000000}"
    --disconnects "${Q4_DISCONNECTS:-10000}" --soak "${Q4_SOAK:-480}" --openapi "${Q4_OPENAPI:-540}"
    --long "${Q4_LONG:-30016}" --answers "${Q4_ANSWERS:-2}" --rounds "${Q4_ROUNDS:-3}"
    --gguf "${Q4_GGUF:-Q4_0}")
mapfile -t all < <(serve list)
if [[ ${1:-} == list ]]; then
    printf '%s\n' "${all[@]}"
    exit
fi

[[ $# -gt 0 ]] || set -- ""
for part in "${all[@]}"; do
    is_asked=0
    for name in "$@"; do [[ $part == "$name"* ]] && is_asked=1; done
    ((is_asked)) && [[ ! -e $work/$part.json ]] || continue
    case $part in
    clients) clients ;;
    openapi) environment schemathesis schemathesis || true ;;
    schemas | mask) environment jsonschema jsonschema || true ;;
    peer | guidellm)
        if llama; then
            words+=(--llama "$peers/build-server/bin/llama-server" --llama-python "$peers/llama/bin/python")
        fi
        [[ $part == peer ]] || environment guidellm guidellm || true
        ;;
    page) if browser; then words+=(--browser "$peers/playwright/bin/python"); fi ;;
    esac
    say "$part"
    SECONDS=0
    if serve "$part" >"$work/$part"; then
        mv "$work/$part" "$work/$part.json"
        say "$part: $SECONDS s"
    else
        say "$part broke after $SECONDS s"
    fi
done

serve whole >"$work/serve.json"
mv "$work/serve.json" bench/results/serve.json
python3 -m serve.verdict bench/results/serve.json || true
