//! A slot on the CPU: rows of f32, allocated once for the largest step.

/// `[rows, width]` f32, room for `capacity` rows.
pub struct CpuTensor {
    data: Vec<f32>,
    rows: usize,
    width: usize,
}

impl CpuTensor {
    /// Room for `capacity` rows; starts with none.
    pub fn new(capacity: usize, width: usize) -> Self {
        Self { data: vec![0.0; capacity * width], rows: 0, width }
    }
    /// Rows in use.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }
    /// Sets the rows in use; panics above the capacity, which the session never exceeds.
    pub fn set_rows(&mut self, rows: usize) {
        assert!(rows * self.width <= self.data.len(), "{rows} rows of {} do not fit the slot", self.width);
        self.rows = rows;
    }
    /// The rows in use.
    pub fn data(&self) -> &[f32] {
        &self.data[..self.rows * self.width]
    }
    /// The rows in use.
    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.rows * self.width]
    }
    /// One row.
    pub fn row(&self, r: usize) -> &[f32] {
        &self.data()[r * self.width..][..self.width]
    }
}
