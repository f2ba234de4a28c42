//! Single products beside their floors: what is left when attention, norms and the threads' waiting are not
//! in the way.
use super::{Figure, Subject, measure, timed};
use crate::args::BenchArgs;
use crate::roofline::{Roofline, Work};
use q4_core::{ExecContext, Q4Linear, Result, TensorView, TensorViewMut, ThreadPool};

/// Every product of a layer and the head, alone, at several numbers of rows. The same product of all layers
/// comes one after another, so that no weight is still in the cache when its turn comes again.
pub(super) fn measure_all(
    subject: &Subject,
    roofline: &Roofline,
    args: &BenchArgs,
    chunk: usize,
    threads: &ThreadPool,
    figures: &mut Vec<Figure>,
) -> Result<()> {
    let blocks = subject.loaded.model.blocks();
    let mut products = Vec::new();
    for of in 0..4 {
        for (i, first) in blocks.first().map_or(&[][..], |b| &b[of].parts).iter().enumerate() {
            let layers = blocks.iter().filter_map(|b| b[of].parts.get(i)).map(|p| &p.product);
            products.push(layers.filter(|l| is_alike(l, &first.product)).collect());
        }
    }
    if let Some(head) = subject.loaded.model.head() {
        products.extend(head.parts.iter().map(|p| vec![&p.product]));
    }
    for layers in &products {
        for m in [1, 8, 64, 512].into_iter().filter(|m| *m <= chunk) {
            figures.push(product(layers, m, roofline, args, threads)?);
        }
    }
    Ok(())
}

/// Whether layers of a mixed model do the same work.
fn is_alike(a: &Q4Linear, b: &Q4Linear) -> bool {
    let of = |l: &Q4Linear| {
        let i = l.info();
        (i.n, i.k, i.resident_bytes, i.path, i.activations)
    };
    of(a) == of(b)
}

/// A product of one shape, once a layer.
fn product(
    layers: &[&Q4Linear],
    m: usize,
    roofline: &Roofline,
    args: &BenchArgs,
    threads: &ThreadPool,
) -> Result<Figure> {
    let linear = layers[0];
    let info = linear.info();
    let (n, k) = (info.n, info.k);
    let x: Vec<f32> = (0..m * k).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
    let mut y = vec![0f32; m * n];
    let workspace = layers.iter().map(|l| l.workspace(m)).max().unwrap_or(0);
    let mut scratch = vec![0u8; workspace + 64];
    let at = scratch.as_ptr().align_offset(64);
    let len = scratch.len() - at;
    let macs = (m * n * k) as f64;
    let gmac = macs / 1e9;
    let work = Work { bytes: info.resident_bytes as f64 / gmac, macs: 1e9 };
    // Enough calls that the clock's resolution does not show, and of every layer as many.
    let floor_s = gmac * work.seconds(roofline.read_gb_s, roofline.gmac_s(&info.activations));
    let rounds = (0.02 / floor_s.max(1e-6) / layers.len() as f64).clamp(1.0, 1000.0) as usize;
    let calls = rounds * layers.len();
    let rates = measure(args, calls as f64 * gmac, || {
        timed(|| {
            for linear in layers.iter().cycle().take(calls) {
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
