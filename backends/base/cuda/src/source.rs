//! CUDA C++ and the files it includes by name.

/// A name, and the text that `#include "NAME"` stands for.
pub type File = (&'static str, &'static str);

/// CUDA C++ that needs no header but files which are known by name.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Short name: of the file in the cache and in messages.
    pub name: &'static str,
    /// The text, usually `include_str!`.
    pub text: &'static str,
    /// What it may include beside the files of this crate.
    pub files: &'static [File],
}

/// [`File`]s of one folder, named from the file that says so: `files!("../cuda/", "a.cuh", "b.cuh")`.
#[macro_export]
macro_rules! files {
    ($folder:literal, $($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!($folder, $name)))),*]
    };
}

/// What kernels of several crates share.
const SHARED: &[File] = files!(
    "../cuda/",
    "types.cuh",
    "convert.cuh",
    "codec.cuh",
    "launch.cuh",
    "sums.cuh",
    "unit.cuh",
    "deal.cuh",
    "rows.cuh",
    "rows.cu",
    "quantise.cuh",
    "few.cuh",
    "row.cuh",
    "hopper.cuh",
    "place.cuh",
);

impl Source {
    /// The text with every file that it includes in its place, once. A name that is not known stays, for the
    /// compiler to complain about.
    pub fn whole(&self) -> String {
        let (mut whole, mut met) = (String::new(), Vec::new());
        self.put(&format!("{}.cu", self.name), self.text, &mut met, &mut whole);
        whole
    }

    fn put(&self, name: &str, text: &str, met: &mut Vec<&'static str>, whole: &mut String) {
        for (i, line) in text.lines().enumerate() {
            let named = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
            match self.files.iter().chain(SHARED).find(|(name, _)| Some(*name) == named) {
                Some((file, text)) => {
                    if !met.contains(file) {
                        met.push(file);
                        *whole += &format!("#line 1 \"{file}\"\n");
                        self.put(file, text, met, whole);
                    }
                    *whole += &format!("#line {} \"{name}\"\n", i + 2);
                }
                None => {
                    *whole += line;
                    whole.push('\n');
                }
            }
        }
    }
}

#[test]
fn files_are_included_by_name_and_once() {
    let files: &[File] = &[("a.cuh", "#include \"b.cuh\"\na\n"), ("b.cuh", "b\n")];
    let text = "#include \"a.cuh\"\n#include \"b.cuh\"\n#include \"unknown\"\nmain\n";
    let lines = Source { name: "main", text, files }.whole();
    let lines: Vec<_> = lines.lines().filter(|l| !l.starts_with("#line")).collect();
    assert_eq!(lines, ["b", "a", "#include \"unknown\"", "main"]);
    for (name, text) in SHARED {
        let whole = Source { name, text, files: &[] }.whole();
        assert!(!whole.contains("#include"), "{name} includes what is not there");
    }
}
