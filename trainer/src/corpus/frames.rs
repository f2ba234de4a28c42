//! Sentences with gaps, which write events and read them; `frames.toml` says what stands in which gap.
use super::words::{Lang, Pair, WORDS, a_thing, number, parsed, the_thing, word};
use std::collections::HashMap;
use std::sync::LazyLock;

/// Kinds of events: what each knows, and which gap of its frames that fills.
macro_rules! events {
    ($($(#[$doc:meta])* $kind:ident { $($field:ident: $value:ty = $gap:ident),+ })+) => {
        /// What happens in a sentence. Numbers are indices into the word lists.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(super) enum Event {
            $($(#[$doc])* $kind { $($field: $value),+ },)+
        }

        impl Event {
            /// One of each kind, to know all frames by.
            fn kinds() -> [Self; [$(stringify!($kind)),+].len()] {
                [$(Self::$kind { $($field: Default::default()),+ }),+]
            }

            fn kind(&self) -> &'static str {
                match self {
                    $(Self::$kind { .. } => stringify!($kind),)+
                }
            }

            fn gaps(&self) -> Gaps {
                match *self {
                    $(Self::$kind { $($field),+ } => Gaps { $($gap: Some($field),)+ ..Gaps::default() },)+
                }
            }

            /// The same kind with other gaps.
            fn with(&self, gaps: &Gaps) -> Option<Self> {
                Some(match self {
                    $(Self::$kind { .. } => Self::$kind { $($field: gaps.$gap?),+ },)+
                })
            }
        }
    };
}

events! {
    /// At a time, a has a new thing.
    Has { when: usize = when, a: usize = a, thing: (usize, usize) = thing }
    /// a goes somewhere.
    Goes { a: usize = a, place: usize = place }
    /// a, who moved last, meets b, who is there from now on.
    Meets { a: usize = a, b: usize = b }
    /// b, beside a, shows a new thing.
    Brings { b: usize = b, thing: (usize, usize) = thing }
    /// a gives a thing to b.
    Gives { a: usize = a, b: usize = b, thing: (usize, usize) = thing }
    /// b thanks a for it.
    Thanks { a: usize = a, b: usize = b }
    /// a leaves a thing where a is.
    Leaves { a: usize = a, thing: (usize, usize) = thing }
    /// a finds a thing where a is.
    Finds { a: usize = a, thing: (usize, usize) = thing }
    /// a and b are content. Ends a story.
    Ends { a: usize = a, b: usize = b }
    /// At a time, a has n of something.
    Counts { when: usize = when, a: usize = a, n: usize = number, counted: usize = counted }
    /// b gives a m more.
    Adds { a: usize = a, b: usize = b, m: usize = number }
    /// a gives m to b.
    Subtracts { a: usize = a, b: usize = b, m: usize = number }
    /// a has s in the end.
    Sums { a: usize = a, s: usize = number, counted: usize = counted }
    /// At a time, a sees a UFO of a colour over a place.
    Sees { when: usize = when, a: usize = a, colour: usize = colour, place: usize = place }
    /// It lands, and its pilot gives a a new thing.
    Lands { a: usize = a, thing: (usize, usize) = thing }
    /// It flies away. Ends a story.
    Flies { a: usize = a, colour: usize = colour }
}

/// Wordings by kind of event: the same number in both languages.
static FRAMES: LazyLock<HashMap<String, Vec<Pair>>> = LazyLock::new(|| parsed(include_str!("frames.toml")));

fn wordings(event: &Event) -> &'static [Pair] {
    &FRAMES[event.kind()]
}

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
    let frame = word(wordings(event), lang, variant);
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
    Event::kinds().into_iter().find_map(|kind| {
        wordings(&kind).iter().find_map(|(en, zh)| {
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
            'a' => word(&WORDS.people, lang, self.a?).into(),
            'b' => word(&WORDS.people, lang, self.b?).into(),
            'o' => a_thing(lang, self.thing?),
            't' => the_thing(lang, self.thing?),
            'p' => word(&WORDS.places, lang, self.place?).into(),
            'w' => word(&WORDS.times, lang, self.when?).into(),
            'n' | 'm' | 's' => number(lang, self.number?).into(),
            'c' => word(&WORDS.counted, lang, self.counted?).into(),
            'l' => word(&WORDS.colours, lang, self.colour?).into(),
            _ => return None,
        })
    }

    /// Every word a gap can hold, with what it means.
    fn words(gap: char, lang: Lang) -> Vec<(String, Gaps)> {
        let none = Gaps::default();
        let all: Vec<Gaps> = match gap {
            'a' => (0..WORDS.people.len()).map(|i| Gaps { a: Some(i), ..none }).collect(),
            'b' => (0..WORDS.people.len()).map(|i| Gaps { b: Some(i), ..none }).collect(),
            'o' | 't' => (0..WORDS.colours.len() * WORDS.things.len())
                .map(|i| Gaps { thing: Some((i / WORDS.things.len(), i % WORDS.things.len())), ..none })
                .collect(),
            'p' => (0..WORDS.places.len()).map(|i| Gaps { place: Some(i), ..none }).collect(),
            'w' => (0..WORDS.times.len()).map(|i| Gaps { when: Some(i), ..none }).collect(),
            'n' | 'm' | 's' => (0..WORDS.numbers.len()).map(|i| Gaps { number: Some(i), ..none }).collect(),
            'c' => (0..WORDS.counted.len()).map(|i| Gaps { counted: Some(i), ..none }).collect(),
            'l' => (0..WORDS.colours.len()).map(|i| Gaps { colour: Some(i), ..none }).collect(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_the_gaps_of_its_event_in_both_languages() {
        let gaps = |frame: &str| {
            let mut gaps: Vec<char> = frame.split('{').skip(1).filter_map(|s| s.chars().next()).collect();
            gaps.sort_unstable();
            gaps.dedup();
            gaps
        };
        assert_eq!(FRAMES.len(), Event::kinds().len());
        for kind in Event::kinds() {
            for (en, zh) in wordings(&kind) {
                assert_eq!(gaps(en), gaps(zh), "{en}");
                assert!(gaps(en).into_iter().all(|gap| kind.gaps().fill(gap, Lang::En).is_some()), "{en}");
            }
        }
    }
}
