//! Stories as lists of events that hold together, and questions whose answers follow from them.
use super::Dice;
use super::frames::{Event, read, variants, write};
use super::words::{Lang, WORDS, a_thing, number, the_thing, word};

/// A story: events in order, each with the wording it is told in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Story {
    lang: Lang,
    events: Vec<(Event, usize)>,
}

type Thing = (usize, usize);

/// Where a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spot {
    With(usize),
    At(usize),
}

/// The world after some events.
#[derive(Clone, Debug, Default)]
struct World {
    people: Vec<(usize, Option<usize>)>,
    /// Every thing, its first owner, and where it is.
    things: Vec<(Thing, usize, Spot)>,
    /// Owner, number and kind of what is counted.
    count: Option<(usize, usize, usize)>,
    /// Colour and place of the UFO.
    ufo: Option<(usize, usize)>,
    given: Option<(usize, usize)>,
    summed: bool,
    ended: bool,
}

impl Story {
    pub(super) fn draw(dice: &mut Dice) -> Self {
        // In the demo model's tokens a Chinese story is three times as long as an English one.
        let lang = if dice.below(6) == 5 { Lang::Zh } else { Lang::En };
        let events = match dice.below(4) {
            0 | 1 => things(dice),
            2 => counting(dice),
            _ => visitors(dice),
        };
        let events = events.into_iter().map(|e| (e, dice.below(variants(&e)))).collect();
        Self { lang, events }
    }

    /// The whole text.
    pub fn text(&self) -> String {
        let gap = if self.lang == Lang::En { " " } else { "" };
        let sentences: Vec<_> = self.events.iter().map(|(e, v)| write(e, self.lang, *v)).collect();
        sentences.join(gap)
    }

    /// Whether it is told in Chinese.
    pub fn is_chinese(&self) -> bool {
        self.lang == Lang::Zh
    }

    /// Reads a text back and replays it. The error says which sentence is no frame, or what contradicts what
    /// came before.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lang = if text.is_ascii() { Lang::En } else { Lang::Zh };
        let mut events: Vec<(Event, usize)> = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let shown = || rest.chars().take(60).collect::<String>();
            let (event, after) = read(rest, lang).ok_or_else(|| format!("no such sentence: {}", shown()))?;
            let told = &rest[..rest.len() - after.len()];
            let variant = (0..variants(&event)).find(|v| write(&event, lang, *v) == told);
            events.push((event, variant.ok_or_else(|| format!("misspelt: {told}"))?));
            rest = after.trim_start();
        }
        let story = Self { lang, events };
        story.world().map(|_| story)
    }

    /// Whether the first owner, thing and place are kept for validation: one combination in ten.
    pub fn is_reserved(&self) -> bool {
        let place = self.events.iter().find_map(|(e, _)| match e {
            Event::Goes { place, .. } | Event::Sees { place, .. } => Some(*place),
            _ => None,
        });
        let first = self.events.iter().find_map(|(e, _)| match *e {
            Event::Has { a, thing, .. } | Event::Lands { a, thing } => Some((a, thing.1)),
            Event::Counts { a, n, counted, .. } => Some((a, n + 2 * counted)),
            _ => None,
        });
        first.is_some_and(|(a, thing)| (7 * a + 3 * thing + place.unwrap_or(0)).is_multiple_of(10))
    }

    /// Asks for a story of this kind, or for any.
    pub(super) fn request(&self, dice: &mut Dice) -> String {
        if dice.below(4) == 0 {
            return say(self.lang, "Tell me a story.", "說一個故事。");
        }
        self.subject().request(self.lang)
    }

    fn subject(&self) -> Subject {
        match self.events.first() {
            Some((Event::Has { thing, .. }, _)) => Subject::Thing(thing.1),
            Some((Event::Counts { .. }, _)) => Subject::Counting,
            _ => Subject::Ufo,
        }
    }

    /// Every request for a story on something that has a name, with that name.
    pub(super) fn requests() -> Vec<(String, String)> {
        let things = WORDS.things.iter().enumerate();
        let things = things.flat_map(|(i, t)| {
            [(Subject::Thing(i), Lang::En, t.0.as_str()), (Subject::Thing(i), Lang::Zh, &t.2)]
        });
        let ufo = [Lang::En, Lang::Zh].map(|lang| (Subject::Ufo, lang, "UFO"));
        things.chain(ufo).map(|(subject, lang, name)| (subject.request(lang), name.to_owned())).collect()
    }

    /// A question with its answer, both from the state of the world at the end.
    pub(super) fn question(&self, dice: &mut Dice) -> (String, String) {
        let all = self.questions();
        let i = dice.below(all.len());
        all.into_iter().nth(i).unwrap_or_default()
    }

    /// Every question this story answers.
    pub fn questions(&self) -> Vec<(String, String)> {
        let world = self.world().unwrap_or_default();
        let lang = self.lang;
        let person = |i| word(&WORDS.people, lang, i);
        let place = |i| word(&WORDS.places, lang, i);
        let say = |en: String, zh: String| if lang == Lang::En { en } else { zh };
        let mut list = Vec::new();
        for (thing, first, spot) in &world.things {
            let (the, owner) = (the_thing(lang, *thing), person(*first));
            let (q, a) = match *spot {
                Spot::With(who) => (
                    say(format!("Who has {the} now?"), format!("現在誰有{the}？")),
                    say(format!("{} has {the} now.", person(who)), format!("現在{}有{the}。", person(who))),
                ),
                Spot::At(at) => (
                    say(format!("Where is {the} now?"), format!("{the}現在在哪裡？")),
                    say(
                        format!("{} is at the {}.", capital(&the), place(at)),
                        format!("{the}現在在{}。", place(at)),
                    ),
                ),
            };
            list.push((q, a));
            if world.ufo.is_none() {
                list.push((
                    say(format!("Who had {the} first?"), format!("一開始誰有{the}？")),
                    say(format!("{owner} had {the} first."), format!("一開始{owner}有{the}。")),
                ));
            } else {
                let a = a_thing(lang, *thing);
                list.push((
                    say(format!("What did the pilot give to {owner}?"), format!("駕駛員送給{owner}什麼？")),
                    say(format!("The pilot gave {owner} {a}."), format!("駕駛員送給{owner}{a}。")),
                ));
            }
        }
        for (who, at) in world.people.iter().filter_map(|(who, at)| at.map(|at| (*who, at))) {
            list.push((
                say(format!("Where is {} now?", person(who)), format!("{}現在在哪裡？", person(who))),
                say(
                    format!("{} is at the {}.", person(who), place(at)),
                    format!("{}現在在{}。", person(who), place(at)),
                ),
            ));
        }
        if let Some((who, n, counted)) = world.count {
            let (who, what, n) = (person(who), word(&WORDS.counted, lang, counted), number(lang, n));
            list.push((
                say(format!("How many {what} does {who} have?"), format!("{who}有幾{what}？")),
                say(format!("{who} has {n} {what}."), format!("{who}有{n}{what}。")),
            ));
        }
        if let Some((colour, at)) = world.ufo {
            let (colour, at) = (word(&WORDS.colours, lang, colour), place(at));
            list.push((
                say("What color were the lights?".into(), "光芒是什麼顏色？".into()),
                say(format!("The lights were {colour}."), format!("光芒是{colour}的。")),
            ));
            list.push((
                say("Where was the UFO?".into(), "UFO 在哪裡？".into()),
                say(format!("The UFO was over the {at}."), format!("UFO 在{at}上空。")),
            ));
        }
        list
    }

    fn world(&self) -> Result<World, String> {
        let mut world = World::default();
        for (i, (event, _)) in self.events.iter().enumerate() {
            world.apply(event, i == 0).map_err(|why| format!("event {}: {event:?}: {why}", i + 1))?;
        }
        if world.count.is_some() && !world.summed {
            return Err("counts without a sum".into());
        }
        Ok(world)
    }
}

/// What a story can be asked to be about.
#[derive(Clone, Copy)]
enum Subject {
    Thing(usize),
    Counting,
    Ufo,
}

impl Subject {
    fn request(self, lang: Lang) -> String {
        match self {
            Self::Thing(i) => {
                let (en, _, zh) = &WORDS.things[i];
                say(lang, &format!("Tell me a story about a {en}."), &format!("說一個{zh}的故事。"))
            }
            Self::Counting => say(lang, "Tell me a story about counting.", "說一個數東西的故事。"),
            Self::Ufo => say(lang, "Tell me a story about a UFO.", "說一個 UFO 的故事。"),
        }
    }
}

fn say(lang: Lang, en: &str, zh: &str) -> String {
    if lang == Lang::En { en.into() } else { zh.into() }
}

impl World {
    fn apply(&mut self, event: &Event, first: bool) -> Result<(), String> {
        let opens = matches!(event, Event::Has { .. } | Event::Counts { .. } | Event::Sees { .. });
        if opens != first {
            return Err(if first { "no beginning" } else { "a second beginning" }.into());
        }
        if self.ended {
            return Err("after the end".into());
        }
        let check = |ok: bool, why: &str| if ok { Ok(()) } else { Err(why.to_owned()) };
        match *event {
            Event::Has { a, thing, .. } => {
                self.people.push((a, None));
                self.things.push((thing, a, Spot::With(a)));
            }
            Event::Goes { a, place } => {
                check(self.place(a) != Some(place), "already there")?;
                check(self.people.iter().any(|p| p.0 == a), "unknown")?;
                self.move_to(a, place);
            }
            Event::Meets { a, b } => {
                let place = self.place(a).ok_or("nowhere to meet")?;
                check(a != b && !self.people.iter().any(|p| p.0 == b), "no stranger")?;
                self.people.push((b, Some(place)));
            }
            Event::Brings { b, thing } => {
                check(self.place(b).is_some(), "not there")?;
                check(self.things.iter().all(|t| t.0.1 != thing.1), "a second one of the kind")?;
                self.things.push((thing, b, Spot::With(b)));
            }
            Event::Gives { a, b, thing } => {
                check(self.together(a, b), "not in the same place")?;
                check(self.spot(thing) == Some(Spot::With(a)), "not a's")?;
                self.put(thing, Spot::With(b));
                self.given = Some((a, b));
                return Ok(());
            }
            Event::Thanks { a, b } => check(self.given == Some((a, b)), "for nothing")?,
            Event::Leaves { a, thing } => {
                check(self.spot(thing) == Some(Spot::With(a)), "not a's")?;
                let place = self.place(a).ok_or("nowhere")?;
                self.put(thing, Spot::At(place));
            }
            Event::Finds { a, thing } => {
                let place = self.place(a).ok_or("nowhere")?;
                check(self.spot(thing) == Some(Spot::At(place)), "not there")?;
                self.put(thing, Spot::With(a));
            }
            Event::Ends { a, b } => {
                check(self.together(a, b), "not in the same place")?;
                self.ended = true;
            }
            Event::Counts { a, n, counted, .. } => {
                check(n >= 2, "not several")?;
                self.count = Some((a, n, counted));
            }
            Event::Adds { a, b, m } => {
                let (who, n, counted) = self.count.ok_or("nothing counted")?;
                check(
                    who == a && a != b && m >= 2 && n + m < WORDS.numbers.len() && !self.summed,
                    "does not add up",
                )?;
                self.count = Some((who, n + m, counted));
            }
            Event::Subtracts { a, b, m } => {
                let (who, n, counted) = self.count.ok_or("nothing counted")?;
                check(who == a && a != b && m >= 2 && n >= m + 2 && !self.summed, "does not add up")?;
                self.count = Some((who, n - m, counted));
            }
            Event::Sums { a, s, counted } => {
                check(self.count == Some((a, s, counted)), "does not add up")?;
                (self.summed, self.ended) = (true, true);
            }
            Event::Sees { a, colour, place, .. } => {
                self.people.push((a, None));
                self.ufo = Some((colour, place));
            }
            Event::Lands { a, thing } => {
                check(
                    self.ufo.is_some() && self.people.iter().any(|p| p.0 == a) && self.things.is_empty(),
                    "no UFO",
                )?;
                self.things.push((thing, a, Spot::With(a)));
            }
            Event::Flies { a, colour } => {
                check(
                    self.ufo.is_some_and(|u| u.0 == colour) && self.people.iter().any(|p| p.0 == a),
                    "another UFO",
                )?;
                check(!self.things.is_empty(), "never landed")?;
                self.ended = true;
            }
        }
        self.given = None;
        Ok(())
    }

    fn place(&self, who: usize) -> Option<usize> {
        self.people.iter().find(|p| p.0 == who)?.1
    }
    fn together(&self, a: usize, b: usize) -> bool {
        a != b && self.place(a).is_some() && self.place(a) == self.place(b)
    }
    fn move_to(&mut self, who: usize, place: usize) {
        self.people.iter_mut().filter(|p| p.0 == who).for_each(|p| p.1 = Some(place));
    }
    fn spot(&self, thing: Thing) -> Option<Spot> {
        self.things.iter().find(|t| t.0 == thing).map(|t| t.2)
    }
    fn put(&mut self, thing: Thing, spot: Spot) {
        self.things.iter_mut().filter(|t| t.0 == thing).for_each(|t| t.2 = spot);
    }
}

/// Someone has a thing, meets someone, and it changes hands, is swapped, lost or found again.
fn things(dice: &mut Dice) -> Vec<Event> {
    let (a, b) = two(dice, WORDS.people.len());
    let (thing, place) = (thing(dice, None), dice.below(WORDS.places.len()));
    let mut events = vec![
        Event::Has { when: dice.below(WORDS.times.len()), a, thing },
        Event::Goes { a, place },
        Event::Meets { a, b },
    ];
    let gives = |a, b, thing| [Event::Gives { a, b, thing }, Event::Thanks { a, b }];
    match dice.below(5) {
        0 => events.extend(gives(a, b, thing)),
        1 => {
            let other = self::thing(dice, Some(thing));
            events.push(Event::Brings { b, thing: other });
            events.extend(gives(b, a, other));
        }
        2 => {
            let other = self::thing(dice, Some(thing));
            events.push(Event::Brings { b, thing: other });
            events.extend([Event::Gives { a, b, thing }, Event::Gives { a: b, b: a, thing: other }]);
        }
        3 => {
            let away = other(dice, WORDS.places.len(), place);
            events.extend([
                Event::Leaves { a, thing },
                Event::Goes { a, place: away },
                Event::Finds { a: b, thing },
                Event::Goes { a: b, place: away },
            ]);
            events.extend(gives(b, a, thing));
        }
        _ => {
            let away = other(dice, WORDS.places.len(), place);
            events.extend([Event::Leaves { a, thing }, Event::Goes { a, place: away }]);
            return events;
        }
    }
    events.push(Event::Ends { a, b });
    events
}

/// Someone counts, and the number changes once or twice.
fn counting(dice: &mut Dice) -> Vec<Event> {
    let (a, b) = two(dice, WORDS.people.len());
    let counted = dice.below(WORDS.counted.len());
    let mut n = 4 + dice.below(7);
    let mut events = vec![Event::Counts { when: dice.below(WORDS.times.len()), a, n, counted }];
    for _ in 0..1 + dice.below(2) {
        let m = 2 + dice.below(4);
        if dice.below(2) == 0 || n < m + 2 {
            events.push(Event::Adds { a, b, m });
            n += m;
        } else {
            events.push(Event::Subtracts { a, b, m });
            n -= m;
        }
    }
    events.push(Event::Sums { a, s: n, counted });
    events
}

/// A UFO comes, gives and goes.
fn visitors(dice: &mut Dice) -> Vec<Event> {
    let (a, colour) = (dice.below(WORDS.people.len()), dice.below(WORDS.colours.len()));
    vec![
        Event::Sees { when: dice.below(WORDS.times.len()), a, colour, place: dice.below(WORDS.places.len()) },
        Event::Lands { a, thing: thing(dice, None) },
        Event::Flies { a, colour },
    ]
}

fn two(dice: &mut Dice, n: usize) -> (usize, usize) {
    let a = dice.below(n);
    (a, other(dice, n, a))
}

/// A number below `n` that is not `taken`.
fn other(dice: &mut Dice, n: usize, taken: usize) -> usize {
    (taken + 1 + dice.below(n - 1)) % n
}

/// A thing of another kind than `taken`.
fn thing(dice: &mut Dice, taken: Option<Thing>) -> Thing {
    let noun = match taken {
        None => dice.below(WORDS.things.len()),
        Some(t) => other(dice, WORDS.things.len(), t.1),
    };
    (dice.below(WORDS.colours.len()), noun)
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |c| c.to_uppercase().collect::<String>() + chars.as_str())
}
