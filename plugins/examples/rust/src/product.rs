//! Calls: the input becomes rows of floats or of integers in the scratch, panels are handed to the program's
//! threads, sums are scaled, rounded and written. Nothing here allocates.
use crate::kernels::{Isa, Quantized, Sums};
use crate::pack::{GROUP, LANES, Packed};
use q4_plugin_sdk::q4_core::formats::{e2m1, e4m3, int8, nvfp4};
use q4_plugin_sdk::q4_core::rows::{RowsMut, check_matrix, check_product, widen_row};
use q4_plugin_sdk::q4_core::{
    ActGlobal, Activations, Code, DType, Error, ExecContext, FuseSet, Fusion, GlobalScale, PreparedInfo,
    PreparedWeight, Result, TensorView, TensorViewMut, ThreadPool,
};

/// Rows of the input that are prepared at a time: bounds the scratch.
const TILE: usize = 32;
/// Rows of the weight whose products are added in one chain of a backward pass.
const CHAIN: usize = 16;

/// A prepared weight.
pub struct Weight {
    packed: Packed,
    info: PreparedInfo,
    x: DType,
    y: DType,
    max_m: usize,
    isa: Isa,
}

impl Weight {
    pub fn new(packed: Packed, info: PreparedInfo, (x, y): (DType, DType), max_m: usize, isa: Isa) -> Self {
        Self { packed, info, x, y, max_m, isa }
    }
}

/// Where scaled sums go.
struct Output<'a> {
    y: RowsMut<'a>,
    set: FuseSet,
}

impl Output<'_> {
    /// Sums of a panel, and of its partner where there is a gate.
    fn each<const M: usize>(&self, sums: impl Fn(usize) -> Sums<M>) -> [Sums<M>; 2] {
        let first = sums(0);
        [first, if self.set.contains(FuseSet::GATE) { sums(1) } else { first }]
    }

    /// Writes or adds `len` values of a row from `column` on.
    ///
    /// # Safety
    /// No other task touches them.
    unsafe fn put(
        &self,
        row: usize,
        column: usize,
        len: usize,
        mut values: [f32; LANES],
        up: impl Fn() -> [f32; LANES],
    ) {
        if self.set.contains(FuseSet::GATE) {
            let up = up();
            values = std::array::from_fn(|l| values[l] / (1.0 + (-values[l]).exp()) * up[l]);
        }
        // SAFETY: forwarded to the caller.
        unsafe {
            if self.set.contains(FuseSet::ACCUMULATE) {
                self.y.add(row, column, &values[..len]);
            } else {
                self.y.put(row, column, &values[..len]);
            }
        }
    }
}

/// Fails unless a call has one to `max_m` rows.
pub fn check_rows(m: usize, max_m: usize) -> Result<()> {
    if (1..=max_m).contains(&m) {
        return Ok(());
    }
    Err(Error::new(Code::ShapeMismatch, "rows of a call").need(format!("1 to {max_m}")).have(m.to_string()))
}

impl PreparedWeight for Weight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        let (tile, k, n) = (m.min(TILE), self.packed.k, self.packed.n);
        let forward = match self.info.activations {
            Activations::Native => 4 * k * tile,
            // One row is widened and quantised at a time; 16 codes, a scale and a sum per group stay.
            _ => tile * (k / GROUP) * size_of::<Quantized>() + 4 * k + 2 * k,
        };
        forward.max(4 * n * tile) + 128
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.product(x, FuseSet::NONE, y, cx)
    }

    /// Gates of whole panels, and additions.
    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        let gates = self.packed.n % (2 * LANES) == 0;
        m <= self.max_m && !set.contains(FuseSet::NORM) && (gates || !set.contains(FuseSet::GATE))
    }

    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        self.product(x, fusion.set(), y, cx)
    }

    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let p = &self.packed;
        let m = check_product((&dy, self.y, p.n), (&dx.as_view(), self.x, p.k))?;
        check_rows(m, self.max_m)?;
        let (pool, dx) = (cx.threads, RowsMut::of(dx)?);
        for first in (0..m).step_by(TILE) {
            let rows = first..(first + TILE).min(m);
            let wide = f32s(cx, rows.len() * p.n)?;
            for (i, r) in rows.clone().enumerate() {
                widen_row(&dy, r, &mut wide[i * p.n..][..p.n])?;
            }
            let wide = &*wide;
            pool.split(p.groups(), 1, &|from, to| {
                for g in from..to {
                    let mut sums = [[0f32; GROUP]; TILE];
                    for chain in (0..p.n).step_by(CHAIN) {
                        let end = (chain + CHAIN).min(p.n);
                        let w: [[f32; GROUP]; CHAIN] = std::array::from_fn(|i| {
                            if chain + i < end { p.decode(chain + i, g) } else { [0.0; GROUP] }
                        });
                        for i in 0..rows.len() {
                            let mut part = [0f32; GROUP];
                            for (w, dy) in w.iter().zip(&wide[i * p.n..][chain..end]) {
                                for (part, w) in part.iter_mut().zip(w) {
                                    *part += dy * w;
                                }
                            }
                            for (sum, part) in sums[i].iter_mut().zip(part) {
                                *sum += part;
                            }
                        }
                    }
                    for (r, sum) in rows.clone().zip(&sums) {
                        // SAFETY: these columns are this task's.
                        unsafe { dx.put(r, g * GROUP, sum) };
                    }
                }
            });
        }
        Ok(())
    }

    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let p = &self.packed;
        check_matrix(&out.as_view(), out.as_view().dtype(), p.n, p.k)?;
        let out = RowsMut::of(out)?;
        cx.threads.split(p.n, 1, &|from, to| {
            for (row, g) in (from..to).flat_map(|row| (0..p.groups()).map(move |g| (row, g))) {
                // SAFETY: these rows are this task's.
                unsafe { out.put(row, g * GROUP, &p.decode(row, g)) };
            }
        });
        Ok(())
    }
}

impl Weight {
    /// `y = x W^T`, fused with `set`.
    fn product(
        &self,
        x: TensorView<'_>,
        set: FuseSet,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let p = &self.packed;
        let columns = if set.contains(FuseSet::GATE) { p.n / 2 } else { p.n };
        let y_type = if set.contains(FuseSet::ACCUMULATE) { DType::F32 } else { self.y };
        let m = check_product((&x, self.x, p.k), (&y.as_view(), y_type, columns))?;
        check_rows(m, self.max_m)?;
        if !self.fuses(m, set) {
            return Err(Error::new(Code::Unsupported, "a fused product")
                .need("a gate of whole panels, or an addition")
                .have(format!("{set:?} of {} rows", p.n)));
        }
        let pool = cx.threads;
        let y = Output { y: RowsMut::of(y)?, set };
        let global = match self.info.activations {
            Activations::Nvfp4(act) => self.act_global(act.global, act.rule, &x, m, cx)?,
            _ => None,
        };
        for first in (0..m).step_by(TILE) {
            let rows = first..(first + TILE).min(m);
            match self.info.activations {
                Activations::Native => {
                    let wide = f32s(cx, rows.len() * p.k)?;
                    for (i, r) in rows.clone().enumerate() {
                        widen_row(&x, r, &mut wide[i * p.k..][..p.k])?;
                    }
                    let row = |r: usize| &wide[(r - first) * p.k..][..p.k];
                    self.panels(
                        pool,
                        rows,
                        &y,
                        1.0,
                        &row,
                        Isa::floats::<8>,
                        Isa::floats::<4>,
                        Isa::floats::<1>,
                    );
                }
                _ => {
                    let groups = p.groups();
                    let q = self.quantize(&x, rows.clone(), global, cx)?;
                    let row = |r: usize| &q[(r - first) * groups..][..groups];
                    // Weights are doubled, and NVFP4 inputs as well.
                    let unit = match (self.info.activations, global) {
                        (Activations::Nvfp4(_), g) => 0.25 * g.map_or(1.0, GlobalScale::multiplier),
                        _ => 0.5,
                    };
                    let kernels = (Isa::integers::<8>, Isa::integers::<4>, Isa::integers::<1>);
                    self.panels(pool, rows, &y, unit, &row, kernels.0, kernels.1, kernels.2);
                }
            }
        }
        Ok(())
    }

    /// Products of the input rows `rows` with every panel, or with a panel of gates and that of what they let
    /// through, eight, four or one row at a time.
    fn panels<'a, R: ?Sized + 'a>(
        &self,
        pool: &ThreadPool,
        rows: std::ops::Range<usize>,
        y: &Output<'_>,
        unit: f64,
        row: &(dyn Fn(usize) -> &'a R + Sync),
        eight: fn(Isa, &[crate::pack::Block], [&R; 8]) -> Sums<8>,
        four: fn(Isa, &[crate::pack::Block], [&R; 4]) -> Sums<4>,
        one: fn(Isa, &[crate::pack::Block], [&R; 1]) -> Sums<1>,
    ) {
        let p = &self.packed;
        let outputs = if y.set.contains(FuseSet::GATE) { p.panels() / 2 } else { p.panels() };
        pool.split(outputs, 1, &|from, to| {
            for panel in from..to {
                let first = panel * LANES;
                let len = LANES.min(p.n - first);
                // The second one is not looked at without a gate.
                let both = [panel, panel + p.panels() - outputs];
                let factors = both.map(|i| p.factors(i).map(|f| (f64::from(f) * unit) as f32));
                let blocks = both.map(|i| p.panel(i));
                let put = |r: usize, sums: [&[f32; LANES]; 2]| {
                    let scaled = |i: usize| std::array::from_fn(|l| sums[i][l] * factors[i][l]);
                    // SAFETY: these columns are this task's.
                    unsafe { y.put(r, first, len, scaled(0), || scaled(1)) };
                };
                let mut r = rows.start;
                while r < rows.end {
                    let left = rows.end - r;
                    if left >= 8 {
                        let sums =
                            y.each(|i| eight(self.isa, blocks[i], std::array::from_fn(|i| row(r + i))));
                        (0..8).for_each(|i| put(r + i, [&sums[0][i], &sums[1][i]]));
                        r += 8;
                    } else if left >= 4 {
                        let sums = y.each(|i| four(self.isa, blocks[i], std::array::from_fn(|i| row(r + i))));
                        (0..4).for_each(|i| put(r + i, [&sums[0][i], &sums[1][i]]));
                        r += 4;
                    } else {
                        let sums = y.each(|i| one(self.isa, blocks[i], [row(r)]));
                        put(r, [&sums[0][0], &sums[1][0]]);
                        r += 1;
                    }
                }
            }
        });
    }

    /// The per-tensor scale of one call's NVFP4 activations.
    fn act_global(
        &self,
        global: ActGlobal,
        rule: q4_plugin_sdk::q4_core::Rule,
        x: &TensorView<'_>,
        m: usize,
        cx: &mut ExecContext<'_>,
    ) -> Result<Option<GlobalScale>> {
        match global {
            ActGlobal::None => Ok(None),
            ActGlobal::Static(g) => Ok(Some(g)),
            ActGlobal::PerCall => {
                let mut amax = 0f32;
                let row = f32s(cx, self.packed.k)?;
                for r in 0..m {
                    widen_row(x, r, row)?;
                    if row.iter().any(|v| !v.is_finite()) {
                        return Err(
                            Error::new(Code::NonFinite, "activations of a product").need("finite values")
                        );
                    }
                    amax = row.iter().fold(amax, |a, v| a.max(v.abs()));
                }
                nvfp4::global_from_amax(rule, amax, self.x).map(Some)
            }
        }
    }

    /// The input rows `rows` as integers, in the scratch.
    fn quantize<'s>(
        &self,
        x: &TensorView<'_>,
        rows: std::ops::Range<usize>,
        global: Option<GlobalScale>,
        cx: &'s mut ExecContext<'_>,
    ) -> Result<&'s [Quantized]> {
        let (k, groups) = (self.packed.k, self.packed.groups());
        // A group is six words; behind them one row of floats and two of bytes.
        let words = rows.len() * groups * 6;
        let scratch = f32s(cx, words + k + k / 2)?;
        let (out, rest) = scratch.split_at_mut(words);
        let (row, rest) = rest.split_at_mut(k);
        // SAFETY: bytes have no alignment and no invalid value; 2k of them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(rest.as_mut_ptr().cast::<u8>(), 2 * k) };
        // SAFETY: six words of four bytes are a group, whatever their bits.
        let out = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<Quantized>(), words / 6) };
        for (r, out) in rows.zip(out.chunks_exact_mut(groups)) {
            widen_row(x, r, row)?;
            match self.info.activations {
                Activations::Nvfp4(act) => {
                    let quantizer = nvfp4::Quantizer { rule: act.rule, global, source: self.x };
                    let (codes, rest) = bytes.split_at_mut(k / 2);
                    let scales = &mut rest[..groups];
                    quantizer.quantize_row(row, codes, scales)?;
                    for (g, out) in out.iter_mut().enumerate() {
                        let q = std::array::from_fn(|i| {
                            let byte = codes[(g * GROUP + i) / 2];
                            e2m1::DOUBLED[usize::from(byte >> (4 * (i % 2)) & 15)]
                        });
                        *out = group(q, e4m3::decode(scales[g]));
                    }
                }
                _ => {
                    // One group at a time: its scale is in a register when it is needed.
                    for (x, out) in row.chunks_exact(GROUP).zip(out.iter_mut()) {
                        let (mut q, mut scale) = ([0i8; GROUP], [0f32; 1]);
                        int8::quantize_row(x, &mut q, &mut scale)?;
                        *out = group(q, scale[0]);
                    }
                }
            }
        }
        Ok(out)
    }
}

const _: () = assert!(size_of::<Quantized>() == 24 && align_of::<Quantized>() == 4);

fn group(q: [i8; GROUP], scale: f32) -> Quantized {
    Quantized {
        words: [0, 1, 8, 9].map(|at| u32::from_le_bytes([0, 2, 4, 6].map(|i| q[at + i] as u8))),
        scale,
        sum: q.iter().map(|v| i32::from(*v)).sum(),
    }
}

/// The first `len` floats of the scratch.
fn f32s<'s>(cx: &'s mut ExecContext<'_>, len: usize) -> Result<&'s mut [f32]> {
    q4_plugin_sdk::q4_core::Scratch::of(cx, 4 * len + 64)?.take(len)
}
