//! The part of a run that one child process has: cases of one level and claim.
use crate::{Case, Level, Options};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Cases of one level and claim, by their place among those. Written `L2:3..17:nvfp4@1/int8/cpu/fused`;
/// nothing in place of the claim is what concerns the whole backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The level of all of them.
    pub level: Level,
    /// The claim of all of them, as it is spelled.
    pub claim: Option<String>,
    /// Which of them.
    pub range: Range<usize>,
}

impl Part {
    /// The cases of one level and claim from `start` on, of which there is one at least.
    pub(crate) fn of(cases: &[Case], start: usize) -> Self {
        let first = &cases[start];
        let claim = first.claim.as_ref().map(ToString::to_string);
        Self { level: first.level, claim, range: start..cases.len() }
    }
    /// The options with which [`cases`](crate::cases) are those of this level and claim, or begin with them:
    /// a child need not make all the others, which takes longer than to run a few.
    pub fn options(&self, all: &Options) -> Options {
        let claims = self.claim.as_ref().map_or_else(|| all.claims.clone(), |claim| vec![claim.clone()]);
        Options { levels: vec![self.level], claims, ..all.clone() }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Range { start, end }, claim) = (&self.range, self.claim.as_deref().unwrap_or_default());
        write!(f, "{}:{start}..{end}:{claim}", self.level)
    }
}

impl FromStr for Part {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (level, rest) = text.split_once(':')?;
            // Devices have a colon too.
            let (range, claim) = rest.split_once(':')?;
            let (start, end) = range.split_once("..")?;
            let claim = (!claim.is_empty()).then(|| claim.to_owned());
            Some(Self { level: Level::parse(level)?, claim, range: start.parse().ok()?..end.parse().ok()? })
        };
        parse().ok_or_else(|| "need LEVEL:START..END:CLAIM".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::liars::honest;
    use crate::{Profile, cases, proofs};
    use q4_core::{Device, HostEnv};

    #[test]
    fn spellings_round_trip() {
        for text in ["L2:3..17:nvfp4@1/int8/a card:0/fused", "L0:0..4:"] {
            assert_eq!(text.parse::<Part>().map(|p| p.to_string()).as_deref(), Ok(text));
        }
        for text in ["", "L2", "L2:3:x", "L9:0..1:x", "L2:a..b:x"] {
            assert!(text.parse::<Part>().is_err(), "{text}");
        }
    }

    /// Whatever was asked for, a child finds its case where the parent has it.
    #[test]
    fn a_child_enumerates_what_its_parent_does() {
        let (backend, env) = (honest(), HostEnv::default());
        let proofs = proofs(&*backend, &env, Device::Cpu);
        let whole = Options { seed: 7, ..Options::of(Profile::Training) };
        let sampled = Options { sample: Some(2), ..whole.clone() };
        let claimed = Options { claims: vec!["*/int8/*".into()], ..whole.clone() };
        for options in [whole, sampled, claimed] {
            let all = cases(&proofs, None, &options);
            let is_alike = |a: &Case, b: &Case| a.level == b.level && a.claim == b.claim;
            for group in all.chunk_by(is_alike) {
                let part = Part::of(group, 0);
                let own = cases(&proofs, None, &part.options(&options));
                let ids = |cases: &[Case]| cases.iter().map(|c| c.id.clone()).collect::<Vec<_>>();
                assert_eq!(ids(&own[part.range.clone()]), ids(group), "{part}");
                assert!(part.claim.is_none() || own.len() == group.len(), "{part}");
            }
            assert!(!all.is_empty());
        }
    }
}
