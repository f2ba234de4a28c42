//! The other process: loads one library and answers for it until nobody asks any more.
use super::memory::Lent;
use super::port::Port;
use super::wire::{Fields, Frame, GROUPED, Malformed, VERSION, answer, ask};
use super::{count, lock};
use crate::{Loaded, Loader, Refusal, TableCases};
use q4_core::conduct::{self, float_control};
use q4_core::stage::{Staged, StagedGroup};
use q4_core::{
    Candidate, Code, Device, Error, ExecContext, ExecPath, FuseSet, Fusion, LinearSpec, PreparedGroup,
    PreparedWeight, Q4Backend, Q4Weight, RmsNorm, TensorView, ThreadPool,
};
use q4_plugin_abi as abi;
use q4_plugin_abi::{Q4LinearSpec, Q4Matrix, Q4Segment, Q4Str};
use q4_plugin_sdk::{borrow, codes, lend};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::collections::BTreeMap;
use std::ffi::{OsString, c_void};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Ends this process as one that nobody needs any more.
const NOBODY: i32 = 130;
/// Most threads that a call may ask for.
const MOST_THREADS: u32 = 1024;
/// Most weights of a group.
const MOST_WEIGHTS: u32 = 1 << 16;

/// What the process does whose standard input is the socket of a client: everything a client asks, of the
/// library that it names first. Returns when the client has said good-bye or is gone.
pub fn serve_main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("this is a part of q4 that q4 starts: {e}");
            ExitCode::from(Code::Usage.exit())
        }
    }
}

fn serve() -> io::Result<()> {
    // The library gets no socket of ours where it would look first.
    let control = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    disguise();
    crate::tell_crashes();
    let (mut port, mut files) = (Port::new(control), Vec::new());
    port.receive(Some(&mut files))?;
    let hello = hello(port.parts().0).map_err(|_| io::ErrorKind::InvalidData)?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let parent = getppid().map_or(0, |pid| pid.as_raw_pid());
    if parent as u32 != hello.client {
        return Ok(()); // it went before it could be followed
    }
    let Some(lifeline) = files.pop() else { return Err(io::ErrorKind::InvalidData.into()) };
    std::thread::Builder::new().name("q4-lifeline".into()).spawn(move || follow(lifeline))?;
    // Every thread of ours is there before the library is.
    let served = Arc::new(OnceLock::new());
    for socket in files {
        let served = served.clone();
        let serve = move || drop(answer_all(&served, Port::new(socket)));
        std::thread::Builder::new().name("q4-server".into()).spawn(serve)?;
    }
    let control = float_control();
    port.out.begin(answer::DONE).u64(conduct::environment()).u64(conduct::locale());
    port.send(&[])?;
    port.receive(None)?;
    if Fields(port.parts().0).u32().ok() != Some(ask::LOAD) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    match load(&hello) {
        Ok(loaded) => {
            let Candidate::Live(backend) = &loaded.candidate else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            let d = backend.descriptor();
            let out = port.out.begin(answer::DONE).descriptor(&loaded.descriptor);
            out.u32(d.priority as u32).u32(d.offers.len() as u32);
            for (schema, path) in &d.offers {
                let schema = codes::schema_to(schema).map_or(0, |s| s.0);
                out.u32(schema).u32(codes::path_to(*path).unwrap_or(0));
            }
            let devices = backend.devices();
            out.u32(devices.len() as u32);
            for d in &devices {
                out.text(&d.name).text(&d.fingerprint).u64(d.memory);
            }
            let server = Server::new(backend.clone(), loaded.table.clone());
            server.rounding.store(u64::from(float_control() != control), Ordering::SeqCst);
            if served.set(server).is_err() {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        Err(refusal) => {
            port.out.begin(answer::FAILED).reasons(&refusal.reasons);
            return port.send(&[]);
        }
    }
    port.send(&[])?;
    answer_all(&served, port)
}

/// The library that was asked for, if its bytes are.
fn load(hello: &Hello) -> Result<Loaded, Refusal> {
    let found = Loader::default().examine(&hello.path)?;
    if found.digest() == hello.digest {
        let before = count::objects();
        let loaded = found.load()?;
        count::install(&before);
        return Ok(loaded);
    }
    Err(found.changed())
}

/// Answers what comes through one socket until nobody is there any more.
fn answer_all(served: &OnceLock<Server>, mut port: Port) -> io::Result<()> {
    let (mut here, mut files) = (Here::default(), Vec::new());
    loop {
        files.clear();
        if port.receive(Some(&mut files)).is_err() {
            return Ok(());
        }
        let Some(server) = served.get() else { return Ok(()) };
        let (question, out) = port.parts();
        match server.answer(&mut here, Fields(question), &mut files, out.begin(answer::DONE)) {
            Ok(()) => {}
            Err(Fault::Error(e)) => {
                out.begin(answer::FAILED).error(&e);
            }
            Err(Fault::Malformed) => {
                let e = Error::new(Code::Internal, "a question that the other process does not know");
                out.begin(answer::FAILED).error(&e);
            }
        }
        port.send(&[])?;
    }
}

struct Hello {
    client: u32,
    path: PathBuf,
    digest: String,
}

fn hello(frame: &[u8]) -> Result<Hello, Malformed> {
    let mut f = Fields(frame);
    if (f.u32()?, f.u32()?) != (ask::HELLO, VERSION) {
        return Err(Malformed);
    }
    let out = Hello {
        client: f.u32()?,
        digest: f.text(64)?,
        path: OsString::from_vec(f.raw(1 << 14)?.to_vec()).into(),
    };
    f.end().map(|()| out)
}

/// Ends the process when the client is gone, whatever the library is doing.
fn follow(lifeline: OwnedFd) {
    // An error is an end too.
    let _ = File::from(lifeline).read(&mut [0]);
    rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap_or_default();
    std::process::exit(NOBODY)
}

/// Makes the command line that of a program that runs a model, as far as the first word after the program
/// goes: what a library computes must not depend on who asks.
fn disguise() {
    const WORD: &[u8] = b"generate\0";
    let Ok(stat) = std::fs::read_to_string("/proc/self/stat") else { return };
    let Ok(line) = std::fs::read("/proc/self/cmdline") else { return };
    // Field 48, counted from the end of the name, which may hold anything.
    let fields = stat.rsplit_once(')').map_or("", |p| p.1).split_whitespace();
    let Some(start) = fields.into_iter().nth(45).and_then(|f| f.parse::<usize>().ok()) else { return };
    let Some(at) = line.iter().position(|b| *b == 0).map(|end| end + 1) else { return };
    if line.get(at..at + WORD.len()) == Some(format!("{}\0", super::VERB).as_bytes()) {
        let word = std::ptr::with_exposed_provenance_mut::<u8>(start + at);
        // SAFETY: the system says that the words of the command line are there, this one as long as what
        // replaces it; no other thread runs yet, and the program has copied what it wants of them.
        unsafe { std::ptr::copy_nonoverlapping(WORD.as_ptr(), word, WORD.len()) };
    }
}

/// The library, and what it made.
struct Server {
    /// Until good-bye.
    backend: Mutex<Option<Arc<dyn Q4Backend>>>,
    table: TableCases,
    weights: Mutex<BTreeMap<u64, Arc<dyn PreparedWeight>>>,
    groups: Mutex<BTreeMap<u64, Arc<dyn PreparedGroup>>>,
    next: AtomicU64,
    pools: Mutex<BTreeMap<usize, Arc<ThreadPool>>>,
    /// Calls after which the thread rounded in another way than before.
    rounding: AtomicU64,
}

/// What one channel has.
#[derive(Default)]
struct Here {
    regions: [Option<Lent>; 3],
    pool: Option<(u32, Arc<ThreadPool>)>,
}

enum Fault {
    Malformed,
    Error(Error),
}

impl From<Malformed> for Fault {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}
impl From<Error> for Fault {
    fn from(e: Error) -> Self {
        Self::Error(e)
    }
}
impl From<io::Error> for Fault {
    fn from(e: io::Error) -> Self {
        Self::Error(Error::new(Code::Io, format!("memory of operands: {e}")))
    }
}

impl Server {
    fn new(backend: Arc<dyn Q4Backend>, table: TableCases) -> Self {
        Self {
            backend: Mutex::new(Some(backend)),
            table,
            weights: Mutex::default(),
            groups: Mutex::default(),
            next: AtomicU64::new(1),
            pools: Mutex::default(),
            rounding: AtomicU64::new(0),
        }
    }

    fn answer(
        &self,
        here: &mut Here,
        mut f: Fields<'_>,
        files: &mut Vec<OwnedFd>,
        out: &mut Frame,
    ) -> Result<(), Fault> {
        match f.u32()? {
            ask::CALL => self.call(here, f)?,
            ask::CAN_PREPARE => {
                let (spec, path) = self.spec(&mut f)?;
                let env = f.env()?;
                let reasons = self.backend()?.can_prepare(&spec, path, &env).err().unwrap_or_default();
                out.reasons(&reasons);
            }
            ask::PROBE => {
                out.items(&self.backend()?.probe(&f.env()?));
            }
            ask::PREPARE => self.prepare(here, f, files, out)?,
            ask::WORKSPACE => {
                let weight = self.weight(f.u64()?)?;
                out.u64(weight.workspace(f.size()?) as u64);
            }
            ask::FUSES => {
                let (weight, m, parts) = (self.weight(f.u64()?)?, f.size()?, f.u32()?);
                let set = borrow::fuse_set(parts).ok_or(Malformed)?;
                out.u32(u32::from(weight.fuses(m, set)));
            }
            ask::DEVICE_FREE => {
                let (backend, ordinal) = (self.backend()?, f.u32()?);
                let device = Device::vendor(&backend.descriptor().name, ordinal);
                out.u64(backend.memory(device)?.free()?);
            }
            ask::GROUP => self.group(here, f, out)?,
            ask::GROUP_WORKSPACE => {
                let group = self.grouped(f.u64()?)?;
                out.u64(group.workspace(f.size()?) as u64);
            }
            ask::RELEASE_GROUP => drop(lock(&self.groups).remove(&f.u64()?)),
            ask::RELEASE => drop(lock(&self.weights).remove(&f.u64()?)),
            ask::REGION => {
                let (which, len) = (f.u32()? as usize, f.size()?);
                let file = files.pop().ok_or(Malformed)?;
                let region = here.regions.get_mut(which).ok_or(Malformed)?;
                *region = None;
                *region = Some(Lent::map(&file, len, &[(0, len)], which > 0)?);
            }
            ask::TABLE => {
                let (secret, case) = (f.u64()?, f.text(256)?);
                self.table.run(&case)?;
                out.u64(secret);
            }
            ask::CONDUCT => {
                out.u64(self.rounding.load(Ordering::SeqCst));
                out.u64(conduct::environment()).u64(conduct::locale());
                count::counts().into_iter().for_each(|n| {
                    out.u64(n);
                });
            }
            ask::BYE => {
                lock(&self.groups).clear();
                lock(&self.weights).clear();
                drop(lock(&self.backend).take());
                // As a program ends that had the library in itself.
                std::process::exit(0);
            }
            _ => return Err(Fault::Malformed),
        }
        Ok(())
    }

    fn backend(&self) -> Result<Arc<dyn Q4Backend>, Malformed> {
        lock(&self.backend).clone().ok_or(Malformed)
    }

    /// A product; what the library calls its own device is one of the backend's.
    fn spec(&self, f: &mut Fields<'_>) -> Result<(LinearSpec, ExecPath), Fault> {
        let (mut spec, path) = spec(f)?;
        spec.device = self.device(spec.device)?;
        Ok((spec, path))
    }

    fn device(&self, named: Device) -> Result<Device, Malformed> {
        Ok(match named {
            Device::Vendor { ordinal, .. } => Device::vendor(&self.backend()?.descriptor().name, ordinal),
            other => other,
        })
    }

    fn weight(&self, id: u64) -> Result<Arc<dyn PreparedWeight>, Fault> {
        Ok(lock(&self.weights).get(&id).cloned().ok_or(Malformed)?)
    }

    fn grouped(&self, id: u64) -> Result<Arc<dyn PreparedGroup>, Fault> {
        Ok(lock(&self.groups).get(&id).cloned().ok_or(Malformed)?)
    }

    fn pool(&self, here: &mut Here, threads: u32) -> Arc<ThreadPool> {
        if let Some((_, pool)) = here.pool.as_ref().filter(|p| p.0 == threads) {
            return pool.clone();
        }
        let count = threads.min(MOST_THREADS) as usize;
        let pool = lock(&self.pools).entry(count).or_insert_with(|| Arc::new(ThreadPool::new(count))).clone();
        here.pool = Some((threads, pool.clone()));
        pool
    }

    /// Runs a call of the library; it must leave its thread as it found it.
    fn watched<R>(&self, call: impl FnOnce() -> R) -> R {
        let before = float_control();
        let out = call();
        if float_control() != before {
            self.rounding.fetch_add(1, Ordering::SeqCst);
        }
        out
    }

    fn prepare(
        &self,
        here: &mut Here,
        mut f: Fields<'_>,
        files: &mut Vec<OwnedFd>,
        out: &mut Frame,
    ) -> Result<(), Fault> {
        let pool = self.pool(here, f.u32()?);
        let (spec, path) = self.spec(&mut f)?;
        let (stored, _) = self::spec(&mut f)?;
        let len = f.size()?;
        let pieces: Vec<(usize, usize)> =
            (0..f.count(5 * 4096)?).map(|_| Ok((f.size()?, f.size()?))).collect::<Result<_, Malformed>>()?;
        let file = files.pop().ok_or(Malformed)?;
        let bytes = Lent::map(&file, len, &pieces, false)?;
        let part = |f: &mut Fields<'_>| -> Result<(*const c_void, u64), Malformed> {
            let (at, n) = (f.u64()?, f.size()?);
            let Ok(at) = usize::try_from(at) else { return Err(Malformed) };
            if at == usize::MAX {
                return Ok((std::ptr::null(), 0));
            }
            if at.checked_add(n).is_none_or(|end| end > bytes.capacity()) {
                return Err(Malformed);
            }
            Ok((bytes.at(at).cast_const().cast(), n as u64))
        };
        let mut raw = Vec::new();
        for s in &stored.segments {
            let [codes, scales, map, absmax] = [part(&mut f)?, part(&mut f)?, part(&mut f)?, part(&mut f)?];
            let zeros = part(&mut f)?;
            raw.push(Q4Segment {
                struct_size: size_of::<Q4Segment>(),
                rows: s.rows as u64,
                codes: codes.0,
                codes_bytes: codes.1,
                scales: scales.0,
                scales_bytes: scales.1,
                nested_map: map.0,
                nested_map_bytes: map.1,
                nested_absmax: absmax.0,
                nested_absmax_bytes: absmax.1,
                nested_offset: f.f32()?,
                global_scale: f.f32()?,
                global_convention: f.u32()?,
                reserved: 0,
                zeros: zeros.0,
                zeros_bytes: zeros.1,
            });
        }
        f.end()?;
        let weight = abi::Q4Weight {
            struct_size: size_of::<abi::Q4Weight>(),
            n_segments: raw.len() as u64,
            segments: raw.as_ptr(),
        };
        // SAFETY: the segments were made here, of bytes that stay mapped until `prepare` has returned.
        let segments = unsafe { borrow::segments(&weight, &stored) }?;
        let w = Q4Weight { schema: stored.schema, k: stored.k, segments: &segments };
        let mut cx = ExecContext::on(spec.device, 0, &pool);
        let backend = self.backend()?;
        let prepared = self.watched(|| backend.prepare(&w, &spec, path, &mut cx))?;
        let prepared: Arc<dyn PreparedWeight> = match spec.device {
            Device::Cpu => prepared.into(),
            device => Arc::new(Staged::new(prepared, device, backend.memory(device)?)),
        };
        let i = prepared.info();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        out.u64(id).u64(i.n as u64).u64(i.k as u64).u64(i.resident_bytes).u32(u32::from(i.ops.0));
        out.u32(codes::path_to(i.path).unwrap_or(0)).u32(lend::activation_kind(&i.activations));
        lock(&self.weights).insert(id, prepared);
        Ok(())
    }

    fn group(&self, here: &mut Here, mut f: Fields<'_>, out: &mut Frame) -> Result<(), Fault> {
        let pool = self.pool(here, f.u32()?);
        let device = self.device(codes::device_from(f.u32()?, f.u32()?).ok_or(Malformed)?)?;
        let mut weights = Vec::new();
        for _ in 0..f.count(MOST_WEIGHTS)? {
            weights.push(Staged::unstaged(&self.weight(f.u64()?)?));
        }
        f.end()?;
        let (backend, mut cx) = (self.backend()?, ExecContext::on(device, 0, &pool));
        let Some(group) = self.watched(|| backend.group(&weights, &mut cx))? else {
            out.u32(0).u64(0);
            return Ok(());
        };
        let group: Arc<dyn PreparedGroup> = match device {
            Device::Cpu => group.into(),
            device => Arc::new(StagedGroup::new(group, device, backend.memory(device)?)),
        };
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.groups).insert(id, group);
        out.u32(1).u64(id);
        Ok(())
    }

    fn call(&self, here: &mut Here, mut f: Fields<'_>) -> Result<(), Fault> {
        let (op, id, threads) = (f.u32()?, f.u64()?, f.u32()?);
        let device = codes::device_from(f.u32()?, f.u32()?).ok_or(Malformed)?;
        let (scratch_at, scratch_len) = (f.u64()?, f.u64()?);
        let pool = self.pool(here, threads);
        let group = (op == GROUPED).then(|| self.grouped(id)).transpose()?;
        let weight = if group.is_some() { None } else { Some(self.weight(id)?) };
        let matrix = |f: &mut Fields<'_>, region: usize| -> Result<Q4Matrix, Malformed> {
            let (at, bytes) = (f.u64()?, f.u64()?);
            Ok(Q4Matrix {
                struct_size: size_of::<Q4Matrix>(),
                data: within(&here.regions[region], at, bytes)?.cast(),
                bytes,
                rows: f.u64()?,
                cols: f.u64()?,
                ld: f.u64()?,
                dtype: f.u32()?,
                device_type: f.u32()?,
                device_id: f.u32()?,
                reserved: 0,
            })
        };
        let x = if op == abi::op::DEQUANTIZE { None } else { Some(matrix(&mut f, 0)?) };
        let y = matrix(&mut f, 1)?;
        let (set, eps) = (borrow::fuse_set(f.u32()?).ok_or(Malformed)?, f.f32()?);
        let norm: Vec<f32> = {
            let bytes = f.raw(super::wire::MOST)?.as_chunks::<4>().0;
            bytes.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let told = f.raw(super::wire::MOST)?;
        let offsets: Vec<i32> = told.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
        f.end()?;
        let mut exec = lend::exec(&mut ExecContext::on(device, 0, &pool))?;
        if scratch_at != u64::MAX {
            exec.workspace = within(&here.regions[2], scratch_at, scratch_len)?.cast();
            exec.workspace_bytes = scratch_len;
        }
        let mut cx = ExecContext::on(device, 0, &pool);
        // SAFETY: bytes of the regions of this channel, which no other call uses.
        cx.workspace = unsafe { borrow::workspace(&exec) }?.1;
        // SAFETY: as above.
        let (x, y) = unsafe { (x.map(|x| borrow::view(&x)).transpose()?, borrow::view_mut(&y)?) };
        if let (Some(group), Some(x)) = (group, x) {
            let at = TensorView::of(&offsets, &[offsets.len()])?;
            self.watched(|| group.forward(x, at, y, &mut cx))?;
            if offsets.iter().flat_map(|v| v.to_le_bytes()).ne(told.iter().copied()) {
                return Err(Error::new(Code::ConformanceFailed, "the offsets were modified").into());
            }
            return Ok(());
        }
        let weight = weight.ok_or(Malformed)?;
        self.watched(|| match (op, x) {
            (abi::op::FORWARD, Some(x)) if set == FuseSet::NONE => weight.forward(x, y, &mut cx),
            (abi::op::FORWARD, Some(x)) => {
                let norm = set.contains(FuseSet::NORM).then(|| TensorView::of(&norm, &[norm.len()]));
                let fusion = Fusion {
                    norm: norm.transpose()?.map(|weight| RmsNorm { weight, eps }),
                    gate: set.contains(FuseSet::GATE),
                    accumulate: set.contains(FuseSet::ACCUMULATE),
                };
                weight.forward_fused(x, &fusion, y, &mut cx)
            }
            (abi::op::BACKWARD_INPUT, Some(x)) => weight.backward_input(x, y, &mut cx),
            _ => weight.dequantize(y, &mut cx),
        })?;
        Ok(())
    }
}

/// Address of byte `at` of a region that has `len` more.
fn within(region: &Option<Lent>, at: u64, len: u64) -> Result<*mut u8, Malformed> {
    let region = region.as_ref().ok_or(Malformed)?;
    let end = at.checked_add(len).ok_or(Malformed)?;
    if end > region.capacity() as u64 {
        return Err(Malformed);
    }
    Ok(region.at(at as usize))
}

/// A product and its path. One without segments is a question too.
fn spec(f: &mut Fields<'_>) -> Result<(LinearSpec, ExecPath), Fault> {
    let mut raw: Q4LinearSpec = f.spec()?;
    let (mut rows, names) = f.names()?;
    let is_empty = rows.is_empty();
    if is_empty {
        rows.push(raw.n);
    }
    let names: Vec<Q4Str> = names.iter().map(|n| Q4Str::new(n)).collect();
    raw.n_segments = rows.len() as u64;
    raw.segment_rows = rows.as_ptr();
    raw.segment_names = if is_empty { std::ptr::null() } else { names.as_ptr() };
    // SAFETY: the arrays have as many elements as `n_segments` says and live until the end of this function.
    let (mut spec, path) = unsafe { borrow::spec(&raw) }?;
    if is_empty {
        spec.segments.clear();
    }
    Ok((spec, path))
}

const _: () = assert!(super::VERB.len() == "generate".len());
