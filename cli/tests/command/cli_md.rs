//! How `docs/cli.md` is read: sections by command, in each a table of options with examples.

const TEXT: &str = include_str!("../../../docs/cli.md");

/// The section of a command.
pub struct Section {
    /// `q4 generate`; the global options are those of `q4`.
    pub command: String,
    /// Its options, one a row.
    pub rows: Vec<Row>,
}

/// A row: an option as it is typed, what it does, and commands that use it, or why there are none.
pub struct Row {
    pub option: String,
    pub does: String,
    pub example: String,
}

impl Row {
    /// The commands.
    pub fn examples(&self) -> impl Iterator<Item = &str> {
        self.example.split('`').skip(1).step_by(2)
    }
}

/// What makes the files that examples begin with.
pub fn setup() -> &'static str {
    TEXT.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap_or_default()
}

/// All sections, in their order.
pub fn sections() -> Vec<Section> {
    let parts = TEXT.split("\n## `").skip(1);
    let section = |part: &str| {
        let (command, text) = part.split_once("`\n")?;
        let rows = text.lines().filter_map(row).collect();
        Some(Section { command: command.to_owned(), rows })
    };
    parts.filter_map(section).collect()
}

fn row(line: &str) -> Option<Row> {
    let line = line.strip_prefix("| `")?.strip_suffix(" |")?;
    // In a table a bar is `\|`.
    let cells: Vec<_> = line.split(" | ").map(|cell| cell.replace("\\|", "|")).collect();
    let [option, does, example] = <[String; 3]>::try_from(cells).ok()?;
    Some(Row { option: format!("`{option}"), does, example })
}
