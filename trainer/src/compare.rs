//! A run that goes on against the run that was stored: what differs, and what would make two runs of one.
use crate::checkpoint::TrainState;
use crate::config::Config;
use crate::sources::{Sources, short};
use q4_core::{Code, Error, Result};
use std::collections::BTreeMap;
use std::path::Path;
use toml::{Table, Value};

/// One thing that is not as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// A key, or what else it is.
    pub what: String,
    /// As stored.
    pub was: String,
    /// As asked for.
    pub is: String,
    /// The steps before and the steps after would belong to two runs.
    pub mixes: bool,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} -> {}", self.what, self.was, self.is)
    }
}

/// Keys, or sections with a dot behind, that say how long a run is, how it is watched and where it lies: they
/// may change on the way. All others would mix two runs.
const FREE: [&str; 19] = [
    "train.steps",
    "train.epochs",
    "train.log_every",
    "train.profile",
    "train.recompute",
    "train.keep_values",
    "train.chunk",
    "optimizer.lr",
    "schedule.",
    "guard.",
    "memory.",
    "checkpoint.",
    "eval.every",
    "eval.patience",
    "sample.",
    "behaviour.",
    "export.",
    "model.device",
    "threads",
];

/// Keys of sections without a default, and what was done before there was a choice.
const FORMER: [(&str, &str); 2] = [("lora.base", "\"merged\""), ("lora.targets", "[]")];

/// Keys whose files are compared by content.
const BY_CONTENT: [&str; 3] = ["model.path", "data.train", "data.valid"];

/// Everything in which the run that is asked for differs from the stored one, keys first.
pub fn differences(
    stored: &TrainState,
    c: &Config,
    sources: &Sources,
    threads: usize,
) -> Result<Vec<Difference>> {
    let parse = |text: &str| {
        text.parse::<Table>().map_err(|e| {
            Error::new(Code::Container, "state.json: config: not TOML").have(e.message().to_owned())
        })
    };
    let was = flat(&parse(&stored.config)?);
    let is = flat(&parse(&c.to_toml()?)?);
    let default = flat(&parse(&Config::default().to_toml()?)?);
    let mut found = Vec::new();
    add(
        &mut found,
        "weights of data.train",
        weights(&parse(&stored.config)?),
        weights(&parse(&c.to_toml()?)?),
    );
    let keys: std::collections::BTreeSet<_> = was.keys().chain(is.keys()).collect();
    for key in keys.into_iter().filter(|k| !BY_CONTENT.contains(&k.as_str())) {
        // A key one of the two programs does not have stands for its default.
        let of = |side: &BTreeMap<String, String>| {
            let former = || FORMER.iter().find(|(k, _)| k == key).map(|(_, v)| (*v).to_owned());
            let found = side.get(key).or_else(|| default.get(key)).cloned();
            found.or_else(former).unwrap_or_else(|| "absent".into())
        };
        add(&mut found, key, of(&was), of(&is));
    }
    if stored.threads > 0 {
        add(&mut found, "threads", stored.threads.to_string(), threads.to_string());
    }
    match &stored.sources {
        Some(was) => {
            add(&mut found, "model", short(&was.model), short(&sources.model));
            add(&mut found, "data.train", was.train.to_string(), sources.train.to_string());
            add(&mut found, "data.valid", was.valid.to_string(), sources.valid.to_string());
        }
        None => add(&mut found, "model and data", "not stored".into(), "cannot be compared".into()),
    }
    Ok(found)
}

/// How files are mixed, whatever they are called.
fn weights(config: &Table) -> String {
    let files = config.get("data").and_then(|d| d.get("train")).and_then(Value::as_array);
    let weight = |file: &Value| file.get("weight").map_or("none".into(), Value::to_string);
    let all: Vec<_> = files.into_iter().flatten().map(weight).collect();
    if all.iter().all(|w| w == "none") { "none".into() } else { all.join(", ") }
}

fn add(found: &mut Vec<Difference>, what: &str, was: String, is: String) {
    if was != is {
        let mixes = !FREE.iter().any(|f| *f == what || f.ends_with('.') && what.starts_with(f));
        found.push(Difference { what: what.to_owned(), was, is, mixes });
    }
}

/// Refuses to make one run of two; what may change is returned to be told.
pub fn judge(found: &[Difference], checkpoint: &Path, allowed: bool) -> Result<()> {
    let mixing: Vec<_> = found.iter().filter(|d| d.mixes).map(ToString::to_string).collect();
    if allowed || mixing.is_empty() {
        return Ok(());
    }
    Err(Error::new(Code::Usage, format!("{}: belongs to another run", checkpoint.display()))
        .need("the configuration, model and data it was written with")
        .have(mixing.join("\n"))
        .fix("go on as it was, begin in another checkpoint.dir, or mix both on purpose: --allow-changes"))
}

fn flat(table: &Table) -> BTreeMap<String, String> {
    fn walk(prefix: &str, table: &Table, out: &mut BTreeMap<String, String>) {
        for (name, value) in table {
            let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            match value {
                Value::Table(inner) => walk(&key, inner, out),
                value => {
                    out.insert(key, value.to_string());
                }
            }
        }
    }
    let mut out = BTreeMap::new();
    walk("", table, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Cursor;
    use crate::guard::Guard;
    use crate::sources::Files;
    use std::path::PathBuf;

    fn config(text: &str) -> Config {
        Config::parse(&format!("[data]\ntrain = [\"a.jsonl\"]\n{text}"), &[]).expect("valid")
    }

    fn state(c: &Config, sources: &Sources) -> TrainState {
        TrainState {
            step: 3,
            tokens: 1,
            seed: 0,
            cursor: Cursor::default(),
            guard: Guard::new(c.guard),
            best: None,
            best_step: None,
            stale: 0,
            owed: false,
            threads: 2,
            ranks: 1,
            config: c.to_toml().expect("TOML"),
            sources: Some(sources.clone()),
        }
    }

    #[test]
    fn what_may_change_is_told_and_what_mixes_is_refused() {
        let sources = Sources { model: "ab".into(), ..Sources::default() };
        let stored = state(&config(""), &sources);
        let found = |text: &str| {
            let found = differences(&stored, &config(text), &sources, 2).expect("compared");
            let refused = judge(&found, Path::new("ck"), false).is_err();
            assert!(judge(&found, Path::new("ck"), true).is_ok());
            (found.iter().map(ToString::to_string).collect::<Vec<_>>(), refused)
        };
        assert_eq!(found(""), (vec![], false));
        assert_eq!(found("[optimizer]\nlr = 0.5"), (vec!["optimizer.lr: 0.0001 -> 0.5".into()], false));
        for free in [
            "[train]\nsteps = 7",
            "[schedule]\nkind = \"wsd\"",
            "[export]\ndir = \"x\"",
            "[guard]\nspike = 6.0",
        ] {
            let (lines, refused) = found(free);
            assert!(lines.len() == 1 && !refused, "{free}: {lines:?}");
        }
        for mixing in [
            "[train]\nseed = 1",
            "[train]\naccumulate = 2",
            "[optimizer]\nstate = \"8bit\"",
            "[optimizer]\nmaster = \"bf16\"",
            "[optimizer]\nbeta2 = 0.99",
            "[quant]\nweights = \"none\"",
            "[lora]\nrank = 4",
            "[model]\ninit = \"random\"",
        ] {
            let (lines, refused) = found(mixing);
            assert!(!lines.is_empty() && refused, "{mixing}: {lines:?}");
        }
    }

    #[test]
    fn files_are_compared_by_content() {
        let dir = tempfile::tempdir().expect("directory");
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).expect("written");
            path
        };
        let of =
            |path: PathBuf| Sources { train: Files::of(&[path], 2).expect("hashed"), ..Sources::default() };
        let (a, moved, other) = (file("a", "x\ny\n"), file("b", "x\ny\n"), file("c", "x\nz\n"));
        let stored = state(&config(""), &of(a));
        let found = |sources: &Sources, threads| {
            differences(&stored, &config(""), sources, threads).expect("compared")
        };
        assert_eq!(found(&of(moved.clone()), 2), []);
        assert_eq!(found(&of(moved), 1).iter().map(|d| d.mixes).collect::<Vec<_>>(), [false]);
        let changed = found(&of(other), 2);
        assert!(changed.len() == 1 && changed[0].mixes && changed[0].what == "data.train", "{changed:?}");
    }
}
