//! Writes a dense checkpoint as a 4-bit one, in the layout of the tool or runner that will read it;
//! [`convert`] writes a 4-bit one in another layout.
//!
//! Everything that can be refused is refused before the first byte is written; the output has its name only
//! when it is complete; the memory held is one packed tensor, whatever the size of the model.
pub mod atomic;
pub mod convert;
mod dat;
mod declare;
mod front;
mod gguf;
mod layout;
mod members;
mod put;
pub mod safetensors;
mod words;
mod work;

use crate::Checkpoint;
use crate::quantize::{Quantized, Rows, Target, amax, power_of_two_amax, quantize, sqnr_db};
use put::{Beside, FILE_NOTE, Put};
use q4_core::detect::Layout;
use q4_core::formats::quantizations;
use q4_core::{Code, Error, Result, ThreadPool};
pub use safetensors::{Entry, Writer};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use work::{Item, Matrix};

/// What to write and how.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportPlan {
    /// Arrangement of the output: `ModelOpt`, `CompressedTensors`, `Bitsandbytes`, `Gptq`, `Awq`
    /// (directories) or `Dat` (a file).
    pub layout: Layout,
    /// What each chosen matrix becomes.
    pub target: Target,
    /// Globs ([`q4_core::matches`]) of layers to quantise besides the default set: the seven projections of
    /// every layer and, for `Dat`, `lm_head`. Embeddings and norms are never quantised.
    pub include: Vec<String>,
    /// Globs of layers to keep dense; stronger than `include`.
    pub exclude: Vec<String>,
    /// q/k/v and gate/up share the per-tensor scale of their largest amax. Runners that fuse them require
    /// it.
    pub share_groups: bool,
    /// NVFP4's per-tensor scales are rounded up to a power of two, as the trainer has them: every decoded
    /// weight is then exact in bf16, and the error is the same.
    pub power_of_two: bool,
    /// Largest data size of one safetensors file in bytes; a tensor that is larger has a file of its own.
    pub max_shard_bytes: u64,
}

/// Reported before a tensor is worked on, and once at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The tensor; empty at the end.
    pub tensor: &'a str,
    /// Tensors written so far.
    pub done: usize,
    /// Tensors in all.
    pub total: usize,
    /// Bytes of the tensors behind, dense ones when quantising.
    pub bytes_done: u64,
    /// Bytes in all.
    pub bytes_total: u64,
}

/// What became of one quantised matrix.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorReport {
    /// Layer, e.g. `model.layers.0.mlp.up_proj`.
    pub name: String,
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Signal-to-noise ratio of the decoded weight in dB; infinite (JSON `null`) when nothing was lost.
    pub sqnr_db: f64,
    /// Dense size.
    pub bytes_in: u64,
    /// Size of codes and scales.
    pub bytes_out: u64,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Arrangement.
    pub layout: Layout,
    /// Encoding of the quantised matrices.
    pub target: Target,
    /// Quantised matrices, in the order of the file.
    pub tensors: Vec<TensorReport>,
    /// Tensors copied bit for bit.
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

/// Layouts that are written, as errors name them.
const WRITTEN: &str = "modelopt, compressed-tensors, bitsandbytes, gptq, awq or dat";

/// 5 GB, the customary size of a part.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

impl ExportPlan {
    /// Every layer that is quantised by default becomes `target` and lies in `layout`, which has to hold it
    /// ([`export`] refuses others).
    pub fn new(layout: Layout, target: Target) -> Self {
        let (include, exclude) = (Vec::new(), Vec::new());
        Self {
            layout,
            target,
            include,
            exclude,
            share_groups: true,
            power_of_two: false,
            max_shard_bytes: DEFAULT_SHARD_BYTES,
        }
    }

    /// [`Code::Usage`] when the layout cannot hold the target.
    fn check(&self) -> Result<()> {
        let invalid = self.target.invalid();
        if invalid.is_none() && self.target.fits(self.layout) {
            return Ok(());
        }
        let held: Vec<_> = quantizations().filter_map(|(_, q)| (q.held)(self.layout)).collect();
        let need = match invalid {
            Some(need) => need.to_owned(),
            None if held.is_empty() => format!("layout {WRITTEN}"),
            None => held.join(", or "),
        };
        Err(Error::new(Code::Usage, format!("layout {} cannot hold what is asked", self.layout.as_str()))
            .need(need)
            .have(self.target.in_words())
            .fix(self.target.fix()))
    }
}

/// Quantises `checkpoint`, which must be dense, and writes it to `out`, which must not exist (an empty
/// directory may, except for `Dat`). `progress` may stop the work with an error, which is then returned;
/// nothing is left behind then.
///
/// # Errors
/// [`Code::Usage`]: `out` exists, the plan contradicts itself, a glob names no layer, the checkpoint is 4-bit
/// already. [`Code::TensorShape`]: a matrix does not fit the format. [`Code::NonFinite`]: a weight is NaN or
/// infinite. [`Code::Io`]: the operating system refused to write.
pub fn export(
    checkpoint: &Checkpoint,
    out: &Path,
    plan: &ExportPlan,
    threads: &ThreadPool,
    progress: &mut dyn FnMut(Progress<'_>) -> Result<()>,
) -> Result<Report> {
    plan.check()?;
    let items = work::items(checkpoint, plan)?;
    let mut run = Run { checkpoint, plan, threads, amax: BTreeMap::new(), items: &items };
    run.write_to(out, progress)
}

/// Where finished tensors go, item by item in order.
trait Sink {
    /// The tensors of `item` come next.
    fn begin(&mut self, item: usize) -> Result<()>;
    /// One tensor.
    fn write(&mut self, entry: &Entry, bytes: &[u8]) -> Result<()>;
}

struct Run<'a> {
    checkpoint: &'a Checkpoint,
    plan: &'a ExportPlan,
    threads: &'a ThreadPool,
    items: &'a [Item],
    /// Shared amax by group.
    amax: BTreeMap<String, f32>,
}

impl Run<'_> {
    fn write_to(
        &mut self,
        out: &Path,
        progress: &mut dyn FnMut(Progress<'_>) -> Result<()>,
    ) -> Result<Report> {
        let (plan, is_file) = (self.plan, self.plan.layout == Layout::Dat);
        let max_shard_bytes = plan.max_shard_bytes;
        let beside = match is_file {
            true => Beside::Nothing,
            false => {
                let small = declare::files(self.checkpoint, plan, self.items)?;
                Beside::Files { small, max_shard_bytes }
            }
        };
        let groups = self.items.iter().map(|i| i.entries.clone()).collect();
        let put = Put { out, groups, beside };
        let (output, files, mut report) = put.all(|sink| self.tensors(sink, progress))?;
        output.commit()?;
        report.bytes_out = files.iter().map(|f| f.1).sum();
        report.files = files;
        if is_file {
            report.notes.push(FILE_NOTE.into());
            report.notes.extend(self.changed());
        }
        Ok(report)
    }

    /// What a `.dat` file computes otherwise than the model it is made of, but for the rounding of the layers
    /// that every layout packs.
    fn changed(&self) -> Option<String> {
        let name = self.checkpoint.config().arch.names.head;
        let head = self.items.iter().filter_map(|i| i.matrix.as_ref()).any(|m| m.layer == name);
        let inputs = self.plan.target.schema().activations().contains(&"nvfp4");
        let changed: Vec<_> = [
            head.then_some("the head is packed to 4 bits as well"),
            inputs.then_some(
                "inputs are rounded to nvfp4, and answers differ, unless it is run with --activations native",
            ),
        ]
        .into_iter()
        .flatten()
        .collect();
        (!changed.is_empty()).then(|| format!("a .dat file computes otherwise: {}", changed.join("; ")))
    }

    fn tensors(
        &mut self,
        sink: &mut dyn Sink,
        progress: &mut dyn FnMut(Progress<'_>) -> Result<()>,
    ) -> Result<Report> {
        let (items, total) = (self.items, self.items.len());
        let bytes_total = items.iter().map(|i| i.bytes_in).sum();
        let (mut bytes_done, mut copied, mut tensors) = (0, 0, Vec::new());
        for (done, item) in items.iter().enumerate() {
            progress(Progress { tensor: &item.source, done, total, bytes_done, bytes_total })?;
            sink.begin(done)?;
            let stored = self.checkpoint.tensor(&item.source)?;
            match &item.matrix {
                None => {
                    sink.write(&item.entries[0], stored.bytes)?;
                    copied += 1;
                }
                Some(matrix) => {
                    let rows = Rows::new(&item.source, stored.bytes, matrix.dtype, matrix.n, matrix.k)?;
                    let global_amax = match (self.group_amax(matrix)?, self.plan.target.rule()) {
                        (group, Some(rule)) if self.plan.power_of_two => {
                            let own = || amax(&rows, self.threads);
                            Some(power_of_two_amax(rule, group.map_or_else(own, Ok)?))
                        }
                        (group, _) => group,
                    };
                    let quantized = quantize(&rows, &self.plan.target, global_amax, self.threads)?;
                    let sqnr_db = sqnr_db(&rows, &quantized, self.threads)?;
                    tensors.push(TensorReport {
                        name: matrix.layer.clone(),
                        n: matrix.n,
                        k: matrix.k,
                        sqnr_db,
                        bytes_in: item.bytes_in,
                        bytes_out: item.entries.iter().map(Entry::bytes).sum(),
                    });
                    self.write(sink, item, matrix, quantized)?;
                }
            }
            bytes_done += item.bytes_in;
        }
        progress(Progress { tensor: "", done: total, total, bytes_done, bytes_total })?;
        let (layout, target) = (self.plan.layout, self.plan.target);
        let (bytes_in, bytes_out) = (bytes_total, 0);
        Ok(Report {
            layout,
            target,
            tensors,
            copied,
            bytes_in,
            bytes_out,
            files: Vec::new(),
            notes: Vec::new(),
        })
    }

    fn write(&self, sink: &mut dyn Sink, item: &Item, matrix: &Matrix, quantized: Quantized) -> Result<()> {
        let parts = layout::parts(self.plan.layout, matrix.dtype, &quantized)?;
        for (entry, bytes) in item.entries.iter().zip(&parts) {
            sink.write(entry, bytes)?;
        }
        Ok(())
    }

    /// Largest amax of the matrices that share a per-tensor scale with this one; `None` when it stands alone.
    fn group_amax(&mut self, matrix: &Matrix) -> Result<Option<f32>> {
        let Some(group) = &matrix.group else { return Ok(None) };
        if let Some(&known) = self.amax.get(group) {
            return Ok(Some(known));
        }
        let mut largest = 0f32;
        for item in self.items {
            let Some(m) = item.matrix.as_ref().filter(|m| m.group.as_ref() == Some(group)) else { continue };
            let stored = self.checkpoint.tensor(&item.source)?;
            let rows = Rows::new(&item.source, stored.bytes, m.dtype, m.n, m.k)?;
            largest = largest.max(amax(&rows, self.threads)?);
        }
        self.amax.insert(group.clone(), largest);
        Ok(Some(largest))
    }
}
