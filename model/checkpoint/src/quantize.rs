//! Quantising a matrix of a model: what a format makes of it ([`q4_core::formats::quantize`]), and how much
//! is lost.
use crate::LayerRows;
pub use q4_core::formats::Target;
pub use q4_core::formats::nf4::ToNf4;
pub use q4_core::formats::nvfp4::{Method, Scales, ToNvfp4, power_of_two_amax};
use q4_core::formats::quantize::{PIECE, parallel};
pub use q4_core::formats::quantize::{Rows, amax};
use q4_core::{Code, Error, OwnedParts, Q4Schema, Q4Weight, Result, RowDecoder, Segment, ThreadPool};

/// A quantised matrix `[n, k]`.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// Encoding.
    pub schema: Q4Schema,
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Codes and scales, in row-major order.
    pub parts: OwnedParts,
}

impl Quantized {
    /// The parts as a borrowed weight segment, in the form every backend and decoder takes.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for parts whose bytes are fewer than their extents say: those of [`quantize`]
    /// are not.
    pub fn segment(&self) -> Result<Segment<'_>> {
        Ok(Segment { rows: self.n, data: self.parts.lend()? })
    }
}

/// Quantises the matrix. `global_amax` replaces the matrix's own amax in the per-tensor scale, for matrices
/// that share one; it must not be below the own amax. Reads the matrix twice with two-level scales, else
/// once; holds the packed result and 16 Ki f32 a thread, never an f32 copy.
///
/// # Errors
/// [`Code::TensorShape`]: NVFP4 with `k % 16 != 0`. [`Code::NonFinite`]: a weight that is NaN or infinite.
/// [`Code::Usage`]: a block size NF4 does not have.
pub fn quantize(
    rows: &Rows<'_>,
    target: &Target,
    global_amax: Option<f32>,
    threads: &ThreadPool,
) -> Result<Quantized> {
    let [n, k] = rows.shape();
    Ok(Quantized { schema: target.schema(), n, k, parts: target.encode(rows, global_amax, threads)? })
}

/// Signal-to-noise ratio of the decoded weight: `10 log10(sum w^2 / sum (w - decoded)^2)`, in dB, summed in
/// f64. Infinite when the decoded weight is equal to the dense one.
///
/// # Errors
/// [`Code::ShapeMismatch`] for two different shapes, [`Code::NonFinite`] for a dense weight that is NaN or
/// infinite.
pub fn sqnr_db(rows: &Rows<'_>, quantized: &Quantized, threads: &ThreadPool) -> Result<f64> {
    let [n, k] = rows.shape();
    let segments = [quantized.segment()?];
    let decoder =
        RowDecoder::new(&Q4Weight { schema: quantized.schema, k: quantized.k, segments: &segments })?;
    if (decoder.n(), decoder.k()) != (n, k) {
        return Err(Error::new(Code::ShapeMismatch, rows.name()).need(format!("[{n}, {k}]")).have(format!(
            "[{}, {}]",
            decoder.n(),
            decoder.k()
        )));
    }
    let read = |row: usize, to: &mut [f32]| rows.read(row * k, to).map(drop);
    ratio([n, k], &read, &|row, to| decoder.row(row, to), threads)
}

/// As [`sqnr_db`] for two weights that are stored in any way, of which `original` is the signal.
///
/// # Errors
/// [`Code::ShapeMismatch`] for two different shapes.
pub fn distance_db(original: &LayerRows<'_>, other: &LayerRows<'_>, threads: &ThreadPool) -> Result<f64> {
    let [one, two] = [original, other].map(LayerRows::shape);
    if one != two {
        let what = "two weights that are compared";
        return Err(Error::new(Code::ShapeMismatch, what).need(format!("{one:?}")).have(format!("{two:?}")));
    }
    let read = |row: usize, to: &mut [f32]| {
        original.row(row, to);
        Ok(())
    };
    ratio(one, &read, &|row, to| other.row(row, to), threads)
}

/// Of a matrix `[n, k]`: `read` gives the rows of the signal, `decode` the others.
fn ratio(
    [n, k]: [usize; 2],
    read: &(dyn Fn(usize, &mut [f32]) -> Result<()> + Sync),
    decode: &(dyn Fn(usize, &mut [f32]) + Sync),
    threads: &ThreadPool,
) -> Result<f64> {
    let step = (PIECE / k).max(1);
    let sums = parallel(threads, (0..n).step_by(step).collect(), |first: usize| {
        let (mut x, mut y) = (vec![0f32; k], vec![0f32; k]);
        let (mut signal, mut noise) = (0f64, 0f64);
        for row in first..(first + step).min(n) {
            read(row, &mut x)?;
            decode(row, &mut y);
            for (&w, &d) in x.iter().zip(&y) {
                signal += f64::from(w) * f64::from(w);
                noise += (f64::from(w) - f64::from(d)).powi(2);
            }
        }
        Ok((signal, noise))
    })?;
    let (signal, noise) = sums.into_iter().fold((0.0, 0.0), |a, s| (a.0 + s.0, a.1 + s.1));
    Ok(if noise == 0.0 { f64::INFINITY } else { 10.0 * (signal / noise).log10() })
}
