//! Single products beside their floors: what is left when attention, norms and the threads' waiting are not in the way.
use super::{Figure, Subject, measure, timed};
use crate::args::BenchArgs;
use crate::roofline::{Roofline, Work};
use q4_core::{ExecContext, Q4Linear, Result, TensorView, TensorViewMut, ThreadPool};
use q4_model::cpu::CpuHead;
use q4_model::load::Model;

/// Every product of one layer and the head, alone, at several numbers of rows.
pub(super) fn measure_all(
    subject: &Subject,
    roofline: &Roofline,
    args: &BenchArgs,
    chunk: usize,
    threads: &ThreadPool,
    figures: &mut Vec<Figure>,
) -> Result<()> {
    let Model::Cpu(model) = &subject.loaded.model else { return Ok(()) };
    let Some(block) = model.blocks.first() else { return Ok(()) };
    let head = match &model.head {
        CpuHead::Q4(linear) => Some(linear),
        CpuHead::Dense(_) => None,
    };
    let products = [&block.qkv, &block.o, &block.gate_up, &block.down].into_iter().chain(head);
    for (linear, _) in products.flat_map(|l| &l.parts) {
        for m in [1, 8, 64, 512].into_iter().filter(|m| *m <= chunk) {
            figures.push(product(linear, m, roofline, args, threads)?);
        }
    }
    Ok(())
}

fn product(
    linear: &Q4Linear,
    m: usize,
    roofline: &Roofline,
    args: &BenchArgs,
    threads: &ThreadPool,
) -> Result<Figure> {
    let info = linear.info();
    let (n, k) = (info.n, info.k);
    let x: Vec<f32> = (0..m * k).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
    let mut y = vec![0f32; m * n];
    let mut scratch = vec![0u8; linear.workspace(m) + 64];
    let at = scratch.as_ptr().align_offset(64);
    let len = scratch.len() - at;
    let macs = (m * n * k) as f64;
    let gmac = macs / 1e9;
    let work = Work { bytes: info.resident_bytes as f64 / gmac, macs: 1e9 };
    // Enough calls that the clock's resolution does not show; small products repeat on a warm cache and may then be
    // faster than memory.
    let floor_s = gmac * work.seconds(roofline.read_gb_s, roofline.gmac_s(&info.activations));
    let calls = (0.02 / floor_s.max(1e-6)).clamp(1.0, 1000.0) as usize;
    let rates = measure(args, calls as f64 * gmac, || {
        timed(|| {
            for _ in 0..calls {
                let mut cx = ExecContext::cpu(threads);
                cx.workspace = Some(TensorViewMut::of(&mut scratch[at..], &[len])?);
                linear.forward(TensorView::of(&x, &[m, k])?, TensorViewMut::of(&mut y, &[m, n])?, &mut cx)?;
            }
            Ok(())
        })
    })?;
    let (what, shape) = (format!("{n}x{k} m={m}"), linear.name().to_owned());
    Ok(Figure { what, shape, unit: "GMAC/s", rates, work })
}
