//! L1: `dequantize` is the definition of the values, bit for bit: every code under every scale, every layout.
use super::Scope;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::{self, Sketch};
use crate::limits::IO;
use crate::measure::Problem;
use crate::stored::Stored;
use crate::{Level, product};
use q4_core::{
    Activations, Convention, DType, ExecPath, GlobalScale, NibbleOrder, OpSet, Q4Schema, Result, ScaleLayout,
};

/// Per-tensor scales at the ends of f32: results are subnormal, or nearly overflow, or are rounded twice.
const GLOBALS: [(&str, Option<(Convention, f32)>); 10] = [
    ("single", None),
    ("multiply-one", Some((Convention::Multiply, 1.0))),
    ("multiply-third", Some((Convention::Multiply, 1.0 / 3.0))),
    ("multiply-tiny", Some((Convention::Multiply, 1e-35))),
    ("multiply-subnormal", Some((Convention::Multiply, 1e-40))),
    ("multiply-huge", Some((Convention::Multiply, 1e34))),
    ("divide-one", Some((Convention::Divide, 1.0))),
    ("divide-third", Some((Convention::Divide, 1.0 / 3.0))),
    ("divide-huge", Some((Convention::Divide, 3e38))),
    ("divide-tiny", Some((Convention::Divide, 1e-34))),
];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let claim = scope.claim;
    through_products(scope, all);
    let Some(io) = IO.into_iter().find(|io| scope.limits.has(OpSet::DEQUANTIZE, Some(*io))) else { return };
    let Some((_, format)) = scope.usual() else { return };
    let path = claim.path;
    let plan = Plan { path, format, io };
    let (n_factor, k_factor) = (scope.limits.n_multiple, scope.limits.k_multiple);
    match claim.schema {
        "nvfp4" => {
            for (layout_name, layout) in LAYOUTS {
                for (name, global) in GLOBALS {
                    let id = format!("every-code/{layout_name}/{name}");
                    scope.add(all, Level::L1, id, move |bench| {
                        let stored = every_nvfp4(layout, global, (n_factor, k_factor))?;
                        run(bench, plan, &stored, true)
                    });
                }
                // A sign on a scale is legal in the encoding and nowhere written: serve it rightly or refuse
                // it.
                scope.add(all, Level::L1, format!("signed-scales/{layout_name}"), move |bench| {
                    let scales: Vec<u8> = (0x80..0xff).collect();
                    let rows = scales.len().next_multiple_of(n_factor);
                    let stored = Stored::every_nvfp4(layout, None, &scales, [rows, 256.max(k_factor)]);
                    run(bench, plan, &stored, false)
                });
            }
        }
        "nf4" | "nf4-dq" => {
            let nested = claim.schema == "nf4-dq";
            let (n, k) = (24usize.next_multiple_of(n_factor), 512.max(k_factor));
            for (name, order) in [("high", NibbleOrder::HighFirst), ("low", NibbleOrder::LowFirst)] {
                for block in BLOCKS {
                    let id = format!("every-code/{name}/{block}");
                    scope.add(all, Level::L1, id, move |bench| {
                        run(bench, plan, &Stored::every_nf4(order, block, nested, n, k), true)
                    });
                }
                if nested {
                    // Another map, a mean below zero, second scales in other blocks: right, or refused.
                    for second in [64, 256, 1024] {
                        let id = format!("nested-otherwise/{name}/{second}");
                        scope.add(all, Level::L1, id, move |bench| {
                            let mut stored = Stored::every_nf4(order, 64, true, n, 4 * k);
                            stored.nest_otherwise(second);
                            run(bench, plan, &stored, false)
                        });
                    }
                } else {
                    scope.add(all, Level::L1, format!("signed-scales/{name}"), move |bench| {
                        let mut stored = Stored::every_nf4(order, 64, false, n, k);
                        stored.negate_absmax();
                        run(bench, plan, &stored, false)
                    });
                }
            }
        }
        _ => {}
    }
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        for (j, (rows, k)) in SHAPES.iter().enumerate() {
            // Large ones in turns: every encoding has two of them.
            if j >= SMALL && ((j + i) % 3 != 0 || scope.repeats()) {
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

const LAYOUTS: [(&str, ScaleLayout); 2] =
    [("row-major", ScaleLayout::RowMajor), ("swizzled", ScaleLayout::Swizzled128x4)];

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

/// Every code under every scale, in as many rows and columns as the limits want.
fn every_nvfp4(
    layout: ScaleLayout,
    global: Option<(Convention, f32)>,
    (n_factor, k_factor): (usize, usize),
) -> Result<Stored> {
    let global = global.map(|(c, g)| GlobalScale::new(c, g)).transpose()?;
    let scales: Vec<u8> = (0..0x7f).collect();
    let rows = scales.len().next_multiple_of(n_factor);
    Ok(Stored::every_nvfp4(layout, global, &scales, [rows, 256.max(k_factor)]))
}

/// Every value again, through the product: x is one row of the identity after the other. What a library
/// decodes when it is asked to decode says nothing about what it multiplies, and some do not decode at all.
fn through_products(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let (claim, limits) = (scope.claim, scope.limits.clone());
    if claim.activations == "native" && scope.limits.is_any_encoding() {
        for schema in scope.encodings().first().into_iter().flat_map(|schema| blocks(*schema)) {
            let path = claim.path;
            let sketch = scope.sketch(schema, Activations::Native, scope.io(), [24, 512, 3]);
            let name = format!("blocks-multiplied/{}", sketch.name());
            scope.add(all, Level::L1, name, move |bench| {
                sketch.with(|problem| super::forward::check(bench, path, problem))
            });
        }
    }
    if claim.activations != "native" || claim.schema != "nvfp4" {
        return;
    }
    for schema in scope.encodings() {
        let Q4Schema::Nvfp4 { scale_layout, global } = schema else { continue };
        let (io, path, limits) = (scope.io(), claim.path, limits.clone());
        let name = format!("every-code-multiplied/{}", lattice::label(&schema));
        scope.add(all, Level::L1, name, move |bench| {
            let global = global.map(|c| (c, 1.0));
            let stored = every_nvfp4(scale_layout, global, (limits.n_multiple, limits.k_multiple))?;
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

/// Blocks of NF4 that checkpoints have.
const BLOCKS: [u32; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];

/// An encoding of NF4 in every block and order; nothing for others.
pub(super) fn blocks(schema: Q4Schema) -> Vec<Q4Schema> {
    let Q4Schema::Nf4 { nested, .. } = schema else { return Vec::new() };
    let orders = [NibbleOrder::HighFirst, NibbleOrder::LowFirst];
    let each = |nibble_order| BLOCKS.map(move |block| Q4Schema::Nf4 { nibble_order, block, nested });
    orders.into_iter().flat_map(each).collect()
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
