//! Read-only bytes that clone for free: a mapped file, a constant of the executable, or a buffer.
//!
//! Checkpoints are larger than memory should be asked for twice, so files are mapped and never copied whole.
use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;
use q4_core::{Code, Error, Result};
use std::{
    fmt,
    fs::File,
    ops::{Deref, Range},
    path::Path,
    sync::Arc,
};

/// Shared read-only bytes.
///
/// A mapped file must not shrink while it is in use: the operating system ends a process that reads beyond
/// the new end. Replace a checkpoint by renaming a new file over it, never by truncating it in place.
#[derive(Clone)]
pub struct Bytes(Owner);

#[derive(Clone)]
enum Owner {
    Mapped(Arc<Mmap>),
    Static(&'static [u8]),
    Shared(Arc<Vec<u8>>),
}

impl Bytes {
    /// Maps a regular file; directories, pipes and devices are refused, for opening some of them would block.
    ///
    /// # Errors
    /// [`Code::ModelMissing`] without the file, [`Code::Container`] for what is no regular file or changes
    /// while it is opened, [`Code::Io`].
    pub fn map(path: &Path) -> Result<Self> {
        let io = |e: std::io::Error| Error::io(path, &e);
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(Error::new(Code::Container, path.display().to_string())
                .need("a regular file")
                .have("something else"));
        }
        let file = File::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        if len == 0 {
            return Ok(Self::from(&[][..]));
        }
        // SAFETY: the map is read-only and private to this owner; that the file must not shrink is documented
        // above.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let now = file.metadata().map_err(io)?.len();
        if map.len() as u64 != len || now != len {
            return Err(Error::new(
                Code::Container,
                format!("{}: changed while it was opened", path.display()),
            )
            .need(format!("{len} bytes"))
            .have(format!("{now} bytes")));
        }
        Ok(Self(Owner::Mapped(Arc::new(map))))
    }
}

/// What the system maps around a page that is touched, at most: a whole large page, where its cache of the
/// file has one.
const AROUND: usize = 2 << 20;

impl Bytes {
    /// Whether reading them maps pages of a file, which [`release`](Self::release) gives back.
    pub fn is_mapped(&self) -> bool {
        matches!(self.0, Owner::Mapped(_))
    }

    /// Bytes of memory that reading `count` places far apart maps.
    pub fn mapped_by(count: usize) -> usize {
        count * AROUND
    }

    /// Lets go of the pages of a mapped file, and of those that came with them; whoever reads them again gets
    /// the same bytes from the file.
    #[cfg(unix)]
    pub fn release(&self, range: Range<usize>) {
        if let Owner::Mapped(map) = &self.0 {
            let start = range.start / AROUND * AROUND;
            let range = start..range.end.next_multiple_of(AROUND).min(map.len());
            // SAFETY: the map is read-only, so its pages hold what the file holds and nothing is lost with
            // them.
            let advised =
                unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
            if let Err(e) = advised {
                tracing::debug!("pages of a mapped file are kept: {e}");
            }
        }
    }
    /// Nothing to give back here: pages of a mapped file stay until they are needed elsewhere.
    #[cfg(not(unix))]
    pub fn release(&self, _: Range<usize>) {}
}

impl From<&'static [u8]> for Bytes {
    fn from(bytes: &'static [u8]) -> Self {
        Self(Owner::Static(bytes))
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Owner::Shared(Arc::new(bytes)))
    }
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Owner::Mapped(map) => map,
            Owner::Static(bytes) => bytes,
            Owner::Shared(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}
