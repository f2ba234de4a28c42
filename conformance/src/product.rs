//! One product through one backend: prepared once, called with guarded operands, compared with the exact
//! result.
use crate::case::{Bench, Seen};
use crate::guarded::{Guarded, Layout, Workspace};
use crate::lattice::{Problem, hash};
use crate::limits::segments;
use crate::stored::mix;
use crate::tolerance::{Exact, Terms, backward_terms, bound_of_sum};
use q4_core::oracle::{Column, Input, Units};
use q4_core::stage::Staged;
use q4_core::{
    Code, DType, Device, Error, ExecContext, ExecPath, LinearSpec, OpSet, PreparedWeight, Q4Weight, Reject,
    Result, RowDecoder, ThreadPool, wide,
};

/// Stale scratch of calls that do not vary it; as f32 a huge number.
pub(crate) const STALE: u8 = 0x7e;

/// The spec of a problem.
pub(crate) fn spec(bench: &Bench<'_>, problem: &Problem<'_>, ops: OpSet) -> LinearSpec {
    let w = &problem.weight;
    LinearSpec {
        segments: segments(&w.segments.iter().map(|s| s.rows).collect::<Vec<_>>(), problem.m as u64),
        schema: w.schema,
        k: w.k,
        max_m: problem.max_m,
        x: problem.io,
        y: problem.io,
        activations: problem.activations,
        device: bench.device,
        ops,
    }
}

/// A prepared weight, or every reason why not. A product that is claimed and then refused is an error.
pub(crate) fn prepare(
    bench: &Bench<'_>,
    path: ExecPath,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
) -> Result<std::result::Result<Box<dyn PreparedWeight>, Vec<Reject>>> {
    if let Err(reasons) = bench.backend.can_prepare(spec, path, bench.env) {
        // Types that differ may be refused whatever the limits say, which are about x and y alike.
        let inside = bench
            .proofs
            .iter()
            .find(|p| spec.x == spec.y && p.is_about(spec, path) && p.limits.admit(spec).is_ok());
        if let Some(proof) = inside {
            let list: Vec<_> = reasons.iter().map(ToString::to_string).collect();
            return Err(failed("a product inside what the backend says it computes is refused")
                .need(format!(
                    "{} in {} segments, k = {}, served as others are",
                    spec.n(),
                    spec.segments.len(),
                    spec.k
                ))
                .have(format!("{}; asked otherwise it accepts {}", list.join("; "), proof.limits)));
        }
        return Ok(Err(reasons));
    }
    let prepared = build(bench, path, w, spec).map_err(|e| {
        failed("can_prepare agreed and prepare refused").need("both to say the same").have(e.to_string())
    })?;
    check_info(bench, path, spec, &*prepared)?;
    Ok(Ok(prepared))
}

/// What `body` sees of the weight of a problem that is prepared for `ops`, or every reason why it is not.
pub(crate) fn with(
    bench: &Bench<'_>,
    path: ExecPath,
    problem: &Problem<'_>,
    ops: OpSet,
    body: impl FnOnce(&dyn PreparedWeight) -> Result<Seen>,
) -> Result<Seen> {
    match prepare(bench, path, &problem.weight, &spec(bench, problem, ops))? {
        Ok(w) => body(&*w),
        Err(reasons) => Ok(Seen::Refused(reasons)),
    }
}

/// A weight that is called with operands in host memory, wherever it lives.
pub(crate) fn build(
    bench: &Bench<'_>,
    path: ExecPath,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
) -> Result<Box<dyn PreparedWeight>> {
    let mut cx = ExecContext::on(spec.device, 0, bench.threads);
    let prepared = bench.backend.prepare(w, spec, path, &mut cx)?;
    Ok(match spec.device {
        Device::Cpu => prepared,
        // It stages them there.
        _ if bench.elsewhere().is_some() => prepared,
        device => Box::new(Staged::new(prepared, device, bench.backend.memory(device)?)),
    })
}

/// What was built is what was asked for.
pub(crate) fn check_info(
    bench: &Bench<'_>,
    path: ExecPath,
    spec: &LinearSpec,
    w: &dyn PreparedWeight,
) -> Result<()> {
    let i = w.info();
    let name = &bench.backend.descriptor().name;
    if i.backend == *name
        && i.path == path
        && i.activations == spec.activations
        && (i.n, i.k) == (spec.n(), spec.k)
        && i.ops.contains(spec.ops)
    {
        return Ok(());
    }
    Err(Error::new(Code::ConformanceFailed, "info() is not the plan")
        .need(format!(
            "{name}, {path}, {}, [{}, {}], ops {:#b}",
            spec.activations,
            spec.n(),
            spec.k,
            spec.ops.0
        ))
        .have(format!(
            "{}, {}, {}, [{}, {}], ops {:#b}",
            i.backend, i.path, i.activations, i.n, i.k, i.ops.0
        )))
}

/// One call; fails when it touched what is not its own.
pub(crate) fn call(
    w: &dyn PreparedWeight,
    op: OpSet,
    (name_in, input): (&str, &Guarded),
    (name_out, output): (&str, &mut Guarded),
    scratch: &mut Workspace,
    threads: &ThreadPool,
) -> Result<()> {
    let before = input.snapshot();
    let mut cx = ExecContext::cpu(threads);
    cx.workspace = scratch.view()?;
    let (x, y) = (input.view()?, output.view_mut()?);
    if op == OpSet::BACKWARD_INPUT { w.backward_input(x, y, &mut cx) } else { w.forward(x, y, &mut cx) }?;
    input.check_unchanged(name_in, &before)?;
    output.check_guards(name_out)?;
    scratch.check_guards()
}

/// How operands and scratch are lent to a call.
#[derive(Clone, Copy)]
pub(crate) struct Lent {
    pub input: Layout,
    pub output: Layout,
    /// What the output holds, when it is not NaN.
    pub held: Option<u8>,
    /// What scratch holds, and how much more of it there is than was asked for.
    pub fill: u8,
    pub spare: usize,
}

impl Lent {
    /// As a careful caller lends them.
    pub const PLAIN: Self =
        Self { input: Layout::PLAIN, output: Layout::PLAIN, held: None, fill: STALE, spare: 0 };
    /// Both operands laid out alike.
    pub const fn alike(layout: Layout) -> Self {
        Self { input: layout, output: layout, ..Self::PLAIN }
    }
}

/// One call on fresh buffers: `m` rows of values of a type, to as many of so many columns of a type.
pub(crate) fn called(
    w: &dyn PreparedWeight,
    op: OpSet,
    (from, values, m): (DType, &[f32], usize),
    (to, columns): (DType, usize),
    lent: Lent,
    threads: &ThreadPool,
) -> Result<Guarded> {
    let x = Guarded::input(from, values, m, values.len() / m, lent.input);
    let mut y = Guarded::output(to, m, columns, lent.output);
    lent.held.into_iter().for_each(|byte| y.hold(byte));
    let mut scratch = Workspace::new(w.workspace(m) + lent.spare, lent.fill);
    let names = if op == OpSet::BACKWARD_INPUT { ["dy", "dx"] } else { ["x", "y"] };
    call(w, op, (names[0], &x), (names[1], &mut y), &mut scratch, threads)?;
    Ok(y)
}

/// `y` of a forward call on fresh buffers.
pub(crate) fn forward(
    w: &dyn PreparedWeight,
    problem: &Problem<'_>,
    layout: Layout,
    fill: u8,
    threads: &ThreadPool,
) -> Result<Guarded> {
    forward_lent(w, problem, Lent { fill, ..Lent::alike(layout) }, threads)
}

/// The same with everything lent so.
pub(crate) fn forward_lent(
    w: &dyn PreparedWeight,
    problem: &Problem<'_>,
    lent: Lent,
    threads: &ThreadPool,
) -> Result<Guarded> {
    let (from, to) = ((problem.io, &problem.x[..], problem.m), (problem.io, problem.weight.n()));
    called(w, OpSet::FORWARD, from, to, lent, threads)
}

/// The same compared with the exact one.
pub(crate) fn checked(
    w: &dyn PreparedWeight,
    path: ExecPath,
    problem: &Problem<'_>,
    threads: &ThreadPool,
) -> Result<Seen> {
    let y = forward_lent(w, problem, Lent::PLAIN, threads)?.values();
    let worst = exact_forward(problem)?.compare("y", &y, forward_bound(path, problem))?;
    Ok(Seen::within(y.len(), worst))
}

/// `dx` of a backward call on fresh buffers.
pub(crate) fn backward(
    w: &dyn PreparedWeight,
    problem: &Problem<'_>,
    dy: &[f32],
    layout: Layout,
    threads: &ThreadPool,
) -> Result<Guarded> {
    let (from, to) = ((problem.io, dy, problem.m), (problem.io, problem.weight.k));
    called(w, OpSet::BACKWARD_INPUT, from, to, Lent::alike(layout), threads)
}

/// The exact `y`, checked against the record where the problem has one.
pub(crate) fn exact_forward(problem: &Problem<'_>) -> Result<Exact> {
    exact_forward_as(problem, &problem.activations)
}

/// The exact `y` with another activation format.
pub(crate) fn exact_forward_as(problem: &Problem<'_>, activations: &q4_core::Activations) -> Result<Exact> {
    let [rows, columns] = [problem.m, problem.weight.n()].map(|n| (0..n).collect::<Vec<_>>());
    exact_part(problem, activations, &rows, &columns)
}

/// The exact `y` at these rows and columns.
pub(crate) fn exact_part(
    problem: &Problem<'_>,
    activations: &q4_core::Activations,
    rows: &[usize],
    columns: &[usize],
) -> Result<Exact> {
    let k = problem.weight.k;
    let decoder = RowDecoder::new(&problem.weight)?;
    let input = Input::new(&problem.x, k, activations, problem.io)?;
    let mut values = vec![(0.0, 0.0); rows.len() * columns.len()];
    for (c, &j) in columns.iter().enumerate() {
        let column = Column::new(&decoder, j);
        for (i, &r) in rows.iter().enumerate() {
            let (exact, abs) = input.dot(r, &column);
            if let Some(recorded) = problem.recorded.as_ref().map(|y| y[r * decoder.n() + j])
                && (recorded - exact).abs() > abs * 1e-6 + 1e-30
            {
                let what = format!("{}: the exact product disagrees with the record", problem.name);
                return Err(Error::new(Code::Internal, what)
                    .need(format!("{recorded:e} at [{r}, {j}]"))
                    .have(format!("{exact:e}")));
            }
            values[i * columns.len() + c] = (exact, abs);
        }
    }
    Ok(Exact { m: rows.len(), n: columns.len(), values })
}

/// Columns that are added up.
const BLOCK: usize = 32;
/// Weights that are added up for one product, at most.
const WEIGHTS: usize = 6_000_000;

/// Compares every element of y at once, far cheaper than one by one: the columns of a block, each with a sign
/// that nobody can foresee, are added up, and so are the rows of the weight. What is off by much more than
/// its bound shows: a column that was not written, a row of another call, a sum that lost a part. Products of
/// tens of millions of weights are looked at in blocks across their width: the first, the last, the borders
/// of segments, and others in between. Returns how many elements.
///
/// This is Freivalds' check of a matrix product, with the error bound of the elements added up.
pub(crate) fn check_sums(path: ExecPath, problem: &Problem<'_>, y: &[f32]) -> Result<usize> {
    let (m, k, n) = (problem.m, problem.weight.k, problem.weight.n());
    let decoder = RowDecoder::new(&problem.weight)?;
    let input = Input::new(&problem.x, k, &problem.activations, problem.io)?;
    let terms = forward_bound(path, problem);
    let (mut decoded, mut signed, mut sizes) = (vec![0f32; k], vec![0f64; k], vec![0f64; k]);
    let (mut seen, salt) = (0, hash(&problem.name));
    for from in blocks(problem) {
        let block = from..n.min(from + BLOCK);
        signed.fill(0.0);
        sizes.fill(0.0);
        let signs: Vec<f64> = block.clone().map(|c| 1.0 - 2.0 * (mix(c as u64 ^ salt) & 1) as f64).collect();
        for (c, sign) in block.clone().zip(&signs) {
            decoder.row(c, &mut decoded);
            add_row(*sign, &decoded, &mut signed, &mut sizes);
        }
        for r in 0..m {
            let (want, abs) = signed_sum(input.row(r), &signed, &sizes);
            let part = &y[r * n..][block.clone()];
            let got: f64 = signs.iter().zip(part).map(|(sign, y)| sign * f64::from(*y)).sum();
            let magnitudes: f64 = part.iter().map(|y| f64::from(y.abs())).sum();
            let limit = bound_of_sum(terms, block.len(), magnitudes, abs);
            seen += block.len();
            if (got - want).abs() <= limit {
                continue;
            }
            // Which of them; and what saturates is judged by itself.
            let columns: Vec<_> = block.clone().collect();
            let exact = exact_part(problem, &problem.activations, &[r], &columns)?;
            exact.compare_at("y", part, terms, &[r], &columns)?;
        }
    }
    Ok(seen)
}

wide! {
    /// Adds `factor · w` to the sums and its magnitude to the sizes.
    fn add_row(factor: f64, w: &[f32], sums: &mut [f64], sizes: &mut [f64]) {
        for ((sum, size), w) in sums.iter_mut().zip(sizes).zip(w) {
            let product = factor * f64::from(*w);
            *sum += product;
            *size += product.abs();
        }
    }
}

wide! {
    /// `(Σ x·w, Σ |x|·size)`, in sums that run beside each other.
    fn signed_sum(x: &[f64], w: &[f64], sizes: &[f64]) -> (f64, f64) {
        const LANES: usize = 8;
        let (mut sum, mut abs) = ([0.0; LANES], [0.0; LANES]);
        let mut add = |i: usize, x: f64, w: f64, size: f64| {
            sum[i] += x * w;
            abs[i] += x.abs() * size;
        };
        let ((x, last_x), (w, last_w)) = (x.as_chunks::<LANES>(), w.as_chunks::<LANES>());
        let (sizes, last_sizes) = sizes.as_chunks::<LANES>();
        for ((x, w), sizes) in x.iter().zip(w).zip(sizes) {
            (0..LANES).for_each(|i| add(i, x[i], w[i], sizes[i]));
        }
        for (i, x) in last_x.iter().enumerate() {
            add(i, *x, last_w[i], last_sizes[i]);
        }
        (sum.iter().sum(), abs.iter().sum())
    }
}

/// First columns of the blocks to look at.
fn blocks(problem: &Problem<'_>) -> Vec<usize> {
    let (k, n) = (problem.weight.k, problem.weight.n());
    let count = n.div_ceil(BLOCK);
    let few = (WEIGHTS / (k * BLOCK).max(1)).max(4);
    if count <= few {
        return (0..n).step_by(BLOCK).collect();
    }
    let mut at = 0;
    let borders = problem.weight.segments.iter().flat_map(|s| {
        at += s.rows;
        [at.saturating_sub(BLOCK), at.min(n - 1)]
    });
    let between = (0..few).map(|i| i * (n - BLOCK) / few);
    let mut all: Vec<usize> = borders.chain(between).map(|c| c / BLOCK * BLOCK).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The exact `dx[m, k] = dy[m, n] W`, an f64 sum of exact products.
pub(crate) fn exact_backward(problem: &Problem<'_>, dy: &[f32]) -> Result<Exact> {
    let (m, k) = (problem.m, problem.weight.k);
    let decoder = RowDecoder::new(&problem.weight)?;
    let n = decoder.n();
    let (mut sums, mut sizes, mut row) = (vec![0f64; m * k], vec![0f64; m * k], vec![0.0; k]);
    for j in 0..n {
        decoder.row(j, &mut row);
        for r in 0..m {
            let factor = f64::from(dy[r * n + j]);
            let (sums, sizes) = (&mut sums[r * k..][..k], &mut sizes[r * k..][..k]);
            add_row(factor, &row, sums, sizes);
        }
    }
    let values = sums.into_iter().zip(sizes).collect();
    Ok(Exact { m, n: k, values })
}

/// What the bound of a forward result depends on.
pub(crate) fn forward_bound(path: ExecPath, problem: &Problem<'_>) -> Terms {
    let units = Units::of(path, &problem.activations);
    Terms { path, units, out: problem.io, k: problem.weight.k }
}

/// What the bound of a gradient depends on.
pub(crate) fn backward_bound(path: ExecPath, problem: &Problem<'_>) -> Terms {
    Terms { path, units: Units::Full, out: problem.io, k: backward_terms(problem.weight.n()) }
}

/// Decodes into `out` type with `layout` and compares bit for bit; the sign of zero is not judged.
pub(crate) fn check_decode(
    w: &dyn PreparedWeight,
    weight: &Q4Weight<'_>,
    out: DType,
    layout: Layout,
    threads: &ThreadPool,
) -> Result<usize> {
    let decoder = RowDecoder::new(weight)?;
    let (n, k) = (decoder.n(), decoder.k());
    let mut y = Guarded::output(out, n, k, layout);
    let mut scratch = Workspace::new(w.workspace(1), STALE);
    let mut cx = ExecContext::cpu(threads);
    cx.workspace = scratch.view()?;
    w.dequantize(y.view_mut()?, &mut cx)?;
    y.check_guards("decoded weight")?;
    scratch.check_guards()?;
    let got = y.values();
    let mut row = vec![0.0; k];
    let (mut wrong, mut first) = (0usize, None);
    for j in 0..n {
        decoder.row(j, &mut row);
        for (i, (got, exact)) in got[j * k..][..k].iter().zip(&row).enumerate() {
            let want = match out {
                DType::F16 => half::f16::from_f32(*exact).to_f32(),
                DType::BF16 => half::bf16::from_f32(*exact).to_f32(),
                _ => *exact,
            };
            if got.to_bits() != want.to_bits() && !(*got == 0.0 && want == 0.0) {
                wrong += 1;
                first = first.or(Some((j, i, want, *got)));
            }
        }
    }
    let Some((j, i, want, got)) = first else { return Ok(n * k) };
    let others = if wrong > 1 { format!(" and {} more of {}", wrong - 1, n * k) } else { String::new() };
    Err(failed(&format!("decoded w[{j}, {i}]{others} in {out}"))
        .need(format!("{want:e} ({:#010x}), bit for bit", want.to_bits()))
        .have(format!("{got:e} ({:#010x})", got.to_bits())))
}

/// A failure of the backend.
pub(crate) fn failed(what: &str) -> Error {
    Error::new(Code::ConformanceFailed, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lattice::{self, Sketch};
    use sha2::{Digest, Sha256};
    use std::fmt::Write;

    /// The oracle itself: first and last value as bits, and a digest of all, for each kind of product. A
    /// change here changes what conformance means.
    #[test]
    fn exact_products_are_pinned() -> Result<()> {
        let mut text = String::new();
        for schema in lattice::usual() {
            let k = 48usize.next_multiple_of(schema.k_block());
            let has = |kind: &&str| *kind != "fp8" || schema.activations().contains(kind);
            for kind in lattice::ACTIVATIONS.into_iter().filter(has) {
                for activations in lattice::quantizers(kind) {
                    let sketch = Sketch::plain(schema, activations, DType::BF16, [17, k, 5], 3);
                    let exact = sketch.with(exact_forward)?;
                    let bits = |v: &(f64, f64)| v.0.to_bits();
                    let mut digest = Sha256::new();
                    exact.values.iter().for_each(|v| digest.update(bits(v).to_le_bytes()));
                    let first = exact.values.first().map_or(0, bits);
                    let last = exact.values.last().map_or(0, bits);
                    let hash = digest.finalize();
                    let hash: String = hash[..12].iter().map(|b| format!("{b:02x}")).collect();
                    let _ = writeln!(text, "{:<72} {first:016x} {last:016x} {hash}", sketch.name());
                }
            }
        }
        insta::assert_snapshot!("exact", text);
        Ok(())
    }
}
