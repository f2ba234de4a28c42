//! L4, before a weight exists: what is not offered, not possible or contradictory is refused, by
//! `can_prepare` and by `prepare` alike.
use super::Scope;
use super::abi::PATHS;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::lattice::{self, Problem, Sketch};
use crate::product::{self, failed};
use crate::stored::Stored;
use q4_core::formats::{encodings, names};
use q4_core::{
    ActGlobal, ActQuant, Activations, DType, Device, ExecContext, ExecPath, GlobalScale, LinearSpec, OpSet,
    Part, Q4Schema, Q4Weight, Result, Rule,
};

/// Everything that the descriptor does not offer.
pub(super) fn backend_cases(all: &mut Vec<Case>) {
    for schema in names() {
        for path in PATHS {
            for kind in lattice::ACTIVATIONS {
                let sketch = Sketch::plain(
                    encodings(schema)[0],
                    lattice::quantizers(kind)[0],
                    DType::F32,
                    [128, 256, 4],
                    0,
                );
                all.push(Case::new(
                    Level::L4,
                    None,
                    format!("offers/{schema}@1/{kind}/{path}"),
                    move |bench| {
                        let offers = &bench.backend.descriptor().offers;
                        let is_offered = offers.iter().any(|(s, p)| s == schema && *p == path);
                        sketch.with(|problem| {
                            let spec = product::spec(bench, problem, OpSet::FORWARD);
                            // No processor has units that take 4-bit operands; their bound is not for it.
                            let is_absurd = path == ExecPath::NativeKernel && bench.device == Device::Cpu;
                            if is_offered && !is_absurd {
                                agree(bench, path, &problem.weight, &spec)
                            } else {
                                refuse(bench, path, &problem.weight, &spec)
                            }
                        })
                    },
                ));
            }
        }
    }
}

type Spoil = fn(&mut LinearSpec);

/// Specs that nobody can serve, each one edit away from a claimed one.
const IMPOSSIBLE: [(&str, Spoil); 9] = [
    ("input-of-bytes", |s| s.x = DType::U8),
    ("input-of-doubles", |s| s.x = DType::F64),
    ("output-of-integers", |s| s.y = DType::I32),
    ("output-of-e4m3", |s| s.y = DType::F8E4M3),
    ("no-segments", |s| s.segments.clear()),
    ("a-segment-without-rows", |s| s.segments[0].rows = 0),
    ("no-columns", |s| s.k = 0),
    ("a-device-that-is-not-there", |s| s.device = Device::Cuda(63)),
    ("half-a-block-of-activations", |s| s.k += 8),
];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let (claim, seed) = (scope.claim, scope.seed);
    let path = claim.path;
    let Some((schema, activations)) = scope.usual() else { return };
    let sketch = scope.sketch(schema, activations, scope.io(), [64, 256, 4]);
    for (name, spoil) in IMPOSSIBLE {
        // Native products of encodings without blocks along k may have any k.
        let may_be_ragged = claim.activations == "native" && schema.k_block() == 1;
        if name == "half-a-block-of-activations" && may_be_ragged {
            continue;
        }
        let sketch = sketch.clone();
        scope.add(all, Level::L4, format!("spec/{name}"), move |bench| {
            sketch.with(|problem| {
                let mut spec = product::spec(bench, problem, OpSet::FORWARD);
                spoil(&mut spec);
                refuse(bench, path, &problem.weight, &spec)
            })
        });
    }
    if claim.activations == "nvfp4" {
        let sketch = sketch.clone();
        scope.add(all, Level::L4, "spec/scale-of-the-other-convention", move |bench| {
            sketch.with(|problem| {
                let mut spec = product::spec(bench, problem, OpSet::FORWARD);
                let global = ActGlobal::Static(GlobalScale::divide(2.0)?);
                spec.activations = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global });
                refuse(bench, path, &problem.weight, &spec)
            })
        });
    }
    for (name, damage) in damages(schema) {
        let sketch = sketch.clone();
        scope.add(all, Level::L4, format!("weight/{name}"), move |bench| {
            damaged(bench, path, &sketch, damage)
        });
    }
    if schema.is_packed() && claim.activations == "native" {
        let sketch = sketch.clone();
        scope.add(all, Level::L4, "weight/nan-scale", move |bench| nan_scale(bench, path, &sketch));
    }
    scope.add(all, Level::L4, format!("verdicts-bind/s{seed}"), move |bench| {
        verdicts_bind(bench, path, schema, activations, seed)
    });
}

/// `can_prepare` says no, and `prepare` does too.
fn refuse(bench: &Bench<'_>, path: ExecPath, w: &Q4Weight<'_>, spec: &LinearSpec) -> Result<Seen> {
    if bench.backend.can_prepare(spec, path, bench.env).is_ok() {
        return Err(failed("can_prepare agrees to what cannot be served").have(describe(spec, path)));
    }
    agree(bench, path, w, spec)
}

/// `prepare` does what `can_prepare` says.
fn agree(bench: &Bench<'_>, path: ExecPath, w: &Q4Weight<'_>, spec: &LinearSpec) -> Result<Seen> {
    let verdict = bench.backend.can_prepare(spec, path, bench.env);
    let mut cx = ExecContext { device: spec.device, ..ExecContext::cpu(bench.threads) };
    let prepared = bench.backend.prepare(w, spec, path, &mut cx);
    match (&verdict, &prepared) {
        (Ok(()), Err(e)) => Err(failed("can_prepare agreed and prepare refused")
            .need(describe(spec, path))
            .have(e.to_string())),
        // What was built shows that it is not what the spec says, and dispatch refuses it for that.
        (Err(_), Ok(built)) if (built.info().n, built.info().k) != (spec.n(), spec.k) => Ok(Seen::exactly(2)),
        (Err(_), Ok(_)) => Err(failed("prepare served what can_prepare refuses").have(describe(spec, path))),
        _ => Ok(Seen::exactly(2)),
    }
}

fn describe(spec: &LinearSpec, path: ExecPath) -> String {
    format!(
        "{} via {path} with {} activations, {} -> {}, [{}, {}] in {} segments on {}",
        spec.schema.label(),
        spec.activations,
        spec.x,
        spec.y,
        spec.n(),
        spec.k,
        spec.segments.len(),
        spec.device
    )
}

/// Over the whole lattice of shapes: a verdict is what then happens.
fn verdicts_bind(
    bench: &Bench<'_>,
    path: ExecPath,
    schema: Q4Schema,
    activations: Activations,
    seed: u64,
) -> Result<Seen> {
    let mut seen = 0;
    for (i, n) in lattice::N.into_iter().enumerate() {
        for k in lattice::K.into_iter().take(9).chain(lattice::RAGGED_K) {
            if k % schema.k_block() != 0 {
                continue;
            }
            let io = [DType::F32, DType::BF16, DType::F16][i % 3];
            let sketch = Sketch::plain(schema, activations, io, [n, k, 1], seed);
            sketch
                .weight()
                .lend(|w| agree(bench, path, w, &product::spec(bench, &sketch.problem(w), OpSet::FORWARD)))?;
            seen += 1;
        }
    }
    Ok(Seen::exactly(seen))
}

/// How a stored weight contradicts its schema.
#[derive(Clone, Copy)]
enum Damage {
    ShortCodes,
    ShortScales,
    ForeignParts,
    MissingGlobal,
    Schema(Q4Schema),
}

/// The first encoding of that name with a per-tensor scale.
fn two_level(name: &str) -> Option<Q4Schema> {
    encodings(name).into_iter().find(|s| s.global().is_some())
}

fn damages(schema: Q4Schema) -> Vec<(&'static str, Damage)> {
    let mut all = vec![("foreign-parts", Damage::ForeignParts)];
    if schema.is_packed() {
        all.push(("short-codes", Damage::ShortCodes));
    }
    if schema.parts(1, schema.k_block()).iter().any(|p| p.part == Part::Scales) {
        all.push(("short-scales", Damage::ShortScales));
    }
    if two_level(schema.id().name).is_some() {
        all.push(("missing-global", Damage::MissingGlobal));
    }
    all.extend(schema.impossible().map(|(name, schema)| (name, Damage::Schema(schema))));
    all
}

fn damaged(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch, damage: Damage) -> Result<Seen> {
    let mut stored = sketch.weight();
    let part = &mut stored.parts[0].data;
    match damage {
        Damage::ShortCodes => part.shorten(Part::Codes, 8),
        Damage::ShortScales => part.shorten(Part::Scales, 1),
        Damage::MissingGlobal => {
            stored.schema = two_level(stored.schema.id().name).unwrap_or(stored.schema);
            part.global = None;
        }
        Damage::Schema(schema) => stored.schema = schema,
        Damage::ForeignParts => {}
    }
    stored.lend(|w| {
        let other = if w.schema.is_packed() { encodings("dense")[1] } else { encodings("nvfp4")[0] };
        let foreign = Stored::random(other, &[64], 256, false, 0);
        foreign.lend(|other| {
            let is_foreign = matches!(damage, Damage::ForeignParts);
            let weight = Q4Weight { segments: if is_foreign { other.segments } else { w.segments }, ..*w };
            let problem = Sketch { m: 1, max_m: 1, ..sketch.clone() }.problem(&weight);
            let spec = product::spec(bench, &problem, OpSet::FORWARD);
            match product::build(bench, path, &weight, &spec) {
                Err(_) => Ok(()),
                Ok(_) => Err(failed("prepare accepted a weight that contradicts its schema")),
            }
        })
    })?;
    // The next one is none the worse for it.
    sketch.with(|problem| super::forward::check(bench, path, problem))
}

/// A scale that is NaN: refused, or NaN in its row, never a number.
fn nan_scale(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch) -> Result<Seen> {
    let mut stored = sketch.weight();
    let (n, k) = (stored.n(), stored.k);
    let row = n / 2;
    // Terms of one sign, none of them zero: an infinity in the scale's place would stay one.
    let schema = stored.schema;
    schema.loudest(&mut stored.parts[0].data);
    let mut x = vec![0f32; k];
    stored.lend(|w| {
        let segment = &w.segments[0];
        schema.decoder([segment.rows, k], &segment.data)?.row(row, &mut x);
        Ok(())
    })?;
    x.iter_mut().for_each(|v| *v = if *v < 0.0 { -1.0 } else { 1.0 });
    schema.spoil(&mut stored.parts[0].data, row, k);
    stored.lend(|w| {
        let one = Sketch { m: 1, max_m: 1, ..sketch.clone() };
        let problem = Problem { x, ..one.problem(w) };
        let spec = product::spec(bench, &problem, OpSet::FORWARD);
        let Ok(prepared) = product::build(bench, path, w, &spec) else {
            return Ok(Seen::exactly(1));
        };
        let layout = crate::guarded::Layout::PLAIN;
        match product::forward(&*prepared, &problem, layout, product::STALE, bench.threads) {
            Err(_) => Ok(Seen::exactly(1)),
            Ok(y) if y.values()[row].is_nan() => Ok(Seen::exactly(1)),
            Ok(y) => Err(failed(&format!("y[0, {row}] of a weight with a NaN scale there"))
                .need("an error, or NaN")
                .have(format!("{:e}", y.values()[row]))),
        }
    })
}
