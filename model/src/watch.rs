//! Looking at the values between the operations of a step.
use q4_core::{Code, Error, Result};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

/// A value that was just written.
pub struct Written<'a> {
    /// Who wrote it.
    pub site: Site,
    /// Rows of the step, or of the logits.
    pub rows: usize,
    /// `[rows, width]`. What is left here is what the next operation reads, rounded to the type of the slot.
    pub values: &'a mut [f32],
}

/// What q, k and v read. Shown behind the product that read it, to be looked at only, and not where products
/// fuse their norm.
pub const INPUT_NORM: &str = "input_layernorm";
/// What gate and up read; shown as [`INPUT_NORM`] is.
pub const POST_NORM: &str = "post_attention_layernorm";

/// Where in the graph a value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The layer; `None` for embeddings and logits.
    pub layer: Option<usize>,
    /// The operation, as checkpoints name modules.
    pub call: &'static str,
}

impl Site {
    /// The input of a product, which not every device shows.
    pub fn is_norm(&self) -> bool {
        matches!(self.call, INPUT_NORM | POST_NORM)
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "model.layers.{layer}.{}", self.call),
            None => f.write_str(self.call),
        }
    }
}

/// Called with every value of a step; an error ends the step.
pub type Each = Box<dyn FnMut(Written<'_>) -> Result<()> + Send>;

/// What an engine does between operations. Anything but `Nothing` and `Unless` costs speed.
#[derive(Default)]
pub enum Watch {
    /// Goes on.
    #[default]
    Nothing,
    /// Ends the step at the first value that is not finite and says where.
    NonFinite,
    /// Hands every value over.
    Each(Each),
    /// Ends the step once this is set.
    Unless(&'static AtomicBool),
}

/// The end of a step that somebody asked to stop; [`Runner::accept_unless`] takes it back, nobody else sees
/// it.
///
/// [`Runner::accept_unless`]: crate::runner::Runner::accept_unless
pub(crate) fn go_on(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(Error::new(Code::Io, "interrupted")) } else { Ok(()) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::cpu::KvType;
    use crate::executor::Shape;
    use crate::load::{ContextOptions, Loaded};
    use crate::synthetic::{Recipe, build};
    use q4_core::memory::Budget;
    use q4_core::{Activations, BuiltinOptions, DType, Device, Dispatch, Policy, Registry, ThreadPool};
    use q4_nf4_kernel as _;
    use std::sync::{Arc, Mutex};

    /// For a model of two layers with a vocabulary above 4, on any device.
    pub(crate) fn check(loaded: &Loaded) -> Result<()> {
        const IDS: [u32; 3] = [3, 1, 4];
        let run = |each: Each| -> Result<Vec<f32>> {
            let options =
                ContextOptions { context: 16, chunk: 16, all_logits: true, kv: KvType::F32, many: None };
            let mut runner = loaded.runner(options, &Budget::of_machine())?;
            runner.accept_watched(&IDS, each)?;
            runner.logits().map(|l| l.to_vec())
        };
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = seen.clone();
        let logits = run(Box::new(move |w| {
            if w.site.is_norm() {
                return Ok(());
            }
            kept.lock().expect("nobody panics").push((w.site.to_string(), w.values.to_vec()));
            Ok(())
        }))?;
        let seen = std::mem::take(&mut *seen.lock().expect("as above"));
        assert_eq!(seen.len(), 2 * 5 + 2);
        assert_eq!((seen[0].1.len() % IDS.len(), seen[5].0.as_str()), (0, "model.layers.0.mlp.down_proj"));
        assert_eq!(seen[11], ("lm_head".to_owned(), logits));
        let mut before = seen.into_iter();
        run(Box::new(move |w| {
            if w.site.is_norm() {
                return Ok(());
            }
            let (site, values) = before.next().expect("as many values");
            assert_eq!(site, w.site.to_string());
            // Other embeddings reach the first product and the sum after it. Both get their old values back,
            // and nothing else ever differs.
            let reached = w.site.layer == Some(0)
                && matches!(w.site.call, "self_attn.{q,k,v}_proj" | "self_attn.o_proj");
            assert_eq!(values != w.values, reached, "{site}");
            w.values.copy_from_slice(&values);
            if w.site.call == "embed_tokens" {
                w.values.fill(0.25);
            }
            Ok(())
        }))?;
        Ok(())
    }

    #[test]
    fn who_watches_sees_every_value_and_may_put_another_in_its_place() -> Result<()> {
        let shape = Shape {
            hidden: 128,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            intermediate: 256,
            vocab: 64,
            layers: 2,
        };
        let recipe = Recipe {
            schema: Recipe::NF4,
            activations: Activations::Native,
            dtype: DType::F32,
            max_rows: 16,
            device: Device::Cpu,
        };
        let dispatch = Dispatch::new(Registry::builtin(&BuiltinOptions::default())?, Policy::default());
        check(&build(&shape, &recipe, &dispatch, Arc::new(ThreadPool::new(2)), &Budget::of_machine())?)
    }
}
