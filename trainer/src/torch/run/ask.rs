//! What a model in training answers.
use super::super::answer::Speaker;
use super::super::session::Language;
use super::{Run, go_on};
use crate::behaviour::{self, Suite};
use q4_core::{Code, Error, Result};
use serde_json::Value;
use std::path::Path;

impl Run<'_> {
    /// Answers to the prompts of `[sample]`.
    pub(super) fn sample(&mut self) -> Result<()> {
        let (c, step) = (self.c, self.step);
        for prompt in &c.sample.prompts {
            go_on()?;
            let answer = self.speaker(c.sample.tokens)?.greedy(prompt)?;
            let fields = [("prompt", Value::from(prompt.as_str())), ("answer", answer.into())];
            (self.cx.say)(&format!("step {step}: {} -> {}", fields[0].1, fields[1].1));
            self.log.values("sample", step, fields.map(|(k, v)| (k.to_owned(), v)).into_iter().collect());
        }
        Ok(())
    }

    fn speaker(&mut self, max_tokens: usize) -> Result<Speaker<'_>> {
        let language = self
            .language
            .ok_or_else(|| Error::new(Code::Usage, "a model without a tokenizer cannot answer"))?;
        let Language { tokenizer, template, stop, .. } = language;
        Ok(Speaker { engine: &mut self.engine, tokenizer, template, stop, max_tokens })
    }

    pub(super) fn suite(&self) -> Result<Option<Suite>> {
        self.c.behaviour.suite.as_deref().map(Suite::load).transpose()
    }

    /// Asks the whole suite; `served`: an exported model, asked through the program that serves it.
    pub(super) fn ask(&mut self, suite: &Suite, served: Option<&Path>) -> Result<behaviour::Report> {
        if let (Some(serve), Some(model)) = (self.cx.serve, served) {
            return suite.run(&mut *serve(model));
        }
        let mut speaker = self.speaker(self.c.behaviour.tokens)?;
        suite.run(&mut |prompt: &str| {
            go_on()?;
            speaker.greedy(prompt)
        })
    }

    /// What the model knows before the first step, kept beside the checkpoints for runs that go on.
    pub(super) fn remember(&mut self, suite: &Suite) -> Result<()> {
        let path = self.c.checkpoint.dir.as_ref().map(|d| d.join("behaviour-before.json"));
        if self.step > 0 {
            let text = path.and_then(|p| std::fs::read_to_string(p).ok());
            self.before = text.and_then(|t| serde_json::from_str(&t).ok()).map(|cases| Suite { cases });
            if self.before.is_none() {
                (self.cx.warn)(
                    "behaviour-before.json cannot be read: what was right before the first step is unknown",
                );
            }
            return Ok(());
        }
        let found = self.ask(suite, None)?;
        let right = suite.passed_in(&found);
        (self.cx.say)(&format!(
            "before training {} of {} rows are answered right",
            right.cases.len(),
            suite.cases.len()
        ));
        if let Some(path) = path {
            let text = serde_json::to_string(&right.cases).unwrap_or_default();
            std::fs::write(&path, text).map_err(|e| Error::io(&path, &e))?;
        }
        self.before = Some(right);
        Ok(())
    }

    /// Share of what was answered right before and still is, among the rows of the group `keep`.
    pub(super) fn kept(&self, found: &behaviour::Report) -> Option<f64> {
        let before = self.before.as_ref()?;
        let known = |o: &behaviour::Outcome| {
            o.group == "keep" && before.cases.iter().any(|c| c.group == o.group && c.prompt == o.prompt)
        };
        let of: Vec<_> = found.outcomes.iter().filter(|o| known(o)).collect();
        (!of.is_empty()).then(|| of.iter().filter(|o| o.passed).count() as f64 / of.len() as f64)
    }

    /// Says and logs what was right.
    pub(super) fn tell(&mut self, found: &behaviour::Report) {
        let mut fields = serde_json::Map::new();
        for (name, group) in &found.groups {
            (self.cx.say)(&format!(
                "{name}: {} of {} right, {} leaks",
                group.passed, group.cases, group.leaks
            ));
            fields.insert(name.clone(), group.rate.into());
        }
        fields.insert("leaks".into(), found.leaks.into());
        self.log.values("behaviour", self.step, fields);
    }
}
