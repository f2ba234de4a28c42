//! Mutants whose results are right and who leave the process that they are guests of another one. Each is
//! asked in a child.
use super::Mutant;
use super::parts::{HONEST, Parts};
use crate::Level::L5;
use q4_core::conduct::{float_control, set_float_control};
use std::io::Write;
use std::time::Duration;

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L5 lethal "keeps-a-thread": "every call starts a thread that stays" {
        before: |_, _| {
            std::thread::spawn(|| std::thread::sleep(Duration::from_secs(60)));
            Ok(())
        },
    }
    L5 lethal "keeps-a-thread-for-each-weight": "every weight has a thread of its own" {
        prepared: |_| {
            std::thread::spawn(|| std::thread::sleep(Duration::from_secs(60)));
            Ok(())
        },
    }
    L5 lethal "starts-a-process": "every call runs another program and waits for it" {
        before: |_, _| {
            drop(std::process::Command::new("true").status());
            Ok(())
        },
    }
    L5 lethal "leaves-a-process": "every weight starts a program that goes on" {
        prepared: |_| {
            drop(std::process::Command::new("sleep").arg("2").spawn());
            Ok(())
        },
    }
    L5 lethal "changes-a-variable": "every call sets a variable of the environment" {
        before: |kept, _| {
            let n = kept.last.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            // SAFETY: only this process's own code reads the environment, and it is a child that is about
            // to be found out.
            unsafe { std::env::set_var("Q4_LIAR", n.to_string()) };
            Ok(())
        },
    }
    L5 lethal "leaves-files-open": "every call opens a file and keeps it" {
        before: |_, _| {
            std::mem::forget(std::fs::File::open("/dev/null"));
            Ok(())
        },
    }
    L5 lethal "flushes-to-zero": "after a call its thread rounds the other way than before" {
        after: |_, _, _| {
            // Rounding up, then to the nearest again.
            let bit = if cfg!(target_arch = "x86_64") { 0x4000 << 16 } else { 1 << 22 };
            set_float_control(float_control() ^ bit);
        },
    }
    L5 lethal "talks": "a call writes to the standard output" {
        before: |_, _| {
            drop(std::io::stdout().write_all(b"computing\n"));
            Ok(())
        },
    }
    L5 lethal "complains": "preparing writes to the standard error" {
        prepared: |_| {
            drop(std::io::stderr().write_all(b"preparing\n"));
            Ok(())
        },
    }
    #[cfg(target_os = "linux")]
    L5 lethal "changes-the-umask": "every call makes files that others may write a bit more likely, or less" {
        before: |_, _| {
            use rustix::fs::Mode;
            use rustix::process::umask;
            let old = umask(Mode::empty());
            umask(old ^ Mode::WOTH);
            Ok(())
        },
    }
    #[cfg(target_os = "linux")]
    L5 lethal "moves-away": "every call changes the working directory" {
        before: |_, _| {
            let here = std::env::current_dir().unwrap_or_default();
            let to = if here == std::path::Path::new("/") { "/proc" } else { "/" };
            drop(std::env::set_current_dir(to));
            Ok(())
        },
    }
    #[cfg(target_os = "linux")]
    L5 lethal "limits-the-process": "every weight lowers the number of files that may be open" {
        prepared: |_| {
            use rustix::process::{Resource, getrlimit, setrlimit};
            let mut limit = getrlimit(Resource::Nofile);
            limit.current = limit.current.map(|n| n - 1);
            let _ = setrlimit(Resource::Nofile, limit);
            Ok(())
        },
    }
    #[cfg(target_os = "linux")]
    L5 lethal "ignores-a-signal": "every call takes Ctrl-C away, or gives it back" {
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
    }
    #[cfg(target_os = "linux")]
    L5 lethal "changes-the-locale": "every call sets the locale of the C library" {
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
    }
};
