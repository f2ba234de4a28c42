//! The options of `q4 conformance`.
use clap::{Args, ValueHint};
use q4_conformance::Part;
use std::path::PathBuf;

/// `q4 conformance`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Judges the backend that --backend names, else those that --plugin brought, else every built-in. Every case runs in a child
process, and a plugin in a child of that: who judges maps none of it. A case is named so that --replay finds it again. The exit status is 5 when anything is wrong or nothing ran.

Examples:
  q4 conformance --backend nvfp4-kernel --report-html report.html
  q4 conformance --plugin ./libmine.so --level L1
  q4 conformance --level L2 --sample 20
  q4 conformance --backend nf4-kernel --replay 'CASE'
  gdb --args q4 conformance --plugin ./libmine.so --replay 'CASE' --in-process")]
pub struct ConformanceArgs {
    /// What the backend must be fit for: inference, or training, which adds the backward product.
    #[arg(long, value_name = "PROFILE", default_value = "training")]
    pub profile: String,
    /// Only these levels: L0 to L5, or abi, decode, forward, backward, negative, honesty.
    #[arg(long, value_name = "LEVEL", value_delimiter = ',')]
    pub level: Vec<String>,
    /// Only claims that match, e.g. nvfp4@1 or '*int8*'.
    #[arg(long, value_name = "GLOB")]
    pub claim: Vec<String>,
    /// Seed of the generated cases.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// At most this many cases of each level and claim, chosen by the seed; no certificate.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub sample: Option<u64>,
    /// Only this case.
    #[arg(long, value_name = "CASE")]
    pub replay: Option<String>,
    /// Run the cases in this process, the plugin's own file mapped into it: for a debugger, valgrind, perf
    /// or a sanitizer. No certificate, and a crash ends the run.
    #[arg(long, conflicts_with = "runner")]
    pub in_process: bool,
    /// Print the names of the cases and run none.
    #[arg(long)]
    pub list: bool,
    /// Known failures, each with a reason, a device and an expiry date.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub waivers: Option<PathBuf>,
    /// Seconds one case may take.
    #[arg(long, value_name = "S", default_value_t = 120)]
    pub time_limit: u64,
    /// Memory a child process may take, e.g. 4GiB.
    #[arg(long, value_name = "SIZE", value_parser = super::bytes, default_value = "4GiB")]
    pub case_memory: u64,
    /// What starts the child processes, with its arguments: an emulator, for a q4 of another architecture,
    /// or a tool.
    #[arg(long, value_name = "COMMAND")]
    pub runner: Option<String>,
    /// Write the report as JSON.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub report_json: Option<PathBuf>,
    /// Write the report as JUnit XML.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub report_junit: Option<PathBuf>,
    /// Write the report as one HTML page.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub report_html: Option<PathBuf>,
    /// Where certificates are kept [default: $XDG_DATA_HOME/q4/certificates].
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub certificates: Option<PathBuf>,
    /// Write no certificate.
    #[arg(long)]
    pub no_certificate: bool,
    /// The backend that this process runs cases of for its parent, ...
    #[arg(long, hide = true, requires = "part", overrides_with = "child")]
    pub child: Option<String>,
    /// ... and which.
    #[arg(long, hide = true, requires = "child", overrides_with = "part")]
    pub part: Option<Part>,
}
