//! How tools name layers.
use super::{Group, list, present};
use q4_core::{Code, Error, Result};
use regex::{Regex, RegexBuilder};
use serde_json::Value;
use std::collections::BTreeSet;

/// Which layers a group is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// All that no group before it has.
    All,
    /// Those of these full names.
    Named(BTreeSet<String>),
    /// Those of a name, or that a regular expression behind `re:` fits from its beginning.
    Patterns(Vec<String>),
}

impl Targets {
    /// Of compressed-tensors, where a class of modules is a target too and layers are of one.
    pub(super) fn of(targets: &[String]) -> Self {
        match targets.iter().any(|target| target == "Linear") {
            true => Self::All,
            false => Self::Patterns(targets.to_vec()),
        }
    }

    /// Whether `layer` is among them; the pattern, where nobody but its tool reads it.
    fn have(&self, layer: &str) -> std::result::Result<bool, &str> {
        match self {
            Self::All => Ok(true),
            Self::Named(names) => Ok(names.contains(layer)),
            Self::Patterns(patterns) => {
                for pattern in patterns {
                    let fits = match pattern.strip_prefix("re:") {
                        Some(text) => regex(text).ok_or(pattern.as_str())?.is_match(layer),
                        None => pattern == layer,
                    };
                    if fits {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }
}

/// A list of modules that are not quantised, as its tool spells them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excluded {
    /// What says so, of which lists complement each other: `config.json: quantization_config`.
    pub file: &'static str,
    /// Its field.
    pub field: String,
    /// Its entries.
    pub patterns: Vec<String>,
}

impl Excluded {
    /// The lists that `file` has under one of `fields`.
    pub(super) fn of<'a>(
        file: &'static str,
        c: &'a Value,
        fields: &'a [&str],
    ) -> impl Iterator<Item = Self> + 'a {
        let said = fields.iter().filter(|field| present(c, field).is_some());
        said.map(move |field| Self { file, field: (*field).to_owned(), patterns: list(c, field) })
    }

    /// File and field.
    pub fn place(&self) -> String {
        format!("{}: {}", self.file, self.field)
    }

    /// The entry that has `module`.
    pub(super) fn entry(&self, module: &str) -> Option<&str> {
        self.patterns.iter().map(String::as_str).find(|pattern| excludes(pattern, module) == Some(true))
    }

    /// Whether `module` is among them; `None` where nobody but its tool can tell.
    pub(super) fn has(&self, module: &str) -> Option<bool> {
        match self.entry(module) {
            Some(_) => Some(true),
            None => self.patterns.iter().all(|p| excludes(p, module).is_some()).then_some(false),
        }
    }
}

/// The first of the groups that has `layer`.
///
/// # Errors
/// [`Code::ConfigInvalid`] for a pattern that cannot be read before one fits.
pub(super) fn first<'a>(groups: &'a [Group], layer: &str) -> Result<Option<&'a Group>> {
    for group in groups {
        match group.targets.have(layer) {
            Ok(true) => return Ok(Some(group)),
            Ok(false) => {}
            Err(pattern) => {
                return Err(Error::new(Code::ConfigInvalid, format!("{}: targets", super::CONFIG))
                    .need("names, classes, or regular expressions of at most 256 bytes without look-around")
                    .have(pattern));
            }
        }
    }
    Ok(None)
}

/// What a list of excluded modules says: a name, a part of one, a pattern with `*`, or a regular expression
/// behind `re:`. `None`: nobody but its tool knows.
pub(super) fn excludes(pattern: &str, module: &str) -> Option<bool> {
    if let Some(text) = pattern.strip_prefix("re:") {
        return Some(regex(text)?.is_match(module));
    }
    if pattern.contains(['?', '[']) {
        return None;
    }
    let Some((first, rest)) = pattern.split_once('*') else {
        let part = module == pattern
            || module.starts_with(&format!("{pattern}."))
            || module.ends_with(&format!(".{pattern}"))
            || module.contains(&format!(".{pattern}."));
        return Some(part);
    };
    let Some(mut left) = module.strip_prefix(first) else { return Some(false) };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = left.find(part) else { return Some(false) };
        left = &left[at + part.len()..];
    }
    Some(left.ends_with(last))
}

/// The pattern is untrusted: what is short and compiles to little is tried, in time linear in the name.
fn regex(text: &str) -> Option<Regex> {
    let is_short = text.len() <= 256;
    is_short.then(|| RegexBuilder::new(&format!("^(?:{text})")).size_limit(1 << 18).build().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parts_and_patterns_are_told() {
        let layer = "model.layers.10.self_attn.q_proj";
        for pattern in [
            layer,
            "q_proj",
            "self_attn",
            "model.layers.10",
            "model.layers.1*",
            "*.q_proj",
            "model*attn*",
            "re:.*self_attn\\.(q|k|v)_proj$",
            "re:model\\.layers\\.\\d{2}\\.",
        ] {
            assert_eq!(excludes(pattern, layer), Some(true), "{pattern}");
        }
        for pattern in ["model.layers.1", "q_pro", "*.k_proj", "re:self_attn", "re:.*k_proj"] {
            assert_eq!(excludes(pattern, layer), Some(false), "{pattern}");
        }
        for pattern in ["re:(?=q)", "re:(", "layers.[12]", "re:(a{1000}){1000}"] {
            assert_eq!(excludes(pattern, layer), None, "{pattern}");
        }
        assert_eq!(excludes(&format!("re:{}", "a".repeat(300)), layer), None);
    }

    #[test]
    fn targets_are_whole_names() {
        let of = |targets: &[&str]| Targets::of(&targets.iter().map(|t| (*t).into()).collect::<Vec<_>>());
        assert_eq!(of(&["re:.*", "Linear"]), Targets::All);
        assert_eq!(of(&["q_proj"]).have("a.q_proj"), Ok(false));
        assert_eq!(of(&["a.q_proj"]).have("a.q_proj"), Ok(true));
        assert_eq!(of(&["re:.*q_proj"]).have("a.q_proj"), Ok(true));
        assert_eq!(of(&["re:(?!a)"]).have("a.q_proj"), Err("re:(?!a)"));
    }
}
