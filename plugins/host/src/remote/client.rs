//! This process's side: the backend.
use super::link::{Broken, Channel, Greeting, Link};
use super::port::Port;
use super::process::Process;
use super::weight::{Held, RemoteGroup, RemoteWeight, lay_out};
use super::wire::ask;
use super::{Isolation, Loss, VERB, lock};
use crate::backend::{agreed, question, strangers};
use crate::{Examined, Refusal, one};
use q4_core::conduct::Facts;
use q4_core::device::{DeviceBytes, DeviceMemory, memory_of};
use q4_core::{
    BackendDescriptor, Code, Device, Error, ExecContext, ExecPath, HostEnv, LinearSpec, PreparedGroup,
    PreparedWeight, ProbeItem, Q4Backend, Q4Weight, Reject, RejectCode, Result, VendorDevice, Verdict,
};
use q4_plugin_abi::Q4PreparedInfo;
use q4_plugin_sdk::lend::{self, LentSpec, LentWeight};
use q4_plugin_sdk::message;
use std::any::Any;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

/// Calls that run at once; others wait for one of them.
const CHANNELS: usize = 8;

/// A library in another process.
pub struct Remote {
    descriptor: BackendDescriptor,
    origin: String,
    devices: Vec<VendorDevice>,
    link: Arc<Link>,
}

impl Remote {
    /// Starts a process for the library that was examined. [`RejectCode::DiedInProbe`] and
    /// [`RejectCode::TimedOut`] when that does not live to say what it loaded.
    pub fn start(found: &Examined, how: &Isolation) -> Result<Self, Refusal> {
        Self::started(found, how).map_err(|reasons| found.refusal().because(reasons))
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
        // Ctrl-C and `timeout` reach a whole group: who is asked to end may have answers to finish first, and
        // this one ends with it, whatever happens.
        command.process_group(0);
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
        let Greeting { descriptor: said, priority, offers, devices } = match greeted {
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
        Ok(Self { descriptor, origin, devices, link: Arc::new(link) })
    }

    /// Number of the process that runs the library.
    pub fn process(&self) -> u32 {
        self.link.process.id
    }

    /// The same backend again, for whoever watches it.
    pub fn handle(&self) -> Self {
        let (descriptor, devices) = (self.descriptor.clone(), self.devices.clone());
        Self { descriptor, origin: self.origin.clone(), devices, link: self.link.clone() }
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
        let lent = question(spec, path, &self.devices, &self.link.name)?;
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

    fn devices(&self) -> Vec<VendorDevice> {
        self.devices.clone()
    }

    fn memory(&self, device: Device) -> Result<Arc<dyn DeviceMemory>> {
        match device {
            Device::Vendor { ordinal, .. } => Ok(Arc::new(Watched { link: self.link.clone(), ordinal })),
            other => memory_of(other),
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
            for (s, places) in segments.iter().zip(places.chunks(5)) {
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
        Ok(Box::new(RemoteWeight { held, info, fuses: Mutex::default() }))
    }

    fn group(
        &self,
        weights: &[Arc<dyn PreparedWeight>],
        cx: &mut ExecContext<'_>,
    ) -> Result<Option<Box<dyn PreparedGroup>>> {
        let own = |w: &Arc<dyn PreparedWeight>| {
            let w = (&**w as &dyn Any).downcast_ref::<RemoteWeight>()?;
            Arc::ptr_eq(&w.held.link, &self.link).then_some(w.held.id)
        };
        let ids: Option<Vec<_>> = weights.iter().map(own).collect();
        let Some(ids) = ids else { return Err(strangers(&self.link.name)) };
        let exec = lend::exec(cx)?;
        let (made, id) = self.link.ask("group", |c| {
            let out = c.port.out.begin(ask::GROUP).u32(exec.threads).u32(exec.device_type);
            out.u32(exec.device_id).u32(ids.len() as u32);
            for id in &ids {
                out.u64(*id);
            }
            c.exchange(&[], |f| Ok((f.u32()?, f.u64()?)))
        })?;
        let group = || RemoteGroup { link: self.link.clone(), id, weights: weights.to_vec() };
        Ok((made == 1).then(|| Box::new(group()) as _))
    }
}

/// Memory of a device of the library. Operands are staged there by the process that has the library; from
/// here it is only looked at.
struct Watched {
    link: Arc<Link>,
    ordinal: u32,
}

impl DeviceMemory for Watched {
    fn alloc(&self, _: usize) -> Result<Box<dyn DeviceBytes>> {
        Err(Error::new(Code::Unsupported, "memory of a device of another process")
            .need("the process that has the library")
            .have(self.link.name.clone()))
    }
    fn stream(&self) -> usize {
        0
    }
    fn synchronize(&self) -> Result<()> {
        // Every call there has waited.
        Ok(())
    }
    fn free(&self) -> Result<u64> {
        self.link.ask("device", |c| {
            c.port.out.begin(ask::DEVICE_FREE).u32(self.ordinal);
            c.exchange(&[], |f| f.u64())
        })
    }
}

fn names(spec: &LinearSpec) -> impl ExactSizeIterator<Item = (u64, &str)> {
    spec.segments.iter().map(|s| (s.rows as u64, &s.name[..s.name.floor_char_boundary(4096)]))
}
