//! What an answer is of, in 16 hexadecimal digits: a run that goes on can tell whether it would have given it.
use q4_model::batch::Request;
use q4_model::checkpoint::Checkpoint;
use q4_model::constraint::{Constraint, Thoughts};
use q4_model::plan::Plan;
use sha2::{Digest, Sha256};
use std::fmt::Write;

/// Bytes at either end of a tensor that stand for it.
const END: usize = 4096;

/// Of a request: its tokens, how they are continued, the form of that and where it ends. A seed counts where it was
/// `seeded`.
pub fn request(request: &Request, form: Option<&(Constraint, Thoughts)>, seeded: bool) -> String {
    let Request { prompt, params, nudges, limits, .. } = request;
    let mut params = params.clone();
    if !seeded {
        params.seed = 0;
    }
    let (stops, strings, max) = (&limits.stop_ids, &limits.stop_strings, limits.max_tokens);
    digest([format!("{prompt:?} {params:?} {nudges:?} {stops:?} {strings:?} {max} {form:?}").as_bytes()])
}

/// Of what answers: the model, by its configuration, its texts, and the type, shape and both ends of each tensor;
/// the kernels in the plan; how the cache is kept and which instructions compute.
pub fn run(checkpoint: &Checkpoint, plan: &Plan, how: &str) -> String {
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
    let tensors = checkpoint.store().entries().filter_map(|t| checkpoint.store().tensor(t.name).ok());
    let ends = tensors.flat_map(|t| {
        let end = t.bytes.len().min(END);
        [&t.bytes[..end], &t.bytes[t.bytes.len() - end..]]
    });
    digest([parts.as_bytes()].into_iter().chain(files.iter().flatten().map(|f| &f[..])).chain(ends))
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
