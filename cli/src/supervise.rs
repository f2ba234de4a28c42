//! A parent for a process that maps somebody else's code: such code may end its process with success in the
//! middle of an answer.
//!
//! The process that the user started forks before anything of a library is there and waits. The child does
//! the work and, at its real end, tells its status together with a secret. Without that it was ended by
//! somebody else, and that is an error, whatever its status is. A library that reads and writes its own
//! process can do as it likes; `--isolate` keeps it out.

#[cfg(unix)]
pub use unix::{begin, tell};

/// Elsewhere nobody waits.
#[cfg(not(unix))]
pub fn begin(_json: bool) -> Option<u8> {
    None
}

/// Elsewhere nobody listens.
#[cfg(not(unix))]
pub fn tell(_status: u8) {}

#[cfg(unix)]
mod unix {
    use crate::report;
    use q4_core::{Code, Error};
    use std::io::Read;
    use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicI32, Ordering};

    /// Where the child tells its status, and what makes it believed.
    static TOKEN: OnceLock<(RawFd, [u8; 16])> = OnceLock::new();
    /// The child, for signals that came to the parent alone.
    static CHILD: AtomicI32 = AtomicI32::new(0);

    /// Forks. `None` in the process that goes on: the child, or this one where a debugger holds it. The
    /// parent returns when the child has ended, with the status to end with.
    pub fn begin(json: bool) -> Option<u8> {
        if is_traced() {
            return None;
        }
        let Ok((mut reader, writer)) = std::io::pipe() else { return None };
        let secret = secret();
        // SAFETY: no other thread runs yet.
        match unsafe { libc::fork() } {
            0 => {
                drop(reader);
                // SAFETY: numbers only. The parent may have gone in between.
                #[cfg(target_os = "linux")]
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                }
                let _ = TOKEN.set((writer.into_raw_fd(), secret));
                None
            }
            -1 => None,
            child => {
                drop(writer);
                CHILD.store(child, Ordering::SeqCst);
                listen();
                let status = wait(child);
                let told = told(&mut reader, &secret);
                Some(conclude(status, told, json))
            }
        }
    }

    /// Tells the parent that this process ends by itself, with this status. Async-signal-safe.
    pub fn tell(status: u8) {
        let Some((fd, secret)) = TOKEN.get() else { return };
        let mut text = [0; 17];
        text[..16].copy_from_slice(secret);
        text[16] = status;
        // SAFETY: bytes of this function. A parent that is gone needs no status.
        unsafe { libc::write(*fd, text.as_ptr().cast(), text.len()) };
    }

    fn conclude(status: i32, told: Option<u8>, json: bool) -> u8 {
        if libc::WIFSIGNALED(status) {
            let signal = libc::WTERMSIG(status);
            if let Some(name) = crash(signal) {
                report::error(&crashed(name), json);
            }
            // As the shell would have seen it. A core was written by the process that had something to show.
            // SAFETY: numbers, and a limit that lives as long as the call.
            unsafe {
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::setrlimit(libc::RLIMIT_CORE, &none);
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
            return 128 + (signal as u8 & 127);
        }
        if let Some(status) = told {
            return status;
        }
        let error = ended(&format!("exit status {}, which is not its own", libc::WEXITSTATUS(status)));
        report::error(&error, json);
        error.code().exit()
    }

    /// The name of a signal that wrong code raises in its own process.
    fn crash(signal: i32) -> Option<&'static str> {
        let names = [
            (libc::SIGSEGV, "SIGSEGV"),
            (libc::SIGBUS, "SIGBUS"),
            (libc::SIGILL, "SIGILL"),
            (libc::SIGFPE, "SIGFPE"),
            (libc::SIGABRT, "SIGABRT"),
        ];
        names.iter().find(|(number, _)| *number == signal).map(|(_, name)| *name)
    }

    /// What a user reads when the process that maps a library crashed.
    fn crashed(name: &str) -> Error {
        Error::new(Code::BackendFailed, "the program crashed with a library of a third party in it")
            .need("libraries that leave the process that loads them alone")
            .have(name)
            .fix("run it in a process of its own: q4 --isolate --plugin ...; docs/backend-authors.md tells how to find the place")
    }

    /// What a user reads when a library ended the program.
    fn ended(how: &str) -> Error {
        Error::new(Code::BackendFailed, "a library ended the program before it was done")
            .need("libraries that leave the process that loads them alone")
            .have(how)
            .fix("run it in a process of its own: q4 --isolate --plugin ...")
    }

    fn wait(child: i32) -> i32 {
        let mut status = 0;
        loop {
            // SAFETY: a place for a number.
            let done = unsafe { libc::waitpid(child, &mut status, 0) };
            if done == child {
                return status;
            }
            if done == -1 && std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
                return libc::SIGKILL; // nobody can say how it ended
            }
        }
    }

    /// The status that the child told, if it did. Processes of a library's may hold the pipe open for ever,
    /// so what is there now is all.
    fn told(reader: &mut std::io::PipeReader, secret: &[u8; 16]) -> Option<u8> {
        let mut text = vec![0; 1 << 16];
        // SAFETY: a flag of a pipe of ours.
        unsafe { libc::fcntl(reader.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        let n = reader.read(&mut text).unwrap_or(0);
        text[..n].windows(17).rev().find(|w| &w[..16] == secret).map(|w| w[16])
    }

    fn secret() -> [u8; 16] {
        use std::hash::{BuildHasher, Hasher};
        let random = || std::hash::RandomState::new().build_hasher().finish().to_le_bytes();
        let mut out = [0; 16];
        out[..8].copy_from_slice(&random());
        out[8..].copy_from_slice(&random());
        out
    }

    /// A debugger follows one process, and should be where the libraries are.
    fn is_traced() -> bool {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let tracer = status.lines().find_map(|l| l.strip_prefix("TracerPid:"));
        tracer.is_some_and(|t| t.trim() != "0")
    }

    /// The terminal's signals reach the child by themselves; those that somebody sent to this process are
    /// passed on.
    fn listen() {
        for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2]
        {
            // SAFETY: a handler that only calls `kill`; the structure is zero where it is not set.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = pass_on as *const () as libc::sighandler_t;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }

    extern "C" fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the system passes a live structure.
        let is_sent = unsafe { (*info).si_code } <= 0;
        if is_sent {
            // SAFETY: a child that has not been waited for, or no process.
            unsafe { libc::kill(CHILD.load(Ordering::SeqCst), signal) };
        }
    }
}
