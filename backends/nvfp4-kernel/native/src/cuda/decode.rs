//! Launchers of `cuda/gemv.cu` and `cuda/row.cu`: products of a few rows, with any fusion, as one kernel.
use super::forward::{Call, Fast};
use super::simple::matrix;
use super::{FILES, Weight};
use crate::call::Mat;
use q4_core::{ActGlobal, Activations, Code, DType, Error, FuseSet, Result};
use q4_cuda::{Gpu, Kernel, Launch, RowKernels, Source, mirror, number};
use std::sync::{Arc, Once, OnceLock};

/// Activation formats as `gemv.cu` counts them.
const ACT_NATIVE: u32 = 1;
const ACT_INT8: u32 = 2;
const ACT_NVFP4: u32 = 3;

pub(super) const GEMV: Source =
    Source { name: "nvfp4-gemv", text: include_str!("../../cuda/gemv.cu"), files: FILES };
/// An image of its own: the two compile side by side.
pub(super) const ROW: Source =
    Source { name: "nvfp4-row", text: include_str!("../../cuda/row.cu"), files: FILES };
/// Longest row that `row.cu` stages with a norm, and without.
const LONGEST: [usize; 2] = [8192, 16384];
/// Rows of the largest call.
const MOST: usize = 16;
/// Blocks of a cluster that share row groups and split k, where sixteen rows of x are too much for one.
const SPLIT: usize = 4;
/// Bytes of 16 rows by 128 k of a weight.
const UNIT: usize = 1152;
const THREADS: usize = 512;
/// Threads of [`Rows::Narrow`], and from how many units a block on it is slower.
const NARROW: usize = 384;
const MANY: usize = 192;
const WARPS: usize = THREADS / 32;
/// Units a warp has in flight.
const STAGES: usize = 3;

mirror! {
    /// `Gemv` of gemv.cu.
    struct Gemv {
        w: u64, groups: u64, x: u64, y: u64, norm: u64, act_global: u64, ldx: u64, ldy: u64,
        m: u32, k: u32, units: u32, each: u32, extra: u32, gate_at: u32, x_dtype: u32, y_dtype: u32,
        accumulate: u32, act: u32, rule: u32, convention: u32, eps: f32, global: f32, late: u32,
    }
    struct Product { p: Gemv }
    struct Align { from: u64, ld: u64, k: u32, size: u32, to: u64 }
}

/// What x is: kernels of its own, compiled when a product first needs them.
struct Family {
    name: &'static str,
    /// Parts of bf16 an element of x becomes: one row, several.
    parts: [usize; 2],
    /// The kernel for one row keeps the scales of x apart.
    apart: bool,
}

/// Native bf16, f16, f32; int8; nvfp4. `Q4_FAMILY` of gemv.cu is the place.
const FAMILIES: [Family; 5] = [
    Family { name: "", parts: [1, 1], apart: false },
    Family { name: "_f16", parts: [2, 2], apart: false },
    Family { name: "_f32", parts: [3, 3], apart: false },
    Family { name: "_int8", parts: [1, 3], apart: true },
    Family { name: "_nvfp4", parts: [1, 1], apart: false },
];

/// A family's kernels.
#[derive(Clone, Copy)]
enum Rows {
    One,
    /// Up to eight.
    Few,
    /// Up to sixteen.
    Wide,
    /// The same by clusters, where the device has them.
    Split,
    /// One, of one part and not too long.
    Row,
    /// The same by fewer warps, each with more units in flight: native bf16, where a block has few units.
    Narrow,
}

/// By [`Rows`].
struct Loaded {
    rows: [Option<Kernel<Product>>; 6],
    align: Kernel<Align>,
}

/// Those of every family that a product needed, or will.
struct Families {
    gpu: Arc<Gpu>,
    loaded: [OnceLock<Loaded>; FAMILIES.len()],
    expected: [Once; FAMILIES.len()],
}

/// Kernels for calls of a few rows.
pub struct Kernels {
    gpu: Arc<Gpu>,
    families: Arc<Families>,
    quantise: RowKernels,
}

impl Families {
    /// Compiles or finds a family's kernels.
    fn get(&self, family: usize) -> Result<&Loaded> {
        if let Some(loaded) = self.loaded[family].get() {
            return Ok(loaded);
        }
        let options = options(family);
        let options = options.each_ref().map(String::as_str);
        let Family { name, parts, .. } = FAMILIES[family];
        let (all, rows) = std::thread::scope(|scope| {
            let rows =
                (parts[0] == 1).then(|| scope.spawn(|| q4_cuda::Kernels::load(&self.gpu, &ROW, &options)));
            let all = q4_cuda::Kernels::load(&self.gpu, &GEMV, &options[..3]);
            (all, rows.map(|r| r.join().map_err(|_| Error::new(Code::Internal, "loading kernels"))))
        });
        let (all, rows) = (all?, rows.transpose()?.transpose()?);
        let get = |from: &q4_cuda::Kernels, name: String| {
            let kernel = from.get(&name)?;
            kernel.allow_shared(self.gpu.shared)?;
            Ok::<_, Error>(kernel)
        };
        let one = Some(get(&all, format!("q4_gemv_one{name}"))?);
        let few = Some(get(&all, format!("q4_gemv_few{name}"))?);
        let wide = Some(get(&all, format!("q4_gemv_few{name}_wide"))?);
        let split =
            self.gpu.arch.clusters.then(|| get(&all, format!("q4_gemv_few{name}_split"))).transpose()?;
        let row = rows.as_ref().map(|r| get(r, format!("q4_row{name}"))).transpose()?;
        let narrow =
            rows.as_ref().filter(|_| family == 0).map(|r| get(r, "q4_row_narrow".into())).transpose()?;
        let loaded = Loaded { rows: [one, few, wide, split, row, narrow], align: all.get("q4_gemv_align")? };
        Ok(self.loaded[family].get_or_init(|| loaded))
    }
}

/// A launch: the kernel, threads of a block, its blocks (or clusters), how many row groups (or pairs of them)
/// they share, bytes of shared memory.
struct Plan {
    kernel: Rows,
    threads: usize,
    teams: usize,
    split: usize,
    work: usize,
    shared: usize,
}

impl Kernels {
    /// Fails where not even the first family could be had.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        q4_cuda::Kernels::available(gpu, &GEMV, &options(0).each_ref().map(String::as_str)[..3])?;
        q4_cuda::Kernels::available(gpu, &ROW, &options(0).each_ref().map(String::as_str))?;
        let families = Families {
            gpu: gpu.clone(),
            loaded: Default::default(),
            expected: [const { Once::new() }; FAMILIES.len()],
        };
        Ok(Self { gpu: gpu.clone(), families: families.into(), quantise: RowKernels::load(gpu)? })
    }

    /// The place in [`FAMILIES`] of a product with `w`.
    fn family(w: &Weight) -> usize {
        match (w.activations, w.x) {
            (Activations::Nvfp4(_), _) => 4,
            (Activations::Int8, _) => 3,
            (_, DType::BF16) => 0,
            (_, DType::F16) => 1,
            _ => 2,
        }
    }

    /// A launch of `rows` rows, a power of two; `None` if no number of blocks makes it fit.
    fn plan(&self, w: &Weight, rows: usize, gate: bool) -> Option<Plan> {
        match rows {
            1 => self.plan_of(w, rows, gate, Rows::One, 1, 1),
            2..=8 => self.plan_of(w, rows, gate, Rows::Few, 8, 1),
            _ => {
                let wide = || self.plan_of(w, rows, gate, Rows::Wide, 16, 1);
                let split =
                    || self.plan_of(w, rows, gate, Rows::Split, 16, SPLIT).filter(|_| self.gpu.arch.clusters);
                // Long rows of x are worth the clusters' barriers.
                if w.k >= 4096 { split().or_else(wide) } else { wide().or_else(split) }
            }
        }
    }

    /// A launch of `row.cu`, which takes one row if it can be staged at once.
    fn row(&self, w: &Weight, rows: usize, norm: bool, gate: bool, x: DType) -> Option<Plan> {
        let place = Self::family(w);
        let family = &FAMILIES[place];
        let staged = w.k <= LONGEST[usize::from(!norm)] && (norm || x != DType::F32);
        if rows != 1 || family.parts[0] != 1 || !staged {
            return None;
        }
        let (units, both) = (w.slabs / 2, if gate { 2 } else { 1 });
        let work = w.padded / 16 / both;
        let teams = work.min(self.gpu.processors as usize).max(1);
        let groups = work.div_ceil(teams) * both;
        let (kernel, threads) = match place == 0 && groups * units < MANY {
            true => (Rows::Narrow, NARROW),
            false => (Rows::Row, THREADS),
        };
        let scales = if family.apart { units * 32 } else { 0 };
        let shared = units * 256 + 16 + scales + threads / 8 + (groups + 1 + threads / 32) * 64;
        // Quotients of units are taken in f32.
        let fits = shared <= self.gpu.shared as usize && groups * units < 1 << 17;
        fits.then_some(Plan { kernel, threads, teams, split: 1, work, shared })
    }

    fn plan_of(
        &self,
        w: &Weight,
        rows: usize,
        gate: bool,
        kernel: Rows,
        columns: usize,
        split: usize,
    ) -> Option<Plan> {
        let family = &FAMILIES[Self::family(w)];
        let (units, both) = (w.slabs / 2, if gate { 2 } else { 1 });
        let (slice, work) = (units.div_ceil(split), w.padded / 16 / both);
        if units < split {
            return None;
        }
        let x = family.parts[usize::from(rows > 1)] * rows * (slice * 128 + 8) * 2;
        let scales = if family.apart && rows == 1 { slice * 32 } else { 0 };
        let fixed = WARPS * STAGES * UNIT + x + scales + 2 * WARPS * 4;
        // Some processors have no place in a cluster.
        let most = if split > 1 {
            self.gpu.processors as usize / split * 15 / 16
        } else {
            self.gpu.processors as usize
        };
        let mut teams = work.min(most.max(1));
        loop {
            let groups = work.div_ceil(teams) * both;
            let whole = if split > 1 { groups } else { 0 };
            let shared = fixed + groups * 8 + (groups + 1 + WARPS + whole) * 64 * columns;
            // Quotients of units are taken in f32.
            if shared <= self.gpu.shared as usize && groups * slice < 1 << 17 {
                // More than half, or a processor that the kernel before leaves early gets two blocks and the
                // launch takes twice as long.
                let shared = shared.max(self.gpu.shared as usize / 2 + 2048);
                return Some(Plan { kernel, threads: THREADS, teams, split, work, shared });
            }
            if teams == work {
                return None;
            }
            teams = work.min(2 * teams);
        }
    }

    /// Most rows of a launch, a power of two.
    fn rows(&self, w: &Weight, m: usize, gate: bool) -> Option<usize> {
        let enough = m.next_power_of_two();
        [16, 8, 4, 2, 1].into_iter().filter(|r| *r <= enough).find(|r| self.plan(w, *r, gate).is_some())
    }
}

/// What the compiler is told for a family; the last for [`ROW`] alone.
pub(super) fn options(family: usize) -> [String; 4] {
    [
        format!("-DQ4_STAGES={STAGES}"),
        format!("-DQ4_STAGES_FEW={STAGES}"),
        format!("-DQ4_FAMILY={family}"),
        "-DQ4_ROW".into(),
    ]
}

/// Whether rows of `x` can be read 16 bytes at a time.
fn is_aligned(x: &Mat) -> bool {
    x.address() % 16 == 0 && (x.rows == 1 || x.ld * x.dtype.size() % 16 == 0)
}

impl Fast for Kernels {
    /// Every model decodes: its kernels compile while weights are still prepared.
    fn expect(&self, w: &Weight) {
        let family = Self::family(w);
        if self.takes(w, 1, FuseSet::NONE) {
            let families = self.families.clone();
            self.families.expected[family].call_once(|| q4_cuda::ahead(move || drop(families.get(family))));
        }
    }

    fn takes(&self, w: &Weight, m: usize, set: FuseSet) -> bool {
        let gate = set.contains(FuseSet::GATE);
        let per_call = matches!(w.activations, Activations::Nvfp4(a) if a.global == ActGlobal::PerCall);
        m <= MOST
            && !(gate && !(w.is_plain() && w.n % 32 == 0))
            // That scale is of the rows after the norm.
            && !(per_call && set.contains(FuseSet::NORM))
            && self.rows(w, m, gate).is_some()
    }

    /// The per-tensor scale of x, then room for aligned copies of the norm's weight and of x.
    fn workspace(&self, w: &Weight, m: usize) -> usize {
        if m <= MOST { 256 + (m + 1) * w.k * 4 } else { 0 }
    }

    unsafe fn forward(&self, w: &Weight, call: &Call) -> Result<()> {
        let gate = call.fuse.gate;
        let kernels = self.families.get(Self::family(w))?;
        let mut x = call.x;
        let (mut norm, eps) = call.fuse.norm.unwrap_or((0, 0.0));
        let copied;
        let (mut act, mut rule, mut convention, mut global, mut act_global) = (ACT_NATIVE, 0, 0, 1.0f32, 0);
        // SAFETY: forwarded; the workspace has the size that was asked for.
        unsafe {
            match w.activations {
                Activations::Native => {}
                Activations::Int8 => act = ACT_INT8,
                Activations::Nvfp4(a) => {
                    (act, rule) = (ACT_NVFP4, q4_cuda::rule(a.rule));
                    match a.global {
                        ActGlobal::None => {}
                        ActGlobal::Static(g) => {
                            (convention, global) = (q4_cuda::convention(a.rule), g.value())
                        }
                        ActGlobal::PerCall => {
                            self.quantise.scale(matrix(&x), &a, w.x, call.workspace, call.stream)?;
                            (convention, act_global) = (q4_cuda::convention(a.rule), call.workspace);
                        }
                    }
                }
            }
            let copy = |from: u64, rows: usize, ld: usize, size: usize, to: u64| {
                let how = Launch::overlapping([w.k.div_ceil(256), rows, 1], 256, 0, call.stream);
                kernels.align.launch(how, Align { from, ld: ld as u64, k: w.k as u32, size: size as u32, to })
            };
            // A product reads its norm's weight before it waits for the kernel ahead, unless that one writes
            // it.
            copied = norm % 16 != 0;
            if copied {
                let to = call.workspace + 256;
                copy(norm, 1, w.k, 4, to)?;
                norm = to;
            }
            if !is_aligned(&x) {
                let to = call.workspace + 256 + 4 * w.k as u64;
                copy(x.address(), x.rows, x.ld, x.dtype.size(), to)?;
                x = x.moved(to, w.k);
            }
        }
        let most = self.rows(w, x.rows, gate).unwrap_or(1);
        for first in (0..x.rows).step_by(most) {
            let rows = most.min(x.rows - first);
            let (xs, ys) = (x.rows_from(first, rows), call.y.rows_from(first, rows));
            let row = self.row(w, rows, norm != 0, gate, x.dtype);
            let plan = row.or_else(|| self.plan(w, rows.next_power_of_two(), gate));
            let plan =
                plan.ok_or_else(|| Error::new(Code::Internal, format!("no launch for {rows} rows")))?;
            let gemv = Gemv {
                w: w.codes,
                groups: w.groups,
                x: xs.address(),
                y: ys.address(),
                norm,
                act_global,
                ldx: xs.ld as u64,
                ldy: ys.ld as u64,
                m: rows as u32,
                k: w.k as u32,
                units: (w.slabs / 2) as u32,
                each: (plan.work / plan.teams) as u32,
                extra: (plan.work % plan.teams) as u32,
                gate_at: if gate { plan.work as u32 } else { 0 },
                x_dtype: number(w.x),
                y_dtype: number(ys.dtype),
                accumulate: call.fuse.accumulate.into(),
                act,
                rule,
                convention,
                eps,
                global,
                late: 0,
            };
            let how = Launch {
                grid: [(plan.teams * plan.split) as u32, 1, 1],
                block: [plan.threads as u32, 1, 1],
                shared: plan.shared as u32,
                stream: call.stream,
                overlap: !copied,
            };
            let kernel = kernels.rows[plan.kernel as usize].as_ref();
            let kernel =
                kernel.ok_or_else(|| Error::new(Code::Internal, "clusters the device does not have"))?;
            // SAFETY: forwarded.
            unsafe { kernel.launch(how, Product { p: gemv })? };
        }
        Ok(())
    }
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    for Family { name, parts, .. } in &FAMILIES {
        for kernel in ["one", "few"] {
            GEMV.takes::<Product>(&format!("q4_gemv_{kernel}{name}"))?;
        }
        for width in ["wide", "split"] {
            GEMV.takes::<Product>(&format!("q4_gemv_few{name}_{width}"))?;
        }
        if parts[0] == 1 {
            ROW.takes::<Product>(&format!("q4_row{name}"))?;
        }
    }
    ROW.takes::<Product>("q4_row_narrow")?;
    GEMV.takes::<Align>("q4_gemv_align")
}

#[test]
fn every_family_compiles() -> Result<()> {
    if let Err(why) = q4_cuda::libraries().nvrtc.version() {
        println!("skipped: {why}");
        return Ok(());
    }
    for (place, family) in FAMILIES.iter().enumerate() {
        let options = options(place);
        let options = options.each_ref().map(String::as_str);
        GEMV.compile(&q4_cuda::HOPPER, &options[..3])?;
        if family.parts[0] == 1 {
            ROW.compile(&q4_cuda::HOPPER, &options)?;
        }
    }
    Ok(())
}
