//! Keys that open the door. They may be exchanged while requests are served.
use q4_core::{Code, Error, Result};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use subtle::{Choice, ConstantTimeEq};

/// Keys, one of which a request must have; none lets everybody in. A clone is the same keys.
#[derive(Clone, Default)]
pub struct Keys(Arc<RwLock<Vec<String>>>);

impl Keys {
    /// These keys.
    ///
    /// # Errors
    /// [`Code::Usage`] for a key that everybody or nobody could send.
    pub fn new(keys: Vec<String>) -> Result<Self> {
        check(&keys)?;
        Ok(Self(Arc::new(RwLock::new(keys))))
    }

    /// From the next request on it is these; requests in flight go on.
    ///
    /// # Errors
    /// [`Code::Usage`] as [`new`](Self::new), and for none at all, which would let everybody in; then the
    /// keys stay.
    pub fn replace(&self, keys: Vec<String>) -> Result<()> {
        check(&keys)?;
        if keys.is_empty() {
            return Err(Error::new(Code::Usage, "API keys").need("at least one").have("none"));
        }
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
        Ok(())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether everybody is let in.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether one of `given` is a key. Compares with every key to the end, so that the time says nothing
    /// about any of them.
    pub(crate) fn admit<'a>(&self, given: impl IntoIterator<Item = &'a [u8]>) -> bool {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let matches =
            |given: &[u8]| keys.iter().fold(Choice::from(0), |any, key| any | key.as_bytes().ct_eq(given));
        given.into_iter().fold(Choice::from(0), |any, given| any | matches(given)).into()
    }
}

/// Says how many there are and none of them.
impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.len())
    }
}

fn check(keys: &[String]) -> Result<()> {
    match keys.iter().any(|key| key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic())) {
        true => Err(Error::new(Code::Usage, "API key: not usable").need("printable ASCII without spaces")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_exchange_leaves_the_keys_as_they_were() {
        let keys = Keys::new(vec!["old".to_owned()]).expect("usable");
        for bad in [&[][..], &["new", ""], &["new", "a b"], &["ключ"]] {
            let bad = bad.iter().map(|key| (*key).to_owned()).collect();
            assert_eq!(keys.replace(bad).expect_err("refused").code(), Code::Usage);
            assert!(keys.admit([&b"old"[..]]) && !keys.admit([&b"new"[..]]));
        }
        keys.clone().replace(vec!["new".to_owned(), "other".to_owned()]).expect("usable");
        assert!(keys.admit([&b"no"[..], b"other"]) && !keys.admit([&b"old"[..]]));
        assert_eq!(format!("{keys:?}"), "2 keys");
    }
}
