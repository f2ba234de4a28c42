//! Where cases run: in this process, or in children that may die, hang or eat memory without taking the
//! report along.
use crate::case::{Bench, Case, CaseResult, Outcome};
use crate::memory::resident_of_all;
use crate::part::Part;
use q4_core::stderr::Stderr;
use q4_core::{Code, Error, Result};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::field::Empty;
use tracing::span::{EnteredSpan, Span};

/// Runs cases in order and hands over each result; stops when `each` says false.
pub trait Runner {
    /// As above.
    fn run(&self, cases: &[Case], bench: &Bench<'_>, each: &mut dyn FnMut(CaseResult) -> bool);
}

/// In this process. Panics become outcomes; aborts and endless loops do not.
pub struct InProcess;

impl Runner for InProcess {
    fn run(&self, cases: &[Case], bench: &Bench<'_>, each: &mut dyn FnMut(CaseResult) -> bool) {
        for case in cases {
            if !each(one(case, bench)) {
                return;
            }
        }
    }
}

fn one(case: &Case, bench: &Bench<'_>) -> CaseResult {
    let span = span(case, &bench.backend.descriptor().name);
    let _in = span.enter();
    let result = inside(case, bench);
    // Whatever the case made of it.
    let result = match bench.elsewhere().and_then(|e| e.lost()) {
        Some((outcome, have)) => CaseResult::ended(case, outcome, Some(have)),
        None => result,
    };
    span.record("outcome", result.outcome.as_str());
    result
}

/// For a timeline: a case that is running, here or in a child.
fn span(case: &Case, backend: &str) -> Span {
    tracing::info_span!("case", id = case.id, level = %case.level, backend, outcome = Empty)
}

fn inside(case: &Case, bench: &Bench<'_>) -> CaseResult {
    match catch_unwind(AssertUnwindSafe(|| (case.body)(bench))) {
        Ok(seen) => CaseResult::of(case, seen),
        Err(payload) => {
            let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
            let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
            let message = format!("panicked: {}", text.unwrap_or_else(|| "without a message".into()));
            CaseResult::ended(case, Outcome::Crash, Some(message))
        }
    }
}

/// What a child writes, one line each, behind [`MARK`] and the secret that it read first from its stdin;
/// anything else on its stdout is the backend's own, whatever it looks like.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Started(usize),
    Ended(CaseResult),
    /// What ran the backend is gone; another child goes on.
    Lost,
}

const MARK: &str = "\u{1}q4-case ";

/// What nobody can guess.
fn secret() -> String {
    use std::hash::{BuildHasher, Hasher};
    // The keys are random.
    let random = || std::hash::RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

/// The child's side: runs the cases of `range`, of those of its part, and writes what came of them to `out`.
///
/// # Errors
/// `Io` when the parent is gone.
pub fn serve(cases: &[Case], range: Range<usize>, bench: &Bench<'_>, out: &mut dyn Write) -> Result<()> {
    let mut secret = String::new();
    std::io::stdin()
        .read_line(&mut secret)
        .map_err(|e| Error::new(Code::Io, format!("secret of a child process: {e}")))?;
    let secret = secret.trim();
    let mut send = |line: &Line| {
        let text = serde_json::to_string(line)
            .map_err(|e| Error::new(Code::Internal, format!("result of a case: {e}")))?;
        writeln!(out, "{MARK}{secret} {text}")
            .and_then(|()| out.flush())
            .map_err(|e| Error::new(Code::Io, format!("results of a child process: {e}")))
    };
    for i in range {
        let Some(case) = cases.get(i) else {
            // Which cases there are depends on the backend's answers about this machine.
            let features = bench.env.cpu_features.join(" ");
            return Err(Error::new(
                Code::ConformanceFailed,
                "a child process has fewer cases than its parent",
            )
            .need(format!("case {i}, on the processor that the parent sees"))
            .have(format!("{} cases on one with `{features}`", cases.len()))
            .fix("an emulator or valgrind may hide features; for a tool, start one process: --in-process"));
        };
        send(&Line::Started(i))?;
        send(&Line::Ended(one(case, bench)))?;
        if bench.elsewhere().is_some_and(|e| e.lost().is_some()) {
            return send(&Line::Lost);
        }
    }
    Ok(())
}

/// In child processes, one for the cases of a level and claim. A child that ends early costs the case it was
/// at; the next one goes on behind it.
pub struct ChildProcesses {
    /// The command that calls [`serve`] for a part of the same cases.
    pub command: Box<dyn Fn(&Part) -> Command + Sync>,
    /// Children that run at the same time, at least one. Results come in the order of the cases whatever it
    /// is.
    pub at_once: usize,
    /// Longest time of one case.
    pub time_limit: Duration,
    /// Most resident bytes of a child and of what it starts.
    pub memory_limit: u64,
}

/// Children that may hang or crash before the rest of a group is given up.
const PATIENCE: usize = 3;

impl Runner for ChildProcesses {
    fn run(&self, cases: &[Case], bench: &Bench<'_>, each: &mut dyn FnMut(CaseResult) -> bool) {
        let (groups, backend) = (groups(cases), &*bench.backend.descriptor().name);
        // A channel for each group: results are told in the order of the cases, whichever came first.
        let (senders, receivers): (Vec<_>, Vec<_>) = groups.iter().map(|_| channel()).unzip();
        let (todo, stop) = (Mutex::new(senders.into_iter().zip(groups)), AtomicBool::new(false));
        let work = || {
            loop {
                let next = todo.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((sender, group)) = next.filter(|_| !stop.load(Ordering::Relaxed)) else { return };
                self.group(&cases[group], backend, &mut |result| {
                    sender.send(result).is_ok() && !stop.load(Ordering::Relaxed)
                });
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..self.at_once.max(1) {
                scope.spawn(work);
            }
            let goes_on = receivers.iter().flatten().all(each);
            stop.store(!goes_on, Ordering::Relaxed);
        });
    }
}

impl ChildProcesses {
    /// One child after the other, until every case of the group has a result or `each` says false.
    fn group(&self, cases: &[Case], backend: &str, each: &mut dyn FnMut(CaseResult) -> bool) {
        let (mut next, mut losses) = (0, 0);
        while next < cases.len() {
            if losses == PATIENCE {
                let message = format!("not run: {PATIENCE} children of this group were lost");
                let mut rest = cases[next..].iter();
                rest.all(|case| each(CaseResult::ended(case, Outcome::Error, Some(message.clone()))));
                return;
            }
            let (end, goes_on) = self.child(cases, next, backend, each);
            if !goes_on {
                return;
            }
            losses += usize::from(end < cases.len());
            next = end;
        }
    }

    /// Runs one child over the cases of a group from `next` on; returns the case behind the last one that has
    /// a result.
    fn child(
        &self,
        cases: &[Case],
        mut next: usize,
        backend: &str,
        each: &mut dyn FnMut(CaseResult) -> bool,
    ) -> (usize, bool) {
        let end = cases.len();
        let secret = secret();
        let spawned = (self.command)(&Part::of(cases, next))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = match spawned {
            Ok(child) => Lost(child),
            Err(e) => {
                let message = format!("a child process could not be started: {e}");
                return (next + 1, each(CaseResult::ended(&cases[next], Outcome::Error, Some(message))));
            }
        };
        if let Some(mut stdin) = child.0.stdin.take() {
            // One that is gone already has no use for it.
            let _ = writeln!(stdin, "{secret}");
        }
        let lines = lines_of(&mut child.0);
        let stderr = child.0.stderr.take().map(Stderr::listen);
        let (mut last, mut begun, mut running) = (Instant::now(), false, None);
        let (outcome, why) = loop {
            match lines.recv_timeout(Duration::from_millis(50)) {
                Ok(text) => {
                    last = Instant::now();
                    match parse(&text, &secret) {
                        Some(Line::Started(i)) if !begun && i == next && next < end => {
                            (begun, running) = (true, Some(span(&cases[next], backend).entered()));
                        }
                        // Of the case that it is at, and of no other.
                        Some(Line::Ended(result)) if begun && next < end && is_of(&cases[next], &result) => {
                            (next, begun) = (next + 1, false);
                            ended(running.take(), result.outcome);
                            if !each(result) {
                                return (next, false);
                            }
                        }
                        Some(Line::Lost) if !begun => return (next, true),
                        _ => {}
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break (Outcome::Crash, String::new()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if last.elapsed() > self.time_limit {
                let seconds = self.time_limit.as_secs_f64();
                break if begun {
                    (Outcome::Hang, format!("no end within {seconds} s"))
                } else {
                    // Not the kernel's doing, as far as anybody can tell.
                    (Outcome::Error, format!("the child process did not begin this case within {seconds} s"))
                };
            }
            if resident_of_all(&child.0.id().to_string()).is_some_and(|b| b > self.memory_limit) {
                break (Outcome::Error, format!("more than {} bytes resident", self.memory_limit));
            }
        };
        if next == end {
            return (next, true);
        }
        ended(running, outcome);
        // A child that closed its stdout and goes on is as lost as one that ended.
        let status = if outcome == Outcome::Crash { child.ended_within(self.time_limit) } else { None };
        drop(child);
        let why = match status {
            Some(status) => format!("the process ended: {status}"),
            None if why.is_empty() => "the process closed its output and went on".into(),
            None => why,
        };
        let why = with_stderr(why, stderr);
        (next + 1, each(CaseResult::ended(&cases[next], outcome, Some(why))))
    }
}

/// For a timeline: the case is over.
fn ended(running: Option<EnteredSpan>, outcome: Outcome) {
    if let Some(span) = running {
        span.record("outcome", outcome.as_str());
    }
}

/// A child that is killed when nobody waits for it any more.
struct Lost(Child);

impl Lost {
    fn ended_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            match self.0.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if start.elapsed() < limit => std::thread::sleep(Duration::from_millis(5)),
                _ => return None,
            }
        }
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        // It may have ended by itself: then there is nothing to kill and only something to collect.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn lines_of(child: &mut Child) -> Receiver<String> {
    let (send, receive) = channel();
    if let Some(out) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut reader = BufReader::new(out);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                if send.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
                line.clear();
            }
        });
    }
    receive
}

/// What became of a child, then what it wrote to its stderr: where it crashed first.
fn with_stderr(what: String, stderr: Option<Stderr>) -> String {
    let said = stderr.map(|s| s.text(Duration::from_millis(500))).unwrap_or_default();
    if said.is_empty() { what } else { format!("{what}\n{said}") }
}

fn parse(text: &str, secret: &str) -> Option<Line> {
    let at = text.find(MARK)?;
    let line = text[at + MARK.len()..].strip_prefix(secret)?;
    serde_json::from_str(line.trim()).ok()
}

fn is_of(case: &Case, result: &CaseResult) -> bool {
    let claim = case.claim.as_ref().map(ToString::to_string);
    (&result.id, result.level, &result.claim, &result.waiver) == (&case.id, case.level, &claim, &None)
}

/// Runs of cases of one level and claim.
fn groups(cases: &[Case]) -> Vec<Range<usize>> {
    let mut all: Vec<Range<usize>> = Vec::new();
    for (i, c) in cases.iter().enumerate() {
        match all.last_mut() {
            Some(r) if cases[r.start].level == c.level && cases[r.start].claim == c.claim => r.end = i + 1,
            _ => all.push(i..i + 1),
        }
    }
    all
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::Level;
    use crate::case::Seen;

    /// Children that are this shell script.
    fn children(script: &'static str) -> ChildProcesses {
        ChildProcesses {
            command: Box::new(move |_| {
                let mut command = Command::new("sh");
                command.args(["-c", script]);
                command
            }),
            at_once: 2,
            time_limit: Duration::from_millis(300),
            memory_limit: u64::MAX,
        }
    }

    /// What becomes of a case whose child is this shell script.
    fn outcome(script: &'static str) -> (Outcome, String) {
        let runner = children(script);
        let cases = [Case::new(Level::L1, None, "any", |_| Ok(Seen::exactly(0)))];
        let mut seen = Vec::new();
        let took = |result| {
            seen.push(result);
            true
        };
        assert_eq!(runner.child(&cases, 0, "any", &mut { took }), (1, true));
        let result = seen.pop().expect("one result");
        (result.outcome, result.message.unwrap_or_default())
    }

    #[test]
    fn a_hang_is_the_case_s_only_if_it_began() {
        let begun = outcome("read s; printf '\\001q4-case %s {\"started\":0}\\n' $s; exec sleep 30");
        assert_eq!(begun, (Outcome::Hang, "no end within 0.3 s".into()));
        let silent = outcome("exec sleep 30");
        assert_eq!(silent, (Outcome::Error, "the child process did not begin this case within 0.3 s".into()));
    }

    /// A sanitizer's report begins with what happened and ends with a legend that is longer than the rest.
    #[test]
    fn the_head_of_what_a_lost_child_wrote_is_told_and_where_it_crashed_first() {
        let (how, why) = outcome(
            "printf 'ERROR: heap-buffer-overflow\\n  #0 in forward kernel.c:7\\n' >&2; \
             head -c 20000 /dev/zero | tr '\\0' 'x' >&2; \
             printf '\\nq4-crash: signal 11 in libv.so+0x12\\nthe end\\n' >&2; kill -SEGV $$",
        );
        assert_eq!(how, Outcome::Crash);
        let lines: Vec<_> = why.lines().collect();
        assert!(lines[0].contains("signal: 11"), "{why}");
        let head = ["signal 11 in libv.so+0x12", "ERROR: heap-buffer-overflow", "  #0 in forward kernel.c:7"];
        assert_eq!(lines[1..4], head, "{why}");
        assert!(why.ends_with("the end") && why.len() < 5000, "{why}");
    }

    /// An emulator that starts the children may have another processor than the parent.
    #[test]
    fn a_child_with_fewer_cases_blames_the_processor_and_not_q4() {
        let env = q4_core::HostEnv { cpu_features: vec!["avx2".into(), "fma".into()], ..Default::default() };
        let threads = q4_core::ThreadPool::new(1);
        struct Nobody(q4_core::BackendDescriptor);
        impl q4_core::Q4Backend for Nobody {
            fn descriptor(&self) -> &q4_core::BackendDescriptor {
                &self.0
            }
            fn probe(&self, _: &q4_core::HostEnv) -> Vec<q4_core::ProbeItem> {
                Vec::new()
            }
            fn can_prepare(
                &self,
                _: &q4_core::LinearSpec,
                _: q4_core::ExecPath,
                _: &q4_core::HostEnv,
            ) -> q4_core::Verdict {
                Ok(())
            }
            fn prepare(
                &self,
                _: &q4_core::Q4Weight<'_>,
                _: &q4_core::LinearSpec,
                _: q4_core::ExecPath,
                _: &mut q4_core::ExecContext<'_>,
            ) -> Result<Box<dyn q4_core::PreparedWeight>> {
                Err(Error::new(Code::Internal, "nobody"))
            }
        }
        let nobody = Nobody(q4_core::BackendDescriptor {
            name: "nobody".into(),
            version: "1".into(),
            vendor: "nobody".into(),
            priority: 0,
            offers: Vec::new(),
        });
        let device = q4_core::Device::Cpu;
        let bench = Bench { backend: &nobody, env: &env, device, threads: &threads, abi: None, proofs: &[] };
        let e = serve(&[], 3..4, &bench, &mut Vec::new()).expect_err("no such case");
        assert_eq!(e.code(), Code::ConformanceFailed);
        let text = e.to_string();
        assert!(text.contains("`avx2 fma`") && text.contains("--in-process"), "{text}");
    }

    /// Lines that look like results and are not: without the secret, of another case, of none, after the end.
    #[test]
    fn results_are_those_of_the_child_and_of_its_case() {
        let ended =
            |id: &str| format!("{{\"ended\":{{\"id\":\"{id}\",\"level\":\"L1\",\"outcome\":\"pass\"}}}}");
        let (right, other) = (ended("L1/backend/any"), ended("L1/backend/other"));
        let say = |secret: &str, line: &str| format!("printf '\\001q4-case %s %s\\n' {secret} '{line}'; ");
        let (own, none) = (say("$s", "{\"started\":0}"), say("", &right));
        let guessed = "0".repeat(32);
        for (script, passes) in [
            (own.clone() + &say("$s", &right), true),
            (none.clone(), false),
            (own.clone() + &none, false),
            (own.clone() + &say(&guessed, &right), false),
            (own.clone() + &say("$s", &other), false),
            (say("$s", &right), false),
        ] {
            let script: &'static str = Box::leak(format!("read s; {script} exit 64").into_boxed_str());
            let (outcome, why) = outcome(script);
            assert_eq!(outcome == Outcome::Pass, passes, "{script}: {why}");
            assert!(passes || why.contains("exit status: 64"), "{script}: {why}");
        }
    }

    /// Groups run beside each other: each of the two waits for what the other leaves behind.
    #[test]
    fn two_children_run_at_once_and_results_come_in_order() {
        let script = "read s; me=$1; d=$2; touch $d/$me; \
                      until [ -e $d/1 ] && [ -e $d/2 ]; do sleep 0.01; done; [ $me = 1 ] && sleep 0.1; \
                      printf '\\001q4-case %s {\"started\":0}\\n' $s; \
                      printf '\\001q4-case %s {\"ended\":{\"id\":\"L%s/backend/any\",\"level\":\"L%s\",\"outcome\":\"pass\"}}\\n' \
                      $s $me $me";
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_owned();
        let runner = ChildProcesses {
            command: Box::new(move |part| {
                let mut command = Command::new("sh");
                command.args(["-c", script, "sh"]).arg(&part.level.as_str()[1..]).arg(&path);
                command
            }),
            time_limit: Duration::from_secs(20),
            ..children("")
        };
        let any = |level| Case::new(level, None, "any", |_| Ok(Seen::exactly(0)));
        let cases = [any(Level::L1), any(Level::L2)];
        let (backend, env) = (crate::liars::honest(), q4_core::HostEnv::default());
        let (device, threads) = (q4_core::Device::Cpu, q4_core::ThreadPool::new(1));
        let bench =
            Bench { backend: &*backend, env: &env, device, threads: &threads, abi: None, proofs: &[] };
        let mut seen = Vec::new();
        runner.run(&cases, &bench, &mut |result| {
            seen.push((result.level, result.outcome));
            true
        });
        assert_eq!(seen, [(Level::L1, Outcome::Pass), (Level::L2, Outcome::Pass)]);
    }
}
