//! What crosses: questions and their answers, each on a channel of its own, and how a process that does not
//! answer is lost.
use super::memory::{ALIGN, Shared, page};
use super::port::Port;
use super::process::Process;
use super::wire::{Fields, MAX_LIST, Malformed, VERSION, answer, ask};
use super::{Loss, lock};
use crate::{Descriptor, Examined};
use q4_core::conduct::{self, Facts};
use q4_core::{Code, Device, Error, ExecPath, Reject, Result, VendorDevice};
use q4_plugin_sdk::codes;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, OnceLock};
use std::time::Duration;

/// How long a process may take to end after it was told to.
const PARTING: Duration = Duration::from_secs(2);

/// All that calls share.
pub(super) struct Link {
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) is_judged: bool,
    pub(super) limit: Duration,
    /// Dropped before the process is waited for, so that it sees their end.
    pub(super) free: Mutex<Vec<Channel>>,
    pub(super) freed: Condvar,
    pub(super) lifeline: Mutex<Option<UnixStream>>,
    pub(super) process: Process,
    /// What was known of it before the library was there.
    pub(super) before: OnceLock<Facts>,
    pub(super) lost: OnceLock<Loss>,
}

/// A socket, and memory for the operands of the calls on it.
pub(super) struct Channel {
    pub(super) port: Port,
    /// x, y and the workspace.
    pub(super) regions: [Option<Shared>; 3],
}

/// An exchange that did not come to an answer.
pub(super) enum Broken {
    /// The other process ended, or closed its side.
    Ended,
    Late,
    Malformed,
    /// This side could not even ask.
    Here(Error),
}

impl From<Malformed> for Broken {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

impl From<std::io::Error> for Broken {
    fn from(e: std::io::Error) -> Self {
        match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::Late,
            ErrorKind::InvalidData => Self::Malformed,
            _ => Self::Ended,
        }
    }
}

pub(super) type Answer<T> = std::result::Result<T, Broken>;

pub(super) type Offers = Vec<(std::borrow::Cow<'static, str>, ExecPath)>;

/// What a process says of the library that it loaded.
pub(super) struct Greeting {
    pub(super) descriptor: Descriptor,
    pub(super) priority: i32,
    pub(super) offers: Offers,
    pub(super) devices: Vec<VendorDevice>,
}

impl Channel {
    /// Says what will be asked for; the answer are digests of the environment and the locale.
    pub(super) fn greet(&mut self, found: &Examined, files: &[OwnedFd]) -> Answer<[u64; 2]> {
        let out = self.port.out.begin(ask::HELLO).u32(VERSION).u32(std::process::id());
        out.text(&found.digest()).raw(found.path().as_os_str().as_bytes());
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        self.exchange(&files, |f| Ok([f.u64()?, f.u64()?]))?.map_err(|_| Broken::Malformed)
    }

    /// Has the library loaded.
    pub(super) fn load(&mut self) -> Answer<std::result::Result<Greeting, Vec<Reject>>> {
        self.port.out.begin(ask::LOAD);
        self.port.send(&[])?;
        self.port.receive(None)?;
        let mut f = Fields(self.port.parts().0);
        if f.u32()? != answer::DONE {
            let reasons = f.reasons()?;
            f.end()?;
            return if reasons.is_empty() { Err(Broken::Malformed) } else { Ok(Err(reasons)) };
        }
        let (descriptor, priority) = (f.descriptor()?, f.u32()? as i32);
        let mut offers = Offers::new();
        for _ in 0..f.count(MAX_LIST)? {
            let schema = codes::schema_from(f.u32()?, 1).ok_or(Malformed)?;
            offers.push((schema.into(), codes::path_from(f.u32()?).ok_or(Malformed)?));
        }
        let mut devices = Vec::new();
        for ordinal in 0..f.count(MAX_LIST)? {
            let device = Device::vendor(&descriptor.name, ordinal);
            devices.push(VendorDevice { device, name: f.line()?, fingerprint: f.line()?, memory: f.u64()? });
        }
        f.end()?;
        Ok(Ok(Greeting { descriptor, priority, offers, devices }))
    }

    /// Sends what was written and reads the answer; the inner error is the library's.
    pub(super) fn exchange<T>(
        &mut self,
        files: &[BorrowedFd<'_>],
        read: impl FnOnce(&mut Fields<'_>) -> std::result::Result<T, Malformed>,
    ) -> Answer<Result<T>> {
        self.port.send(files)?;
        self.port.receive(None)?;
        let mut f = Fields(self.port.parts().0);
        let out = match f.u32()? {
            answer::DONE => Ok(read(&mut f)?),
            answer::FAILED => Err(f.error()?),
            _ => return Err(Broken::Malformed),
        };
        f.end()?;
        Ok(out)
    }

    /// At least `len` bytes in a region, after room for any phase.
    pub(super) fn region(&mut self, which: usize, len: usize) -> Answer<&mut Shared> {
        if self.regions[which].as_ref().is_none_or(|r| r.len() < len + ALIGN) {
            let bytes = (len + ALIGN).max(4 * page()).checked_next_power_of_two().unwrap_or(len + ALIGN);
            let memory = |e: std::io::Error| {
                Broken::Here(
                    Error::new(Code::OutOfMemory, "operands of a call in another process")
                        .need(format!("{bytes} bytes that both share"))
                        .have(e.to_string()),
                )
            };
            let shared = Shared::new(bytes, which > 0).map_err(memory)?;
            self.port.out.begin(ask::REGION).u32(which as u32).u64(shared.len() as u64);
            let file = shared.file().try_clone_to_owned().map_err(memory)?;
            self.exchange(&[file.as_fd()], |_| Ok(()))?.map_err(Broken::Here)?;
            self.regions[which] = Some(shared);
        }
        self.regions[which].as_mut().ok_or(Broken::Malformed)
    }
}

impl Link {
    /// One question on a channel of its own.
    pub(super) fn ask<T>(
        &self,
        what: &str,
        question: impl FnOnce(&mut Channel) -> Answer<Result<T>>,
    ) -> Result<T> {
        let mut channel = {
            let mut free = lock(&self.free);
            loop {
                if let Some(loss) = self.lost.get() {
                    return Err(self.error(what, loss));
                }
                match free.pop() {
                    Some(channel) => break channel,
                    None => free = self.freed.wait(free).unwrap_or_else(|e| e.into_inner()),
                }
            }
        };
        let answered = question(&mut channel);
        match answered {
            Ok(answer) => {
                self.give_back(channel);
                answer
            }
            Err(Broken::Here(e)) => {
                self.give_back(channel);
                Err(e.within(&self.name))
            }
            Err(broken) => Err(self.broken(what, broken)),
        }
    }

    pub(super) fn facts(&self, inside: [u64; 6]) -> Facts {
        let mut all = conduct::facts(Some(self.process.id));
        let names = [
            "calls that changed how their thread rounds",
            "environment",
            "locale",
            conduct::ALLOCATIONS,
            "threads that it started",
            "processes that it started",
        ];
        all.extend(names.into_iter().zip(inside).map(|(name, v)| (name.to_owned(), v.to_string())));
        let [out, err] = self.process.printed();
        all.insert("bytes on its standard output".into(), out.to_string());
        all.insert("bytes on its standard error".into(), err.to_string());
        all
    }

    fn give_back(&self, channel: Channel) {
        lock(&self.free).push(channel);
        self.freed.notify_one();
    }

    pub(super) fn broken(&self, what: &str, broken: Broken) -> Error {
        let loss = self.lose(broken);
        self.error(what, &loss)
    }

    /// Ends the process and keeps the reason, unless there is one.
    pub(super) fn lose(&self, broken: Broken) -> Loss {
        // A process that closes a socket is about to end by itself, if it means well.
        let ended = match broken {
            Broken::Ended => self.process.end_within(PARTING / 4),
            _ => None,
        };
        self.process.kill();
        let killed = self.process.end_within(PARTING);
        let why = match (ended, broken) {
            (Some(end), _) => format!("the process ended: {end}"),
            (None, Broken::Late) => format!("no answer within {} s", self.limit.as_secs_f64()),
            (None, Broken::Ended) => "the process closed its socket and went on".to_owned(),
            (None, _) => format!("an answer that makes no sense ({})", killed.unwrap_or_default()),
        };
        let words = self.process.last_words();
        let have = if words.is_empty() { why } else { format!("{why}\n{words}") };
        let is_hang = have.starts_with("no answer");
        let loss = self.lost.get_or_init(|| Loss { is_hang, have }).clone();
        self.freed.notify_all();
        loss
    }

    fn error(&self, what: &str, loss: &Loss) -> Error {
        Error::new(Code::BackendFailed, format!("{}: {what}", self.name))
            .need(format!("an answer of the process that runs {}", self.path.display()))
            .have(loss.have.clone())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let free = self.free.get_mut().unwrap_or_else(|e| e.into_inner());
        if self.lost.get().is_none()
            && let Some(channel) = free.last_mut()
        {
            channel.port.out.begin(ask::BYE);
            // Who is gone needs no good-bye.
            let _ = channel.port.send(&[]);
            self.process.end_within(PARTING);
        }
        free.clear();
        drop(lock(&self.lifeline).take());
        self.process.kill();
    }
}
