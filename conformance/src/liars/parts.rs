//! The parts of the honest backend that a mutant may exchange, and the right ones; and the weight that they
//! work on.
use super::card::{self, CardParts};
use super::situation::{Done, Fault, Situation};
use half::{bf16, f16};
use q4_core::formats::ggml::{Apart, Blocks};
use q4_core::formats::{e2m1, e4m3, e8m0, fp8::inputs, int8, mxfp4, nf4, nvfp4, swizzle};
use q4_core::oracle::act_global;
use q4_core::{
    Activations, BackendDescriptor, Code, DType, Error, ExecPath, Fp8, FuseSet, GlobalScale, LinearSpec,
    OpSet, PreparedInfo, Q4Schema, Result, Scratch, TensorView, TensorViewMut, Verdict, read_floats, rows,
    wide,
};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

/// Every step that can be exchanged.
#[derive(Clone, Copy)]
pub struct Parts {
    /// The path that it computes on.
    pub(super) path: ExecPath,
    /// Edits what is said before anything is asked.
    pub(super) descriptor: fn(&mut BackendDescriptor),
    /// The answer, from the right one and the number of questions so far.
    pub(super) verdict: fn(&LinearSpec, ExecPath, Verdict, u64) -> Verdict,
    /// `prepare` refuses what `can_prepare` refuses.
    pub(super) obeys: bool,
    /// Edits a weight that was just prepared.
    pub(super) prepared: fn(&mut Kept) -> Result<()>,
    /// Codes of flat elements from one on; the flag is low nibble first.
    pub(super) nibbles: fn(&[u8], usize, bool, &mut [u8]),
    /// Value of an NVFP4 code.
    pub(super) e2m1: fn(u8) -> f32,
    /// Value of an NF4 code.
    pub(super) nf4: fn(u8) -> f32,
    /// Where the scale of a block is.
    pub(super) scale_at: fn(Block) -> usize,
    /// Value of a scale byte.
    pub(super) e4m3: fn(u8) -> f32,
    /// Value of a power of two.
    pub(super) e8m0: fn(u8) -> f32,
    /// Block of column `i` of an MXFP4 row.
    pub(super) power_at: fn(usize) -> usize,
    /// Value of an int4 code under a zero point and a scale.
    pub(super) int4: fn(u8, u8, f32) -> f32,
    /// Value of an int4 code under a scale and a bias.
    pub(super) affine: fn(u8, f32, f32) -> f32,
    /// Value of a scale of int4 or FP8, of this type.
    pub(super) int4_scale: fn(&[u8], DType) -> f32,
    /// Group of column `i` of an int4 row, in groups of so many.
    pub(super) group_at: fn(usize, usize) -> usize,
    /// Where the zero point or bias of a group is.
    pub(super) zero_at: fn(Block) -> usize,
    /// A block of GGML taken apart.
    pub(super) apart: fn(Blocks, &[u8]) -> Apart,
    /// Group of element `i` of a block of GGML, in groups of so many.
    pub(super) ggml_group: fn(usize, usize) -> usize,
    /// Value of an element of a block of GGML.
    pub(super) ggml: fn(Element) -> f32,
    /// The block of a row, of so many, whose f16 block `i` has.
    pub(super) floats_of: fn(usize, usize) -> usize,
    /// Value of an FP8 code.
    pub(super) fp8: fn(u8) -> f32,
    /// Value of an FP8 code under a scale.
    pub(super) fp8_value: fn(f32, f32) -> f32,
    /// Which scale an element of FP8 has; asked at every 16th column where tiles are whole steps of 16.
    pub(super) tile_of: fn(Element8) -> usize,
    /// Value of an element from code, block scale and per-tensor scale.
    pub(super) value: fn(f32, f32, Option<GlobalScale>) -> f32,
    /// Whose per-tensor scale a segment uses.
    pub(super) global_of: fn(usize) -> usize,
    /// Block of flat element `i`, of so many, of a matrix with so many columns.
    pub(super) absmax_at: fn(usize, usize, usize) -> usize,
    /// Absmax from map entry and code, second scale and offset.
    pub(super) absmax: fn(f32, u8, f32, f32) -> f32,
    /// Second scale of a block, of so many each.
    pub(super) nested_at: fn(usize, usize) -> usize,
    /// The absmax of a block that is used.
    pub(super) absmax_used: fn(f32) -> f32,
    /// Edits a decoded row.
    pub(super) row: fn(&mut [f32], RowAt),
    /// Edits a decoded row of the forward product.
    pub(super) forward_row: fn(&mut [f32], RowAt),
    /// Edits a decoded row of the backward product.
    pub(super) backward_row: fn(&mut [f32], RowAt),
    /// A gradient of y as it is used.
    pub(super) gradient: fn(f32) -> f32,
    /// Reads and widens row `r` of an input.
    pub(super) read: fn(&TensorView<'_>, usize, &mut [f32]) -> Result<()>,
    /// Format that really runs.
    pub(super) activations: fn(Activations) -> Activations,
    /// `[m, k]` as the product sees it.
    pub(super) quantise: Quantise,
    /// The input between being quantised and being used.
    pub(super) stage: fn(&Kept, Vec<f64>) -> Vec<f64>,
    /// A sum of products.
    pub(super) sum: fn(&[f64], &[f32]) -> f64,
    /// Sums backwards and in f32, as the circumstances of a call suggest.
    pub(super) unsteady: fn(&Kept, &Call<'_>) -> bool,
    /// Rows and columns that are computed; the rest is zero.
    pub(super) extent: fn(usize, usize) -> (usize, usize),
    /// A result before it is rounded to the type of y.
    pub(super) round: fn(f64, DType) -> f32,
    /// Checks operands of a call: (input, output) with what they must be.
    pub(super) check: fn(Operand<'_>, Operand<'_>) -> Result<()>,
    /// Scratch of so many rows, of in features and of the most rows there may be.
    pub(super) workspace: fn(usize, usize, usize) -> usize,
    /// Before anything else of a call.
    pub(super) before: fn(&Kept, &mut TensorViewMut<'_>) -> Result<()>,
    /// After the result was written.
    pub(super) after: fn(&Kept, &TensorView<'_>, &mut TensorViewMut<'_>),
    /// Rows are taken from [`Kept::hoard`] instead of being decoded.
    pub(super) hoarded: bool,
    /// Stored codes are read beyond their end.
    pub(super) reads_on: bool,
    /// What goes wrong in a forward call in this situation.
    pub(super) fault: fn(&Situation<'_>) -> Fault,
    /// The same of a backward call, whose output is `[m, k]`.
    pub(super) backward_fault: fn(&Situation<'_>) -> Fault,
    /// The same of a decoded matrix `[n, k]`.
    pub(super) decode_fault: fn(&Situation<'_>) -> Fault,
    /// Whether a call of so many rows is fused with these parts.
    pub(super) fuses: fn(usize, FuseSet) -> bool,
    /// What is done besides multiplying, from what was asked for.
    pub(super) fused: fn(FuseSet) -> FuseSet,
    /// A row with its norm, from its elements, the weight and what is added to the mean square.
    pub(super) norm: fn(&[f32], &[f32], f32) -> Vec<f32>,
    /// Where the up row of column `c` of so many is.
    pub(super) up_at: fn(usize, usize) -> usize,
    /// What a gate lets through.
    pub(super) gate: fn(f64, f64) -> f64,
    /// A sum of what was there and a product, in a row.
    pub(super) add: fn(f64, f64, usize) -> f64,
    /// The device that it computes on, where that is not the CPU.
    pub(super) card: Option<CardParts>,
    /// Whether several weights are multiplied in one call.
    pub(super) groups: bool,
    /// The offsets of a call to so many weights with so many rows.
    pub(super) offsets: fn(&TensorView<'_>, usize, usize) -> Result<Vec<i32>>,
    /// The weight of a row, or [`NOBODY`].
    pub(super) expert: fn(usize, &[i32]) -> usize,
}

/// A row that no weight multiplies.
pub(super) const NOBODY: usize = usize::MAX;

/// An element of FP8, and how its matrix is cut.
#[derive(Clone, Copy)]
pub(super) struct Element8 {
    pub format: Fp8,
    pub row: usize,
    pub column: usize,
    pub rows: usize,
    pub k: usize,
}

/// What an element of a block of GGML is made of.
#[derive(Clone, Copy)]
pub(super) struct Element {
    pub blocks: Blocks,
    pub code: u8,
    pub zero: u8,
    pub scale: i8,
    pub min: u8,
    pub of_scales: f32,
    pub of_mins: f32,
}

/// `[m, k]` of f32, k, the format and the type the values had, to what the product multiplies.
pub(super) type Quantise = fn(&[f32], usize, &Activations, DType) -> Result<Vec<f64>>;

/// Nothing exchanged.
pub(super) const HONEST: Parts = Parts {
    path: ExecPath::FusedDequant,
    descriptor: |_| {},
    verdict: |_, _, verdict, _| verdict,
    obeys: true,
    prepared: |_| Ok(()),
    nibbles: |codes, from, low_first, out| each(out, from, |i| nibble(codes, i, low_first)),
    e2m1: e2m1::decode,
    nf4: nf4::decode,
    scale_at: right_scale,
    e4m3: e4m3::decode,
    e8m0: e8m0::decode,
    power_at: |i| i / mxfp4::BLOCK,
    int4: |code, zero, scale| f32::from(i16::from(code) - i16::from(zero)) * scale,
    affine: |code, scale, bias| f32::from(code) * scale + bias,
    int4_scale: float,
    group_at: |i, group| i / group,
    zero_at: right_scale,
    apart: Blocks::apart,
    ggml_group: |i, group| i / group,
    ggml: |e| {
        let scale = e.of_scales * f32::from(e.scale);
        scale * f32::from(i16::from(e.code) - i16::from(e.zero)) - e.of_mins * f32::from(e.min)
    },
    floats_of: |block, _| block,
    fp8: e4m3::decode,
    fp8_value: |code, scale| code * scale,
    tile_of: |e| e.format.scale_of(e.row, e.column, e.k),
    value: |code, scale, global| code * global.map_or(scale, |g| g.effective(scale)),
    global_of: |segment| segment,
    absmax_at: |i, block, _| i / block,
    absmax: |map, _, absmax, offset| map * absmax + offset,
    nested_at: |i, block| i / block,
    absmax_used: |absmax| absmax,
    row: |_, _| {},
    forward_row: |_, _| {},
    backward_row: |_, _| {},
    gradient: |v| v,
    read: widen,
    activations: |a| a,
    quantise,
    stage: |_, x| x,
    sum,
    unsteady: |_, _| false,
    extent: |m, n| (m, n),
    round: |v, _| v as f32,
    check,
    workspace: |m, k, _| Scratch::bytes(&[4 * m * k]),
    before: |_, _| Ok(()),
    after: |_, _, _| {},
    hoarded: false,
    reads_on: false,
    fault: |_| Fault::None,
    backward_fault: |_| Fault::None,
    decode_fault: |_| Fault::None,
    fuses: |_, set| set == FuseSet::NONE,
    fused: |set| set,
    norm: |x, weight, eps| {
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
        let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
        x.iter().zip(weight).map(|(v, w)| (f64::from(*v) * inverse * f64::from(*w)) as f32).collect()
    },
    up_at: |c, columns| c + columns,
    gate: |gate, up| gate / (1.0 + (-gate).exp()) * up,
    add: |before, v, _| before + v,
    card: None,
    groups: false,
    offsets: |at, count, m| rows::offsets(at, count, m).map(<[i32]>::to_vec),
    expert: |r, at| at.partition_point(|from| *from as usize <= r).max(1) - 1,
};

/// The same, which fuses everything in any number of rows, and multiplies several weights in one call.
pub(super) const FUSING: Parts = Parts { fuses: |_, _| true, groups: true, ..HONEST };

/// The same on a device of its own.
pub(super) const ON_CARD: Parts = Parts { card: Some(card::RIGHT), ..FUSING };

/// A scale's place.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub row: usize,
    pub block: usize,
    pub rows: usize,
    pub blocks: usize,
    pub is_tiled: bool,
}

/// A decoded row's place.
#[derive(Clone, Copy)]
pub(super) struct RowAt {
    pub row: usize,
    pub n: usize,
    /// Its segment.
    pub segment: usize,
    pub schema: Q4Schema,
    pub global: Option<GlobalScale>,
}

/// Circumstances of a call that must not matter.
pub(super) struct Call<'a> {
    pub x: &'a TensorView<'a>,
    pub y: &'a TensorView<'a>,
    pub threads: usize,
    pub scratch: u8,
}

/// An operand, and its type, rows and columns as they must be.
pub(super) type Operand<'a> = (&'a TensorView<'a>, DType, usize, usize);

/// A prepared weight.
pub(super) struct Kept {
    pub info: PreparedInfo,
    pub x: DType,
    pub y: DType,
    pub schema: Q4Schema,
    /// Most rows of a call.
    pub max_m: usize,
    /// Out features of the segments.
    pub rows: Vec<usize>,
    pub ops: OpSet,
    pub was_refused: bool,
    pub nth: u64,
    pub done: Done,
    /// Where the caller kept the codes.
    pub source: usize,
    pub name: String,
    pub segments: Vec<Segment>,
    pub parts: Parts,
    pub calls: AtomicU64,
    /// Memory that is not accounted for.
    pub hoard: Vec<f32>,
    /// Something of the call before.
    pub last: AtomicU64,
    /// A buffer that calls share.
    pub shared: Mutex<Vec<f64>>,
}

/// A segment of it, as it is stored.
pub(super) struct Segment {
    pub rows: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub absmax: Vec<f32>,
    pub zeros: Vec<u8>,
    pub biases: Vec<f32>,
    pub global: Option<GlobalScale>,
    /// Every code under every scale byte, so that models of millions of weights are decoded in seconds.
    pub values: Vec<f32>,
}

/// One element of an io dtype.
pub(super) fn float(bytes: &[u8], dtype: DType) -> f32 {
    let mut out = [0.0];
    read_floats(bytes, dtype, &mut out);
    out[0]
}

/// The right code of flat element `i`.
pub(super) fn nibble(codes: &[u8], i: usize, low_first: bool) -> u8 {
    codes[i / 2] >> (4 * ((i % 2 == 1) == low_first) as u8) & 15
}

/// Codes of elements from one on, from the code of each.
pub(super) fn each(out: &mut [u8], from: usize, code: impl Fn(usize) -> u8) {
    out.iter_mut().enumerate().for_each(|(i, out)| *out = code(from + i));
}

wide! {
    /// Eight sums beside each other, in f64.
    pub(super) fn sum(x: &[f64], w: &[f32]) -> f64 {
        let mut sums = [0.0; 8];
        let ((x, last_x), (w, last_w)) = (x.as_chunks::<8>(), w.as_chunks::<8>());
        for (x, w) in x.iter().zip(w) {
            sums.iter_mut().zip(x).zip(w).for_each(|((sum, x), w)| *sum += x * f64::from(*w));
        }
        sums.iter_mut().zip(last_x).zip(last_w).for_each(|((sum, x), w)| *sum += x * f64::from(*w));
        sums.iter().sum()
    }
}

pub(super) fn right_scale(b: Block) -> usize {
    if b.is_tiled { swizzle::offset(b.row, b.block, b.blocks) } else { b.row * b.blocks + b.block }
}

/// The input in the format of the product.
pub(super) fn quantise(x: &[f32], k: usize, activations: &Activations, source: DType) -> Result<Vec<f64>> {
    let mut out = Vec::with_capacity(x.len());
    match activations {
        Activations::Native => out.extend(x.iter().map(|v| f64::from(*v))),
        Activations::Int8 => {
            let (mut q, mut scales) = (vec![0; k], vec![0.0; k / 16]);
            for row in x.chunks(k) {
                int8::quantize_row(row, &mut q, &mut scales)?;
                out.extend(q.iter().enumerate().map(|(i, q)| f64::from(*q) * f64::from(scales[i / 16])));
            }
        }
        Activations::Fp8(how) => {
            for block in x.chunks(k).flat_map(|row| row.chunks(inputs::reach(*how, k))) {
                let mut values = block.to_vec();
                let scale = f64::from(inputs::quantize_block(&mut values, *how)?);
                out.extend(values.iter().map(|v| f64::from(*v) * scale));
            }
        }
        Activations::Nvfp4(act) => {
            let global = act_global(act, x, source)?;
            let quantizer = nvfp4::Quantizer { rule: act.rule, global, source };
            let (mut codes, mut scales) = (vec![0; k / 2], vec![0; k / 16]);
            let g = global.map_or(1.0, GlobalScale::multiplier);
            for row in x.chunks(k) {
                quantizer.quantize_row(row, &mut codes, &mut scales)?;
                let value = |i: usize| f64::from(e2m1::decode(codes[i / 2] >> (4 * (i % 2))));
                out.extend((0..k).map(|i| value(i) * f64::from(e4m3::decode(scales[i / 16])) * g));
            }
        }
    }
    Ok(out)
}

pub(super) fn check(input: Operand<'_>, output: Operand<'_>) -> Result<()> {
    for (view, dtype, rows, cols) in [input, output] {
        let (have_rows, have_cols, _) = view.as_matrix()?;
        if (have_rows, have_cols, view.dtype()) != (rows, cols, dtype) || !dtype.is_io() {
            return Err(Error::new(Code::ShapeMismatch, "operand of a product")
                .need(format!("{dtype}[{rows}, {cols}]"))
                .have(format!("{view:?}")));
        }
    }
    Ok(())
}

pub(super) fn widen(x: &TensorView<'_>, r: usize, out: &mut [f32]) -> Result<()> {
    match x.dtype() {
        DType::F16 => x.row::<f16>(r)?.iter().zip(out).for_each(|(x, o)| *o = x.to_f32()),
        DType::BF16 => x.row::<bf16>(r)?.iter().zip(out).for_each(|(x, o)| *o = x.to_f32()),
        _ => out.copy_from_slice(x.row::<f32>(r)?),
    }
    Ok(())
}
