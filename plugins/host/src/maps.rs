//! What of this process can be read and run: a pointer of a library is looked up before it is followed,
//! because a wrong one would end the process instead of the library's candidacy.

/// The kernel's list of mappings; without one, every pointer that is not NULL passes.
pub struct Maps(Option<Vec<Mapping>>);

struct Mapping {
    start: usize,
    end: usize,
    read: bool,
    run: bool,
}

impl Maps {
    /// The mappings now. Asked of Linux alone: where wine opens that file, it is another process's.
    pub fn now() -> Self {
        if !cfg!(target_os = "linux") {
            return Self(None);
        }
        let text = std::fs::read_to_string("/proc/self/maps").ok();
        Self(text.map(|text| text.lines().filter_map(parse).collect()))
    }

    /// `bytes` at `at` can be read.
    pub fn readable(&self, at: usize, bytes: usize) -> bool {
        self.covers(at, bytes, |m| m.read)
    }

    /// `at` is code.
    pub fn runnable(&self, at: usize) -> bool {
        self.covers(at, 1, |m| m.run)
    }

    fn covers(&self, at: usize, bytes: usize, allowed: impl Fn(&Mapping) -> bool) -> bool {
        let Some(end) = at.checked_add(bytes) else { return false };
        let Some(all) = &self.0 else { return at != 0 };
        let mut at = at;
        // Neighbouring mappings are in order.
        for m in all.iter().filter(|m| allowed(m)) {
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

fn parse(line: &str) -> Option<Mapping> {
    let mut fields = line.split(' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let flags = fields.next()?.as_bytes();
    let hex = |s| usize::from_str_radix(s, 16).ok();
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        read: flags.first() == Some(&b'r'),
        run: flags.get(2) == Some(&b'x'),
    })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn code_and_data_are_told_apart_from_nothing() {
        let (maps, data) = (Maps::now(), vec![0u8; 1 << 20]);
        assert!(maps.readable(data.as_ptr() as usize, data.len()));
        assert!(!maps.runnable(data.as_ptr() as usize));
        assert!(maps.runnable(Maps::now as fn() -> Maps as usize));
        assert!(!maps.readable(0, 1) && !maps.readable(8, 8) && !maps.readable(usize::MAX - 4, 16));
    }
}
