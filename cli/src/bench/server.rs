//! `q4 bench --server`: what users of a server get, together and each of them.
//!
//! Nothing is left out of a figure: a request that fails is counted, a time to first token begins when a
//! request is due, and lengths are those that the server counts.
mod figures;
mod load;
mod plot;
mod prompts;
mod report;

use crate::args::{BenchArgs, LoadArgs};
use crate::client::{self, Server};
use crate::context::Context;
use crate::report::Outcome;
use load::{Level, Subject};
use prompts::Prompts;
use q4_core::{Code, Error, Result};
use report::{Body, Ratio, Row};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Users at once where nobody says.
const USERS: [usize; 3] = [1, 8, 32];
/// Requests of a level where nobody says: for each user, and at least.
const EACH: usize = 4;
const LEAST: usize = 16;

/// Runs the verb.
pub fn run(cx: &Context, args: &BenchArgs, server: Server) -> Result<Outcome> {
    cx.nothing_here()?;
    let load = &args.load;
    if let Some(path) = &load.plot {
        require_free(path)?;
    }
    let runtime = client::runtime()?;
    let measured = runtime.block_on(async {
        let mut subjects = vec![Subject::find(server, args.server.served.as_deref()).await?];
        if let Some(url) = &load.compare {
            let key = load.compare_api_key_file.as_deref().map(client::key_in).transpose()?;
            let other = Server::new(url, key.as_deref())?;
            subjects.push(Subject::find(other, load.compare_model.as_deref()).await?);
        }
        measure(cx, load, !args.no_warm_up, subjects).await
    });
    // Who hangs is not waited for.
    runtime.shutdown_background();
    let body = measured?;
    cx.report().result("bench-server", &body, || body.text())?;
    if let Some(path) = &load.plot {
        write(path, &plot::svg(&body))?;
    }
    Ok(if body.failed() > 0 { Outcome::Found(Code::Findings) } else { Outcome::Done })
}

async fn measure(cx: &Context, load: &LoadArgs, warms_up: bool, subjects: Vec<Subject>) -> Result<Body> {
    let (wanted, answer) = (load.prompt_tokens as usize, load.answer_tokens as usize);
    let patience = Duration::from_secs(load.timeout);
    let levels = levels(load);
    let requests = |level: &Level| match (load.requests, level) {
        (Some(n), _) => n as usize,
        (None, Level::Users(n)) => (n * EACH).max(LEAST),
        (None, Level::Rate(_)) => LEAST,
    };
    let mut ready = Vec::new();
    for subject in subjects {
        ready.push(subject.ready(answer, patience).await?);
    }
    // One number of words, so that both servers read the same.
    let words = ready[0].words_for(wanted, load.seed).await?;
    let most = levels.iter().map(&requests).max().unwrap_or(LEAST);
    let prompts = Arc::new(Prompts::new(load.seed, words, most));
    let ready: Vec<_> = ready.into_iter().map(Arc::new).collect();
    let bar = cx.report().bar("levels");
    bar.set_length((levels.len() * ready.len()) as u64);
    if warms_up {
        let largest = levels.iter().map(Level::at_once).max().unwrap_or(1).min(most);
        for subject in &ready {
            load::run(subject, &prompts, Level::Users(largest), largest, load.seed).await;
        }
    }
    let mut results = Vec::new();
    for (turn, level) in levels.iter().enumerate() {
        let mut rows = Vec::new();
        // Who was last is first in the next turn.
        let mut order: Vec<_> = (0..ready.len()).collect();
        if turn % 2 == 1 {
            order.reverse();
        }
        for which in order {
            let run = load::run(&ready[which], &prompts, *level, requests(level), load.seed).await;
            rows.push(Row::new(which, &ready[which], *level, &run));
            bar.inc(1);
        }
        rows.sort_by_key(|row| row.which);
        results.extend(rows);
    }
    bar.finish_and_clear();
    let ratios = match ready.len() {
        1 => None,
        _ => Some(results.chunks(2).map(|pair| Ratio::new(&pair[0], &pair[1])).collect()),
    };
    Ok(Body {
        servers: ready.iter().map(|subject| subject.described()).collect(),
        prompt_tokens: wanted,
        answer_tokens: answer,
        seed: load.seed,
        results,
        ratios,
    })
}

fn levels(load: &LoadArgs) -> Vec<Level> {
    let users = if load.users.is_empty() && load.rate.is_empty() { &USERS[..] } else { &load.users };
    let rates = load.rate.iter().map(|rate| Level::Rate(*rate));
    users.iter().map(|users| Level::Users(*users)).chain(rates).collect()
}

/// A plot that cannot be written is told before minutes of measuring.
fn require_free(path: &Path) -> Result<()> {
    let e = |text: String| Error::new(Code::Usage, format!("--plot {}", path.display())).have(text);
    if path.symlink_metadata().is_ok() {
        return Err(e("a file of that name".to_owned()).need("a name that is free"));
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        return Err(
            e(format!("no folder {}", folder.display())).fix(format!("mkdir -p {}", folder.display()))
        );
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|e| Error::new(Code::Io, format!("--plot {}: {e}", path.display())))
}
