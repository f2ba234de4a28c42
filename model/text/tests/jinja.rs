//! Expressions of chat templates against what Jinja2 makes of them, as `bench/templates.py` recorded it.
use q4_text::template::{ChatTemplate, Message};
use serde_json::{Map, Value};

fn rendered(expression: &str) -> Option<String> {
    let template = ChatTemplate::compile(&format!("{{{{ {expression} }}}}")).ok()?;
    template.render(&[Message::new("user", "Hi")], None, true, &Map::new()).ok()
}

fn cases(name: &str) -> Vec<Value> {
    let cases: Value = serde_json::from_str(include_str!("data/jinja.json")).expect("JSON");
    cases[name].as_array().expect("a list").clone()
}

#[test]
fn expressions_are_rendered_as_by_jinja2() {
    let same = cases("same");
    assert!(same.len() > 2700, "{}", same.len());
    for case in same {
        let expression = case[0].as_str().expect("an expression");
        assert_eq!(rendered(expression).as_deref(), case[1].as_str(), "{expression}");
    }
}

#[test]
fn what_jinja2_refuses_is_refused() {
    for case in cases("refused") {
        let expression = case.as_str().expect("an expression");
        assert_eq!(rendered(expression), None, "{expression}");
    }
}

#[test]
fn the_differences_are_the_known_ones() {
    for case in cases("differs") {
        let expression = case[0].as_str().expect("an expression");
        assert_eq!(rendered(expression).as_deref(), case[1].as_str(), "{expression}");
        assert_ne!(case[1], case[2], "{expression}");
    }
}
