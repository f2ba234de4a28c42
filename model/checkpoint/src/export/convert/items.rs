//! Decides, from names, types and scales, which tensors of the output hold which content, and refuses what it
//! cannot hold.
//!
//! Nothing is dropped: a tensor that the layout has no place for is an error with its name.
use super::Changed;
use super::contents::{Content, Contents, matrices, tensors};
use super::scale::{Used, expressed, nearest};
use crate::export::safetensors::Entry;
use crate::export::{gguf, layout};
use crate::quantize::Quantized;
use crate::words::were_apart;
use crate::{Checkpoint, Container, Layer, Stored};
use q4_core::detect::Layout;
use q4_core::formats::{KINDS, Kind, Lack};
use q4_core::{Code, Convention, DType, Error, GlobalScale, OwnedParts, Part, Q4Schema, Result};
use std::borrow::Cow;

/// A tensor, or the tensors of a layer.
pub(super) struct Item<'a> {
    pub name: String,
    pub entries: Vec<Entry>,
    /// The layer, and what it is written as.
    pub matrix: Option<(&'a Layer<'a>, Q4Schema)>,
    data: Data<'a>,
}

enum Data<'a> {
    /// As they are, one for each entry.
    Stored(Vec<Stored<'a>>),
    /// Arranged anew.
    Packed(Box<Packed<'a>>),
    /// As f32.
    Decoded(&'a Layer<'a>),
    /// As f32.
    Widened(Stored<'a>),
}

struct Packed<'a> {
    layer: &'a Layer<'a>,
    layout: Layout,
    schema: Q4Schema,
    dtype: DType,
    global: Option<GlobalScale>,
    inputs: Option<GlobalScale>,
}

/// Ends of names that only parts of quantised layers have: one that belongs to no layer we know means
/// something else in another layout, or nothing.
const MARKS: [&str; 15] = [
    "_scale",
    "_scale_2",
    "_scale_inv",
    ".scale",
    "qdata",
    "_packed",
    "absmax",
    "quant_map",
    "zero_point",
    "g_idx",
    "qweight",
    "qzeros",
    ".scales",
    ".biases",
    "__nf4",
];

/// Everything to be written as `layout`, sorted by name. `whole` says that all layers have that layout
/// already. Where scales may change in their last bit, `changed` takes down which did.
pub(super) fn items<'a>(
    checkpoint: &'a Checkpoint,
    contents: &'a Contents<'a>,
    layout: Layout,
    whole: bool,
    mut changed: Option<&mut Vec<Changed>>,
) -> Result<Vec<Item<'a>>> {
    let dtype = checkpoint.embedding_elements()?.dtype();
    let layers: Vec<_> = matrices(contents).collect();
    let are_simple = !whole && are_simple(&layers)?;
    let in_blocks = checkpoint.store().container() == Container::Gguf;
    let is_as_stored = |layer: &Layer<'_>| !in_blocks && !were_apart(&layer.detected);
    let mut items = Vec::with_capacity(contents.len());
    for (name, content) in contents {
        items.push(match content {
            Content::Inputs(_) => continue, // with its layer
            // What was taken apart is packed again.
            Content::Matrix(layer) if layer.detected.layout == layout && is_as_stored(layer) => {
                let mut names = tensors(&layer.detected);
                names.retain(|name| checkpoint.table().contains_key(name));
                let stored = names.iter().map(|n| checkpoint.tensor(n)).collect::<Result<Vec<_>>>()?;
                let entries =
                    names.iter().zip(&stored).map(|(n, s)| Entry::new(n, s.dtype, s.shape)).collect();
                let matrix = Some((&**layer, layer.detected.schema));
                Item { name: name.clone(), entries, matrix, data: Data::Stored(stored) }
            }
            Content::Matrix(layer) => {
                let schema = if are_simple { simplest(layer)? } else { layer.detected.schema };
                let packed = Packed::new(layer, layout, schema, dtype, changed.as_deref_mut())?;
                let matrix = Some((&**layer, packed.schema));
                let (entries, data) = (packed.entries(), Data::Packed(Box::new(packed)));
                Item { name: name.clone(), entries, matrix, data }
            }
            Content::Decoded(head) => {
                let entries = vec![Entry::new(name, DType::F32, &[head.detected.n, head.detected.k])];
                Item { name: name.clone(), entries, matrix: None, data: Data::Decoded(head) }
            }
            Content::Widened(stored) => {
                let entries = vec![Entry::new(name, DType::F32, stored.shape)];
                Item { name: name.clone(), entries, matrix: None, data: Data::Widened(*stored) }
            }
            Content::Tensor(stored) => {
                let owner = layers.iter().find(|l| within(name, &l.name));
                if !whole && (owner.is_some() || MARKS.iter().any(|mark| name.ends_with(mark))) {
                    return Err(homeless(name, layout));
                }
                let entries = vec![Entry::new(name, stored.dtype, stored.shape)];
                Item { name: name.clone(), entries, matrix: None, data: Data::Stored(vec![*stored]) }
            }
        });
    }
    if !whole {
        one_kind_of_inputs(&layers)?;
    }
    if layout == Layout::Gguf {
        items.iter().try_for_each(|item| gguf::check(&item.entries))?;
    }
    Ok(items)
}

/// A layer's encoding without a part that says nothing.
fn simplest(layer: &Layer<'_>) -> Result<Q4Schema> {
    let schema = layer.detected.schema;
    Ok(schema.simpler(&layer.segment.data)?.unwrap_or(schema))
}

/// Whether all layers have one encoding without such parts: a declaration covers all of them.
fn are_simple(layers: &[&Layer<'_>]) -> Result<bool> {
    let all = layers.iter().map(|layer| simplest(layer)).collect::<Result<Vec<_>>>()?;
    Ok(all.iter().all(|schema| schema.id() == all[0].id()))
}

impl Item<'_> {
    /// Data of the tensors that `entries` lists.
    pub fn data(&self) -> Result<Vec<Cow<'_, [u8]>>> {
        match &self.data {
            Data::Stored(tensors) => Ok(tensors.iter().map(|t| Cow::Borrowed(t.bytes)).collect()),
            Data::Packed(packed) => Ok(packed.data()?.into_iter().map(Cow::Owned).collect()),
            Data::Widened(stored) => {
                let values = stored.to_f32()?;
                Ok(vec![Cow::Owned(values.iter().flat_map(|v| v.to_le_bytes()).collect())])
            }
            Data::Decoded(layer) => {
                let shape @ [n, k] = [layer.detected.n, layer.detected.k];
                let rows = layer.detected.schema.decoder(shape, &layer.segment.data)?;
                let mut values = vec![0f32; n * k];
                values.chunks_exact_mut(k).enumerate().for_each(|(r, out)| rows.row(r, out));
                Ok(vec![Cow::Owned(values.iter().flat_map(|v| v.to_le_bytes()).collect())])
            }
        }
    }
}

impl<'a> Packed<'a> {
    /// `layer`, whose values `schema` has, in `layout`.
    fn new(
        layer: &'a Layer<'a>,
        layout: Layout,
        schema: Q4Schema,
        dtype: DType,
        mut changed: Option<&mut Vec<Changed>>,
    ) -> Result<Self> {
        let shape = [layer.detected.n, layer.detected.k];
        if schema.tensors(layout, shape).is_none() {
            let holds = |kind: &&Kind| kind.usual.iter().any(|s| s.tensors(layout, [1, 64]).is_some());
            let names: Vec<_> =
                KINDS.into_iter().filter(holds).flat_map(|kind| kind.names.first()).map(|n| n.0).collect();
            return Err(Error::new(
                Code::Usage,
                format!("`{}`: layout {} cannot hold its format", layer.name, layout.as_str()),
            )
            .need(names.join(" or "))
            .have(schema.to_string())
            .fix("a layout of its format; another format is `q4 quantize` from the dense original, for from here it \
                  would have the errors of both"));
        }
        if let Some(Lack { part, need, have }) = schema.lacks(layout, shape, &layer.segment.data)? {
            let tensor = layer.detected.keys.of(part).unwrap_or(&layer.name);
            return Err(Error::new(
                Code::Usage,
                format!("`{tensor}`: layout {} cannot hold it", layout.as_str()),
            )
            .need(need)
            .have(have)
            .fix("a layout of its format that does; nothing is rounded here"));
        }
        if layer.order.is_some() && layout != Layout::Gptq {
            return Err(Error::new(
                Code::Usage,
                format!("`{}.g_idx`: act-order, which layout {} cannot hold", layer.name, layout.as_str()),
            )
            .need("groups in the order of the in features")
            .have("in features of any group, for which it has no exact counterpart")
            .fix("keep the layout: --layout gptq"));
        }
        let global = weight_scale(layer, layout, changed.as_deref_mut())?;
        let inputs = input_scale(layer, layout, changed)?;
        let schema = schema.plain(layout, global.map(GlobalScale::convention));
        Ok(Self { layer, layout, schema, dtype, global, inputs })
    }

    fn entries(&self) -> Vec<Entry> {
        let (d, layer) = (&self.layer.detected, &self.layer.name);
        let mut entries = layout::entries(self.layout, self.schema, layer, self.dtype, d.n, d.k);
        if self.inputs.is_some() {
            entries.push(match self.layout {
                Layout::CompressedTensors => {
                    Entry::new(format!("{layer}.input_global_scale"), DType::F32, &[1])
                }
                Layout::Gguf => Entry::new(format!("{layer}.input_scale"), DType::F32, &[1]),
                _ => Entry::new(format!("{layer}.input_scale"), DType::F32, &[]),
            });
        }
        entries
    }

    fn data(&self) -> Result<Vec<Vec<u8>>> {
        let (d, data) = (&self.layer.detected, &self.layer.segment.data);
        let mut parts = OwnedParts::copy(data)?.with_global(self.global);
        if let (Some(scales), Some(dtype)) = (data.get(Part::Scales), parts.dtype(Part::Scales)) {
            let rows = d.schema.in_rows(Part::Scales, scales.as_bytes()?, [d.n, d.k])?.into_owned();
            parts = parts.with(Part::Scales, dtype, &[rows.len() / dtype.size()], rows);
        }
        if d.schema.wire().nibble_order != self.schema.wire().nibble_order {
            parts.bytes_mut(Part::Codes).iter_mut().for_each(|b| *b = b.rotate_left(4));
        }
        if let Some(order) = &self.layer.order {
            order.scatter_codes(parts.bytes_mut(Part::Codes));
        }
        let parts = d.schema.recast(parts, &self.schema);
        let mut parts = layout::parts(
            self.layout,
            self.dtype,
            &Quantized { schema: self.schema, n: d.n, k: d.k, parts },
        )?;
        if let Some(order) = &self.layer.order {
            let is_index = |entry: &Entry| entry.name.ends_with(".g_idx");
            let index = self.entries().iter().position(is_index).and_then(|at| parts.get_mut(at));
            let groups = order.groups(d.schema.block());
            let index = index.ok_or_else(|| Error::new(Code::Internal, "act-order without a g_idx"))?;
            *index = groups.into_iter().flat_map(u32::to_le_bytes).collect();
        }
        parts.extend(self.inputs.map(|scale| scale.value().to_le_bytes().to_vec()));
        Ok(parts)
    }
}

/// The per-tensor scale as `layout` has it. A scale of 1 stands only where the layout needs one.
fn weight_scale(
    layer: &Layer<'_>,
    layout: Layout,
    changed: Option<&mut Vec<Changed>>,
) -> Result<Option<GlobalScale>> {
    let (d, data) = (&layer.detected, &layer.segment.data);
    if d.schema.wire().global.is_none() {
        return Ok(None);
    }
    match (data.global, &d.keys.global) {
        (None, _) if layout == Layout::Dat => Ok(None),
        (Some(scale), _) if layout == Layout::Dat && scale.value() == 1.0 => Ok(None),
        (None, _) => GlobalScale::new(convention(layout), 1.0).map(Some),
        (Some(scale), key) => {
            let scales = data.need(Part::Scales)?;
            let used = Used::of(&d.schema.in_rows(Part::Scales, scales.as_bytes()?, [d.n, d.k])?);
            let key = key.as_deref().unwrap_or(&layer.name);
            let name = format!("{}.weight", layer.name);
            expressed(scale, convention(layout), &used, key, layout.as_str())
                .or_else(|e| nearest(scale, convention(layout), &used, name, changed, e))
                .map(Some)
        }
    }
}

fn input_scale(
    layer: &Layer<'_>,
    layout: Layout,
    changed: Option<&mut Vec<Changed>>,
) -> Result<Option<GlobalScale>> {
    let (Some(scale), Some(key)) = (layer.input_scale(), &layer.detected.keys.input_global) else {
        return Ok(None);
    };
    match layout {
        Layout::Dat => Err(homeless(key, layout)),
        _ => expressed(scale, convention(layout), &Used::all(), key, layout.as_str())
            .or_else(|e| {
                let name = format!("{}.inputs", layer.name);
                nearest(scale, convention(layout), &Used::all(), name, changed, e)
            })
            .map(Some),
    }
}

fn convention(layout: Layout) -> Convention {
    if layout == Layout::CompressedTensors { Convention::Divide } else { Convention::Multiply }
}

/// Either all layers have a scale of inputs or none has: a declaration covers all of them.
fn one_kind_of_inputs(layers: &[&Layer<'_>]) -> Result<()> {
    let find = |has: bool| layers.iter().find(|l| l.input_scale().is_some() == has);
    match (find(true), find(false)) {
        (Some(with), Some(without)) => {
            Err(Error::new(Code::Usage, format!("`{}`: no scale of its inputs", without.name))
                .need(format!("one, as `{}` has, or none in any layer", with.name)))
        }
        _ => Ok(()),
    }
}

fn within(name: &str, module: &str) -> bool {
    name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}

fn homeless(tensor: &str, layout: Layout) -> Error {
    Error::new(Code::Usage, format!("`{tensor}`: layout {} has no place for it", layout.as_str()))
        .need("tensors that keep their meaning; nothing is dropped")
        .have("a part of the quantisation of the original's layout")
        .fix("keep the layout")
}
