//! What a result is about: the bytes of a library and of all that it loads besides itself, the machine, a
//! device.
use q4_core::{Error, HostEnv, Result, VendorDevice};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;

/// A file of machine code and its bytes' digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    /// Where it was loaded from.
    pub path: String,
    /// Lower-case hex.
    pub sha256: String,
    /// Libraries that it needs and that are not the system's, in the order of their names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<Needed>,
}

/// A library that another one needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Needed {
    /// As the other one names it: a soname or a path.
    pub name: String,
    /// Where it was found.
    pub path: String,
    /// Lower-case hex.
    pub sha256: String,
}

impl Library {
    /// Reads and digests a file that needs nothing but the system's libraries.
    ///
    /// # Errors
    /// `Io` or `ModelMissing` when it cannot be read.
    pub fn of(path: &Path) -> Result<Self> {
        let mut digest = Sha256::new();
        let copied = File::open(path)
            .and_then(|file| io::copy(&mut BufReader::with_capacity(1 << 16, file), &mut digest));
        copied.map_err(|e| Error::io(path, &e))?;
        let sha256 = format!("{:x}", digest.finalize());
        Ok(Self { path: path.display().to_string(), sha256, needs: Vec::new() })
    }
}

/// What decides how kernels compute: architecture, CPU features, devices and driver. How many processors a
/// process may use and which built-in libraries it found are no part of it.
pub fn facts(env: &HostEnv) -> Vec<String> {
    let mut facts = vec![env.arch.clone()];
    facts.extend(env.cpu_features.iter().cloned());
    facts.extend(env.cuda_driver.map(|driver| format!("CUDA driver {driver}")));
    facts.extend(env.cuda.iter().map(|d| format!("cuda:{} {} {} {}", d.ordinal, d.arch(), d.name, d.memory)));
    facts
}

/// A device of a third party's, as a certificate names it: spelling, name and fingerprint.
pub fn device_fact(device: &VendorDevice) -> String {
    format!("{} {} ({})", device.device, device.name, device.fingerprint)
}

/// Fingerprint of [`facts`]. Lower-case hex.
pub fn machine(env: &HostEnv) -> String {
    format!("{:x}", Sha256::digest(facts(env).join("\n")))[..32].to_owned()
}
