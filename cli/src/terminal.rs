//! The terminal as it was found: line editing changes it, and whatever ends the program changes it back.
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(unix)]
pub use unix::{editing, end_by, keep, restore, say};

/// A flag that is up while this lives.
pub struct Raised(&'static AtomicBool);

impl Raised {
    /// Puts `flag` up.
    pub fn new(flag: &'static AtomicBool) -> Self {
        flag.store(true, Ordering::SeqCst);
        Self(flag)
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

#[cfg(unix)]
mod unix {
    use super::Raised;
    use std::mem::MaybeUninit;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, Ordering};

    static FOUND: OnceLock<libc::termios> = OnceLock::new();
    static EDITING: AtomicBool = AtomicBool::new(false);

    /// Remembers the state of the terminal on standard input, and makes the signals that end a process from
    /// outside put it back first. Called before the first line is edited.
    pub fn keep() {
        let mut state = MaybeUninit::uninit();
        // SAFETY: a place for the structure.
        if unsafe { libc::tcgetattr(0, state.as_mut_ptr()) } != 0 {
            return;
        }
        // SAFETY: the call above succeeded, so it filled it.
        if FOUND.set(unsafe { state.assume_init() }).is_err() {
            return;
        }
        for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
            // SAFETY: the handler calls only what a handler may.
            unsafe {
                let before = libc::signal(signal, on_end as *const () as libc::sighandler_t);
                if before == libc::SIG_IGN {
                    libc::signal(signal, before); // as nohup wants it
                }
            }
        }
    }

    /// Begins to edit a line, which lasts as long as what is returned.
    pub fn editing() -> Raised {
        Raised::new(&EDITING)
    }

    /// Puts the terminal back if a line was being edited. Async-signal-safe.
    pub fn restore() {
        // SAFETY: numbers only. In the background the terminal is somebody else's, and as he wants it.
        let is_ours = unsafe { libc::tcgetpgrp(0) == libc::getpgrp() };
        if !EDITING.swap(false, Ordering::SeqCst) || !is_ours {
            return;
        }
        if let Some(found) = FOUND.get() {
            // SAFETY: a structure that the system filled; the call may be made from a signal handler.
            unsafe { libc::tcsetattr(0, libc::TCSANOW, found) };
        }
        // Pastes come as they are again, and the shell's prompt begins on a line of its own.
        say(b"\x1b[?2004l\n");
    }

    /// Writes to stderr. Async-signal-safe.
    pub fn say(text: &[u8]) {
        // SAFETY: bytes that live as long as the call. Where stderr is gone there is nobody to tell.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }

    extern "C" fn on_end(signal: libc::c_int) {
        end_by(signal);
    }

    /// Ends the process as the signal would have, with the terminal as it was found. Async-signal-safe.
    pub fn end_by(signal: libc::c_int) {
        restore();
        // SAFETY: numbers only; both calls may be made from a signal handler. The signal is delivered when
        // this returns.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
}

/// Elsewhere the system puts it back.
#[cfg(not(unix))]
mod elsewhere {
    use std::io::Write;

    /// Remembers nothing.
    pub fn keep() {}

    /// Begins to edit a line, which lasts as long as what is returned: nothing to put back is known here.
    pub fn editing() -> Editing {
        Editing
    }

    /// A line that is being edited.
    pub struct Editing;

    /// Writes to stderr.
    pub fn say(text: &[u8]) {
        // Where stderr is gone there is nobody to tell.
        let _ = std::io::stderr().write_all(text);
    }
}

#[cfg(not(unix))]
pub use elsewhere::{editing, keep, say};
