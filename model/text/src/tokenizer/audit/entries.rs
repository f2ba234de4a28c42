//! Vocabulary, merges and added tokens, counted and measured without keeping them.
use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::fmt;

/// A list or map of tokens; `highest` is the largest id, `longest` the bytes of the longest token.
#[derive(Default)]
pub(super) struct Entries {
    pub count: usize,
    pub highest: u64,
    pub longest: usize,
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Entries::default())
    }
}

impl<'de> Visitor<'de> for Entries {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list or a map of token ids")
    }

    fn visit_unit<E: Error>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<Self, A::Error> {
        while let Some(Length(longest)) = list.next_element()? {
            self.count += 1;
            self.longest = self.longest.max(longest);
        }
        self.highest = self.count.saturating_sub(1) as u64;
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((Length(length), id)) = map.next_entry::<Length, u64>()? {
            self.count += 1;
            self.highest = self.highest.max(id);
            self.longest = self.longest.max(length);
        }
        Ok(self)
    }
}

/// Elements of a list, which are skipped.
#[derive(Default)]
pub(super) struct Count(pub usize);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Skip;
        impl<'de> Visitor<'de> for Skip {
            type Value = Count;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }
            fn visit_unit<E: Error>(self) -> Result<Count, E> {
                Ok(Count(0))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Count, A::Error> {
                let mut count = 0;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Count(count))
            }
        }
        deserializer.deserialize_any(Skip)
    }
}

/// Bytes of a text; of a list, those of the longest text in it.
#[derive(Default)]
struct Length(usize);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Measure;
        impl<'de> Visitor<'de> for Measure {
            type Value = Length;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token, or a list that holds one")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Length, E> {
                Ok(Length(text.len()))
            }
            fn visit_f64<E: Error>(self, _: f64) -> Result<Length, E> {
                Ok(Length(0))
            }
            fn visit_u64<E: Error>(self, _: u64) -> Result<Length, E> {
                Ok(Length(0))
            }
            fn visit_i64<E: Error>(self, _: i64) -> Result<Length, E> {
                Ok(Length(0))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Length, A::Error> {
                let mut longest = 0;
                while let Some(Length(length)) = list.next_element()? {
                    longest = longest.max(length);
                }
                Ok(Length(longest))
            }
        }
        deserializer.deserialize_any(Measure)
    }
}

/// `added_tokens`, measured.
#[derive(Default)]
pub(super) struct Contents {
    pub count: usize,
    pub highest: u64,
    pub longest: usize,
    pub bytes: usize,
    /// One takes the white space beside it too, however much there is.
    pub strips: bool,
}

impl<'de> Deserialize<'de> for Contents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Added {
            id: u64,
            #[serde(default)]
            content: Length,
            #[serde(default)]
            lstrip: bool,
            #[serde(default)]
            rstrip: bool,
        }
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Contents;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of added tokens")
            }
            fn visit_unit<E: Error>(self) -> Result<Contents, E> {
                Ok(Contents::default())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Contents, A::Error> {
                let mut seen = Contents::default();
                while let Some(Added { id, content, lstrip, rstrip }) = list.next_element()? {
                    seen.strips |= lstrip || rstrip;
                    seen.count += 1;
                    seen.highest = seen.highest.max(id);
                    seen.longest = seen.longest.max(content.0);
                    seen.bytes += content.0;
                }
                Ok(seen)
            }
        }
        deserializer.deserialize_any(List)
    }
}

/// The second halves of all merges.
pub(super) struct Merges(pub Vec<String>);

impl<'de> Deserialize<'de> for Merges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Seconds;
        impl<'de> Visitor<'de> for Seconds {
            type Value = Merges;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of merges")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merges, A::Error> {
                let mut seconds = Vec::new();
                while let Some(Second(second)) = list.next_element()? {
                    seconds.push(second);
                }
                Ok(Merges(seconds))
            }
        }
        deserializer.deserialize_any(Seconds)
    }
}

struct Second(String);

impl<'de> Deserialize<'de> for Second {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Merge;
        impl<'de> Visitor<'de> for Merge {
            type Value = Second;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two tokens")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Second, E> {
                Ok(Second(text.split(' ').nth(1).unwrap_or_default().to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Second, A::Error> {
                let (_, second) = (list.next_element::<IgnoredAny>()?, list.next_element::<String>()?);
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Second(second.unwrap_or_default()))
            }
        }
        deserializer.deserialize_any(Merge)
    }
}
