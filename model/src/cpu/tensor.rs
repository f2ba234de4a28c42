//! A slot on the CPU: rows of f32, allocated once for the largest step.
use q4_core::ThreadPool;

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

/// Elements below which waking another thread costs more than the work.
const WORTH_A_TASK: usize = 8 * 1024;

/// Runs `f(r, row r)` for every row of `data`, in parallel where that pays.
pub(super) fn each_row(
    data: &mut [f32],
    width: usize,
    threads: &ThreadPool,
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    let rows = data.len() / width.max(1);
    let data = Disjoint::new(data);
    threads.split(rows, WORTH_A_TASK.div_ceil(width.max(1)), &|start, end| {
        for r in start..end {
            // SAFETY: a row belongs to one task.
            f(r, unsafe { data.slice(r * width, width) });
        }
    });
}

/// A buffer that tasks write disjoint parts of.
pub(super) struct Disjoint {
    start: *mut f32,
    len: usize,
}
// SAFETY: every use hands a part to one task only, as each states.
unsafe impl Sync for Disjoint {}

impl Disjoint {
    pub(super) fn new(data: &mut [f32]) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len() }
    }
    /// # Safety
    /// No two slices alive at once overlap, and none outlives the buffer.
    #[allow(clippy::mut_from_ref)] // that is the point
    pub(super) unsafe fn slice(&self, at: usize, len: usize) -> &mut [f32] {
        assert!(at + len <= self.len, "{at} + {len} of {}", self.len);
        // SAFETY: inside the buffer by the line above, disjoint by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}
