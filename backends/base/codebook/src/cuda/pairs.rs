//! The expressions of `row.cu`, worked out here: what codes become, and that codes and x meet.
use super::FILES;
use super::decode::ROW;
use half::bf16;
use q4_core::formats::{e2m1, nf4};

/// Fails unless the kernel's text, or that of the layout, has these.
fn has(lines: &[&str]) {
    let text = ROW.whole() + FILES.iter().find(|f| f.0 == "layout.cuh").map_or("", |f| f.1);
    for line in lines {
        assert!(text.contains(line), "{line}");
    }
}

fn wide(half: u32) -> f64 {
    bf16::from_bits(half as u16).to_f64()
}

/// `fma.rn.bf16x2`, which has nothing to round.
fn fma2(a: u32, b: u32, c: u32) -> u32 {
    let of = |shift: u32| {
        let [a, b, c] = [a, b, c].map(|v| wide(v >> shift & 0xffff));
        let y = bf16::from_f64(a * b + c);
        assert_eq!(y.to_f64(), a * b + c, "{a:e} {b:e} {c:e}");
        u32::from(y.to_bits()) << shift
    };
    of(0) | of(16)
}

/// A word with a code in every place, and others beside it that have all their bits, or none.
fn words(code: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..8u32).flat_map(move |place| {
        [0u32, !0].map(move |others| (place, others & !(15 << (4 * place)) | code << (4 * place)))
    })
}

/// Places `i` and `i + 4` of a word are the halves of pair `i`.
fn of_place(pairs: [u32; 4], place: u32) -> f64 {
    wide(pairs[place as usize % 4] >> (16 * (place / 4)) & 0xffff)
}

#[test]
fn whole_numbers_come_apart() {
    has(&[
        "fma2(w & 0x000f000fu, 0x7f007f00u, zero)",
        "fma2(w & 0x00f000f0u, 0x7d007d00u, zero)",
        "fma2(v & 0x000f000fu, 0x7f007f00u, zero)",
        "fma2(v & 0x00f000f0u, 0x7d007d00u, zero)",
        "u32 v = w >> 8;",
        "{0xbe00be00u, 0xbe00be00u, 0xbe00be00u, 0xbe00be00u}",
        "fma2(__byte_perm(u.scale, 0, 0x3232), 0x3c803c80u, 0x80008000u)",
        "#define TIMES 64.0f",
    ]);
    let middle = (8.0, 0xbe00_be00);
    let points = (0..16u8).map(|point| {
        // As `Words` has it above a scale.
        let negative = (-f32::from(point)).to_bits() >> 16;
        (f64::from(point), fma2(negative << 16 | negative, 0x3c80_3c80, 0x8000_8000))
    });
    for (point, zero) in points.chain([middle]) {
        for code in 0..16 {
            for (place, w) in words(code) {
                let v = w >> 8;
                let pairs = [
                    fma2(w & 0x000f_000f, 0x7f00_7f00, zero),
                    fma2(w & 0x00f0_00f0, 0x7d00_7d00, zero),
                    fma2(v & 0x000f_000f, 0x7f00_7f00, zero),
                    fma2(v & 0x00f0_00f0, 0x7d00_7d00, zero),
                ];
                let have = 64.0 * of_place(pairs, place);
                assert_eq!(have, f64::from(code) - point, "{code} less {point} at {place}");
            }
        }
    }
}

#[test]
fn numbers_of_e2m1_come_apart() {
    has(&[
        "fma2(bits & 0x81c081c0u, 0x7e807e80u, 0x80008000u)",
        "raised((w & 0x000f000fu) * 0x1040u)",
        "raised((w & 0x00f000f0u) * 0x104u)",
        "raised((v & 0x000f000fu) * 0x1040u)",
        "raised((v & 0x00f000f0u) * 0x104u)",
        "#define TIMES 1.0f",
    ]);
    let raised = |bits: u32| fma2(bits & 0x81c0_81c0, 0x7e80_7e80, 0x8000_8000);
    for code in 0..16 {
        for (place, w) in words(code) {
            let v = w >> 8;
            let pairs = [
                raised((w & 0x000f_000f) * 0x1040),
                raised((w & 0x00f0_00f0) * 0x104),
                raised((v & 0x000f_000f) * 0x1040),
                raised((v & 0x00f0_00f0) * 0x104),
            ];
            let (have, want) = (of_place(pairs, place), f64::from(e2m1::VALUES[code as usize]));
            assert_eq!(have.to_bits(), want.to_bits(), "{code} at {place}");
        }
    }
}

/// `__byte_perm`.
fn byte_perm(x: u32, y: u32, selector: u32) -> u32 {
    let bytes = (u64::from(y) << 32 | u64::from(x)).to_le_bytes();
    let byte = |i: u32| bytes[(selector >> (4 * i) & 7) as usize];
    assert_eq!(selector & 0x8888, 0, "no signs");
    u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
}

/// `select` of gemv.cu, which fills the table of row.cu too; where a look-up finds an entry.
#[test]
fn bytes_of_nf4_are_their_values() {
    has(&[
        "m = w & 0x77777777u, s = (w >> 1 & 0x44444444u) | 0x32103210u;",
        "p[0] = __byte_perm(__byte_perm(0x083570ac, 0x00fb7fc4, m), __byte_perm(0xe9aa5edb, 0xac794218, m), s);",
        "p[1] = __byte_perm(__byte_perm(0xbfbfbfbf, 0x00bdbebe, m), __byte_perm(0x3e3e3e3d, 0x3f3f3f3f, m), s);",
        "p[2] = __byte_perm(__byte_perm(0xd3268823, 0x008990ed, m), __byte_perm(0x2c391a52, 0x2321d0ec, m), s);",
        "p[3] = __byte_perm(__byte_perm(0xb93939bb, 0x00b739b8, m), __byte_perm(0xb9bab939, 0x3b3ab9b9, m), s);",
        "a[4 * h] = __byte_perm(p[0], p[1], 0x5140), a[4 * h + 2] = __byte_perm(p[0], p[1], 0x7362);",
        "a[4 * h + 1] = __byte_perm(p[2], p[3], 0x5140), a[4 * h + 3] = __byte_perm(p[2], p[3], 0x7362);",
        "m >>= 16, s >>= 16;",
        "table + __byte_perm(w, copy, 0x7604 | i << 4)",
        "#define DOWN 0.742811501f",
    ]);
    for byte in 0..256u32 {
        for at in 0..4 {
            let w = byte << (8 * at) | 0x5a3c_96e1 & !(255 << (8 * at));
            let (mut m, mut s) = (w & 0x7777_7777, w >> 1 & 0x4444_4444 | 0x3210_3210);
            let mut a = [0; 8];
            for h in 0..2 {
                let p = [
                    [0x0835_70ac, 0x00fb_7fc4, 0xe9aa_5edb, 0xac79_4218],
                    [0xbfbf_bfbf, 0x00bd_bebe, 0x3e3e_3e3d, 0x3f3f_3f3f],
                    [0xd326_8823, 0x0089_90ed, 0x2c39_1a52, 0x2321_d0ec],
                    [0xb939_39bb, 0x00b7_39b8, 0xb9ba_b939, 0x3b3a_b9b9],
                ]
                .map(|[a, b, c, d]| {
                    byte_perm(byte_perm(a, b, m & 0xffff), byte_perm(c, d, m & 0xffff), s & 0x7777)
                });
                (a[4 * h], a[4 * h + 2]) = (byte_perm(p[0], p[1], 0x5140), byte_perm(p[0], p[1], 0x7362));
                (a[4 * h + 1], a[4 * h + 3]) = (byte_perm(p[2], p[3], 0x5140), byte_perm(p[2], p[3], 0x7362));
                (m, s) = (m >> 16, s >> 16);
            }
            for half in 0..2 {
                let part = |i: usize| wide(a[2 * at + i] >> (16 * half) & 0xffff);
                let value = f64::from(nf4::CODEBOOK[(byte >> (4 * half) & 15) as usize]);
                let have = (part(0) + part(1)) * 0.742_811_501;
                assert!((have - value).abs() <= value.abs() * 2f64.powf(-20.7), "{byte:#x}: {have} {value}");
            }
            for copy in (0..16).map(|copy| copy * 8) {
                assert_eq!(byte_perm(w, copy, 0x7604 | (at as u32) << 4), byte << 8 | copy);
            }
        }
    }
}

/// How codes lie in a unit, and how a kernel takes them.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// Pairs of half a word apart: INT4, E2M1.
    Apart,
    /// A byte is a pair: NF4.
    Bytes,
    /// A byte is a code: E4M3.
    Codes,
}

/// Where in a unit the code of (row, k) is: byte, and bit there.
pub(super) fn code_at(kind: Kind, row: usize, k: usize) -> (usize, usize) {
    let (tile, lane, i) = (k >> 6 & 1, place_of(kind, (row & 7) * 4 + (k >> 1 & 3)), k >> 3 & 7);
    match kind {
        Kind::Codes => (tile * 1024 + lane + (row & 8) * 64 + (i & 6) * 2 + (i & 1) + (k & 1) * 2, 0),
        _ => (tile * 512 + lane + (row & 8) + i, 4 * (k & 1)),
    }
}

/// Where a lane's 16 bytes are.
fn place_of(kind: Kind, lane: usize) -> usize {
    16 * if kind == Kind::Codes { lane ^ (lane / 8 % 4) } else { lane }
}

/// The k of each u16 of x in shared memory, as `stage_row` and `stage_one` deal out a unit's 128.
fn staged(gap: usize) -> [usize; 128] {
    let mut of = [usize::MAX; 128];
    for k in (0..128).step_by(8) {
        let from = k - (k & (2 * gap - 8)) / 2;
        let e = |i: usize| if i < 4 { from + i } else { from + gap + i - 4 };
        let pairs = match gap {
            16 => [(0, 4), (1, 5), (2, 6), (3, 7)],
            _ => [(0, 1), (4, 5), (2, 3), (6, 7)],
        };
        let (to, turn) = ((k & !63) * 2 + (k & 8) * 8 + (k & 48) / 2, (k & 64) / 2);
        let [a, b, c, d] = pairs;
        let stores = [
            (to + turn, if turn > 0 { [c, d] } else { [a, b] }),
            (to + (turn ^ 32), if turn > 0 { [a, b] } else { [c, d] }),
        ];
        for (at, pairs) in stores {
            for (i, pair) in pairs.into_iter().enumerate() {
                for (j, element) in [pair.0, pair.1].into_iter().enumerate() {
                    let place = &mut of[at / 2 + 2 * i + j];
                    assert_eq!(*place, usize::MAX, "stored once");
                    *place = e(element);
                }
            }
        }
    }
    of
}

#[test]
fn every_code_meets_its_x() {
    has(&[
        // Where codes lie, and how they come.
        "w.codes + unit * UNIT + (k >> 6 & 1) * TILE_CODES + place_of((row & 7) * 4 + (k >> 1 & 3));",
        "u32 turn_of(u32 row) { return CODE_BITS == 8 ? row >> 1 & 3 : 0; }",
        "u32 place_of(u32 lane) { return (lane ^ turn_of(lane / 4)) * 16; }",
        "codes += place_of(lane);",
        "u32 i = k >> 3 & 7;",
        "CODE_BITS == 8 ? lane + (row & 8) * 64 + (i & 6) * 2 + (i & 1) + (k & 1) * 2 : lane + (row & 8) + i;",
        "load16(u.words[i], codes + 512 * i);",
        "upper = &u.words[OF_EIGHT * s][OF_EIGHT * h];",
        "lower = &u.words[OF_EIGHT * s + OF_EIGHT - 1][OF_EIGHT == 2 ? 2 * h : 2 + h];",
        "first = risen(w << 8 & 0x80008000 | w << 4 & 0x07f007f0);",
        "pairs_of(w[0], a[0], a[1]), pairs_of(w[1], a[2], a[3]);",
        // How x is staged, and how it comes.
        "enum { GAP = LEVELS == INT4 || LEVELS == E2M1 ? 16 : 8 };",
        "from -= (k & 2 * GAP - 8) / 2;",
        "u32 from = k - (k & 2 * GAP - 8) / 2;",
        "u32 to = xs + (k & ~63u) * 2 + (k & 8) * 8 + (k & 48) / 2, turn = (k & 64) / 2;",
        "\"r\"(to + turn), \"r\"(turn ? c : a), \"r\"(turn ? d : b)",
        "\"r\"(to + (turn ^ 32)), \"r\"(turn ? a : c), \"r\"(turn ? b : d)",
        "if (GAP == 16) put(k, in, pair(0, 4), pair(1, 5), pair(2, 6), pair(3, 7));",
        "else put(k, in, pair(0, 1), pair(4, 5), pair(2, 3), pair(6, 7));",
        "return __byte_perm(h[i], h[i + 2], halves);",
        "if (GAP == 16) put(k, in, pair(0, 0x5410), pair(0, 0x7632), pair(1, 0x5410), pair(1, 0x7632));",
        "else put(k, in, h[0], h[2], h[1], h[3]);",
        "xfirst = shared_at(xs) + t * 32",
        "b[8 * s + 4 * h], xat + s * 128 + h * 16,",
        "const u32 *x = b + 8 * s + 4 * h;",
        // What is multiplied with what.
        "As<bf16>::mma(d[s], a0[0], a1[0], a0[1], a1[1], x[0], x[1]);",
        "As<bf16>::mma(d[s], a0[2], a1[2], a0[3], a1[3], x[2], x[3]);",
        "As<bf16>::mma(d[0], a0[0], a0[1], a0[2], a0[3], x[0], x[1]);",
        "As<bf16>::mma(d[1], a1[4], a1[5], a1[6], a1[7], x[2], x[3]);",
    ]);
    for kind in [Kind::Apart, Kind::Bytes, Kind::Codes] {
        let x = staged(if kind == Kind::Apart { 16 } else { 8 });
        let of_eight = if kind == Kind::Codes { 2 } else { 1 };
        for row in 0..16 {
            let k_at = |byte: usize, bit: usize| {
                let mut all = (0..128).filter(|k| code_at(kind, row, *k) == (byte, bit));
                let k = all.next().unwrap_or_else(|| panic!("row {row} has no code at {byte}, {bit}"));
                assert_eq!(all.next(), None, "one code a place");
                k
            };
            let mut met = [0; 128];
            for (t, s, h) in (0..16).map(|i| (i / 4, i / 2 % 2, i % 2)) {
                let lane = row % 8 * 4 + t;
                let (words, first) = match (row < 8, of_eight) {
                    (true, _) => (of_eight * s, of_eight * h),
                    (false, 2) => (2 * s + 1, 2 * h),
                    (false, _) => (s, 2 + h),
                };
                let word = words * 512 + place_of(kind, lane) + first * 4;
                for (i, half) in (0..8).map(|i| (i / 2, i % 2)) {
                    let (byte, bit) = match kind {
                        Kind::Apart => (word + i / 2 + 2 * half, i % 2 * 4),
                        Kind::Bytes => (word + i, 4 * half),
                        Kind::Codes => (word + i / 2 * 4 + i % 2 + 2 * half, 0),
                    };
                    let k = k_at(byte, bit);
                    assert_eq!(x[(t * 32 + s * 128 + h * 16) / 2 + 2 * i + half], k, "row {row}");
                    met[k] += 1;
                }
            }
            assert_eq!(met, [1; 128], "row {row}");
        }
    }
}

/// In what columns x stands, and whose sums a lane takes: those of the row and the tile of its word of
/// scales.
#[test]
fn sums_meet_their_scales() {
    has(&[
        "return HALVES ? n / 4 * 2 + n % 2 : n % 2 ? ~0u : n / 4;",
        "part, HALVES ? 2 * s + h : s);",
        "t % 2 ? d[0][2 + h] + d[1][2 + h] : d[0][h] + d[1][h], scale_in(u.scale, h) * by, sum);",
        "t % 2 ? d[1][0] + d[1][2] : d[0][0] + d[0][2], __uint_as_float(u.scale) * by, sum);",
        "scale = codes + SCALES_AT + lane * 4;",
        "zero[i] = __shfl_sync(~0u, mine, i, 4);",
        "take_apart(*upper, zero[2 * s], a0), take_apart(*lower, zero[2 * s + 1], a1);",
        "(u32 *)(w.codes + unit * UNIT + SCALES_AT) + (row & 7) * 4 + (k >> 6 & 1) * 2 + (row >> 3 & 1);",
        "sum += __shfl_xor_sync(~0u, sum, 2);",
        "if (t < 2) to[8 * t] = sum;",
    ]);
    let word = |row: usize, tile: usize| (row & 7) * 4 + tile * 2 + (row >> 3);
    for (halves, n, t) in (0..64).map(|i| (i / 32 == 1, i / 4 % 8, i % 4)) {
        // The lane's row and tile, and the columns of the accumulators that it takes.
        let (row, tile) = (n + 8 * (t % 2), t / 2);
        assert_eq!(4 * n + t, word(row, tile), "its own word is the scale");
        for h in 0..2 {
            let column = 2 * t + if halves { h } else { 0 };
            let part = if halves { 2 * tile + h } else { tile };
            let of_column = match (halves, column % 2) {
                (true, _) => column / 4 * 2 + column % 2,
                (false, 0) => column / 4,
                (false, _) => usize::MAX,
            };
            assert_eq!(of_column, part, "half {h} of tile {tile} is in column {column}");
        }
        for s in 0..2 {
            // Zero points of rows n and n + 8 of a row of four lanes.
            assert_eq!([word(n, s), word(n + 8, s)], [4 * n + 2 * s, 4 * n + 2 * s + 1]);
        }
    }
}
