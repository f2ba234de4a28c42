//! Proof that a backend passed on a machine, and the gate that asks for it.
//!
//! A certificate is about bytes: of the library and of all that it loads besides itself, of the suite's
//! meaning, of the machine's facts. When one of them changes it is void. It has no date, so the same run
//! writes the same file. It is sealed ([`Key`]): what somebody else wrote is none.
use crate::facts::{Library, Needed, device_fact, facts, machine};
use crate::key::Key;
use crate::options::SUITE_VERSION;
use crate::{Claim, Limits, Profile, Report, own};
use q4_core::{
    Code, Device, Error, ExecPath, HostEnv, LinearSpec, Reject, RejectCode, Result, VendorDevice, Verdict,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

/// A passing run, complete for its profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Certificate {
    /// `q4.certificate/2`.
    pub schema: String,
    /// Backend.
    pub backend: String,
    /// Its version.
    pub version: String,
    /// Digest of the library file.
    pub sha256: String,
    /// What it loads besides itself.
    pub needs: Vec<Needed>,
    /// Version of the suite.
    pub suite: String,
    /// Profile that passed.
    pub profile: Profile,
    /// Claims that passed, each with its limits.
    pub claims: Vec<Proven>,
    /// Fingerprint of the machine it passed on.
    pub machine: String,
    /// The facts behind the fingerprint.
    pub facts: Vec<String>,
    /// The device of the library's own that it passed on, if it did: name and fingerprint, as
    /// [`device_fact`] puts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// A claim that passed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proven {
    /// `nvfp4@1/native/cpu/fused-dequant`.
    pub claim: String,
    /// The products of that kind that were proved: no other is served.
    pub limits: Limits,
}

const FAMILY: &str = "q4.certificate/";
const SCHEMA: &str = "q4.certificate/2";

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
                needs: library.needs.clone(),
                suite: report.suite.clone(),
                profile: report.profile,
                claims: own
                    .filter_map(|c| {
                        let mut limits = c.limits.clone()?;
                        // What was not judged is not certified.
                        let is_judged = report.profile == Profile::Training;
                        limits.types.iter_mut().for_each(|t| t.backward &= is_judged);
                        Some(Proven { claim: c.claim.clone(), limits })
                    })
                    .collect(),
                machine: report.machine.clone(),
                facts: report.facts.clone(),
                device: b.device.clone(),
            })
        });
        Ok(certified.collect())
    }

    /// Void unless backend, version, bytes, the suite's major version and the machine are those of the run.
    ///
    /// # Errors
    /// What changed, for people.
    pub fn valid_for(
        &self,
        backend: &str,
        version: &str,
        library: &Library,
        env: &HostEnv,
        profile: Profile,
    ) -> std::result::Result<(), String> {
        let major = |v: &str| v.split('.').next().unwrap_or_default().to_owned();
        let (own_major, suite_major) = (major(&self.suite), major(SUITE_VERSION));
        let differs = [
            ("schema", self.schema.as_str(), SCHEMA),
            ("backend", &self.backend, backend),
            ("version", &self.version, version),
            ("library bytes, sha256", &self.sha256, &library.sha256),
            ("suite", &own_major, &suite_major),
        ]
        .into_iter()
        .find(|(_, certified, now)| certified != now);
        if let Some((what, certified, now)) = differs {
            return Err(format!("{what}: certified {certified}, now {now}"));
        }
        if let Some(why) = needs_differ(&self.needs, &library.needs) {
            return Err(why);
        }
        let (now, facts) = (machine(env), facts(env));
        if self.machine != now {
            let lacks = |a: &[String], b: &[String]| {
                let all: Vec<_> = a.iter().filter(|f| !b.contains(f)).map(String::as_str).collect();
                if all.is_empty() { "nothing else".into() } else { all.join(", ") }
            };
            let (then, now) = (lacks(&self.facts, &facts), lacks(&facts, &self.facts));
            return Err(format!("machine: certified with {then}, now with {now}"));
        }
        if self.profile < profile {
            return Err(format!("profile: certified {}, now {}", self.profile.as_str(), profile.as_str()));
        }
        if self.claims.is_empty() { Err("it certifies no claim".into()) } else { Ok(()) }
    }

    /// Whether a product is of a kind that passed, and within its limits.
    ///
    /// # Errors
    /// `conformance-missing`, with the kinds that did, or every limit that it is beyond.
    pub fn covers(&self, spec: &LinearSpec, path: ExecPath) -> Verdict {
        let (schema, activations) = (spec.schema.id().name, spec.activations.as_str());
        let claim = Claim { schema, activations, device: spec.device, path }.to_string();
        if let Some(proven) = self.claims.iter().find(|p| p.claim == claim) {
            return proven.limits.admit(spec);
        }
        let kinds: Vec<_> = self.claims.iter().map(|p| p.claim.as_str()).collect();
        let need = format!("a kind of product that its certificate is about: {}", kinds.join(", "));
        Err(vec![Reject::new(RejectCode::ConformanceMissing, need, claim)])
    }

    /// Void unless the device that it is about is still what it was. What `loaded` has is known only once the
    /// library runs.
    ///
    /// # Errors
    /// Which device it was, and which it is.
    pub fn is_for_device(&self, loaded: &[VendorDevice]) -> std::result::Result<(), Reject> {
        let now: Vec<_> = loaded.iter().map(device_fact).collect();
        match &self.device {
            Some(certified) if !now.contains(certified) => {
                let have = if now.is_empty() { "none".into() } else { now.join(", ") };
                let need = format!("the device that its certificate is about, {certified}");
                Err(Reject::new(RejectCode::ConformanceMissing, need, have))
            }
            _ => Ok(()),
        }
    }

    fn file_name(&self) -> String {
        let name: String = self.backend.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let head = |text: &str| text.get(..16).unwrap_or(text).to_owned();
        let machine = match &self.device {
            Some(device) => format!("{:x}", Sha256::digest(format!("{}\n{device}", self.machine))),
            None => self.machine.clone(),
        };
        format!("{name}-{}-{}-{}.json", head(&self.sha256), head(&machine), self.profile.as_str())
    }
}

/// The first library of two lists that is not the same in both.
fn needs_differ(certified: &[Needed], now: &[Needed]) -> Option<String> {
    let of = |all: &[Needed], name: &str| all.iter().find(|n| n.name == name).cloned();
    let show = |n: Option<Needed>| n.map_or("none".into(), |n| format!("{} sha256 {}", n.path, n.sha256));
    let names = certified.iter().chain(now).map(|n| &n.name);
    let mut pairs = names.map(|name| (name, of(certified, name), of(now, name)));
    let (name, then, now) = pairs.find(|(_, then, now)| then != now)?;
    Some(format!("{name}, which it loads: certified {}, now {}", show(then), show(now)))
}

/// Certificates of one owner: a folder of them, and the key that seals them.
#[derive(Clone, Debug)]
pub struct Certificates {
    folder: PathBuf,
    data: PathBuf,
}

impl Certificates {
    /// Those of the user, where [`data_dir`] says. `None` when the environment names no home.
    pub fn of_user() -> Option<Self> {
        data_dir().map(|data| Self::under(&data))
    }

    /// Those under `data`, which has the key as well.
    pub fn under(data: &Path) -> Self {
        Self { folder: data.join("certificates"), data: data.to_owned() }
    }

    /// The same in another folder.
    pub fn kept_in(self, folder: &Path) -> Self {
        Self { folder: folder.to_owned(), ..self }
    }

    /// Seals `certificate` and writes it; returns the file. Makes folder and key if there are none.
    ///
    /// # Errors
    /// `Io`.
    pub fn write(&self, certificate: &Certificate) -> Result<PathBuf> {
        let path = self.folder.join(certificate.file_name());
        own::write(&path, Key::open_or_make(&self.data)?.seal(certificate)?.as_bytes())?;
        Ok(path)
    }

    /// The certificate of a third party's library for products on `device`, without which nothing of it may
    /// run. One about a device of its own is about no other, whichever of them that was: see
    /// [`Certificate::is_for_device`].
    ///
    /// # Errors
    /// `conformance-missing`: what voids the nearest certificate, and the command that makes a new one.
    pub fn find(
        &self,
        backend: &str,
        version: &str,
        library: &Library,
        (env, device): (&HostEnv, Device),
        profile: Profile,
    ) -> std::result::Result<Certificate, Reject> {
        let mut voids = Vec::new();
        let key = Key::open(&self.data);
        for path in self.files() {
            let about = match own::read(&path) {
                Ok(bytes) => About::of(&bytes, backend),
                Err(e) => About::Nothing(e.to_string()),
            };
            let why = match (about, &key) {
                (About::Others, _) => continue,
                (About::Nothing(why), _) => (3, why),
                (About::Unknown(schema), _) => (2, format!("schema: certified {schema}, now {SCHEMA}")),
                (About::This(_), Err(why)) => (0, format!("seal: {why}")),
                (About::This(_), Ok(None)) => {
                    (1, format!("seal: made with a key that is not in {}", Key::path(&self.data).display()))
                }
                (About::This(value), Ok(Some(key))) if !key.sealed(&value) => {
                    (1, "seal: not written by q4 conformance of this user, or changed since".into())
                }
                (About::This(value), Ok(Some(_))) => match serde_json::from_value::<Certificate>(value) {
                    Err(e) => (2, format!("fields: {e}")),
                    Ok(certificate) => match certificate.valid_for(backend, version, library, env, profile) {
                        Ok(()) => match (&certificate.device, device) {
                            (None, Device::Vendor { .. }) => {
                                (0, format!("device: certified without {device}"))
                            }
                            (Some(own), Device::Cpu | Device::Cuda(_)) => {
                                (0, format!("device: certified for {own}, now {device}"))
                            }
                            (Some(own), _) if !own.starts_with(&format!("{device} ")) => {
                                (0, format!("device: certified for {own}, now {device}"))
                            }
                            _ => return Ok(certificate),
                        },
                        // One of the same bytes is nearer than one of an older build.
                        Err(why) => (u8::from(certificate.sha256 != library.sha256), why),
                    },
                },
            };
            voids.push((why, path));
        }
        let option = if profile == Profile::Training { " --profile training" } else { "" };
        // The devices that were looked for are facts of the machine.
        let device = match device {
            Device::Vendor { .. } => format!(" --device {device}"),
            _ => if env.cuda.is_empty() { "" } else { " --device cuda" }.to_owned(),
        };
        let nearest = voids.iter().min();
        let have = match nearest {
            None => format!("none in {}", self.folder.display()),
            Some(((_, why), path)) => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                format!("one that is void: {why} ({})", printable(&name))
            }
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

    /// Files with the name of one, by name.
    fn files(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        let mut paths: Vec<_> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
        paths.retain(|p| p.extension().is_some_and(|e| e == "json"));
        paths.sort();
        paths
    }
}

/// What a file in the folder of certificates is about.
enum About {
    /// The backend in question.
    This(Value),
    /// The backend in question, in another version of the format.
    Unknown(String),
    /// Another backend.
    Others,
    /// Nothing, for this reason.
    Nothing(String),
}

impl About {
    fn of(bytes: &[u8], backend: &str) -> Self {
        let Ok(value) = serde_json::from_slice::<Value>(bytes) else {
            return Self::Nothing("not JSON".into());
        };
        match (value["schema"].as_str(), value["backend"].as_str()) {
            (_, Some(name)) if name != backend => Self::Others,
            (Some(SCHEMA), Some(_)) => Self::This(value),
            (Some(schema), Some(_)) if schema.starts_with(FAMILY) => Self::Unknown(printable(schema)),
            _ => Self::Nothing("no certificate".into()),
        }
    }
}

/// Without what a terminal would act on.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).take(128).collect()
}

/// The variables that [`data_dir`] looks at.
pub const DATA_VARIABLES: &str =
    if cfg!(windows) { "XDG_DATA_HOME or LOCALAPPDATA" } else { "XDG_DATA_HOME or HOME" };

/// Where everything lies that q4 keeps for a user.
pub fn data_dir() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let of_user = || match cfg!(windows) {
        true => absolute("LOCALAPPDATA"),
        false => absolute("HOME").map(|h| h.join(".local/share")),
    };
    Some(absolute("XDG_DATA_HOME").or_else(of_user)?.join("q4"))
}

#[cfg(test)]
mod tests;
