//! A conversation with a model that a server computes.
use super::params::Settings;
use super::talk::{self, Said, Talk};
use super::{THINKING, files};
use crate::args::{AnswerArgs, ChatArgs};
use crate::client::{self, Piece, Reply, Server};
use crate::context::Context;
use crate::conversation::{Sampling, Saved};
use crate::generate::Emitter;
use crate::prompt;
use crate::report::{Outcome, Report, plain, stderr};
use crate::signals;
use q4_core::{Code, Error, Result};
use q4_model::sampling::SamplingParams;
use q4_model::template::Message;
use q4_model::wishes::Wishes;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::io::{self, IsTerminal};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// How often an answer looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(20);

/// One line of `--json`.
#[derive(Serialize)]
struct Line<'a> {
    turn: usize,
    user: &'a str,
    text: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Value>,
    /// As the server counts; null where it does not.
    prompt_tokens: Option<usize>,
    answer_tokens: Option<usize>,
    finish_reason: &'a str,
    timing: Timing,
    server: String,
    model: &'a str,
}

/// How long an answer took, in seconds from the request.
#[derive(Clone, Copy, Default, Serialize)]
struct Timing {
    first_s: f64,
    total_s: f64,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &ChatArgs, server: Server) -> Result<Outcome> {
    cx.nothing_here()?;
    for (option, is_given) in
        [("--context", args.answer.context.is_some()), ("--quantize", args.answer.quantize.is_some())]
    {
        if is_given {
            return Err(Error::new(Code::Usage, format!("{option} beside --server"))
                .need("an option of the conversation; how a model runs is the server's business"));
        }
    }
    let report = cx.report();
    let (saved, played) = files(args, report)?;
    let played_from = played.as_ref().and_then(|p| p.saved.as_ref());
    let mut given = Map::new();
    given.extend(args.answer.prompt.template_arg.iter().cloned());
    if let Some(path) = &args.answer.prompt.tools {
        given.insert("tools".to_owned(), prompt::tools(path)?);
    }
    let runtime = client::runtime()?;
    let model = runtime.block_on(server.model(args.server.served.as_deref()))?;
    let is_person = talk::is_person();
    let mut chat = Remote {
        report,
        args: &args.answer,
        show_speed: args.show_speed,
        is_person,
        server,
        model,
        runtime,
        messages: Vec::new(),
        variables: given.clone(),
        given,
        wishes: Wishes::default(),
        max_tokens: None,
        turns: 0,
        last: None,
    };
    if is_person && report.is_interactive() {
        let (model, at) = (&chat.model, chat.server.address());
        stderr(&plain(&format!("{model} at {at}. /help lists the commands.\n")));
    }
    match (&saved, played_from) {
        (Some(saved), _) => chat.take_up(saved)?,
        (None, Some(played)) => {
            played.tell_of_other_model(&chat.model, report);
            let answer = chat.settle(Some(played))?;
            chat.messages = answer.system.map(|s| Message::new("system", s)).into_iter().collect();
        }
        (None, None) => {
            let answer = chat.settle(None)?;
            chat.messages = answer.system.map(|s| Message::new("system", s)).into_iter().collect();
        }
    }
    let messages = played.map_or_else(Vec::new, |p| p.messages);
    talk::hold(&mut chat, &messages, !args.no_history)
}

struct Remote<'a> {
    report: &'a Report,
    /// The options of the command line.
    args: &'a AnswerArgs,
    show_speed: bool,
    /// Somebody looks and types.
    is_person: bool,
    server: Server,
    model: String,
    runtime: Runtime,
    messages: Vec<Message>,
    /// Variables of the template that options name, tools among them.
    given: Map<String, Value>,
    /// These, and those that were set here or in a file.
    variables: Map<String, Value>,
    /// What is not asked for is as the server has it.
    wishes: Wishes,
    max_tokens: Option<usize>,
    turns: usize,
    /// The speed of the last answer.
    last: Option<String>,
}

/// How listening ended when nothing went wrong.
enum Heard {
    End,
    Stopped,
}

impl Remote<'_> {
    /// Takes the settings of a file, and the options over them, which are returned together.
    fn settle(&mut self, file: Option<&Saved>) -> Result<AnswerArgs> {
        let answer = file.map_or_else(|| self.args.clone(), |file| file.over(self.args));
        let wishes = answer.wishes();
        wishes.upon(SamplingParams::default())?;
        (self.wishes, self.max_tokens) = (wishes, answer.max_tokens);
        let variables = file.map(Saved::variables).unwrap_or_default();
        self.variables = variables.into_iter().chain(self.given.clone()).collect();
        Ok(answer)
    }

    /// What was asked for, for people.
    fn settings(&self) -> String {
        let Wishes { temperature, top_p, top_k, min_p, repetition_penalty, seed } = &self.wishes;
        let text = |name: &str, value: Option<String>| value.map(|value| format!("{name} {value}, "));
        let all = [
            text("temperature", temperature.map(|x| x.to_string())),
            text("top-p", top_p.map(|x| x.to_string())),
            text("top-k", top_k.map(|x| x.to_string())),
            text("min-p", min_p.map(|x| x.to_string())),
            text("repetition-penalty", repetition_penalty.map(|x| x.to_string())),
            text("seed", seed.map(|x| x.to_string())),
            text("max-tokens", self.max_tokens.map(|x| x.to_string())),
        ];
        let asked: String = all.into_iter().flatten().collect();
        format!("{asked}{} as the server has it", if asked.is_empty() { "everything" } else { "the rest" })
    }

    /// The request for an answer to everything said.
    fn request(&self) -> Result<Value> {
        let unwritten = |e: serde_json::Error| Error::new(Code::Internal, format!("a request: {e}"));
        let mut messages = serde_json::to_value(&self.messages).map_err(unwritten)?;
        for message in messages.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
            // A note of q4's own.
            message.remove("finish_reason");
        }
        // By way of a text, in which 0.3 is 0.3.
        let wishes = serde_json::to_string(&self.wishes).map_err(unwritten)?;
        let mut body: Value = serde_json::from_str(&wishes).map_err(unwritten)?;
        let mut variables = self.variables.clone();
        let tools = variables.shift_remove("tools");
        let mut put = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                body[name] = value;
            }
        };
        put("model", Some(self.model.clone().into()));
        put("messages", Some(messages));
        put("stream", Some(true.into()));
        put("stream_options", Some(json!({"include_usage": true})));
        put("max_tokens", self.max_tokens.map(Value::from));
        put("stop", (!self.args.stop.is_empty()).then(|| self.args.stop.clone().into()));
        put("ignore_eos", self.args.ignore_eos.then(|| true.into()));
        put("tools", tools);
        put("chat_template_kwargs", (!variables.is_empty()).then(|| variables.into()));
        Ok(body)
    }

    /// Asks, and hands on what comes until it ends or somebody stops it.
    fn listen(&self, body: &Value, reply: &mut Reply, shown: &mut Shown) -> Result<Heard> {
        let answer = async {
            let mut stream = self.server.stream("/v1/chat/completions", body).await?;
            while let Some(event) = stream.next().await? {
                for piece in reply.take(&event) {
                    shown.piece(&piece);
                }
            }
            reply.require_end(self.server.address()).map(|()| Heard::End)
        };
        let stopped = async {
            while !(self.is_person && signals::STOP.load(Ordering::Relaxed)) {
                tokio::time::sleep(LOOK).await;
            }
        };
        self.runtime.block_on(async {
            tokio::select! {
                heard = answer => heard,
                // What is dropped here closes the connection.
                () = stopped => Ok(Heard::Stopped),
            }
        })
    }

    /// Keeps what was answered in the conversation.
    fn keep(&mut self, reply: &Reply, finish: &str) {
        let mut message = Message::new("assistant", &reply.text);
        message.tool_calls = reply.calls();
        message.reasoning_content = Some(reply.thoughts.clone()).filter(|t| !t.is_empty());
        if matches!(finish, "length" | INTERRUPTED) {
            message.extra.insert("finish_reason".into(), finish.into());
        }
        self.messages.push(message);
    }

    /// Says where an answer would have gone on.
    fn mark(&self, reply: &Reply, finish: &str) {
        let tokens = reply.usage.map_or("its".to_owned(), |usage| usage.answer.to_string());
        match (finish, self.is_person) {
            (INTERRUPTED, _) => stderr("[interrupted; /retry answers anew, /undo drops it]\n"),
            ("length", true) => {
                stderr(&format!("[cut after {tokens} tokens; /params max-tokens N allows more]\n"));
            }
            ("length", false) => self.report.warn(&format!(
                "the answer is cut after {tokens} tokens; a larger -n lets it go on, if the server does"
            )),
            ("content_filter", _) => self.report.warn("the server held a part of the answer back"),
            _ => {}
        }
    }

    fn speed(&self, reply: &Reply, timing: Timing) -> String {
        let Timing { first_s, total_s } = timing;
        let Some(usage) = reply.usage else {
            return format!(
                "first words after {first_s:.2} s, all after {total_s:.2} s; the server counts no tokens"
            );
        };
        let (prompt, answer) = (usage.prompt, usage.answer);
        let rate = match total_s - first_s {
            rest if rest > 0.0 && answer > 1 => format!(", {:.1} tok/s", (answer - 1) as f64 / rest),
            _ => String::new(),
        };
        format!("prompt {prompt} tokens; answer {answer} tokens{rate}; first words after {first_s:.2} s")
    }
}

/// The `finish_reason` of an answer that Ctrl-C or the end of a server cut.
const INTERRUPTED: &str = "interrupted";

impl Talk for Remote<'_> {
    fn report(&self) -> &Report {
        self.report
    }

    fn is_person(&self) -> bool {
        self.is_person
    }

    fn messages(&self) -> &[Message] {
        &self.messages
    }

    fn set_messages(&mut self, messages: Vec<Message>) -> Result<()> {
        self.messages = messages;
        Ok(())
    }

    fn is_greedy(&self) -> bool {
        self.wishes.temperature == Some(0.0)
    }

    fn room(&self) -> String {
        String::new()
    }

    fn stats(&self) -> Option<String> {
        self.last.clone()
    }

    fn saved(&self) -> Saved {
        let sampling = Sampling::wished(self.wishes.clone(), self.max_tokens);
        Saved::new(&self.model, &self.messages, sampling, self.variables.clone())
    }

    fn say(&mut self, message: &str) -> Result<Said> {
        signals::begin_answer();
        self.messages.push(Message::new("user", message));
        let (mut reply, mut shown) = (Reply::default(), Shown::new(!self.report.is_json()));
        let heard = self.request().and_then(|body| self.listen(&body, &mut reply, &mut shown));
        if !reply.is_begun() && !matches!(heard, Ok(Heard::End)) {
            self.messages.pop();
            if heard.is_ok() {
                stderr("\n[interrupted before there was an answer: the message is dropped]\n");
            }
            return heard.map(|_| Said::Dropped);
        }
        let finish = match &heard {
            Ok(Heard::End) => reply.finish.clone().unwrap_or_default(),
            Ok(Heard::Stopped) | Err(_) => INTERRUPTED.to_owned(),
        };
        self.keep(&reply, &finish);
        let timing = shown.end(&reply)?;
        if let Err(e) = heard {
            return Err(e.fix("what came of the answer is kept: /retry answers anew, /undo drops it"));
        }
        self.turns += 1;
        if self.report.is_json() {
            let line = Line {
                turn: self.turns,
                user: message,
                text: &reply.text,
                reasoning: &reply.thoughts,
                tool_calls: reply.calls(),
                prompt_tokens: reply.usage.map(|u| u.prompt),
                answer_tokens: reply.usage.map(|u| u.answer),
                finish_reason: &finish,
                timing,
                server: self.server.address().to_string(),
                model: &self.model,
            };
            self.report.document("chat", &line)?;
        } else {
            self.mark(&reply, &finish);
        }
        let speed = self.speed(&reply, timing);
        if self.show_speed {
            stderr(&format!("{speed}\n"))
        } else {
            self.report.detail(&speed)
        }
        self.last = Some(speed);
        Ok(if finish == INTERRUPTED { Said::Interrupted } else { Said::Answered })
    }

    fn think(&mut self, wish: Option<bool>) -> Result<()> {
        if let Some(on) = wish {
            self.variables.insert(THINKING.into(), on.into());
        }
        let state = match self.variables.get(THINKING).and_then(Value::as_bool) {
            Some(true) => {
                "on is what the server is asked for; whether its template knows it is not known here"
            }
            Some(false) => {
                "off is what the server is asked for; whether its template knows it is not known here"
            }
            None => "as the server has it",
        };
        stderr(&format!("thinking: {state}\n"));
        Ok(())
    }

    fn set(&mut self, settings: &str) -> Result<()> {
        let Settings { wishes, max_tokens } = Settings::of(settings)?;
        wishes.upon(SamplingParams::default())?;
        self.wishes = wishes.or(&self.wishes);
        self.max_tokens = max_tokens.unwrap_or(self.max_tokens);
        stderr(&format!("{}\n", self.settings()));
        Ok(())
    }

    fn take_up(&mut self, saved: &Saved) -> Result<()> {
        saved.tell_of_other_model(&self.model, self.report);
        let answer = self.settle(Some(saved))?;
        self.messages = saved.messages_under(answer.system.as_deref());
        if self.is_person {
            stderr(&format!("{} messages\n", self.messages.len()));
            if self.messages.last().is_some_and(|m| m.role == "user") {
                stderr("the last one has no answer yet: /retry answers it\n");
            }
        }
        Ok(())
    }
}

/// Writes an answer as it comes, thoughts between the tags that a model puts around them.
struct Shown {
    out: Emitter,
    begun: Instant,
    first: Option<Duration>,
    is_thinking: bool,
    /// Nobody knows whose server it is: what it says does not steer a terminal.
    is_plain: bool,
}

impl Shown {
    fn new(text: bool) -> Self {
        Self {
            out: Emitter::new(text, true),
            begun: Instant::now(),
            first: None,
            is_thinking: false,
            is_plain: io::stdout().is_terminal(),
        }
    }

    fn piece(&mut self, piece: &Piece) {
        self.first.get_or_insert_with(|| self.begun.elapsed());
        let text = match piece {
            Piece::Thought(text) => {
                if !std::mem::replace(&mut self.is_thinking, true) {
                    self.out.piece("<think>\n");
                }
                text
            }
            Piece::Text(text) => {
                if std::mem::take(&mut self.is_thinking) {
                    self.out.piece("\n</think>\n\n");
                }
                text
            }
        };
        self.words(text);
    }

    fn words(&mut self, text: &str) {
        if self.is_plain { self.out.piece(&plain(text)) } else { self.out.piece(text) }
    }

    /// Everything came; fails where it could not be written.
    fn end(&mut self, reply: &Reply) -> Result<Timing> {
        let total = self.begun.elapsed();
        if self.is_thinking {
            self.out.piece("\n</think>");
        }
        let calls = reply.calls_as_text();
        if !calls.is_empty() {
            self.out.piece(if reply.text.is_empty() && reply.thoughts.is_empty() { "" } else { "\n" });
            self.words(&calls);
        }
        self.out.end(&reply.text)?;
        Ok(Timing { first_s: self.first.unwrap_or(total).as_secs_f64(), total_s: total.as_secs_f64() })
    }
}
