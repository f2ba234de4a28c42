//! What codes and scales of a 4-bit matrix amount to, and which of that no quantiser writes.
//!
//! A quantiser scales every block by its largest element: some code of a block is near the largest code, and
//! codes follow the bell of trained (or random) weights. Bounds lie far from what quantisers of real weights
//! do.

/// Elements below which a distribution says nothing.
pub(crate) const SAMPLE: u64 = 4096;

/// One finding: stable name and text.
pub type Oddity = (&'static str, String);

/// What a matrix amounts to.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The largest absolute weight before the per-tensor scale.
    pub amax: f64,
    /// Mean square of the weights before the per-tensor scale.
    pub mean_square: f64,
    /// Blocks whose codes are lost under a zero scale.
    pub lost: usize,
    /// Every scale is zero.
    pub all_zero: bool,
    /// What no quantiser writes.
    pub odd: Vec<Oddity>,
}

/// Trained weights use small codes of E2M1 more than large ones, and quantisers see to it that some are the
/// largest.
pub(crate) fn even(counts: &[u64; 16]) -> Option<Oddity> {
    let all: u64 = counts.iter().sum();
    let mean = all as f64 / 16.0;
    let deviation = counts.iter().map(|c| (*c as f64 - mean).powi(2)).sum::<f64>() / mean / all as f64;
    (all >= SAMPLE && deviation < 0.01)
        .then(|| ("codes-even", "all 16 codes are equally frequent, as those of no weights are".to_owned()))
}
