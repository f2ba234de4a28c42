//! What blocks hold, as the kernels of `q4-codebook` take it.
use half::f16;
use q4_codebook::{Bytes, Encoding, Offset, Place, Run, Signed, Stored, Values};
use q4_core::formats::ggml::{Apart, Blocks};
use q4_core::{Code, Error, ExecPath, LinearSpec, Part, PreparedWeight, Q4Schema, Q4Weight, Result};
use std::marker::PhantomData;

/// Codes of `4 + HIGH` bits, groups with scale and minimum, as Q4_K and Q5_K have them.
struct Minima<const HIGH: usize>;

impl<const HIGH: usize> Encoding for Minima<HIGH> {
    type Scale = u8;
    type Offset = u8;
    const OFFSET: Offset = Offset::Minimum;
    const HIGH: usize = HIGH;
    const NESTED: bool = true;
}

/// Codes of six bits, groups with a signed scale: Q6_K.
struct SixBits;

impl Encoding for SixBits {
    type Scale = Signed;
    type Offset = u8;
    const HIGH: usize = 2;
    const NESTED: bool = true;
}

/// Signed bytes, groups with an f16: Q8_0.
struct EightBits;

impl Encoding for EightBits {
    type Scale = f16;
    type Offset = u8;
    const BYTES: Option<Bytes> = Some(Bytes::Signed);
}

/// An encoding of blocks: what of them becomes a group's scale.
trait OfBlocks: Encoding<Offset = u8> {
    fn scale(apart: &Apart, group: usize) -> Self::Scale;
}

impl<const HIGH: usize> OfBlocks for Minima<HIGH> {
    fn scale(apart: &Apart, group: usize) -> u8 {
        apart.scales[group].cast_unsigned()
    }
}

impl OfBlocks for SixBits {
    fn scale(apart: &Apart, group: usize) -> Signed {
        Signed::new(apart.scales[group])
    }
}

impl OfBlocks for EightBits {
    fn scale(apart: &Apart, _: usize) -> f16 {
        apart.scale
    }
}

/// Elements, and what is kept of so many beside four bits of each code, in bytes.
pub(crate) fn beside(blocks: Blocks) -> (u32, usize) {
    let elements = blocks.elements();
    let high = elements * (blocks.bits() as usize - 4) / 8;
    let scales = match blocks {
        Blocks::Q4K | Blocks::Q5K => 2 * (elements / blocks.group()) + 4,
        // The f16 of minima that there are not is kept too.
        Blocks::Q6K => elements / blocks.group() + 4,
        Blocks::Q80 => 2,
    };
    (elements as u32, high + scales)
}

/// Repacks `w`. Fails on scales that are not finite.
pub(crate) fn prepare(
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    place: &Place<'_>,
) -> Result<Box<dyn PreparedWeight>> {
    let Q4Schema::Ggml(format) = w.schema else {
        return Err(Error::new(Code::SchemaInvalid, "weight")
            .need("blocks of GGML")
            .have(w.schema.to_string()));
    };
    let pack = match format.blocks {
        Blocks::Q4K => packed::<Minima<0>>,
        Blocks::Q5K => packed::<Minima<1>>,
        Blocks::Q6K => packed::<SixBits>,
        Blocks::Q80 => packed::<EightBits>,
    };
    pack(format.blocks, w, spec, path, place)
}

fn packed<E: OfBlocks>(
    blocks: Blocks,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    place: &Place<'_>,
) -> Result<Box<dyn PreparedWeight>> {
    let mut segments = Vec::with_capacity(w.segments.len());
    for (i, s) in w.segments.iter().enumerate() {
        let bytes = s.data.need(Part::Codes)?.as_bytes()?;
        let bad = bytes.chunks_exact(blocks.bytes()).position(|block| {
            let apart = blocks.apart(block);
            !apart.scale.is_finite() || !apart.min.is_finite()
        });
        if let Some(at) = bad {
            return Err(Error::new(Code::ScaleInvalid, format!("segment {i}: block {at}"))
                .need("finite scales")
                .have("NaN or infinity"));
        }
        segments.push(Rows::<E> { blocks, rows: s.rows, k: w.k, bytes, _as: PhantomData });
    }
    let values = match E::BYTES {
        Some(_) => Values::BYTES,
        None => Values::numbers(E::HIGH, blocks.zero()),
    };
    place.pack_here::<E, _>((crate::OWN.name, path), &segments, values, blocks.group() as u32, spec)
}

/// A matrix of blocks.
struct Rows<'a, E> {
    blocks: Blocks,
    rows: usize,
    k: usize,
    bytes: &'a [u8],
    _as: PhantomData<fn() -> E>,
}

impl<E: OfBlocks> Stored<E> for Rows<'_, E> {
    fn rows(&self) -> usize {
        self.rows
    }
    fn read(&self, row: usize, from: usize, len: usize, out: &mut Run<E>) {
        let (blocks, elements) = (self.blocks, self.blocks.elements());
        let first = row * blocks.row(self.k) + blocks.row(from);
        let (words, groups) = (elements / 8, elements / blocks.group());
        for (i, block) in self.bytes[first..][..blocks.row(len)].chunks_exact(blocks.bytes()).enumerate() {
            let apart = blocks.apart(block);
            let eight = |codes: &[u8], shift: u32| {
                codes.iter().rev().fold(0, |word, code| word << 4 | u32::from(code >> shift & 15))
            };
            // Counted from their zero, which codes are stored from.
            let four = |codes: &[u8]| {
                codes
                    .iter()
                    .rev()
                    .fold(0, |word, code| word << 8 | u32::from(code.wrapping_sub(blocks.zero())))
            };
            for (j, codes) in apart.codes[..elements].chunks_exact(8).enumerate() {
                (out.codes[i * words + j], out.high[i * words + j]) = match E::BYTES {
                    Some(_) => (four(&codes[..4]), four(&codes[4..])),
                    None => (eight(codes, 0), eight(codes, 4)),
                };
            }
            for g in 0..groups {
                out.scales[i * groups + g] = E::scale(&apart, g);
                out.offsets[i * groups + g] = apart.mins[g];
            }
            if E::NESTED {
                out.nests[i] = [apart.scale, apart.min];
            }
        }
    }
}
