//! No matrix unit is known here.
use crate::activations::Quantised;
use crate::call::{Mat, Threads};
use crate::output::Output;
use crate::weight::Weight;
use q4_core::Activations;
use q4_core::isa::Isa;

/// Inputs in the form of a unit.
pub enum Inputs {
    /// f32 or what widens to it.
    #[allow(dead_code)]
    Floats(Mat),
    /// NVFP4, in blocks.
    #[allow(dead_code)]
    Bytes(Quantised),
}

/// No scratch.
pub fn workspace(_: Isa, _: &Activations, _: usize, _: u64) -> Option<u64> {
    Some(0)
}

/// None: not for a unit.
///
/// # Safety
/// Nothing is touched.
pub unsafe fn multiply(
    _: &Weight,
    _: Inputs,
    _: &Output<'_>,
    _: f64,
    _: *mut u8,
    _: &Threads<'_>,
) -> Option<Vec<usize>> {
    None
}
