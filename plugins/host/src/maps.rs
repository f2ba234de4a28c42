//! What of this process can be read and run: a pointer of a library is looked up before it is followed,
//! because a wrong one would end the process instead of the library's candidacy.

use std::path::PathBuf;

/// The kernel's list of mappings; without one, every pointer that is not NULL passes.
pub struct Maps(Option<Vec<u8>>);

/// One line of the list.
#[derive(Clone, Copy)]
pub(crate) struct Mapping<'m> {
    pub start: usize,
    pub end: usize,
    pub is_readable: bool,
    pub is_code: bool,
    /// What is mapped: the path of a file, or another name.
    pub name: &'m [u8],
}

/// The lines of such a list. Allocates nothing: a process that crashed asks, too.
pub(crate) fn mappings(list: &[u8]) -> impl Iterator<Item = Mapping<'_>> {
    list.split(|b| *b == b'\n').filter_map(|line| {
        let (start, rest) = hex(line)?;
        let (end, rest) = hex(rest.strip_prefix(b"-")?)?;
        let (is_readable, is_code) = (rest.get(1) == Some(&b'r'), rest.get(3) == Some(&b'x'));
        // Permissions, offset, device, inode; then blanks and the name.
        let name = rest.split(|b| *b == b' ').skip(5).find(|word| !word.is_empty());
        let at = name.map_or(rest.len(), |name| name.as_ptr() as usize - rest.as_ptr() as usize);
        Some(Mapping { start, end, is_readable, is_code, name: &rest[at..] })
    })
}

fn hex(text: &[u8]) -> Option<(usize, &[u8])> {
    let len = text.iter().take_while(|b| b.is_ascii_hexdigit()).count();
    let digit = |value: usize, b: &u8| value << 4 | (*b as char).to_digit(16).unwrap_or(0) as usize;
    (len > 0).then(|| (text[..len].iter().fold(0, digit), &text[len..]))
}

/// The file whose mapping holds `address`; `None` where the system has no such list.
pub fn file_at(address: usize) -> Option<PathBuf> {
    let list = Maps::now().0?;
    let at = mappings(&list).find(|m| (m.start..m.end).contains(&address) && m.name.starts_with(b"/"))?;
    Some(String::from_utf8_lossy(at.name).into_owned().into())
}

impl Maps {
    /// The mappings now. Asked of Linux alone: where wine opens that file, it is another process's.
    pub fn now() -> Self {
        if !cfg!(target_os = "linux") {
            return Self(None);
        }
        Self(std::fs::read("/proc/self/maps").ok())
    }

    /// `bytes` at `at` can be read.
    pub fn readable(&self, at: usize, bytes: usize) -> bool {
        self.covers(at, bytes, |m| m.is_readable)
    }

    /// `at` is code.
    pub fn runnable(&self, at: usize) -> bool {
        self.covers(at, 1, |m| m.is_code)
    }

    fn covers(&self, at: usize, bytes: usize, allowed: impl Fn(&Mapping<'_>) -> bool) -> bool {
        let Some(end) = at.checked_add(bytes) else { return false };
        let Some(list) = &self.0 else { return at != 0 };
        let mut at = at;
        // Neighbouring mappings are in order.
        for m in mappings(list).filter(|m| allowed(m)) {
            if at >= m.start && at < m.end {
                at = m.end;
            }
            if at >= end {
                return true;
            }
        }
        bytes == 0
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn an_address_leads_to_its_file() {
        let own = std::env::current_exe().and_then(std::fs::canonicalize).ok();
        assert!(own.is_some());
        assert_eq!(file_at(file_at as fn(usize) -> Option<PathBuf> as usize), own);
        assert_eq!(file_at(1), None);
    }

    #[test]
    fn code_and_data_are_told_apart_from_nothing() {
        let (maps, data) = (Maps::now(), vec![0u8; 1 << 20]);
        assert!(maps.readable(data.as_ptr() as usize, data.len()));
        assert!(!maps.runnable(data.as_ptr() as usize));
        assert!(maps.runnable(Maps::now as fn() -> Maps as usize));
        assert!(!maps.readable(0, 1) && !maps.readable(8, 8) && !maps.readable(usize::MAX - 4, 16));
    }
}
