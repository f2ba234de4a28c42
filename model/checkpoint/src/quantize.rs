//! Turns one dense matrix into 4-bit codes and scales, in bounded pieces and on all threads.
//!
//! Pieces are cut by element count alone, never by the number of threads, so a result does not depend on the
//! machine.
use q4_core::formats::{nf4, nvfp4};
use q4_core::{
    Absmax, Code, DType, Error, GlobalScale, NibbleOrder, Q4Schema, Q4Weight, Result, RowDecoder, Rule,
    ScaleLayout, Segment, SegmentData, TensorView, ThreadPool, read_floats,
};
use serde::Serialize;
use std::sync::{Mutex, PoisonError};

/// How many scales an NVFP4 value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scales {
    /// A block scale times a per-tensor scale.
    TwoLevel,
    /// A block scale only. E4M3 is coarse at the size weights have, which costs 1 to 3 dB.
    Single,
}

/// How an NVFP4 block scale is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The amax of the block maps to 6.
    Rtn,
    /// The amax maps to 6 or to 4, whichever has the smaller squared error; a tie goes to 6 (arXiv
    /// 2512.02010).
    FourOverSix,
    /// Of the scale that maps the amax to 6 and eight E4M3 codes on either side, the one with the smallest
    /// squared error.
    Search,
}

/// What a dense matrix becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "format")]
pub enum Target {
    /// E2M1 codes with E4M3 block scales.
    Nvfp4 {
        /// Rounding; fixes the convention of the per-tensor scale.
        rule: Rule,
        /// One level or two.
        scales: Scales,
        /// Choice of the block scale.
        method: Method,
    },
    /// NF4 codes, high nibble first, with an absmax per `block`.
    Nf4 {
        /// Elements per absmax: a power of two, 32 to 4096.
        block: u32,
        /// Quantise the absmax too.
        double: bool,
    },
}

/// A dense matrix `[n, k]` in the bytes of its file.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    name: &'a str,
    bytes: &'a [u8],
    dtype: DType,
    n: usize,
    k: usize,
}

/// A quantised matrix `[n, k]`, in row-major order.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// Encoding.
    pub schema: Q4Schema,
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Packed codes, two a byte.
    pub codes: Vec<u8>,
    /// E4M3 block scales `[n, k/16]` of NVFP4; empty for NF4.
    pub scales: Vec<u8>,
    /// Per-tensor scale of two-level NVFP4.
    pub global: Option<GlobalScale>,
    /// One absmax per block of NF4; empty when `nested`.
    pub absmax: Vec<f32>,
    /// Quantised absmax: u8 codes, one f32 per 256 codes, offset.
    pub nested: Option<(Vec<u8>, Vec<f32>, f32)>,
}

impl Target {
    /// As an error names it.
    pub(crate) fn in_words(&self) -> String {
        match *self {
            Self::Nvfp4 { rule, scales, .. } => {
                let levels = match scales {
                    Scales::TwoLevel => "block scales and one per tensor",
                    Scales::Single => "block scales alone",
                };
                format!("nvfp4 with {levels}, rounded as {} does", rule.as_str())
            }
            Self::Nf4 { block, double } => {
                let scales = if double { "quantised scales" } else { "scales" };
                format!("nf4 with {scales} for blocks of {block}")
            }
        }
    }

    /// The encoding the result has.
    pub const fn schema(&self) -> Q4Schema {
        match *self {
            Self::Nvfp4 { rule, scales, .. } => Q4Schema::Nvfp4 {
                scale_layout: ScaleLayout::RowMajor,
                global: match scales {
                    Scales::TwoLevel => Some(rule.convention()),
                    Scales::Single => None,
                },
            },
            Self::Nf4 { block, double } => Q4Schema::Nf4 {
                nibble_order: NibbleOrder::HighFirst,
                block,
                nested: if double { Some(NESTED_BLOCK as u32) } else { None },
            },
        }
    }
}

/// Elements a thread widens at a time: 64 KiB of f32.
const PIECE: usize = 16 * 1024;

impl<'a> Rows<'a> {
    /// `bytes`: little-endian `dtype` (f32, f16 or bf16) `[n, k]`, row-major; `name` is used in errors.
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

    /// Widens elements `start..` of the flattened matrix and returns their amax; NaN and infinity are errors.
    fn read(&self, start: usize, out: &mut [f32]) -> Result<f32> {
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

/// Largest magnitude in the matrix. [`Code::NonFinite`] names the first NaN or infinity by row and column.
pub fn amax(rows: &Rows<'_>, threads: &ThreadPool) -> Result<f32> {
    let elements = rows.n * rows.k;
    let pieces: Vec<usize> = (0..elements).step_by(PIECE).collect();
    let found = parallel(threads, pieces, |start| {
        let mut x = vec![0f32; PIECE.min(elements - start)];
        rows.read(start, &mut x)
    })?;
    Ok(found.into_iter().fold(0f32, f32::max))
}

/// The smallest amax, at least `amax`, whose per-tensor scale under `rule` is a power of two; zero stays
/// zero. `s * code` then has six significant bits, so bf16 holds every decoded weight exactly.
pub fn power_of_two_amax(rule: Rule, amax: f32) -> f32 {
    if amax == 0.0 {
        return 0.0;
    }
    let mut scale =
        f32::from_bits((amax / GlobalScale::RANGE).to_bits() & 0x7f80_0000).max(f32::MIN_POSITIVE);
    while GlobalScale::RANGE * scale < amax {
        scale *= 2.0;
    }
    let exact = GlobalScale::RANGE * scale;
    // A rule that divides computes `RANGE * (1 / amax)`, which may miss the power of two by a rounding.
    let mut near = exact;
    for _ in 0..4 {
        let global = nvfp4::global_from_amax(rule, near, DType::F32).map_or(0.0, GlobalScale::value);
        if global.to_bits() & 0x007f_ffff == 0 {
            return near;
        }
        near = f32::from_bits(near.to_bits() + 1);
    }
    exact
}

/// Quantises the matrix. `global_amax` replaces the matrix's own amax in the per-tensor scale, for matrices
/// that share one; it must not be below the own amax. Reads the matrix twice with two-level scales, else
/// once; holds the packed result and 16 Ki f32 a thread, never an f32 copy.
///
/// [`Code::TensorShape`]: NVFP4 with `k % 16 != 0`. [`Code::NonFinite`]: a weight that is NaN or infinite.
/// [`Code::Usage`]: a block size NF4 does not have.
pub fn quantize(
    rows: &Rows<'_>,
    target: &Target,
    global_amax: Option<f32>,
    threads: &ThreadPool,
) -> Result<Quantized> {
    match *target {
        Target::Nvfp4 { rule, scales, method } => to_nvfp4(rows, rule, scales, method, global_amax, threads),
        Target::Nf4 { block, double } => to_nf4(rows, block, double, threads),
    }
}

/// Signal-to-noise ratio of the decoded weight: `10 log10(sum w^2 / sum (w - decoded)^2)`, in dB, summed in
/// f64. Infinite when the decoded weight is equal to the dense one.
pub fn sqnr_db(rows: &Rows<'_>, quantized: &Quantized, threads: &ThreadPool) -> Result<f64> {
    let segments = [quantized.segment()?];
    let decoder =
        RowDecoder::new(&Q4Weight { schema: quantized.schema, k: quantized.k, segments: &segments })?;
    if (decoder.n(), decoder.k()) != (rows.n, rows.k) {
        return Err(Error::new(Code::ShapeMismatch, rows.name)
            .need(format!("[{}, {}]", rows.n, rows.k))
            .have(format!("[{}, {}]", decoder.n(), decoder.k())));
    }
    let step = (PIECE / rows.k).max(1);
    let sums = parallel(threads, (0..rows.n).step_by(step).collect(), |first: usize| {
        let (mut x, mut y) = (vec![0f32; rows.k], vec![0f32; rows.k]);
        let (mut signal, mut noise) = (0f64, 0f64);
        for row in first..(first + step).min(rows.n) {
            rows.read(row * rows.k, &mut x)?;
            decoder.row(row, &mut y);
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

impl Quantized {
    /// The parts as a borrowed weight segment, in the form every backend and decoder takes.
    pub fn segment(&self) -> Result<Segment<'_>> {
        let data = match self.schema {
            Q4Schema::Nvfp4 { .. } => SegmentData::Nvfp4 {
                codes: TensorView::of(&self.codes, &[self.n, self.k / 2])?,
                scales: TensorView::of(&self.scales, &[self.n, self.k / nvfp4::BLOCK])?,
                global: self.global,
            },
            _ => SegmentData::Nf4 {
                codes: TensorView::of(&self.codes, &[self.codes.len()])?,
                absmax: match &self.nested {
                    None => Absmax::Plain(TensorView::of(&self.absmax, &[self.absmax.len()])?),
                    Some((codes, absmax, offset)) => Absmax::Nested {
                        codes: TensorView::of(codes, &[codes.len()])?,
                        map: TensorView::of(nf4::dynamic_map().as_slice(), &[256])?,
                        absmax: TensorView::of(absmax, &[absmax.len()])?,
                        offset: *offset,
                        block: NESTED_BLOCK,
                    },
                },
            },
        };
        Ok(Segment { rows: self.n, data })
    }
}

/// Absmax codes per nested absmax, as bitsandbytes has it.
pub const NESTED_BLOCK: usize = 256;

fn to_nvfp4(
    rows: &Rows<'_>,
    rule: Rule,
    scales: Scales,
    method: Method,
    global_amax: Option<f32>,
    threads: &ThreadPool,
) -> Result<Quantized> {
    let (n, k) = (rows.n, rows.k);
    if k % nvfp4::BLOCK != 0 {
        return Err(Error::new(Code::TensorShape, rows.name)
            .need("in features divisible by 16 for NVFP4")
            .have(format!("[{n}, {k}]"))
            .fix("exclude this layer, or use --format nf4"));
    }
    let (limit, global) = match scales {
        Scales::Single => (f32::INFINITY, None),
        Scales::TwoLevel => {
            let amax = global_amax.map_or_else(|| amax(rows, threads), Ok)?;
            (amax, Some(nvfp4::global_from_amax(rule, amax, rows.dtype)?))
        }
    };
    let quantizer = nvfp4::Quantizer { rule, global, source: rows.dtype };
    let elements = n * k;
    let (mut codes, mut block_scales) = (vec![0u8; elements / 2], vec![0u8; elements / nvfp4::BLOCK]);
    let pieces: Vec<_> =
        codes.chunks_mut(PIECE / 2).zip(block_scales.chunks_mut(PIECE / nvfp4::BLOCK)).enumerate().collect();
    parallel(threads, pieces, |(i, (codes, scales))| {
        let mut x = vec![0f32; codes.len() * 2];
        let own = rows.read(i * PIECE, &mut x)?;
        if own > limit {
            return Err(Error::new(Code::ValueInvalid, format!("{}: amax of the group", rows.name))
                .need(format!("at least the matrix's own, {own} or more"))
                .have(limit.to_string()));
        }
        match method {
            Method::Rtn => quantizer.quantize_row(&x, codes, scales),
            Method::FourOverSix => quantizer.quantize_row_four_over_six(&x, codes, scales),
            Method::Search => quantizer.quantize_row_search(&x, codes, scales),
        }
    })?;
    let schema =
        Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: global.map(GlobalScale::convention) };
    Ok(Quantized { schema, n, k, codes, scales: block_scales, global, absmax: Vec::new(), nested: None })
}

fn to_nf4(rows: &Rows<'_>, block: u32, double: bool, threads: &ThreadPool) -> Result<Quantized> {
    if !(32..=4096).contains(&block) || !block.is_power_of_two() {
        return Err(Error::new(Code::Usage, "block size of NF4")
            .need("32 to 4096, a power of two")
            .have(block.to_string()));
    }
    // Every block size divides PIECE, so no block is cut.
    let (elements, size) = (rows.n * rows.k, block as usize);
    let (mut codes, mut absmax) = (vec![0u8; elements.div_ceil(2)], vec![0f32; elements.div_ceil(size)]);
    let pieces: Vec<_> =
        codes.chunks_mut(PIECE / 2).zip(absmax.chunks_mut(PIECE / size)).enumerate().collect();
    parallel(threads, pieces, |(i, (codes, absmax))| {
        let mut x = vec![0f32; PIECE.min(elements - i * PIECE)];
        rows.read(i * PIECE, &mut x)?;
        nf4::quantize(&x, size, codes, absmax)
    })?;
    let nested = double.then(|| nf4::nest(&absmax));
    if nested.is_some() {
        absmax = Vec::new();
    }
    let schema = Q4Schema::Nf4 {
        nibble_order: NibbleOrder::HighFirst,
        block,
        nested: double.then_some(NESTED_BLOCK as u32),
    };
    Ok(Quantized { schema, n: rows.n, k: rows.k, codes, scales: Vec::new(), global: None, absmax, nested })
}

/// Runs `body` on every item; results in item order, or the error of the first item that has one.
fn parallel<I: Send, O: Send>(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_reaches_a_power_of_two() {
        for rule in [Rule::ModelOpt, Rule::CompressedTensors, Rule::TorchAo, Rule::TransformerEngine] {
            for e in -60..60 {
                let wanted = 1.37 * (e as f32).exp2();
                let amax = power_of_two_amax(rule, wanted);
                assert!(amax >= wanted && amax < wanted * 2.01, "{rule:?}: {wanted} -> {amax}");
                let global = nvfp4::global_from_amax(rule, amax, DType::F32).expect("finite").value();
                assert_eq!(
                    global.to_bits() & 0x007f_ffff,
                    0,
                    "{rule:?}: amax {wanted} has the scale {global}"
                );
            }
        }
    }
}
