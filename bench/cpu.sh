#!/usr/bin/env bash
# Measures q4 beside its peers on this machine's processors: bench/cpu.sh [--help]. See docs/benchmarks.md.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=${XDG_CACHE_HOME:-$HOME/.cache}/q4-bench
llama_version=0.3.36 # of llama-cpp-python, whose source package holds llama.cpp
openvino_version=2026.4.1
peers=1
amx=$(grep -cwm1 amx_int8 /proc/cpuinfo 2>/dev/null || true)
without_amx=0
pass=()
for arg in "$@"; do
    case $arg in
    --no-peers) peers=0 ;;
    --without-amx) without_amx=$amx pass+=("$arg") ;;
    *) pass+=("$arg") ;;
    esac
done
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec python3 bench/cpu.py --help
fi
mkdir -p "$cache"

say() { printf '%s\n' "$*" >&2; }
jobs=$(nproc)
python=$cache/venv/bin/python

if [[ -z ${Q4_BIN:-} ]]; then
    say "building q4"
    cargo build --release --quiet
    Q4_BIN=${CARGO_TARGET_DIR:-target}/release/q4
fi

model() { # NAME COMMAND...: writes $cache/NAME unless it is there
    local out=$cache/$1
    shift
    [[ -e $out ]] || { say "writing ${out##*/}"; "$@" "$out"; }
}

tools() {
    [[ -x $python ]] || python3 -m venv "$cache/venv"
    "$python" -c 'import cmake, gguf, ninja, numpy' 2>/dev/null ||
        "$python" -m pip install --quiet cmake gguf ninja numpy scikit-build-core
}

llama() {
    local source=$cache/llama_cpp_python-$llama_version/vendor/llama.cpp
    if [[ ! -d $source ]]; then
        "$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
            --dest "$cache" "llama-cpp-python==$llama_version" || return
        tar -xf "$cache/llama_cpp_python-$llama_version.tar.gz" -C "$cache" || return
    fi
    # The processor's own instructions, first without AMX, then, where there is AMX, its library again with it.
    build "$source" build -mno-amx-int8 llama-bench || return
    if ((amx && !without_amx)); then
        build "$source" build-amx "" ggml-cpu || return
    fi
    for shape in 0.6b 4b; do
        gguf "$source" "$shape" Q4_0 || return
    done
    gguf "$source" 0.6b NVFP4
}

build() { # SOURCE FOLDER FLAGS TARGET
    [[ -e $cache/$2/done ]] && return
    say "building llama.cpp ($2); this takes minutes"
    # Its commit is asked of git, which must not find somebody else's repository above it.
    PATH=$cache/venv/bin:$PATH GIT_CEILING_DIRECTORIES=$(dirname "$1") cmake -G Ninja -S "$1" -B "$cache/$2" -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DGGML_CCACHE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
        -DCMAKE_C_FLAGS="$3" -DCMAKE_CXX_FLAGS="$3" >"$cache/$2.log" 2>&1 &&
        PATH=$cache/venv/bin:$PATH nice ninja -C "$cache/$2" -j"$jobs" "$4" >>"$cache/$2.log" 2>&1 &&
        touch "$cache/$2/done" ||
        { say "llama.cpp does not build; see $cache/$2.log"; return 1; }
}

gguf() { # SOURCE SHAPE TYPE
    PYTHONPATH=$1/gguf-py model "qwen3-$2-$3.gguf" "$python" bench/gguf_model.py "qwen3-$2" "$3"
}

openvino() {
    "$python" -c 'import openvino' 2>/dev/null ||
        "$python" -m pip install --quiet "openvino==$openvino_version" || return
    model qwen3-0.6b-int4.xml "$python" bench/openvino_model.py qwen3-0.6b
}

without=()
if ((peers)); then
    tools && llama || without+=(llama.cpp)
    # Held back from AMX it would not run as on a processor without it.
    ((without_amx)) || { [[ -x $python ]] && openvino; } || without+=(OpenVINO)
else
    without+=(llama.cpp OpenVINO)
fi
for peer in ${without+"${without[@]}"}; do
    say "no figures of $peer in this run"
done
model qwen3-4b-nvfp4 "$Q4_BIN" bench --shape qwen3-4b --write

exec python3 bench/cpu.py --q4 "$Q4_BIN" --cache "$cache" --without "${without[*]-}" ${pass+"${pass[@]}"}
