//! The optimiser's kernels against the CPU, bit for bit, and their speed. Needs a CUDA device and NVRTC:
//! ignored, not passed, where nobody asks for it (`cargo test --features cuda --test cuda_optimizer --
//! --ignored`).
#![cfg(feature = "cuda")]
use q4_core::ThreadPool;
use q4_cuda::Buffer;
use q4_trainer::optim::cuda::Launcher;
use q4_trainer::optim::{
    Gradient, Hyper, Master, MasterFormat, ScaleChoice, StateFormat, StateLayout, adamw, quantize_dequantize,
    sum_of_squares,
};
use q4_trainer::rng::Philox;
use std::time::Instant;

const FLOATS: [MasterFormat; 2] = [MasterFormat::F32, MasterFormat::Bf16];
const HYPER: Hyper =
    Hyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, grad_scale: 0.5 };

/// Numbers over many orders of magnitude; some zeros.
fn wild(seed: u64, n: usize, size: f32) -> Vec<f32> {
    let (r, s) = (Philox::new(seed, 0, 1), Philox::new(seed, 0, 2));
    (0..n as u64)
        .map(|i| {
            if i % 97 == 0 || i / 4096 % 5 == 4 {
                0.0
            } else {
                r.normal(i) * (2.0 * s.normal(i)).exp() * size
            }
        })
        .collect()
}

fn to_bf16(x: &[f32]) -> Vec<u16> {
    x.iter().map(|x| (x.to_bits() >> 16) as u16).collect()
}

/// A buffer on the device, filled with a pattern first.
fn on(cuda: &Launcher, bytes: &[u8]) -> Buffer {
    let at = room(cuda, bytes.len() + 64);
    at.fill(0xa5).expect("poisoned");
    at.upload(0, bytes).expect("copied");
    at
}

fn room(cuda: &Launcher, bytes: usize) -> Buffer {
    Buffer::new(cuda.gpu(), bytes).expect("memory")
}

/// Its bytes, after checking that nothing was written behind them.
fn back(at: &Buffer) -> Vec<u8> {
    let len = at.len() - 64;
    let mut bytes = vec![0; at.len()];
    at.download(0, &mut bytes).expect("copied");
    assert!(bytes[len..].iter().all(|b| *b == 0xa5), "written behind the end");
    bytes.truncate(len);
    bytes
}

#[test]
#[ignore = "needs a CUDA device"]
fn steps_have_the_bits_of_the_cpu() {
    let cuda = Launcher::new(0).expect("a device");
    let pool = ThreadPool::new(8);
    let mut compared = 0;
    for n in [4096, 16 * 4096 * 3 + 4096 + 1072, 64 * 65 + 7, 33] {
        for format in StateFormat::ALL {
            for master in FLOATS {
                for grad in FLOATS {
                    let layout = StateLayout::new(format, n);
                    let mut w = wild(1, n, 0.02);
                    let mut b = to_bf16(&w);
                    let mut state = vec![0u8; layout.bytes()];
                    let start: &[u8] = match master {
                        MasterFormat::F32 => bytemuck::cast_slice(&w),
                        MasterFormat::Bf16 => bytemuck::cast_slice(&b),
                    };
                    let (device_w, device_state) = (on(&cuda, start), on(&cuda, &state));
                    for step in 1..=4 {
                        let g = wild(10 + step, n, 1e-4);
                        let h = to_bf16(&g);
                        let hyper = Hyper { step, ..HYPER };
                        let rng = Philox::new(77, step, 5);
                        let m = match master {
                            MasterFormat::F32 => Master::F32(&mut w),
                            MasterFormat::Bf16 => Master::Bf16(&mut b),
                        };
                        let (host_g, device_g) = match grad {
                            MasterFormat::F32 => (Gradient::F32(&g), on(&cuda, bytemuck::cast_slice(&g))),
                            MasterFormat::Bf16 => (Gradient::Bf16(&h), on(&cuda, bytemuck::cast_slice(&h))),
                        };
                        adamw(&hyper, &layout, m, host_g, &mut state, rng, &pool).expect("step");
                        // SAFETY: the buffers have the sizes of the layout.
                        unsafe {
                            cuda.adamw(
                                &hyper,
                                &layout,
                                (device_w.ptr(), master),
                                (device_g.ptr(), grad),
                                device_state.ptr(),
                                rng,
                            )
                        }
                        .expect("launched");
                        let have = back(&device_w);
                        let want: &[u8] = match master {
                            MasterFormat::F32 => bytemuck::cast_slice(&w),
                            MasterFormat::Bf16 => bytemuck::cast_slice(&b),
                        };
                        let at = have.iter().zip(want).position(|(a, b)| a != b);
                        assert_eq!(at, None, "{n} {format:?} {master:?} {grad:?} step {step}: weights");
                        let have = back(&device_state);
                        let at = have.iter().zip(&state).position(|(a, b)| a != b);
                        assert_eq!(at, None, "{n} {format:?} {master:?} {grad:?} step {step}: state");
                        compared += have.len() + want.len();
                        let tiles = n.div_ceil(4096);
                        let (scratch, out) = (room(&cuda, 8 * tiles), room(&cuda, 8));
                        let from = (device_g.ptr(), grad);
                        // SAFETY: as above.
                        unsafe { cuda.sum_of_squares(from, n, scratch.ptr(), out.ptr()) }.expect("launched");
                        let mut sum = [0f64];
                        out.download(0, &mut sum).expect("copied");
                        let (have, want) = (sum[0], sum_of_squares(host_g, &pool));
                        assert!((have / want - 1.0).abs() < 1e-13, "{have} {want}");
                    }
                }
            }
        }
    }
    println!("equal in bits: {compared} bytes of weights and states");
}

#[test]
#[ignore = "needs a CUDA device"]
fn values_have_the_bits_of_the_quantiser() {
    let cuda = Launcher::new(0).expect("a device");
    let pool = ThreadPool::new(8);
    for (rows, k, size) in [(64, 256, 0.02), (300, 1040, 1e-6), (1, 16, 3.0), (2048, 4096, 0.02)] {
        let n = rows * k;
        let w = wild(3, n, size);
        let b = to_bf16(&w);
        let wide: Vec<f32> = b.iter().map(|b| f32::from_bits(u32::from(*b) << 16)).collect();
        for choice in [ScaleChoice::PowerOfTwo, ScaleChoice::Free] {
            for (from, values, bytes) in [
                (MasterFormat::F32, &w, bytemuck::cast_slice::<_, u8>(&w)),
                (MasterFormat::Bf16, &wide, bytemuck::cast_slice(&b)),
            ] {
                let mut want = vec![0f32; n];
                let scale =
                    quantize_dequantize(values, rows, k, choice, &mut want, &pool).expect("quantised");
                for to in FLOATS {
                    let (input, info) = (on(&cuda, bytes), on(&cuda, &[0xff; 8]));
                    let out = on(&cuda, &vec![0xff; n * to.size()]);
                    // SAFETY: the buffers have the sizes of the types.
                    unsafe {
                        cuda.quantize_dequantize((input.ptr(), from), n, choice, (out.ptr(), to), info.ptr())
                    }
                    .expect("launched");
                    let (have, words) = (back(&out), back(&info));
                    assert_eq!(words[4..], scale.value().to_le_bytes(), "scale");
                    let same = match to {
                        MasterFormat::F32 => have == bytemuck::cast_slice::<f32, u8>(&want),
                        MasterFormat::Bf16 => {
                            let rounded: Vec<u16> =
                                want.iter().map(|x| half::bf16::from_f32(*x).to_bits()).collect();
                            have == bytemuck::cast_slice::<u16, u8>(&rounded)
                        }
                    };
                    assert!(same, "[{rows}, {k}] {choice:?} {from:?} to {to:?}");
                }
            }
        }
    }
    let mut w = wild(3, 4096, 0.02);
    w[99] = f32::NAN;
    let (input, info, out) =
        (on(&cuda, bytemuck::cast_slice(&w)), on(&cuda, &[0; 8]), on(&cuda, &[0; 16384]));
    // SAFETY: as above.
    unsafe {
        cuda.quantize_dequantize(
            (input.ptr(), MasterFormat::F32),
            4096,
            ScaleChoice::PowerOfTwo,
            (out.ptr(), MasterFormat::F32),
            info.ptr(),
        )
    }
    .expect("launched");
    let values = back(&out);
    assert!(
        values.as_chunks::<4>().0.iter().all(|b| f32::from_le_bytes(*b).is_nan()),
        "a NaN must not be hidden"
    );
}

#[test]
#[ignore = "needs a CUDA device; prints times"]
fn speed() {
    let cuda = Launcher::new(0).expect("a device");
    // gate and up of Qwen3-4B, several of them so that nothing stays in the cache.
    let (n, copies) = (2 * 9728 * 2560usize, 4);
    println!("{n} elements, bf16 gradients; floor at 4.8 TB/s in brackets");
    for (format, master) in [
        (StateFormat::F32, MasterFormat::F32),
        (StateFormat::Int8, MasterFormat::F32),
        (StateFormat::Int8, MasterFormat::Bf16),
        (StateFormat::Int4, MasterFormat::Bf16),
        (StateFormat::Nvfp4, MasterFormat::Bf16),
    ] {
        let layout = StateLayout::new(format, n);
        let noise: Vec<u16> = (0..n).map(|i| 0x3800 | (i as u16).wrapping_mul(40503) & 0x83ff).collect();
        let buffers: Vec<[Buffer; 3]> = (0..copies)
            .map(|_| {
                let (w, g, s) =
                    (room(&cuda, n * master.size()), room(&cuda, 2 * n), room(&cuda, layout.bytes()));
                g.upload(0, &noise).expect("copied");
                w.upload(0, &noise).expect("copied");
                s.fill(0).expect("zeroed");
                [w, g, s]
            })
            .collect();
        let mut times = Vec::new();
        for step in 1..=9 {
            cuda.gpu().synchronize().expect("waited");
            let start = Instant::now();
            for [w, g, s] in &buffers {
                let hyper = Hyper { step, ..HYPER };
                // SAFETY: the buffers have the sizes of the layout.
                unsafe {
                    cuda.adamw(
                        &hyper,
                        &layout,
                        (w.ptr(), master),
                        (g.ptr(), MasterFormat::Bf16),
                        s.ptr(),
                        Philox::new(1, step, 2),
                    )
                }
                .expect("launched");
            }
            cuda.gpu().synchronize().expect("waited");
            times.push(start.elapsed().as_secs_f64() / copies as f64);
        }
        times.sort_by(f64::total_cmp);
        let bytes = (2 * n * master.size() + 2 * n + 2 * layout.bytes()) as f64;
        let name = format!("{} {}", master.as_str(), format.as_str());
        println!(
            "{name:<12} {:8.1} us  [{:6.1} us]  {:.2} TB/s",
            times[4] * 1e6,
            bytes / 4.8e12 * 1e6,
            bytes / times[4] / 1e12
        );
    }
    // The value of a weight: reads the master twice, writes bf16 once.
    for from in FLOATS {
        let (input, out, info) = (room(&cuda, n * from.size()), room(&cuda, 2 * n), room(&cuda, 8));
        input.fill(0x3c).expect("filled");
        let mut times = Vec::new();
        for _ in 0..9 {
            cuda.gpu().synchronize().expect("waited");
            let start = Instant::now();
            // SAFETY: the buffers have the sizes of the types.
            unsafe {
                cuda.quantize_dequantize(
                    (input.ptr(), from),
                    n,
                    ScaleChoice::PowerOfTwo,
                    (out.ptr(), MasterFormat::Bf16),
                    info.ptr(),
                )
            }
            .expect("launched");
            cuda.gpu().synchronize().expect("waited");
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let bytes = (2 * n * from.size() + 2 * n) as f64;
        println!("value {}   {:8.1} us  [{:6.1} us]", from.as_str(), times[4] * 1e6, bytes / 4.8e12 * 1e6);
    }
}
