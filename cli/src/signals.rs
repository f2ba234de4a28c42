//! What Ctrl-C and a closed pipe do.
//!
//! A closed pipe ends the process without a word, as with every other filter. Ctrl-C ends it at once, unless
//! a verb is writing files that must be removed first; then it asks once and insists the second time, unless
//! that is an echo of the first. SIGTERM does the same. In a conversation Ctrl-C stops the answer and nothing
//! else. SIGHUP ends the process, unless a server has a file to read again.
use crate::report::Outcome;
use crate::supervise;
use crate::terminal::{self, Raised};
use q4_core::asked::{Asked, Wish};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

static CLEANUP: AtomicBool = AtomicBool::new(false);
static ASKED: Asked = Asked::new();

/// Ctrl-C was pressed while [`cleanup`] was held.
pub fn interrupted() -> bool {
    ASKED.is_asked()
}

/// Holds Ctrl-C back: the first only sets [`interrupted`]; whoever holds this looks there and stops.
pub fn cleanup() -> Raised {
    Raised::new(&CLEANUP)
}

/// Set by Ctrl-C while [`talking`] is held.
pub static STOP: AtomicBool = AtomicBool::new(false);

static RELOADS: AtomicBool = AtomicBool::new(false);
static HUNG_UP: AtomicBool = AtomicBool::new(false);

/// From now on SIGHUP only makes [`hung_up`] true, until this is dropped.
pub fn hangups() -> Raised {
    let raised = Raised::new(&RELOADS);
    #[cfg(unix)]
    // SAFETY: the handler touches atomics, or ends the process by the signal.
    unsafe {
        libc::signal(libc::SIGHUP, on_hangup as *const () as libc::sighandler_t);
    }
    raised
}

/// Whether SIGHUP came since this was asked the last time.
pub fn hung_up() -> bool {
    HUNG_UP.swap(false, Ordering::Relaxed)
}

#[cfg(unix)]
extern "C" fn on_hangup(signal: libc::c_int) {
    match RELOADS.load(Ordering::Relaxed) {
        true => HUNG_UP.store(true, Ordering::Relaxed),
        false => terminal::end_by(signal),
    }
}

static TALKING: AtomicBool = AtomicBool::new(false);
static PRESSED: AtomicU8 = AtomicU8::new(0);

/// Begins a conversation: Ctrl-C sets [`STOP`], where answers look. A second one tells that this takes a
/// while, a third ends the program, for a backend may hang. While a line is edited, the editor has it.
pub fn talking() -> Raised {
    Raised::new(&TALKING)
}

/// An answer begins that nobody has interrupted yet.
pub fn begin_answer() {
    STOP.store(false, Ordering::Relaxed);
    PRESSED.store(0, Ordering::Relaxed);
}

/// Sets what both do; called once, before anything else.
#[cfg(unix)]
pub fn install() {
    ASKED.listen();
    // SAFETY: the dispositions are set before any thread starts, and the handlers only touch atomics, raise a
    // signal, or call `_exit`.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        // A file that grows past the limit is an error of whoever writes it, who then removes it.
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        libc::signal(libc::SIGINT, on_interrupt as *const () as libc::sighandler_t);
        libc::signal(libc::SIGTERM, on_end as *const () as libc::sighandler_t);
    }
}

/// SIGTERM: as Ctrl-C where files must be removed first, else what it always does.
#[cfg(unix)]
extern "C" fn on_end(signal: libc::c_int) {
    if !is_cleaned_up_first() {
        terminal::end_by(signal);
    }
}

#[cfg(unix)]
extern "C" fn on_interrupt(_signal: libc::c_int) {
    if !is_held_back() {
        end()
    }
}

/// Ctrl-C and Ctrl-Break; a closed pipe is an error of whoever writes.
#[cfg(windows)]
pub fn install() {
    ASKED.listen();
    // SAFETY: the handler touches atomics and ends the process.
    unsafe { windows::SetConsoleCtrlHandler(Some(on_event), 1) };
}

/// The system calls it in a thread of its own; what it does not take ends the process without our status.
#[cfg(windows)]
extern "system" fn on_event(event: u32) -> i32 {
    let is_interrupt = event <= 1;
    if is_interrupt && !is_held_back() {
        end()
    }
    i32::from(is_interrupt)
}

/// Whether somebody holds Ctrl-C back: a conversation twice, others once.
fn is_held_back() -> bool {
    if TALKING.load(Ordering::Relaxed) {
        STOP.store(true, Ordering::Relaxed);
        match PRESSED.fetch_add(1, Ordering::Relaxed) {
            0 => return true,
            1 => {
                terminal::say(b"\nstopping; Ctrl-C again ends q4\n");
                return true;
            }
            _ => {}
        }
    }
    is_cleaned_up_first()
}

/// Whether the verb that runs ends by itself, and nobody insists.
fn is_cleaned_up_first() -> bool {
    CLEANUP.load(Ordering::Relaxed) && ASKED.hear() != Wish::Insists
}

/// No destructor runs: a library that hangs may hold what they wait for.
#[cfg(unix)]
fn end() -> ! {
    terminal::restore();
    let status = Outcome::Interrupted.exit();
    supervise::tell(status);
    // SAFETY: `_exit` may be called from a signal handler and from any thread.
    unsafe { libc::_exit(i32::from(status)) }
}

/// The same.
#[cfg(windows)]
fn end() {
    let status = Outcome::Interrupted.exit();
    supervise::tell(status);
    // SAFETY: this process.
    unsafe { windows::TerminateProcess(windows::GetCurrentProcess(), u32::from(status)) };
}

#[cfg(windows)]
mod windows {
    use std::ffi::c_void;

    #[link(name = "kernel32")]
    unsafe extern "system" {
        pub fn SetConsoleCtrlHandler(handler: Option<extern "system" fn(u32) -> i32>, add: i32) -> i32;
        pub fn GetCurrentProcess() -> *mut c_void;
        pub fn TerminateProcess(process: *mut c_void, status: u32) -> i32;
    }
}
