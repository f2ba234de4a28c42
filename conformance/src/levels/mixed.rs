//! L2 and L3: x and y of different types. Programs compute in f32 and keep results in 16 bits, or make logits
//! of f32 from 16 bits.
use super::Scope;
use super::backward::gradients;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::{Layout, Place};
use crate::lattice::Problem;
use crate::limits::IO;
use crate::product::{self, Lent, failed};
use crate::tolerance::{Terms, backward_terms};
use q4_core::oracle::{Units, roundoff};
use q4_core::{DType, ExecPath, LinearSpec, OpSet, Result};

/// `[n, k, m]`: one row, some, and more than a tile of them.
const SHAPES: [[usize; 3]; 3] = [[65, 272, 1], [48, 144, 6], [130, 80, 35]];

pub(super) fn cases(scope: &Scope<'_>, op: OpSet, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let (formats, level) = (scope.quantizers(), if op == OpSet::FORWARD { Level::L2 } else { Level::L3 });
    let pairs = IO.into_iter().flat_map(|x| IO.map(|y| (x, y))).filter(|(x, y)| x != y);
    let has = |io| scope.limits.has(op, Some(io));
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        for (j, (x, y)) in pairs.clone().enumerate().filter(|(_, (x, y))| has(*x) && has(*y)) {
            let shape = SHAPES[(i + j) % SHAPES.len()];
            let sketch = scope.sketch(schema, formats[(i + j) % formats.len()], x, shape);
            scope.add(all, level, format!("mixed/{y}/{}", sketch.name()), move |bench| {
                sketch.with(|problem| match op {
                    OpSet::FORWARD => forward(bench, path, problem, y),
                    _ => backward(bench, path, problem, y),
                })
            });
        }
    }
}

/// As in one call after the other of a program: closely packed, and with y in a wider matrix.
const LENT: [Lent; 2] = [
    Lent::PLAIN,
    Lent { output: Layout { gap: 37, place: Place::End }, fill: 0xff, spare: 4096, ..Lent::PLAIN },
];

fn spec(bench: &Bench<'_>, problem: &Problem<'_>, y: DType, ops: OpSet) -> LinearSpec {
    LinearSpec { y, ..product::spec(bench, problem, ops) }
}

fn forward(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>, y: DType) -> Result<Seen> {
    let w = match product::prepare(bench, path, &problem.weight, &spec(bench, problem, y, OpSet::FORWARD))? {
        Ok(prepared) => prepared,
        Err(reasons) => return Ok(Seen::Refused(reasons)),
    };
    let exact = product::exact_forward(problem)?;
    let terms = Terms { out: y, ..product::forward_bound(path, problem) };
    let mut worst = 0f64;
    for lent in LENT {
        let (from, to) = ((problem.io, &problem.x[..], problem.m), (y, problem.weight.n()));
        let got = product::called(&*w, OpSet::FORWARD, from, to, lent, bench.threads)?;
        worst = worst.max(exact.compare("y", &got.values(), terms)?);
    }
    // An operand of the other's type does not fit.
    let swapped = ((y, &problem.x[..], problem.m), (problem.io, problem.weight.n()));
    if product::called(&*w, OpSet::FORWARD, swapped.0, swapped.1, Lent::PLAIN, bench.threads).is_ok() {
        return Err(failed("a call with the types of x and y exchanged was served"));
    }
    Ok(Seen::within(LENT.len() * exact.values.len(), worst))
}

fn backward(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>, y: DType) -> Result<Seen> {
    let ops = OpSet::FORWARD.with(OpSet::BACKWARD_INPUT);
    let w = match product::prepare(bench, path, &problem.weight, &spec(bench, problem, y, ops))? {
        Ok(prepared) => prepared,
        Err(reasons) => return Ok(Seen::Refused(reasons)),
    };
    // Gradients have the type of y.
    let dy = gradients(problem, y);
    let exact = product::exact_backward(problem, &dy)?;
    // A dense copy has the type of y.
    let is_coarser = path == ExecPath::DequantMatmul && roundoff(y) > roundoff(problem.io);
    let out = if is_coarser { y } else { problem.io };
    let terms = Terms { path, units: Units::Full, out, k: backward_terms(problem.weight.n()) };
    let mut worst = 0f64;
    for lent in LENT {
        let (from, to) = ((y, &dy[..], problem.m), (problem.io, problem.weight.k));
        let dx = product::called(&*w, OpSet::BACKWARD_INPUT, from, to, lent, bench.threads)?;
        worst = worst.max(exact.compare("dx", &dx.values(), terms)?);
    }
    Ok(Seen::within(LENT.len() * exact.values.len(), worst))
}
