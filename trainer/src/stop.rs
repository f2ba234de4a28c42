//! SIGTERM, Ctrl-C and a closed terminal: the first asks a run to end where it can go on from, the second
//! ends it at once, unless it is an echo of the first.
use q4_core::asked::{Asked, Wish};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

static ASKED: Asked = Asked::new();
/// The first signal.
static BY: AtomicI32 = AtomicI32::new(0);
/// The one that all ranks end by.
static AGREED: AtomicI32 = AtomicI32::new(0);
static RANKS: AtomicBool = AtomicBool::new(false);
/// Another process says that the signal was heard.
static MUTE: AtomicBool = AtomicBool::new(false);

/// A signal that asked the run to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal(i32);

impl Signal {
    /// Status the process ends with, as shells count: 130 after Ctrl-C, 143 after SIGTERM.
    pub fn exit(self) -> u8 {
        128 + (self.0 as u8 & 127)
    }

    /// As the system counts.
    pub fn number(self) -> i32 {
        self.0
    }

    /// `SIGTERM`, `Ctrl-C` or `SIGHUP`.
    pub fn name(self) -> &'static str {
        match self.0 {
            2 => "Ctrl-C",
            15 => "SIGTERM",
            _ => "SIGHUP",
        }
    }
}

/// Whether the run was asked to end, and by what. Among ranks: once all know.
pub fn asked() -> Option<Signal> {
    if RANKS.load(Ordering::Relaxed) { signal(&AGREED) } else { heard() }
}

/// What this process was asked by, whatever the others know.
pub fn heard() -> Option<Signal> {
    signal(&BY)
}

fn signal(by: &AtomicI32) -> Option<Signal> {
    match by.load(Ordering::Relaxed) {
        0 => None,
        signal => Some(Signal(signal)),
    }
}

/// From here on a run ends by what its ranks agree on, and only one of them says that it was asked to.
pub fn among_ranks(speaks: bool) {
    RANKS.store(true, Ordering::Relaxed);
    MUTE.store(!speaks, Ordering::Relaxed);
}

/// A signal is for others, who will say that they have heard it.
pub fn hear_silently() {
    MUTE.store(true, Ordering::Relaxed);
}

/// Whether it is one of several.
pub fn is_among_ranks() -> bool {
    RANKS.load(Ordering::Relaxed)
}

/// The first signal that any rank has heard, by number: all end by it.
pub fn agree(signal: i32) {
    AGREED.store(signal, Ordering::Relaxed);
}

/// From here on the signals ask first. Those that are ignored, as under `nohup`, stay so.
#[cfg(unix)]
pub fn ask_first() {
    ASKED.listen();
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: plain structures, zero is a valid value of them; the handler only does what a handler may.
        unsafe {
            let mut old: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut old);
            if old.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// A file that grows over its limit is an error of the write, not the end of the process.
#[cfg(unix)]
pub fn writes_fail_plainly() {
    // SAFETY: a disposition without a handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Elsewhere the system's own behaviour is kept.
#[cfg(not(unix))]
pub fn ask_first() {}

/// Elsewhere there is no such limit.
#[cfg(not(unix))]
pub fn writes_fail_plainly() {}

#[cfg(unix)]
extern "C" fn on_signal(signal: libc::c_int) {
    const TEXT: &[u8] =
        b"\nasked to end: after this step, with what is there written down; again ends at once\n";
    match ASKED.hear() {
        Wish::First => BY.store(signal, Ordering::Relaxed),
        Wish::Echo => return,
        // SAFETY: may be called from a handler.
        Wish::Insists => unsafe { libc::_exit(128 + signal) },
    }
    if MUTE.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: may be called from a handler; the code that was interrupted finds its errno as it was.
    unsafe {
        let errno = errno();
        let was = *errno;
        libc::write(2, TEXT.as_ptr().cast(), TEXT.len());
        *errno = was;
    }
}

#[cfg(any(target_os = "macos", target_os = "ios", target_os = "freebsd"))]
unsafe fn errno() -> *mut libc::c_int {
    // SAFETY: has no conditions.
    unsafe { libc::__error() }
}

#[cfg(all(unix, not(any(target_os = "macos", target_os = "ios", target_os = "freebsd"))))]
unsafe fn errno() -> *mut libc::c_int {
    // SAFETY: has no conditions.
    unsafe { libc::__errno_location() }
}
