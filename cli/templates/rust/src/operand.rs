//! Operands of a call: rows of f32, f16 or bf16, checked before they are touched.
use crate::q4_plugin::{DEVICE_CPU, Q4Matrix, dtype};
use std::slice;

/// A matrix whose bytes are there.
pub struct Operand {
    data: *mut u8,
    rows: usize,
    cols: usize,
    /// Elements from row to row.
    ld: usize,
    dtype: u32,
}

// SAFETY: tasks of a call write different elements of an output and only read inputs.
unsafe impl Sync for Operand {}

impl Operand {
    /// `m`, if it is `rows` by `cols` in host memory.
    pub fn new(m: &Q4Matrix, rows: u64, cols: usize) -> Option<Self> {
        let size = if m.dtype == dtype::F32 { 4 } else { 2 };
        let is_float = [dtype::F32, dtype::F16, dtype::BF16].contains(&m.dtype);
        let fits = is_float && m.device_type == DEVICE_CPU && rows > 0 && m.rows == rows;
        let fits = fits && m.cols == cols as u64 && m.ld >= m.cols;
        let last = (rows.checked_sub(1)?).checked_mul(m.ld)?.checked_add(m.cols)?;
        let (rows, ld) = (usize::try_from(rows).ok()?, usize::try_from(m.ld).ok()?);
        let fits = fits && last <= m.bytes / size;
        fits.then_some(Self { data: m.data.cast(), rows, cols, ld, dtype: m.dtype })
    }
    pub fn rows(&self) -> usize {
        self.rows
    }
    fn size(&self) -> usize {
        if self.dtype == dtype::F32 { 4 } else { 2 }
    }
    /// Address and bytes, from the first element to the last.
    pub fn range(&self) -> (usize, usize) {
        (self.data as usize, ((self.rows - 1) * self.ld + self.cols) * self.size())
    }
    /// Whether it shares a byte with `other`; NULL is nothing.
    pub fn overlaps(&self, (other, bytes): (usize, usize)) -> bool {
        let (at, reach) = self.range();
        other != 0 && at < other + bytes && other < at + reach
    }
    fn at(&self, row: usize, col: usize) -> *mut u8 {
        assert!(row < self.rows && col < self.cols);
        self.data.wrapping_add((row * self.ld + col) * self.size())
    }
    /// A row of f32, if that is what it has.
    pub fn f32_row(&self, row: usize) -> Option<&[f32]> {
        // SAFETY: aligned elements of a row that is there; nobody writes inputs.
        (self.dtype == dtype::F32).then(|| unsafe { slice::from_raw_parts(self.at(row, 0).cast(), self.cols) })
    }
    /// A row of 16-bit elements as f32.
    pub fn widen(&self, row: usize, out: &mut [f32]) {
        // SAFETY: aligned elements of a row that is there.
        let halves: &[u16] = unsafe { slice::from_raw_parts(self.at(row, 0).cast(), self.cols) };
        let widen = if self.dtype == dtype::F16 { from_f16 } else { |h| f32::from_bits(u32::from(h) << 16) };
        out.iter_mut().zip(halves).for_each(|(out, half)| *out = widen(*half));
    }
    /// Rounds once and writes.
    pub fn store(&self, row: usize, col: usize, v: f32) {
        let at = self.at(row, col);
        // SAFETY: an aligned element that is there, written by one task.
        unsafe {
            match self.dtype {
                dtype::F32 => at.cast::<f32>().write(v),
                dtype::F16 => at.cast::<u16>().write(to_f16(v)),
                _ => at.cast::<u16>().write(to_bf16(v)),
            }
        }
    }
}

fn from_f16(h: u16) -> f32 {
    let (sign, exponent, mantissa) = (u32::from(h & 0x8000) << 16, u32::from(h >> 10 & 31), u32::from(h & 1023));
    match exponent {
        31 => f32::from_bits(sign | 0x7f80_0000 | mantissa << 13),
        0 => f32::from_bits(sign | (mantissa as f32 / 16_777_216.0).to_bits()),
        _ => f32::from_bits(sign | (exponent + 112) << 23 | mantissa << 13),
    }
}

/// To nearest, ties to even; NaN stays a quiet NaN.
fn to_f16(v: f32) -> u16 {
    let (sign, a) = ((v.to_bits() >> 16 & 0x8000) as u16, v.to_bits() & 0x7fff_ffff);
    sign | match a {
        0x7f80_0001.. => 0x7e00,
        // 65520 and above.
        0x477f_f000.. => 0x7c00,
        // Below 2^-14 multiples of 2^-24: an addition rounds.
        ..0x3880_0000 => ((f32::from_bits(a) + 0.5).to_bits() - 0.5f32.to_bits()) as u16,
        _ => (((a + 0xfff + (a >> 13 & 1)) >> 13) - (112 << 10)) as u16,
    }
}

fn to_bf16(v: f32) -> u16 {
    let u = v.to_bits();
    if v.is_nan() { (u >> 16) as u16 | 0x40 } else { ((u + 0x7fff + (u >> 16 & 1)) >> 16) as u16 }
}
