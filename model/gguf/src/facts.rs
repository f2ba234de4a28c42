//! The metadata of an architecture under inspection: typed, every problem at once, and nothing left over.
//!
//! A key that nobody asked for may change what the model computes, so it is a problem too.
use crate::{Gguf, Value, cursor::brief};
use q4_core::{Code, Error, Result};
use std::{cell::RefCell, collections::BTreeSet, fmt};

/// Keys without a meaning that are listed.
const FOREIGN: usize = 20;

/// Keys that begin with the name of the architecture.
pub(crate) struct Facts<'g, 'a> {
    gguf: &'g Gguf<'a>,
    arch: &'a str,
    asked: RefCell<BTreeSet<String>>,
    problems: Vec<String>,
}

impl<'g, 'a> Facts<'g, 'a> {
    pub fn of(gguf: &'g Gguf<'a>, arch: &'a str) -> Self {
        Self { gguf, arch, asked: RefCell::default(), problems: Vec::new() }
    }

    /// The value of `ARCHITECTURE.key`.
    pub fn get(&self, key: &str) -> Option<&'g Value<'a>> {
        let key = format!("{}.{key}", self.arch);
        let value = self.gguf.get(&key);
        self.asked.borrow_mut().insert(key);
        value
    }

    /// Notes a problem of `ARCHITECTURE.key`.
    pub fn problem(&mut self, key: &str, need: impl fmt::Display, have: impl fmt::Display) {
        self.problems.push(format!("{}.{key}: need {need}, have {have}", self.arch));
    }

    /// A whole number above zero. After a problem: 1.
    pub fn size(&mut self, key: &str) -> u64 {
        if self.get(key).is_none() {
            self.problem(key, "a whole number above 0", "nothing");
        }
        self.optional_size(key).unwrap_or(1)
    }

    /// A whole number above zero, if there is one.
    pub fn optional_size(&mut self, key: &str) -> Option<u64> {
        let value = self.get(key)?;
        let size = value.whole().filter(|n| (1..=u64::from(u32::MAX)).contains(n));
        if size.is_none() {
            self.problem(key, "a whole number above 0", value);
        }
        size
    }

    /// A finite number above zero. After a problem: 1.
    pub fn positive(&mut self, key: &str) -> f64 {
        if self.get(key).is_none() {
            self.problem(key, "a number above 0", "nothing");
        }
        self.optional_positive(key).unwrap_or(1.0)
    }

    /// A finite number above zero, if there is one.
    pub fn optional_positive(&mut self, key: &str) -> Option<f64> {
        let value = self.get(key)?;
        let number = value.number().filter(|x| *x > 0.0);
        if number.is_none() {
            self.problem(key, "a number above 0", value);
        }
        number
    }

    /// A value that changes nothing, or none.
    pub fn only(&mut self, key: &str, need: &str, accept: impl Fn(&Value<'a>) -> bool) {
        if let Some(value) = self.get(key).filter(|v| !accept(v)) {
            self.problem(key, need, value);
        }
    }

    /// # Errors
    /// [`Code::ConfigInvalid`] with all problems, among them the keys that nobody asked for.
    pub fn finish(mut self) -> Result<()> {
        let asked = self.asked.take();
        let own = |key: &str| key.strip_prefix(self.arch).is_some_and(|rest| rest.starts_with('.'));
        let foreign = self.gguf.metadata().iter().filter(|(key, _)| own(key) && !asked.contains(*key));
        for (key, value) in foreign.take(FOREIGN) {
            let key = brief(key);
            self.problems.push(format!("{key}: need no such key, for it is not understood, have {value}"));
        }
        if self.problems.is_empty() {
            return Ok(());
        }
        let n = self.problems.len();
        let plural = if n == 1 { "" } else { "s" };
        Err(Error::new(Code::ConfigInvalid, format!("GGUF metadata: {n} problem{plural}"))
            .have(self.problems.join("\n")))
    }
}
