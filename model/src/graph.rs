//! The forward pass of a decoder, once, for every family and every executor.
use crate::arch::Activation;
use crate::executor::{Executor, Logits, Shape, Slots};
use crate::watch::{INPUT_NORM, POST_NORM, Site};
use q4_core::Result;

/// Weights of one layer, in the executor's form. A norm that the family lacks is none.
pub struct Block<E: Executor> {
    /// Before attention.
    pub input_norm: Option<E::Norm>,
    /// q, k and v.
    pub qkv: E::Linear,
    /// Of every query head, and of every key head.
    pub head_norms: Option<[E::Norm; 2]>,
    /// Attention output.
    pub o: E::Linear,
    /// Of what attention adds to the residual stream.
    pub attention_norm: Option<E::Norm>,
    /// Before the MLP.
    pub post_norm: Option<E::Norm>,
    /// gate and up.
    pub gate_up: E::Linear,
    /// Of the gate.
    pub activation: Activation,
    /// MLP output.
    pub down: E::Linear,
    /// Of what the MLP adds to the residual stream.
    pub mlp_norm: Option<E::Norm>,
}

/// A whole model, in the executor's form.
pub struct Decoder<E: Executor> {
    /// Sizes.
    pub shape: Shape,
    /// Token embeddings.
    pub table: E::Table,
    /// Layers, first to last.
    pub blocks: Vec<Block<E>>,
    /// Before the head.
    pub norm: E::Norm,
    /// The head.
    pub head: E::Head,
}

impl<E: Executor> Decoder<E> {
    /// Runs `ids` behind what `cache` holds and commits them to it. Logits are left in `s.logits`.
    ///
    /// # Errors
    /// Those of the executor and of its products.
    pub fn forward(
        &self,
        ex: &mut E,
        ids: &[u32],
        cache: &mut E::Cache,
        s: &mut Slots<E::Tensor>,
        logits: Logits<'_>,
    ) -> Result<()> {
        ex.embed(&self.table, ids, &mut s.hidden)?;
        ex.watch(Site { layer: None, call: "embed_tokens" }, &mut s.hidden)?;
        for (i, b) in self.blocks.iter().enumerate() {
            b.forward(ex, i, cache, s)?;
        }
        if logits != Logits::Skip {
            ex.head(&s.hidden, &self.norm, &self.head, logits, &mut s.normed, &mut s.logits)?;
            ex.watch(Site { layer: None, call: "lm_head" }, &mut s.logits)?;
        }
        ex.commit(cache, ids.len())
    }
}

impl<E: Executor> Block<E> {
    /// Layer `i`: takes and leaves the residual stream in `s.hidden`.
    ///
    /// # Errors
    /// Those of the executor and of its products.
    pub fn forward(
        &self,
        ex: &mut E,
        i: usize,
        cache: &mut E::Cache,
        s: &mut Slots<E::Tensor>,
    ) -> Result<()> {
        let at = |call| Site { layer: Some(i), call };
        ex.norm_linear(&s.hidden, self.input_norm.as_ref(), &self.qkv, &mut s.normed, &mut s.qkv)?;
        if self.input_norm.is_some() && ex.shows_norms() {
            ex.watch(at(INPUT_NORM), &mut s.normed)?;
        }
        ex.watch(at("self_attn.{q,k,v}_proj"), &mut s.qkv)?;
        ex.rope_attention(&mut s.qkv, self.head_norms.as_ref(), cache, i, &mut s.context)?;
        ex.watch(at("self_attn"), &mut s.context)?;
        let between = (&mut s.product, &mut s.normed);
        ex.linear_add(&s.context, &self.o, self.attention_norm.as_ref(), between, &mut s.hidden)?;
        ex.watch(at("self_attn.o_proj"), &mut s.hidden)?;
        ex.gated(self.post_norm.as_ref(), &self.gate_up, self.activation, s)?;
        if self.post_norm.is_some() && ex.shows_norms() {
            ex.watch(at(POST_NORM), &mut s.normed)?;
        }
        ex.watch(at("mlp.{gate,up}_proj"), &mut s.gated)?;
        let between = (&mut s.product, &mut s.normed);
        ex.linear_add(&s.gated, &self.down, self.mlp_norm.as_ref(), between, &mut s.hidden)?;
        ex.watch(at("mlp.down_proj"), &mut s.hidden)
    }
}
