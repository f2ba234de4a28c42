//! The child processes of a host, alone: loads the plugin named by its argument and says on one line what
//! came of it, or serves one to whoever holds the other end of its standard input.
use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|a| a == q4_plugin_host::remote::VERB) {
        return q4_plugin_host::remote::serve_main();
    }
    q4_plugin_host::probe_main(std::env::args_os().skip(1))
}
