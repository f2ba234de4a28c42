//! How far a claim reaches: found by asking, proved by the cases, written into the certificate, and held to
//! ever after.
//!
//! A backend never lists its claims. It is asked, product by product, so that a claim and a refusal cannot
//! disagree.
//! A backend that computes less than everything is no worse for it. What it accepts is described by a few
//! numbers here; cases are drawn inside them, a refusal inside them is a failure, and a product outside them
//! is refused for it.
use crate::claim::Claim;
use crate::lattice::{self, ACTIVATIONS, Sketch};
use q4_core::formats;
use q4_core::{
    Activations, DType, Device, ExecPath, HostEnv, LinearSpec, OpSet, Q4Backend, Q4Schema, Reject,
    RejectCode, SegmentSpec, Verdict,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Largest number of rows of a call that anybody is asked about; who takes it takes any.
const MANY_ROWS: usize = 1 << 20;
/// Types of inputs and outputs that have claims.
pub(crate) const IO: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
/// Factors that out or in features may have to have, ascending; 1 only where nothing has blocks along k.
const FACTORS: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
/// Stands for every encoding of a schema, or every rule of an activation format.
const ANY: &str = "any";
/// What a factor is tried with: whoever needs more refuses one of these.
const TIMES: [usize; 6] = [1, 2, 3, 5, 7, 11];
/// Out and in features that some kind of backend may begin with, the smallest first.
const FIRST: [[usize; 2]; 4] = [[128, 256], [1024, 1024], [256, 4096], [4096, 4096]];

/// A claim and how far it reaches. The cases prove it: all inside is accepted and right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Proof {
    /// The kind of product.
    pub claim: Claim,
    /// The products of that kind.
    pub limits: Limits,
}

impl Proof {
    /// Whether it is about the kind of product of a spec.
    pub fn is_about(&self, spec: &LinearSpec, path: ExecPath) -> bool {
        let c = &self.claim;
        (c.schema, c.activations, c.device, c.path)
            == (spec.schema.id().name, spec.activations.as_str(), spec.device, path)
    }
}

/// Every kind of product that `backend` agrees to compute on `device`.
pub fn claims(backend: &dyn Q4Backend, env: &HostEnv, device: Device) -> Vec<Claim> {
    proofs(backend, env, device).into_iter().map(|p| p.claim).collect()
}

/// Every kind of product that `backend` agrees to compute on `device`, each with its limits: one product
/// suffices, everything else is asked, and then measured.
pub fn proofs(backend: &dyn Q4Backend, env: &HostEnv, device: Device) -> Vec<Proof> {
    let mut offers: Vec<_> = backend.descriptor().offers.clone();
    offers.sort();
    offers.dedup();
    let mut found = Vec::new();
    for schema in formats::names() {
        for (_, path) in offers.iter().filter(|(name, _)| name == schema) {
            for activations in ACTIVATIONS {
                if let Some(limits) = Limits::find(backend, env, (schema, activations), *path, device) {
                    found.push(Proof { claim: Claim { schema, activations, device, path: *path }, limits });
                }
            }
        }
    }
    found
}

/// The products of one claim that a backend computes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Encodings of the weight, as cases spell them: `nvfp4.row-major.multiply`, `nf4.high.64`; or `any`.
    pub encodings: Vec<String>,
    /// Rules of the activation format, as cases spell them: `nvfp4.modelopt.single`; or `any`.
    pub quantizers: Vec<String>,
    /// Types of input and output, which are the same, each with the operations it has.
    pub types: Vec<TypeLimits>,
    /// Row segments of one weight, at most; 3 stands for any number.
    pub segments: usize,
    /// Out features of every segment are a multiple of this.
    pub n_multiple: usize,
    /// In features are a multiple of this.
    pub k_multiple: usize,
    /// Rows of a call, at most; none for any number.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub max_m: Option<usize>,
}

/// Operations for one element type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TypeLimits {
    /// `float32`, `float16` or `bfloat16`.
    pub dtype: String,
    /// `backward_input` is there besides `forward`.
    pub backward: bool,
    /// `dequantize` is there besides `forward`.
    pub dequantize: bool,
}

impl TypeLimits {
    fn ops(&self) -> OpSet {
        let part = |there: bool, op| if there { op } else { OpSet(0) };
        OpSet::FORWARD
            .with(part(self.backward, OpSet::BACKWARD_INPUT))
            .with(part(self.dequantize, OpSet::DEQUANTIZE))
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let types: Vec<_> = self.types.iter().map(TypeLimits::to_string).collect();
        write!(f, "{}", types.join(", "))?;
        for list in [&self.encodings, &self.quantizers] {
            if !list.iter().any(|name| name == ANY) {
                write!(f, "; {}", list.join(", "))?;
            }
        }
        write!(f, "; n % {} == 0, k % {} == 0", self.n_multiple, self.k_multiple)?;
        match self.segments {
            3.. => {}
            count => write!(f, "; at most {count} segments")?,
        }
        self.max_m.map_or(Ok(()), |m| write!(f, "; at most {m} rows"))
    }
}

impl fmt::Display for TypeLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |there: bool, name: &'static str| if there { name } else { "" };
        let (backward, dequantize) = (part(self.backward, "+backward"), part(self.dequantize, "+dequantize"));
        write!(f, "{}{backward}{dequantize}", self.dtype)
    }
}

/// Asks about one product at a time.
struct Question<'a> {
    backend: &'a dyn Q4Backend,
    env: &'a HostEnv,
    path: ExecPath,
    spec: LinearSpec,
}

impl Question<'_> {
    fn accepts(&self, edit: impl FnOnce(&mut LinearSpec)) -> bool {
        let mut spec = self.spec.clone();
        edit(&mut spec);
        self.backend.can_prepare(&spec, self.path, self.env).is_ok()
    }
}

/// The least k that is a multiple of `factor` and of the blocks of `schema`.
fn whole(factor: usize, schema: &Q4Schema) -> usize {
    let block = schema.k_block();
    (1..=block).map(|i| i * factor).find(|k| k.is_multiple_of(block)).unwrap_or(factor)
}

impl Limits {
    /// What `backend` says it computes of one kind of product; `None` when that is nothing.
    pub fn find(
        backend: &dyn Q4Backend,
        env: &HostEnv,
        (schema, activations): (&str, &str),
        path: ExecPath,
        device: Device,
    ) -> Option<Self> {
        let (encodings, quantizers) = (formats::encodings(schema), lattice::quantizers(activations));
        let mut q = Question { backend, env, path, spec: plain_spec(encodings[0], quantizers[0], device) };
        q.spec = first(&q, &encodings, &quantizers)?;
        let (encoding, base) = (q.spec.schema, q.spec.clone());
        // Blocks along k, of the weight or of the input, leave no smaller factor: the shortest that are
        // served.
        let served = encodings.iter().filter(|e| q.accepts(|s| s.schema = **e));
        let shortest = *served.min_by_key(|e| e.k_block()).unwrap_or(&encoding);
        let blocks = [shortest.k_block(), if activations == "native" { 1 } else { 16 }];
        let rows = |s: &mut LinearSpec, n: usize| s.segments[0].rows = n;
        let n_multiple = FACTORS.into_iter().find(|f| TIMES.iter().all(|t| q.accepts(|s| rows(s, f * t))))?;
        let k_multiple = FACTORS
            .into_iter()
            .filter(|f| blocks.iter().all(|block| f % block == 0))
            .find(|f| TIMES.iter().all(|t| q.accepts(|s| (s.schema, s.k) = (shortest, f * t))))?;
        // Of two sizes: who serves a thing in one of them says that it is served, and must then do so in all.
        let served = |edit: &dyn Fn(&mut LinearSpec)| {
            q.accepts(|s| edit(s))
                || q.accepts(|s| {
                    s.max_m = 1;
                    s.segments[0].rows = n_multiple;
                    edit(s);
                    s.k = whole(k_multiple, &s.schema);
                })
        };
        let types: Vec<_> = IO
            .into_iter()
            .filter(|io| served(&|s| (s.x, s.y) = (*io, *io)))
            .map(|io| {
                let has = |op| served(&|s| (s.x, s.y, s.ops) = (io, io, OpSet::FORWARD.with(op)));
                let (backward, dequantize) = (has(OpSet::BACKWARD_INPUT), has(OpSet::DEQUANTIZE));
                TypeLimits { dtype: io.as_str().into(), backward, dequantize }
            })
            .collect();
        let takes_segments =
            |count: usize| served(&|s| s.segments = segments(&vec![s.segments[0].rows; count], 0));
        let segments = (2..=3).take_while(|count| takes_segments(*count)).last().unwrap_or(1);
        let max_m = (!q.accepts(|s| s.max_m = MANY_ROWS)).then(|| {
            let (mut yes, mut no) = (base.max_m, MANY_ROWS);
            while no - yes > 1 {
                let m = yes.midpoint(no);
                if q.accepts(|s| s.max_m = m) { yes = m } else { no = m }
            }
            yes
        });
        let is_served = |e: &&Q4Schema| **e == encoding || served(&|s| s.schema = **e);
        Some(Self {
            encodings: listed(encodings.iter().map(|e| (e.label(), is_served(&e)))),
            quantizers: listed(
                quantizers.iter().map(|a| (lattice::act_kind(a), served(&|s| s.activations = *a))),
            ),
            types,
            segments,
            n_multiple,
            k_multiple,
            max_m,
        })
    }

    /// Whether nothing is left out of the products of `schema`.
    pub fn is_everything(&self, schema: &str) -> bool {
        let block = formats::encodings(schema).iter().map(|s| s.k_block()).min().unwrap_or(1).max(16);
        let is_any = |list: &[String]| list.iter().any(|name| name == ANY);
        let all_types = self.types.len() == IO.len() && self.types.iter().all(|t| t.backward && t.dequantize);
        is_any(&self.encodings)
            && is_any(&self.quantizers)
            && all_types
            && self.segments >= 3
            && self.n_multiple == 1
            && self.k_multiple <= block
            && self.max_m.is_none()
    }

    /// Every reason why a product is outside.
    ///
    /// # Errors
    /// As above: `conformance-missing`, each with what was proved.
    pub fn admit(&self, spec: &LinearSpec) -> Verdict {
        let mut reasons = Vec::new();
        let mut outside = |need: String, have: String| {
            reasons.push(Reject::new(RejectCode::ConformanceMissing, format!("certified: {need}"), have));
        };
        for (proved, have) in
            [(&self.encodings, spec.schema.label()), (&self.quantizers, lattice::act_kind(&spec.activations))]
        {
            if !proved.iter().any(|p| p == ANY || *p == have) {
                outside(proved.join(", "), have);
            }
        }
        let of = |d: DType| self.types.iter().find(|t| t.dtype == d.as_str());
        let types: Vec<_> = self.types.iter().map(|t| t.dtype.as_str()).collect();
        for (name, dtype) in [("x", spec.x), ("y", spec.y)] {
            match of(dtype) {
                None => outside(format!("{name} of {}", types.join(", ")), dtype.to_string()),
                Some(t) if !t.ops().contains(spec.ops) => {
                    outside(
                        format!("operations {:#05b} with {dtype}", t.ops().0),
                        format!("{:#05b}", spec.ops.0),
                    );
                }
                Some(_) => {}
            }
        }
        if spec.segments.len() > self.segments && self.segments < 3 {
            outside(format!("at most {} segments", self.segments), spec.segments.len().to_string());
        }
        if let Some(s) = spec.segments.iter().find(|s| s.rows % self.n_multiple != 0) {
            outside(format!("out features % {} == 0", self.n_multiple), s.rows.to_string());
        }
        if spec.k % self.k_multiple != 0 {
            outside(format!("in features % {} == 0", self.k_multiple), spec.k.to_string());
        }
        if let Some(max) = self.max_m.filter(|max| spec.max_m > *max) {
            outside(format!("at most {max} rows"), spec.max_m.to_string());
        }
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }

    /// The nearest product inside: the same one where it is inside already.
    pub(crate) fn fit(&self, mut sketch: Sketch) -> Sketch {
        let up = |n: usize, factor: usize| n.max(1).next_multiple_of(factor);
        if self.segments < sketch.rows.len().min(3) {
            let n = sketch.rows.iter().sum();
            sketch.rows = if self.segments == 1 { vec![n] } else { vec![n - n / 2, n / 2] };
        }
        sketch.rows.iter_mut().for_each(|n| *n = up(*n, self.n_multiple));
        sketch.k = up(sketch.k, whole(self.k_multiple, &sketch.schema));
        if !self.types.iter().any(|t| t.dtype == sketch.io.as_str())
            && let Some(io) = IO.into_iter().find(|io| self.types.iter().any(|t| t.dtype == io.as_str()))
        {
            sketch.io = io;
        }
        if let Some(max) = self.max_m {
            (sketch.m, sketch.max_m) = (sketch.m.min(max), sketch.max_m.min(max));
        }
        sketch
    }

    /// Whether no encoding is left out.
    pub(crate) fn is_any_encoding(&self) -> bool {
        self.encodings.iter().any(|name| name == ANY)
    }

    /// Encodings of a claim that are inside.
    pub(crate) fn encodings(&self, claim: &Claim) -> Vec<Q4Schema> {
        let mut all = formats::encodings(claim.schema);
        all.retain(|e| self.encodings.iter().any(|p| p == ANY || *p == e.label()));
        all
    }

    /// Activation formats of a claim that are inside.
    pub(crate) fn quantizers(&self, claim: &Claim) -> Vec<Activations> {
        let mut all = lattice::quantizers(claim.activations);
        all.retain(|a| self.quantizers.iter().any(|p| p == ANY || *p == lattice::act_kind(a)));
        all
    }

    /// Whether an operation is there, with some type or with this one.
    pub(crate) fn has(&self, op: OpSet, io: Option<DType>) -> bool {
        let of = |t: &&TypeLimits| io.is_none_or(|io| t.dtype == io.as_str());
        self.types.iter().filter(of).any(|t| t.ops().contains(op))
    }
}

/// The names that are served; [`ANY`] when all are.
fn listed(all: impl Iterator<Item = (String, bool)>) -> Vec<String> {
    let (served, refused): (Vec<_>, Vec<_>) = all.partition(|(_, is_served)| *is_served);
    if refused.is_empty() { vec![ANY.into()] } else { served.into_iter().map(|(name, _)| name).collect() }
}

/// The first product that is accepted: small shapes first, then other types, encodings and activation
/// formats.
fn first(q: &Question<'_>, encodings: &[Q4Schema], quantizers: &[Activations]) -> Option<LinearSpec> {
    let mut all = FIRST.into_iter().flat_map(|shape| [16, 1].map(|m| (shape, m)));
    let place = |([n, k], m): ([usize; 2], usize)| {
        encodings.iter().find_map(|schema| {
            quantizers.iter().find_map(|activations| {
                IO.into_iter().find_map(|io| {
                    let mut spec = plain_spec(*schema, *activations, q.spec.device);
                    (spec.x, spec.y, spec.k, spec.max_m) = (io, io, k, m);
                    spec.segments[0].rows = n;
                    q.accepts(|s| s.clone_from(&spec)).then_some(spec)
                })
            })
        })
    };
    all.find_map(place)
}

/// A shape that every backend has: the smallest that any tile divides.
pub(crate) fn plain_spec(schema: Q4Schema, activations: Activations, device: Device) -> LinearSpec {
    LinearSpec {
        segments: segments(&[128], 0),
        schema,
        k: 256,
        max_m: 16,
        x: DType::F32,
        y: DType::F32,
        activations,
        device,
        ops: OpSet::FORWARD,
    }
}

/// Segments with the names that models have: nothing tells a library that it is tested.
pub(crate) fn segments(rows: &[usize], seed: u64) -> Vec<SegmentSpec> {
    let word = crate::stored::mix(seed ^ rows.iter().fold(7, |h, r| h * 31 + *r as u64));
    let names: &[&str] = match (rows.len(), word % 2) {
        (1, 0) => &["self_attn.o_proj"],
        (1, _) => &["mlp.down_proj"],
        (2, _) => &["mlp.gate_proj", "mlp.up_proj"],
        _ => &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    };
    let layer = word / 2 % 94;
    let models = ["model.layers", "model.layers", "model.language_model.layers", "transformer.h"];
    let model = models[(word >> 20) as usize % models.len()];
    let name = |i: usize| match (rows.len(), word >> 30 & 7) {
        (1, 0) => "lm_head".to_owned(),
        _ => format!("{model}.{layer}.{}", names[i % names.len()]),
    };
    rows.iter().enumerate().map(|(i, &rows)| SegmentSpec { name: name(i), rows }).collect()
}
