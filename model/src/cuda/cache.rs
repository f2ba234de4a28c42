//! Keys and values of every layer on the device, allocated once.
use crate::batch::PAGE;
use crate::executor::{Shape, Sizes};
use crate::places::Places;
use q4_core::{DType, Result};
use q4_cuda::{Buffer, Gpu};
use std::sync::Arc;

/// `[layer][k or v][page][kv head][position][head_dim]`. A sequence alone has one page as large as its
/// context; many share [pages](Places) of [`PAGE`] positions.
pub struct CudaCache {
    buffer: Buffer,
    /// Bytes of all keys of a layer, and of all values.
    part: u64,
    /// Whose the pages are, and how much of them is valid.
    pub places: Places,
}

impl CudaCache {
    /// Bytes of so many positions.
    pub fn bytes(dtype: DType, layers: usize, kv_heads: usize, head_dim: usize, positions: usize) -> u64 {
        (dtype.size() * layers * 2 * kv_heads * head_dim) as u64 * positions as u64
    }

    /// Of a sequence that has it alone.
    pub fn alone(gpu: &Arc<Gpu>, dtype: DType, shape: &Shape, sizes: &Sizes) -> Result<Self> {
        let Sizes { context, rows, .. } = *sizes;
        Self::of(gpu, dtype, shape, context, Places::one(context, context, rows))
    }

    /// `pages` pages that many share.
    pub fn shared(gpu: &Arc<Gpu>, dtype: DType, shape: &Shape, sizes: &Sizes, pages: usize) -> Result<Self> {
        let Sizes { sequences, context, rows, .. } = *sizes;
        let places = Places::many((PAGE, pages), (sequences, context), rows);
        Self::of(gpu, dtype, shape, PAGE * pages, places)
    }

    fn of(gpu: &Arc<Gpu>, dtype: DType, s: &Shape, positions: usize, places: Places) -> Result<Self> {
        let bytes = Self::bytes(dtype, s.layers, s.kv_heads, s.head_dim, positions);
        let buffer = Buffer::new(gpu, bytes as usize)?;
        Ok(Self { buffer, part: bytes / (2 * s.layers) as u64, places })
    }

    /// Device addresses of the keys and the values of `layer`, page 0.
    pub fn layer(&self, layer: usize) -> (u64, u64) {
        let keys = self.buffer.ptr() + 2 * self.part * layer as u64;
        (keys, keys + self.part)
    }
}
