//! The plan of a model: every product, its encoding, who computes it and who was refused. Reads no weight.
use crate::checkpoint::{Checkpoint, Head, Layer, Order, names};
use crate::quantize::Target;
use crate::weights::gathered;
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, DType, Device, Dispatch, Error, LinearSpec, OpSet, Q4Schema,
    Result, Rule, SegmentSpec, Selection, SelectionError,
};
use tracing::field::Empty;

/// What `--activations` may ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationRequest {
    /// What is usual for the checkpoint: [`Layer::usual`] on a CPU, and what is declared on a device, whose
    /// units multiply floats.
    #[default]
    Auto,
    /// What the checkpoint declares, else floats as they are: for comparing with what never rounds.
    Declared,
    /// Floats as they are.
    Native,
    /// int8 per 16.
    Int8,
    /// NVFP4, by the rule of the checkpoint's flavour.
    Nvfp4,
    /// FP8 of FP8 weights, with the scale that is declared; of other weights as `Auto`.
    Fp8,
}

impl ActivationRequest {
    /// Whether the user says what inputs of every layer are.
    fn is_named(self) -> bool {
        matches!(self, Self::Native | Self::Int8 | Self::Nvfp4)
    }
}

/// Everything that decides a plan, the checkpoint and the policy aside.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// Activation format.
    pub activations: ActivationRequest,
    /// Output type of products.
    pub dtype: DType,
    /// Device of all products.
    pub device: Device,
    /// Quantise dense projections while loading.
    pub quantize: Option<Target>,
    /// Rows of the largest step.
    pub max_rows: usize,
    /// Operations the caller needs.
    pub ops: OpSet,
}

/// One product of the plan.
pub struct Product {
    /// What is needed.
    pub spec: LinearSpec,
    /// The choice, or why there is none.
    pub choice: Result<Selection, SelectionError>,
    /// Arrangement in the file.
    pub layout: &'static str,
    /// Dense in the file, 4-bit after loading.
    pub quantized_on_load: bool,
    /// The order that its inputs are put into, where that is another than theirs (act-order).
    pub order: Option<Order>,
    /// Its inputs are neither what is declared nor what the user says, but what is usual for such a file.
    pub usual_inputs: bool,
    /// How many of its layers lack the scale that their declared NVFP4 inputs take, so that their inputs
    /// stay as they are. None where the user says what inputs are.
    pub unscaled: usize,
}

/// The products of one layer, each group in the order its outputs lie side by side.
pub struct LayerPlan {
    /// q, k and v: one product where they agree in everything, the order of their inputs too, else three.
    pub qkv: Vec<Product>,
    /// Attention output.
    pub o: Vec<Product>,
    /// gate and up: one product or two.
    pub gate_up: Vec<Product>,
    /// MLP output.
    pub down: Vec<Product>,
}

/// How the head is computed.
pub enum HeadPlan {
    /// Dense: the embeddings again, or a matrix of its own. No 4-bit product, so no backend.
    Dense {
        /// Stored type.
        dtype: DType,
        /// It is the embedding table.
        tied: bool,
    },
    /// A 4-bit product.
    Product(Box<Product>),
}

/// The plan of a whole model.
pub struct Plan {
    /// First to last.
    pub layers: Vec<LayerPlan>,
    /// The head.
    pub head: HeadPlan,
}

impl Product {
    /// Bytes beside the weight for the order of its inputs.
    pub(crate) fn order_bytes(&self) -> u64 {
        self.order.as_ref().map_or(0, |order| size_of_val(order.features()) as u64)
    }
    /// Scratch bytes for `m` rows of inputs in that order.
    pub(crate) fn gathered(&self, m: usize) -> usize {
        if self.order.is_some() { gathered(m, self.spec.k, self.spec.x) } else { 0 }
    }
}

impl Plan {
    /// Plans every product of `checkpoint`. Layers nobody can serve are part of the plan; see
    /// [`Plan::require`].
    ///
    /// # Errors
    /// Damage of the checkpoint, as of [`Checkpoint::bind`], what the policy or the options name and does not
    /// exist, and FP8 inputs of a model without an FP8 weight.
    pub fn new(checkpoint: &Checkpoint, dispatch: &Dispatch, options: &PlanOptions) -> Result<Self> {
        let count = checkpoint.config().num_hidden_layers;
        let span = tracing::info_span!("plan", model = checkpoint.name(), layers = count, products = Empty);
        let _in = span.enter();
        let planner = Planner { checkpoint, dispatch, options };
        let layers = (0..count).map(|i| planner.layer(i)).collect::<Result<Vec<_>>>()?;
        let plan = Self { layers, head: planner.head()? };
        span.record("products", plan.products().count());
        let is_fp8 = |p: &Product| matches!(p.spec.activations, Activations::Fp8(_));
        if options.activations == ActivationRequest::Fp8 && !plan.products().any(is_fp8) {
            return Err(Error::new(Code::OverrideUnused, "FP8 activations would be those of no layer")
                .need("a layer with FP8 weights")
                .have(plan.schemas().join(", "))
                .fix("see `q4 inspect MODEL`, or leave --activations out"));
        }
        // Scales were looked at here and there in the files.
        checkpoint.release_files();
        Ok(plan)
    }

    /// Every product, first layer first, the head last.
    pub fn products(&self) -> impl Iterator<Item = &Product> {
        let head = match &self.head {
            HeadPlan::Product(p) => Some(&**p),
            HeadPlan::Dense { .. } => None,
        };
        self.layers.iter().flat_map(|l| [&l.qkv, &l.o, &l.gate_up, &l.down]).flatten().chain(head)
    }

    /// Layers on a path worse than the best that exists for them.
    pub fn downgraded(&self) -> usize {
        self.products().filter(|p| p.choice.as_ref().is_ok_and(|c| c.is_downgrade)).count()
    }

    /// Whether every layer is served, and everything that the user named serves something.
    ///
    /// # Errors
    /// The first layer that nobody can serve, with all reasons ([`Code::NoneEligible`],
    /// [`Code::DowngradeDenied`], [`Code::Ambiguous`], [`Code::UnknownBackend`]); [`Code::OverrideUnused`]
    /// for a backend that was named and would serve no layer.
    pub fn require(&self, dispatch: &Dispatch) -> Result<()> {
        let refused: Vec<_> =
            self.products().filter_map(|p| p.choice.as_ref().err().map(|e| (p, e))).collect();
        if let Some((_, first)) = refused.first() {
            let mut e = Error::from((*first).clone());
            if refused.len() > 1 {
                e = e.within(format!(
                    "{} of {} products cannot be served; the first",
                    refused.len(),
                    self.products().count()
                ));
            }
            return Err(e);
        }
        let policy = dispatch.policy();
        let four_bit = self.products().any(|p| p.spec.schema.is_packed());
        if policy.compute == q4_core::ComputePath::KernelOnly && !four_bit {
            return Err(Error::new(
                Code::NoneEligible,
                "no layer of this model is 4-bit, so no kernel would run",
            )
            .need("4-bit layers under --compute kernel-only")
            .have("a dense checkpoint")
            .fix("add --quantize nvfp4, or write a 4-bit checkpoint with `q4 quantize`"));
        }
        let serves = |name: &str| {
            self.products().any(|p| p.choice.as_ref().is_ok_and(|c| c.backend.descriptor().name == name))
        };
        for (glob, name) in policy
            .overrides
            .all
            .iter()
            .map(|n| ("*", n))
            .chain(policy.overrides.layers.iter().map(|(g, n)| (g.as_str(), n)))
        {
            if !serves(name) {
                return Err(Error::new(
                    Code::OverrideUnused,
                    format!("backend `{name}` would serve no layer of this model"),
                )
                .need(format!("at least one layer `{glob}` it can serve"))
                .have(format!("layers of {}", self.schemas().join(", ")))
                .fix(if four_bit {
                    "see `q4 explain MODEL`"
                } else {
                    "add --quantize nvfp4 or --quantize nf4"
                }));
            }
        }
        match policy.overrides.preferred.iter().find(|name| !serves(name)) {
            Some(name) => Err(self.unused(name)),
            None => Ok(()),
        }
    }

    /// A third party that was named serves nothing: for each kind of product, why.
    fn unused(&self, name: &str) -> Error {
        let mut reasons: Vec<String> = Vec::new();
        for p in self.products() {
            let lost = p.choice.iter().flat_map(|c| &c.rejected).filter(|r| r.backend == name);
            for reason in lost.flat_map(|r| &r.reasons) {
                let text = format!("{}: need {}; have {}", reason.code.as_str(), reason.need, reason.have);
                if !reasons.iter().any(|r| r.ends_with(&text)) {
                    reasons.push(format!("{}: {text}", p.spec.name()));
                }
            }
        }
        Error::new(Code::OverrideUnused, format!("plugin `{name}` would serve no layer of this model"))
            .need(format!("at least one product that `{name}` accepts"))
            .have(reasons.join("\n"))
            .fix("see `q4 explain MODEL`, or leave --plugin out")
    }

    fn schemas(&self) -> Vec<String> {
        let mut names: Vec<_> = self.products().map(|p| p.spec.schema.to_string()).collect();
        names.sort();
        names.dedup();
        names
    }
}

/// Element type of products' inputs: the CPU keeps f32, a GPU multiplies what its outputs have.
pub fn input_type(device: Device, dtype: DType) -> DType {
    if device == Device::Cpu { DType::F32 } else { dtype }
}

/// Element type of logits. Sixteen bits would make ties of near ones; on the CPU they are what `--dtype`
/// says, as ever.
pub fn head_type(device: Device, dtype: DType) -> DType {
    if device == Device::Cpu { dtype } else { DType::F32 }
}

struct Planner<'a> {
    checkpoint: &'a Checkpoint,
    dispatch: &'a Dispatch,
    options: &'a PlanOptions,
}

struct Part {
    name: String,
    n: usize,
    k: usize,
    schema: Q4Schema,
    activations: Activations,
    layout: &'static str,
    quantized_on_load: bool,
    order: Option<Order>,
    usual_inputs: bool,
    unscaled: bool,
}

impl Planner<'_> {
    fn layer(&self, i: usize) -> Result<LayerPlan> {
        let linears = names::linears(self.checkpoint.config(), i);
        Ok(LayerPlan {
            qkv: self.group(&linears[..3])?,
            o: self.group(&linears[3..4])?,
            gate_up: self.group(&linears[4..6])?,
            down: self.group(&linears[6..])?,
        })
    }

    fn head(&self) -> Result<HeadPlan> {
        Ok(match self.checkpoint.bind_head()? {
            Head::Tied => {
                HeadPlan::Dense { dtype: self.checkpoint.embedding_elements()?.dtype(), tied: true }
            }
            Head::Dense(stored) => HeadPlan::Dense { dtype: stored.dtype, tied: false },
            Head::Quantised(layer) => HeadPlan::Product(Box::new(self.product(vec![self.part(&layer)?]))),
        })
    }

    /// One product where all parts agree, else one each.
    fn group(&self, members: &[(String, usize, usize)]) -> Result<Vec<Product>> {
        let bind = |(name, n, k): &(String, usize, usize)| self.part(&self.checkpoint.bind(name, *n, *k)?);
        let parts = members.iter().map(bind).collect::<Result<Vec<_>>>()?;
        let overrides = &self.dispatch.policy().overrides;
        let bound = |p: &Part| overrides.of(&p.name, p.schema.is_packed(), true).map(str::to_owned);
        let first = &parts[0];
        let alike = parts.iter().all(|p| {
            p.schema == first.schema
                && p.activations == first.activations
                && p.layout == first.layout
                && p.order == first.order
                && bound(p) == bound(first)
        });
        Ok(match alike {
            true => vec![self.product(parts)],
            false => parts.into_iter().map(|p| self.product(vec![p])).collect(),
        })
    }

    fn usual(&self, d: &Layer<'_>) -> Activations {
        if self.options.device == Device::Cpu { d.usual() } else { d.declared }
    }

    fn part(&self, d: &Layer<'_>) -> Result<Part> {
        let stored = d.detected.schema;
        let target = self.options.quantize.as_ref().filter(|_| !stored.is_packed());
        let schema = target.map_or(stored, |target| target.schema());
        let activations = match self.options.activations {
            ActivationRequest::Auto => self.usual(d),
            ActivationRequest::Declared => d.declared,
            ActivationRequest::Native => Activations::Native,
            ActivationRequest::Int8 => Activations::Int8,
            ActivationRequest::Nvfp4 if target.is_some() => {
                Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None })
            }
            ActivationRequest::Nvfp4 => Activations::Nvfp4(d.nvfp4_activations()),
            ActivationRequest::Fp8 if schema.activations().contains(&"fp8") => {
                Activations::Fp8(d.fp8_activations()?)
            }
            ActivationRequest::Fp8 => self.usual(d),
        };
        // An activation format is about 4-bit products; a dense matrix is multiplied as it is.
        let activations = if schema.is_packed() { activations } else { Activations::Native };
        Ok(Part {
            name: d.name.clone(),
            n: d.detected.n,
            k: d.detected.k,
            schema,
            activations,
            layout: d.detected.layout.as_str(),
            quantized_on_load: target.is_some(),
            order: d.order.clone(),
            usual_inputs: !self.options.activations.is_named()
                && activations == d.usual()
                && activations != d.declared,
            unscaled: !self.options.activations.is_named() && d.lacks_input_scale(),
        })
    }

    fn product(&self, parts: Vec<Part>) -> Product {
        let first = &parts[0];
        let spec = LinearSpec {
            schema: first.schema,
            k: first.k,
            max_m: self.options.max_rows,
            x: input_type(self.options.device, self.options.dtype),
            y: if first.name == self.checkpoint.config().arch.names.head {
                head_type(self.options.device, self.options.dtype)
            } else {
                self.options.dtype
            },
            activations: first.activations,
            device: self.options.device,
            ops: self.options.ops,
            segments: parts.iter().map(|p| SegmentSpec { name: p.name.clone(), rows: p.n }).collect(),
        };
        Product {
            choice: self.dispatch.select(&spec),
            layout: first.layout,
            quantized_on_load: first.quantized_on_load,
            order: first.order.clone(),
            usual_inputs: first.usual_inputs,
            unscaled: parts.iter().filter(|p| p.unscaled).count(),
            spec,
        }
    }
}
