//! The model in training without gradients: what it answers, and how well it knows held-out data.
use super::super::executor::{TorchCache, TorchNorm, Weight};
use super::super::laid::{Laid, LaidTarget};
use super::super::loss;
use super::super::weights::Source;
use super::{Engine, Rows};
use q4_core::{Code, Error, Result};
use q4_model::executor::{Executor, Logits};
use tch::Tensor;

impl Engine {
    /// Logits of `ids` behind what `cache` holds, without gradients: `[1, vocab]` or `[ids, vocab]`, in the
    /// compute type.
    pub fn logits(&mut self, ids: &[u32], cache: &mut TorchCache, which: Logits<'_>) -> Result<Tensor> {
        let _guard = tch::no_grad_guard();
        let table = self.value(0)?;
        let mut x = self.embed(&table, ids)?;
        for i in 0..self.params.layers() {
            x = self.block(i, &x, cache)?.0;
        }
        let norm = TorchNorm { weight: self.value(self.params.norm())?, eps: self.eps };
        let head = self.head()?;
        let (mut scratch, mut out) = (Tensor::new(), Tensor::new());
        self.ex.head(&x, &norm, &head, which, &mut scratch, &mut out)?;
        self.ex.commit(cache, ids.len())?;
        Ok(out)
    }

    /// Sum of the losses of a batch's supervised tokens, and their number, without gradients.
    pub fn evaluate(&mut self, rows: &Rows<'_>) -> Result<(f64, usize)> {
        let _guard = tch::no_grad_guard();
        let laid = Laid::of(rows)?;
        let LaidTarget::Tokens(targets) = &laid.target else {
            return Err(Error::new(Code::Internal, "evaluation of a loss without tokens"));
        };
        let mut cache = self.ex.batch(&laid.groups, &laid.positions)?;
        let table = self.value(0)?;
        let mut x = self.embed(&table, &laid.ids)?;
        for i in 0..self.params.layers() {
            x = self.block(i, &x, &mut cache)?.0;
        }
        let norm = TorchNorm { weight: self.value(self.params.norm())?, eps: self.eps };
        let head = self.head()?;
        let ex = &mut self.ex;
        let sum = loss::sum(&x, targets, self.options.chunk, &mut |x| {
            let (mut scratch, mut out) = (Tensor::new(), Tensor::new());
            ex.head(x, &norm, &head, Logits::All, &mut scratch, &mut out)?;
            Ok(out)
        })?;
        Ok((sum, rows.target.supervised()))
    }

    /// The head without gradients.
    fn head(&mut self) -> Result<Weight> {
        let index = self.params.head();
        match &self.params.all[index].source {
            Source::Frozen(weight, _) => Ok(weight.share()),
            _ => Ok(Weight::Dense(self.value(index)?)),
        }
    }
}
