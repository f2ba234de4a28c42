#!/bin/sh
# Builds the example plugins outside of the workspace, as their authors would, into a folder:
#   plugins/examples/build.sh OUT_DIR
# CC, CFLAGS and CARGO_TARGET_DIR are honoured.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: build.sh OUT_DIR}
mkdir -p "$out"
out=$(cd "$out" && pwd)
for name in acme_c acme_arena; do
    ${CC:-cc} -std=c11 -O3 ${CFLAGS:-} -ffp-contract=off -Wall -Wextra -pedantic -Werror -fPIC -shared -fvisibility=hidden \
        -I"$here/../abi/include" "$here/c/$name.c" -o "$out/lib$name.so" -lm
done
target=${CARGO_TARGET_DIR:-$here/rust/target}
cargo build --quiet --release --manifest-path "$here/rust/Cargo.toml" --target-dir "$target"
cp "$target/release/libacme_nvfp4.so" "$out/libacme_nvfp4.so"
ls -l "$out"
