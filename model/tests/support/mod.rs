//! Opening and running the recorded models, for tests.
#![allow(dead_code)]
use q4_core::memory::Budget;
use q4_core::{
    BuiltinOptions, ComputePath, DType, Device, Dispatch, OpSet, Overrides, Policy, Registry, Result,
    ThreadPool,
};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::cpu::KvType;
use q4_model::load::{ContextOptions, Loaded, load};
use q4_model::plan::{ActivationRequest, Plan, PlanOptions};
use q4_model::runner::Runner;
use std::path::PathBuf;
use std::sync::Arc;
use {
    q4_dequant_matmul as _, q4_fp8_kernel as _, q4_ggml_kernel as _, q4_int4_kernel as _,
    q4_mxfp4_kernel as _, q4_nf4_kernel as _, q4_nvfp4_kernel as _, q4_reference as _,
};

pub fn golden(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../conformance/golden").join(path)
}

pub struct Setup {
    pub backend: Option<&'static str>,
    pub compute: ComputePath,
    pub activations: ActivationRequest,
    pub dtype: DType,
    pub device: Device,
    pub chunk: usize,
    pub context: usize,
    pub all_logits: bool,
    pub threads: usize,
    pub kv: KvType,
    pub isa: Option<&'static str>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            backend: None,
            compute: ComputePath::Auto,
            activations: ActivationRequest::Auto,
            dtype: DType::F32,
            device: Device::Cpu,
            chunk: 16,
            context: 256,
            all_logits: false,
            threads: 2,
            kv: KvType::F32,
            isa: None,
        }
    }
}

impl Setup {
    pub fn dispatch(&self) -> Result<Dispatch> {
        let overrides = Overrides { all: self.backend.map(str::to_owned), ..Overrides::default() };
        let policy = Policy { compute: self.compute, overrides, ..Policy::default() };
        let cuda = if let Device::Cuda(ordinal) = self.device { Some(ordinal) } else { None };
        let options = BuiltinOptions { isa: self.isa.map(str::to_owned), cuda, ..BuiltinOptions::default() };
        Ok(Dispatch::new(Registry::builtin(&options)?, policy))
    }

    pub fn options(&self) -> PlanOptions {
        PlanOptions {
            activations: self.activations,
            dtype: self.dtype,
            device: self.device,
            quantize: None,
            max_rows: self.chunk,
            ops: OpSet::FORWARD,
        }
    }

    pub fn load(&self, checkpoint: &Checkpoint, dispatch: &Dispatch) -> Result<Loaded> {
        let options = self.options();
        let plan = Plan::new(checkpoint, dispatch, &options)?;
        let threads = Arc::new(ThreadPool::new(self.threads));
        load(checkpoint, &plan, dispatch, &options, threads, &Budget::of_machine(), &mut |_, _| {})
    }

    pub fn runner(&self, loaded: &Loaded) -> Result<Runner> {
        let options = ContextOptions {
            context: self.context,
            chunk: self.chunk,
            all_logits: self.all_logits,
            kv: self.kv,
            many: None,
        };
        loaded.runner(options, &Budget::of_machine())
    }

    pub fn open(&self, path: &str) -> Result<(Dispatch, Runner)> {
        let checkpoint = Checkpoint::open(&golden(path), &OpenOptions::default())?;
        let dispatch = self.dispatch()?;
        let loaded = self.load(&checkpoint, &dispatch)?;
        let runner = self.runner(&loaded)?;
        Ok((dispatch, runner))
    }
}

pub fn argmax(logits: &[f32]) -> u32 {
    let best =
        logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |b, (i, &v)| if v > b.1 { (i, v) } else { b });
    best.0 as u32
}

pub fn greedy(runner: &mut Runner, steps: usize) -> Result<Vec<u32>> {
    let mut out = Vec::new();
    for _ in 0..steps {
        let id = argmax(runner.logits()?);
        out.push(id);
        runner.decode(id)?;
    }
    Ok(out)
}
