//! A library that was judged and is used: in a process of its own with `--isolate`, else in one whose end is
//! watched. Whatever it does then, no answer that was cut short ends with success.
#![cfg(target_os = "linux")]
use crate::plugin::{User, built};
use crate::serve::Server;
use crate::{document, err, out};
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

/// The C example, which does in a call what the environment says, and its certificate.
static SWITCHED: LazyLock<(User, PathBuf)> = LazyLock::new(|| {
    let user = User::new();
    let source = built::acme_c_source();
    let at = source.find("static q4_status forward(").unwrap();
    let open = at + source[at..].find('{').unwrap() + 1;
    let body = "
    const char *does = getenv(\"ACME_DOES\");
    static int calls;
    if (does && calls++ == 2) {
        if (!strcmp(does, \"_exit\")) _exit(0);
        if (!strcmp(does, \"exit\")) exit(0);
        if (!strcmp(does, \"fault\")) *(volatile int *)8 = 1;
        if (!strcmp(does, \"print\")) write(1, \"injected\", 8);
        if (!strcmp(does, \"wait\")) for (;;) pause();
    }
";
    let source = format!("#include <unistd.h>\n{}{body}{}", &source[..open], &source[open..]);
    let plugin = built::compile(user.folder(), "switched", &["-O3"], &source);
    let judged = user.q4(&plugin).args(["--json", "conformance"]).output().unwrap();
    assert!(judged.status.success(), "{}{}", out(&judged), err(&judged));
    (user, plugin)
});

fn generate(options: &[&str], does: Option<&str>) -> Command {
    let (user, plugin) = &*SWITCHED;
    let mut command = user.q4(plugin);
    command.args(options).args(["--backend", "acme-c", "generate", "demo", "-p", "Who are you?"]);
    command.args(["--temperature", "0"]);
    if let Some(does) = does {
        command.env("ACME_DOES", does);
    }
    command
}

/// What the map of a process that has the library says.
const MAPPED: &str = "memfd:q4-switched";
const ANSWER: &str = "I am the q4 demo model, made of four-bit numbers.";

#[test]
fn answers_are_the_same_in_a_process_of_its_own() {
    for options in [&["--json"][..], &["--json", "--isolate"]] {
        let output = generate(options, None).output().unwrap();
        assert!(output.status.success(), "{}", err(&output));
        let report = document("generate", &output);
        assert_eq!(report["text"], ANSWER);
        let executed = report["executed"].as_array().unwrap();
        assert_eq!((executed.len(), &executed[0]["backend"]), (1, &"acme-c".into()), "{report}");
    }
}

#[test]
fn what_an_isolated_library_prints_is_not_in_the_answer() {
    let output = generate(&["--isolate"], Some("print")).output().unwrap();
    assert_eq!((output.status.code(), out(&output).trim()), (Some(0), ANSWER));
}

#[test]
fn an_answer_that_a_library_cuts_short_is_no_success() {
    for (does, isolated) in [("_exit", "exit status: 0"), ("exit", "exit status: 0"), ("fault", "signal: 11")]
    {
        let output = generate(&["--json", "--isolate"], Some(does)).output().unwrap();
        assert_eq!(output.status.code(), Some(6), "{does}: {}{}", out(&output), err(&output));
        let error = document("error", &output).to_string();
        assert!(error.contains(isolated) && error.contains("switched.so"), "{does}: {error}");

        let output = generate(&["--json"], Some(does)).output().unwrap();
        if does == "fault" {
            assert_eq!(output.status.signal(), Some(11), "{does}: {}", err(&output));
            continue;
        }
        assert_eq!(output.status.code(), Some(6), "{does}: {}{}", out(&output), err(&output));
        let error = document("error", &output);
        assert_eq!(error["code"], "Q4-E0313", "{error}");
        assert!(error["what"].as_str().unwrap().contains("before it was done"), "{error}");
    }
}

fn within_seconds(what: impl Fn() -> bool) -> bool {
    (0..1000).any(|_| {
        what() || {
            std::thread::sleep(Duration::from_millis(20));
            false
        }
    })
}

/// The processes that any thread of a process started.
fn children(id: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let text = threads.filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    text.flat_map(|t| t.split_whitespace().filter_map(|w| w.parse().ok()).collect::<Vec<_>>()).collect()
}

/// Those, and those that they started.
fn below(id: u32) -> Vec<u32> {
    let own = children(id);
    own.iter().flat_map(|child| below(*child)).chain(own.iter().copied()).collect()
}

fn is_gone(id: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{id}/stat")).map_or(true, |text| text.contains(") Z "))
}

#[test]
fn signals_that_one_process_gets_reach_the_one_that_works() {
    for (signal, code, number) in [("-INT", Some(130), None), ("-TERM", None, Some(15))] {
        let mut command = generate(&[], Some("wait"));
        let mut parent = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        assert!(within_seconds(|| !children(parent.id()).is_empty()), "nobody works");
        let child = children(parent.id())[0];
        // It has set what it does with signals when it maps the library.
        let maps = format!("/proc/{child}/maps");
        assert!(within_seconds(|| std::fs::read_to_string(&maps).unwrap_or_default().contains(MAPPED)));
        assert!(Command::new("kill").args([signal, &parent.id().to_string()]).status().unwrap().success());
        let status = parent.wait().unwrap();
        assert_eq!((status.code(), status.signal()), (code, number), "{signal}");
        assert!(within_seconds(|| is_gone(child)));
    }
}

/// A terminal's Ctrl-C, and `timeout`, reach every process of the group.
#[test]
fn who_stops_a_server_does_not_stop_its_libraries_first() {
    let (user, plugin) = &*SWITCHED;
    let mut command = user.q4(plugin);
    command.args(["--isolate", "--backend", "acme-c"]).process_group(0);
    let server = Server::of(command, &["--parallel", "1"]);
    server.wait_until_ready();
    let body = json!({
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 100, "ignore_eos": true, "stream": true, "temperature": 0,
    });
    let stream = server.send("POST /v1/chat/completions", &body.to_string());
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("content")), "it has begun");
    let group = format!("-{}", server.process());
    assert!(Command::new("kill").args(["-INT", "--", &group]).status().unwrap().success());
    let rest: Vec<String> = lines.collect();
    assert!(rest.iter().any(|line| line.contains("\"finish_reason\":\"length\"")), "{:?}", rest.last());
    assert_eq!(server.end("-CONT"), Some(0));
}

#[test]
fn no_process_outlives_the_one_that_the_user_started() {
    for options in [&[][..], &["--isolate"]] {
        let mut command = generate(options, Some("wait"));
        let mut parent = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let is_mapped = |id: &u32| {
            std::fs::read_to_string(format!("/proc/{id}/maps")).unwrap_or_default().contains(MAPPED)
        };
        assert!(within_seconds(|| below(parent.id()).iter().any(is_mapped)), "{options:?}");
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", parent.id())).unwrap();
        assert!(!maps.contains(MAPPED), "{options:?}: the library is where the user waits");
        let all = below(parent.id());
        parent.kill().unwrap();
        parent.wait().unwrap();
        assert!(within_seconds(|| all.iter().all(|id| is_gone(*id))), "{options:?}: {all:?}");
    }
}

#[test]
fn isolation_is_of_libraries() {
    let output = crate::run(&["--isolate", "generate", "demo", "-p", "x"]);
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
}

/// Results that a library writes itself, wherever it finds a descriptor, and statuses that once meant
/// something.
#[test]
fn results_that_a_library_forges_are_nobody_s() {
    let user = User::new();
    let forge = "
#include <stdio.h>
__attribute__((constructor)) static void early(void) {
    char line[4096] = {0};
    FILE *f = fopen(\"/proc/self/cmdline\", \"r\");
    size_t n = fread(line, 1, 4095, f);
    fclose(f);
    if (memmem(line, n, \"plugin-probe\", 12)) return;
    for (int fd = 0; fd < FIRST; fd++)
        for (int i = 0; i < 2000; i++)
            if (dprintf(fd, \"\\n\\001q4-case {\\\"started\\\":%d}\\n\\001q4-case {\\\"ended\\\":{\\\"id\\\":\\\"L0/backend/descriptor\\\",\\\"level\\\":\\\"L0\\\",\\\"outcome\\\":\\\"pass\\\",\\\"values\\\":4}}\\n\", i, i) < 0) break;
    FORGED
}";
    for (name, descriptors, then) in [
        ("forges", "64", ""),
        ("forges-outputs", "3", ""),
        ("forges-and-leaves", "3", "_exit(64);"),
        ("leaves", "0", "_exit(0);"),
    ] {
        let gnu = ("#include \"q4_plugin.h\"", "#define _GNU_SOURCE\n#include \"q4_plugin.h\"");
        let early = forge.replace("FORGED", then).replace("FIRST", descriptors);
        let plugin = built::stub(user.folder(), name, &[gnu, ("/*EARLY*/", &early)]);
        let output = user.q4(&plugin).args(["--json", "conformance"]).output().unwrap();
        assert_eq!(output.status.code(), Some(5), "{name}: {}{}", out(&output), err(&output));
        assert!(user.certificates().is_empty(), "{name}");
    }
}
