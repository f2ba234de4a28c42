//! Causal attention over the cache, one task per key/value head and block of rows.
use super::cache::{KvCache, Rows};
use super::simd;
use super::tensor::{CpuTensor, Disjoint};
use crate::executor::Shape;
use q4_core::ThreadPool;

/// Query rows of a task: enough to amortise a task, few enough to balance.
const ROWS: usize = 16;

/// Scores of one (head, row) per thread-sized slice; the buffer holds one slice per concurrent task.
pub(super) struct Scores {
    buffer: Vec<f32>,
    stride: usize,
}

impl Scores {
    /// Room for `tasks` tasks over `context` positions.
    pub(super) fn new(tasks: usize, context: usize) -> Self {
        let stride = context.next_multiple_of(16);
        Self { buffer: vec![0.0; stride * tasks], stride }
    }
    pub(super) fn bytes(tasks: usize, context: usize) -> u64 {
        (context.next_multiple_of(16) * tasks * 4) as u64
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
    let lanes = scores.buffer.len() / stride;
    let scores = Disjoint::new(&mut scores.buffer);
    let width = out.width();
    let out = Disjoint::new(out.data_mut());
    let row_blocks = rows.div_ceil(ROWS);
    let all = shape.kv_heads * row_blocks;
    // A lane owns one score slice and walks the tasks `lane, lane + lanes, ...`.
    threads.run(lanes.min(all), &|lane| {
        // SAFETY: a lane number is handed out once per run, and slices of different lanes do not overlap.
        let line = unsafe { scores.slice(lane * stride, stride) };
        for task in (lane..all).step_by(lanes) {
            let (kv, block) = (task % shape.kv_heads, task / shape.kv_heads);
            for r in block * ROWS..((block + 1) * ROWS).min(rows) {
                let count = past + r + 1;
                for h in kv * group..(kv + 1) * group {
                    let q = &qkv.row(r)[h * d..][..d];
                    // SAFETY: (row, head) belongs to exactly one task.
                    let o = unsafe { out.slice(r * width + h * d, d) };
                    let line = &mut line[..count];
                    match (cache.rows(layer, 0, kv, count), cache.rows(layer, 1, kv, count)) {
                        (Rows::F32(k), Rows::F32(v)) => head(q, k, v, scale, line, o),
                        (Rows::F16(k), Rows::F16(v)) => head(q, k, v, scale, line, o),
                        _ => unreachable!("keys and values of a cache have one type"),
                    }
                }
            }
        }
    });
}

fn head<T: simd::Lanes>(q: &[f32], k: &[T], v: &[T], scale: f32, line: &mut [f32], out: &mut [f32]) {
    simd::dots(q, k, scale, line);
    let max = line.iter().fold(f32::NEG_INFINITY, |m, &s| if s > m || s.is_nan() { s } else { m });
    let total = simd::exp_sum(line, max);
    simd::weighted_sum(line, v, 1.0 / total, out);
}
