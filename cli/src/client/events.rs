//! Server-sent events, as they come: the bytes may be cut anywhere.
use q4_core::{Code, Error, Result};
use std::collections::VecDeque;

/// Bytes of an event at most.
const MOST: usize = 16 << 20;

/// What was read of an event that is not whole yet.
#[derive(Default)]
pub struct Events {
    /// The bytes of a line without its end.
    line: Vec<u8>,
    /// Whether the last byte ended a line, so that a line feed belongs to that end.
    was_return: bool,
    /// The lines of data.
    data: Option<String>,
    is_begun: bool,
}

impl Events {
    /// Takes what has come; the data of every event that is whole goes to the end of `out`.
    ///
    /// # Errors
    /// [`Code::ServerFailed`] for an event without an end.
    pub fn take(&mut self, bytes: &[u8], out: &mut VecDeque<String>) -> Result<()> {
        for &byte in bytes {
            match byte {
                b'\n' if self.was_return => self.was_return = false,
                b'\n' | b'\r' => {
                    self.was_return = byte == b'\r';
                    self.end_line(out);
                }
                byte => {
                    self.was_return = false;
                    self.line.push(byte);
                }
            }
            if self.line.len() + self.data.as_ref().map_or(0, String::len) > MOST {
                return Err(Error::new(Code::ServerFailed, "an event without an end")
                    .need(format!("at most {MOST} bytes")));
            }
        }
        Ok(())
    }

    /// Takes the end: some servers leave the empty line behind the last event out.
    pub fn end(&mut self, out: &mut VecDeque<String>) {
        self.end_line(out);
        out.extend(self.data.take());
    }

    fn end_line(&mut self, out: &mut VecDeque<String>) {
        let bytes = std::mem::take(&mut self.line);
        let text = String::from_utf8_lossy(&bytes);
        let text = if self.is_begun { &*text } else { text.trim_start_matches('\u{feff}') };
        self.is_begun = true;
        if text.is_empty() {
            out.extend(self.data.take());
            return;
        }
        let (field, value) = text.split_once(':').unwrap_or((text, ""));
        // llama-server's word for an event that tells of an error was a field of its own.
        if matches!(field, "data" | "error") {
            let value = value.strip_prefix(' ').unwrap_or(value);
            let value = if field == "error" { format!("{{\"error\":{value}}}") } else { value.to_owned() };
            match &mut self.data {
                Some(data) => *data = format!("{data}\n{value}"),
                None => self.data = Some(value),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The events of a text that comes in pieces of `size` bytes.
    fn cut(text: &str, size: usize) -> Vec<String> {
        let (mut events, mut out) = (Events::default(), VecDeque::new());
        for bytes in text.as_bytes().chunks(size) {
            events.take(bytes, &mut out).expect("short events");
        }
        events.end(&mut out);
        out.into()
    }

    #[test]
    fn events_do_not_depend_on_cuts_or_line_ends() {
        let text = "\u{feff}: hello\nevent: x\ndata: {\"a\": \"談\"}\n\n:\n\ndata:one\ndata:  two\nid: 7\n\n\
                    retry: 9\n\ndata\n\ndatum: no\n\ndata: [DONE]\n\n";
        let want = ["{\"a\": \"談\"}", "one\n two", "", "[DONE]"];
        for text in [text.to_owned(), text.replace('\n', "\r\n"), text.replace('\n', "\r")] {
            for size in 1..=text.len() {
                assert_eq!(cut(&text, size), want, "{size}: {text:?}");
            }
        }
    }

    #[test]
    fn an_end_without_an_empty_line_is_one() {
        assert_eq!(cut("data: [DONE]", 5), ["[DONE]"]);
        assert_eq!(cut("data: x\n", 5), ["x"]);
        assert!(cut("\n\n: only comments\n\n", 3).is_empty());
    }

    #[test]
    fn a_field_of_errors_becomes_a_document() {
        assert_eq!(cut("error: {\"message\": \"no\"}\n\n", 4), ["{\"error\":{\"message\": \"no\"}}"]);
    }

    #[test]
    fn an_event_without_an_end_is_refused() {
        let (mut events, mut out) = (Events::default(), VecDeque::new());
        let bytes = vec![b'x'; 1 << 20];
        let all = (0..17).try_for_each(|_| events.take(&bytes, &mut out));
        assert_eq!(all.expect_err("too long").code(), Code::ServerFailed);
    }
}
