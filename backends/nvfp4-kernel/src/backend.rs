//! The backend object: a loaded library with a context per device, or bare facts for questions about other
//! machines.
use crate::library::{self, Library};
use crate::table::Ctx;
use crate::{abi, prepare, probe};
use q4_core::memory::UnifiedMemory;
use q4_core::{
    BackendDescriptor, Built, BuiltinOptions, Code, Device, Error, ExecContext, ExecPath, Footprint, HostEnv,
    LibraryFacts, LinearSpec, PreparedWeight, ProbeItem, Q4Backend, Q4Weight, Reject, RejectCode, Result,
    Verdict,
};
use std::collections::{BTreeMap, btree_map::Entry};
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// NVFP4 products by libNVFP4.
pub struct Nvfp4Kernel {
    descriptor: BackendDescriptor,
    facts: LibraryFacts,
    engine: Option<Engine>,
}

/// What computes, as opposed to what is known.
struct Engine {
    library: &'static Library,
    isa: Option<CString>,
    is_managed: bool,
    /// One per device that was used; the interface wants one thread at a time in each.
    contexts: Mutex<BTreeMap<Device, Ctx>>,
    /// What happened while it was built, for `diagnose`.
    notes: Vec<ProbeItem>,
}

/// Loads libNVFP4: the file of `options.libraries["nvfp4-kernel"]` alone when there is one, else the first
/// usable one beside the executable, in `deps` or `../lib` beside it, or known to the system loader.
/// `options.isa` is binding.
///
/// # Errors
/// Every place that was tried, with its reason, and last the command that would help.
pub fn construct(options: &BuiltinOptions, _: &HostEnv) -> Result<Built, Vec<Reject>> {
    let library = library::load(options.libraries.get(probe::NAME).map(PathBuf::as_path))?;
    let (engine, facts) = Engine::new(library, options)?;
    let backend = Nvfp4Kernel { descriptor: descriptor(&facts), facts: facts.clone(), engine: Some(engine) };
    Ok(Built { library: Some(facts), ..Built::new(Arc::new(backend)) })
}

impl Nvfp4Kernel {
    /// A backend that answers `can_prepare` as one with such a library would, and refuses to `prepare`: for
    /// decision tables about machines that are not here.
    pub fn with_facts(facts: LibraryFacts) -> Arc<dyn Q4Backend> {
        Arc::new(Self { descriptor: descriptor(&facts), facts, engine: None })
    }

    /// Whether products of many rows may run on a matrix unit, which wants operands laid out for it.
    fn has_matrix_unit(&self) -> bool {
        self.facts.cpu_isa.iter().any(|isa| isa == "amx")
    }
}

impl Q4Backend for Nvfp4Kernel {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }

    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        let notes = self.engine.as_ref().map_or(&[][..], |e| &e.notes);
        notes.iter().cloned().chain(probe::items(&self.facts, env)).collect()
    }

    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        probe::verdict(spec, path, env)
    }

    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        let usual = Footprint::usual(spec, path);
        match spec.device {
            Device::Cpu => Footprint { workspace: prepare::workspace(spec, self.has_matrix_unit()), ..usual },
            _ => usual,
        }
    }

    fn manages_memory(&self) -> bool {
        true
    }

    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        let Some(engine) = &self.engine else {
            return Err(
                Error::new(Code::LibraryRefused, "libNVFP4 is only imagined").need("a loaded library")
            );
        };
        engine.with(spec.device, |ctx| prepare::prepare(&engine.library.table, ctx, w, spec, path, cx))
    }
}

impl Engine {
    /// Opens the CPU, and the GPU that is to be used, to learn what the library has kernels for.
    fn new(library: &'static Library, options: &BuiltinOptions) -> Result<(Self, LibraryFacts), Vec<Reject>> {
        let isa = options.isa.as_deref();
        let mut notes = vec![library.note()];
        let mut facts = LibraryFacts {
            path: library.path.clone(),
            version: library.version.clone(),
            ..LibraryFacts::default()
        };
        let Ok(isa) = isa.map(CString::new).transpose() else {
            return Err(vec![Reject::new(
                RejectCode::Internal,
                "an instruction set without NUL",
                "Q4_ISA with NUL",
            )]);
        };
        let mut contexts = BTreeMap::new();
        match library.table.ctx_create(Device::Cpu, isa.as_deref(), false) {
            Ok(ctx) => {
                let item = cpu(library, &ctx, &mut facts);
                notes.push(item);
                contexts.insert(Device::Cpu, ctx);
            }
            // An instruction set that was asked for and is not there must not turn into another one.
            Err(reasons) if isa.is_some() => return Err(reasons),
            Err(reasons) => {
                notes.push(ProbeItem { id: "context.cpu".into(), reasons, detail: String::new() })
            }
        }
        let is_managed = options.unified_memory != UnifiedMemory::Disabled;
        let mut is_managed = is_managed;
        if let Some(device) = options.cuda.map(Device::Cuda) {
            let id = format!("context.{device}").into();
            let mut opened = library.table.ctx_create(device, None, is_managed);
            if opened.is_err() && options.unified_memory == UnifiedMemory::Prefer {
                is_managed = false;
                opened = library.table.ctx_create(device, None, false);
            }
            match opened {
                Ok(ctx) => {
                    notes.push(ProbeItem { id, ..cuda(library, &ctx, &mut facts) });
                    contexts.insert(device, ctx);
                }
                Err(reasons) => {
                    let texts: Vec<_> =
                        reasons.iter().map(|r| format!("{} (need {})", r.have, r.need)).collect();
                    facts.cuda_refused = Some(texts.join("; "));
                    // A machine without a GPU is no finding; the text still says why there is none.
                    let is_finding = reasons.iter().any(|r| r.code != RejectCode::DeviceAbsent);
                    let detail = format!("none: {}", texts.join("; "));
                    notes.push(ProbeItem {
                        id,
                        reasons: if is_finding { reasons } else { Vec::new() },
                        detail,
                    });
                }
            }
        }
        facts.cuda_images.sort_unstable();
        facts.cuda_images.dedup();
        tracing::debug!(path = %facts.path, version = %facts.version, cpu = ?facts.cpu_isa, cuda = ?facts.cuda_images, "libNVFP4");
        Ok((Self { library, isa, is_managed, contexts: Mutex::new(contexts), notes }, facts))
    }

    /// Runs `job` in the context of `device`, which is opened when it is new.
    fn with<R>(&self, device: Device, job: impl FnOnce(&Ctx) -> Result<R>) -> Result<R> {
        let mut contexts = self.contexts.lock().unwrap_or_else(|e| e.into_inner());
        let ctx = match contexts.entry(device) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let isa = self.isa.as_deref().filter(|_| device == Device::Cpu);
                new.insert(self.library.table.ctx_create(device, isa, self.is_managed).map_err(
                    |reasons| {
                        let texts: Vec<_> = reasons.iter().map(ToString::to_string).collect();
                        Error::new(Code::DeviceMissing, format!("libNVFP4 cannot use {device}"))
                            .have(texts.join("\n"))
                    },
                )?)
            }
        };
        job(ctx)
    }
}

/// Enters the CPU's instruction sets into `facts`, unless a path or an activation format of the contract is
/// missing.
fn cpu(library: &Library, ctx: &Ctx, facts: &mut LibraryFacts) -> ProbeItem {
    const PATHS: u32 = 1 << abi::PATH_FUSED_DEQUANT;
    const ACTIVATIONS: u32 = 1 << abi::ACT_NATIVE | 1 << abi::ACT_INT8 | 1 << abi::ACT_NVFP4;
    let mut item = ProbeItem { id: "context.cpu".into(), reasons: Vec::new(), detail: String::new() };
    match library.table.device_info(ctx) {
        Err(e) => item.reasons.push(Reject::new(RejectCode::Internal, "device_info", e.to_string())),
        Ok(info) if info.paths & PATHS != PATHS || info.activations & ACTIVATIONS != ACTIVATIONS => {
            let have = format!("paths {:#b}, activations {:#b}", info.paths, info.activations);
            let need = "fused-dequant with native, int8 and nvfp4 activations on the CPU";
            item.reasons.push(Reject::new(RejectCode::KernelImageMissing, need, have));
        }
        Ok(info) => {
            facts.cpu_isa = info
                .isa_available
                .split(',')
                .map(|s| s.trim().to_owned())
                .filter(|s| !s.is_empty())
                .collect();
            item.detail = format!("runs {} ({})", info.isa, info.build);
        }
    }
    item
}

/// Enters the capability of a GPU into `facts` when the library has machine code for it.
fn cuda(library: &Library, ctx: &Ctx, facts: &mut LibraryFacts) -> ProbeItem {
    let mut item = ProbeItem { id: "".into(), reasons: Vec::new(), detail: String::new() };
    match library.table.device_info(ctx) {
        Err(e) => item.reasons.push(Reject::new(RejectCode::Internal, "device_info", e.to_string())),
        Ok(info) => {
            item.detail = format!("runs {} ({}), paths {:#b}", info.isa, info.build, info.paths);
            if info.has_native_image {
                facts.cuda_images.push(info.capability);
                if info.paths & 1 << abi::PATH_NATIVE != 0 {
                    facts.cuda_native.push(info.capability);
                } else if probe::BLACKWELL.contains(&info.capability) {
                    facts.cuda_native_refused = library.table.native_refusals(ctx);
                }
            } else {
                let need = format!("sm_{}{} kernels in libNVFP4", info.capability.0, info.capability.1);
                item.reasons.push(Reject::new(RejectCode::KernelImageMissing, need, info.build));
            }
        }
    }
    item
}

fn descriptor(facts: &LibraryFacts) -> BackendDescriptor {
    BackendDescriptor {
        name: probe::NAME.into(),
        version: facts.version.clone().into(),
        vendor: "q4".into(),
        priority: 0,
        offers: probe::paths(facts).into_iter().map(|path| ("nvfp4".into(), path)).collect(),
    }
}
