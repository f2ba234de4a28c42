//! Launches of products of a few rows with packed weights (`few.cuh`): which kernel, how many blocks, how
//! much shared memory.
use crate::{Gpu, Kernel, Kernels, Launch, Matrix, Mirror, mirror};
use Width::{Few, FewSplit, One, Wide, WideSplit};
use q4_core::Result;

/// Rows of the largest launch.
pub const FEW_ROWS: usize = 16;
/// Units a warp has in flight.
pub const FEW_STAGES: usize = 3;
/// Bytes of 16 rows by 128 k of a weight of four bits: codes and scales.
pub const UNIT: usize = 1152;
const THREADS: usize = 512;
const WARPS: usize = THREADS / 32;

/// The kernels there may be, by the rows they take. Those that split are of clusters of blocks, which share
/// row groups and divide k: where the rows of x are too much for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// One.
    One,
    /// Up to eight.
    Few,
    /// Up to sixteen.
    Wide,
    /// The same by clusters.
    WideSplit,
    /// Up to eight by clusters.
    FewSplit,
}

impl Width {
    /// Those on a device with or without clusters, with or without the last one.
    fn there(clusters: bool, few_split: bool) -> &'static [Self] {
        &[One, Few, Wide, WideSplit, FewSplit]
            [..3 + usize::from(clusters) + usize::from(clusters && few_split)]
    }

    /// Columns of sums of a block, and blocks of a cluster.
    fn shape(self) -> (usize, usize) {
        [(1, 1), (8, 1), (16, 1), (16, 4), (8, 4)][self as usize]
    }
}

impl Kernels {
    /// Those that the device has, by [`Width`]; `few_split`: and the source.
    pub fn widths<A: Mirror>(
        &self,
        few_split: bool,
        name: impl Fn(Width) -> String,
    ) -> Result<[Option<Kernel<A>>; 5]> {
        let mut all = [const { None }; 5];
        for width in Width::there(self.gpu().arch.clusters, few_split) {
            all[*width as usize] = Some(self.get_with(&name(*width), self.gpu().shared)?);
        }
        Ok(all)
    }
}

/// What of a device decides.
#[derive(Clone, Copy, Debug)]
pub struct Chip {
    /// Multiprocessors.
    pub processors: usize,
    /// Bytes of shared memory a block may ask for.
    pub shared: usize,
    /// Whether blocks form clusters.
    pub clusters: bool,
}

impl Chip {
    /// Bytes of shared memory of which no two blocks have room on a multiprocessor: one that the kernel
    /// before leaves early would get two blocks, and the launch take twice as long.
    pub fn alone(&self) -> usize {
        self.shared / 2 + 2048
    }
}

impl From<&Gpu> for Chip {
    fn from(gpu: &Gpu) -> Self {
        let (processors, shared) = (gpu.processors as usize, gpu.shared as usize);
        Self { processors, shared, clusters: gpu.arch.clusters }
    }
}

/// Products with a weight, of a few rows.
#[derive(Clone, Debug)]
pub struct FewRows {
    /// Where.
    pub on: Chip,
    /// Whether there is [`Width::FewSplit`].
    pub few_split: bool,
    /// Row groups of the weight.
    pub groups: usize,
    /// Units of a row group.
    pub units: usize,
    /// Bytes of a unit.
    pub unit: usize,
    /// Columns of the weight.
    pub k: usize,
    /// Groups go in pairs, of gate and of up rows.
    pub gate: bool,
    /// Parts of bf16 that an element of x becomes: of one row, of several.
    pub parts: [usize; 2],
    /// Bytes that a block keeps beside all else: with one row, with several.
    pub beside: [usize; 2],
    /// And for each row group.
    pub per_group: usize,
}

/// A launch: of any stream, overlapping.
#[derive(Clone, Copy, Debug)]
pub struct FewPlan {
    /// How.
    pub how: Launch,
    /// Row groups, or pairs of them with a gate.
    pub work: usize,
    /// Blocks, or clusters, that share them.
    pub teams: usize,
}

impl FewRows {
    /// Row groups that go together.
    pub fn both(&self) -> usize {
        if self.gate { 2 } else { 1 }
    }

    /// A launch of `rows` rows, a power of two; `None` if no number of blocks makes it fit.
    pub fn plan(&self, rows: usize) -> Option<(Width, FewPlan)> {
        let order = match rows {
            1 => [One, FewSplit],
            2..=8 => [Few, FewSplit],
            // Long rows of x are worth the clusters' barriers.
            _ if self.k >= 4096 => [WideSplit, Wide],
            _ => [Wide, WideSplit],
        };
        let there = Width::there(self.on.clusters, self.few_split);
        let plan = |width: Width| Some((width, self.plan_of(rows, width.shape())?));
        order.into_iter().filter(|width| there.contains(width)).find_map(plan)
    }

    fn plan_of(&self, rows: usize, (columns, split): (usize, usize)) -> Option<FewPlan> {
        let (slice, work) = (self.units.div_ceil(split), self.groups / self.both());
        if self.units < split {
            return None;
        }
        let several = usize::from(rows > 1);
        let x = self.parts[several] * rows * (slice * 128 + 8) * 2;
        let fixed = WARPS * FEW_STAGES * self.unit + x + self.beside[several] + 2 * WARPS * 4;
        let Chip { processors, shared: room, .. } = self.on;
        // Some processors have no place in a cluster.
        let most = if split > 1 { processors / split * 15 / 16 } else { processors };
        let mut teams = work.min(most.max(1));
        loop {
            let groups = work.div_ceil(teams) * self.both();
            let whole = if split > 1 { groups } else { 0 };
            let shared = fixed + groups * self.per_group + (groups + 1 + WARPS + whole) * 64 * columns;
            // Quotients of units are taken in f32.
            if shared <= room && groups * slice < 1 << 17 {
                let shared = shared.max(self.on.alone());
                let how = Launch::overlapping([teams * split, 1, 1], THREADS as u32, shared as u32, 0);
                return Some(FewPlan { how, work, teams });
            }
            if teams == work {
                return None;
            }
            teams = work.min(2 * teams);
        }
    }

    /// Most rows of a launch of a call of `m`, a power of two.
    pub fn rows(&self, m: usize) -> Option<usize> {
        let enough = m.next_power_of_two();
        [16, 8, 4, 2, 1].into_iter().filter(|r| *r <= enough).find(|r| self.plan(*r).is_some())
    }
}

impl FewPlan {
    /// Row groups (or pairs) of a block, how many blocks have one more, and with a gate the first up group.
    pub fn deal(&self, gate: bool) -> [u32; 3] {
        let Self { work, teams, .. } = *self;
        [work / teams, work % teams, if gate { work } else { 0 }].map(|n| n as u32)
    }
}

mirror! {
    /// Of kernels that copy rows to where products can read them 16 bytes at a time.
    pub struct Align { from: u64, ld: u64, k: u32, size: u32, to: u64 }
}

impl Kernel<Align> {
    /// Rows of x to `to`, close together.
    ///
    /// # Safety
    /// x is device memory, `to` has room for it.
    pub unsafe fn copy(&self, x: Matrix, to: u64, stream: usize) -> Result<()> {
        let how = Launch::overlapping([x.cols.div_ceil(256) as usize, x.rows as usize, 1], 256, 0, stream);
        // SAFETY: by contract.
        unsafe { self.launch(how, Align { from: x.data, ld: x.ld, k: x.cols, size: x.size() as u32, to }) }
    }
}
