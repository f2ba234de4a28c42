//! Writes a 4-bit checkpoint in another layout of its format without touching a value, and proves it.
//!
//! Codes and block scales are moved, a per-tensor scale is expressed in the other convention or refused,
//! everything else is copied or refused by name. The output is read again and decoded before it gets its
//! name: one that is not, bit for bit, what the input is never appears.
mod contents;
mod items;
mod proof;
mod scale;

use super::declare::{self, Declared};
use super::put::{Beside, FILE_NOTE, Put};
use super::{DEFAULT_SHARD_BYTES, Progress, Sink, gguf, safetensors};
use crate::{Bytes, Checkpoint, Container, Layer, OpenOptions};
use contents::{Content, Contents, contents, matrices, widen};
use items::{Item, items};
use q4_core::detect::Layout;
use q4_core::formats::storage::Described;
use q4_core::{ActGlobal, Activations, Code, Error, GlobalScale, Q4Schema, Result, ThreadPool};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// What to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// Arrangement of the output: `ModelOpt`, `CompressedTensors`, `Bitsandbytes`, `Gptq`, `Awq`
    /// (directories), `Gguf` or `Dat` (a file).
    pub layout: Layout,
    /// Largest data size of one safetensors file in bytes; a layer that is larger has a file of its own.
    pub max_shard_bytes: u64,
    /// A per-tensor scale without an exact counterpart becomes the nearest f32, if no factor of a block
    /// differs by more than its last bit.
    pub allow_last_bit: bool,
}

impl Conversion {
    /// Into `layout`, in parts of the customary size.
    pub fn new(layout: Layout) -> Self {
        Self { layout, max_shard_bytes: DEFAULT_SHARD_BYTES, allow_last_bit: false }
    }
}

/// One 4-bit matrix, before and after.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorReport {
    /// Layer, e.g. `model.layers.0.mlp.up_proj`.
    pub name: String,
    /// Encoding, e.g. `nvfp4@1`.
    pub schema: String,
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Layout it had.
    pub from: Layout,
    /// Stored per-tensor scale of the input.
    pub scale_in: Option<f32>,
    /// The same in the convention of the output.
    pub scale_out: Option<f32>,
}

/// A per-tensor scale that became the nearest f32.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Changed {
    /// Content, e.g. `model.layers.0.mlp.up_proj.weight`, or `.inputs` for the scale of a layer's inputs.
    pub name: String,
    /// Block scales whose factor has another last bit.
    pub block_scales: usize,
    /// Block scales that were looked at: those that occur, or for inputs all there are.
    pub of: usize,
    /// The largest change of a factor, as a share of it.
    pub largest_relative: f64,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Arrangement.
    pub layout: Layout,
    /// The output, read again, decodes to the values of the input: always, unless last bits may differ.
    pub lossless: bool,
    /// SHA-256 of all decoded values of the output, where `lossless` the same of the input; defined in
    /// `docs/numerics.md`.
    pub sha256_decoded: String,
    /// Scales that became the nearest f32, by name.
    pub changed: Vec<Changed>,
    /// The 4-bit matrices by name.
    pub tensors: Vec<TensorReport>,
    /// Other tensors, copied bit for bit.
    pub copied: usize,
    /// Bytes of all tensors read.
    pub bytes_in: u64,
    /// Bytes of all files written.
    pub bytes_out: u64,
    /// Files written: name and bytes.
    pub files: Vec<(String, u64)>,
    /// What the user has to know to use the output.
    pub notes: Vec<String>,
}

/// Writes `checkpoint` to `out`, which must not exist (an empty directory may, except for `Dat`), reads it
/// again and compares. `progress` counts every tensor twice, when it is written and when it is compared; it
/// may stop the work with an error, which is then returned. Nothing is left behind by any error. One tensor
/// is held at a time.
///
/// # Errors
/// [`Code::Usage`]: `out` exists, the checkpoint has no 4-bit layer, or the layout cannot hold a tensor,
/// which is named, as it is. [`Code::Findings`]: what was written decodes to something else. [`Code::Io`]:
/// the operating system refused to write. Damage of the input has the errors of [`Checkpoint::bind_all`].
pub fn convert(
    checkpoint: &Checkpoint,
    out: &Path,
    conversion: Conversion,
    threads: &ThreadPool,
    progress: &mut dyn FnMut(Progress<'_>) -> Result<()>,
) -> Result<Report> {
    let layout = conversion.layout;
    if matches!(layout, Layout::TorchAo | Layout::Mlx | Layout::Fp8 | Layout::Dense) {
        return Err(Error::new(Code::Usage, format!("layout {} is not written", layout.as_str()))
            .need("modelopt, compressed-tensors, bitsandbytes, gptq, awq, gguf or dat"));
    }
    let container = match layout {
        Layout::Dat => Container::Dat,
        Layout::Gguf => Container::Gguf,
        _ => Container::Safetensors,
    };
    if container == Container::Gguf && out.extension().is_none_or(|e| e != "gguf") {
        return Err(Error::new(Code::Usage, format!("{}: layout gguf is one file", out.display()))
            .need("a name that ends in .gguf, by which it is told from others when it is opened")
            .fix(format!("{}", out.with_extension("gguf").display())));
    }
    if container == Container::Gguf && checkpoint.store().container() == container {
        return Err(Error::new(Code::Usage, format!("{}: a GGUF file already", checkpoint.name()))
            .need("a checkpoint in another layout: what else its metadata say would be lost"));
    }
    checkpoint.bind_all()?;
    let mut contents = contents(checkpoint)?;
    if layout == Layout::Gguf {
        widen(&mut contents);
    }
    if matrices(&contents).next().is_none() {
        return Err(Error::new(Code::Usage, format!("{}: no 4-bit layer", checkpoint.name()))
            .need("a 4-bit checkpoint")
            .have("a dense one")
            .fix(match layout {
                Layout::Gguf => "q4 quantize writes a dense one as 4-bit; convert that".to_owned(),
                _ => format!("q4 quantize --layout {} writes a dense one as 4-bit", layout.as_str()),
            }));
    }
    // Words of GPTQ and AWQ are packed in one way, whichever they had, and declared so.
    let whole = checkpoint.store().container() == container
        && matrices(&contents).all(|layer| layer.detected.layout == layout)
        && !matches!(layout, Layout::Gptq | Layout::Awq);
    if let Some(note) = checkpoint.declaration().notes.first().filter(|_| !whole) {
        return Err(Error::new(
            Code::Usage,
            format!("layout {} cannot say what the original says", layout.as_str()),
        )
        .need("a declaration of weights and inputs, nothing else")
        .have(note.text.as_str())
        .fix("keep the layout"));
    }
    let mut changed = Vec::new();
    let allowed = conversion.allow_last_bit.then_some(&mut changed);
    let items = items(checkpoint, &contents, layout, whole, allowed)?;
    let run =
        Run { checkpoint, contents: &contents, items: &items, changed: &changed, conversion, whole, threads };
    run.write_to(out, progress)
}

/// A layer and what it is written as.
type Written<'a> = (&'a Layer<'a>, Q4Schema);

/// What is said of all `layers` together: one format, and scales that reach equally far.
fn described(layers: &[Written<'_>]) -> Result<Option<Described>> {
    let Some(first) = layers.first() else { return Ok(None) };
    let of = |(_, schema): &Written<'_>| schema.described();
    let by_row = |(layer, schema): &Written<'_>| {
        let whole = Described { group_size: 0, strategy: "channel", ..schema.described()? };
        let is_all = schema.block() == layer.detected.k && !schema.blocks().is_empty();
        is_all.then_some(whole)
    };
    if by_row(first).is_some() && layers.iter().all(|layer| by_row(layer) == by_row(first)) {
        return Ok(by_row(first));
    }
    if layers.iter().all(|layer| of(layer) == of(first)) {
        return Ok(of(first));
    }
    let other = layers.iter().find(|layer| of(layer) != of(first)).unwrap_or(first);
    let words = |(layer, schema): &Written<'_>| {
        format!("{} with a scale per {} in `{}`", schema, schema.block(), layer.name)
    };
    Err(Error::new(Code::Usage, "layers of several formats: the layout describes one for all")
        .need(words(first))
        .have(words(other)))
}

struct Run<'a> {
    checkpoint: &'a Checkpoint,
    contents: &'a Contents<'a>,
    items: &'a [Item<'a>],
    changed: &'a [Changed],
    conversion: Conversion,
    /// All layers have the layout already.
    whole: bool,
    threads: &'a ThreadPool,
}

/// A caller's [`Progress`] function.
type Tell<'t> = &'t mut dyn FnMut(Progress<'_>) -> Result<()>;

impl Run<'_> {
    fn write_to(&self, out: &Path, progress: Tell<'_>) -> Result<Report> {
        let layout = self.conversion.layout;
        let beside = match layout {
            Layout::Dat => Beside::Nothing,
            Layout::Gguf => Beside::Metadata(gguf::head(self.checkpoint)?),
            _ => {
                let max_shard_bytes = self.conversion.max_shard_bytes;
                Beside::Files { small: self.small_files()?, max_shard_bytes }
            }
        };
        let groups = self.items.iter().map(|i| i.entries.clone()).collect();
        let (output, files, ()) = Put { out, groups, beside }.all(|sink| self.write(sink, progress))?;
        let alone = |name: &str| -> Result<_> { Ok(vec![(name.to_owned(), Bytes::map(output.path())?)]) };
        let again = match layout {
            Layout::Dat => {
                let mut again = alone("model.dat")?;
                let config = self.checkpoint.file("config.json");
                again.extend(config.map(|bytes| ("config.json".to_owned(), bytes)));
                Checkpoint::from_files(&out.display().to_string(), again)?
            }
            Layout::Gguf => Checkpoint::from_files(&out.display().to_string(), alone("model.gguf")?)?,
            _ => Checkpoint::open(output.path(), &OpenOptions::default())?,
        };
        if layout == Layout::Gguf {
            let (name, config) = (self.checkpoint.config().arch.names.head, self.checkpoint.config());
            let has_head = matrices(self.contents).any(|layer| layer.name == name);
            gguf::agrees(config, again.config(), has_head)?;
        }
        let mut report = self.proven(&again, files, progress)?;
        if layout == Layout::Dat {
            report.notes.push(FILE_NOTE.into());
        }
        drop(again);
        output.commit()?;
        Ok(report)
    }

    /// What stands beside the weights; what is said about them is said anew unless nothing changes.
    fn small_files(&self) -> Result<Vec<(String, Vec<u8>)>> {
        if self.whole {
            return Ok(declare::unchanged(self.checkpoint));
        }
        let layers: Vec<_> = matrices(self.contents).collect();
        let head = self.checkpoint.config().arch.names.head;
        let dense_head = layers.iter().all(|l| l.name != head).then_some(head);
        let tensors = self.contents.iter().filter(|(_, c)| matches!(c, Content::Tensor(_)));
        let declared = Declared {
            layout: self.conversion.layout,
            described: described(&self.items.iter().filter_map(|item| item.matrix).collect::<Vec<_>>())?,
            inputs: layers.iter().any(|l| l.input_scale().is_some() && l.declared != Activations::Native),
            double: layers.iter().any(|l| l.detected.keys.nested_absmax.is_some()),
            act_order: layers.iter().any(|l| l.order.is_some()),
            dtype: Some(self.checkpoint.embedding_elements()?.dtype()),
            dense: declare::dense_layers(dense_head, tensors.map(|(name, _)| name.as_str())),
        };
        // Only in .dat files does a packed head stand beside a tied one; others would ignore it.
        let untied = dense_head.is_none() && self.checkpoint.config().tie_word_embeddings;
        let fields = untied.then(|| ("tie_word_embeddings", false.into())).into_iter().collect();
        declared.files(self.checkpoint, &declare::config(self.checkpoint)?, fields)
    }

    fn write(&self, sink: &mut dyn Sink, progress: Tell<'_>) -> Result<()> {
        let mut bytes = 0;
        for (done, item) in self.items.iter().enumerate() {
            progress(self.progress(&item.name, done, bytes))?;
            sink.begin(done)?;
            for (entry, data) in item.entries.iter().zip(item.data()?) {
                sink.write(entry, &data)?;
            }
            bytes += item.entries.iter().map(safetensors::Entry::bytes).sum::<u64>();
        }
        Ok(())
    }

    fn progress<'t>(&self, tensor: &'t str, done: usize, bytes_done: u64) -> Progress<'t> {
        let total = self.items.len() + self.contents.len();
        Progress { tensor, done, total, bytes_done, bytes_total: self.bytes_out() }
    }

    fn bytes_out(&self) -> u64 {
        self.items.iter().flat_map(|i| &i.entries).map(safetensors::Entry::bytes).sum()
    }

    /// Compares the output as it was read `again` and reports.
    fn proven(&self, again: &Checkpoint, files: Vec<(String, u64)>, progress: Tell<'_>) -> Result<Report> {
        let bytes = self.bytes_out();
        again.bind_all()?;
        let written = contents(again)?;
        let changed = self.changed.iter().map(|c| c.name.as_str()).collect();
        let sha256_decoded = proof::prove(
            (self.checkpoint, self.contents),
            (again, &written),
            &changed,
            self.threads,
            &mut |name, done| progress(self.progress(name, self.items.len() + done, bytes)),
        )?;
        progress(self.progress("", self.items.len() + self.contents.len(), bytes))?;
        let pairs = || matrices(self.contents).zip(matrices(&written));
        let tensors: Vec<_> = pairs().map(|(a, b)| tensor_report(a, b)).collect();
        let is_tensor = |c: &&Content<'_>| matches!(c, Content::Tensor(_) | Content::Widened(_));
        let tensors_in = self.contents.values().filter(is_tensor).count();
        Ok(Report {
            layout: self.conversion.layout,
            lossless: self.changed.is_empty(),
            sha256_decoded,
            changed: self.changed.to_vec(),
            tensors,
            copied: tensors_in,
            bytes_in: self.checkpoint.store().entries().map(|e| e.bytes as u64).sum(),
            bytes_out: files.iter().map(|f| f.1).sum(),
            files,
            notes: [self.not_carried(), input_notes(pairs())].concat(),
        })
    }

    /// What is no value and has no place in the output.
    fn not_carried(&self) -> Vec<String> {
        let named = |what: &str, names: Vec<&str>| {
            let more = if names.len() > 8 { format!(" and {} more", names.len() - 8) } else { String::new() };
            let first = &names[..names.len().min(8)];
            (!names.is_empty()).then(|| format!("{what} not carried over: {}{more}", first.join(", ")))
        };
        // torchao keeps a record of every tensor there.
        let known = |key: &str| matches!(key, "format" | "tensor_names") || self.contents.contains_key(key);
        let metadata = self.checkpoint.store().metadata().keys().map(String::as_str);
        let metadata = named("metadata of the weight files", metadata.filter(|key| !known(key)).collect());
        let mut others: Vec<_> = self.checkpoint.others().iter().map(String::as_str).collect();
        if self.conversion.layout == Layout::Gguf {
            others.extend(["LICENSE", "NOTICE"].into_iter().filter(|f| self.checkpoint.file(f).is_some()));
        }
        named("files", others).into_iter().chain(metadata).collect()
    }
}

fn tensor_report(source: &Layer<'_>, output: &Layer<'_>) -> TensorReport {
    let scale = |layer: &Layer<'_>| layer.segment.data.global.map(GlobalScale::value);
    let d = &source.detected;
    TensorReport {
        name: source.name.clone(),
        schema: d.schema.id().to_string(),
        n: d.n,
        k: d.k,
        from: d.layout,
        scale_in: scale(source),
        scale_out: scale(output),
    }
}

/// Where products of equal weights differ all the same: layouts have quantisers of inputs of their own.
fn input_notes<'c>(pairs: impl Iterator<Item = (&'c Layer<'c>, &'c Layer<'c>)>) -> Vec<String> {
    let mut changes: BTreeMap<(String, String), usize> = BTreeMap::new();
    for (a, b) in pairs {
        let told = (told(&a.usual()), told(&b.usual()));
        if told.0 != told.1 {
            *changes.entry(told).or_default() += 1;
        }
    }
    let note = |((before, after), layers): (&(String, String), &usize)| {
        format!(
            "answers differ: inputs of {layers} layers were {before} and are now {after}, unless told otherwise; run \
             both with --activations native for equal answers"
        )
    };
    changes.iter().map(note).collect()
}

fn told(declared: &Activations) -> String {
    match declared {
        Activations::Nvfp4(quant) => {
            let scale = match quant.global {
                ActGlobal::None => "without a per-tensor scale",
                ActGlobal::Static(_) => "with a stored scale",
                ActGlobal::PerCall => "with a scale per call",
            };
            format!("nvfp4 rounded as {} does, {scale}", quant.rule.as_str())
        }
        other => other.as_str().to_owned(),
    }
}

#[cfg(test)]
mod tests;
