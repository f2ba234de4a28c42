//! The sampling settings of a conversation, as they are shown and set while it runs.
use q4_core::{Code, Error, Result};
use q4_model::generate::Limits;
use q4_model::sampling::SamplingParams;
use q4_model::wishes::Wishes;
use std::fmt;
use std::str::FromStr;

/// How answers are drawn and how long they may be.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Longest answer; none is what the context has room for.
    pub max_tokens: Option<usize>,
}

/// What a line of settings asks for.
pub struct Settings {
    /// How tokens are drawn.
    pub wishes: Wishes,
    /// Longest answer, where it is among them; none is no bound.
    pub max_tokens: Option<Option<usize>>,
}

const NAMES: &str = "temperature, top-p, top-k, min-p, repetition-penalty, seed or max-tokens";

impl Params {
    /// Those an answer begins with.
    pub fn new(sampling: SamplingParams, limits: &Limits) -> Self {
        let max_tokens = Some(limits.max_tokens).filter(|most| *most != usize::MAX);
        Self { sampling, max_tokens }
    }

    /// These with the settings of `text` over them. [`Code::Usage`] for the first that has no meaning;
    /// nothing is set then.
    pub fn with(&self, text: &str) -> Result<Self> {
        let Settings { wishes, max_tokens } = Settings::of(text)?;
        let sampling = wishes.upon(self.sampling.clone())?;
        Ok(Self { sampling, max_tokens: max_tokens.unwrap_or(self.max_tokens) })
    }

    /// Whether what was set has no effect, because nothing is drawn.
    pub fn is_idle(&self) -> bool {
        let p = &self.sampling;
        p.temperature == 0.0 && (p.top_p < 1.0 || p.top_k > 0 || p.min_p > 0.0)
    }
}

impl Settings {
    /// Reads pairs of a name and a value: `temperature 0.7 top-p=0.9`. [`Code::Usage`] for the first that is
    /// no such pair.
    pub fn of(text: &str) -> Result<Self> {
        let mut new = Self { wishes: Wishes::default(), max_tokens: None };
        let mut words = text.split(|c: char| c.is_whitespace() || c == '=').filter(|w| !w.is_empty());
        while let Some(word) = words.next() {
            // As config files spell them, too.
            let name = word.replace('_', "-");
            let value = words.next();
            let w = &mut new.wishes;
            match &*name {
                "temperature" => w.temperature = Some(number(&name, value)?),
                "top-p" => w.top_p = Some(number(&name, value)?),
                "top-k" => w.top_k = Some(number(&name, value)?),
                "min-p" => w.min_p = Some(number(&name, value)?),
                "repetition-penalty" => w.repetition_penalty = Some(number(&name, value)?),
                "seed" => w.seed = Some(number(&name, value)?),
                "max-tokens" if value == Some("none") => new.max_tokens = Some(None),
                "max-tokens" => new.max_tokens = Some(Some(number(&name, value)?)),
                _ => {
                    return Err(Error::new(Code::Usage, format!("/params {word}: no such setting"))
                        .need(NAMES)
                        .fix("/params temperature 0.7 top-p 0.9"));
                }
            }
        }
        Ok(new)
    }
}

impl fmt::Display for Params {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SamplingParams { temperature, top_k, top_p, min_p, repetition_penalty, seed } = &self.sampling;
        write!(f, "temperature {temperature}, top-p {top_p}, top-k {top_k}, min-p {min_p}, ")?;
        write!(f, "repetition-penalty {repetition_penalty}, seed {seed}, max-tokens ")?;
        match self.max_tokens {
            Some(most) => write!(f, "{most}"),
            None => f.write_str("none"),
        }
    }
}

fn number<T: FromStr>(name: &str, value: Option<&str>) -> Result<T> {
    value.and_then(|v| v.parse().ok()).ok_or_else(|| {
        Error::new(Code::Usage, format!("/params {name}"))
            .need("a number behind the name")
            .have(value.unwrap_or("nothing"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_typed() -> Result<()> {
        let old = Params { sampling: SamplingParams::default(), max_tokens: Some(9) };
        let new = old.with("temperature 0.7 top_p=0.9  seed = 18446744073709551615 max-tokens 3")?;
        assert_eq!((new.sampling.temperature, new.sampling.top_p), (0.7, 0.9));
        assert_eq!((new.sampling.seed, new.max_tokens), (u64::MAX, Some(3)));
        assert_eq!(new.with("max-tokens none")?.to_string().split(' ').next_back(), Some("none"));
        assert_eq!(old.with(&new.to_string().replace(',', " "))?, new);
        for bad in
            ["temprature 1", "top-k -1", "seed", "temperature 1 top-p 0", "temperature NaN", "top-k 1.5"]
        {
            assert_eq!(old.with(bad).expect_err(bad).code(), Code::Usage, "{bad}");
        }
        Ok(())
    }
}
