//! L1: `dequantize` is the definition of the values, bit for bit: every code under every scale, every layout.
use super::Scope;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::{Problem, Sketch};
use crate::limits::IO;
use crate::stored::Stored;
use crate::{Level, product};
use q4_core::formats::kind;
use q4_core::{Activations, DType, ExecPath, OpSet, Result};

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let claim = scope.claim;
    through_products(scope, all);
    let Some(io) = IO.into_iter().find(|io| scope.limits.has(OpSet::DEQUANTIZE, Some(*io))) else { return };
    let Some((_, format)) = scope.usual() else { return };
    let path = claim.path;
    let plan = Plan { path, format, io };
    let factors = [scope.limits.n_multiple, scope.limits.k_multiple];
    let edges = kind(claim.schema).into_iter().flat_map(|kind| (kind.edges)(claim.schema, factors));
    for (_, edge) in edges.enumerate().filter(|(i, _)| scope.has_turn_of_weight(*i)) {
        scope.add(all, Level::L1, edge.id.clone(), move |bench| {
            run(bench, plan, &Stored::of(&edge)?, !edge.is_rare)
        });
    }
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        for (j, (rows, k)) in SHAPES.iter().enumerate() {
            // Large ones in turns: every encoding has two of them.
            if j >= SMALL && ((j + i) % 3 != 0 || scope.repeats()) || !scope.has_turn_of_weight(i + j) {
                continue;
            }
            let base = scope.sketch(schema, format, io, [1, *k, 1]);
            let sketch = scope.limits.fit(Sketch { rows: rows.to_vec(), ..base });
            scope.add(all, Level::L1, format!("shape/{}", sketch.name()), move |bench| {
                run(bench, plan, &sketch.weight(), true)
            });
        }
    }
}

/// Out features of the segments and in features of decoded matrices.
const SHAPES: [(&[usize], usize); 15] = [
    (&[1], 16),
    (&[15], 48),
    (&[17], 80),
    (&[33], 144),
    (&[65], 272),
    (&[16, 48, 3], 64),
    (&[130], 1040),
    (&[641], 96),
    (&[1000, 24], 160),
    (&[72], 3072),
    (&[40, 8, 8], 4112),
    (&[136], 768),
    (&[264], 480),
    (&[4300, 801], 16),
    (&[3], 16_400),
];
/// Of them, those that every encoding has.
const SMALL: usize = 7;

/// Every value again, through the product: x is one row of the identity after the other. What a library
/// decodes when it is asked to decode says nothing about what it multiplies, and some do not decode at all.
fn through_products(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let (claim, limits) = (scope.claim, scope.limits.clone());
    if claim.activations == "native" && scope.limits.is_any_encoding() {
        for schema in scope.encodings().first().into_iter().flat_map(|schema| schema.blocks()) {
            let path = claim.path;
            let sketch = scope.sketch(schema, Activations::Native, scope.io(), [24, 512, 3]);
            let name = format!("blocks-multiplied/{}", sketch.name());
            scope.add(all, Level::L1, name, move |bench| {
                sketch.with(|problem| super::forward::check(bench, path, problem))
            });
        }
    }
    if claim.activations != "native" {
        return;
    }
    for schema in scope.encodings() {
        let (io, path, limits) = (scope.io(), claim.path, limits.clone());
        let Some(edge) = schema.every_code([limits.n_multiple, limits.k_multiple]) else { continue };
        let name = format!("every-code-multiplied/{}", schema.label());
        scope.add(all, Level::L1, name, move |bench| {
            let stored = Stored::of(&edge)?;
            let k = stored.k;
            let m = limits.max_m.unwrap_or(64).min(64).min(k);
            stored.lend(|weight| {
                let rows = |from: usize| -> Vec<f32> {
                    (0..m * k).map(|i| if i % k == from + i / k { 1.0 } else { 0.0 }).collect()
                };
                let mut problem = Problem {
                    name: String::new(),
                    weight: *weight,
                    x: rows(0),
                    m,
                    max_m: m,
                    activations: Activations::Native,
                    io,
                    recorded: None,
                };
                let spec = product::spec(bench, &problem, OpSet::FORWARD);
                let prepared = match product::prepare(bench, path, weight, &spec)? {
                    Ok(prepared) => prepared,
                    Err(reasons) => return Ok(Seen::Refused(reasons)),
                };
                let terms = product::forward_bound(path, &problem);
                let mut seen = Seen::Refused(Vec::new());
                for from in (0..k).step_by(m) {
                    problem.x = rows(from);
                    let y = product::forward(&*prepared, &problem, Layout::PLAIN, 0, bench.threads)?;
                    let y = y.values();
                    let worst = product::exact_forward(&problem)?.compare("y", &y, terms)?;
                    seen = seen.and(Seen::within(y.len(), worst));
                }
                Ok(seen)
            })
        });
    }
}

/// How weights are prepared to be decoded.
#[derive(Clone, Copy)]
struct Plan {
    path: ExecPath,
    format: Activations,
    io: DType,
}

/// Decodes to all three types; with `must`, refusing the weight is wrong once `can_prepare` agreed.
fn run(bench: &Bench<'_>, plan: Plan, stored: &Stored, must: bool) -> Result<Seen> {
    stored.lend(|w| {
        let problem = Problem {
            name: String::new(),
            weight: *w,
            x: Vec::new(),
            m: 1,
            max_m: 1,
            activations: plan.format,
            io: plan.io,
            recorded: None,
        };
        let spec = product::spec(bench, &problem, OpSet::FORWARD.with(OpSet::DEQUANTIZE));
        if let (false, Err(reasons)) = (must, bench.backend.can_prepare(&spec, plan.path, bench.env)) {
            return Ok(Seen::Refused(reasons));
        }
        let prepared = match product::prepare(bench, plan.path, w, &spec) {
            Ok(Ok(prepared)) => prepared,
            Ok(Err(reasons)) => return Ok(Seen::Refused(reasons)),
            Err(e) if must => return Err(e),
            Err(_) => return Ok(Seen::exactly(0)),
        };
        let mut values = 0;
        for (dtype, layout) in [
            (DType::F32, Layout::PLAIN),
            (DType::F32, Layout::HOSTILE),
            (DType::F16, Layout::PLAIN),
            (DType::BF16, Layout::HOSTILE),
        ] {
            values += product::check_decode(&*prepared, w, dtype, layout, bench.threads)?;
        }
        Ok(Seen::exactly(values))
    })
}
