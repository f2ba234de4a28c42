//! Losses over pieces of the batch, so that the logits of one piece exist at a time.
use super::Tch;
use q4_core::{Code, Error, Result};
use tch::{Kind, Reduction, Tensor};

/// Target of a token nobody predicts.
pub const IGNORE: i64 = -100;

/// What a batch is trained towards.
pub enum Target<'a> {
    /// The next token of every position, or [`IGNORE`]: mean cross entropy.
    Tokens(&'a [i64]),
    /// Hidden states `[rows * seq, hidden]`: mean absolute difference, for bring-up on synthetic data.
    Hidden(&'a Tensor),
}

impl Target<'_> {
    /// Whether the last norm and the head take part, and so have gradients.
    pub fn reaches_head(&self) -> bool {
        matches!(self, Self::Tokens(_)) && self.supervised() > 0
    }

    /// What the mean is taken over.
    pub fn supervised(&self) -> usize {
        match self {
            Self::Tokens(t) => t.iter().filter(|t| **t != IGNORE).count(),
            Self::Hidden(t) => t.numel(),
        }
    }
}

/// A loss with its gradients.
pub struct Gradients {
    /// The sum times the scale.
    pub loss: f64,
    /// With respect to the hidden states, f32.
    pub input: Tensor,
    /// With respect to the last norm and the head; `None`: they took no part or do not move.
    pub weights: [Option<Tensor>; 2],
}

/// `scale * sum of -log p(target)` over the supervised rows of `x` `[n, hidden]`, `chunk` rows at a time.
/// `leaves` are the last norm's weight and the head that `logits` uses.
pub fn cross_entropy(
    x: &Tensor,
    targets: &[i64],
    scale: f64,
    chunk: usize,
    leaves: &[&Tensor; 2],
    logits: &mut dyn FnMut(&Tensor) -> Result<Tensor>,
) -> Result<Gradients> {
    let picked = Picked::of(x, targets)?;
    let n = picked.x.size()[0];
    let grad = Tensor::f_empty(picked.x.size(), (Kind::Float, x.device())).t()?;
    let moving: Vec<usize> = (0..2).filter(|i| leaves[*i].requires_grad()).collect();
    let mut sums: [Option<Tensor>; 2] = [None, None];
    let mut total = Tensor::f_zeros([1], (Kind::Double, x.device())).t()?;
    for first in (0..n).step_by(chunk.max(1)) {
        let rows = (chunk.max(1) as i64).min(n - first);
        let part = picked.x.f_narrow(0, first, rows).t()?.f_detach().t()?.f_set_requires_grad(true).t()?;
        let wanted = picked.targets.f_narrow(0, first, rows).t()?;
        let loss = entropy(&logits(&part)?, &wanted)?.f_mul_scalar(scale).t()?;
        total = total.f_add(&loss.f_detach().t()?).t()?;
        let mut inputs = vec![&part];
        inputs.extend(moving.iter().map(|i| leaves[*i]));
        let mut grads = Tensor::f_run_backward(&[loss], &inputs, false, false).t()?.into_iter();
        if let Some(dx) = grads.next() {
            grad.f_narrow(0, first, rows).t()?.f_copy_(&dx).t()?;
        }
        for (i, g) in moving.iter().zip(grads) {
            sums[*i] = Some(match sums[*i].take() {
                // The sum over chunks is kept in f32: bf16 would lose what the later ones add.
                None => g.f_to_kind(Kind::Float).t()?,
                Some(mut sum) => sum.f_add_(&g).t()?,
            });
        }
    }
    Ok(Gradients { loss: total.f_double_value(&[0]).t()?, input: picked.spread(grad, x)?, weights: sums })
}

/// Sum of the losses of the supervised rows, without gradients.
pub fn sum(
    x: &Tensor,
    targets: &[i64],
    chunk: usize,
    logits: &mut dyn FnMut(&Tensor) -> Result<Tensor>,
) -> Result<f64> {
    let picked = Picked::of(x, targets)?;
    let n = picked.x.size()[0];
    let mut total = Tensor::f_zeros([1], (Kind::Double, x.device())).t()?;
    for first in (0..n).step_by(chunk.max(1)) {
        let rows = (chunk.max(1) as i64).min(n - first);
        let out = logits(&picked.x.f_narrow(0, first, rows).t()?)?;
        total = total.f_add(&entropy(&out, &picked.targets.f_narrow(0, first, rows).t()?)?).t()?;
    }
    total.f_double_value(&[0]).t()
}

/// `scale * sum |x - wanted|`.
pub fn l1(x: &Tensor, wanted: &Tensor, scale: f64) -> Result<Gradients> {
    if x.size() != wanted.size() {
        return Err(Error::new(Code::ShapeMismatch, "hidden states to match")
            .need(format!("{:?}", x.size()))
            .have(format!("{:?}", wanted.size())));
    }
    let x = x.f_detach().t()?.f_set_requires_grad(true).t()?;
    let loss = x.f_sub(wanted).t()?.f_abs().t()?.f_sum(Kind::Float).t()?.f_mul_scalar(scale).t()?;
    let value = f64::try_from(loss.f_detach().t()?).t()?;
    let mut grads = Tensor::f_run_backward(&[loss], &[&x], false, false).t()?;
    Ok(Gradients { loss: value, input: grads.remove(0), weights: [None, None] })
}

fn entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let logits = logits.f_to_kind(Kind::Float).t()?;
    logits.f_cross_entropy_loss(targets, None::<&Tensor>, Reduction::Sum, IGNORE, 0.0).t()
}

/// The supervised rows alone: nobody needs the logits of the others.
struct Picked {
    x: Tensor,
    targets: Tensor,
    rows: Option<Tensor>,
}

impl Picked {
    fn of(x: &Tensor, targets: &[i64]) -> Result<Self> {
        if x.size()[0] != targets.len() as i64 {
            return Err(Error::new(Code::Internal, "targets")
                .need(format!("{}", x.size()[0]))
                .have(targets.len().to_string()));
        }
        let on = |v: &[i64]| Tensor::f_from_slice(v).and_then(|t| t.f_to_device(x.device())).t();
        let wanted: Vec<i64> = targets.iter().copied().filter(|t| *t != IGNORE).collect();
        if wanted.len() == targets.len() {
            return Ok(Self { x: x.shallow_clone(), targets: on(&wanted)?, rows: None });
        }
        let rows: Vec<i64> = (0..targets.len()).filter(|i| targets[*i] != IGNORE).map(|i| i as i64).collect();
        let rows = on(&rows)?;
        Ok(Self { x: x.f_index_select(0, &rows).t()?, targets: on(&wanted)?, rows: Some(rows) })
    }

    /// Gradients of the picked rows at their places, zero elsewhere.
    fn spread(&self, grad: Tensor, x: &Tensor) -> Result<Tensor> {
        match &self.rows {
            None => Ok(grad),
            Some(rows) => {
                Tensor::f_zeros(x.size(), (Kind::Float, x.device())).t()?.f_index_copy_(0, rows, &grad).t()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn chunks_and_masks_do_not_change_the_loss() -> Result<()> {
        tch::manual_seed(1);
        let x = Tensor::randn([10, 8], (Kind::Float, Device::Cpu));
        let norm = Tensor::ones([8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let head = Tensor::randn([20, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let targets: Vec<i64> = (0..10).map(|i| if i % 3 == 0 { IGNORE } else { i }).collect();
        let run = |chunk| {
            cross_entropy(&x, &targets, 0.5, chunk, &[&norm, &head], &mut |x| {
                (x * &norm).f_linear(&head, None::<&Tensor>).t()
            })
        };
        let (a, b) = (run(100)?, run(3)?);
        // f32 sums of seven rows in another order: a few units in the last place of a loss near ten.
        assert!((a.loss - b.loss).abs() < 1e-5, "{} and {}", a.loss, b.loss);
        // The reference: one graph over everything.
        let leaf = x.copy().set_requires_grad(true);
        let whole = (&leaf * &norm).linear(&head, None::<&Tensor>).cross_entropy_loss::<Tensor>(
            &Tensor::from_slice(&targets),
            None,
            Reduction::Sum,
            IGNORE,
            0.0,
        ) * 0.5;
        assert!((f64::try_from(whole.detach()).t()? - a.loss).abs() < 1e-5);
        let want = Tensor::run_backward(&[whole], &[&leaf, &norm, &head], false, false);
        for (what, (got, want)) in [a.input, b.input].iter().zip([&want[0], &want[0]]).enumerate() {
            assert!(got.allclose(want, 1e-5, 1e-6, false), "dx {what}");
        }
        for (i, want) in want[1..].iter().enumerate() {
            assert!(b.weights[i].as_ref().is_some_and(|g| g.allclose(want, 1e-5, 1e-5, false)), "leaf {i}");
        }
        Ok(())
    }
}
