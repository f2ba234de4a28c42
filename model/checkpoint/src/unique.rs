//! Names in untrusted JSON objects: bounded, and each there once.
//!
//! Two readers that keep different duplicates see different files; serde's maps keep the last one in silence.
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use std::{collections::BTreeMap, fmt};

/// Longest name of a tensor or of a metadata key, in bytes.
pub(super) const NAME_LIMIT: usize = 1024;
/// Most texts of one object: torchao has one for each tensor, and each takes far more memory than the
/// shortest spelling of it.
pub(super) const TEXT_LIMIT: usize = 1 << 16;

/// An object of texts with distinct keys.
#[derive(Default)]
pub(super) struct Texts(pub BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Texts;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts without duplicate keys")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Texts, A::Error> {
                let mut texts = BTreeMap::new();
                while let Some(key) = entries.next_key::<String>()? {
                    check_length(&key)?;
                    if texts.len() == TEXT_LIMIT {
                        return Err(A::Error::custom(format!("more than {TEXT_LIMIT} texts")));
                    }
                    let text = entries.next_value().map_err(|e| within(&key, &e))?;
                    if texts.contains_key(&key) {
                        return Err(A::Error::custom(format!("duplicate key `{key}`")));
                    }
                    texts.insert(key, text);
                }
                Ok(Texts(texts))
            }
        }
        d.deserialize_map(Entries)
    }
}

/// Refuses a name that is too long.
pub(super) fn check_length<E: Error>(key: &str) -> Result<(), E> {
    match key.len() <= NAME_LIMIT {
        true => Ok(()),
        false => Err(E::custom(format!("key `{}` is longer than {NAME_LIMIT} bytes", brief(key)))),
    }
}

/// The error of the value of `key`.
pub(super) fn within<E: Error>(key: &str, e: &E) -> E {
    E::custom(format!("`{}`: {e}", brief(key)))
}

/// A name short enough for a message.
pub(super) fn brief(name: &str) -> String {
    if name.chars().count() <= 120 {
        name.to_owned()
    } else {
        name.chars().take(117).chain("...".chars()).collect()
    }
}
