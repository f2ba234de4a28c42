# Functions that make llama.cpp, the peer, of the source package of llama-cpp-python; sourced by others.
llama_version=0.3.36 # of llama-cpp-python

llama_source() { # FOLDER BIN: the source into FOLDER, by the tools in BIN: cmake, ninja, scikit-build-core
    local package=llama_cpp_python-$llama_version
    [[ -d $1/$package ]] && return
    "$2/python" -m pip --version >/dev/null 2>&1 || "$2/python" -m ensurepip >/dev/null || return
    PATH=$2:$PATH "$2/python" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
        --dest "$1" "llama-cpp-python==$llama_version" || return
    tar -xf "$1/$package.tar.gz" -C "$1"
}

# The processor's own instructions, besides what FLAGS take away.
llama_build() { # FOLDER BIN BUILD FLAGS TARGET [OPTION...]: FOLDER/BUILD/bin/TARGET
    local folder=$1 bin=$2 build=$3 flags=$4 target=$5
    shift 5
    [[ -e $folder/$build/done ]] && return
    printf 'building llama.cpp (%s); this takes minutes\n' "$build" >&2
    # Its commit is asked of git, which must not find somebody else's repository above it. The last word on an
    # option is that of OPTION.
    PATH=$bin:$PATH GIT_CEILING_DIRECTORIES=$folder cmake -G Ninja \
        -S "$folder/llama_cpp_python-$llama_version/vendor/llama.cpp" -B "$folder/$build" \
        -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DGGML_CCACHE=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
        -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DCMAKE_C_FLAGS="$flags" \
        -DCMAKE_CXX_FLAGS="$flags" "$@" >"$folder/$build.log" 2>&1 &&
        PATH=$bin:$PATH nice ninja -C "$folder/$build" -j"$(nproc)" "$target" >>"$folder/$build.log" 2>&1 &&
        touch "$folder/$build/done"
}
