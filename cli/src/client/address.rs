//! Where a server is.
use hyper::Uri;
use q4_core::{Code, Error, Result};
use std::fmt;

/// `http://HOST:PORT` and perhaps a path that its API is under.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
    authority: String,
    path: String,
}

impl Address {
    /// Reads a URL; one that ends with `/v1`, as clients are given it, means the same.
    ///
    /// # Errors
    /// [`Code::Usage`] for anything else, https among it: q4 speaks no TLS.
    pub fn parse(url: &str) -> Result<Self> {
        let wrong = |have: &str| {
            Error::new(Code::Usage, format!("{url}: not the address of a server"))
                .need("http://HOST:PORT")
                .have(have)
        };
        let uri: Uri = url.parse().map_err(|e| wrong(&format!("{e}")))?;
        let authority = uri.authority().ok_or_else(|| wrong("no host"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(wrong("https, and q4 speaks no TLS")
                    .fix("ssh -L 8080:HOST:PORT, or a proxy on this machine that speaks it"));
            }
            Some(other) => return Err(wrong(other)),
            None => return Err(wrong("no scheme").fix(format!("http://{url}"))),
        }
        if authority.as_str().contains('@') {
            return Err(wrong("a name before the host").fix("a key: --api-key-file FILE"));
        }
        if uri.query().is_some() {
            return Err(wrong("a query"));
        }
        let port = match authority.as_str().strip_prefix(authority.host()) {
            Some("") => 80,
            Some(port) => port[1..].parse().map_err(|_| wrong(&format!("the port {}", &port[1..])))?,
            None => return Err(wrong("no host")),
        };
        let path = uri.path().trim_end_matches('/');
        Ok(Self {
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port,
            authority: authority.as_str().to_owned(),
            path: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
        })
    }

    /// A name or a number.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Its port; 80 where none is named.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Both, as they were named.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// What a request line says for `path` of the API.
    pub fn path(&self, path: &str) -> String {
        format!("{}{path}", self.path)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_pasted() {
        for (url, host, port, path) in [
            ("http://127.0.0.1:8080/", "127.0.0.1", 8080, "/v1/models"),
            ("http://localhost", "localhost", 80, "/v1/models"),
            ("http://[::1]:9/v1", "::1", 9, "/v1/models"),
            ("http://box:8000/team/v1/", "box", 8000, "/team/v1/models"),
        ] {
            let address = Address::parse(url).unwrap_or_else(|e| panic!("{url}: {e}"));
            let have = (address.host(), address.port(), address.path("/v1/models"));
            assert_eq!(have, (host, port, path.to_owned()), "{url}");
        }
        assert_eq!(Address::parse("http://[::1]:9/v1").expect("valid").to_string(), "http://[::1]:9");
    }

    #[test]
    fn what_cannot_be_asked_is_refused_with_a_word() {
        for (url, word) in [
            ("https://example.org", "TLS"),
            ("localhost:8080", "http://localhost:8080"),
            ("ftp://x", "ftp"),
            ("http://me:secret@x", "--api-key-file"),
            ("http://x/?key=1", "query"),
            ("http://", "need"),
            ("", "need"),
            ("http://x:99999", "the port 99999"),
            ("http://x:", "the port"),
            ("/path", "no host"),
        ] {
            let e = Address::parse(url).expect_err(url);
            assert!(e.code() == Code::Usage && e.to_string().contains(word), "{url}: {e}");
        }
    }
}
