//! L2: several weights in one call, as a layer of experts has them, where a backend takes them: every row is
//! a product with its own weight, however rows are dealt. L4: offsets that do not fit are refused.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::{Guarded, Layout, Workspace};
use crate::lattice::{Problem, Sketch};
use crate::limits::{IO, segments};
use crate::product::{self, failed};
use crate::tolerance::Exact;
use q4_core::stage::{Staged, StagedGroup};
use q4_core::{
    ActGlobal, Activations, Device, ExecContext, ExecPath, LinearSpec, OpSet, PreparedGroup, PreparedWeight,
    Q4Weight, Reject, RejectCode, Result, TensorView,
};
use std::sync::Arc;

/// Weights of a group.
const EXPERTS: usize = 5;
/// `[n, k]` of each, and rows of the call.
const SHAPES: [[usize; 3]; 4] = [[96, 256, 1], [48, 384, 7], [160, 256, 23], [64, 512, 96]];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let per_call = |a: &Activations| matches!(a, Activations::Nvfp4(q) if q.global == ActGlobal::PerCall);
    let activations = scope.quantizers().into_iter().find(|a| !per_call(a));
    let (Some((schema, _)), Some(activations)) = (scope.usual(), activations) else { return };
    for io in IO.into_iter().filter(|io| scope.limits.has(OpSet::FORWARD, Some(*io))) {
        let sketches = SHAPES.map(|shape| five(scope.sketch(schema, activations, io, shape)));
        scope.add(all, Level::L2, format!("grouped/{io}"), move |bench| {
            sketches.iter().try_fold(Seen::Refused(Vec::new()), |seen, sketch| {
                Ok(seen.and(sketch.with(|problem| check(bench, path, problem))?))
            })
        });
    }
}

/// What of it is refused. A device that does not wait cannot.
pub(super) fn refused_cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let (Some((schema, activations)), Device::Cpu) = (scope.usual(), scope.claim.device) else { return };
    let sketch = five(scope.sketch(schema, activations, scope.io(), [48, 128, 8]));
    scope.add(all, Level::L4, format!("grouped-offsets/{}", sketch.name()), move |bench| {
        sketch.with(|problem| refused(bench, path, problem))
    });
}

/// A product of one segment as one of five: its segments are the weights of a group.
fn five(sketch: Sketch) -> Sketch {
    let n = sketch.rows.iter().sum();
    Sketch { rows: vec![n; EXPERTS], ..sketch }
}

/// The segments of a problem as weights of one group, or why that is none.
fn group(
    bench: &Bench<'_>,
    path: ExecPath,
    problem: &Problem<'_>,
) -> Result<std::result::Result<Box<dyn PreparedGroup>, Vec<Reject>>> {
    let mut weights: Vec<Arc<dyn PreparedWeight>> = Vec::new();
    let whole = product::spec(bench, problem, OpSet::FORWARD);
    for segment in problem.weight.segments.chunks(1) {
        let w = Q4Weight { segments: segment, ..problem.weight };
        let own = segments(&[segment[0].rows], problem.m as u64);
        match product::prepare(bench, path, &w, &LinearSpec { segments: own, ..whole.clone() })? {
            Ok(prepared) => weights.push(Staged::unstaged(&prepared.into())),
            Err(reasons) => return Ok(Err(reasons)),
        }
    }
    let made = bench.backend.group(&weights, &mut ExecContext::on(bench.device, 0, bench.threads))?;
    let Some(made) = made else {
        let have = "weights that are called one after the other";
        return Ok(Err(vec![Reject::new(RejectCode::OpUnsupported, "a group of weights", have)]));
    };
    Ok(Ok(match bench.device {
        Device::Cpu => made,
        // It stages operands there.
        _ if bench.elsewhere().is_some() => made,
        device => Box::new(StagedGroup::new(made, device, bench.backend.memory(device)?)),
    }))
}

/// Offsets of calls of m rows: in turns, all to one, none to the outer ones, none to every other one, and as
/// unevenly as rows are dealt by a router.
fn deals(m: usize) -> Vec<Vec<i32>> {
    let dealt = |share: &dyn Fn(usize) -> usize| {
        let total: usize = (0..EXPERTS).map(share).sum();
        let upto = |e: usize| (0..e).map(share).sum::<usize>() * m / total;
        (0..=EXPERTS).map(|e| upto(e) as i32).collect::<Vec<_>>()
    };
    let mut all = vec![
        dealt(&|_| 1),
        dealt(&|e| usize::from(e == 0)),
        dealt(&|e| usize::from(e == EXPERTS - 1)),
        dealt(&|e| usize::from(e % (EXPERTS - 1) != 0)),
        dealt(&|e| usize::from(e % 2 == 1)),
        dealt(&|e| usize::from(e % 2 == 0)),
        dealt(&|e| [1, 17, 0, 5, 2][e]),
    ];
    all.sort_unstable();
    all.dedup();
    all
}

fn check(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    let group = match group(bench, path, problem)? {
        Ok(group) => group,
        Err(reasons) => return Ok(Seen::Refused(reasons)),
    };
    let (m, all) = (problem.m, problem.weight.n());
    let n = all / EXPERTS;
    // Of every row with every weight, side by side.
    let exact = product::exact_forward(problem)?;
    let (mut values, mut worst) = (0, 0f64);
    for offsets in deals(m) {
        let (y, _) = call(&*group, problem, &offsets, bench)?;
        let own = |r: usize| {
            let e = offsets.partition_point(|at| *at as usize <= r) - 1;
            exact.values[r * all + e * n..][..n].iter().copied()
        };
        let exact = Exact { m, n, values: (0..m).flat_map(own).collect() };
        let of = |e: q4_core::Error| e.within(format!("{EXPERTS} weights in one call, offsets {offsets:?}"));
        let terms = product::forward_bound(path, problem);
        worst = worst.max(exact.compare("y", &y.values(), terms).map_err(of)?);
        values += m * n;
    }
    Ok(Seen::within(values, worst))
}

/// y of a call, and its bits before; fails when the call touched what is not its own.
fn call(
    group: &dyn PreparedGroup,
    problem: &Problem<'_>,
    offsets: &[i32],
    bench: &Bench<'_>,
) -> Result<(Guarded, Vec<u8>)> {
    let (mut y, before) = output(problem);
    called(group, problem, offsets, &mut y, bench)?;
    y.check_guards("y")?;
    Ok((y, before))
}

fn output(problem: &Problem<'_>) -> (Guarded, Vec<u8>) {
    let y = Guarded::output(problem.io, problem.m, problem.weight.n() / EXPERTS, Layout::HOSTILE);
    let before = y.snapshot();
    (y, before)
}

fn called(
    group: &dyn PreparedGroup,
    problem: &Problem<'_>,
    offsets: &[i32],
    y: &mut Guarded,
    bench: &Bench<'_>,
) -> Result<()> {
    let x = Guarded::input(problem.io, &problem.x, problem.m, problem.weight.k, Layout::HOSTILE);
    let (before, lent) = (x.snapshot(), offsets.to_vec());
    let mut scratch = Workspace::new(group.workspace(problem.m), product::STALE);
    let mut cx = ExecContext::cpu(bench.threads);
    cx.workspace = scratch.view()?;
    let done = group.forward(x.view()?, TensorView::of(&lent, &[lent.len()])?, y.view_mut()?, &mut cx);
    x.check_unchanged("x", &before)?;
    scratch.check_guards()?;
    if lent != offsets {
        return Err(failed("the offsets were modified"));
    }
    done
}

fn refused(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    let group = match group(bench, path, problem)? {
        Ok(group) => group,
        Err(reasons) => return Ok(Seen::Refused(reasons)),
    };
    let m = problem.m as i32;
    let wrong: [(&str, [i32; EXPERTS + 1]); 6] = [
        ("that begin behind the first row", [1, 1, 1, m, m, m]),
        ("that begin before the first row", [-1, 0, 0, m, m, m]),
        ("that fall", [0, m, 0, m, m, m]),
        ("that end before the last row", [0, 0, 0, 0, m - 1, m - 1]),
        ("that end behind the last row", [0, 0, 0, 0, m, m + 1]),
        ("of more rows than there are", [0, m, 2 * m, 3 * m, 3 * m, m]),
    ];
    for (what, offsets) in wrong {
        let (mut y, before) = output(problem);
        if called(&*group, problem, &offsets, &mut y, bench).is_ok() {
            return Err(failed(&format!("offsets {what} were accepted"))
                .need(format!("an error for {offsets:?}, m = {m}"))
                .have("success"));
        }
        y.check_unchanged("y of a refused call", &before)?;
    }
    // It still computes.
    call(&*group, problem, &[0, m, m, m, m, m], bench)?;
    Ok(Seen::exactly(wrong.len() + 1))
}
