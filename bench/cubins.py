#!/usr/bin/env python3
"""Compiles every CUDA kernel with NVRTC as the program does and writes a hash of its instructions.

cubins.py OUT.json [--against OLD.json] [--only NAME] needs no device: only NVRTC, found in Q4_CUDA_LIBS or by
the loader. A row is one kernel of one program (source, architecture, options): bytes of instructions, their
hash, registers, bytes of its frame and of shared memory that it declares (more may be asked for by a launch). Compared with OLD.json it prints what differs, and takes over what has the
text it had there.
"""
import argparse
import concurrent.futures
import ctypes
import hashlib
import json
import os
import pathlib
import re
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARED = "backends/base/cuda/cuda"
# q4-cuda's table of architectures: one of each major number, those with wgmma, those with FP4 tensor cores.
TABLE = sorted(
    (int(major), int(minor), int(kib), wgmma == "true", fp4 == "true")
    for major, minor, kib, wgmma, fp4 in re.findall(
        r"row\(\((\d+), (\d+)\), (\d+), \w+, (\w+), (\w+)\)", (ROOT / SHARED / "../src/arch.rs").read_text()
    )
)
SHARED_OF = {f"sm_{major}{minor}{'a' if major >= 9 else ''}": kib << 10 for major, minor, kib, *_ in TABLE}
ALL, HOPPER, FP4 = ([a for a, row in zip(SHARED_OF, TABLE) if has(row)] for has in (lambda r: r[1] == 0, lambda r: r[3], lambda r: r[4]))
PLAIN = [[]]


def defines(names, *rows):
    return [[f"-D{n}={v}" for n, v in zip(names.split(), row)] for row in rows]


NVFP4, LEVELS, MODEL = "backends/nvfp4-kernel/native/cuda", "backends/base/codebook/cuda", "model/cuda"
FAMILIES = defines("Q4_STAGES Q4_STAGES_FEW Q4_FAMILY", *((3, 3, f) for f in range(5)))
# Tile shapes of nvfp4's tiles.rs, and of codebook's rounded.rs.
TILES = [(32, 2, 1), (64, 2, 1), (64, 2, 2), (64, 2, 4), (128, 2, 1), (128, 3, 1), (176, 2, 2), (256, 2, 1)]
SHAPES = [
    (32, 2, 1, 1, 12, 1), (32, 3, 1, 1, 6, 1), (64, 2, 1, 1, 8, 1), (64, 3, 1, 1, 6, 1), (128, 2, 1, 1, 6, 1), (256, 2, 2, 1, 4, 0),
    (64, 3, 1, 8, 6, 1), (64, 2, 1, 2, 8, 1), (176, 2, 2, 2, 4, 0), (128, 3, 2, 1, 4, 0),
]
ROUNDED = defines("TN WGS PAIR SPLIT PACKS ORDERED", *SHAPES)
# Where codes are bytes, what there is room for is in flight.
BYTES = defines("TN WGS PAIR SPLIT PACKS ORDERED", *((*s[:4], p, s[5]) for s, p in zip(SHAPES, (10, 6, 8, 6, 6, 4, 4, 8, 4, 4))))
# Shapes of codebook's fp8.rs, of x with scales for rows and for 128 of k.
FP8 = [(64, 2, 1), (64, 3, 1), (128, 2, 1), (128, 3, 1), (64, 2, 2), (64, 2, 4), (128, 3, 2)]
# `CODINGS` of codebook's cuda.rs: NF4, whole numbers with scales of five kinds, E2M1, E4M3.
INT4, E2M1 = defines("LEVELS SCALES", *((1, s) for s in range(5))), ["-DLEVELS=2", "-DSCALES=2"]
E4M3 = ["-DLEVELS=3", "-DSCALES=0", "-DCODE_BITS=8"]
CODINGS = [[], *INT4, E2M1]
# How many widths of tiles there are: scales of whole numbers do not go into operands, nor those of halves of
# tiles beside them.
GEMMS = [([], 4), *((INT4[i], 3) for i in (0, 3, 4)), (E2M1, 4), (E4M3, 3)]
HEADS = [64, 80, 96, 128]

# Name, source, architectures, options of each time it is compiled.
PROGRAMS = [
    ("rows", f"{SHARED}/rows.cu", sorted({*ALL, *FP4}), PLAIN),
    ("nvfp4-simple", f"{NVFP4}/simple.cu", sorted({*ALL, *FP4}), PLAIN),
    ("nvfp4-fp4", f"{NVFP4}/fp4.cu", FP4, PLAIN),
    ("nvfp4-gemv", f"{NVFP4}/gemv.cu", ALL, FAMILIES),
    ("nvfp4-row", f"{NVFP4}/row.cu", ALL, [FAMILIES[f] + ["-DQ4_ROW"] for f in (0, 3, 4)]),
    ("nvfp4-order", f"{NVFP4}/order.cu", HOPPER, PLAIN),
    ("nvfp4-gemm", f"{NVFP4}/gemm.cu", HOPPER, defines("TN WGS KS ELEMENT", *((*t, e) for t in TILES for e in ("bf16", "f16")))),
    ("levels-simple", f"{LEVELS}/simple.cu", ALL, [*CODINGS, E4M3]),
    ("levels-gemv", f"{LEVELS}/gemv.cu", ALL, [*CODINGS, E4M3]),
    ("levels-row", f"{LEVELS}/row.cu", ALL, [*CODINGS, E4M3]),
    ("levels-order", f"{LEVELS}/order.cu", HOPPER, PLAIN),
    ("levels-gemm", f"{LEVELS}/gemm.cu", HOPPER, [c + t for c, most in GEMMS for t in defines("TN", (32,), (64,), (128,), (256,))[:most]]),
    ("levels-rows", f"{LEVELS}/rows.cu", HOPPER, PLAIN),
    ("levels-rounded", f"{LEVELS}/rounded.cu", HOPPER, [c + t for c in CODINGS for t in ROUNDED] + [E4M3 + t for t in BYTES]),
    ("levels-codes", f"{LEVELS}/codes.cu", HOPPER, PLAIN),
    ("levels-fp8", f"{LEVELS}/fp8.cu", HOPPER, [E4M3 + t for t in defines("TN WGS SPLIT X_BLOCKS", *((*t, b) for t in FP8 for b in (0, 1)))]),
    ("dense", "backends/dequant-matmul/cuda/dense.cu", ALL, PLAIN),
    ("model-rows", f"{MODEL}/rows.cu", ALL, PLAIN),
    ("attention", f"{MODEL}/attention.cu", ALL, PLAIN + defines("HEAD_DIM SLOTS", *((d, s) for d in HEADS for s in (1, 2)))),
    ("prefill", f"{MODEL}/prefill.cu", ALL, defines("HEAD_DIM", *((d,) for d in HEADS))),
    ("prefill_wide", f"{MODEL}/prefill_wide.cu", HOPPER, defines("HEAD_DIM", (64,), (128,))),
    ("head", f"{MODEL}/head.cu", ALL, PLAIN),
    ("sample", f"{MODEL}/draw.cu", ALL, PLAIN),
    ("roofline", "cli/cuda/roofline.cu", ALL, PLAIN),
    ("optimizer", "trainer/src/optim/kernel.cu", ALL, [["--fmad=false"]]),
]


def whole(path, met):
    """The text with what it includes by name, each file once, as q4-cuda's `Source::whole` does."""
    def place(match):
        if match[1] in met:
            return ""
        met.add(match[1])
        folders = [path.parent, ROOT / SHARED]
        return whole(next(f / match[1] for f in folders if (f / match[1]).exists()), met)

    return re.sub(r'^#include "(.+)"$', place, path.read_text(), flags=re.M)


def library():
    folders = os.environ.get("Q4_CUDA_LIBS", "").split(":")
    for folder in map(pathlib.Path, filter(None, folders)):
        for name in sorted(folder.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(name), ctypes.RTLD_GLOBAL)
        for name in sorted(folder.glob("libnvrtc.so*")):
            return ctypes.CDLL(str(name))
    return ctypes.CDLL("libnvrtc.so")


def compiled(job):
    """Rows of a program: kernel, registers, bytes of instructions, their hash."""
    name, text, arch, options = job
    nvrtc = library()
    options = [f"--gpu-architecture={arch}", "--std=c++17", f"-DQ4_SHARED={SHARED_OF[arch]}", *options]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options)))
    if status:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(f"{name} for {arch} {options}: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if folder := os.environ.get("Q4_CUBINS_KEEP"):
        file = pathlib.Path(folder) / ("_".join([name, arch, *options[3:]]) + ".cubin")
        file.write_bytes(image.raw)
    return sections(image.raw)


def sections(image):
    """`.text.KERNEL` of an ELF of 64 bits, and what `.nv.info` says of it."""
    start, size, count, names = struct.unpack_from("<Q10xHHH", image, 0x28)
    heads = [struct.unpack_from("<IIQQQQIIQQ", image, start + i * size) for i in range(count)]
    parts, sizes = {}, {}
    for name, _, _, _, offset, length, *_ in heads:
        name += heads[names][4]
        name = image[name:image.index(b"\0", name)].decode()
        parts[name], sizes[name] = image[offset:offset + length], length
    found = {}
    for name, code in parts.items():
        if name.startswith(".text."):
            shared = sizes.get(f".nv.shared.{name[6:]}", 0)
            found[name[6:]] = {"bytes": len(code), "hash": hashlib.sha256(code).hexdigest()[:16], "shared": shared}
    info, at = parts[".nv.info"], 0
    while at < len(info):
        form, kind, length = struct.unpack_from("<BBH", info, at)
        if form == 4 and kind in (0x2F, 0x11):  # registers of a kernel, bytes of its frame: spills are there
            symbol, value = struct.unpack_from("<II", info, at + 4)
            name = struct.unpack_from("<I", parts[".symtab"], 24 * symbol)[0]
            name = parts[".strtab"][name:parts[".strtab"].index(b"\0", name)].decode()
            if name in found:
                found[name]["registers" if kind == 0x2F else "frame"] = value
        at += 4 + (length if form == 4 else 0)
    return found


def jobs(only):
    for name, path, archs, options in PROGRAMS:
        if only is None or name == only:
            text = whole(ROOT / path, {pathlib.Path(path).name})
            for arch in archs:
                for choice in options:
                    yield " ".join([name, arch, *choice]), (name, text, arch, choice)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path)
    parser.add_argument("--only")
    args = parser.parse_args()
    old = json.loads(args.against.read_text()) if args.against else {}
    new, todo = {}, {}
    for key, job in jobs(args.only):
        text = hashlib.sha256(job[1].encode()).hexdigest()[:16]
        new[key] = {"text": text}
        if old.get(key, {}).get("text") == text:
            new[key] = old[key]
        else:
            todo[key] = job
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for key, kernels in zip(todo, pool.map(compiled, todo.values())):
            new[key]["kernels"] = kernels
    args.out.write_text(json.dumps(new, indent=1) + "\n")
    print(f"{len(new)} programs, {sum(len(p['kernels']) for p in new.values())} kernels, {len(todo)} programs compiled")
    if not args.against:
        return
    differs = 0
    for key in sorted(new.keys() & old.keys()):
        before, after = old[key]["kernels"], new[key]["kernels"]
        for kernel in sorted(before.keys() | after.keys()):
            a, b = before.get(kernel), after.get(kernel)
            if a != b:
                differs += 1
                print(f"{key} {kernel}: {a} -> {b}")
    print(f"{differs} kernels differ")
    sys.exit(differs > 0)


main()
