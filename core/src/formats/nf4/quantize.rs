//! Quantising to NF4.
use super::{HighFirst, NESTED_BLOCK, Nf4, dynamic_map, has_block, nest, quantize, sample};
use crate::formats::quantize::{Encoder, PIECE, Rows, parallel};
use crate::formats::storage::Layout;
use crate::{Code, Error, OwnedParts, Part, Q4Schema, Result, ThreadPool};
use serde::Serialize;

/// NF4 codes, high nibble first, with an absmax per `block`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ToNf4 {
    /// Elements per absmax: a power of two, 32 to 4096.
    pub block: u32,
    /// Quantise the absmax too.
    pub double: bool,
}

impl Encoder for ToNf4 {
    fn in_words(&self) -> String {
        let scales = if self.double { "quantised scales" } else { "scales" };
        format!("nf4 with {scales} for blocks of {}", self.block)
    }
    fn schema(&self) -> Q4Schema {
        let nested = self.double.then_some(NESTED_BLOCK as u32);
        Q4Schema::Nf4(Nf4 { nibble_order: HighFirst, block: self.block, nested })
    }
    fn invalid(&self) -> Option<&'static str> {
        (!has_block(self.block)).then_some("a block size of 32 to 4096, a power of two")
    }
    fn fits(&self, layout: Layout) -> bool {
        layout == Layout::Bitsandbytes || (layout == Layout::Dat && !self.double)
    }
    fn fix(&self) -> &'static str {
        match self.double {
            true => "--layout bitsandbytes, or no --double-quant",
            false => "--layout bitsandbytes or dat; or --format nvfp4",
        }
    }
    fn lacks(&self, layout: Layout, n: usize, k: usize) -> Option<&'static str> {
        match layout {
            Layout::Dat if k % 2 != 0 => Some("an even number of in features"),
            // The file does not say how large a block is: readers divide.
            Layout::Dat => (n * k % self.block as usize != 0).then_some("whole blocks of NF4 in a .dat file"),
            _ => None,
        }
    }
    fn encode(&self, rows: &Rows<'_>, _: Option<f32>, threads: &ThreadPool) -> Result<OwnedParts> {
        let Self { block, double } = *self;
        if !has_block(block) {
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
            quantize(&x, size, codes, absmax)
        })?;
        let parts = sample::with_codes(codes);
        if !double {
            return Ok(parts.with_f32(Part::Scales, &absmax));
        }
        let (codes, absmax, offset) = nest(&absmax);
        Ok(sample::with_nested(parts, codes, &absmax, dynamic_map(), offset))
    }
}
