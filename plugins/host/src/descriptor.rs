//! Who a library says it is: constant bytes, parsed without running or trusting anything.
use q4_core::{Reject, RejectCode};
use q4_plugin_abi::{ABI_MAJOR, ABI_MINOR, MAGIC, Q4Descriptor};
use std::mem::{offset_of, size_of};

/// The descriptor of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Backend name.
    pub name: String,
    /// Version of the code that computes.
    pub version: String,
    /// Who made it.
    pub vendor: String,
    /// Major and minor of the contract it was built for.
    pub abi: (u32, u32),
}

impl Descriptor {
    /// Bytes of a descriptor.
    pub const BYTES: usize = size_of::<Q4Descriptor>();

    /// Parses the bytes of the symbol. Its first 24 bytes are the same in every major.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, Reject> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mismatch = |need: String, have: String| Reject::new(RejectCode::AbiMismatch, need, have);
        if bytes[..8] != MAGIC {
            return Err(mismatch(
                format!("a descriptor that starts with `{}`", MAGIC.escape_ascii()),
                format!("`{}`", bytes[..8].escape_ascii()),
            ));
        }
        let abi = (word(offset_of!(Q4Descriptor, abi_major)), word(offset_of!(Q4Descriptor, abi_minor)));
        if abi.0 != ABI_MAJOR {
            let code = if abi.0 < ABI_MAJOR { RejectCode::LibraryTooOld } else { RejectCode::AbiMismatch };
            return Err(Reject::new(
                code,
                format!("interface {ABI_MAJOR}.x (this program speaks {ABI_MAJOR}.{ABI_MINOR})"),
                format!("interface {}.{}", abi.0, abi.1),
            ));
        }
        let size = word(offset_of!(Q4Descriptor, descriptor_size)) as usize;
        if size < Self::BYTES {
            return Err(mismatch(
                format!("a descriptor of at least {} bytes", Self::BYTES),
                format!("{size}"),
            ));
        }
        let text = |at: usize, len: usize, what: &str| {
            let field = &bytes[at..at + len];
            let end = field.iter().position(|b| *b == 0);
            let text = end.and_then(|end| std::str::from_utf8(&field[..end]).ok());
            match text.filter(|t| !t.chars().any(char::is_control)) {
                Some(text) => Ok(text.to_owned()),
                None => Err(mismatch(
                    format!("a {what} in UTF-8 that ends"),
                    format!("`{}`", field.escape_ascii()),
                )),
            }
        };
        let name = text(offset_of!(Q4Descriptor, name), 64, "name")?;
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.chars().all(plain) {
            return Err(mismatch("a name of a-z, 0-9 and -, a letter first".into(), format!("`{name}`")));
        }
        Ok(Self {
            name,
            version: text(offset_of!(Q4Descriptor, version), 32, "version")?,
            vendor: text(offset_of!(Q4Descriptor, vendor), 64, "vendor")?,
            abi,
        })
    }
}
