//! L2, values: inputs far from one, blocks and rows far from each other, results beyond what a half can hold.
use super::Scope;
use super::forward::check;
use crate::case::Case;
use crate::lattice::{Sketch, Values};
use crate::{Level, limits};
use q4_core::{Activations, DType};

/// `[n, k, m]`: one row, a few, and more than a tile of them, even and odd.
const SHAPES: [[usize; 3]; 3] = [[48, 272, 1], [65, 128, 6], [40, 144, 35]];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let formats = scope.quantizers();
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        for (j, values) in Values::EXTREME.into_iter().enumerate() {
            for (l, io) in limits::IO.into_iter().enumerate() {
                let shape = SHAPES[(i + j + l) % SHAPES.len()];
                let plain = scope.sketch(schema, formats[(i + j) % formats.len()], io, shape);
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
    }
}
