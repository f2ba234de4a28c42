//! One error shape for the whole program: a stable code, what happened, what was needed, what was found, what
//! to do.
use serde::{Serialize, Serializer, ser::SerializeStruct};
use std::{borrow::Cow, fmt};

macro_rules! codes {
    ($($name:ident = $id:literal, $exit:literal, $title:literal;)*) => {
        /// Stable identity of an error. The text of an [`Error`] may change, its code and exit status may
        /// not.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Code { $(#[doc = $title] $name,)* }

        impl Code {
            /// Every code, in numeric order.
            pub const ALL: &'static [Code] = &[$(Code::$name,)*];
            /// `Q4-E` and four digits.
            pub const fn id(self) -> &'static str { match self { $(Self::$name => concat!("Q4-E", $id),)* } }
            /// Exit status of a process that ends with this error.
            pub const fn exit(self) -> u8 { match self { $(Self::$name => $exit,)* } }
            /// What the code stands for, in a few words.
            pub const fn title(self) -> &'static str { match self { $(Self::$name => $title,)* } }
        }
    };
}

codes! {
    Usage              = "0101", 2, "the command line names what does not exist, or contradicts itself";
    Findings           = "0102", 3, "the check ran and found problems";
    ModelMissing       = "0201", 4, "a file of the model is missing";
    Container          = "0202", 4, "a weight file is damaged or not what its name says";
    TensorMissing      = "0203", 4, "a tensor the model needs is not in the file";
    TensorShape        = "0204", 4, "a tensor has a shape the model cannot use";
    TensorType         = "0205", 4, "a tensor has an element type the format does not allow";
    ScaleInvalid       = "0206", 4, "a scale is NaN, infinite, zero or negative";
    SchemaInvalid      = "0207", 4, "the 4-bit tensors of a layer contradict each other";
    ConfigInvalid      = "0208", 4, "config.json is damaged or describes an unsupported model";
    TokenizerInvalid   = "0209", 4, "the tokenizer is damaged";
    TemplateInvalid    = "0210", 4, "the chat template does not compile, fails or exceeds its bounds";
    NonFinite          = "0211", 4, "a layer produced NaN or infinity, or the logits of an answer are the same for every token or position";
    ContextFull        = "0212", 4, "the prompt and the answer do not fit into the context";
    ValueInvalid       = "0213", 4, "a stored value is outside the range of its format";
    ConversationInvalid = "0214", 4, "a conversation file is damaged or not one";
    NoneEligible       = "0301", 6, "no backend can serve a layer under the given policy";
    UnknownBackend     = "0302", 6, "no backend has that name";
    Ambiguous          = "0303", 6, "two backends are equally good";
    DowngradeDenied    = "0304", 6, "only a downgrade is left, and none was agreed to";
    OverrideUnused     = "0305", 6, "a named backend would serve no layer";
    LibraryRefused     = "0306", 6, "a shared library cannot be loaded or does not speak our interface";
    SelfCheckFailed    = "0307", 6, "a backend computes something other than its schema says";
    ShapeMismatch      = "0308", 6, "operands of a product do not fit together";
    Unsupported        = "0309", 6, "the backend does not offer this operation";
    PathBroken         = "0310", 6, "a backend ran another path than the one selected";
    UnifiedMemory      = "0311", 6, "unified memory is required and cannot be had";
    DeviceMissing      = "0312", 6, "the requested device does not exist or cannot be used";
    BackendFailed      = "0313", 6, "a backend failed during a call";
    OutOfMemory        = "0401", 7, "the program would need more memory than it may use";
    Io                 = "0501", 8, "the operating system refused to read or write";
    ServerRefused      = "0502", 8, "a server refused a request";
    ServerFailed       = "0503", 8, "a server failed, went away, or does not speak the protocol";
    RankLost           = "0504", 8, "another rank of a training ended, or cannot be reached";
    ConformanceFailed  = "0601", 5, "a backend does not meet the suite";
    Internal           = "0901", 1, "a bug in q4";
}

/// What went wrong, in the four parts a user can act on.
///
/// ```
/// use q4_core::{Code, Error};
///
/// let e = Error::new(Code::TensorShape, "q_proj")
///     .need("[4, 8]")
///     .have("[4, 7]")
///     .fix("export the model again")
///     .within("model.safetensors");
/// assert_eq!((e.code().id(), e.code().exit()), ("Q4-E0204", 4));
/// assert_eq!(
///     e.to_string(),
///     "Q4-E0204: model.safetensors: q_proj\n  need: [4, 8]\n  have: [4, 7]\n  fix: export the model again"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(Box<Parts>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Parts {
    code: Code,
    what: String,
    need: Option<String>,
    have: Option<String>,
    fix: Option<String>,
}

/// Result of everything in q4 that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// `what`: one line, starting with the thing that failed (a layer, a tensor, a file, a flag).
    pub fn new(code: Code, what: impl Into<String>) -> Self {
        Self(Box::new(Parts { code, what: what.into(), need: None, have: None, fix: None }))
    }
    /// What would have been acceptable.
    pub fn need(mut self, need: impl Into<String>) -> Self {
        self.0.need = Some(need.into());
        self
    }
    /// What was found instead.
    pub fn have(mut self, have: impl Into<String>) -> Self {
        self.0.have = Some(have.into());
        self
    }
    /// What the user can do now, best as a command.
    pub fn fix(mut self, fix: impl Into<String>) -> Self {
        self.0.fix = Some(fix.into());
        self
    }
    /// Puts a subject in front of what happened: `model.safetensors: header ...`.
    pub fn within(mut self, subject: impl fmt::Display) -> Self {
        self.0.what = format!("{subject}: {}", self.0.what);
        self
    }
    /// The stable code.
    pub fn code(&self) -> Code {
        self.0.code
    }
    /// What happened.
    pub fn what(&self) -> &str {
        &self.0.what
    }
    /// The four parts as `(name, text)`, those that are set.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let p = &*self.0;
        [
            ("what", Some(&p.what)),
            ("need", p.need.as_ref()),
            ("have", p.have.as_ref()),
            ("fix", p.fix.as_ref()),
        ]
        .into_iter()
        .filter_map(|(k, v)| v.map(|v| (k, v.as_str())))
    }
    /// What a parser of command lines said, of which the first line counts.
    pub fn usage(said: &str) -> Self {
        let what = said.lines().next().unwrap_or_default();
        Self::new(Code::Usage, what.strip_prefix("error: ").unwrap_or(what))
    }
    /// An I/O failure on `path`; a file that does not exist is a missing model file.
    pub fn io(path: &std::path::Path, e: &std::io::Error) -> Self {
        match e.kind() {
            std::io::ErrorKind::NotFound => {
                Self::new(Code::ModelMissing, format!("{}: no such file or folder", path.display()))
            }
            _ => Self::new(Code::Io, format!("{}: {e}", path.display())),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &*self.0;
        write!(f, "{}: {}", p.code.id(), p.what)?;
        for (name, text) in [("need", &p.need), ("have", &p.have), ("fix", &p.fix)] {
            if let Some(text) = text {
                write!(f, "\n  {name}: {}", Cow::from(text.replace('\n', "\n        ")))?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// `code`, `exit`, `what`, `need`, `have` and `fix`, as every document of an error has them; parts that are
/// not set are null.
impl Serialize for Error {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        let p = &*self.0;
        let mut fields = to.serialize_struct("Error", 6)?;
        fields.serialize_field("code", p.code.id())?;
        fields.serialize_field("exit", &p.code.exit())?;
        fields.serialize_field("what", &p.what)?;
        fields.serialize_field("need", &p.need)?;
        fields.serialize_field("have", &p.have)?;
        fields.serialize_field("fix", &p.fix)?;
        fields.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_ordered() {
        let ids: Vec<_> = Code::ALL.iter().map(|c| c.id()).collect();
        let mut sorted = ids.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), ids.len());
        assert!(Code::ALL.iter().all(|c| matches!(c.exit(), 1..=8)));
    }

    #[test]
    fn every_code_is_documented() {
        let page = include_str!("../../docs/errors.md");
        for c in Code::ALL {
            let row = format!("| {} | {} | {} |", c.id(), c.exit(), c.title());
            assert!(page.contains(&row), "docs/errors.md lacks {row}");
        }
    }

    #[test]
    fn every_part_is_printed() {
        let e = Error::new(Code::TensorShape, "q_proj")
            .need("[4, 8]")
            .have("[4, 7]")
            .fix("re-export")
            .within("a.safetensors");
        assert_eq!(
            e.to_string(),
            "Q4-E0204: a.safetensors: q_proj\n  need: [4, 8]\n  have: [4, 7]\n  fix: re-export"
        );
    }
}
