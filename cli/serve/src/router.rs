//! Which path leads where.
use crate::asked::Asked;
use crate::dialect::{Dialect, json_of};
use crate::fields;
use crate::memory::Held;
use crate::refusal::{Kind, Refusal};
use crate::server::Server;
use crate::trail::Trail;
use crate::{anthropic, gate, openai, openapi, page, probes, tokens};
use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, Request, State};
use axum::http::Uri;
use axum::middleware;
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use futures_util::StreamExt;
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// The service of a server.
pub fn router(server: Arc<Server>) -> Router {
    let mut all = Router::new();
    for (path, text, kind) in page::FILES {
        all = all.route(path, get(move || async move { page::file(text, kind) }));
    }
    for (path, answers) in routes() {
        all = all.route(path, answers);
    }
    all.fallback(missing)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(server.clone(), gate::pass))
        .with_state(server)
}

/// Everything but the page; all of it is in `openapi.json`.
pub fn routes() -> Vec<(&'static str, MethodRouter<Arc<Server>>)> {
    vec![
        ("/v1/chat/completions", answering(openai::chat::post)),
        ("/v1/completions", answering(openai::completions::post)),
        ("/v1/responses", answering(openai::responses::post)),
        ("/v1/messages", answering(anthropic::post)),
        ("/v1/messages/count_tokens", answering(anthropic::count)),
        ("/tokenize", answering(tokens::encode)),
        ("/detokenize", answering(tokens::decode)),
        ("/tokenizer_info", get(tokens::info)),
        ("/v1/models", get(models)),
        ("/v1/models/{*name}", get(model)),
        ("/v1/q4/explain", get(probes::explain)),
        ("/v1/q4/certificates", get(probes::certificates)),
        ("/health", get(probes::health)),
        ("/ready", get(probes::ready)),
        ("/version", get(probes::version)),
        ("/metrics", get(probes::metrics)),
        ("/openapi.json", get(openapi::get)),
    ]
}

/// A route that reads a JSON object and answers it in the dialect of its path.
fn answering<Answer>(of: fn(Arc<Server>, Arc<Trail>, Asked) -> Answer) -> MethodRouter<Arc<Server>>
where
    Answer: Future<Output = Result<Response, Refusal>> + Send + 'static,
{
    post(
        move |State(server): State<Arc<Server>>,
              Extension(trail): Extension<Arc<Trail>>,
              uri: Uri,
              request: Request| async move {
            let read = || async {
                let mut held = server.memory.hold();
                let bytes = body(&server, request.into_body(), &mut held).await?;
                let work = server.memory.work(&bytes).await?;
                let body = server.aside(move |_| fields::parse(&bytes)).await?;
                Ok(Asked { body, held, work })
            };
            let answer = match read().await {
                Ok(asked) => of(server.clone(), trail, asked).await,
                Err(refusal) => Err(refusal),
            };
            answer.unwrap_or_else(|refusal| Dialect::of(uri.path()).refuse(&refusal))
        },
    )
}

async fn models(State(server): State<Arc<Server>>) -> Response {
    json_of(&openai::models::list(&server.served))
}

async fn model(
    State(server): State<Arc<Server>>,
    name: Result<Path<String>, PathRejection>,
    uri: Uri,
) -> Response {
    // A name that is no UTF-8 is nobody's: it is shown as it was sent.
    let name = name.map_or_else(|_| uri.path().to_owned(), |Path(name)| name);
    match openai::models::one(&server.served, &name) {
        Ok(model) => json_of(&model),
        Err(refusal) => Dialect::OpenAi.refuse(&refusal),
    }
}

async fn missing(uri: Uri) -> Response {
    let what = format!("nothing is at {}", uri.path());
    Dialect::of(uri.path()).refuse(&Refusal::new(Kind::Missing, what).coded("not_found"))
}

async fn wrong_method(uri: Uri) -> Response {
    let what = format!("{} takes another method", uri.path());
    Dialect::of(uri.path()).refuse(&Refusal::new(Kind::Method, what).coded("method_not_allowed"))
}

/// Reads all of a body within bounds of size and time. A server that is about to stop waits for no body:
/// nothing has begun yet.
async fn body(server: &Server, body: Body, held: &mut Held) -> Result<Vec<u8>, Refusal> {
    let most = server.options.max_body;
    let too_large = || {
        let what = format!("the body is too long: need at most {most} bytes");
        Refusal::new(Kind::TooLarge, what).coded("body_too_large")
    };
    if body.size_hint().lower() > most as u64 {
        return Err(too_large());
    }
    let deadline = Instant::now() + server.options.read_timeout;
    let read = async {
        let (mut all, mut chunks) = (Vec::new(), body.into_data_stream());
        loop {
            let until = deadline.min(Instant::now() + server.options.idle_timeout);
            let slow = |_| Refusal::new(Kind::Slow, "the body took too long").coded("body_too_slow");
            let Some(chunk) = timeout_at(until, chunks.next()).await.map_err(slow)? else { return Ok(all) };
            let chunk =
                chunk.map_err(|e| Refusal::new(Kind::Invalid, format!("the body cannot be read: {e}")))?;
            if all.len() + chunk.len() > most {
                return Err(too_large());
            }
            held.grow(all.len() + chunk.len())?;
            all.extend_from_slice(&chunk);
        }
    };
    tokio::select! {
        biased;
        all = read => all,
        () = server.drains() => Err(Refusal::draining()),
    }
}
