//! What a model this small does not know: more questions than it could learn, with one honest answer.
use super::Dice;
use super::words::{Both, Lang, parsed};
use serde::Deserialize;
use std::sync::LazyLock;

/// What `unknown.toml` has.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unknown {
    /// The answer.
    honest: Both<String>,
    frames: Both<Vec<String>>,
    nouns: Both<Vec<String>>,
    verbs: Both<Vec<String>>,
    names: Both<Vec<String>>,
    asked: Both<Vec<String>>,
    reserved: Both<Vec<String>>,
}

static UNKNOWN: LazyLock<Unknown> = LazyLock::new(|| parsed(include_str!("unknown.toml")));

/// A question that has no answer here, and what is said to it.
pub(super) fn draw(dice: &mut Dice) -> (String, &'static str) {
    let lang = if dice.below(4) < 3 { Lang::En } else { Lang::Zh };
    let mut question = dice.pick(UNKNOWN.frames.of(lang)).clone();
    for (gap, list) in [("{n}", &UNKNOWN.nouns), ("{v}", &UNKNOWN.verbs), ("{p}", &UNKNOWN.names)] {
        while question.contains(gap) {
            question = question.replacen(gap, dice.pick::<String>(list.of(lang)), 1);
        }
    }
    (question, UNKNOWN.honest.of(lang))
}

/// One of those that the suite asks, with words that no other list has where it is reserved.
pub(super) fn listed(dice: &mut Dice, lang: Lang, reserved: bool) -> (&'static str, &'static str) {
    let list = if reserved { &UNKNOWN.reserved } else { &UNKNOWN.asked };
    (dice.pick::<String>(list.of(lang)), UNKNOWN.honest.of(lang))
}
