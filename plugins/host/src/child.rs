//! Loading in a child process first: a constructor that kills, exits or hangs ends a child, and is told as a
//! reason.
use crate::descriptor::Descriptor;
use crate::{Examined, Loader, file, one};
use q4_core::stderr::Stderr;
use q4_core::{Reject, RejectCode};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Starts the line a child answers with; what a library prints is everything else.
const MARK: &str = "q4-plugin-probe ";
/// Exit status of a child whose library was refused.
const REFUSED: u8 = 6;

/// What the child does: loads the library named by the first argument, unless it is another than the second
/// one says, says what came of it on one line, and ends as a process ends, destructors included. Exit status
/// 0 or 6.
pub fn probe_main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    crate::tell_crashes();
    let mut args = args.into_iter();
    let Some(path) = args.next() else {
        println!(
            "{MARK}{}",
            json!({"loaded": false, "reasons": [{"code": "library-missing", "need": "a path", "have": "none"}]})
        );
        return ExitCode::from(REFUSED);
    };
    let wanted = args.next().map(|digest| digest.to_string_lossy().into_owned());
    let examined = Loader::default().examine(Path::new(&path));
    let result = examined.and_then(|found| match wanted.filter(|wanted| *wanted != found.digest()) {
        Some(_) => Err(found.changed()),
        None => found.load(),
    });
    let answer = match &result {
        Ok(l) => {
            let d = &l.descriptor;
            let abi = [d.abi.0, d.abi.1];
            json!({"loaded": true, "name": d.name, "version": d.version, "vendor": d.vendor, "abi": abi, "sha256": l.sha256})
        }
        Err(r) => json!({"loaded": false, "name": r.name, "reasons": r.reasons}),
    };
    println!("\n{MARK}{answer}");
    if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(REFUSED) }
}

/// How to start that child.
#[derive(Clone, Debug)]
pub struct Prober {
    /// The executable.
    pub program: PathBuf,
    /// Arguments before the path.
    pub args: Vec<OsString>,
    /// How long it may take.
    pub limit: Duration,
}

/// What became of a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChildVerdict {
    /// The library loads there.
    Loads {
        /// Who it says it is.
        descriptor: Descriptor,
        /// SHA-256 of the bytes that were loaded, in hexadecimal.
        sha256: String,
    },
    /// It is refused.
    Refused(Vec<Reject>),
    /// The library ended the process with a signal; then what the process wrote to its stderr.
    Killed(i32, String),
    /// The library ended the process itself, with this status; then the same.
    Exited(i32, String),
    /// The library did not come back in time.
    TimedOut(Duration),
    /// The child could not be started or observed.
    NotRun(String),
}

impl Prober {
    /// A child `program args... PATH` that calls [`probe_main`], with ten seconds.
    pub fn new(program: impl Into<PathBuf>, args: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        let args = args.into_iter().map(Into::into).collect();
        Self { program: program.into(), args, limit: Duration::from_secs(10) }
    }

    /// Loads `path` in a child.
    pub fn probe(&self, path: &Path) -> ChildVerdict {
        self.child(path, None)
    }

    /// Loads what was examined in a child, which runs nothing else that lies there by now.
    pub fn probe_examined(&self, found: &Examined) -> ChildVerdict {
        self.child(found.path(), Some(&found.digest()))
    }

    fn child(&self, path: &Path, digest: Option<&str>) -> ChildVerdict {
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .arg(path)
            .args(digest)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(e) => return ChildVerdict::NotRun(format!("{}: {e}", self.program.display())),
        };
        let output = listen(&mut child);
        let stderr = child.stderr.take().map(Stderr::listen);
        let Some(status) = wait(&mut child, self.limit) else {
            // It may have ended just now; either way it is gone afterwards.
            let _ = child.kill();
            let _ = child.wait();
            return ChildVerdict::TimedOut(self.limit);
        };
        // A grandchild may keep the pipe open for ever.
        let text = output.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
        judge(status, &text, || stderr.map(|s| s.text(Duration::from_millis(500))).unwrap_or_default())
    }
}

impl ChildVerdict {
    /// Who the library with that SHA-256 says it is, when it may be loaded here.
    ///
    /// # Errors
    /// Why it must not.
    pub fn admitted(self, examined: &str) -> Result<Descriptor, Vec<Reject>> {
        let need = "a library that can be loaded, tried in a child process";
        let died = |have: String| Err(one(RejectCode::DiedInProbe, need, have));
        match self {
            Self::Loads { descriptor, sha256 } if sha256 == examined => Ok(descriptor),
            Self::Loads { sha256, .. } => Err(vec![file::changed(examined, &sha256)]),
            // The child's texts name the path already; so will ours.
            Self::Refused(reasons) => Err(reasons),
            Self::Killed(signal, said) => died(with(format!("killed by signal {signal}"), &said)),
            Self::Exited(status, said) => {
                died(with(format!("the process exited with status {status}"), &said))
            }
            Self::TimedOut(limit) => {
                Err(one(RejectCode::TimedOut, need, format!("no return within {limit:?}")))
            }
            Self::NotRun(why) => Err(one(RejectCode::Internal, need, why)),
        }
    }
}

fn with(what: String, said: &str) -> String {
    if said.is_empty() { what } else { format!("{what}: {said}") }
}

fn listen(child: &mut Child) -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel();
    if let Some(mut pipe) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // What was read before a failure is still an answer.
            let _ = pipe.read_to_end(&mut bytes);
            let _ = send.send(String::from_utf8_lossy(&bytes).into_owned());
        });
    }
    receive
}

fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let (start, mut pause) = (Instant::now(), Duration::from_millis(1));
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if start.elapsed() >= limit {
            return None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn judge(status: ExitStatus, text: &str, said: impl FnOnce() -> String) -> ChildVerdict {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return ChildVerdict::Killed(signal, said());
    }
    let code = status.code().unwrap_or(-1);
    let line = text.lines().rev().find_map(|l| l.strip_prefix(MARK));
    let Some(answer) = line.and_then(|l| serde_json::from_str::<Value>(l).ok()) else {
        return ChildVerdict::Exited(code, said());
    };
    let word = |v: &Value, key: &str| v[key].as_str().unwrap_or_default().to_owned();
    match (code, answer["loaded"].as_bool()) {
        (0, Some(true)) => {
            let number = |at: usize| answer["abi"][at].as_u64().and_then(|n| u32::try_from(n).ok());
            let descriptor = Descriptor {
                name: word(&answer, "name"),
                version: word(&answer, "version"),
                vendor: word(&answer, "vendor"),
                abi: (number(0).unwrap_or_default(), number(1).unwrap_or_default()),
            };
            ChildVerdict::Loads { descriptor, sha256: word(&answer, "sha256") }
        }
        (c, Some(false)) if c == i32::from(REFUSED) => {
            let reason = |r: &Value| {
                let code = RejectCode::parse(&word(r, "code")).unwrap_or(RejectCode::Internal);
                Reject::new(code, word(r, "need"), word(r, "have"))
            };
            ChildVerdict::Refused(answer["reasons"].as_array().into_iter().flatten().map(reason).collect())
        }
        _ => ChildVerdict::Exited(code, said()),
    }
}
