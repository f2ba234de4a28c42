//! Keys and values of every layer on the device, allocated once for the whole context.
use q4_core::{DType, Result};
use q4_cuda::{Buffer, Gpu};
use std::sync::Arc;

/// `[layer][k or v][sequence][kv head][position][head_dim]`; positions `0..len` of a sequence are valid.
pub struct CudaCache {
    buffer: Buffer,
    dtype: DType,
    kv_heads: usize,
    head_dim: usize,
    sequences: usize,
    capacity: usize,
    len: usize,
}

impl CudaCache {
    /// Bytes a cache of this size takes.
    pub fn bytes(dtype: DType, layers: usize, kv_heads: usize, head_dim: usize, capacity: usize) -> u64 {
        (dtype.size() * layers * 2 * kv_heads * head_dim) as u64 * capacity as u64
    }
    /// Room for `capacity` positions of each of `sequences` sequences, which advance together.
    pub fn new(
        gpu: &Arc<Gpu>,
        dtype: DType,
        (layers, kv_heads, head_dim): (usize, usize, usize),
        sequences: usize,
        capacity: usize,
    ) -> Result<Self> {
        let one = Self::bytes(dtype, layers, kv_heads, head_dim, capacity) as usize;
        let buffer = Buffer::new(gpu, one * sequences)?;
        Ok(Self { buffer, dtype, kv_heads, head_dim, sequences, capacity, len: 0 })
    }
    /// Positions that are valid.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Nothing accepted yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Positions a sequence has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Sequences side by side.
    pub fn sequences(&self) -> usize {
        self.sequences
    }
    /// Forgets everything behind the first `len` positions.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
    /// Accepts `rows` positions of every sequence.
    pub fn advance(&mut self, rows: usize) {
        self.len += rows;
    }
    /// Elements between a head's cache and the next one's.
    pub fn head_stride(&self) -> u64 {
        (self.capacity * self.head_dim) as u64
    }
    /// Elements between a sequence's cache and the next one's.
    pub fn sequence_stride(&self) -> u64 {
        self.head_stride() * self.kv_heads as u64
    }
    /// Device addresses of the keys and the values of `layer`, sequence 0.
    pub fn layer(&self, layer: usize) -> (u64, u64) {
        let part = self.sequence_stride() * (self.sequences * self.dtype.size()) as u64;
        let keys = self.buffer.ptr() + 2 * part * layer as u64;
        (keys, keys + part)
    }
}
