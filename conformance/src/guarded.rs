//! Buffers that notice: operands with poisoned gaps and guard bands, scratch that is exactly as large as
//! promised.
//!
//! Everything outside the elements of a view has a pattern that must survive the call; inside an input the
//! pattern reads as NaN, so that a kernel that reads a gap shows it in its result. A pattern does not notice
//! a read that is thrown away, nor a write that is undone: buffers at the end of their pages have no page
//! behind them, and inputs there are read-only.
use crate::pages::Pages;
use half::slice::HalfFloatSliceExt;
use q4_core::selfcheck::IoBuffer;
use q4_core::{Code, DType, Device, Error, Result, TensorView, TensorViewMut, read_floats};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Bytes before and behind every buffer.
const GUARD: usize = 256;
/// What guards and gaps hold. As f32, f16 and bf16 it is NaN.
const POISON: u8 = 0xff;
/// What guards and gaps of outputs hold: not NaN, so that a NaN written there is seen too.
const MARK: u8 = 0xa5;

/// Where the rows of a matrix lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Elements from the end of a row to the start of the next.
    pub gap: usize,
    /// Where the first element is.
    pub place: Place,
}

/// Where a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the heap, so many elements behind a 64-byte boundary.
    Offset(usize),
    /// In pages of its own, its last byte the last one before a page that nobody may touch, aligned to
    /// elements only.
    End,
    /// In pages of its own, its first byte the first one after a page that nobody may touch.
    Start,
}

impl Layout {
    /// As a careful caller has it: aligned, no gaps.
    pub const PLAIN: Self = Self { gap: 0, place: Place::Offset(0) };
    /// As callers are allowed to have it: odd gaps, aligned to elements only, nothing behind it.
    pub const HOSTILE: Self = Self { gap: 5, place: Place::End };
}

/// A matrix `[rows, cols]` of an io dtype inside a larger, marked buffer.
pub struct Guarded {
    dtype: DType,
    bytes: Memory,
    start: usize,
    rows: usize,
    cols: usize,
    ld: usize,
    mark: u8,
}

impl Guarded {
    /// An input holding `values`, which are rounded to `dtype`; gaps and guards are NaN.
    pub fn input(dtype: DType, values: &[f32], rows: usize, cols: usize, layout: Layout) -> Self {
        let mut out = Self::new(dtype, rows, cols, layout, POISON);
        let packed = bytes_of(&IoBuffer::new(dtype, values));
        let row = cols * dtype.size();
        for r in 0..rows {
            let at = out.at(r);
            out.bytes[at..at + row].copy_from_slice(&packed[r * row..][..row]);
        }
        out.bytes.seal();
        out
    }

    /// An output whose elements are NaN until they are written.
    pub fn output(dtype: DType, rows: usize, cols: usize, layout: Layout) -> Self {
        let mut out = Self::new(dtype, rows, cols, layout, MARK);
        let row = cols * dtype.size();
        for r in 0..rows {
            let at = out.at(r);
            out.bytes[at..at + row].fill(POISON);
        }
        out
    }

    fn new(dtype: DType, rows: usize, cols: usize, layout: Layout, mark: u8) -> Self {
        let ld = cols + layout.gap;
        let (bytes, start) = match layout.place {
            Place::Offset(offset) => {
                let (span, offset) = ((rows * ld).max(1) * dtype.size(), offset * dtype.size());
                let bytes = vec![mark; 64 + offset + span + 2 * GUARD];
                let start = GUARD + bytes[GUARD..].as_ptr().align_offset(64) + offset;
                (Memory::Heap(bytes), start)
            }
            Place::End | Place::Start => {
                let span = (((rows.max(1) - 1) * ld + cols) * dtype.size()).max(1);
                let bytes = Memory::before_a_hole(span + GUARD, mark);
                let start = if layout.place == Place::Start { 0 } else { bytes.len() - span };
                (bytes, start)
            }
        };
        Self { dtype, bytes, start, rows, cols, ld, mark }
    }

    fn at(&self, row: usize) -> usize {
        self.start + row * self.ld * self.dtype.size()
    }

    /// Bytes from the first element to the last.
    fn span(&self) -> usize {
        if self.rows == 0 { 0 } else { ((self.rows - 1) * self.ld + self.cols) * self.dtype.size() }
    }

    /// For reading.
    pub fn view(&self) -> Result<TensorView<'_>> {
        self.view_as(self.dtype, Device::Cpu, self.rows, self.cols)
    }

    /// The same bytes under another description, for calls that must be refused. The description must not be
    /// larger.
    pub fn view_as(&self, dtype: DType, device: Device, rows: usize, cols: usize) -> Result<TensorView<'_>> {
        let p = NonNull::from(&self.bytes[self.start.min(self.bytes.len() - 1)]).cast::<c_void>();
        let len = self.span();
        // SAFETY: `span` bytes from `start` on are inside the buffer, borrowed for the life of the view.
        unsafe {
            TensorView::from_raw(p, len, device, dtype, &[rows as i64, cols as i64], &[self.ld as i64, 1])
        }
    }

    /// For writing.
    pub fn view_mut(&mut self) -> Result<TensorViewMut<'_>> {
        let (dtype, rows, cols) = (self.dtype, self.rows, self.cols);
        self.view_mut_as(dtype, Device::Cpu, rows, cols)
    }

    /// As [`view_as`](Self::view_as), for writing.
    pub fn view_mut_as(
        &mut self,
        dtype: DType,
        device: Device,
        rows: usize,
        cols: usize,
    ) -> Result<TensorViewMut<'_>> {
        let (len, ld) = (self.span(), self.ld as i64);
        let p = NonNull::from(&mut self.bytes[self.start]).cast::<c_void>();
        // SAFETY: as above, and the borrow is unique.
        unsafe { TensorViewMut::from_raw(p, len, device, dtype, &[rows as i64, cols as i64], &[ld, 1]) }
    }

    /// Every element NaN, as in a new output.
    pub fn poison(&mut self) {
        self.hold(POISON);
    }

    /// Every byte of every element this one.
    pub fn hold(&mut self, byte: u8) {
        let row = self.cols * self.dtype.size();
        for r in 0..self.rows {
            let at = self.at(r);
            self.bytes[at..at + row].fill(byte);
        }
    }

    /// The elements, widened.
    pub fn values(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (r, row) in out.chunks_mut(self.cols.max(1)).enumerate() {
            read_floats(&self.bytes[self.at(r)..][..self.cols * self.dtype.size()], self.dtype, row);
        }
        out
    }

    /// The elements' bits.
    pub fn bits(&self) -> Vec<u8> {
        let row = self.cols * self.dtype.size();
        let mut out = Vec::with_capacity(self.rows * row);
        (0..self.rows).for_each(|r| out.extend_from_slice(&self.bytes[self.at(r)..][..row]));
        out
    }

    /// Everything, guards included.
    pub fn snapshot(&self) -> Vec<u8> {
        self.bytes.to_vec()
    }

    /// Fails when a byte outside the elements changed.
    pub fn check_guards(&self, what: &str) -> Result<()> {
        let size = self.dtype.size();
        let rows = (0..self.rows).map(|r| self.at(r)..self.at(r) + self.cols * size);
        let mut outside = 0;
        let wrong = rows.chain(std::iter::once(self.bytes.len()..self.bytes.len())).find_map(|row| {
            let gap = std::mem::replace(&mut outside, row.end)..row.start;
            Some(gap.start + self.bytes[gap].iter().position(|b| *b != self.mark)?)
        });
        match wrong {
            None => Ok(()),
            Some(i) => {
                let at = (i as i64 - self.start as i64).div_euclid(size as i64);
                Err(Error::new(
                    Code::ConformanceFailed,
                    format!("{what}: a byte outside the matrix was written"),
                )
                .need(format!("[{}, {}], rows {} elements apart", self.rows, self.cols, self.ld))
                .have(format!("element {at} from the first one")))
            }
        }
    }

    /// Fails when anything differs from `before`.
    pub fn check_unchanged(&self, what: &str, before: &[u8]) -> Result<()> {
        // As slices first: that is one comparison of memory.
        let differs = || self.bytes.iter().zip(before).position(|(a, b)| a != b);
        match (self.bytes[..] != *before).then(differs).flatten() {
            None => Ok(()),
            Some(i) => Err(Error::new(Code::ConformanceFailed, format!("{what} was modified"))
                .need("not a byte of it written")
                .have(format!("byte {} from its start", i as i64 - self.start as i64))),
        }
    }
}

/// Bytes of a buffer.
pub(crate) enum Memory {
    Heap(Vec<u8>),
    Pages(Pages),
}

impl Memory {
    /// At least `len` bytes of `mark`, the last one before a page that faults. On the heap where there are no
    /// pages to be had.
    pub fn before_a_hole(len: usize, mark: u8) -> Self {
        let mut memory = Pages::new(len).map_or_else(|| Self::Heap(vec![mark; len]), Self::Pages);
        memory.fill(mark);
        memory
    }
    /// From now on a write faults, where that can be had.
    pub fn seal(&mut self) {
        if let Self::Pages(pages) = self {
            pages.seal();
        }
    }
}

impl std::ops::Deref for Memory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Pages(pages) => pages.bytes(),
        }
    }
}

impl std::ops::DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Pages(pages) => pages.bytes_mut(),
        }
    }
}

/// Scratch of exactly the bytes a weight asked for, 64-byte aligned, between guards.
pub struct Workspace {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Workspace {
    /// `len` bytes of `fill`.
    pub fn new(len: usize, fill: u8) -> Self {
        let mut bytes = vec![MARK; len + 64 + 2 * GUARD];
        let start = GUARD + bytes[GUARD..].as_ptr().align_offset(64);
        bytes[start..start + len].fill(fill);
        Self { bytes, start, len }
    }
    /// What a call gets; `None` when it asked for nothing.
    pub fn view(&mut self) -> Result<Option<TensorViewMut<'_>>> {
        if self.len == 0 {
            return Ok(None);
        }
        TensorViewMut::of(&mut self.bytes[self.start..self.start + self.len], &[self.len]).map(Some)
    }
    /// Fails when a byte around it changed.
    pub fn check_guards(&self) -> Result<()> {
        let (head, tail) = (&self.bytes[..self.start], &self.bytes[self.start + self.len..]);
        if head.iter().chain(tail).all(|&b| b == MARK) {
            return Ok(());
        }
        Err(Error::new(Code::ConformanceFailed, "a byte outside the workspace was written")
            .need(format!("at most the {} bytes it asked for", self.len)))
    }
}

/// The bytes, as they are in memory.
pub(crate) fn bytes_of(values: &IoBuffer) -> Vec<u8> {
    match values {
        IoBuffer::F32(v) => bytemuck::cast_slice(v).to_vec(),
        IoBuffer::F16(v) => bytemuck::cast_slice(v.reinterpret_cast()).to_vec(),
        IoBuffer::BF16(v) => bytemuck::cast_slice(v.reinterpret_cast()).to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_what_they_say() -> Result<()> {
        let values: Vec<f32> = (0..15).map(|i| i as f32).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for layout in [Layout::PLAIN, Layout::HOSTILE, Layout { gap: 3, place: Place::Start }] {
                let g = Guarded::input(dtype, &values, 3, 5, layout);
                let v = g.view()?;
                match layout.place {
                    Place::Offset(offset) => assert_eq!(v.as_ptr() as usize % 64, offset * dtype.size()),
                    Place::Start => assert_eq!(v.as_ptr() as usize % 4096, 0),
                    Place::End => assert_eq!((v.as_ptr() as usize + g.span()) % 4096, 0),
                }
                assert_eq!(v.as_matrix()?, (3, 5, 5 + layout.gap));
                assert_eq!(g.values(), values);
                g.check_guards("x")?;
            }
        }
        Ok(())
    }

    #[test]
    fn writes_outside_are_seen_and_writes_inside_are_not() -> Result<()> {
        let mut y = Guarded::output(DType::F32, 2, 3, Layout::HOSTILE);
        assert!(y.values().iter().all(|v| v.is_nan()));
        y.view_mut()?.row_mut::<f32>(1)?.fill(1.0);
        y.check_guards("y")?;
        for offset in [-1i64, 12, 16, 44] {
            let mut broken = Guarded::output(DType::F32, 2, 3, Layout { gap: 5, ..Layout::PLAIN });
            let at = (broken.start as i64 + offset) as usize;
            broken.bytes[at] = 0;
            assert!(broken.check_guards("y").is_err(), "{offset}");
        }
        let mut w = Workspace::new(64, 0);
        w.check_guards()?;
        let end = w.start + 64;
        w.bytes[end] = 0;
        assert!(w.check_guards().is_err());
        Ok(())
    }
}
