//! The step against f64, the formats against their description, and what the formats must never do.
use super::*;
use crate::rng::stochastic_bf16;
use q4_core::formats::{e2m1, e4m3, nvfp4};
use q4_core::{DType, Rule};

const HYPER: Hyper =
    Hyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, grad_scale: 0.5 };

fn normals(seed: u64, n: usize, deviation: f32) -> Vec<f32> {
    let r = Philox::new(seed, 0, 0);
    (0..n as u64).map(|i| r.normal(i) * deviation).collect()
}

/// Gradients over many orders of magnitude, some exactly zero.
fn wild(seed: u64, n: usize) -> Vec<f32> {
    let (r, s) = (Philox::new(seed, 0, 1), Philox::new(seed, 0, 2));
    (0..n as u64)
        .map(|i| if i % 97 == 0 { 0.0 } else { r.normal(i) * (2.0 * s.normal(i)).exp() * 1e-4 })
        .collect()
}

/// Moments in f64 from the bytes, as the module documentation describes the formats, without the code that
/// packs them.
fn decode(layout: &StateLayout, state: &[u8]) -> (Vec<f64>, Vec<f64>) {
    let s = layout.sections().map(|range| &state[range]);
    let float = |bytes: &[u8], i: usize| {
        f64::from(f32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().expect("4")))
    };
    let nibble = |bytes: &[u8], i: usize| usize::from(bytes[i / 2] >> (4 * (i % 2)) & 15);
    let n = layout.len();
    let each = |f: &dyn Fn(usize) -> f64| (0..n).map(f).collect::<Vec<_>>();
    match layout.format() {
        StateFormat::F32 => (each(&|i| float(s[0], i)), each(&|i| float(s[1], i))),
        StateFormat::Int8 => (
            each(&|i| f64::from(maps::SIGNED8.values[usize::from(s[0][i])]) * float(s[2], i / 256)),
            each(&|i| f64::from(maps::UNSIGNED8.values[usize::from(s[1][i])]) * float(s[3], i / 256)),
        ),
        StateFormat::Int4 => (
            each(&|i| f64::from(maps::SIGNED4[nibble(s[0], i)]) * float(s[2], i / 128)),
            each(&|i| (2f64.powf(0.4 * (nibble(s[1], i) as f64 - 15.0)) * float(s[3], i / 128)).powi(2)),
        ),
        StateFormat::Nvfp4 => {
            let scale = |x: &[u8], second: &[u8], i: usize| {
                f64::from(e4m3::decode(x[i / 16])) * float(second, i / TILE)
            };
            (
                each(&|i| f64::from(e2m1::VALUES[nibble(s[0], i)]) * scale(s[2], s[4], i)),
                each(&|i| {
                    let code = nibble(s[1], i);
                    assert!(code < 8, "a root has no sign");
                    let root = if code == 0 { 0.25 } else { f64::from(e2m1::VALUES[code]) };
                    (root * scale(s[3], s[5], i)).powi(2)
                }),
            )
        }
    }
}

/// Largest relative error a packed value may have, for one that is not small beside its block.
fn tolerance(format: StateFormat) -> (f64, f64) {
    match format {
        StateFormat::F32 => (1e-6, 1e-6),
        // Half the widest step of the map beside its value: 10^-k (0.1 + 0.9/2^(k+1)) and so on; the last
        // decade has 64 steps.
        StateFormat::Int8 => (0.04, 0.02),
        // A neighbour: 0.2125 for 0.11 of the mean, a ratio of 1.32 in the root.
        StateFormat::Int4 => (1.0, 0.75),
        // A neighbour: 0.5 for 0.25.
        StateFormat::Nvfp4 => (1.0, 3.0),
    }
}

#[test]
fn every_format_follows_the_f64_reference() {
    let pool = ThreadPool::new(2);
    for format in StateFormat::ALL {
        // No multiple of a tile or a block.
        let n = 2 * TILE + 1072;
        let layout = StateLayout::new(format, n);
        let mut state = vec![0u8; layout.bytes()];
        let mut w = normals(1, n, 0.02);
        for step in 1..=6 {
            let h = Hyper { step, ..HYPER };
            let g = wild(step, n);
            let (m, v) = decode(&layout, &state);
            let before = w.clone();
            adamw(
                &h,
                &layout,
                Master::F32(&mut w),
                Gradient::F32(&g),
                &mut state,
                Philox::new(0, 0, 0),
                &pool,
            )
            .expect("step");
            let (m_new, v_new) = decode(&layout, &state);
            let (b1, b2) = (f64::from(h.beta1), f64::from(h.beta2));
            let t = step as i32;
            // Twice the largest update exact moments allow: the weights of past gradients in m, squared, over
            // those in v.
            let shares: f64 =
                (0..t).map(|k| ((1.0 - b1) * b1.powi(k)).powi(2) / ((1.0 - b2) * b2.powi(k))).sum();
            let limit = 2.0 * (shares * (1.0 - b2.powi(t))).sqrt() / (1.0 - b1.powi(t));
            let (mut largest_m, mut largest_v) = (0f64, 0f64);
            let mut want = Vec::new();
            for i in 0..n {
                let g = f64::from(g[i]) * f64::from(h.grad_scale);
                // What rounding is relative to: the sum may cancel.
                let size = (b1 * m[i]).abs() + ((1.0 - b1) * g).abs();
                let (m, v) = (b1 * m[i] + (1.0 - b1) * g, b2 * v[i] + (1.0 - b2) * g * g);
                let update = (m / (1.0 - b1.powi(t))) / ((v / (1.0 - b2.powi(t))).sqrt() + f64::from(h.eps));
                assert!(format != StateFormat::F32 || update.abs() <= 0.5 * limit * (1.0 + 1e-5), "{update}");
                let w = f64::from(before[i]) * (1.0 - f64::from(h.lr) * f64::from(h.weight_decay))
                    - f64::from(h.lr) * update.clamp(-limit, limit);
                want.push((w, m, v, size));
                (largest_m, largest_v) = (largest_m.max(m.abs()), largest_v.max(v));
            }
            let (tm, tv) = tolerance(format);
            for (i, (x, m, v, size)) in want.into_iter().enumerate() {
                let error = (f64::from(w[i]) - x).abs();
                // The update is at most a few lr; where m cancels it has fewer digits.
                assert!(
                    error <= 1e-7 * x.abs() + 1e-5 * f64::from(h.lr),
                    "{format:?} step {step} w[{i}]: {} for {x}",
                    w[i]
                );
                // Small beside the largest of all, a value may become any other small one.
                assert!(
                    (m_new[i] - m).abs() <= tm * m.abs() + 0.09 * largest_m,
                    "{format:?} m[{i}]: {} for {m}",
                    m_new[i]
                );
                assert!(
                    (v_new[i] - v).abs() <= tv * v + 0.09 * largest_v,
                    "{format:?} v[{i}]: {} for {v}",
                    v_new[i]
                );
                if format == StateFormat::F32 {
                    assert!((m_new[i] - m).abs() <= tm * size && (v_new[i] - v).abs() <= tv * v + 1e-30);
                }
            }
        }
    }
}

#[test]
fn packed_values_are_the_nearest_or_neighbours() {
    use moments::{Draws, Moment, Part, pack, unpack};
    for format in [StateFormat::Int8, StateFormat::Int4, StateFormat::Nvfp4] {
        for moment in [Moment::Mean, Moment::Square] {
            let [codes, scales, second] = format.tile_bytes();
            let (mut codes, mut scales, mut second) = (vec![0; codes], vec![0; scales], vec![0; second]);
            let x: Vec<f32> =
                wild(9, TILE).iter().map(|x| if moment == Moment::Square { x * x } else { *x }).collect();
            let mut part = Part { codes: &mut codes, scales: &mut scales, second: &mut second };
            let root = |x: f32| {
                if format != StateFormat::Int8 && moment == Moment::Square {
                    f64::from(x).sqrt()
                } else {
                    f64::from(x)
                }
            };
            // Means over many draws.
            let (draws, mut means) = (400, vec![0f64; TILE]);
            let mut y = vec![0f32; TILE];
            for step in 0..draws {
                let random = Draws { rng: Philox::new(4, step, 0), first: 3 * TILE };
                pack(format, moment, &mut x.clone(), &mut part, &random);
                unpack(format, moment, &part, &mut y);
                means.iter_mut().zip(&y).for_each(|(m, y)| *m += root(*y) / draws as f64);
            }
            // What any code would decode to in each block, found by decoding all of them.
            let levels = match format {
                StateFormat::Int8 => 256usize,
                StateFormat::Nvfp4 if moment == Moment::Square => 8,
                _ => 16,
            };
            let mut all = vec![vec![0f32; TILE]; levels];
            for (code, all) in all.iter_mut().enumerate() {
                let byte = if levels == 256 { code } else { code | code << 4 } as u8;
                let mut codes = vec![byte; part.codes.len()];
                let part = Part { codes: &mut codes, scales: part.scales, second: part.second };
                unpack(format, moment, &part, all);
            }
            for i in 0..TILE {
                let (want, have) = (root(x[i]), root(y[i]));
                let mut near: Vec<f64> = all.iter().map(|a| root(a[i])).collect();
                near.sort_by(f64::total_cmp);
                let slack = 1e-5 * want.abs() + 1e-30;
                if format == StateFormat::Int8 {
                    let best = near.iter().map(|v| (v - want).abs()).fold(f64::INFINITY, f64::min);
                    assert!((have - want).abs() <= best + slack, "{format:?} {i}: {have} for {want}");
                    continue;
                }
                let low = near.iter().copied().filter(|v| *v <= want + slack).fold(near[0], f64::max);
                let high = near
                    .iter()
                    .rev()
                    .copied()
                    .filter(|v| *v >= want - slack)
                    .fold(near[levels - 1], f64::min);
                assert!(low - slack <= have && have <= high + slack, "{format:?} {i}: {have} for {want}");
                // Five deviations of a mean; what lies below the smallest value cannot be right.
                let bound = 2.5 * (high - low) / (draws as f64).sqrt() + slack;
                let mean = means[i];
                assert!(want < near[0] || (mean - want).abs() <= bound, "{format:?} {i}: {mean} for {want}");
            }
        }
    }
}

#[test]
fn threads_and_interruptions_change_no_bit() {
    let n = 5 * TILE * TILES + 3 * TILE + 272;
    for format in StateFormat::ALL {
        for master in [MasterFormat::F32, MasterFormat::Bf16] {
            let layout = StateLayout::new(format, n);
            let run = |threads: usize,
                       from: Option<(Vec<f32>, Vec<u16>, Vec<u8>)>,
                       steps: std::ops::RangeInclusive<u64>| {
                let pool = ThreadPool::new(threads);
                let (mut w, mut b, mut state) = from.unwrap_or_else(|| {
                    let w = normals(1, n, 0.02);
                    let b = w.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
                    (w, b, vec![0u8; layout.bytes()])
                });
                for step in steps {
                    let g = wild(step, n);
                    let m = match master {
                        MasterFormat::F32 => Master::F32(&mut w),
                        MasterFormat::Bf16 => Master::Bf16(&mut b),
                    };
                    let h = Hyper { step, ..HYPER };
                    adamw(&h, &layout, m, Gradient::F32(&g), &mut state, Philox::new(5, step, 3), &pool)
                        .expect("step");
                }
                (w, b, state)
            };
            let whole = run(1, None, 1..=3);
            assert!(whole == run(4, None, 1..=3), "{format:?} {master:?}: threads");
            // The bytes of a checkpoint are these very bytes.
            assert!(whole == run(2, Some(run(3, None, 1..=2)), 3..=3), "{format:?} {master:?}: resume");
        }
    }
}

#[test]
fn a_bf16_gradient_is_the_f32_one_it_stands_for() {
    let n = TILE + 16;
    let pool = ThreadPool::new(1);
    let bits: Vec<u16> = wild(2, n).iter().map(|x| (x.to_bits() >> 16) as u16).collect();
    let floats: Vec<f32> = bits.iter().map(|b| f32::from_bits(u32::from(*b) << 16)).collect();
    let layout = StateLayout::new(StateFormat::Nvfp4, n);
    let run = |g: Gradient<'_>| {
        let (mut w, mut state) = (normals(1, n, 0.02), vec![0; layout.bytes()]);
        adamw(&HYPER, &layout, Master::F32(&mut w), g, &mut state, Philox::new(0, 0, 0), &pool)
            .expect("step");
        (w, state, sum_of_squares(g, &pool))
    };
    assert_eq!(run(Gradient::Bf16(&bits)), run(Gradient::F32(&floats)));
}

#[test]
fn a_bf16_master_lands_beside_the_f32_one() {
    let n = 3 * TILE;
    let pool = ThreadPool::new(1);
    let layout = StateLayout::new(StateFormat::F32, n);
    let mut bits: Vec<u16> = normals(1, n, 0.02).iter().map(|x| (x.to_bits() >> 16) as u16).collect();
    let mut w: Vec<f32> = bits.iter().map(|b| f32::from_bits(u32::from(*b) << 16)).collect();
    let g = wild(1, n);
    let (mut a, mut b) = (vec![0; layout.bytes()], vec![0; layout.bytes()]);
    let rng = Philox::new(8, 1, 2);
    adamw(&HYPER, &layout, Master::F32(&mut w), Gradient::F32(&g), &mut a, rng, &pool).expect("step");
    adamw(&HYPER, &layout, Master::Bf16(&mut bits), Gradient::F32(&g), &mut b, rng, &pool).expect("step");
    assert_eq!(a, b);
    for i in 0..n {
        assert_eq!(bits[i], stochastic_bf16(w[i], rng.half(i as u64)), "{i}");
    }
}

/// Trains on one gradient, under `noise` times as much noise, and returns the share of the weight's NVFP4
/// codes that changed.
fn moved(format: StateFormat, master: MasterFormat, beta2: f32, noise: f32) -> f64 {
    let (n, k) = (32, 1024);
    let layout = StateLayout::choose(format, &[n, k]);
    // Another stretch of it each step.
    let errors = normals(3, 4 * n * k, noise * 1e-3);
    let pool = ThreadPool::new(2);
    let bits: Vec<u16> = normals(1, n * k, 0.02).iter().map(|x| (x.to_bits() >> 16) as u16).collect();
    let start: Vec<f32> = bits.iter().map(|b| f32::from_bits(u32::from(*b) << 16)).collect();
    let (mut w, mut b) = (start.clone(), bits);
    let g = normals(2, n * k, 1e-3);
    let mut state = vec![0; layout.bytes()];
    for step in 1..=200 {
        let m = match master {
            MasterFormat::F32 => Master::F32(&mut w),
            MasterFormat::Bf16 => Master::Bf16(&mut b),
        };
        let h = Hyper { lr: 1e-5, beta2, weight_decay: 0.0, step, grad_scale: 1.0, ..HYPER };
        let mut g = g.clone();
        let begin = (step * 7919) as usize % (3 * n * k);
        g.iter_mut().zip(&errors[begin..]).for_each(|(g, e)| *g += e);
        adamw(&h, &layout, m, Gradient::F32(&g), &mut state, Philox::new(1, step, 0), &pool).expect("step");
    }
    if master == MasterFormat::Bf16 {
        w = b.iter().map(|b| f32::from_bits(u32::from(*b) << 16)).collect();
    }
    let codes = |w: &[f32]| {
        let global =
            weight::global_scale(ScaleChoice::PowerOfTwo, w.iter().fold(0f32, |a, x| a.max(x.abs())))
                .expect("scale");
        let q = nvfp4::Quantizer { rule: Rule::ModelOpt, global: Some(global), source: DType::F32 };
        let (mut codes, mut scales) = (vec![0; w.len() / 2], vec![0; w.len() / 16]);
        q.quantize_row(w, &mut codes, &mut scales).expect("quantised");
        codes
    };
    let (a, b) = (codes(&start), codes(&w));
    let differ = |a: &u8, b: &u8| u32::from((a ^ b) & 15 != 0) + u32::from((a ^ b) >> 4 != 0);
    f64::from(a.iter().zip(&b).map(|(a, b)| differ(a, b)).sum::<u32>()) / (n * k) as f64
}

#[test]
fn small_steps_move_the_weights() {
    let mut wrong = Vec::new();
    for (beta2, noise) in [(0.999, 0.0), (0.95, 3.0)] {
        let exact = moved(StateFormat::F32, MasterFormat::F32, beta2, noise);
        assert!(exact > 0.05, "the test moves too little to tell: {exact}");
        for format in StateFormat::ALL {
            for master in [MasterFormat::F32, MasterFormat::Bf16] {
                let share = moved(format, master, beta2, noise);
                let off = share / exact - 1.0;
                println!(
                    "beta2 {beta2}, noise {noise}: {} {}: {share:.4} of codes moved, f32 {exact:.4}, {:+.1} %",
                    format.as_str(),
                    master.as_str(),
                    100.0 * off
                );
                if off.abs() > 0.1 {
                    wrong.push((beta2, noise, format, master, share, exact));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Packed second moments once decoded to zero, and `m / eps` threw the weights away.
#[test]
fn no_second_moment_is_zero_and_no_step_is_wild() {
    let n = 4 * TILE;
    let pool = ThreadPool::new(1);
    for format in StateFormat::ALL {
        let layout = StateLayout::new(format, n);
        let (mut w, mut state) = (vec![0f32; n], vec![0; layout.bytes()]);
        let mut silent = vec![true; n];
        for step in 1..=30 {
            // Sparse, spread over twelve orders of magnitude, and much smaller now and then.
            let damp = if step % 5 == 0 { 1e-6 } else { 1.0 };
            let g: Vec<f32> = wild(step, n).iter().map(|x| x * damp).collect();
            let before = w.clone();
            let h = Hyper { step, weight_decay: 0.0, beta2: 0.999, grad_scale: 1.0, ..HYPER };
            adamw(
                &h,
                &layout,
                Master::F32(&mut w),
                Gradient::F32(&g),
                &mut state,
                Philox::new(0, 0, 0),
                &pool,
            )
            .expect("step");
            let (_, v) = decode(&layout, &state);
            for i in 0..n {
                silent[i] &= g[i] == 0.0;
                assert!(w[i].is_finite() && v[i].is_finite());
                assert!(
                    v[i] > 0.0 || silent[i] || format == StateFormat::F32,
                    "{format:?} step {step}: v[{i}] is zero"
                );
                let bound = if format == StateFormat::F32 { 8.0 } else { 32.0 };
                let update = (w[i] - before[i]).abs() / h.lr;
                assert!(update <= bound, "{format:?} step {step}: an update of {update} lr");
            }
        }
    }
}

#[test]
fn steady_gradients_give_steps_of_lr() {
    let n = 2 * TILE;
    let pool = ThreadPool::new(1);
    for format in StateFormat::ALL {
        let layout = StateLayout::new(format, n);
        let (mut w, mut state) = (vec![0f32; n], vec![0; layout.bytes()]);
        let g = wild(4, n);
        for step in 1..=50 {
            let h = Hyper { step, weight_decay: 0.0, beta2: 0.999, grad_scale: 1.0, ..HYPER };
            let before = w.clone();
            adamw(
                &h,
                &layout,
                Master::F32(&mut w),
                Gradient::F32(&g),
                &mut state,
                Philox::new(0, 0, 0),
                &pool,
            )
            .expect("step");
            let largest = w.iter().zip(&before).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(largest <= 4.0 * h.lr, "{format:?} step {step}: {} lr", largest / h.lr);
        }
    }
}

#[test]
fn small_and_flat_tensors_stay_in_f32() {
    let format = |shape: &[usize]| StateLayout::choose(StateFormat::Int4, shape).format();
    assert_eq!(format(&[1 << 20]), StateFormat::F32);
    assert_eq!(format(&[63, 65]), StateFormat::F32);
    assert_eq!(format(&[64, 64]), StateFormat::Int4);
    let bytes = |f| StateLayout::new(f, 1 << 20).bytes() as f64 / f64::from(1 << 20);
    assert_eq!(StateFormat::ALL.map(bytes), [8.0, 2.03125, 1.0625, 1.126953125]);
}

#[test]
fn lengths_and_parameters_are_checked() {
    let pool = ThreadPool::new(1);
    let layout = StateLayout::new(StateFormat::F32, 32);
    let call = |h: &Hyper, n: usize, state: usize| {
        adamw(
            h,
            &layout,
            Master::F32(&mut vec![0.0; n]),
            Gradient::F32(&[0.0; 32]),
            &mut vec![0; state],
            Philox::new(0, 0, 0),
            &pool,
        )
    };
    assert!(call(&HYPER, 32, 256).is_ok());
    assert_eq!(call(&HYPER, 31, 256).expect_err("short").code(), Code::ShapeMismatch);
    assert_eq!(call(&HYPER, 32, 255).expect_err("short").code(), Code::ShapeMismatch);
    for bad in [Hyper { step: 0, ..HYPER }, Hyper { beta2: 1.0, ..HYPER }, Hyper { lr: f32::NAN, ..HYPER }] {
        assert!(call(&bad, 32, 256).is_err());
    }
}

#[test]
fn sums_of_squares_show_what_is_not_finite() {
    let pool = ThreadPool::new(2);
    let g = wild(1, 3 * TILE + 5);
    let want: f64 = g.iter().map(|x| f64::from(*x).powi(2)).sum();
    let have = sum_of_squares(Gradient::F32(&g), &pool);
    assert!((have / want - 1.0).abs() < 1e-12);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut g = g.clone();
        g[2 * TILE] = bad;
        assert!(!sum_of_squares(Gradient::F32(&g), &pool).is_finite());
    }
}
