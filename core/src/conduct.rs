//! What a call must leave as it found it: how its thread rounds, and what is one for a whole process. Some of
//! it the system tells of any process, some only the process itself.
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::path::Path;

/// Names of facts and what they are, for comparing them with those of another time.
pub type Facts = BTreeMap<String, String>;

/// Name of the fact that lists threads, by number: one that ends is no change.
pub const THREADS: &str = "threads";

/// Name of the fact that counts allocations, which only some calls must not make.
pub const ALLOCATIONS: &str = "allocations";

/// What the system tells of the process with this number, or of this one: nothing of it is for a backend to
/// change. Empty where the system tells nothing.
pub fn facts(process: Option<u32>) -> Facts {
    let root = process.map_or_else(|| "/proc/self".into(), |id| format!("/proc/{id}"));
    let root = Path::new(&root);
    let mut all = Facts::new();
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let Some(status) = read(&root.join("status")) else { return all };
    let field = |text: &str, name: &str| {
        text.lines().find_map(|l| l.strip_prefix(name)).map_or_else(String::new, |v| v.trim().to_owned())
    };
    for (name, what) in [
        ("SigIgn:", "ignored signals"),
        ("SigCgt:", "handled signals"),
        ("Umask:", "umask"),
        ("NoNewPrivs:", "no_new_privs"),
        ("Seccomp:", "seccomp"),
        ("CapEff:", "capabilities"),
        ("Cpus_allowed:", "processors it may use"),
    ] {
        all.insert(what.into(), field(&status, name));
    }
    let thread = if process.is_some() { root.join("status") } else { "/proc/thread-self/status".into() };
    all.insert("blocked signals".into(), field(&read(&thread).unwrap_or_default(), "SigBlk:"));
    let link =
        |path: &Path| std::fs::read_link(path).map_or_else(|e| e.to_string(), |to| to.display().to_string());
    all.insert("working directory".into(), link(&root.join("cwd")));
    all.insert("resource limits".into(), read(&root.join("limits")).unwrap_or_default());
    let names = |folder: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut all: Vec<_> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        all.sort();
        all
    };
    let (open, threads) = (root.join("fd"), names(&root.join("task")));
    // Not the folder that is being read, nor what q4 itself keeps.
    let is_own = |to: &str| to.starts_with("/proc/") || to.starts_with("/memfd:q4-");
    let files = names(&open).into_iter().map(|n| (link(&open.join(&n)), n)).filter(|f| !is_own(&f.0));
    all.insert("open files".into(), files.map(|(to, n)| format!("{n} -> {to}; ")).collect());
    let children = |t: &String| read(&root.join("task").join(t).join("children")).unwrap_or_default();
    // What children that were waited for have used is the only trace of them.
    let stat = read(&root.join("stat")).unwrap_or_default();
    let of_children = stat.rsplit_once(')').and_then(|p| p.1.split_whitespace().nth(8)).unwrap_or_default();
    let alive: String = threads.iter().map(children).collect();
    all.insert("child processes".into(), format!("{alive}and page faults of ended ones: {of_children}"));
    all.insert(THREADS.into(), threads.join(" "));
    all
}

/// [`facts`] of this process, and what only it knows.
pub fn facts_here() -> Facts {
    let mut all = facts(None);
    all.insert("rounding of floats".into(), format!("{:#x}", float_control()));
    all.insert("environment".into(), environment().to_string());
    all.insert("locale".into(), locale().to_string());
    all
}

/// How this thread computes with floats: rounding, flushing to zero and trapping, whatever the processor
/// keeps of it. Flags that any operation sets are not part of it.
pub fn float_control() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        let (mut sse, mut x87) = (0u32, 0u16);
        // SAFETY: both store a register to the variable they are given.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut sse, options(nostack, preserves_flags));
            std::arch::asm!("fnstcw [{}]", in(reg) &raw mut x87, options(nostack, preserves_flags));
        }
        u64::from(sse & !0x3f) << 16 | u64::from(x87)
    }
    #[cfg(target_arch = "aarch64")]
    {
        let control: u64;
        // SAFETY: reads a register that every thread may read.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) control, options(nostack, preserves_flags)) }
        control
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        0
    }
}

/// Makes this thread compute as [`float_control`] said it did.
pub fn set_float_control(control: u64) {
    #[cfg(target_arch = "x86_64")]
    {
        let (sse, x87) = ((control >> 16) as u32, control as u16);
        // SAFETY: both load a register from a variable that holds what the register held before; every
        // exception is masked as it was then.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const sse, options(nostack, preserves_flags));
            std::arch::asm!("fldcw [{}]", in(reg) &raw const x87, options(nostack, preserves_flags));
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: writes what was read there.
    unsafe {
        std::arch::asm!("msr fpcr, {}", in(reg) control, options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = control;
}

/// A digest of the environment, whatever its order. The same within one process only.
pub fn environment() -> u64 {
    let digest = |pair: (std::ffi::OsString, std::ffi::OsString)| {
        let mut hasher = std::hash::DefaultHasher::new();
        pair.hash(&mut hasher);
        hasher.finish()
    };
    std::env::vars_os().map(digest).fold(0, u64::wrapping_add)
}

/// A digest of the C library's locale.
pub fn locale() -> u64 {
    #[cfg(target_os = "linux")]
    {
        unsafe extern "C" {
            fn setlocale(
                category: std::ffi::c_int,
                locale: *const std::ffi::c_char,
            ) -> *const std::ffi::c_char;
        }
        const ALL: std::ffi::c_int = 6;
        // SAFETY: NULL asks and changes nothing.
        let name = unsafe { setlocale(ALL, std::ptr::null()) };
        if name.is_null() {
            return 0;
        }
        let mut hasher = std::hash::DefaultHasher::new();
        // SAFETY: the C library keeps the text until the locale is set again.
        unsafe { std::ffi::CStr::from_ptr(name) }.hash(&mut hasher);
        hasher.finish()
    }
    #[cfg(not(target_os = "linux"))]
    {
        0
    }
}

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use super::*;

    #[test]
    fn another_rounding_is_seen_and_undone() {
        let before = float_control();
        // Flush to zero.
        let flush = if cfg!(target_arch = "x86_64") { 0x8000 << 16 } else { 1 << 24 };
        set_float_control(before | flush);
        let other = float_control();
        set_float_control(before);
        assert_eq!((other, float_control()), (before | flush, before));
        assert_eq!((environment(), locale()), (environment(), locale()));
    }
}
