//! L2, directed: inputs made for the weight, where they are rounded to FP8. FP8 tensor cores may lose more
//! than a wrong rounding changes most sums of random signs. So x has the signs of a row of the weight, and
//! every error of a wrong rounding the sign of its product: all of them add up to several percent of
//! `Σ|x·w|`, which is y itself. What is lost of k shows in rows with one value.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::lattice::{Problem, Sketch};
use crate::product;
use q4_core::formats::fp8::inputs::BLOCK;
use q4_core::{Activations, ExecPath, Fp8Inputs, OpSet, PreparedWeight, Result, RowDecoder};

/// `[n, k, m]`: two tiles of out features, a last block of in features that is cut, and more rows than a
/// kernel for few has. Then so many in features that they pass any ring of slabs, and are shared out.
const SHAPE: [usize; 3] = [136, 400, 33];
const LONG: [usize; 3] = [40, 4112, 17];
/// The same for rows with one value: each in feature has one, and of many at least one in 31.
const SINGLE: [usize; 3] = [136, 272, 272];
const LONG_SINGLE: [usize; 3] = [40, 4112, 136];

/// The largest of what shares a scale: that is 2^-5 then, as the stored one of the suite is. All values are
/// exact in 16 bits.
const LARGEST: f32 = 14.0;
/// The smallest code times that scale.
const SMALLEST: f32 = 1.0 / 16384.0;

/// What a row of x is, and its magnitudes, from a row of the weight and its own place among the others.
type Row = (&'static str, fn(&[f32], usize) -> Vec<f32>);

/// Rows whose errors add up; the last is for a stored scale alone.
const ROWS: [Row; 6] = [
    ("ties that go down", ties_down),
    ("ties that go up", ties_up),
    ("subnormal codes", subnormal),
    ("blocks far apart", apart),
    ("a loud product", loud),
    ("values beyond the largest code", beyond),
];
const SINGLES: [Row; 1] = [("one value", single)];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    if scope.claim.activations != "fp8" {
        return;
    }
    let path = scope.claim.path;
    let formats = scope.quantizers();
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        let mut case = |activations: &Activations, shape: [usize; 3], rows: &'static [Row]| {
            let sketch = scope.sketch(schema, *activations, scope.io(), shape);
            let name = if rows.len() == 1 { "directed/single" } else { "directed" };
            let id = format!("{name}/{}", sketch.name());
            scope.add(all, Level::L2, id, move |bench| {
                each(bench, path, &sketch, (rows, shape[2]), &mut |w, problem| {
                    product::checked(w, path, problem, bench.threads)
                })
            });
        };
        let rows = |activations: &Activations| match activations {
            Activations::Fp8(Fp8Inputs::Static(_)) => &ROWS[..],
            _ => &ROWS[..ROWS.len() - 1],
        };
        formats.iter().for_each(|a| case(a, SHAPE, rows(a)));
        // Long ones in turns.
        if let Some(a) = formats.get(i % formats.len().max(1)) {
            case(a, LONG, rows(a));
            case(a, SINGLE, &SINGLES);
            case(a, LONG_SINGLE, &SINGLES);
        }
    }
}

/// Behind an even mantissa: what is not rounded, or away from zero, is too large.
fn ties_down(w: &[f32], turn: usize) -> Vec<f32> {
    under_a_scale(w, |i| tie(2 * (turn % 4), i + turn))
}

/// Behind an odd one: what is cut is too small.
fn ties_up(w: &[f32], turn: usize) -> Vec<f32> {
    under_a_scale(w, |i| tie(2 * (turn % 4) + 1, i + turn))
}

/// Halfway between the code with so many eighths and the next.
fn tie(eighths: usize, i: usize) -> f32 {
    (1.0 + eighths as f32 / 8.0 + 0.0625) * [0.25, 0.5, 1.0, 2.0, 4.0][i % 5]
}

/// Ties between subnormal codes, those of a row in one direction.
fn subnormal(w: &[f32], turn: usize) -> Vec<f32> {
    under_a_scale(w, |i| (1.5 + (turn % 2 + 2 * (i % 3)) as f32) * SMALLEST)
}

/// The largest value in one block, alone, and so small ones in the others that a scale of the row leaves one
/// bit of them, and scales of their own everything.
fn apart(w: &[f32], _: usize) -> Vec<f32> {
    let at = quietest(w);
    let of = |i| match i / BLOCK == at / BLOCK {
        true if i == at => LARGEST,
        true => 0.0,
        false => 1.375 * SMALLEST,
    };
    (0..w.len()).map(of).collect()
}

/// All of them have the same code.
fn beyond(w: &[f32], turn: usize) -> Vec<f32> {
    (0..w.len()).map(|i| [14.5, 15.0, 18.0, 28.0, 448.0][(i + turn) % 5]).collect()
}

/// One product of the first that are added, and others that add up to much, of which units that have met it
/// keep nothing: those of sm_90 in every third row, units with fewer bits in the next ones.
fn loud(w: &[f32], turn: usize) -> Vec<f32> {
    let first = &w[..w.len().min(32)];
    let at = (0..first.len()).max_by(|a, b| first[*a].abs().total_cmp(&first[*b].abs())).unwrap_or(0);
    let quiet = 0.99 * LARGEST * w[at].abs() * 0.5f32.powi([14, 12, 11][turn % 3]);
    let code = |w: f32| {
        let steps = (quiet / w.abs() / SMALLEST).min(LARGEST / SMALLEST).floor();
        f32::from_bits(steps.to_bits() & !0xf_ffff) * SMALLEST
    };
    let mut x = under_a_scale(w, |i| code(w[i]));
    x[at] = LARGEST;
    x
}

/// One value, the last in feature's first: whatever is lost of others cannot hide it.
fn single(w: &[f32], turn: usize) -> Vec<f32> {
    let at = w.len() - 1 - 31 * turn % w.len();
    (0..w.len()).map(|i| if i == at { 1.0 + (turn % 8) as f32 / 8.0 } else { 0.0 }).collect()
}

/// These values; but the largest, which gives each block its scale, where its product counts least.
fn under_a_scale(w: &[f32], of: impl Fn(usize) -> f32) -> Vec<f32> {
    let mut x: Vec<f32> = (0..w.len()).map(of).collect();
    x.chunks_mut(BLOCK).zip(w.chunks(BLOCK)).for_each(|(x, w)| x[quietest(w)] = LARGEST);
    x
}

fn quietest(w: &[f32]) -> usize {
    (0..w.len()).min_by(|a, b| w[*a].abs().total_cmp(&w[*b].abs())).unwrap_or(0)
}

/// `[count, k]`, a row of x for each of these rows of the weight, with its signs.
fn made(decoder: &RowDecoder<'_>, features: &[usize], count: usize, (_, row): Row) -> Vec<f32> {
    let mut w = vec![0.0; decoder.k()];
    let one = |turn: usize| {
        decoder.row(features[turn % features.len()], &mut w);
        row(&w, turn).iter().zip(&w).map(|(x, w)| x.copysign(*w)).collect::<Vec<_>>()
    };
    (0..count).flat_map(one).collect()
}

/// Rows of the weight, those first whose blocks each have an element that counts least beside the others.
fn features(decoder: &RowDecoder<'_>) -> Vec<usize> {
    let mut w = vec![0.0; decoder.k()];
    let mut loudness = |row: usize| {
        decoder.row(row, &mut w);
        let share = |block: &[f32]| {
            let all: f32 = block.iter().map(|w| w.abs()).sum();
            if all > 0.0 { block[quietest(block)].abs() / all } else { f32::INFINITY }
        };
        w.chunks(BLOCK).map(share).fold(0.0, f32::max)
    };
    let mut all: Vec<_> = (0..decoder.n()).map(|row| (loudness(row), row)).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all.into_iter().map(|(_, row)| row).collect()
}

/// Has so many rows of each kind judged, in calls of as many as there may be, and the first alone.
fn each(
    bench: &Bench<'_>,
    path: ExecPath,
    sketch: &Sketch,
    (rows, count): (&[Row], usize),
    judge: &mut dyn FnMut(&dyn PreparedWeight, &Problem<'_>) -> Result<Seen>,
) -> Result<Seen> {
    sketch.with(|problem| {
        let decoder = RowDecoder::new(&problem.weight)?;
        let (features, k) = (features(&decoder), decoder.k());
        product::with(bench, path, problem, OpSet::FORWARD, |w| {
            let mut seen = Seen::exactly(0);
            for row in rows {
                let all = made(&decoder, &features, count, *row);
                for x in all.chunks(problem.m * k).chain([&all[..k]]) {
                    let (m, x) = (x.len() / k, x.to_vec());
                    let problem = Problem { name: String::new(), x, m, recorded: None, ..*problem };
                    let next = judge(w, &problem).map_err(|e| e.within(format!("{}, {m} rows", row.0)))?;
                    seen = seen.and(next);
                }
            }
            Ok(seen)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::liars::{honest_units, mutants};
    use crate::product::{Lent, exact_forward, forward_bound, forward_lent};
    use crate::{lattice, proofs};
    use q4_core::selfcheck::IoBuffer;
    use q4_core::{DType, Device, HostEnv, Q4Backend, ThreadPool, formats};

    const PATH: ExecPath = ExecPath::FusedRounded;

    /// Largest error of these rows over its bound, for every kind of scale of the input.
    fn worst(backend: &dyn Q4Backend, shape: [usize; 3], rows: &[Row], seed: u64) -> Result<f64> {
        let (env, threads, device) = (HostEnv::default(), ThreadPool::new(2), Device::Cpu);
        let proofs = proofs(backend, &env, device);
        let bench = Bench { backend, env: &env, device, threads: &threads, abi: None, proofs: &proofs };
        let encodings = formats::encodings("fp8");
        let schema = encodings[seed as usize % encodings.len()];
        let mut worst = 0f64;
        for activations in lattice::quantizers("fp8") {
            let sketch = Sketch::plain(schema, activations, DType::BF16, shape, seed);
            each(&bench, PATH, &sketch, (rows, shape[2]), &mut |w, problem| {
                assert_eq!(IoBuffer::new(DType::F16, &problem.x).to_f32(), problem.x, "exact in 16 bits");
                assert_eq!(IoBuffer::new(DType::BF16, &problem.x).to_f32(), problem.x, "exact in 16 bits");
                let y = forward_lent(w, problem, Lent::PLAIN, &threads)?.values();
                let terms = forward_bound(PATH, problem);
                for (y, (exact, abs)) in y.iter().zip(exact_forward(problem)?.values) {
                    worst = worst.max((f64::from(*y) - exact).abs() / crate::bound(terms, exact, abs));
                }
                Ok(Seen::exactly(y.len()))
            })?;
        }
        Ok(worst)
    }

    /// What each shows alone, by more than twice the bound. The correct one loses most beside a loud product.
    #[test]
    fn errors_add_up_to_twice_the_bound() -> Result<()> {
        let wrong: [(&str, [usize; 3], &[usize]); 12] = [
            ("units-as-it-is", SHAPE, &[0]),
            ("units-ties-up", SHAPE, &[0]),
            ("units-cut", SHAPE, &[1]),
            ("units-without-subnormals", SHAPE, &[2]),
            ("units-by-row", SHAPE, &[3]),
            ("units-by-block", SHAPE, &[3]),
            ("units-taken-out-at-the-end", LONG, &[4]),
            ("units-with-ten-bits", SHAPE, &[4]),
            ("units-without-the-stored-scale", SHAPE, &[5]),
            ("units-past-its-end", SHAPE, &[5]),
            ("units-end-of-long-sums-lost", LONG_SINGLE, &[]),
            ("units-slab-of-many-lost", LONG_SINGLE, &[]),
        ];
        for (name, shape, rows) in wrong {
            let mutant = mutants().find(|m| m.name == name).unwrap_or_else(|| panic!("no mutant {name}"));
            let rows: Vec<_> = rows.iter().map(|i| ROWS[*i]).collect();
            let rows = if rows.is_empty() { SINGLES.to_vec() } else { rows };
            for seed in 0..3 {
                let ratio = worst(&*mutant.backend(), shape, &rows, seed)?;
                println!("{name}, seed {seed}: {ratio:.2} of the bound");
                assert!(ratio > 2.0, "{name}, seed {seed}: {ratio:.2} of the bound");
            }
        }
        for seed in 0..3 {
            for (shape, rows) in [(SHAPE, &ROWS[..]), (LONG, &ROWS[..]), (SINGLE, &SINGLES[..])] {
                let ratio = worst(&*honest_units(), shape, rows, seed)?;
                println!("the correct one, k = {}, seed {seed}: {ratio:.2} of the bound", shape[1]);
                assert!(ratio < 0.8, "seed {seed}: {ratio:.2} of the bound");
            }
        }
        Ok(())
    }
}
