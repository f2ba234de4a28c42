//! Cases, exact references and bounds every backend must meet, and the proof that nobody slips past them.
//!
//! [`run`] is the suite: it asks a backend what it claims, enumerates the cases of levels L0 to L5, runs each
//! and reports. [`golden`] holds operands and results recorded from the libraries that define the formats,
//! [`lattice`] makes seeded problems over the shapes where kernels break, and every single output is compared
//! with the exact product. A backend's word is never taken for its result. [`liars`] are mutants, backends
//! with one fault each; the suite is as good as those it catches.
mod case;
pub mod certificate;
mod claim;
pub mod facts;
pub mod golden;
mod guarded;
mod key;
pub mod lattice;
mod levels;
pub mod liars;
mod limits;
mod measure;
pub mod memory;
mod options;
mod own;
mod pages;
mod part;
mod passes;
mod paths;
mod printed;
mod product;
mod report;
mod run;
mod runner;
mod stored;
mod tolerance;
mod waiver;

pub use case::{AbiProbe, Bench, Case, CaseResult, Elsewhere, Outcome, Seen};
pub use certificate::{Certificate, Certificates, Proven};
pub use claim::{Claim, Level, Profile};
pub use facts::{Library, Needed};
pub use key::Key;
pub use lattice::Problem;
pub use levels::cases;
pub use limits::{Limits, Proof, TypeLimits, claims, proofs};
pub use measure::{Measured, measure};
pub use options::{Options, SUITE_VERSION};
pub use part::Part;
pub use passes::StoredPasses;
pub use paths::{PathReport, Verdict, check_paths};
pub use report::{BackendReport, ClaimReport, Errors, Failure, HISTOGRAM, LevelReport, Report};
pub use run::{run, run_with};
pub use runner::{ChildProcesses, InProcess, Runner, serve};
pub use stored::Stored;
pub use tolerance::{AGGREGATE, AGGREGATE_FROM, Exact, Terms, backward_terms, bound};
pub use waiver::{Date, Waiver, Waivers};
