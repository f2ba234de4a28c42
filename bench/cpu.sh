#!/usr/bin/env bash
# Measures q4 beside its peers on this machine's processors: bench/cpu.sh [--help]. See docs/benchmarks.md.
set -euo pipefail
cd "$(dirname "$0")/.."

source bench/llama.sh
cache=${XDG_CACHE_HOME:-$HOME/.cache}/q4-bench
openvino_version=2026.4.1
peers=1
amx=$(grep -cwm1 amx_int8 /proc/cpuinfo 2>/dev/null || true)
without_amx=0
isa=
shapes=(0.6b 4b)
pass=()
last=
for arg in "$@"; do
    case $arg in
    --no-peers) peers=0 ;;
    --without-amx) without_amx=$amx pass+=("$arg") ;;
    --isa=*) isa=${arg#*=} pass+=("$arg") ;;
    *) pass+=("$arg") ;;
    esac
    case $last in
    --isa) isa=$arg ;;
    --shape) shapes=("${arg#qwen3-}") ;;
    esac
    last=$arg
done
# Of one instruction set it measures other things.
script=bench/cpu${isa:+_cells}.py
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec python3 "$script" --help
fi
case $isa in
'' | avx2 | avx512vnni) ;;
*) exec python3 "$script" ${pass+"${pass[@]}"} ;; # which says what there is
esac
mkdir -p "$cache"

say() { printf '%s\n' "$*" >&2; }
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
    llama_source "$cache" "$cache/venv/bin" || return
    # The processor's own instructions, first without AMX, then, where there is AMX, its library again with it.
    build build -mno-amx-int8 llama-bench || return
    if ((amx && !without_amx)); then
        build build-amx "" ggml-cpu || return
    fi
    for shape in 0.6b 4b; do
        gguf "$source" "$shape" Q4_0 || return
    done
    gguf "$source" 0.6b NVFP4
}

# llama.cpp for one instruction set: what it finds on this machine, or no more than AVX2 has.
llama_for() { # ISA
    llama_source "$cache" "$cache/venv/bin" || return
    case $1 in
    avx2) build build-avx2 "" llama-bench -DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON \
        -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX_VNNI=OFF -DGGML_AVX512=OFF ;;
    *) build build -mno-amx-int8 llama-bench ;;
    esac || return
    for shape in "${shapes[@]}"; do
        for type in Q4_0 Q4_K; do
            gguf "$cache/llama_cpp_python-$llama_version/vendor/llama.cpp" "$shape" "$type" || return
        done
    done
}

build() { # FOLDER FLAGS TARGET [OPTION...]
    llama_build "$cache" "$cache/venv/bin" "$@" ||
        { say "llama.cpp does not build; see $cache/$1.log"; return 1; }
}

gguf() { # SOURCE SHAPE TYPE
    PYTHONPATH=$1/gguf-py model "qwen3-$2-$3.gguf" "$python" bench/gguf_model.py "qwen3-$2" "$3"
}

openvino() { # SHAPE...
    "$python" -c 'import openvino' 2>/dev/null ||
        "$python" -m pip install --quiet "openvino==$openvino_version" || return
    local shape
    for shape in "$@"; do
        model "qwen3-$shape-int4.xml" "$python" bench/openvino_model.py "qwen3-$shape" || return
    done
}

without=()
if [[ -n $isa ]]; then
    { ((peers)) && tools && llama_for "$isa"; } || without+=(llama.cpp)
    # It cannot be held to a set, and takes all that the processor has.
    case $isa in
    avx2) beyond='avx512f|avx_vnni' ;;
    *) beyond=amx_int8 ;;
    esac
    { ((peers)) && ! grep -qwE "$beyond" /proc/cpuinfo && openvino "${shapes[@]}"; } || without+=(OpenVINO)
elif ((peers)); then
    tools && llama || without+=(llama.cpp)
    # Held back from AMX it would not run as on a processor without it.
    ((without_amx)) || { [[ -x $python ]] && openvino 0.6b; } || without+=(OpenVINO)
else
    without+=(llama.cpp OpenVINO)
fi
for peer in ${without+"${without[@]}"}; do
    say "no figures of $peer in this run"
done
[[ -n $isa ]] || model qwen3-4b-nvfp4 "$Q4_BIN" bench --shape qwen3-4b --write

exec python3 "$script" --q4 "$Q4_BIN" --cache "$cache" --without "${without[*]-}" ${pass+"${pass[@]}"}
