//! Sentences with gaps, which write events and read them.
//!
//! A gap is a letter in braces: `{a}` and `{b}` people, `{o}` a thing named for the first time, `{t}` the
//! same thing again, `{p}` a place, `{w}` a time, `{n}` and `{m}` and `{s}` numbers, `{c}` what is counted,
//! `{l}` a colour.
use super::words::{
    COLOURS, COUNTED, Lang, NUMBERS, PEOPLE, PLACES, THINGS, TIMES, a_thing, the_thing, word,
};

/// What happens in a sentence. Numbers are indices into the word lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Event {
    /// At a time, a has a new thing.
    Has { when: usize, a: usize, thing: (usize, usize) },
    /// a goes somewhere.
    Goes { a: usize, place: usize },
    /// a, who moved last, meets b, who is there from now on.
    Meets { a: usize, b: usize },
    /// b, beside a, shows a new thing.
    Brings { b: usize, thing: (usize, usize) },
    /// a gives a thing to b.
    Gives { a: usize, b: usize, thing: (usize, usize) },
    /// b thanks a for it.
    Thanks { a: usize, b: usize },
    /// a leaves a thing where a is.
    Leaves { a: usize, thing: (usize, usize) },
    /// a finds a thing where a is.
    Finds { a: usize, thing: (usize, usize) },
    /// a and b are content. Ends a story.
    Ends { a: usize, b: usize },
    /// At a time, a has n of something.
    Counts { when: usize, a: usize, n: usize, counted: usize },
    /// b gives a m more.
    Adds { a: usize, b: usize, m: usize },
    /// a gives m to b.
    Subtracts { a: usize, b: usize, m: usize },
    /// a has s in the end.
    Sums { a: usize, s: usize, counted: usize },
    /// At a time, a sees a UFO of a colour over a place.
    Sees { when: usize, a: usize, colour: usize, place: usize },
    /// It lands, and its pilot gives a a new thing.
    Lands { a: usize, thing: (usize, usize) },
    /// It flies away. Ends a story.
    Flies { a: usize, colour: usize },
}

/// The wordings of an event's kind: the same number in both languages.
fn wordings(event: &Event) -> &'static [(&'static str, &'static str)] {
    match event {
        Event::Has { .. } => &[
            ("{w} {a} woke up and found {o} beside the bed.", "{w}，{a}醒來，看見床邊有{o}。"),
            ("{w} {a} got {o} as a present.", "{w}，{a}收到了{o}當禮物。"),
            ("{w} {a} was playing with {o}.", "{w}，{a}正在玩{o}。"),
        ],
        Event::Goes { .. } => &[
            ("{a} went to the {p}.", "{a}去了{p}。"),
            ("Then {a} walked to the {p}.", "然後{a}走到{p}。"),
            ("{a} ran all the way to the {p}.", "{a}一路跑到{p}。"),
        ],
        Event::Meets { .. } => &[
            ("There {a} met {b}.", "{a}在那裡遇見了{b}。"),
            ("{b} was already there and waved to {a}.", "{b}已經在那裡了，向{a}揮揮手。"),
        ],
        Event::Brings { .. } => &[
            ("{b} had brought {o}.", "{b}帶來了{o}。"),
            ("\"Look what I have,\" said {b}, and it was {o}.", "「看我有什麼。」{b}說，原來是{o}。"),
        ],
        Event::Gives { .. } => &[
            ("{a} gave {t} to {b}.", "{a}把{t}送給{b}。"),
            ("{a} wanted {b} to have {t} and handed it over.", "{a}想讓{b}擁有{t}，就交給了{b}。"),
        ],
        Event::Thanks { .. } => &[
            ("\"Thank you, {a}!\" said {b}.", "「謝謝你，{a}！」{b}說。"),
            ("{b} smiled and hugged {a}.", "{b}笑了，抱了抱{a}。"),
        ],
        Event::Leaves { .. } => &[
            ("{a} put {t} down and forgot it there.", "{a}放下{t}，把它忘在那裡了。"),
            ("{a} was tired and left {t} under a tree.", "{a}累了，把{t}留在樹下。"),
        ],
        Event::Finds { .. } => &[
            ("Soon {a} saw {t} and picked it up.", "不久{a}看見{t}，把它撿了起來。"),
            ("{a} came across {t} and took it along.", "{a}發現了{t}，帶在身上。"),
        ],
        Event::Ends { .. } => &[
            ("{a} and {b} talked until the stars came out.", "{a}和{b}一直聊到星星出來。"),
            ("It was a good day for {a} and {b}.", "對{a}和{b}來說，這是美好的一天。"),
            ("{a} and {b} promised to meet again soon.", "{a}和{b}約好很快再見面。"),
        ],
        Event::Counts { .. } => &[
            ("{w} {a} counted {n} {c} on the table.", "{w}，{a}在桌上數到{n}{c}。"),
            ("{w} {a} carried {n} {c} in a basket.", "{w}，{a}的籃子裡有{n}{c}。"),
        ],
        Event::Adds { .. } => &[
            ("{b} came by and gave {a} {m} more.", "{b}走過來，又給了{a}{m}個。"),
            ("{a} got another {m} from {b}.", "{a}又從{b}那裡得到{m}個。"),
        ],
        Event::Subtracts { .. } => &[
            ("{b} asked for {m}, and {a} gave them away gladly.", "{b}想要{m}個，{a}高興地給了。"),
            ("{a} shared {m} of them with {b}.", "{a}分了{m}個給{b}。"),
        ],
        Event::Sums { .. } => &[
            ("In the end {a} had {s} {c}.", "最後{a}有{s}{c}。"),
            ("That left {a} with {s} {c}.", "這樣{a}就有{s}{c}。"),
        ],
        Event::Sees { .. } => &[
            (
                "{w} {a} looked up and saw a UFO with {l} lights over the {p}.",
                "{w}，{a}抬頭看見{p}上空有一架閃著{l}光芒的 UFO。",
            ),
            (
                "{w} a UFO with {l} lights hung over the {p}, and only {a} noticed.",
                "{w}，一架閃著{l}光芒的 UFO 停在{p}上空，只有{a}注意到。",
            ),
        ],
        Event::Lands { .. } => &[
            (
                "It landed as softly as a feather, and its pilot gave {a} {o}.",
                "它像羽毛一樣輕輕落下，駕駛員送給{a}{o}。",
            ),
            ("A door opened, and a small voice offered {a} {o}.", "門打開了，一個小小的聲音送給{a}{o}。"),
        ],
        Event::Flies { .. } => &[
            (
                "Then the {l} lights rose into the clouds, and {a} waved for a long time.",
                "然後{l}的光芒升上雲端，{a}揮了很久的手。",
            ),
            (
                "When the {l} lights were gone, {a} could hardly believe it.",
                "{l}的光芒消失以後，{a}簡直不敢相信。",
            ),
        ],
    }
}

/// One event of each kind, to know all frames by.
const KINDS: [Event; 16] = {
    let (a, b, thing, when) = (0, 0, (0, 0), 0);
    [
        Event::Has { when, a, thing },
        Event::Goes { a, place: 0 },
        Event::Meets { a, b },
        Event::Brings { b, thing },
        Event::Gives { a, b, thing },
        Event::Thanks { a, b },
        Event::Leaves { a, thing },
        Event::Finds { a, thing },
        Event::Ends { a, b },
        Event::Counts { when, a, n: 0, counted: 0 },
        Event::Adds { a, b, m: 0 },
        Event::Subtracts { a, b, m: 0 },
        Event::Sums { a, s: 0, counted: 0 },
        Event::Sees { when, a, colour: 0, place: 0 },
        Event::Lands { a, thing },
        Event::Flies { a, colour: 0 },
    ]
};

/// What stands in the gaps.
#[derive(Clone, Copy, Debug, Default)]
struct Gaps {
    a: Option<usize>,
    b: Option<usize>,
    thing: Option<(usize, usize)>,
    place: Option<usize>,
    when: Option<usize>,
    number: Option<usize>,
    counted: Option<usize>,
    colour: Option<usize>,
}

/// Number of wordings of an event.
pub(super) fn variants(event: &Event) -> usize {
    wordings(event).len()
}

/// The sentence.
pub(super) fn write(event: &Event, lang: Lang, variant: usize) -> String {
    let (en, zh) = wordings(event)[variant];
    let frame = if lang == Lang::En { en } else { zh };
    let gaps = event.gaps();
    let mut out = String::new();
    let mut rest = frame;
    while let Some((text, tail)) = rest.split_once('{') {
        out += text;
        let mut chars = tail.chars();
        out += &chars.next().and_then(|gap| gaps.fill(gap, lang)).unwrap_or_default();
        rest = chars.as_str().strip_prefix('}').unwrap_or_default();
    }
    out + rest
}

/// Reads the sentence at the start of `text`: the event and what follows it.
pub(super) fn read(text: &str, lang: Lang) -> Option<(Event, &str)> {
    KINDS.iter().find_map(|kind| {
        wordings(kind).iter().find_map(|(en, zh)| {
            let frame = if lang == Lang::En { en } else { zh };
            let (gaps, rest) = fit(frame, text, Gaps::default(), lang)?;
            Some((kind.with(&gaps)?, rest))
        })
    })
}

/// Matches a frame against the start of a text, trying every word that fits a gap.
fn fit<'t>(frame: &str, text: &'t str, gaps: Gaps, lang: Lang) -> Option<(Gaps, &'t str)> {
    let Some((literal, tail)) = frame.split_once('{') else {
        return Some((gaps, text.strip_prefix(frame)?));
    };
    let text = text.strip_prefix(literal)?;
    let gap = tail.chars().next()?;
    let frame = tail.get(2..)?;
    Gaps::words(gap, lang).into_iter().find_map(|(word, put)| {
        let rest = text.strip_prefix(word.as_str())?;
        fit(frame, rest, put.over(gaps)?, lang)
    })
}

impl Gaps {
    fn fill(&self, gap: char, lang: Lang) -> Option<String> {
        Some(match gap {
            'a' => word(PEOPLE, lang, self.a?).into(),
            'b' => word(PEOPLE, lang, self.b?).into(),
            'o' => a_thing(lang, self.thing?),
            't' => the_thing(lang, self.thing?),
            'p' => word(PLACES, lang, self.place?).into(),
            'w' => word(TIMES, lang, self.when?).into(),
            // Two of something is another word in Chinese.
            'n' | 'm' | 's' if lang == Lang::Zh && self.number == Some(2) => "兩".into(),
            'n' | 'm' | 's' => word(NUMBERS, lang, self.number?).into(),
            'c' => word(COUNTED, lang, self.counted?).into(),
            'l' => word(COLOURS, lang, self.colour?).into(),
            _ => return None,
        })
    }

    /// Every word a gap can hold, with what it means.
    fn words(gap: char, lang: Lang) -> Vec<(String, Gaps)> {
        let none = Gaps::default();
        let all: Vec<Gaps> = match gap {
            'a' => (0..PEOPLE.len()).map(|i| Gaps { a: Some(i), ..none }).collect(),
            'b' => (0..PEOPLE.len()).map(|i| Gaps { b: Some(i), ..none }).collect(),
            'o' | 't' => (0..COLOURS.len() * THINGS.len())
                .map(|i| Gaps { thing: Some((i / THINGS.len(), i % THINGS.len())), ..none })
                .collect(),
            'p' => (0..PLACES.len()).map(|i| Gaps { place: Some(i), ..none }).collect(),
            'w' => (0..TIMES.len()).map(|i| Gaps { when: Some(i), ..none }).collect(),
            'n' | 'm' | 's' => (0..NUMBERS.len()).map(|i| Gaps { number: Some(i), ..none }).collect(),
            'c' => (0..COUNTED.len()).map(|i| Gaps { counted: Some(i), ..none }).collect(),
            'l' => (0..COLOURS.len()).map(|i| Gaps { colour: Some(i), ..none }).collect(),
            _ => Vec::new(),
        };
        all.into_iter().filter_map(|g| Some((g.fill(gap, lang)?, g))).collect()
    }

    /// Both, unless they say different things of the same gap.
    fn over(self, old: Gaps) -> Option<Gaps> {
        fn one<T: PartialEq>(new: Option<T>, old: Option<T>) -> Option<Option<T>> {
            match (new, old) {
                (Some(n), Some(o)) if n != o => None,
                (n, o) => Some(n.or(o)),
            }
        }
        Some(Gaps {
            a: one(self.a, old.a)?,
            b: one(self.b, old.b)?,
            thing: one(self.thing, old.thing)?,
            place: one(self.place, old.place)?,
            when: one(self.when, old.when)?,
            number: one(self.number, old.number)?,
            counted: one(self.counted, old.counted)?,
            colour: one(self.colour, old.colour)?,
        })
    }
}

impl Event {
    fn gaps(&self) -> Gaps {
        let none = Gaps::default();
        match *self {
            Self::Has { when, a, thing } => Gaps { when: Some(when), a: Some(a), thing: Some(thing), ..none },
            Self::Goes { a, place } => Gaps { a: Some(a), place: Some(place), ..none },
            Self::Meets { a, b } | Self::Thanks { a, b } | Self::Ends { a, b } => {
                Gaps { a: Some(a), b: Some(b), ..none }
            }
            Self::Brings { b, thing } => Gaps { b: Some(b), thing: Some(thing), ..none },
            Self::Gives { a, b, thing } => Gaps { a: Some(a), b: Some(b), thing: Some(thing), ..none },
            Self::Leaves { a, thing } | Self::Finds { a, thing } | Self::Lands { a, thing } => {
                Gaps { a: Some(a), thing: Some(thing), ..none }
            }
            Self::Counts { when, a, n, counted } => {
                Gaps { when: Some(when), a: Some(a), number: Some(n), counted: Some(counted), ..none }
            }
            Self::Adds { a, b, m } | Self::Subtracts { a, b, m } => {
                Gaps { a: Some(a), b: Some(b), number: Some(m), ..none }
            }
            Self::Sums { a, s, counted } => {
                Gaps { a: Some(a), number: Some(s), counted: Some(counted), ..none }
            }
            Self::Sees { when, a, colour, place } => {
                Gaps { when: Some(when), a: Some(a), colour: Some(colour), place: Some(place), ..none }
            }
            Self::Flies { a, colour } => Gaps { a: Some(a), colour: Some(colour), ..none },
        }
    }

    /// The same kind with other gaps.
    fn with(&self, g: &Gaps) -> Option<Event> {
        Some(match self {
            Self::Has { .. } => Self::Has { when: g.when?, a: g.a?, thing: g.thing? },
            Self::Goes { .. } => Self::Goes { a: g.a?, place: g.place? },
            Self::Meets { .. } => Self::Meets { a: g.a?, b: g.b? },
            Self::Brings { .. } => Self::Brings { b: g.b?, thing: g.thing? },
            Self::Gives { .. } => Self::Gives { a: g.a?, b: g.b?, thing: g.thing? },
            Self::Thanks { .. } => Self::Thanks { a: g.a?, b: g.b? },
            Self::Leaves { .. } => Self::Leaves { a: g.a?, thing: g.thing? },
            Self::Finds { .. } => Self::Finds { a: g.a?, thing: g.thing? },
            Self::Ends { .. } => Self::Ends { a: g.a?, b: g.b? },
            Self::Counts { .. } => Self::Counts { when: g.when?, a: g.a?, n: g.number?, counted: g.counted? },
            Self::Adds { .. } => Self::Adds { a: g.a?, b: g.b?, m: g.number? },
            Self::Subtracts { .. } => Self::Subtracts { a: g.a?, b: g.b?, m: g.number? },
            Self::Sums { .. } => Self::Sums { a: g.a?, s: g.number?, counted: g.counted? },
            Self::Sees { .. } => Self::Sees { when: g.when?, a: g.a?, colour: g.colour?, place: g.place? },
            Self::Lands { .. } => Self::Lands { a: g.a?, thing: g.thing? },
            Self::Flies { .. } => Self::Flies { a: g.a?, colour: g.colour? },
        })
    }
}
