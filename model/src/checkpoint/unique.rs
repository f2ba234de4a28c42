//! JSON objects in which a repeated key is an error.
//!
//! Two readers that keep different duplicates see different files; serde's maps keep the last one in silence.
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use std::{collections::BTreeMap, fmt, marker::PhantomData};

/// Longest name of a tensor or of a metadata key, in bytes.
pub(super) const NAME_LIMIT: usize = 1024;

/// An object with distinct keys.
pub(super) struct Unique<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Map<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Map<V> {
            type Value = Unique<V>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object without duplicate keys")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Unique<V>, A::Error> {
                let mut map = BTreeMap::new();
                while let Some(key) = entries.next_key::<String>()? {
                    let value = entries
                        .next_value()
                        .map_err(|e| A::Error::custom(format!("`{}`: {e}", brief(&key))))?;
                    insert(&mut map, key, value)?;
                }
                Ok(Unique(map))
            }
        }
        d.deserialize_map(Map(PhantomData))
    }
}

/// Adds an entry; a key that is too long or there already is an error.
pub(super) fn insert<V, E: Error>(map: &mut BTreeMap<String, V>, key: String, value: V) -> Result<(), E> {
    if key.len() > NAME_LIMIT {
        return Err(E::custom(format!("key `{}` is longer than {NAME_LIMIT} bytes", brief(&key))));
    }
    if map.contains_key(&key) {
        return Err(E::custom(format!("duplicate key `{key}`")));
    }
    map.insert(key, value);
    Ok(())
}

/// A name short enough for a message.
pub(super) fn brief(name: &str) -> String {
    if name.chars().count() <= 120 {
        name.to_owned()
    } else {
        name.chars().take(117).chain("...".chars()).collect()
    }
}
