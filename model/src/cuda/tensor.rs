//! A slot on the device: rows of one element type in memory allocated once for the largest step.
use half::{bf16, f16};
use q4_core::{Code, DType, Error, Result, TensorView, TensorViewMut, read_floats};
use q4_cuda::Buffer;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// `[rows, width]`, room for `capacity` rows. A clone is the same memory with rows of its own.
#[derive(Clone)]
pub struct CudaTensor {
    memory: Arc<Buffer>,
    at: usize,
    dtype: DType,
    rows: usize,
    width: usize,
    capacity: usize,
}

impl CudaTensor {
    /// Room for `capacity` rows from byte `at` of `memory`; starts with none. Panics where they are not
    /// inside it.
    pub fn new(memory: &Arc<Buffer>, at: usize, capacity: usize, width: usize, dtype: DType) -> Self {
        assert!(at + capacity * width * dtype.size() <= memory.len(), "a slot outside of its memory");
        Self { memory: memory.clone(), at, dtype, rows: 0, width, capacity }
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
        self.memory.ptr() + self.at as u64
    }
    /// Device address of row `r`.
    pub fn row(&self, r: usize) -> u64 {
        self.ptr() + (r * self.width * self.dtype.size()) as u64
    }
    /// Sets the rows in use; panics above the capacity, which the engine never exceeds.
    pub fn set_rows(&mut self, rows: usize) {
        assert!(rows <= self.capacity, "{rows} rows do not fit a slot of {}", self.capacity);
        self.rows = rows;
    }

    /// `rows` rows in use, `first` and behind it, as the input of a product. Panics where there are fewer.
    pub fn view(&self, first: usize, rows: usize) -> Result<TensorView<'_>> {
        assert!(first + rows <= self.rows, "rows {first}..{} of {}", first + rows, self.rows);
        let (ptr, bytes) = self.from(first, 0)?;
        let (rows, width) = (rows as i64, self.width as i64);
        // SAFETY: `bytes` bytes from `ptr` belong to the memory, which the view keeps alive through the slot
        // it borrows.
        unsafe { TensorView::from_raw(ptr, bytes, self.device(), self.dtype, &[rows, width], &[width, 1]) }
    }
    /// Columns `column..column + width` of the rows in use as the output of a product.
    pub fn view_mut(&mut self, column: usize, width: usize) -> Result<TensorViewMut<'_>> {
        let (ptr, bytes) = self.from(0, column)?;
        let (shape, strides) = ([self.rows as i64, width as i64], [self.width as i64, 1]);
        // SAFETY: as above, and unique.
        unsafe { TensorViewMut::from_raw(ptr, bytes, self.device(), self.dtype, &shape, &strides) }
    }

    /// The rows in use, widened; what writes them must be complete.
    pub fn download(&self) -> Result<Vec<f32>> {
        let count = self.rows * self.width;
        let mut bytes = vec![0u8; count * self.dtype.size()];
        self.memory.download(self.at, &mut bytes)?;
        let mut values = vec![0.0; count];
        read_floats(&bytes, self.dtype, &mut values);
        Ok(values)
    }
    /// Writes the rows in use, rounded to the slot's type; what reads or writes them must be complete.
    pub fn upload(&mut self, values: &[f32]) -> Result<()> {
        assert_eq!(values.len(), self.rows * self.width, "values of a slot");
        match self.dtype {
            DType::F16 => {
                let rounded: Vec<_> = values.iter().map(|v| f16::from_f32(*v).to_bits()).collect();
                self.memory.upload(self.at, &rounded)
            }
            DType::BF16 => {
                let rounded: Vec<_> = values.iter().map(|v| bf16::from_f32(*v).to_bits()).collect();
                self.memory.upload(self.at, &rounded)
            }
            _ => self.memory.upload(self.at, values),
        }
    }

    fn device(&self) -> q4_core::Device {
        self.memory.gpu().device()
    }
    fn from(&self, row: usize, column: usize) -> Result<(NonNull<c_void>, usize)> {
        let at = (row * self.width + column) * self.dtype.size();
        let bytes = self.capacity * self.width * self.dtype.size();
        NonNull::new((self.ptr() + at as u64) as *mut c_void)
            .filter(|_| at < bytes)
            .map(|p| (p, bytes - at))
            .ok_or_else(|| {
                Error::new(Code::ShapeMismatch, "part of a slot")
                    .need(format!("row {row}, column {column} inside it"))
                    .have(format!("{} rows of {}", self.capacity, self.width))
            })
    }
}
