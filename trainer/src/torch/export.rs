//! Trained masters as a model directory or `.dat` file, through the model crate's own export.
//!
//! Dense masters are written beside the target first (f32 where 4-bit codes will be made of them, bf16
//! elsewhere) and become 4-bit by the code every `q4 quantize` runs. With power-of-two scales the result
//! holds, bit for bit, the values the forward pass computed with. What training did not move, and what the
//! model does not use, keeps its bytes.
use super::Tch;
use super::kernels::Kernels;
use super::weights::{Params, Role, Source, bytes};
use crate::optim::ScaleChoice;
use q4_core::detect::{Layout, TensorMeta};
use q4_core::{Code, DType, Error, Result};
use q4_model::checkpoint::{Bytes, Checkpoint, OpenOptions};
use q4_model::export::{Entry, ExportPlan, Writer, export};
use q4_model::quantize::{Method, Scales, Target, ToNvfp4};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tch::Kind;

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A dense directory: 4-bit layers as their decoded values, which bf16 holds exactly.
    Bf16,
    /// 4-bit in this layout.
    Nvfp4(Layout),
}

impl FromStr for Form {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        Ok(match s {
            "bf16" => Self::Bf16,
            "modelopt" => Self::Nvfp4(Layout::ModelOpt),
            "compressed-tensors" => Self::Nvfp4(Layout::CompressedTensors),
            "dat" => Self::Nvfp4(Layout::Dat),
            _ => {
                return Err(Error::new(Code::Usage, format!("export as `{s}`"))
                    .need("bf16, modelopt, compressed-tensors or dat"));
            }
        })
    }
}

/// The files beside the weights, from the model that was trained.
pub struct Side {
    /// `config.json`, without what it said about quantisation.
    config: Vec<u8>,
    others: Vec<(String, Bytes)>,
}

/// What goes along, where there is one.
pub const OTHERS: [&str; 4] =
    ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

impl Side {
    /// Of a checkpoint.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let config =
            checkpoint.file("config.json").ok_or_else(|| Error::new(Code::ModelMissing, "config.json"))?;
        let others = OTHERS.iter().filter_map(|n| Some(((*n).to_owned(), checkpoint.file(n)?))).collect();
        Self::new(&config, others)
    }

    /// From a `config.json` and other files.
    pub fn new(config: &[u8], others: Vec<(String, Bytes)>) -> Result<Self> {
        let wrong = |e: String| Error::new(Code::ConfigInvalid, "config.json").have(e);
        let mut value: Value = serde_json::from_slice(config).map_err(|e| wrong(e.to_string()))?;
        let object = value.as_object_mut().ok_or_else(|| wrong("no object".into()))?;
        object.shift_remove("quantization_config");
        let config = serde_json::to_vec_pretty(&value).map_err(|e| wrong(e.to_string()))?;
        Ok(Self { config, others })
    }

    /// `config.json`.
    pub fn config(&self) -> &[u8] {
        &self.config
    }

    /// One of [`OTHERS`].
    pub fn file(&self, name: &str) -> Option<Bytes> {
        self.others.iter().find(|(n, _)| n == name).map(|(_, b)| b.clone())
    }
}

/// Writes the model to `out`, which must not exist, and tells how it differs from what was trained. `base` is
/// the checkpoint training began with, where there was one.
pub fn write(
    params: &Params,
    kernels: &Kernels,
    side: &Side,
    base: Option<&Checkpoint>,
    out: &Path,
    form: Form,
) -> Result<Vec<String>> {
    if std::fs::symlink_metadata(out).is_ok() {
        return Err(
            Error::new(Code::Usage, format!("{}: exists", out.display())).fix("name another, or remove it")
        );
    }
    if matches!(form, Form::Nvfp4(_)) && !params.keep.quantised {
        return Err(Error::new(Code::Usage, "export in NVFP4 of a model that was not trained in it")
            .need("quant.weights = \"nvfp4\"")
            .fix("export bf16, then q4 quantize"));
    }
    let beside = Beside::new(out)?;
    dense(params, kernels, side, base, &beside.0, form)?;
    let Form::Nvfp4(layout) = form else {
        return std::fs::rename(&beside.0, out).map(|()| Vec::new()).map_err(|e| Error::io(out, &e));
    };
    let target = Target::Nvfp4(ToNvfp4::new(layout, Some(Scales::TwoLevel), Method::Rtn));
    let plan = ExportPlan {
        power_of_two: kernels.scale() == ScaleChoice::PowerOfTwo,
        ..ExportPlan::new(layout, target)
    };
    let checkpoint = Checkpoint::open(&beside.0, &OpenOptions::default())?;
    Ok(export(&checkpoint, out, &plan, kernels.pool(), &mut |_| Ok(()))?.notes)
}

/// A directory of its own beside the target, removed with the value unless it was renamed.
pub(super) struct Beside(PathBuf);

impl Beside {
    pub(super) fn new(out: &Path) -> Result<Self> {
        let mut name = out.file_name().unwrap_or_default().to_owned();
        name.push(format!(".dense-{}", std::process::id()));
        let path = out.with_file_name(name);
        std::fs::create_dir_all(&path).map_err(|e| Error::io(&path, &e))?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Already renamed, or not worth an error of its own.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn dense(
    params: &Params,
    kernels: &Kernels,
    side: &Side,
    base: Option<&Checkpoint>,
    dir: &Path,
    form: Form,
) -> Result<()> {
    let dtype = |role| if role == Role::Linear && form != Form::Bf16 { DType::F32 } else { DType::BF16 };
    let kept = kept(params, base);
    let mut entries: Vec<Entry> = Vec::new();
    for p in &params.all {
        for (module, rows) in &p.parts {
            let mut shape = p.shape.clone();
            shape[0] = *rows;
            entries.push(Entry::new(format!("{module}.weight"), dtype(p.role), &shape));
        }
    }
    entries.retain(|e| kept.iter().all(|k| k.name != e.name));
    let made = entries.len();
    entries.extend(kept);
    let path = dir.join("model.safetensors");
    let mut writer = Writer::create(&path, &entries)?;
    let (made, kept) = entries.split_at(made);
    if let Some(base) = base {
        for entry in kept {
            writer.write(&entry.name, base.tensor(&entry.name)?.bytes)?;
        }
    }
    for (index, p) in params.all.iter().enumerate() {
        let value = match form {
            // The decoded values are exact in bf16.
            Form::Bf16 => Some(params.value(index, kernels)?.f_to_kind(Kind::BFloat16).t()?),
            Form::Nvfp4(_) => None,
        };
        let mut first = 0;
        for (part, (module, rows)) in p.parts.iter().enumerate() {
            let name = format!("{module}.weight");
            if made.iter().all(|e| e.name != name) {
                first += *rows as i64;
                continue;
            }
            let data = match &value {
                Some(value) => bytes(&value.f_narrow(0, first, *rows as i64).t()?)?,
                None => {
                    let master = params.master_rows(index, part)?;
                    match dtype(p.role) {
                        DType::F32 => bytemuck::cast_slice(&master).to_vec(),
                        _ => master.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
                    }
                }
            };
            writer.write(&name, &data)?;
            first += *rows as i64;
        }
    }
    writer.finish()?;
    let small =
        side.others.iter().map(|(n, b)| (n.as_str(), &b[..])).chain([("config.json", &side.config[..])]);
    for (name, bytes) in small {
        let path = dir.join(name);
        std::fs::write(&path, bytes).map_err(|e| Error::io(&path, &e))?;
    }
    Ok(())
}

/// Entries of the base that are written as they were read: dense tensors that did not move, and what no
/// parameter is made of.
fn kept(params: &Params, base: Option<&Checkpoint>) -> Vec<Entry> {
    let Some(base) = base else { return Vec::new() };
    // A packed head beside a tied table is made anew where the layout wants one.
    let owned = |name: &str| {
        let of = |module: &str| name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'));
        of(base.config().arch.names.head)
            || params.all.iter().flat_map(|p| &p.parts).any(|(module, _)| of(module))
    };
    let still = |name: &str| {
        let fixed = params.all.iter().filter(|p| matches!(p.source, Source::Fixed(_)));
        fixed.flat_map(|p| &p.parts).any(|(module, _)| name.strip_suffix(".weight") == Some(module))
    };
    let entry = |(name, meta): (&str, &TensorMeta)| {
        let dtype = meta.dtype?;
        let keep = if owned(name) { still(name) && dtype.is_io() } else { true };
        keep.then(|| Entry::new(name, dtype, &meta.shape))
    };
    base.table().iter().filter_map(entry).collect()
}
