//! L2: what a weight says it fuses is what separate steps would give: a norm before the product, a gate
//! behind it, an addition to what y holds.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::{Guarded, Layout, Workspace};
use crate::lattice::{Problem, Sketch};
use crate::limits::IO;
use crate::product::{self, failed};
use crate::tolerance::{Terms, bound};
use q4_core::oracle::roundoff;
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    Activations, DType, Device, ExecContext, ExecPath, FuseSet, Fusion, OpSet, PreparedWeight, Reject,
    RejectCode, Result, RmsNorm, TensorView,
};

const EPS: f32 = 1e-6;
/// From here on a value rounds to an infinite f16.
const F16_END: f64 = 65520.0;

const SHAPES: [[usize; 3]; 5] =
    [[96, 256, 1], [160, 384, 5], [128, 256, 16], [288, 512, 33], [256, 640, 130]];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let (claim, seed) = (scope.claim, scope.seed);
    let path = claim.path;
    let Some((schema, activations)) = scope.usual() else { return };
    // A code of NVFP4 may change by half of its value with the last bit of the norm.
    let sets = (1..8).map(FuseSet).filter(|s| claim.activations != "nvfp4" || !s.contains(FuseSet::NORM));
    let each: Vec<_> =
        SHAPES.into_iter().flat_map(|shape| sets.clone().map(move |set| (shape, set))).collect();
    for io in IO.into_iter().filter(|io| scope.limits.has(OpSet::FORWARD, Some(*io))) {
        let limits = scope.limits.clone();
        let sketch = move |shape| limits.fit(Sketch::plain(schema, activations, io, shape, seed));
        let mut case = |name: String, each: Vec<([usize; 3], FuseSet)>| {
            let sketch = sketch.clone();
            scope.add(all, Level::L2, name, move |bench| {
                each.iter().try_fold(Seen::Refused(Vec::new()), |seen, (shape, set)| {
                    let next = sketch(*shape).with(|problem| check(bench, path, problem, *set))?;
                    Ok(seen.and(next))
                })
            });
        };
        // Fusing is rare on the CPU: one case for all that a weight may decline.
        if claim.device == Device::Cpu {
            case(format!("fused/{io}"), each.clone());
            continue;
        }
        for (shape, set) in &each {
            case(format!("fused/{}/{}", set.0, sketch(*shape).name()), vec![(*shape, *set)]);
        }
    }
}

fn check(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>, set: FuseSet) -> Result<Seen> {
    product::with(bench, path, problem, OpSet::FORWARD, |w| {
        let (m, k, n) = (problem.m, problem.weight.k, problem.weight.n());
        if !w.fuses(m, set) {
            let have = format!("parts {:#05b} of {m} rows are left to the caller", set.0);
            return Ok(Seen::Refused(vec![Reject::new(RejectCode::OpUnsupported, "a fused product", have)]));
        }
        let (norm, gate, add) =
            (set.contains(FuseSet::NORM), set.contains(FuseSet::GATE), set.contains(FuseSet::ACCUMULATE));
        let scale: Vec<f32> = (0..k).map(|i| 0.5 + (i * 7 % 13) as f32 / 8.0).collect();
        let x = if norm { normed(problem, &scale) } else { problem.x.clone() };
        let exact = product::exact_forward(&Problem { name: String::new(), x, recorded: None, ..*problem })?;
        let columns = if gate { n / 2 } else { n };
        let before: Vec<f32> = (0..m * columns).map(|i| (i % 23) as f32 / 4.0 - 2.5).collect();
        let y = run(w, problem, &scale, set, columns, &before, bench)?.values();
        // The last bit of a normed input is the kernel's own.
        let slack = match (norm, problem.activations) {
            (false, _) => 0.0,
            (true, Activations::Native) => 2.0 * roundoff(problem.io),
            (true, _) => 2.0 * roundoff(problem.io) + 0.01,
        };
        let terms = Terms { out: DType::F32, ..product::forward_bound(path, problem) };
        let sum = |r: usize, c: usize| {
            let (v, size) = exact.values[r * n + c];
            (v, bound(terms, v, size) + size * slack)
        };
        let mut worst = 0f64;
        for (i, got) in y.iter().enumerate() {
            let (r, c) = (i / columns, i % columns);
            let (mut want, mut limit) = sum(r, c);
            if gate {
                let (up, off) = sum(r, c + columns);
                let silu = want / (1.0 + (-want).exp());
                limit = 1.1 * limit * (up.abs() + off) + off * silu.abs() + 1e-5 * (silu * up).abs();
                want = silu * up;
            }
            if add {
                want += f64::from(before[i]);
                limit += want.abs() * roundoff(DType::F32);
            } else {
                limit += want.abs() * roundoff(problem.io) + f64::from(f32::MIN_POSITIVE);
                limit += if problem.io == DType::F16 { 0.5f64.powi(25) } else { 0.0 };
            }
            // Past the range of the type, infinity is the right answer.
            let saturates = !add && problem.io == DType::F16 && want.abs() + limit >= F16_END;
            if saturates && got.is_infinite() && f64::from(got.signum()) == want.signum() {
                continue;
            }
            let ratio = (f64::from(*got) - want).abs() / limit;
            if ratio.is_nan() || ratio > 1.0 {
                return Err(failed(&format!("y[{r}, {c}] of a product fused with parts {:#05b}", set.0))
                    .need(format!("{want:e} within {limit:e}"))
                    .have(format!("{got:e}")));
            }
            worst = worst.max(ratio);
        }
        Ok(Seen::within(y.len(), worst))
    })
}

fn run(
    w: &dyn PreparedWeight,
    problem: &Problem<'_>,
    scale: &[f32],
    set: FuseSet,
    columns: usize,
    before: &[f32],
    bench: &Bench<'_>,
) -> Result<Guarded> {
    let (m, k) = (problem.m, problem.weight.k);
    let norm = set.contains(FuseSet::NORM).then_some(()).map(|()| TensorView::of(scale, &[k])).transpose()?;
    let fusion = Fusion {
        norm: norm.map(|weight| RmsNorm { weight, eps: EPS }),
        gate: set.contains(FuseSet::GATE),
        accumulate: set.contains(FuseSet::ACCUMULATE),
    };
    let x_type = if fusion.norm.is_some() { DType::F32 } else { problem.io };
    let x = Guarded::input(x_type, &problem.x, m, k, Layout::PLAIN);
    let mut y = match fusion.accumulate {
        true => Guarded::input(DType::F32, before, m, columns, Layout::PLAIN),
        false => Guarded::output(problem.io, m, columns, Layout::PLAIN),
    };
    let mut scratch = Workspace::new(w.workspace(m), product::STALE);
    let mut cx = ExecContext::cpu(bench.threads);
    cx.workspace = scratch.view()?;
    w.forward_fused(x.view()?, &fusion, y.view_mut()?, &mut cx)?;
    y.check_guards("y")?;
    scratch.check_guards()?;
    Ok(y)
}

/// `x / sqrt(mean(x^2) + eps) * scale`, rounded to the type of the input.
fn normed(problem: &Problem<'_>, scale: &[f32]) -> Vec<f32> {
    let k = scale.len();
    let mut out = Vec::with_capacity(problem.x.len());
    for row in problem.x.chunks(k) {
        let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / k as f64;
        let inverse = 1.0 / (mean + f64::from(EPS)).sqrt();
        out.extend(row.iter().zip(scale).map(|(v, s)| (f64::from(*v) * inverse * f64::from(*s)) as f32));
    }
    IoBuffer::new(problem.io, &out).to_f32()
}
