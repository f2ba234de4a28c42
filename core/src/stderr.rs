//! What a child process wrote to its stderr: how it begins and how it ends. The report of a sanitizer begins
//! with what happened and ends with a legend; a panic is what comes last.
use std::io::Read;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Bytes that are kept of the beginning.
const HEAD: usize = 3000;
/// Bytes that are kept of the end.
const TAIL: usize = 800;
/// Starts the line in which a child says where it crashed.
pub const CRASH: &str = "q4-crash: ";

/// A pipe that is being read.
pub struct Stderr(Arc<(Mutex<Ends>, Condvar)>);

#[derive(Default)]
struct Ends {
    head: Vec<u8>,
    tail: Vec<u8>,
    /// Bytes between the two.
    left_out: usize,
    is_over: bool,
}

impl Stderr {
    /// Reads `pipe` to its end in a thread, so that the child never waits for a reader.
    pub fn listen(mut pipe: impl Read + Send + 'static) -> Self {
        let shared = Arc::new((Mutex::new(Ends::default()), Condvar::new()));
        let ends = shared.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = pipe.read(&mut buffer) {
                ends.0.lock().unwrap_or_else(PoisonError::into_inner).take(&buffer[..n]);
            }
            ends.0.lock().unwrap_or_else(PoisonError::into_inner).is_over = true;
            ends.1.notify_all();
        });
        Self(shared)
    }

    /// The lines that say where the child crashed, then the head and the end of everything else. Waits for
    /// the end of the pipe, but no longer than `patience`: a grandchild may hold it open.
    pub fn text(&self, patience: Duration) -> String {
        let ends = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.0.1.wait_timeout_while(ends, patience, |ends| !ends.is_over);
        waited.unwrap_or_else(PoisonError::into_inner).0.text()
    }
}

impl Ends {
    fn take(&mut self, bytes: &[u8]) {
        let (head, rest) = bytes.split_at(bytes.len().min(HEAD - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend_from_slice(rest);
        let over = self.tail.len().saturating_sub(TAIL);
        self.tail.drain(..over);
        self.left_out += over;
    }

    fn text(&self) -> String {
        let mut bytes = self.head.clone();
        if self.left_out > 0 {
            bytes.extend(format!("\n[... {} bytes ...]\n", self.left_out).bytes());
        }
        bytes.extend_from_slice(&self.tail);
        let text = String::from_utf8_lossy(&bytes);
        // What a library prints must not steer the terminal of whoever reads the report.
        let is_shown = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
        let text: String = text.chars().filter(is_shown).collect();
        let (crash, other): (Vec<&str>, Vec<&str>) = text.trim().lines().partition(|l| l.starts_with(CRASH));
        let crash = crash.iter().map(|l| &l[CRASH.len()..]);
        crash.chain(other).collect::<Vec<_>>().join("\n").trim().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> String {
        Stderr::listen(std::io::Cursor::new(text.as_bytes().to_vec())).text(Duration::from_secs(9))
    }

    #[test]
    fn head_and_end_are_kept_and_the_crash_comes_first() {
        assert_eq!(of(""), "");
        assert_eq!(of("one\ntwo\n"), "one\ntwo");
        assert_eq!(
            of("noise\x1b[2J\nq4-crash: signal 11 in libv.so+0x12\nend\n"),
            "signal 11 in libv.so+0x12\nnoise[2J\nend"
        );
        let long = format!("ERROR: first\n{}\nlast", "x".repeat(9000));
        let text = of(&long);
        assert!(text.starts_with("ERROR: first\n") && text.ends_with("\nlast"), "{text}");
        assert!(text.contains("[... 5218 bytes ...]") && text.len() < 4000, "{}", text.len());
    }

    #[test]
    fn a_pipe_that_stays_open_costs_the_patience_and_no_text() {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        std::io::Write::write_all(&mut writer, b"still here").expect("room in a pipe");
        let stderr = Stderr::listen(reader);
        let text = (0..100).map(|_| stderr.text(Duration::from_millis(20))).find(|t| !t.is_empty());
        assert_eq!(text.as_deref(), Some("still here"));
    }
}
