//! The files a run learns from: paths, or paths with weights.
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::path::PathBuf;
use toml::{Table, Value};

/// Files to learn from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mix {
    /// In the order they were named.
    pub paths: Vec<PathBuf>,
    /// Shares of the rows of an epoch, one a path; empty: every row once.
    pub weights: Vec<f64>,
}

impl From<Vec<PathBuf>> for Mix {
    fn from(paths: Vec<PathBuf>) -> Self {
        Self { paths, weights: Vec::new() }
    }
}

impl Mix {
    /// Whether there is no file.
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    fn add(&mut self, path: &str, weight: Option<f64>) {
        if weight.is_some() && self.weights.is_empty() {
            self.weights = vec![1.0; self.paths.len()];
        }
        self.paths.push(path.into());
        if let Some(weight) = weight {
            self.weights.push(weight);
        } else if !self.weights.is_empty() {
            self.weights.push(1.0);
        }
    }

    fn item(&mut self, item: &Value) -> Option<()> {
        match item {
            Value::String(path) => self.add(path, None),
            Value::Table(item) if item.contains_key("path") => {
                let path = item.get("path")?.as_str()?;
                let weight = item.get("weight").map(|w| number(w).ok_or(())).transpose().ok()?;
                if item.keys().any(|k| k != "path" && k != "weight") {
                    return None;
                }
                self.add(path, weight);
            }
            Value::Table(weights) if !weights.is_empty() => {
                for (path, weight) in weights {
                    self.add(path, Some(number(weight)?));
                }
            }
            _ => return None,
        }
        Some(())
    }
}

fn number(value: &Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
}

impl Serialize for Mix {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let path = |p: &PathBuf| Value::String(p.to_string_lossy().into_owned());
        let one = |(i, p): (usize, &PathBuf)| match self.weights.get(i) {
            None => path(p),
            Some(weight) => Value::Table(Table::from_iter([
                ("path".to_owned(), path(p)),
                ("weight".to_owned(), Value::Float(*weight)),
            ])),
        };
        self.paths.iter().enumerate().map(one).collect::<Vec<_>>().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Mix {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let need = "expected paths, `{ path = \"FILE\", weight = 2.0 }`, or a table of FILE = weight";
        let items = Vec::<Value>::deserialize(deserializer).map_err(|_| D::Error::custom(need))?;
        let mut mix = Self::default();
        for item in &items {
            mix.item(item).ok_or_else(|| D::Error::custom(need))?;
        }
        Ok(mix)
    }
}
