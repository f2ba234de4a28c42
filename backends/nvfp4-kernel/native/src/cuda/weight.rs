//! A packed weight on a device.
use super::Engine;
use super::memory::Memory;
use crate::weight::Span;
use q4_core::{Activations, DType, Error, PreparedInfo};
use std::sync::Arc;

/// A weight in memory of a device. The layout is that of `cuda/layout.cuh`.
pub struct Weight {
    /// What was built.
    pub(super) info: PreparedInfo,
    /// Where it lives.
    pub engine: Arc<Engine>,
    /// All of its bytes.
    pub(super) _memory: Memory,
    /// Device address of the units: codes.
    pub codes: u64,
    /// The same, for what counts scales from there.
    pub scales: u64,
    /// Device address of one u64 per 16 padded rows: the f32 that sums of their products are multiplied with
    /// in the low half, `first row * 32 + rows` in the high one.
    pub groups: u64,
    /// Device address of the segments, for the plain kernels.
    pub(super) spans_at: u64,
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Padded k / 64, even.
    pub slabs: usize,
    /// Padded rows: each segment starts at a multiple of 16.
    pub padded: usize,
    /// Row segments, top to bottom.
    pub spans: Vec<Span>,
    /// What happens to x.
    pub activations: Activations,
    /// Type of x.
    pub x: DType,
    /// Type of y.
    pub y: DType,
    /// Rows of the largest call.
    pub max_m: usize,
}

impl Weight {
    /// No padding between segments: row r of the matrix is padded row r.
    pub fn is_plain(&self) -> bool {
        self.spans.split_last().is_none_or(|(_, rest)| rest.iter().all(|s| s.end % 16 == 0))
    }
    /// Puts the shape of a call into its failure.
    pub(super) fn shaped(&self, e: Error, what: &str, m: usize) -> Error {
        super::shaped(e, what, m, [self.n, self.k], &self.engine.gpu)
    }
}
