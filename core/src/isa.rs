//! Instruction sets that kernels are written for: their names, which of them this processor has, and the one
//! that `Q4_ISA` names, which is read here and nowhere else.
use crate::{Code, Error, Reject, RejectCode, Result};

/// The variable that names one.
const VARIABLE: &str = "Q4_ISA";

/// An instruction set, best first of each architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with VNNI, and the tile unit (AMX, bf16) for products of many rows.
    Amx,
    /// AVX-512 with VNNI.
    Avx512Vnni,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// NEON with dot products and 8-bit matrix products.
    NeonI8mm,
    /// NEON with dot products.
    NeonDotprod,
    /// NEON, which every aarch64 has.
    Neon,
    /// Plain Rust.
    Portable,
}

impl Isa {
    /// Every one, best first.
    pub const ALL: [Self; 8] = [
        Self::Amx,
        Self::Avx512Vnni,
        Self::Avx512,
        Self::Avx2,
        Self::NeonI8mm,
        Self::NeonDotprod,
        Self::Neon,
        Self::Portable,
    ];

    /// Spelling in `Q4_ISA`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amx => "amx",
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::NeonI8mm => "neoni8mm",
            Self::NeonDotprod => "neondotprod",
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }

    /// The set that it is for f32: integer dots and tiles are of no use to them.
    pub const fn floats(self) -> Self {
        match self {
            Self::Amx | Self::Avx512Vnni => Self::Avx512,
            Self::NeonI8mm | Self::NeonDotprod => Self::Neon,
            plain => plain,
        }
    }

    /// Those this processor has, best first; never empty.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The best one of this processor.
    pub fn best() -> Self {
        Self::available().next().unwrap_or(Self::Portable)
    }

    /// Whether this processor has it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        match self {
            Self::Amx => Self::Avx512Vnni.is_available() && crate::has_tiles(),
            Self::Avx512Vnni => Self::Avx512.is_available() && has!("avx512vnni"),
            Self::Avx512 => {
                let own = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
                own && Self::Avx2.is_available()
            }
            Self::Avx2 => has!("avx2") && has!("fma") && has!("f16c"),
            Self::NeonI8mm | Self::NeonDotprod | Self::Neon => false,
            Self::Portable => true,
        }
    }

    /// Whether this processor has it.
    #[cfg(target_arch = "aarch64")]
    pub fn is_available(self) -> bool {
        use std::arch::is_aarch64_feature_detected as has;
        match self {
            Self::NeonI8mm => has!("dotprod") && has!("i8mm"),
            Self::NeonDotprod => has!("dotprod"),
            Self::Neon | Self::Portable => true,
            Self::Amx | Self::Avx512Vnni | Self::Avx512 | Self::Avx2 => false,
        }
    }

    /// Whether this processor has it.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn is_available(self) -> bool {
        self == Self::Portable
    }

    /// The best one of this processor, or the one that is named.
    ///
    /// # Errors
    /// The name is unknown, or this processor lacks the set: no other is taken instead.
    pub fn choose(name: Option<&str>) -> std::result::Result<Self, Reject> {
        let Some(name) = name else { return Ok(Self::best()) };
        match Self::ALL.into_iter().find(|isa| isa.name() == name) {
            None => Err(Reject::new(
                RejectCode::KernelImageMissing,
                format!("an instruction set of {}", list(Self::ALL)),
                format!("`{name}`"),
            )),
            Some(isa) if isa.is_available() => Ok(isa),
            Some(_) => Err(Reject::new(
                RejectCode::DeviceArch,
                format!("a processor with {name}"),
                format!("one with {}", list(Self::available())),
            )),
        }
    }

    /// What `Q4_ISA` names, if anything.
    ///
    /// # Errors
    /// [`Code::Usage`] for a name that is none of [`ALL`](Self::ALL), [`Code::DeviceMissing`] for one that
    /// this processor lacks: nobody computes with another one instead.
    pub fn named() -> Result<Option<Self>> {
        let name = std::env::var_os(VARIABLE).unwrap_or_default();
        if name.is_empty() { Ok(None) } else { Self::check(&name.to_string_lossy()).map(Some) }
    }

    fn check(name: &str) -> Result<Self> {
        let what = format!("{VARIABLE}={name}");
        let error = match Self::choose(Some(name)) {
            Ok(isa) => return Ok(isa),
            Err(reason) if reason.code == RejectCode::DeviceArch => {
                Error::new(Code::DeviceMissing, what).need(reason.need).have(list(Self::available()))
            }
            Err(_) => Error::new(Code::Usage, what).need(format!("one of {}", list(Self::ALL))),
        };
        Err(error.fix(format!("unset {VARIABLE}, which takes the best there is")))
    }
}

fn list(isas: impl IntoIterator<Item = Isa>) -> String {
    isas.into_iter().map(Isa::name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_known_and_there_or_refused() {
        assert_eq!(Isa::check("portable").expect("everywhere"), Isa::Portable);
        for wrong in ["sse2", "AVX2", "avx 2"] {
            let e = Isa::check(wrong).expect_err(wrong);
            assert_eq!(e.code(), Code::Usage);
            assert!(e.to_string().contains("amx, avx512vnni, avx512, avx2"), "{e}");
        }
        for isa in Isa::ALL {
            match Isa::check(isa.name()) {
                Ok(found) => assert!(found == isa && isa.is_available()),
                Err(e) => assert!(!isa.is_available() && e.code() == Code::DeviceMissing, "{e}"),
            }
        }
        let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
        assert_eq!(Isa::check(foreign).expect_err(foreign).code(), Code::DeviceMissing);
    }

    #[test]
    fn whoever_has_a_set_has_its_floats() {
        for isa in Isa::available() {
            assert!(isa.floats().is_available(), "{isa:?}");
            assert_eq!(isa.floats().floats(), isa.floats());
        }
    }
}
