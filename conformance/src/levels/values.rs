//! L2, values: inputs far from one, blocks and rows far from each other, results beyond what a half can hold.
use super::Scope;
use super::forward::check;
use crate::case::{Case, Seen};
use crate::lattice::{self, Problem, Sketch, Values};
use crate::{Level, limits, product};
use q4_core::{Activations, DType, OpSet, Q4Schema, RowDecoder};

/// `[n, k, m]`: one row, a few, and more than a tile of them, even and odd.
const SHAPES: [[usize; 3]; 3] = [[48, 272, 1], [65, 128, 6], [40, 144, 35]];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let formats = scope.quantizers();
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        for (j, values) in Values::EXTREME.into_iter().enumerate() {
            for (l, io) in limits::IO.into_iter().enumerate() {
                let shape = SHAPES[(i + j + l) % SHAPES.len()];
                let plain = scope.sketch(schema, formats[(i + j + 3 * l) % formats.len()], io, shape);
                // The scale of a quantised input would be subnormal itself, and lose what the input has left.
                let is_lost = values == Values::Subnormal && plain.activations != Activations::Native;
                let values = if is_lost && plain.io != DType::F16 { Values::Tiny } else { values };
                let sketch = Sketch { values, ..plain };
                let name = format!("values/{}", sketch.name());
                scope.add(all, Level::L2, name, move |bench| {
                    sketch.with(|problem| check(bench, path, problem))
                });
            }
        }
        loudest(scope, schema, formats[i % formats.len()], all);
    }
    let Some((schema, _)) = scope.usual() else { return };
    // Every way to round has ties of its own.
    for activations in formats {
        let sketch =
            Sketch { values: Values::Ties, ..scope.sketch(schema, activations, scope.io(), SHAPES[1]) };
        let name = format!("values/{}", sketch.name());
        scope.add(all, Level::L2, name, move |bench| sketch.with(|problem| check(bench, path, problem)));
    }
    if scope.claim.activations != "nvfp4" {
        return;
    }
    for (i, activations) in lattice::rarer_quantizers().into_iter().enumerate() {
        let io = limits::IO[i % limits::IO.len()];
        let sketch = scope.sketch(schema, activations, io, SHAPES[i % SHAPES.len()]);
        let name = format!("values/{}", sketch.name());
        scope.add(all, Level::L2, name, move |bench| {
            sketch.with(|problem| {
                let spec = product::spec(bench, problem, OpSet::FORWARD);
                // Rules that a claim does not list may be left out.
                match bench.backend.can_prepare(&spec, path, bench.env) {
                    Err(reasons) => Ok(Seen::Refused(reasons)),
                    Ok(()) => check(bench, path, problem),
                }
            })
        });
    }
}

/// The largest sums there are: every code is the largest, and each row of x has the signs of a row of the
/// weight.
fn loudest(scope: &Scope<'_>, schema: Q4Schema, activations: Activations, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let sketch = scope.sketch(schema, activations, scope.io(), [33, 512, 5]);
    let name = format!("values/loudest/{}", sketch.name());
    scope.add(all, Level::L2, name, move |bench| {
        let mut stored = sketch.weight();
        stored.loudest();
        stored.lend(|weight| {
            let decoder = RowDecoder::new(weight)?;
            let (k, mut x) = (weight.k, vec![0.0; sketch.m * weight.k]);
            for (r, x) in x.chunks_mut(k).enumerate() {
                decoder.row(r % decoder.n(), x);
                x.iter_mut().for_each(|v| *v = if *v < 0.0 { -1.5 } else { 1.5 });
            }
            let problem = Problem {
                name: sketch.name(),
                weight: *weight,
                x,
                m: sketch.m,
                max_m: sketch.max_m,
                activations,
                io: sketch.io,
                recorded: None,
            };
            check(bench, path, &problem)
        })
    });
}
