//! Rows to token ids, with the spans that are learnt.
//!
//! Text is tokenised in pieces cut at the borders of answers, as it is when the model is asked: the prompt up
//! to the answer in one piece, the answer as the model would write it in the next.
use super::layout::{Chat, Row, bad};
use super::{LoadOptions, Sample, Supervise, Text};
use q4_core::{Code, Error, Result, ThreadPool};
use q4_text::template::Message;
use serde_json::{Map, Value};
use std::sync::Mutex;

/// Samples of all rows, in order, with line numbers.
pub(super) fn all(
    rows: &[(usize, Row)],
    text: &Text<'_>,
    options: &LoadOptions,
    threads: &ThreadPool,
) -> Vec<(usize, Result<Sample>)> {
    const PIECE: usize = 64;
    let plain = Plain::of(text);
    let slots: Vec<_> = rows.chunks(PIECE).map(|_| Mutex::new(Vec::new())).collect();
    threads.run(slots.len(), &|i| {
        let rows = &rows[i * PIECE..((i + 1) * PIECE).min(rows.len())];
        let samples =
            rows.iter().map(|(line, row)| (*line, one(row, text, options, plain.as_ref()))).collect();
        *slots[i].lock().unwrap_or_else(|e| e.into_inner()) = samples;
    });
    slots.into_iter().flat_map(|s| s.into_inner().unwrap_or_else(|e| e.into_inner())).collect()
}

fn one(row: &Row, text: &Text<'_>, options: &LoadOptions, plain: Option<&Plain>) -> Result<Sample> {
    let mut sample = Sample { ids: Vec::new(), supervised: Vec::new() };
    match row {
        Row::Text(document) => {
            free_of_specials(document, text)?;
            sample.push(text, document, true)?;
            sample.ids.push(text.end_of_text);
            sample.supervised.push(true);
        }
        Row::Chat(Chat { messages, unlearnt, tools }) => {
            let tools = tools.as_ref();
            for m in messages {
                free_of_specials(&m.content, text)?;
            }
            let whole = render(messages, tools, false, text, plain)?;
            let mut at = 0;
            for (i, _) in messages.iter().enumerate().filter(|(_, m)| m.role == "assistant") {
                let before = render(&messages[..i], tools, true, text, plain)?;
                let after = render(&messages[..=i], tools, false, text, plain)?;
                let end = end_of_answer(&whole, &before, &after, at, text)?;
                let all = options.supervise == Supervise::All;
                sample.push(text, &whole[at..before.len()], all)?;
                sample.push(text, &whole[before.len()..end], !unlearnt.contains(&i))?;
                at = end;
            }
            sample.push(text, &whole[at..], options.supervise == Supervise::All)?;
        }
    }
    Ok(sample)
}

/// Where the answer that begins after `before` ends, its end of turn included.
fn end_of_answer(whole: &str, before: &str, after: &str, at: usize, text: &Text<'_>) -> Result<usize> {
    let invalid = |what: &str| {
        Error::new(Code::TemplateInvalid, format!("chat template: {what}"))
            .need(format!("each answer after the prompt that asks for it, then {}", text.end_of_turn))
    };
    if before.len() < at
        || !whole.starts_with(before)
        || !whole.starts_with(after)
        || after.len() < before.len()
    {
        return Err(
            invalid("an answer changes what stands before it").have("a template that rewrites earlier turns")
        );
    }
    match after[before.len()..].rfind(text.end_of_turn) {
        Some(i) => Ok(before.len() + i + text.end_of_turn.len()),
        None => Err(invalid("no end of turn after an answer")
            .have(format!("{:?}", &after[before.len()..]).chars().take(80).collect::<String>())),
    }
}

/// A special token spelt out in a text would become one: then data could end turns or impersonate a role.
fn free_of_specials(content: &str, text: &Text<'_>) -> Result<()> {
    // Special tokens are rare in text and all written with these brackets in the models we read.
    if !content.contains("<|") {
        return Ok(());
    }
    let found = text.tokenizer.encode(content, false)?.into_iter().find(|id| text.tokenizer.is_special(*id));
    match found {
        None => Ok(()),
        Some(id) => Err(bad("a special token inside a text")
            .need("text only")
            .have(text.tokenizer.decode(&[id], false)?)
            .fix("remove it, or give the turns as `messages`")),
    }
}

impl Sample {
    fn push(&mut self, text: &Text<'_>, piece: &str, supervised: bool) -> Result<()> {
        if !piece.is_empty() {
            self.ids.extend(text.tokenizer.encode(piece, false)?);
            self.supervised.resize(self.ids.len(), supervised);
        }
        Ok(())
    }
}

fn render(
    messages: &[Message],
    tools: Option<&Value>,
    prompt: bool,
    text: &Text<'_>,
    plain: Option<&Plain>,
) -> Result<String> {
    if let Some(plain) = plain.filter(|_| tools.is_none())
        && let Some(rendered) = plain.render(messages, prompt)
    {
        return Ok(rendered);
    }
    text.template.render(messages, tools, prompt, &Map::new())
}

/// A template that only puts fixed text around role and content, as most do: found by trying it, rendered by
/// adding strings.
///
/// Starting the engine costs 0.1 ms a prompt, minutes on large files.
struct Plain {
    /// Before the role, between role and content, after the content, and what asks for an answer.
    frame: [String; 4],
}

impl Plain {
    fn of(text: &Text<'_>) -> Option<Self> {
        let render =
            |messages: &[Message], prompt| text.template.render(messages, None, prompt, &Map::new()).ok();
        let probe = [Message::new("user", "\u{1}")];
        let (one, asked) = (render(&probe, false)?, render(&probe, true)?);
        let (head, tail) = one.split_once('\u{1}')?;
        let (open, middle) = head.split_once("user")?;
        let frame = [open, middle, tail, asked.strip_prefix(&one)?].map(str::to_owned);
        let plain = Self { frame };
        let turns = |roles: &[&str], texts: &[&str]| -> Vec<Message> {
            roles.iter().zip(texts.iter().cycle()).map(|(r, t)| Message::new(*r, *t)).collect()
        };
        // Contents that templates are known to trim, cut or treat as thoughts.
        let odd = [
            "\n  x  \n",
            "<think>\na\n</think>\n\nb",
            "",
            "tool_call {{ 1 }}",
            "</think>c\r\n",
            "談談 \u{3000}",
        ];
        let roles: [&[&str]; 6] = [
            &["user", "assistant"],
            &["system", "user", "assistant", "user", "assistant", "user"],
            &["user", "assistant", "user", "assistant"],
            &["system", "user", "assistant"],
            &["user"],
            &["user", "user", "assistant", "assistant", "user", "assistant"],
        ];
        for roles in roles {
            for shift in 0..odd.len() {
                let mut texts = odd;
                texts.rotate_left(shift);
                for prompt in [false, true] {
                    let messages = turns(roles, &texts);
                    if render(&messages, prompt) != plain.render(&messages, prompt) {
                        return None;
                    }
                }
            }
        }
        Some(plain)
    }

    fn render(&self, messages: &[Message], prompt: bool) -> Option<String> {
        let known = |m: &Message| {
            matches!(m.role.as_str(), "user" | "assistant")
                && m.tool_calls.is_none()
                && m.reasoning_content.is_none()
                && m.extra.is_empty()
        };
        let first_is_system = messages.first().is_some_and(|m| m.role == "system");
        let mut out = String::new();
        for (i, m) in messages.iter().enumerate() {
            let as_user = Message { role: "user".into(), ..m.clone() };
            if !(known(m) || i == 0 && first_is_system && known(&as_user)) {
                return None;
            }
            let [open, middle, close, _] = &self.frame;
            out.extend([open, m.role.as_str(), middle, &m.content, close]);
        }
        if prompt {
            out += &self.frame[3];
        }
        Some(out)
    }
}
