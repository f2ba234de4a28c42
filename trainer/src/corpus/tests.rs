use super::*;
use std::collections::{HashMap, HashSet};

const SIZES: Sizes = Sizes { train: 8000, valid: 1000 };

fn stories(items: &[Item]) -> impl Iterator<Item = &str> {
    items.iter().filter_map(|i| match &i.document {
        Document::Text(text) => Some(text.as_str()),
        Document::Chat(_) => None,
    })
}

#[test]
fn every_story_reads_back_to_itself() {
    let corpus = generate(1, SIZES);
    let mut chinese = 0;
    for text in stories(&corpus.train).chain(stories(&corpus.valid)) {
        let story = Story::parse(text).unwrap_or_else(|why| panic!("{text}\n{why}"));
        assert_eq!(story.text(), text);
        chinese += usize::from(story.is_chinese());
    }
    assert!(chinese > 50, "{chinese} Chinese stories");
}

#[test]
fn a_story_that_contradicts_itself_does_not_read() {
    let good = "One quiet evening Mia got a red ball as a present. Mia went to the park. There Mia met Tom. \
                Mia gave the red ball to Tom. \"Thank you, Mia!\" said Tom. It was a good day for Mia and Tom.";
    let story = Story::parse(good).expect("consistent");
    let has = |q: &str, a: &str| story.questions().contains(&(q.to_owned(), a.to_owned()));
    assert!(has("Who has the red ball now?", "Tom has the red ball now."));
    assert!(has("Who had the red ball first?", "Mia had the red ball first."));
    assert!(has("Where is Tom now?", "Tom is at the park."));
    for (from, to) in [
        ("gave the red", "gave the blue"),
        ("gave the red ball to Tom", "gave the red ball to Anna"),
        ("There Mia met Tom. ", ""),
        ("Thank you, Mia!\" said Tom", "Thank you, Tom!\" said Mia"),
        ("went to the park", "went to the moon"),
        ("It was a good day for Mia and Tom", "It was a good day for Mia and Mia"),
    ] {
        let bad = good.replace(from, to);
        assert_ne!(bad, good);
        assert!(Story::parse(&bad).is_err(), "{bad}");
    }
    let sums = "One windy afternoon Tom counted six eggs on the table. Anna came by and gave Tom two more. In the end Tom had eight eggs.";
    Story::parse(sums).expect("adds up");
    assert!(Story::parse(&sums.replace("eight", "nine")).is_err());
}

#[test]
fn nothing_held_out_is_learnt() {
    let corpus = generate(2, SIZES);
    assert!(corpus.train.iter().all(|i| !i.held_out));
    assert_eq!(corpus.valid.iter().filter(|i| i.held_out).count(), 500);
    let learnt: HashSet<&str> = stories(&corpus.train).collect();
    assert!(learnt.iter().all(|t| !Story::parse(t).expect("a story").is_reserved()));
    let reserved: Vec<_> =
        stories(&corpus.valid).filter(|t| Story::parse(t).expect("a story").is_reserved()).collect();
    assert!(reserved.len() > 15 && reserved.iter().all(|t| !learnt.contains(t)));
    let asked = |items: &[Item], what: &str| {
        let has = |i: &Item| matches!(&i.document, Document::Chat(turns) if turns.iter().any(|m| m.content == what));
        items.iter().filter(|i| has(i)).count()
    };
    for (known, held_out) in [("Who are you?", "Please say who you are."), ("你是誰", "你到底是誰")] {
        assert!(asked(&corpus.train, known) > 0 && asked(&corpus.train, held_out) == 0);
        assert!(asked(&corpus.valid, held_out) > 0, "{held_out}");
    }
}

#[test]
fn the_seed_is_all_there_is() {
    let a = generate(3, SIZES);
    assert_eq!(a, generate(3, SIZES));
    let b = generate(4, SIZES);
    assert_ne!(a.train, b.train);
    let more = generate(3, Sizes { train: 8100, valid: 1000 });
    assert_eq!(more.train[..8000], a.train[..]);
    let distinct: HashSet<String> = a.train.iter().map(|i| i.document.json().to_string()).collect();
    assert!(distinct.len() > 6000, "{} distinct of 8000", distinct.len());
    assert!(a.train.iter().all(|i| i.nats > 0.0 && i.nats < 120.0));
}

#[test]
fn the_answers_of_the_demo_are_among_them() {
    let corpus = generate(5, Sizes { train: 40_000, valid: 0 });
    let pairs: HashSet<(&str, &str)> = corpus
        .train
        .iter()
        .filter_map(|i| match &i.document {
            Document::Chat(turns) => Some(turns),
            Document::Text(_) => None,
        })
        .flat_map(|turns| turns.chunks(2).map(|t| (t[0].content.as_str(), t[1].content.as_str())))
        .collect();
    for pair in [
        ("Who are you?", "I am the q4 demo model, made of four-bit numbers."),
        ("Who am I?", "You are the person who is talking to me."),
        ("你是誰", "我是 q4 示範模型，用四位元數字做成的。"),
        ("我是誰", "你是正在和我說話的人。"),
        ("談談UFO", "UFO 是天空中還沒有人能解釋的飛行物。"),
        ("What color is the sky?", "The sky is blue."),
        ("What is 7 plus 8?", "7 plus 8 is 15."),
        ("7 - 2", "7 minus 2 is 5."),
        ("Hello", "Hello! What shall we talk about?"),
        ("tell me a joke", "What did zero say to eight? Nice belt!"),
        ("Name three rivers.", "The Nile, the Amazon and the Danube."),
        ("thanks", "You are welcome."),
        (
            "Write one short sentence about UFO and you.",
            "I have never seen a UFO, but I would like to meet one.",
        ),
    ] {
        assert!(pairs.contains(&pair), "{pair:?}");
    }
}

#[test]
fn a_question_has_one_answer_and_the_suite_asks_them_all() {
    let suite = suite();
    let known: HashMap<&str, &str> = suite.iter().map(|c| (c.prompt.as_str(), c.must[0].as_str())).collect();
    assert_eq!(known.len(), suite.len(), "a question with two answers");
    let corpus = generate(7, Sizes { train: 2000, valid: 200 });
    let mut asked = 0;
    for item in corpus.train.iter().chain(&corpus.valid) {
        let Document::Chat(turns) = &item.document else { continue };
        for turn in turns.chunks(2).filter(|t| Story::parse(&t[1].content).is_err()) {
            let Some(answer) = known.get(turn[0].content.as_str()) else { continue };
            assert_eq!(turn[1].content, *answer);
            asked += 1;
        }
    }
    assert!(asked > 1000, "{asked}");
    let rows = |group: &str| suite.iter().filter(|c| c.group == group).count();
    assert_eq!((rows("difference"), rows("sum"), rows("product")), (231, 121 + 25, 121));
    assert_eq!((rows("identity"), rows("identity-heldout"), rows("story")), (14 + 8, 4 + 2, 26));
    assert_eq!(rows("unknown-heldout"), 13);
}

#[test]
fn what_it_does_not_know_is_not_what_it_knows() {
    let known: HashSet<String> = suite().into_iter().map(|c| c.prompt.to_lowercase()).collect();
    let mut dice = Dice::new(Philox::new(8, 0, streams::FREE));
    let drawn: HashSet<String> = (0..20_000).map(|_| unknown::draw(&mut dice).0).collect();
    assert!(drawn.len() > 5000, "{}", drawn.len());
    assert_eq!(drawn.iter().find(|q| known.contains(&q.to_lowercase())), None);
    assert_eq!(drawn.iter().find(|q| q.contains(['{', '}'])), None);
}

#[test]
fn files_are_written_once() {
    let dir = tempfile::tempdir().expect("directory");
    let corpus = generate(6, Sizes { train: 50, valid: 10 });
    let report = corpus.write(dir.path()).expect("written");
    let train = fs::read_to_string(dir.path().join("train.jsonl")).expect("read");
    assert_eq!((train.lines().count(), report.train_bytes), (50, train.len()));
    assert!(report.held_out_rows == 5 && report.valid_nats > 10.0);
    assert_eq!(corpus.write(dir.path()).expect_err("not empty").code(), Code::Usage);
    let rows = crate::data::read_rows(&dir.path().join("valid.jsonl"), crate::data::Format::Auto)
        .expect("rows")
        .rows;
    assert_eq!(rows.len(), 10);
    let asked = crate::behaviour::Suite::load(&dir.path().join("behaviour.jsonl")).expect("a suite");
    assert_eq!(asked.cases, suite());
}
