//! Models by their Hub ids: those that other programs have downloaded are found where they lie; nothing is
//! downloaded.
use q4_core::{Code, Error, Result};
use std::borrow::Cow;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The model that `name` means: a path that exists is itself, `OWNER/NAME` is a snapshot in the local cache
/// of the Hub, and anything else stays a path. [`Code::ModelMissing`] for an id that is not in the cache.
pub fn located(name: &Path) -> Result<Cow<'_, Path>> {
    let Some(id) = name.to_str().and_then(id).filter(|_| !name.exists()) else {
        return Ok(Cow::Borrowed(name));
    };
    let Some(cache) = cache(|name| std::env::var_os(name).filter(|v| !v.is_empty()), std::env::home_dir())
    else {
        return Ok(Cow::Borrowed(name));
    };
    let found = snapshot(&cache, id);
    // In a folder that exists it is rather a path with a slip in it.
    let is_path = name.parent().is_some_and(Path::is_dir);
    if is_path && found.is_err() { Ok(Cow::Borrowed(name)) } else { found.map(Cow::Owned) }
}

/// What looks like an id: an owner and a name. Paths that begin with a point or a slash do not.
fn id(text: &str) -> Option<&str> {
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-'])
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
    };
    let is_file = [".safetensors", ".dat", ".json"].iter().any(|end| text.ends_with(end));
    let (owner, name) = text.split_once('/')?;
    (is_part(owner) && is_part(name) && !is_file).then_some(text)
}

/// Where huggingface_hub keeps what it has downloaded.
fn cache(variable: impl Fn(&str) -> Option<OsString>, home: Option<PathBuf>) -> Option<PathBuf> {
    if let Some(own) = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE")) {
        return Some(own.into());
    }
    let base = variable("HF_HOME").map(PathBuf::from).or_else(|| {
        let cache = variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(home?.join(".cache")))?;
        Some(cache.join("huggingface"))
    })?;
    Some(base.join("hub"))
}

/// The newest download of `id`.
fn snapshot(cache: &Path, id: &str) -> Result<PathBuf> {
    let missing = |have: String| {
        Err(Error::new(
            Code::ModelMissing,
            format!("{id}: no such directory, and no such model in the local cache"),
        )
        .need(format!("a path, or a model of the Hub in {}", cache.display()))
        .have(have)
        .fix(format!(
            "a folder: see that it was written, and where you stand; a model of the Hub: hf download {id}, then the same \
             command; HF_HOME says where another cache is"
        )))
    };
    let folder = cache.join(format!("models--{}", id.replace('/', "--")));
    if !folder.is_dir() {
        return missing(format!("no {}", folder.display()));
    }
    let main = folder.join("refs").join("main");
    let Ok(commit) = std::fs::read_to_string(&main) else {
        return missing(format!("no {}: its main branch was never downloaded", main.display()));
    };
    let snapshot = folder.join("snapshots").join(commit.trim());
    // A name of a folder and nothing else, whoever wrote the file.
    let is_plain = commit.trim().chars().all(|c| c.is_ascii_alphanumeric()) && !commit.trim().is_empty();
    if !is_plain || !snapshot.is_dir() {
        return missing(format!("no snapshot for {}", main.display()));
    }
    Ok(snapshot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_from_paths() {
        for yes in ["Qwen/Qwen3-0.6B", "a/b", "nvidia/Qwen3.6-27B-NVFP4"] {
            assert_eq!(id(yes), Some(yes));
        }
        for no in [
            "demo",
            "./a",
            "/a/b",
            "a/b/c",
            "../b",
            "a/",
            "/a",
            "a b/c",
            "models/x.dat",
            "a/b.safetensors",
            "-a/b",
        ] {
            assert_eq!(id(no), None, "{no}");
        }
    }

    #[test]
    fn the_cache_is_where_huggingface_hub_has_it() {
        let home = || Some(PathBuf::from("/home/u"));
        let found = |set: &[(&str, &str)]| {
            let variable = |name: &str| set.iter().find(|v| v.0 == name).map(|v| OsString::from(v.1));
            cache(variable, home()).expect("somewhere").display().to_string()
        };
        assert_eq!(found(&[]), "/home/u/.cache/huggingface/hub");
        assert_eq!(found(&[("XDG_CACHE_HOME", "/c")]), "/c/huggingface/hub");
        assert_eq!(found(&[("HF_HOME", "/h"), ("XDG_CACHE_HOME", "/c")]), "/h/hub");
        assert_eq!(found(&[("HF_HUB_CACHE", "/x"), ("HF_HOME", "/h")]), "/x");
    }
}
