//! Launchers of `cuda/gemv.cu` and `cuda/row.cu`: products of a few rows, with any fusion, as one kernel.
use super::forward::{Call, Fast};
use super::simple::matrix;
use super::{FILES, Weight};
use crate::probe::refused;
use q4_core::{ActGlobal, Activations, Code, DType, Error, FuseSet, Result};
use q4_cuda::{
    Align, Chip, FEW_ROWS, FEW_STAGES, FewPlan, FewRows, Gpu, Kernel, Launch, Matrix, RowKernels, RowWidth,
    Source, UNIT, Width, mirror, number,
};
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

mirror! {
    /// `Gemv` of gemv.cu.
    struct Gemv {
        w: u64, groups: u64, x: u64, y: u64, norm: u64, act_global: u64, ldx: u64, ldy: u64,
        m: u32, k: u32, units: u32, each: u32, extra: u32, gate_at: u32, x_dtype: u32, y_dtype: u32,
        accumulate: u32, act: u32, rule: u32, convention: u32, eps: f32, global: f32, late: u32,
    }
    struct Product { p: Gemv }
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
struct Loaded {
    widths: [Option<Kernel<Product>>; 5],
    /// Of `row.cu`, by [`RowWidth`]; the narrow one for native bf16.
    row: [Option<Kernel<Product>>; 2],
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
        let row = |stem: &str, there: bool| {
            let Some(rows) = rows.as_ref().filter(|_| there) else { return Ok(None) };
            rows.get_with(&format!("{stem}{name}"), self.gpu.shared).map(Some)
        };
        let loaded = Loaded {
            widths: all.widths(false, |width| gemv(width, name))?,
            row: [row("q4_row", true)?, row("q4_row_narrow", family == 0)?],
            align: all.get("q4_gemv_align")?,
        };
        Ok(self.loaded[family].get_or_init(|| loaded))
    }
}

/// The name of a kernel of a family.
fn gemv(width: Width, family: &str) -> String {
    let (stem, split) = match width {
        Width::One => ("one", ""),
        Width::Wide => ("few", "_wide"),
        Width::WideSplit => ("few", "_split"),
        _ => ("few", ""),
    };
    format!("q4_gemv_{stem}{family}{split}")
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

    fn few(&self, w: &Weight, gate: bool) -> FewRows {
        few(Self::family(w), [w.padded / 16, w.slabs / 2, w.k], gate, (&*self.gpu).into())
    }
}

/// Products of the family at `place` with a weight of so many row groups, units and columns.
fn few(place: usize, [groups, units, k]: [usize; 3], gate: bool, on: Chip) -> FewRows {
    let Family { parts, apart, .. } = FAMILIES[place];
    let beside = [if apart { units * 32 } else { 0 }, 0];
    FewRows { on, few_split: false, groups, units, unit: UNIT, k, gate, parts, beside, per_group: 8 }
}

/// A launch of `row.cu`, which takes one row if it can be staged at once.
fn row(place: usize, of: &FewRows, rows: usize, norm: bool, x: DType) -> Option<(RowWidth, FewPlan)> {
    if rows == 1 { of.row(norm, x, place == 0) } else { None }
}

/// What the compiler is told for a family; the last for [`ROW`] alone.
pub(super) fn options(family: usize) -> [String; 4] {
    [
        format!("-DQ4_STAGES={FEW_STAGES}"),
        format!("-DQ4_STAGES_FEW={FEW_STAGES}"),
        format!("-DQ4_FAMILY={family}"),
        "-DQ4_ROW".into(),
    ]
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
        m <= FEW_ROWS
            && !(gate && !(w.is_plain() && w.n % 32 == 0))
            // That scale is of the rows after the norm.
            && !(per_call && set.contains(FuseSet::NORM))
            && self.few(w, gate).rows(m).is_some()
    }

    /// The per-tensor scale of x, then room for aligned copies of the norm's weight and of x.
    fn workspace(&self, w: &Weight, m: usize) -> usize {
        if m <= FEW_ROWS { 256 + (m + 1) * w.k * 4 } else { 0 }
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
                Activations::Fp8(_) => return Err(refused(&w.activations)),
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
            // A product reads its norm's weight before it waits for the kernel ahead, unless that one writes
            // it.
            copied = norm % 16 != 0;
            if copied {
                let to = call.workspace + 256;
                kernels.align.copy(Matrix::new(norm, DType::F32, 1, w.k, w.k), to, call.stream)?;
                norm = to;
            }
            if !matrix(&x).is_aligned() {
                let to = call.workspace + 256 + 4 * w.k as u64;
                kernels.align.copy(matrix(&x), to, call.stream)?;
                x = x.moved(to, w.k);
            }
        }
        let (place, of) = (Self::family(w), self.few(w, gate));
        let most = of.rows(x.rows).unwrap_or(1);
        for first in (0..x.rows).step_by(most) {
            let rows = most.min(x.rows - first);
            let (xs, ys) = (x.rows_from(first, rows), call.y.rows_from(first, rows));
            let launch = match row(place, &of, rows, norm != 0, x.dtype) {
                Some((width, plan)) => kernels.row[width as usize].as_ref().zip(Some(plan)),
                None => of
                    .plan(rows.next_power_of_two())
                    .and_then(|(width, plan)| kernels.widths[width as usize].as_ref().zip(Some(plan))),
            };
            let none = || Error::new(Code::Internal, format!("no launch for {rows} rows"));
            let (kernel, plan) = launch.ok_or_else(none)?;
            let [each, extra, gate_at] = plan.deal(gate);
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
                each,
                extra,
                gate_at,
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
            let how = Launch { stream: call.stream, overlap: !copied, ..plan.how };
            // SAFETY: forwarded.
            unsafe { kernel.launch(how, Product { p: gemv })? };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_take_what_they_are_given() -> Result<()> {
        for Family { name, parts, .. } in &FAMILIES {
            for width in [Width::One, Width::Few, Width::Wide, Width::WideSplit] {
                GEMV.takes::<Product>(&gemv(width, name))?;
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

    /// Every launch of many shapes on many devices, as a hash for each: what they were when NVFP4 and NF4 had
    /// a planner each.
    #[test]
    fn launches_are_what_they_were() {
        // Multiprocessors, KiB of shared memory, clusters.
        let devices = [
            (16, 163, false, 0xd5b9_96d0_a7d5_1b51),
            (58, 99, false, 0xa389_6f39_1c78_86c8),
            (108, 163, false, 0x86ff_c121_31e0_2e13),
            (114, 227, true, 0xa39b_4593_d2d5_9721),
            (132, 227, true, 0x2c2b_0bdf_c1c9_7ec5),
            (148, 227, true, 0x0198_e086_2231_5a83),
            (170, 99, true, 0x8eb7_b8a9_b09b_4923),
        ];
        let ns: [usize; 15] =
            [16, 48, 96, 320, 1000, 1024, 2560, 4096, 6144, 9728, 19456, 32000, 50_257, 151_936, 1_000_000];
        let ks: [usize; 13] = [16, 128, 400, 512, 1024, 2560, 3984, 4096, 8192, 9728, 16384, 17408, 25600];
        for (processors, kib, clusters, want) in devices {
            let on = Chip { processors, shared: kib << 10, clusters };
            let mut hash = 0xcbf2_9ce4_8422_2325u64;
            let mut put = |numbers: &[usize]| {
                numbers.iter().for_each(|n| hash = (hash ^ *n as u64).wrapping_mul(0x100_0000_01b3));
            };
            let shapes = ns.into_iter().flat_map(|n| ks.map(|k| [(n, k, false), (n, k, true)])).flatten();
            for (n, k, gate) in shapes.filter(|(n, _, gate)| !gate || n % 32 == 0) {
                for place in 0..FAMILIES.len() {
                    let of = few(place, [n.div_ceil(16), k.div_ceil(128), k], gate, on);
                    for rows in [1, 2, 4, 8, 16] {
                        match of.plan(rows) {
                            None => put(&[0]),
                            Some((width, FewPlan { how, work, teams })) => {
                                let [blocks, threads, shared] =
                                    [how.grid[0], how.block[0], how.shared].map(|v| v as usize);
                                put(&[width as usize + 1, threads, teams, blocks / teams, work, shared]);
                            }
                        }
                        put(&[of.rows(rows).unwrap_or(0)]);
                    }
                    for (norm, x) in
                        [(false, DType::BF16), (true, DType::BF16), (false, DType::F32), (true, DType::F32)]
                    {
                        match row(place, &of, 1, norm, x) {
                            None => put(&[0]),
                            Some((_, FewPlan { how, work, teams })) => {
                                put(&[how.block[0] as usize, teams, work, how.shared as usize]);
                            }
                        }
                    }
                }
            }
            assert_eq!(hash, want, "{on:?}");
        }
    }
}
