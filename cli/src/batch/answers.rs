//! The file of answers: a line each, in the order of the requests, and what an earlier run left in it.
use super::Kept;
use super::requests::Asked;
use crate::report::stdout;
use q4_core::{Code, Error, Result};
use q4_model::generate::FinishReason;
use serde::Serialize;
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

/// One line.
#[derive(Serialize)]
struct Line<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a Value>,
    /// [Of the request](super::identity::request), and [of what answers it](super::identity::run).
    request: &'a str,
    run: &'a str,
    #[serde(flatten)]
    outcome: Outcome<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Outcome<'a> {
    Answer {
        text: &'a str,
        token_ids: &'a [u32],
        prompt_tokens: usize,
        finish_reason: FinishReason,
        seed: u64,
    },
    Error {
        error: &'a Error,
    },
}

/// Where answers go.
pub struct Answers {
    file: Option<(PathBuf, File)>,
    run: String,
    /// Lines that are there.
    pub written: usize,
    /// Lines of an earlier run that hold an error, and the first of them.
    pub stale: Option<(usize, usize)>,
    /// The first failure.
    pub failed: Option<Code>,
}

impl Answers {
    /// Standard output, or a file, behind the whole lines that are in it: answers to the same `requests`, by
    /// the same `run`.
    ///
    /// # Errors
    /// [`Code::Usage`] for lines that are something else, which are not touched; [`Code::Io`].
    pub fn open(path: Option<&Path>, requests: &[Asked], run: String) -> Result<Self> {
        let mut answers = Self { file: None, run, written: 0, stale: None, failed: None };
        let Some(path) = path else { return Ok(answers) };
        let failed = |e: io::Error| Error::new(Code::Io, format!("{}: {e}", path.display()));
        let mut options = OpenOptions::new();
        let mut file =
            options.read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
        let (mut whole, mut line) = (0, Vec::new());
        let mut reader = BufReader::new(&file);
        loop {
            line.clear();
            reader.read_until(b'\n', &mut line).map_err(failed)?;
            if line.last() != Some(&b'\n') {
                break; // half a line, or the end
            }
            answers.take(&line, requests).map_err(|have| {
                Error::new(Code::Usage, format!("{}: line {}", path.display(), answers.written + 1))
                    .need("the answers of an earlier run on the same file, with the same model and options")
                    .have(have)
                    .fix("another name for --output")
            })?;
            whole += line.len() as u64;
            answers.written += 1;
        }
        file.set_len(whole).and_then(|()| file.seek(SeekFrom::End(0))).map_err(failed)?;
        answers.file = Some((path.to_owned(), file));
        Ok(answers)
    }

    /// Looks at the next line of an earlier run; what it is if it is none.
    fn take(&mut self, line: &[u8], requests: &[Asked]) -> std::result::Result<(), String> {
        let value: Value = serde_json::from_slice(line).map_err(|e| e.to_string())?;
        let said = |name: &str| value.get(name).and_then(Value::as_str);
        let Some(asked) = requests.get(self.written) else {
            return Err(format!("more lines than the {} requests", requests.len()));
        };
        if value.get("index").and_then(Value::as_u64) != Some(self.written as u64)
            || value.get("id") != asked.id.as_ref()
            || said("request") != Some(&asked.identity)
        {
            return Err("the answer to another request, or with other options".to_owned());
        }
        if said("run") != Some(&self.run) {
            return Err("the answer of another model, or of one that was computed otherwise".to_owned());
        }
        if let Some(error) = value.get("error") {
            let code = error.get("code").and_then(Value::as_str);
            let code = Code::ALL.iter().copied().find(|c| Some(c.id()) == code).unwrap_or(Code::Internal);
            self.failed = self.failed.or(Some(code));
            let (count, first) = self.stale.unwrap_or((0, self.written));
            self.stale = Some((count + 1, first));
        }
        Ok(())
    }

    /// Writes the next answer, if it is known.
    pub fn say(&mut self, requests: &[Asked], kept: &Kept) -> Result<bool> {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(outcome) = &*kept else { return Ok(false) };
        let Asked { id, request, identity } = &requests[self.written];
        let outcome = match outcome {
            Ok(answer) => Outcome::Answer {
                text: &answer.text,
                token_ids: &answer.ids,
                prompt_tokens: answer.prompt_tokens,
                finish_reason: answer.finish,
                seed: request.params.seed,
            },
            Err(error) => {
                self.failed = self.failed.or(Some(error.code()));
                Outcome::Error { error }
            }
        };
        let line = Line { index: self.written, id: id.as_ref(), request: identity, run: &self.run, outcome };
        let mut line = serde_json::to_string(&line)
            .map_err(|e| Error::new(Code::Internal, format!("an answer: {e}")))?;
        line.push('\n');
        match &mut self.file {
            None => stdout(&line)?,
            Some((path, file)) => file
                .write_all(line.as_bytes())
                .map_err(|e| Error::new(Code::Io, format!("{}: {e}", path.display())))?,
        }
        // Its text is not needed any longer.
        *kept = None;
        self.written += 1;
        Ok(true)
    }
}
