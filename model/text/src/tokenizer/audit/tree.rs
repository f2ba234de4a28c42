//! JSON whose objects have no key twice: of two equal keys the audit could read one and the library the
//! other.
use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};
use std::fmt;

/// A value of that kind.
#[derive(Default)]
pub(super) struct Tree(pub Value);

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Build;
        impl<'de> Visitor<'de> for Build {
            type Value = Tree;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON without equal keys")
            }
            fn visit_unit<E: Error>(self) -> Result<Tree, E> {
                Ok(Tree(Value::Null))
            }
            fn visit_bool<E: Error>(self, v: bool) -> Result<Tree, E> {
                Ok(Tree(v.into()))
            }
            fn visit_i64<E: Error>(self, v: i64) -> Result<Tree, E> {
                Ok(Tree(v.into()))
            }
            fn visit_u64<E: Error>(self, v: u64) -> Result<Tree, E> {
                Ok(Tree(v.into()))
            }
            fn visit_f64<E: Error>(self, v: f64) -> Result<Tree, E> {
                Ok(Tree(v.into()))
            }
            fn visit_str<E: Error>(self, v: &str) -> Result<Tree, E> {
                Ok(Tree(v.into()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Tree, A::Error> {
                let mut values = Vec::new();
                while let Some(Tree(value)) = list.next_element()? {
                    values.push(value);
                }
                Ok(Tree(Value::Array(values)))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Tree, A::Error> {
                let mut map = Map::new();
                while let Some((key, Tree(value))) = entries.next_entry::<String, Tree>()? {
                    if map.contains_key(&key) {
                        let key: String = key.chars().take(40).collect();
                        return Err(A::Error::custom(format!("the key `{key}` stands twice in one object")));
                    }
                    map.insert(key, value);
                }
                Ok(Tree(Value::Object(map)))
            }
        }
        deserializer.deserialize_any(Build)
    }
}
