//! The process that runs a library, seen from the one that started it: when it ends, how, and what it printed.
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};

/// A child that is watched by a thread of its own, which lives as long as it does.
pub struct Process {
    /// Its number.
    pub id: u32,
    handle: OwnedFd,
    end: Arc<End>,
    printed: [Arc<Printed>; 2],
}

#[derive(Default)]
struct End {
    status: Mutex<Option<String>>,
    told: Condvar,
}

/// Bytes of one of its outputs: how many, and the last of them.
#[derive(Default)]
struct Printed {
    count: AtomicU64,
    kept: Mutex<Vec<u8>>,
    closed: AtomicBool,
}

/// Bytes that are kept of an output.
const KEPT: usize = 600;

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
        let printed = [Arc::default(), Arc::default()];
        out.into_iter().for_each(|pipe| drain(pipe, &printed[0]));
        err.into_iter().for_each(|pipe| drain(pipe, &printed[1]));
        Ok(Self { id, handle, end, printed })
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
        [0, 1].map(|i| self.printed[i].count.load(Ordering::SeqCst))
    }

    /// What it wrote last to its standard error, once it has ended.
    pub fn last_words(&self) -> String {
        let start = Instant::now();
        // A process of its own may hold the pipe for ever.
        while !self.printed[1].closed.load(Ordering::SeqCst) && start.elapsed() < Duration::from_millis(300) {
            std::thread::sleep(Duration::from_millis(2));
        }
        let kept = lock(&self.printed[1].kept);
        let plain = |c: char| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c };
        String::from_utf8_lossy(&kept).trim().chars().map(plain).collect()
    }
}

fn said(status: ExitStatus) -> String {
    status.to_string()
}

fn drain(mut pipe: impl Read + Send + 'static, into: &Arc<Printed>) {
    let printed = into.clone();
    let read = move || {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = pipe.read(&mut buffer) {
            let mut kept = lock(&printed.kept);
            kept.extend_from_slice(&buffer[..n]);
            let over = kept.len().saturating_sub(KEPT);
            kept.drain(..over);
            printed.count.fetch_add(n as u64, Ordering::SeqCst);
        }
        printed.closed.store(true, Ordering::SeqCst);
    };
    // Without a reader the pipe closes, and a library that prints is ended by that.
    drop(std::thread::Builder::new().name("q4-output".into()).spawn(read));
}
