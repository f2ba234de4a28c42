//! Launchers of `cuda/gemv.cu` and `cuda/row.cu`: products of a few rows, with any fusion, as one kernel.
use super::{Call, Coding, FILES, Levels, Packed, load};
use q4_core::{Code, DType, Error, Fp8Inputs, FuseSet, Result};
use q4_cuda::{
    Align, Chip, FEW_ROWS, FewPlan, FewRows, Gpu, Kernel, Launch, Matrix, RowWidth, Source, Width, mirror,
    number,
};
use std::sync::Arc;

const SOURCE: Source = Source { name: "levels-gemv", text: include_str!("../../cuda/gemv.cu"), files: FILES };
/// For one row of bf16: an image of its own, the two compile side by side.
pub(super) const ROW: Source =
    Source { name: "levels-row", text: include_str!("../../cuda/row.cu"), files: FILES };
/// Bytes of the table, as in the source.
const fn table(levels: Levels) -> usize {
    if matches!(levels, Levels::E4m3) { 0 } else { 32_768 }
}
/// The same in `row.cu`.
const fn entries(levels: Levels) -> usize {
    if matches!(levels, Levels::Nf4) { 65_536 } else { 0 }
}

mirror! {
    /// `Gemv` of gemv.cu.
    pub(super) struct Gemv {
        pub(super) w: u64, pub(super) x: u64, pub(super) y: u64, pub(super) norm: u64, pub(super) ldx: u64,
        pub(super) ldy: u64, pub(super) m: u32, pub(super) n: u32, pub(super) k: u32, pub(super) units: u32,
        pub(super) each: u32, pub(super) extra: u32, pub(super) gate_at: u32, pub(super) x_dtype: u32,
        pub(super) y_dtype: u32, pub(super) accumulate: u32, pub(super) eps: f32, pub(super) fixed: f32,
    }
    struct Product { p: Gemv }
}

/// Kernels for one type of x.
struct Family {
    widths: [Option<Kernel<Product>>; 5],
    /// Parts of bf16 an element of x becomes.
    parts: usize,
}

/// Kernels for calls of a few rows.
pub struct Kernels {
    gpu: Arc<Gpu>,
    levels: Levels,
    /// f32, f16, bf16.
    families: [Family; 3],
    /// Of `row.cu`, by [`RowWidth`].
    row: [Kernel<Product>; 2],
    /// The same that round x to FP8 on the way; where the weight is FP8.
    rounded: Option<[Kernel<Product>; 2]>,
    align: Kernel<Align>,
}

/// The name of a kernel for x of a type.
fn gemv(width: Width, x: &str) -> String {
    format!("levels_gemv_{x}_{}", ["one", "few", "wide", "wide_split", "few_split"][width as usize])
}

/// Products with `w`, for x of so many parts.
fn few(levels: Levels, w: &Packed, parts: usize, gate: bool, on: Chip) -> FewRows {
    let (groups, units, k) = (w.n.div_ceil(16) as usize, w.units as usize, w.k as usize);
    let (unit, parts, beside) = (levels.unit(), [parts; 2], [table(levels); 2]);
    FewRows { on, few_split: true, groups, units, unit, k, gate, parts, beside, per_group: 0 }
}

/// A launch of `row.cu` with `w`, which takes one row of bf16 if it can be staged at once. `rounded`: what
/// FP8 keeps of it, with a scale for each unit.
pub(super) fn row(
    levels: Levels,
    w: &Packed,
    (norm, gate, rounded): (bool, bool, bool),
    on: Chip,
) -> Option<(RowWidth, FewPlan)> {
    let scales = if rounded { 4 * w.units as usize } else { 0 };
    let of = FewRows { beside: [entries(levels) + scales; 2], ..few(levels, w, 1, gate, on) };
    let (width, mut plan) = of.row(norm, DType::BF16, true)?;
    // Codings differ in registers, which therefore do not keep two blocks apart.
    plan.how.shared = plan.how.shared.max(on.alone() as u32);
    Some((width, plan))
}

/// How `row.cu` is told of scales of x: the one of all, 0 for that of the row, -1 for those of 128.
pub(super) fn fixed(inputs: Fp8Inputs) -> f32 {
    match inputs {
        Fp8Inputs::Static(scale) => scale.effective(1.0),
        Fp8Inputs::PerRow => 0.0,
        Fp8Inputs::PerBlock => -1.0,
    }
}

impl Kernels {
    /// Compiles or finds them.
    pub fn load(gpu: &Arc<Gpu>, coding: Coding) -> Result<Self> {
        let (all, rows) = std::thread::scope(|scope| {
            let rows = scope.spawn(|| load(gpu, &ROW, coding, &[]));
            let all = load(gpu, &SOURCE, coding, &[]);
            (all, rows.join().map_err(|_| Error::new(Code::Internal, "loading kernels")))
        });
        let (all, rows) = (all?, rows??);
        let row = |name| rows.get_with(name, gpu.shared);
        let rounded = match coding.levels {
            Levels::E4m3 => Some([row("levels_row_rounded")?, row("levels_row_rounded_narrow")?]),
            _ => None,
        };
        let family = |x: &str, parts| {
            Ok::<_, Error>(Family { widths: all.widths(true, |width| gemv(width, x))?, parts })
        };
        Ok(Self {
            gpu: gpu.clone(),
            levels: coding.levels,
            families: [family("f32", 3)?, family("f16", 2)?, family("bf16", 1)?],
            row: [row("levels_row")?, row("levels_row_narrow")?],
            rounded,
            align: all.get("levels_gemv_align")?,
        })
    }

    fn few(&self, w: &Packed, dtype: u32, gate: bool) -> FewRows {
        few(self.levels, w, self.families[dtype as usize - 1].parts, gate, (&*self.gpu).into())
    }

    /// Whether they take calls of `m` rows of x (`dtype` as rounded after a norm); any number without a
    /// fusion.
    pub fn takes(&self, w: &Packed, dtype: u32, m: usize, set: FuseSet) -> bool {
        let gate = set.contains(FuseSet::GATE);
        w.units > 0
            && (set == FuseSet::NONE || m <= FEW_ROWS)
            && !(gate && w.n % 32 != 0)
            && self.few(w, dtype, gate).rows(m.min(FEW_ROWS)).is_some()
    }

    /// Whether one of them takes one row of bf16 and rounds it to FP8, behind the norm if there is one.
    pub fn rounds(&self, w: &Packed, set: FuseSet) -> bool {
        let (norm, gate) = (set.contains(FuseSet::NORM), set.contains(FuseSet::GATE));
        let has_launch = row(self.levels, w, (norm, gate, true), (&*self.gpu).into()).is_some();
        self.rounded.is_some() && w.units > 0 && !(gate && w.n % 32 != 0) && has_launch
    }

    /// Room for aligned copies of the norm's weight and of one launch's x.
    pub fn workspace(&self, w: &Packed, m: usize) -> usize {
        if w.units == 0 { 0 } else { ((m.min(FEW_ROWS) + 1) * w.k as usize * 4).next_multiple_of(256) }
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The matrices are device memory that fits the weight, and do not overlap; the workspace has the size
    /// asked for.
    pub unsafe fn forward(&self, w: &Packed, call: &Call) -> Result<()> {
        let (mut norm, k) = (call.norm.0, w.k as usize);
        // A product reads its norm's weight before it waits for the kernel ahead, unless that one writes it.
        let copied = norm % 16 != 0;
        if copied {
            let weight = Matrix::new(norm, DType::F32, 1, k, k);
            // SAFETY: by contract.
            unsafe { self.align.copy(weight, call.workspace, call.stream)? };
            norm = call.workspace;
        }
        let (m, of) = (call.x.rows as usize, self.few(w, call.source, call.gate));
        let most = of.rows(m.min(FEW_ROWS)).unwrap_or(1);
        for first in (0..m).step_by(most) {
            let rows = most.min(m - first);
            let (mut xs, ys) = (call.x.rows_from(first, rows), call.y.rows_from(first, rows));
            let none = || Error::new(Code::Internal, format!("no launch for {rows} rows"));
            let is_row = rows == 1 && call.source == number(DType::BF16);
            let how = (norm != 0, call.gate, call.rounding.is_some());
            let of_row = || row(self.levels, w, how, (&*self.gpu).into());
            let by_width = if call.rounding.is_some() { self.rounded.as_ref() } else { Some(&self.row) };
            let (kernel, plan) = match is_row.then(of_row).flatten().zip(by_width) {
                Some(((width, plan), kernels)) => (&kernels[width as usize], plan),
                None => {
                    let (width, plan) = of.plan(rows.next_power_of_two()).ok_or_else(none)?;
                    let kernel = self.families[call.source as usize - 1].widths[width as usize].as_ref();
                    (kernel.ok_or_else(none)?, plan)
                }
            };
            if !call.x.is_aligned() {
                let to = call.workspace + 4 * k as u64;
                // SAFETY: by contract.
                unsafe { self.align.copy(xs, to, call.stream)? };
                (xs.data, xs.ld) = (to, k as u64);
            }
            let [each, extra, gate_at] = plan.deal(call.gate);
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
                each,
                extra,
                gate_at,
                x_dtype: call.source,
                y_dtype: ys.dtype,
                accumulate: call.accumulate.into(),
                eps: call.norm.1,
                fixed: call.rounding.map_or(0.0, fixed),
            };
            let how = Launch { stream: call.stream, overlap: !copied, ..plan.how };
            // SAFETY: by contract.
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
        for x in ["f32", "f16", "bf16"] {
            for width in [Width::One, Width::Few, Width::Wide, Width::WideSplit, Width::FewSplit] {
                SOURCE.takes::<Product>(&gemv(width, x))?;
            }
        }
        ROW.takes::<Product>("levels_row")?;
        ROW.takes::<Product>("levels_row_narrow")?;
        ROW.takes::<Product>("levels_row_rounded")?;
        ROW.takes::<Product>("levels_row_rounded_narrow")?;
        SOURCE.takes::<Align>("levels_gemv_align")
    }

    #[test]
    fn kernels_compile_for_old_devices_and_new() -> Result<()> {
        if let Err(why) = q4_cuda::libraries().nvrtc.version() {
            println!("skipped: {why}");
            return Ok(());
        }
        // NF4's for all, and each other coding for one of them; bench/cubins.py compiles all for all.
        let majors: Vec<_> = q4_cuda::Arch::majors().filter(q4_cuda::Arch::is_known).collect();
        let others = super::super::CODINGS[1..].iter().zip(majors.iter().cycle());
        for (coding, arch) in majors.iter().map(|arch| (&super::super::CODINGS[0], arch)).chain(others) {
            super::super::compile(&SOURCE, arch, *coding, &[])?;
            super::super::compile(&ROW, arch, *coding, &[])?;
            super::super::compile(&super::super::simple::SOURCE, arch, *coding, &[])?;
        }
        Ok(())
    }

    /// A row that can be staged has a launch whose blocks are alone on a multiprocessor, with room for what
    /// row.cu lays out.
    #[test]
    fn a_row_has_a_launch() {
        let on = Chip { processors: 132, shared: 227 << 10, clusters: true };
        let w = |n: u32, k: u32| Packed { codes: 0, scales: 0, n, k, group: 64, units: k.div_ceil(128) };
        let levels = [Levels::Nf4, Levels::Int4, Levels::E2m1, Levels::E4m3];
        for (levels, norm, gate) in levels.into_iter().flat_map(|l| [(l, false, true), (l, true, false)]) {
            for (n, k) in [(32, 64), (96, 320), (2560, 4096), (19_456, 2560), (151_936, 8192), (64, 16_384)] {
                let (w, both) = (w(n, k), if gate { 2 } else { 1 });
                let rounded = levels == Levels::E4m3;
                let Some((width, plan)) = row(levels, &w, (norm, gate, rounded), on) else {
                    assert!(norm && k > 8192, "{levels:?} {n} {k}");
                    continue;
                };
                assert!(!norm || k <= 8192, "{levels:?} {n} {k}");
                let (shared, threads) = (plan.how.shared as usize, plan.how.block[0] as usize);
                assert!(2 * shared > on.shared && shared <= on.shared, "{shared} bytes");
                let [each, extra, gate_at] = plan.deal(gate).map(|v| v as usize);
                assert_eq!((each * plan.teams + extra) * both, n.div_ceil(16) as usize);
                assert_eq!((plan.how.grid, gate_at > 0), ([plan.teams as u32, 1, 1], gate));
                let groups = (each + usize::from(extra > 0)) * both;
                let [x, norms] = [w.units as usize * 256 + 16, threads / 32 * 4];
                let scales = if rounded { w.units as usize * 4 } else { 0 };
                let sums = (groups + threads / 32) * 16 * 4;
                assert!(entries(levels) + x + norms + scales + sums <= shared, "{levels:?} {n} {k}");
                let is_narrow = groups * (w.units as usize) < 192;
                assert_eq!((width == RowWidth::Narrow, threads), (is_narrow, width.threads()));
            }
        }
        // What does not fit, gemv.cu takes.
        let small = Chip { processors: 58, shared: 99 << 10, clusters: false };
        assert!(row(Levels::Nf4, &w(1_000_000, 16_384), (false, false, false), small).is_none());
        assert!(row(Levels::Int4, &w(4096, 16_384), (false, false, false), small).is_some());
    }

    /// Every launch of many shapes on many devices, as a hash for each: what they were when NVFP4 and NF4 had
    /// a planner each.
    #[test]
    fn launches_are_what_they_were() {
        // Multiprocessors, KiB of shared memory, clusters.
        let devices = [
            (16, 163, false, 0x9ae8_f832_7b0f_82ba),
            (58, 99, false, 0x7b2e_3aab_3df2_9a06),
            (108, 163, false, 0x9e4c_0573_2441_4bad),
            (114, 227, true, 0x3a76_4f39_a597_f7e6),
            (132, 227, true, 0x46d7_f019_1cd9_8190),
            (148, 227, true, 0x3469_cc8e_191c_5fca),
            (170, 99, true, 0xc488_398f_1fcc_e474),
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
                let units = k.div_ceil(128) as u32;
                let w = Packed { codes: 0, scales: 0, n: n as u32, k: k as u32, group: 64, units };
                for parts in [3, 2, 1] {
                    let of = few(Levels::Nf4, &w, parts, gate, on);
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
                }
            }
            assert_eq!(hash, want, "{on:?}");
        }
    }
}
