//! Requests as users send them, and what comes back when.
use super::prompts::{Prompts, arrivals, prompt};
use crate::client::{Reply, Server, Usage};
use q4_core::{Code, Error, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

/// How many ask, or how often.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// So many users, each of whom asks again when he has his answer.
    Users(usize),
    /// So many requests a second.
    Rate(f64),
}

impl Level {
    /// Requests at once, as far as it says.
    pub fn at_once(&self) -> usize {
        match self {
            Self::Users(n) => *n,
            Self::Rate(_) => 1,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Users(1) => f.pad("1 user"),
            Self::Users(n) => f.pad(&format!("{n} users")),
            Self::Rate(rate) => f.pad(&format!("{rate}/s")),
        }
    }
}

/// A server and one of its models.
pub struct Subject {
    server: Server,
    model: String,
}

/// One that answers, and how it is asked.
pub struct Ready {
    subject: Subject,
    answer: usize,
    patience: Duration,
    /// Whether it takes fields that OpenAI's API does not have.
    takes_more: bool,
    /// Makes requests of this run unlike those of any other.
    salt: u64,
    asked: AtomicU64,
}

/// A server that was measured.
#[derive(Serialize)]
pub struct Described {
    pub url: String,
    pub model: String,
    /// Whether it takes `ignore_eos` and words against its cache; where not, answers end where the model ends
    /// them, and prompts may have been computed before.
    pub ignores_eos: bool,
}

/// An answer as it came. Times begin when the request was due.
pub struct Seen {
    /// None where no event had a text.
    pub first: Option<Duration>,
    /// Between events with a text.
    pub gaps: Vec<Duration>,
    /// As the server counts.
    pub usage: Usage,
}

/// What came of the requests of a level.
pub struct Run {
    /// From the first request to the end of the last.
    pub wall: Duration,
    /// One for each request.
    pub fates: Vec<Result<Seen>>,
}

impl Subject {
    /// The model that is named, else the first there is.
    pub async fn find(server: Server, named: Option<&str>) -> Result<Self> {
        let model = server.model(named).await?;
        Ok(Self { server, model })
    }

    /// Finds out how to ask for answers of `answer` tokens.
    pub async fn ready(self, answer: usize, patience: Duration) -> Result<Ready> {
        let salt = RandomState::new().build_hasher().finish();
        let mut ready =
            Ready { subject: self, answer, patience, takes_more: true, salt, asked: AtomicU64::new(0) };
        match ready.ask("time", 1, Instant::now()).await {
            Ok(_) => Ok(ready),
            Err(e) if e.code() == Code::ServerRefused => {
                ready.takes_more = false;
                ready.ask("time", 1, Instant::now()).await?;
                Ok(ready)
            }
            Err(e) => Err(e),
        }
    }
}

impl Ready {
    /// What a report says of it.
    pub fn described(&self) -> Described {
        Described {
            url: self.subject.server.address().to_string(),
            model: self.subject.model.clone(),
            ignores_eos: self.takes_more,
        }
    }

    /// Tokens that answers are to have.
    pub fn answer(&self) -> usize {
        self.answer
    }

    /// How many words make a prompt of `tokens` here; its template takes some of them.
    pub async fn words_for(&self, tokens: usize, seed: u64) -> Result<usize> {
        let count = async |words: usize| {
            let seen = self.ask(&prompt(seed, u64::MAX - 1, words), 1, Instant::now()).await?;
            Ok::<_, Error>(seen.usage.prompt as f64)
        };
        let (few, many) = (1, tokens.max(2));
        let (least, most) = (count(few).await?, count(many).await?);
        let each = (most - least) / (many - few) as f64;
        if each <= 0.0 {
            return Err(Error::new(
                Code::ServerFailed,
                format!("{}: its counts", self.subject.server.address()),
            )
            .need("more prompt_tokens for more words")
            .have(format!("{least} for {few} and {most} for {many}")));
        }
        Ok(((tokens as f64 - least) / each).round().max(0.0) as usize + 1)
    }

    fn body(&self, prompt: &str, answer: usize) -> Value {
        let mut body = json!({
            "model": self.subject.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": answer,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if self.takes_more {
            let number = self.asked.fetch_add(1, Ordering::Relaxed);
            body["ignore_eos"] = true.into();
            // A prompt that was computed before would be no prompt: two words for it, of which a server knows
            // one at most.
            body["cache_prompt"] = false.into();
            body["cache_salt"] = format!("q4-bench-{:016x}-{number}", self.salt).into();
        }
        body
    }

    /// One request that was due at `due`.
    async fn ask(&self, prompt: &str, answer: usize, due: Instant) -> Result<Seen> {
        let patience = self.patience;
        let late = |_| {
            Err(Error::new(Code::ServerFailed, format!("{}: no whole answer", self.subject.server.address()))
                .need(format!("one within {} s (--timeout)", patience.as_secs())))
        };
        timeout(patience, self.listen(&self.body(prompt, answer), due)).await.unwrap_or_else(late)
    }

    async fn listen(&self, body: &Value, due: Instant) -> Result<Seen> {
        let mut stream = self.subject.server.stream("/v1/chat/completions", body).await?;
        let mut reply = Reply::default();
        let (mut first, mut last, mut gaps) = (None, None, Vec::new());
        while let Some(event) = stream.next().await? {
            if reply.take(&event).is_empty() {
                continue;
            }
            let now = Instant::now();
            match last.replace(now) {
                None => first = Some(now - due),
                Some(before) => gaps.push(now - before),
            }
        }
        reply.require_end(self.subject.server.address())?;
        let usage = reply.usage.ok_or_else(|| {
            Error::new(
                Code::ServerFailed,
                format!("{}: an answer without counts", self.subject.server.address()),
            )
            .need("usage in its last event, for \"include_usage\": true")
        })?;
        Ok(Seen { first, gaps, usage })
    }
}

/// Sends the first `count` prompts at this level.
pub async fn run(ready: &Arc<Ready>, prompts: &Arc<Prompts>, level: Level, count: usize, seed: u64) -> Run {
    let begun = Instant::now();
    let mut tasks: JoinSet<Vec<Result<Seen>>> = JoinSet::new();
    match level {
        Level::Users(users) => {
            let next = Arc::new(AtomicUsize::new(0));
            for _ in 0..users.min(count) {
                let (ready, prompts, next) = (ready.clone(), prompts.clone(), next.clone());
                tasks.spawn(async move {
                    let mut fates = Vec::new();
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        if at >= count {
                            return fates;
                        }
                        fates.push(ready.ask(prompts.get(at), ready.answer, Instant::now()).await);
                    }
                });
            }
        }
        Level::Rate(rate) => {
            for (at, due) in arrivals(seed, count).into_iter().enumerate() {
                let (ready, prompts) = (ready.clone(), prompts.clone());
                let due = begun + Duration::from_secs_f64(due / rate);
                tasks.spawn(async move {
                    sleep_until(due).await;
                    vec![ready.ask(prompts.get(at), ready.answer, due).await]
                });
            }
        }
    }
    let fates = tasks.join_all().await.into_iter().flatten().collect();
    Run { wall: begun.elapsed(), fates }
}
