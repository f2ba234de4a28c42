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

/// What a step needs of a library of collectives, where the model lives.
trait Collectives {
    /// Sends and takes tensors, both in the order of ranks, this one not among them: what one rank gives
    /// another in this order, that one takes in the same. They are on their way when this returns.
    fn exchange(&self, give: Vec<(usize, Tensor)>, take: &[Piece]) -> Result<Pending>;
    /// f64 of every rank, as many of each.
    fn gather(&self, mine: &Tensor) -> Result<Numbers>;
}

/// What a rank sends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Which.
    pub rank: usize,
    /// Elements; not none.
    pub len: usize,
    /// Their type.
    pub kind: Kind,
}

/// What other ranks send, on its way.
pub(super) enum Pending {
    /// One behind the other.
    Host(Packed),
    /// Each for itself.
    Device(nccl::Travelling),
}

/// Bytes between hosts.
pub(super) struct Packed {
    /// Dropped, and so waited for, before the memory it uses.
    work: Work,
    out: Tensor,
    take: Vec<Piece>,
    _sent: Tensor,
}

impl Pending {
    fn wait(self) -> Result<Vec<Tensor>> {
        match self {
            Self::Host(Packed { work, out, take, .. }) => {
                work.wait()?;
                let mut at = 0;
                let piece = |p: &Piece| {
                    let bytes = (p.len * p.kind.elt_size_in_bytes()) as i64;
                    let t = out.f_narrow(0, at, bytes).t()?;
                    // Behind an odd number of shorter elements longer ones are not where they can be read.
                    let aligned = at % p.kind.elt_size_in_bytes() as i64 == 0;
                    at += bytes;
                    let t = if aligned { t } else { super::copied(&t)? };
                    t.f_view_dtype(p.kind).t()
                };
                take.iter().map(piece).collect()
            }
            Self::Device(travelling) => travelling.wait(),
        }
    }
}

/// Numbers of every rank, one's behind the other's.
pub(super) enum Numbers {
    /// Here already.
    Host(Vec<f64>),
    /// On their way.
    Device(nccl::Reading),
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

    /// Tensors to other ranks and from them, as of [`Collectives::exchange`].
    pub(super) fn exchange(&self, give: Vec<(usize, Tensor)>, take: &[Piece]) -> Result<Pending> {
        self.tensors()?.exchange(give, take).map_err(|e| self.lost(e))
    }

    /// Those that were to be taken.
    pub(super) fn arrived(&self, pending: Pending) -> Result<Vec<Tensor>> {
        pending.wait().map_err(|e| self.lost(e))
    }

    /// As many f64 of every rank.
    pub(super) fn gather_there(&self, mine: &Tensor) -> Result<Numbers> {
        self.tensors()?.gather(mine).map_err(|e| self.lost(e))
    }

    /// One's behind the other's.
    pub(super) fn read(&self, numbers: Numbers) -> Result<Vec<f64>> {
        match numbers {
            Numbers::Host(here) => Ok(here),
            Numbers::Device(reading) => reading.wait().map_err(|e| self.lost(e)),
        }
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
    fn exchange(&self, give: Vec<(usize, Tensor)>, take: &[Piece]) -> Result<Pending> {
        let mut counts = [vec![0; self.size], vec![0; self.size]];
        let mut pieces = Vec::with_capacity(give.len());
        for (rank, t) in &give {
            pieces.push(t.f_contiguous().t()?.f_view([-1]).t()?.f_view_dtype(Kind::Uint8).t()?);
            counts[0][*rank] += (t.numel() * t.kind().elt_size_in_bytes()) as i64;
        }
        for p in take {
            counts[1][p.rank] += (p.len * p.kind.elt_size_in_bytes()) as i64;
        }
        let sorted = give.is_sorted_by_key(|(rank, _)| *rank) && take.is_sorted_by_key(|p| p.rank);
        if !sorted {
            return Err(Error::new(Code::Internal, "an exchange that is not in the order of ranks"));
        }
        let bytes = (Kind::Uint8, Device::Cpu);
        let sent = match pieces.is_empty() {
            true => Tensor::f_empty([0], bytes).t()?,
            false => Tensor::f_cat(&pieces, 0).t()?,
        };
        let out = Tensor::f_empty([counts[1].iter().sum::<i64>()], bytes).t()?;
        let (to, from) = (out.data_ptr().cast(), sent.data_ptr().cast());
        // SAFETY: as many bytes as counted; both tensors stay in `Packed` until they were waited for.
        let work = unsafe { self.gloo.all_to_all(to, &counts[1], from, &counts[0])? };
        Ok(Pending::Host(Packed { work, out, take: take.to_vec(), _sent: sent }))
    }

    fn gather(&self, mine: &Tensor) -> Result<Numbers> {
        let mine = super::slice_mut::<f64>(mine, Kind::Double)?;
        let mut all = vec![0.0; mine.len() * self.size];
        if !mine.is_empty() {
            self.gloo.all_gather(bytemuck::cast_slice_mut(mine), bytemuck::cast_slice_mut(&mut all))?;
        }
        Ok(Numbers::Host(all))
    }
}
