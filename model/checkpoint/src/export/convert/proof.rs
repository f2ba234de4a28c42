//! Decodes two checkpoints in step, compares every bit and hashes both: what was written is believed when it
//! was read again.
//!
//! The definition of the hash is in `docs/numerics.md`.
use super::contents::{Content, Contents};
use crate::{Checkpoint, Layer, Stored};
use q4_core::formats::e4m3;
use q4_core::{Code, DType, Error, GlobalScale, Result, ThreadPool, read_floats};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// Values decoded at a time on each side: 2 MiB of f32.
const PIECE: usize = 512 * 1024;
/// How far a value may lie from the input's, in units of the last place, where its factor changed by one: the
/// product of a code and a factor at the end of its binade.
const CHANGED: u32 = 2;

/// Compares everything that `source` and `output` hold, NVFP4 codes and block scales too, and returns the
/// SHA-256 of the decoded values of the output in hexadecimal. Contents named in `changed` may differ in the
/// last bits of their values, never in codes and block scales. `progress` is called before each content with
/// the number of those done.
///
/// [`Code::Findings`] names the first content, row and column that differ.
pub(super) fn prove(
    source: (&Checkpoint, &Contents<'_>),
    output: (&Checkpoint, &Contents<'_>),
    changed: &BTreeSet<&str>,
    threads: &ThreadPool,
    progress: &mut dyn FnMut(&str, usize) -> Result<()>,
) -> Result<String> {
    let lost = source.1.keys().find(|name| !output.1.contains_key(*name));
    let new = output.1.keys().find(|name| !source.1.contains_key(*name));
    if let Some(name) = lost {
        return Err(differs(name, "in what was written", "nothing"));
    }
    if let Some(name) = new {
        return Err(differs(name, "no such content", "one in what was written"));
    }
    let sides = [Side::new(source.0), Side::new(output.0)];
    for (done, ((name, a), b)) in source.1.iter().zip(output.1.values()).enumerate() {
        progress(name, done)?;
        let ulps = if changed.contains(name.as_str()) { CHANGED } else { 0 };
        match (a, b) {
            (Content::Matrix(a), Content::Matrix(b)) => matrices(name, [a, b], &sides, ulps, threads)?,
            (Content::Inputs(a), Content::Inputs(b)) => inputs(name, [*a, *b], &sides, ulps)?,
            (Content::Decoded(a), Content::Tensor(b)) => decoded(name, a, b, &sides)?,
            (Content::Tensor(a), Content::Tensor(b)) => plain(name, [a, b], &sides, threads)?,
            (Content::Widened(a), Content::Tensor(b)) => widened(name, a, b, &sides)?,
            _ => return Err(differs(name, "the same kind of tensor", "another")),
        }
    }
    let [a, b] = sides.map(|side| side.finish());
    if a != b && changed.is_empty() {
        return Err(Error::new(Code::Internal, "equal values have different hashes").need(a).have(b));
    }
    Ok(b)
}

struct Side<'a> {
    checkpoint: &'a Checkpoint,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    hash: Sha256,
    values: Vec<f32>,
}

impl<'a> Side<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint, state: Mutex::default() }
    }

    fn with<T>(&self, body: impl FnOnce(&mut State) -> T) -> T {
        body(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn begin(&self, name: &str, dtype: &str, shape: &[usize]) {
        self.with(|s| s.hash.update(header(name, dtype, shape)));
    }

    fn finish(self) -> String {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        format!("{:x}", state.hash.finalize())
    }
}

/// The line before the values of a tensor, e.g. `model.norm.weight bfloat16 [64]`.
fn header(name: &str, dtype: &str, shape: &[usize]) -> String {
    let extents: Vec<_> = shape.iter().map(usize::to_string).collect();
    format!("{name} {dtype} [{}]\n", extents.join(","))
}

/// Blocks against the floats that were written of them.
fn decoded(name: &str, layer: &Layer<'_>, stored: &Stored<'_>, sides: &[Side<'_>; 2]) -> Result<()> {
    let shape @ [n, k] = [layer.detected.n, layer.detected.k];
    if (stored.dtype, stored.shape) != (DType::F32, &shape[..]) {
        return Err(differs(
            name,
            &format!("float32 {shape:?}"),
            &format!("{} {:?}", stored.dtype, stored.shape),
        ));
    }
    let rows = layer.detected.schema.decoder(shape, &layer.segment.data)?;
    sides.iter().for_each(|side| side.begin(name, "float32", &shape));
    let (mut have, mut want) = (vec![0f32; k], vec![0f32; k]);
    for (r, bytes) in stored.bytes.chunks_exact(4 * k).take(n).enumerate() {
        rows.row(r, &mut want);
        read_floats(bytes, DType::F32, &mut have);
        if let Some((column, a, b)) = first_difference(&want, &have, 0) {
            return Err(differs(&format!("{name}: row {r}, column {column}"), &bits(a), &bits(b)));
        }
        sides.iter().for_each(|side| side.with(|s| s.hash.update(bytes)));
    }
    Ok(())
}

/// Floats of 16 bits against the f32 that were written of them.
fn widened(name: &str, a: &Stored<'_>, b: &Stored<'_>, sides: &[Side<'_>; 2]) -> Result<()> {
    if (b.dtype, b.shape) != (DType::F32, a.shape) {
        let have = format!("{} {:?}", b.dtype, b.shape);
        return Err(differs(name, &format!("float32 {:?}", a.shape), &have));
    }
    let values = [a.to_f32()?, b.to_f32()?];
    for (side, values) in sides.iter().zip(&values) {
        side.begin(name, "float32", a.shape);
        side.with(|s| s.hash.update(bytemuck::cast_slice::<f32, u8>(values)));
    }
    match first_difference(&values[0], &values[1], 0) {
        Some((at, a, b)) => Err(differs(&format!("{name}: element {at}"), &bits(a), &bits(b))),
        None => Ok(()),
    }
}

fn matrices(
    name: &str,
    layers: [&Layer<'_>; 2],
    sides: &[Side<'_>; 2],
    ulps: u32,
    threads: &ThreadPool,
) -> Result<()> {
    let [a, b] = layers.map(|l| (l.detected.n, l.detected.k));
    if a != b {
        return Err(differs(name, &format!("{a:?}"), &format!("{b:?}")));
    }
    let (n, k) = a;
    let decoders = [layers[0].rows()?, layers[1].rows()?];
    sides.iter().for_each(|side| side.begin(name, "float32", &[n, k]));
    let step = (PIECE / k).max(1);
    for first in (0..n).step_by(step) {
        let rows = first..(first + step).min(n);
        threads.run(2, &|i| {
            sides[i].with(|s| {
                s.values.resize(rows.len() * k, 0.0);
                for (row, out) in rows.clone().zip(s.values.chunks_exact_mut(k)) {
                    decoders[i].row(row, out);
                }
                // Mapped files are read in place, so the machine is little-endian as they are.
                s.hash.update(bytemuck::cast_slice::<f32, u8>(&s.values));
            });
        });
        let found = sides[0].with(|a| sides[1].with(|b| first_difference(&a.values, &b.values, ulps)));
        if let Some((at, a, b)) = found {
            let place = format!("{name}: row {}, column {}", first + at / k, at % k);
            return Err(differs(&place, &bits(a), &bits(b)));
        }
        for row in rows {
            let parts = |i: usize| decoders[i].nvfp4_row(row);
            if parts(0) != parts(1) {
                return Err(differs(
                    &format!("{name}: row {row}"),
                    "the codes and block scales of the input",
                    "others",
                ));
            }
        }
    }
    sides.iter().zip(layers).for_each(|(side, layer)| side.checkpoint.release(&layer.detected));
    Ok(())
}

/// The factors of all block scales, which is what a scale in either convention stands for.
fn inputs(name: &str, scales: [GlobalScale; 2], sides: &[Side<'_>; 2], ulps: u32) -> Result<()> {
    let factors = scales.map(|g| (0..0x7f).map(|byte| g.effective(e4m3::decode(byte))).collect::<Vec<_>>());
    for (side, factors) in sides.iter().zip(&factors) {
        side.begin(name, "float32", &[factors.len()]);
        side.with(|s| s.hash.update(bytemuck::cast_slice::<f32, u8>(factors)));
    }
    match first_difference(&factors[0], &factors[1], ulps) {
        Some((byte, a, b)) => Err(differs(&format!("{name}: block scale {byte:#04x}"), &bits(a), &bits(b))),
        None => Ok(()),
    }
}

fn plain(name: &str, tensors: [&Stored<'_>; 2], sides: &[Side<'_>; 2], threads: &ThreadPool) -> Result<()> {
    let [a, b] = tensors;
    if (a.dtype, a.shape) != (b.dtype, b.shape) {
        let tell = |t: &Stored<'_>| format!("{} {:?}", t.dtype, t.shape);
        return Err(differs(name, &tell(a), &tell(b)));
    }
    threads.run(2, &|i| {
        let t = tensors[i];
        sides[i].begin(name, t.dtype.as_str(), t.shape);
        sides[i].with(|s| s.hash.update(t.bytes));
    });
    match a.bytes.iter().zip(b.bytes).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(differs(
            &format!("{name}: byte {at}"),
            &format!("{:#04x}", a.bytes[at]),
            &format!("{:#04x}", b.bytes[at]),
        )),
    }
}

fn first_difference(a: &[f32], b: &[f32], ulps: u32) -> Option<(usize, f32, f32)> {
    let at = a.iter().zip(b).position(|(a, b)| a.to_bits().abs_diff(b.to_bits()) > ulps)?;
    Some((at, a[at], b[at]))
}

fn bits(value: f32) -> String {
    format!("{value} ({:#010x})", value.to_bits())
}

fn differs(place: &str, need: &str, have: &str) -> Error {
    Error::new(Code::Findings, format!("{place}: read back, the output is not the input"))
        .need(need)
        .have(have)
        .fix("nothing was kept; if another disk gives the same, please report it")
}
