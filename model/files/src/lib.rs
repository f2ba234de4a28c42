//! The small files of a model directory: a bound on their bytes, and every problem of a configuration at
//! once.
pub mod fields;
pub mod files;
