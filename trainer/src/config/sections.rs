//! The sections and their defaults.
use super::*;

macro_rules! names {
    ($(#[$doc:meta])* $name:ident { $($(#[$attr:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name { $($(#[$attr])* #[serde(rename = $text)] $variant,)* }
    };
}

names!(
    /// Where weights come from.
    Init {
        /// Those of the model directory.
        #[default]
        Checkpoint = "checkpoint",
        /// Normal numbers with the deviation usual for the shape.
        Random = "random",
    }
);
names!(
    /// What is minimised.
    Loss {
        /// Cross-entropy of the next token.
        #[default]
        Ce = "ce",
        /// Mean distance of hidden states, for synthetic linear stacks.
        Scalar = "scalar",
    }
);
names!(
    /// Over which gradients the clipped norm is taken.
    ClipScope {
        /// All of a step; they must all exist at once.
        #[default]
        Global = "global",
        /// Those of one block: the only norm known while the backward pass still runs.
        Block = "block",
        /// All of the step before.
        Previous = "previous",
    }
);
names!(
    /// Weights in the forward pass.
    Weights {
        /// Their NVFP4 values, gradients straight through.
        #[default]
        Nvfp4 = "nvfp4",
        /// As they are.
        Dense = "none",
    }
);
names!(
    /// Inputs of products in the forward pass.
    Inputs {
        /// As they are.
        #[default]
        Native = "native",
        /// Their NVFP4 values, gradients straight through.
        Nvfp4 = "nvfp4",
    }
);
names!(
    /// What adapters stand beside.
    BaseForm {
        /// `Packed` for a checkpoint with 4-bit layers, else `Merged`.
        #[default]
        Auto = "auto",
        /// The checkpoint's codes, multiplied by a backend that keeps them packed; nothing is decoded.
        Packed = "packed",
        /// Their values, dense.
        Decoded = "decoded",
        /// The NVFP4 value of base plus adapter, made anew in every step: what a merge writes.
        Merged = "merged",
    }
);
names!(
    /// Which paths may multiply by a packed base, as `--compute` of `q4 generate`.
    Compute {
        /// The best there is; a dense copy where a kernel was to be had is refused.
        #[default]
        Auto = "auto",
        /// A kernel on packed weights.
        KernelOnly = "kernel-only",
        /// Dense copies where no kernel can; each is told.
        KernelOrFallback = "kernel-or-fallback",
        /// Dense copies.
        DequantMatmulOnly = "dequant-matmul-only",
    }
);
names!(
    /// Which step's weights are exported.
    Pick {
        /// The best where early stopping ended the run, else the last.
        #[default]
        Auto = "auto",
        /// That with the smallest held-out loss.
        Best = "best",
        /// The last.
        Last = "last",
    }
);
names!(
    /// Defaults for an amount of memory.
    Preset {
        /// Small models: everything in f32, nothing recomputed.
        #[default]
        None = "none",
        /// All weights of a 4 B model on 128 GB: f32 masters, 8-bit states, recomputed blocks.
        Full128g = "full-128g",
        /// All weights of a 4 B model on 24 GB: bf16 masters, NVFP4 states, updated during the backward pass.
        Full24g = "full-24g",
        /// Adapters on a packed 4 B model on 8 GB.
        Lora8g = "lora-8g",
    }
);

/// Name and what it is for.
pub(super) type Field = (&'static str, &'static str);

macro_rules! section {
    ($(#[$doc:meta])* $name:ident {
        $($(#[doc = $fdoc:literal])* $(#[serde($($how:tt)*)])? $field:ident: $type:ty = $default:expr,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name { $($(#[doc = $fdoc])* $(#[serde($($how)*)])? pub $field: $type,)* }
        impl $name {
            /// Every field, in order.
            pub(super) const FIELDS: &[Field] = &[$((stringify!($field), concat!($($fdoc),*)),)*];
        }
        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}

section!(
    /// `[model]`
    ModelConfig {
        /// A model directory, or `demo`.
        path: PathBuf = "demo".into(),
        /// Where weights come from.
        init: Init = Init::Checkpoint,
        /// A named shape of random weights instead of `path`, without files.
        #[serde(skip_serializing_if = "Option::is_none")]
        shape: Option<String> = None,
        /// `auto`, `cpu`, `cuda` or `cuda:N`.
        device: String = "auto".into(),
    }
);
section!(
    /// `[data]`
    DataConfig {
        /// Files to learn from.
        train: Mix = Mix::default(),
        /// Held-out files.
        valid: Vec<PathBuf> = Vec::new(),
        /// What the files are; `auto`: by their names, `.tsv`, `.txt`, `.parquet`, else JSON.
        format: Format = Format::Auto,
        /// How samples share rows.
        packing: Packing = Packing::Documents,
        /// The same for held-out data.
        eval_packing: Packing = Packing::Documents,
        /// Which tokens are learnt.
        supervise: Supervise = Supervise::Response,
        /// Which tokens of held-out data count.
        eval_supervise: Supervise = Supervise::Response,
        /// What happens to samples longer than a row.
        truncate: Truncate = Truncate::Cut,
        /// Positions of a row.
        seq: usize = 256,
        /// Rows of a micro-batch.
        rows: usize = 8,
        /// Another order in every epoch.
        shuffle: bool = true,
    }
);
section!(
    /// `[train]`
    TrainConfig {
        /// Optimiser steps.
        steps: u64 = 1000,
        /// Times all data is seen, instead of `steps`; may be a fraction.
        #[serde(skip_serializing_if = "Option::is_none")]
        epochs: Option<f64> = None,
        /// Micro-batches of a step, of each rank; the mean is taken over all their learnt tokens.
        accumulate: usize = 1,
        /// Weights that stay as they are, by patterns of their names, as `model.layers.0.*`.
        freeze: Vec<String> = Vec::new(),
        /// Key of every random number.
        seed: u64 = 0,
        /// What is minimised.
        loss: Loss = Loss::Ce,
        /// Norm the gradient is cut down to; 0: never.
        clip: f64 = 1.0,
        /// Over which gradients.
        clip_scope: ClipScope = ClipScope::Global,
        /// Compute each block a second time instead of keeping its activations.
        recompute: bool = false,
        /// Update a block as soon as its gradients exist, and drop them.
        update_in_backward: bool = false,
        /// Keep the 4-bit values of all weights between passes instead of those of one block.
        keep_values: bool = true,
        /// Tokens whose logits exist at a time.
        chunk: usize = 1024,
        /// Steps whose memory is reported phase by phase.
        profile: Vec<u64> = Vec::new(),
        /// Steps between lines of metrics.
        log_every: u64 = 1,
    }
);
section!(
    /// `[optimizer]`
    OptimizerConfig {
        /// Peak learning rate.
        lr: f64 = 1e-4,
        /// Decay of the mean of gradients.
        beta1: f64 = 0.9,
        /// Decay of the mean of their squares.
        beta2: f64 = 0.95,
        /// Added to the root.
        eps: f64 = 1e-8,
        /// Decoupled decay of matrices.
        weight_decay: f64 = 0.1,
        /// Decoupled decay of norms.
        norm_decay: f64 = 0.0,
        /// Decoupled decay of embeddings and head.
        embedding_decay: f64 = 0.0,
        /// Moments.
        state: StateFormat = StateFormat::F32,
        /// Master weights.
        master: MasterFormat = MasterFormat::F32,
    }
);
section!(
    /// `[schedule]`
    ScheduleConfig {
        /// Course after the warm-up.
        kind: Kind = Kind::Cosine,
        /// Steps of warm-up.
        warmup: u64 = 0,
        /// Smallest rate as a share of the peak.
        min_ratio: f64 = 0.1,
        /// Share of the steps in which `wsd` decays.
        decay: f64 = 0.2,
    }
);
section!(
    /// `[guard]`
    #[derive(Copy)]
    GuardOptions {
        /// Bad steps in a row after which training stops.
        patience: u32 = 5,
        /// Standard deviations above the mean of the window that make a spike; 0 switches spikes off.
        spike: f64 = 0.0,
        /// Good steps the window has; spikes are looked for once it is full.
        window: usize = 128,
    }
);
section!(
    /// `[quant]`
    QuantConfig {
        /// Weights in the forward pass.
        weights: Weights = Weights::Nvfp4,
        /// Inputs of products.
        activations: Inputs = Inputs::Native,
        /// Per-tensor scale.
        scale: ScaleChoice = ScaleChoice::PowerOfTwo,
        /// Who multiplies by a packed base: `NAME` or `LAYER_GLOB=NAME`, as --backend; empty: the best.
        backend: Vec<String> = Vec::new(),
        /// Which paths may multiply by it, as --compute.
        compute: Compute = Compute::Auto,
    }
);
section!(
    /// `[lora]`
    LoraConfig {
        /// Rank of every adapter.
        rank: usize = 16,
        /// Adapters are scaled by `alpha / rank`.
        alpha: f64 = 32.0,
        /// What they stand beside; `auto`: `packed` for a 4-bit checkpoint, else `merged`.
        base: BaseForm = BaseForm::Auto,
        /// Modules that have one, as PEFT names them (`q_proj`, ...), each with matrices of its own; empty:
        /// all, and q/k/v and gate/up share `lora_A`.
        targets: Vec<String> = Vec::new(),
        /// Folder of an adapter in PEFT's layout to go on from; its rank, alpha and targets count.
        #[serde(skip_serializing_if = "Option::is_none")]
        init: Option<PathBuf> = None,
    }
);
section!(
    /// `[memory]`
    MemoryConfig {
        /// Defaults for an amount of memory.
        preset: Preset = Preset::None,
        /// Bytes the run may use, as `24GiB`; absent: what is free, less 5 %.
        #[serde(skip_serializing_if = "Option::is_none")]
        limit: Option<String> = None,
    }
);
section!(
    /// `[checkpoint]`
    CheckpointConfig {
        /// Folder to go on from after an interruption, relative to where you stand; absent: none.
        #[serde(skip_serializing_if = "Option::is_none")]
        dir: Option<PathBuf> = None,
        /// Steps between two; 0: at the end only.
        every: u64 = 100,
        /// Newest ones that are kept.
        keep: usize = 2,
        /// Write one whenever the held-out loss is better than ever, and keep it.
        keep_best: bool = true,
        /// Go on from the newest; as --resume. How a run was started is stored nowhere.
        #[serde(skip_serializing)]
        resume: bool = false,
    }
);
section!(
    /// `[eval]`
    EvalConfig {
        /// Steps between two; 0: at the end only.
        every: u64 = 0,
        /// Rows of a batch; 0: as many as in training.
        rows: usize = 0,
        /// Positions of a row; 0: as many as in training.
        seq: usize = 0,
        /// Evaluations without a better loss after which training ends; 0: never.
        patience: u32 = 0,
    }
);
section!(
    /// `[sample]`
    SampleConfig {
        /// Steps between two; 0: never.
        every: u64 = 0,
        /// Prompts, put through the chat template.
        prompts: Vec<String> = Vec::new(),
        /// Tokens of an answer.
        tokens: usize = 64,
    }
);
section!(
    /// `[behaviour]`
    BehaviourConfig {
        /// Rows of prompts with what must and must not be answered.
        #[serde(skip_serializing_if = "Option::is_none")]
        suite: Option<PathBuf> = None,
        /// Steps between two; 0: at the end only.
        every: u64 = 0,
        /// Tokens of an answer.
        tokens: usize = 96,
        /// Smallest rate of a group for the run to succeed.
        gates: BTreeMap<String, f64> = BTreeMap::new(),
    }
);
section!(
    /// `[export]`
    ExportConfig {
        /// Folder of the finished model, one in it for each layout, relative to where you stand; absent:
        /// none.
        #[serde(skip_serializing_if = "Option::is_none")]
        dir: Option<PathBuf> = None,
        /// Which step; `auto`: the best after early stopping, else the last. The best is in checkpoint.dir.
        step: Pick = Pick::Auto,
        /// Any of `bf16`, `modelopt`, `compressed-tensors`, `dat`, `peft` (adapters alone); `auto`: `peft`
        /// beside a packed or decoded base, else `modelopt`.
        layouts: Vec<String> = vec!["auto".into()],
    }
);
