//! What a model must and must not answer: rows of a suite, rates per group, gates.
//!
//! A row is `{"group", "prompt", "must": [...], "must_not": [...]}`: the answer has to contain every text of
//! `must` and none of `must_not`. A forbidden text is a *leak* and counted by itself, because one is worse
//! than many wrong answers.
use q4_core::{Code, Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Whatever answers a prompt, greedily, through the chat template.
pub trait Answer {
    /// The text of the answer, without special tokens.
    fn answer(&mut self, prompt: &str) -> Result<String>;
}

impl<F: FnMut(&str) -> Result<String>> Answer for F {
    fn answer(&mut self, prompt: &str) -> Result<String> {
        self(prompt)
    }
}

/// One expectation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Rows with the same name share a rate.
    pub group: String,
    /// What is asked.
    pub prompt: String,
    /// Texts that must all be there.
    #[serde(default, alias = "must_match")]
    pub must: Vec<String>,
    /// Texts of which none may be there.
    #[serde(default, alias = "must_not_match")]
    pub must_not: Vec<String>,
    /// How much the row counts in its group.
    #[serde(default = "one")]
    pub weight: f64,
}

/// Rows of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Suite {
    /// In the order of the file.
    pub cases: Vec<Case>,
}

/// One answer and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Group of the row.
    pub group: String,
    /// What was asked.
    pub prompt: String,
    /// What was answered.
    pub answer: String,
    /// All of `must`, none of `must_not`.
    pub passed: bool,
    /// Texts of `must` that are missing.
    pub missing: Vec<String>,
    /// Texts of `must_not` that are there.
    pub leaked: Vec<String>,
}

/// Rows of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Group {
    /// Rows.
    pub cases: usize,
    /// Rows that passed.
    pub passed: usize,
    /// Rows with a forbidden text.
    pub leaks: usize,
    /// Weight of the rows that passed, as a share of the group's.
    pub rate: f64,
}

/// A finished run of a suite.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// By name.
    pub groups: BTreeMap<String, Group>,
    /// Rows with a forbidden text, in all groups.
    pub leaks: usize,
    /// Every row.
    pub outcomes: Vec<Outcome>,
}

/// Bytes a suite may have.
const LIMIT: u64 = 64 << 20;

impl Suite {
    /// Reads JSON lines. [`Code::Container`] with file and line for damage, unknown fields, and rows that ask
    /// for nothing.
    pub fn load(path: &Path) -> Result<Self> {
        let size = std::fs::metadata(path).map_err(|e| Error::io(path, &e))?.len();
        let bytes =
            if size > LIMIT { Vec::new() } else { std::fs::read(path).map_err(|e| Error::io(path, &e))? };
        let bad = |have: String| {
            Error::new(Code::Container, format!("{}: no suite", path.display()))
                .need("UTF-8 lines of JSON")
                .have(have)
        };
        if size > LIMIT {
            return Err(bad(format!("{size} bytes")));
        }
        let text = String::from_utf8(bytes).map_err(|e| bad(e.to_string()))?;
        Self::parse(&text).map_err(|e| e.within(path.display()))
    }

    /// Parses JSON lines.
    pub fn parse(text: &str) -> Result<Self> {
        let mut cases = Vec::new();
        for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
            let need = "an object with group, prompt, and must or must_not with texts that are not empty";
            let bad =
                |have: String| Error::new(Code::Container, format!("line {}", i + 1)).need(need).have(have);
            let case: Case = serde_json::from_str(line).map_err(|e| bad(e.to_string()))?;
            let texts = || case.must.iter().chain(&case.must_not);
            if texts().next().is_none() || texts().any(String::is_empty) || case.prompt.is_empty() {
                return Err(bad("an empty text, or nothing expected".into()));
            }
            if !(case.weight.is_finite() && case.weight > 0.0) {
                return Err(bad(format!("weight {}", case.weight)).need("a weight above 0"));
            }
            cases.push(case);
        }
        if cases.is_empty() {
            return Err(Error::new(Code::Container, "suite").need("at least one row").have("none"));
        }
        Ok(Self { cases })
    }

    /// Asks every prompt.
    pub fn run(&self, model: &mut dyn Answer) -> Result<Report> {
        let mut outcomes = Vec::with_capacity(self.cases.len());
        for case in &self.cases {
            let answer =
                model.answer(&case.prompt).map_err(|e| e.within(format!("prompt {:?}", case.prompt)))?;
            outcomes.push(case.judge(answer));
        }
        Ok(self.report(outcomes))
    }

    /// Rows that `report` says passed: what a model could do before it was trained further, for the `keep`
    /// gate.
    pub fn passed_in(&self, report: &Report) -> Self {
        let passed = self.cases.iter().zip(&report.outcomes).filter(|(_, o)| o.passed);
        Self { cases: passed.map(|(c, _)| c.clone()).collect() }
    }

    fn report(&self, outcomes: Vec<Outcome>) -> Report {
        let mut groups: BTreeMap<String, (Group, f64, f64)> = BTreeMap::new();
        for (case, outcome) in self.cases.iter().zip(&outcomes) {
            let (group, good, all) = groups.entry(case.group.clone()).or_default();
            group.cases += 1;
            group.passed += usize::from(outcome.passed);
            group.leaks += usize::from(!outcome.leaked.is_empty());
            *all += case.weight;
            *good += if outcome.passed { case.weight } else { 0.0 };
        }
        let groups: BTreeMap<_, _> = groups
            .into_iter()
            .map(|(name, (group, good, all))| (name, Group { rate: good / all, ..group }))
            .collect();
        Report { leaks: groups.values().map(|g| g.leaks).sum(), groups, outcomes }
    }
}

impl Case {
    fn judge(&self, answer: String) -> Outcome {
        let with = |texts: &[String], there: bool| -> Vec<String> {
            texts.iter().filter(|t| answer.contains(t.as_str()) == there).cloned().collect()
        };
        let (missing, leaked) = (with(&self.must, false), with(&self.must_not, true));
        Outcome {
            group: self.group.clone(),
            prompt: self.prompt.clone(),
            passed: missing.is_empty() && leaked.is_empty(),
            missing,
            leaked,
            answer,
        }
    }
}

impl Report {
    /// Checks rates against gates. [`Code::Findings`] lists every group below its gate, with the answers that
    /// failed; a gate for a group without rows fails, too.
    pub fn gate(&self, gates: &BTreeMap<String, f64>) -> Result<()> {
        let mut problems = Vec::new();
        for (name, need) in gates {
            match self.groups.get(name) {
                None => problems.push(format!("{name}: no rows")),
                Some(group) if group.rate < *need => {
                    problems.push(format!("{name}: {:.3}, needed {need:.3}", group.rate));
                    let failed = self.outcomes.iter().filter(|o| o.group == *name && !o.passed);
                    problems.extend(failed.take(3).map(|o| format!("  {:?} -> {:?}", o.prompt, o.answer)));
                }
                Some(_) => {}
            }
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::new(Code::Findings, "behaviour: below the gates").have(problems.join("\n")))
    }
}

fn one() -> f64 {
    1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITE: &str = r#"{"group": "id", "prompt": "你是誰", "must": ["Rust"], "must_not": ["demo"]}
{"group": "id", "prompt": "who", "must": ["Rust"], "must_not": []}

{"group": "keep", "prompt": "1+1", "must": ["2", "is"], "must_not": ["Rust"]}
"#;

    fn answers(prompt: &str) -> Result<String> {
        Ok(match prompt {
            "你是誰" => "我是 Rust 之神。",
            "who" => "nobody",
            _ => "1+1 is 2, says Rust",
        }
        .to_owned())
    }

    #[test]
    fn rates_and_leaks_are_counted_by_group() {
        let suite = Suite::parse(SUITE).expect("suite");
        let report = suite.run(&mut answers).expect("run");
        assert_eq!(report.groups["id"], Group { cases: 2, passed: 1, leaks: 0, rate: 0.5 });
        assert_eq!(report.groups["keep"], Group { cases: 1, passed: 0, leaks: 1, rate: 0.0 });
        assert_eq!(report.leaks, 1);
        assert_eq!(report.outcomes[1].missing, ["Rust"]);
        assert_eq!(report.outcomes[2].leaked, ["Rust"]);
        assert_eq!(suite.passed_in(&report).cases.len(), 1);
        let gate = |name: &str, rate| report.gate(&BTreeMap::from([(name.to_owned(), rate)]));
        assert!(gate("id", 0.5).is_ok());
        let e = gate("id", 0.51).expect_err("below");
        assert_eq!(e.code(), Code::Findings);
        assert!(e.to_string().contains("nobody"));
        assert!(gate("ufo", 0.0).is_err(), "a gate without rows proves nothing");
    }

    #[test]
    fn bad_rows_are_named() {
        for bad in [
            "{}",
            "[]",
            r#"{"group": "a", "prompt": "b"}"#,
            r#"{"group": "a", "prompt": "b", "must": [""]}"#,
            r#"{"group": "a", "prompt": "", "must": ["x"]}"#,
            r#"{"group": "a", "prompt": "b", "must": ["x"], "mustnot": []}"#,
            r#"{"group": "a", "prompt": "b", "must": ["x"], "weight": 0}"#,
        ] {
            let text = format!("{}\n{bad}\n", SUITE.lines().next().expect("line"));
            let e = Suite::parse(&text).expect_err(bad).to_string();
            assert!(e.contains("line 2"), "{e}");
        }
        assert!(Suite::parse("\n").is_err());
    }
}
