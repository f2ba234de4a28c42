//! Choosing one (backend, path) per layer, once, and saying why: pure, complete, never retried.
use crate::memory::UnifiedMemory;
use crate::{
    Candidate, Code, ComputePath, Device, Error, ExecPath, HostEnv, LinearSpec, Q4Backend, Reject,
    RejectCode, Result,
};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::{fmt, sync::Arc};

/// Named backends. They bind: a layer that one applies to is served by it or not at all.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Overrides {
    /// `(layer glob, backend)`; the last match wins over earlier ones and over `all`. `*` matches any text.
    pub layers: Vec<(String, String)>,
    /// Backend of every 4-bit layer.
    pub all: Option<String>,
    /// Third parties that were named without layers: of those that nobody else was named for, they have all
    /// that they can serve, whatever path or priority others have, and at least one.
    pub preferred: Vec<String>,
    /// Third parties. None serves a product that it was not named for.
    pub guests: BTreeSet<String>,
}

impl Overrides {
    /// From names as `--backend` takes them: `NAME` for all layers, `LAYER_GLOB=NAME` for some.
    ///
    /// # Errors
    /// [`Code::Usage`] for a name that is empty and for two names of all layers.
    pub fn parse(given: &[String]) -> Result<Self> {
        let mut overrides = Self::default();
        for text in given {
            let bad = || {
                Error::new(Code::Usage, format!("--backend {text}"))
                    .need("the name of a backend, or LAYER_GLOB=NAME with both sides filled in")
            };
            match text.rsplit_once('=') {
                Some((glob, name)) if !glob.is_empty() && !name.is_empty() => {
                    overrides.layers.push((glob.to_owned(), name.to_owned()));
                }
                None if !text.is_empty() => {
                    if let Some(other) = overrides.all.replace(text.clone()).filter(|other| other != text) {
                        return Err(Error::new(Code::Usage, "--backend names two backends for all layers")
                            .have(format!("{other} and {text}"))
                            .fix(format!(
                                "bind the layers apart, e.g. --backend {other} --backend '*.mlp.*={text}'"
                            )));
                    }
                }
                _ => return Err(bad()),
            }
        }
        Ok(overrides)
    }

    /// The backend named for a layer, if any.
    pub fn of(&self, layer: &str, is_packed: bool, offers_dense: bool) -> Option<&str> {
        let by_layer =
            self.layers.iter().rev().find(|(glob, _)| matches(glob, layer)).map(|(_, b)| b.as_str());
        // A backend named for the whole model is about its 4-bit layers; dense ones follow if it offers them.
        by_layer.or_else(|| self.all.as_deref().filter(|_| is_packed || offers_dense))
    }
}

/// What the user asked for.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Policy {
    /// Paths that are acceptable.
    pub compute: ComputePath,
    /// What is demanded of the memory of weights on a device.
    pub unified_memory: UnifiedMemory,
    /// Named backends.
    pub overrides: Overrides,
}

/// One (backend, path) that lost, with every reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rejection {
    /// Name.
    pub backend: String,
    /// The path it was asked about; `None` when it never came to that.
    pub path: Option<ExecPath>,
    /// Never empty.
    pub reasons: Vec<Reject>,
}

/// The decision for one layer.
#[derive(Clone)]
pub struct Selection {
    /// Winner.
    pub backend: Arc<dyn Q4Backend>,
    /// Its path; `prepare` gets exactly this.
    pub path: ExecPath,
    /// Every candidate that lost.
    pub rejected: Vec<Rejection>,
    /// A dense copy, though a kernel exists for this schema, or would if a dead candidate lived. Only under
    /// [`ComputePath::KernelOrFallback`]; a backend that the user named is a request and no downgrade.
    pub is_downgrade: bool,
}

impl fmt::Debug for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} via {} ({} rejected)", self.backend.descriptor().name, self.path, self.rejected.len())
    }
}

/// No backend, or more than one equally good backend.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SelectionError {
    /// A named backend does not exist at all.
    UnknownBackend {
        /// The name given.
        asked: String,
        /// Names that exist, dead ones included.
        known: Vec<String>,
    },
    /// Nobody can.
    NoneEligible {
        /// Layer.
        layer: String,
        /// Its encoding.
        schema: String,
        /// The policy in force.
        policy: ComputePath,
        /// The backend that was named.
        forced: Option<String>,
        /// Everybody, with reasons.
        rejected: Vec<Rejection>,
    },
    /// Two are equally good.
    Ambiguous {
        /// Layer.
        layer: String,
        /// The path they share.
        path: ExecPath,
        /// Their names.
        tied: Vec<String>,
    },
    /// Only a downgrade is possible, and the policy does not agree to one.
    DowngradeDenied {
        /// Layer.
        layer: String,
        /// The best path there is.
        got: ExecPath,
        /// Everybody better, with reasons.
        rejected: Vec<Rejection>,
    },
    /// The segments of one product are bound to different backends.
    SplitOverride {
        /// Layer group.
        layer: String,
        /// The names.
        asked: Vec<String>,
    },
}

/// Decides once per layer. Pure apart from calling the (pure) `can_prepare`.
///
/// ```
/// # use q4_core::{Activations, DType, Device, LinearSpec, OpSet, SegmentSpec, formats};
/// # let segments = vec![SegmentSpec { name: "lm_head".into(), rows: 256 }];
/// # let (schema, activations) = (formats::encodings("nvfp4")[0], Activations::Native);
/// # let (x, y, device, ops) = (DType::F32, DType::F32, Device::Cpu, OpSet::FORWARD);
/// # let spec = LinearSpec { segments, schema, k: 768, max_m: 1, x, y, activations, device, ops };
/// use q4_core::{Candidate, Code, Error, HostEnv, Policy, Reject, RejectCode, select};
///
/// let why = Reject::new(RejectCode::DeviceArch, "avx2", "a processor without it");
/// let candidates = [Candidate::Dead { name: "nvfp4-kernel".into(), reasons: vec![why.clone()] }];
/// let mut policy = Policy::default();
///
/// // Nobody is left out of the answer, and a reason is passed on as it was given.
/// let refused = select(&candidates, &spec, &policy, &HostEnv::collect()).unwrap_err();
/// assert_eq!(refused.rejected()[0].backend, "nvfp4-kernel");
/// assert_eq!(refused.rejected()[0].reasons, [why]);
/// assert_eq!(Error::from(refused).code(), Code::NoneEligible);
///
/// // A name that does not exist is never ignored.
/// policy.overrides.all = Some("nvfp4-kernle".into());
/// let refused = select(&candidates, &spec, &policy, &HostEnv::collect()).unwrap_err();
/// assert_eq!(Error::from(refused).code(), Code::UnknownBackend);
/// ```
///
/// # Errors
/// [`SelectionError`], with everybody who was refused and every reason.
pub fn select(
    candidates: &[Candidate],
    spec: &LinearSpec,
    policy: &Policy,
    env: &HostEnv,
) -> Result<Selection, SelectionError> {
    let schema = spec.schema.id().name;
    let forced = forced(candidates, spec, policy)?;
    let mut rejected = Vec::new();
    // Those that were named come first.
    let mut eligible: Vec<(bool, ExecPath, i32, Arc<dyn Q4Backend>)> = Vec::new();
    for candidate in candidates {
        let name = candidate.name().to_owned();
        let mut lose = |path, reasons| rejected.push(Rejection { backend: name.clone(), path, reasons });
        if let Some(f) = forced.as_ref().filter(|f| **f != name) {
            lose(
                None,
                vec![Reject::new(RejectCode::NotSelected, format!("`{f}`, as named"), format!("`{name}`"))],
            );
            continue;
        }
        let preferred = forced.is_none() && policy.overrides.preferred.contains(&name);
        if forced.is_none() && !preferred && policy.overrides.guests.contains(&name) {
            let need = format!("to be named: --backend {name}, or its file with --plugin");
            lose(None, vec![Reject::new(RejectCode::NotSelected, need, "a third party that was found")]);
            continue;
        }
        let backend = match candidate {
            Candidate::Live(b) => b,
            Candidate::Dead { reasons, .. } => {
                lose(None, reasons.clone());
                continue;
            }
        };
        let offers = &backend.descriptor().offers;
        let mut paths: Vec<_> = offers.iter().filter(|(s, _)| s == schema).map(|(_, p)| *p).collect();
        paths.sort_unstable();
        if paths.is_empty() {
            let mut known: Vec<_> = offers.iter().map(|(s, _)| s.as_ref()).collect();
            known.sort_unstable();
            known.dedup();
            lose(None, vec![Reject::new(RejectCode::SchemaUnsupported, schema, known.join(", "))]);
        }
        for path in paths {
            // The oracle runs only where it is named and no other path is asked for. A dense matrix is not a
            // 4-bit product: kernel-only is about codes that would be expanded, and there are none.
            let open = matches!(policy.compute, ComputePath::Auto | ComputePath::KernelOrFallback);
            let named_oracle = path == ExecPath::Reference && forced.is_some() && open;
            let dense = !spec.schema.is_packed() && path == ExecPath::DequantMatmul;
            if !policy.compute.admits().contains(&path) && !named_oracle && !dense {
                lose(
                    Some(path),
                    vec![Reject::new(RejectCode::PathNotAdmitted, policy.compute.as_str(), path.as_str())],
                );
                continue;
            }
            let is_shared = policy.unified_memory != UnifiedMemory::Require || backend.manages_memory();
            if spec.device != Device::Cpu && !is_shared {
                let (need, have) = ("weights in managed memory, as required", "plain memory of the device");
                lose(Some(path), vec![Reject::new(RejectCode::UnifiedMemory, need, have)]);
                continue;
            }
            match backend.can_prepare(spec, path, env) {
                Ok(()) => eligible.push((!preferred, path, backend.descriptor().priority, backend.clone())),
                Err(reasons) => lose(Some(path), reasons),
            }
        }
    }
    eligible.sort_by_key(|(unnamed, path, priority, _)| (*unnamed, *path, -i64::from(*priority)));
    let Some((unnamed, path, priority, backend)) = eligible.first().cloned() else {
        let (layer, schema) = (spec.name(), spec.schema.to_string());
        return Err(SelectionError::NoneEligible { layer, schema, policy: policy.compute, forced, rejected });
    };
    let tied: Vec<_> = eligible
        .iter()
        .filter(|e| (e.0, e.1, e.2) == (unnamed, path, priority))
        .map(|e| e.3.descriptor().name.to_string())
        .collect();
    if tied.len() > 1 {
        return Err(SelectionError::Ambiguous { layer: spec.name(), path, tied });
    }
    for (other_unnamed, p, other_priority, b) in eligible.iter().skip(1) {
        let need = if unnamed == *other_unnamed {
            format!("better than {path}, priority {priority}")
        } else {
            format!("`{}`, as named", backend.descriptor().name)
        };
        let have = format!("{p}, priority {other_priority}");
        rejected.push(Rejection {
            backend: b.descriptor().name.to_string(),
            path: Some(*p),
            reasons: vec![Reject::new(RejectCode::NotSelected, need, have)],
        });
    }
    let wanted_better =
        forced.is_none() && unnamed && spec.schema.is_packed() && policy.compute.admits()[0] < path;
    let is_downgrade = wanted_better && rejected.iter().any(|r| lost_to_circumstance(r, path));
    if policy.compute == ComputePath::Auto && is_downgrade {
        return Err(SelectionError::DowngradeDenied { layer: spec.name(), got: path, rejected });
    }
    Ok(Selection { backend, path, rejected, is_downgrade })
}

/// A candidate that would have been better than `path`, or is dead and might have been.
fn lost_to_circumstance(r: &Rejection, path: ExecPath) -> bool {
    use RejectCode::{DeviceUnsupported, NotSelected, SchemaUnsupported};
    // A kernel for devices of another kind is none for this one.
    let chosen_against = |x: &Reject| matches!(x.code, NotSelected | SchemaUnsupported | DeviceUnsupported);
    path == ExecPath::DequantMatmul
        && r.path.is_none_or(|p| p < ExecPath::DequantMatmul)
        && !r.reasons.iter().any(chosen_against)
}

fn forced(
    candidates: &[Candidate],
    spec: &LinearSpec,
    policy: &Policy,
) -> Result<Option<String>, SelectionError> {
    let offers_dense = policy.overrides.all.as_deref().is_some_and(|name| {
        candidates.iter().any(|c| match c {
            Candidate::Live(b) => c.name() == name && b.descriptor().offers.iter().any(|(s, _)| s == "dense"),
            Candidate::Dead { .. } => false,
        })
    });
    let mut asked: Vec<_> = spec
        .segments
        .iter()
        .map(|s| policy.overrides.of(&s.name, spec.schema.is_packed(), offers_dense).map(str::to_owned))
        .collect();
    asked.dedup();
    // A misspelt name is an error wherever it stands, also where this layer would not be bound by it.
    let named = policy.overrides.all.iter().chain(policy.overrides.layers.iter().map(|(_, name)| name));
    if let Some(unknown) = named.into_iter().find(|n| !candidates.iter().any(|c| c.name() == **n)) {
        let known = candidates.iter().map(|c| c.name().to_owned()).collect();
        return Err(SelectionError::UnknownBackend { asked: unknown.clone(), known });
    }
    match asked.as_slice() {
        [one] => Ok(one.clone()),
        several => {
            let asked = several.iter().map(|a| a.clone().unwrap_or_else(|| "no backend".into())).collect();
            Err(SelectionError::SplitOverride { layer: spec.name(), asked })
        }
    }
}

/// `*` stands for any text, everything else for itself; a pattern without `*` may also be the end of a name.
pub fn matches(glob: &str, name: &str) -> bool {
    let mut parts = glob.split('*');
    let first = parts.next().unwrap_or("");
    let Some(last) = parts.next_back() else {
        return name == glob || name.strip_suffix(glob).is_some_and(|head| head.ends_with('.'));
    };
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.len() >= last.len() && rest.ends_with(last)
}

impl SelectionError {
    /// Everybody who was refused.
    pub fn rejected(&self) -> &[Rejection] {
        match self {
            Self::NoneEligible { rejected, .. } | Self::DowngradeDenied { rejected, .. } => rejected,
            _ => &[],
        }
    }
}

impl fmt::Display for SelectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownBackend { asked, .. } => write!(f, "no backend is named `{asked}`"),
            Self::Ambiguous { layer, path, tied } => {
                write!(f, "{layer}: {} tie on {path}", tied.join(" and "))
            }
            Self::SplitOverride { layer, asked } => {
                write!(f, "{layer}: one product, bound to {}", asked.join(" and "))
            }
            Self::NoneEligible { layer, schema, policy, forced, rejected } => {
                write!(f, "{layer}: no backend can serve {schema} under {policy}")?;
                if let Some(b) = forced {
                    write!(f, " with `{b}` named")?;
                }
                list(f, rejected)
            }
            Self::DowngradeDenied { layer, got, rejected } => {
                write!(f, "{layer}: the best path left is {got}, a downgrade, which nobody agreed to")?;
                list(f, rejected)
            }
        }
    }
}

fn list(f: &mut fmt::Formatter<'_>, rejected: &[Rejection]) -> fmt::Result {
    for r in rejected {
        let path = r.path.map_or("-", ExecPath::as_str);
        for reason in &r.reasons {
            write!(f, "\n  {:<14} {path:<14} {reason}", r.backend)?;
        }
    }
    Ok(())
}

impl std::error::Error for SelectionError {}

impl From<SelectionError> for Error {
    fn from(e: SelectionError) -> Self {
        let text = e.to_string();
        match e {
            SelectionError::UnknownBackend { known, .. } => {
                let mut names: BTreeMap<String, ()> = known.into_iter().map(|k| (k, ())).collect();
                let known = std::mem::take(&mut names).into_keys().collect::<Vec<_>>().join(", ");
                Error::new(Code::UnknownBackend, text).need(format!("one of {known}"))
            }
            SelectionError::NoneEligible { forced, .. } => {
                let e = Error::new(Code::NoneEligible, text);
                match forced {
                    Some(_) => e.fix("name another backend, or leave the choice to q4 by dropping --backend"),
                    None => e.fix(
                        "`q4 explain MODEL` shows every layer; --compute kernel-or-fallback also admits a dense product",
                    ),
                }
            }
            SelectionError::Ambiguous { .. } => {
                Error::new(Code::Ambiguous, text).fix("name one with --backend")
            }
            SelectionError::SplitOverride { .. } => {
                Error::new(Code::Ambiguous, text).fix("bind all layers of the group to one backend")
            }
            SelectionError::DowngradeDenied { .. } => Error::new(Code::DowngradeDenied, text).fix(
                "--compute kernel-or-fallback accepts dense copies, slower and larger; each is reported",
            ),
        }
    }
}
