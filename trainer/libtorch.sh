#!/usr/bin/env bash
# The libtorch that CPU training links: 2.11.0 out of the PyPI wheel, without its 400 MB of CUDA kernels.
#
#   source trainer/libtorch.sh          # fetches once, then sets LIBTORCH for cargo
#   trainer/libtorch.sh                 # the same, and prints what to export
#
# Everything lands in $Q4_LIBTORCH (default: ~/.cache/q4/libtorch-2.11.0-cpu). pip's own configuration says which index
# is asked. For GPU training run the finished binary against a full libtorch 2.11: see docs/training.md.
q4_libtorch() (
    set -euo pipefail
    root=$1
    [ -e "$root/complete" ] && exit 0
    for tool in python3 gcc; do
        command -v $tool >/dev/null || { echo "libtorch.sh: need $tool; have none" >&2; exit 1; }
    done
    python3 -m pip --version >/dev/null || { echo "libtorch.sh: need pip for python3; have none" >&2; exit 1; }
    [ "$(uname -sm)" = "Linux x86_64" ] || {
        echo "libtorch.sh: need Linux x86_64; have $(uname -sm). Set LIBTORCH to a libtorch 2.11.0 of your own." >&2
        exit 1
    }
    mkdir -p "$(dirname "$root")"
    work=$(mktemp -d "$root.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    echo "libtorch.sh: fetching libtorch 2.11.0 (544 MB, once) for $root" >&2
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_25_x86_64 --platform manylinux2014_x86_64 \
        --no-cache-dir --dest "$work/wheels" \
        torch==2.11.0 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85 >&2
    (cd "$work/wheels" && sha256sum --quiet --check) >&2 <<'SUMS'
0f68f4ac6d95d12e896c3b7a912b5871619542ec54d3649cf48cc1edd4dd2756  torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl
7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548  nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl
4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8  nvidia_cuda_cupti-13.0.85-py3-none-manylinux_2_25_x86_64.whl
SUMS
    python3 - "$work" <<'UNPACK'
import glob, sys, zipfile
work = sys.argv[1]
keep = ("torch/lib/libc10.so", "torch/lib/libtorch_cpu.so", "torch/lib/libgomp.so.1", "torch/include/",
        "nvidia/cu13/lib/libcudart.so.13", "nvidia/cu13/lib/libcupti.so.13")
for wheel in glob.glob(work + "/wheels/*.whl"):
    with zipfile.ZipFile(wheel) as z:
        z.extractall(work, [n for n in z.namelist() if n.startswith(keep)])
UNPACK
    # The wheel's libtorch.so needs libtorch_cuda.so; an empty one is all the linker asks for.
    gcc -shared -Wl,-soname,libtorch.so -o "$work/torch/lib/libtorch.so" -x c /dev/null
    rm -rf "$work/wheels"
    touch "$work/complete"
    rm -rf "$root"
    mv "$work" "$root"
    trap - EXIT
)

Q4_LIBTORCH=${Q4_LIBTORCH:-${XDG_CACHE_HOME:-$HOME/.cache}/q4/libtorch-2.11.0-cpu}
if q4_libtorch "$Q4_LIBTORCH"; then
    export Q4_LIBTORCH LIBTORCH="$Q4_LIBTORCH/torch"
    [ "${BASH_SOURCE[0]}" != "$0" ] || echo "export LIBTORCH=$LIBTORCH"
else
    echo "libtorch.sh: no libtorch" >&2
    [ "${BASH_SOURCE[0]}" != "$0" ] || exit 1
    false
fi
