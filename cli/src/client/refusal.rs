//! What a server says or does instead of answering, as an error of q4's.
use super::Address;
use hyper::StatusCode;
use hyper::header::{HeaderMap, HeaderName, LOCATION, RETRY_AFTER};
use q4_core::{Code, Error};
use serde_json::Value;

/// Characters of a server's words that are repeated.
const WORDS: usize = 300;

/// A status that is no success.
pub fn refused(at: &Address, path: &str, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Error {
    let code = if status.is_server_error() { Code::ServerFailed } else { Code::ServerRefused };
    let said = words(body);
    let have = if said.is_empty() { status.to_string() } else { format!("{status}: {said}") };
    let error = |what: &str| Error::new(code, format!("{at}: {what}")).have(have.clone());
    let header = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(cut);
    let again = header(RETRY_AFTER).map(|after| match after.parse::<u64>() {
        Ok(seconds) => format!("again after {seconds} s"),
        Err(_) => format!("again after {after}"),
    });
    match status.as_u16() {
        401 | 403 => error("the server wants a key that it knows")
            .fix("--api-key-file FILE, or the variable Q4_API_KEY"),
        404 => error("there is no such model or no such API")
            .need(format!("{path}, and a model that /v1/models lists"))
            .fix("--model NAME, or the address that its clients are given"),
        429 => error("the server is busy").fix(again.unwrap_or_else(|| "again later".to_owned())),
        300..=399 => {
            let to = header(LOCATION).unwrap_or_else(|| "nowhere".to_owned());
            error("the server sends its clients elsewhere").fix(format!("--server, if you trust it: {to}"))
        }
        500.. => {
            let failed = error("the server failed");
            match again {
                Some(again) => failed.fix(again),
                None => failed,
            }
        }
        _ => error("the server refused the request"),
    }
}

/// A connection that ended, or that carries something else than HTTP.
pub fn broken(at: &Address, e: &hyper::Error) -> Error {
    let error = |what: &str| Error::new(Code::ServerFailed, format!("{at}: {what}"));
    match () {
        () if e.is_parse() => error("what comes back is no HTTP").need("HTTP/1.1").have(e.to_string()),
        () if e.is_incomplete_message() || e.is_closed() || e.is_canceled() => {
            error("the server went away before the end of its answer").have(e.to_string())
        }
        () => error("the connection broke").have(with_source(e)),
    }
}

fn with_source(e: &hyper::Error) -> String {
    let source = std::error::Error::source(e).map(|source| format!(": {source}"));
    format!("{e}{}", source.unwrap_or_default())
}

/// What a body says in words: the message of an error, wherever servers put it, else its text.
pub fn words(body: &[u8]) -> String {
    let document: Option<Value> = serde_json::from_slice(body).ok();
    let message = document.as_ref().and_then(|d| {
        let places = ["/error/message", "/message", "/detail", "/error"];
        places.iter().find_map(|place| d.pointer(place).and_then(Value::as_str))
    });
    cut(message.unwrap_or(&String::from_utf8_lossy(body)).trim())
}

/// A text that is not longer than an error should be, on one line.
pub fn cut(text: &str) -> String {
    let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match one_line.char_indices().nth(WORDS) {
        Some((at, _)) => format!("{}...", &one_line[..at]),
        None => one_line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_a_code_and_says_what_helps() {
        let at = Address::parse("http://x:1").expect("an address");
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, "7".parse().expect("a value"));
        headers.insert(LOCATION, "http://y/".parse().expect("a value"));
        let body = br#"{"error": {"message": "so\nit is"}}"#;
        for (status, code, says) in [
            (401, Code::ServerRefused, "--api-key-file"),
            (404, Code::ServerRefused, "--model NAME"),
            (400, Code::ServerRefused, "refused the request"),
            (429, Code::ServerRefused, "again after 7 s"),
            (302, Code::ServerRefused, "http://y/"),
            (500, Code::ServerFailed, "failed"),
            (503, Code::ServerFailed, "again after 7 s"),
        ] {
            let status = StatusCode::from_u16(status).expect("a status");
            let e = refused(&at, "/v1/models", status, &headers, body);
            let text = e.to_string();
            assert_eq!((e.code(), e.code().exit()), (code, 8), "{text}");
            assert!(text.contains(says) && text.contains("so it is"), "{text}");
        }
    }

    #[test]
    fn words_are_found_wherever_they_stand_and_are_short() {
        for body in [
            r#"{"error": {"message": "no"}}"#,
            r#"{"error": "no"}"#,
            r#"{"object": "error", "message": "no"}"#,
            r#"{"detail": "no"}"#,
            " no\n",
        ] {
            assert_eq!(words(body.as_bytes()), "no", "{body}");
        }
        assert_eq!(words(b""), "");
        assert_eq!(words("é".repeat(1000).as_bytes()).chars().count(), WORDS + 3);
    }
}
