//! The options of `q4 plugin`.
use clap::{Args, Subcommand, ValueEnum, ValueHint};
use serde::Serialize;
use std::path::PathBuf;

/// `q4 plugin`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
A project computes one kind of product and is certified for it as it stands: NVFP4 weights, inputs as they are, on the CPU.

Examples:
  q4 plugin new --lang c ./volta && cd volta && make
  q4 conformance --plugin ./libvolta.so --backend volta
  q4 plugin header > q4_plugin.h")]
pub struct PluginArgs {
    /// What to write.
    #[command(subcommand)]
    pub verb: PluginVerb,
}

/// What `q4 plugin` writes.
#[derive(Subcommand, Debug)]
pub enum PluginVerb {
    /// Print q4_plugin.h, the contract of this q4 with backends in shared libraries.
    Header,
    /// Write a project for a new backend into a folder.
    New(NewArgs),
}

/// `q4 plugin new`.
#[derive(Args, Debug)]
pub struct NewArgs {
    /// Language of the project.
    #[arg(long, value_enum)]
    pub lang: Language,
    /// Name of the backend, as users will call it [default: that of the folder].
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Who makes it.
    #[arg(long, value_name = "TEXT", default_value = "unnamed vendor")]
    pub vendor: String,
    /// A folder that does not exist, or is empty.
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
}

/// Languages of projects.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Language {
    /// C11, with a Makefile.
    C,
    /// C++17, with a Makefile.
    #[value(alias = "c++", alias = "cxx")]
    Cpp,
    /// Rust, with Cargo, no dependencies.
    Rust,
}
