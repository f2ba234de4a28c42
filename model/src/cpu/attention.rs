//! Causal attention over the cache, one task per key/value head and block of rows.
use super::cache::{KvCache, Rows};
use super::simd;
use super::tensor::{CpuTensor, Disjoint};
use crate::executor::Shape;
use q4_core::ThreadPool;

/// Query rows of a task: enough to amortise a task, few enough to balance.
const ROWS: usize = 16;

/// Queries that are worked on at once.
const QUERIES: usize = 4;

/// Scores of a few (row, head) pairs per concurrent task, one line of positions each.
pub(super) struct Scores {
    buffer: Vec<f32>,
    stride: usize,
}

impl Scores {
    /// Room for `tasks` tasks over `context` positions.
    pub(super) fn new(tasks: usize, context: usize) -> Self {
        let stride = context.next_multiple_of(16);
        Self { buffer: vec![0.0; stride * QUERIES * tasks], stride }
    }
    pub(super) fn bytes(tasks: usize, context: usize) -> u64 {
        (context.next_multiple_of(16) * QUERIES * tasks * 4) as u64
    }
}

/// Tasks a step of `rows` rows is cut into.
pub(super) fn tasks(shape: &Shape, rows: usize) -> usize {
    shape.kv_heads * rows.div_ceil(ROWS)
}

/// `out[r, h] = softmax(q[r, h] · K^T / sqrt(d)) V` over positions `0..=len + r`.
///
/// A row's result depends on its own positions alone, in order: neither the number of threads nor the way a prompt
/// was cut into steps changes a bit.
pub(super) fn run(
    shape: &Shape,
    qkv: &CpuTensor,
    cache: &KvCache,
    layer: usize,
    scores: &mut Scores,
    out: &mut CpuTensor,
    threads: &ThreadPool,
) {
    let rows = qkv.rows();
    let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let scale = 1.0 / (d as f32).sqrt();
    let past = cache.len();
    let stride = scores.stride;
    let lanes = scores.buffer.len() / (stride * QUERIES);
    let scores = Disjoint::new(&mut scores.buffer);
    let width = out.width();
    let out = Disjoint::new(out.data_mut());
    let row_blocks = rows.div_ceil(ROWS);
    let all = shape.kv_heads * row_blocks;
    // A lane owns its score lines and walks the tasks `lane, lane + lanes, ...`.
    threads.run(lanes.min(all), &|lane| {
        for task in (lane..all).step_by(lanes) {
            let (kv, block) = (task % shape.kv_heads, task / shape.kv_heads);
            let first = block * ROWS;
            let pairs = (ROWS.min(rows - first)) * group;
            for from in (0..pairs).step_by(QUERIES) {
                let few = QUERIES.min(pairs - from);
                // Past the last pair it is the last one again, computed twice and written once.
                let pair = |i: usize| {
                    let i = (from + i).min(pairs - 1);
                    (first + i / group, kv * group + i % group)
                };
                let counts: [usize; QUERIES] = std::array::from_fn(|i| past + pair(i).0 + 1);
                let most = counts[few - 1];
                let q = std::array::from_fn(|i| &qkv.row(pair(i).0)[pair(i).1 * d..][..d]);
                // SAFETY: a lane number is handed out once per run, and lines of different lanes do not overlap.
                let mut lines = std::array::from_fn(|i| unsafe {
                    scores.slice((lane * QUERIES + i) * stride, counts[i])
                });
                let mut spare = [[0.0; 0]; QUERIES];
                let mut outs = spare.each_mut().map(|s| &mut s[..]);
                for (i, o) in outs.iter_mut().enumerate().take(few) {
                    // SAFETY: (row, head) belongs to exactly one task.
                    *o = unsafe { out.slice(pair(i).0 * width + pair(i).1 * d, d) };
                }
                match (cache.rows(layer, 0, kv, most), cache.rows(layer, 1, kv, most)) {
                    (Rows::F32(k), Rows::F32(v)) => heads(q, k, v, scale, &mut lines, &mut outs[..few]),
                    (Rows::F16(k), Rows::F16(v)) => heads(q, k, v, scale, &mut lines, &mut outs[..few]),
                    _ => unreachable!("keys and values of a cache have one type"),
                }
            }
        }
    });
}

/// Up to four queries of one key/value head, each over the positions its line has room for.
fn heads<T: simd::Lanes>(
    q: [&[f32]; QUERIES],
    k: &[T],
    v: &[T],
    scale: f32,
    lines: &mut [&mut [f32]; QUERIES],
    out: &mut [&mut [f32]],
) {
    let few = out.len();
    let mut first = 0;
    if simd::takes_blocks(q[0].len()) {
        if few == QUERIES {
            block::<T, QUERIES>(q, k, v, scale, lines, out);
            return;
        }
        if few >= 2 {
            block::<T, 2>([q[0], q[1]], k, v, scale, &mut lines[..2], &mut out[..2]);
            first = 2;
        }
    }
    for i in first..few {
        simd::dots(q[i], k, scale, lines[i]);
        let total = softmax(lines[i]);
        simd::weighted_sum(lines[i], v, total, out[i]);
    }
}

/// N of them at once; there are as many lines and outputs.
fn block<T: simd::Lanes, const N: usize>(
    q: [&[f32]; N],
    k: &[T],
    v: &[T],
    scale: f32,
    lines: &mut [&mut [f32]],
    out: &mut [&mut [f32]],
) {
    let (Ok(lines), Ok(out)) =
        (<&mut [&mut [f32]; N]>::try_from(lines), <&mut [&mut [f32]; N]>::try_from(out))
    else {
        unreachable!("a block of {N}");
    };
    simd::block_dots(q, k, scale, lines);
    let totals = lines.each_mut().map(|line| softmax(line));
    simd::block_sums(lines.each_ref().map(|l| &**l), v, totals, out);
}

/// Scores to weights; what makes them sum to one.
fn softmax(line: &mut [f32]) -> f32 {
    let max = simd::max(line);
    1.0 / simd::exp_sum(line, max)
}
