//! A tensor the optimiser moves.
use crate::optim::{MasterFormat, StateLayout};
use std::ops::Range;
use tch::Tensor;

/// Master, moments, and how both are kept.
pub struct Trained {
    /// f32 or bf16.
    pub master: Tensor,
    /// Elements that this rank moves; all, where there is one.
    pub own: Range<usize>,
    /// Moments of those, as bytes.
    pub state: Tensor,
    /// How.
    pub layout: StateLayout,
    /// As one rank would keep the moments of all elements.
    pub whole: StateLayout,
    /// Of the master.
    pub format: MasterFormat,
    /// Random stream of its stochastic rounding.
    pub stream: u32,
    /// Weight decay.
    pub decay: f32,
}
