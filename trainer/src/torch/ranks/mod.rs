//! The ranks of a run and how they talk: tensors through `Collectives`, decisions through Gloo on the host,
//! deaths through `watch`.
//!
//! Whatever ranks could disagree about (losses, norms, signals, what rank 0 alone does) is gathered first and
//! judged by all with the same numbers, in the order of ranks.
use super::Tch;
use crate::ranks::Place;
use crate::stop;
use gloo::{Gloo, Store, Work};
use meeting::Meeting;
use q4_core::{Code, Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::cell::{OnceCell, RefCell};
use std::process::ExitCode;
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use watch::Watch;

pub mod gloo;
pub mod launch;
mod meeting;
mod nccl;
mod watch;

/// What a step needs of a library of collectives: f32 and bytes, where the model lives.
trait Collectives {
    /// `give[i]` f32 to rank i out of `send`, one behind the other, and `take[i]` from it. May be on its way
    /// when this returns.
    fn all_to_all(&self, send: Tensor, give: &[usize], take: &[usize]) -> Result<Pending>;
    /// As many bytes of every rank, in their order: `[size * len]`.
    fn all_gather(&self, mine: &Tensor) -> Result<Tensor>;
}

/// What other ranks send, on its way.
pub(super) struct Pending {
    /// Dropped, and so waited for, before the memory it uses.
    work: Option<Work>,
    out: Tensor,
    _send: Tensor,
}

impl Pending {
    fn wait(self) -> Result<Tensor> {
        self.work.map_or(Ok(()), Work::wait)?;
        Ok(self.out)
    }
}

/// All ranks of a run, as one of them sees them.
pub struct Team {
    place: Place,
    /// Small things of the host.
    host: Gloo,
    /// Gradients and masters; not before the device is known.
    tensors: OnceCell<Box<dyn Collectives>>,
    store: Store,
    watch: Watch,
    /// An error that every rank has.
    agreed: RefCell<Option<Error>>,
}

/// Longest wait for the others to come; as of torch's own programs.
const MEETING: Duration = Duration::from_secs(300);
/// Longest wait for a message: rank 0 may answer prompts meanwhile. Deaths are told otherwise, at once.
const PATIENCE: Duration = Duration::from_secs(7 * 24 * 3600);

impl Team {
    /// Meets the others.
    ///
    /// # Errors
    /// [`Code::RankLost`] when not all come.
    pub fn meet(place: &Place) -> Result<Self> {
        let Place { rank, size, meet, .. } = place;
        let absent = |e: Error| {
            let have =
                e.parts().find(|(n, _)| *n == "have").map_or(String::new(), |(_, text)| text.to_owned());
            Error::new(Code::RankLost, format!("{place}: the ranks do not find each other"))
                .need(format!("all {size} ranks within {} s", MEETING.as_secs()))
                .have(have)
                .fix(
                    "start all of them (torchrun, mpirun, srun), with one MASTER_ADDR and a free MASTER_PORT",
                )
        };
        let serves = *rank == 0 && !meet.served;
        let store = Store::open(&meet.host, meet.port, serves, MEETING).map_err(absent)?;
        let store = store.within(&meet.prefix).map_err(absent)?;
        let meeting = Meeting::begin(place).map_err(absent)?;
        // All are there before any connects: what follows waits for nobody.
        store.set(&format!("here/{rank}"), &[1]).map_err(absent)?;
        (0..*size).try_for_each(|r| store.get(&format!("here/{r}"), &mut [0])).map_err(absent)?;
        let host = Gloo::open(&store.within("host")?, *rank, *size, PATIENCE).map_err(absent)?;
        let watch = Gloo::open(&store.within("watch")?, *rank, *size, 50 * PATIENCE).map_err(absent)?;
        stop::among_ranks(place.is_first());
        let team = Self {
            place: place.clone(),
            host,
            tensors: OnceCell::new(),
            store,
            watch: Watch::begin(watch, *rank, *size),
            agreed: RefCell::default(),
        };
        // From here on everybody is watched.
        team.gather(&[0])?;
        meeting.end();
        Ok(team)
    }

    /// Tensors of `device`, where the model lives, can be sent from here on.
    ///
    /// # Errors
    /// [`Code::LibraryRefused`] without NCCL for a CUDA device.
    pub fn connect(&self, device: Device) -> Result<()> {
        let (rank, size) = (self.rank(), self.size());
        let tensors: Box<dyn Collectives> = match device {
            Device::Cuda(n) => Box::new(nccl::Nccl::new(&self.store, rank, size, n)?),
            _ => Box::new(Host { gloo: self.host, size }),
        };
        let _: std::result::Result<(), _> = self.tensors.set(tensors);
        Ok(())
    }

    fn tensors(&self) -> Result<&dyn Collectives> {
        let tensors = self.tensors.get().map(|t| &**t);
        tensors.ok_or_else(|| Error::new(Code::Internal, "ranks that are not connected"))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.place.rank
    }
    /// How many there are.
    pub fn size(&self) -> usize {
        self.place.size
    }
    /// Whether this rank speaks and writes.
    pub fn is_first(&self) -> bool {
        self.place.is_first()
    }

    /// `mine` of every rank; all have the same length.
    fn gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut out = vec![0; mine.len() * self.size()];
        self.host.all_gather(&mut mine.to_vec(), &mut out).map_err(|e| self.lost(e))?;
        Ok(out.chunks_exact(mine.len().max(1)).map(<[u8]>::to_vec).collect())
    }

    /// Bytes of any length of every rank.
    pub fn gather_any(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let lens = self.gather(&(mine.len() as u64).to_le_bytes())?;
        let lens: Vec<usize> = lens.iter().map(|b| number(b) as usize).collect();
        let longest = lens.iter().copied().max().unwrap_or(0);
        let mut padded = mine.to_vec();
        padded.resize(longest.max(1), 0);
        let all = self.gather(&padded)?;
        Ok(all
            .into_iter()
            .zip(lens)
            .map(|(mut bytes, len)| {
                bytes.truncate(len);
                bytes
            })
            .collect())
    }

    /// The same numbers of every rank.
    pub fn gather_numbers(&self, mine: &[f64]) -> Result<Vec<Vec<f64>>> {
        let bytes: Vec<u8> = mine.iter().flat_map(|x| x.to_le_bytes()).collect();
        if bytes.is_empty() {
            return Ok(vec![Vec::new(); self.size()]);
        }
        let all = self.gather(&bytes)?;
        Ok(all.iter().map(|b| b.chunks_exact(8).map(|x| f64::from_bits(number(x))).collect()).collect())
    }

    /// Numbers and what this process was asked by meanwhile; a signal that any rank has heard is agreed on.
    pub fn gather_and_listen(&self, mine: &[f64]) -> Result<Vec<Vec<f64>>> {
        let heard = stop::heard().map_or(0.0, |s| f64::from(s.number()));
        let mut all = self.gather_numbers(&[mine, &[heard]].concat())?;
        let signals: Vec<f64> = all.iter_mut().filter_map(Vec::pop).collect();
        if stop::asked().is_none()
            && let Some(signal) = signals.iter().find(|s| **s != 0.0)
        {
            stop::agree(*signal as i32);
        }
        Ok(all)
    }

    /// `bytes` must be those of rank 0. [`Code::Usage`] names the first rank where they are not.
    pub fn same(&self, what: &str, bytes: &[u8]) -> Result<()> {
        let all = self.gather_any(bytes)?;
        match all.iter().position(|other| *other != all[0]) {
            None => Ok(()),
            Some(rank) => {
                let e = Error::new(Code::Usage, format!("rank {rank} has another {what} than rank 0"));
                Err(self.agree(e.need("the same line and the same files on every machine")))
            }
        }
    }

    /// What rank 0 alone does; all have its result, an error too.
    pub fn first<T: Serialize + DeserializeOwned>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let mine = if self.is_first() { Some(f()) } else { None };
        let sent = match &mine {
            None => Vec::new(),
            Some(Ok(value)) => json!({ "ok": value }).to_string().into_bytes(),
            Some(Err(e)) => {
                let signal = stop::heard().map(stop::Signal::number);
                json!({ "error": e, "signal": signal }).to_string().into_bytes()
            }
        };
        let all = self.gather_any(&sent)?;
        let broken = |e: serde_json::Error| Error::new(Code::Internal, format!("rank 0 said: {e}"));
        let mut said: Value = serde_json::from_slice(&all[0]).map_err(broken)?;
        if let Some(signal) = said["signal"].as_i64().filter(|_| stop::asked().is_none()) {
            stop::agree(signal as i32);
        }
        if said["error"].is_object() {
            let e = match mine {
                Some(Err(e)) => e,
                _ => error(&said["error"]),
            };
            return Err(self.agree(e));
        }
        match mine {
            Some(value) => value,
            None => serde_json::from_value(said["ok"].take()).map_err(broken),
        }
    }

    /// An error that every rank comes to by itself.
    pub fn agree(&self, e: Error) -> Error {
        *self.agreed.borrow_mut() = Some(e.clone());
        e
    }

    /// Whether every rank has it.
    pub fn is_agreed(&self, e: &Error) -> bool {
        self.agreed.borrow().as_ref().is_some_and(|a| (a.code(), a.what()) == (e.code(), e.what()))
    }

    /// All are done.
    pub fn part(&self) -> Result<()> {
        self.watch.part(|| self.gather(&[0]).map(|_| ()))
    }

    /// This rank ends alone; the others are told why.
    pub fn fail(&self, e: &Error) {
        if e.code() != Code::RankLost {
            self.watch.tell(e);
        }
    }

    /// Whether rank 0 ends with the same error, and will have said so.
    pub fn said_by_first(&self, e: &Error) -> bool {
        let own = format!("rank 0: {}", e.what());
        let same = |of: &Error| of.what() == own || of.what() == e.what() && own.contains("rank 0: rank 0: ");
        !self.is_first() && self.watch.verdict(Duration::from_secs(1)).is_some_and(|of| same(&of))
    }

    /// Which rank a failed message means, once that is known.
    fn lost(&self, e: Error) -> Error {
        self.watch.verdict(Duration::from_secs(3)).unwrap_or(e)
    }

    /// Gradients of every rank.
    pub(super) fn all_to_all(&self, send: Tensor, give: &[usize], take: &[usize]) -> Result<Pending> {
        self.tensors()?.all_to_all(send, give, take).map_err(|e| self.lost(e))
    }

    pub(super) fn arrived(&self, pending: Pending) -> Result<Tensor> {
        pending.wait().map_err(|e| self.lost(e))
    }

    pub(super) fn all_gather(&self, mine: &Tensor) -> Result<Tensor> {
        self.tensors()?.all_gather(mine).map_err(|e| self.lost(e))
    }
}

/// Ends the process. Where ranks are connected, at once: their threads must not meet what an orderly end
/// takes down.
pub fn leave(exit: u8) -> ExitCode {
    if stop::is_among_ranks() {
        // What is buffered is flushed by its line.
        watch::end(exit);
    }
    ExitCode::from(exit)
}

fn number(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |b| u64::from_le_bytes(*b))
}

/// An error as another rank wrote it down.
fn error(said: &Value) -> Error {
    let of = |name: &str| said[name].as_str().map(str::to_owned);
    let code = Code::ALL.iter().find(|c| Some(c.id()) == said["code"].as_str());
    let mut e = Error::new(code.copied().unwrap_or(Code::Internal), of("what").unwrap_or_default());
    if let Some(need) = of("need") {
        e = e.need(need);
    }
    if let Some(have) = of("have") {
        e = e.have(have);
    }
    match of("fix") {
        Some(fix) => e.fix(fix),
        None => e,
    }
}

/// Tensors of the host, through Gloo.
struct Host {
    gloo: Gloo,
    size: usize,
}

impl Collectives for Host {
    fn all_to_all(&self, send: Tensor, give: &[usize], take: &[usize]) -> Result<Pending> {
        let out = Tensor::f_empty([take.iter().sum::<usize>() as i64], (Kind::Float, Device::Cpu)).t()?;
        if send.kind() != Kind::Float || send.numel() != give.iter().sum::<usize>() || !send.is_contiguous() {
            return Err(Error::new(Code::Internal, "all-to-all of what is not f32"));
        }
        let bytes = |counts: &[usize]| counts.iter().map(|n| 4 * *n as i64).collect::<Vec<_>>();
        let (to, from) = (out.data_ptr().cast(), send.data_ptr().cast());
        // SAFETY: as many bytes as counted; both tensors stay in `Pending` until they were waited for.
        let work = unsafe { self.gloo.all_to_all(to, &bytes(take), from, &bytes(give))? };
        Ok(Pending { out, _send: send, work: Some(work) })
    }

    fn all_gather(&self, mine: &Tensor) -> Result<Tensor> {
        let out = Tensor::f_empty([(mine.numel() * self.size) as i64], (Kind::Uint8, Device::Cpu)).t()?;
        let mine = mine.f_contiguous().t()?;
        let from = super::slice_mut::<u8>(&mine, Kind::Uint8)?;
        self.gloo.all_gather(from, super::slice_mut(&out, Kind::Uint8)?)?;
        Ok(out)
    }
}
