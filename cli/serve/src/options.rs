//! How the server behaves.
use crate::keys::Keys;
use crate::memory;
use q4_core::memory::human;
use q4_core::{Code, Error, Result};
use std::time::Duration;

/// Bounds and doors. [`Default`] has no keys and no foreign origins.
#[derive(Clone, Debug)]
pub struct Options {
    /// Keys, one of which a request must have; none lets everybody in.
    pub keys: Keys,
    /// Origins of other sites whose pages may ask, such as `https://example.org`.
    pub origins: Vec<String>,
    /// Names that this server is asked by, without a port, beside `localhost` and addresses, which nobody
    /// else can let point here; `*` is every name. Not looked at where keys are needed.
    pub hosts: Vec<String>,
    /// Bytes of a body.
    pub max_body: usize,
    /// Bytes that all requests in flight may take, their bodies as they come, are read and become prompts.
    pub request_memory: u64,
    /// Tokens of a prompt; absent is the context of the model.
    pub max_prompt: Option<usize>,
    /// Connections at once; more wait.
    pub connections: usize,
    /// How long a request may take to arrive, once for its head and once for its body.
    pub read_timeout: Duration,
    /// How long the next piece of a body may take to arrive.
    pub idle_timeout: Duration,
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
            keys: Keys::default(),
            origins: Vec::new(),
            hosts: Vec::new(),
            max_body: 8 << 20,
            request_memory: 384 << 20,
            max_prompt: None,
            connections: 4096,
            read_timeout: Duration::from_secs(20),
            idle_timeout: Duration::from_secs(5),
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
    /// [`Code::Usage`] for an origin that no browser sends, a host that is no name, and memory that no
    /// request could be read in.
    pub fn check(&self) -> Result<()> {
        if self.request_memory < memory::LEAST {
            return Err(Error::new(Code::Usage, "memory for requests")
                .need(format!("at least {}", human(memory::LEAST)))
                .have(human(self.request_memory)));
        }
        let is_name = |host: &str| {
            host == "*"
                || !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        };
        if let Some(host) = self.hosts.iter().find(|host| !is_name(host)) {
            return Err(Error::new(Code::Usage, "host: not one")
                .need("a name without scheme and port, e.g. q4.example.org, or * for every name")
                .have(host));
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
        let hosts = |host: &str| Options { hosts: vec![host.into()], ..Options::default() };
        let origins = |origin: &str| Options { origins: vec![origin.into()], ..Options::default() };
        for options in [
            Options { request_memory: 1 << 20, ..Options::default() },
            hosts(""),
            hosts("https://example.org"),
            hosts("example.org:80"),
            hosts("*.example.org"),
            origins("*"),
            origins("https://example.org/"),
            origins("example.org"),
            origins("https://*.example.org"),
        ] {
            assert_eq!(options.check().expect_err("refused").code(), Code::Usage, "{options:?}");
        }
        hosts("q4.example.org").check().expect("fine");
        hosts("*").check().expect("fine");
        origins("http://localhost:3000").check().expect("fine");
        Options::default().check().expect("fine");
    }
}
