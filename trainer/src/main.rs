//! `q4-train`.
use q4_trainer::torch::device;
use tch::{Kind, Tensor};
fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    let d = match device::open(&name) {
        Ok(d) => d,
        Err(e) => { eprintln!("{e}"); std::process::exit(i32::from(e.code().exit())) }
    };
    let a = Tensor::randn([512, 512], (Kind::Float, d)).to_kind(Kind::BFloat16);
    let b = Tensor::randn([512, 512], (Kind::Float, d)).to_kind(Kind::BFloat16);
    let c = a.matmul(&b).to_device(tch::Device::Cpu).to_kind(Kind::Double);
    let r = a.to_device(tch::Device::Cpu).to_kind(Kind::Double).matmul(&b.to_device(tch::Device::Cpu).to_kind(Kind::Double));
    println!("matmul rel {:?}", f64::try_from((&c - &r).norm() / r.norm()));
    println!("{:?}", device::Memory::of(d));
    let q = Tensor::randn([2, 4, 64, 64], (Kind::Float, d)).to_kind(Kind::BFloat16).set_requires_grad(true);
    let k = Tensor::randn([2, 2, 64, 64], (Kind::Float, d)).to_kind(Kind::BFloat16);
    let y = Tensor::scaled_dot_product_attention(&q, &k, &k, None::<&Tensor>, 0.0, true, None, true);
    let g = Tensor::run_backward(&[y.sum(Kind::Float)], &[&q], false, false);
    println!("sdpa grad {:?} {:?}", g[0].size(), f64::try_from(g[0].norm()));
    let w = Tensor::ones([64], (Kind::Float, d));
    println!("{:?}", q.to_kind(Kind::Float).rms_norm([64], Some(&w), 1e-6).size());
    println!("sync {:?} det {:?}", device::synchronize(d), device::deterministic(true));
    device::reset_peaks(d);
    device::release_cache(d);
    println!("{:?}", device::Memory::of(d));
    for dim in [64i64, 128] {
      let q = Tensor::randn([192, 4, 256, dim], (Kind::Float, d)).to_kind(Kind::BFloat16).set_requires_grad(true);
      let k = Tensor::randn([192, 2, 256, dim], (Kind::Float, d)).to_kind(Kind::BFloat16).set_requires_grad(true);
      for gqa in [true, false] {
        let mut best = f64::MAX;
        for _ in 0..10 {
          let t = std::time::Instant::now();
          let k2 = if gqa { k.shallow_clone() } else { k.repeat_interleave_self_int(2, 1, None) };
          let y = Tensor::scaled_dot_product_attention(&q, &k2, &k2, None::<&Tensor>, 0.0, true, None, gqa);
          let _ = Tensor::run_backward(&[y.sum(Kind::Float)], &[&q, &k], false, false);
          device::synchronize(d).ok();
          best = best.min(t.elapsed().as_secs_f64());
        }
        println!("dim {dim} gqa {gqa} fwd+bwd {:.3} ms", best * 1e3);
      }
    }
}
