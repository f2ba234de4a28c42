//! The problems of the suite: every encoding, every activation format, and the shapes where kernels break,
//! one row and many, one below, on and above every tile.
use crate::Claim;
use crate::stored::{Stored, mix, uniform};
use q4_core::formats::KINDS;
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    ActGlobal, ActQuant, Activations, DType, ExecPath, Fp8Inputs, GlobalScale, Q4Schema, Q4Weight, Result,
    Rule,
};

/// A product with its operands.
pub struct Problem<'a> {
    /// Name, which is also its seed where it has one.
    pub name: String,
    /// The stored weight.
    pub weight: Q4Weight<'a>,
    /// `[m, k]`, already representable in `io`.
    pub x: Vec<f32>,
    /// Rows.
    pub m: usize,
    /// Most rows of a call that the weight is prepared for.
    pub max_m: usize,
    /// Activation format.
    pub activations: Activations,
    /// Type of input and output.
    pub io: DType,
    /// Result recorded elsewhere, `[m, n]`; it must agree with our own exact product.
    pub recorded: Option<Vec<f64>>,
}

/// Every encoding a checkpoint can have, block sizes aside.
pub fn usual() -> Vec<Q4Schema> {
    KINDS.iter().flat_map(|kind| kind.usual).copied().collect()
}

/// Out features.
pub(crate) const N: [usize; 13] = [1, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 130];
/// In features, all multiples of 16.
pub(crate) const K: [usize; 14] = [16, 32, 48, 64, 80, 112, 128, 144, 192, 240, 256, 272, 512, 1040];
/// In features that no block of 16 divides; NF4 and dense weights have them.
pub(crate) const RAGGED_K: [usize; 6] = [17, 31, 33, 63, 72, 100];
/// Rows of a call.
pub(crate) const M: [usize; 11] = [1, 2, 4, 5, 8, 16, 17, 33, 64, 65, 129];

/// The element type that a path surely takes: rounded weights are for bf16, everything else has f32.
pub(crate) fn io_of(path: ExecPath) -> DType {
    if path == ExecPath::FusedRounded { DType::BF16 } else { DType::F32 }
}

/// Kinds of activation formats, as claims name them.
pub(crate) const ACTIVATIONS: [&str; 4] = ["native", "int8", "nvfp4", "fp8"];

/// Activation formats of one kind: each quantiser of `nvfp4`, each scale of `fp8`.
pub(crate) fn quantizers(kind: &str) -> Vec<Activations> {
    let fixed = |g: Result<GlobalScale>| g.map_or(ActGlobal::None, ActGlobal::Static);
    match kind {
        "native" => vec![Activations::Native],
        "int8" => vec![Activations::Int8],
        // A stored scale that some inputs are beyond.
        "fp8" => [Some(Fp8Inputs::PerRow), Some(Fp8Inputs::PerBlock), small().ok().map(Fp8Inputs::Static)]
            .into_iter()
            .flatten()
            .map(Activations::Fp8)
            .collect(),
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

/// A stored scale of FP8 inputs: those past 14 become 14.
fn small() -> Result<GlobalScale> {
    GlobalScale::multiply(0.03125)
}

/// Quantisers that models ask for besides: tried, and not part of what a claim is described by.
pub(crate) fn rarer_quantizers() -> Vec<Activations> {
    let fixed = |g: Result<GlobalScale>| g.map_or(ActGlobal::None, ActGlobal::Static);
    [
        (Rule::TorchAo, ActGlobal::None),
        (Rule::TorchAo, fixed(GlobalScale::multiply(0.0017))),
        (Rule::CompressedTensors, ActGlobal::None),
        (Rule::ModelOpt, ActGlobal::PerCall),
        (Rule::ModelOpt, fixed(GlobalScale::multiply(0.4))),
        (Rule::Runtime, fixed(GlobalScale::multiply(0.0031))),
        (Rule::TransformerEngine, ActGlobal::None),
        (Rule::TransformerEngine, fixed(GlobalScale::divide(411.0))),
    ]
    .map(|(rule, global)| Activations::Nvfp4(ActQuant { rule, global }))
    .to_vec()
}

/// Activation formats that make sense for an encoding.
pub fn activations(schema: &Q4Schema) -> Vec<Activations> {
    schema.activations().iter().flat_map(|kind| quantizers(kind)).collect()
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
    /// Most rows of a call that the weight is prepared for.
    pub max_m: usize,
    /// What the values of the input are like.
    pub values: Values,
    /// Seed of all values.
    pub seed: u64,
}

/// Magnitudes of an input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Values {
    /// Heavy-tailed around 1, with zeros and blocks of zeros.
    #[default]
    Usual,
    /// The same times 4096: results pass what f16 can hold.
    Large,
    /// The same in f32 and bf16 times 2^60.
    Huge,
    /// The same divided by 2^14; in f32 and bf16 by 2^60.
    Tiny,
    /// Smaller than the smallest normal number of the type.
    Subnormal,
    /// Blocks of 16 whose magnitudes are up to 2^18 apart, and rows that are as far apart.
    Uneven,
    /// Halfway between two codes of the format, under scales that are codes themselves or halfway between two
    /// of those.
    Ties,
    /// Nothing below zero.
    Positive,
    /// Zeros alone.
    Zero,
}

impl Values {
    /// All but the usual ones.
    pub(crate) const EXTREME: [Self; 8] = [
        Self::Large,
        Self::Huge,
        Self::Tiny,
        Self::Subnormal,
        Self::Uneven,
        Self::Ties,
        Self::Positive,
        Self::Zero,
    ];
    const fn as_str(self) -> &'static str {
        ["", "large", "huge", "tiny", "subnormal", "uneven", "ties", "positive", "zero"][self as usize]
    }
    /// What element `i` of row `r` is multiplied by.
    fn scale(self, io: DType, seed: u64, r: usize, i: usize) -> f32 {
        let is_half = io == DType::F16;
        match self {
            Self::Usual | Self::Ties | Self::Positive => 1.0,
            Self::Zero => 0.0,
            Self::Large => {
                if is_half {
                    1024.0
                } else {
                    4096.0
                }
            }
            Self::Huge => {
                if is_half {
                    3000.0
                } else {
                    2f32.powi(60)
                }
            }
            Self::Tiny => 2f32.powi(if is_half { -14 } else { -60 }),
            Self::Subnormal => 2f32.powi(if is_half { -20 } else { -133 }),
            Self::Uneven => {
                let word = mix(seed ^ (r as u64) << 32 ^ (i / 16) as u64);
                2f32.powi((word % 10) as i32 - 9) * 2f32.powi((mix(seed ^ r as u64) % 10) as i32 - 9)
            }
        }
    }
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
        Self { schema, activations, io, rows: vec![n], k, m, max_m: m, values: Values::Usual, seed }
    }
    /// Identity: `nvfp4.row-major.multiply/int8/bfloat16/n17.k80.m3/s0`; `m3of64` of a weight for up to 64
    /// rows.
    pub fn name(&self) -> String {
        let rows: Vec<_> = self.rows.iter().map(ToString::to_string).collect();
        let (schema, format, io) = (self.schema.label(), act_label(&self.activations), self.io);
        let of = if self.max_m == self.m { String::new() } else { format!("of{}", self.max_m) };
        let values = self.values.as_str();
        let dot = if values.is_empty() { "" } else { "." };
        format!(
            "{schema}/{format}/{io}/n{}.k{}.m{}{of}{dot}{values}/s{}",
            rows.join("+"),
            self.k,
            self.m,
            self.seed
        )
    }
    /// Its weight.
    pub fn weight(&self) -> Stored {
        let mut stored = Stored::random(self.schema, &self.rows, self.k, self.io != DType::F32, self.seed);
        // Where results have room for them, per-tensor scales are as far apart as those of models.
        if self.io == DType::F32 && self.values == Values::Usual {
            stored.spread_globals(self.seed ^ hash(&format!("{:?} {}", self.rows, self.k)));
        }
        stored
    }
    /// Its input `[m, k]`, rounded to `io`: heavy-tailed, with zeros, blocks of zeros and, from three rows
    /// on, a second row of zeros. Not the last: that is the one that kernels lose.
    pub fn input(&self) -> Vec<f32> {
        let is_zero = |i: usize| self.m > 2 && i / self.k == 1;
        let scale = |i: usize| self.values.scale(self.io, self.seed, i / self.k, i % self.k);
        let value = |i: usize| match self.values {
            _ if is_zero(i) => 0.0,
            Values::Ties => tie(&self.activations, self.seed, i as u64),
            Values::Positive => activation(self.seed, i as u64).abs(),
            _ => activation(self.seed, i as u64) * scale(i),
        };
        let raw: Vec<f32> = (0..self.m * self.k).map(value).collect();
        IoBuffer::new(self.io, &raw).to_f32()
    }
    /// The problem, of a weight like its own that lies somewhere.
    pub(crate) fn problem<'a>(&self, weight: &Q4Weight<'a>) -> Problem<'a> {
        Problem {
            name: self.name(),
            weight: *weight,
            x: self.input(),
            m: self.m,
            max_m: self.max_m,
            activations: self.activations,
            io: self.io,
            recorded: None,
        }
    }
    /// Hands the problem to `body`.
    ///
    /// # Errors
    /// Those of `body`.
    pub fn with<R>(&self, body: impl FnOnce(&Problem<'_>) -> Result<R>) -> Result<R> {
        self.weight().lend(|w| body(&self.problem(w)))
    }
}

/// Products of one encoding and activation format: `count` for each type of input and output, walked so that
/// all pairs of n, k and m come up over a few encodings.
pub(crate) fn sketches(schema: Q4Schema, activations: Activations, count: usize, seed: u64) -> Vec<Sketch> {
    // Neighbouring encodings begin at different places.
    let start = (hash(&schema.label()) ^ hash(&act_label(&activations))) as usize % 2002;
    let mut all = Vec::new();
    for (t, io) in [DType::F32, DType::BF16, DType::F16].into_iter().enumerate() {
        for j in 0..count {
            let at = start + t * 667 + j;
            let is_ragged = activations == Activations::Native && schema.k_block() == 1 && j % 4 == 3;
            let k = if is_ragged { RAGGED_K[at / 4 % RAGGED_K.len()] } else { K[at % K.len()] };
            let k = k.next_multiple_of(schema.k_block());
            let n = N[at % N.len()];
            let rows = match at % 3 {
                0 if n > 3 => vec![n / 3, n - n / 3],
                1 if n > 40 => vec![n - 33, 16, 17],
                _ => vec![n],
            };
            let m = M[at % M.len()];
            // Half of the weights are made for more rows than this call has.
            let max_m = if at / 2 % 2 == 0 { m } else { m + [1, 3, 16, 511][at / 4 % 4] };
            all.push(Sketch { rows, max_m, ..Sketch::plain(schema, activations, io, [n, k, m], seed) });
        }
    }
    all
}

/// `count` products whose extents are drawn, each of at most `work` multiplications. Residues are not left to
/// chance: those of m and of blocks of k modulo 16, and of n modulo 128, each come up equally often, in pairs
/// and an order that the seed gives.
pub(crate) fn drawn(
    claim: &Claim,
    (schema, activations): (Q4Schema, Activations),
    count: usize,
    seed: u64,
    work: usize,
) -> Vec<Sketch> {
    let salt = hash(&format!("{claim} {} {}", schema.label(), act_label(&activations))) ^ mix(seed);
    let draw = |i: usize, what: u64| mix(salt ^ (i as u64) << 8 ^ what);
    // Visits all residues of a power of two, for an odd step.
    let residue = |i: usize, what: u64, modulus: usize| {
        let [step, turn, start] = [0, 33, 99].map(|salted| mix(salt ^ what ^ salted) as usize);
        // Every sixteen products begin elsewhere, so that residues of two extents do not walk together.
        let turn = if modulus == 16 { (i / 16).wrapping_mul(turn | 1) % 16 } else { 0 };
        i.wrapping_mul(step | 1).wrapping_add(start).wrapping_add(turn) % modulus
    };
    let between = |i: usize, what: u64, low: f32, high: f32| {
        (low.ln() + uniform(draw(i, what)) * (high / low).ln()).exp() as usize
    };
    let is_ragged = |i: usize| activations == Activations::Native && schema.k_block() == 1 && i % 5 == 3;
    (0..count)
        .map(|i| {
            let is_few = draw(i, 1) % 3 == 0;
            let mut m = between(i, 2, 1.0, if is_few { 12.0 } else { 700.0 }) / 16 * 16 + residue(i, 3, 16);
            let mut n = between(i, 4, 4.0, 3000.0) / 128 * 128 + residue(i, 5, 128);
            let mut k = 16 * (between(i, 6, 1.0, 500.0) / 16 * 16 + residue(i, 7, 16));
            // Nothing at all has the residue of one whole.
            (m, n, k) = [(m, 16), (n, 128), (k, 256)].map(|(v, whole)| if v == 0 { whole } else { v }).into();
            if is_ragged(i) {
                k += 1 + residue(i, 8, 16) % 15;
            }
            k = k.next_multiple_of(schema.k_block());
            // Halved in turns, residues kept, until the product is small enough.
            for turn in 0.. {
                if m * n * k <= work {
                    break;
                }
                let half = |v: usize, modulus: usize| (v / modulus / 2) * modulus + v % modulus;
                match (turn + i) % 3 {
                    0 if m >= 32 => m = half(m, 16),
                    1 if n >= 256 => n = half(n, 128),
                    2 if k >= 512 => k = half(k, 256),
                    _ if turn > 60 => break,
                    _ => {}
                }
            }
            let cut = |of: usize| 1 + draw(i, 9) as usize % of;
            let rows = match draw(i, 10) % 3 {
                0 if n > 8 => {
                    let first = cut(n - 4);
                    let second = 1 + draw(i, 11) as usize % (n - first - 2);
                    vec![first, second, n - first - second]
                }
                1 if n > 2 => {
                    let first = cut(n - 1);
                    vec![first, n - first]
                }
                _ => vec![n],
            };
            // Up to the context of a model: what plans for that many rows is asked for one most of the time.
            let max_m = match draw(i, 12) % 5 {
                0 => m,
                1 => m + 1 + draw(i, 13) as usize % 7,
                2 => (m + 1).next_power_of_two(),
                3 => m + 1 + draw(i, 13) as usize % 2000,
                _ => [4096, 8192, 32_768, 40_960, 131_072][draw(i, 13) as usize % 5],
            };
            let io = [DType::F32, DType::BF16, DType::F16][(draw(i, 14) % 3) as usize];
            Sketch { rows, max_m, ..Sketch::plain(schema, activations, io, [n, k, m], seed) }
        })
        .collect()
}

/// Hands problems of one encoding to `visit`: every activation format that makes sense, every type.
/// The name of a problem holds all that makes it.
///
/// # Errors
/// Those of `visit`.
pub fn each(schema: Q4Schema, visit: &mut dyn FnMut(&Problem<'_>) -> Result<()>) -> Result<()> {
    for activations in activations(&schema) {
        for sketch in sketches(schema, activations, 14, 0) {
            // A backend may refuse what no block of 16 divides; callers of this function count refusals as
            // failures.
            if sketch.k % 16 == 0 {
                sketch.with(&mut *visit)?;
            }
        }
    }
    Ok(())
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
        Activations::Fp8(how @ Fp8Inputs::Static(g)) => format!("fp8.{}-{}", how.as_str(), g.value()),
        Activations::Fp8(how) => format!("fp8.{}", how.as_str()),
        other => other.as_str().to_owned(),
    }
}

/// The kind of an activation format: its label without the value of a fixed scale.
pub(crate) fn act_kind(a: &Activations) -> String {
    match a {
        Activations::Nvfp4(q) if matches!(q.global, ActGlobal::Static(_)) => {
            format!("nvfp4.{}.static", q.rule.as_str())
        }
        Activations::Fp8(how) => format!("fp8.{}", how.as_str()),
        other => act_label(other),
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

/// Element `i` of an input of ties: the first of a block is its largest, the rest lie between two codes.
fn tie(activations: &Activations, seed: u64, i: u64) -> f32 {
    let (block, word) = (mix(seed ^ (i / 16) ^ 0x71e5), mix(seed << 20 ^ i ^ 0x71e5));
    let sign = if word & 1 == 0 { 1.0 } else { -1.0 };
    let unit = 2f32.powi((block % 5) as i32 - 2) * sign;
    match activations {
        Activations::Int8 if i % 16 == 0 => 127.0 * unit,
        Activations::Int8 => ((word >> 8) % 127) as f32 * unit + 0.5 * unit,
        // A scale of a power of two, whether it is stored, of 128 or of the row; codes have three bits of
        // fraction.
        Activations::Fp8(_) if i % 128 == 0 => 14.0 * sign,
        Activations::Fp8(_) => (1.0 + ((word >> 8) % 8) as f32 / 8.0 + 0.0625) * unit,
        // A sixth of it is 1, or halfway between two scales: 1.0625, 1.1875.
        _ if i % 16 == 0 => [6.0, 6.375, 7.125][(block >> 8) as usize % 3] * unit,
        _ => [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0][(word >> 8) as usize % 7] * unit,
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
        for schema in usual() {
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
    fn residues_are_not_left_to_chance() {
        let claim = Claim {
            schema: "nvfp4",
            activations: "native",
            device: q4_core::Device::Cpu,
            path: ExecPath::FusedDequant,
        };
        let two_level = q4_core::formats::encodings("nvfp4")[1];
        let (mut most_m, mut most_k) = (0, 0);
        for seed in 0..20 {
            let all = drawn(&claim, (two_level, Activations::Native), 128, seed, 4_000_000);
            for r in 0..16 {
                assert!(all.iter().any(|s| s.m % 16 == r), "m % 16 == {r} of seed {seed}");
                assert!(all.iter().any(|s| s.k / 16 % 16 == r), "k / 16 % 16 == {r} of seed {seed}");
            }
            let n = |s: &Sketch| s.rows.iter().sum::<usize>();
            assert!((0..128).all(|r| all.iter().any(|s| n(s) % 128 == r)), "n % 128 of seed {seed}");
            assert!(all.iter().all(|s| s.m <= s.max_m && s.m * n(s) * s.k <= 4_000_000));
            (most_m, most_k) = all.iter().fold((most_m, most_k), |(m, k), s| (m.max(s.m), k.max(s.k)));
        }
        assert!(most_m > 400 && most_k > 4096, "{most_m} rows, {most_k} columns");
    }

    #[test]
    fn the_walk_meets_every_extent() {
        let schema = q4_core::formats::encodings("nf4")[0];
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
