//! How far the matrices of a model are from those of the one that it was made from.
use crate::checkpoint::{Checkpoint, Head, Layer, names, quantize::distance_db};
use q4_core::{Code, Error, Result, ThreadPool};
use serde::Serialize;

/// One matrix.
#[derive(Clone, Debug, Serialize)]
pub struct Matrix {
    /// Module.
    pub name: String,
    /// Out and in features.
    pub shape: [usize; 2],
    /// Its encoding, as people read it.
    pub schema: String,
    /// How its tensors are arranged.
    pub layout: &'static str,
    /// Whether its groups are made of any in features.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub act_order: bool,
    /// Bits that a weight takes, scales and all.
    pub bits: f64,
    /// Signal-to-noise ratio against the original, in dB: null where there is none, or where both are the
    /// same.
    pub sqnr_db: Option<f64>,
    /// Whether both are the same, value by value; null without an original.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same: Option<bool>,
}

/// The linear layers and the head of its own of `checkpoint`, compared with those of `original` where that is
/// given. What cannot be bound is left out: verifying tells why.
///
/// # Errors
/// [`Code::TensorMissing`] and others of [`Checkpoint::bind`] for a matrix that the original does not have or
/// has in another shape.
pub fn matrices(
    checkpoint: &Checkpoint,
    original: Option<&Checkpoint>,
    threads: &ThreadPool,
    step: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Matrix>> {
    let config = checkpoint.config();
    let names = (0..config.num_hidden_layers).flat_map(|i| names::linears(config, i));
    let mut layers: Vec<_> = names.filter_map(|(name, n, k)| checkpoint.bind(&name, n, k).ok()).collect();
    if matches!(checkpoint.bind_head(), Ok(Head::Dense(_) | Head::Quantised(_)))
        && !config.tie_word_embeddings
    {
        let head = checkpoint.bind(config.arch.names.head, config.vocab_size, config.hidden_size);
        layers.extend(head.ok());
    }
    let all = layers.len();
    let mut found = Vec::with_capacity(all);
    for (i, layer) in layers.into_iter().enumerate() {
        let of = original.map(|original| distance(&layer, original, threads)).transpose()?;
        checkpoint.release(&layer.detected);
        let (schema, shape) = (layer.detected.schema, [layer.detected.n, layer.detected.k]);
        found.push(Matrix {
            name: layer.name,
            shape,
            schema: schema.to_string(),
            layout: layer.detected.layout.as_str(),
            act_order: layer.order.is_some(),
            bits: 8.0 * schema.stored_bytes(shape[0], shape[1]) as f64 / (shape[0] * shape[1]) as f64,
            sqnr_db: of.filter(|db| db.is_finite()),
            same: of.map(|db| db == f64::INFINITY),
        });
        step(i + 1, all);
    }
    Ok(found)
}

fn distance(layer: &Layer<'_>, original: &Checkpoint, threads: &ThreadPool) -> Result<f64> {
    let within = |e: Error| e.within("the original");
    let other = original.bind(&layer.name, layer.detected.n, layer.detected.k).map_err(within)?;
    let db = distance_db(&other.rows()?, &layer.rows()?, threads)?;
    original.release(&other.detected);
    match db.is_nan() {
        true => {
            Err(Error::new(Code::ValueInvalid, format!("`{}`", layer.name)).need("finite weights in both"))
        }
        false => Ok(db),
    }
}
