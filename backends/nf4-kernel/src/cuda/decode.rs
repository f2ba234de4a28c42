//! Launchers of `cuda/gemv.cu`: products of a few rows, with any fusion, as one kernel.
use super::{Call, FILES, Packed};
use q4_core::{Code, Error, FuseSet, Result};
use q4_cuda::{Gpu, Kernel, Kernels as Module, Launch, Source, mirror};
use std::sync::Arc;

const SOURCE: Source = Source { name: "nf4-gemv", text: include_str!("../../cuda/gemv.cu"), files: FILES };
/// Rows of the largest launch.
pub const MOST: usize = 16;
/// Blocks of a cluster that share row groups and split k, where the rows of x are too much for one.
const SPLIT: usize = 4;
const THREADS: usize = 512;
const WARPS: usize = THREADS / 32;
/// Bytes of the table, of 16 rows by 128 k of a weight, and units a warp has in flight; as in the source.
const TABLE: usize = 32_768;
const UNIT: usize = super::UNIT;
const STAGES: usize = 3;

mirror! {
    /// `Gemv` of gemv.cu.
    struct Gemv {
        w: u64, x: u64, y: u64, norm: u64, ldx: u64, ldy: u64, m: u32, n: u32, k: u32, units: u32,
        each: u32, extra: u32, gate_at: u32, x_dtype: u32, y_dtype: u32, accumulate: u32, eps: f32, unused: u32,
    }
    struct Product { p: Gemv }
    struct Align { from: u64, ld: u64, k: u32, size: u32, to: u64 }
}

/// Kernels for one type of x: one row, up to eight, up to sixteen; the last two also by clusters, where the
/// device has them.
struct Family {
    one: Kernel<Product>,
    few: Kernel<Product>,
    wide: Kernel<Product>,
    split: Option<[Kernel<Product>; 2]>,
    /// Parts of bf16 an element of x becomes.
    parts: usize,
}

/// Kernels for calls of a few rows.
pub struct Kernels {
    gpu: Arc<Gpu>,
    /// f32, f16, bf16.
    families: [Family; 3],
    align: Kernel<Align>,
}

/// A launch: the kernel, its blocks (or clusters), how many row groups (or pairs of them) they share, bytes
/// of shared memory.
struct Plan<'a> {
    kernel: &'a Kernel<Product>,
    teams: usize,
    split: usize,
    work: usize,
    shared: usize,
}

impl Kernels {
    /// Compiles or finds them.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let all = Module::load(gpu, &SOURCE, &[])?;
        let get = |name: String| {
            let kernel = all.get(&name)?;
            kernel.allow_shared(gpu.shared)?;
            Ok::<_, Error>(kernel)
        };
        let family = |x: &str, parts| {
            let get = |kind: &str| get(format!("nf4_gemv_{x}_{kind}"));
            Ok::<_, Error>(Family {
                one: get("one")?,
                few: get("few")?,
                wide: get("wide")?,
                split: if gpu.arch.clusters { Some([get("few_split")?, get("wide_split")?]) } else { None },
                parts,
            })
        };
        Ok(Self {
            gpu: gpu.clone(),
            families: [family("f32", 3)?, family("f16", 2)?, family("bf16", 1)?],
            align: all.get("nf4_gemv_align")?,
        })
    }

    /// A launch of `rows` rows, a power of two; `None` if no number of blocks makes it fit. `dtype` is a
    /// type's number.
    fn plan(&self, w: &Packed, dtype: u32, rows: usize, gate: bool) -> Option<Plan<'_>> {
        let family = &self.families[dtype as usize - 1];
        let parts = family.parts;
        let alone = |kernel, columns| self.plan_of(w, parts, rows, gate, kernel, columns, 1);
        let split = |i: usize| {
            let kernel = &family.split.as_ref()?[i];
            self.plan_of(w, parts, rows, gate, kernel, 8 * (i + 1), SPLIT)
        };
        match rows {
            1 => alone(&family.one, 1).or_else(|| split(0)),
            2..=8 => alone(&family.few, 8).or_else(|| split(0)),
            // Long rows of x are worth the clusters' barriers.
            _ if w.k >= 4096 => split(1).or_else(|| alone(&family.wide, 16)),
            _ => alone(&family.wide, 16).or_else(|| split(1)),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn plan_of<'a>(
        &self,
        w: &Packed,
        parts: usize,
        rows: usize,
        gate: bool,
        kernel: &'a Kernel<Product>,
        columns: usize,
        split: usize,
    ) -> Option<Plan<'a>> {
        let (units, both) = (w.units as usize, if gate { 2 } else { 1 });
        let (slice, work) = (units.div_ceil(split), (w.n as usize).div_ceil(16) / both);
        if units < split {
            return None;
        }
        let x = parts * rows * (slice * 128 + 8) * 2;
        let fixed = TABLE + WARPS * STAGES * UNIT + x + 2 * WARPS * 4;
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
            let shared = fixed + (groups + 1 + WARPS + whole) * 64 * columns;
            // Quotients of units are taken in f32.
            if shared <= self.gpu.shared as usize && groups * slice < 1 << 17 {
                // More than half, or a processor that the kernel before leaves early gets two blocks and the
                // launch takes twice as long.
                let shared = shared.max(self.gpu.shared as usize / 2 + 2048);
                return Some(Plan { kernel, teams, split, work, shared });
            }
            if teams == work {
                return None;
            }
            teams = work.min(2 * teams);
        }
    }

    /// Most rows of a launch, a power of two.
    fn rows(&self, w: &Packed, dtype: u32, m: usize, gate: bool) -> Option<usize> {
        let enough = m.next_power_of_two();
        let fits = |r: &usize| self.plan(w, dtype, *r, gate).is_some();
        [16, 8, 4, 2, 1].into_iter().filter(|r| *r <= enough).find(fits)
    }

    /// Whether they take calls of `m` rows of x (`dtype` as rounded after a norm); any number without a
    /// fusion.
    pub fn takes(&self, w: &Packed, dtype: u32, m: usize, set: FuseSet) -> bool {
        let gate = set.contains(FuseSet::GATE);
        w.units > 0
            && (set == FuseSet::NONE || m <= MOST)
            && !(gate && w.n % 32 != 0)
            && self.rows(w, dtype, m.min(MOST), gate).is_some()
    }

    /// Room for aligned copies of the norm's weight and of one launch's x.
    pub fn workspace(&self, w: &Packed, m: usize) -> usize {
        if w.units == 0 { 0 } else { ((m.min(MOST) + 1) * w.k as usize * 4).next_multiple_of(256) }
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The matrices are device memory that fits the weight, and do not overlap; the workspace has the size
    /// asked for.
    pub unsafe fn forward(&self, w: &Packed, call: &Call) -> Result<()> {
        let (mut norm, k) = (call.norm.0, w.k as usize);
        let copy = |from: u64, rows: u32, ld: u64, size: u32, to: u64| {
            let how = Launch::overlapping([k.div_ceil(256), rows as usize, 1], 256, 0, call.stream);
            // SAFETY: by contract.
            unsafe { self.align.launch(how, Align { from, ld, k: w.k, size, to }) }
        };
        if norm % 16 != 0 {
            copy(norm, 1, k as u64, 4, call.workspace)?;
            norm = call.workspace;
        }
        let size = if call.x.dtype == 1 { 4 } else { 2 };
        let is_aligned = call.x.data % 16 == 0 && (call.x.rows == 1 || call.x.ld * u64::from(size) % 16 == 0);
        let m = call.x.rows as usize;
        let most = self.rows(w, call.source, m.min(MOST), call.gate).unwrap_or(1);
        for first in (0..m).step_by(most) {
            let rows = most.min(m - first);
            let (mut xs, ys) = (call.x.rows_from(first, rows), call.y.rows_from(first, rows));
            let plan = self.plan(w, call.source, rows.next_power_of_two(), call.gate);
            let plan =
                plan.ok_or_else(|| Error::new(Code::Internal, format!("no launch for {rows} rows")))?;
            if !is_aligned {
                let to = call.workspace + 4 * k as u64;
                copy(xs.data, xs.rows, xs.ld, size, to)?;
                (xs.data, xs.ld) = (to, k as u64);
            }
            let gemv = Gemv {
                w: w.codes,
                x: xs.data,
                y: ys.data,
                norm,
                ldx: xs.ld,
                ldy: ys.ld,
                m: rows as u32,
                n: w.n,
                k: w.k,
                units: w.units,
                each: (plan.work / plan.teams) as u32,
                extra: (plan.work % plan.teams) as u32,
                gate_at: if call.gate { plan.work as u32 } else { 0 },
                x_dtype: call.source,
                y_dtype: ys.dtype,
                accumulate: call.accumulate.into(),
                eps: call.norm.1,
                unused: 0,
            };
            let how = Launch {
                grid: [(plan.teams * plan.split) as u32, 1, 1],
                block: [THREADS as u32, 1, 1],
                shared: plan.shared as u32,
                stream: call.stream,
                overlap: true,
            };
            // SAFETY: by contract.
            unsafe { plan.kernel.launch(how, Product { p: gemv })? };
        }
        Ok(())
    }
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    for x in ["f32", "f16", "bf16"] {
        for kind in ["one", "few", "wide", "few_split", "wide_split"] {
            SOURCE.takes::<Product>(&format!("nf4_gemv_{x}_{kind}"))?;
        }
    }
    SOURCE.takes::<Align>("nf4_gemv_align")
}

#[test]
fn kernels_compile_for_old_devices_and_new() -> Result<()> {
    if let Err(why) = q4_cuda::libraries().nvrtc.version() {
        println!("skipped: {why}");
        return Ok(());
    }
    for arch in q4_cuda::Arch::majors() {
        SOURCE.compile(&arch, &[])?;
        super::simple::SOURCE.compile(&arch, &[])?;
    }
    Ok(())
}
