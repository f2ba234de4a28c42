//! Loads the plugin named by its argument and says on one line what came of it: the child of `Prober`, alone.
use std::process::ExitCode;

fn main() -> ExitCode {
    q4_plugin_host::probe_main(std::env::args_os().skip(1))
}
