//! The cases of every level. Which ones exist depends on the backend's claims and the options, and on nothing else, so a
//! parent and a child process that enumerate them agree.
mod abi;
mod backward;
mod decode;
mod forward;
mod fused;
mod honesty;
mod large;
mod memory;
mod negative;
mod operands;
mod steady;

use crate::lattice::hash;
use crate::{Case, Claim, Level, Options, claims};
use q4_core::{HostEnv, Q4Backend};
use std::collections::BTreeMap;

/// Every case that `options` ask for, in order of level and claim.
pub fn cases(
    backend: &dyn Q4Backend,
    env: &HostEnv,
    abi: Option<&dyn crate::AbiProbe>,
    options: &Options,
) -> Vec<Case> {
    let claims: Vec<Claim> =
        claims(backend, env, options.device).into_iter().filter(|c| options.admits(c)).collect();
    let mut all = Vec::new();
    for level in options.levels() {
        if options.claims.is_empty() {
            match level {
                Level::L0 => abi::cases(abi, &mut all),
                Level::L4 => negative::backend_cases(&mut all),
                _ => {}
            }
        }
        for claim in &claims {
            match level {
                Level::L0 => {}
                Level::L1 => decode::cases(claim, options.seed, &mut all),
                Level::L2 => {
                    forward::cases(claim, options.seed, &mut all);
                    fused::cases(claim, options.seed, &mut all);
                    large::cases(claim, options.seed, &mut all);
                }
                Level::L3 => backward::cases(claim, options.seed, &mut all),
                Level::L4 => {
                    negative::cases(claim, options.seed, &mut all);
                    operands::cases(claim, options.seed, &mut all);
                }
                Level::L5 => {
                    honesty::cases(claim, options.seed, &mut all);
                    steady::cases(claim, options.seed, &mut all);
                    memory::cases(claim, options.seed, &mut all);
                }
            }
        }
    }
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
