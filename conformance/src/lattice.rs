//! The problems of the suite: every encoding, every activation format, and the shapes where kernels break, one row and
//! many, one below, on and above every tile.
use crate::measure::Problem;
use crate::stored::{Stored, mix, uniform};
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    ActGlobal, ActQuant, Activations, Convention, DType, ExecPath, GlobalScale, NibbleOrder, Q4Schema,
    Result, Rule, ScaleLayout,
};

/// Every encoding a checkpoint can have, block sizes aside.
pub const SCHEMAS: [Q4Schema; 9] = [
    Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None },
    Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Multiply) },
    Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Divide) },
    Q4Schema::Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, global: Some(Convention::Multiply) },
    Q4Schema::Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: None },
    Q4Schema::Nf4 { nibble_order: NibbleOrder::LowFirst, block: 128, nested: None },
    Q4Schema::Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: Some(256) },
    Q4Schema::Dense { dtype: DType::BF16 },
    Q4Schema::Dense { dtype: DType::F32 },
];

/// Out features.
pub(crate) const N: [usize; 13] = [1, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 130];
/// In features, all multiples of 16.
pub(crate) const K: [usize; 14] = [16, 32, 48, 64, 80, 112, 128, 144, 192, 240, 256, 272, 512, 1040];
/// In features that no block of 16 divides; NF4 and dense weights have them.
pub(crate) const RAGGED_K: [usize; 6] = [17, 31, 33, 63, 72, 100];
/// Rows of a call.
pub(crate) const M: [usize; 11] = [1, 2, 4, 5, 8, 16, 17, 33, 64, 65, 129];

/// Encodings of a schema that forward products are tried with.
pub(crate) fn encodings(schema: &str) -> Vec<Q4Schema> {
    let mut all = SCHEMAS.to_vec();
    all.push(Q4Schema::Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, global: None });
    all.push(Q4Schema::Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, global: Some(Convention::Divide) });
    all.push(Q4Schema::Nf4 { nibble_order: NibbleOrder::HighFirst, block: 32, nested: None });
    all.push(Q4Schema::Nf4 { nibble_order: NibbleOrder::LowFirst, block: 4096, nested: None });
    all.push(Q4Schema::Nf4 { nibble_order: NibbleOrder::LowFirst, block: 128, nested: Some(256) });
    all.push(Q4Schema::Dense { dtype: DType::F16 });
    all.retain(|s| s.id().name == schema);
    all
}

/// The element type that a path surely takes: rounded weights are for bf16, everything else has f32.
pub(crate) fn io_of(path: ExecPath) -> DType {
    if path == ExecPath::FusedRounded { DType::BF16 } else { DType::F32 }
}

/// Activation formats of one kind: `native`, `int8`, or each quantiser of `nvfp4`.
pub(crate) fn quantizers(kind: &str) -> Vec<Activations> {
    let fixed = |g: Result<GlobalScale>| g.map_or(ActGlobal::None, ActGlobal::Static);
    match kind {
        "native" => vec![Activations::Native],
        "int8" => vec![Activations::Int8],
        _ => [
            (Rule::ModelOpt, ActGlobal::None),
            (Rule::TorchAo, ActGlobal::PerCall),
            (Rule::CompressedTensors, ActGlobal::PerCall),
            (Rule::Runtime, ActGlobal::None),
            (Rule::ModelOpt, fixed(GlobalScale::multiply(0.0021))),
            (Rule::CompressedTensors, fixed(GlobalScale::divide(390.0))),
            (Rule::TransformerEngine, ActGlobal::PerCall),
        ]
        .map(|(rule, global)| Activations::Nvfp4(ActQuant { rule, global }))
        .to_vec(),
    }
}

/// Activation formats that make sense for an encoding.
pub fn activations(schema: &Q4Schema) -> Vec<Activations> {
    let kinds: &[&str] = match schema {
        Q4Schema::Dense { .. } => &["native"],
        Q4Schema::Nf4 { .. } => &["native", "int8"],
        _ => &["native", "int8", "nvfp4"],
    };
    kinds.iter().flat_map(|kind| quantizers(kind)).collect()
}

/// Everything that makes one product.
#[derive(Clone, Debug)]
pub struct Sketch {
    /// Encoding.
    pub schema: Q4Schema,
    /// Activation format.
    pub activations: Activations,
    /// Type of input and output.
    pub io: DType,
    /// Out features of the segments.
    pub rows: Vec<usize>,
    /// In features.
    pub k: usize,
    /// Rows of the call.
    pub m: usize,
    /// Seed of all values.
    pub seed: u64,
}

impl Sketch {
    /// A problem in one segment.
    pub fn plain(
        schema: Q4Schema,
        activations: Activations,
        io: DType,
        [n, k, m]: [usize; 3],
        seed: u64,
    ) -> Self {
        Self { schema, activations, io, rows: vec![n], k, m, seed }
    }
    /// Identity: `nvfp4.row-major.multiply/int8/bfloat16/n17.k80.m3/s0`.
    pub fn name(&self) -> String {
        let rows: Vec<_> = self.rows.iter().map(ToString::to_string).collect();
        let (schema, format, io) = (label(&self.schema), act_label(&self.activations), self.io);
        format!("{schema}/{format}/{io}/n{}.k{}.m{}/s{}", rows.join("+"), self.k, self.m, self.seed)
    }
    /// Its weight.
    pub fn weight(&self) -> Stored {
        Stored::random(self.schema, &self.rows, self.k, self.io != DType::F32, self.seed)
    }
    /// Its input `[m, k]`, rounded to `io`: heavy-tailed, with zeros, blocks of zeros and, from three rows on, a second
    /// row of zeros. Not the last: that is the one that kernels lose.
    pub fn input(&self) -> Vec<f32> {
        let is_zero = |i: usize| self.m > 2 && i / self.k == 1;
        let value = |i: usize| if is_zero(i) { 0.0 } else { activation(self.seed, i as u64) };
        let raw: Vec<f32> = (0..self.m * self.k).map(value).collect();
        IoBuffer::new(self.io, &raw).to_f32()
    }
    /// Hands the problem to `body`.
    pub fn with<R>(&self, body: impl FnOnce(&Problem<'_>) -> Result<R>) -> Result<R> {
        self.weight().lend(|w| {
            body(&Problem {
                name: self.name(),
                weight: *w,
                x: self.input(),
                m: self.m,
                activations: self.activations,
                io: self.io,
                recorded: None,
            })
        })
    }
}

/// Products of one encoding and activation format: `count` for each type of input and output, walked so that all pairs
/// of n, k and m come up over a few encodings.
pub(crate) fn sketches(schema: Q4Schema, activations: Activations, count: usize, seed: u64) -> Vec<Sketch> {
    // Neighbouring encodings begin at different places.
    let start = (hash(&label(&schema)) ^ hash(&act_label(&activations))) as usize % 2002;
    let mut all = Vec::new();
    for (t, io) in [DType::F32, DType::BF16, DType::F16].into_iter().enumerate() {
        for j in 0..count {
            let at = start + t * 667 + j;
            let is_ragged =
                activations == Activations::Native && !matches!(schema, Q4Schema::Nvfp4 { .. }) && j % 4 == 3;
            let k = if is_ragged { RAGGED_K[at / 4 % RAGGED_K.len()] } else { K[at % K.len()] };
            let n = N[at % N.len()];
            let rows = match at % 3 {
                0 if n > 3 => vec![n / 3, n - n / 3],
                1 if n > 40 => vec![n - 33, 16, 17],
                _ => vec![n],
            };
            all.push(Sketch { schema, activations, io, rows, k, m: M[at % M.len()], seed });
        }
    }
    all
}

/// Hands problems of one encoding to `visit`: every activation format that makes sense, every type.
/// The name of a problem holds all that makes it.
pub fn each(schema: Q4Schema, visit: &mut dyn FnMut(&Problem<'_>) -> Result<()>) -> Result<()> {
    for activations in activations(&schema) {
        for sketch in sketches(schema, activations, 14, 0) {
            // A backend may refuse what no block of 16 divides; callers of this function count refusals as failures.
            if sketch.k % 16 == 0 {
                sketch.with(&mut *visit)?;
            }
        }
    }
    Ok(())
}

/// Identity of an encoding: `nvfp4.swizzled.divide`, `nf4.high.64`, `nf4-dq.low.128`, `dense.float16`.
pub(crate) fn label(schema: &Q4Schema) -> String {
    match schema {
        Q4Schema::Nvfp4 { scale_layout, global } => {
            let layout = if *scale_layout == ScaleLayout::RowMajor { "row-major" } else { "swizzled" };
            let global = match global {
                None => "single",
                Some(Convention::Multiply) => "multiply",
                Some(Convention::Divide) => "divide",
            };
            format!("nvfp4.{layout}.{global}")
        }
        Q4Schema::Nf4 { nibble_order, block, .. } => {
            let order = if *nibble_order == NibbleOrder::HighFirst { "high" } else { "low" };
            format!("{}.{order}.{block}", schema.id().name)
        }
        Q4Schema::Dense { dtype } => format!("dense.{dtype}"),
        other => format!("{other:?}"),
    }
}

/// Identity of an activation format: `native`, `int8`, `nvfp4.torchao.per-call`.
pub(crate) fn act_label(a: &Activations) -> String {
    match a {
        Activations::Nvfp4(q) => {
            let global = match q.global {
                ActGlobal::None => "single".to_owned(),
                ActGlobal::PerCall => "per-call".to_owned(),
                ActGlobal::Static(g) => format!("static-{}", g.value()),
            };
            format!("nvfp4.{}.{global}", q.rule.as_str())
        }
        other => other.as_str().to_owned(),
    }
}

fn activation(seed: u64, i: u64) -> f32 {
    let u = mix(seed << 20 ^ i ^ 0xa5a5);
    let v = (uniform(u) - 0.5) * 2.0;
    match (u & 31, i / 16 % 7) {
        (0, _) | (_, 6) => 0.0,
        (1, _) => v * 20.0,
        _ => v,
    }
}

/// FNV-1a, so that the order of an enumeration never decides what is in a case.
pub(crate) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_identities() {
        let mut names = BTreeSet::new();
        let mut count = 0;
        for schema in SCHEMAS {
            for a in activations(&schema) {
                let all: BTreeSet<_> = sketches(schema, a, 60, 7).iter().map(Sketch::name).collect();
                count += all.len();
                names.extend(all);
            }
        }
        assert_eq!(names.len(), count);
        assert!(names.iter().all(|n| n.ends_with("/s7")));
    }

    #[test]
    fn the_walk_meets_every_extent() {
        let schema = Q4Schema::Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: None };
        let all = sketches(schema, Activations::Native, 60, 0);
        for n in N {
            assert!(all.iter().any(|s| s.rows.iter().sum::<usize>() == n), "n = {n}");
        }
        for k in K.into_iter().chain(RAGGED_K) {
            assert!(all.iter().any(|s| s.k == k), "k = {k}");
        }
        for m in M {
            assert!(all.iter().any(|s| s.m == m), "m = {m}");
        }
        assert!(all.iter().any(|s| s.rows.len() == 3));
    }
}
