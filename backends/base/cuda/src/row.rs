//! Launches of products with one row of x that keep packed weights in registers (`row.cuh`).
use crate::{FewPlan, FewRows, Launch};
use q4_core::DType;

/// Longest row that is staged at once with a norm, and without.
const LONGEST: [usize; 2] = [8192, 16384];
/// A block of so many units is for [`RowWidth::Full`].
const MANY: usize = 192;

/// The kernels there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowWidth {
    /// Blocks of 512 threads.
    Full,
    /// Of 384, each with more units in flight: faster for blocks of few units.
    Narrow,
}

impl RowWidth {
    /// Threads of a block.
    pub fn threads(self) -> usize {
        [512, 384][self as usize]
    }
}

impl FewRows {
    /// A launch for one row of x of a type (with a norm of that behind it), one part of bf16; `None` unless
    /// it can be staged at once. `narrow`: there is [`RowWidth::Narrow`].
    pub fn row(&self, norm: bool, x: DType, narrow: bool) -> Option<(RowWidth, FewPlan)> {
        let staged = self.k <= LONGEST[usize::from(!norm)] && (norm || x != DType::F32);
        if self.parts[0] != 1 || !staged {
            return None;
        }
        let work = self.groups / self.both();
        let teams = work.min(self.on.processors).max(1);
        let groups = work.div_ceil(teams) * self.both();
        let width = if narrow && groups * self.units < MANY { RowWidth::Narrow } else { RowWidth::Full };
        let threads = width.threads();
        let shared = self.units * 256 + 16 + self.beside[0] + threads / 8 + (groups + 1 + threads / 32) * 64;
        // Quotients of units are taken in f32.
        let fits = shared <= self.on.shared && groups * self.units < 1 << 17;
        let how = Launch::overlapping([teams, 1, 1], threads as u32, shared as u32, 0);
        fits.then_some((width, FewPlan { how, work, teams }))
    }
}
