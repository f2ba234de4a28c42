//! Where a request stands in a trace that others began (W3C Trace Context): its lines in the log carry it.
use crate::words::random;
use axum::http::HeaderMap;

const HEADER: &str = "traceparent";

/// A place in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// 32 hexadecimal digits, which all of the trace share.
    pub trace: String,
    /// 16 of them: whoever sent the request.
    pub parent: String,
    /// The request here, as whoever reads the log may call it.
    pub span: String,
}

impl TraceContext {
    /// What a request says of it. What is not as the standard has it is as if it were not there.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut all = headers.get_all(HEADER).iter();
        let (Some(text), None) = (all.next(), all.next()) else { return None };
        let mut parts = text.to_str().ok()?.trim().split('-');
        let [version, trace, parent, flags] =
            [2, 32, 16, 2].map(|len| parts.next().and_then(|p| hex(p, len)));
        let (version, trace, parent) = (version?, named(trace?)?, named(parent?)?);
        flags?;
        // Later versions may say more behind it.
        let is_known = version != "ff" && (version != "00" || parts.next().is_none());
        let span = format!("{:016x}", random().max(1));
        is_known.then(|| Self { trace: trace.to_owned(), parent: parent.to_owned(), span })
    }
}

/// So many hexadecimal digits, lower case.
fn hex(text: &str, len: usize) -> Option<&str> {
    let is_digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    (text.len() == len && text.bytes().all(is_digit)).then_some(text)
}

/// Zeros are nobody's name.
fn named(text: &str) -> Option<&str> {
    text.bytes().any(|b| b != b'0').then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const PARENT: &str = "b7ad6b7169203331";

    fn of(values: &[&str]) -> Option<TraceContext> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(HEADER, value.parse().expect("a value"));
        }
        TraceContext::of(&headers)
    }

    #[test]
    fn a_place_in_a_trace_is_read() {
        for value in [
            format!("00-{TRACE}-{PARENT}-01"),
            format!(" 00-{TRACE}-{PARENT}-00 "),
            format!("cc-{TRACE}-{PARENT}-01"),
            format!("cc-{TRACE}-{PARENT}-01-what-the-future-brings"),
        ] {
            let context = of(&[&value]).unwrap_or_else(|| panic!("{value}"));
            assert_eq!((context.trace.as_str(), context.parent.as_str()), (TRACE, PARENT));
            assert_eq!(hex(&context.span, 16).and_then(named), Some(context.span.as_str()));
        }
    }

    #[test]
    fn what_is_not_as_the_standard_has_it_is_not_there() {
        let good = format!("00-{TRACE}-{PARENT}-01");
        for value in [
            String::new(),
            "00".to_owned(),
            format!("00-{TRACE}-{PARENT}"),
            format!("00-{TRACE}-{PARENT}-01-more"),
            format!("ff-{TRACE}-{PARENT}-01"),
            format!("00-{}-{PARENT}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{}-{PARENT}-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-{PARENT}-0g"),
            format!("00-{PARENT}-{TRACE}-01"),
        ] {
            assert_eq!(of(&[&value]), None, "{value}");
        }
        assert_eq!(of(&[&good, &good]), None);
        assert_eq!(of(&[]), None);
    }
}
