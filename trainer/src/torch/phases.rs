//! What memory a step held at each of its phases.
use super::device::{self, Memory};
use q4_core::Result;
use serde::Serialize;
use std::time::Instant;
use tch::Device;

/// The first phase of a step.
const FIRST: &str = "batch_ready";

/// One sample, at the end of a phase.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// Optimiser step.
    pub step: u64,
    /// Phase that ended.
    pub phase: &'static str,
    /// Since the start of the step.
    pub seconds: f64,
    /// Bytes of base weights that do not move, as they are kept.
    pub base_bytes: u64,
    /// Used and free; `device_peak` is that of this phase alone.
    #[serde(flatten)]
    pub memory: Memory,
}

/// Collects samples of the profiled steps, and stops a step that goes over the limit.
pub struct Phases {
    device: Device,
    limit: Option<u64>,
    profiling: bool,
    step: u64,
    begun: Instant,
    /// Bytes of base weights that do not move, as they are kept.
    pub base_bytes: u64,
    /// All samples so far.
    pub samples: Vec<Sample>,
}

impl Phases {
    /// Nothing collected yet.
    pub fn new(device: Device, limit: Option<u64>) -> Self {
        Self {
            device,
            limit,
            profiling: false,
            step: 0,
            begun: Instant::now(),
            base_bytes: 0,
            samples: Vec::new(),
        }
    }

    /// Step `step` begins; its phases are sampled if `profiling`, which makes the device wait at each.
    pub fn begin(&mut self, step: u64, profiling: bool) {
        (self.step, self.profiling, self.begun) = (step, profiling, Instant::now());
        if profiling {
            device::reset_peaks(self.device);
        }
    }

    /// `phase` has ended. [`q4_core::Code::OutOfMemory`] over the limit.
    pub fn mark(&mut self, phase: &'static str) -> Result<()> {
        // Looking costs a call to the driver and two files: once a step unless there is something to look
        // for.
        if !self.profiling && self.limit.is_none() && phase != FIRST {
            return Ok(());
        }
        if self.profiling {
            device::synchronize(self.device)?;
        }
        let memory = device::guard(self.device, self.limit)?;
        if self.profiling {
            let seconds = self.begun.elapsed().as_secs_f64();
            let base_bytes = self.base_bytes;
            self.samples.push(Sample { step: self.step, phase, seconds, base_bytes, memory });
            device::reset_peaks(self.device);
        }
        Ok(())
    }

    /// The largest sample, on the device or resident.
    pub fn peak(&self) -> u64 {
        let of = |s: &Sample| if self.device.is_cuda() { s.memory.device_peak } else { s.memory.rss };
        self.samples.iter().map(of).max().unwrap_or(0)
    }
}
