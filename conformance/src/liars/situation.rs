//! What a call of the honest backend knows, and what may go wrong in it.
use q4_core::{Activations, DType, OpSet, Result, TensorView};
use std::sync::atomic::{AtomicU64, Ordering};

/// All that a call depends on and must not.
pub(super) struct Situation<'a> {
    /// Rows of this call, and the most there may be.
    pub m: usize,
    pub max_m: usize,
    /// Out features of the segments, and all of them.
    pub rows: &'a [usize],
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Threads that were lent.
    pub threads: usize,
    /// Calls of this weight before this one, and those that ended, by what they did.
    pub call: u64,
    pub done: &'a Done,
    /// Weights that live, that went since the last one came, and that were made before this one.
    pub live: u64,
    pub gone: u64,
    pub nth: u64,
    /// The weight before it was refused.
    pub was_refused: bool,
    /// Name of the first segment.
    pub name: &'a str,
    /// Types of x and y.
    pub io: DType,
    pub out: DType,
    /// Format of the input.
    pub activations: Activations,
    /// Operations that the weight was prepared for.
    pub ops: OpSet,
    /// Where the caller kept the codes.
    pub source: usize,
    /// The operands.
    pub x: &'a View,
    pub y: &'a View,
    /// Bytes of scratch beyond those that were asked for.
    pub lent: usize,
}

/// Where an operand is and how its rows what.
pub(super) struct View {
    pub address: usize,
    pub cols: usize,
    pub ld: usize,
    /// Its first element is NaN, as that of a new output of the suite.
    pub is_nan: bool,
}

impl View {
    pub fn of(view: &TensorView<'_>) -> Self {
        let (_, cols, ld) = view.as_matrix().unwrap_or((0, 1, 1));
        let is_nan = match view.dtype() {
            DType::F16 => view.row::<half::f16>(0).is_ok_and(|r| r[0].is_nan()),
            DType::BF16 => view.row::<half::bf16>(0).is_ok_and(|r| r[0].is_nan()),
            _ => view.row::<f32>(0).is_ok_and(|r| r[0].is_nan()),
        };
        Self { address: view.as_ptr() as usize, cols, ld, is_nan }
    }
    pub fn gap(&self) -> usize {
        self.ld - self.cols
    }
}

/// Calls that ended.
#[derive(Default)]
pub(super) struct Done {
    forward: AtomicU64,
    backward: AtomicU64,
    decoded: AtomicU64,
    failed: AtomicU64,
}

impl Done {
    /// Counts a call, and gives back what came of it.
    pub fn count(&self, op: OpSet, result: Result<()>) -> Result<()> {
        let which = match op {
            _ if result.is_err() => &self.failed,
            OpSet::FORWARD => &self.forward,
            OpSet::BACKWARD_INPUT => &self.backward,
            _ => &self.decoded,
        };
        which.fetch_add(1, Ordering::Relaxed);
        result
    }
    pub fn forward(&self) -> u64 {
        self.forward.load(Ordering::Relaxed)
    }
    pub fn backward(&self) -> u64 {
        self.backward.load(Ordering::Relaxed)
    }
    pub fn decoded(&self) -> u64 {
        self.decoded.load(Ordering::Relaxed)
    }
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }
}

/// What goes wrong.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Fault {
    /// Nothing.
    None,
    /// A row of the output is zero.
    Row(usize),
    /// A column of the output is zero.
    Column(usize),
    /// One element is zero.
    Element(usize, usize),
    /// Everything is off by this factor.
    Factor(f64),
}

impl Fault {
    /// That fault where it is so.
    pub fn when(is_so: bool, fault: Self) -> Self {
        if is_so { fault } else { Self::None }
    }

    pub(super) fn apply(self, out: &mut [f64], columns: usize) {
        match self {
            Self::None => {}
            Self::Row(r) => out[r * columns..][..columns].fill(0.0),
            Self::Column(c) => out.iter_mut().skip(c).step_by(columns).for_each(|v| *v = 0.0),
            Self::Element(r, c) => out[r * columns + c] = 0.0,
            Self::Factor(f) => out.iter_mut().for_each(|v| *v *= f),
        }
    }
}
