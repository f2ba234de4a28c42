# Functions that install what the server is measured with, into the folder $peers; sourced by others.
source bench/llama.sh

say() { printf '%s\n' "$*" >&2; }

# One environment a client: they want different versions of each other. uv finds those quickly.
environment() { # NAME PACKAGE...
    local name=$1 uv=$peers/tool/bin/uv
    shift
    [[ -e $peers/$name/done ]] && return
    say "installing $name"
    [[ -x $uv ]] || { python3 -m venv "$peers/tool" && "$peers/tool/bin/pip" install --quiet uv; } || return
    rm -rf "${peers:?}/$name"
    "$uv" venv --quiet --python python3 "$peers/$name" &&
        "$uv" pip install --quiet --python "$peers/$name/bin/python" "$@" && touch "$peers/$name/done" ||
        { rm -rf "${peers:?}/$name"; say "$name cannot be installed"; return 1; }
}

clients() {
    local name
    for name in $(PYTHONPATH=bench python3 -m serve.clients --list); do
        case $name in
        lm_eval) environment "$name" "lm_eval[api]" transformers ;;
        pydantic-ai-slim) environment "$name" "pydantic-ai-slim[openai,anthropic]" ;;
        *) environment "$name" "$name" ;;
        esac || true
    done
    [[ -e $peers/node/done ]] || {
        say "installing clients of npm"
        mkdir -p "$peers/node"
        (cd "$peers/node" && npm install --silent openai @anthropic-ai/sdk && touch done)
    } || say "the clients of npm cannot be installed"
}

llama() {
    environment llama cmake gguf ninja numpy scikit-build-core || return
    llama_source "$peers" "$peers/llama/bin" || return
    llama_build "$peers" "$peers/llama/bin" build-server "" llama-server -DLLAMA_BUILD_SERVER=ON ||
        { say "llama-server does not build; see $peers/build-server.log"; return 1; }
}

browser() {
    environment playwright playwright || return
    [[ -n $(command -v chromium || command -v chromium-browser) ]] || { say "no Chromium"; return 1; }
}
