//! Operands of a call, and the threads and scratch that it may use.
use half::{bf16, f16, slice::HalfFloatSliceExt};
use q4_core::{Code, DType, Device, Error, ExecContext, Result, TensorView, TensorViewMut, ThreadPool};
use std::fmt::Display;
use std::{ptr, slice};

/// An operand that does not fit.
pub fn invalid(what: impl Into<String>, need: impl Display, have: impl Display) -> Error {
    Error::new(Code::ShapeMismatch, what).need(need.to_string()).have(have.to_string())
}

/// A matrix by address: host memory, or memory of a device that is only computed with.
#[derive(Clone, Copy)]
pub struct Mat {
    data: *mut u8,
    /// Rows, at least 1.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Elements from one row to the next.
    pub ld: usize,
    /// f32, f16 or bf16.
    pub dtype: DType,
}

// SAFETY: an address and sizes; who dereferences it states why that is not a race.
unsafe impl Send for Mat {}
// SAFETY: as above.
unsafe impl Sync for Mat {}

impl Mat {
    /// An operand to read: any number of rows, `cols` columns of `dtype`.
    pub fn input(view: &TensorView<'_>, name: &str, cols: usize, dtype: DType) -> Result<Self> {
        Self::of(view.as_ptr().cast_mut().cast(), view, name, cols, dtype)
    }

    /// An operand to write.
    pub fn output(view: &mut TensorViewMut<'_>, name: &str, cols: usize, dtype: DType) -> Result<Self> {
        Self::of(view.as_mut_ptr().cast(), &view.as_view(), name, cols, dtype)
    }

    fn of(data: *mut u8, view: &TensorView<'_>, name: &str, cols: usize, dtype: DType) -> Result<Self> {
        let (rows, have, ld) = view.as_matrix()?;
        if rows == 0 || have != cols || view.dtype() != dtype || !dtype.is_io() {
            let kind = if dtype.is_io() { dtype.as_str() } else { "float32, float16 or bfloat16" };
            return Err(invalid(name, format!("{kind}[at least 1, {cols}]"), format!("{view:?}")));
        }
        // The stride of a single row means nothing.
        Ok(Self { data, rows, cols, ld: if rows > 1 { ld } else { cols }, dtype })
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// The same elements at another address, rows `ld` apart.
    pub fn moved(&self, to: u64, ld: usize) -> Self {
        Self { data: ptr::without_provenance_mut(to as usize), ld, ..*self }
    }

    /// `count` of its rows from `first` on.
    pub fn rows_from(&self, first: usize, count: usize) -> Self {
        debug_assert!(first + count <= self.rows);
        // The address may be a device's: it is only computed with.
        Self { data: self.data.wrapping_add(first * self.ld * self.dtype.size()), rows: count, ..*self }
    }

    /// First element of f32 data.
    pub fn floats(&self) -> *const f32 {
        debug_assert_eq!(self.dtype, DType::F32);
        self.data.cast()
    }

    /// Elements from (`row`, `col`) on, widened.
    ///
    /// # Safety
    /// They are inside the matrix and nobody writes them.
    pub unsafe fn load(&self, row: usize, col: usize, out: &mut [f32]) {
        // SAFETY: inside, by contract.
        unsafe {
            let p = self.data.add((row * self.ld + col) * self.dtype.size());
            match self.dtype {
                DType::F16 => slice::from_raw_parts(p.cast::<f16>(), out.len()).convert_to_f32_slice(out),
                DType::BF16 => slice::from_raw_parts(p.cast::<bf16>(), out.len()).convert_to_f32_slice(out),
                _ => out.copy_from_slice(slice::from_raw_parts(p.cast::<f32>(), out.len())),
            }
        }
    }

    /// Writes elements from (`row`, `col`) on, each rounded once.
    ///
    /// # Safety
    /// They are inside the matrix and nobody else touches them.
    pub unsafe fn store(&self, row: usize, col: usize, values: &[f32]) {
        // SAFETY: inside, by contract.
        unsafe {
            let p = self.data.add((row * self.ld + col) * self.dtype.size());
            match self.dtype {
                DType::F16 => {
                    slice::from_raw_parts_mut(p.cast::<f16>(), values.len()).convert_from_f32_slice(values)
                }
                DType::BF16 => {
                    slice::from_raw_parts_mut(p.cast::<bf16>(), values.len()).convert_from_f32_slice(values)
                }
                _ => slice::from_raw_parts_mut(p.cast::<f32>(), values.len()).copy_from_slice(values),
            }
        }
    }

    /// Adds to f32 elements from (`row`, `col`) on.
    ///
    /// # Safety
    /// They are inside the matrix and nobody else touches them.
    pub unsafe fn add(&self, row: usize, col: usize, values: &[f32]) {
        // SAFETY: inside, by contract.
        let to = unsafe {
            slice::from_raw_parts_mut(self.floats().cast_mut().add(row * self.ld + col), values.len())
        };
        for (to, v) in to.iter_mut().zip(values) {
            *to += v;
        }
    }
}

/// Fails unless all are in host memory.
pub fn on_host(views: &[&TensorView<'_>]) -> Result<()> {
    match views.iter().find(|view| view.device() != Device::Cpu) {
        None => Ok(()),
        Some(view) => Err(invalid("operand on another device", Device::Cpu, view.device())),
    }
}

/// The threads of a call.
#[derive(Clone, Copy)]
pub struct Threads<'a>(pub &'a ThreadPool);

impl Threads<'_> {
    /// How many tasks to make of `items`: a few per thread, so that a late thread costs little.
    pub fn tasks(&self, items: usize) -> usize {
        self.tasks_of(4, items)
    }

    /// The same with `each` tasks per thread.
    pub fn tasks_of(&self, each: usize, items: usize) -> usize {
        match self.0.threads() {
            1 => items.min(1),
            threads => items.min(threads.saturating_mul(each)),
        }
    }

    /// Runs `body` on each of so many nearly equal ranges of `0..items`. Allocates nothing.
    pub fn each(&self, tasks: usize, items: usize, body: impl Fn(std::ops::Range<usize>) + Sync) {
        let cut = |i: usize| items / tasks * i + (items % tasks).min(i);
        self.0.run(tasks, &|t| body(cut(t)..cut(t + 1)));
    }
}

/// Scratch of at least `need` bytes, aligned on `align`: the device's address where the call runs there.
pub fn scratch(cx: &mut ExecContext<'_>, need: Option<u64>, align: usize) -> Result<*mut u8> {
    let need =
        need.ok_or_else(|| invalid("workspace", "a size that fits the address space", "an overflow"))?;
    if need == 0 {
        return Ok(ptr::null_mut());
    }
    let (at, have) = match &mut cx.workspace {
        Some(w) => (w.as_mut_ptr().cast::<u8>(), w.as_view().nbytes() as u64),
        None => (ptr::null_mut(), 0),
    };
    if have < need {
        return Err(invalid("workspace of a product", format!("{need} bytes"), format!("{have} bytes")));
    }
    if at.addr() % align != 0 {
        let need = format!("{align}-byte alignment");
        return Err(invalid("workspace of a product", need, format!("{at:p}")));
    }
    Ok(at)
}

/// Fails unless x and y have the same number of rows, at most `max_m`.
pub fn check_rows(max_m: usize, x: &Mat, y: &Mat) -> Result<()> {
    if x.rows == y.rows && x.rows <= max_m {
        return Ok(());
    }
    let need = format!("the same number of rows, at most max_m = {max_m}");
    Err(invalid("operands of a product", need, format!("{} and {}", x.rows, y.rows)))
}
