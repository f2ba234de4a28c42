//! `q4 serve`: a model over HTTP.
use crate::args::ServeArgs;
use crate::context::Context;
use crate::explain;
use crate::proof::Proofs;
use crate::report::{Outcome, stderr};
use crate::session::{Session, shared_chunk};
use crate::signals;
use crate::text::{Text, context_size};
use q4_core::{Code, Device, Error, Result};
use q4_model::batch::company;
use q4_model::constraint::Grammars;
use q4_model::cpu::KvType;
use q4_model::load::ContextOptions;
use q4_model::plan::Plan;
use q4_serve::{Keys, Options, Served, Worker};
use serde::Serialize;
use serde_json::{Value, json};
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Positions of a sequence where nobody says.
const CONTEXT: usize = 8192;
/// Bytes of a request for other things than its prompt, tools among them, and for each token of a context.
const BODY: usize = 512 << 10;
const TOKEN: usize = 64;
/// Bytes of a file of keys.
const KEYS: u64 = 1 << 20;
/// How often the server looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(50);

/// The document of `--json`, written once requests are taken.
#[derive(Serialize)]
struct Begun<'a> {
    model: &'a str,
    url: String,
    context: usize,
    parallel: usize,
    reproducible: bool,
}

/// Runs the verb.
pub fn run(cx: &Context, args: &ServeArgs) -> Result<Outcome> {
    give_back_memory();
    // From here on somebody who stops the server is heard, also while it loads.
    let _hold = signals::cleanup();
    let mut options = Options {
        keys: Keys::new(keys(args)?)?,
        origins: args.cors_origin.clone(),
        hosts: hosts(args),
        request_memory: args.request_memory,
        drain_timeout: Duration::from_secs(args.drain_timeout),
        ..Options::default()
    };
    options.check()?;
    // An address that is taken is no reason to load a model first.
    let address = format!("{}:{}", args.host, args.port);
    let listener = TcpListener::bind(&*address).map_err(|e| {
        Error::new(Code::Io, format!("{address}: {e}")).fix("another --port, or 0 for one that is free")
    })?;
    let dispatch = Session::dispatch(cx)?;
    let checkpoint = cx.open(&args.model)?;
    let text = Text::of(&checkpoint)?;
    let context = context_size(args.context, CONTEXT, &checkpoint)?;
    // What is read into memory before it can be counted in tokens.
    options.max_body = BODY + context * TOKEN;
    let sequences = usize::from(args.parallel);
    let sizes = ContextOptions {
        context,
        chunk: shared_chunk(cx.device()?, sequences),
        all_logits: false,
        kv: cx.kv(KvType::F16),
        many: None,
    };
    let plan = Plan::new(&checkpoint, &dispatch, &cx.plan_options(args.quantize, sizes.chunk)?)?;
    plan.require(&dispatch)?;
    let explained = explain::document(cx, &checkpoint, &plan)?;
    let proofs = Proofs::new(cx, checkpoint.name(), &dispatch, &plan)?;
    let memory = args.request_memory;
    let session = Session::load_many(cx, dispatch, &checkpoint, args.quantize, sizes, sequences, memory)?;
    let dependents = session.dependents()?;
    if let (true, Some(first)) = (args.reproducible, dependents.first()) {
        return Err(Error::new(Code::Unsupported, format!("--reproducible: {}", first.layer))
            .need("a row whose bits do not depend on its company")
            .have(first.why.clone())
            .fix(
                "--device cpu, a kernel on packed weights, and an instruction set whose sums have one order, e.g. \
                 Q4_ISA=avx512vnni",
            ));
    }
    let proofs = serde_json::to_value(proofs.loaded(session.facts().skipped_self_checks))
        .map_err(|e| Error::new(Code::Internal, format!("the certificates: {e}")))?;
    let served = Arc::new(Served {
        name: args.alias.clone().unwrap_or_else(|| checkpoint.name().to_owned()),
        template: text.template(&checkpoint)?.as_ref().clone(),
        variables: text.variables.clone(),
        generation: text.generation().clone(),
        stop_ids: text.stop_ids().to_vec(),
        context,
        explain: with(explained, cx.device()?, &dependents),
        certificates: proofs,
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        tokenizer: text.tokenizer,
        grammars: Grammars::default(),
    });
    let (engine, bounds) = session.sequences()?;
    let worker = Worker::start(engine, bounds, served.clone(), args.queue)?;
    let at = listener.local_addr().map_err(|e| Error::new(Code::Io, e.to_string()))?;
    let begun = Begun {
        model: &served.name,
        url: format!("http://{at}/"),
        context,
        parallel: sequences,
        reproducible: dependents.is_empty(),
    };
    cx.report().result("serve", &begun, || format!("{} at {}\n", begun.model, begun.url))?;
    if !at.ip().is_loopback() && options.keys.is_empty() {
        cx.report().insist("everybody who reaches this machine may ask: --api-key-file FILE asks for a key");
    }
    if let Some(first) = dependents.first() {
        cx.report().warn(&format!(
            "answers may depend on who else is served: {}: {}; --reproducible refuses that",
            first.layer, first.why
        ));
    }
    // Without a file there is nothing to read again, and SIGHUP ends the server as every other program.
    let _reloads = args.api_key_file.is_some().then(signals::hangups);
    let door = options.keys.clone();
    let stop = async {
        while !signals::interrupted() {
            if signals::hung_up() {
                reload(cx, args, &door).await;
            }
            tokio::time::sleep(LOOK).await;
        }
    };
    q4_serve::run(listener, served, Arc::new(worker), options, stop)?;
    session.facts().detail(cx.report());
    Ok(Outcome::Done)
}

/// Lets what a request took go back to the system. glibc raises the size from which on memory is the system's
/// own, up to 32 MiB, whenever such a piece is freed, and gives threads up to eight heaps a processor, so what
/// is resident grew for as long as somebody asked for something new.
fn give_back_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: numbers of the allocator, which it takes at any time.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 << 10);
    }
}

/// Exchanges the keys; what cannot be read or used leaves the old ones. Somewhere else, since a file may make
/// whoever reads it wait.
async fn reload(cx: &Context, args: &ServeArgs, door: &Keys) {
    let (args, keys) = (args.clone(), door.clone());
    let read = tokio::task::spawn_blocking(move || keys.replace(self::keys(&args)?).map(|()| keys.len()));
    let why = match read.await {
        Ok(Ok(count)) => return stderr(&format!("SIGHUP: keys are read again: {count}\n")),
        Ok(Err(e)) => e.to_string(),
        Err(e) => format!("a bug in q4: {e}"),
    };
    cx.report().insist(&format!("SIGHUP: keys stay as they were: {}: {why}", door.len()));
}

/// Names that the server is known by; that of `--host` is one.
fn hosts(args: &ServeArgs) -> Vec<String> {
    let address = args.host.trim_start_matches('[').trim_end_matches(']');
    let own = Some(&args.host).filter(|_| address.parse::<IpAddr>().is_err());
    args.allowed_host.iter().chain(own).cloned().collect()
}

fn keys(args: &ServeArgs) -> Result<Vec<String>> {
    let mut keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let name = path.display();
        let failed = |e: std::io::Error| Error::new(Code::Io, format!("--api-key-file {name}: {e}"));
        let len = std::fs::metadata(path).map_err(failed)?.len();
        if len > KEYS {
            return Err(Error::new(Code::Usage, format!("--api-key-file {name}"))
                .need(format!("at most {KEYS} bytes"))
                .have(format!("{len} bytes")));
        }
        let text = std::fs::read_to_string(path).map_err(failed)?;
        keys.extend(text.lines().map(str::trim).filter(|l| !l.is_empty()).map(str::to_owned));
        if keys.is_empty() {
            // No key at all would let everybody in.
            return Err(Error::new(Code::Usage, format!("--api-key-file {name}"))
                .need("a key on each line")
                .have("none"));
        }
    }
    Ok(keys)
}

/// The plan, with what was found out about rows and their company.
fn with(mut explained: Value, device: Device, dependents: &[company::Dependent]) -> Value {
    if let Value::Object(fields) = &mut explained {
        fields.insert("device".to_owned(), device.to_string().into());
        fields.insert("reproducible".to_owned(), dependents.is_empty().into());
        fields.insert("not_reproducible".to_owned(), json!(dependents));
    }
    explained
}
