//! Known failures as data: which cases, of which backend, on which device, why, and until when.
//!
//! A waived case still runs. A waiver that has expired excuses nothing, and one whose cases all pass is
//! reported, so that the list can only shrink by itself.
use crate::case::{CaseResult, Outcome};
use q4_core::{Code, Error, Result, matches};
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// One entry of a `waivers.toml`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiver {
    /// Glob over case ids.
    pub case: String,
    /// Backend it excuses.
    pub backend: String,
    /// Device it excuses, `cpu` or `cuda:0`; `*` for all.
    pub device: String,
    /// Why the failure is known and accepted.
    pub reason: String,
    /// Last day it excuses anything.
    pub expires: Date,
}

/// All entries of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waivers(pub Vec<Waiver>);

impl Waivers {
    /// Reads the text of a `waivers.toml`: tables `[[waiver]]` of the five keys, each a basic string, all
    /// required.
    ///
    /// # Errors
    /// `ConfigInvalid` with the line.
    pub fn parse(text: &str) -> Result<Self> {
        let mut all: Vec<Vec<(String, String)>> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let bad = |need: &str| {
                Error::new(Code::ConfigInvalid, format!("waivers: line {}", at + 1)).need(need).have(line)
            };
            let line = line.trim();
            match line.split_once('=') {
                _ if line.is_empty() || line.starts_with('#') => {}
                _ if line == "[[waiver]]" => all.push(Vec::new()),
                Some((key, value)) => {
                    let text = value.trim().strip_prefix('"').and_then(|v| v.strip_suffix('"'));
                    let text =
                        text.filter(|t| !t.contains(['"', '\\'])).ok_or_else(|| bad("key = \"text\""))?;
                    let entry = all.last_mut().ok_or_else(|| bad("[[waiver]] first"))?;
                    let key = key.trim();
                    if !KEYS.contains(&key) || entry.iter().any(|(k, _)| k == key) {
                        return Err(bad("case, backend, device, reason and expires, each once"));
                    }
                    entry.push((key.to_owned(), text.to_owned()));
                }
                None => return Err(bad("[[waiver]] or key = \"text\"")),
            }
        }
        all.iter().map(|entry| Waiver::of(entry)).collect::<Result<_>>().map(Self)
    }

    /// The entries that concern `backend`, on a day.
    pub(crate) fn judge(&self, backend: &str, today: Date) -> Judge<'_> {
        let own = self.0.iter().filter(|w| w.backend == backend);
        Judge {
            today,
            entries: own.map(|w| Entry { waiver: w, covered: 0, executed: 0, excused: 0 }).collect(),
        }
    }
}

const KEYS: [&str; 5] = ["case", "backend", "device", "reason", "expires"];

impl Waiver {
    fn of(entry: &[(String, String)]) -> Result<Self> {
        let get = |key: &str| {
            let found = entry.iter().find(|(k, v)| k == key && !v.is_empty()).map(|(_, v)| v.clone());
            found.ok_or_else(|| {
                Error::new(Code::ConfigInvalid, "waivers: an entry without all of its keys")
                    .need(KEYS.join(", "))
                    .have(format!("no `{key}` in {entry:?}"))
            })
        };
        let expires = get("expires")?;
        let date = Date::parse(&expires).ok_or_else(|| {
            Error::new(Code::ConfigInvalid, "waivers: expires").need("YYYY-MM-DD").have(expires)
        })?;
        Ok(Self {
            case: get("case")?,
            backend: get("backend")?,
            device: get("device")?,
            reason: get("reason")?,
            expires: date,
        })
    }

    fn covers(&self, result: &CaseResult) -> bool {
        let device = result.claim.as_deref().and_then(|c| c.split('/').nth(2)).unwrap_or("cpu");
        let is_case = self.case == result.id || (self.case.contains('*') && matches(&self.case, &result.id));
        is_case && (self.device == "*" || self.device == device)
    }
}

/// Waivers at work.
pub(crate) struct Judge<'a> {
    today: Date,
    entries: Vec<Entry<'a>>,
}

struct Entry<'a> {
    waiver: &'a Waiver,
    covered: usize,
    executed: usize,
    excused: usize,
}

impl Judge<'_> {
    /// Turns a bad outcome that is excused into a waived one.
    pub fn apply(&mut self, result: &mut CaseResult) {
        for entry in &mut self.entries {
            if !entry.waiver.covers(result) {
                continue;
            }
            entry.covered += 1;
            entry.executed += usize::from(result.outcome != Outcome::Unsupported);
            if result.outcome.is_bad() {
                entry.excused += 1;
                if self.today <= entry.waiver.expires {
                    result.outcome = Outcome::Waived;
                    result.waiver = Some(entry.waiver.reason.clone());
                }
            }
        }
    }

    /// What is wrong with the list itself, after a run that was `complete` or a part of one.
    pub fn notes(&self, complete: bool) -> Vec<String> {
        let mut notes = Vec::new();
        for Entry { waiver: w, covered, executed, excused } in &self.entries {
            if self.today > w.expires {
                notes.push(format!("waiver expired on {}: {} ({})", w.expires, w.case, w.reason));
            } else if *executed > 0 && *excused == 0 {
                notes.push(format!(
                    "unexpected pass: {} of {executed} cases is no longer needed ({})",
                    w.case, w.reason
                ));
            } else if *covered == 0 && complete {
                notes.push(format!("waiver of no case there is: {} ({})", w.case, w.reason));
            }
        }
        notes
    }
}

/// A day.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Date {
    year: u32,
    month: u32,
    day: u32,
}

impl Date {
    /// `YYYY-MM-DD`.
    pub fn parse(text: &str) -> Option<Self> {
        let parts: Vec<u32> = text.split('-').map(|p| p.parse().ok()).collect::<Option<_>>()?;
        let &[year, month, day] = parts.as_slice() else { return None };
        (text.len() == 10 && (1..=12).contains(&month) && (1..=31).contains(&day)).then_some(Self {
            year,
            month,
            day,
        })
    }

    /// Today in UTC.
    pub fn today() -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Self::of_days(seconds / 86400)
    }

    /// The day that many days after 1970-01-01 (the Gregorian calendar repeats every 146097 days).
    fn of_days(days: u64) -> Self {
        // Years begin in March, so that the leap day is a year's last.
        let z = days + 719_468;
        let (era, day) = (z / 146_097, z % 146_097);
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let of_year = day - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let civil = if month < 10 { month + 3 } else { month - 9 };
        Self {
            year: (era * 400 + year + u64::from(civil <= 2)) as u32,
            month: civil as u32,
            day: (of_year - (153 * month + 2) / 5 + 1) as u32,
        }
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    const FILE: &str = r#"
# What we know.
[[waiver]]
case = "L2/*/nvfp4/*"
backend = "acme"
device = "cpu"
reason = "rounds ties up, fixed in 1.1"
expires = "2030-01-31"
"#;

    fn result(id: &str, outcome: Outcome) -> CaseResult {
        CaseResult {
            id: id.into(),
            level: Level::L2,
            claim: Some("nvfp4@1/nvfp4/cpu/fused-dequant".into()),
            outcome,
            values: 0,
            ratio: None,
            message: None,
            waiver: None,
        }
    }

    #[test]
    fn a_waiver_excuses_its_cases_until_it_expires() -> Result<()> {
        let waivers = Waivers::parse(FILE)?;
        let id = "L2/nvfp4@1/nvfp4/cpu/fused-dequant/lattice/x/s0";
        let day = |text| Date::parse(text).expect("a date");
        let judged = |backend: &str, today, id: &str, outcome| {
            let mut judge = waivers.judge(backend, today);
            let mut r = result(id, outcome);
            judge.apply(&mut r);
            (r.outcome, judge.notes(false))
        };
        let in_time = day("2030-01-31");
        assert_eq!(judged("acme", in_time, id, Outcome::Fail), (Outcome::Waived, vec![]));
        assert_eq!(judged("acme", in_time, "L1/other", Outcome::Fail), (Outcome::Fail, vec![]));
        assert_eq!(judged("other", in_time, id, Outcome::Fail), (Outcome::Fail, vec![]));
        let (outcome, notes) = judged("acme", in_time, id, Outcome::Pass);
        assert_eq!(outcome, Outcome::Pass);
        assert!(notes[0].starts_with("unexpected pass"), "{notes:?}");
        let (outcome, notes) = judged("acme", day("2030-02-01"), id, Outcome::Fail);
        assert_eq!(outcome, Outcome::Fail);
        assert!(notes[0].starts_with("waiver expired on 2030-01-31"), "{notes:?}");
        let unused = waivers.judge("acme", in_time).notes(true);
        assert!(unused[0].starts_with("waiver of no case there is: L2/*/nvfp4/*"), "{unused:?}");
        Ok(())
    }

    #[test]
    fn a_file_that_is_not_understood_is_an_error() {
        for (from, to) in [
            ("expires = \"2030-01-31\"", ""),
            ("2030-01-31", "2030-1-31"),
            ("2030-01-31", "soon"),
            ("device =", "devise ="),
            ("device = \"cpu\"", "device = cpu"),
            ("[[waiver]]", "[waiver]"),
            ("reason = \"rounds", "case = \"again"),
        ] {
            let text = FILE.replace(from, to);
            assert_eq!(
                Waivers::parse(&text).expect_err("must be refused").code(),
                Code::ConfigInvalid,
                "{to}"
            );
        }
    }

    #[test]
    fn days_become_dates() {
        for (days, date) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (20_777, "2026-11-20"),
            (47_540, "2100-02-28"),
        ] {
            assert_eq!(Date::of_days(days).to_string(), date);
        }
        assert!(Date::today() > Date::parse("2025-01-01").expect("a date"));
    }
}
