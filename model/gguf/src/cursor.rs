//! A place in the file. Whatever is taken was there: a length is compared with what is left before it is
//! believed.
use q4_core::{Code, Error, Result};

/// Reads forward. Errors are [`Code::Container`] and name the byte.
#[derive(Clone, Copy)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes before it.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Bytes behind it.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub fn take(&mut self, length: u64, what: &str) -> Result<&'a [u8]> {
        let Some(n) = usize::try_from(length).ok().filter(|n| *n <= self.left()) else {
            return Err(self
                .damaged(&format!("the file ends inside {what}"))
                .need(format!("{length} bytes"))
                .have(format!("{} bytes", self.left()))
                .fix("copy or download the file again"));
        };
        self.at += n;
        Ok(&self.bytes[self.at - n..self.at])
    }

    pub fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A number of things, each of which takes at least `least` bytes of the file.
    pub fn count(&mut self, least: usize, what: &str) -> Result<usize> {
        let count = self.u64(what)?;
        let most = self.left() / least;
        match usize::try_from(count).ok().filter(|n| *n <= most) {
            Some(count) => Ok(count),
            None => Err(self
                .damaged(what)
                .need(format!("at most {most}, for which {} bytes are left", self.left()))
                .have(count.to_string())
                .fix("copy or download the file again")),
        }
    }

    /// A text behind its length.
    pub fn text(&mut self, what: &str) -> Result<&'a str> {
        let length = self.u64(what)?;
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|e| self.damaged(what).need("UTF-8").have(e.to_string()))
    }

    /// A text that names something.
    pub fn name(&mut self, most: usize, what: &str) -> Result<&'a str> {
        let name = self.text(what)?;
        if name.is_empty() || name.len() > most {
            return Err(self.damaged(what).need(format!("1 to {most} bytes")).have(name.len().to_string()));
        }
        Ok(name)
    }

    pub fn damaged(&self, what: &str) -> Error {
        Error::new(Code::Container, format!("at byte {}: {what}", self.at))
    }
}

/// A text of the file, short enough for a message.
pub(crate) fn brief(text: &str) -> String {
    if text.chars().nth(80).is_none() {
        text.to_owned()
    } else {
        text.chars().take(77).chain("...".chars()).collect()
    }
}
