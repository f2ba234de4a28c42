//! NVFP4 activations with a straight-through gradient: single-level scales, as a checkpoint without stored
//! input scales has them (rule ModelOpt).
use super::Tch;
use q4_core::formats::nvfp4;
use q4_core::{ActGlobal, ActQuant, DType, Error, Result, Rule};
use tch::{Kind, Tensor};

/// What training with 4-bit activations rounds to.
pub const FORMAT: ActQuant = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None };

/// `x` with the values its products will see; `dL/dx` is `dL/dy`. `[rows, k]`, `k % 16 == 0`.
pub fn straight_through(x: &Tensor, format: &ActQuant) -> Result<Tensor> {
    if *format != FORMAT {
        return Err(Error::new(q4_core::Code::Unsupported, "activations of a training step")
            .need(format!("{FORMAT:?}"))
            .have(format!("{format:?}")));
    }
    let fixed = x.f_detach().t()?.f_to_kind(Kind::Float).t()?;
    let rounded = if x.device().is_cuda() { rounded_ops(&fixed)? } else { rounded_core(&fixed)? };
    // Exact: x - x is zero, and the sum is the rounded value.
    rounded.f_to_kind(x.kind()).t()?.f_add(&x.f_sub(&x.f_detach().t()?).t()?).t()
}

/// Through core's own quantiser.
fn rounded_core(x: &Tensor) -> Result<Tensor> {
    let x = x.f_contiguous().t()?;
    let k = *x.size().last().unwrap_or(&0) as usize;
    let out = x.f_empty_like().t()?;
    let quantizer = nvfp4::Quantizer { rule: Rule::ModelOpt, global: None, source: DType::F32 };
    let (from, to) = (super::floats(&x)?, super::floats_mut(&out)?);
    let (mut codes, mut scales) = (vec![0; k / 2], vec![0; k / nvfp4::BLOCK]);
    for (from, to) in from.chunks_exact(k).zip(to.chunks_exact_mut(k)) {
        quantizer.quantize_row(from, &mut codes, &mut scales)?;
        nvfp4::dequantize_row(&codes, &scales, None, to);
    }
    Ok(out)
}

/// The same bits in libtorch's operations, on any device.
fn rounded_ops(x: &Tensor) -> Result<Tensor> {
    let shape = x.size();
    let block = nvfp4::BLOCK as i64;
    let x = x.f_reshape([-1, block]).t()?;
    let amax = x.f_abs().t()?.f_amax([1i64], true).t()?;
    // A division, as in core: the reciprocal of six is not exact.
    let t = amax.f_div_scalar(6.0).t()?;
    let ones = t.f_ones_like().t()?;
    let t = ones.f_where_self(&t.f_eq(0.0).t()?, &t).t()?;
    let t = t.f_clamp(f64::from(1.0f32 / 512.0), 448.0).t()?;
    let scale = t.f_to_kind(Kind::Float8e4m3fn).t()?.f_to_kind(Kind::Float).t()?;
    let v = x.f_div(&scale).t()?;
    let a = v.f_abs().t()?;
    // E2M1's steps; a tie goes to the even code.
    let mut code = a.f_zeros_like().t()?;
    for (edge, rise, tie_up) in [
        (0.25, 0.5, false),
        (0.75, 0.5, true),
        (1.25, 0.5, false),
        (1.75, 0.5, true),
        (2.5, 1.0, false),
        (3.5, 1.0, true),
        (5.0, 2.0, false),
    ] {
        let above = if tie_up { a.f_ge(edge) } else { a.f_gt(edge) }.t()?;
        code = code.f_add(&above.f_to_kind(Kind::Float).t()?.f_mul_scalar(rise).t()?).t()?;
    }
    code.f_copysign(&v).t()?.f_mul(&scale).t()?.f_reshape(shape).t()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_give_the_bits_of_core() -> Result<()> {
        // Every magnitude from deep underflow to saturation, ties included, and a zero block.
        let rng = crate::rng::Philox::new(7, 0, 0);
        let mut x: Vec<f32> =
            (0..64 * 512u64).map(|i| rng.normal(i) * (((i / 16) % 60) as f32 - 30.0).exp2()).collect();
        x[..16].fill(0.0);
        for (i, v) in x[16..32].iter_mut().enumerate() {
            *v = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0][i % 8] * if i < 8 { 1.0 } else { -1.0 };
        }
        let x = Tensor::from_slice(&x).view([64, 512]);
        let (a, b) = (rounded_core(&x)?, rounded_ops(&x)?);
        assert_eq!(super::super::floats(&a)?, super::super::floats(&b)?);
        assert_ne!(super::super::floats(&a)?, super::super::floats(&x)?);
        Ok(())
    }

    #[test]
    fn the_gradient_passes_straight_through() -> Result<()> {
        let x = Tensor::from_slice(&[0.3f32; 32]).view([2, 16]).set_requires_grad(true);
        let y = straight_through(&x, &FORMAT)?;
        let weights = Tensor::arange(32, (Kind::Float, tch::Device::Cpu)).view([2, 16]);
        let loss = (&y * &weights).sum(Kind::Float);
        let grad = Tensor::run_backward(&[loss], &[&x], false, false).remove(0);
        assert_eq!(super::super::floats(&grad)?, super::super::floats(&weights)?);
        Ok(())
    }
}
