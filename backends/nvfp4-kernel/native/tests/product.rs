//! The product on every instruction set of this machine against an exact oracle, and the promises about its
//! bits.
#![allow(clippy::unwrap_used)]
mod harness;
use harness::{Ctx, Desc, Lent, Matrix, Rng, Source, Weight};
use q4_core::formats::{int8, nvfp4};
use q4_core::{ActGlobal, ActQuant, Activations, DType, GlobalScale, Rule, ScaleLayout};

const MS: [usize; 8] = [1, 2, 3, 4, 5, 8, 17, 33];
const NS: [usize; 6] = [1, 15, 16, 17, 48, 130];
const KS: [usize; 6] = [16, 48, 64, 80, 256, 320];
const MOST: usize = 33;
const IO: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// What a product does with its activations, as the description and as the oracle say it.
#[derive(Clone, Copy, Debug)]
enum Act {
    Native,
    Int8,
    Nvfp4(Rule, Option<GlobalScale>),
}

impl Act {
    fn all() -> Vec<Self> {
        let m = GlobalScale::multiply(0.003).unwrap();
        let d = GlobalScale::divide(333.0).unwrap();
        vec![
            Self::Native,
            Self::Int8,
            Self::Nvfp4(Rule::TorchAo, Some(m)),
            Self::Nvfp4(Rule::ModelOpt, None),
            Self::Nvfp4(Rule::CompressedTensors, Some(d)),
            Self::Nvfp4(Rule::TransformerEngine, Some(d)),
            Self::Nvfp4(Rule::Runtime, None),
        ]
    }
    fn apply(self, d: &mut Desc) {
        d.activations = match self {
            Self::Native => Activations::Native,
            Self::Int8 => Activations::Int8,
            Self::Nvfp4(rule, global) => {
                let global = global.map_or(ActGlobal::None, ActGlobal::Static);
                Activations::Nvfp4(ActQuant { rule, global })
            }
        };
    }
    /// The activations that really enter the product.
    fn quantised(self, x: &[f32], k: usize, source: DType) -> Vec<f64> {
        let mut out = Vec::new();
        for row in x.chunks_exact(k) {
            match self {
                Self::Native => out.extend(row.iter().map(|&v| f64::from(v))),
                Self::Int8 => {
                    let (mut q, mut s) = (vec![0; k], vec![0.0; k / 16]);
                    int8::quantize_row(row, &mut q, &mut s).unwrap();
                    out.extend(q.iter().enumerate().map(|(i, &q)| f64::from(q) * f64::from(s[i / 16])));
                }
                Self::Nvfp4(rule, global) => {
                    let (mut c, mut s, mut v) = (vec![0; k / 2], vec![0; k / 16], vec![0.0; k]);
                    nvfp4::Quantizer { rule, global, source }.quantize_row(row, &mut c, &mut s).unwrap();
                    nvfp4::dequantize_row(&c, &s, global, &mut v);
                    out.extend(v.iter().map(|&v| f64::from(v)));
                }
            }
        }
        out
    }
}

/// `(sum, sum of magnitudes)` for every output.
fn oracle(x: &[f64], w: &[f32], k: usize) -> Vec<(f64, f64)> {
    let dot = |x: &[f64], w: &[f32]| {
        x.iter()
            .zip(w)
            .fold((0.0, 0.0), |(s, a), (&x, &w)| (s + x * f64::from(w), a + (x * f64::from(w)).abs()))
    };
    x.chunks_exact(k).flat_map(|x| w.chunks_exact(k).map(move |w| dot(x, w))).collect()
}

fn ulp(v: f64, dtype: DType) -> f64 {
    let (bits, least) = match dtype {
        DType::F16 => (10, -24),
        DType::BF16 => (7, -133),
        _ => (23, -149),
    };
    (v.abs() * 2f64.powi(-bits)).max(2f64.powi(least))
}

fn globals() -> [Option<GlobalScale>; 3] {
    [None, Some(GlobalScale::multiply(0.0123).unwrap()), Some(GlobalScale::divide(77.7).unwrap())]
}

#[test]
fn every_kernel_meets_the_oracle_and_rows_do_not_depend_on_each_other() {
    let contexts = Ctx::all();
    let mut rng = Rng(1);
    let mut case = 0;
    for act in Act::all() {
        for n in NS {
            for k in KS {
                case += 1;
                let (x_type, y_type) = (IO[case % 3], IO[case / 3 % 3]);
                let source = Source::random(n, k, globals()[case / 2 % 3], &mut rng);
                let x = Matrix::of(&rng.floats(MOST * k), MOST, k, x_type);
                let exact = oracle(&act.quantised(&x.values(), k, x_type), &source.values(), k);
                let mut desc = Desc::of(std::slice::from_ref(&source), k);
                (desc.x, desc.y) = (x_type, y_type);
                act.apply(&mut desc);
                for (isa, ctx) in &contexts {
                    let w = Weight::new(ctx, &desc).unwrap();
                    let mut first: [Option<Vec<f32>>; 2] = [None, None];
                    for m in MS.into_iter().rev() {
                        let x = Matrix::of(&x.values()[..m * k], m, k, x_type);
                        let mut y = Matrix::blank(m, n, n, y_type);
                        w.forward(&x, &mut y, &Lent::serial()).unwrap();
                        let y = y.values();
                        for (i, (&y, &(want, size))) in y.iter().zip(&exact).enumerate() {
                            let bound = (k as f64 / 16.0 + 24.0) * 2f64.powi(-24) * size + ulp(want, y_type);
                            assert!(
                                (f64::from(y) - want).abs() <= bound,
                                "{isa} {act:?} m={m} n={n} k={k} {x_type}->{y_type} output {i}: {y} is not {want} +- {bound}"
                            );
                        }
                        let all = first[usize::from(on_unit(isa, act, m))].get_or_insert_with(|| y.clone());
                        assert!(
                            bits(&y) == bits(&all[..m * n]),
                            "{isa} {act:?} m={m} n={n} k={k}: depends on m"
                        );
                    }
                }
            }
        }
    }
}

/// Whether the matrix unit multiplies, which adds in an order of its own.
fn on_unit(isa: &str, act: Act, m: usize) -> bool {
    isa == "amx" && !matches!(act, Act::Int8) && m > 8
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn vector_kernels_agree_bit_for_bit() {
    // FNV-1a over all bits below: what every architecture must come to.
    const RECORDED: u64 = 0x314b_5613_cb26_de5a;
    let mut rng = Rng(2);
    let (n, k) = (50, 336);
    let mut fnv = 0xcbf2_9ce4_8422_2325u64;
    let source = Source::random(n, k, globals()[1], &mut rng);
    for act in Act::all() {
        // All that is left of a panel of six rows.
        for m in [1, 3, 9, 13, 14, 16, 17, 18] {
            // Without a function that libraries may round differently.
            let x: Vec<f32> = (0..m * k).map(|_| rng.unit() * rng.unit()).collect();
            let x = Matrix::of(&x, m, k, DType::F32);
            let mut seen: Option<(String, Vec<u32>)> = None;
            let vectors = |isa: &str| isa != "portable" && !on_unit(isa, act, m);
            for (isa, ctx) in Ctx::all().into_iter().filter(|(isa, _)| vectors(isa)) {
                let mut desc = Desc::of(std::slice::from_ref(&source), k);
                act.apply(&mut desc);
                let mut y = Matrix::blank(m, n, n, DType::F32);
                Weight::new(&ctx, &desc).unwrap().forward(&x, &mut y, &Lent::serial()).unwrap();
                let y = bits(&y.values());
                let (other, want) = seen.get_or_insert_with(|| (isa.clone(), y.clone()));
                assert!(y == *want, "{act:?} m={m}: {isa} differs from {other}");
            }
            for y in seen.into_iter().flat_map(|(_, y)| y) {
                fnv = (fnv ^ u64::from(y)).wrapping_mul(0x100_0000_01b3);
            }
        }
    }
    if Ctx::all().len() == 1 {
        println!("skipped: this processor has no vector kernels");
        return;
    }
    assert_eq!(fnv, RECORDED, "{fnv:#x}: not the bits of other architectures");
}

#[test]
fn integer_paths_are_exact_where_f32_is() {
    let mut rng = Rng(3);
    let global = GlobalScale::multiply(0.25).unwrap();
    for (k, n, m) in [(16, 17, 1), (320, 33, 2), (208, 16, 5), (320, 130, 33)] {
        let mut source = Source::random(n, k, Some(global), &mut rng);
        // Powers of two, 1 to 4.
        source.scales.iter_mut().for_each(|s| *s = 0x38 + 8 * (rng.next() % 3) as u8);
        // int8: every block has a 127, so its scale is the power of two it is multiplied with. NVFP4: the
        // same with 6.
        let eights: Vec<f32> = (0..m * k)
            .map(|i| if i % 16 == 5 { 127.0 } else { (rng.next() % 255) as f32 - 127.0 })
            .enumerate()
            .map(|(i, v)| v * 2f32.powi((i / 16 % 3) as i32 - 1))
            .collect();
        let table = q4_core::formats::e2m1::VALUES;
        let fours: Vec<f32> = (0..m * k)
            .map(|i| if i % 16 == 5 { -6.0 } else { table[(rng.next() % 16) as usize] })
            .enumerate()
            .map(|(i, v)| v * 2f32.powi((i / 16 % 3) as i32 - 1))
            .collect();
        for (act, x) in [(Act::Int8, &eights), (Act::Nvfp4(Rule::ModelOpt, None), &fours)] {
            let exact = act.quantised(x, k, DType::F32);
            assert!(
                exact.iter().zip(x).all(|(a, &b)| *a == f64::from(b)),
                "the test's own premise: nothing is rounded"
            );
            let want = oracle(&exact, &source.values(), k);
            for (isa, ctx) in Ctx::all() {
                let mut desc = Desc::of(std::slice::from_ref(&source), k);
                act.apply(&mut desc);
                let mut y = Matrix::blank(m, n, n, DType::F32);
                let x = Matrix::of(x, m, k, DType::F32);
                Weight::new(&ctx, &desc).unwrap().forward(&x, &mut y, &Lent::serial()).unwrap();
                for (y, (want, _)) in y.values().iter().zip(&want) {
                    assert_eq!(f64::from(*y), *want, "{isa} {act:?} m={m} n={n} k={k}");
                }
            }
        }
    }
}

#[test]
fn neither_threads_nor_strides_change_a_bit_and_gaps_stay_untouched() {
    let mut rng = Rng(4);
    for act in Act::all() {
        for (m, n, k) in [(1, 130, 80), (3, 70, 2064), (9, 130, 112), (70, 200, 144)] {
            let source = Source::random(n, k, globals()[2], &mut rng);
            let (x_type, y_type) = (IO[m % 3], IO[n % 3]);
            let values = rng.floats(m * k);
            for (isa, ctx) in Ctx::all() {
                let mut desc = Desc::of(std::slice::from_ref(&source), k);
                (desc.x, desc.y, desc.max_m) = (x_type, y_type, 70);
                act.apply(&mut desc);
                let mut dense = Matrix::blank(m, n, n, y_type);
                let w = Weight::new(&ctx, &desc).unwrap();
                w.forward(&Matrix::of(&values, m, k, x_type), &mut dense, &Lent::serial()).unwrap();
                for threads in [1, 3] {
                    let lent = Lent::threads(threads);
                    let w = Weight::with(&ctx, &desc, &lent).unwrap();
                    let mut y = Matrix::blank(m, n, n + 7, y_type);
                    w.forward(&Matrix::of(&values, m, k + 5, x_type), &mut y, &lent).unwrap();
                    assert!(y.gaps_are_untouched(), "{isa} {act:?} m={m}");
                    assert!(
                        bits(&y.values()) == bits(&dense.values()),
                        "{isa} {act:?} m={m} threads={threads}"
                    );
                }
            }
        }
    }
}

#[test]
fn one_weight_serves_several_threads_at_once() {
    let mut rng = Rng(5);
    let (m, n, k) = (5, 96, 256);
    let source = Source::random(n, k, None, &mut rng);
    let ctx = Ctx::new("portable");
    let mut desc = Desc::of(std::slice::from_ref(&source), k);
    Act::Int8.apply(&mut desc);
    let w = Weight::new(&ctx, &desc).unwrap();
    drop(ctx); // a weight keeps what it needs
    let w = std::sync::Arc::new(w);
    let threads: Vec<_> = (0..4)
        .map(|seed| {
            let w = w.clone();
            std::thread::spawn(move || {
                let x = Matrix::of(&Rng(seed).floats(m * k), m, k, DType::F32);
                let run = || {
                    let mut y = Matrix::blank(m, n, n, DType::F32);
                    w.forward(&x, &mut y, &Lent::threads(2)).unwrap();
                    bits(&y.values())
                };
                let first = run();
                (0..20).for_each(|_| assert!(run() == first));
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
}

#[test]
fn a_scale_per_call_is_that_of_all_rows() {
    let mut rng = Rng(6);
    let (m, n, k) = (4, 33, 96);
    let source = Source::random(n, k, globals()[1], &mut rng);
    for rule in Rule::ALL {
        for x_type in IO {
            let x = Matrix::of(&rng.floats(m * k), m, k, x_type);
            let amax = x.values().iter().fold(0f32, |a, v| a.max(v.abs()));
            let g = nvfp4::global_from_amax(rule, amax, x_type).unwrap();
            for (isa, ctx) in Ctx::all() {
                let mut desc = Desc::of(std::slice::from_ref(&source), k);
                desc.x = x_type;
                Act::Nvfp4(rule, Some(g)).apply(&mut desc);
                let (mut stated, mut found) =
                    (Matrix::blank(m, n, n, DType::F32), Matrix::blank(m, n, n, DType::F32));
                Weight::new(&ctx, &desc).unwrap().forward(&x, &mut stated, &Lent::serial()).unwrap();
                desc.activations = Activations::Nvfp4(ActQuant { rule, global: ActGlobal::PerCall });
                Weight::new(&ctx, &desc).unwrap().forward(&x, &mut found, &Lent::threads(3)).unwrap();
                assert!(bits(&stated.values()) == bits(&found.values()), "{isa} {rule:?} {x_type}");
            }
        }
    }
}

#[test]
fn stacked_segments_are_the_weights_one_by_one() {
    let mut rng = Rng(7);
    let k = 144;
    let parts: Vec<_> = [7, 20, 64]
        .iter()
        .zip([0.0123, 3.5, 0.007])
        .map(|(&rows, g)| Source::random(rows, k, GlobalScale::multiply(g).ok(), &mut rng))
        .collect();
    let n: usize = parts.iter().map(|p| p.rows).sum();
    for act in Act::all() {
        for m in [1, 6] {
            let x = Matrix::of(&rng.floats(m * k), m, k, DType::F32);
            for (isa, ctx) in Ctx::all() {
                let run = |sources: &[Source]| {
                    let mut desc = Desc::of(sources, k);
                    act.apply(&mut desc);
                    let n = desc.n();
                    let mut y = Matrix::blank(m, n, n, DType::F32);
                    Weight::new(&ctx, &desc).unwrap().forward(&x, &mut y, &Lent::serial()).unwrap();
                    y
                };
                let whole = run(&parts);
                let mut column = 0;
                for part in &parts {
                    let alone = run(std::slice::from_ref(part));
                    for (r, c) in (0..m).flat_map(|r| (0..part.rows).map(move |c| (r, c))) {
                        let (a, b) = (whole.get(r, column + c), alone.get(r, c));
                        assert_eq!(
                            a.to_bits(),
                            b.to_bits(),
                            "{isa} {act:?} m={m} row {r} column {}",
                            column + c
                        );
                    }
                    column += part.rows;
                }
                assert_eq!(column, n);
            }
        }
    }
}

#[test]
fn tiled_scales_are_the_same_weight() {
    let mut rng = Rng(8);
    for (n, k) in [(1, 16), (130, 80), (300, 320)] {
        let row_major = Source::random(n, k, globals()[1], &mut rng);
        let tiled = Source {
            scales: q4_core::formats::swizzle::to_blocked(&row_major.scales, n, k / 16),
            layout: ScaleLayout::Swizzled128x4,
            ..row_major.clone()
        };
        let ctx = Ctx::new("portable");
        let decoded = [&row_major, &tiled].map(|s| {
            let mut out = Matrix::blank(n, k, k, DType::F32);
            Weight::new(&ctx, &Desc::of(std::slice::from_ref(s), k))
                .unwrap()
                .dequantize(&mut out, &Lent::serial())
                .unwrap();
            out.bytes
        });
        assert!(decoded[0] == decoded[1], "{n} x {k}");
    }
}

#[test]
fn dequantize_is_exact_for_every_code_under_every_scale() {
    let (n, k) = (19, 127 * 16);
    let codes: Vec<u8> =
        (0..n * k / 2).map(|i| (2 * i % 16) as u8 | (((2 * i + 1) % 16) << 4) as u8).collect();
    // Row r starts at scale r, so that every scale meets several lanes and groups.
    let scales: Vec<u8> = (0..n * 127).map(|i| ((i % 127 + i / 127) % 127) as u8).collect();
    let extreme = [1e-38f32, 3.3e38, 0.1, 1.0 / 3.0, 2688.0];
    let globals = extreme
        .iter()
        .flat_map(|&v| [GlobalScale::multiply(v).ok(), GlobalScale::divide(v).ok()])
        .chain([None]);
    let contexts = Ctx::all();
    for global in globals {
        let source = Source {
            rows: n,
            k,
            codes: codes.clone(),
            scales: scales.clone(),
            layout: ScaleLayout::RowMajor,
            global,
        };
        let want: Vec<f32> = (0..n * k)
            .map(|i| {
                let s = q4_core::formats::e4m3::TABLE[usize::from(scales[i / 16])];
                q4_core::formats::e2m1::VALUES[i % 16] * global.map_or(s, |g| g.effective(s))
            })
            .collect();
        for (isa, ctx) in &contexts {
            let w = Weight::new(ctx, &Desc::of(std::slice::from_ref(&source), k)).unwrap();
            for (dtype, threads) in IO.into_iter().flat_map(|d| [(d, 1), (d, 3)]) {
                let mut out = Matrix::blank(n, k, k + 3, dtype);
                w.dequantize(&mut out, &Lent::threads(threads)).unwrap();
                assert!(out.gaps_are_untouched());
                assert!(out.bytes == Matrix::of(&want, n, k + 3, dtype).bytes, "{isa} {global:?} {dtype}");
            }
        }
    }
}

#[test]
fn the_gradient_of_the_input_meets_the_oracle() {
    let mut rng = Rng(9);
    for (case, (m, n, k)) in
        [(1, 1, 16), (1, 130, 80), (3, 17, 64), (8, 48, 320), (33, 130, 48), (70, 40, 112)]
            .into_iter()
            .enumerate()
    {
        let parts = [
            Source::random(n, k, [None, GlobalScale::multiply(0.3).ok()][case % 2], &mut rng),
            Source::random(9, k, [None, GlobalScale::multiply(0.0123).ok()][case % 2], &mut rng),
        ];
        let values: Vec<f32> = parts.iter().flat_map(Source::values).collect();
        let n = n + 9;
        let (x_type, y_type) = (IO[case % 3], IO[case / 2 % 3]);
        let dy = Matrix::of(&rng.floats(m * n), m, n + 2, y_type);
        for (isa, ctx) in Ctx::all() {
            let mut desc = Desc::of(&parts, k);
            (desc.x, desc.y, desc.max_m) = (x_type, y_type, 70);
            let w = Weight::new(&ctx, &desc).unwrap();
            let [one, three] = [1, 3].map(|threads| {
                let mut dx = Matrix::blank(m, k, k + 1, x_type);
                w.backward(&dy, &mut dx, &Lent::threads(threads)).unwrap();
                assert!(dx.gaps_are_untouched());
                dx
            });
            assert!(one.bytes == three.bytes, "{isa}: depends on threads");
            for (r, c) in (0..m).flat_map(|r| (0..k).map(move |c| (r, c))) {
                let terms = (0..n).map(|j| f64::from(dy.get(r, j)) * f64::from(values[j * k + c]));
                let (want, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                let bound = 2.0 * (n as f64 + 1.0) * 2f64.powi(-24) * size + ulp(want, x_type);
                let have = f64::from(one.get(r, c));
                assert!(
                    (have - want).abs() <= bound,
                    "{isa} m={m} n={n} k={k} ({r}, {c}): {have} is not {want}"
                );
            }
        }
    }
}
