//! This process's side: a backend, its weights, and the link they share.
use super::VERB;
use super::memory::{ALIGN, Shared, page, place};
use super::port::Port;
use super::process::Process;
use super::wire::{Fields, MAX_LIST, Malformed, VERSION, answer, ask};
use crate::backend::agreed;
use crate::{Descriptor, Examined, Refusal, one};
use q4_core::conduct::{self, Facts};
use q4_core::{
    BackendDescriptor, Code, Error, ExecContext, ExecPath, HostEnv, LinearSpec, PreparedInfo, PreparedWeight,
    ProbeItem, Q4Backend, Q4Weight, Reject, RejectCode, Result, TensorView, TensorViewMut, Verdict,
};
use q4_plugin_abi as abi;
use q4_plugin_abi::{Q4Matrix, Q4PreparedInfo, Q4Segment};
use q4_plugin_sdk::lend::{self, LentSpec, LentWeight};
use q4_plugin_sdk::{codes, message};
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// Calls that run at once; others wait for one of them.
const CHANNELS: usize = 8;
/// What lies around operands that are watched: as f32, f16 and bf16 it is NaN.
const MARK: u8 = 0xff;
/// Bytes of it on each side.
const APRON: usize = 4096;
/// How long a process may take to end after it was told to.
const PARTING: Duration = Duration::from_secs(2);

/// How a library gets a process of its own.
#[derive(Clone, Debug)]
pub struct Isolation {
    /// An executable that calls [`serve_main`](super::serve_main) when its first argument is [`VERB`], and words before that.
    pub program: PathBuf,
    /// Those words.
    pub args: Vec<OsString>,
    /// Longest time of one call.
    pub limit: Duration,
    /// Operands lie against pages that nobody may touch, outputs are poisoned, and what is around them is compared: for a
    /// suite. Else calls are as fast as they can be.
    pub is_judged: bool,
}

/// How a process that serves a library was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// It did not answer in time and was killed.
    pub is_hang: bool,
    /// What became of it: `the process ended: signal: 11 (SIGSEGV)`.
    pub have: String,
}

/// A library in another process.
pub struct Remote {
    descriptor: BackendDescriptor,
    origin: String,
    link: Arc<Link>,
}

/// All that calls share.
struct Link {
    name: String,
    path: PathBuf,
    is_judged: bool,
    limit: Duration,
    /// Dropped before the process is waited for, so that it sees their end.
    free: Mutex<Vec<Channel>>,
    freed: Condvar,
    lifeline: Mutex<Option<UnixStream>>,
    process: Process,
    /// What was known of it before the library was there.
    before: OnceLock<Facts>,
    lost: OnceLock<Loss>,
}

/// A socket, and memory for the operands of the calls on it.
struct Channel {
    port: Port,
    /// x, y and the workspace.
    regions: [Option<Shared>; 3],
}

/// An exchange that did not come to an answer.
enum Broken {
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

type Answer<T> = std::result::Result<T, Broken>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Remote {
    /// Starts a process for the library that was examined. [`RejectCode::DiedInProbe`] and [`RejectCode::TimedOut`] when that
    /// does not live to say what it loaded.
    pub fn start(found: &Examined, how: &Isolation) -> Result<Self, Refusal> {
        let mut refusal = Refusal::of(&found.given);
        refusal.name.clone_from(&found.descriptor.name);
        refusal.sha256 = Some(found.sha256().to_owned());
        Self::started(found, how).map_err(|reasons| refusal.because(reasons))
    }

    fn started(found: &Examined, how: &Isolation) -> std::result::Result<Self, Vec<Reject>> {
        let need = "a library that can be loaded in a process of its own";
        let failed = |have: String| one(RejectCode::Internal, need, have);
        let pair = || UnixStream::pair().map_err(|e| failed(format!("a socket: {e}")));
        let (own, control) = pair()?;
        let mut command = Command::new(&how.program);
        // Words that a user may say; the first is not theirs and is gone before the library is there.
        command.args(&how.args).args([VERB, "demo", "-p", "Hello"]);
        command.stdin(Stdio::from(OwnedFd::from(control)));
        let (mut ports, mut theirs, mut ends) = (vec![own], Vec::new(), Vec::new());
        for _ in 1..CHANNELS {
            let (here, there) = pair()?;
            ports.push(here);
            theirs.push(OwnedFd::from(there));
        }
        let (lifeline, there) = pair()?;
        theirs.push(there.into());
        for port in &ports {
            port.set_read_timeout(Some(how.limit)).map_err(|e| failed(e.to_string()))?;
            ends.push(port.try_clone().map_err(|e| failed(e.to_string()))?);
        }
        // A process of the library's may hold the sockets open: that one of ours has ended, its keeper says.
        let ended = move || {
            for port in ends {
                let _ = port.shutdown(std::net::Shutdown::Both);
            }
        };
        let process = Process::start(command, ended).map_err(failed)?;
        let channel =
            |socket| Channel { port: Port::new(OwnedFd::from(socket)), regions: [None, None, None] };
        let mut first = channel(ports.remove(0));
        let link = Link {
            name: found.descriptor.name.clone(),
            path: found.path().to_owned(),
            is_judged: how.is_judged,
            limit: how.limit,
            free: Mutex::new(ports.into_iter().map(channel).collect()),
            freed: Condvar::new(),
            lifeline: Mutex::new(Some(lifeline)),
            process,
            before: OnceLock::new(),
            lost: OnceLock::new(),
        };
        let greeted = first.greet(found, &theirs).and_then(|inside| {
            if how.is_judged {
                drop(link.before.set(link.facts([0, inside[0], inside[1], 0, 0, 0])));
            }
            first.load()
        });
        drop(theirs);
        let (said, priority, offers) = match greeted {
            Ok(Ok(greeting)) => greeting,
            Ok(Err(reasons)) => return Err(reasons),
            Err(broken) => {
                let loss = link.lose(broken);
                let code = if loss.is_hang { RejectCode::TimedOut } else { RejectCode::DiedInProbe };
                return Err(one(code, need, loss.have));
            }
        };
        if said != found.descriptor {
            let have = format!("{} {} in the other process", said.name, said.version);
            let need = format!("the descriptor in the file: {} {}", link.name, found.descriptor.version);
            return Err(one(RejectCode::AbiMismatch, need, have));
        }
        lock(&link.free).push(first);
        let d = &found.descriptor;
        let descriptor = BackendDescriptor {
            name: d.name.clone().into(),
            version: d.version.clone().into(),
            vendor: d.vendor.clone().into(),
            priority,
            offers,
        };
        let origin = format!(
            "{} {} from {} (sha256 {}) in process {}",
            d.name,
            d.version,
            link.path.display(),
            found.sha256(),
            link.process.id
        );
        tracing::info!(path = %link.path.display(), process = link.process.id, name = %d.name, "plugin");
        Ok(Self { descriptor, origin, link: Arc::new(link) })
    }

    /// Number of the process that runs the library.
    pub fn process(&self) -> u32 {
        self.link.process.id
    }

    /// The same backend again, for whoever watches it.
    pub fn handle(&self) -> Self {
        Self { descriptor: self.descriptor.clone(), origin: self.origin.clone(), link: self.link.clone() }
    }

    /// How that process was lost, if it was.
    pub fn lost(&self) -> Option<Loss> {
        self.link.lost.get().cloned()
    }

    /// What is known of that process: what the system tells, what it printed, and what it says itself.
    pub fn facts(&self) -> Result<Facts> {
        let inside = self.link.ask("conduct", |c| {
            c.port.out.begin(ask::CONDUCT);
            c.exchange(&[], |f| Ok([f.u64()?, f.u64()?, f.u64()?, f.u64()?, f.u64()?, f.u64()?]))
        })?;
        Ok(self.link.facts(inside))
    }

    /// The same before the library was there; nothing unless it is judged.
    pub fn facts_before(&self) -> Facts {
        self.link.before.get().cloned().unwrap_or_default()
    }

    /// Runs a check of the library's table there. See [`crate::TableCases`].
    pub fn table_case(&self, case: &str) -> Result<()> {
        let secret = super::secret();
        let told = self.link.ask(case, |c| {
            c.port.out.begin(ask::TABLE).u64(secret).text(case);
            c.exchange(&[], |f| f.u64())
        })?;
        if told == secret {
            return Ok(());
        }
        Err(self.link.broken(case, Broken::Malformed))
    }
}

type Offers = Vec<(std::borrow::Cow<'static, str>, ExecPath)>;
type Greeting = std::result::Result<(Descriptor, i32, Offers), Vec<Reject>>;

impl Channel {
    /// Says what will be asked for; the answer are digests of the environment and the locale.
    fn greet(&mut self, found: &Examined, files: &[OwnedFd]) -> Answer<[u64; 2]> {
        let out = self.port.out.begin(ask::HELLO).u32(VERSION).u32(std::process::id());
        out.text(&found.digest()).raw(found.path().as_os_str().as_bytes());
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        self.exchange(&files, |f| Ok([f.u64()?, f.u64()?]))?.map_err(|_| Broken::Malformed)
    }

    /// Has the library loaded.
    fn load(&mut self) -> Answer<Greeting> {
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
        f.end()?;
        Ok(Ok((descriptor, priority, offers)))
    }

    /// Sends what was written and reads the answer; the inner error is the library's.
    fn exchange<T>(
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
    fn region(&mut self, which: usize, len: usize) -> Answer<&mut Shared> {
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
    fn ask<T>(&self, what: &str, question: impl FnOnce(&mut Channel) -> Answer<Result<T>>) -> Result<T> {
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

    fn facts(&self, inside: [u64; 6]) -> Facts {
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

    fn broken(&self, what: &str, broken: Broken) -> Error {
        let loss = self.lose(broken);
        self.error(what, &loss)
    }

    /// Ends the process and keeps the reason, unless there is one.
    fn lose(&self, broken: Broken) -> Loss {
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

impl Q4Backend for Remote {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }

    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        let detail = self.origin.clone();
        let mut items = vec![ProbeItem { id: "plugin.load".into(), reasons: Vec::new(), detail }];
        let asked = self.link.ask("probe", |c| {
            c.port.out.begin(ask::PROBE).env(env);
            c.exchange(&[], |f| f.items())
        });
        match asked {
            // The first is the same, said there.
            Ok(more) => items.extend(more.into_iter().filter(|i| i.id != "plugin.load")),
            Err(e) => {
                let reasons = one(RejectCode::Internal, "a probe that ends", message::line(&e));
                items.push(ProbeItem { id: "plugin.probe".into(), reasons, detail: String::new() });
            }
        }
        items
    }

    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        crate::backend::possible(spec, path)?;
        let lent = LentSpec::new(spec, path).map_err(|e| {
            let need = "a product the interface can express";
            one(RejectCode::SchemaUnsupported, need, message::line(&e))
        })?;
        let asked = self.link.ask("can_prepare", |c| {
            c.port.out.begin(ask::CAN_PREPARE).spec(lent.raw()).names(names(spec)).env(env);
            c.exchange(&[], |f| f.reasons())
        });
        match asked {
            Ok(reasons) if reasons.is_empty() => Ok(()),
            Ok(reasons) => Err(reasons),
            Err(e) => Err(one(RejectCode::Internal, "a verdict", message::line(&e))),
        }
    }

    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        let (lent, weight) = (LentSpec::new(spec, path)?, LentWeight::new(w)?);
        // What is stored need not be what is asked for: whether it is, is for the library to say.
        let stored_as = LinearSpec {
            segments: w
                .segments
                .iter()
                .map(|s| q4_core::SegmentSpec { name: String::new(), rows: s.rows })
                .collect(),
            schema: w.schema,
            k: w.k,
            ..spec.clone()
        };
        let stored = LentSpec::new(&stored_as, path)?;
        let raw = weight.raw();
        // SAFETY: `LentWeight` made as many.
        let segments = unsafe { std::slice::from_raw_parts(raw.segments, raw.n_segments as usize) };
        let threads = cx.threads.threads();
        let made = self.link.ask("prepare", |c| {
            let (bytes, pieces, places) = lay_out(segments, self.link.is_judged)?;
            let out = c.port.out.begin(ask::PREPARE).u32(u32::try_from(threads).unwrap_or(u32::MAX));
            out.spec(lent.raw()).names(names(spec)).spec(stored.raw()).names(names(&stored_as));
            out.u64(bytes.len() as u64).u32(pieces.len() as u32);
            for piece in &pieces {
                out.u64(piece.0 as u64).u64(piece.1 as u64);
            }
            for (s, places) in segments.iter().zip(places.chunks(4)) {
                for place in places {
                    out.u64(place.0).u64(place.1);
                }
                out.f32(s.nested_offset).f32(s.global_scale).u32(s.global_convention);
            }
            c.exchange(&[bytes.file()], |f| {
                let (id, n, k, resident_bytes) = (f.u64()?, f.u64()?, f.u64()?, f.u64()?);
                let (ops, path, activations) = (f.u32()?, f.u32()?, f.u32()?);
                let struct_size = size_of::<Q4PreparedInfo>();
                Ok((
                    id,
                    Q4PreparedInfo { struct_size, n, k, resident_bytes, path, activations, ops, reserved: 0 },
                ))
            })
        })?;
        let (id, facts) = made;
        let held = Held { link: self.link.clone(), id };
        let info = agreed(&facts, spec, path, w, &self.link.name, true)?;
        Ok(Box::new(RemoteWeight { held, info }))
    }
}

fn names(spec: &LinearSpec) -> impl ExactSizeIterator<Item = (u64, &str)> {
    spec.segments.iter().map(|s| {
        let mut end = s.name.len().min(4096);
        while !s.name.is_char_boundary(end) {
            end -= 1;
        }
        (s.rows as u64, &s.name[..end])
    })
}

type Pieces = Vec<(usize, usize)>;
/// Memory, its readable pages, and the parts in it.
type Laid = (Shared, Pieces, Vec<(u64, u64)>);

/// The bytes of a weight as the other process will see them: memory, the pages of it that can be read there, and the place and
/// length of each part, four to a segment. With `is_judged`, every part ends or begins where the pages do.
fn lay_out(segments: &[Q4Segment], is_judged: bool) -> Answer<Laid> {
    let parts = segments.iter().flat_map(|s| {
        [
            (s.codes, s.codes_bytes),
            (s.scales, s.scales_bytes),
            (s.nested_map, s.nested_map_bytes),
            (s.nested_absmax, s.nested_absmax_bytes),
        ]
    });
    let (mut end, mut pieces, mut places) = (0, Pieces::new(), Vec::new());
    let parts: Vec<_> = parts.collect();
    for &(at, len) in &parts {
        let (phase, len) = (at as usize % ALIGN, len as usize);
        if at.is_null() {
            places.push((u64::MAX, 0));
        } else if is_judged {
            let room = (len + ALIGN).next_multiple_of(page());
            let inside = place(room, len, phase, places.len() % 2 == 0).ok_or(Malformed)?;
            places.push(((end + inside) as u64, len as u64));
            pieces.push((end, room));
            end += room + page();
        } else {
            let first = end.next_multiple_of(ALIGN) + phase;
            places.push((first as u64, len as u64));
            end = first + len;
        }
    }
    if !is_judged {
        pieces.push((0, end.next_multiple_of(page())));
    }
    let mut bytes = Shared::new(end, false).map_err(|e| {
        Broken::Here(
            Error::new(Code::OutOfMemory, "a weight for another process")
                .need(format!("{end} bytes that both share"))
                .have(e.to_string()),
        )
    })?;
    if is_judged {
        bytes.fill(0, bytes.len(), MARK);
    }
    for (&(at, _), &(place, len)) in parts.iter().zip(&places).filter(|p| !p.0.0.is_null()) {
        // SAFETY: a part of a weight that is lent for this call.
        bytes.write(place as usize, unsafe { std::slice::from_raw_parts(at.cast(), len as usize) });
    }
    Ok((bytes, pieces, places))
}

/// A weight there; released with this.
struct Held {
    link: Arc<Link>,
    id: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        // A process that is gone has released everything.
        let _ = self.link.ask("release", |c| {
            c.port.out.begin(ask::RELEASE).u64(self.id);
            c.exchange(&[], |_| Ok(()))
        });
    }
}

struct RemoteWeight {
    held: Held,
    info: PreparedInfo,
}

/// Where an operand lies.
struct Placed {
    at: usize,
    len: usize,
    /// Bytes around it that hold [`MARK`].
    apron: [(usize, usize); 2],
}

impl PreparedWeight for RemoteWeight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        let asked = self.held.link.ask("workspace", |c| {
            c.port.out.begin(ask::WORKSPACE).u64(self.held.id).u64(m as u64);
            c.exchange(&[], |f| f.u64())
        });
        asked.ok().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.call("forward", abi::op::FORWARD, Some(x), y, cx)
    }
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        self.call("backward_input", abi::op::BACKWARD_INPUT, Some(dy), dx, cx)
    }
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.call("dequantize", abi::op::DEQUANTIZE, None, out, cx)
    }
}

impl RemoteWeight {
    fn call(
        &self,
        what: &str,
        op: u32,
        x: Option<TensorView<'_>>,
        mut y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let xm = x.as_ref().map(lend::matrix).transpose()?;
        let ym = lend::matrix_mut(&mut y)?;
        let mut exec = lend::exec(cx)?;
        let is_judged = self.held.link.is_judged;
        if let Some(scratch) = &mut cx.workspace {
            exec.workspace = scratch.as_mut_ptr();
        }
        self.held.link.ask(what, |c| {
            // Which edge is up to the shape, so that a case is the same when it runs again.
            let at_end = (ym.rows + ym.cols) % 2 == 0;
            let x = xm.as_ref().map(|m| c.lend(0, m, is_judged, at_end)).transpose()?;
            let y = c.lend(1, &ym, is_judged, at_end)?;
            let w = if exec.workspace.is_null() {
                None
            } else {
                // As bytes.
                let m = Q4Matrix {
                    data: exec.workspace,
                    rows: 1,
                    cols: exec.workspace_bytes,
                    ld: exec.workspace_bytes,
                    dtype: 0,
                    ..ym
                };
                Some(c.lend(2, &m, is_judged, at_end)?)
            };
            let out = c.port.out.begin(ask::CALL).u32(op).u64(self.held.id).u32(exec.threads);
            out.u32(exec.device_type).u32(exec.device_id);
            let none = Placed { at: usize::MAX, len: 0, apron: [(0, 0); 2] };
            let scratch = w.as_ref().unwrap_or(&none);
            out.u64(scratch.at as u64).u64(scratch.len as u64);
            for (m, p) in xm.iter().zip(&x).chain([(&ym, &y)]) {
                out.u64(p.at as u64).u64(p.len as u64).u64(m.rows).u64(m.cols).u64(m.ld);
                out.u32(m.dtype).u32(m.device_type).u32(m.device_id);
            }
            let answered = c.exchange(&[], |_| Ok(()))?;
            let [_, results, scratch] = &c.regions;
            let (Some(results), true) = (results, is_judged || answered.is_ok()) else { return Ok(answered) };
            // SAFETY: the bytes of y, a unique view, and no others.
            unsafe { take(results, &y, &ym, is_judged) };
            if !is_judged {
                return Ok(answered);
            }
            let around = |of: &str, region: &Shared, placed: &Placed| {
                let hit = placed.apron.iter().find_map(|a| region.other_than(a.0, a.1, MARK));
                hit.map_or(Ok(()), |hit| Err(outside(of, hit as i64 - placed.at as i64, placed.len)))
            };
            let mut checked = around("the output", results, &y);
            if let (Some(region), Some(w)) = (scratch, &w) {
                checked = checked.and_then(|()| around("the workspace", region, w));
            }
            Ok(answered.and(checked))
        })
    }
}

fn outside(of: &str, at: i64, len: usize) -> Error {
    Error::new(Code::ConformanceFailed, format!("a byte outside {of} was written"))
        .need(format!("nothing but the {len} bytes that were lent"))
        .have(format!("byte {at} from the first"))
}

/// Bytes from the first element to the last.
fn span(m: &Q4Matrix) -> usize {
    if m.rows == 0 || m.cols == 0 {
        return 0;
    }
    let size = codes::dtype_from(m.dtype).map_or(1, |d| d.size() as u64);
    (((m.rows - 1) * m.ld + m.cols) * size) as usize
}

impl Channel {
    /// Copies an operand to its region and says where it lies.
    fn lend(&mut self, which: usize, m: &Q4Matrix, is_judged: bool, at_end: bool) -> Answer<Placed> {
        let len = span(m);
        let region = self.region(which, len)?;
        let phase = m.data as usize % ALIGN;
        let at = place(region.len(), len, phase, at_end && is_judged).ok_or(Malformed)?;
        let mut apron = [(0, 0); 2];
        if is_judged {
            let (first, end) = (at.saturating_sub(APRON), (at + len + APRON).min(region.len()));
            apron = [(first, at - first), (at + len, end - at - len)];
            apron.iter().for_each(|a| region.fill(a.0, a.1, MARK));
        }
        if which == 0 || is_judged {
            // SAFETY: `span` bytes of a view from its first element on; whatever device it names, a weight in another process is
            // lent host memory.
            region.write(at, unsafe { std::slice::from_raw_parts(m.data.cast(), len) });
        }
        Ok(Placed { at, len, apron })
    }
}

/// Copies results back: everything between the first and the last element, or the elements alone.
///
/// # Safety
/// `m` describes writable bytes that nobody else uses.
unsafe fn take(region: &Shared, placed: &Placed, m: &Q4Matrix, whole: bool) {
    let data = m.data.cast::<u8>();
    let size = codes::dtype_from(m.dtype).map_or(1, |d| d.size());
    if whole || m.ld == m.cols || m.rows == 1 {
        // SAFETY: forwarded to the caller.
        return unsafe { region.read(placed.at, data, placed.len) };
    }
    for r in 0..m.rows as usize {
        let at = r * m.ld as usize * size;
        // SAFETY: as above; a row of it.
        unsafe { region.read(placed.at + at, data.wrapping_add(at), m.cols as usize * size) };
    }
}
