//! Where cases run: in this process, or in children that may die, hang or eat memory without taking the report along.
use crate::case::{Bench, Case, CaseResult, Outcome};
use crate::memory::resident_of;
use q4_core::{Code, Error, Result};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

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

/// What a child writes, one line each, behind [`MARK`]; anything else on its stdout is the backend's own.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Line {
    Started(usize),
    Ended(CaseResult),
}

const MARK: &str = "\u{1}q4-case ";

/// The child's side: runs the cases of `range` and writes what came of them to `out`.
///
/// # Errors
/// `Io` when the parent is gone.
pub fn serve(cases: &[Case], range: Range<usize>, bench: &Bench<'_>, out: &mut dyn Write) -> Result<()> {
    let mut send = |line: &Line| {
        let text = serde_json::to_string(line)
            .map_err(|e| Error::new(Code::Internal, format!("result of a case: {e}")))?;
        writeln!(out, "{MARK}{text}")
            .and_then(|()| out.flush())
            .map_err(|e| Error::new(Code::Io, format!("results of a child process: {e}")))
    };
    for i in range {
        let Some(case) = cases.get(i) else {
            return Err(Error::new(Code::Internal, "a child process has fewer cases than its parent"));
        };
        send(&Line::Started(i))?;
        send(&Line::Ended(one(case, bench)))?;
    }
    Ok(())
}

/// In child processes, one for the cases of a level and claim. A child that ends early costs the case it was at; the next
/// one goes on behind it.
pub struct ChildProcesses {
    /// The command that calls [`serve`] for a range of the same cases.
    pub command: Box<dyn Fn(Range<usize>) -> Command>,
    /// Longest time of one case.
    pub time_limit: Duration,
    /// Most resident bytes of a child.
    pub memory_limit: u64,
}

/// Children that may hang or crash before the rest of a group is given up.
const PATIENCE: usize = 3;

impl Runner for ChildProcesses {
    fn run(&self, cases: &[Case], _bench: &Bench<'_>, each: &mut dyn FnMut(CaseResult) -> bool) {
        for group in groups(cases) {
            let (mut next, mut losses) = (group.start, 0);
            while next < group.end {
                if losses == PATIENCE {
                    let message = format!("not run: {PATIENCE} children of this group were lost");
                    for case in &cases[next..group.end] {
                        if !each(CaseResult::ended(case, Outcome::Error, Some(message.clone()))) {
                            return;
                        }
                    }
                    break;
                }
                let (end, goes_on) = self.child(cases, next..group.end, each);
                if !goes_on {
                    return;
                }
                losses += usize::from(end < group.end);
                next = end;
            }
        }
    }
}

impl ChildProcesses {
    /// Runs a child without cases: it asks the backend all that the list of cases depends on, as its parent is about to.
    ///
    /// # Errors
    /// `ConformanceFailed` when the child does not live to tell.
    pub fn rehearse(&self) -> Result<()> {
        let failed = |have: String| {
            Error::new(Code::ConformanceFailed, "the backend cannot be asked what it computes")
                .need("a child process that asks it and ends well")
                .have(have)
        };
        let mut command = (self.command)(0..0);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = Lost(child.map_err(|e| failed(format!("none could be started: {e}")))?);
        let errors = tail_of(&mut child.0);
        match child.ended_within(self.time_limit) {
            Some(status) if status.success() => Ok(()),
            Some(status) => {
                let tail = errors.recv_timeout(Duration::from_millis(500)).unwrap_or_default();
                Err(failed(
                    [&format!("one that ended: {status}"), tail.trim()].join(" ").trim_end().to_owned(),
                ))
            }
            None => Err(failed(format!("one without an end within {} s", self.time_limit.as_secs_f64()))),
        }
    }

    /// Runs one child over `range`; returns the case behind the last one that has a result.
    fn child(
        &self,
        cases: &[Case],
        range: Range<usize>,
        each: &mut dyn FnMut(CaseResult) -> bool,
    ) -> (usize, bool) {
        let mut next = range.start;
        let spawned = (self.command)(range.clone())
            .stdin(Stdio::null())
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
        let lines = lines_of(&mut child.0);
        let errors = tail_of(&mut child.0);
        let (mut last, mut begun) = (Instant::now(), false);
        let (outcome, why) = loop {
            match lines.recv_timeout(Duration::from_millis(50)) {
                Ok(text) => {
                    last = Instant::now();
                    match parse(&text) {
                        Some(Line::Started(_)) => begun = true,
                        Some(Line::Ended(result)) => {
                            (next, begun) = (next + 1, false);
                            if !each(result) {
                                return (next, false);
                            }
                        }
                        None => {}
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
            if resident_of(&child.0.id().to_string()).is_some_and(|b| b > self.memory_limit) {
                break (Outcome::Error, format!("more than {} bytes resident", self.memory_limit));
            }
        };
        if next == range.end {
            return (next, true);
        }
        // A child that closed its stdout and goes on is as lost as one that ended.
        let status = if outcome == Outcome::Crash { child.ended_within(self.time_limit) } else { None };
        drop(child);
        let mut why = match status {
            Some(status) => format!("the process ended: {status}"),
            None if why.is_empty() => "the process closed its output and went on".into(),
            None => why,
        };
        if let Ok(tail) = errors.recv_timeout(Duration::from_millis(500))
            && !tail.trim().is_empty()
        {
            why = format!("{why}; stderr ends with: {}", tail.trim());
        }
        (next + 1, each(CaseResult::ended(&cases[next], outcome, Some(why))))
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

/// The last bytes of a child's stderr, once it has ended.
fn tail_of(child: &mut Child) -> Receiver<String> {
    const KEPT: usize = 600;
    let (send, receive) = channel();
    if let Some(mut err) = child.stderr.take() {
        std::thread::spawn(move || {
            let (mut kept, mut buffer) = (Vec::new(), [0; 4096]);
            while let Ok(n @ 1..) = err.read(&mut buffer) {
                kept.extend_from_slice(&buffer[..n]);
                let over = kept.len().saturating_sub(KEPT);
                kept.drain(..over);
            }
            let _ = send.send(String::from_utf8_lossy(&kept).into_owned());
        });
    }
    receive
}

fn parse(text: &str) -> Option<Line> {
    let at = text.find(MARK)?;
    serde_json::from_str(text[at + MARK.len()..].trim()).ok()
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
        assert_eq!(runner.child(&cases, 0..1, &mut { took }), (1, true));
        let result = seen.pop().expect("one result");
        (result.outcome, result.message.unwrap_or_default())
    }

    #[test]
    fn a_hang_is_the_case_s_only_if_it_began() {
        let begun = outcome("printf '\\001q4-case {\"started\":0}\\n'; exec sleep 30");
        assert_eq!(begun, (Outcome::Hang, "no end within 0.3 s".into()));
        let silent = outcome("exec sleep 30");
        assert_eq!(silent, (Outcome::Error, "the child process did not begin this case within 0.3 s".into()));
    }

    #[test]
    fn a_backend_that_ends_or_hangs_who_asks_it_is_told_apart() {
        assert!(children("exit 0").rehearse().is_ok());
        for (script, says) in
            [("kill -SEGV $$", "signal: 11"), ("echo why >&2; exit 9", "why"), ("exec sleep 30", "0.3 s")]
        {
            let e = children(script).rehearse().expect_err(script);
            assert_eq!(e.code(), Code::ConformanceFailed);
            assert!(e.to_string().contains(says), "{script}: {e}");
        }
    }
}
