//! What memory the program may use, decided before it is used, and what `--unified-memory` promises.
use crate::{Code, Error, Result};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// A limit on bytes and what has been promised of it.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    named: bool,
    reserved: AtomicU64,
}

impl Budget {
    /// A budget of `limit` bytes, which somebody named.
    pub fn new(limit: u64) -> Self {
        Self { limit, named: true, reserved: AtomicU64::new(0) }
    }

    /// What this machine has free for us less 5 %: the smaller of available memory and the cgroup's rest.
    pub fn of_machine() -> Self {
        Self { named: false, ..Self::new(available().map_or(u64::MAX, |free| free - free / 20)) }
    }

    /// The same and what this process has already.
    pub fn of_process() -> Self {
        let machine = Self::of_machine();
        Self { limit: machine.limit.saturating_add(resident().unwrap_or(0)), ..machine }
    }

    /// Whether somebody named the limit; else it is what the machine has.
    pub fn is_named(&self) -> bool {
        self.named
    }

    /// Bytes that nobody was promised.
    pub fn left(&self) -> u64 {
        self.limit.saturating_sub(self.reserved())
    }

    /// Bytes in all.
    pub fn limit(&self) -> u64 {
        self.limit
    }
    /// Bytes promised so far.
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Promises `bytes` to `what` before they are allocated.
    ///
    /// # Errors
    /// [`Code::OutOfMemory`] when less is left.
    pub fn reserve(&self, bytes: u64, what: &str) -> Result<()> {
        let fits = |now: u64| now.checked_add(bytes).filter(|next| *next <= self.limit);
        match self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => Ok(()),
            Err(now) => {
                Err(Error::new(Code::OutOfMemory, format!("{what} does not fit into the memory limit"))
                    .need(format!("{} more, {} in all", human(bytes), human(now.saturating_add(bytes))))
                    .have(format!("{} of {} left", human(self.limit.saturating_sub(now)), human(self.limit)))
                    .fix("raise --memory-limit, shorten the context, or choose a smaller model"))
            }
        }
    }

    /// Gives a promise back.
    pub fn release(&self, bytes: u64) {
        self.reserved.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes this process could still allocate without swapping; `None` where the system does not say.
pub fn available() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let free = kib_field(&meminfo, "MemAvailable:")?;
    let read = |p: &str| std::fs::read_to_string(p).ok()?.trim().parse::<u64>().ok();
    let rest = |limit: &str, used: &str| Some(read(limit)?.saturating_sub(read(used)?));
    let cgroup = rest("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current").or_else(|| {
        rest("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
    });
    Some(cgroup.map_or(free, |c| c.min(free)))
}

/// Largest resident size this process ever had, or since [`forget_peak`], in bytes; `None` where the system
/// does not say.
pub fn peak_resident() -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Begins [`peak_resident`] anew at what is resident now, where the system can.
pub fn forget_peak() {
    // 5 resets the peak (proc(5)); a system without it goes on with the old one.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// Resident size of this process, pages of files included, in bytes; `None` where the system does not say.
pub fn resident() -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// `1.50 GiB`.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let step = (63 - bytes.max(1).leading_zeros()) as usize / 10;
    match step.min(UNITS.len() - 1) {
        0 => format!("{bytes} B"),
        u => format!("{:.2} {}", bytes as f64 / (1u64 << (10 * u)) as f64, UNITS[u]),
    }
}

/// Parses `24GiB`, `512M`, `1.5GB`, `4096`; powers of 1024 for `KiB` and `K`, of 1000 for `KB`.
///
/// # Errors
/// [`Code::Usage`] for anything else, zero included.
pub fn parse_bytes(text: &str) -> Result<u64> {
    let bad = || {
        Error::new(Code::Usage, format!("`{text}` is not an amount of memory"))
            .need("a number and a unit, e.g. 24GiB or 512M")
    };
    let t = text.trim();
    let split = t.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(t.len());
    let number: f64 = t[..split].parse().map_err(|_| bad())?;
    let unit = t[split..].trim().to_ascii_lowercase();
    let power = |p: &str| "kmgt".find(p).map(|i| i as i32 + 1);
    let factor = match unit.as_str() {
        "" | "b" => 1.0,
        u => match (u.strip_suffix("ib").or(Some(u).filter(|u| u.len() == 1)), u.strip_suffix('b')) {
            (Some(p), _) => 1024f64.powi(power(p).ok_or_else(bad)?),
            (None, Some(p)) => 1000f64.powi(power(p).ok_or_else(bad)?),
            _ => return Err(bad()),
        },
    };
    let bytes = number * factor;
    if bytes.is_finite() && bytes >= 1.0 && bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(bad()) }
}

/// What the user wants done with memory that host and device can share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnifiedMemory {
    /// Never touch it.
    #[default]
    Disabled,
    /// Promote weights where possible; go on without where not.
    Prefer,
    /// Promote weights or stop.
    Require,
}

/// Whether managed memory can be had, and why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ManagedSupport {
    /// It can.
    Yes,
    /// It cannot.
    No(String),
}

impl UnifiedMemory {
    /// Spelling of `--unified-memory`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Prefer => "prefer",
            Self::Require => "require",
        }
    }

    /// Whether weights go to memory that host and device share. Activations never do: a shared copy per layer
    /// once froze whole hosts.
    ///
    /// # Errors
    /// [`Code::UnifiedMemory`] for `Require` where there is no such memory.
    pub fn grant(self, support: &ManagedSupport) -> Result<bool> {
        match (self, support) {
            (Self::Disabled, _) | (Self::Prefer, ManagedSupport::No(_)) => Ok(false),
            (_, ManagedSupport::Yes) => Ok(true),
            (Self::Require, ManagedSupport::No(why)) => {
                Err(Error::new(Code::UnifiedMemory, "--unified-memory require")
                    .need("managed memory on a CUDA device")
                    .have(why))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_refuses_before_the_allocation() -> Result<()> {
        let b = Budget::new(100);
        b.reserve(60, "weights")?;
        let e = b.reserve(41, "KV cache").expect_err("over the limit");
        assert_eq!(e.code(), Code::OutOfMemory);
        b.reserve(40, "KV cache")?;
        assert!(b.reserve(u64::MAX, "overflow").is_err());
        b.release(100);
        assert_eq!(b.reserved(), 0);
        Ok(())
    }

    #[test]
    fn amounts_are_parsed() -> Result<()> {
        assert_eq!(parse_bytes("24GiB")?, 24 << 30);
        assert_eq!(parse_bytes("512M")?, 512 << 20);
        assert_eq!(parse_bytes("1.5GB")?, 1_500_000_000);
        assert_eq!(parse_bytes("4096")?, 4096);
        for bad in ["", "GiB", "-1", "1QiB", "0", "1e400", "12 34"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
        assert_eq!(human(3 << 29), "1.50 GiB");
        assert_eq!(human(12), "12 B");
        Ok(())
    }

    #[test]
    fn unified_memory_keeps_its_contract() -> Result<()> {
        use UnifiedMemory::*;
        let no = ManagedSupport::No("no CUDA device".into());
        assert!(!Disabled.grant(&no)? && !Disabled.grant(&ManagedSupport::Yes)?);
        assert!(!Prefer.grant(&no)? && Prefer.grant(&ManagedSupport::Yes)?);
        assert!(Require.grant(&ManagedSupport::Yes)?);
        let refused = Require.grant(&no).expect_err("must be loud");
        assert_eq!(refused.code(), Code::UnifiedMemory);
        assert!(refused.to_string().contains("no CUDA device"), "{refused}");
        Ok(())
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(available().is_none_or(|b| b > 1 << 20));
        assert!(peak_resident().is_none_or(|b| b > 0));
    }
}
