//! Turns one dense matrix into 4-bit codes and scales, in bounded pieces and on all threads.
//!
//! Pieces are cut by element count alone, never by the number of threads, so a result does not depend on the
//! machine.
use super::Q4Schema;
use super::storage::Layout;
use crate::{Code, DType, Error, OwnedParts, Result, Rule, ThreadPool, read_floats};
use std::sync::{Mutex, PoisonError};

/// A way of quantising to one format.
pub trait Encoder: Send + Sync {
    /// As an error names it.
    fn in_words(&self) -> String;
    /// The encoding the result has.
    fn schema(&self) -> Q4Schema;
    /// What its parameters would have to be.
    fn invalid(&self) -> Option<&'static str> {
        None
    }
    /// The rule of the per-tensor scale, which matrices may share.
    fn rule(&self) -> Option<Rule> {
        None
    }
    /// Whether checkpoints of this layout hold the result.
    fn fits(&self, layout: Layout) -> bool;
    /// What helps where a layout does not.
    fn fix(&self) -> &'static str;
    /// What a matrix `[n, k]` lacks to be stored so.
    fn lacks(&self, layout: Layout, n: usize, k: usize) -> Option<&'static str>;
    /// Quantises the matrix. `global_amax` replaces its own amax in the per-tensor scale, and must not be
    /// below it.
    ///
    /// # Errors
    /// [`Code::TensorShape`] for a shape that the format does not have, [`Code::NonFinite`] for a weight that
    /// is NaN or infinite, [`Code::ValueInvalid`] for a `global_amax` that is too small.
    fn encode(&self, rows: &Rows<'_>, global_amax: Option<f32>, threads: &ThreadPool) -> Result<OwnedParts>;
}

/// Elements a thread widens at a time: 64 KiB of f32.
pub const PIECE: usize = 16 * 1024;

/// A dense matrix `[n, k]` in the bytes of its file.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    pub(crate) name: &'a str,
    bytes: &'a [u8],
    pub(crate) dtype: DType,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

impl<'a> Rows<'a> {
    /// `bytes`: little-endian `dtype` (f32, f16 or bf16) `[n, k]`, row-major; `name` is used in errors.
    ///
    /// # Errors
    /// [`Code::TensorType`] for another type, [`Code::TensorShape`] when bytes and extents differ.
    pub fn new(name: &'a str, bytes: &'a [u8], dtype: DType, n: usize, k: usize) -> Result<Self> {
        if !dtype.is_io() {
            return Err(Error::new(Code::TensorType, name)
                .need("float32, float16 or bfloat16")
                .have(dtype.as_str()));
        }
        let need = n.checked_mul(k).and_then(|e| e.checked_mul(dtype.size())).filter(|&b| b > 0);
        if need != Some(bytes.len()) {
            return Err(Error::new(Code::TensorShape, name)
                .need(format!("the bytes of a [{n}, {k}] matrix of {dtype}, at least one element"))
                .have(format!("{} bytes", bytes.len())));
        }
        Ok(Self { name, bytes, dtype, n, k })
    }

    /// As errors call it.
    pub fn name(&self) -> &'a str {
        self.name
    }
    /// Out and in features.
    pub fn shape(&self) -> [usize; 2] {
        [self.n, self.k]
    }

    /// Widens elements `start..` of the flattened matrix and returns their amax.
    ///
    /// # Errors
    /// [`Code::NonFinite`] names the first NaN or infinity by row and column.
    pub fn read(&self, start: usize, out: &mut [f32]) -> Result<f32> {
        read_floats(&self.bytes[start * self.dtype.size()..], self.dtype, out);
        let mut amax = 0f32;
        let mut finite = true;
        for v in &*out {
            amax = amax.max(v.abs());
            finite &= v.is_finite();
        }
        if finite {
            return Ok(amax);
        }
        let at = out.iter().position(|v| !v.is_finite()).unwrap_or(0);
        let (row, column) = ((start + at) / self.k, (start + at) % self.k);
        Err(Error::new(Code::NonFinite, format!("{}: row {row}, column {column}", self.name))
            .need("finite weights")
            .have(out[at].to_string()))
    }
}

/// Largest magnitude in the matrix.
///
/// # Errors
/// As [`Rows::read`].
pub fn amax(rows: &Rows<'_>, threads: &ThreadPool) -> Result<f32> {
    let elements = rows.n * rows.k;
    let pieces: Vec<usize> = (0..elements).step_by(PIECE).collect();
    let found = parallel(threads, pieces, |start| {
        let mut x = vec![0f32; PIECE.min(elements - start)];
        rows.read(start, &mut x)
    })?;
    Ok(found.into_iter().fold(0f32, f32::max))
}

/// Runs `body` on every item; results in item order, or the error of the first item that has one.
///
/// # Errors
/// Those of `body`.
pub fn parallel<I: Send, O: Send>(
    threads: &ThreadPool,
    items: Vec<I>,
    body: impl Fn(I) -> Result<O> + Sync,
) -> Result<Vec<O>> {
    enum Slot<I, O> {
        Waiting(I),
        Done(Result<O>),
        Taken,
    }
    let slots: Vec<_> = items.into_iter().map(|item| Mutex::new(Slot::Waiting(item))).collect();
    threads.run(slots.len(), &|i| {
        let mut slot = slots[i].lock().unwrap_or_else(PoisonError::into_inner);
        if let Slot::Waiting(item) = std::mem::replace(&mut *slot, Slot::Taken) {
            *slot = Slot::Done(body(item));
        }
    });
    let lost = || Error::new(Code::Internal, "a piece of a matrix was not processed");
    slots
        .into_iter()
        .map(|slot| match slot.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Slot::Done(result) => result,
            _ => Err(lost()),
        })
        .collect()
}
