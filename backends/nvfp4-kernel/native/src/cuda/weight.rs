//! A packed weight on a device.
use super::Engine;
use super::forward;
use super::memory::Memory;
use crate::call::{Mat, check_rows, invalid};
use crate::weight::Span;
use q4_core::{
    Activations, DType, Error, ExecContext, FuseSet, Fusion, PreparedInfo, PreparedWeight, Result,
    TensorView, TensorViewMut,
};
use std::sync::Arc;

/// A weight in memory of a device. The layout is that of `cuda/layout.cu`.
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

impl PreparedWeight for Weight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        let bytes = forward::workspace(self, m as u64);
        bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        forward::forward(self, &x, &Fusion::default(), y, cx)
    }

    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        set == FuseSet::NONE || forward::fuses(self, m, set)
    }

    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        forward::forward(self, &x, fusion, y, cx)
    }

    /// `dx = dy W` with the decoded weight.
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        mut dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        placed(&[&dy, &dx.as_view()], cx)?;
        let dy = Mat::input(&dy, "dy", self.n, self.y)?;
        let dx = Mat::output(&mut dx, "dx", self.k, self.x)?;
        check_rows(self.max_m, &dy, &dx)?;
        // SAFETY: views of memory of this device, dx a unique one.
        unsafe { self.engine.simple.backward(self, &dy, &dx, cx.stream) }
            .map_err(|e| self.shaped(e, "gradient", dy.rows))
    }

    fn dequantize(&self, mut out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        placed(&[&out.as_view()], cx)?;
        let dtype = out.as_view().dtype();
        let out = Mat::output(&mut out, "decoded weight", self.k, dtype)?;
        if out.rows != self.n {
            return Err(invalid("decoded weight", format!("{} rows", self.n), out.rows));
        }
        // SAFETY: a unique view of memory of this device.
        unsafe { self.engine.simple.dequantize(self, &out, cx.stream) }
            .map_err(|e| self.shaped(e, "decoding", self.n))
    }
}

/// Fails unless all are in memory of the device of the call.
pub(super) fn placed(views: &[&TensorView<'_>], cx: &ExecContext<'_>) -> Result<()> {
    views.iter().try_for_each(|view| q4_cuda::check_place(view, cx))
}
