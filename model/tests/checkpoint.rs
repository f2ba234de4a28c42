//! Checkpoints of every tool are opened, bound and decoded to the bits their tool defines, and checked to the
//! end.
#![allow(clippy::unwrap_used)]
mod handmade;

use handmade::{DatEntry, Model, Tensor, VARIANTS, golden, write_dat};
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, Convention, Nvfp4, Q4Weight, RowDecoder, Rule, detect::Layout,
};
use q4_model::{
    checkpoint::{Checkpoint, Container, Head, Layer, OpenOptions, TensorStore, names},
    verify::{Finding, Severity, verify},
};
use serde_json::json;

#[allow(clippy::excessive_precision)] // the decimals of the format's definition
const NF4: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

#[test]
fn every_layer_of_every_tool_decodes_to_its_bits() {
    let mut layers = 0;
    for model in ["a", "b"] {
        for variant in VARIANTS {
            let c = open(model, variant);
            let raw = Model::golden(model, variant);
            c.bind_all().unwrap_or_else(|e| panic!("{model} {variant}: {e}"));
            for i in 0..c.config().num_hidden_layers {
                for (name, n, k) in names::linears(c.config(), i) {
                    let layer = c.layer(&name, n, k).unwrap();
                    assert_eq!(layer.detected.layout, layout(variant), "{variant}");
                    let (have, need) = (decode(&layer), definition(&raw, &name, n, k));
                    assert!(same_bits(&have, &need), "{model} {variant} {name}");
                    layers += 1;
                }
            }
        }
    }
    assert_eq!(layers, 2 * 8 * 14);
}

#[test]
fn products_are_those_the_tools_recorded() {
    let mut products = 0;
    for model in ["a", "b"] {
        let probe = handmade::parse(&std::fs::read(golden(model, "linear_probe.safetensors")).unwrap()).0;
        let find = |name: String| probe.iter().find(|t| t.name == name).unwrap().f32s();
        for (variant, output) in [
            ("nvfp4_modelopt", "modelopt.y_w4a16"),
            ("nvfp4_torchao_nogs", "torchao_nogs.y_w4a16"),
            ("nf4_bnb", "nf4.y"),
        ] {
            let c = open(model, variant);
            for (name, n, k) in names::linears(c.config(), 0) {
                let short = name.strip_prefix("model.layers.0.").unwrap();
                let (x, y) = (find(format!("{short}.x")), find(format!("{short}.{output}")));
                let w = decode(&c.layer(&name, n, k).unwrap());
                assert_eq!(y.len(), x.len() / k * n);
                for (i, have) in y.iter().enumerate() {
                    let (row, col) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
                    let terms = row.iter().zip(col).map(|(a, b)| f64::from(*a) * f64::from(*b));
                    let (sum, abs) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                    assert!(
                        (sum - f64::from(*have)).abs() <= 1e-6 * abs,
                        "{model} {variant} {short} {i}: {sum} {have}"
                    );
                    products += 1;
                }
            }
        }
    }
    assert!(products > 20_000, "{products}");
}

/// A name that the reader of GGUF files makes says nothing in another file.
#[test]
fn names_of_blocks_are_refused_elsewhere() {
    let mut m = Model::golden("a", "");
    let name = "model.layers.0.self_attn.q_proj";
    let weight = m.remove(&format!("{name}.weight"));
    let [n, k] = [weight.shape[0], weight.shape[1]];
    let bytes = k / 32 * 34;
    m.tensors.push(Tensor::new(&format!("{name}.weight.q8_0"), "U8", &[n, bytes], vec![0; n * bytes]));
    let e = m.open().unwrap().layer(name, n, k).map(drop).unwrap_err();
    let text = e.to_string();
    let says = |part: &str| text.contains(part);
    assert!(
        e.code() == Code::SchemaInvalid && says("q_proj.weight.q8_0`") && says("in a GGUF file"),
        "{text}"
    );
}

#[test]
fn inputs_are_what_the_tool_declares() {
    let declared = |m: &Model| first(&m.open().unwrap(), |l| (l.declared, l.nvfp4_activations()));
    for (variant, rule) in [("nvfp4_modelopt", Rule::ModelOpt), ("nvfp4_ct", Rule::CompressedTensors)] {
        let m = Model::golden("a", variant);
        let (declared, own) = declared(&m);
        let ActGlobal::Static(scale) = own.global else { panic!("{own:?}") };
        let key = if rule == Rule::ModelOpt { "input_scale" } else { "input_global_scale" };
        assert_eq!(scale.value(), m.get(&format!("model.layers.0.self_attn.q_proj.{key}")).f32s()[0]);
        assert_eq!(scale.convention(), rule.convention());
        assert_eq!((declared, own.rule), (Activations::Nvfp4(own), rule));
    }
    let mut without = Model::golden("a", "nvfp4_modelopt");
    let lacks = |m: &Model| first(&m.open().unwrap(), |l| (l.declared, l.lacks_input_scale()));
    assert!(!lacks(&without).1);
    without.tensors.retain(|t| !t.name.ends_with(".input_scale"));
    assert_eq!(lacks(&without), (Activations::Native, true));
    let mut w4a16 = Model::golden("a", "nvfp4_modelopt");
    w4a16.config["quantization_config"] = json!({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"});
    w4a16.hf_quant = None;
    assert!(!lacks(&w4a16).1);
    let (native, own) = declared(&w4a16);
    assert_eq!(native, Activations::Native);
    assert!(matches!(own, ActQuant { rule: Rule::ModelOpt, global: ActGlobal::Static(_) }));
    let (native, own) = declared(&Model::golden("a", "nvfp4_ct_w4a16"));
    assert_eq!((native, own.global), (Activations::Native, ActGlobal::None));
    for (variant, global) in
        [("nvfp4_torchao_gs", ActGlobal::PerCall), ("nvfp4_torchao_nogs", ActGlobal::None)]
    {
        let mut m = Model::golden("a", variant);
        let own = ActQuant { rule: Rule::TorchAo, global };
        assert_eq!(declared(&m), (Activations::Native, own));
        for record in m.metadata.values_mut() {
            *record = json!(
                record.as_str().unwrap().replace("\"act_quant_kwargs\": null", "\"act_quant_kwargs\": {}")
            );
        }
        assert_eq!(declared(&m), (Activations::Nvfp4(own), own));
    }
    for variant in ["", "nf4_bnb", "nf4_bnb_dq"] {
        assert_eq!(declared(&Model::golden("a", variant)).0, Activations::Native);
    }
}

#[test]
fn a_dat_file_round_trips() {
    let m = Model::golden("a", "nvfp4_torchao_nogs");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.dat");
    std::fs::write(&path, write_dat(&m.dat())).unwrap();
    let missing = Checkpoint::open(&path, &OpenOptions::default()).unwrap_err();
    assert_eq!(missing.code(), Code::ModelMissing);
    assert!(missing.to_string().contains("--config"));
    let options = OpenOptions { config: Some(golden("a", "").join("config.json")), ..OpenOptions::default() };
    let c = Checkpoint::open(&path, &options).unwrap();
    c.bind_all().unwrap();
    assert_eq!(c.store().container(), Container::Dat);
    assert_eq!(c.store().entries().count(), m.dat().len());
    for i in 0..2 {
        for (name, n, k) in names::linears(c.config(), i) {
            let layer = c.layer(&name, n, k).unwrap();
            assert!(same_bits(&decode(&layer), &definition(&m, &name, n, k)), "{name}");
            let runtime = ActQuant { rule: Rule::Runtime, global: ActGlobal::None };
            assert_eq!((layer.detected.layout, layer.declared), (Layout::Dat, Activations::Nvfp4(runtime)));
        }
    }
    assert!(c.config().tie_word_embeddings);
    let Head::Quantised(head) = c.head().unwrap() else { panic!("the stored head is 4-bit") };
    assert_eq!((head.detected.n, head.detected.k), (256, 64));
    let norm = c.norm("model.norm", 64).unwrap();
    let need = m.get("model.norm.weight").f32s();
    assert!(norm.iter().zip(&need).all(|(a, b)| *a == half::f16::from_f32(*b).to_f32()));
}

#[test]
fn nf4_in_a_dat_file_is_low_nibble_first() {
    let bnb = Model::golden("a", "nf4_bnb");
    let name = "model.layers.0.mlp.up_proj";
    let mut entries = Model::golden("a", "nvfp4_torchao_nogs").dat();
    entries.retain(|e| !e.key.starts_with(name));
    let swapped = bnb.get(&format!("{name}.weight")).bytes.iter().map(|b| b.rotate_left(4)).collect();
    let absmax = bnb.get(&format!("{name}.weight.absmax"));
    entries.push(DatEntry::new(&format!("{name}.weight"), 0, &[192, 32], swapped));
    entries.push(DatEntry::new(&format!("{name}.absmax"), 6, &absmax.shape, absmax.bytes.clone()));
    let map = NF4.iter().flat_map(|v| v.to_le_bytes()).collect();
    entries.push(DatEntry::new(&format!("{name}.quant_map"), 6, &[16], map));
    let c = bnb.open_with("tiny.dat", write_dat(&entries)).unwrap();
    let layer = c.layer(name, 192, 64).unwrap();
    assert!(same_bits(&decode(&layer), &definition(&bnb, name, 192, 64)));
    assert_eq!(layer.declared, Activations::Native);
}

#[test]
fn shards_are_one_model() {
    let m = Model::golden("b", "nvfp4_modelopt");
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in m.shards() {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    let whole = m.open().unwrap();
    for path in [dir.path().to_owned(), dir.path().join("model.safetensors.index.json")] {
        let c = Checkpoint::open(&path, &OpenOptions::default()).unwrap();
        c.bind_all().unwrap();
        assert_eq!(c.table(), whole.table());
        assert_eq!(c.store().files().count(), 2);
        for name in c.table().keys() {
            assert_eq!(c.tensor(name).unwrap().bytes, whole.tensor(name).unwrap().bytes, "{name}");
        }
    }
    let shard = dir.path().join("model-00001-of-00002.safetensors");
    assert_eq!(TensorStore::open(&shard).unwrap().table().len(), m.tensors.len() / 2);
    let alone = Checkpoint::open(&shard, &OpenOptions::default()).unwrap();
    assert_eq!(alone.bind_all().unwrap_err().code(), Code::TensorMissing);
    std::fs::write(dir.path().join("model.safetensors"), m.safetensors()).unwrap();
    let both = Checkpoint::open(dir.path(), &OpenOptions::default()).unwrap_err();
    assert!(both.to_string().contains("two sets"), "{both}");
}

#[test]
fn a_directory_says_what_it_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Checkpoint::open(dir.path(), &OpenOptions::default()).unwrap_err();
    assert_eq!(open().code(), Code::ModelMissing);
    for (name, part) in [("pytorch_model.bin", "pickle"), ("tiny.onnx", "ONNX")] {
        std::fs::write(dir.path().join(name), b"x").unwrap();
        for e in [open(), Checkpoint::open(&dir.path().join(name), &OpenOptions::default()).unwrap_err()] {
            assert!(e.to_string().contains(part) && e.to_string().contains("fix:"), "{e}");
        }
        std::fs::remove_file(dir.path().join(name)).unwrap();
    }
    std::fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    assert!(open().to_string().contains("regular file"));
    assert_eq!(
        Checkpoint::open(&dir.path().join("none"), &OpenOptions::default()).unwrap_err().code(),
        Code::ModelMissing
    );
}

#[test]
fn files_may_stand_elsewhere() {
    let (weights, texts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let m = Model::golden("a", "");
    std::fs::write(weights.path().join("tiny.safetensors"), m.safetensors()).unwrap();
    std::fs::write(texts.path().join("config.json"), m.config.to_string()).unwrap();
    std::fs::write(texts.path().join("tokenizer.json"), "{}").unwrap();
    std::fs::write(texts.path().join("chat_template.jinja"), "hello").unwrap();
    let there = Some(texts.path().to_owned());
    let tokenizer = there.as_ref().map(|t| t.join("tokenizer.json"));
    let options = OpenOptions { config: there, tokenizer, memory: None };
    let c = Checkpoint::open(&weights.path().join("tiny.safetensors"), &options).unwrap();
    assert_eq!(&c.file("chat_template.jinja").unwrap()[..], b"hello");
    assert_eq!(&c.file("tokenizer.json").unwrap()[..], b"{}");
    assert!(c.file("generation_config.json").is_none() && c.file("../config.json").is_none());
    let options = OpenOptions { tokenizer: Some(texts.path().join("no.json")), ..options };
    assert_eq!(Checkpoint::open(weights.path(), &options).unwrap_err().code(), Code::ModelMissing);
}

#[test]
fn a_list_of_tensors_stays_within_the_memory_it_may_take() {
    let path = golden("a", "").join("model.safetensors");
    assert!(TensorStore::open_within(&path, Some(1 << 20)).is_ok());
    let e = TensorStore::open_within(&path, Some(1 << 10)).unwrap_err();
    assert!(e.code() == Code::OutOfMemory && e.to_string().contains("--memory-limit"), "{e}");
}

#[test]
fn a_base_model_loads_without_the_names_of_the_whole() {
    let mut m = Model::golden("a", "");
    m.tensors.iter_mut().for_each(|t| t.name = t.name.replace("model.", ""));
    m.open().unwrap().bind_all().unwrap();
}

#[test]
fn the_head_is_tied_stored_or_missing() {
    let tied = Model::golden("a", "");
    assert!(matches!(tied.open().unwrap().head().unwrap(), Head::Tied));
    let mut copy = tied.clone();
    let embedding = tied.get("model.embed_tokens.weight").clone();
    copy.tensors.push(Tensor { name: "lm_head.weight".into(), ..embedding });
    assert!(matches!(copy.open().unwrap().head().unwrap(), Head::Tied));
    let mut other = copy.clone();
    other.edit("lm_head.weight").bytes[0] ^= 1;
    assert_eq!(other.open().unwrap().head().unwrap_err().code(), Code::SchemaInvalid);
    other.config["tie_word_embeddings"] = json!(false);
    assert!(matches!(other.open().unwrap().head().unwrap(), Head::Dense(_)));
    other.remove("lm_head.weight");
    assert_eq!(other.open().unwrap().head().unwrap_err().code(), Code::TensorMissing);
    let untied = Model::golden("b", "nf4_bnb").open().unwrap();
    let Head::Dense(head) = untied.head().unwrap() else { panic!("b has a head of its own") };
    assert_eq!(head.shape, [192, 96]);
}

#[test]
fn algorithms_we_do_not_compute_are_named() {
    let refused = |variant: &str, field: &str, value: serde_json::Value| {
        let mut m = Model::golden("a", variant);
        *m.config["quantization_config"].pointer_mut(field).expect(field) = value.clone();
        m.hf_quant = None;
        let e = m.open().expect_err(field).to_string();
        let last = field.rsplit('/').next().unwrap();
        assert!(e.contains(last) && e.starts_with("Q4-E0208"), "{e}");
        assert!(value.as_str().is_none_or(|v| e.contains(v)), "{e}");
    };
    for algo in ["NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8", "MXFP8", "MIXED_PRECISION"] {
        refused("nvfp4_modelopt", "/quant_algo", json!(algo));
    }
    refused("nvfp4_ct", "/config_groups/group_0/format", json!("naive-quantized"));
    // One that is read, of weights that are none of its.
    for (variant, field, value) in [
        ("nvfp4_modelopt", "/quant_algo", "FP8"),
        ("nvfp4_ct", "/config_groups/group_0/format", "float-quantized"),
    ] {
        let mut m = Model::golden("a", variant);
        *m.config["quantization_config"].pointer_mut(field).unwrap() = json!(value);
        m.hf_quant = None;
        let e = m.open().unwrap_err().to_string();
        assert!(e.contains("num_bits") && e.contains("need: 8") && e.contains("have: 4"), "{e}");
    }
    // Inputs of MXFP4 weights are used as they are.
    let inputs = json!({"num_bits": 4, "type": "float", "group_size": 32, "dynamic": true});
    refused("mxfp4_ct", "/config_groups/group_0/input_activations", inputs);
    refused("mxfp4_ct", "/config_groups/group_0/weights/group_size", json!(16));
    refused("nvfp4_ct", "/config_groups/group_0/weights/num_bits", json!(8));
    refused("nvfp4_ct", "/config_groups/group_0/weights/group_size", json!(32));
    refused("nvfp4_ct", "/transform_config", json!({"config_groups": {"u": {}}}));
    refused("nf4_bnb", "/bnb_4bit_quant_type", json!("fp4"));
    // The bytes of one format under the name of another.
    let mut m = Model::golden("a", "mxfp4_ct");
    m.config["quantization_config"] =
        Model::golden("a", "nvfp4_ct_w4a16").config["quantization_config"].clone();
    let c = m.open().unwrap();
    let e = c.layer("model.layers.0.mlp.up_proj", 192, 64).unwrap_err().to_string();
    assert!(e.contains("another format than config.json declares") && e.contains("need: nvfp4"), "{e}");
    refused("nf4_bnb", "/quant_method", json!("hqq"));
    let mut m = Model::golden("a", "nvfp4_modelopt");
    m.hf_quant.as_mut().unwrap()["quantization"]["quant_algo"] = json!("W4A16_NVFP4");
    assert!(m.open().unwrap_err().to_string().contains("the same as in config.json"));
    m.hf_quant.as_mut().unwrap()["quantization"] =
        json!({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"});
    let c = m.open().unwrap();
    assert_eq!(c.declaration().notes.len(), 1);
    assert!(codes(&verify(&c)).contains(&"kv-cache-float"));
    m.config["quantization_config"] = json!(null);
    assert!(m.open().unwrap().bind_all().is_ok(), "hf_quant_config.json alone is enough");
    m.config["quantization_config"] = json!({"quant_method": "torchao"});
    assert!(m.open().is_err());
}

#[test]
fn golden_checkpoints_verify_clean() {
    for model in ["a", "b"] {
        for variant in VARIANTS {
            let findings = verify(&open(model, variant));
            let bad: Vec<_> = findings.iter().filter(|f| f.severity != Severity::Note).collect();
            assert!(bad.is_empty(), "{model} {variant}: {bad:?}");
        }
    }
}

#[test]
fn verify_runs_to_the_end() {
    let name = |layer: usize, part: &str| format!("model.layers.{layer}.{part}");
    let mut m = Model::golden("a", "nvfp4_modelopt");
    m.edit(&name(0, "mlp.up_proj.weight_scale")).bytes[5] = 0x7f;
    m.edit(&name(1, "mlp.up_proj.weight_scale")).bytes[6] = 0x81;
    m.edit(&name(1, "mlp.up_proj.weight_scale")).bytes[7] = 0x81;
    m.edit(&name(1, "mlp.down_proj.weight_scale")).bytes.fill(0);
    let g = m.edit(&name(0, "mlp.gate_proj.weight_scale_2"));
    g.bytes = (1.0 / g.f32s()[0]).to_le_bytes().to_vec();
    m.edit(&name(1, "self_attn.q_norm.weight")).bytes.fill(0);
    m.remove(&name(1, "self_attn.k_proj.weight_scale"));
    m.remove(&name(0, "self_attn.o_proj.input_scale"));
    m.tensors.push(Tensor::new("model.layers.7.mlp.up_proj.weight", "F32", &[1], vec![0; 4]));
    m.tensors.push(Tensor::new("model.vision.weight", "F32", &[1], vec![0; 4]));
    let words = json!({"type": "WordLevel", "vocab": {"a": 0, "b": 255}, "unk_token": "a"});
    let tokenizer = json!({"model": words, "added_tokens": [{"id": 300, "content": "x", "special": true,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}]});
    m.others.push(("tokenizer.json".into(), tokenizer.to_string().into_bytes()));
    m.others.push(("generation_config.json".into(), br#"{"eos_token_id": 5}"#.to_vec()));
    let findings = verify(&m.open().unwrap());
    let has = |code: &str, severity: Severity, tensor: &str, part: &str| {
        let hit = findings.iter().any(|f| {
            (f.code, f.severity) == (code, severity) && f.tensor == tensor && f.message.contains(part)
        });
        assert!(hit, "{code} {tensor} {part}: {findings:#?}");
    };
    use Severity::{Error, Warning};
    has("scale-invalid", Error, &name(0, "mlp.up_proj.weight_scale"), "0x7f (NaN) at row 1, block 1");
    has("scale-invalid", Error, &name(1, "mlp.up_proj.weight_scale"), "row 1, block 2, the first of 2");
    has("scales-all-zero", Warning, &name(1, "mlp.down_proj.weight_scale"), "");
    has("scale-convention", Warning, &name(0, "mlp.gate_proj.weight_scale_2"), "above 1");
    has("scale-range", Warning, &name(0, "mlp.gate_proj.weight_scale"), "inverted");
    has("norm-all-zero", Warning, &name(1, "self_attn.q_norm"), "");
    has("schema-invalid", Error, &name(1, "self_attn.k_proj"), "weight_scale");
    has("input-scale-missing", Warning, &name(0, "self_attn.o_proj"), "");
    has("extra-layer", Warning, "model.layers.7", "1 tensors");
    has("unknown-tensor", Warning, "model.vision.weight", "");
    has("tokenizer-invalid", Error, "tokenizer.json", "300");
    has("eos-mismatch", Warning, "generation_config.json", "[5]");
    assert_eq!(findings.iter().filter(|f| f.severity == Error).count(), 4, "{findings:#?}");
    assert!(findings.is_sorted_by_key(|f| f.severity));
    let json = serde_json::to_value(&findings[0]).unwrap();
    assert_eq!(json["severity"], "error");
}

#[test]
fn padding_of_swizzled_scales_is_told_from_scales() {
    let mut m = Model::golden("b", "nvfp4_torchao_gs");
    let name = "model.layers.0.self_attn.k_proj";
    let scales = m.edit(&format!("{name}._weight_scale"));
    // Second tile, row 0, third column: column 6 of 6.
    scales.bytes[514] = 0x7f;
    let c = m.open().unwrap();
    c.layer(name, 32, 96).expect("nobody reads the padding");
    assert!(codes(&verify(&c)).contains(&"scale-padding"));
    m.metadata[&format!("{name}.weight")] = json!(
        m.metadata[&format!("{name}.weight")]
            .as_str()
            .unwrap()
            .replace("\"is_swizzled_scales\": true", "\"is_swizzled_scales\": false")
    );
    assert!(m.open().unwrap().layer(name, 32, 96).unwrap_err().to_string().contains("is_swizzled_scales"));
}

fn open(model: &str, variant: &str) -> Checkpoint {
    Checkpoint::open(&golden(model, variant), &OpenOptions::default())
        .unwrap_or_else(|e| panic!("{model} {variant}: {e}"))
}

fn first<T>(c: &Checkpoint, f: impl Fn(&Layer<'_>) -> T) -> T {
    let [(name, n, k), ..] = names::linears(c.config(), 0);
    f(&c.layer(&name, n, k).unwrap())
}

fn codes(findings: &[Finding]) -> Vec<&'static str> {
    findings.iter().map(|f| f.code).collect()
}

fn layout(variant: &str) -> Layout {
    match variant {
        "" => Layout::Dense,
        "nvfp4_modelopt" => Layout::ModelOpt,
        v if v.starts_with("nvfp4_ct") => Layout::CompressedTensors,
        v if v.starts_with("nvfp4_torchao") => Layout::TorchAo,
        _ => Layout::Bitsandbytes,
    }
}

fn decode(layer: &Layer<'_>) -> Vec<f32> {
    let (schema, k) = (layer.detected.schema, layer.detected.k);
    let segments = [layer.segment.clone()];
    let decoder = RowDecoder::new(&Q4Weight { schema, k, segments: &segments }).unwrap();
    let mut out = vec![0.0; decoder.n() * k];
    for (r, row) in out.chunks_exact_mut(k).enumerate() {
        decoder.row(r, row);
    }
    out
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The weights of a layer by the formulas of its tool, straight from the file's bytes.
fn definition(m: &Model, name: &str, n: usize, k: usize) -> Vec<f32> {
    let tensor = |suffix: &str| m.find(&format!("{name}.{suffix}"));
    let scalar = |suffix: &str| tensor(suffix).map(|t| t.f32s()[0]);
    if let Some(codes) = tensor("_weight_qdata") {
        let scales = handmade::unswizzle(&tensor("_weight_scale").unwrap().bytes, n, k / 16);
        return nvfp4(&codes.bytes, &scales, |s| scalar("_weight_per_tensor_scale").map_or(s, |g| s * g));
    }
    if let Some(codes) = tensor("weight_packed") {
        return nvfp4(&codes.bytes, &tensor("weight_scale").unwrap().bytes, |s| {
            s / scalar("weight_global_scale").unwrap()
        });
    }
    let weight = tensor("weight").unwrap();
    if let Some(g) = scalar("weight_scale_2") {
        return nvfp4(&weight.bytes, &tensor("weight_scale").unwrap().bytes, |s| s * g);
    }
    if let Some(absmax) = tensor("weight.absmax") {
        let state = &tensor("weight.quant_state.bitsandbytes__nf4").unwrap().bytes;
        let state: serde_json::Value = serde_json::from_slice(state).unwrap();
        let absmax = if absmax.dtype == "U8" {
            let (map, nested) = (
                tensor("weight.nested_quant_map").unwrap().f32s(),
                tensor("weight.nested_absmax").unwrap().f32s(),
            );
            let offset = state["nested_offset"].as_f64().unwrap() as f32;
            absmax
                .bytes
                .iter()
                .enumerate()
                .map(|(i, c)| map[usize::from(*c)] * nested[i / 256] + offset)
                .collect()
        } else {
            absmax.f32s()
        };
        let block = state["blocksize"].as_u64().unwrap() as usize;
        let code = |i: usize| weight.bytes[i / 2] >> (4 * (1 - i % 2)) & 15;
        return (0..n * k).map(|i| NF4[usize::from(code(i))] * absmax[i / block]).collect();
    }
    match weight.dtype.as_str() {
        "F32" => weight.f32s(),
        _ => weight
            .bytes
            .chunks_exact(2)
            .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
            .collect(),
    }
}

fn nvfp4(codes: &[u8], scales: &[u8], effective: impl Fn(f32) -> f32) -> Vec<f32> {
    const MAGNITUDE: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let e4m3 = |b: u8| {
        let (exponent, mantissa) = (i32::from(b >> 3 & 15), f32::from(b & 7));
        if exponent == 0 { mantissa / 512.0 } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) }
    };
    let value = |i: usize| {
        let code = codes[i / 2] >> (4 * (i % 2)) & 15;
        let magnitude = MAGNITUDE[usize::from(code & 7)];
        (if code > 7 { -magnitude } else { magnitude }) * effective(e4m3(scales[i / 16]))
    };
    (0..codes.len() * 2).map(value).collect()
}

#[test]
fn conventions_are_told_apart() {
    let modelopt = Model::golden("a", "nvfp4_modelopt").open().unwrap();
    let ct = Model::golden("a", "nvfp4_ct").open().unwrap();
    let convention = |c: &Checkpoint| {
        first(c, |l| match l.detected.schema {
            q4_core::Q4Schema::Nvfp4(Nvfp4 { global, .. }) => global,
            _ => None,
        })
    };
    assert_eq!(
        (convention(&modelopt), convention(&ct)),
        (Some(Convention::Multiply), Some(Convention::Divide))
    );
}
