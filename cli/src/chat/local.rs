//! A conversation on one cache, with a model that is computed here.
use super::params::Params;
use super::talk::{self, Said, Talk};
use super::{THINKING, files};
use crate::args::{AnswerArgs, ChatArgs};
use crate::context::Context;
use crate::conversation::{Sampling, Saved};
use crate::generate::{Emitter, Turn, stats, tell_if_cut};
use crate::prompt;
use crate::report::{Outcome, Report, stderr};
use crate::session::{Facts, Session, Timing, chunk};
use crate::signals;
use crate::text::{Text, context_size};
use q4_core::{Code, Error, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::cpu::KvType;
use q4_model::generate::{Answer, Conversation, FinishReason, Limits};
use q4_model::load::ContextOptions;
use q4_model::sampling::Sampler;
use q4_model::template::{ChatTemplate, Message};
use serde::Serialize;
use serde_json::{Map, Value};
use std::time::Instant;

/// Positions of a conversation, where the model has as many.
const CONTEXT: usize = 4096;

/// One line of `--json`.
#[derive(Serialize)]
struct Line<'a> {
    turn: usize,
    #[serde(flatten)]
    said: Turn<'a>,
    context_used: usize,
    context: usize,
    #[serde(flatten)]
    facts: Facts,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &ChatArgs) -> Result<Outcome> {
    let start = Instant::now();
    let report = cx.report();
    let (saved, played) = files(args, report)?;
    let from = saved.as_ref().or_else(|| played.as_ref().and_then(|p| p.saved.as_ref()));
    let answer = from.map_or_else(|| args.answer.clone(), |saved| saved.over(&args.answer));
    let dispatch = Session::dispatch(cx)?;
    let checkpoint = cx.open(&args.model)?;
    let text = Text::of(&checkpoint)?;
    let template = text.template(&checkpoint)?;
    let sampling = text.sampling(&answer, report)?;
    let limits = text.limits(&answer);
    let mut given = Map::new();
    prompt::give(&mut given, &args.answer.prompt, &template, report)?;
    let context = context_size(answer.context, CONTEXT, &checkpoint)?;
    let chunk = chunk(cx.device()?).min(context);
    let sizes = ContextOptions { context, chunk, all_logits: false, kv: cx.kv(KvType::F16), many: None };
    let session = Session::load(cx, dispatch, &checkpoint, answer.quantize, sizes)?;
    let mut runner = session.runner()?;
    let sampler = Sampler::new(sampling.clone(), checkpoint.config().vocab_size)?;
    let is_person = talk::is_person();
    let mut chat = Local {
        report,
        args: &args.answer,
        show_speed: args.show_speed,
        is_person,
        checkpoint: &checkpoint,
        text: &text,
        template: &template,
        session: &session,
        talk: Conversation::new(&mut runner, &text.tokenizer, &template, &text.variables, None),
        variables: given.clone(),
        given,
        params: Params::new(sampling, &limits),
        limits: Limits { interrupt: is_person.then_some(&signals::STOP), ..limits },
        sampler,
        context,
        load_s: start.elapsed().as_secs_f64(),
        turns: 0,
        last: None,
    };
    if is_person && report.is_interactive() {
        stderr(&format!("{}, {context} positions. /help lists the commands.\n", checkpoint.name()));
    }
    chat.begin(saved.as_ref(), played.as_ref().and_then(|p| p.saved.as_ref()))?;
    let messages = played.map_or_else(Vec::new, |p| p.messages);
    talk::hold(&mut chat, &messages, !args.no_history)
}

struct Local<'a> {
    report: &'a Report,
    /// The options of the command line.
    args: &'a AnswerArgs,
    show_speed: bool,
    /// Somebody looks and types.
    is_person: bool,
    checkpoint: &'a Checkpoint,
    text: &'a Text,
    template: &'a ChatTemplate,
    session: &'a Session,
    talk: Conversation<'a>,
    /// Variables of the template that options name, tools among them.
    given: Map<String, Value>,
    /// These, and those that were set here or in a file.
    variables: Map<String, Value>,
    params: Params,
    limits: Limits,
    sampler: Sampler,
    context: usize,
    load_s: f64,
    turns: usize,
    last: Option<Answer>,
}

impl Local<'_> {
    /// Puts what was loaded, and the system message, where a conversation begins.
    fn begin(&mut self, saved: Option<&Saved>, played: Option<&Saved>) -> Result<()> {
        if let Some(played) = played {
            played.tell_of_other_model(self.checkpoint.name(), self.report);
        }
        let variables = played.map(Saved::variables).unwrap_or_default();
        self.render_with(variables.into_iter().chain(self.given.clone()).collect());
        match saved {
            Some(saved) => self.take_up(saved),
            None => {
                let args = played.map_or_else(|| self.args.clone(), |played| played.over(self.args));
                self.set_messages(args.system.map(|s| Message::new("system", s)).into_iter().collect())
            }
        }
    }

    /// Says where an answer would have gone on.
    fn mark(&self, answer: &Answer) {
        let tokens = answer.ids.len();
        let text = match answer.finish {
            _ if !self.is_person => {
                let most = self.checkpoint.config().max_position_embeddings;
                return tell_if_cut(self.report, answer, self.context, most);
            }
            FinishReason::Interrupted => "interrupted; /retry answers anew, /undo drops it".to_owned(),
            FinishReason::Length => format!("cut after {tokens} tokens; /params max-tokens N allows more"),
            FinishReason::Context => {
                format!("cut: all {} positions are used; {}", self.context, self.ways_out())
            }
            FinishReason::Stop | FinishReason::StopString => return,
        };
        stderr(&format!("[{text}]\n"));
    }

    /// What helps when the context is full.
    fn ways_out(&self) -> String {
        let most = self.checkpoint.config().max_position_embeddings;
        let more = match self.context < most {
            true => format!(", --context N gives up to {most}"),
            false => String::new(),
        };
        format!("/undo drops the last exchange, /reset all of them{more}")
    }

    fn advised(&self, e: Error) -> Error {
        if e.code() == Code::ContextFull { e.fix(self.ways_out()) } else { e }
    }

    fn speed(&self, answer: &Answer) -> String {
        let (timing, used) = (Timing::of(self.load_s, [answer]), self.talk.runner().tokens().len());
        format!("{}; {used} of {} positions", stats(&timing, std::slice::from_ref(answer)), self.context)
    }

    /// Renders what comes with these variables of the template over the model's own.
    fn render_with(&mut self, variables: Map<String, Value>) {
        let mut all = self.text.variables.clone();
        all.extend(variables.clone());
        self.talk.set_variables(all);
        self.variables = variables;
    }

    fn use_params(&mut self, params: Params) -> Result<()> {
        self.sampler.set_params(params.sampling.clone())?;
        self.limits.max_tokens = params.max_tokens.unwrap_or(usize::MAX);
        self.params = params;
        Ok(())
    }
}

impl Talk for Local<'_> {
    fn report(&self) -> &Report {
        self.report
    }

    fn is_person(&self) -> bool {
        self.is_person
    }

    fn messages(&self) -> &[Message] {
        self.talk.messages()
    }

    fn set_messages(&mut self, messages: Vec<Message>) -> Result<()> {
        self.talk.set_messages(messages).map(drop)
    }

    fn is_greedy(&self) -> bool {
        self.sampler.is_greedy()
    }

    fn room(&self) -> String {
        format!(", {} of {} positions used", self.talk.runner().tokens().len(), self.context)
    }

    fn stats(&self) -> Option<String> {
        self.last.as_ref().map(|answer| self.speed(answer))
    }

    fn saved(&self) -> Saved {
        let sampling = Sampling::of(&self.params.sampling, self.params.max_tokens);
        Saved::new(self.checkpoint.name(), self.talk.messages(), sampling, self.variables.clone())
    }

    fn say(&mut self, message: &str) -> Result<Said> {
        let mut out = Emitter::new(!self.report.is_json(), true);
        signals::begin_answer();
        let (limits, sampling) = (&self.limits, &self.params.sampling);
        let mut began = false;
        let answer = self.talk.turn(message, sampling, &mut self.sampler, limits, &mut |piece| {
            began = true;
            out.piece(piece);
        });
        let answer = answer.map_err(|e| {
            if began && self.is_person {
                stderr("\n");
            }
            self.advised(e)
        })?;
        if !answer.is_said() {
            stderr("\n[interrupted before there was an answer: the message is dropped]\n");
            return Ok(Said::Dropped);
        }
        out.end(&answer.text)?;
        self.turns += 1;
        let used = self.talk.runner().tokens().len();
        if self.report.is_json() {
            let (said, facts) = (Turn::new(message, &answer), self.session.facts());
            let line = Line { turn: self.turns, said, context_used: used, context: self.context, facts };
            self.report.document("chat", &line)?;
        } else {
            self.mark(&answer);
        }
        let speed = self.speed(&answer);
        if self.show_speed {
            stderr(&format!("{speed}\n"))
        } else {
            self.report.detail(&speed)
        }
        let said =
            if answer.finish == FinishReason::Interrupted { Said::Interrupted } else { Said::Answered };
        self.last = Some(answer);
        Ok(said)
    }

    fn think(&mut self, wish: Option<bool>) -> Result<()> {
        let Some(on) = wish else {
            let state = match self.variables.get(THINKING).and_then(Value::as_bool) {
                Some(true) => "on",
                Some(false) => "off",
                None => "as the model's template has it",
            };
            stderr(&format!("thinking: {state}\n"));
            return Ok(());
        };
        let prompt = |on: bool| {
            let mut variables = self.text.variables.clone();
            variables.insert(THINKING.into(), on.into());
            self.template.render(&[Message::new("user", "?")], None, true, &variables)
        };
        if prompt(true)? == prompt(false)? {
            return Err(Error::new(Code::Usage, "/think: the model's template does not know it")
                .need(format!("a chat template that asks for {THINKING}"))
                .have("the same prompt with and without it"));
        }
        let mut variables = self.variables.clone();
        variables.insert(THINKING.into(), on.into());
        self.render_with(variables);
        stderr(if on { "thinking: on\n" } else { "thinking: off\n" });
        Ok(())
    }

    fn set(&mut self, settings: &str) -> Result<()> {
        let params = self.params.with(settings)?;
        self.use_params(params)?;
        stderr(&format!("{}\n", self.params));
        if !settings.is_empty() && self.params.is_idle() {
            stderr("top-p, top-k and min-p have no effect at temperature 0\n");
        }
        Ok(())
    }

    fn take_up(&mut self, saved: &Saved) -> Result<()> {
        saved.tell_of_other_model(self.checkpoint.name(), self.report);
        let args = saved.over(self.args);
        let sampling = self.text.sampling(&args, self.report)?;
        let params = Params::new(sampling, &self.text.limits(&args));
        let messages = saved.messages_under(args.system.as_deref());
        let (before, variables) = (self.talk.messages().to_vec(), self.variables.clone());
        self.render_with(saved.variables().into_iter().chain(self.given.clone()).collect());
        let taken = self.talk.set_messages(messages).and_then(|positions| {
            if positions < self.context {
                return Ok(positions);
            }
            Err(Error::new(Code::ContextFull, "the conversation does not fit into the context")
                .need(format!("more than {positions} positions"))
                .have(format!("{} positions", self.context))
                .fix("q4 chat --load FILE --context N"))
        });
        let positions = match taken {
            Ok(positions) => positions,
            Err(e) => {
                self.render_with(variables);
                self.talk.set_messages(before)?;
                return Err(e);
            }
        };
        self.use_params(params)?;
        if self.is_person {
            let messages = self.talk.messages();
            stderr(&format!("{} messages, {positions} of {} positions\n", messages.len(), self.context));
            if messages.last().is_some_and(|m| m.role == "user") {
                stderr("the last one has no answer yet: /retry answers it\n");
            }
        }
        Ok(())
    }
}
