//! The products of a packed base: who multiplies by each, chosen as for inference, and the weights.
use super::frozen::{Frozen, Place, device};
use crate::config::{Compute, Config, Inputs};
use q4_core::memory::human;
use q4_core::{
    BuiltinOptions, Code, ComputePath, DType, Device, Dispatch, Error, Executed, OpSet, Overrides, Policy,
    Q4Weight, Registry, Result, ThreadPool, isa::Isa,
};
use q4_model::checkpoint::Checkpoint;
use q4_model::plan::{ActivationRequest, HeadPlan, Plan, PlanOptions, Product};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use {
    q4_dequant_matmul as _, q4_fp8_kernel as _, q4_ggml_kernel as _, q4_int4_kernel as _,
    q4_mxfp4_kernel as _, q4_nf4_kernel as _, q4_nvfp4_kernel as _, q4_reference as _,
};

/// Every product of a checkpoint, with its choice.
pub struct Products {
    dispatch: Dispatch,
    plan: Plan,
    place: Arc<Place>,
}

impl Products {
    /// Plans all products of a training step: forward and the gradient of the input, nothing of the weight.
    ///
    /// # Errors
    /// As [`Plan::require`]: a product that nobody may serve, with everybody who was refused and why; a
    /// backend that was named and serves nothing; a `Q4_ISA` that is unknown or not there.
    /// [`Code::Unsupported`] for a layer with act-order.
    pub fn plan(c: &Config, checkpoint: &Checkpoint, on: tch::Device, pool: Arc<ThreadPool>) -> Result<Self> {
        let computes = device(on);
        let cuda = if let Device::Cuda(n) = computes { Some(n) } else { None };
        let isa = Isa::named()?.map(|isa| isa.name().to_owned());
        let options = BuiltinOptions { isa, cuda, ..BuiltinOptions::default() };
        let policy = Policy {
            compute: c.quant.compute.into(),
            overrides: Overrides::parse(&c.quant.backend)?,
            ..Policy::default()
        };
        let dispatch = Dispatch::new(Registry::builtin(&options)?, policy);
        let merges = c.layouts().iter().any(|l| *l != crate::config::PEFT);
        let options = PlanOptions {
            activations: match c.quant.activations {
                Inputs::Native => ActivationRequest::Native,
                Inputs::Nvfp4 => ActivationRequest::Nvfp4,
            },
            dtype: if computes == Device::Cpu { DType::F32 } else { DType::BF16 },
            device: computes,
            quantize: None,
            max_rows: c.data.rows * c.data.seq,
            ops: OpSet::FORWARD.with(OpSet::BACKWARD_INPUT).with(if merges {
                OpSet::DEQUANTIZE
            } else {
                OpSet::FORWARD
            }),
        };
        let plan = Plan::new(checkpoint, &dispatch, &options)?;
        // Its inputs would have to change places, and their gradients back.
        if let Some(product) = plan.products().find(|p| p.order.is_some()) {
            let what = format!("{}: training on a packed base with act-order", product.spec.name());
            return Err(Error::new(Code::Unsupported, what)
                .need("groups in the order of the in features")
                .have("a g_idx with another order")
                .fix("lora.base = \"decoded\", or a base that was quantised with desc_act false"));
        }
        plan.require(&dispatch).map_err(|e| e.within("training on a packed base"))?;
        Ok(Self { dispatch, plan, place: Place::new(on, pool)? })
    }

    /// Weights of the products that begin with `module`, packed; `None`: that one is no product.
    pub fn prepare(&self, checkpoint: &Checkpoint, module: &str) -> Result<Option<Vec<Arc<Frozen>>>> {
        let first = |group: &&[Product]| group.first().is_some_and(|p| p.spec.segments[0].name == module);
        let Some(group) = self.groups().find(first) else { return Ok(None) };
        group.iter().map(|p| self.weight(checkpoint, p)).collect::<Result<_>>().map(Some)
    }

    fn weight(&self, checkpoint: &Checkpoint, product: &Product) -> Result<Arc<Frozen>> {
        let (spec, pool) = (&product.spec, self.place.pool());
        let layers = spec
            .segments
            .iter()
            .map(|s| checkpoint.layer_on(pool, &s.name, s.rows, spec.k))
            .collect::<Result<Vec<_>>>()?;
        let segments: Vec<_> = layers.iter().map(|l| l.segment.clone()).collect();
        let weight = Q4Weight { schema: spec.schema, k: spec.k, segments: &segments };
        let selection = product.choice.as_ref().map_err(|e| Error::from(e.clone()))?;
        let linear = self.dispatch.prepare(&weight, spec, selection, pool)?;
        layers.iter().for_each(|l| checkpoint.release(&l.detected));
        Frozen::new(linear, self.place.clone())
    }

    /// Products that share their input, as the graph has them.
    fn groups(&self) -> impl Iterator<Item = &[Product]> {
        let layers = self.plan.layers.iter();
        let head = match &self.plan.head {
            HeadPlan::Product(p) => Some(&**p),
            HeadPlan::Dense { .. } => None,
        };
        layers.flat_map(|l| [&*l.qkv, &*l.o, &*l.gate_up, &*l.down]).chain(head.map(std::slice::from_ref))
    }

    /// Whether the head is a product.
    pub fn has_head(&self) -> bool {
        matches!(self.plan.head, HeadPlan::Product(_))
    }

    /// Bytes that the weights will keep, as their backends say.
    pub fn resident(&self) -> u64 {
        self.footprints().map(|f| f.resident).sum()
    }

    /// Bytes of scratch of the largest product.
    pub fn workspace(&self) -> u64 {
        self.footprints().map(|f| f.workspace).max().unwrap_or(0)
    }

    fn footprints(&self) -> impl Iterator<Item = q4_core::Footprint> {
        let chosen = |p: &Product| p.choice.as_ref().ok().map(|s| s.backend.footprint(&p.spec, s.path));
        self.plan.products().filter_map(chosen)
    }

    /// Products that will run on a dense copy although a kernel for them exists, as was agreed to.
    pub fn downgraded(&self) -> usize {
        self.plan.downgraded()
    }

    /// What ran so far.
    pub fn executed(&self) -> Vec<Executed> {
        self.dispatch.witness().executed()
    }
}

impl fmt::Display for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = |p: &Product| {
            let s = p.choice.as_ref().ok()?;
            Some(format!("{} ({}, {})", s.backend.descriptor().name, s.path, p.spec.activations))
        };
        let who: BTreeSet<_> = self.plan.products().filter_map(who).collect();
        let who = who.into_iter().collect::<Vec<_>>().join(", ");
        let count = self.plan.products().count();
        write!(f, "base packed: {count} products by {who}, {}", human(self.resident()))
    }
}

impl From<Compute> for ComputePath {
    fn from(c: Compute) -> Self {
        match c {
            Compute::Auto => Self::Auto,
            Compute::KernelOnly => Self::KernelOnly,
            Compute::KernelOrFallback => Self::KernelOrFallback,
            Compute::DequantMatmulOnly => Self::DequantMatmulOnly,
        }
    }
}
