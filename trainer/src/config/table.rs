//! All keys for readers: as a commented configuration, and as the table of docs/training.md.
use super::*;

/// What `q4 train init` writes.
pub const START: &str = include_str!("start.toml");

/// A section: name, what it is for, whether it is there without being named, its fields.
type Section = (&'static str, &'static str, bool, &'static [Field]);

const ALL: [Section; 14] = [
    ("model", "What is trained.", true, ModelConfig::FIELDS),
    (
        "data",
        "What it learns from. A file may stand for a list of one, a table of `FILE = weight` for a mixture.",
        true,
        DataConfig::FIELDS,
    ),
    ("train", "How long and in which pieces.", true, TrainConfig::FIELDS),
    ("optimizer", "AdamW.", true, OptimizerConfig::FIELDS),
    ("schedule", "Learning rate over the steps.", true, ScheduleConfig::FIELDS),
    ("guard", "What a bad step is.", true, GuardOptions::FIELDS),
    ("quant", "4-bit weights and inputs of the forward pass.", true, QuantConfig::FIELDS),
    (
        "lora",
        "Low-rank adapters on a frozen base; without this section all weights are trained.",
        false,
        LoraConfig::FIELDS,
    ),
    ("memory", "What it may use.", true, MemoryConfig::FIELDS),
    ("checkpoint", "Where it can go on from.", true, CheckpointConfig::FIELDS),
    ("eval", "Loss on held-out data.", true, EvalConfig::FIELDS),
    ("sample", "Answers written down on the way.", true, SampleConfig::FIELDS),
    ("behaviour", "Prompts with answers that must and must not come.", true, BehaviourConfig::FIELDS),
    ("export", "What is written in the end.", true, ExportConfig::FIELDS),
];

impl Config {
    /// Every key with its value here and what it is for, as TOML that reads back as this configuration; what
    /// has no value is a comment.
    pub fn commented(&self) -> Result<String> {
        let (mine, adapters) = (self.table()?, of(&LoraConfig::default())?);
        let mut out = String::new();
        for (name, about, _, fields) in ALL {
            let values = mine.get(name).and_then(Value::as_table);
            let hidden = if values.is_some() { "" } else { "# " };
            let values = values.unwrap_or(&adapters);
            out += &format!("# {about}\n{hidden}[{name}]\n");
            for (field, doc) in fields {
                out += &format!("# {}\n", sentence(name, field, doc));
                out += &match values.get(*field) {
                    Some(value) => format!("{hidden}{field} = {value}\n"),
                    None => format!("# {field} = {}\n", absent(field)),
                };
            }
            out.push('\n');
        }
        out.truncate(out.trim_end().len() + 1);
        Ok(out)
    }
}

/// Rows of `key, default, meaning` for every key, as Markdown.
#[cfg(test)]
fn reference() -> Result<String> {
    let (defaults, adapters) = (of(&Config::default())?, of(&LoraConfig::default())?);
    let mut out = String::from("| key | default | |\n|---|---|---|\n");
    for (name, about, always, fields) in ALL {
        let values = defaults.get(name).and_then(Value::as_table).unwrap_or(&adapters);
        out += &format!("| **`[{name}]`** | {} | {about} |\n", if always { "" } else { "absent" });
        for (field, doc) in fields {
            let value = values.get(*field).map_or("absent".into(), |v| format!("`{v}`"));
            out += &format!("| `{name}.{field}` | {value} | {} |\n", sentence(name, field, doc));
        }
    }
    Ok(out)
}

pub(super) fn of(value: &impl Serialize) -> Result<Table> {
    Table::try_from(value).map_err(|e| Error::new(Code::Internal, format!("configuration: {e}")))
}

/// What a field is for, and the names it takes.
fn sentence(section: &str, field: &str, doc: &str) -> String {
    let doc = doc.trim();
    match names(section, field) {
        Some(names) => format!("{doc} One of {names}."),
        None => doc.to_owned(),
    }
}

/// The names a field takes, out of the mouth of what reads it.
fn names(section: &str, field: &str) -> Option<String> {
    let e = Config::parse("", &[(format!("{section}.{field}"), "?".into())]).err()?;
    let (_, problems) = e.parts().find(|(part, _)| *part == "have")?;
    let need = format!("{section}.{field}: need one of ");
    let line = problems.lines().find_map(|l| l.strip_prefix(&need))?;
    Some(line.rsplit_once(", have ")?.0.to_owned())
}

/// How a field would be written that has no value.
fn absent(field: &str) -> &'static str {
    match field {
        "resume" => "false",
        "epochs" => "3.0",
        "steps" => "1000",
        "init" => "\"adapter\"",
        _ => "\"...\"",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commented_configuration_reads_back() {
        let mut c = Config::preset(Preset::Lora8g);
        c.data.train = vec!["a \"b\".jsonl".into()].into();
        c.behaviour.suite = Some("s".into());
        c.behaviour.gates.insert("who am i".into(), 0.95);
        for c in [
            c,
            Config {
                data: DataConfig { train: vec!["x".into()].into(), ..<_>::default() },
                ..<_>::default()
            },
        ] {
            let text = c.commented().expect("TOML");
            assert_eq!(Config::parse(&text, &[]).expect(&text), c);
        }
    }

    #[test]
    fn every_key_has_a_line_and_a_meaning() {
        let text = Config::default().commented().expect("TOML");
        for (name, _, _, fields) in ALL {
            assert!(text.contains(&format!("[{name}]\n")), "{name}");
            for (field, doc) in fields {
                assert!(doc.trim().len() > 3, "{name}.{field}");
                let written =
                    text.lines().any(|l| l.trim_start_matches("# ").starts_with(&format!("{field} = ")));
                assert!(written, "{name}.{field}");
            }
        }
        assert!(text.contains("One of `cosine`, `linear`, `constant`, `wsd`."), "{text}");
        // The names of sections and this table are one list.
        assert_eq!(ALL.map(|s| s.0), SECTIONS);
    }

    #[test]
    fn the_first_configuration_is_one() {
        let c = Config::parse(START, &[]).expect("valid");
        assert!(c.export.dir.is_some() && c.checkpoint.dir.is_some());
    }

    /// `Q4_WRITE_DOCS=1` writes the table.
    #[test]
    fn the_page_has_the_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/training.md");
        let page = std::fs::read_to_string(&path).expect("docs/training.md");
        let (begin, end) = ("<!-- keys -->\n", "<!-- /keys -->");
        let (head, rest) = page.split_once(begin).expect("a place for the table");
        let (old, tail) = rest.split_once(end).expect("the end of the table");
        let new = reference().expect("table");
        if std::env::var_os("Q4_WRITE_DOCS").is_some() {
            std::fs::write(&path, format!("{head}{begin}{new}{end}{tail}")).expect("written");
        } else {
            assert!(
                old == new,
                "docs/training.md: Q4_WRITE_DOCS=1 cargo test -p q4-trainer the_page writes it"
            );
        }
    }
}
