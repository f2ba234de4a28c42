//! Causal attention over the cache, one task per key/value head and block of a sequence's rows.
use super::cache::{Elements, KvCache};
use super::simd;
use super::sums::{self, QUERIES};
use super::tensor::{CpuTensor, Disjoint};
use crate::executor::Shape;
use crate::places::Place;
use half::f16;
use q4_core::ThreadPool;
use q4_simd::{LANES, Vectors, Widen};
use std::array;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Query rows of a task: enough to amortise a task, few enough to balance.
const ROWS: usize = 16;

/// Most bytes of a head's keys in a page with which the next page is asked for: a small part of the second
/// level of a cache.
const NEAR: usize = 16 << 10;

/// Positions from what is read of a larger page to what is asked for meanwhile: the next blocks of keys, of
/// which up to eight are read at once, each from the start of another page of memory.
const AHEAD: usize = 8 * LANES;

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

/// Tasks that a step of `rows` rows of `sequences` sequences is cut into at most.
pub(super) fn tasks(shape: &Shape, rows: usize, sequences: usize) -> usize {
    shape.kv_heads * (rows.div_ceil(ROWS) + sequences.min(rows) - 1)
}

/// `out[r, h] = softmax(q[r, h] · K^T / sqrt(d)) V` over the positions of r's sequence up to its own.
///
/// A row's result depends on its own positions alone, in order: neither the number of threads, nor the way a
/// prompt was cut into steps, nor who else is in a step, nor where the pages lie changes a bit.
pub(super) fn run(
    vectors: Vectors,
    shape: &Shape,
    qkv: &CpuTensor,
    (cache, places): (&KvCache, &[Place]),
    layer: usize,
    scores: &mut Scores,
    out: &mut CpuTensor,
    threads: &ThreadPool,
) {
    let group = shape.heads / shape.kv_heads;
    let lanes = scores.buffer.len() / (scores.stride * QUERIES);
    let row_blocks: usize = cache.places.parts().iter().map(|part| part.rows.div_ceil(ROWS)).sum();
    let all = shape.kv_heads * row_blocks;
    let (stride, width) = (scores.stride, out.width());
    let (scores, out) = (Disjoint::new(&mut scores.buffer), Disjoint::new(out.data_mut()));
    let step = Step { vectors, shape, qkv, cache, places, layer, scores, stride, out, width };
    // A lane owns its score lines and takes one task after the other, those of a head in a row: its keys and
    // values stay in the cache, and no lane waits long for another.
    let next = AtomicUsize::new(0);
    threads.run(lanes.min(all), &|lane| {
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= all {
                break;
            }
            let (kv, rows) = (task / row_blocks, step.rows(task % row_blocks));
            let (mut at, end, is_alone) = (rows.start * group, rows.end * group, rows.len() == 1);
            while at < end {
                at += match end - at {
                    QUERIES.. if sums::queries(vectors) == QUERIES => {
                        step.queries::<QUERIES>(lane, kv, at, is_alone)
                    }
                    4.. => step.queries::<4>(lane, kv, at, is_alone),
                    2.. => step.queries::<2>(lane, kv, at, is_alone),
                    _ => step.queries::<1>(lane, kv, at, is_alone),
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
    places: &'a [Place],
    layer: usize,
    scores: Disjoint,
    stride: usize,
    out: Disjoint,
    width: usize,
}

impl Step<'_> {
    /// The rows of block number `block`, all of one sequence.
    fn rows(&self, mut block: usize) -> Range<usize> {
        let mut first = 0;
        for part in self.cache.places.parts() {
            let blocks = part.rows.div_ceil(ROWS);
            if block < blocks {
                return first + block * ROWS..first + part.rows.min((block + 1) * ROWS);
            }
            block -= blocks;
            first += part.rows;
        }
        first..first
    }

    /// N queries of one key/value head from number `at` on, which counts them by rows; returns N. Those of a row
    /// alone read from memory what those of many rows find in the cache.
    fn queries<const N: usize>(&self, lane: usize, kv: usize, at: usize, is_alone: bool) -> usize {
        match self.cache.elements() {
            Elements::F32(all) => self.sums::<f32, N>(all, lane, kv, at, is_alone),
            Elements::F16(all) => self.sums::<f16, N>(all, lane, kv, at, is_alone),
        }
        N
    }

    fn sums<T: Widen, const N: usize>(&self, all: &[T], lane: usize, kv: usize, at: usize, is_alone: bool) {
        let (d, group) = (self.shape.head_dim, self.shape.heads / self.shape.kv_heads);
        let place: [_; N] = array::from_fn(|i| ((at + i) / group, kv * group + (at + i) % group));
        let sequence = self.places[place[0].0].sequence;
        let counts = place.map(|(row, _)| self.places[row].position + 1);
        let q = place.map(|(row, head)| &self.qkv.row(row)[head * d..][..d]);
        let blocks = counts[N - 1].next_multiple_of(LANES);
        // SAFETY: a lane number is handed out once per run, and lines of different lanes do not overlap.
        let mut lines =
            array::from_fn(|i| unsafe { self.scores.slice((lane * QUERIES + i) * self.stride, blocks) });
        // SAFETY: (row, head) belongs to exactly one task.
        let mut out = place.map(|(row, head)| unsafe { self.out.slice(row * self.width + head * d, d) });
        let (most, page) = (counts[N - 1], self.cache.places.page());
        let (pages, is_near) = (most.div_ceil(page), page * d * size_of::<T>() <= NEAR);
        let of = |at: usize| {
            let head = (self.layer, kv);
            self.cache.head(all, head, sequence, (at, page.min(most - at * page)))
        };
        let (v, scale) = (self.vectors, 1.0 / (d as f32).sqrt());
        for (at, start) in (0..most).step_by(page).enumerate() {
            let lines = &mut lines.each_mut().map(|line| &mut line[start..blocks.min(start + page)]);
            let keys = of(at).keys;
            let next = match is_near {
                true if at + 1 < pages => Some(of(at + 1).keys),
                true => Some(of(0).values),
                false => keys.get(AHEAD * d..).filter(|_| is_alone),
            };
            sums::scores(v, q, keys, next, scale, lines);
        }
        let totals = array::from_fn(|i| softmax(v, &mut lines[i][..counts[i]]));
        for (at, start) in (0..most).step_by(page).enumerate() {
            let scales = if at + 1 == pages { totals } else { [1.0; N] };
            let end = |i: usize| counts[i].clamp(start, start + page);
            let weights = array::from_fn(|i| &lines[i][start..end(i)]);
            let values = of(at).values;
            let next = match at + 1 < pages {
                true => Some(of(at + 1).values),
                false => values.get(AHEAD * d..).filter(|_| is_alone),
            };
            sums::weighted(v, weights, values, next, (at > 0, scales), &mut out);
        }
    }
}

/// Scores to weights; what makes them sum to one.
fn softmax(v: Vectors, line: &mut [f32]) -> f32 {
    let max = simd::max(v, line);
    1.0 / simd::exp_sum(v, line, max)
}
