//! The exact operations, one row of the weight at a time, with one rounding at the end.
use crate::prepare::Stored;
use half::{bf16, f16};
use q4_core::oracle::{Column, Input};
use q4_core::rows::{check_matrix, check_product, widen_row};
use q4_core::{
    DType, ExecContext, PreparedInfo, PreparedWeight, Result, RowDecoder, TensorView, TensorViewMut, wide,
};
use std::sync::Mutex;

impl PreparedWeight for Stored {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    /// None: this backend allocates what it needs.
    fn workspace(&self, _m: usize) -> usize {
        0
    }

    fn forward(&self, x: TensorView<'_>, mut y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let (n, k) = (self.info.n, self.info.k);
        let m = check_product((&x, self.x, k), (&y.as_view(), self.y, n))?;
        let input = Input::new(&widen(&x)?, k, &self.info.activations, x.dtype())?;
        let mut sums = vec![0.0; n * m];
        self.with(|w| {
            let decoder = RowDecoder::new(w)?;
            let columns: Vec<_> = sums.chunks_mut(m.max(1)).map(Mutex::new).collect();
            cx.threads.split(n, 8, &|start, end| {
                let mut weight = Column::new(&decoder, start);
                for row in start..end {
                    weight.read(&decoder, row);
                    let mut column = columns[row].lock().unwrap_or_else(|e| e.into_inner());
                    column.iter_mut().enumerate().for_each(|(r, sum)| *sum = input.dot(r, &weight).0);
                }
            });
            Ok(())
        })?;
        (0..m).try_for_each(|r| store(&mut y, r, (0..n).map(|row| sums[row * m + r])))
    }

    /// `Σ_n dy·w` in f64, n in order.
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        mut dx: TensorViewMut<'_>,
        _cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let (n, k) = (self.info.n, self.info.k);
        let m = check_product((&dy, self.y, n), (&dx.as_view(), self.x, k))?;
        let dy = widen(&dy)?;
        let mut sums = vec![0.0; m * k];
        self.with(|w| {
            let decoder = RowDecoder::new(w)?;
            let mut decoded = vec![0.0; k];
            for row in 0..n {
                decoder.row(row, &mut decoded);
                for (r, sums) in sums.chunks_mut(k).enumerate() {
                    let factor = f64::from(dy[r * n + row]);
                    add_row(factor, &decoded, sums);
                }
            }
            Ok(())
        })?;
        (0..m).try_for_each(|r| store(&mut dx, r, sums[r * k..][..k].iter().copied()))
    }

    fn dequantize(&self, mut out: TensorViewMut<'_>, _cx: &mut ExecContext<'_>) -> Result<()> {
        let (n, k) = (self.info.n, self.info.k);
        check_matrix(&out.as_view(), out.as_view().dtype(), n, k)?;
        self.with(|w| {
            let decoder = RowDecoder::new(w)?;
            let mut decoded = vec![0.0; k];
            (0..n).try_for_each(|row| {
                decoder.row(row, &mut decoded);
                store(&mut out, row, decoded.iter().map(|v| f64::from(*v)))
            })
        })
    }
}

wide! {
    /// Adds `factor · w` to the sums.
    fn add_row(factor: f64, w: &[f32], sums: &mut [f64]) {
        sums.iter_mut().zip(w).for_each(|(sum, w)| *sum += factor * f64::from(*w));
    }
}

fn widen(x: &TensorView<'_>) -> Result<Vec<f32>> {
    let (m, k, _) = x.as_matrix()?;
    let mut out = vec![0.0; m * k];
    out.chunks_mut(k).enumerate().try_for_each(|(r, row)| widen_row(x, r, row))?;
    Ok(out)
}

/// Rounds row `r` once.
fn store(y: &mut TensorViewMut<'_>, r: usize, values: impl Iterator<Item = f64>) -> Result<()> {
    match y.as_view().dtype() {
        DType::F16 => {
            y.row_mut::<f16>(r)?.iter_mut().zip(values).for_each(|(y, v)| *y = f16::from_f32(to_odd(v)))
        }
        DType::BF16 => {
            y.row_mut::<bf16>(r)?.iter_mut().zip(values).for_each(|(y, v)| *y = bf16::from_f32(to_odd(v)))
        }
        _ => y.row_mut::<f32>(r)?.iter_mut().zip(values).for_each(|(y, v)| *y = v as f32),
    }
    Ok(())
}

/// Rounds to f32 with an odd last bit where that is not exact, so that a second rounding to half the bits is
/// right (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
fn to_odd(v: f64) -> f32 {
    let near = v as f32;
    if f64::from(near) == v || near.to_bits() & 1 == 1 || near.is_nan() {
        near
    } else if f64::from(near) < v {
        near.next_up()
    } else {
        near.next_down()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_value_is_rounded_twice() {
        // Just above a tie of f16 and of bf16: f32 drops the last term, and ties to even then go down.
        for (tie, half) in [(1.0 + 2f64.powi(-11), 11), (1.0 + 2f64.powi(-8), 8)] {
            let v = tie + 2f64.powi(-40);
            let up = 1.0 + 2f32.powi(1 - half);
            let (h, b) = (f16::from_f32(to_odd(v)).to_f32(), bf16::from_f32(to_odd(v)).to_f32());
            assert_eq!(if half == 11 { h } else { b }, up);
            assert_eq!(to_odd(tie), tie as f32, "exact values stay");
        }
        assert_eq!(f16::from_f32(to_odd(1e300)), f16::INFINITY);
        assert!(to_odd(f64::NAN).is_nan());
    }
}
