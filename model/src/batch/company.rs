//! Whether a row's bits depend on its company: measured, product by product, on the model's own weights.
//!
//! Kernels of the CPU promise that they do not, some with exceptions (tiles of matrices add up in another
//! order from nine rows on); dense products and the kernels of third parties promise nothing. Who serves many
//! wants to know what holds here, so it is looked at: a row alone and among others, by every product there
//! is. A device whose attention mixes rows by design says so, and is not looked at.
use crate::load::Loaded;
use crate::weights::Linear;
use half::{bf16, f16};
use q4_core::{DType, Element, ExecContext, Q4Linear, Result, TensorView, TensorViewMut, ThreadPool};
use serde::Serialize;
use std::collections::HashSet;

/// A layer whose rows do depend on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Dependent {
    /// The first layer with this product.
    pub layer: String,
    /// Who computes it, how, and how it was seen.
    pub why: String,
}

/// Numbers of rows that kernels go about in ways of their own: few, around their tiles, and many.
const COMPANY: [usize; 14] = [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 64, 100];

/// The layers of `loaded` whose rows come out with other bits in other company of up to `rows` rows, one for
/// each way in which products are computed. Empty is what reproducible answers need.
///
/// # Errors
/// Those of backends.
pub fn dependents(loaded: &Loaded, rows: usize) -> Result<Vec<Dependent>> {
    // What mixes rows by design need not be looked at, and what products add to it changes nothing.
    if let Some(why) = loaded.model.mixes_rows() {
        return Ok(vec![Dependent { layer: "self_attn".to_owned(), why: why.to_owned() }]);
    }
    let (mut seen, mut found) = (HashSet::new(), Vec::new());
    let blocks = loaded.model.blocks();
    let linears = blocks.iter().flatten().copied().chain(loaded.model.head());
    for part in linears.flat_map(|linear: &Linear| &linear.parts).map(|part| &part.product) {
        let info = part.info();
        let way = (info.backend.clone(), info.path, info.activations.as_str(), info.n, info.k);
        if !seen.insert(way) {
            continue;
        }
        let rows = rows.min(part.max_m());
        let differs = match part.types().1 {
            DType::F16 => differs::<f16>(part, rows, &loaded.threads)?,
            DType::BF16 => differs::<bf16>(part, rows, &loaded.threads)?,
            _ => differs::<f32>(part, rows, &loaded.threads)?,
        };
        if let Some((row, alone, together)) = differs {
            found.push(Dependent {
                layer: part.name().to_owned(),
                why: format!(
                    "{} ({}): row {row} has other bits among {together} rows than among {alone}",
                    info.backend, info.path
                ),
            });
        }
    }
    Ok(found)
}

/// A row, and two numbers of rows among which its bits differ.
fn differs<T: Element + bytemuck::Pod>(
    part: &Q4Linear,
    rows: usize,
    threads: &ThreadPool,
) -> Result<Option<(usize, usize, usize)>> {
    let (n, k) = (part.info().n, part.info().k);
    let x = inputs(rows * k);
    let run = |x: &[f32], m: usize| -> Result<Vec<u8>> {
        let mut y = vec![T::zeroed(); m * n];
        let bytes = part.workspace(m);
        let mut workspace = vec![0u8; bytes + 64];
        let pad = workspace.as_ptr().align_offset(64);
        let mut cx = ExecContext::cpu(threads);
        cx.workspace = Some(TensorViewMut::of(&mut workspace[pad..pad + bytes], &[bytes])?);
        part.forward(TensorView::matrix(x, m, k, k)?, TensorViewMut::matrix(&mut y, m, n, n)?, &mut cx)?;
        Ok(bytemuck::cast_slice(&y).to_vec())
    };
    let whole = run(&x, rows)?;
    let row = n * size_of::<T>();
    for m in COMPANY.into_iter().filter(|m| *m < rows) {
        // From the start, and somewhere else: a place is company too.
        for first in [0, (rows - m) / 2] {
            let some = run(&x[first * k..][..m * k], m)?;
            let same = |r: usize| some[r * row..][..row] == whole[(first + r) * row..][..row];
            if let Some(r) = (0..m).find(|r| !same(*r)) {
                return Ok(Some((first + r, m, rows)));
            }
        }
    }
    Ok(None)
}

/// Numbers like those of normalised activations: of both signs, most of them small. Always the same.
fn inputs(len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    // Three of them are nearly a normal distribution.
    (0..len).map(|_| 2.0 * (next() + next() + next())).collect()
}
