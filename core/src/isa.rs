//! Instruction sets that kernels are written for, by the names that `Q4_ISA` takes.
use crate::{Code, Error, Result};

/// Every one, best first of each architecture.
pub const ISAS: [&str; 8] =
    ["amx", "avx512vnni", "avx512", "avx2", "neoni8mm", "neondotprod", "neon", "portable"];

/// The variable that names one.
const VARIABLE: &str = "Q4_ISA";

/// What `Q4_ISA` names, if anything. [`Code::Usage`] for a name that is none of [`ISAS`],
/// [`Code::DeviceMissing`] for one that this processor lacks: nobody computes with another one instead.
pub fn named() -> Result<Option<String>> {
    match std::env::var(VARIABLE) {
        Ok(name) if !name.is_empty() => check(&name).map(|()| Some(name)),
        Ok(_) | Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(name)) => check(&name.to_string_lossy()).map(|()| None),
    }
}

fn check(name: &str) -> Result<()> {
    if !ISAS.contains(&name) {
        return Err(Error::new(Code::Usage, format!("{VARIABLE}={name}"))
            .need(format!("one of {}", ISAS.join(", ")))
            .fix(format!("unset {VARIABLE}, which takes the best there is")));
    }
    if is_available(name) {
        return Ok(());
    }
    let have: Vec<_> = ISAS.into_iter().filter(|isa| is_available(isa)).collect();
    Err(Error::new(Code::DeviceMissing, format!("{VARIABLE}={name}"))
        .need(format!("a processor with {name}"))
        .have(have.join(", "))
        .fix(format!("unset {VARIABLE}, which takes the best there is")))
}

/// Whether this processor has the set of that name.
#[cfg(target_arch = "x86_64")]
pub fn is_available(name: &str) -> bool {
    use std::arch::is_x86_feature_detected as has;
    let avx2 = has!("avx2") && has!("fma") && has!("f16c");
    let avx512 = avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
    match name {
        "amx" => avx512 && has!("avx512vnni") && crate::has_tiles(),
        "avx512vnni" => avx512 && has!("avx512vnni"),
        "avx512" => avx512,
        "avx2" => avx2,
        _ => name == "portable",
    }
}

/// Whether this processor has the set of that name.
#[cfg(target_arch = "aarch64")]
pub fn is_available(name: &str) -> bool {
    use std::arch::is_aarch64_feature_detected as has;
    match name {
        "neon" => true,
        "neondotprod" => has!("dotprod"),
        "neoni8mm" => has!("dotprod") && has!("i8mm"),
        _ => name == "portable",
    }
}

/// Whether this processor has the set of that name.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn is_available(name: &str) -> bool {
    name == "portable"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_known_and_there_or_refused() {
        assert!(check("portable").is_ok());
        for wrong in ["sse2", "AVX2", "avx 2"] {
            let e = check(wrong).expect_err(wrong);
            assert_eq!(e.code(), Code::Usage);
            assert!(e.to_string().contains("amx, avx512vnni, avx512, avx2"), "{e}");
        }
        for isa in ISAS {
            match check(isa) {
                Ok(()) => assert!(is_available(isa), "{isa}"),
                Err(e) => assert!(!is_available(isa) && e.code() == Code::DeviceMissing, "{e}"),
            }
        }
        let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
        assert_eq!(check(foreign).expect_err(foreign).code(), Code::DeviceMissing);
    }
}
