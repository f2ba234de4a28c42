#!/usr/bin/env bash
# Measures what `q4 serve` promises, and writes bench/results/serve.json:
#   bench/serve.sh [PART...]
#
# Parts are bits, clients, hostile, load and page; all of them where none is named. What is measured of this
# commit is kept in serve-HEAD of the target folder and not measured again; what is missing is a row that says
# so.
#   Q4_BIN         q4 to measure, else it is built
#   Q4_SERVE_ISA   instruction set of the parts but bits
#   Q4_CLIENTS     folder with a virtual environment for each client, else one is made from PyPI
#   Q4_PLAYWRIGHT  Python with playwright, for the page
#   Q4_MODEL       folder with a model and its tokenizer for the part load, else the demo model
#   Q4_REQUESTS, Q4_MALFORMED, Q4_DISCONNECTS, Q4_ANSWERS, Q4_ROUNDS  how many
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(cargo metadata --format-version 1 --no-deps |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
work=$target/serve-$(git rev-parse HEAD)
mkdir -p "$work"

say() { printf '%s\n' "$*" >&2; }
if [[ -z ${Q4_BIN:-} ]]; then
    say "building"
    cargo build --release --locked --quiet -p q4 -p nvfp4-native --bins --lib
    Q4_BIN=$target/release/q4
fi
parts=("$@")
[[ $# -gt 0 ]] || parts=(bits clients hostile load page)

# One environment a client: they want different versions of each other. uv finds those quickly.
install() {
    local tool=$Q4_CLIENTS/tool/bin extra
    [[ -x $tool/uv ]] || { python3 -m venv "${tool%/bin}" && "$tool/pip" install --quiet uv; } || return
    for name in $(python3 bench/serve_clients.py --list); do
        [[ -e $Q4_CLIENTS/$name/done ]] && continue
        say "installing $name"
        case $name in
        lm_eval) extra=("lm_eval[api]" transformers) ;;
        pydantic-ai-slim) extra=("pydantic-ai-slim[openai,anthropic]") ;;
        *) extra=("$name") ;;
        esac
        rm -rf "${Q4_CLIENTS:?}/$name"
        if "$tool/uv" venv --quiet --python python3 "$Q4_CLIENTS/$name" &&
            "$tool/uv" pip install --quiet --python "$Q4_CLIENTS/$name/bin/python" "${extra[@]}"; then
            touch "$Q4_CLIENTS/$name/done"
        else
            rm -rf "${Q4_CLIENTS:?}/$name"
            say "$name cannot be installed"
        fi
    done
}

rows=(--q4 "$Q4_BIN" --work "$work" --isa "${Q4_SERVE_ISA:-}" --model "${Q4_MODEL:-demo}"
    --requests "${Q4_REQUESTS:-1000}" --malformed "${Q4_MALFORMED:-20000}"
    --disconnects "${Q4_DISCONNECTS:-500}" --answers "${Q4_ANSWERS:-4}" --rounds "${Q4_ROUNDS:-3}"
    --browser "${Q4_PLAYWRIGHT:-}")
for part in "${parts[@]}"; do
    [[ -e $work/$part.json ]] && continue
    say "$part"
    more=()
    if [[ $part == clients ]]; then
        if [[ -z ${Q4_CLIENTS:-} ]]; then
            Q4_CLIENTS=$target/serve-clients
            install || say "no clients can be installed"
        fi
        more=(--venvs "$Q4_CLIENTS")
    fi
    python3 bench/serve.py "$part" "${rows[@]}" ${more+"${more[@]}"} > "$work/$part"
    mv "$work/$part" "$work/$part.json"
done

python3 bench/serve.py whole "${rows[@]}" > "$work/serve.json"
mv "$work/serve.json" bench/results/serve.json
