//! Liars whose results are right and who leave the process that they are guests of another one. Each is asked
//! in a child.
use super::Liar;
use super::parts::{HONEST, Parts};
use crate::Level::L5;
use q4_core::conduct::{float_control, set_float_control};
use std::io::Write;
use std::time::Duration;

const fn guest(name: &'static str, lie: &'static str, parts: Parts) -> Liar {
    Liar::lethal(L5, name, lie, parts)
}

pub(super) const LIARS: &[Liar] = &[
    guest(
        "keeps-a-thread",
        "every call starts a thread that stays",
        Parts {
            before: |_, _| {
                std::thread::spawn(|| std::thread::sleep(Duration::from_secs(60)));
                Ok(())
            },
            ..HONEST
        },
    ),
    guest(
        "keeps-a-thread-for-each-weight",
        "every weight has a thread of its own",
        Parts {
            prepared: |_| {
                std::thread::spawn(|| std::thread::sleep(Duration::from_secs(60)));
                Ok(())
            },
            ..HONEST
        },
    ),
    guest(
        "starts-a-process",
        "every call runs another program and waits for it",
        Parts {
            before: |_, _| {
                drop(std::process::Command::new("true").status());
                Ok(())
            },
            ..HONEST
        },
    ),
    guest(
        "leaves-a-process",
        "every weight starts a program that goes on",
        Parts {
            prepared: |_| {
                drop(std::process::Command::new("sleep").arg("2").spawn());
                Ok(())
            },
            ..HONEST
        },
    ),
    guest(
        "changes-a-variable",
        "every call sets a variable of the environment",
        Parts {
            before: |kept, _| {
                let n = kept.last.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                // SAFETY: only this process's own code reads the environment, and it is a child that is about
                // to be found out.
                unsafe { std::env::set_var("Q4_LIAR", n.to_string()) };
                Ok(())
            },
            ..HONEST
        },
    ),
    guest(
        "leaves-files-open",
        "every call opens a file and keeps it",
        Parts {
            before: |_, _| {
                std::mem::forget(std::fs::File::open("/dev/null"));
                Ok(())
            },
            ..HONEST
        },
    ),
    guest(
        "flushes-to-zero",
        "after a call its thread rounds the other way than before",
        Parts {
            after: |_, _, _| {
                // Rounding up, then to the nearest again.
                let bit = if cfg!(target_arch = "x86_64") { 0x4000 << 16 } else { 1 << 22 };
                set_float_control(float_control() ^ bit);
            },
            ..HONEST
        },
    ),
    guest(
        "talks",
        "a call writes to the standard output",
        Parts {
            before: |_, _| {
                drop(std::io::stdout().write_all(b"computing\n"));
                Ok(())
            },
            ..HONEST
        },
    ),
    guest(
        "complains",
        "preparing writes to the standard error",
        Parts {
            prepared: |_| {
                drop(std::io::stderr().write_all(b"preparing\n"));
                Ok(())
            },
            ..HONEST
        },
    ),
    #[cfg(target_os = "linux")]
    guest(
        "changes-the-umask",
        "every call makes files that others may write a bit more likely, or less",
        Parts {
            before: |_, _| {
                use rustix::fs::Mode;
                use rustix::process::umask;
                let old = umask(Mode::empty());
                umask(old ^ Mode::WOTH);
                Ok(())
            },
            ..HONEST
        },
    ),
    #[cfg(target_os = "linux")]
    guest(
        "moves-away",
        "every call changes the working directory",
        Parts {
            before: |_, _| {
                let here = std::env::current_dir().unwrap_or_default();
                let to = if here == std::path::Path::new("/") { "/proc" } else { "/" };
                drop(std::env::set_current_dir(to));
                Ok(())
            },
            ..HONEST
        },
    ),
    #[cfg(target_os = "linux")]
    guest(
        "limits-the-process",
        "every weight lowers the number of files that may be open",
        Parts {
            prepared: |_| {
                use rustix::process::{Resource, getrlimit, setrlimit};
                let mut limit = getrlimit(Resource::Nofile);
                limit.current = limit.current.map(|n| n - 1);
                let _ = setrlimit(Resource::Nofile, limit);
                Ok(())
            },
            ..HONEST
        },
    ),
    #[cfg(target_os = "linux")]
    guest(
        "ignores-a-signal",
        "every call takes Ctrl-C away, or gives it back",
        Parts {
            before: |_, _| {
                unsafe extern "C" {
                    fn signal(number: i32, handler: usize) -> usize;
                }
                const IGNORE: usize = 1;
                // SAFETY: SIGINT; neither disposition runs code.
                unsafe {
                    let old = signal(2, IGNORE);
                    signal(2, if old == IGNORE { 0 } else { IGNORE });
                }
                Ok(())
            },
            ..HONEST
        },
    ),
    #[cfg(target_os = "linux")]
    guest(
        "changes-the-locale",
        "every call sets the locale of the C library",
        Parts {
            before: |kept, _| {
                unsafe extern "C" {
                    fn setlocale(category: i32, locale: *const std::ffi::c_char) -> *const std::ffi::c_char;
                }
                let n = kept.last.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let name = if n % 2 == 0 { c"C.UTF-8" } else { c"C" };
                // SAFETY: a text that lives for ever.
                unsafe { setlocale(6, name.as_ptr()) };
                Ok(())
            },
            ..HONEST
        },
    ),
];
