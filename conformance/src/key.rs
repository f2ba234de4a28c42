//! What tells a file that q4 wrote from one that anybody wrote: HMAC-SHA-256 under a random key in the
//! owner's folder.
//!
//! It proves that whoever wrote the file could read the key. Code that runs as the owner can: a library while
//! it is judged, and one that is certified and loaded. Against those it is no fence; docs/threat-model.md
//! says what is.
use crate::own;
use hmac::{Hmac, Mac};
use q4_core::{Code, Error, Result};
use serde::Serialize;
use serde_json::Value;
use sha2::Sha256;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Field of a sealed document that holds the code of all others, in hexadecimal.
const SEAL: &str = "hmac_sha256";
const BYTES: usize = 32;

/// The key of one owner.
#[derive(Clone)]
pub struct Key([u8; BYTES]);

impl Key {
    /// Where it lies under the folder that q4 keeps for a user.
    pub fn path(data: &Path) -> PathBuf {
        data.join("key")
    }

    /// The key under `data`; `None` when there is none yet.
    ///
    /// # Errors
    /// What is wrong with it: it can be read or written by others, or is no key.
    pub fn open(data: &Path) -> Result<Option<Self>, String> {
        let path = Self::path(data);
        let wrong = |what: &str| {
            let fix = "remove it, and q4 conformance makes a new one; certificates are void then";
            format!("{}: {what}; {fix}", path.display())
        };
        match fs::symlink_metadata(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(wrong(&e.to_string())),
            Ok(meta) if !is_private(&meta) => {
                return Err(wrong("not a regular file that only you can read (mode 0600)"));
            }
            Ok(_) => {}
        }
        let bytes = own::read(&path).map_err(|e| wrong(&e.to_string()))?;
        let count = bytes.len();
        let key =
            bytes.try_into().map_err(|_| wrong(&format!("a key has {BYTES} bytes, this has {count}")))?;
        Ok(Some(Self(key)))
    }

    /// The key under `data`, made if there is none. Two processes that make one at a time get the same.
    ///
    /// # Errors
    /// `Io`; a key that is there and wrong is not replaced.
    pub fn open_or_make(data: &Path) -> Result<Self> {
        let open = || Self::open(data).map_err(|why| Error::new(Code::Io, why));
        if let Some(key) = open()? {
            return Ok(key);
        }
        let mut bytes = [0; BYTES];
        getrandom::fill(&mut bytes)
            .map_err(|e| Error::new(Code::Io, format!("random bytes for a key: {e}")))?;
        own::write_new(&Self::path(data), &bytes)?;
        open()?
            .ok_or_else(|| Error::new(Code::Io, format!("{}: it is gone again", Self::path(data).display())))
    }

    /// `document`, a structure with named fields, as sealed JSON.
    ///
    /// # Errors
    /// `Internal` when it is none.
    pub fn seal(&self, document: &impl Serialize) -> Result<String> {
        let wrong = |what: String| Error::new(Code::Internal, format!("a document to seal: {what}"));
        let mut value = serde_json::to_value(document).map_err(|e| wrong(e.to_string()))?;
        let code = format!("{:x}", self.code(&value).finalize().into_bytes());
        let fields = value.as_object_mut().ok_or_else(|| wrong("no fields".into()))?;
        fields.insert(SEAL.into(), code.into());
        serde_json::to_string_pretty(&value).map(|text| text + "\n").map_err(|e| wrong(e.to_string()))
    }

    /// Whether every value of `sealed` is as it was when this key sealed it, whatever the order and the white
    /// space.
    pub fn sealed(&self, sealed: &Value) -> bool {
        let mut value = sealed.clone();
        let Some(Value::String(code)) = value.as_object_mut().and_then(|fields| fields.shift_remove(SEAL))
        else {
            return false;
        };
        let code: Option<Vec<u8>> = (0..code.len())
            .step_by(2)
            .map(|at| code.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok()))
            .collect();
        code.is_some_and(|code| self.code(&value).verify_slice(&code).is_ok())
    }

    fn code(&self, value: &Value) -> Hmac<Sha256> {
        // A key shorter than a block of the hash is followed by zeros: RFC 2104.
        let mut block = [0; 64];
        block[..BYTES].copy_from_slice(&self.0);
        let mut code = Hmac::new(&block.into());
        let mut text = String::new();
        canonical(value, &mut text);
        code.update(text.as_bytes());
        code
    }
}

/// One text for one value: no white space, fields sorted.
fn canonical(value: &Value, out: &mut String) {
    let list = |out: &mut String, i: usize| {
        if i > 0 {
            out.push(',');
        }
    };
    match value {
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                list(out, i);
                canonical(item, out);
            }
            out.push(']');
        }
        Value::Object(fields) => {
            let mut names: Vec<_> = fields.keys().collect();
            names.sort();
            out.push('{');
            for (i, name) in names.into_iter().enumerate() {
                list(out, i);
                out.push_str(&Value::from(name.as_str()).to_string());
                out.push(':');
                canonical(&fields[name], out);
            }
            out.push('}');
        }
        plain => out.push_str(&plain.to_string()),
    }
}

#[cfg(unix)]
fn is_private(meta: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    // Without /proc, the mode has to do.
    let is_own = fs::metadata("/proc/self").map_or(true, |process| process.uid() == meta.uid());
    meta.is_file() && meta.mode() & 0o077 == 0 && is_own
}

#[cfg(not(unix))]
fn is_private(meta: &fs::Metadata) -> bool {
    meta.is_file()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_code_is_hmac_sha256_of_the_sorted_text() {
        // echo -n '{"a":[1,"x"],"b":{"c":null,"d":-2}}' | openssl dgst -sha256 -mac HMAC -macopt
        // hexkey:0b..0b (32 bytes)
        let key = Key([0x0b; BYTES]);
        let text = key.seal(&json!({"b": {"d": -2, "c": null}, "a": [1, "x"]})).expect("sealed");
        let sealed: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(sealed[SEAL], "587b09e0117584f00be73e32356f5461191976aafcb472e7ceea1c3fce5ae685");
        assert!(key.sealed(&sealed));
    }

    #[test]
    fn every_value_and_the_key_are_sealed() {
        let key = Key([7; BYTES]);
        let text =
            key.seal(&json!({"schema": "q4.any/1", "list": [1, 2], "deep": {"x": "y"}})).expect("sealed");
        let whole: Value = serde_json::from_str(&text).expect("JSON");
        assert!(key.sealed(&whole));
        assert!(!Key([8; BYTES]).sealed(&whole), "another key");
        for (pointer, other) in [
            ("/schema", json!("q4.any/2")),
            ("/list", json!([2, 1])),
            ("/list/0", json!("1")),
            ("/deep/x", json!("z")),
        ] {
            let mut value = whole.clone();
            *value.pointer_mut(pointer).expect(pointer) = other;
            assert!(!key.sealed(&value), "{pointer}");
        }
        let mut more = whole.clone();
        more["more"] = json!(null);
        assert!(!key.sealed(&more), "one field more");
        for code in [json!(null), json!(""), json!("0"), json!("é"), json!("ab")] {
            let mut value = whole.clone();
            value[SEAL] = code;
            assert!(!key.sealed(&value));
        }
        assert!(!key.sealed(&json!([])) && !key.sealed(&json!({})));
    }

    #[test]
    fn two_that_make_a_key_make_one() {
        let dir = tempfile::tempdir().expect("a folder");
        let data = &dir.path().join("q4");
        assert!(Key::open(data).expect("none yet").is_none());
        let keys: Vec<_> = std::thread::scope(|s| {
            let all: Vec<_> = (0..8).map(|_| s.spawn(move || Key::open_or_make(data))).collect();
            all.into_iter().map(|t| t.join().expect("no panic").expect("a key").0).collect()
        });
        assert!(keys.iter().all(|k| *k == keys[0]) && keys[0] != [0; BYTES]);
    }

    #[cfg(unix)]
    #[test]
    fn a_key_that_others_may_read_is_none() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = tempfile::tempdir().expect("a folder");
        let path = Key::path(dir.path());
        let refused = |says: &str| {
            let why = Key::open(dir.path()).err().unwrap_or_else(|| panic!("{says}"));
            assert!(why.contains(says) && why.contains("remove it"), "{why}");
            assert!(Key::open_or_make(dir.path()).is_err());
            fs::remove_file(&path).expect("removed");
        };
        Key::open_or_make(dir.path()).expect("a key");
        assert_eq!(fs::metadata(&path).expect("it is there").permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("opened");
        refused("only you can read");
        own::write(&path, &[0; 31]).expect("written");
        refused("32 bytes, this has 31");
        symlink("/dev/zero", &path).expect("a link");
        refused("only you can read");
        assert!(
            std::process::Command::new("mkfifo")
                .arg("-m")
                .arg("600")
                .arg(&path)
                .status()
                .expect("mkfifo")
                .success()
        );
        refused("only you can read");
    }
}
