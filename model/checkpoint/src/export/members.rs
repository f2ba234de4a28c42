//! Fields of a JSON object replaced in its text.
//!
//! A parser and a printer would change numbers that nobody asked to change (1e-06, 5000000.0); here every
//! other character stays.
use serde_json::Value;

/// `text`, a valid JSON object, without its fields of the names in `fields`, and with those at its end that
/// are not null.
pub(super) fn with_members(text: &str, fields: &[(&str, Value)]) -> String {
    let replaced = |member: &&str| fields.iter().any(|(name, _)| name_of(member).as_deref() == Some(*name));
    let mut members: Vec<String> =
        split(text).into_iter().filter(|m| !replaced(m)).map(str::to_owned).collect();
    if let Some(last) = members.last_mut() {
        last.truncate(last.trim_end().len());
    }
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let value = format!("{value:#}").replace('\n', "\n  ");
        members.push(format!("\n  \"{name}\": {value}"));
    }
    format!("{{{}\n}}\n", members.join(","))
}

/// The text between the commas of the outermost object, white space included.
fn split(text: &str) -> Vec<&str> {
    let text = text.trim();
    let inner = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')).unwrap_or_default();
    let (mut members, mut start, mut depth, mut quoted, mut escaped) = (Vec::new(), 0, 0usize, false, false);
    for (i, c) in inner.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ if quoted => {}
            '{' | '[' => depth += 1,
            '}' | ']' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                members.push(&inner[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    members.push(&inner[start..]);
    members.retain(|m| !m.trim().is_empty());
    members
}

/// The name of a field, unescaped.
fn name_of(member: &str) -> Option<String> {
    serde_json::Deserializer::from_str(member).into_iter::<String>().next()?.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_other_character_stays() {
        let text = "{\n \"a\": 1e-06,\n \"q\": {\"x\": [1, {\"y\": \"}],\"}]},\n \"b,\\\"q\": \"{ä\\\\\" ,\"c\":[ ]\n}\n";
        let out = with_members(text, &[("q", json!({ "z": null }))]);
        assert_eq!(
            out,
            "{\n \"a\": 1e-06,\n \"b,\\\"q\": \"{ä\\\\\" ,\"c\":[ ],\n  \"q\": {\n    \"z\": null\n  }\n}\n"
        );
        let escaped = with_members(r#"{"\u0071": 1, "q": 2, "r": 3}"#, &[("q", json!(4))]);
        assert_eq!(escaped, "{ \"r\": 3,\n  \"q\": 4\n}\n");
        assert_eq!(with_members("{}", &[("q", json!(true))]), "{\n  \"q\": true\n}\n");
        assert_eq!(with_members(r#"{"a": 1, "q": 2}"#, &[("q", Value::Null)]), "{\"a\": 1\n}\n");
        let last = with_members("{\"a\": 1, \"q\": 2 }", &[("q", json!(3))]);
        assert_eq!(last, "{\"a\": 1,\n  \"q\": 3\n}\n");
    }
}
