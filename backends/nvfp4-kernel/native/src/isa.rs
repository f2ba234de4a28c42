//! Which instruction sets the kernels exist for and which of them this processor has: decided once per ctx,
//! never per call.
use crate::kernels::{Kernels, portable};

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

    /// Spelling in `nvfp4_ctx_desc.isa`.
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

    /// The one with that spelling.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name)
    }

    /// Those this processor has, best first; never empty.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The best one of this processor.
    pub fn best() -> Self {
        Self::available().next().unwrap_or(Self::Portable)
    }

    /// Processor features it needs.
    pub const fn needs(self) -> &'static str {
        match self {
            Self::Amx => {
                "x86-64 with avx512vnni, what it needs, amx-tile and amx-bf16, and a system that grants tiles"
            }
            Self::Avx512Vnni => "x86-64 with avx512f, avx512bw, avx512dq, avx512vl, avx512vnni, fma, f16c",
            Self::Avx512 => "x86-64 with avx512f, avx512bw, avx512dq, avx512vl, fma, f16c",
            Self::Avx2 => "x86-64 with avx2, fma, f16c",
            Self::NeonI8mm => "aarch64 with neon, dotprod, i8mm",
            Self::NeonDotprod => "aarch64 with neon, dotprod",
            Self::Neon => "aarch64 with neon",
            Self::Portable => "any processor",
        }
    }

    /// Whether this processor has it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match self {
            Self::Amx => Self::Avx512Vnni.is_available() && q4_core::has_tiles(),
            Self::Avx512Vnni => avx2 && avx512 && is_x86_feature_detected!("avx512vnni"),
            Self::Avx512 => avx2 && avx512,
            Self::Avx2 => avx2,
            Self::Portable => true,
            Self::NeonI8mm | Self::NeonDotprod | Self::Neon => false,
        }
    }
    /// Whether this processor has it.
    #[cfg(target_arch = "aarch64")]
    pub fn is_available(self) -> bool {
        use std::arch::is_aarch64_feature_detected;
        let neon = is_aarch64_feature_detected!("neon");
        let dotprod = neon && is_aarch64_feature_detected!("dotprod");
        match self {
            Self::NeonI8mm => dotprod && is_aarch64_feature_detected!("i8mm"),
            Self::NeonDotprod => dotprod,
            Self::Neon => neon,
            Self::Portable => true,
            Self::Amx | Self::Avx512Vnni | Self::Avx512 | Self::Avx2 => false,
        }
    }
    /// Whether this processor has it.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn is_available(self) -> bool {
        self == Self::Portable
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
