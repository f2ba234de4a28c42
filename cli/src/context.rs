//! What the global options amount to: policy, backends, memory, threads, and the model they apply to.
//!
//! A request that this build cannot meet fails here, before any verb starts, and never turns into something
//! else.
use crate::args::{
    ActivationFormat, Compute, DeviceChoice, Dtype, Format, GlobalArgs, KvCache, ModelArgs, Unified,
};
use crate::demo;
use crate::device::{self, Choice};
use crate::hub;
use crate::mistakes;
use crate::plugins::{self, Asked, Place, Tables};
use crate::report::Report;
use q4_conformance::{StoredPasses, certificate};
use q4_core::memory::{Budget, ManagedSupport, UnifiedMemory};
use q4_core::{
    BuiltinOptions, Candidate, Code, ComputePath, DType, Device, Dispatch, Error, HostEnv, OpSet, Overrides,
    Policy, Registry, RejectCode, Result, ThreadPool, isa::Isa,
};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::cpu::KvType;
use q4_model::plan::{ActivationRequest, PlanOptions};
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The backend behind `--nvfp4-lib`.
const NVFP4_KERNEL: &str = "nvfp4-kernel";

/// The global options, checked.
pub struct Context {
    global: GlobalArgs,
    report: Report,
    overrides: Overrides,
    gated: bool,
    place: Place,
    every_plugin: bool,
    judges: bool,
    compares: bool,
    compared: Option<String>,
    /// Instruction set that kernels are told to use.
    isa: Option<String>,
    chosen: OnceCell<Choice>,
}

impl Context {
    /// Checks what can be checked without a model. [`Code::Usage`] for options that contradict each other,
    /// [`Code::DeviceMissing`], [`Code::UnifiedMemory`] and [`Code::LibraryRefused`] for what this build does
    /// not have.
    pub fn new(global: GlobalArgs) -> Result<Self> {
        let cx = Self {
            report: Report::new(&global),
            overrides: Overrides::parse(&global.backend)?,
            gated: true,
            place: if global.isolate { Place::Isolated } else { Place::Here },
            every_plugin: false,
            judges: false,
            compares: false,
            compared: None,
            isa: Isa::named()?.map(|isa| isa.name().to_owned()),
            chosen: OnceCell::new(),
            global,
        };
        if cx.global.device != DeviceChoice::Auto {
            cx.device()?;
        }
        cx.check_isolation()?;
        cx.check_unified_memory()?;
        let (threads, processors) = (cx.thread_count(), q4_core::processors());
        if threads > processors {
            cx.report.warn(&format!(
                "--threads {threads}: this process has {processors} processors; more are slower"
            ));
        }
        if cx.global.no_self_check {
            cx.report.warn("--no-self-check: backends are trusted without a check of their first product");
        }
        Ok(cx)
    }

    /// The same options for a run to compare with: all layers by `backend`, where `device` says, whatever it
    /// takes to compute them, in plain memory, with outputs of the same type.
    pub fn against(&self, backend: &str, device: Option<DeviceChoice>) -> Result<Self> {
        let dtype = match self.plan_options(None, 1)?.dtype {
            DType::F16 => Dtype::Float16,
            DType::BF16 => Dtype::Bfloat16,
            _ => Dtype::Float32,
        };
        let global = GlobalArgs {
            compute: Compute::Auto,
            device: device.unwrap_or(self.global.device),
            unified_memory: Unified::Disabled,
            dtype: Some(dtype),
            ..self.global.clone()
        };
        let overrides = Overrides { all: Some(backend.to_owned()), ..Overrides::default() };
        let compared = Some(backend.to_owned());
        let (report, chosen, isa) = (Report::new(&global), OnceCell::new(), self.isa.clone());
        let cx = Self { report, overrides, compared, isa, chosen, global, ..*self };
        cx.device()
            .map_err(|e| e.within("--against-device").fix("--against-device cpu, or leave the option out"))?;
        Ok(cx)
    }

    /// Whether third-party backends need a certificate; the suite that writes one is the exception.
    pub fn gated(mut self, yes: bool) -> Self {
        self.gated = yes;
        self
    }

    /// Where third-party code runs, whatever `--isolate` says.
    pub fn placed(mut self, place: Place) -> Self {
        self.place = place;
        self
    }

    /// For the suite: `auto` is the CPU, since what passes on a device says nothing about another one.
    pub fn judging(mut self) -> Self {
        self.judges = true;
        self
    }

    /// For what is compared with implementations that never round: `auto` is what the checkpoint declares.
    pub fn comparing(mut self) -> Self {
        self.compares = true;
        self
    }

    /// The same with every library of the folders that were named, also those that no `--backend` asks for.
    pub fn with_every_plugin(mut self) -> Self {
        self.every_plugin = true;
        self
    }

    /// The same beside a run of `backend`, if any: its file is named for that one.
    pub fn compared_with(mut self, backend: Option<&str>) -> Self {
        self.compared = backend.map(str::to_owned);
        self
    }

    /// Refuses what says how to compute here, for a verb that asks a server instead. Variables of the
    /// environment, and the threads, say nothing about one request.
    pub fn nothing_here(&self) -> Result<()> {
        let g = &self.global;
        let asked = [
            ("--backend", !g.backend.is_empty()),
            ("--compute", g.compute != Compute::default()),
            ("--activations", g.activations != ActivationFormat::default()),
            ("--device", g.device != DeviceChoice::Auto),
            ("--dtype", g.dtype.is_some()),
            ("--kv-cache", g.kv_cache.is_some()),
            ("--unified-memory", g.unified_memory != Unified::default()),
            ("--memory-limit", g.memory_limit.is_some()),
            ("--plugin", !g.plugin.is_empty()),
            ("--plugin-dir", !g.plugin_dir.is_empty()),
            ("--isolate", g.isolate),
            ("--no-self-check", g.no_self_check),
        ];
        match asked.iter().find(|(_, is_asked)| *is_asked) {
            None => Ok(()),
            Some((option, _)) => Err(Error::new(Code::Usage, format!("{option} beside --server"))
                .need("nothing about computing here: the server computes")
                .fix(format!("{option} where the server is begun"))),
        }
    }

    /// Where results go.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// What selection must obey.
    pub fn policy(&self) -> Policy {
        let compute = match self.global.compute {
            Compute::Auto => ComputePath::Auto,
            Compute::KernelOnly => ComputePath::KernelOnly,
            Compute::KernelOrFallback => ComputePath::KernelOrFallback,
            Compute::DequantMatmulOnly => ComputePath::DequantMatmulOnly,
        };
        Policy { compute, unified_memory: self.unified_memory(), overrides: self.overrides.clone() }
    }

    /// The backends of this build, constructed on this machine, and the tables of those that plugins brought.
    /// Loads libraries.
    pub fn backends(&self) -> Result<(Registry, Tables)> {
        let cuda = match self.device()? {
            Device::Cuda(ordinal) => Some(ordinal),
            _ => None,
        };
        let options = self.builtin_options(cuda);
        let mut registry = Registry::builtin(&options)?;
        let asked = Asked {
            paths: &self.global.plugin,
            folders: &self.global.plugin_dir,
            gated: self.gated,
            device: self.device()?,
            place: self.place,
            wanted: &|name| self.every_plugin || !self.gated || self.names(name),
        };
        let tables = plugins::add(&mut registry, &asked)?;
        is_there(self.device()?, registry.env())?;
        Ok((registry, tables))
    }

    fn builtin_options(&self, cuda: Option<u32>) -> BuiltinOptions {
        let named = self.global.nvfp4_lib.iter().map(|path| (NVFP4_KERNEL.to_owned(), path.clone()));
        let libraries = BTreeMap::from_iter(named);
        BuiltinOptions { libraries, isa: self.isa.clone(), cuda, unified_memory: self.unified_memory() }
    }

    /// Whether `--backend` names it.
    fn names(&self, backend: &str) -> bool {
        let Overrides { all, layers, .. } = &self.overrides;
        all.as_deref() == Some(backend) || layers.iter().any(|(_, name)| name == backend)
    }

    /// The dispatch of all products, under the policy of the options.
    pub fn dispatch(&self) -> Result<Dispatch> {
        let (registry, tables) = self.backends()?;
        let dispatch = Dispatch::new(registry, self.preferring(self.policy(), &tables));
        if self.global.no_self_check {
            return Ok(dispatch.without_self_checks());
        }
        let passes = certificate::data_dir().zip(std::env::current_exe().ok()).map(|(data, program)| {
            let env = dispatch.registry().env();
            Box::new(StoredPasses::new(&data, program, env, self.isa.as_deref()))
        });
        Ok(match passes {
            Some(passes) => dispatch.remembering(passes),
            None => dispatch,
        })
    }

    /// A file that was named is a backend that was named: for the layers that `--backend` says, for the other
    /// run of a comparison, else for all that it can serve.
    fn preferring(&self, mut policy: Policy, tables: &Tables) -> Policy {
        let is_compared = |name: &String| self.compared.as_ref() == Some(name);
        let is_other_run = self.overrides.all.is_some() && self.overrides.all == self.compared;
        let unbound = tables.named().iter().filter(|name| !self.names(name) && !is_compared(name));
        policy.overrides.preferred = unbound.filter(|_| !is_other_run).cloned().collect();
        policy
    }

    /// Fails when a backend that was named cannot be used at all, with every reason and a command that works
    /// without it.
    pub fn require_named(&self, dispatch: &Dispatch) -> Result<()> {
        let names = self.overrides.all.iter().chain(self.overrides.layers.iter().map(|(_, name)| name));
        for name in names {
            let candidates = dispatch.registry().candidates();
            let Some(candidate) = candidates.iter().find(|c| c.name() == name) else {
                let known: Vec<_> = candidates.iter().map(Candidate::name).collect();
                return Err(Error::new(Code::UnknownBackend, format!("no backend is named `{name}`"))
                    .need(format!("one of {}", known.join(", ")))
                    .fix(mistakes::backend(name, &known)));
            };
            if let Candidate::Dead { reasons, .. } = candidate {
                let is_judged = !reasons.iter().any(|r| r.code == RejectCode::ConformanceMissing);
                let texts: Vec<_> = reasons
                    .iter()
                    .map(|r| format!("{}: need {}; have {}", r.code.as_str(), r.need, r.have))
                    .collect();
                let library = dispatch.registry().env().libraries.get(name).filter(|_| !is_judged);
                let dense = "compute on dense copies: q4 --backend dequant-matmul generate";
                let fix = match library {
                    Some(library) => {
                        let device = match self.device()? {
                            Device::Cpu => String::new(),
                            device => format!(" --device {device}"),
                        };
                        format!("q4 conformance --plugin {}{device}", library.path)
                    }
                    None if name == NVFP4_KERNEL => {
                        format!("name a libNVFP4 that exists with --nvfp4-lib PATH, or {dense}")
                    }
                    None => dense.to_owned(),
                };
                return Err(Error::new(
                    Code::LibraryRefused,
                    format!("backend `{name}` is named and cannot be used"),
                )
                .need(format!("`{name}`, as named"))
                .have(texts.join("\n"))
                .fix(fix));
            }
        }
        Ok(())
    }

    /// What the user allows, in bytes.
    pub fn memory_limit(&self) -> Option<u64> {
        self.global.memory_limit
    }

    /// What may be allocated.
    pub fn budget(&self) -> Budget {
        self.global.memory_limit.map_or_else(Budget::of_process, Budget::new)
    }

    /// How many threads the whole process has.
    pub fn thread_count(&self) -> usize {
        self.global.threads.map_or_else(q4_core::processors, usize::from)
    }

    /// Threads of the whole process.
    pub fn threads(&self) -> Arc<ThreadPool> {
        Arc::new(ThreadPool::new(self.thread_count()))
    }

    /// The best instruction set that kernels may use; a kernel that is not written for it uses the next one
    /// down. None where a device computes.
    pub fn isa(&self) -> Option<&'static str> {
        let is_cpu = self.device().is_ok_and(|device| device == Device::Cpu);
        Isa::choose(self.isa.as_deref()).ok().filter(|_| is_cpu).map(Isa::name)
    }

    /// Says where a run computes, and why: with `-v`, and on stderr where a GPU stays idle that nobody wants
    /// idle.
    pub fn tell_device(&self) -> Result<()> {
        let choice = self.device_choice()?;
        if choice.idle {
            self.report.warn(&format!("computing on the CPU while a GPU is idle: {}", choice.why));
        }
        let isa = self.isa().map_or_else(String::new, |isa| format!(", instruction set {isa}"));
        self.report.detail(&format!("device {} ({}){isa}", choice.device, choice.why));
        Ok(())
    }

    /// Where products run, and why there; found out once, when it is first asked for.
    pub fn device_choice(&self) -> Result<&Choice> {
        if let Some(choice) = self.chosen.get() {
            return Ok(choice);
        }
        let options = self.builtin_options(None);
        let choice = device::choose(self.global.device, self.bound_to_cpu(), &options)?;
        Ok(self.chosen.get_or_init(|| choice))
    }

    /// Where products run.
    pub fn device(&self) -> Result<Device> {
        self.device_choice().map(|choice| choice.device)
    }

    /// Why `auto` is the CPU whatever the machine has.
    fn bound_to_cpu(&self) -> Option<&'static str> {
        let g = &self.global;
        let named = g.plugin.is_empty() && g.plugin_dir.is_empty();
        match self.judges {
            true => Some("backends are judged where the user says"),
            false if g.isolate => Some("--isolate runs there"),
            false if !named => Some("a library of a third party runs where the user says"),
            false => None,
        }
    }

    /// How a model is planned; `max_rows` are the rows of its largest step.
    pub fn plan_options(&self, quantize: Option<Format>, max_rows: usize) -> Result<PlanOptions> {
        let activations = match self.global.activations {
            ActivationFormat::Auto if self.compares => ActivationRequest::Declared,
            ActivationFormat::Auto => ActivationRequest::Auto,
            ActivationFormat::Native => ActivationRequest::Native,
            ActivationFormat::Int8 => ActivationRequest::Int8,
            ActivationFormat::Nvfp4 => ActivationRequest::Nvfp4,
            ActivationFormat::Fp8 => ActivationRequest::Fp8,
        };
        let device = self.device()?;
        let dtype = match self.global.dtype {
            Some(Dtype::Float32) => DType::F32,
            Some(Dtype::Float16) => DType::F16,
            Some(Dtype::Bfloat16) => DType::BF16,
            // Checkpoints are trained in bf16: its range is what their activations have.
            None if device != Device::Cpu => DType::BF16,
            None => DType::F32,
        };
        let quantize = quantize.map(|format| format.how.default_target());
        Ok(PlanOptions { activations, dtype, device, quantize, max_rows, ops: OpSet::FORWARD })
    }

    /// How keys and values are cached where the user does not say.
    pub fn kv(&self, default: KvType) -> KvType {
        self.global.kv_cache.map_or(default, |kind| match kind {
            KvCache::Float16 => KvType::F16,
            KvCache::Float32 => KvType::F32,
        })
    }

    /// Opens the model the user named.
    pub fn open(&self, model: &ModelArgs) -> Result<Checkpoint> {
        if model.model == Path::new(demo::NAME) {
            if model.config.is_some() || model.tokenizer.is_some() {
                return Err(Error::new(Code::Usage, "--config and --tokenizer belong to a model in a file")
                    .have("the model inside the executable")
                    .fix("name the model; a directory called demo is ./demo"));
            }
            return demo::open();
        }
        let path = hub::located(&model.model)?;
        mistakes::model(&path)?;
        let options = OpenOptions {
            config: model.config.clone(),
            tokenizer: model.tokenizer.clone(),
            memory: self.memory_limit(),
        };
        Checkpoint::open(&path, &options)
    }

    fn unified_memory(&self) -> UnifiedMemory {
        match self.global.unified_memory {
            Unified::Disabled => UnifiedMemory::Disabled,
            Unified::Prefer => UnifiedMemory::Prefer,
            Unified::Require => UnifiedMemory::Require,
        }
    }

    fn check_isolation(&self) -> Result<()> {
        if !self.global.isolate {
            return Ok(());
        }
        if self.global.plugin.is_empty() && self.global.plugin_dir.is_empty() {
            return Err(Error::new(Code::Usage, "--isolate without a library to isolate")
                .need("--plugin PATH or --plugin-dir DIR")
                .fix("leave --isolate out: what is built in runs in this process"));
        }
        match self.device()? {
            Device::Cpu => Ok(()),
            device => Err(Error::new(Code::Usage, format!("--isolate with --device {device}"))
                .need("--device cpu: operands on a device are not copied to another process")
                .fix("leave one of the two out")),
        }
    }

    fn check_unified_memory(&self) -> Result<()> {
        let request = self.unified_memory();
        if request == UnifiedMemory::Disabled {
            return Ok(());
        }
        if self.device()? != Device::Cpu {
            return Ok(()); // the backend says when it opens the device
        }
        let why = "--device cpu, where host memory is all there is";
        let granted = request.grant(&ManagedSupport::No(why.into()));
        granted.map_err(|e| e.fix("--unified-memory prefer goes on without"))?;
        if request == UnifiedMemory::Prefer {
            self.report.warn(&format!("--unified-memory prefer: none to be had: {why}"));
        }
        Ok(())
    }
}

/// Fails for a device that no plugin brings.
fn is_there(device: Device, env: &HostEnv) -> Result<()> {
    let is_known = matches!(device, Device::Cpu | Device::Cuda(_)) || env.vendor_device(device).is_some();
    if is_known {
        return Ok(());
    }
    let all: Vec<_> = env.vendor.iter().map(|d| format!("{} ({})", d.device, d.name)).collect();
    Err(Error::new(Code::DeviceMissing, format!("--device {device}"))
        .need("a device of a library that is named with --plugin")
        .have(if all.is_empty() { "no library with a device of its own".into() } else { all.join(", ") })
        .fix("name the library with --plugin, or --device cpu"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_bind_layers_or_all() -> Result<()> {
        let o = Overrides::parse(&["a".into(), "*.mlp.*=b".into(), "a".into()])?;
        assert_eq!((o.all.as_deref(), o.layers), (Some("a"), vec![("*.mlp.*".to_owned(), "b".to_owned())]));
        for bad in [vec!["a", "b"], vec![""], vec!["=a"], vec!["a="]] {
            let given: Vec<_> = bad.iter().map(|s| (*s).to_owned()).collect();
            assert_eq!(Overrides::parse(&given).expect_err("must be refused").code(), Code::Usage, "{bad:?}");
        }
        Ok(())
    }
}
