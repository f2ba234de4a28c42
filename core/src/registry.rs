//! The backends a process knows: built-ins through `inventory`, sorted and checked against a list of names;
//! plugins later.
use crate::memory::UnifiedMemory;
use crate::{Candidate, Code, Error, HostEnv, LibraryFacts, Q4Backend, Reject, RejectCode, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::{path::PathBuf, sync::Arc};

/// What a built-in backend may be told when it is constructed.
#[derive(Clone, Debug, Default)]
pub struct BuiltinOptions {
    /// Library to load instead of searching, by backend name.
    pub libraries: BTreeMap<String, PathBuf>,
    /// Instruction set to use instead of the best one (`Q4_ISA`).
    pub isa: Option<String>,
    /// Look for CUDA devices and open this one; a program that stays on the CPU need not pay for that.
    pub cuda: Option<u32>,
    /// What is done with memory that host and device share.
    pub unified_memory: UnifiedMemory,
}

/// A constructed built-in and the library behind it.
pub struct Built {
    /// The backend.
    pub backend: Arc<dyn Q4Backend>,
    /// Facts of its library, for [`HostEnv::libraries`].
    pub library: Option<LibraryFacts>,
    /// Compute capabilities it has machine code for on disk, for [`crate::CudaTools::images`]. Empty unless
    /// [`BuiltinOptions::cuda`] asks for a device.
    pub images: Vec<(u32, u32)>,
}

impl Built {
    /// A backend without a library of its own.
    pub fn new(backend: Arc<dyn Q4Backend>) -> Self {
        Self { backend, library: None, images: Vec::new() }
    }
}

/// How a built-in announces itself: `inventory::submit! { Registration { .. } }` in its `lib.rs`.
pub struct Registration {
    /// Its name.
    pub name: &'static str,
    /// Builds it for a machine, or says with every reason why it cannot be used there.
    pub construct: fn(&BuiltinOptions, &HostEnv) -> std::result::Result<Built, Vec<Reject>>,
}
inventory::collect!(Registration);

/// Names every complete build has. A name that nobody registered stays in the list as a dead candidate.
pub const BUILTINS: [&str; 8] = [
    "dequant-matmul",
    "fp8-kernel",
    "ggml-kernel",
    "int4-kernel",
    "mxfp4-kernel",
    "nf4-kernel",
    "nvfp4-kernel",
    "reference",
];

/// All candidates of this process, sorted by name, names unique.
pub struct Registry {
    candidates: Vec<Candidate>,
    guests: BTreeSet<String>,
    env: HostEnv,
}

impl Registry {
    /// Constructs every registered built-in on this machine.
    ///
    /// # Errors
    /// [`Code::Internal`] for a backend that is registered twice or under a name that is not its own.
    pub fn builtin(options: &BuiltinOptions) -> Result<Self> {
        let mut env = HostEnv::collect();
        if options.cuda.is_some() {
            env.find_cuda(options.cuda);
        }
        Self::on(env, options)
    }

    /// The same for a machine that is described by data and need not be here: what its backends answer
    /// follows from `env` alone. Without [`BuiltinOptions::cuda`] none of them looks at a device or its
    /// libraries.
    ///
    /// # Errors
    /// As [`builtin`](Self::builtin).
    pub fn on(mut env: HostEnv, options: &BuiltinOptions) -> Result<Self> {
        let mut found: BTreeMap<&'static str, Candidate> = BTreeMap::new();
        for r in inventory::iter::<Registration> {
            let candidate = match (r.construct)(options, &env) {
                Ok(built) => {
                    env.libraries.extend(built.library.map(|facts| (r.name.to_owned(), facts)));
                    if !built.images.is_empty() {
                        env.cuda_tools.images.insert(r.name.to_owned(), built.images);
                    }
                    Candidate::Live(built.backend)
                }
                Err(reasons) => Candidate::Dead { name: r.name.into(), reasons },
            };
            if candidate.name() != r.name || found.insert(r.name, candidate).is_some() {
                return Err(Error::new(
                    Code::Internal,
                    format!("backend `{}` is registered twice or misnamed", r.name),
                ));
            }
        }
        for name in BUILTINS {
            found.entry(name).or_insert_with(|| Candidate::Dead {
                name: name.into(),
                reasons: vec![Reject::new(
                    RejectCode::NotCompiledIn,
                    format!("a build with {name}"),
                    "this one",
                )],
            });
        }
        Ok(Self { candidates: found.into_values().collect(), guests: BTreeSet::new(), env })
    }

    /// Adds a loaded or refused third party, which serves what it is named for and nothing else.
    ///
    /// # Errors
    /// [`Code::LibraryRefused`] for a name that exists already.
    pub fn add(&mut self, candidate: Candidate) -> Result<()> {
        match self.candidates.binary_search_by(|c| c.name().cmp(candidate.name())) {
            Ok(_) => Err(Error::new(
                Code::LibraryRefused,
                format!("a backend named `{}` exists already", candidate.name()),
            )
            .need("a unique name")),
            Err(at) => {
                if let Candidate::Live(backend) = &candidate {
                    self.env.vendor.extend(backend.devices());
                    self.env.vendor.sort_by_key(|d| d.device);
                }
                self.guests.insert(candidate.name().to_owned());
                self.candidates.insert(at, candidate);
                Ok(())
            }
        }
    }

    /// Records the library behind a candidate, for reports and for whoever checks its file.
    pub fn loaded(&mut self, name: &str, facts: LibraryFacts) {
        self.env.libraries.insert(name.to_owned(), facts);
    }

    /// Everybody, dead ones included, sorted by name.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }
    /// Names of third parties.
    pub fn guests(&self) -> &BTreeSet<String> {
        &self.guests
    }
    /// The machine selection decides for.
    pub fn env(&self) -> &HostEnv {
        &self.env
    }
    /// The live backend of that name.
    pub fn live(&self, name: &str) -> Option<&Arc<dyn Q4Backend>> {
        self.candidates.iter().find_map(|c| match c {
            Candidate::Live(b) if c.name() == name => Some(b),
            _ => None,
        })
    }
}
