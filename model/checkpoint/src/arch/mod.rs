//! What a family of decoders is: a description, which the one graph, the readers and the writers look up.
//!
//! A new dense family is a file like [`qwen3`] and a line in [`ALL`]. What a description cannot say is
//! refused, by `check` or by the field that says it: a model is never computed as something that it is not.
pub mod qwen3;

use q4_core::{Code, Error, Result};
use q4_files::fields::Fields;
use std::fmt;

/// Families that are read, by their `model_type`.
pub static ALL: &[&Arch] = &[&qwen3::QWEN3];

/// A family of decoders.
pub struct Arch {
    /// `model_type` of `config.json`.
    pub model_type: &'static str,
    /// The class that `architectures` names.
    pub class: &'static str,
    /// What its configurations call sizes.
    pub fields: FieldNames,
    /// Width of a head where the configuration has no such field; else `hidden / heads`.
    pub head_dim: Option<usize>,
    /// Adds a problem for what a configuration asks for beyond this description.
    pub check: fn(&mut Fields),
    /// Its modules. A norm that it lacks has no name.
    pub names: Names,
    /// Projections with a bias, as `names` has them.
    pub biases: &'static [&'static str],
    /// How q and k are turned.
    pub rotary: Rotary,
    /// Between attention and the next layer.
    pub mlp: Mlp,
    /// Embeddings are multiplied by the root of their width.
    pub scaled_embedding: bool,
    /// Conversations of models that ship no template.
    pub template: Template,
    /// Published sizes.
    pub sizes: &'static [Size],
}

/// What configurations of a family call their sizes.
#[derive(Clone, Copy)]
pub struct FieldNames {
    /// Width of the residual stream.
    pub hidden: &'static str,
    /// Width of the MLP.
    pub intermediate: &'static str,
    /// Decoder layers.
    pub layers: &'static str,
    /// Query heads.
    pub heads: &'static str,
    /// Key and value heads; as many as query heads without.
    pub kv_heads: &'static str,
    /// Width of a head.
    pub head_dim: &'static str,
    /// Rows of the embedding.
    pub vocab: &'static str,
    /// Positions.
    pub positions: &'static str,
    /// Epsilon of norms.
    pub eps: &'static str,
    /// Activation of the MLP.
    pub activation: &'static str,
}

impl FieldNames {
    /// As most families have them.
    pub const USUAL: Self = Self {
        hidden: "hidden_size",
        intermediate: "intermediate_size",
        layers: "num_hidden_layers",
        heads: "num_attention_heads",
        kv_heads: "num_key_value_heads",
        head_dim: "head_dim",
        vocab: "vocab_size",
        positions: "max_position_embeddings",
        eps: "rms_norm_eps",
        activation: "hidden_act",
    };
}

/// Modules of a family. Those of a layer follow `LAYERS.N.`; a linear layer or norm is called without
/// `.weight`, because its tensors' suffixes depend on the layout.
#[derive(Clone, Copy)]
pub struct Names {
    /// Token embeddings, `[vocab, hidden]`.
    pub embedding: &'static str,
    /// What all layers begin with.
    pub layers: &'static str,
    /// The last norm, `[hidden]`.
    pub final_norm: &'static str,
    /// The output projection, `[vocab, hidden]`.
    pub head: &'static str,
    /// Query projection, `[heads * head_dim, hidden]`.
    pub q: &'static str,
    /// Key projection, `[kv_heads * head_dim, hidden]`.
    pub k: &'static str,
    /// Value projection, `[kv_heads * head_dim, hidden]`.
    pub v: &'static str,
    /// Output projection of attention, `[hidden, heads * head_dim]`.
    pub o: &'static str,
    /// Gate projection, `[intermediate, hidden]`.
    pub gate: &'static str,
    /// Up projection, `[intermediate, hidden]`.
    pub up: &'static str,
    /// Down projection, `[hidden, intermediate]`.
    pub down: &'static str,
    /// Norms around attention, `[hidden]`.
    pub attention: Around,
    /// Norms around the MLP, `[hidden]`.
    pub mlp: Around,
    /// Norms of each query and of each key head, `[head_dim]`.
    pub heads: Option<[&'static str; 2]>,
}

/// Where the norms of half a layer stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Around {
    /// Of what it reads.
    pub before: Option<&'static str>,
    /// Of what it adds to the residual stream.
    pub after: Option<&'static str>,
}

impl Around {
    /// One norm, of what is read.
    pub const fn before(name: &'static str) -> Self {
        Self { before: Some(name), after: None }
    }
}

impl Names {
    /// As most families have them: norms before each half, none of heads.
    pub const USUAL: Self = Self {
        embedding: "model.embed_tokens",
        layers: "model.layers",
        final_norm: "model.norm",
        head: "lm_head",
        q: "self_attn.q_proj",
        k: "self_attn.k_proj",
        v: "self_attn.v_proj",
        o: "self_attn.o_proj",
        gate: "mlp.gate_proj",
        up: "mlp.up_proj",
        down: "mlp.down_proj",
        attention: Around::before("input_layernorm"),
        mlp: Around::before("post_attention_layernorm"),
        heads: None,
    };

    /// The linear layers of a decoder layer: q, k, v, o, gate, up, down.
    pub const fn linears(&self) -> [&'static str; 7] {
        [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]
    }

    /// Module `name` of decoder layer `layer`.
    pub fn of(&self, layer: usize, name: &str) -> String {
        format!("{}.{layer}.{name}", self.layers)
    }

    /// The decoder layer a tensor belongs to, by its name.
    pub fn layer_of(&self, tensor: &str) -> Option<usize> {
        tensor.strip_prefix(self.layers)?.strip_prefix('.')?.split('.').next()?.parse().ok()
    }
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Which elements are turned together.
    pub pairs: Pairs,
    /// Share of a head that is turned where `partial_rotary_factor` says nothing; all of it without.
    pub partial: Option<f64>,
}

/// Which elements of a head are turned together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// `i` and `i + d / 2` (NeoX).
    Halves,
    /// `2 i` and `2 i + 1` (GPT-J).
    Neighbours,
}

/// What follows attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// `down(activation(gate x) * up x)`.
    Dense(Activation),
    /// A few of many such, chosen by a router. Described, and refused: nothing here computes it yet.
    Experts(Activation),
}

/// Of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + exp(-x))`; what products can fuse.
    Silu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
    GeluTanh,
}

impl Activation {
    /// As `config.json` spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::GeluTanh => "gelu_pytorch_tanh",
        }
    }
}

impl Mlp {
    /// Of the gate, or of every expert's.
    pub fn activation(self) -> Activation {
        match self {
            Self::Dense(activation) | Self::Experts(activation) => activation,
        }
    }
}

/// A chat template for models that ship none.
#[derive(Clone, Copy)]
pub struct Template {
    /// Whose it is.
    pub family: &'static str,
    /// A token without which a vocabulary cannot speak it.
    pub marker: &'static str,
    /// Tokens that end an answer where no file says which do.
    pub ends: &'static [&'static str],
    /// Jinja.
    pub source: &'static str,
}

/// A published size.
pub struct Size {
    /// As users name it.
    pub name: &'static str,
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Whether the head is the embedding.
    pub tied: bool,
}

impl Arch {
    /// The family of a `model_type`.
    pub fn of(model_type: &str) -> Option<&'static Self> {
        ALL.iter().find(|a| a.model_type == model_type).copied()
    }

    /// Whether the projection `module` has a bias.
    pub fn is_biased(&self, module: &str) -> bool {
        self.biases.iter().any(|b| module.ends_with(b))
    }

    /// For executors that compute one kind of layer: a norm before each half, one of every head, heads that
    /// are turned whole and by halves, SiLU, no biases.
    ///
    /// # Errors
    /// [`Code::Unsupported`] names what else there is.
    pub fn plain(&self, who: &str) -> Result<()> {
        let (n, whole) = (&self.names, Rotary { pairs: Pairs::Halves, partial: None });
        let elsewhere = |a: &Around| a.before.is_none() || a.after.is_some();
        let found = [
            (elsewhere(&n.attention) || elsewhere(&n.mlp), "norms elsewhere than before attention and MLP"),
            (n.heads.is_none(), "heads without norms"),
            (!self.biases.is_empty(), "biases"),
            (self.rotary != whole, "heads that are turned in part or by neighbours"),
            (self.mlp != Mlp::Dense(Activation::Silu), "an MLP without SiLU"),
            (self.scaled_embedding, "scaled embeddings"),
        ];
        let have: Vec<_> = found.iter().filter(|f| f.0).map(|f| f.1).collect();
        if have.is_empty() {
            return Ok(());
        }
        Err(Error::new(Code::Unsupported, format!("`{}` with {who}", self.model_type))
            .need("layers like those of Qwen3")
            .have(have.join(", ")))
    }
}

impl fmt::Debug for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type)
    }
}

impl PartialEq for Arch {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}
