//! Cases, exact references and bounds every backend must meet.
//!
//! [`golden`] holds operands and results recorded from the libraries that define the formats, [`lattice`] makes seeded
//! problems over the shapes where kernels break, and [`measure()`] runs either through a backend and compares every single
//! output with the exact product. A backend's word is never taken for its result.
pub mod golden;
pub mod lattice;
mod measure;
mod paths;

pub use measure::{Measured, Problem, measure};
pub use paths::{PathReport, Verdict, check_paths};
