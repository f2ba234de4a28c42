//! Decides, from names, types and shapes alone, which tensors are quantised and which are copied.
//!
//! A glob that names nothing is an error: what was asked for and did not happen must not pass for done.
use super::safetensors::Entry;
use super::{ExportPlan, layout};
use crate::Checkpoint;
use crate::arch::Names;
use q4_core::detect::{Layout, TensorMeta};
use q4_core::{Code, DType, Error, Result, matches};

/// One tensor to read and what it becomes.
pub(super) struct Item {
    /// Name in the input.
    pub source: String,
    /// Its size there.
    pub bytes_in: u64,
    /// `None`: copied.
    pub matrix: Option<Matrix>,
    /// Tensors of the output.
    pub entries: Vec<Entry>,
}

/// A matrix to quantise.
pub(super) struct Matrix {
    /// Name of the layer in the output.
    pub layer: String,
    pub n: usize,
    pub k: usize,
    pub dtype: DType,
    /// Matrices with the same group share a per-tensor scale.
    pub group: Option<String>,
}

/// Everything to be written, sorted by input name.
pub(super) fn items(checkpoint: &Checkpoint, plan: &ExportPlan) -> Result<Vec<Item>> {
    let table = checkpoint.table();
    refuse_4bit(checkpoint)?;
    let names = &checkpoint.config().arch.names;
    let mut choice = Choice::new(plan, names);
    let mut items = Vec::with_capacity(table.len());
    for (name, meta) in table.iter() {
        let dtype = meta.dtype.ok_or_else(|| {
            Error::new(Code::TensorType, name).need("an element type that can be copied or quantised")
        })?;
        let mut head = None;
        // The .dat convention stores the output layer packed even where it is tied to the embedding.
        if plan.layout == Layout::Dat
            && name.strip_suffix(".weight") == Some(names.embedding)
            && checkpoint.config().tie_word_embeddings
            && !table.contains_key(&format!("{}.weight", names.head))
            && choice.takes(names.head)
        {
            head = Some(quantised(names.head, name, meta, dtype, plan)?);
        }
        let layer = name.strip_suffix(".weight").filter(|l| *l != names.embedding && meta.shape.len() == 2);
        items.push(match layer.filter(|l| choice.takes(l)) {
            Some(layer) => quantised(layer, name, meta, dtype, plan)?,
            None => copied(name, meta, dtype),
        });
        items.extend(head);
    }
    choice.finish()?;
    if items.iter().all(|i| i.matrix.is_none()) {
        return Err(Error::new(Code::Usage, "nothing is left to quantise")
            .need("at least one linear layer")
            .fix("exclude less"));
    }
    Ok(items)
}

/// Which layers the globs and the default set choose.
struct Choice<'a> {
    plan: &'a ExportPlan,
    names: &'a Names,
    /// Globs of `include` and `exclude` that matched a layer.
    used: Vec<bool>,
}

impl<'a> Choice<'a> {
    fn new(plan: &'a ExportPlan, names: &'a Names) -> Self {
        Self { plan, names, used: vec![false; plan.include.len() + plan.exclude.len()] }
    }

    fn takes(&mut self, layer: &str) -> bool {
        let last = |module: &str| module.rsplit('.').next().map(str::to_owned);
        let default = self.names.linears().iter().any(|l| last(l) == last(layer))
            || (self.plan.layout == Layout::Dat && layer == self.names.head);
        let hit: Vec<bool> =
            self.plan.include.iter().chain(&self.plan.exclude).map(|g| matches(g, layer)).collect();
        let (included, excluded) = hit.split_at(self.plan.include.len());
        let takes = (default || included.contains(&true)) && !excluded.contains(&true);
        self.used.iter_mut().zip(&hit).for_each(|(used, hit)| *used |= hit);
        takes
    }

    fn finish(self) -> Result<()> {
        let globs = self.plan.include.iter().chain(&self.plan.exclude);
        match globs.zip(self.used).find(|(_, used)| !used) {
            None => Ok(()),
            Some((glob, _)) => {
                Err(Error::new(Code::Usage, format!("`{glob}` names no linear layer of the checkpoint"))
                    .need("the name of a layer, or a glob, e.g. `model.layers.0.*`")
                    .fix("a tied lm_head has no tensor of its own; `q4 inspect` lists the tensors"))
            }
        }
    }
}

fn quantised(layer: &str, source: &str, meta: &TensorMeta, dtype: DType, plan: &ExportPlan) -> Result<Item> {
    let &[n, k] = &*meta.shape else {
        return Err(Error::new(Code::TensorShape, source).need("a matrix").have(format!("{:?}", meta.shape)));
    };
    let need = plan.target.lacks(plan.layout, n, k);
    if let Some(need) = need.or((n == 0 || k == 0).then_some("at least one element")) {
        return Err(Error::new(Code::TensorShape, source)
            .need(need)
            .have(format!("[{n}, {k}]"))
            .fix(format!("keep it dense: --exclude {layer}")));
    }
    if !dtype.is_io() {
        return Err(Error::new(Code::TensorType, source)
            .need("float32, float16 or bfloat16")
            .have(dtype.as_str()));
    }
    let two_level = plan.target.schema().global().is_some();
    let group = if plan.share_groups && two_level { group_of(layer) } else { None };
    let entries = layout::entries(plan.layout, plan.target.schema(), layer, dtype, n, k);
    let matrix = Matrix { layer: layer.to_owned(), n, k, dtype, group };
    Ok(Item { source: source.to_owned(), bytes_in: size(meta, dtype), matrix: Some(matrix), entries })
}

fn copied(name: &str, meta: &TensorMeta, dtype: DType) -> Item {
    let entries = vec![Entry::new(name, dtype, &meta.shape)];
    Item { source: name.to_owned(), bytes_in: size(meta, dtype), matrix: None, entries }
}

fn size(meta: &TensorMeta, dtype: DType) -> u64 {
    meta.shape.iter().product::<usize>() as u64 * dtype.size() as u64
}

fn group_of(layer: &str) -> Option<String> {
    let (parent, name) = layer.rsplit_once('.')?;
    let group = match name {
        "q_proj" | "k_proj" | "v_proj" => "q/k/v",
        "gate_proj" | "up_proj" => "gate/up",
        _ => return None,
    };
    Some(format!("{parent}.{group}"))
}

fn refuse_4bit(checkpoint: &Checkpoint) -> Result<()> {
    const MARKS: [&str; 7] = [
        ".weight_packed",
        "._weight_qdata",
        ".qdata",
        ".weight_scale",
        ".absmax",
        ".quant_map",
        ".weight_scale_inv",
    ];
    let packed = |(name, meta): &(&str, &TensorMeta)| {
        MARKS.iter().any(|m| name.ends_with(m))
            || (name.ends_with("_proj.weight") && meta.dtype.is_some_and(|d| !d.is_io()))
    };
    let by = match checkpoint.table().iter().find(packed) {
        Some((name, _)) => name.to_owned(),
        None if checkpoint.config().quantization.is_some() => "quantization_config in config.json".into(),
        None => return Ok(()),
    };
    Err(Error::new(Code::Usage, "the checkpoint is quantised already")
        .need("a dense checkpoint: quantising twice adds the errors of both")
        .have(by)
        .fix("quantise the original; `q4 convert` changes the layout without changing a value"))
}
