//! Where the files of a model come from: a directory, single files, or the executable itself.
//!
//! What is missing or of the wrong kind is found here, before anything is parsed.
use super::{OpenOptions, bytes::Bytes, stored::Container};
use q4_core::{Code, Error, Result};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

const MODEL: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Files beside the weights with their largest sizes in bytes.
const SIDE: [(&str, usize); 13] = [
    ("config.json", 1 << 20),
    ("generation_config.json", 1 << 20),
    ("hf_quant_config.json", 4 << 20),
    ("tokenizer.json", 64 << 20),
    ("tokenizer_config.json", 4 << 20),
    ("chat_template.jinja", 1 << 20),
    ("chat_template.json", 1 << 20),
    ("special_tokens_map.json", 1 << 20),
    ("added_tokens.json", 4 << 20),
    ("vocab.json", 64 << 20),
    ("merges.txt", 64 << 20),
    ("LICENSE", 1 << 20),
    ("NOTICE", 1 << 20),
];

/// Files that a user may take for weights, and what to do instead.
const REFUSED: [(&str, &str, &str); 5] = [
    ("bin", "a pickle, which runs code when it is read", "save it again with safe_serialization=True"),
    ("pt", "a pickle, which runs code when it is read", "save its tensors with safetensors.torch.save_file"),
    ("pth", "a pickle, which runs code when it is read", "save its tensors with safetensors.torch.save_file"),
    (
        "ckpt",
        "a pickle, which runs code when it is read",
        "save its tensors with safetensors.torch.save_file",
    ),
    ("onnx", "ONNX, which is a graph and no checkpoint", "use the safetensors files that it was made from"),
];

/// The files of a model.
pub(super) enum Source {
    /// A directory, and the weight file in it if one was named.
    Dir { dir: PathBuf, weights: Option<String> },
    /// Files in memory.
    Memory { name: String, files: BTreeMap<String, Bytes> },
}

/// The weight files of a source: either `files`, or those that the index names.
pub(super) struct Weights {
    pub container: Container,
    pub files: Vec<String>,
    pub index: Option<String>,
    /// A file of weights of the usual name beside the index: what that names, or another set.
    pub beside: Option<&'static str>,
}

impl Source {
    /// A directory or a weight file.
    pub fn of_path(path: &Path) -> Result<Self> {
        let facts = std::fs::metadata(path).map_err(|e| Error::io(path, &e))?;
        if facts.is_dir() {
            return Ok(Self::Dir { dir: path.to_owned(), weights: None });
        }
        let name = path.file_name().and_then(|n| n.to_str()).ok_or_else(|| {
            Error::new(Code::Container, format!("{}: the file name is not UTF-8", path.display()))
        })?;
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let weights = Some(name.to_owned());
        if container_of(name).is_some() || name.ends_with(".index.json") {
            return Ok(Self::Dir { dir: parent.to_owned(), weights });
        }
        Err(refusal(&path.display().to_string(), name))
    }

    /// Which files hold the weights.
    pub fn weights(&self) -> Result<Weights> {
        let single = |name: &str, container| Weights {
            container,
            files: vec![name.to_owned()],
            index: None,
            beside: None,
        };
        let sharded = |name: &str| Weights {
            container: Container::Safetensors,
            files: Vec::new(),
            index: Some(name.to_owned()),
            beside: None,
        };
        if let Self::Dir { weights: Some(name), .. } = self {
            return Ok(container_of(name).map_or_else(|| sharded(name), |c| single(name, c)));
        }
        let names = self.names()?;
        let has = |name: &str| names.iter().any(|n| n == name);
        if has(MODEL) && has(INDEX) {
            return Ok(Weights { beside: Some(MODEL), ..sharded(INDEX) });
        }
        if has(MODEL) {
            return Ok(single(MODEL, Container::Safetensors));
        }
        if has(INDEX) {
            return Ok(sharded(INDEX));
        }
        let found: Vec<_> = names.iter().filter_map(|n| container_of(n).map(|c| (n, c))).collect();
        match found.as_slice() {
            [(name, container)] => Ok(single(name, *container)),
            [] => match names.iter().find(|n| refused(n).is_some()) {
                Some(name) => Err(refusal(&self.label(name), name)),
                None => Err(Error::new(Code::ModelMissing, format!("{}: no weights", self.label("")))
                    .need(format!(
                        "{MODEL}, {INDEX} with its shards, or one .safetensors, .gguf or .dat file"
                    ))
                    .have(listed(&names))
                    .fix("name the folder that the model was downloaded or exported to")),
            },
            several => {
                Err(Error::new(Code::Container, format!("{}: which weights are meant?", self.label("")))
                    .need(format!("{MODEL}, {INDEX}, or one weight file"))
                    .have(several.iter().take(4).map(|f| f.0.as_str()).collect::<Vec<_>>().join(", "))
                    .fix("name the file itself"))
            }
        }
    }

    /// A file by its plain name.
    pub fn get(&self, name: &str) -> Result<Option<Bytes>> {
        match self {
            Self::Memory { files, .. } => Ok(files.get(name).cloned()),
            Self::Dir { dir, .. } => optional(&dir.join(name)),
        }
    }

    /// What to call a file of this source in messages; the source itself for an empty name.
    pub fn label(&self, name: &str) -> String {
        match self {
            Self::Dir { dir, .. } if name.is_empty() => dir.display().to_string(),
            Self::Dir { dir, .. } => dir.join(name).display().to_string(),
            Self::Memory { name: source, .. } if name.is_empty() => source.clone(),
            Self::Memory { name: source, .. } => format!("{source}/{name}"),
        }
    }

    /// The files beside the weights, with those that the options name instead of the ones found here.
    pub fn side_files(&self, options: &OpenOptions) -> Result<BTreeMap<String, Bytes>> {
        let mut found = BTreeMap::new();
        for (name, limit) in SIDE {
            let named = match name {
                "config.json" => options.config.as_deref().map(|p| (p, true)),
                "tokenizer.json" => options.tokenizer.as_deref().map(|p| (p, true)),
                "generation_config.json" => options.config.as_deref().map(|p| (p, false)),
                "tokenizer_config.json" | "chat_template.jinja" => {
                    options.tokenizer.as_deref().map(|p| (p, false))
                }
                _ => None,
            };
            let bytes = match named {
                Some((path, is_it)) => {
                    let path = if path.is_dir() {
                        path.join(name)
                    } else if is_it {
                        path.to_owned()
                    } else {
                        path.with_file_name(name)
                    };
                    if is_it { Some(Bytes::map(&path)?) } else { optional(&path)? }
                }
                None => self.get(name)?,
            };
            let Some(bytes) = bytes else { continue };
            if bytes.len() > limit {
                return Err(Error::new(
                    Code::ConfigInvalid,
                    format!("{}: the file is too large", self.label(name)),
                )
                .need(format!("at most {limit} bytes"))
                .have(format!("{} bytes", bytes.len())));
            }
            found.insert(name.to_owned(), bytes);
        }
        Ok(found)
    }

    /// What else is there: neither one of the `weights` files nor one of those beside them. Nothing where a
    /// file was named, for its directory may hold anything.
    pub fn others(&self, weights: &[&str]) -> Result<Vec<String>> {
        if matches!(self, Self::Dir { weights: Some(_), .. }) {
            return Ok(Vec::new());
        }
        let mut names = self.names()?;
        names.retain(|n| {
            n != INDEX && !weights.contains(&n.as_str()) && SIDE.iter().all(|(side, _)| n != side)
        });
        Ok(names)
    }

    fn names(&self) -> Result<Vec<String>> {
        match self {
            Self::Memory { files, .. } => Ok(files.keys().cloned().collect()),
            Self::Dir { dir, .. } => {
                let io = |e: std::io::Error| Error::io(dir, &e);
                let mut names = Vec::new();
                for entry in std::fs::read_dir(dir).map_err(io)? {
                    names.extend(entry.map_err(io)?.file_name().into_string());
                }
                names.sort_unstable();
                Ok(names)
            }
        }
    }
}

fn optional(path: &Path) -> Result<Option<Bytes>> {
    match Bytes::map(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.code() == Code::ModelMissing => Ok(None),
        Err(e) => Err(e),
    }
}

fn container_of(name: &str) -> Option<Container> {
    match extension(name).as_str() {
        "safetensors" => Some(Container::Safetensors),
        "dat" => Some(Container::Dat),
        "gguf" => Some(Container::Gguf),
        _ => None,
    }
}

fn refused(name: &str) -> Option<(&'static str, &'static str)> {
    let extension = extension(name);
    REFUSED.iter().find(|r| r.0 == extension).map(|r| (r.1, r.2))
}

/// Some of what a folder holds.
fn listed(names: &[String]) -> String {
    match names.len() {
        0 => "an empty folder".to_owned(),
        n if n > 4 => format!("{}, and {} more", names[..4].join(", "), n - 4),
        _ => names.join(", "),
    }
}

fn refusal(label: &str, name: &str) -> Error {
    let (have, fix) =
        refused(name).unwrap_or(("another kind of file", "name a model directory or a weight file"));
    Error::new(Code::Container, format!("{label}: not a checkpoint that can be read"))
        .need(".safetensors, .gguf or .dat")
        .have(have)
        .fix(fix)
}

fn extension(name: &str) -> String {
    Path::new(name).extension().map(|e| e.to_string_lossy().to_ascii_lowercase()).unwrap_or_default()
}
