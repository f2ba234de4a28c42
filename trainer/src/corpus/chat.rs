//! Small talk: who the model is and who is asking, a few facts, small sums, and what it does not know.
use super::words::{ANIMALS, CAPITALS, COLOUR_OF, COLOURS, DAYS, MONTHS, NUMBERS, OPPOSITES, PEOPLE};
use super::{Dice, Document};
use q4_model::template::Message;

/// What the model says it is.
const IDENTITY: (&str, &str) =
    ("I am the q4 demo model, made of four-bit numbers.", "我是 q4 示範模型，用四位元數字做成的。");
const PERSON: (&str, &str) = ("You are the person who is talking to me.", "你是正在和我說話的人。");

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
const UFO: (Asked, Asked) = (
    Asked {
        known: &[
            "Tell me about UFO.",
            "What is a UFO?",
            "Talk about UFO.",
            "Write one short sentence about UFO and you.",
        ],
        reserved: &["Say something about a UFO."],
    },
    Asked { known: &["談談UFO", "UFO 是什麼"], reserved: &["說說UFO"] },
);
const GREETING: (&[&str], &[&str]) = (&["Hello", "Hi", "hi", "Good morning"], &["你好", "早安"]);
const UNKNOWN: &[&str] = &[
    "What will the weather be tomorrow?",
    "What time is it?",
    "How old is the sea?",
    "Where did I put my keys?",
    "How many stars are there?",
    "What am I thinking of?",
];

/// A conversation of one exchange, or now and then of two, and whether it has a reserved wording.
pub(super) fn draw(dice: &mut Dice, all: bool) -> (Document, bool) {
    let exchanges = if dice.below(5) == 0 { 2 } else { 1 };
    let (mut turns, mut reserved) = (Vec::new(), false);
    for _ in 0..exchanges {
        let (question, answer, held_out) = exchange(dice, all);
        turns.extend([Message::new("user", question), Message::new("assistant", answer)]);
        reserved |= held_out;
    }
    (Document::Chat(turns), reserved)
}

fn exchange(dice: &mut Dice, all: bool) -> (String, String, bool) {
    let plain = |q: String, a: String| (q, a, false);
    match dice.below(24) {
        0 | 1 => both(dice, &WHO_ARE_YOU, (&[IDENTITY.0], &[IDENTITY.1]), all),
        2 | 3 => both(dice, &WHO_AM_I, (&[PERSON.0], &[PERSON.1]), all),
        4 => named(dice),
        5 | 6 => {
            let en = &[
                "I have never seen a UFO, but I would like to meet one.",
                "A UFO is something in the sky that nobody has explained so far.",
            ];
            both(dice, &UFO, (en, &["UFO 是天空中還沒有人能解釋的飛行物。"]), all)
        }
        7 => {
            let en = dice.below(3) < 2;
            let q = dice.pick(if en { GREETING.0 } else { GREETING.1 });
            let a = if en { "Hello! What shall we talk about?" } else { "你好！今天想聊什麼？" };
            plain(q.into(), a.into())
        }
        8 => match dice.below(2) {
            0 => plain("Thank you!".into(), "You are welcome.".into()),
            _ => plain("謝謝".into(), "不客氣。".into()),
        },
        9..=11 => {
            let (country, capital) = CAPITALS[dice.below(CAPITALS.len())];
            plain(
                format!("What is the capital of {country}?"),
                format!("The capital of {country} is {capital}."),
            )
        }
        12 | 13 => colour(dice),
        14 => {
            let (animal, sound) = ANIMALS[dice.below(ANIMALS.len())];
            plain(format!("What does the {animal} say?"), format!("The {animal} says {sound}."))
        }
        15 | 16 => {
            let (a, b) = OPPOSITES[dice.below(OPPOSITES.len())];
            plain(format!("What is the opposite of {a}?"), format!("The opposite of {a} is {b}."))
        }
        17 => next(dice, "day", DAYS),
        18 => next(dice, "month", MONTHS),
        19..=21 => sum(dice),
        22 => {
            let n = 1 + dice.below(10);
            let words: Vec<_> = (1..=n).map(|i| NUMBERS[i].0).collect();
            plain(format!("Count to {}.", NUMBERS[n].0), format!("{}.", words.join(", ")))
        }
        _ => plain(dice.pick(UNKNOWN).into(), "I do not know that yet.".into()),
    }
}

/// Two questions in three are English, as stories are.
fn both(
    dice: &mut Dice,
    asked: &(Asked, Asked),
    answers: (&[&str], &[&str]),
    all: bool,
) -> (String, String, bool) {
    let english = dice.below(3) < 2;
    let (asked, answers) = if english { (&asked.0, answers.0) } else { (&asked.1, answers.1) };
    // A reserved wording one time in three where they are allowed.
    let reserved = all && dice.below(3) == 0;
    let question = dice.pick(if reserved { asked.reserved } else { asked.known });
    (question.into(), dice.pick(answers).into(), reserved)
}

/// Who someone is who has said so: the answer has to be copied.
fn named(dice: &mut Dice) -> (String, String, bool) {
    let (en, zh) = PEOPLE[dice.below(PEOPLE.len())];
    match dice.below(3) {
        0 | 1 => (format!("My name is {en}. Who am I?"), format!("You are {en}."), false),
        _ => (format!("我叫{zh}。我是誰"), format!("你是{zh}。"), false),
    }
}

fn colour(dice: &mut Dice) -> (String, String, bool) {
    let (en, zh, colour) = COLOUR_OF[dice.below(COLOUR_OF.len())];
    let (a, b) = COLOURS[colour];
    match dice.below(4) {
        0 | 1 => (format!("What color is the {en}?"), format!("The {en} is {a}."), false),
        2 => (format!("What is the color of the {en}?"), format!("The {en} is {a}."), false),
        _ => (format!("{zh}是什麼顏色"), format!("{zh}是{b}的。"), false),
    }
}

fn next(dice: &mut Dice, unit: &str, list: &[&str]) -> (String, String, bool) {
    let i = dice.below(list.len());
    let (now, then) = (list[i], list[(i + 1) % list.len()]);
    (format!("What {unit} comes after {now}?"), format!("After {now} comes {then}."), false)
}

fn sum(dice: &mut Dice) -> (String, String, bool) {
    match dice.below(5) {
        op @ (0 | 1) => {
            let (a, b) = (dice.below(11), dice.below(11));
            let sign = if op == 0 { "plus" } else { "+" };
            (format!("What is {a} {sign} {b}?"), format!("{a} plus {b} is {}.", a + b), false)
        }
        2 | 3 => {
            let (rest, b) = (dice.below(11), dice.below(11));
            let a = rest + b;
            (format!("What is {a} minus {b}?"), format!("{a} minus {b} is {rest}."), false)
        }
        _ => {
            let (a, b) = (1 + dice.below(5), 1 + dice.below(5));
            let word = |n: usize| NUMBERS[n].1;
            let (a, b, s) = (word(a), word(b), word(a + b));
            (format!("{a}加{b}等於多少"), format!("{a}加{b}等於{s}。"), false)
        }
    }
}
