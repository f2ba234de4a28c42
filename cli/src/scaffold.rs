//! `q4 plugin`: the C header, and new projects for backends of third parties that build without a source tree
//! of q4.
//!
//! Everything is part of the executable, so a project is for the program that will load it.
use crate::args::{Language, NewArgs, PluginArgs, PluginVerb};
use crate::context::Context;
use crate::report::{Outcome, stdout};
use q4_core::{BUILTINS, Code, Error, Result};
use q4_plugin_abi::{ABI_MAJOR, ABI_MINOR, HEADER, SOURCES};
use serde::Serialize;
use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A file of a project: where, and its text.
type File = (&'static str, String);

macro_rules! templates {
    ($($name:literal = $file:literal),*) => { vec![$(($name, include_str!(concat!("../templates/", $file)))),*] };
}

/// Runs the verb.
///
/// # Errors
/// `Usage` for a name that no backend can have and for a folder that has something in it; `Io`.
pub fn run(cx: &Context, args: &PluginArgs) -> Result<Outcome> {
    match &args.verb {
        PluginVerb::Header if cx.report().is_json() => {
            let version = format!("{ABI_MAJOR}.{ABI_MINOR}");
            cx.report().document("plugin-header", &Header { version, header: HEADER })?;
        }
        PluginVerb::Header => stdout(HEADER)?,
        PluginVerb::New(args) => new(cx, args)?,
    }
    Ok(Outcome::Done)
}

#[derive(Serialize)]
struct Header {
    /// Of the interface.
    version: String,
    header: &'static str,
}

#[derive(Serialize)]
struct Written {
    name: String,
    language: Language,
    folder: PathBuf,
    files: Vec<&'static str>,
    library: String,
}

fn new(cx: &Context, args: &NewArgs) -> Result<()> {
    let name = name(args)?;
    let library = format!("{DLL_PREFIX}{}{DLL_SUFFIX}", name.replace('-', "_"));
    let files = files(args.lang, &name, &args.vendor, &library)?;
    write(&args.dir, &files)?;
    if cx.report().is_json() {
        let names = files.iter().map(|f| f.0).collect();
        let (language, folder) = (args.lang, args.dir.clone());
        return cx
            .report()
            .document("plugin-new", &Written { name, language, folder, files: names, library });
    }
    let build = match args.lang {
        Language::Rust => format!("cargo build --release && cp target/release/{library} ."),
        Language::C | Language::Cpp => "make".into(),
    };
    cx.report().text(&format!(
        "wrote {name} into {}\n\n  cd {0}\n  {build}\n  q4 conformance --plugin ./{library} --backend {name}\n",
        args.dir.display()
    ))
}

/// The name of the backend: the one that was given, else that of the folder.
fn name(args: &NewArgs) -> Result<String> {
    let (name, from) = match &args.name {
        Some(name) => (name.clone(), "--name"),
        None => {
            let folder = std::path::absolute(&args.dir).map_err(|e| Error::io(&args.dir, &e))?;
            let last = folder.file_name().unwrap_or_default().to_string_lossy();
            (last.to_lowercase().replace(['_', ' '], "-"), "the folder's name")
        }
    };
    let refused = |have: String| {
        Error::new(Code::Usage, format!("{from} is the name of the backend"))
            .need("1 to 63 of a-z, 0-9 and -, a letter first, and no name of a backend that q4 has")
            .have(have)
            .fix("q4 plugin new --name NAME ...")
    };
    let is_letter = |c: char| c.is_ascii_lowercase();
    let fits = name.len() < 64
        && name.starts_with(is_letter)
        && name.chars().all(|c| is_letter(c) || c.is_ascii_digit() || c == '-');
    if !fits || BUILTINS.contains(&&*name) {
        return Err(refused(format!("`{name}`")));
    }
    // It stands in quotes in three languages, and is a constant of 64 bytes.
    let is_plain = |c: char| !c.is_control() && !matches!(c, '"' | '\\' | '{' | '}');
    if args.vendor.is_empty() || args.vendor.len() > 63 || !args.vendor.chars().all(is_plain) {
        return Err(Error::new(Code::Usage, "--vendor")
            .need("1 to 63 bytes without quotes, braces or backslashes")
            .have(format!("`{}`", args.vendor)));
    }
    Ok(name)
}

fn files(language: Language, name: &str, vendor: &str, library: &str) -> Result<Vec<File>> {
    let templates = match language {
        Language::C => templates!(
            "README.md" = "c/README.md",
            "Makefile" = "c/Makefile",
            ".gitignore" = "c/gitignore",
            "kernel.c" = "c/kernel.c",
            "kernel.h" = "c/kernel.h",
            "plugin.c" = "c/plugin.c"
        ),
        Language::Cpp => templates!(
            "README.md" = "cpp/README.md",
            "Makefile" = "cpp/Makefile",
            ".gitignore" = "cpp/gitignore",
            "kernel.cpp" = "cpp/kernel.cpp",
            "kernel.hpp" = "cpp/kernel.hpp",
            "plugin.cpp" = "cpp/plugin.cpp"
        ),
        Language::Rust => templates!(
            "README.md" = "rust/README.md",
            "Cargo.toml" = "rust/Cargo.toml.txt",
            ".gitignore" = "rust/gitignore",
            "src/kernel.rs" = "rust/src/kernel.rs",
            "src/lib.rs" = "rust/src/lib.rs",
            "src/operand.rs" = "rust/src/operand.rs"
        ),
    };
    let fill = |text: &str| {
        text.replace("{{name}}", name)
            .replace("{{lib}}", &name.replace('-', "_"))
            .replace("{{so}}", library)
            .replace("{{vendor}}", vendor)
            .replace("{{q4}}", env!("CARGO_PKG_VERSION"))
    };
    let mut all: Vec<File> = templates.iter().map(|(file, text)| (*file, fill(text))).collect();
    all.push(("q4_plugin.h", HEADER.to_owned()));
    if language == Language::Rust {
        all.push(("src/q4_plugin.rs", binding()?));
    }
    Ok(all)
}

/// The crate `q4-plugin-abi` as one file, its modules inside of it.
fn binding() -> Result<String> {
    let [(_, root), modules @ ..] = SOURCES;
    // What the crate says of its own sources is of no use there.
    let root = root.split("\n/// `q4_plugin.h`, the same contract").next().unwrap_or(root);
    let mut text = root.replace("#![no_std]\n", "");
    for (name, source) in modules {
        let (from, source) = (format!("\nmod {name};\n"), source.replace("crate::", "super::"));
        if !text.contains(&from) {
            return Err(Error::new(Code::Internal, format!("the binding has no module {name}")));
        }
        text = text.replace(&from, &format!("\nmod {name} {{\n{source}}}\n"));
    }
    Ok(text)
}

/// Writes all files or none: beside the folder first, which then gets its name at once.
fn write(folder: &Path, files: &[File]) -> Result<()> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |e: std::io::Error| Error::io(&path, &e)
    };
    let taken = |have: &str| {
        Error::new(Code::Usage, format!("{} is there already", folder.display()))
            .need("a folder that does not exist, or an empty one")
            .have(have)
    };
    let folder = std::path::absolute(folder).map_err(io(folder))?;
    match fs::read_dir(&folder).map(|mut entries| entries.next().is_none()) {
        Ok(true) => {}
        Ok(false) => return Err(taken("one with files in it")),
        Err(e) if e.kind() == ErrorKind::NotFound && fs::symlink_metadata(&folder).is_err() => {}
        Err(e) if e.kind() == ErrorKind::PermissionDenied => return Err(io(&folder)(e)),
        Err(_) => return Err(taken("a file, or a link that leads nowhere")),
    }
    let parent = folder.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(parent).map_err(io(parent))?;
    // It goes away again when anything fails.
    let draft = tempfile::Builder::new().prefix(".q4-plugin-").tempdir_in(parent).map_err(io(parent))?;
    let inner = draft.path().join("project");
    for (name, text) in files {
        let path = inner.join(name);
        let above = path.parent().unwrap_or(&inner);
        fs::create_dir_all(above).map_err(io(above))?;
        fs::write(&path, text).map_err(io(&path))?;
    }
    // On Unix an empty folder is replaced, and one that is not empty any more is an error.
    #[cfg(windows)]
    let _ = fs::remove_dir(&folder);
    fs::rename(&inner, &folder).map_err(io(&folder))
}
