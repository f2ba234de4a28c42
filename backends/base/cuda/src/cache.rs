//! Machine code on disk, by what it was made from: a second start compiles nothing.
use crate::{Arch, Source};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Machine code of a source.
pub(crate) struct Image {
    pub bytes: Vec<u8>,
    pub from_cache: bool,
    pub path: Option<PathBuf>,
}

/// Folders with images: one to write, others to read.
#[derive(Clone, Debug)]
pub struct Cache {
    own: Option<PathBuf>,
    prebuilt: Vec<PathBuf>,
}

/// What an image is made from.
pub(crate) struct Key {
    pub name: &'static str,
    pub arch: String,
    hash: String,
}

impl Key {
    pub fn new(source: &Source, arch: &Arch, options: &[&str]) -> Self {
        let mut h = Sha256::new();
        h.update(source.whole());
        for o in options.iter().chain([&arch.option().as_str()]) {
            h.update([0]);
            h.update(o);
        }
        let hash = h.finalize().iter().take(12).map(|b| format!("{b:02x}")).collect();
        Self { name: source.name, arch: arch.target(), hash }
    }
    /// `gemv-sm_90a-0123456789abcdef01234567`: the start of every name of this image.
    pub fn prefix(&self) -> String {
        format!("{}-{}-{}", self.name, self.arch, self.hash)
    }
}

/// One file of the cache.
#[derive(Clone, Debug)]
pub struct CachedImage {
    /// File.
    pub path: PathBuf,
    /// Bytes.
    pub bytes: u64,
}

impl Cache {
    /// `$Q4_CUBIN_CACHE`, else `q4/cubin` in the user's cache folder; prebuilt images in `cubin` beside the
    /// executable, and in the folders of `$Q4_CUBINS`.
    pub fn of_user() -> Self {
        let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        let own = absolute("Q4_CUBIN_CACHE").or_else(|| {
            let of_user = || match cfg!(windows) {
                true => absolute("LOCALAPPDATA"),
                false => absolute("HOME").map(|h| h.join(".cache")),
            };
            Some(absolute("XDG_CACHE_HOME").or_else(of_user)?.join("q4").join("cubin"))
        });
        let named = std::env::var_os("Q4_CUBINS").unwrap_or_default();
        let mut prebuilt: Vec<_> = std::env::split_paths(&named).filter(|p| p.is_absolute()).collect();
        prebuilt.extend(std::env::current_exe().ok().and_then(|e| Some(e.parent()?.join("cubin"))));
        Self { own, prebuilt }
    }

    /// A cache in one folder, for tests and tools.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { own: Some(folder.into()), prebuilt: Vec::new() }
    }

    /// The folder images are written to.
    pub fn folder(&self) -> Option<&Path> {
        self.own.as_deref()
    }

    /// Images it holds.
    pub fn images(&self) -> Vec<CachedImage> {
        let Some(entries) = self.own.as_ref().and_then(|d| std::fs::read_dir(d).ok()) else {
            return Vec::new();
        };
        let mut all: Vec<_> = entries
            .flatten()
            .filter(|e| e.path().extension().is_some_and(|x| x == "cubin"))
            .filter_map(|e| Some(CachedImage { path: e.path(), bytes: e.metadata().ok()?.len() }))
            .collect();
        all.sort_by(|a, b| a.path.cmp(&b.path));
        all
    }

    /// No image at all, neither made here nor prebuilt.
    pub fn is_empty(&self) -> bool {
        self.prebuilt.iter().chain(&self.own).all(|dir| {
            let mut files = std::fs::read_dir(dir).into_iter().flatten().flatten();
            !files.any(|e| e.path().extension().is_some_and(|x| x == "cubin"))
        })
    }

    pub(crate) fn read(&self, key: &Key, nvrtc: u32) -> Option<(Vec<u8>, PathBuf)> {
        let path = self.path(key, nvrtc)?;
        Some((checked(std::fs::read(&path).ok()?)?, path))
    }

    /// An image of any compiler: prebuilt, or cached when there still was one.
    pub(crate) fn any(&self, key: &Key) -> Option<(Vec<u8>, PathBuf)> {
        let prefix = key.prefix();
        self.prebuilt.iter().chain(&self.own).find_map(|dir| {
            let mut files: Vec<_> = std::fs::read_dir(dir).ok()?.flatten().map(|e| e.path()).collect();
            files.sort();
            files.into_iter().rev().find_map(|p| {
                let name = p.file_name()?.to_str()?;
                let is_it = name.starts_with(&prefix) && name.ends_with(".cubin");
                is_it.then(|| Some((checked(std::fs::read(&p).ok()?)?, p.clone())))?
            })
        })
    }

    /// Written beside and renamed: a reader never sees half an image.
    pub(crate) fn write(&self, key: &Key, nvrtc: u32, image: &[u8]) -> std::io::Result<PathBuf> {
        let path = self.path(key, nvrtc).ok_or(std::io::ErrorKind::NotFound)?;
        let dir = path.parent().ok_or(std::io::ErrorKind::NotFound)?;
        std::fs::create_dir_all(dir)?;
        let beside = dir.join(format!(".{}.{}", key.prefix(), std::process::id()));
        let mut file = std::fs::File::create(&beside)?;
        file.write_all(image)?;
        file.write_all(&Sha256::digest(image))?;
        file.sync_all()?;
        std::fs::rename(&beside, &path)?;
        Ok(path)
    }

    pub(crate) fn forget(&self, image: &Image) {
        if let Some(p) = &image.path {
            let _ = std::fs::remove_file(p); // the next read misses or finds it damaged again
        }
    }

    pub(crate) fn places(&self) -> String {
        let all: Vec<_> = self.prebuilt.iter().chain(&self.own).map(|p| p.display().to_string()).collect();
        all.join(", ")
    }

    fn path(&self, key: &Key, nvrtc: u32) -> Option<PathBuf> {
        Some(self.own.as_ref()?.join(format!("{}-nvrtc{nvrtc}.cubin", key.prefix())))
    }
}

/// Our files end with the SHA-256 of what is before; a file without it is not ours or is damaged.
fn checked(mut file: Vec<u8>) -> Option<Vec<u8>> {
    let at = file.len().checked_sub(32)?;
    let ok = Sha256::digest(&file[..at]).as_slice() == &file[at..];
    file.truncate(at);
    ok.then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ARCHS, HOPPER};

    const A: Source = Source { name: "a", text: "extern \"C\" __global__ void a() {}", files: &[] };

    #[test]
    fn images_come_back_and_damage_is_noticed() -> std::io::Result<()> {
        let dir = tempfile::tempdir()?;
        let cache = Cache::at(dir.path().join("new"));
        let key = Key::new(&A, &HOPPER, &["-DX=1"]);
        let bytes = |found: Option<(Vec<u8>, PathBuf)>| found.map(|f| f.0);
        assert_eq!(bytes(cache.read(&key, 13000)), None);
        let path = cache.write(&key, 13000, b"image")?;
        assert_eq!(bytes(cache.read(&key, 13000)).as_deref(), Some(&b"image"[..]));
        assert_eq!(cache.images().len(), 1);
        assert_eq!(bytes(cache.read(&key, 13010)), None, "another compiler");
        assert_eq!(bytes(cache.any(&key)).as_deref(), Some(&b"image"[..]));
        assert_eq!(bytes(cache.read(&Key::new(&A, &HOPPER, &["-DX=2"]), 13000)), None, "other options");
        assert_eq!(bytes(cache.read(&Key::new(&A, &ARCHS[0], &["-DX=1"]), 13000)), None, "another device");
        let mut damaged = std::fs::read(&path)?;
        damaged[2] ^= 1;
        std::fs::write(&path, damaged)?;
        assert_eq!(bytes(cache.read(&key, 13000)), None);
        Ok(())
    }
}
