//! Generated answers, whole, changed and cut short, read in pieces of every kind.
use super::*;
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use serde::de::IgnoredAny;

const WORDS: [&str; 12] = [
    "Oslo",
    " is ",
    "\n",
    "<",
    "<tool",
    "你好",
    "🛸",
    "</tool_call>",
    "<b>",
    "</think>",
    "\n\n",
    "{\"name\": 1}",
];
const OBJECTS: [&str; 6] = [
    "{}",
    r#"{"city": "Oslo"}"#,
    r#"{"a": "</tool_call>\n<tool_call>{\"name\": \"x\"}", "b": {"c": [1, -2.5e3, {}]}}"#,
    r#"{ "é" : "\ud83d\udef8 \\", "t":true , "n":null }"#,
    r#"{"a": [[], [[1], "]}"], false]}"#,
    "{\n  \"a\": \"<think>\"\n}",
];
const VALUES: [&str; 8] =
    ["1", "Oslo", "[1, 2]", "a\nb", "</function>\n</tool_call>", "<parameter=b>", "\"q\"", "é < ü"];
const CHANGES: [&str; 12] =
    ["<", "\"", "}", "{", "\\", "\n", "<tool_call>", "</tool_call>", "<think>", "</parameter>", "é", ","];

fn below(rng: &mut ChaCha8Rng, n: usize) -> usize {
    (rng.next_u64() % n as u64) as usize
}

fn pick<'a>(rng: &mut ChaCha8Rng, from: &[&'a str]) -> &'a str {
    from[below(rng, from.len())]
}

/// A call, and what should be told of it.
fn a_call(rng: &mut ChaCha8Rng, index: usize) -> (String, [Part; 3]) {
    let name = pick(rng, &["f", "get_weather", "ü.x"]);
    let object = pick(rng, &OBJECTS);
    let string = Value::from(object);
    let (written, arguments) = match below(rng, 6) {
        0 | 1 => (format!("{{\"name\": \"{name}\", \"arguments\": {object}}}"), object.to_string()),
        2 => (format!("{{\"arguments\":{object},\"name\":\"{name}\"}}"), object.to_string()),
        3 => (format!("{{\"id\": [1], \"name\": \"{name}\", \"arguments\": {string}}}"), object.to_string()),
        _ => {
            let values: Vec<&str> = (0..below(rng, 4)).map(|_| pick(rng, &VALUES)).collect();
            let written =
                values.iter().map(|v| format!("<parameter=a>\n{v}\n</parameter>\n")).collect::<String>();
            let told = values.iter().map(|v| match *v {
                "1" | "[1, 2]" => format!("\"a\": {v}"),
                v => format!("\"a\": {}", Value::from(v)),
            });
            let told = told.collect::<Vec<_>>().join(", ");
            (format!("<function={name}>\n{written}</function>"), format!("{{{told}}}"))
        }
    };
    (format!("<tool_call>\n{written}\n</tool_call>"), call(index, name, &arguments))
}

/// An answer, and what should be told of it.
fn an_answer(rng: &mut ChaCha8Rng, thinking: bool) -> (String, Vec<Part>) {
    let (mut answer, mut parts, mut calls) = (String::new(), Vec::new(), 0);
    if thinking || below(rng, 2) == 0 {
        let thought = pick(rng, &["Hm.", "a\n\nb <tool_call>", "a <think> </ think>", "你好"]);
        answer = format!("{}\n{thought}\n</think>\n\n", if thinking { "" } else { "<think>" });
        parts.push(reasoning(thought));
    }
    for _ in 0..below(rng, 5) {
        if below(rng, 2) == 0 {
            let (written, told) = a_call(rng, calls);
            let space = pick(rng, &["", "\n", "\n\n "]);
            answer = answer + space + &written;
            if let Some(Text(text)) = parts.last_mut() {
                text.push_str(space);
            }
            parts.extend(told);
            calls += 1;
        } else {
            let words: String = (0..=below(rng, 4)).map(|_| pick(rng, &WORDS)).collect();
            let words = format!("I{words}.");
            answer += &words;
            parts.push(Text(words));
        }
    }
    (answer, merged(parts))
}

/// Something else in place of a few characters, or an early end.
fn changed(rng: &mut ChaCha8Rng, answer: &str) -> String {
    let mut chars: Vec<String> = answer.chars().map(String::from).collect();
    for _ in 0..=below(rng, 3) {
        let (at, what) = (below(rng, chars.len() + 1), below(rng, 4));
        match what {
            0 => chars.truncate(at),
            1 => chars.insert(at, pick(rng, &CHANGES).into()),
            _ if at == chars.len() => {}
            2 => chars[at] = pick(rng, &CHANGES).into(),
            _ => _ = chars.remove(at),
        }
    }
    chars.concat()
}

/// Pieces of at most `size` bytes, or one character that is larger.
fn pieces(text: &str, mut size: impl FnMut() -> usize) -> Vec<&str> {
    let (mut pieces, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let (piece, after) = rest.split_at(rest.floor_char_boundary(size()).max(first.len_utf8()));
        pieces.push(piece);
        rest = after;
    }
    pieces
}

/// Whether every character of `answer` is in a part, or belongs to a call or the tags of reasoning.
fn accounted(answer: &str, parts: &[Part]) -> bool {
    let silent = |s: &str| s.replace("<think>", "").replace("</think>", "").trim().is_empty();
    match parts {
        [] => silent(answer),
        [Text(told) | Reasoning(told), ..] if told.is_empty() => false,
        [Text(told) | Reasoning(told), rest @ ..] => answer
            .match_indices(told.as_str())
            .any(|(at, _)| silent(&answer[..at]) && accounted(&answer[at + told.len()..], rest)),
        [CallStart { .. }, rest @ ..] => {
            let Some((before, body)) = answer.split_once("<tool_call>") else { return false };
            let rest = if let [CallArguments { .. }, rest @ ..] = rest { rest } else { rest };
            match rest {
                _ if !silent(before) => false,
                [CallEnd { .. }, rest @ ..] => {
                    let end = "</tool_call>";
                    body.match_indices(end).any(|(at, _)| accounted(&body[at + end.len()..], rest))
                }
                [] => true,
                _ => body.char_indices().any(|(at, _)| accounted(&body[at..], rest)),
            }
        }
        _ => false,
    }
}

/// What holds of every answer. Gives the number of calls that ended.
fn check(options: &Options, answer: &str, rng: &mut ChaCha8Rng) -> usize {
    let whole = read(options, [answer]);
    for size in [1, 2, 3, 5] {
        assert_eq!(read(options, pieces(answer, || size)), whole, "{size}: {answer:?}");
    }
    let random = pieces(answer, || 1 + below(rng, 12));
    assert_eq!(read(options, random), whole, "{answer:?}");
    assert!(accounted(answer, &whole), "{answer:?}: {whole:?}");
    let ended = whole.windows(3).filter_map(|parts| match parts {
        [CallStart { name, .. }, CallArguments { delta, .. }, CallEnd { .. }] => Some((name, delta)),
        _ => None,
    });
    let ended = ended.inspect(|(name, arguments)| {
        assert!(!name.is_empty() && arguments.starts_with('{'), "{answer:?}");
        assert!(serde_json::from_str::<IgnoredAny>(arguments).is_ok(), "{answer:?}: {arguments}");
    });
    let ended = ended.count();
    assert_eq!(ended, whole.iter().filter(|part| matches!(part, CallEnd { .. })).count());
    ended
}

#[test]
fn every_cut_of_an_answer_tells_the_same_and_nothing_is_lost() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let (mut ended, mut damaged) = (0, 0);
    for i in 0..200 {
        let options = if i % 3 == 0 { thinking() } else { tools() };
        let (answer, told) = an_answer(&mut rng, options.thinking);
        assert_eq!(read(&options, [answer.as_str()]), told, "{answer:?}");
        let calls = check(&options, &answer, &mut rng);
        ended += calls;
        for _ in 0..5 {
            let changed = changed(&mut rng, &answer);
            damaged += usize::from(check(&options, &changed, &mut rng) < calls);
        }
        check(&Options::default(), &answer, &mut rng);
    }
    assert!(ended > 100 && damaged > 100, "{ended} calls, {damaged} answers with fewer");
}

#[test]
fn the_account_misses_what_is_lost() {
    let answer = "<think>a</think>b <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>c";
    let parts = read(&tools(), [answer]);
    assert!(accounted(answer, &parts));
    for without in [0, 1, 5] {
        let mut fewer = parts.clone();
        fewer.remove(without);
        assert!(!accounted(answer, &fewer), "{without}");
    }
}

#[test]
fn no_character_is_read_more_than_a_few_times() {
    for part in [
        "<",
        "<t",
        "\n",
        " <think",
        "</think",
        "<tool_call>",
        "<tool_call>{",
        "<tool_call><",
        "<tool_call>{\"arguments\": ",
        "<tool_call>{\"name\": \"f\"}<",
        "<tool_call><function=f><",
        "<tool_call><function=f><parameter=a><",
        "{\"a\": [",
    ] {
        for options in [thinking(), tools(), Options::default()] {
            let answer = part.repeat(2000);
            let mut parser = ReplyParser::new(options);
            pieces(&answer, || 7).into_iter().for_each(|piece| _ = parser.push(piece));
            parser.finish();
            assert!(parser.steps <= 4 * answer.chars().count(), "{part:?}: {}", parser.steps);
        }
    }
}
