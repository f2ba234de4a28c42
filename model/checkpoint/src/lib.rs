//! Checkpoints: files are mapped and indexed once, layers are bound to their bytes by name. Also what
//! families call them, and the same models written anew in 4 bits or in another layout.
//!
//! Nothing that a file says is believed before it was compared with something else: sizes with the file,
//! parts with each other, layouts with the configuration, values with the format. Damage is an error that
//! names file or tensor.
pub mod arch;
mod blocks;
mod bytes;
pub mod config;
mod dat;
mod declared;
pub mod export;
mod gguf;
mod layer;
mod matrix;
mod mlx;
pub mod names;
mod order;
pub mod quantize;
mod safetensors;
mod shards;
mod source;
mod store;
mod stored;
mod table;
mod unique;
pub mod values;
mod words;

pub use bytes::Bytes;
pub use declared::{Declaration, Excluded, Method};
pub use layer::Layer;
pub use matrix::{Elements, Matrix};
pub use order::{LayerRows, Order};
pub use store::{Entry, SCANNED, TensorStore};
pub use stored::{Container, Stored};
pub use table::Table;
pub use words::{Packing, Words};

use crate::config::DecoderConfig;
use q4_core::{
    Code, Error, Result, ThreadPool,
    detect::{Detected, Layout},
};
use source::Source;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};
use values::Helpers;

/// Files that stand elsewhere than beside the weights.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// `config.json`, or the directory that holds it.
    pub config: Option<PathBuf>,
    /// `tokenizer.json`, or the directory that holds it.
    pub tokenizer: Option<PathBuf>,
    /// Bytes that the list of tensors may take; unbounded without.
    pub memory: Option<u64>,
}

/// A model on disk or in the executable.
///
/// ```
/// use q4_checkpoint::{Checkpoint, OpenOptions};
/// use q4_core::Code;
/// use std::path::Path;
///
/// let model = Checkpoint::open(Path::new("../../cli/demo"), &OpenOptions::default())?;
/// let (hidden, inner) = (model.config().hidden_size, model.config().intermediate_size);
/// assert_eq!((hidden, inner), (256, 768));
///
/// // A linear layer by name, with the shape that the configuration gives it.
/// let layer = model.layer("model.layers.0.mlp.down_proj", hidden, inner)?;
/// assert_eq!(layer.detected.schema.id().to_string(), "nvfp4@1");
/// let mut row = vec![0.0; inner];
/// layer.rows()?.row(0, &mut row);
/// assert!(row.iter().any(|v| *v != 0.0));
///
/// // What the file does not say is not believed.
/// let refused = model.layer("model.layers.0.mlp.down_proj", inner, hidden).unwrap_err();
/// assert_eq!(refused.code(), Code::TensorShape);
/// # Ok::<(), q4_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Checkpoint {
    name: String,
    store: TensorStore,
    config: DecoderConfig,
    declaration: Declaration,
    /// The head is the embedding's codes.
    is_head_tied: bool,
    side: BTreeMap<String, Bytes>,
    others: Vec<String>,
}

/// Whether a file beside the weights is about texts.
fn is_of_tokenizer(name: &str) -> bool {
    !["config.json", "generation_config.json", "hf_quant_config.json"].contains(&name)
}

/// What turns the last hidden state into logits, `[vocab, hidden]`.
#[derive(Clone, Debug)]
pub enum Head<'a> {
    /// The embedding.
    Tied,
    /// A float matrix of its own.
    Dense(Stored<'a>),
    /// A 4-bit matrix of its own, which also takes precedence over a tied embedding.
    Quantised(Box<Layer<'a>>),
}

impl Checkpoint {
    /// Opens a model directory, a `.safetensors` file, an index of shards or a `.dat` file, with
    /// `config.json` beside it or named in `options`, or a `.gguf` file, which holds it. The weights are
    /// indexed, not read, but for blocks of GGUF that are taken apart.
    ///
    /// # Errors
    /// [`Code::ModelMissing`] for a file that is not there, [`Code::Container`] for one that is damaged or no
    /// weight file, [`Code::ConfigInvalid`], [`Code::OutOfMemory`] for a list of tensors beyond
    /// [`OpenOptions::memory`], [`Code::Io`].
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        Self::read(path.display().to_string(), Source::of_path(path)?, options)
    }

    /// The same from files in memory, under the names they would have in a directory.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Code::Container`] also for a name that comes twice.
    pub fn from_files(name: &str, files: Vec<(String, Bytes)>) -> Result<Self> {
        let mut map = BTreeMap::new();
        for (file, bytes) in files {
            if map.insert(file.clone(), bytes).is_some() {
                return Err(Error::new(Code::Container, format!("{name}: the file {file} is there twice")));
            }
        }
        Self::read(
            name.to_owned(),
            Source::Memory { name: name.to_owned(), files: map },
            &OpenOptions::default(),
        )
    }

    fn read(name: String, source: Source, options: &OpenOptions) -> Result<Self> {
        let store = TensorStore::read(&source, options.memory)?;
        let mut side = source.side_files(options)?;
        if store.container() == Container::Gguf {
            store.foreign().map_or(Ok(()), |(name, spelled)| Err(gguf::refusal(name, spelled)))?;
            let bytes = store.file_alone().map_or(&[][..], |bytes| &bytes[..]);
            // What lies beside it is of other models, unless it was named.
            let (config, tokenizer) = (options.config.is_none(), options.tokenizer.is_none());
            side.retain(|name, _| if is_of_tokenizer(name) { !tokenizer } else { !config });
            for (name, bytes) in gguf::files(&name, bytes, [config, tokenizer])? {
                side.entry(name).or_insert(bytes);
            }
        }
        let config = side.get("config.json").ok_or_else(|| {
            // Both at once: whoever adds one should not be sent back for the other.
            let fix = match side.get("tokenizer.json") {
                Some(_) => "--config DIR, the folder of the model that it was made from",
                None => "--config DIR --tokenizer DIR, the folder of the model that it was made from",
            };
            Error::new(Code::ModelMissing, format!("{}: no such file", source.label("config.json")))
                .need("config.json beside the weights")
                .fix(fix)
        })?;
        let config = DecoderConfig::parse(config)?;
        let store = store.of_whole_model(config.arch);
        // A `.dat` or `.gguf` file says all there is about its layers; the configuration beside it is that of
        // the original model.
        let mut declaration = match store.container() {
            Container::Dat | Container::Gguf => Declaration::none(),
            Container::Safetensors => Declaration::read(
                config.quantization.as_ref(),
                side.get("hf_quant_config.json").map(|b| &b[..]),
            )?,
        };
        let apart = words::apart(&store, declaration.packing, options.memory)?;
        let store = store.with("words taken apart", apart.tensors, apart.bytes.into(), &apart.gone);
        let (arch, tied) = (&config.arch.names, config.tie_word_embeddings);
        let mlx::Read { store, is_head_tied } = mlx::read(store, &declaration, arch, tied, options.memory)?;
        if is_head_tied {
            declaration.alike(arch.embedding, arch.head);
        }
        for note in &declaration.notes {
            tracing::warn!(model = %name, "{}", note.text);
        }
        let weights: Vec<_> = store.files().map(|(name, _)| name).collect();
        let others = source.others(&weights)?;
        Ok(Self { name, store, config, declaration, is_head_tied, side, others })
    }

    /// What the model was opened as.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shapes and constants.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// What the configuration says about the quantisation.
    pub fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    /// The tensors without their meaning.
    pub fn store(&self) -> &TensorStore {
        &self.store
    }

    /// `config.json`, `generation_config.json`, `hf_quant_config.json`, `tokenizer.json`,
    /// `tokenizer_config.json` or `chat_template.jinja`, if the model has it. Their sizes were bounded
    /// when the model was opened.
    pub fn file(&self, name: &str) -> Option<Bytes> {
        self.side.get(name).cloned()
    }

    /// Names in the model's directory of which nothing is read.
    pub fn others(&self) -> &[String] {
        &self.others
    }

    /// Type and shape of every tensor.
    pub fn table(&self) -> &Table {
        self.store.table()
    }

    /// A tensor by its full name.
    ///
    /// # Errors
    /// [`Code::TensorMissing`] without it, [`Code::TensorType`] where no weight has its type.
    pub fn tensor(&self, name: &str) -> Result<Stored<'_>> {
        self.store.tensor(name)
    }

    /// The linear layer of module `name`, which must be `[n, k]`. Every value that could make a product
    /// non-finite has been read: scales are finite and not negative, codebooks are NF4's, dense weights
    /// are finite.
    ///
    /// # Errors
    /// [`Code::TensorMissing`], [`Code::TensorShape`] for another shape, [`Code::SchemaInvalid`] for parts
    /// that contradict each other or the configuration, [`Code::ScaleInvalid`] and [`Code::ValueInvalid`] for
    /// values that no product can use.
    pub fn layer(&self, name: &str, n: usize, k: usize) -> Result<Layer<'_>> {
        self.checked(name, n, k, None)
    }

    /// As [`layer`](Self::layer); `threads` share the reading.
    ///
    /// # Errors
    /// As [`layer`](Self::layer).
    pub fn layer_on(&self, threads: &ThreadPool, name: &str, n: usize, k: usize) -> Result<Layer<'_>> {
        self.checked(name, n, k, Some(threads))
    }

    fn checked(&self, name: &str, n: usize, k: usize, helpers: Helpers<'_>) -> Result<Layer<'_>> {
        let layer = self.bind(name, n, k)?;
        match values::problems(|name| self.store.tensor(name), &layer.detected, helpers)?.into_iter().next() {
            Some(problem) => Err(problem.into()),
            None => Ok(layer),
        }
    }

    /// Tells the system that the bytes of a layer were read for the last time for now, so that a mapped file
    /// does not count towards the size of this process. Reading them again is slower, not wrong.
    pub fn release(&self, layer: &Detected) {
        let keys = &layer.keys;
        for key in [&keys.scales, &keys.absmax].into_iter().flatten().chain([&keys.weight]) {
            self.release_tensor(key);
        }
    }

    /// As [`release`](Self::release) for one tensor.
    pub fn release_tensor(&self, name: &str) {
        self.store.release_tensor(name);
    }

    /// Tells the system that nothing of the weight files is needed in memory for now.
    pub fn release_files(&self) {
        self.store.release();
    }

    /// As [`layer`](Self::layer), but of the values only the per-tensor scales are read: for plans and
    /// listings.
    ///
    /// # Errors
    /// As [`layer`](Self::layer), but for the values that are not read.
    pub fn bind(&self, name: &str, n: usize, k: usize) -> Result<Layer<'_>> {
        layer::bind(self, name, n, k).map_err(|e| self.of_absent_layer(name, e))
    }

    /// A tensor of a layer of which nothing is there: not it is missing.
    fn of_absent_layer(&self, name: &str, e: Error) -> Error {
        let modules = &self.config.arch.names;
        match modules.layer_of(name) {
            Some(i) if e.code() == Code::TensorMissing && !self.table().has_prefix(&modules.of(i, "")) => {
                let layers = self.config.num_hidden_layers;
                e.need(format!("{layers} layers, as num_hidden_layers of config.json says"))
                    .have(format!("no tensor of layer {i}"))
            }
            _ => e,
        }
    }

    /// A tensor of exactly `shape` in f16, bf16 or f32 with finite values only.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor); [`Code::TensorType`] and [`Code::TensorShape`] for another type or shape,
    /// [`Code::ValueInvalid`] for NaN and infinity.
    pub fn floats(&self, name: &str, shape: &[usize]) -> Result<Stored<'_>> {
        self.store.floats(name, shape, None)
    }

    /// As [`floats`](Self::floats); `threads` share the reading.
    ///
    /// # Errors
    /// As [`floats`](Self::floats).
    pub fn floats_on(&self, threads: &ThreadPool, name: &str, shape: &[usize]) -> Result<Stored<'_>> {
        self.store.floats(name, shape, Some(threads))
    }

    /// As [`floats_on`](Self::floats_on) for a tensor of which a few rows are read later.
    ///
    /// # Errors
    /// As [`floats`](Self::floats).
    pub fn floats_in_passing(&self, threads: &ThreadPool, name: &str, shape: &[usize]) -> Result<Stored<'_>> {
        self.store.floats_in_passing(name, shape, Some(threads))
    }

    /// The `len` weights of the norm of module `name` (without `.weight`), finite.
    ///
    /// # Errors
    /// As [`floats`](Self::floats).
    pub fn norm(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let name = format!("{name}.weight");
        let stored = self.store.floats(&name, &[len], None).map_err(|e| self.of_absent_layer(&name, e));
        let values = stored?.to_f32();
        self.release_tensor(&name);
        values
    }

    /// The `n` values that the projection `module` adds to its product, finite; none where the family has
    /// none.
    ///
    /// # Errors
    /// As [`floats`](Self::floats).
    pub fn bias(&self, module: &str, n: usize) -> Result<Option<Vec<f32>>> {
        let name = self.config.arch.is_biased(module).then(|| format!("{module}.bias"));
        name.map(|name| self.store.floats(&name, &[n], None)?.to_f32()).transpose()
    }

    /// The output projection. In a `.dat` file a 4-bit `lm_head` is used even where the configuration ties it
    /// to the embedding.
    ///
    /// # Errors
    /// As [`layer`](Self::layer) and [`floats`](Self::floats); [`Code::SchemaInvalid`] for a head of
    /// its own that the configuration ties to the embedding.
    pub fn head(&self) -> Result<Head<'_>> {
        let head = self.bind_head()?;
        if let Head::Quantised(layer) = &head {
            return Ok(Head::Quantised(Box::new(self.layer(
                &layer.name,
                layer.detected.n,
                layer.detected.k,
            )?)));
        }
        if let Head::Dense(stored) = &head {
            self.store.floats(&format!("{}.weight", self.config.arch.names.head), stored.shape, None)?;
        }
        Ok(head)
    }

    /// As [`head`](Self::head) without reading values, but for those of a dense one that is tied: it is
    /// compared.
    ///
    /// # Errors
    /// As [`head`](Self::head), but for the values that are not read.
    pub fn bind_head(&self) -> Result<Head<'_>> {
        let (n, k) = (self.config.vocab_size, self.config.hidden_size);
        let (tied, names) = (self.config.tie_word_embeddings, &self.config.arch.names);
        if tied && !self.has_module(names.head) {
            return Ok(Head::Tied);
        }
        if !self.has_module(names.head) {
            let error = Error::new(Code::TensorMissing, format!("`{}.weight`", names.head))
                .need("a head of its own, for tie_word_embeddings is false in config.json")
                .have(format!("{} tensors of other names", self.table().len()));
            return Err(self.store.hint(names.head, error));
        }
        let layer = self.bind(names.head, n, k)?;
        if layer.detected.layout == Layout::Gguf {
            self.agrees_about_head(&layer.detected)?;
        }
        if layer.detected.layout != Layout::Dense {
            return self.agrees_about_packed(&layer.detected).map(|()| Head::Quantised(Box::new(layer)));
        }
        let stored = self.tensor(&layer.detected.keys.weight)?;
        if !tied {
            return Ok(Head::Dense(stored));
        }
        let name = format!("{}.weight", names.embedding);
        let is_same =
            |embedding: &Stored<'_>| (embedding.dtype, embedding.bytes) == (stored.dtype, stored.bytes);
        if self.blocks_of(names.embedding).is_none() && is_same(&self.tensor(&name)?) {
            return Ok(Head::Tied);
        }
        Err(Error::new(
            Code::SchemaInvalid,
            format!("`{}.weight`: config.json ties it to the embedding", names.head),
        )
        .need(format!("the same values as {}.weight, or no such tensor", names.embedding))
        .have("others")
        .fix("set tie_word_embeddings to false if the model was trained so"))
    }

    /// Only in `.dat` files does a packed head stand beside a tied one; other tools would not read it. MLX's
    /// may be the embedding itself.
    fn agrees_about_packed(&self, head: &Detected) -> Result<()> {
        let may_be = self.store.container() != Container::Safetensors || self.is_head_tied;
        if !self.config.tie_word_embeddings || may_be {
            return Ok(());
        }
        Err(Error::new(
            Code::SchemaInvalid,
            format!("`{}`: config.json ties it to the embedding", head.keys.weight),
        )
        .need("no such tensor, for tie_word_embeddings is true in config.json")
        .have(format!("a head of its own, {}", head.schema.in_words()))
        .fix("set tie_word_embeddings to false if the model was quantised so"))
    }

    /// A GGUF file has a head of its own, or its embedding's blocks under that name: a configuration from
    /// elsewhere may say otherwise.
    fn agrees_about_head(&self, head: &Detected) -> Result<()> {
        let (tied, names) = (self.config.tie_word_embeddings, &self.config.arch.names);
        let at = |name: &str| self.tensor(name).map(|stored| stored.bytes.as_ptr());
        let embedding = format!("{}.weight", names.embedding);
        let is_embedding = match self.blocks_of(names.embedding) {
            Some(blocks) => at(&blocks.tensor(&embedding))? == at(&head.keys.weight)?,
            None => false,
        };
        if is_embedding == tied {
            return Ok(());
        }
        let stored =
            |is_embedding| if is_embedding { "no head beside the embedding" } else { "a head of its own" };
        Err(Error::new(Code::SchemaInvalid, format!("tie_word_embeddings is {tied}"))
            .need(format!("a file with {}", stored(tied)))
            .have(stored(is_embedding))
            .fix("leave --config out: a GGUF file has its own"))
    }

    /// Binds and checks every tensor the model needs.
    ///
    /// # Errors
    /// The first problem: as [`layer`](Self::layer), [`floats`](Self::floats) and [`head`](Self::head).
    pub fn bind_all(&self) -> Result<()> {
        self.embedding()?;
        for i in 0..self.config.num_hidden_layers {
            for (name, len) in names::norms(&self.config, i) {
                self.norm(&name, len)?;
            }
            for (name, n, k) in names::linears(&self.config, i) {
                self.layer(&name, n, k)?;
                self.bias(&name, n)?;
            }
        }
        self.norm(self.config.arch.names.final_norm, self.config.hidden_size)?;
        self.head().map(drop)
    }

    /// The same files read as another model: with another configuration and, where named, two kinds of module
    /// exchanged.
    pub fn changed(&self, edit: impl FnOnce(&mut DecoderConfig), exchange: Option<(&str, &str)>) -> Self {
        let mut other = self.clone();
        edit(&mut other.config);
        if let Some((a, b)) = exchange {
            other.store = self.store.exchanged(a, b);
        }
        other
    }

    fn has_module(&self, module: &str) -> bool {
        self.table().has_prefix(&format!("{module}."))
    }
}
