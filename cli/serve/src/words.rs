//! Names that nobody else has, and the time.
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// A number that cannot be foreseen; no secret should depend on it.
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// `prefix` and 24 digits.
pub fn name(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
