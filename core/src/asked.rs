//! Whether a process was asked to end, and whether somebody insists.
//!
//! One wish often comes twice: `timeout` and other supervisors send their signal to a process and then to its
//! group, and a terminal's Ctrl-C reaches a process by itself and through whoever passes signals on. Who
//! counts signals takes that for impatience, and whether the system delivers both is a matter of chance.
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A signal this soon after the first is the same wish; nobody who changed his mind is as fast.
const ECHO: Duration = Duration::from_millis(250);

/// What a signal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// End, when what is being done is put away.
    First,
    /// The first one, heard again.
    Echo,
    /// End now.
    Insists,
}

/// The wishes a process has heard. One static a process; handlers of signals may use it.
#[derive(Debug)]
pub struct Asked {
    origin: OnceLock<Instant>,
    /// Milliseconds behind the origin, from 1 on; 0 where nobody asked.
    at: AtomicU64,
}

impl Asked {
    /// Nobody asked.
    pub const fn new() -> Self {
        Self { origin: OnceLock::new(), at: AtomicU64::new(0) }
    }

    /// Starts the clock, which a handler may not: to be called before one is set. Without it there are no
    /// echoes, and the second signal insists.
    pub fn listen(&self) {
        let _ = self.origin.get_or_init(Instant::now);
    }

    /// Whether somebody asked.
    pub fn is_asked(&self) -> bool {
        self.at.load(Ordering::Relaxed) != 0
    }

    /// A signal came. Async-signal-safe: atomics and the monotonic clock.
    pub fn hear(&self) -> Wish {
        let now = self.origin.get().map(|origin| origin.elapsed().as_millis() as u64 + 1);
        match (self.at.compare_exchange(0, now.unwrap_or(1), Ordering::Relaxed, Ordering::Relaxed), now) {
            (Ok(_), _) => Wish::First,
            (Err(at), Some(now)) if now.saturating_sub(at) < ECHO.as_millis() as u64 => Wish::Echo,
            (Err(_), _) => Wish::Insists,
        }
    }
}

impl Default for Asked {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_that_comes_twice_at_once_is_one() {
        let asked = Asked::new();
        asked.listen();
        assert!(!asked.is_asked());
        assert_eq!(asked.hear(), Wish::First);
        assert_eq!(asked.hear(), Wish::Echo);
        std::thread::sleep(ECHO);
        assert_eq!((asked.hear(), asked.is_asked()), (Wish::Insists, true));
    }

    #[test]
    fn without_a_clock_the_second_insists() {
        let asked = Asked::new();
        assert_eq!((asked.hear(), asked.hear()), (Wish::First, Wish::Insists));
    }
}
