//! Which weights stay as they are, by name.
use q4_core::{Code, Error, Result, matches};

/// Patterns of names, as `train.freeze` has them.
#[derive(Clone, Debug, Default)]
pub struct Still(Vec<String>);

impl Still {
    /// `groups` are the modules of the model, those that move together in one list.
    ///
    /// # Errors
    /// [`Code::Usage`] with the pattern that matches nothing, or only some of the modules that move together;
    /// where nothing would move.
    pub fn new(patterns: &[String], groups: &[Vec<String>]) -> Result<Self> {
        let still = Self(patterns.to_vec());
        for pattern in patterns {
            if !groups.iter().flatten().any(|name| is(pattern, name)) {
                return Err(Error::new(Code::Usage, format!("train.freeze: {pattern:?}"))
                    .need("a pattern that matches a weight, as model.layers.0.* or *.mlp.down_proj")
                    .have("none that does")
                    .fix("`--dry-run` lists the names"));
            }
        }
        let held = |name: &String| still.0.iter().any(|pattern| is(pattern, name));
        for group in groups {
            let (some, rest): (Vec<_>, Vec<_>) = group.iter().partition(|name| held(name));
            if !some.is_empty() && !rest.is_empty() {
                return Err(Error::new(Code::Usage, format!("train.freeze: {}", some[0]))
                    .need(format!("all of {}: they are one matrix here", group.join(", ")))
                    .have("some")
                    .fix(format!("add {:?}", rest[0])));
            }
        }
        if !patterns.is_empty() && groups.iter().flatten().all(held) {
            return Err(Error::new(Code::Usage, "train.freeze").need("weights that move").have("none"));
        }
        Ok(still)
    }

    /// Whether modules that move together stay.
    pub fn holds(&self, modules: &[&str]) -> bool {
        modules.iter().any(|name| self.0.iter().any(|pattern| is(pattern, name)))
    }
}

/// Names of modules are matched, and of their weights, as PyTorch calls them.
fn is(pattern: &str, module: &str) -> bool {
    matches(pattern, module) || matches(pattern, &format!("{module}.weight"))
}

/// Names with their layers in one: `model.layers.[0-27].mlp.down_proj`.
pub fn brief(names: &[String]) -> Vec<String> {
    let mut out: Vec<(String, Vec<usize>)> = Vec::new();
    for name in names {
        let number = name.split('.').find_map(|part| part.parse::<usize>().ok());
        let form = name.split('.').map(|p| if p.parse::<usize>().is_ok() { "#" } else { p });
        let form = form.collect::<Vec<_>>().join(".");
        match out.iter_mut().find(|(f, _)| *f == form) {
            Some((_, layers)) => layers.extend(number),
            None => out.push((form, number.into_iter().collect())),
        }
    }
    out.into_iter().map(|(form, layers)| form.replace('#', &format!("[{}]", ranges(&layers)))).collect()
}

fn ranges(layers: &[usize]) -> String {
    let mut out: Vec<(usize, usize)> = Vec::new();
    for &layer in layers {
        match out.last_mut() {
            Some((_, end)) if *end + 1 == layer => *end = layer,
            _ => out.push((layer, layer)),
        }
    }
    let one = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    out.iter().map(one).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups() -> Vec<Vec<String>> {
        let layer = |l: usize| {
            [vec!["q_proj", "k_proj"], vec!["o_proj"]]
                .map(|g| g.into_iter().map(|m| format!("model.layers.{l}.{m}")).collect::<Vec<_>>())
        };
        std::iter::once(vec!["model.embed_tokens".to_owned()]).chain((0..12).flat_map(layer)).collect()
    }

    #[test]
    fn patterns_hold_what_they_name_and_refuse_what_they_do_not() {
        let new = |patterns: &[&str]| {
            Still::new(&patterns.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>(), &groups())
        };
        let still = new(&["model.layers.1.*", "model.embed_tokens.weight"]).expect("names");
        assert!(still.holds(&["model.layers.1.o_proj"]) && still.holds(&["model.embed_tokens"]));
        assert!(!still.holds(&["model.layers.11.o_proj"]) && !still.holds(&["model.layers.0.q_proj"]));
        for (patterns, says) in [
            (&["model.layer.0.*"][..], "model.layer.0.*"),
            (&["*.q_proj"], "k_proj"),
            (&["*"], "weights that move"),
            (&["model.layers.1.*", "lm_head"], "lm_head"),
        ] {
            let e = new(patterns).expect_err(says).to_string();
            assert!(e.contains("train.freeze") && e.contains(says), "{e}");
        }
        assert!(new(&[]).is_ok());
    }

    #[test]
    fn lists_are_short() {
        let names: Vec<_> = groups().concat().into_iter().filter(|n| !n.contains(".5.")).collect();
        assert_eq!(
            brief(&names),
            [
                "model.embed_tokens",
                "model.layers.[0-4,6-11].q_proj",
                "model.layers.[0-4,6-11].k_proj",
                "model.layers.[0-4,6-11].o_proj"
            ]
        );
    }
}
