//! What was read and not told yet, and what is to be told.
use super::Part;

#[derive(Clone, Debug, Default)]
pub(super) struct Telling {
    parts: Vec<Part>,
    held: String,
    /// Where in `held` a tag has begun.
    tag: Option<usize>,
    /// Calls begun so far.
    calls: usize,
    /// In a call whose start was told.
    begun: bool,
}

/// What the character held last is to one of several tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// The last of one: the how manieth, and where in the held text it begins.
    Whole { which: usize, at: usize },
    /// One that may still become whole.
    Begun,
    /// Neither in a tag nor the first of one.
    None,
    /// Not what the begun tag needs. As `<` is only ever the first, nothing but it can begin another.
    Broken,
}

impl Telling {
    pub fn parts(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.parts)
    }

    pub fn hold(&mut self, c: char) {
        self.held.push(c);
    }

    /// Lets go of `c`, held last, and of the tag it broke.
    pub fn unhold(&mut self, c: char) {
        self.held.truncate(self.held.len() - c.len_utf8());
        self.tag = None;
    }

    pub fn held(&self) -> &str {
        &self.held
    }

    pub fn take_held(&mut self) -> String {
        self.tag = None;
        std::mem::take(&mut self.held)
    }

    pub fn drop_held(&mut self) {
        self.tag = None;
        self.held.clear();
    }

    /// Reads the character held last as part of one of `tags`.
    pub fn tag(&mut self, tags: &[&str]) -> Tag {
        let at = match self.tag {
            None if !self.held.ends_with('<') => return Tag::None,
            None => self.held.len() - 1,
            Some(at) => at,
        };
        let begun = &self.held[at..];
        if let Some(which) = tags.iter().position(|&tag| tag == begun) {
            self.tag = None;
            return Tag::Whole { which, at };
        }
        if tags.iter().any(|tag| tag.starts_with(begun)) {
            self.tag = Some(at);
            return Tag::Begun;
        }
        if self.tag.is_none() { Tag::None } else { Tag::Broken }
    }

    /// Forgets a tag that was broken and reads the character as if none had begun.
    pub fn no_tag(&mut self, tags: &[&str]) {
        self.tag = None;
        self.tag(tags);
    }

    pub fn in_tag(&self) -> bool {
        self.tag.is_some()
    }

    pub fn begun(&self) -> bool {
        self.begun
    }

    pub fn after_call(&self) -> bool {
        self.calls > 0
    }

    /// What is held is text.
    pub fn text(&mut self) {
        match self.parts.last_mut() {
            Some(Part::Text(text)) => text.push_str(&self.held),
            _ if self.held.is_empty() => {}
            _ => self.parts.push(Part::Text(self.held.clone())),
        }
        self.drop_held();
    }

    /// What is held is reasoning.
    pub fn reasoning(&mut self) {
        match self.parts.last_mut() {
            Some(Part::Reasoning(text)) => text.push_str(&self.held),
            _ if self.held.is_empty() => {}
            _ => self.parts.push(Part::Reasoning(self.held.clone())),
        }
        self.drop_held();
    }

    /// What is held begins a call.
    pub fn start(&mut self, name: String) {
        self.drop_held();
        self.begun = true;
        self.parts.push(Part::CallStart { index: self.calls, name });
        self.calls += 1;
    }

    /// What is held says `more` of the arguments of the call that was begun.
    pub fn arguments(&mut self, more: &str) {
        self.drop_held();
        match self.parts.last_mut() {
            Some(Part::CallArguments { delta, .. }) => delta.push_str(more),
            _ => self.parts.push(Part::CallArguments { index: self.calls - 1, delta: more.into() }),
        }
    }

    /// What is held ends the call that was begun.
    pub fn end(&mut self) {
        self.drop_held();
        self.begun = false;
        self.parts.push(Part::CallEnd { index: self.calls - 1 });
    }

    /// `c`, held last, damages the call: what is held is text but for the tag that `c` broke, or `c` itself,
    /// which is to be read again and comes back.
    pub fn damage(&mut self, c: char) -> String {
        let rest = self.held.split_off(self.tag.unwrap_or(self.held.len() - c.len_utf8()));
        self.text();
        self.begun = false;
        rest
    }
}
