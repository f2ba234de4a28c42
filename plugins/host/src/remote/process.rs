//! The process that runs a library, seen from the one that started it: when it ends, how, and what it
//! printed.
use q4_core::stderr::Stderr;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::time::Duration;

/// A child that is watched by a thread of its own, which lives as long as it does.
pub struct Process {
    /// Its number.
    pub id: u32,
    handle: OwnedFd,
    end: Arc<End>,
    /// Bytes written to standard output and standard error.
    printed: [Arc<AtomicU64>; 2],
    stderr: Option<Stderr>,
}

#[derive(Default)]
struct End {
    status: Mutex<Option<String>>,
    told: Condvar,
}

/// An output whose bytes are counted as they are read.
struct Counted<R>(R, Arc<AtomicU64>);

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.0.read(buffer)?;
        self.1.fetch_add(n as u64, Ordering::SeqCst);
        Ok(n)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Process {
    /// Starts `command` with both outputs captured; `ended` runs when it has ended.
    pub fn start(mut command: Command, ended: impl FnOnce() + Send + 'static) -> Result<Self, String> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let (send, receive) = mpsc::channel();
        let end = Arc::new(End::default());
        let tell = end.clone();
        // The child is killed when the thread that started it ends, so that thread does nothing else.
        let keep = move || {
            let started = command.spawn().map_err(|e| e.to_string());
            // What of it the other process holds must be held by it alone.
            drop(command);
            let mut child = match started {
                Ok(child) => child,
                Err(e) => return drop(send.send(Err(e))),
            };
            let id = child.id();
            let pid = i32::try_from(id).ok().and_then(Pid::from_raw);
            let handle = pid.ok_or("no number".to_owned()).and_then(|pid| {
                pidfd_open(pid, PidfdFlags::empty()).map_err(|e| format!("a handle of a process: {e}"))
            });
            let outputs = (child.stdout.take(), child.stderr.take());
            if handle.is_err() {
                // Nobody could end it later.
                let _ = child.kill();
            }
            let _ = send.send(handle.map(|handle| (id, handle, outputs)));
            let status = child.wait();
            *lock(&tell.status) = Some(status.map_or_else(|e| e.to_string(), said));
            tell.told.notify_all();
            ended();
        };
        let keeper = std::thread::Builder::new().name("q4-keeper".into()).spawn(keep);
        keeper.map_err(|e| format!("a thread: {e}"))?;
        let (id, handle, (out, err)) = receive.recv().map_err(|_| "its thread ended".to_owned())??;
        let printed: [Arc<AtomicU64>; 2] = [Arc::default(), Arc::default()];
        let stderr = err.map(|pipe| Stderr::listen(Counted(pipe, printed[1].clone())));
        if let Some(pipe) = out {
            let mut pipe = Counted(pipe, printed[0].clone());
            let drain = move || drop(io::copy(&mut pipe, &mut io::sink()));
            // Without a reader the pipe closes, and a library that prints is ended by that.
            drop(std::thread::Builder::new().name("q4-output".into()).spawn(drain));
        }
        Ok(Self { id, handle, end, printed, stderr })
    }

    /// Ends it.
    pub fn kill(&self) {
        // It may have ended by itself.
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
    }

    /// How it ended, if it does within `limit`: `signal: 11 (SIGSEGV)`.
    pub fn end_within(&self, limit: Duration) -> Option<String> {
        let status = lock(&self.end.status);
        let wait = self.end.told.wait_timeout_while(status, limit, |s| s.is_none());
        wait.unwrap_or_else(|e| e.into_inner()).0.clone()
    }

    /// Bytes it wrote to its standard output and standard error so far.
    pub fn printed(&self) -> [u64; 2] {
        // Whoever counts may not have read yet what was written just now.
        std::thread::sleep(std::time::Duration::from_millis(5));
        [0, 1].map(|i| self.printed[i].load(Ordering::SeqCst))
    }

    /// Where it crashed, and what it wrote first and last to its standard error, once it has ended.
    pub fn last_words(&self) -> String {
        self.stderr.as_ref().map_or_else(String::new, |stderr| stderr.text(Duration::from_millis(300)))
    }
}

fn said(status: ExitStatus) -> String {
    status.to_string()
}
