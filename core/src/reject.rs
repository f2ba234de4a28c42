//! Why a candidate was turned down: a stable code, what was needed and what was found.
use serde::Serialize;
use std::{borrow::Cow, fmt};

macro_rules! reject_codes {
    ($($name:ident = $spelling:literal, $title:literal;)*) => {
        /// Why a candidate was turned down. Codes are stable; texts are not.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
        #[serde(rename_all = "kebab-case")]
        #[non_exhaustive]
        pub enum RejectCode { $(#[doc = $title] $name,)* }

        impl RejectCode {
            /// Every code.
            pub const ALL: &'static [RejectCode] = &[$(RejectCode::$name,)*];
            /// Stable kebab-case spelling.
            pub const fn as_str(self) -> &'static str { match self { $(Self::$name => $spelling,)* } }
            /// What the code stands for, in a few words.
            pub const fn title(self) -> &'static str { match self { $(Self::$name => $title,)* } }
        }
    };
}

reject_codes! {
    NotSelected            = "not-selected", "another backend was named or is better, or a third party was not named";
    PathNotAdmitted        = "path-not-admitted", "the policy excludes this path";
    SchemaUnsupported      = "schema-unsupported", "another encoding of the weight is needed";
    PathUnsupported        = "path-unsupported", "the backend does not have this path";
    OpUnsupported          = "op-unsupported", "an operation is asked for that it does not have";
    ActivationsUnsupported = "activations-unsupported", "another activation format is needed";
    DtypeUnsupported       = "dtype-unsupported", "another element type is needed";
    LayoutUnsupported      = "layout-unsupported", "another layout of scales or codes is needed";
    ShapeUnsupported       = "shape-unsupported", "the shape does not fit the kernel";
    NotCompiledIn          = "not-compiled-in", "this build does not contain it";
    DeviceAbsent           = "device-absent", "the device does not exist";
    DeviceUnsupported      = "device-unsupported", "it computes on devices of another kind";
    DeviceArch             = "device-arch", "the device is of another architecture";
    KernelImageMissing     = "kernel-image-missing", "the library has no kernel for this device";
    DriverTooOld           = "driver-too-old", "the driver is older than needed";
    LibraryMissing         = "library-missing", "no such file, or no whole library";
    LibraryTooOld          = "library-too-old", "the library speaks an older interface";
    LibraryUntrusted       = "library-untrusted", "everybody may write the file or a folder above it, or it loads what its file does not name";
    SymbolMissing          = "symbol-missing", "the library does not export what it must";
    AbiMismatch            = "abi-mismatch", "the library is for another machine or breaks the interface";
    NameTaken              = "name-taken", "another backend has this name already";
    SelfCheckFailed        = "self-check-failed", "it computes something else than it says";
    ConformanceMissing     = "conformance-missing", "no valid certificate for this file on this machine";
    UnifiedMemory          = "unified-memory", "its weights stay in plain memory of the device";
    DisabledByUser         = "disabled-by-user", "the user switched it off";
    InvalidArgument        = "invalid-argument", "the backend did not understand the question";
    DiedInProbe            = "died-in-probe", "the child process that loaded it first was ended by it";
    TimedOut               = "timed-out", "the child process that loaded it first did not come back";
    Panicked               = "panicked", "it panicked, and is not called again";
    Internal               = "internal", "it failed in a way that has no other code";
}

impl RejectCode {
    /// The code with that spelling, for reasons that cross a C boundary.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|c| c.as_str() == text)
    }
}

/// One reason: a code, what was needed and what was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reject {
    /// Stable code.
    pub code: RejectCode,
    /// E.g. `k % 32 == 0`.
    pub need: Cow<'static, str>,
    /// E.g. `k = 4000`.
    pub have: Cow<'static, str>,
}

impl Reject {
    /// Shorthand.
    pub fn new(
        code: RejectCode,
        need: impl Into<Cow<'static, str>>,
        have: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { code, need: need.into(), have: have.into() }
    }
}
impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<20} need {}; have {}", self.code.as_str(), self.need, self.have)
    }
}

/// `Ok(())`, or *every* reason (never an empty list).
pub type Verdict = std::result::Result<(), Vec<Reject>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_one_spelling_and_is_documented() {
        let page = include_str!("../../docs/errors.md");
        for (i, c) in RejectCode::ALL.iter().enumerate() {
            assert_eq!(RejectCode::parse(c.as_str()), Some(*c));
            assert_eq!(serde_json::to_value(c).ok(), Some(c.as_str().into()));
            assert!(RejectCode::ALL[..i].iter().all(|other| other.title() != c.title()), "{c:?}");
            let row = format!("| `{}` | {} |", c.as_str(), c.title());
            assert!(page.contains(&row), "docs/errors.md lacks {row}");
        }
        assert_eq!(RejectCode::parse("Internal"), None);
    }

    #[test]
    fn reject_codes_round_trip() {
        for c in ["device-arch", "shape-unsupported", "internal", "library-too-old"] {
            assert_eq!(RejectCode::parse(c).map(RejectCode::as_str), Some(c));
        }
    }
}
