//! A model of the device layout (cuda/layout.cuh) on the CPU: what `q4_pack` must write, and its inverse.
use q4_core::formats::{e2m1, e4m3};
use q4_cuda::UNIT;

/// Lowest bit of the magnitude of pair p in its half of a word.
const MAGNITUDE: [u32; 4] = [6, 3, 0, 9];
/// Its sign.
const SIGN: [u32; 4] = [15, 12, 13, 14];

/// Byte of the scale as the device keeps it: an f16 without its last seven bits, never subnormal.
pub fn scale(e4m3: u8) -> u8 {
    match (e4m3 >> 3, e4m3 & 7) {
        (0, 0) => 0x08,
        (0, m) => {
            let up = m.leading_zeros() as u8 - 4;
            (9 - up) << 3 | (m << up & 7)
        }
        (e, m) => (e + 8) << 3 | m,
    }
}

/// Eight codes to a word, by place.
pub fn word(codes: [u8; 8]) -> u32 {
    codes.iter().enumerate().fold(0, |w, (place, &c)| {
        let (p, half) = (place / 2, 16 * (place as u32 % 2));
        w | u32::from(c & 7) << (MAGNITUDE[p] + half) | u32::from(c >> 3 & 1) << (SIGN[p] + half)
    })
}

/// The inverse of [`word`].
pub fn codes(word: u32) -> [u8; 8] {
    std::array::from_fn(|place| {
        let (p, half) = (place / 2, 16 * (place as u32 % 2));
        (word >> (MAGNITUDE[p] + half) & 7 | (word >> (SIGN[p] + half) & 1) << 3) as u8
    })
}

/// First byte of the words of a block of 16, and the byte of its scale, in a matrix of `units` units a row
/// group.
pub fn at(row: usize, block: usize, units: usize) -> (usize, usize) {
    let (unit, tile, lane) = (row / 16 * units + block / 8, block / 4 % 2, row % 8 * 4 + block % 4);
    (unit * UNIT + tile * 512 + lane * 16, unit * UNIT + 1024 + lane * 4 + tile * 2 + row / 8 % 2)
}

/// Of k in a block: its word, and the place of its code there.
pub fn place(row: usize, k: usize) -> (usize, usize) {
    (k % 8 / 2, k / 8 % 2 * 4 + row / 8 % 2 * 2 + k % 2)
}

/// Packs `rows` rows of checkpoint bytes (low nibble first, E4M3 scales) of `k` columns; zeros beyond them.
pub fn pack(packed: &[u8], scales: &[u8], rows: usize, k: usize) -> Vec<u8> {
    let units = k.div_ceil(128);
    let mut out = vec![0; rows.div_ceil(16) * units * UNIT];
    for row in 0..rows.next_multiple_of(16) {
        for block in 0..units * 8 {
            let inside = row < rows && block < k / 16;
            let first = row * (k / 16) + block;
            let step = if inside { scales[first] } else { 0 };
            // A zero scale keeps the signs of its zeros.
            let keep = if step == 0 { 8 } else { 15 };
            let code = |i: usize| if inside { packed[first * 8 + i / 2] >> (4 * (i % 2)) & keep } else { 0 };
            let (codes_at, scale_at) = at(row, block, units);
            for i in 0..16 {
                let (word_at, place) = place(row, i);
                let bytes = &mut out[codes_at + 4 * word_at..][..4];
                // Of the other row's codes nothing changes.
                let mut all = codes(u32::from_le_bytes(std::array::from_fn(|i| bytes[i])));
                all[place] = code(i);
                bytes.copy_from_slice(&word(all).to_le_bytes());
            }
            out[scale_at] = scale(step);
        }
    }
    out
}

/// The decoded element, without per-tensor scale: how the kernels read the layout.
pub fn decoded(bytes: &[u8], row: usize, k: usize, units: usize) -> f32 {
    let (codes_at, scale_at) = at(row, k / 16, units);
    let (word_at, place) = place(row, k % 16);
    let word = u32::from_le_bytes(std::array::from_fn(|i| bytes[codes_at + 4 * word_at + i]));
    e2m1::decode(codes(word)[place]) * f32::from_bits((u32::from(bytes[scale_at]) << 20) + 0x3800_0000)
}

/// The four pairs of a word as the kernels shift and mask them to bf16, times 2^-126.
pub fn pairs(w: u32) -> [u32; 4] {
    let m = 0x81c0_81c0;
    [
        w & m,
        w << 3 & m,
        (w & 0x2007_2007).wrapping_mul(68) & m,
        (w >> 3 & 0x01c0_01c0) | (w << 1 & 0x8000_8000),
    ]
}

#[test]
fn every_scale_keeps_its_value() {
    for byte in 1..0x7fu8 {
        let bits = (u32::from(scale(byte)) << 20) + 0x3800_0000;
        assert_eq!(f32::from_bits(bits), e4m3::decode(byte), "{byte:#04x}");
        assert_eq!(
            half::f16::from_bits(u16::from(scale(byte)) << 7).to_f32(),
            e4m3::decode(byte),
            "{byte:#04x}"
        );
    }
}

#[test]
fn words_come_back_and_decode_by_shift_and_mask() {
    for seed in 0..20_000u32 {
        let raw = seed.wrapping_mul(2_654_435_761) ^ seed << 11;
        let c: [u8; 8] = std::array::from_fn(|i| (raw >> (4 * i) & 15) as u8);
        let w = word(c);
        assert_eq!(codes(w), c);
        for (p, pair) in pairs(w).into_iter().enumerate() {
            for z in 0..2 {
                let bits = pair >> (16 * z) & 0xffff;
                // Exact: bf16 widened, then times 2^126 in f64.
                let value = f64::from(f32::from_bits(bits << 16)) * 2f64.powi(126);
                assert_eq!(
                    value.to_bits(),
                    f64::from(e2m1::decode(c[2 * p + z])).to_bits(),
                    "{w:#010x} {p} {z}"
                );
            }
        }
    }
}

#[test]
fn packed_matrices_decode_to_the_bit() {
    for (rows, k) in [(16, 128), (1, 16), (35, 80), (48, 272)] {
        let mut state = 1u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let packed: Vec<u8> = (0..rows * k / 2).map(|_| byte()).collect();
        let scales: Vec<u8> = (0..rows * k / 16).map(|_| byte() % 0x7f).collect();
        let bytes = pack(&packed, &scales, rows, k);
        for row in 0..rows.next_multiple_of(16) {
            let mut want = vec![0.0; k];
            if row < rows {
                let (codes, steps) = (&packed[row * k / 2..][..k / 2], &scales[row * k / 16..][..k / 16]);
                q4_core::formats::nvfp4::dequantize_row(codes, steps, None, &mut want);
            }
            want.resize(k.next_multiple_of(128), 0.0);
            for (i, want) in want.into_iter().enumerate() {
                assert_eq!(
                    decoded(&bytes, row, i, k.div_ceil(128)).to_bits(),
                    want.to_bits(),
                    "row {row}, k {i}"
                );
            }
        }
    }
}
