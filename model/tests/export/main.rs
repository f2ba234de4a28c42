//! Exports are compared, bit for bit, with what the tools whose layouts they have wrote from the same dense
//! weights.
#![allow(clippy::unwrap_used)]
mod files;
#[path = "../plans/mod.rs"]
mod plans;
mod tools;
mod values;

use q4_core::detect::Layout;
use q4_core::{Result, ThreadPool};
use q4_model::checkpoint::{Checkpoint, OpenOptions, TensorStore};
use q4_model::export::{ExportPlan, Report, export};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MODELS: [&str; 2] = ["qwen3_tiny_a", "qwen3_tiny_b"];
const NVFP4: [Layout; 3] = [Layout::ModelOpt, Layout::CompressedTensors, Layout::Dat];

fn golden(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/golden").join(model)
}

fn open(model: &str) -> Result<Checkpoint> {
    Checkpoint::open(&golden(model), &OpenOptions::default())
}

fn exported(model: &str, plan: &ExportPlan) -> Result<(TempDir, PathBuf, Report)> {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let report = export(&open(model)?, &out, plan, &ThreadPool::new(2), &mut |_| Ok(()))?;
    Ok((dir, out, report))
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The same tensors with the same bytes, in those that `compared` accepts; packed E2M1 codes up to the sign
/// of zero.
fn assert_same_tensors(
    own: &TensorStore,
    reference: &TensorStore,
    compared: &dyn Fn(&str) -> bool,
) -> Result<()> {
    let names =
        |s: &TensorStore| s.table().keys().filter(|n| compared(n)).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(names(own), names(reference));
    for name in names(own) {
        let (a, b) = (own.tensor(&name)?, reference.tensor(&name)?);
        assert_eq!((a.dtype, a.shape), (b.dtype, b.shape), "{name}");
        let nvfp4 = own.table().contains_key(&name.replace("weight_packed", "weight_scale"))
            && name.ends_with("weight_packed")
            || own.table().contains_key(&format!("{name}_scale"));
        let differing = a
            .bytes
            .iter()
            .zip(b.bytes)
            .filter(|(a, b)| if nvfp4 { unsigned(**a) != unsigned(**b) } else { a != b })
            .count();
        assert_eq!(differing, 0, "{name}: of {} bytes", a.bytes.len());
    }
    Ok(())
}

/// Both codes of a byte, with +0 for -0.
fn unsigned(byte: u8) -> (u8, u8) {
    let code = |c: u8| if c == 8 { 0 } else { c };
    (code(byte & 15), code(byte >> 4))
}
