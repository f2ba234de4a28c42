//! A library in a process of its own, where processes cannot share memory and be followed as they can on
//! Linux: there is none, and who asks for one is told so.
pub use crate::isolation::{Isolation, Loss, VERB};
use crate::{Examined, Refusal};
use q4_core::conduct::Facts;
use q4_core::{
    BackendDescriptor, Code, ExecContext, ExecPath, HostEnv, LinearSpec, PreparedWeight, ProbeItem,
    Q4Backend, Q4Weight, Reject, RejectCode, Result, Verdict,
};
use std::convert::Infallible;
use std::process::ExitCode;

/// What a system must be for it.
const NEED: &str = "a system where a library can have a process of its own: Linux";

/// A library in another process: nobody has one here.
pub struct Remote(Infallible);

impl Remote {
    /// Refuses: `not-compiled-in`.
    pub fn start(found: &Examined, _: &Isolation) -> Result<Self, Refusal> {
        Err(found.refused(Reject::new(RejectCode::NotCompiledIn, NEED, crate::this_system())))
    }
    /// Number of the process that runs the library.
    pub fn process(&self) -> u32 {
        match self.0 {}
    }
    /// The same backend again.
    pub fn handle(&self) -> Self {
        match self.0 {}
    }
    /// How that process was lost, if it was.
    pub fn lost(&self) -> Option<Loss> {
        match self.0 {}
    }
    /// What is known of that process.
    pub fn facts(&self) -> Result<Facts> {
        match self.0 {}
    }
    /// The same before the library was there.
    pub fn facts_before(&self) -> Facts {
        match self.0 {}
    }
    /// Runs a check of the library's table there.
    pub fn table_case(&self, _: &str) -> Result<()> {
        match self.0 {}
    }
}

/// Nothing is counted here.
pub(crate) fn uncounted<R>(body: impl FnOnce() -> R) -> R {
    body()
}

impl Q4Backend for Remote {
    fn descriptor(&self) -> &BackendDescriptor {
        match self.0 {}
    }
    fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
        match self.0 {}
    }
    fn can_prepare(&self, _: &LinearSpec, _: ExecPath, _: &HostEnv) -> Verdict {
        match self.0 {}
    }
    fn prepare(
        &self,
        _: &Q4Weight<'_>,
        _: &LinearSpec,
        _: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        match self.0 {}
    }
}

/// Nobody starts it here but by hand.
pub fn serve_main() -> ExitCode {
    eprintln!(
        "this is a part of q4 that q4 starts, and does not here: need {NEED}; have {}",
        crate::this_system()
    );
    ExitCode::from(Code::Usage.exit())
}

/// Nothing runs here that this process had to be hidden from.
pub fn shield() {}
