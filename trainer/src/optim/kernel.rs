//! The AdamW step over tiles, on all threads.
//!
//! Tasks are cut by element count, never by the number of threads, and a tile depends on nothing outside it.
use super::layout::{StateFormat, StateLayout};
use super::moments::{Draws, Moment, Part, pack, unpack};
use super::{Gradient, Master, Scalars, TILE, TILES};
use crate::rng::{Philox, stochastic_bf16};
use q4_core::ThreadPool;
use std::sync::{Mutex, PoisonError};

/// One task: up to [`TILES`] tiles of everything.
struct Piece<'a> {
    /// Index of its first element.
    first: usize,
    master: Master<'a>,
    grad: Gradient<'a>,
    /// The six sections of the state.
    state: [&'a mut [u8]; 6],
}

pub(super) fn step(
    scalars: &Scalars,
    layout: &StateLayout,
    master: Master<'_>,
    grad: Gradient<'_>,
    state: &mut [u8],
    rng: Philox,
    threads: &ThreadPool,
) {
    let format = layout.format();
    let pieces: Vec<_> = cut(layout, master, grad, state).into_iter().map(Mutex::new).collect();
    threads.run(pieces.len(), &|i| {
        let mut piece = pieces[i].lock().unwrap_or_else(PoisonError::into_inner);
        run(scalars, format, &mut piece, rng);
    });
}

fn cut<'a>(
    layout: &StateLayout,
    mut master: Master<'a>,
    grad: Gradient<'a>,
    state: &'a mut [u8],
) -> Vec<Piece<'a>> {
    let sections = layout.sections();
    let [codes, scales, seconds] = layout.format().tile_bytes().map(|bytes| bytes * TILES);
    let mut rest = state;
    let mut at = 0;
    let mut parts = sections.map(|range| {
        let (_, tail) = std::mem::take(&mut rest).split_at_mut(range.start - at);
        let (section, tail) = tail.split_at_mut(range.len());
        (rest, at) = (tail, range.end);
        section
    });
    let sizes = [codes, codes, scales, scales, seconds, seconds];
    let n = layout.len();
    (0..n)
        .step_by(TILE * TILES)
        .map(|first| {
            let last = (first + TILE * TILES).min(n);
            let master = match &mut master {
                Master::F32(w) => Master::F32(take(w, last - first)),
                Master::Bf16(w) => Master::Bf16(take(w, last - first)),
            };
            let grad = match grad {
                Gradient::F32(g) => Gradient::F32(&g[first..last]),
                Gradient::Bf16(g) => Gradient::Bf16(&g[first..last]),
            };
            let mut size = sizes.iter();
            let state = parts.each_mut().map(|p| {
                let bytes = size.next().map_or(0, |s| (*s).min(p.len()));
                take(p, bytes)
            });
            Piece { first, master, grad, state }
        })
        .collect()
}

fn take<'a, T>(from: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (head, tail) = std::mem::take(from).split_at_mut(n);
    *from = tail;
    head
}

fn run(scalars: &Scalars, format: StateFormat, piece: &mut Piece<'_>, rng: Philox) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the two features are there.
        unsafe { run_fma(scalars, format, piece, rng) };
        return;
    }
    run_any(scalars, format, piece, rng);
}

/// The same operations; a fused multiply-add is one instruction instead of a call.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_fma(scalars: &Scalars, format: StateFormat, piece: &mut Piece<'_>, rng: Philox) {
    run_any(scalars, format, piece, rng);
}

#[inline(always)]
fn run_any(scalars: &Scalars, format: StateFormat, piece: &mut Piece<'_>, rng: Philox) {
    let n = piece.grad.len();
    let (mut g, mut m, mut v) = ([0f32; TILE], [0f32; TILE], [0f32; TILE]);
    let mut update = [0f32; TILE];
    let bytes = format.tile_bytes();
    for (t, start) in (0..n).step_by(TILE).enumerate() {
        let len = TILE.min(n - start);
        let padded = if format == StateFormat::F32 { len } else { len.next_multiple_of(256) };
        let [mc, vc, ms, vs, m2, v2] = piece.state.each_mut().map(|s| &mut **s);
        let mut mean = part(mc, ms, m2, bytes, t);
        let mut square = part(vc, vs, v2, bytes, t);
        unpack(format, Moment::Mean, &mean, &mut m[..padded]);
        unpack(format, Moment::Square, &square, &mut v[..padded]);
        match piece.grad {
            Gradient::F32(from) => g[..len].copy_from_slice(&from[start..start + len]),
            Gradient::Bf16(from) => {
                for (g, bits) in g.iter_mut().zip(&from[start..start + len]) {
                    *g = f32::from_bits(u32::from(*bits) << 16);
                }
            }
        }
        // Padding has a gradient of zero, whatever the last tile left there.
        g[len..padded].fill(0.0);
        m[len..padded].fill(0.0);
        v[len..padded].fill(0.0);
        let Scalars { grad_scale, beta1, rest1, beta2, rest2, unbias1, unbias2, eps, limit, .. } = *scalars;
        for i in 0..padded {
            let g = g[i] * grad_scale;
            m[i] = beta1.mul_add(m[i], rest1 * g);
            v[i] = beta2.mul_add(v[i], (rest2 * g) * g);
            let u = (m[i] * unbias1) / v[i].sqrt().mul_add(unbias2, eps);
            update[i] = u.clamp(-limit, limit);
        }
        match &mut piece.master {
            Master::F32(w) => {
                for (w, u) in w[start..start + len].iter_mut().zip(&update) {
                    *w = scalars.minus_lr.mul_add(*u, *w * scalars.keep);
                }
            }
            Master::Bf16(w) => {
                round_all(scalars, &mut w[start..start + len], &update, rng, piece.first + start)
            }
        }
        let draws = Draws { rng, first: piece.first + start };
        pack(format, Moment::Mean, &mut m[..padded], &mut mean, &draws);
        pack(format, Moment::Square, &mut v[..padded], &mut square, &draws);
    }
}

/// Updates bf16 weights; `first` is the index of the first one, a multiple of 8.
#[inline(always)]
fn round_all(scalars: &Scalars, w: &mut [u16], update: &[f32], rng: Philox, first: usize) {
    for (block, (w, u)) in w.chunks_mut(8).zip(update.chunks(8)).enumerate() {
        let random = rng.block((first / 8 + block) as u32);
        for (i, (w, u)) in w.iter_mut().zip(u).enumerate() {
            let old = f32::from_bits(u32::from(*w) << 16);
            let new = scalars.minus_lr.mul_add(*u, old * scalars.keep);
            *w = stochastic_bf16(new, (random[i / 2] >> (16 * (i % 2))) as u16);
        }
    }
}

/// Bytes of tile `t` of one moment; the last tile may have fewer.
#[inline(always)]
fn part<'a>(
    codes: &'a mut [u8],
    scales: &'a mut [u8],
    second: &'a mut [u8],
    bytes: [usize; 3],
    t: usize,
) -> Part<'a> {
    let of = |section: &'a mut [u8], bytes: usize| {
        let end = section.len();
        &mut section[(t * bytes).min(end)..((t + 1) * bytes).min(end)]
    };
    Part { codes: of(codes, bytes[0]), scales: of(scales, bytes[1]), second: of(second, bytes[2]) }
}
