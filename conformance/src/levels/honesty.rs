//! L5, evidence: which activation format really ran, and that what is kept is the weight and not the caller's
//! bytes.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::{self, Problem, Sketch};
use crate::product::{self, failed};
use q4_core::{DType, ExecPath, OpSet, Result};

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let (claim, seed, io) = (scope.claim, scope.seed, scope.io());
    let path = claim.path;
    let Some((_, activations)) = scope.usual() else { return };
    for schema in scope.encodings() {
        for io in [DType::F32, DType::F16] {
            let sketch = scope.sketch(schema, activations, io, [64, 256, 3]);
            let name = format!("format/{}", sketch.name());
            // A half output of a dense copy is looser than the difference between the formats.
            let is_told_apart = sketch.io == DType::F32 || path != ExecPath::DequantMatmul;
            if is_told_apart {
                let sketch = sketch.clone();
                scope.add(all, Level::L5, name, move |bench| {
                    sketch.with(|problem| format_that_ran(bench, path, problem))
                });
            }
            let name = format!("source-destroyed/{}", sketch.name());
            scope.add(all, Level::L5, name, move |bench| source_destroyed(bench, path, &sketch));
        }
        let name = format!("info/{}/s{seed}", schema.label());
        let sketches = [[64, 128, 1], [17, 48, 4], [130, 256, 129]]
            .map(|shape| scope.sketch(schema, activations, io, shape));
        scope.add(all, Level::L5, name, move |bench| {
            let seen = sketches.iter().map(|s| s.with(|problem| info(bench, path, problem)));
            Ok(Seen::exactly(seen.sum::<Result<usize>>()?))
        });
    }
}

/// On inputs that every format rounds to something else, the result is that of the format that was asked for.
fn format_that_ran(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    // One large element a block: int8 and E2M1 lose the small ones whole, and each rounds the large ones in
    // its own way. Where the bound is wide, small ones that were kept in part would leave too little to see.
    let x: Vec<f32> = (0..problem.x.len())
        .map(|i| match i % 16 {
            0 => 127.0 + (i / 16 % 5) as f32,
            j => 0.3 + j as f32 / 100.0,
        })
        .collect();
    let x = q4_core::selfcheck::IoBuffer::new(problem.io, &x).to_f32();
    let problem = Problem { name: problem.name.clone(), x, recorded: None, ..*problem };
    product::with(bench, path, &problem, OpSet::FORWARD, |w| {
        let y = product::forward(w, &problem, Layout::PLAIN, product::STALE, bench.threads)?.values();
        let terms = product::forward_bound(path, &problem);
        let own = product::exact_forward(&problem)?;
        let verdict = own.compare("y", &y, terms);
        for kind in lattice::ACTIVATIONS {
            if kind == problem.activations.as_str() {
                continue;
            }
            let other = product::exact_forward_as(&problem, &lattice::quantizers(kind)[0])?;
            // The crafted input must tell the formats apart, or this case proves nothing.
            let exact: Vec<f32> = own.values.iter().map(|v| v.0 as f32).collect();
            if other.compare("y", &exact, terms).is_ok() {
                return Err(q4_core::Error::new(
                    q4_core::Code::Internal,
                    format!("{kind} cannot be told apart here"),
                ));
            }
            if verdict.is_err() && other.compare("y", &y, terms).is_ok() {
                return Err(failed("another activation format ran")
                    .need(problem.activations.as_str())
                    .have(kind));
            }
        }
        Ok(Seen::within(y.len(), verdict?))
    })
}

/// The caller's bytes are gone after `prepare`; the product is not.
fn source_destroyed(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch) -> Result<Seen> {
    let mut stored = sketch.weight();
    let intact = stored.clone();
    let prepared = stored.lend(|w| {
        product::prepare(bench, path, w, &product::spec(bench, &sketch.problem(w), OpSet::FORWARD))
    })?;
    let w = match prepared {
        Ok(w) => w,
        Err(reasons) => return Ok(Seen::Refused(reasons)),
    };
    stored.destroy();
    intact.lend(|weight| product::checked(&*w, path, &sketch.problem(weight), bench.threads))
}

fn described(i: &q4_core::PreparedInfo) -> String {
    format!(
        "{} via {} with {} activations, [{}, {}], {} bytes resident, ops {:#05b}",
        i.backend, i.path, i.activations, i.n, i.k, i.resident_bytes, i.ops.0
    )
}

/// `info()` is the plan, before and after calls, and does not understate what is kept.
fn info(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<usize> {
    let spec = product::spec(bench, problem, OpSet::FORWARD);
    let Ok(w) = product::prepare(bench, path, &problem.weight, &spec)? else { return Ok(0) };
    let before = described(w.info());
    product::forward(&*w, problem, Layout::PLAIN, product::STALE, bench.threads)?;
    product::check_info(bench, path, &spec, &*w)?;
    let after = described(w.info());
    if before != after {
        return Err(failed("info() changed after a call").need(before).have(after));
    }
    // Codes and scales are the least a 4-bit weight can be kept in, a half of each element the least of a
    // dense one.
    let least = spec.schema.least_bytes(spec.n(), spec.k);
    let have = w.info().resident_bytes;
    if have < least {
        return Err(failed("info(): resident_bytes")
            .need(format!("at least {least}"))
            .have(have.to_string()));
    }
    // Asked again on the same terms, the same plan.
    let again = product::build(bench, path, &problem.weight, &spec)?;
    if described(again.info()) != before {
        return Err(failed("two weights prepared alike differ in info()"));
    }
    // What the most rows need is lent to all calls.
    let sizes: Vec<_> = (1..=problem.max_m).map(|m| w.workspace(m)).collect();
    if let Some(m) = sizes.windows(2).position(|s| s[0] > s[1]) {
        return Err(failed("workspace(m) is not a growing number of bytes").have(format!(
            "{} of {} rows and {} of one more",
            sizes[m],
            m + 1,
            sizes[m + 1]
        )));
    }
    if (1..=problem.max_m).any(|m| w.workspace(m) != sizes[m - 1]) {
        return Err(failed("workspace(m) is not a fixed number of bytes"));
    }
    Ok(3)
}
