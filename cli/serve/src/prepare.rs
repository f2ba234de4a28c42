//! From what is asked to what the engine takes: templates are rendered, texts become tokens, and everything
//! is checked that can be checked before a place in the queue is taken. It computes, so it runs on threads
//! that may block.
use crate::ask::{Ask, Prompt, Talk};
use crate::constraint::{Constraint, Demand};
use crate::options::Options;
use crate::refusal::Refusal;
use crate::served::Served;
use crate::words::random;
use q4_core::{Code, Error};
use q4_model::batch::Request;
use q4_model::constraint::{Grammar, Thoughts};
use q4_model::generate::Limits;
use q4_model::reply;
use q4_model::stop::StopMatcher;

/// Answers to all prompts of one request.
const MOST_SEQUENCES: usize = 128;
/// Bytes of an answer or a stop string beside its texts and tokens.
const ANSWER: usize = 1 << 10;

/// A prompt as the engine gets it.
#[derive(Clone, Debug)]
pub struct Given {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Its text, where it is to be repeated.
    pub text: String,
    /// What its model may think before an answer has its form.
    pub thoughts: Thoughts,
    /// How to take the reply apart, which only conversations are.
    pub reading: Option<reply::Options>,
}

/// Everything that one request makes the engine do.
#[derive(Debug)]
pub struct Job {
    /// One for each answer: those to the first prompt come first.
    pub requests: Vec<Request>,
    /// The prompts, each of which has `requests / prompts` answers.
    pub prompts: Vec<Given>,
    /// See [`Ask::stop`].
    pub stop: Vec<String>,
    /// See [`Ask::parallel_calls`].
    pub parallel_calls: bool,
    /// Likely tokens to tell at each place; those that the engine was asked for may be more.
    pub logprobs: Option<usize>,
}

impl Job {
    /// Bytes that it takes, here and in the engine, until its answers are over.
    pub fn bytes(&self) -> u64 {
        let prompts = self.prompts.iter().map(|given| given.text.capacity() + 4 * given.ids.capacity());
        let each = |request: &Request| {
            let stops = request.limits.stop_strings.iter().map(|stop| ANSWER + stop.len()).sum::<usize>();
            ANSWER + 4 * request.prompt.capacity() + 8 * request.nudges.bias.capacity() + stops
        };
        (prompts.sum::<usize>() + self.requests.iter().map(each).sum::<usize>()) as u64
    }
}

/// Makes a job of what is asked.
///
/// # Errors
/// 400 for everything that no engine could do.
pub fn prepare(served: &Served, options: &Options, ask: Ask) -> Result<Job, Refusal> {
    let sequences = ask.prompts.len().saturating_mul(ask.n);
    if sequences == 0 || sequences > MOST_SEQUENCES {
        let need = format!("1 to {MOST_SEQUENCES} answers in one request");
        return Err(Refusal::field("prompt", &need, sequences));
    }
    StopMatcher::new(&ask.stop)?;
    let first_seed = ask.wishes.seed.unwrap_or_else(|| random() >> 32);
    let params = ask.wishes.over(&served.generation, first_seed)?;
    let highest = served.tokenizer.highest_id();
    if let Some((id, _)) = ask.nudges.bias.iter().find(|(id, _)| *id > highest) {
        return Err(Refusal::field("logit_bias", &format!("token ids up to {highest}"), id));
    }
    let most = options.max_prompt.unwrap_or(served.context);
    let give = |prompt| give(served, prompt, most, &ask);
    let given = ask.prompts.iter().map(give).collect::<Result<Vec<_>, _>>()?;
    let form = form(served, &ask, &given)?;
    let mut requests = Vec::with_capacity(sequences);
    for prompt in &given {
        let room = room(served, prompt, ask.max_tokens)?;
        for answer in 0..ask.n as u64 {
            let mut params = params.clone();
            params.seed = first_seed.wrapping_add(answer);
            requests.push(Request {
                prompt: prompt.ids.clone(),
                params,
                nudges: ask.nudges.clone(),
                limits: Limits {
                    max_tokens: ask.max_tokens.or(served.generation.max_new_tokens).unwrap_or(room).min(room),
                    stop_ids: if ask.ignore_eos { Vec::new() } else { served.stop_ids.clone() },
                    stop_strings: ask.stop.clone(),
                    // The drawn token is weighed only where others are.
                    top_logprobs: ask.logprobs.map_or(0, |most| most.max(1)),
                    form: form.clone(),
                    interrupt: None,
                },
                reuse: ask.reuse,
                prompt_logprobs: ask.echo && ask.logprobs.is_some(),
            });
        }
    }
    Ok(Job {
        requests,
        prompts: given,
        stop: ask.stop,
        parallel_calls: ask.parallel_calls,
        logprobs: ask.logprobs,
    })
}

/// The form of all answers.
fn form(served: &Served, ask: &Ask, given: &[Given]) -> Result<Option<Grammar>, Refusal> {
    let (Some(constraint), Some(first)) = (&ask.constraint, given.first()) else { return Ok(None) };
    let tools = match ask.prompts.first() {
        Some(Prompt::Talk(talk)) => talk.tools.as_ref(),
        _ => None,
    };
    let what = constraint.over(&served.template, tools, ask.parallel_calls);
    let compiled = served.grammars.compile(&served.tokenizer, &what, first.thoughts);
    compiled.map(Some).map_err(|e| {
        let refusal = Refusal::from(e);
        let message = format!("{}: {}", constraint.at, refusal.message);
        Refusal { param: Some(constraint.at.clone()), message, ..refusal }
    })
}

/// A prompt of at most `most` tokens, with its text if that is to be repeated. What cannot be as short is
/// refused before it becomes tokens, which is most of the work.
fn give(served: &Served, prompt: &Prompt, most: usize, ask: &Ask) -> Result<Given, Refusal> {
    let fits = |tokens: usize, counted: &str| match tokens > most {
        true => Err(full(format!("at most {most} tokens"), format!("{counted}{tokens} tokens"))),
        false => Ok(()),
    };
    let repeated = |text: &str| if ask.echo { text.to_owned() } else { String::new() };
    let given = match prompt {
        Prompt::Talk(talk) => {
            let text = rendered(served, talk)?;
            fits(served.tokenizer.least(&text), "at least ")?;
            // What must have a form is told as it is, whatever it looks like, unless its form is a call.
            let is_form = matches!(&ask.constraint, Some(Constraint { what: Demand::Form(_), .. }));
            let reading = reply::Options {
                thinking: text.trim_end().ends_with("<think>"),
                tools: talk.tools.is_some() && !is_form,
                schemas: talk.tools.clone(),
            };
            let ids = served.tokenizer.encode(&text, false)?;
            let thoughts = Thoughts::of(&text, &served.template);
            Given { ids, text: repeated(&text), thoughts, reading: Some(reading) }
        }
        Prompt::Text(text) => {
            fits(served.tokenizer.least(text), "at least ")?;
            let ids = served.tokenizer.encode(text, true)?;
            Given { ids, text: repeated(text), thoughts: Thoughts::None, reading: None }
        }
        Prompt::Ids(ids) => {
            fits(ids.len(), "")?;
            let highest = served.tokenizer.highest_id();
            if let Some(id) = ids.iter().find(|id| **id > highest) {
                return Err(Refusal::field("prompt", &format!("token ids up to {highest}"), id));
            }
            let text = if ask.echo { served.tokenizer.decode(ids, false)? } else { String::new() };
            Given { ids: ids.clone(), text, thoughts: Thoughts::None, reading: None }
        }
    };
    if given.ids.is_empty() {
        return Err(Refusal::field("prompt", "at least one token", "none"));
    }
    fits(given.ids.len(), "")?;
    Ok(given)
}

/// The refusal of a prompt that is too long.
fn full(need: String, have: String) -> Refusal {
    Error::new(Code::ContextFull, "the prompt is too long")
        .need(need)
        .have(have)
        .fix("send less of the conversation, or serve the model with a larger context")
        .into()
}

/// The prompt of a conversation.
pub fn rendered(served: &Served, talk: &Talk) -> Result<String, Refusal> {
    let mut variables = served.variables.clone();
    variables.extend(talk.variables.clone());
    if talk.tools.is_some() && !served.template.reads("tools") {
        tracing::debug!(model = served.name, "the chat template knows no tools: the model does not see them");
    }
    Ok(served.template.render(&talk.messages, talk.tools.as_ref(), true, &variables)?)
}

/// Positions that are left for an answer.
fn room(served: &Served, prompt: &Given, max_tokens: Option<usize>) -> Result<usize, Refusal> {
    let room = served.context.saturating_sub(prompt.ids.len());
    if room == 0 && max_tokens != Some(0) {
        let need = format!("fewer tokens than the {} of the context", served.context);
        return Err(full(need, format!("{} tokens", prompt.ids.len())));
    }
    Ok(room)
}
