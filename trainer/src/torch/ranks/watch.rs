//! Who notices that a rank has died, and tells: every rank waits for a message of rank 0, and rank 0 for one
//! of each. A process that ends closes its connections, so that whoever waits knows it at once.
use super::gloo::Gloo;
use q4_core::{Code, Error, Result};
use serde_json::Value;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A message: its first byte says what it is, the rest is text.
const LEN: usize = 1024;
/// A rank has ended; the text is the error the others end with.
const ENDED: u8 = 1;

/// Time a rank has to end by itself, with its own words, before it is ended.
const GRACE: Duration = Duration::from_secs(4);

/// Time a message has to be read before its connection is closed.
const ARRIVAL: Duration = Duration::from_millis(100);

/// The threads that wait, and what they found out.
pub(super) struct Watch {
    shared: Arc<Shared>,
}

struct Shared {
    gloo: Gloo,
    rank: usize,
    size: usize,
    /// Why this rank must end.
    verdict: Mutex<Option<Error>>,
    found: Condvar,
    /// Somebody is about to say why.
    found_out: Mutex<bool>,
    /// What comes now is the end that all have agreed on.
    parting: Mutex<bool>,
    /// And has come.
    parted: Mutex<bool>,
}

impl Watch {
    pub fn begin(gloo: Gloo, rank: usize, size: usize) -> Self {
        let shared = Arc::new(Shared {
            gloo,
            rank,
            size,
            verdict: Mutex::new(None),
            found: Condvar::new(),
            found_out: Mutex::new(false),
            parting: Mutex::new(false),
            parted: Mutex::new(false),
        });
        let of = if rank == 0 { 1..size } else { 0..1 };
        for other in of {
            let shared = shared.clone();
            std::thread::spawn(move || shared.wait_for(other));
        }
        Self { shared }
    }

    /// Why the run ends, if that becomes known within `patience`.
    pub fn verdict(&self, patience: Duration) -> Option<Error> {
        let until = Instant::now() + patience;
        let mut verdict = lock(&self.shared.verdict);
        while verdict.is_none() && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            verdict = match self.shared.found.wait_timeout(verdict, left) {
                Ok((verdict, _)) => verdict,
                Err(broken) => broken.into_inner().0,
            };
        }
        verdict.clone()
    }

    /// All that is left is to wait until everybody is done: connections that close meanwhile mean nothing.
    pub fn part(&self, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        *lock(&self.shared.parting) = true;
        wait()?;
        *lock(&self.shared.parted) = true;
        Ok(())
    }

    /// This rank ends with an error.
    pub fn tell(&self, e: &Error) {
        let rank = self.shared.rank;
        let e = e.clone().within(format!("rank {rank}"));
        self.shared.send_all(ENDED, text(&e).as_bytes(), usize::MAX);
    }
}

impl Shared {
    fn wait_for(&self, other: usize) {
        let mut message = vec![0; LEN];
        let said = self.gloo.recv(&mut message, other);
        let e = match said {
            Ok(()) => read(&message[1..]),
            Err(_) if *lock(&self.parting) => {
                std::thread::sleep(GRACE);
                if !*lock(&self.parted) {
                    end(Code::RankLost.exit());
                }
                return;
            }
            Err(e) => {
                let how = e.parts().find(|(name, _)| *name == "have").map_or("", |(_, text)| text);
                dead(other, self.size).have(format!("{how}: killed, out of memory, or its machine is gone"))
            }
        };
        if std::mem::replace(&mut *lock(&self.found_out), true) {
            return;
        }
        if self.rank == 0 {
            // Before this rank ends, too: the others would take it for the one that has died.
            self.send_all(ENDED, text(&e).as_bytes(), other);
            std::thread::sleep(ARRIVAL);
        }
        *lock(&self.verdict) = Some(e.clone());
        self.found.notify_all();
        std::thread::sleep(GRACE);
        // It computes, or waits for what will not come. Files are whole or not there, whenever that is.
        eprintln!("{e}");
        end(e.code().exit());
    }

    /// To everybody this rank watches, but not to `except`.
    fn send_all(&self, what: u8, text: &[u8], except: usize) {
        let others = if self.rank == 0 { 1..self.size } else { 0..1 };
        for other in others.filter(|r| *r != except) {
            let mut message = vec![0; LEN];
            message[0] = what;
            let len = text.len().min(LEN - 1);
            message[1..=len].copy_from_slice(&text[..len]);
            // Who is gone needs no message.
            let _: Result<()> = self.gloo.send(&mut message, other);
        }
    }
}

/// What the others end with.
pub(super) fn dead(rank: usize, size: usize) -> Error {
    Error::new(Code::RankLost, format!("rank {rank} of {size} has died"))
        .need("all ranks until the end")
        .have("nothing is heard of it: killed, out of memory, or its machine is gone")
        .fix("--resume goes on after the last checkpoint, with as many ranks as you like")
}

/// The error as JSON that fits into a message.
fn text(e: &Error) -> String {
    let whole = serde_json::to_string(e).unwrap_or_default();
    if whole.len() < LEN {
        return whole;
    }
    let what: String = e.what().chars().take(200).collect();
    serde_json::to_string(&Error::new(e.code(), what)).unwrap_or_default()
}

fn read(message: &[u8]) -> Error {
    let end = message.iter().position(|b| *b == 0).unwrap_or(message.len());
    let said: Value = serde_json::from_slice(&message[..end]).unwrap_or_default();
    super::error(&said)
}

/// At once: the threads of libtorch must not meet what an orderly end takes down.
pub(super) fn end(status: u8) -> ! {
    #[cfg(unix)]
    // SAFETY: ends the process.
    unsafe {
        libc::_exit(i32::from(status))
    }
    #[cfg(not(unix))]
    std::process::exit(i32::from(status))
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}
