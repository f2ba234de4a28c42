//! How the server behaves.
use q4_core::{Code, Error, Result};
use std::time::Duration;

/// Bounds and doors. [`Default`] has no keys and no foreign origins.
#[derive(Clone, Debug)]
pub struct Options {
    /// Keys, one of which a request must have; none lets everybody in.
    pub keys: Vec<String>,
    /// Origins of other sites whose pages may ask, such as `https://example.org`.
    pub origins: Vec<String>,
    /// Bytes of a body.
    pub max_body: usize,
    /// Tokens of a prompt; absent is the context of the model.
    pub max_prompt: Option<usize>,
    /// Connections at once; more wait.
    pub connections: usize,
    /// How long a request may take to arrive, once for its head and once for its body.
    pub read_timeout: Duration,
    /// How long a client may take nothing of an answer that is there.
    pub write_timeout: Duration,
    /// How often an event stream says that it is alive.
    pub keep_alive: Duration,
    /// How long answers in flight may go on once the server is to stop.
    pub drain_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            keys: Vec::new(),
            origins: Vec::new(),
            max_body: 8 << 20,
            max_prompt: None,
            connections: 4096,
            read_timeout: Duration::from_secs(20),
            write_timeout: Duration::from_secs(60),
            keep_alive: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

impl Options {
    /// Checks that every option does what it looks like.
    ///
    /// # Errors
    /// [`Code::Usage`] for a key that everybody or nobody could send, and for an origin that no browser
    /// sends.
    pub fn check(&self) -> Result<()> {
        if self.keys.iter().any(|key| key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic())) {
            return Err(Error::new(Code::Usage, "API key: not usable").need("printable ASCII without spaces"));
        }
        let is_origin = |origin: &str| {
            let rest = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
            rest.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*', ' ', '@', '?', '#']))
        };
        match self.origins.iter().find(|origin| !is_origin(origin)) {
            Some(origin) => Err(Error::new(Code::Usage, "origin: not one")
                .need("scheme, host and port as browsers send them, e.g. https://example.org:8443")
                .have(origin)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doors_that_would_not_be_what_they_look_like_are_refused() {
        let keys = |key: &str| Options { keys: vec!["good".into(), key.into()], ..Options::default() };
        let origins = |origin: &str| Options { origins: vec![origin.into()], ..Options::default() };
        for options in [
            keys(""),
            keys("a b"),
            keys("ключ"),
            origins("*"),
            origins("https://example.org/"),
            origins("example.org"),
            origins("https://*.example.org"),
        ] {
            assert_eq!(options.check().expect_err("refused").code(), Code::Usage, "{options:?}");
        }
        keys("sk-1_2").check().expect("fine");
        origins("http://localhost:3000").check().expect("fine");
        Options::default().check().expect("fine");
    }
}
