//! Self-checks that passed, kept for the next process: a file beside the certificates, for one executable on
//! one machine.
//!
//! It holds passes of built-ins only: a third party's library is checked in every process. It is believed
//! when it is sealed as certificates are ([`Key`]) and everything it depends on is as it was: the bytes of
//! the executable and of the backend's library, the machine, the instruction set that was asked for. Anything
//! else is as if it were not there, and is overwritten. A digest of a file that has not changed since is not
//! computed again: that would take longer than the checks.
use crate::facts::{Library, machine};
use crate::key::Key;
use crate::own;
use q4_core::selfcheck::Passes;
use q4_core::{BUILTINS, HostEnv};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const SCHEMA: &str = "q4.self-checks/2";

/// Passes of this executable, in a file.
pub struct StoredPasses {
    data: PathBuf,
    path: PathBuf,
    program: PathBuf,
    libraries: BTreeMap<String, PathBuf>,
    machine: String,
    isa: String,
    /// Once somebody asked.
    opened: Mutex<Option<Opened>>,
}

/// What is known, and what of it the file has.
struct Opened {
    now: Stored,
    written: Option<Stored>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Stored {
    schema: String,
    machine: String,
    isa: String,
    /// SHA-256 of the executable.
    program: String,
    /// Kinds of products, each with the digest of its backend's library where there is one.
    passed: BTreeSet<String>,
    /// Digests by path.
    digests: BTreeMap<String, Known>,
}

/// The digest of a file as it was when it looked so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Known {
    facts: Facts,
    sha256: String,
}

impl StoredPasses {
    /// Passes of `program`, in the folder `data` that q4 keeps for a user, for the machine and the libraries
    /// of `env` and the instruction set asked for. Reads nothing before the first question.
    pub fn new(data: &Path, program: PathBuf, env: &HostEnv, isa: Option<&str>) -> Self {
        let libraries = env.libraries.iter().map(|(name, facts)| (name.clone(), PathBuf::from(&facts.path)));
        let (machine, isa) = (machine(env), isa.unwrap_or("best").to_owned());
        // One file for each path of an executable, so that a new build replaces what the old one left.
        let name = format!("{:x}", Sha256::digest(program.as_os_str().as_encoded_bytes()));
        let set: String = isa.chars().filter(char::is_ascii_alphanumeric).take(16).collect();
        let file = format!("{}-{}-{set}.json", &name[..16], &machine[..16]);
        Self {
            data: data.to_owned(),
            path: data.join("self-checks").join(file),
            program,
            libraries: libraries.collect(),
            machine,
            isa,
            opened: Mutex::new(None),
        }
    }

    /// Runs `body` on the passes and the name of one, and writes what changed. `None` for a third party's,
    /// and when a file it depends on cannot be read.
    fn with<R>(
        &self,
        backend: &str,
        kind: &str,
        body: impl FnOnce(&mut BTreeSet<String>, String) -> R,
    ) -> Option<R> {
        if !BUILTINS.contains(&backend) {
            return None;
        }
        let mut opened = self.opened.lock().unwrap_or_else(|e| e.into_inner());
        if opened.is_none() {
            *opened = Some(self.open()?);
        }
        let Opened { now, written } = opened.as_mut()?;
        let entry = match self.libraries.get(backend) {
            None => kind.to_owned(),
            Some(library) => format!("{kind} sha256 {}", digest(library, &mut now.digests)?),
        };
        let result = body(&mut now.passed, entry);
        if !now.passed.is_empty() && written.as_ref() != Some(now) {
            // A file that cannot be written costs the next process its checks, nothing else.
            if let Err(e) = self.write(now) {
                tracing::debug!(%e, "self-checks are not remembered");
            }
            *written = Some(now.clone());
        }
        Some(result)
    }

    fn open(&self) -> Option<Opened> {
        let written = self.read();
        let mut digests = written.as_ref().map(|w| w.digests.clone()).unwrap_or_default();
        let program = digest(&self.program, &mut digests)?;
        let (schema, machine, isa) = (SCHEMA.to_owned(), self.machine.clone(), self.isa.clone());
        let mut now = Stored { schema, machine, isa, program, passed: BTreeSet::new(), digests };
        let is_ours = |w: &&Stored| {
            (&w.schema, &w.machine, &w.isa, &w.program) == (&now.schema, &now.machine, &now.isa, &now.program)
        };
        now.passed = written.as_ref().filter(is_ours).map(|w| w.passed.clone()).unwrap_or_default();
        Some(Opened { now, written })
    }

    /// What is stored, if it is as it was written.
    fn read(&self) -> Option<Stored> {
        let bytes = match own::read(&self.path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == ErrorKind::NotFound => return None,
            Err(e) => {
                tracing::warn!("self-checks are not remembered: {}: {e}", self.path.display());
                return None;
            }
        };
        let key = match Key::open(&self.data) {
            Ok(key) => key?,
            Err(why) => {
                tracing::warn!("self-checks are not remembered: {why}");
                return None;
            }
        };
        let value: Value = serde_json::from_slice(&bytes).ok()?;
        if key.sealed(&value) { serde_json::from_value(value).ok() } else { None }
    }

    fn write(&self, stored: &Stored) -> q4_core::Result<()> {
        own::write(&self.path, Key::open_or_make(&self.data)?.seal(stored)?.as_bytes())
    }
}

impl Passes for StoredPasses {
    fn recall(&self, backend: &str, kind: &str) -> bool {
        self.with(backend, kind, |passed, entry| passed.contains(&entry)).unwrap_or(false)
    }

    fn remember(&self, backend: &str, kind: &str) {
        self.with(backend, kind, |passed, entry| passed.insert(entry));
    }
}

/// SHA-256 of a file: the known one while the file looks as it did, else computed and known from now on.
fn digest(path: &Path, known: &mut BTreeMap<String, Known>) -> Option<String> {
    let (name, facts) = (path.display().to_string(), Facts::of(path));
    if let (Some(known), Some(facts)) = (known.get(&name), &facts)
        && known.facts == *facts
    {
        return Some(known.sha256.clone());
    }
    let sha256 = Library::of(path).ok()?.sha256;
    // The same before and after it was read, and for long enough that the clock would tell another change.
    match facts.filter(|facts| Facts::of(path).as_ref() == Some(facts) && facts.is_settled()) {
        Some(facts) => known.insert(name, Known { facts, sha256: sha256.clone() }),
        None => known.remove(&name),
    };
    Some(sha256)
}

/// What the system says of a file, down to the time of its last change, which no program can set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Facts {
    bytes: u64,
    device: u64,
    inode: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Facts {
    #[cfg(unix)]
    fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        let m = std::fs::metadata(path).ok()?;
        Some(Self {
            bytes: m.len(),
            device: m.dev(),
            inode: m.ino(),
            modified: (m.mtime(), m.mtime_nsec()),
            changed: (m.ctime(), m.ctime_nsec()),
        })
    }

    /// Digests are always computed where a change could go unnoticed.
    #[cfg(not(unix))]
    fn of(_: &Path) -> Option<Self> {
        None
    }

    fn is_settled(&self) -> bool {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.is_ok_and(|now| now.as_secs() as i64 > self.changed.0 + 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use q4_core::LibraryFacts;
    use std::fs;

    /// A program and a library that exist, and where passes go.
    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            let place = Self(tempfile::tempdir().expect("a folder"));
            fs::write(place.program(), "machine code").expect("written");
            fs::write(place.library(), "kernels").expect("written");
            place
        }
        fn program(&self) -> PathBuf {
            self.0.path().join("q4")
        }
        fn library(&self) -> PathBuf {
            self.0.path().join("lib.so")
        }
        fn data(&self) -> PathBuf {
            self.0.path().join("data")
        }
        fn folder(&self) -> PathBuf {
            self.data().join("self-checks")
        }
        fn file(&self) -> PathBuf {
            let mut files = fs::read_dir(self.folder()).expect("a folder").map(|f| f.expect("a file").path());
            let file = files.next().expect("a file");
            assert_eq!(files.next(), None, "nothing else is left there");
            file
        }
        /// As the next process finds it.
        fn passes(&self, feature: &str, isa: Option<&str>) -> StoredPasses {
            let library = LibraryFacts { path: self.library().display().to_string(), ..Default::default() };
            let env = HostEnv {
                cpu_features: vec![feature.into()],
                libraries: [(KERNEL.to_owned(), library)].into(),
                ..HostEnv::default()
            };
            StoredPasses::new(&self.data(), self.program(), &env, isa)
        }
        fn recalled(&self) -> [bool; 2] {
            let passes = self.passes("avx2", None);
            [passes.recall(KERNEL, "k"), passes.recall(PLAIN, "p")]
        }
    }

    /// A built-in with a library, and one without.
    const KERNEL: &str = "nvfp4-kernel";
    const PLAIN: &str = "nf4-kernel";
    const BOTH: [bool; 2] = [true, true];
    const NONE: [bool; 2] = [false, false];

    fn remembered() -> Place {
        let place = Place::new();
        assert_eq!(place.recalled(), NONE);
        let passes = place.passes("avx2", None);
        passes.remember(KERNEL, "k");
        passes.remember(PLAIN, "p");
        assert_eq!(place.recalled(), BOTH);
        place
    }

    #[test]
    fn a_pass_is_remembered_for_the_same_bytes_on_the_same_machine() {
        let place = remembered();
        assert!(!place.passes("avx512", None).recall(PLAIN, "p"), "another machine");
        assert!(!place.passes("avx2", Some("portable")).recall(PLAIN, "p"), "another set");
        assert!(!place.passes("avx2", None).recall(PLAIN, "k"), "another kind");
        fs::write(place.library(), "Kernels").expect("written");
        assert_eq!(place.recalled(), [false, true], "one byte of the library");
        fs::remove_file(place.library()).expect("removed");
        assert_eq!(place.recalled(), [false, true], "no library");
        fs::write(place.program(), "Machine code").expect("written");
        assert_eq!(place.recalled(), NONE, "one byte of the program");
        place.passes("avx2", None).remember(PLAIN, "p");
        assert_eq!(place.recalled(), [false, true], "a new build replaces the old one's file");
        place.file();
    }

    #[test]
    fn a_plugin_is_checked_in_every_process() {
        let place = remembered();
        let passes = place.passes("avx2", None);
        passes.remember("acme", "k");
        assert!(!passes.recall("acme", "k") && !place.passes("avx2", None).recall("acme", "k"));
    }

    #[test]
    fn another_s_file_is_as_if_it_were_not_there() {
        let place = remembered();
        fs::remove_file(Key::path(&place.data())).expect("removed");
        assert_eq!(place.recalled(), NONE, "no key");
        Key::open_or_make(&place.data()).expect("another key");
        assert_eq!(place.recalled(), NONE, "another key");
        #[cfg(unix)]
        for kind in [vec!["mkfifo"], vec!["ln", "-s", "/dev/zero"], vec!["mkdir"]] {
            let file = place.file();
            fs::remove_file(&file).expect("removed");
            let made = std::process::Command::new(kind[0]).args(&kind[1..]).arg(&file).status();
            assert!(made.expect("it runs").success());
            assert_eq!(place.recalled(), NONE, "{kind:?}");
            place.passes("avx2", None).remember(PLAIN, "p");
            // A folder cannot be replaced by a file.
            assert_eq!(place.recalled(), [false, kind != ["mkdir"]], "{kind:?}");
        }
    }

    #[test]
    fn a_damaged_file_is_as_if_it_were_not_there() {
        let place = remembered();
        let (file, whole) = (place.file(), fs::read(place.file()).expect("a file"));
        let meaning = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).ok();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&file, &bytes).expect("written");
            // A line break may become white space of another kind.
            let want = if meaning(&bytes) == meaning(&whole) { BOTH } else { NONE };
            assert_eq!(place.recalled(), want, "byte {at}");
        }
        for len in [0, 1, whole.len() / 2, whole.len() - 3] {
            fs::write(&file, &whole[..len]).expect("written");
            assert_eq!(place.recalled(), NONE, "{len} bytes");
        }
        // The next pass makes it good again.
        place.passes("avx2", None).remember(KERNEL, "k");
        assert_eq!(place.recalled(), [true, false]);
    }

    #[test]
    #[cfg(unix)]
    fn a_digest_is_known_until_the_file_changes() {
        let (place, mut known) = (Place::new(), BTreeMap::new());
        let path = place.program();
        let first = digest(&path, &mut known);
        assert!(known.is_empty(), "it changed a moment ago");
        let mut facts = Facts::of(&path).expect("it is there");
        let name = path.display().to_string();
        known.insert(name.clone(), Known { facts: facts.clone(), sha256: "known".into() });
        assert_eq!(digest(&path, &mut known).as_deref(), Some("known"));
        facts.changed.1 ^= 1;
        known.insert(name, Known { facts, sha256: "known".into() });
        assert_eq!(digest(&path, &mut known), first, "one nanosecond");
        // A program that nobody has changed for long.
        let old = std::env::current_exe().expect("this one");
        let settled = Facts::of(&old).is_some_and(|f| f.is_settled());
        digest(&old, &mut known);
        assert_eq!(known.len(), usize::from(settled));
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_nothing_else() {
        let place = Place::new();
        fs::write(place.0.path().join("data"), "a file in the way").expect("written");
        let passes = place.passes("avx2", None);
        passes.remember(PLAIN, "p");
        assert!(passes.recall(PLAIN, "p"), "this process knows");
        assert_eq!(place.recalled(), NONE);
    }
}
