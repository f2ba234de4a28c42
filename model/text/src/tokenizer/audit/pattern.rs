//! Regular expressions: how large they become when they are compiled, and how often they may have to try
//! again.
//!
//! The engine hands what it can to an automaton, whose size is what is bounded here. Look-around runs in a
//! machine that backtracks, up to a million steps for every match: there at most one repetition may give
//! anything back, so that the steps of a text stay proportional to its square.
use super::{bounded, refused};
use fancy_regex::Expr;
use q4_core::{Error, Result};

/// Expressions of a tokenizer.
const COUNT: usize = 16;
/// Bytes of one.
const BYTES: usize = 16 << 10;
/// Parentheses inside of each other.
const NESTING: usize = 32;
/// Repetitions that a count may ask for, counts of counts multiplied.
const REPEATS: usize = 32;
/// Characters and classes of all expressions, counted repetitions written out.
const ATOMS: usize = 512;
/// Classes among them. One of Unicode compiles to some ten KiB, alone in a look-around to more.
const CLASSES: usize = 160;
/// Ways in which a branch with look-around may match before its repetition does.
const WAYS: usize = 64;

/// All expressions of a file together.
#[derive(Default)]
pub(super) struct Patterns {
    count: usize,
    atoms: usize,
    classes: usize,
}

impl Patterns {
    /// Adds one expression of part `name`.
    pub(super) fn add(&mut self, name: &str, pattern: &str) -> Result<()> {
        self.count += 1;
        bounded("regular expressions", self.count, COUNT)?;
        bounded(&format!("{name}: bytes of a pattern"), pattern.len(), BYTES)?;
        let opened = pattern.bytes().scan(0usize, |depth, b| {
            *depth = match b {
                b'(' | b'[' => *depth + 1,
                b')' | b']' => depth.saturating_sub(1),
                _ => *depth,
            };
            Some(*depth)
        });
        bounded(&format!("{name}: nesting of a pattern"), opened.max().unwrap_or(0), NESTING)?;
        let tree = crate::quiet::quietly(|| Expr::parse_tree(pattern))
            .map_err(|panic| broken(name, panic))?
            .map_err(|e| broken(name, e.to_string()))?;
        self.measure(name, &tree.expr, 1)?;
        branches(name, &tree.expr)
    }

    fn measure(&mut self, name: &str, expr: &Expr, times: usize) -> Result<()> {
        let mut atoms = |n: usize| {
            self.atoms = self.atoms.saturating_add(n.saturating_mul(times));
            bounded(&format!("{name}: size of the patterns"), self.atoms, ATOMS)
        };
        match expr {
            Expr::Empty | Expr::Assertion(_) => atoms(1),
            Expr::Literal { val, .. } => atoms(val.chars().count().max(1)),
            Expr::Any { .. } | Expr::Delegate { .. } => {
                // A long list of ranges is as large as several classes.
                let weight = if let Expr::Delegate { inner, .. } = expr { 1 + inner.len() / 256 } else { 1 };
                atoms(weight)?;
                self.classes = self.classes.saturating_add(weight.saturating_mul(times));
                bounded(&format!("{name}: character classes of the patterns"), self.classes, CLASSES)
            }
            Expr::Concat(list) | Expr::Alt(list) => {
                atoms(1)?;
                list.iter().try_for_each(|e| self.measure(name, e, times))
            }
            Expr::Group(inner) | Expr::LookAround(inner, _) | Expr::AtomicGroup(inner) => {
                atoms(1)?;
                self.measure(name, inner, times)
            }
            Expr::Repeat { child, lo, hi, .. } => {
                atoms(1)?;
                let most = if *hi == usize::MAX { lo + 1 } else { *hi };
                let times = times.saturating_mul(most.max(1));
                bounded(&format!("{name}: repetitions a pattern counts"), times, REPEATS)?;
                self.measure(name, child, times)
            }
            _ => Err(refused(&format!("{name}: a pattern that refers to itself"))
                .need("classes, repetitions, alternatives and look-around")
                .have("a back-reference, a condition or a call")),
        }
    }
}

/// Every branch at the top that needs the backtracking machine is short of choices.
fn branches(name: &str, expr: &Expr) -> Result<()> {
    match expr {
        Expr::Alt(list) => list.iter().try_for_each(|e| branches(name, e)),
        Expr::Group(inner) => branches(name, inner),
        hard if is_hard(hard) => {
            let mut choices = Choices { ways: 1, repeats: 0 };
            choices.count(name, hard)?;
            bounded(&format!("{name}: repetitions beside a look-around"), choices.repeats, 1)?;
            bounded(&format!("{name}: alternatives beside a look-around"), choices.ways, WAYS)
        }
        _ => Ok(()),
    }
}

fn is_hard(expr: &Expr) -> bool {
    match expr {
        Expr::LookAround(..) | Expr::AtomicGroup(_) => true,
        Expr::Concat(list) | Expr::Alt(list) => list.iter().any(is_hard),
        Expr::Group(inner) => is_hard(inner),
        Expr::Repeat { child, .. } => is_hard(child),
        _ => false,
    }
}

struct Choices {
    ways: usize,
    repeats: usize,
}

impl Choices {
    fn count(&mut self, name: &str, expr: &Expr) -> Result<()> {
        match expr {
            Expr::Concat(list) => list.iter().try_for_each(|e| self.count(name, e)),
            Expr::Alt(list) => {
                self.ways = self.ways.saturating_mul(list.len());
                list.iter().try_for_each(|e| self.count(name, e))
            }
            Expr::Group(inner) => self.count(name, inner),
            // What is inside gives nothing back once it matched; to match at all, a single character may
            // repeat.
            Expr::AtomicGroup(inner) => match &**inner {
                Expr::Repeat { child, .. } if is_atom(child) => Ok(()),
                other => self.count(name, other),
            },
            Expr::LookAround(inner, _) => {
                let before = self.repeats;
                self.count(name, inner)?;
                bounded(&format!("{name}: repetitions in a look-around"), self.repeats - before, 0)
            }
            Expr::Repeat { child, lo, hi, .. } if *lo == 0 && *hi == 1 => {
                self.ways = self.ways.saturating_mul(2);
                self.count(name, child)
            }
            Expr::Repeat { child, lo, hi, .. } if lo == hi => self.count(name, child),
            Expr::Repeat { child, .. } => {
                self.repeats += 1;
                if is_atom(child) {
                    return Ok(());
                }
                Err(refused(&format!("{name}: a repeated group beside a look-around"))
                    .need("a repeated character or class")
                    .have("a group, which may be divided in more ways than can be tried"))
            }
            _ => Ok(()),
        }
    }
}

fn is_atom(expr: &Expr) -> bool {
    match expr {
        Expr::Any { .. } | Expr::Delegate { .. } => true,
        Expr::Literal { val, .. } => val.chars().count() == 1,
        Expr::Group(inner) => is_atom(inner),
        _ => false,
    }
}

fn broken(name: &str, why: String) -> Error {
    refused(&format!("{name}: a broken pattern"))
        .need("a regular expression")
        .have(why.chars().take(300).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_published_tokenizers_are_far_below() -> Result<()> {
        for pattern in [
            // Qwen2 and Qwen3.
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            // GPT-2 and whatever came from it.
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            // With possessive repetitions, and with cases of letters.
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|\s+(?!\S)|\s+",
            // Between cases of letters.
            r"(?<=[a-z])(?=[A-Z])",
        ] {
            let mut patterns = Patterns::default();
            patterns.add("pre_tokenizer", pattern)?;
            assert!(patterns.classes * 4 <= CLASSES && patterns.atoms * 4 <= ATOMS, "{pattern}");
        }
        Ok(())
    }

    #[test]
    fn what_could_be_tried_in_too_many_ways_is_refused() {
        for pattern in [
            r"(?:a+)+(?!b)",
            r"\w+\w+(?!b)",
            r"(\w+)\1",
            r"(?=\w*)a",
            r"(?=\w{40})",
            r"(?>(?:a*)*)b",
            r"(?:a?b?c?d?e?f?g?)(?!x)",
        ] {
            assert!(Patterns::default().add("pre_tokenizer", pattern).is_err(), "{pattern}");
        }
    }
}
