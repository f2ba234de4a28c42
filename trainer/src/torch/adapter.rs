//! Low-rank corrections, and the NVFP4 base that they are merged into in every step.
use super::Tch;
use super::trained::Trained;
use q4_core::formats::e2m1;
use q4_core::{Code, Error, Result};
use tch::{Kind, Tensor};

/// A low-rank correction, `scale * b a`.
pub struct Adapter {
    /// `[rank, k]`.
    pub a: Trained,
    /// `[n, rank]`.
    pub b: Trained,
    /// alpha / rank.
    pub scale: f64,
    /// Modules with matrices of their own: which of the parts have some, and ones `[n, rank]` where `b` may
    /// be anything but zero. `None`: all parts share `a`.
    pub own: Option<(Vec<bool>, Tensor)>,
}

/// NVFP4 base of an adapter, `[n, k]`: the layer computes with `Q(base + scale * b a)`, so a merged file is
/// what was trained.
pub struct Packed {
    /// Two a byte, `[n, k / 2]`.
    pub codes: Tensor,
    /// E4M3, `[n, k / 16]`.
    pub scales: Tensor,
    /// Per-tensor scale of every row, `[n, 1]`.
    pub global: Tensor,
}

impl Adapter {
    /// `base + scale * b a`, in place of `base` `[n, k]`, f32 where the adapter is.
    pub fn merged(&self, base: Tensor) -> Result<Tensor> {
        let (a, b) = (self.a.master.f_to_kind(Kind::Float).t()?, self.b.master.f_to_kind(Kind::Float).t()?);
        let mut base = base.f_to_device(a.device()).t()?;
        base.f_add_(&b.f_matmul(&a).t()?.f_mul_scalar(self.scale).t()?).t()
    }

    /// The gradient of `b` without what would mix modules.
    pub fn masked(&self, db: Tensor) -> Result<Tensor> {
        match &self.own {
            Some((_, mask)) => db.f_mul(mask).t(),
            None => Ok(db),
        }
    }

    /// From `dL/dW` of the layer to the gradients of `a` and `b` (straight through the quantiser).
    pub fn gradients(&self, grad: &Tensor) -> Result<(Tensor, Tensor)> {
        let grad = grad.f_to_kind(Kind::Float).t()?;
        let (a, b) = (self.a.master.f_to_kind(Kind::Float).t()?, self.b.master.f_to_kind(Kind::Float).t()?);
        let da = b.f_tr().t()?.f_matmul(&grad).t()?.f_mul_scalar(self.scale).t()?;
        let db = grad.f_matmul(&a.f_tr().t()?).t()?.f_mul_scalar(self.scale).t()?;
        Ok((da, self.masked(db)?))
    }
}

impl Packed {
    /// Bytes.
    pub fn bytes(&self) -> u64 {
        let of = |t: &Tensor| (t.numel() * t.kind().elt_size_in_bytes()) as u64;
        of(&self.codes) + of(&self.scales) + of(&self.global)
    }

    /// Values, f32. Rows decoded at a time: 4 Mi elements, so that the indices stay small beside the result.
    pub fn decode(&self) -> Result<Tensor> {
        let [n, half] = self.codes.size()[..] else { return Err(Error::new(Code::Internal, "packed base")) };
        let device = self.codes.device();
        let out = Tensor::f_empty([n, 2 * half], (Kind::Float, device)).t()?;
        let table: Vec<f32> = (0..16).map(e2m1::decode).collect();
        let table = Tensor::f_from_slice(&table).t()?.f_to_device(device).t()?;
        let step = ((4 << 20) / (2 * half)).max(1);
        for first in (0..n).step_by(step as usize) {
            let rows = step.min(n - first);
            let codes = self.codes.f_narrow(0, first, rows).t()?;
            let both = [codes.f_bitwise_and(15).t()?, codes.f_bitwise_right_shift_tensor_scalar(4).t()?];
            let index = Tensor::f_stack(&both, -1).t()?.f_to_kind(Kind::Int).t()?.f_view([-1]).t()?;
            let values = table.f_index_select(0, &index).t()?.f_view([rows, half / 8, 16]).t()?;
            let scales = self.scales.f_narrow(0, first, rows).t()?.f_view_dtype(Kind::Float8e4m3fn).t()?;
            let scales =
                scales.f_to_kind(Kind::Float).t()?.f_mul(&self.global.f_narrow(0, first, rows).t()?).t()?;
            let values = values.f_mul(&scales.f_unsqueeze(-1).t()?).t()?.f_view([rows, 2 * half]).t()?;
            out.f_narrow(0, first, rows).t()?.f_copy_(&values).t()?;
        }
        Ok(out)
    }
}
