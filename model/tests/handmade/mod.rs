//! Checkpoints as plain bytes: read, changed and written here without the readers under test.
//!
//! A test that wrote its files with the code it tests could only show that the code agrees with itself.
#![allow(dead_code, clippy::unwrap_used)]
pub mod act_order;
pub mod gguf;

use q4_core::Result;
use q4_model::checkpoint::{Bytes, Checkpoint};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// A tensor with its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn new(name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self { name: name.into(), dtype: dtype.into(), shape: shape.to_vec(), bytes }
    }
    pub fn f32s(&self) -> Vec<f32> {
        assert_eq!(self.dtype, "F32", "{}", self.name);
        self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

/// A model directory in memory.
#[derive(Clone)]
pub struct Model {
    pub tensors: Vec<Tensor>,
    pub metadata: Map<String, Value>,
    pub config: Value,
    pub hf_quant: Option<Value>,
    pub others: Vec<(String, Vec<u8>)>,
}

pub const VARIANTS: [&str; 8] = [
    "",
    "nvfp4_modelopt",
    "nvfp4_ct",
    "nvfp4_ct_w4a16",
    "nvfp4_torchao_gs",
    "nvfp4_torchao_nogs",
    "nf4_bnb",
    "nf4_bnb_dq",
];

/// The directory of tiny model `model` (`a` or `b`); an empty variant is the dense one.
pub fn golden(model: &str, variant: &str) -> PathBuf {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../conformance/golden"));
    root.join(format!("qwen3_tiny_{model}")).join(variant)
}

impl Model {
    pub fn golden(model: &str, variant: &str) -> Self {
        let dir = golden(model, variant);
        let (tensors, metadata) = parse(&std::fs::read(dir.join("model.safetensors")).unwrap());
        let json =
            |name: &str| std::fs::read(dir.join(name)).ok().map(|b| serde_json::from_slice(&b).unwrap());
        let config = json("config.json").unwrap();
        Self { tensors, metadata, config, hf_quant: json("hf_quant_config.json"), others: Vec::new() }
    }

    /// ModelOpt's mixture: attention in FP8 under one scale, what is left in NVFP4, each layer by name in two
    /// files.
    pub fn mixture() -> Self {
        let mut m = Self::golden("a", "nvfp4_modelopt");
        let fp8 = Self::golden("a", "fp8_tensor_ct");
        let mut listed = Map::new();
        for i in 0..2 {
            for part in ["q", "k", "v", "o"] {
                let layer = format!("model.layers.{i}.self_attn.{part}_proj");
                m.tensors.retain(|t| !t.name.starts_with(&format!("{layer}.")));
                m.tensors.push(fp8.get(&format!("{layer}.weight")).clone());
                let stored = fp8.get(&format!("{layer}.weight_scale"));
                let wide = u32::from(u16::from_le_bytes(stored.bytes[..2].try_into().unwrap())) << 16;
                let bytes = wide.to_le_bytes().to_vec();
                m.tensors.push(Tensor::new(&format!("{layer}.weight_scale"), "F32", &[], bytes.clone()));
                m.tensors.push(Tensor::new(&format!("{layer}.input_scale"), "F32", &[], bytes));
                listed.insert(layer, json!({"quant_algo": "FP8"}));
            }
            for part in ["gate", "up", "down"] {
                let layer = format!("model.layers.{i}.mlp.{part}_proj");
                listed.insert(layer, json!({"quant_algo": "NVFP4", "group_size": 16}));
            }
        }
        m.config["quantization_config"] = json!({
            "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed,
            "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.47.0"},
        });
        m.hf_quant = Some(json!({"quantization": {
            "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": listed,
            "exclude_modules": ["lm_head"],
        }}));
        m
    }

    pub fn get(&self, name: &str) -> &Tensor {
        self.find(name).unwrap_or_else(|| panic!("no {name}"))
    }
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|t| t.name == name)
    }
    pub fn edit(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"))
    }
    pub fn remove(&mut self, name: &str) -> Tensor {
        let at = self.tensors.iter().position(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"));
        self.tensors.remove(at)
    }

    /// Everything but the weights.
    pub fn side(&self) -> Vec<(String, Vec<u8>)> {
        let mut files = self.others.clone();
        files.push(("config.json".into(), self.config.to_string().into_bytes()));
        files.extend(
            self.hf_quant.as_ref().map(|q| ("hf_quant_config.json".into(), q.to_string().into_bytes())),
        );
        files
    }

    pub fn safetensors(&self) -> Vec<u8> {
        write(&self.tensors, &self.metadata)
    }

    pub fn open(&self) -> Result<Checkpoint> {
        self.open_with("model.safetensors", self.safetensors())
    }

    /// Opens with `weights` as the file `name` in place of the model's own.
    pub fn open_with(&self, name: &str, weights: Vec<u8>) -> Result<Checkpoint> {
        let mut files = self.side();
        files.push((name.into(), weights));
        open(files)
    }

    /// As two shards and their index.
    pub fn shards(&self) -> Vec<(String, Vec<u8>)> {
        let (first, second) = self.tensors.split_at(self.tensors.len() / 2);
        let mut map = Map::new();
        let mut files = self.side();
        for (i, part) in [first, second].into_iter().enumerate() {
            let name = format!("model-0000{}-of-00002.safetensors", i + 1);
            for t in part {
                map.insert(t.name.clone(), json!(name));
            }
            files.push((name, write(part, &self.metadata)));
        }
        let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
        files.push(("model.safetensors.index.json".into(), index.to_string().into_bytes()));
        files
    }

    /// The single-level torchao model as a `.dat` exporter writes it: f16 norms and embedding, row-major
    /// scales, `lm_head` quantised although it is tied (here: codes and scales of the first rows of
    /// another layer, repeated).
    pub fn dat(&self) -> Vec<DatEntry> {
        let mut entries = Vec::new();
        for t in &self.tensors {
            if let Some(layer) = t.name.strip_suffix("._weight_qdata") {
                let (n, blocks) = (t.shape[0], t.shape[1] / 8);
                let scales = unswizzle(&self.get(&format!("{layer}._weight_scale")).bytes, n, blocks);
                entries.push(DatEntry::new(&format!("{layer}.weight.qdata"), 0, &t.shape, t.bytes.clone()));
                entries.push(DatEntry::new(&format!("{layer}.weight.scale"), 101, &[n, blocks], scales));
            } else if !t.name.ends_with("._weight_scale") {
                let halves = match t.dtype.as_str() {
                    "F32" => t.f32s().iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
                    "BF16" => {
                        let wide =
                            t.bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()));
                        wide.flat_map(|v| half::f16::from_f32(v.to_f32()).to_le_bytes()).collect()
                    }
                    other => panic!("{other}"),
                };
                entries.push(DatEntry::new(&t.name, 5, &t.shape, halves));
            }
        }
        let q = self.get("model.layers.0.mlp.gate_proj._weight_qdata");
        let vocab = self.config["vocab_size"].as_u64().unwrap() as usize;
        let repeat = |bytes: &[u8], n: usize| bytes.iter().copied().cycle().take(n).collect::<Vec<u8>>();
        let width = q.shape[1];
        entries.push(DatEntry::new(
            "lm_head.weight.qdata",
            0,
            &[vocab, width],
            repeat(&q.bytes, vocab * width),
        ));
        entries.push(DatEntry::new(
            "lm_head.weight.scale",
            101,
            &[vocab, width / 8],
            vec![0x30; vocab * width / 8],
        ));
        entries
    }
}

pub fn open(files: Vec<(String, Vec<u8>)>) -> Result<Checkpoint> {
    Checkpoint::from_files(
        "tiny",
        files.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes))).collect(),
    )
}

/// Tensors in file order and the metadata.
pub fn parse(file: &[u8]) -> (Vec<Tensor>, Map<String, Value>) {
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&file[8..8 + n]).unwrap();
    let mut metadata = Map::new();
    let mut tensors = Vec::new();
    for (name, v) in header {
        if name == "__metadata__" {
            metadata = v.as_object().unwrap().clone();
            continue;
        }
        let numbers = |v: &Value| {
            v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect::<Vec<_>>()
        };
        let at = numbers(&v["data_offsets"]);
        let bytes = file[8 + n + at[0]..8 + n + at[1]].to_vec();
        tensors.push((at[0], Tensor::new(&name, v["dtype"].as_str().unwrap(), &numbers(&v["shape"]), bytes)));
    }
    tensors.sort_by_key(|t| t.0);
    (tensors.into_iter().map(|t| t.1).collect(), metadata)
}

pub fn write(tensors: &[Tensor], metadata: &Map<String, Value>) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), Value::Object(metadata.clone()));
    let mut data = Vec::new();
    for t in tensors {
        let start = data.len();
        data.extend_from_slice(&t.bytes);
        let entry = json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [start, data.len()]});
        assert!(header.insert(t.name.clone(), entry).is_none(), "{} twice", t.name);
    }
    join(&Value::Object(header).to_string(), &data)
}

/// A safetensors file with this header text and data.
pub fn join(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Header text and data of a safetensors file.
pub fn split(file: &[u8]) -> (String, Vec<u8>) {
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (String::from_utf8(file[8..8 + n].to_vec()).unwrap(), file[8 + n..].to_vec())
}

#[derive(Clone)]
pub struct DatEntry {
    pub key: String,
    pub code: u64,
    pub dims: Vec<u64>,
    pub bytes: Vec<u8>,
}

impl DatEntry {
    pub fn new(key: &str, code: u64, dims: &[usize], bytes: Vec<u8>) -> Self {
        Self { key: key.into(), code, dims: dims.iter().map(|d| *d as u64).collect(), bytes }
    }
}

pub fn write_dat(entries: &[DatEntry]) -> Vec<u8> {
    let mut out = leb128(entries.len() as u64);
    for e in entries {
        out.extend(leb128(e.key.len() as u64));
        out.extend(e.key.as_bytes());
        out.extend(leb128(e.code));
        out.extend(leb128(e.dims.len() as u64));
        out.extend(e.dims.iter().flat_map(|d| leb128(*d)));
        out.extend(&e.bytes);
    }
    out
}

pub fn leb128(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value > 0x7f {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

/// Row-major scales from tiles of 128 rows by 4 scales.
pub fn unswizzle(tiled: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let tiles = cols.div_ceil(4);
    let at =
        |r: usize, c: usize| ((r / 128) * tiles + c / 4) * 512 + (r % 32) * 16 + ((r % 128) / 32) * 4 + c % 4;
    (0..rows * cols).map(|i| tiled[at(i / cols, i % cols)]).collect()
}
