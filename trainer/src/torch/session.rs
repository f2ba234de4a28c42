//! From a configuration to a model in training: device, weights, data, and what its files are.
use super::engine::{ClipScope, Engine, Options};
use super::export::Side;
use super::kernels::Kernels;
use super::products::Products;
use super::weights::{Beside, Decay, Keep, Params};
use super::{TorchExecutor, activations, device};
use crate::adapters::Adapters;
use crate::config::{self, BaseForm, Compute, Config, Init, Inputs, Weights};
use crate::data::{Dataset, LoadOptions, Text};
use crate::optim::Share;
use crate::plan::Shapes;
use q4_core::detect::TensorMeta;
use q4_core::{Activations, Code, DType, Error, Result, ThreadPool};
use q4_model::arch::qwen3::QWEN3;
use q4_model::checkpoint::{Bytes, Checkpoint, OpenOptions};
use q4_model::config::DecoderConfig;
use q4_model::executor::Shape;
use q4_model::synthetic;
use q4_model::template::ChatTemplate;
use q4_model::tokenizer::Tokenizer;
use q4_rows::END_OF_TURN;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tch::Device;

/// What `model.path = "demo"` means to the program: a model inside it.
pub type Demo<'a> = &'a dyn Fn() -> Result<Checkpoint>;

/// The model a run begins with.
pub struct Base {
    /// Sizes and constants.
    pub config: DecoderConfig,
    /// `None`: a named shape without files.
    pub checkpoint: Option<Checkpoint>,
    /// Files that go along with an export.
    pub side: Side,
}

impl Base {
    /// Opens what `model` names.
    pub fn open(model: &config::ModelConfig, demo: Demo<'_>) -> Result<Self> {
        if let Some(name) = &model.shape {
            let text = shape_config(name)?;
            let config = DecoderConfig::parse(text.as_bytes())?;
            return Ok(Self { config, checkpoint: None, side: Side::new(text.as_bytes(), Vec::new())? });
        }
        let checkpoint = if model.path == Path::new("demo") {
            demo()?
        } else if model.init == Init::Random && !has_weights(&model.path) {
            // Weights are made up: configuration and tokenizer are all that is needed of a directory.
            return Self::bare(&model.path);
        } else {
            Checkpoint::open(&model.path, &OpenOptions::default()).map_err(|e| {
                // The advice of q4's other verbs is an option that training does not have.
                let meant = e.parts().any(|(part, text)| part == "fix" && text.contains("--config"));
                if meant { e.fix("put config.json and tokenizer.json of that model beside it") } else { e }
            })?
        };
        Ok(Self {
            config: checkpoint.config().clone(),
            side: Side::of(&checkpoint)?,
            checkpoint: Some(checkpoint),
        })
    }

    fn bare(dir: &Path) -> Result<Self> {
        let read = |name: &str| std::fs::read(dir.join(name)).map_err(|e| Error::io(&dir.join(name), &e));
        let text = read("config.json")?;
        let others = super::export::OTHERS
            .iter()
            .filter_map(|n| Some(((*n).to_owned(), Bytes::from(read(n).ok()?))))
            .collect();
        Ok(Self { config: DecoderConfig::parse(&text)?, checkpoint: None, side: Side::new(&text, others)? })
    }

    /// SHA-256 of what the model is: configuration, tokenizer, template and, where training begins with
    /// `weights`, every tensor.
    pub fn digest(&self, weights: bool) -> Result<String> {
        let mut hash = Sha256::new();
        let mut part = |name: &str, bytes: &[u8]| {
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part("config.json", self.side.config());
        for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
            part(name, self.side.file(name).as_deref().unwrap_or_default());
        }
        if let Some(checkpoint) = self.checkpoint.as_ref().filter(|_| weights) {
            for (name, _) in checkpoint.table().iter() {
                part(name, checkpoint.tensor(name)?.bytes);
            }
        }
        Ok(format!("{:x}", hash.finalize()))
    }

    /// Bytes of an element that is exported as it was read: 4 for a base with matrices in f32, else 2; 0
    /// without files.
    pub fn width(&self) -> u64 {
        let Some(checkpoint) = &self.checkpoint else { return 0 };
        let wide = |m: &TensorMeta| m.dtype == Some(DType::F32) && m.shape.len() > 1;
        if checkpoint.table().iter().any(|(_, m)| wide(m)) { 4 } else { 2 }
    }

    /// Whether a projection is stored in 4 bits.
    fn is_packed(&self) -> Result<bool> {
        let Some(checkpoint) = &self.checkpoint else { return Ok(false) };
        for layer in 0..self.config.num_hidden_layers {
            for (name, n, k) in q4_model::checkpoint::names::linears(&self.config, layer) {
                if checkpoint.bind(&name, n, k)?.detected.schema.is_packed() {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Tokenizer and template; [`Code::ModelMissing`] for a shape without files.
    pub fn language(&self) -> Result<Language> {
        let missing = || {
            Error::new(Code::ModelMissing, "tokenizer.json: the model has none")
                .need("a tokenizer to read text with")
        };
        let tokenizer = Tokenizer::from_bytes(&self.side.file("tokenizer.json").ok_or_else(missing)?)?;
        let own = self.side.file("chat_template.jinja");
        let text = own.map(|b| String::from_utf8_lossy(&b).into_owned());
        let ours = || ChatTemplate::of(self.config.arch.template.source);
        let template = match (text, self.side.file("tokenizer_config.json")) {
            (Some(source), _) => ChatTemplate::compile(&source)?,
            (None, Some(config)) => ChatTemplate::from_tokenizer_config(&config)?.unwrap_or_else(ours),
            (None, None) => ours(),
        };
        let end_of_text = Text::new(&tokenizer, &template, &self.config.eos_token_ids)?.end_of_text;
        let mut stop = self.config.eos_token_ids.clone();
        stop.extend([Some(end_of_text), tokenizer.id_of(END_OF_TURN)].into_iter().flatten());
        Ok(Language { tokenizer, template, end_of_text, stop })
    }
}

fn has_weights(dir: &Path) -> bool {
    dir.is_file()
        || ["model.safetensors", "model.safetensors.index.json"].iter().any(|f| dir.join(f).exists())
}

/// How text becomes ids.
pub struct Language {
    /// Tokenizer.
    pub tokenizer: Tokenizer,
    /// Chat template.
    pub template: ChatTemplate,
    /// Ends a document.
    pub end_of_text: u32,
    /// Ends an answer.
    pub stop: Vec<u32>,
}

impl Language {
    /// Reads and tokenises files.
    pub fn load(&self, paths: &[PathBuf], options: &LoadOptions, pool: &ThreadPool) -> Result<Dataset> {
        Dataset::load(paths, &self.text(), options, pool)
    }

    /// What samples are made with.
    pub fn text(&self) -> Text<'_> {
        Text {
            tokenizer: &self.tokenizer,
            template: &self.template,
            end_of_text: self.end_of_text,
            end_of_turn: END_OF_TURN,
        }
    }
}

/// The configuration with the form of the base that `auto` means here. [`Code::Usage`] where a packed base
/// was asked for that there is not, or a backend was named that nothing is for.
pub fn settled(c: &Config, base: &Base) -> Result<Config> {
    let mut c = c.clone();
    let stored = c.model.init == Init::Checkpoint;
    if let Some(lora) = &mut c.lora {
        if let Some(dir) = &lora.init {
            let init = Adapters::open(dir).map_err(|e| e.within("lora.init"))?;
            (lora.rank, lora.alpha) = (init.rank, init.alpha);
            lora.targets = init.targets.iter().cloned().collect();
        }
        let packed = stored && base.is_packed()?;
        match lora.base {
            BaseForm::Auto if packed => lora.base = BaseForm::Packed,
            BaseForm::Auto => lora.base = BaseForm::Merged,
            BaseForm::Packed if !packed => {
                return Err(Error::new(Code::Usage, "lora.base = \"packed\"")
                    .need("a checkpoint whose projections are stored in 4 bits")
                    .have(if stored { "a dense one" } else { "random weights" })
                    .fix("write one with `q4 quantize`, or lora.base = \"merged\""));
            }
            BaseForm::Decoded if !stored => {
                return Err(Error::new(Code::Usage, "lora.base = \"decoded\"")
                    .need("a checkpoint")
                    .have("random weights")
                    .fix("lora.base = \"merged\""));
            }
            BaseForm::Packed | BaseForm::Decoded | BaseForm::Merged => {}
        }
    }
    let named = !c.quant.backend.is_empty() || c.quant.compute != Compute::Auto;
    if named && !is_packed(&c) {
        return Err(Error::new(Code::Usage, "quant.backend and quant.compute (--backend, --compute)")
            .need("adapters beside a packed base: nothing else is multiplied by a backend")
            .have(c.lora.as_ref().map_or("no [lora]", |l| match l.base {
                BaseForm::Decoded => "lora.base = \"decoded\"",
                _ => "lora.base = \"merged\"",
            })));
    }
    Ok(c)
}

fn is_packed(c: &Config) -> bool {
    c.lora.as_ref().is_some_and(|l| l.base == BaseForm::Packed)
}

/// The products of a packed base, planned; `None`: nothing is packed. Reads no weight.
pub fn products(c: &Config, base: &Base, device: Device, pool: &Arc<ThreadPool>) -> Result<Option<Products>> {
    let Some(checkpoint) = base.checkpoint.as_ref().filter(|_| is_packed(c)) else { return Ok(None) };
    Products::plan(c, checkpoint, device, pool.clone()).map(Some)
}

/// The model of `config`, on its device, ready for steps; `products` are those of a packed base, `share` is
/// what this rank moves.
pub fn engine(
    c: &Config,
    base: &Base,
    device: Device,
    pool: Arc<ThreadPool>,
    products: Option<&Products>,
    share: Share,
) -> Result<Engine> {
    let kernels = Kernels::new(device, pool, c.quant.scale)?;
    let lora = c.lora.as_ref();
    if c.train.clip_scope == config::ClipScope::Block && !c.train.update_in_backward {
        return Err(Error::new(Code::Usage, "train.clip_scope = \"block\"")
            .need("train.update_in_backward = true")
            .fix("clip_scope = \"global\""));
    }
    let o = &c.optimizer;
    let keep = Keep {
        state: o.state,
        master: o.master,
        lora: lora.map(|l| (l.rank, l.alpha)),
        quantised: c.quant.weights == Weights::Nvfp4,
        decay: Decay {
            linear: o.weight_decay as f32,
            norm: o.norm_decay as f32,
            table: o.embedding_decay as f32,
        },
        share,
    };
    let beside = match (products, lora.map(|l| l.base)) {
        (Some(products), _) => Some(Beside::Packed(products)),
        (None, Some(BaseForm::Decoded)) => Some(Beside::Decoded),
        _ => None,
    };
    let seed = c.train.seed;
    let (_, still) = Shapes::of(&base.config).freeze(&c.train.freeze)?;
    let mut params = match (&base.checkpoint, c.model.init, beside) {
        (Some(checkpoint), Init::Checkpoint, Some(beside)) => {
            Params::load_beside(checkpoint, beside, keep, seed, &kernels)?
        }
        (Some(checkpoint), Init::Checkpoint, None) => Params::load(checkpoint, keep, seed, &kernels)?,
        _ => Params::random(&base.config, keep, seed, &kernels)?,
    };
    params.freeze(&still);
    if let Some(lora) = lora.filter(|l| !l.targets.is_empty()) {
        let init = lora.init.as_deref().map(Adapters::open).transpose()?;
        params.target(&lora.targets, init.as_ref(), seed, &kernels)?;
    }
    let m = &base.config;
    let shape = Shape {
        hidden: m.hidden_size,
        heads: m.num_attention_heads,
        kv_heads: m.num_key_value_heads,
        head_dim: m.head_dim,
        intermediate: m.intermediate_size,
        vocab: m.vocab_size,
        layers: m.num_hidden_layers,
    };
    let format = match c.quant.activations {
        Inputs::Native => Activations::Native,
        Inputs::Nvfp4 => Activations::Nvfp4(activations::FORMAT),
    };
    let ex = TorchExecutor::new(m, shape, device, format)?;
    let t = &c.train;
    let options = Options {
        recompute: t.recompute,
        update_in_backward: t.update_in_backward,
        clip: t.clip,
        clip_scope: match t.clip_scope {
            config::ClipScope::Global => ClipScope::Global,
            config::ClipScope::Block => ClipScope::Block,
            config::ClipScope::Previous => ClipScope::Previous,
        },
        chunk: t.chunk,
        keep_values: t.keep_values,
    };
    Ok(Engine::new(params, kernels, ex, m.rms_norm_eps, options, t.seed))
}

/// Opens the device and fixes what a result depends on: threads, and kernels that do not race where libtorch
/// has them.
pub fn device(name: &str, threads: usize) -> Result<Device> {
    tch::set_num_threads(threads as i32);
    let device = device::open(name)?;
    device::deterministic(!device.is_cuda())?;
    Ok(device)
}

/// `config.json` of a published size.
fn shape_config(name: &str) -> Result<String> {
    let s = synthetic::size(name)?;
    let text = json!({
        "architectures": [QWEN3.class], "model_type": QWEN3.model_type, "hidden_act": "silu", "attention_bias": false,
        "hidden_size": s.hidden, "intermediate_size": s.intermediate, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim,
        "vocab_size": s.vocab, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "tie_word_embeddings": s.tied, "torch_dtype": "bfloat16",
    });
    Ok(text.to_string())
}
