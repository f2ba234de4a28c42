//! Where sums go: the columns of y that two row blocks make, each sum times its factor, or a gate times what
//! it lets through.
use crate::call::{Mat, check_rows};
use crate::kernels::{Acc, Blocks, FinishFn, GateFn, LANES, PAIR, SCALE_FACTOR};
use crate::weight::Weight;
use q4_core::{Activations, Code, DType, Error, FuseSet, GlobalScale, Result};

/// Rows that are finished before they are written.
const CHUNK: usize = 8;

/// The output of a call.
#[derive(Clone, Copy)]
pub struct Output<'a> {
    w: &'a Weight,
    y: Mat,
    set: FuseSet,
}

/// Whether a product of `m` rows may be fused with exactly `set`. Gate and up have to be whole row blocks,
/// and rows more than a direct kernel takes: few wait for the weights, which are fastest as one stream.
pub fn fuses(w: &Weight, m: usize, set: FuseSet) -> bool {
    let k = w.kernels();
    let few = if w.activations == Activations::Native { k.float.direct_rows } else { k.bytes.direct_rows };
    let gates = m > few && w.n % (2 * LANES) == 0;
    m <= w.max_m && !set.contains(FuseSet::NORM) && (gates || !set.contains(FuseSet::GATE))
}

/// Columns and type of y.
pub fn shape(w: &Weight, set: FuseSet) -> (usize, DType) {
    let columns = if set.contains(FuseSet::GATE) { w.n / 2 } else { w.n };
    (columns, if set.contains(FuseSet::ACCUMULATE) { DType::F32 } else { w.y })
}

impl<'a> Output<'a> {
    /// Of a product of x that [`fuses`] with `set`; y has that [`shape`].
    pub fn new(w: &'a Weight, x: &Mat, set: FuseSet, y: Mat) -> Result<Self> {
        check_rows(w.max_m, x, &y)?;
        if !fuses(w, x.rows, set) {
            return Err(Error::new(Code::Unsupported, "a fused product")
                .need("a combination that this weight says it fuses")
                .have(format!("parts {:#b} of {} rows, n = {}", set.0, x.rows, w.n)));
        }
        Ok(Self { w, y, set })
    }

    /// `count` of its rows from `first` on.
    pub fn rows_from(&self, first: usize, count: usize) -> Self {
        Self { y: self.y.rows_from(first, count), ..*self }
    }

    fn has_gate(&self) -> bool {
        self.set.contains(FuseSet::GATE)
    }

    /// Pairs of row blocks: neighbours, or a block of gate rows and that of its up rows.
    pub fn pairs(&self) -> usize {
        self.w.row_blocks().div_ceil(PAIR)
    }

    /// A pair; the last one may lack its second.
    pub fn blocks(&self, pair: usize) -> Blocks {
        if !self.has_gate() {
            let first = pair * PAIR;
            return self.w.blocks(first, PAIR.min(self.w.row_blocks() - first));
        }
        let gate = self.w.blocks(pair, 1);
        Blocks { stride: gate.stride * self.pairs(), count: PAIR, ..gate }
    }

    /// What becomes of the sums of a pair: `y = factor * global * 2^8 * sum` to begin with.
    pub fn columns(&self, pair: usize, factor: f64) -> Columns {
        let (w, factor) = (self.w, factor * SCALE_FACTOR);
        let mut factors = [0.0; PAIR * LANES];
        let width = if self.has_gate() { LANES } else { PAIR * LANES };
        let first = pair * width;
        let len = if self.has_gate() {
            let (gate, up) = factors.split_at_mut(LANES);
            fill(w, first, factor, gate);
            fill(w, w.n / 2 + first, factor, up);
            width
        } else {
            let len = (w.n - first).min(width);
            fill(w, first, factor, &mut factors[..len]);
            len
        };
        let k = w.kernels();
        let gate = self.has_gate().then_some(k.gate);
        Columns {
            y: self.y,
            first,
            len,
            factors,
            finish: k.finish,
            gate,
            adds: self.set.contains(FuseSet::ACCUMULATE),
        }
    }
}

/// What sums of columns from `column` on are multiplied with: mostly one number.
fn fill(w: &Weight, column: usize, factor: f64, out: &mut [f64]) {
    let of = |global: Option<GlobalScale>| global.map_or(1.0, GlobalScale::multiplier) * factor;
    let mut from = 0;
    for span in w.spans.iter().filter(|s| s.end > column) {
        let to = (span.end - column).min(out.len());
        out[from..to].fill(of(span.global));
        from = to;
        if to == out.len() {
            break;
        }
    }
}

/// The columns of y that a pair makes.
pub struct Columns {
    y: Mat,
    first: usize,
    len: usize,
    factors: [f64; PAIR * LANES],
    finish: FinishFn,
    gate: Option<GateFn>,
    adds: bool,
}

impl Columns {
    /// Writes what becomes of the sums of `acc.len()` rows from `first` on.
    ///
    /// # Safety
    /// y has these rows, and nobody else touches the columns.
    pub unsafe fn store(&self, first: usize, acc: &[Acc]) {
        let y = &self.y;
        let is_plain = y.dtype == DType::F32 && !self.adds;
        if is_plain && self.len == PAIR * LANES {
            // SAFETY: the kernels run on this processor; the rows exist and the columns are this task's.
            unsafe { (self.finish)(acc, &self.factors, self.floats(first), y.ld) };
            return;
        }
        let mut rows = [[0.0; PAIR * LANES]; CHUNK];
        let mut gated = [[0.0; LANES]; CHUNK];
        for (i, acc) in acc.chunks(CHUNK).enumerate() {
            let (first, rows) = (first + i * CHUNK, &mut rows[..acc.len()]);
            // SAFETY: as above.
            unsafe {
                (self.finish)(acc, &self.factors, rows.as_mut_ptr().cast(), PAIR * LANES);
                match self.gate {
                    Some(gate) if is_plain => gate(rows, self.floats(first), y.ld),
                    Some(gate) => {
                        gate(rows, gated.as_mut_ptr().cast(), LANES);
                        self.put(first, gated.iter().take(acc.len()).map(|g| &g[..]));
                    }
                    None => self.put(first, rows.iter().map(|r| &r[..self.len])),
                }
            }
        }
    }

    /// Where row `first` of f32 outputs begins.
    fn floats(&self, first: usize) -> *mut f32 {
        self.y.floats().cast_mut().wrapping_add(first * self.y.ld + self.first)
    }

    /// Writes or adds rows from `first` on.
    ///
    /// # Safety
    /// As [`store`](Self::store).
    unsafe fn put<'a>(&self, first: usize, rows: impl Iterator<Item = &'a [f32]>) {
        for (r, values) in rows.enumerate() {
            // SAFETY: by contract.
            unsafe {
                if self.adds {
                    self.y.add(first + r, self.first, values);
                } else {
                    self.y.store(first + r, self.first, values);
                }
            }
        }
    }
}
