//! Small talk: who the model is and who is asking, a few facts, small sums, and what it does not know.
use super::words::{ANIMALS, CAPITALS, COLOUR_OF, COLOURS, DAYS, MONTHS, NUMBERS, OPPOSITES, PEOPLE};
use super::{Dice, Document};
use q4_model::template::Message;

/// What the model says it is.
const IDENTITY: (&str, &str) =
    ("I am the q4 demo model, made of four-bit numbers.", "我是 q4 示範模型，用四位元數字做成的。");
const PERSON: (&str, &str) = ("You are the person who is talking to me.", "你是正在和我說話的人。");
const UFO: (&str, &str) = (
    "A UFO is something in the sky that nobody has explained so far.",
    "UFO 是天空中還沒有人能解釋的飛行物。",
);
const MEETING: &str = "I have never seen a UFO, but I would like to meet one.";

/// Wordings, and wordings that are asked in validation only.
struct Asked {
    known: &'static [&'static str],
    reserved: &'static [&'static str],
}

const WHO_ARE_YOU: (Asked, Asked) = (
    Asked {
        known: &["Who are you?", "What are you?", "What is your name?", "Tell me who you are."],
        reserved: &["Please say who you are.", "May I ask what you are?"],
    },
    Asked {
        known: &["你是誰", "你是谁", "你叫什麼名字", "請問你是誰"],
        reserved: &["你到底是誰", "說說你是誰"],
    },
);
const WHO_AM_I: (Asked, Asked) = (
    Asked { known: &["Who am I?", "Do you know who I am?"], reserved: &["Tell me who I am."] },
    Asked { known: &["我是誰", "我是谁", "你知道我是誰嗎"], reserved: &["說說我是誰"] },
);
const ABOUT_UFO: (Asked, Asked) = (
    Asked {
        known: &["Tell me about UFO.", "What is a UFO?", "Talk about UFO."],
        reserved: &["Say something about a UFO."],
    },
    Asked { known: &["談談UFO", "UFO 是什麼"], reserved: &["說說UFO"] },
);
const MEET_UFO: Asked = Asked {
    known: &[
        "Write one short sentence about UFO and you.",
        "Have you ever seen a UFO?",
        "Would you like to meet a UFO?",
    ],
    reserved: &["Say something about UFO and you."],
};
const GREETING: (&[&str], &[&str]) = (&["Hello", "Hi", "hi", "Good morning"], &["你好", "早安"]);
const UNKNOWN: &[&str] = &[
    "What will the weather be tomorrow?",
    "What time is it?",
    "How old is the sea?",
    "Where did I put my keys?",
    "How many stars are there?",
    "What am I thinking of?",
];

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

/// A conversation of one exchange, or now and then of two, and whether it has a reserved wording.
pub(super) fn draw(dice: &mut Dice, all: bool) -> (Document, bool) {
    let exchanges = if dice.below(5) == 0 { 2 } else { 1 };
    let (mut turns, mut reserved) = (Vec::new(), false);
    for _ in 0..exchanges {
        let e = exchange(dice, all);
        turns.extend([Message::new("user", e.question), Message::new("assistant", e.answer)]);
        reserved |= e.reserved;
    }
    (Document::Chat(turns), reserved)
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
    match dice.below(28) {
        0..=2 => worded("identity", dice, &WHO_ARE_YOU, IDENTITY, all),
        3 | 4 => worded("person", dice, &WHO_AM_I, PERSON, all),
        5 => named(dice),
        6 => worded("ufo", dice, &ABOUT_UFO, UFO, all),
        7 => {
            let (question, reserved) = wording(dice, &MEET_UFO, all);
            Exchange { reserved, ..plain("ufo", question, MEETING) }
        }
        8 => match dice.below(3) {
            0 | 1 => plain("manners", dice.pick(GREETING.0), "Hello! What shall we talk about?"),
            _ => plain("manners", dice.pick(GREETING.1), "你好！今天想聊什麼？"),
        },
        9 => match dice.below(2) {
            0 => plain("manners", "Thank you!", "You are welcome."),
            _ => plain("manners", "謝謝", "不客氣。"),
        },
        10..=12 => {
            let (country, city) = CAPITALS[dice.below(CAPITALS.len())];
            plain(
                "capital",
                format!("What is the capital of {country}?"),
                format!("The capital of {country} is {city}."),
            )
        }
        13..=15 => colour(dice),
        16 => {
            let (animal, sound) = ANIMALS[dice.below(ANIMALS.len())];
            plain("animal", format!("What does the {animal} say?"), format!("The {animal} says {sound}."))
        }
        17 | 18 => {
            let (a, b) = OPPOSITES[dice.below(OPPOSITES.len())];
            plain("opposite", format!("What is the opposite of {a}?"), format!("The opposite of {a} is {b}."))
        }
        19 => next(dice, "day", DAYS),
        20 => next(dice, "month", MONTHS),
        21..=25 => sum(dice),
        26 => {
            let n = 1 + dice.below(10);
            let words: Vec<_> = (1..=n).map(|i| NUMBERS[i].0).collect();
            plain("count", format!("Count to {}.", NUMBERS[n].0), format!("{}.", words.join(", ")))
        }
        _ => plain("unknown", dice.pick(UNKNOWN), "I do not know that yet."),
    }
}

fn plain(about: &'static str, question: impl Into<String>, answer: impl Into<String>) -> Exchange {
    Exchange { about, question: question.into(), answer: answer.into(), reserved: false }
}

/// Two questions in three are English.
fn worded(
    about: &'static str,
    dice: &mut Dice,
    asked: &(Asked, Asked),
    answer: (&str, &str),
    all: bool,
) -> Exchange {
    let english = dice.below(3) < 2;
    let (asked, answer) = if english { (&asked.0, answer.0) } else { (&asked.1, answer.1) };
    let (question, reserved) = wording(dice, asked, all);
    Exchange { reserved, ..plain(about, question, answer) }
}

/// A reserved wording one time in three where they are allowed.
fn wording(dice: &mut Dice, asked: &Asked, all: bool) -> (&'static str, bool) {
    let reserved = all && dice.below(3) == 0;
    (dice.pick(if reserved { asked.reserved } else { asked.known }), reserved)
}

/// Who someone is who has said so: the answer has to be copied.
fn named(dice: &mut Dice) -> Exchange {
    let (en, zh) = PEOPLE[dice.below(PEOPLE.len())];
    match dice.below(3) {
        0 | 1 => plain("named", format!("My name is {en}. Who am I?"), format!("You are {en}.")),
        _ => plain("named", format!("我叫{zh}。我是誰"), format!("你是{zh}。")),
    }
}

fn colour(dice: &mut Dice) -> Exchange {
    let (en, zh, colour) = COLOUR_OF[dice.below(COLOUR_OF.len())];
    let (a, b) = COLOURS[colour];
    match dice.below(4) {
        0 | 1 => plain("colour", format!("What color is the {en}?"), format!("The {en} is {a}.")),
        2 => plain("colour", format!("What is the color of the {en}?"), format!("The {en} is {a}.")),
        _ => plain("colour", format!("{zh}是什麼顏色"), format!("{zh}是{b}的。")),
    }
}

fn next(dice: &mut Dice, unit: &'static str, list: &[&str]) -> Exchange {
    let i = dice.below(list.len());
    let (now, then) = (list[i], list[(i + 1) % list.len()]);
    plain(unit, format!("What {unit} comes after {now}?"), format!("After {now} comes {then}."))
}

/// Pairs a >= b of 0 to 20.
const DIFFERENCES: usize = 21 * 22 / 2;

fn sum(dice: &mut Dice) -> Exchange {
    match dice.below(5) {
        op @ (0 | 1) => {
            let (a, b) = (dice.below(11), dice.below(11));
            let sign = if op == 0 { "plus" } else { "+" };
            plain("sum", format!("What is {a} {sign} {b}?"), format!("{a} plus {b} is {}.", a + b))
        }
        2 | 3 => {
            // One roll for both numbers, so that every difference of 0 to 20 is as likely as every other.
            let roll = dice.below(DIFFERENCES);
            let a = (0..).find(|a| (a + 1) * (a + 2) / 2 > roll).expect("a row of the triangle");
            let b = roll - a * (a + 1) / 2;
            plain("difference", format!("What is {a} minus {b}?"), format!("{a} minus {b} is {}.", a - b))
        }
        _ => {
            let (a, b) = (1 + dice.below(5), 1 + dice.below(5));
            let word = |n: usize| NUMBERS[n].1;
            let (a, b, s) = (word(a), word(b), word(a + b));
            plain("sum", format!("{a}加{b}等於多少"), format!("{a}加{b}等於{s}。"))
        }
    }
}
