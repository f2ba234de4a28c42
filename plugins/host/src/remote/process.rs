//! The process that runs a library, seen from the one that started it: when it ends, how, and what it
//! printed.
use super::lock;
use q4_core::stderr::Stderr;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{ioctl_fionread, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

/// A child that is watched by a thread of its own, which lives as long as it does.
pub struct Process {
    /// Its number.
    pub id: u32,
    handle: OwnedFd,
    end: Arc<End>,
    /// Its standard output and standard error.
    outputs: [Arc<Output>; 2],
    stderr: Stderr,
}

#[derive(Default)]
struct End {
    status: Mutex<Option<String>>,
    told: Condvar,
}

/// A pipe, and the bytes that were read from it. Both change under one lock, so that every byte written is in
/// exactly one of them for whoever counts.
struct Output {
    pipe: OwnedFd,
    read: Mutex<u64>,
}

impl Output {
    fn of(pipe: impl Into<OwnedFd>) -> Arc<Self> {
        Arc::new(Self { pipe: pipe.into(), read: Mutex::new(0) })
    }

    /// Bytes written so far.
    fn written(&self) -> u64 {
        let read = lock(&self.read);
        *read + ioctl_fionread(&self.pipe).unwrap_or(0)
    }
}

/// The one that reads it.
struct Reader(Arc<Output>);

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Waits without the lock, for which nobody else may have to wait.
        retry_on_intr(|| poll(&mut [PollFd::new(&self.0.pipe, PollFlags::IN)], None))?;
        let mut read = lock(&self.0.read);
        let n = rustix::io::read(&self.0.pipe, buffer)?;
        *read += n as u64;
        Ok(n)
    }
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
            let outputs = child.stdout.take().zip(child.stderr.take()).ok_or("no pipes".to_owned());
            let started = handle.and_then(|handle| outputs.map(|outputs| (id, handle, outputs)));
            if started.is_err() {
                // Nobody could end it later.
                let _ = child.kill();
            }
            let _ = send.send(started);
            let status = child.wait();
            *lock(&tell.status) = Some(status.map_or_else(|e| e.to_string(), said));
            tell.told.notify_all();
            ended();
        };
        let keeper = std::thread::Builder::new().name("q4-keeper".into()).spawn(keep);
        keeper.map_err(|e| format!("a thread: {e}"))?;
        let (id, handle, (out, err)) = receive.recv().map_err(|_| "its thread ended".to_owned())??;
        let (out, err) = (Output::of(out), Output::of(err));
        let stderr = Stderr::listen(Reader(err.clone()));
        let mut drained = Reader(out.clone());
        let drain = move || drop(io::copy(&mut drained, &mut io::sink()));
        // Without a reader the pipe fills, and a library that prints waits for ever.
        std::thread::Builder::new()
            .name("q4-output".into())
            .spawn(drain)
            .map_err(|e| format!("a thread: {e}"))?;
        Ok(Self { id, handle, end, outputs: [out, err], stderr })
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
        [0, 1].map(|i| self.outputs[i].written())
    }

    /// Where it crashed, and what it wrote first and last to its standard error, once it has ended.
    pub fn last_words(&self) -> String {
        self.stderr.text(Duration::from_millis(300))
    }
}

fn said(status: ExitStatus) -> String {
    status.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_written_is_counted_whoever_has_read_it() {
        for _ in 0..50 {
            let mut command = Command::new("sh");
            command.args(["-c", "head -c 70000 /dev/zero; printf abc >&2"]);
            let process = Process::start(command, || {}).expect("a shell");
            assert!(process.end_within(Duration::from_secs(60)).is_some());
            assert_eq!(process.printed(), [70_000, 3]);
        }
    }
}
