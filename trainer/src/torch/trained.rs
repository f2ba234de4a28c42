//! A tensor the optimiser moves.
use crate::optim::{MasterFormat, StateLayout};
use tch::Tensor;

/// Master, moments, and how both are kept.
pub struct Trained {
    /// f32 or bf16.
    pub master: Tensor,
    /// Moments, as bytes.
    pub state: Tensor,
    /// How.
    pub layout: StateLayout,
    /// Of the master.
    pub format: MasterFormat,
    /// Random stream of its stochastic rounding.
    pub stream: u32,
    /// Weight decay.
    pub decay: f32,
}
