//! The page: files that ask this server alone.
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;

/// Nothing from elsewhere, nothing inline, in nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Path, content and type of every file.
pub const FILES: [(&str, &str, &str); 5] = [
    ("/", include_str!("../page/index.html"), "text/html; charset=utf-8"),
    ("/app.js", include_str!("../page/app.js"), SCRIPT),
    ("/markdown.js", include_str!("../page/markdown.js"), SCRIPT),
    ("/view.js", include_str!("../page/view.js"), SCRIPT),
    ("/style.css", include_str!("../page/style.css"), "text/css; charset=utf-8"),
];

/// A file as a response.
pub fn file(text: &'static str, kind: &'static str) -> Response {
    let mut response = Response::new(Body::from(text));
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}
