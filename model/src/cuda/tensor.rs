//! A slot on the device: rows of one element type, allocated once for the largest step.
use q4_core::{Code, DType, Error, Result, TensorView, TensorViewMut};
use q4_cuda::{Buffer, Gpu};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// `[rows, width]`, room for `capacity` rows.
pub struct CudaTensor {
    buffer: Buffer,
    dtype: DType,
    rows: usize,
    width: usize,
    capacity: usize,
}

impl CudaTensor {
    /// Room for `capacity` rows; starts with none.
    pub fn new(gpu: &Arc<Gpu>, capacity: usize, width: usize, dtype: DType) -> Result<Self> {
        let buffer = Buffer::new(gpu, capacity * width * dtype.size())?;
        Ok(Self { buffer, dtype, rows: 0, width, capacity })
    }
    /// Rows in use.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Device address of the first row.
    pub fn ptr(&self) -> u64 {
        self.buffer.ptr()
    }
    /// Device address of row `r`.
    pub fn row(&self, r: usize) -> u64 {
        self.buffer.ptr() + (r * self.width * self.dtype.size()) as u64
    }
    /// The bytes themselves.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }
    /// Sets the rows in use; panics above the capacity, which the engine never exceeds.
    pub fn set_rows(&mut self, rows: usize) {
        assert!(rows <= self.capacity, "{rows} rows do not fit a slot of {}", self.capacity);
        self.rows = rows;
    }

    /// Rows `first..` in use as the input of a product.
    pub fn view(&self, first: usize) -> Result<TensorView<'_>> {
        let (ptr, bytes) = self.from(first, 0)?;
        let (rows, width) = ((self.rows - first) as i64, self.width as i64);
        // SAFETY: `bytes` bytes from `ptr` belong to the buffer, which the view borrows.
        unsafe { TensorView::from_raw(ptr, bytes, self.device(), self.dtype, &[rows, width], &[width, 1]) }
    }
    /// Columns `column..column + width` of the rows in use as the output of a product.
    pub fn view_mut(&mut self, column: usize, width: usize) -> Result<TensorViewMut<'_>> {
        let (ptr, bytes) = self.from(0, column)?;
        let (shape, strides) = ([self.rows as i64, width as i64], [self.width as i64, 1]);
        // SAFETY: as above, and unique.
        unsafe { TensorViewMut::from_raw(ptr, bytes, self.device(), self.dtype, &shape, &strides) }
    }

    fn device(&self) -> q4_core::Device {
        self.buffer.gpu().device()
    }
    fn from(&self, row: usize, column: usize) -> Result<(NonNull<c_void>, usize)> {
        let at = (row * self.width + column) * self.dtype.size();
        NonNull::new((self.buffer.ptr() + at as u64) as *mut c_void)
            .filter(|_| at < self.buffer.len())
            .map(|p| (p, self.buffer.len() - at))
            .ok_or_else(|| {
                Error::new(Code::ShapeMismatch, "part of a slot")
                    .need(format!("row {row}, column {column} inside it"))
                    .have(format!("{} rows of {}", self.capacity, self.width))
            })
    }
}
