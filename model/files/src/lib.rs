//! The small files of a model directory: never read beyond a bound, and every problem of a configuration at
//! once.
pub mod fields;
pub mod files;
