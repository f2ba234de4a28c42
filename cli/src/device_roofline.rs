//! What a CUDA device allows, measured like [`crate::roofline`]: reads, and bf16 products on its tensor
//! cores.
use q4_core::Result;
use q4_cuda::{Buffer, Event, Gpu, Kernels, Launch, Source, mirror};
use std::sync::Arc;

const SOURCE: Source = Source { name: "roofline", text: include_str!("../cuda/roofline.cu"), files: &[] };

mirror! {
    struct Fill { data: u64, count: u64 }
    struct Read { data: u64, count: u64, out: u64 }
    struct Multiply { rounds: i32, seed: u64, out: u64 }
}

/// Limits of one device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRoofline {
    /// Gigabytes read a second.
    pub read_gb_s: f64,
    /// 10^9 bf16 multiply-accumulates a second.
    pub gmac_s: f64,
}

impl DeviceRoofline {
    /// The median of several runs of each.
    pub fn measure(gpu: &Arc<Gpu>) -> Result<Self> {
        let kernels = Kernels::load(gpu, &SOURCE, &[])?;
        let fill = kernels.get::<Fill>("fill")?;
        let (read, multiply) = (kernels.get::<Read>("read")?, kernels.get::<Multiply>("multiply")?);
        let bytes = (gpu.memory()?.0 / 4).min(2 << 30) as usize;
        let data = Buffer::new(gpu, bytes)?;
        let out = Buffer::new(gpu, 4)?;
        let (data, out) = (data.ptr(), out.ptr());
        let processors = gpu.processors as usize;
        let all = Launch::new([8 * processors, 1, 1], [512, 1, 1], 0);
        let words = (bytes / 4) as u64;
        // SAFETY: the buffer holds `words` words; so for the launches below with the sizes they are given.
        unsafe { fill.launch(all, Fill { data, count: words })? };
        let vectors = (bytes / 16) as u64;
        let read_s = median(gpu, || unsafe {
            // SAFETY: see above.
            read.launch(all, Read { data, count: vectors, out })
        })?;
        let rounds = 2000i32;
        let product_s = median(gpu, || unsafe {
            // SAFETY: see above; 48 KiB of shared memory need no permission.
            let how = Launch { shared: 48 << 10, ..Launch::new([processors, 1, 1], [256, 1, 1], 0) };
            multiply.launch(how, Multiply { rounds, seed: data, out })
        })?;
        // Per round and multiprocessor: 2 warpgroups of 4 products m64n256k16, or 8 warps of 64 m16n8k16.
        let macs = if gpu.arch.wgmma { 2 * 4 * 64 * 256 * 16 } else { 8 * 64 * 16 * 8 * 16 };
        Ok(Self {
            read_gb_s: bytes as f64 / read_s / 1e9,
            gmac_s: f64::from(macs) * f64::from(rounds) * f64::from(gpu.processors) / product_s / 1e9,
        })
    }
}

fn median(gpu: &Arc<Gpu>, mut once: impl FnMut() -> Result<()>) -> Result<f64> {
    once()?;
    let mut seconds = (0..7)
        .map(|_| {
            let start = Event::record(gpu, 0)?;
            once()?;
            start.seconds_until(&Event::record(gpu, 0)?)
        })
        .collect::<Result<Vec<_>>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}
