//! A linear layer as it is stored: layout, bytes, and what the checkpoint wants done with its input.
//!
//! Names and types say which layout it is, the configuration says what was meant, and here the two must
//! agree.
use super::order::{LayerRows, Order};
use super::{Checkpoint, Container, declared::Rounded, stored::Stored, words};
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, Convention, DType, Error, Fp8Inputs, GlobalScale, Q4Weight,
    Result, Rule, ScaleLayout, Segment, SegmentData, TensorView,
    detect::{Detected, Layout, QuantState, detect},
    read_floats,
};
use serde::Deserialize;

/// Tensors that would change a layer's product where they are not a part of its layout; some families have
/// biases.
const FOREIGN: [&str; 15] = [
    "bias",
    "pre_quant_scale",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "scales",
    "qzeros",
    "biases",
    "global_scale",
    "weight.absmax",
    "absmax",
    "weight.scale",
];

/// A bound linear layer, `[n, k]`.
#[derive(Clone, Debug)]
pub struct Layer<'a> {
    /// Module, e.g. `model.layers.0.mlp.up_proj`.
    pub name: String,
    /// Layout, schema, shape and tensor names.
    pub detected: Detected,
    /// The bytes; `rows` is `n`. Columns are those of [`order`](Self::order).
    pub segment: Segment<'a>,
    /// The in feature of each column, where it is not the column's own number: a product takes its inputs in
    /// this order, and [`rows`](Self::rows) undoes it.
    pub order: Option<Order>,
    /// What the checkpoint declares its inputs to be.
    pub declared: Activations,
    of_gguf: bool,
    input_global: Option<GlobalScale>,
    lacks_input_scale: bool,
    fp8: Result<Fp8Inputs>,
}

impl Layer<'_> {
    /// Its rows decoded, in features where the model has them.
    ///
    /// # Errors
    /// [`Code::SchemaInvalid`] for parts that contradict the schema, which no bound layer has.
    pub fn rows(&self) -> Result<LayerRows<'_>> {
        let segments = std::slice::from_ref(&self.segment);
        let weight = Q4Weight { schema: self.detected.schema, k: self.detected.k, segments };
        LayerRows::new(&weight, self.order.as_ref())
    }

    /// The quantiser of the tool that wrote the layer; layouts without one of their own have that of `.dat`
    /// files.
    pub fn rule(&self) -> Rule {
        match self.detected.layout {
            Layout::ModelOpt => Rule::ModelOpt,
            Layout::CompressedTensors => Rule::CompressedTensors,
            Layout::TorchAo => Rule::TorchAo,
            _ => Rule::Runtime,
        }
    }

    /// What its inputs are on a CPU where nobody says: what is declared, and of GGUF files, which declare
    /// nothing, int8. llama.cpp, for which they are made, rounds inputs of quantised blocks to 8 bits there, in
    /// groups of 32 or 256; here 16 share a scale.
    pub fn usual(&self) -> Activations {
        if self.of_gguf && self.detected.schema.is_packed() { Activations::Int8 } else { self.declared }
    }

    /// The stored scale of the inputs, used or not.
    pub fn input_scale(&self) -> Option<GlobalScale> {
        self.input_global
    }

    /// NVFP4 inputs are declared and their scale is not there: inputs stay as they are, which is not what was
    /// exported.
    pub fn lacks_input_scale(&self) -> bool {
        self.lacks_input_scale
    }

    /// What NVFP4 activations mean for this layer: its tool's rule with the stored scale of the inputs.
    /// Without one, torchao takes a scale per call where the weight has a per-tensor scale, and the
    /// others use none.
    pub fn nvfp4_activations(&self) -> ActQuant {
        let two_level = self.detected.schema.global().is_some();
        let global = match self.input_global {
            Some(scale) => ActGlobal::Static(scale),
            None if self.detected.layout == Layout::TorchAo && two_level => ActGlobal::PerCall,
            None => ActGlobal::None,
        };
        ActQuant { rule: self.rule(), global }
    }

    /// What FP8 activations mean for this layer: the scale that the configuration declares, of each row where
    /// it declares none.
    ///
    /// # Errors
    /// [`Code::SchemaInvalid`] when that is a stored one and there is none, [`Code::TensorShape`] and
    /// [`Code::ScaleInvalid`] when it is none, [`Code::Unsupported`] for others than of a row, of 128 and
    /// stored ones.
    pub fn fp8_activations(&self) -> Result<Fp8Inputs> {
        self.fp8.clone()
    }
}

/// Finds `name`, checks its parts against each other, the configuration and `[n, k]`, and borrows them. Of
/// the values only the per-tensor scales are read.
pub(super) fn bind<'a>(c: &'a Checkpoint, name: &str, n: usize, k: usize) -> Result<Layer<'a>> {
    let table = c.table();
    is_read_of_torchao(c, name)?;
    let state = |key: &str| quant_state(key, c.tensor(key)?.bytes);
    let detected = detect(name, table, &state)?.ok_or_else(|| {
        let error = Error::new(Code::TensorMissing, format!("`{name}.weight`"))
            .need("a float matrix of that name, or packed codes and scales in its place")
            .have(format!("{} tensors of other names", table.len()));
        c.store().hint(name, error)
    })?;
    if detected.layout == Layout::Mlx {
        // Its words are told by their number alone.
        has_shape(&detected, n, k)?;
    }
    c.declaration().check(name, &detected)?;
    let own = |key: &String| {
        detected.keys.all().any(|own| own == key)
            || (key.ends_with(".bias") && c.config().arch.is_biased(name))
    };
    let mut foreign = FOREIGN.iter().map(|f| format!("{name}.{f}")).filter(|key| !own(key));
    if let Some(key) = foreign.find(|key| table.contains_key(key)) {
        return Err(Error::new(
            Code::SchemaInvalid,
            format!("`{key}`: would change the product of its layer"),
        )
        .need("a layer without it")
        .have(format!(
            "it beside `{}`, which is {}",
            detected.keys.weight,
            detected.schema.in_words()
        )));
    }
    shape_agrees(c, name, &detected)?;
    words::refuse_packed(&detected, table)?;
    let of_gguf = c.store().container() == Container::Gguf;
    if detected.layout == Layout::Gguf && !of_gguf {
        return Err(Error::new(Code::SchemaInvalid, format!("`{}`", detected.keys.weight))
            .need("blocks of GGML in a GGUF file")
            .have("a tensor of that name in another"));
    }
    has_shape(&detected, n, k)?;
    let convention =
        if detected.layout == Layout::CompressedTensors { Convention::Divide } else { Convention::Multiply };
    let scalar =
        |key: &Option<String>| key.as_deref().map(|key| scale(key, &c.tensor(key)?, convention)).transpose();
    let (global, input_global) = (scalar(&detected.keys.global)?, scalar(&detected.keys.input_global)?);
    let segment = Segment { rows: n, data: data(c, &detected, global)? };
    let order = match detected.layout {
        Layout::Gptq => Order::of(c.store(), name, [k, k / detected.schema.block()])?,
        _ => None,
    };
    let tools = matches!(detected.layout, Layout::ModelOpt | Layout::CompressedTensors);
    let inputs = c.declaration().inputs(name)?;
    let lacks_input_scale = tools && input_global.is_none() && inputs == Some(true);
    let name = name.to_owned();
    let (native, fp8) = (Activations::Native, fp8_inputs(c, &name));
    let mut layer = Layer {
        name,
        detected,
        segment,
        order,
        declared: native,
        of_gguf,
        input_global,
        lacks_input_scale,
        fp8,
    };
    layer.declared = declared(c, &layer, inputs)?;
    Ok(layer)
}

/// How FP8 inputs of `layer` would be scaled. What is wrong with that is only told to who asks for it.
fn fp8_inputs(c: &Checkpoint, layer: &str) -> Result<Fp8Inputs> {
    let key = format!("{layer}.input_scale");
    let way_out = "--activations native multiplies inputs as they are";
    match c.declaration().rounded(layer)? {
        None | Some(Rounded::Row) => Ok(Fp8Inputs::PerRow),
        Some(Rounded::Block) => Ok(Fp8Inputs::PerBlock),
        Some(Rounded::Other(what)) => Err(Error::new(Code::Unsupported, format!("{layer}: FP8 inputs"))
            .need("a scale of each token, of each 128 in features of one, or a stored one")
            .have(what.as_str())
            .fix(way_out)),
        Some(Rounded::Stored) if !c.table().contains_key(&key) => {
            Err(Error::new(Code::SchemaInvalid, format!("`{key}`"))
                .need("a scale, for config.json declares static FP8 inputs")
                .have("no such tensor")
                .fix(way_out))
        }
        Some(Rounded::Stored) => {
            let stored = c.tensor(&key)?;
            if stored.bytes.len() != stored.dtype.size() || !stored.dtype.is_io() {
                return Err(Error::new(Code::TensorShape, format!("`{key}`"))
                    .need("one float32, float16 or bfloat16")
                    .have(format!("{} bytes of {}", stored.bytes.len(), stored.dtype)));
            }
            let mut value = [0.0];
            read_floats(stored.bytes, stored.dtype, &mut value);
            let scale = GlobalScale::multiply(value[0]).map_err(|e| e.within(format_args!("`{key}`")))?;
            Ok(Fp8Inputs::Static(scale))
        }
    }
}

fn has_shape(found: &Detected, n: usize, k: usize) -> Result<()> {
    if (found.n, found.k) == (n, k) {
        return Ok(());
    }
    Err(Error::new(Code::TensorShape, format!("`{}`", found.keys.weight))
        .need(format!("[{n}, {k}], as config.json says"))
        .have(format!("[{}, {}]{}", found.n, found.k, of_other_bits(found, k))))
}

/// Words of MLX say nothing of their codes: with others than those of 4 bits, rows are longer or shorter.
fn of_other_bits(found: &Detected, k: usize) -> String {
    if found.layout != Layout::Mlx || !(4 * found.k).is_multiple_of(k) {
        return String::new();
    }
    format!(" of 4 bits, or codes of {} bits", 4 * found.k / k)
}

/// The extents that compressed-tensors stores beside words are those that the words have.
fn shape_agrees(c: &Checkpoint, name: &str, found: &Detected) -> Result<()> {
    let key = format!("{name}.weight_shape");
    if found.layout != Layout::CompressedTensors || !c.table().contains_key(&key) {
        return Ok(());
    }
    let stored = c.tensor(&key)?;
    let wide = |bytes: &[u8; 8]| i64::from_le_bytes(*bytes);
    let narrow = |bytes: &[u8; 4]| i64::from(i32::from_le_bytes(*bytes));
    let have: Vec<i64> = match stored.dtype {
        DType::I64 => stored.bytes.as_chunks().0.iter().map(wide).collect(),
        DType::I32 => stored.bytes.as_chunks().0.iter().map(narrow).collect(),
        other => {
            return Err(Error::new(Code::TensorType, format!("`{key}`"))
                .need("i64 or i32")
                .have(other.as_str()));
        }
    };
    if have == [found.n as i64, found.k as i64] {
        return Ok(());
    }
    Err(Error::new(Code::SchemaInvalid, format!("`{key}`: another shape than the words have"))
        .need(format!("[{}, {}], as `{}` has", found.n, found.k, found.keys.weight))
        .have(format!("{have:?}")))
}

fn data<'a>(c: &'a Checkpoint, d: &Detected, global: Option<GlobalScale>) -> Result<SegmentData<'a>> {
    let mut data = SegmentData::default().with_global(global).with_offset(d.nested_offset);
    for part in d.schema.parts(d.n, d.k) {
        let key = d
            .keys
            .of(part.part)
            .ok_or_else(|| Error::new(Code::Internal, format!("{}: a part without a name", d.keys.weight)))?;
        data = data.with(part.part, TensorView::of_bytes(c.tensor(key)?.bytes, part.dtype, &part.shape)?);
    }
    Ok(data)
}

/// `inputs`: whether the configuration says that they are NVFP4.
fn declared(c: &Checkpoint, layer: &Layer<'_>, inputs: Option<bool>) -> Result<Activations> {
    let quantised = Ok(Activations::Nvfp4(layer.nvfp4_activations()));
    let stored = layer.input_global.is_some();
    match layer.detected.layout {
        Layout::Dat if layer.detected.schema.activations().contains(&"nvfp4") => quantised,
        Layout::ModelOpt if stored && inputs != Some(false) => quantised,
        Layout::CompressedTensors => match inputs {
            Some(true) if !stored => {
                Err(Error::new(Code::SchemaInvalid, format!("`{}.input_global_scale`", layer.name))
                    .need("a scale, for config.json declares NVFP4 input_activations")
                    .have("no such tensor"))
            }
            Some(false) => Ok(Activations::Native),
            _ if stored => quantised,
            _ => Ok(Activations::Native),
        },
        Layout::TorchAo if torchao(c, layer)? => quantised,
        _ => Ok(Activations::Native),
    }
}

/// Refuses a tensor by the class that torchao says it is of: others have the same names for other things.
fn is_read_of_torchao(c: &Checkpoint, name: &str) -> Result<()> {
    #[derive(Deserialize)]
    struct Record {
        #[serde(rename = "_type")]
        kind: String,
    }
    let key = format!("{name}.weight");
    let Some(record) = c.store().metadata().get(&key) else { return Ok(()) };
    match serde_json::from_str::<Record>(record) {
        Ok(Record { kind }) if kind != "NVFP4Tensor" && kind != "Tensor" => {
            Err(Error::new(Code::SchemaInvalid, format!("__metadata__ of `{key}`: _type"))
                .need("NVFP4Tensor, or Tensor for one that is not quantised: torchao's others are not read")
                .have(kind))
        }
        _ => Ok(()),
    }
}

/// Whether torchao's record of the tensor asks for quantised inputs; the record must fit the tensors.
fn torchao(c: &Checkpoint, layer: &Layer<'_>) -> Result<bool> {
    #[derive(Deserialize)]
    struct Record {
        #[serde(rename = "_type")]
        kind: String,
        #[serde(rename = "_data")]
        data: Option<Data>,
        #[serde(rename = "_tensor_data_names")]
        parts: Option<Vec<String>>,
    }
    #[derive(Deserialize)]
    struct Data {
        is_swizzled_scales: Option<bool>,
        block_size: Option<u64>,
        act_quant_kwargs: Option<serde_json::Value>,
    }
    let key = format!("{}.weight", layer.name);
    let Some(text) = c.store().metadata().get(&key) else { return Ok(false) };
    let wrong = |field: &str, need: &str, have: String| {
        Error::new(Code::SchemaInvalid, format!("__metadata__ of `{key}`: {field}")).need(need).have(have)
    };
    let record: Record =
        serde_json::from_str(text).map_err(|e| wrong("record", "the JSON torchao writes", e.to_string()))?;
    if record.kind != "NVFP4Tensor" {
        return Err(wrong("_type", "NVFP4Tensor", record.kind));
    }
    let data = record.data.ok_or_else(|| wrong("_data", "an object", "nothing".into()))?;
    if let Some(parts) = record.parts {
        let stored = |part: &str| c.table().contains_key(&format!("{}._weight_{part}", layer.name));
        if let Some(lost) = parts.iter().find(|part| !stored(part)) {
            return Err(wrong("_tensor_data_names", "a tensor for each name", format!("none for {lost}")));
        }
        if stored("per_tensor_scale") && !parts.iter().any(|p| p == "per_tensor_scale") {
            return Err(wrong("_tensor_data_names", "per_tensor_scale, for it is stored", parts.join(", ")));
        }
    }
    let scales = layer.detected.keys.scales.as_deref().unwrap_or_default();
    let swizzled = layer.detected.schema.wire().scale_layout == Some(ScaleLayout::Swizzled128x4);
    let block = layer.detected.schema.block();
    match (data.is_swizzled_scales, data.block_size) {
        (Some(says), _) if says != swizzled => Err(wrong(
            "is_swizzled_scales",
            &format!("{swizzled}, as the shape of `{scales}` says"),
            says.to_string(),
        )),
        (_, Some(size)) if size != block as u64 => {
            Err(wrong("block_size", &format!("{block}, as `{scales}` has"), size.to_string()))
        }
        _ => Ok(data.act_quant_kwargs.is_some()),
    }
}

fn scale(key: &str, stored: &Stored<'_>, convention: Convention) -> Result<GlobalScale> {
    let value = stored.bytes.first_chunk().map_or(f32::NAN, |b| f32::from_le_bytes(*b));
    GlobalScale::new(convention, value).map_err(|e| e.within(format_args!("`{key}`")))
}

/// The JSON that bitsandbytes stores beside a weight, as bytes of a u8 tensor.
fn quant_state(key: &str, bytes: &[u8]) -> Result<QuantState> {
    #[derive(Deserialize)]
    struct Raw {
        quant_type: String,
        blocksize: u32,
        shape: Vec<usize>,
        nested_blocksize: Option<u32>,
        nested_offset: Option<f64>,
        nested_dtype: Option<String>,
    }
    const LIMIT: usize = 1 << 16;
    let wrong =
        |need: &str, have: String| Error::new(Code::SchemaInvalid, format!("`{key}`")).need(need).have(have);
    if bytes.len() > LIMIT {
        return Err(wrong(&format!("at most {LIMIT} bytes of JSON"), bytes.len().to_string()));
    }
    let raw: Raw =
        serde_json::from_slice(bytes).map_err(|e| wrong("the JSON bitsandbytes writes", e.to_string()))?;
    let nested = match (raw.nested_blocksize, raw.nested_offset) {
        (None, None) => None,
        (Some(block), Some(offset)) => Some((block, offset as f32)),
        _ => return Err(wrong("nested_blocksize and nested_offset, or neither", "one of them".into())),
    };
    if let Some(other) = raw.nested_dtype.filter(|d| nested.is_some() && d != "float32") {
        return Err(wrong("nested_dtype float32", other));
    }
    Ok(QuantState { quant_type: raw.quant_type, block: raw.blocksize, shape: raw.shape, nested })
}
