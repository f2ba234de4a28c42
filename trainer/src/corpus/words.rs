//! Words of both languages. The n-th word of a list means the same in both, so that stories share one world.
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::LazyLock;

/// English or 正體中文.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Lang {
    En,
    Zh,
}

/// The same in both languages.
#[derive(Debug, Deserialize)]
pub(super) struct Both<T> {
    en: T,
    zh: T,
}

impl<T> Both<T> {
    pub(super) fn of(&self, lang: Lang) -> &T {
        match lang {
            Lang::En => &self.en,
            Lang::Zh => &self.zh,
        }
    }
}

/// A word in English and in Chinese, or two words that belong together.
pub(super) type Pair = (String, String);

/// What `words.toml` has; its comments say what the words are.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Words {
    pub(super) people: Vec<Pair>,
    pub(super) colours: Vec<Pair>,
    pub(super) things: Vec<(String, String, String)>,
    pub(super) places: Vec<Pair>,
    pub(super) times: Vec<Pair>,
    pub(super) counted: Vec<Pair>,
    pub(super) numbers: Vec<Pair>,
    pub(super) animals: Vec<Pair>,
    pub(super) capitals: Vec<Pair>,
    pub(super) opposites: Vec<Pair>,
    pub(super) colour_of: Vec<(String, String, usize)>,
    pub(super) days: Vec<String>,
    pub(super) months: Vec<String>,
}

pub(super) static WORDS: LazyLock<Words> = LazyLock::new(|| parsed(include_str!("words.toml")));

/// A data file that is part of the program: it is as right as the code is, and the tests draw from all of it.
pub(super) fn parsed<T: DeserializeOwned>(text: &str) -> T {
    toml::from_str(text).expect("the data beside this file")
}

/// Word `i` of a list.
pub(super) fn word(list: &[Pair], lang: Lang, i: usize) -> &str {
    let (en, zh) = &list[i];
    if lang == Lang::En { en } else { zh }
}

/// A colour and a thing: `a red ball`, `一顆紅色的球`.
pub(super) fn a_thing(lang: Lang, (colour, thing): (usize, usize)) -> String {
    let (en, measure, zh) = &WORDS.things[thing];
    let colour = word(&WORDS.colours, lang, colour);
    match lang {
        Lang::En if colour.starts_with(['a', 'e', 'i', 'o', 'u']) => format!("an {colour} {en}"),
        Lang::En => format!("a {colour} {en}"),
        Lang::Zh => format!("一{measure}{colour}的{zh}"),
    }
}

/// `the red ball`, `那顆紅色的球`.
pub(super) fn the_thing(lang: Lang, (colour, thing): (usize, usize)) -> String {
    let (en, measure, zh) = &WORDS.things[thing];
    let colour = word(&WORDS.colours, lang, colour);
    match lang {
        Lang::En => format!("the {colour} {en}"),
        Lang::Zh => format!("那{measure}{colour}的{zh}"),
    }
}

/// How many of something, which for two is another word in Chinese.
pub(super) fn number(lang: Lang, n: usize) -> &'static str {
    if lang == Lang::Zh && n == 2 { "兩" } else { word(&WORDS.numbers, lang, n) }
}
