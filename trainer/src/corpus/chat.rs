//! Small talk: who the model is and who is asking, what people type first, a few facts, small sums, and what
//! it does not know.
use super::words::{Lang, WORDS, parsed, word};
use super::{Dice, Document, unknown};
use q4_model::template::Message;
use serde::Deserialize;
use std::sync::LazyLock;

/// What it says to sums of more than [`LARGEST`].
const TOO_LARGE: &str = "Those numbers are too large for me.";
/// The largest number that it adds.
const LARGEST: usize = 10;

/// What `chat.toml` has.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Chat {
    /// What comes in threes, English and Chinese, with the three.
    threes: Vec<(String, String, [String; 3])>,
    asked: Asked,
    /// Of itself and whoever asks.
    itself: Vec<Topic>,
    /// Manners, and what is asked for fun.
    manners: Vec<Topic>,
    /// A few facts.
    facts: Vec<Topic>,
}

/// Wordings of questions; `{}` is what they are about.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    animal: Vec<String>,
    opposite: Vec<String>,
    capital: Vec<String>,
    colour: Vec<String>,
    three: Vec<String>,
}

/// Wordings of one question, and its only answer.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Topic {
    about: String,
    known: Vec<String>,
    /// Asked in validation only.
    reserved: Vec<String>,
    answer: String,
}

static CHAT: LazyLock<Chat> = LazyLock::new(|| parsed(include_str!("chat.toml")));

/// A question and its only answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Exchange {
    /// What it is about.
    pub(super) about: &'static str,
    pub(super) question: String,
    pub(super) answer: String,
    /// Worded as in validation only.
    pub(super) reserved: bool,
}

/// A conversation of one exchange, or now and then of more, and whether it has a reserved wording.
pub(super) fn draw(dice: &mut Dice, all: bool) -> (Document, bool) {
    let exchanges = [1, 1, 1, 2, 2, 3, 4][dice.below(7)];
    let (mut turns, mut reserved) = (Vec::new(), false);
    for _ in 0..exchanges {
        let e = if dice.below(5) == 0 { nobody_knows(dice) } else { exchange(dice, all) };
        let question = casual(dice, e.question);
        turns.extend([Message::new("user", question), Message::new("assistant", e.answer)]);
        reserved |= e.reserved;
    }
    (Document::Chat(turns), reserved)
}

fn nobody_knows(dice: &mut Dice) -> Exchange {
    if dice.below(12) == 0 {
        let (a, b) = (LARGEST + 1 + dice.below(2000), 1 + dice.below(2000));
        let (a, b) = if dice.below(2) == 0 { (a, b) } else { (b, a) };
        return plain("large", reckoned(dice, ["plus", "+", "times", "*"], a, b), TOO_LARGE);
    }
    let (question, answer) = unknown::draw(dice);
    plain("unknown", question, answer)
}

/// As people type it: without capitals, without the mark at the end, or as it was.
fn casual(dice: &mut Dice, question: String) -> String {
    let bare = |text: &str| text.trim_end_matches(['?', '.', '!']).to_owned();
    let typed = match dice.below(6) {
        0 => question.to_lowercase(),
        1 => bare(&question),
        2 => bare(&question.to_lowercase()),
        3 if !question.is_ascii() && !question.ends_with(['？', '！']) => format!("{question}？"),
        _ => return question,
    };
    if typed.is_empty() { question } else { typed }
}

/// Every exchange there is.
pub(super) fn every() -> Vec<Exchange> {
    let mut list: Vec<Exchange> = Vec::new();
    for e in Dice::every(|dice| exchange(dice, true)) {
        if !list.contains(&e) {
            list.push(e);
        }
    }
    list
}

fn exchange(dice: &mut Dice, all: bool) -> Exchange {
    match dice.below(32) {
        // Who is talking to whom comes first.
        0 | 1 => one_of(dice, &CHAT.itself[..4], all),
        2..=4 => one_of(dice, &CHAT.itself, all),
        5..=10 => one_of(dice, &CHAT.manners, all),
        11 | 12 => one_of(dice, &CHAT.facts, all),
        13 => named(dice),
        14 | 15 => {
            let (country, city) = dice.pick(&WORDS.capitals);
            let question = asked(dice, &CHAT.asked.capital, country);
            plain("capital", question, format!("The capital of {country} is {city}."))
        }
        16 | 17 => colour(dice),
        18 => {
            let (animal, sound) = dice.pick(&WORDS.animals);
            let question = asked(dice, &CHAT.asked.animal, animal);
            plain("animal", question, format!("The {animal} says {sound}."))
        }
        19 => {
            let (a, b) = dice.pick(&WORDS.opposites);
            let question = asked(dice, &CHAT.asked.opposite, a);
            plain("opposite", question, format!("The opposite of {a} is {b}."))
        }
        20 => next(dice, "day", &WORDS.days),
        21 => next(dice, "month", &WORDS.months),
        22..=27 => sum(dice),
        28 => {
            let n = 1 + dice.below(10);
            let word = |i| word(&WORDS.numbers, Lang::En, i);
            let words: Vec<_> = (1..=n).map(word).collect();
            let question = match dice.turn(3) {
                0 => format!("Count to {}.", word(n)),
                1 => format!("Count to {n}."),
                _ => format!("Count from one to {}.", word(n)),
            };
            plain("count", question, format!("{}.", words.join(", ")))
        }
        29 | 30 => three(dice),
        _ => {
            let lang = if dice.below(2) == 0 { Lang::En } else { Lang::Zh };
            let reserved = all && dice.below(3) == 0;
            let (question, answer) = unknown::listed(dice, lang, reserved);
            Exchange { reserved, ..plain("unknown", question, answer) }
        }
    }
}

/// One of some wordings of a question about `what`.
fn asked(dice: &mut Dice, wordings: &[String], what: &str) -> String {
    wordings[dice.turn(wordings.len())].replace("{}", what)
}

/// Rivers, say.
fn three(dice: &mut Dice) -> Exchange {
    let (en, zh, [a, b, c]) = dice.pick(&CHAT.threes);
    if dice.below(4) == 3 {
        return plain("three", format!("說出三{zh}"), format!("{a}, {b}, {c}."));
    }
    let question = asked(dice, &CHAT.asked.three, en);
    let mut answer = format!("{a}, {b} and {c}.");
    answer[..1].make_ascii_uppercase();
    plain("three", question, answer)
}

fn plain(about: &'static str, question: impl Into<String>, answer: impl Into<String>) -> Exchange {
    Exchange { about, question: question.into(), answer: answer.into(), reserved: false }
}

/// One of some topics; a reserved wording one time in three where they are allowed.
fn one_of(dice: &mut Dice, topics: &'static [Topic], all: bool) -> Exchange {
    let topic = dice.pick(topics);
    let reserved = all && !topic.reserved.is_empty() && dice.below(3) == 0;
    let question = dice.pick(if reserved { &topic.reserved } else { &topic.known });
    Exchange { reserved, ..plain(&topic.about, question, &topic.answer) }
}

/// Who someone is who has said so: the answer has to be copied.
fn named(dice: &mut Dice) -> Exchange {
    let (en, zh) = dice.pick(&WORDS.people);
    match dice.below(3) {
        0 | 1 => plain("named", format!("My name is {en}. Who am I?"), format!("You are {en}.")),
        _ => plain("named", format!("我叫{zh}。我是誰"), format!("你是{zh}。")),
    }
}

fn colour(dice: &mut Dice) -> Exchange {
    let (en, zh, colour) = dice.pick(&WORDS.colour_of);
    let (a, b) = &WORDS.colours[*colour];
    if dice.below(3) == 2 {
        return plain("colour", format!("{zh}是什麼顏色"), format!("{zh}是{b}的。"));
    }
    let question = asked(dice, &CHAT.asked.colour, en);
    plain("colour", question, format!("The {en} is {a}."))
}

fn next(dice: &mut Dice, unit: &'static str, list: &[String]) -> Exchange {
    let i = dice.below(list.len());
    let (now, then) = (&list[i], &list[(i + 1) % list.len()]);
    let question = match dice.turn(2) {
        0 => format!("What {unit} comes after {now}?"),
        _ => format!("Which {unit} is after {now}?"),
    };
    plain(unit, question, format!("After {now} comes {then}."))
}

/// Pairs a >= b of 0 to 20.
const DIFFERENCES: usize = 21 * 22 / 2;

fn sum(dice: &mut Dice) -> Exchange {
    match dice.below(7) {
        0 | 1 => {
            let (a, b) = (dice.below(LARGEST + 1), dice.below(LARGEST + 1));
            plain(
                "sum",
                reckoned(dice, ["plus", "+", "plus", "+"], a, b),
                format!("{a} plus {b} is {}.", a + b),
            )
        }
        2 | 3 => {
            // One roll for both numbers, so that every difference of 0 to 20 is as likely as every other.
            let roll = dice.below(DIFFERENCES);
            let a = (0..).find(|a| (a + 1) * (a + 2) / 2 > roll).expect("a row of the triangle");
            let b = roll - a * (a + 1) / 2;
            let question = reckoned(dice, ["minus", "-", "minus", "-"], a, b);
            plain("difference", question, format!("{a} minus {b} is {}.", a - b))
        }
        4 | 5 => {
            let (a, b) = (dice.below(LARGEST + 1), dice.below(LARGEST + 1));
            let question = reckoned(dice, ["times", "*", "times", "x"], a, b);
            plain("product", question, format!("{a} times {b} is {}.", a * b))
        }
        _ => {
            let (a, b) = (1 + dice.below(5), 1 + dice.below(5));
            let word = |n| word(&WORDS.numbers, Lang::Zh, n);
            let (a, b, s) = (word(a), word(b), word(a + b));
            plain("sum", format!("{a}加{b}等於多少"), format!("{a}加{b}等於{s}。"))
        }
    }
}

/// Two numbers with a sign between them, as it is asked.
fn reckoned(dice: &mut Dice, signs: [&str; 4], a: usize, b: usize) -> String {
    match dice.turn(8) {
        0 | 1 => format!("What is {a} {} {b}?", signs[0]),
        2 => format!("What is {a} {} {b}?", signs[1]),
        3 => format!("{a} {} {b}", signs[3]),
        4 => format!("{a}{}{b}=", signs[1]),
        5 => format!("How much is {a} {} {b}?", signs[2]),
        6 => format!("What's {a}{}{b}?", signs[3]),
        _ => format!("{a} {} {b} = ?", signs[1]),
    }
}
