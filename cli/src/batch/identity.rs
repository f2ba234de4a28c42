//! What an answer is of, in 16 hexadecimal digits: a run that goes on can tell whether it would have given
//! it.
use q4_core::Result;
use q4_model::batch::Request;
use q4_model::checkpoint::{Checkpoint, TensorStore};
use q4_model::constraint::{Constraint, Thoughts};
use q4_model::plan::Plan;
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::{iter, thread};

/// Of a request: its tokens, how they are continued, the form of that and where it ends. A seed counts where
/// it was `seeded`.
pub fn request(request: &Request, form: Option<&(Constraint, Thoughts)>, seeded: bool) -> String {
    let Request { prompt, params, nudges, limits, .. } = request;
    let mut params = params.clone();
    if !seeded {
        params.seed = 0;
    }
    let (stops, strings, max) = (&limits.stop_ids, &limits.stop_strings, limits.max_tokens);
    digest([format!("{prompt:?} {params:?} {nudges:?} {stops:?} {strings:?} {max} {form:?}").as_bytes()])
}

/// Of what answers: the model, by its configuration, its texts, and the type, shape and bytes of each tensor;
/// the kernels in the plan; how the cache is kept and which instructions compute.
///
/// # Errors
/// Those of reading a tensor.
pub fn run(checkpoint: &Checkpoint, plan: &Plan, how: &str, threads: usize) -> Result<String> {
    let mut parts = String::from(how);
    for product in plan.products() {
        let spec = &product.spec;
        let (x, y) = (spec.x, spec.y);
        let _ = write!(parts, "\n{} {} {} {x:?} {y:?}", spec.name(), spec.schema, spec.activations.as_str());
        if let Ok(choice) = &product.choice {
            let _ = write!(parts, " {} {}", choice.backend.descriptor().name, choice.path);
        }
    }
    for tensor in checkpoint.store().entries() {
        let _ = write!(parts, "\n{} {} {:?}", tensor.name, tensor.stored_type, tensor.shape);
    }
    let files = ["config.json", "hf_quant_config.json", "tokenizer.json"].map(|name| checkpoint.file(name));
    let contents = contents(checkpoint.store(), threads)?;
    let texts = [parts.as_bytes()].into_iter().chain(files.iter().flatten().map(|f| &f[..]));
    Ok(digest(texts.chain(contents.iter().map(|hash| &hash[..]))))
}

/// The hash of each tensor's bytes: a second for two GB and each thread.
fn contents(store: &TensorStore, threads: usize) -> Result<Vec<[u8; 32]>> {
    let names: Vec<_> = store.entries().map(|t| t.name).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mine =
            iter::from_fn(|| names.get(next.fetch_add(1, Relaxed)).map(|name| (*name, store.tensor(name))));
        mine.map(|(name, t)| t.map(|t| (name, Sha256::digest(t.bytes).into()))).collect::<Result<Vec<_>>>()
    };
    let mut found: Vec<(&str, [u8; 32])> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        let done = workers.into_iter().map(|w| w.join().unwrap_or_else(|panic| resume_unwind(panic)));
        done.collect::<Result<Vec<_>>>().map(|each| each.concat())
    })?;
    found.sort_unstable();
    Ok(found.into_iter().map(|(_, hash)| hash).collect())
}

fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // With its length: parts cannot be mistaken for others that lie side by side.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()[..8].iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
