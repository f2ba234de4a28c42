//! Texts of failures across the boundary: written into the caller's buffer, read back from it, never owned by
//! both.
use q4_core::Error;
use q4_plugin_abi::{Prefixed, Q4Error, Q4Str};
use std::borrow::Cow;
use std::mem::size_of;

/// One line of an error, without its code: that crosses as a status.
pub fn line(e: &Error) -> String {
    let parts: Vec<String> = e
        .parts()
        .map(|(name, text)| if name == "what" { text.to_owned() } else { format!("{name} {text}") })
        .collect();
    parts.join("; ")
}

/// Writes `text` into the caller's buffer, cut at a character, and its whole length beside it.
///
/// # Safety
/// `err` is NULL or addresses a [`Q4Error`] whose `ptr` is NULL or has `cap` writable bytes.
pub unsafe fn write(err: *mut Q4Error, text: &str, native_code: i64) {
    // SAFETY: by the contract.
    let Some(given) = (unsafe { q4_plugin_abi::read(err) }) else { return };
    let mut fits = text.len().min(given.cap);
    while !text.is_char_boundary(fits) {
        fits -= 1;
    }
    if !given.ptr.is_null() {
        // SAFETY: `fits` is at most `cap`, and the caller's buffer is not our text.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), given.ptr, fits) };
    }
    // SAFETY: `read` found all fields of the first version.
    unsafe {
        (*err).len = text.len();
        (*err).native_code = native_code;
    }
}

/// Room for the text of one failure, on the caller's stack.
pub struct Message([u8; 512]);

impl Message {
    /// Empty.
    #[allow(clippy::new_without_default)] // half a kilobyte that should be seen to be made
    pub fn new() -> Self {
        Self([0; 512])
    }
    /// The buffer as a call takes it.
    pub fn raw(&mut self) -> Q4Error {
        let (ptr, cap) = (self.0.as_mut_ptr(), self.0.len());
        Q4Error { struct_size: size_of::<Q4Error>(), ptr, cap, len: 0, native_code: 0 }
    }
    /// What was written.
    pub fn text(&self, raw: &Q4Error) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.0[..raw.len.min(self.0.len())])
    }
}

/// A borrowed text of the other side, at most `most` bytes of it, with what is not UTF-8 replaced.
///
/// # Safety
/// `text.ptr` is NULL or has `text.len` readable bytes for `'a`.
pub unsafe fn text<'a>(text: Q4Str, most: usize) -> Cow<'a, str> {
    if text.ptr.is_null() {
        return Cow::Borrowed("");
    }
    // SAFETY: forwarded to the caller.
    String::from_utf8_lossy(unsafe { std::slice::from_raw_parts(text.ptr, text.len.min(most)) })
}

const _: () = assert!(<Q4Error as Prefixed>::MIN == size_of::<Q4Error>());

#[cfg(test)]
mod tests {
    use super::*;
    use q4_core::Code;

    #[test]
    fn a_long_text_is_cut_at_a_character_and_its_length_is_told() {
        let mut room = [0xffu8; 8];
        let mut err = Q4Error {
            struct_size: size_of::<Q4Error>(),
            ptr: room.as_mut_ptr(),
            cap: 6,
            len: 0,
            native_code: 0,
        };
        // SAFETY: a live buffer of at least `cap` bytes.
        unsafe { write(&mut err, "abcdeéf", 7) };
        assert_eq!(
            (&room[..5], room[5], room[7], err.len, err.native_code),
            (&b"abcde"[..], 0xff, 0xff, 8, 7)
        );
        err.struct_size = 8;
        // SAFETY: as above.
        unsafe { write(&mut err, "xyz", 0) };
        assert_eq!((room[0], err.len), (b'a', 8), "too short a structure is left alone");
        // SAFETY: NULL is allowed.
        unsafe { write(std::ptr::null_mut(), "xyz", 0) };
    }

    #[test]
    fn what_crosses_is_one_line() {
        let e = Error::new(Code::ShapeMismatch, "operand").need("16").have("15");
        assert_eq!(line(&e), "operand; need 16; have 15");
    }
}
