//! What blocks hold, as the kernels of `q4-codebook` take it.
use q4_codebook::{Bytes, Encoding, Kept, Offset, Place, Run, Stored, Values, each};
use q4_core::formats::ggml::Blocks;
use q4_core::{Code, Error, ExecPath, LinearSpec, Part, PreparedWeight, Q4Schema, Q4Weight, Result};

/// Codes of `4 + HIGH` bits, groups with scale and minimum, as Q4_K and Q5_K have them.
struct Minima<const HIGH: usize>;

impl<const HIGH: usize> Encoding for Minima<HIGH> {
    const OFFSET: Offset = Offset::Minimum;
    const HIGH: usize = HIGH;
    const NESTED: Option<Kept> = Some(Kept::Byte);
}

/// Codes of six bits, groups with a signed scale: Q6_K.
struct SixBits;

impl Encoding for SixBits {
    const HIGH: usize = 2;
    const NESTED: Option<Kept> = Some(Kept::Signed);
}

/// Signed bytes, groups with an f16: Q8_0.
struct EightBits;

impl Encoding for EightBits {
    const BYTES: Option<Bytes> = Some(Bytes::Signed);
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
    let blocks = format.blocks;
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
        segments.push(Rows { blocks, rows: s.rows, k: w.k, bytes });
    }
    let (of, stored, group) = ((crate::OWN.name, path), each(&segments), blocks.group() as u32);
    let numbers = |high| Values::numbers(high, blocks.zero());
    match blocks {
        Blocks::Q4K => place.pack_here::<Minima<0>>(of, &stored, (numbers(0), Kept::Byte, group), spec),
        Blocks::Q5K => place.pack_here::<Minima<1>>(of, &stored, (numbers(1), Kept::Byte, group), spec),
        Blocks::Q6K => place.pack_here::<SixBits>(of, &stored, (numbers(2), Kept::Signed, group), spec),
        Blocks::Q80 => place.pack_here::<EightBits>(of, &stored, (Values::BYTES, Kept::F16, group), spec),
    }
}

/// A matrix of blocks.
struct Rows<'a> {
    blocks: Blocks,
    rows: usize,
    k: usize,
    bytes: &'a [u8],
}

impl Stored for Rows<'_> {
    fn rows(&self) -> usize {
        self.rows
    }
    fn read(&self, row: usize, from: usize, len: usize, out: &mut Run) {
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
                (out.codes[i * words + j], out.high[i * words + j]) = match blocks {
                    Blocks::Q80 => (four(&codes[..4]), four(&codes[4..])),
                    Blocks::Q4K | Blocks::Q5K | Blocks::Q6K => (eight(codes, 0), eight(codes, 4)),
                };
            }
            for g in 0..groups {
                out.scales[i * groups + g] = match blocks {
                    Blocks::Q80 => apart.scale.to_f32(),
                    Blocks::Q4K | Blocks::Q5K => f32::from(apart.scales[g].cast_unsigned()),
                    Blocks::Q6K => f32::from(apart.scales[g]),
                };
                out.offsets[i * groups + g] = f32::from(apart.mins[g]);
            }
            if blocks != Blocks::Q80 {
                out.nests[i] = [apart.scale, apart.min];
            }
        }
    }
}
