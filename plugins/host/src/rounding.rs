//! What loading a library did to the floating-point mode of the thread that loads it. Compilers link code
//! into a library (`crtfastmath.o`, by `-Ofast` and `-ffast-math`) that makes subnormals zero in the whole
//! program from then on.
use q4_core::{Reject, RejectCode};

/// MXCSR on x86-64, FPCR on aarch64: rounding, subnormals, exceptions that trap.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Mode(u64);

impl Mode {
    /// Of this thread, now.
    #[cfg(target_arch = "x86_64")]
    pub fn now() -> Self {
        let mut word = 0u32;
        // SAFETY: stores the control word to a local.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags));
        }
        // The lowest six bits say what has happened, not what is to happen.
        Self(u64::from(word & !0x3f))
    }
    /// Of this thread, now.
    #[cfg(target_arch = "aarch64")]
    pub fn now() -> Self {
        let word: u64;
        // SAFETY: reads the control register.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
        Self(word)
    }
    /// Unknown here.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn now() -> Self {
        Self(0)
    }

    /// Sets it again.
    #[cfg(target_arch = "x86_64")]
    fn restore(self) {
        let word = self.0 as u32;
        // SAFETY: a word that the processor itself gave.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags));
        }
    }
    /// Sets it again.
    #[cfg(target_arch = "aarch64")]
    fn restore(self) {
        // SAFETY: a word that the processor itself gave.
        unsafe { std::arch::asm!("msr fpcr, {}", in(reg) self.0, options(nomem, nostack, preserves_flags)) };
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn restore(self) {}

    /// Refuses a library that was loaded since and changed it, and takes the change back.
    pub fn unchanged(self) -> Result<(), Vec<Reject>> {
        let now = Self::now();
        if now == self {
            return Ok(());
        }
        self.restore();
        let need = "a library that leaves the floating-point mode of the program alone; -Ofast and -ffast-math link code \
                    into it that does not (crtfastmath.o): use -O3 -ffp-contract=off";
        let name = if cfg!(target_arch = "x86_64") { "MXCSR" } else { "FPCR" };
        let have = format!("{name} {:#x} before it was loaded and {:#x} after", self.0, now.0);
        Err(crate::one(RejectCode::AbiMismatch, need, have))
    }
}
