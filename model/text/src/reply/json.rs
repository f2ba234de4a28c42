//! Checks one JSON value (RFC 8259) a character at a time.

/// Values within values; readers of the result have bounds, too (serde_json: 127).
const DEEPEST: usize = 100;

#[derive(Clone, Debug)]
pub(super) struct Json {
    place: Place,
    /// The open objects (true) and arrays (false).
    open: Vec<bool>,
    /// The string is a key.
    key: bool,
}

/// What was read last, by what may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A value must follow.
    Value,
    /// A value or the end of the array.
    FirstValue,
    /// A key or the end of the object.
    FirstKey,
    Key,
    Colon,
    /// A value is complete.
    After,
    String,
    Escape,
    /// Hexadecimal digits of an escape still to come.
    Hex(u8),
    /// The rest of `true`, `false` or `null`.
    Word(&'static str),
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

impl Default for Json {
    fn default() -> Self {
        Self { place: Place::Value, open: Vec::new(), key: false }
    }
}

impl Json {
    pub fn place(&self) -> Place {
        self.place
    }

    /// Open objects and arrays.
    pub fn depth(&self) -> usize {
        self.open.len()
    }

    /// The string read now, or last, is a key.
    pub fn in_key(&self) -> bool {
        self.key
    }

    /// Takes the next character; false where it cannot follow.
    #[must_use]
    pub fn step(&mut self, c: char) -> bool {
        use Place::*;
        let in_object = self.open.last() == Some(&true);
        self.place = match (self.place, c) {
            (String, '"') if self.key => Colon,
            (String, '"') => After,
            (String, '\\') => Escape,
            (String, ' '..) => String,
            (Escape, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => String,
            (Escape, 'u') => Hex(4),
            (Hex(left), _) if c.is_ascii_hexdigit() => {
                if left == 1 {
                    String
                } else {
                    Hex(left - 1)
                }
            }
            (Word(rest), _) => match rest.strip_prefix(c) {
                Some("") => After,
                Some(rest) => Word(rest),
                None => return false,
            },
            (Value | FirstValue | FirstKey | Key | Colon | After, ' ' | '\t' | '\n' | '\r') => self.place,
            (Value | FirstValue, '"') | (FirstKey | Key, '"') => {
                self.key = matches!(self.place, FirstKey | Key);
                String
            }
            (Value | FirstValue, '{' | '[') if self.open.len() < DEEPEST => {
                self.open.push(c == '{');
                if c == '{' { FirstKey } else { FirstValue }
            }
            (Value | FirstValue, 't') => Word("rue"),
            (Value | FirstValue, 'f') => Word("alse"),
            (Value | FirstValue, 'n') => Word("ull"),
            (Value | FirstValue, '-') => Minus,
            (Value | FirstValue | Minus, '0') => Zero,
            (Value | FirstValue | Minus | Integer, '0'..='9') => Integer,
            (Zero | Integer, '.') => Point,
            (Point | Fraction, '0'..='9') => Fraction,
            (Zero | Integer | Fraction, 'e' | 'E') => E,
            (E, '+' | '-') => Sign,
            (E | Sign | Exponent, '0'..='9') => Exponent,
            (Zero | Integer | Fraction | Exponent, _) => {
                self.place = After;
                return self.step(c);
            }
            (Colon, ':') => Value,
            (After, ',') if in_object => Key,
            (After, ',') if !self.open.is_empty() => Value,
            (FirstKey, '}') | (FirstValue, ']') => self.close(),
            (After, '}') if in_object => self.close(),
            (After, ']') if !in_object && !self.open.is_empty() => self.close(),
            _ => return false,
        };
        true
    }

    fn close(&mut self) -> Place {
        self.open.pop();
        Place::After
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::IgnoredAny;

    fn valid(text: &str) -> bool {
        let mut json = Json::default();
        text.chars().all(|c| json.step(c)) && json.depth() == 0 && json.place() == Place::After
    }

    #[test]
    fn the_checker_agrees_with_serde_json() {
        let good = [
            r#"{}"#,
            r#"[ ]"#,
            r#"{"a":[1,-0.5e+3,0,{"b":null}],"c":"\u00e9\"\\\n","é":true , "d" : false}"#,
            "\n[[1 ,2]\t,[-7E2,0e0,10.25]]",
        ];
        let bad = [
            "",
            "{",
            "[1,]",
            "{,}",
            r#"{"a"}"#,
            r#"{"a":}"#,
            r#"{"a":1,}"#,
            "[01]",
            "[-]",
            "[1.]",
            "[.5]",
            "[1e]",
            "[+1]",
            r#"["\x"]"#,
            r#"["\u12g4"]"#,
            "[\"\n\"]",
            "[nul]",
            "[truee]",
            "[1 2]",
            "[1}",
            r#"{"a":1]"#,
            "[]]",
            "{1:2}",
            "['a']",
            "[\u{a0}1]",
        ];
        for (texts, is) in [(&good[..], true), (&bad[..], false)] {
            for text in texts {
                assert_eq!(valid(text), is, "{text}");
                assert_eq!(serde_json::from_str::<IgnoredAny>(text).is_ok(), is, "{text}");
            }
        }
    }

    #[test]
    fn what_serde_json_could_not_read_back_is_too_deep() {
        let nested = |n| "[".repeat(n) + &"]".repeat(n);
        assert!(valid(&nested(DEEPEST)) && !valid(&nested(DEEPEST + 1)));
        assert!(serde_json::from_str::<serde_json::Value>(&nested(DEEPEST)).is_ok());
    }
}
