//! What proof there is of each backend that computes a model here: its self-check, and the certificate of a
//! third party's library.
use crate::context::Context;
use crate::plugins;
use q4_conformance::Certificate;
use q4_core::{Dispatch, ExecPath, LibraryFacts, Result};
use q4_model::plan::Plan;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// The document of `/v1/q4/certificates`, of a model that is loaded.
#[derive(Debug, Serialize)]
pub struct Proofs {
    schema: &'static str,
    model: String,
    device: String,
    /// Products that were trusted without a check (`--no-self-check`).
    skipped_self_checks: u64,
    backends: Vec<Proof>,
}

/// Of one backend.
#[derive(Debug, Serialize)]
struct Proof {
    backend: String,
    version: String,
    vendor: String,
    origin: Origin,
    /// Products that it computes.
    products: usize,
    paths: BTreeSet<ExecPath>,
    schemas: BTreeSet<String>,
    /// The file that its code is in, beside the executable.
    library: Option<LibraryFacts>,
    /// The first product of each kind and shape, against the oracle, before any request: here, or by the same
    /// executable on this machine earlier, which only a built-in is believed.
    self_check: &'static str,
    /// Without one nothing of a third party's library runs.
    certificate: Option<Certificate>,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Origin {
    BuiltIn,
    Plugin,
}

impl Proofs {
    /// Of everybody whom `plan` chose, with certificates read again as when their libraries were loaded.
    ///
    /// # Errors
    /// [`q4_core::Code::LibraryRefused`] where a certificate is gone since, or the library another one.
    pub fn new(cx: &Context, model: &str, dispatch: &Dispatch, plan: &Plan) -> Result<Self> {
        let (registry, device) = (dispatch.registry(), cx.device()?);
        let mut found: BTreeMap<String, Proof> = BTreeMap::new();
        for product in plan.products() {
            let Ok(choice) = &product.choice else { continue };
            let who = choice.backend.descriptor();
            let name = who.name.to_string();
            let is_guest = registry.guests().contains(&name);
            let library = registry.env().libraries.get(&name).cloned();
            let proof = found.entry(name.clone()).or_insert_with(|| Proof {
                backend: name,
                version: who.version.to_string(),
                vendor: who.vendor.to_string(),
                origin: if is_guest { Origin::Plugin } else { Origin::BuiltIn },
                products: 0,
                paths: BTreeSet::new(),
                schemas: BTreeSet::new(),
                library,
                self_check: "passed",
                certificate: None,
            });
            proof.products += 1;
            proof.paths.insert(choice.path);
            proof.schemas.insert(product.spec.schema.to_string());
        }
        for proof in found.values_mut().filter(|proof| matches!(proof.origin, Origin::Plugin)) {
            if let Some(library) = &proof.library {
                proof.certificate = Some(plugins::certificate(library, registry.env(), device)?);
            }
        }
        let backends = found.into_values().collect();
        let (model, device) = (model.to_owned(), device.to_string());
        Ok(Self { schema: "q4.certificates/1", model, device, skipped_self_checks: 0, backends })
    }

    /// The same once all is loaded: of `skipped` products nobody looked at the first one.
    pub fn loaded(mut self, skipped: u64) -> Self {
        self.skipped_self_checks = skipped;
        if skipped > 0 {
            self.backends.iter_mut().for_each(|proof| proof.self_check = "skipped");
        }
        self
    }
}
