//! Causal attention over the cache, one task per key/value head and block of rows.
use super::cache::{Head, KvCache, Positions};
use super::simd;
use super::sums::{self, QUERIES};
use super::tensor::{CpuTensor, Disjoint};
use crate::executor::Shape;
use q4_core::ThreadPool;
use q4_simd::{LANES, Vectors, Widen};
use std::array;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Query rows of a task: enough to amortise a task, few enough to balance.
const ROWS: usize = 16;

/// Scores of a few (row, head) pairs per concurrent task, one line of positions each.
pub(super) struct Scores {
    buffer: Vec<f32>,
    stride: usize,
}

impl Scores {
    /// Room for `tasks` tasks over `context` positions.
    pub(super) fn new(tasks: usize, context: usize) -> Self {
        let stride = Self::stride(context);
        Self { buffer: vec![0.0; stride * QUERIES * tasks], stride }
    }
    pub(super) fn bytes(tasks: usize, context: usize) -> u64 {
        (Self::stride(context) * QUERIES * tasks * 4) as u64
    }
    /// From one line to the next: a cache line more than a line needs, since lines a power of two apart share
    /// a few places of the cache.
    fn stride(context: usize) -> usize {
        context.next_multiple_of(LANES) + LANES
    }
}

/// Tasks a step of `rows` rows is cut into.
pub(super) fn tasks(shape: &Shape, rows: usize) -> usize {
    shape.kv_heads * rows.div_ceil(ROWS)
}

/// `out[r, h] = softmax(q[r, h] · K^T / sqrt(d)) V` over positions `0..=len + r`.
///
/// A row's result depends on its own positions alone, in order: neither the number of threads nor the way a
/// prompt was cut into steps changes a bit.
pub(super) fn run(
    vectors: Vectors,
    shape: &Shape,
    qkv: &CpuTensor,
    cache: &KvCache,
    layer: usize,
    scores: &mut Scores,
    out: &mut CpuTensor,
    threads: &ThreadPool,
) {
    let (rows, group) = (qkv.rows(), shape.heads / shape.kv_heads);
    let lanes = scores.buffer.len() / (scores.stride * QUERIES);
    let row_blocks = rows.div_ceil(ROWS);
    let all = shape.kv_heads * row_blocks;
    let (stride, width) = (scores.stride, out.width());
    let (scores, out) = (Disjoint::new(&mut scores.buffer), Disjoint::new(out.data_mut()));
    let step = Step { vectors, shape, qkv, cache, layer, scores, stride, out, width };
    // A lane owns its score lines and takes one task after the other, those of a head in a row: its keys and
    // values stay in the cache, and no lane waits long for another.
    let next = AtomicUsize::new(0);
    threads.run(lanes.min(all), &|lane| {
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= all {
                break;
            }
            let (kv, first) = (task / row_blocks, task % row_blocks * ROWS);
            let end = (rows.min(first + ROWS)) * group;
            let mut at = first * group;
            while at < end {
                at += match end - at {
                    QUERIES.. if sums::queries(vectors) == QUERIES => step.queries::<QUERIES>(lane, kv, at),
                    4.. => step.queries::<4>(lane, kv, at),
                    2.. => step.queries::<2>(lane, kv, at),
                    _ => step.queries::<1>(lane, kv, at),
                };
            }
        }
    });
}

/// What the tasks of a step share.
struct Step<'a> {
    vectors: Vectors,
    shape: &'a Shape,
    qkv: &'a CpuTensor,
    cache: &'a KvCache,
    layer: usize,
    scores: Disjoint,
    stride: usize,
    out: Disjoint,
    width: usize,
}

impl Step<'_> {
    /// N queries of one key/value head from number `at` on, which counts them by rows; returns N.
    fn queries<const N: usize>(&self, lane: usize, kv: usize, at: usize) -> usize {
        let (d, group) = (self.shape.head_dim, self.shape.heads / self.shape.kv_heads);
        let place: [_; N] = array::from_fn(|i| ((at + i) / group, kv * group + (at + i) % group));
        let counts = place.map(|(row, _)| self.cache.len() + row + 1);
        let q = place.map(|(row, head)| &self.qkv.row(row)[head * d..][..d]);
        let blocks = counts[N - 1].next_multiple_of(LANES);
        // SAFETY: a lane number is handed out once per run, and lines of different lanes do not overlap.
        let mut lines =
            array::from_fn(|i| unsafe { self.scores.slice((lane * QUERIES + i) * self.stride, blocks) });
        // SAFETY: (row, head) belongs to exactly one task.
        let mut out = place.map(|(row, head)| unsafe { self.out.slice(row * self.width + head * d, d) });
        match self.cache.head(self.layer, kv, counts[N - 1]) {
            Head::F32(head) => attend(self.vectors, q, head, counts, &mut lines, &mut out),
            Head::F16(head) => attend(self.vectors, q, head, counts, &mut lines, &mut out),
        }
        N
    }
}

/// Queries of one head, each over its own count of positions.
fn attend<T: Widen, const N: usize>(
    v: Vectors,
    q: [&[f32]; N],
    head: Positions<'_, T>,
    counts: [usize; N],
    lines: &mut [&mut [f32]; N],
    out: &mut [&mut [f32]; N],
) {
    let scale = 1.0 / (q[0].len() as f32).sqrt();
    sums::scores(v, q, head.keys, scale, lines);
    let totals = array::from_fn(|i| softmax(v, &mut lines[i][..counts[i]]));
    sums::weighted(v, array::from_fn(|i| &lines[i][..counts[i]]), head.values, totals, out);
}

/// Scores to weights; what makes them sum to one.
fn softmax(v: Vectors, line: &mut [f32]) -> f32 {
    let max = simd::max(v, line);
    1.0 / simd::exp_sum(v, line, max)
}
