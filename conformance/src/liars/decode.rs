//! Mutants that read the stored bits wrongly: every defect that a 4-bit decoder was ever seen to have.
use super::Mutant;
use super::parts::{Block, Element, Element8, HONEST, Parts, each, float, nibble, right_scale};
use crate::Level::{L1, L4};
use q4_core::formats::ggml::Blocks;
use q4_core::formats::{e2m1, e4m3, e8m0, nf4, swizzle};
use q4_core::{Convention, DType, GlobalScale};

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L1 "nibbles-swapped": "the high nibble comes first" {
        nibbles: |codes, from, low, out| each(out, from, |i| nibble(codes, i ^ 1, low)),
    }
    L1 "nibble-order-ignored": "NF4 is always read as bitsandbytes packs it" {
        nibbles: |codes, from, _, out| each(out, from, |i| nibble(codes, i, false)),
    }
    L1 "scales-tiled": "block scales repeat one after the other instead of each over its block" {
        scale_at: |b| right_scale(Block { block: (b.block * 16) % b.blocks, ..b }),
    }
    L1 "scales-transposed": "block scales are read column by column" {
        scale_at: |b| if b.is_tiled { right_scale(b) } else { b.block * b.rows + b.row },
    }
    L1 "scales-shifted": "each block takes the scale of the next" { scale_at: |b| right_scale(b) + 1 }
    L1 "swizzled-read-as-rows": "tiled scales are read as if they were row-major" {
        scale_at: |b| b.row * b.blocks + b.block,
    }
    L1 "rows-read-as-swizzled": "row-major scales are read as if they were tiled" {
        scale_at: |b| swizzle::offset(b.row, b.block, b.blocks),
    }
    L1 "scale-of-the-row": "the first scale of a row is used for all of it" {
        scale_at: |b| right_scale(Block { block: 0, ..b }),
    }
    L1 "scales-as-integers": "the byte of an E4M3 scale is used as a number" {
        e4m3: |byte| f32::from(byte) / 448.0,
    }
    L1 "scales-as-e5m2": "scale bytes are read as the other 8-bit float" {
        e4m3: |byte| half::f16::from_bits(u16::from(byte) << 8).to_f32(),
    }
    L1 "top-row-nan": "the top exponent row of E4M3 is NaN" {
        e4m3: |byte| if byte & 0x78 == 0x78 { f32::NAN } else { e4m3::decode(byte) },
    }
    L1 "subnormal-scales-flushed": "E4M3 scales below 2^-6 are zero" {
        e4m3: |byte| if byte & 0x78 == 0 { 0.0 } else { e4m3::decode(byte) },
    }
    L1 "scales-divided": "the element is divided by its scale" {
        value: |code, scale, global| code / global.map_or(scale, |g| g.effective(scale)),
    }
    L1 "global-dropped": "the per-tensor scale is not applied" { value: |code, scale, _| code * scale }
    L1 "global-squared": "the per-tensor scale is applied twice" {
        value: |code, scale, g| code * g.map_or(scale, |g| g.effective(g.effective(scale))),
    }
    L1 "global-always-multiplied": "a dividing per-tensor scale multiplies" {
        value: |code, scale, g| code * g.map_or(scale, |g| scale * g.value()),
    }
    L1 "global-by-reciprocal": "a dividing scale is replaced by its rounded reciprocal" {
        value: |code, scale, g| code * scale_by_reciprocal(scale, g),
    }
    L1 "global-of-the-first": "every segment takes the per-tensor scale of the first" { global_of: |_| 0 }
    L1 "rounded-in-another-order": "code times scale first, then the per-tensor scale" {
        value: |code, scale, g| g.map_or(code * scale, |g| g.effective(code * scale)),
    }
    L1 "subnormals-flushed": "values below the normal range of f32 are zero" {
        value: |code, scale, g| {
            let v = (HONEST.value)(code, scale, g);
            if v.is_subnormal() { 0.0 } else { v }
        },
    }
    L1 "decoded-in-half": "values are rounded to f16 on the way" {
        value: |code, scale, g| half::f16::from_f32((HONEST.value)(code, scale, g)).to_f32(),
    }
    L1 "e2m1-entry-off": "code 5 is 2.5 instead of 3" {
        e2m1: |code| match code & 15 {
            5 => 2.5,
            13 => -2.5,
            c => e2m1::decode(c),
        },
    }
    L1 "e2m1-as-integer": "codes are signed integers" { e2m1: |code| f32::from(((code << 4) as i8) >> 4) }
    L1 "powers-of-two-halved": "E8M0 scales are half of what they are" {
        e8m0: |byte| e8m0::decode(byte) / 2.0,
    }
    L1 "powers-of-two-as-e4m3": "E8M0 scales are read as those of NVFP4" { e8m0: e4m3::decode }
    L1 "powers-of-two-as-numbers": "E8M0 scales are read as integers" { e8m0: f32::from }
    L1 "least-power-lost": "E8M0 scales of 2^-127 are zero" {
        e8m0: |byte| if byte == 0 { 0.0 } else { e8m0::decode(byte) },
    }
    L1 "powers-within-half": "E8M0 scales are kept within the range of f16" {
        e8m0: |byte| e8m0::decode(byte.clamp(127 - 14, 127 + 15)),
    }
    L1 "powers-of-two-rounded-up": "E8M0 scales are even powers" { e8m0: |byte| e8m0::decode(byte | 1) }
    L1 "mxfp4-in-blocks-of-16": "MXFP4 has a scale for 16 elements" { power_at: |i| i / 16 }
    L1 "mxfp4-in-blocks-of-64": "MXFP4 has a scale for 64 elements" { power_at: |i| i / 64 }
    L1 "mxfp4-scale-of-the-row": "the first scale of an MXFP4 row is used for all of it" { power_at: |_| 0 }
    L1 "mxfp4-scales-shifted": "each block of MXFP4 takes the scale of the next" { power_at: |i| i / 32 + 1 }
    L1 "int4-zero-one-less": "zero points are those of GPTQ's first format, which stores one less" {
        int4: |code, zero, scale| (HONEST.int4)(code, zero.wrapping_add(1), scale),
    }
    L1 "int4-zero-taken-for-granted": "the zero point is always 8" {
        int4: |code, _, scale| (HONEST.int4)(code, 8, scale),
    }
    L1 "int4-zero-signed": "zero points are signed numbers" {
        int4: |code, zero, scale| {
            f32::from(i16::from(code) - i16::from(((zero << 4) as i8) >> 4)) * scale
        },
    }
    L1 "int4-zero-unscaled": "the zero point is taken off after scaling" {
        int4: |code, zero, scale| f32::from(code) * scale - f32::from(zero),
    }
    L1 "int4-zero-rounded": "code and zero point are scaled and rounded each for itself" {
        int4: |code, zero, scale| f32::from(code) * scale - f32::from(zero) * scale,
    }
    L1 "int4-zero-of-fifteen-lost": "a zero point of 15 is taken for 14" {
        int4: |code, zero, scale| (HONEST.int4)(code, zero.min(14), scale),
    }
    L1 "int4-zeros-transposed": "zero points are read column by column" {
        zero_at: |b| b.block * b.rows + b.row,
    }
    L1 "int4-zero-of-the-row": "the first zero point of a row is used for all of it" {
        zero_at: |b| b.row * b.blocks,
    }
    L1 "int4-zeros-of-eight-rows": "eight out features have the zero points of the first of them" {
        zero_at: |b| b.row / 8 * 8 * b.blocks + b.block,
    }
    L1 "int4-twos-complement": "codes are signed integers" {
        int4: |code, _, scale| f32::from(((code << 4) as i8) >> 4) * scale,
    }
    L1 "affine-bias-taken-off": "the bias of a group is taken off instead of added" {
        affine: |code, scale, bias| f32::from(code) * scale - bias,
    }
    L1 "affine-bias-scaled": "the bias of a group is added to codes, before these are scaled" {
        affine: |code, scale, bias| (f32::from(code) + bias) * scale,
    }
    L1 "affine-bias-as-zero-point": "the bias of a group is taken for the nearest whole number of its scale" {
        affine: |code, scale, bias| match scale {
            0.0 => bias,
            scale => (f32::from(code) + (bias / scale).round()) * scale,
        },
    }
    L1 "affine-rounded-once": "a scaled code and its bias are rounded together" {
        affine: |code, scale, bias| f32::from(code).mul_add(scale, bias),
    }
    L1 "int4-in-groups-of-32": "a group of int4 has 32 elements" { group_at: |i, _| i / 32 }
    L1 "int4-in-groups-of-128": "a group of int4 has 128 elements" { group_at: |i, _| i / 128 }
    L1 "int4-scale-of-the-row": "the first scale of an int4 row is used for all of it" { group_at: |_, _| 0 }
    L1 "int4-groups-shifted": "each group takes scale and zero point of the next" {
        group_at: |i, group| i / group + 1,
    }
    L1 "int4-halves-exchanged": "scales of 16 bits are read as the other type of 16 bits" {
        int4_scale: |bytes, dtype| match dtype {
            DType::F16 => float(bytes, DType::BF16),
            DType::BF16 => float(bytes, DType::F16),
            other => float(bytes, other),
        },
    }
    L1 "int4-scales-within-half": "scales are rounded to f16" {
        int4_scale: |bytes, dtype| half::f16::from_f32(float(bytes, dtype)).to_f32(),
    }
    L1 "int4-scales-unsigned": "the sign of a scale is lost" {
        int4_scale: |bytes, dtype| float(bytes, dtype).abs(),
    }
    L1 "ggml-minima-added": "minima are added instead of taken off" {
        ggml: |e| (HONEST.ggml)(Element { of_mins: -e.of_mins, ..e }),
    }
    L1 "ggml-minima-dropped": "minima are taken for nothing" {
        ggml: |e| (HONEST.ggml)(Element { min: 0, ..e }),
    }
    L1 "ggml-minima-by-the-scale": "minima are multiplied by the f16 of scales" {
        ggml: |e| (HONEST.ggml)(Element { of_mins: e.of_scales, ..e }),
    }
    L1 "ggml-minima-under-the-scale": "minima are taken off codes, before these are scaled" {
        ggml: |e| {
            let code = f32::from(i16::from(e.code) - i16::from(e.zero));
            e.of_scales * f32::from(e.scale) * (code - f32::from(e.min))
        },
    }
    L1 "ggml-scales-of-four-bits": "the last four scales of a block lack their upper bits" {
        apart: |blocks, block| {
            let mut apart = blocks.apart(block);
            if blocks.has_mins() {
                apart.scales[4..8].iter_mut().for_each(|s| *s &= 15);
            }
            apart
        },
    }
    L1 "ggml-upper-bits-exchanged": "the last four scales and minima have each other's upper bits" {
        apart: |blocks, block| {
            let mut apart = blocks.apart(block);
            for g in (4..8).filter(|_| blocks.has_mins()) {
                let (scale, min) = (apart.scales[g].cast_unsigned(), apart.mins[g]);
                apart.scales[g] = (scale & 15 | min & 48).cast_signed();
                apart.mins[g] = min & 15 | scale & 48;
            }
            apart
        },
    }
    L1 "ggml-scales-and-minima-exchanged": "minima are taken for scales" {
        ggml: |e| match e.blocks.has_mins() {
            true => (HONEST.ggml)(Element { scale: e.min.cast_signed(), min: e.scale.cast_unsigned(), ..e }),
            false => (HONEST.ggml)(e),
        },
    }
    L1 "ggml-fifth-bit-dropped": "codes of more than four bits are cut" {
        ggml: |e| (HONEST.ggml)(Element { code: e.code & 15, ..e }),
    }
    L1 "ggml-fifth-bit-of-the-next": "the fifth bits of two runs are exchanged" {
        apart: |blocks, block| {
            let mut apart = blocks.apart(block);
            if blocks == Blocks::Q5K {
                let codes = apart.codes;
                for (i, code) in apart.codes.iter_mut().enumerate() {
                    *code = *code & 15 | codes[i ^ 32] & 16;
                }
            }
            apart
        },
    }
    L1 "ggml-six-bits-in-order": "codes of Q6_K lie in the order of their bytes" {
        apart: |blocks, block| {
            let mut apart = blocks.apart(block);
            if blocks == Blocks::Q6K {
                let codes = apart.codes;
                for (i, code) in apart.codes.iter_mut().enumerate() {
                    let (half, at) = (i / 128 * 128, i % 128);
                    *code = codes[half + at % 2 * 64 + at / 2];
                }
            }
            apart
        },
    }
    L1 "ggml-nibbles-in-order": "a byte of Q4_K holds neighbours" {
        apart: |blocks, block| {
            let mut apart = blocks.apart(block);
            if blocks == Blocks::Q4K {
                let codes = apart.codes;
                for (i, code) in apart.codes.iter_mut().enumerate() {
                    let (run, at) = (i / 64 * 64, i % 64);
                    *code = codes[run + at % 2 * 32 + at / 2];
                }
            }
            apart
        },
    }
    L1 "ggml-scales-unsigned": "scales of Q6_K are unsigned" {
        ggml: |e| {
            let code = f32::from(i16::from(e.code) - i16::from(e.zero));
            let scale = e.of_scales * f32::from(e.scale.cast_unsigned());
            scale * code - e.of_mins * f32::from(e.min)
        },
    }
    L1 "ggml-zero-one-less": "codes are counted from one less" {
        ggml: |e| (HONEST.ggml)(Element { zero: e.zero.saturating_sub(1), ..e }),
    }
    L1 "ggml-bytes-unsigned": "bytes of Q8_0 are unsigned" {
        ggml: |e| match e.blocks {
            Blocks::Q80 => (HONEST.ggml)(Element { code: e.code ^ 128, zero: 0, ..e }),
            _ => (HONEST.ggml)(e),
        },
    }
    L1 "ggml-groups-of-32": "every scale is for 32 elements" { ggml_group: |i, _| i / 32 }
    L1 "ggml-groups-of-16": "every scale is for 16 elements" { ggml_group: |i, _| i / 16 }
    L1 "ggml-scale-of-the-block": "the first group of a block lends its scale to all" {
        ggml_group: |_, _| 0,
    }
    L1 "ggml-floats-of-the-row": "a row has the f16 of its first block" { floats_of: |_, _| 0 }
    L1 "ggml-floats-shifted": "each block takes the f16 of the next" { floats_of: |b, all| (b + 1) % all }
    L1 "ggml-floats-unsigned": "the sign of an f16 is lost" {
        ggml: |e| (HONEST.ggml)(Element { of_scales: e.of_scales.abs(), of_mins: e.of_mins.abs(), ..e }),
    }
    L1 "ggml-scales-within-half": "the product of both scales is rounded to f16" {
        ggml: |e| {
            let half = |v: f32| half::f16::from_f32(v).to_f32();
            let scale = half(e.of_scales * f32::from(e.scale));
            scale * f32::from(i16::from(e.code) - i16::from(e.zero)) - half(e.of_mins * f32::from(e.min))
        },
    }
    L1 "ggml-subnormals-flushed": "an f16 below the normal range is zero" {
        ggml: |e| {
            let flushed = |v: f32| if v.abs() < 6.103_515_6e-5 { 0.0 } else { v };
            (HONEST.ggml)(Element { of_scales: flushed(e.of_scales), of_mins: flushed(e.of_mins), ..e })
        },
    }
    L1 "fp8-as-e5m2": "FP8 codes are read as the other 8-bit float" {
        fp8: |code| half::f16::from_bits(u16::from(code) << 8).to_f32(),
    }
    L1 "fp8-as-fnuz": "FP8 codes have an exponent bias of 8" { fp8: |code| e4m3::decode(code) / 2.0 }
    L1 "fp8-top-row-lost": "FP8 codes from 256 on are 240, as where infinity has their row" {
        fp8: |code| e4m3::decode(code).clamp(-240.0, 240.0),
    }
    L1 "fp8-subnormals-flushed": "FP8 codes below 2^-6 are zero" {
        fp8: |code| if code & 0x78 == 0 { 0.0 } else { e4m3::decode(code) },
    }
    L1 "fp8-subnormals-normal": "FP8 codes below 2^-6 have a leading one" {
        fp8: |code| match code & 0x78 {
            0 => f32::from_bits(u32::from(code & 0x80) << 24 | ((u32::from(code & 7) << 20) + (120 << 23))),
            _ => e4m3::decode(code),
        },
    }
    L1 "fp8-sign-dropped": "the sign of FP8 codes is lost" { fp8: |code| e4m3::decode(code & 0x7f) }
    L1 "fp8-as-integers": "FP8 codes are signed integers" { fp8: |code| f32::from(code.cast_signed()) }
    L1 "fp8-largest-off": "the largest FP8 code is taken for 480" {
        fp8: |code| if code & 0x7f == 0x7e { 480f32.copysign(e4m3::decode(code)) } else { e4m3::decode(code) },
    }
    L1 "fp8-scales-divide": "FP8 codes are divided by their scale, as its name says inverse" {
        fp8_value: |code, scale| code / scale,
    }
    L1 "fp8-scaled-in-bfloat16": "FP8 weights are rounded to bfloat16" {
        fp8_value: |code, scale| half::bf16::from_f32(code * scale).to_f32(),
    }
    L1 "fp8-scaled-in-half": "FP8 weights are rounded to f16" {
        fp8_value: |code, scale| half::f16::from_f32(code * scale).to_f32(),
    }
    L1 "fp8-scale-of-the-first-tile": "the first scale of FP8 is used for all of a matrix" { tile_of: |_| 0 }
    L1 "fp8-scale-of-the-row": "the first scale of an FP8 row is used for all of it" {
        tile_of: |e| (HONEST.tile_of)(Element8 { column: 0, ..e }),
    }
    L1 "fp8-scale-of-the-first-row": "scales of FP8 are those of the first out feature" {
        tile_of: |e| (HONEST.tile_of)(Element8 { row: 0, ..e }),
    }
    L1 "fp8-tiles-transposed": "scales of FP8 tiles are read column by column" {
        tile_of: |e| {
            let [rows, columns] = e.format.grid(e.rows, e.k);
            let at = (HONEST.tile_of)(e);
            at % columns * rows + at / columns
        },
    }
    L1 "fp8-tiles-shifted": "each FP8 tile takes the scale of the next" {
        tile_of: |e| (HONEST.tile_of)(e) + 1,
    }
    L1 "fp8-tiles-of-64": "tiles of FP8 have 64 in features" {
        tile_of: |e| (HONEST.tile_of)(Element8 { column: 2 * e.column, ..e }),
    }
    L1 "fp8-last-tile-lost": "a tile that is cut has the scale of the one before" {
        tile_of: |e| {
            let whole = e.k / e.format.reach(e.k) * e.format.reach(e.k);
            (HONEST.tile_of)(Element8 { column: e.column.min(whole.max(1) - 1), ..e })
        },
    }
    L1 "fp8-rows-cut-lost": "out features behind the last whole tile have the scale of those before" {
        tile_of: |e| match e.format.tile[0] as usize {
            0 => 0,
            tile => {
                let whole = (e.rows / tile * tile).max(1);
                (HONEST.tile_of)(Element8 { row: e.row.min(whole - 1), ..e })
            }
        },
    }
    L1 "halves-of-a-block": "a byte holds elements j and j + 16 of 32, as in GGUF" {
        nibbles: |codes, from, low, out| {
            each(out, from, |i| {
                let (block, j) = (i / 32, i % 32);
                let other = 32 * block + 2 * (j % 16) + j / 16;
                nibble(codes, if other / 2 < codes.len() { other } else { i }, low)
            });
        },
    }
    L4 "nan-power-is-infinite": "the E8M0 byte of NaN is 2^128" {
        e8m0: |byte| if byte == e8m0::NAN { f32::INFINITY } else { e8m0::decode(byte) },
    }
    L1 "nf4-entry-off": "one entry of the codebook is off by one bit" {
        nf4: |code| if code == 11 { nf4::decode(11).next_up() } else { nf4::decode(code) },
    }
    L1 "nf4-as-fp4": "NF4 codes are looked up in the table of E2M1" { nf4: |code| e2m1::decode(code) / 6.0 }
    L1 "absmax-restarts-each-row": "blocks are counted from the start of a row" {
        absmax_at: |i, block, k| i / k * k.div_ceil(block) + i % k / block,
    }
    L1 "absmax-block-of-64": "the block size is taken for granted" { absmax_at: |i, _, _| i / 64 }
    L1 "absmax-shifted": "each block takes the absmax of the next" { absmax_at: |i, block, _| i / block + 1 }
    L1 "offset-dropped": "the mean of double-quantised scales is not added" {
        absmax: |map, _, absmax, _| map * absmax,
    }
    L1 "map-taken-as-linear": "double-quantised scales are read as integers" {
        absmax: |_, code, absmax, offset| (f32::from(code) - 127.0) / 128.0 * absmax + offset,
    }
    L1 "last-block-skipped": "the last block of every row is zero" {
        row: |row, _| {
            let at = row.len().saturating_sub(16);
            row[at..].fill(0.0);
        },
    }
    L1 "last-row-skipped": "the last out feature is zero" {
        row: |row, at| {
            if at.row + 1 == at.n {
                row.fill(0.0);
            }
        },
    }
    L1 "last-column-skipped": "the last in feature is zero" {
        row: |row, _| {
            if let Some(last) = row.last_mut() {
                *last = 0.0;
            }
        },
    }
    L1 "tail-ignored": "what is left of k behind the last 64 is zero" {
        row: |row, _| {
            let whole = row.len() / 64 * 64;
            row[whole..].fill(0.0);
        },
    }
};

fn scale_by_reciprocal(scale: f32, g: Option<GlobalScale>) -> f32 {
    match g {
        Some(g) if g.convention() == Convention::Divide => scale * (1.0 / g.value()),
        Some(g) => g.effective(scale),
        None => scale,
    }
}
