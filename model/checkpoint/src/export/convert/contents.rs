//! What a checkpoint holds, whatever its layout: matrices to be decoded, scales of inputs, and tensors as
//! they are.
use crate::{Checkpoint, Head, Layer, Stored, names};
use q4_core::detect::{Detected, Layout};
use q4_core::{Code, DType, Error, GlobalScale, Result};
use std::collections::{BTreeMap, BTreeSet};

/// One thing that has a value.
pub(super) enum Content<'a> {
    /// A packed matrix.
    Matrix(Box<Layer<'a>>),
    /// An embedding or a head in blocks that only GGUF files hold, to be written in floats.
    Decoded(Box<Layer<'a>>),
    /// The per-tensor scale of a layer's inputs.
    Inputs(GlobalScale),
    /// Any other tensor.
    Tensor(Stored<'a>),
    /// One of 16-bit floats, to be written in f32.
    Widened(Stored<'a>),
}

/// Contents by name: a matrix is `LAYER.weight` and a scale of inputs `LAYER.inputs` in every layout.
pub(super) type Contents<'a> = BTreeMap<String, Content<'a>>;

/// Everything in `checkpoint`. Errors are those of its layers; [`Code::TensorType`] for a tensor that could
/// not be copied.
pub(super) fn contents(checkpoint: &Checkpoint) -> Result<Contents<'_>> {
    let config = checkpoint.config();
    let mut layers = Vec::new();
    for (name, n, k) in (0..config.num_hidden_layers).flat_map(|i| names::linears(config, i)) {
        layers.push(checkpoint.bind(&name, n, k)?);
    }
    if let Head::Quantised(head) = checkpoint.bind_head()? {
        layers.push(*head);
    }
    layers.retain(|l| l.detected.schema.is_packed());
    let module = config.arch.names.embedding;
    let bind = |_| checkpoint.bind(module, config.vocab_size, config.hidden_size);
    let embedding = checkpoint.blocks_of(module).map(bind).transpose()?;
    let parts: BTreeSet<String> =
        layers.iter().chain(&embedding).flat_map(|l| tensors(&l.detected)).collect();
    let blocks = layers.pop_if(|l| l.name == config.arch.names.head && l.detected.layout == Layout::Gguf);
    let mut contents = Contents::new();
    for name in checkpoint.table().keys().filter(|name| !parts.contains(*name)) {
        contents.insert(name.to_owned(), Content::Tensor(checkpoint.tensor(name)?));
    }
    // Those of a tied head are the embedding's.
    for layer in blocks.filter(|_| !config.tie_word_embeddings).into_iter().chain(embedding) {
        contents.insert(format!("{}.weight", layer.name), Content::Decoded(Box::new(layer)));
    }
    for layer in layers {
        let inputs =
            layer.input_scale().map(|scale| (format!("{}.inputs", layer.name), Content::Inputs(scale)));
        let matrix = (format!("{}.weight", layer.name), Content::Matrix(Box::new(layer)));
        for (name, content) in inputs.into_iter().chain([matrix]) {
            if contents.contains_key(&name) {
                return Err(Error::new(Code::SchemaInvalid, format!("`{name}`"))
                    .need("no tensor of that name beside the packed layer")
                    .have("one"));
            }
            contents.insert(name, content);
        }
    }
    Ok(contents)
}

/// Vectors in f32, for engines of GGUF files multiply by no others.
pub(super) fn widen(contents: &mut Contents<'_>) {
    for content in contents.values_mut() {
        if let Content::Tensor(stored) = content
            && stored.shape.len() == 1
            && matches!(stored.dtype, DType::F16 | DType::BF16)
        {
            *content = Content::Widened(*stored);
        }
    }
}

/// The packed layers among `contents`, in order.
pub(super) fn matrices<'c, 'a>(contents: &'c Contents<'a>) -> impl Iterator<Item = &'c Layer<'a>> {
    contents.values().filter_map(|c| match c {
        Content::Matrix(layer) => Some(&**layer),
        _ => None,
    })
}

/// Full names of all tensors that a layer may have.
pub(super) fn tensors(layer: &Detected) -> Vec<String> {
    let mut names: Vec<_> = layer.keys.all().map(str::to_owned).collect();
    let weight = &layer.keys.weight;
    let module = weight.rsplit_once('.').map_or("", |(module, _)| module);
    match layer.layout {
        Layout::Bitsandbytes => names.push(format!("{weight}.quant_state.bitsandbytes__nf4")),
        // They say again what shapes and order of the others do.
        Layout::CompressedTensors => names.push(format!("{module}.weight_shape")),
        Layout::Gptq => names.push(format!("{module}.g_idx")),
        _ => {}
    }
    names
}
