//! The cases of every level. Which ones exist depends on the backend's claims and the options, and on nothing
//! else, so a parent and a child process that enumerate them agree.
mod abi;
mod backward;
mod conduct;
mod decode;
mod directed;
mod drawn;
mod forward;
mod fused;
mod gradients;
mod grouped;
mod honesty;
mod large;
mod life;
mod memory;
mod mixed;
mod models;
mod negative;
mod operands;
mod operations;
mod reach;
mod steady;
mod values;

use crate::case::{Bench, Seen};
use crate::lattice::{self, Sketch, hash};
use crate::limits::IO;
use crate::{Case, Claim, Level, Limits, Options, Proof};
use q4_core::{Activations, DType, ExecPath, OpSet, Q4Schema, Result, formats};
use std::collections::{BTreeMap, BTreeSet};

/// Parts that q4's own claims share out in what they have in common.
const PARTS: usize = 4;

/// A claim whose cases are made, within its limits.
struct Scope<'a> {
    claim: &'a Claim,
    limits: &'a Limits,
    seed: u64,
    /// Whether the backend is one of q4's own, whose claims are known to share code; of a library nothing
    /// is.
    is_own: bool,
}

impl Scope<'_> {
    /// Encodings to try.
    fn encodings(&self) -> Vec<Q4Schema> {
        self.limits.encodings(self.claim)
    }
    /// Activation formats to try.
    fn quantizers(&self) -> Vec<Activations> {
        self.limits.quantizers(self.claim)
    }
    /// One of each for cases that are about something else.
    fn usual(&self) -> Option<(Q4Schema, Activations)> {
        Some((*self.encodings().first()?, *self.quantizers().first()?))
    }
    /// The type that the path is for, or the first one there is.
    fn io(&self) -> DType {
        let wanted = lattice::io_of(self.claim.path);
        let first = IO.into_iter().find(|io| self.limits.has(OpSet::FORWARD, Some(*io)));
        if self.limits.has(OpSet::FORWARD, Some(wanted)) { wanted } else { first.unwrap_or(wanted) }
    }
    /// The product of that kind that is nearest to `[n, k, m]`.
    fn sketch(&self, schema: Q4Schema, activations: Activations, io: DType, shape: [usize; 3]) -> Sketch {
        self.limits.fit(Sketch::plain(schema, activations, io, shape, self.seed))
    }
    /// Whether its kernels multiply what is stored, or may.
    fn is_packed(&self) -> bool {
        !self.is_own || is_packed(self.claim.path)
    }
    /// Whether another claim is known to compute the same but for the input: what decodes the weight first is
    /// one piece of code in q4's own backends, whatever it is multiplied by.
    fn repeats(&self) -> bool {
        !self.is_packed() && self.claim.activations != "native"
    }
    /// Whether the claim sees the `i`th product of those that are about extents. A library sees all of them.
    /// Claims of q4's own that are one piece of code but for the format share them out, and seeds change who
    /// has which: of packed kernels the names of one format, of dense paths all formats but those that always
    /// see the whole. Every product is some claim's.
    fn has_turn(&self, i: usize) -> bool {
        let name = self.claim.schema;
        let is_whole = name == "dense" || name == "nvfp4" && !self.is_oracle();
        if !self.is_own || !self.is_packed() && is_whole {
            return true;
        }
        let (names, parts): (Vec<_>, _) = match formats::kind(name) {
            Some(kind) if self.is_packed() => (kind.names.iter().map(|n| n.0).collect(), kind.names.len()),
            _ => (formats::names().collect(), PARTS),
        };
        let at = names.iter().position(|n| *n == name).unwrap_or(0);
        (i + at + self.seed as usize % parts) % parts == 0
    }
    /// The same of the `i`th case of those that know the weight alone: decoding, and gradients. Claims of
    /// q4's own with native inputs see all, those with others, whose weights are the same, a part.
    fn has_turn_of_weight(&self, i: usize) -> bool {
        let at = match self.claim.activations {
            "native" => return true,
            "int8" => 0,
            _ => PARTS / 2,
        };
        !self.is_own || (i + at + self.seed as usize % PARTS) % PARTS == 0
    }
    /// Whether its sums are known to be those of the oracle.
    fn is_oracle(&self) -> bool {
        self.is_own && self.claim.path == ExecPath::Reference
    }
    /// Adds a case of the claim.
    fn add(
        &self,
        all: &mut Vec<Case>,
        level: Level,
        name: impl std::fmt::Display,
        body: impl Fn(&Bench<'_>) -> Result<Seen> + Send + Sync + 'static,
    ) {
        all.push(Case::new(level, Some(self.claim), name, body));
    }
}

fn is_packed(path: ExecPath) -> bool {
    !matches!(path, ExecPath::DequantMatmul | ExecPath::Reference)
}

/// Every case that `options` ask for, in order of level and claim. They depend on what the backend says it
/// computes and on nothing else of it.
pub fn cases(proofs: &[Proof], abi: Option<&dyn crate::AbiProbe>, options: &Options) -> Vec<Case> {
    let scopes: Vec<_> = proofs
        .iter()
        .filter(|p| options.admits(&p.claim))
        .map(|p| Scope { claim: &p.claim, limits: &p.limits, seed: options.seed, is_own: abi.is_none() })
        .collect();
    let mut all = Vec::new();
    for level in options.levels() {
        if options.claims.is_empty() {
            match level {
                Level::L0 => abi::cases(abi, &mut all),
                Level::L4 => negative::backend_cases(&mut all),
                Level::L5 => conduct::backend_cases(abi, &mut all),
                _ => {}
            }
        }
        for scope in &scopes {
            match level {
                Level::L0 => {}
                Level::L1 => decode::cases(scope, &mut all),
                Level::L2 => {
                    forward::cases(scope, &mut all);
                    values::cases(scope, &mut all);
                    directed::cases(scope, &mut all);
                    drawn::cases(scope, &mut all);
                    mixed::cases(scope, OpSet::FORWARD, &mut all);
                    models::cases(scope, &mut all);
                    reach::cases(scope, &mut all);
                    fused::cases(scope, &mut all);
                    grouped::cases(scope, &mut all);
                    large::cases(scope, &mut all);
                }
                Level::L3 => {
                    backward::cases(scope, &mut all);
                    mixed::cases(scope, OpSet::BACKWARD_INPUT, &mut all);
                    gradients::cases(scope, &mut all);
                }
                Level::L4 => {
                    negative::cases(scope, &mut all);
                    operands::cases(scope, &mut all);
                    grouped::refused_cases(scope, &mut all);
                }
                Level::L5 => {
                    conduct::cases(scope, &mut all);
                    honesty::cases(scope, &mut all);
                    steady::cases(scope, &mut all);
                    operations::cases(scope, &mut all);
                    life::cases(scope, &mut all);
                    memory::cases(scope, &mut all);
                }
            }
        }
    }
    // Narrow limits make one product of several.
    let mut seen = BTreeSet::new();
    all.retain(|c| seen.insert(c.id.clone()));
    if let Some(id) = &options.replay {
        all.retain(|c| c.id == *id);
    }
    match options.sample {
        Some(count) => sample(all, count, options.seed),
        None => all,
    }
}

/// `count` cases of each level and claim, chosen by the seed.
fn sample(all: Vec<Case>, count: usize, seed: u64) -> Vec<Case> {
    let mut ranks: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let group = |c: &Case| format!("{} {:?}", c.level, c.claim);
    let rank = |c: &Case| crate::stored::mix(hash(&c.id) ^ seed);
    for c in &all {
        ranks.entry(group(c)).or_default().push(rank(c));
    }
    for ranks in ranks.values_mut() {
        ranks.sort_unstable();
        ranks.truncate(count);
    }
    let is_chosen = |c: &Case| ranks.get(&group(c)).is_some_and(|r| r.binary_search(&rank(c)).is_ok());
    all.into_iter().filter(is_chosen).collect()
}
