//! Which instruction sets the kernels exist for and which of them this processor has: decided once per
//! backend, never per call.
use crate::kernels::{Kernels, portable};
use q4_core::{Reject, RejectCode};

/// An instruction set, best first.
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
    pub const ALL: [Isa; 8] = [
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

    /// The best one of this processor, or the one that is named.
    ///
    /// # Errors
    /// The name is unknown, or this processor lacks the set.
    pub fn choose(name: Option<&str>) -> Result<Self, Reject> {
        let Some(name) = name else { return Ok(Self::available().next().unwrap_or(Self::Portable)) };
        let list = |all: &mut dyn Iterator<Item = Self>| all.map(Self::name).collect::<Vec<_>>().join(", ");
        match Self::ALL.into_iter().find(|isa| isa.name() == name) {
            None => Err(Reject::new(
                RejectCode::KernelImageMissing,
                format!("an instruction set of {}", list(&mut Self::ALL.into_iter())),
                format!("`{name}`"),
            )),
            Some(isa) if isa.is_available() => Ok(isa),
            Some(isa) => Err(Reject::new(
                RejectCode::DeviceArch,
                format!("a processor with {}", isa.name()),
                format!("one with {}", list(&mut Self::available())),
            )),
        }
    }

    /// Those this processor has, best first; never empty.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        q4_core::isa::is_available(self.name())
    }

    /// Its kernels. They may run only where [`is_available`](Self::is_available) says so.
    pub fn kernels(self) -> &'static Kernels {
        #[cfg(target_arch = "aarch64")]
        use crate::kernels::neon;
        #[cfg(target_arch = "x86_64")]
        use crate::kernels::{avx2, avx512};
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Avx512Vnni => avx512::vnni(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => &avx512::PLAIN,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => &avx2::KERNELS,
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => &neon::I8MM,
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod => &neon::DOTPROD,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => &neon::PLAIN,
            _ => &portable::KERNELS,
        }
    }
}
