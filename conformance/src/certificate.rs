//! Proof that a backend passed on a machine, and the gate that asks for it.
//!
//! A certificate is about bytes: of the library, of the suite's meaning, of the machine's facts. When one of them changes it
//! is void. It has no date, so the same run writes the same file.
use crate::{Profile, Report};
use q4_core::{Code, Error, HostEnv, Reject, RejectCode, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A file of machine code and its bytes' digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    /// Where it was loaded from.
    pub path: String,
    /// Lower-case hex.
    pub sha256: String,
}

impl Library {
    /// Reads and digests a file.
    ///
    /// # Errors
    /// `Io` or `ModelMissing` when it cannot be read.
    pub fn of(path: &Path) -> Result<Self> {
        let mut file = fs::File::open(path).map_err(|e| Error::io(path, &e))?;
        let (mut digest, mut buffer) = (Sha256::new(), vec![0; 1 << 16]);
        loop {
            match file.read(&mut buffer).map_err(|e| Error::io(path, &e))? {
                0 => break,
                n => digest.update(&buffer[..n]),
            }
        }
        Ok(Self { path: path.display().to_string(), sha256: hex(&digest.finalize()) })
    }
}

/// A passing run, complete for its profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Certificate {
    /// `q4.certificate/1`.
    pub schema: String,
    /// Backend.
    pub backend: String,
    /// Its version.
    pub version: String,
    /// Digest of the library file.
    pub sha256: String,
    /// Version of the suite.
    pub suite: String,
    /// Profile that passed.
    pub profile: Profile,
    /// Claims that passed.
    pub claims: Vec<String>,
    /// Fingerprint of the machine it passed on.
    pub machine: String,
}

const SCHEMA: &str = "q4.certificate/1";

impl Certificate {
    /// The certificates of a report, one for each backend that passed with a library.
    ///
    /// # Errors
    /// `ConformanceFailed` when the run did not pass or left something of its profile out.
    pub fn of(report: &Report) -> Result<Vec<Self>> {
        if !report.conformant || !report.complete || report.waived > 0 {
            return Err(Error::new(Code::ConformanceFailed, "no certificate can be written")
                .need("a run of the whole profile without a failure and without waivers")
                .have(format!(
                    "{} failed, {} waived, {}",
                    report.failed,
                    report.waived,
                    if report.complete { "complete" } else { "a part of the profile" }
                )));
        }
        let certified = report.backends.iter().filter_map(|b| {
            let library = b.library.as_ref()?;
            let own = report.claims.iter().filter(|c| c.backend == b.name && c.claim != "backend");
            Some(Self {
                schema: SCHEMA.into(),
                backend: b.name.clone(),
                version: b.version.clone(),
                sha256: library.sha256.clone(),
                suite: report.suite.clone(),
                profile: report.profile,
                claims: own.map(|c| c.claim.clone()).collect(),
                machine: report.machine.clone(),
            })
        });
        Ok(certified.collect())
    }

    /// Writes it into `dir`, which is made if need be; returns the file.
    ///
    /// # Errors
    /// `Io`.
    pub fn write(&self, dir: &Path) -> Result<PathBuf> {
        let path = dir.join(self.file_name());
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| Error::new(Code::Internal, format!("a certificate: {e}")))?;
        write_whole(&path, &(text + "\n"))?;
        Ok(path)
    }

    /// Void unless backend, version, bytes, the suite's major version and the machine are those of the run.
    /// The error names what changed.
    pub fn valid_for(
        &self,
        backend: &str,
        version: &str,
        sha256: &str,
        env: &HostEnv,
        profile: Profile,
    ) -> std::result::Result<(), String> {
        let machine = machine(env);
        let major = |v: &str| v.split('.').next().unwrap_or_default().to_owned();
        let (own_major, suite_major) = (major(&self.suite), major(crate::SUITE_VERSION));
        let differs = [
            ("schema", self.schema.as_str(), SCHEMA),
            ("backend", &self.backend, backend),
            ("version", &self.version, version),
            ("library bytes, sha256", &self.sha256, sha256),
            ("suite", &own_major, &suite_major),
            ("machine", &self.machine, &machine),
        ]
        .into_iter()
        .find(|(_, certified, now)| certified != now);
        if let Some((what, certified, now)) = differs {
            return Err(format!("{what}: certified {certified}, now {now}"));
        }
        if self.profile < profile {
            return Err(format!("profile: certified {}, now {}", self.profile.as_str(), profile.as_str()));
        }
        if self.claims.is_empty() { Err("it certifies no claim".into()) } else { Ok(()) }
    }

    fn file_name(&self) -> String {
        let name: String = self.backend.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let head = |text: &str| text.get(..16).unwrap_or(text).to_owned();
        format!("{name}-{}-{}-{}.json", head(&self.sha256), head(&self.machine), self.profile.as_str())
    }
}

/// Writes a file that is complete or absent: no reader ever sees half of it. Its folder is made if need be.
pub(crate) fn write_whole(path: &Path, text: &str) -> Result<()> {
    let io = |path: &Path, e: std::io::Error| Error::new(Code::Io, format!("{}: {e}", path.display()));
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir).map_err(|e| io(dir, e))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let partial = dir.join(format!(".{name}.{}", std::process::id()));
    fs::write(&partial, text).map_err(|e| io(&partial, e))?;
    fs::rename(&partial, path).map_err(|e| {
        // What is left of it would only be in the way.
        let _ = fs::remove_file(&partial);
        io(path, e)
    })
}

/// Where certificates lie unless said otherwise: `$XDG_DATA_HOME/q4/certificates`, else under `~/.local/share`. `None` when
/// the environment names no home.
pub fn default_dir() -> Option<PathBuf> {
    data_dir().map(|dir| dir.join("certificates"))
}

/// Where everything lies that q4 keeps for a user.
pub fn data_dir() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| absolute("HOME").map(|h| h.join(".local/share")))?;
    Some(data.join("q4"))
}

/// Fingerprint of what decides how kernels compute: architecture, CPU features, devices and driver. Lower-case hex.
/// How many processors a process may use and which built-in libraries it found are no part of it.
pub fn machine(env: &HostEnv) -> String {
    let mut facts = format!("{} {:?} {:?}", env.arch, env.cpu_features, env.cuda_driver);
    for d in &env.cuda {
        facts.push_str(&format!(
            " {}:{}.{}:{}:{}",
            d.ordinal, d.capability.0, d.capability.1, d.name, d.memory
        ));
    }
    hex(&Sha256::digest(facts.as_bytes()))[..32].to_owned()
}

/// Lets a third-party backend pass that has a valid certificate in `dir`.
///
/// # Errors
/// `conformance-missing`: what voids the nearest certificate, and the command that makes a new one.
pub fn gate(
    dir: &Path,
    backend: &str,
    version: &str,
    library: &Library,
    env: &HostEnv,
    profile: Profile,
) -> std::result::Result<(), Reject> {
    let mut voids = Vec::new();
    for certificate in certificates(dir).iter().filter(|c| c.backend == backend) {
        match certificate.valid_for(backend, version, &library.sha256, env, profile) {
            Ok(()) => return Ok(()),
            Err(why) => voids.push(why),
        }
    }
    let option = if profile == Profile::Training { " --profile training" } else { "" };
    // The devices that were looked for are facts of the machine.
    let device = if env.cuda.is_empty() { "" } else { " --device cuda" };
    let have = match voids.first() {
        None => format!("none in {}", dir.display()),
        Some(why) => format!("one that is void: {why}"),
    };
    Err(Reject::new(
        RejectCode::ConformanceMissing,
        format!(
            "a certificate for this library on this machine: q4 conformance --plugin {}{device}{option}",
            library.path
        ),
        have,
    ))
}

/// Every certificate of a directory, by file name; files that are none are not certificates and prove nothing.
fn certificates(dir: &Path) -> Vec<Certificate> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut paths: Vec<_> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "json"));
    paths.sort();
    let read = |p: &PathBuf| serde_json::from_slice(&fs::read(p).ok()?).ok();
    paths.iter().filter_map(read).collect()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, liars, run};
    use q4_core::{CudaDevice, ThreadPool};

    fn machine_with(feature: &str) -> HostEnv {
        HostEnv { arch: "x86_64".into(), cpu_features: vec![feature.into()], ..HostEnv::default() }
    }

    fn certificate() -> Certificate {
        Certificate {
            schema: SCHEMA.into(),
            backend: "acme".into(),
            version: "1.2.0".into(),
            sha256: "ab".repeat(32),
            suite: crate::SUITE_VERSION.into(),
            profile: Profile::Inference,
            claims: vec!["nvfp4@1/native/cpu/fused-dequant".into()],
            machine: machine(&machine_with("avx2")),
        }
    }

    #[test]
    fn one_byte_of_the_library_voids_a_certificate() -> Result<()> {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("libacme.so");
        fs::write(&file, b"machine code").expect("written");
        let library = Library::of(&file)?;
        assert_eq!(library.sha256.len(), 64);
        let certificates = dir.path().join("certificates");
        Certificate { sha256: library.sha256.clone(), ..certificate() }.write(&certificates)?;
        let env = machine_with("avx2");
        let pass =
            |library: &Library| gate(&certificates, "acme", "1.2.0", library, &env, Profile::Inference);
        assert_eq!(pass(&library), Ok(()));
        fs::write(&file, b"machine codf").expect("written");
        let reject = pass(&Library::of(&file)?).expect_err("other bytes");
        assert_eq!(reject.code, RejectCode::ConformanceMissing);
        assert!(reject.need.contains("q4 conformance --plugin"), "{reject}");
        assert!(reject.need.contains("libacme.so"), "{reject}");
        assert!(reject.have.contains("void: library bytes"), "{reject}");
        Ok(())
    }

    #[test]
    fn everything_a_certificate_is_about_can_void_it() {
        let c = certificate();
        let env = machine_with("avx2");
        let valid = |c: &Certificate, backend: &str, version: &str, env: &HostEnv, profile| {
            c.valid_for(backend, version, &"ab".repeat(32), env, profile)
        };
        let now = Profile::Inference;
        assert_eq!(valid(&c, "acme", "1.2.0", &env, now), Ok(()));
        // What a machine may lend to a process is not what it is.
        let lent = HostEnv { processors: 7, ..env.clone() };
        assert_eq!(valid(&c, "acme", "1.2.0", &lent, now), Ok(()));
        let minor = Certificate { suite: "2.9.3".into(), ..c.clone() };
        assert_eq!(valid(&minor, "acme", "1.2.0", &env, now), Ok(()));
        for (why, result) in [
            ("backend", valid(&c, "acne", "1.2.0", &env, now)),
            ("version", valid(&c, "acme", "1.2.1", &env, now)),
            ("machine", valid(&c, "acme", "1.2.0", &machine_with("avx512f"), now)),
            ("profile", valid(&c, "acme", "1.2.0", &env, Profile::Training)),
            ("suite", valid(&Certificate { suite: "3.0.0".into(), ..c.clone() }, "acme", "1.2.0", &env, now)),
            (
                "schema",
                valid(
                    &Certificate { schema: "q4.certificate/2".into(), ..c.clone() },
                    "acme",
                    "1.2.0",
                    &env,
                    now,
                ),
            ),
            ("no claim", valid(&Certificate { claims: vec![], ..c.clone() }, "acme", "1.2.0", &env, now)),
        ] {
            assert!(result.expect_err(why).contains(why), "{why}");
        }
    }

    #[test]
    fn without_a_certificate_nobody_passes() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("acme.json"), b"{}").expect("written");
        let library = Library { path: "/opt/libacme.so".into(), sha256: "00".repeat(32) };
        for dir in [dir.path(), Path::new("/nowhere/at/all")] {
            let env = HostEnv::default();
            let reject =
                gate(dir, "acme", "1.0.0", &library, &env, Profile::Training).expect_err("nothing there");
            assert!(reject.have.starts_with("none in"), "{reject}");
            assert!(reject.need.ends_with("--plugin /opt/libacme.so --profile training"), "{reject}");
            let capability = (9, 0);
            let device = CudaDevice { ordinal: 0, capability, name: "GPU".into(), memory: 1 << 34 };
            let env = HostEnv { cuda: vec![device], ..env };
            let reject =
                gate(dir, "acme", "1.0.0", &library, &env, Profile::Inference).expect_err("as before");
            assert!(reject.need.ends_with("--plugin /opt/libacme.so --device cuda"), "{reject}");
        }
    }

    #[test]
    fn only_a_complete_run_without_failures_certifies() -> Result<()> {
        let (env, threads) = (HostEnv::default(), ThreadPool::new(1));
        let mut report = run(
            &*liars::honest(),
            &Options { levels: vec![crate::Level::L0], ..Options::of(Profile::Inference) },
            &env,
            &threads,
        );
        assert!(report.conformant, "{}", report.text());
        assert_eq!(Certificate::of(&report).expect_err("a part of it").code(), Code::ConformanceFailed);
        report.complete = true;
        assert_eq!(Certificate::of(&report)?, [], "no library, no certificate");
        report.backends[0].library = Some(Library { path: "x".into(), sha256: "00".into() });
        assert_eq!(Certificate::of(&report)?.len(), 1);
        report.waived = 1;
        assert!(Certificate::of(&report).is_err());
        (report.waived, report.conformant) = (0, false);
        assert!(Certificate::of(&report).is_err());
        Ok(())
    }
}
