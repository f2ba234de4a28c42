//! What this process prints for a while, counted. It is printed all the same, afterwards.
#[cfg(target_os = "linux")]
mod linux {
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::os::fd::OwnedFd;

    /// Standard output and standard error, held back while it lives.
    pub struct Printed(Option<[(OwnedFd, File); 2]>);

    impl Printed {
        /// From here on. `None` when the system gives no place for it.
        pub fn begin() -> Option<Self> {
            flush();
            let file = || memfd_create("q4-printed", MemfdFlags::CLOEXEC).ok().map(File::from);
            let old = |fd| rustix::io::fcntl_dupfd_cloexec(fd, 3).ok();
            let (out, err) = (file()?, file()?);
            let held = [(old(rustix::stdio::stdout())?, out), (old(rustix::stdio::stderr())?, err)];
            rustix::stdio::dup2_stdout(&held[0].1).ok()?;
            rustix::stdio::dup2_stderr(&held[1].1).ok()?;
            Some(Self(Some(held)))
        }

        /// How many bytes there were on each.
        pub fn end(mut self) -> [u64; 2] {
            self.restore()
        }

        fn restore(&mut self) -> [u64; 2] {
            let Some(held) = self.0.take() else { return [0, 0] };
            flush();
            // Both were duplicates of what is open.
            let _ = rustix::stdio::dup2_stdout(&held[0].0);
            let _ = rustix::stdio::dup2_stderr(&held[1].0);
            held.map(|(old, mut held)| {
                let mut text = Vec::new();
                // What cannot be read back was printed by nobody.
                let _ = held.rewind().and_then(|()| held.read_to_end(&mut text));
                let _ = File::from(old).write_all(&text);
                text.len() as u64
            })
        }
    }

    impl Drop for Printed {
        fn drop(&mut self) {
            self.restore();
        }
    }

    fn flush() {
        let _ = std::io::stdout().flush();
    }
}

#[cfg(target_os = "linux")]
pub use linux::Printed;

/// Elsewhere nobody listens.
#[cfg(not(target_os = "linux"))]
pub struct Printed(());

#[cfg(not(target_os = "linux"))]
impl Printed {
    /// Nothing.
    pub fn begin() -> Option<Self> {
        None
    }
    /// Nothing.
    pub fn end(self) -> [u64; 2] {
        [0, 0]
    }
}
