//! Damaged and hostile checkpoints: each ends in an error about the model's files that says where, without a
//! panic and without an allocation that the damage dictates.
#![allow(clippy::unwrap_used)]
mod handmade;

use handmade::{DatEntry, Model, Tensor, VARIANTS, join, leb128, split, write_dat};
use q4_heap::{COUNTED, Heap};
use q4_model::verify::{Severity, verify};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Most bytes that opening, checking and verifying one damaged model may hold at a time.
const ALLOWED: usize = 64 << 20;

#[global_allocator]
static HEAP: Heap = COUNTED;

#[derive(Default)]
struct Run {
    cases: usize,
    peak: usize,
    wrong: Vec<String>,
}

impl Run {
    fn check(&mut self, label: &str, files: Vec<(String, Vec<u8>)>) {
        let start = q4_heap::begin();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let checkpoint = handmade::open(files).map_err(|e| (e, true))?;
            let findings = verify(&checkpoint);
            let objects = findings.iter().any(|f| f.severity == Severity::Error);
            checkpoint.bind_all().map(|()| objects).map_err(|e| (e, objects))
        }));
        let peak = q4_heap::peak() - start;
        self.cases += 1;
        self.peak = self.peak.max(peak);
        if peak > ALLOWED {
            self.wrong.push(format!("{label}: allocated {peak} bytes"));
        }
        match outcome {
            Err(_) => self.wrong.push(format!("{label}: panic")),
            Ok(Ok(found)) => self.wrong.push(format!("{label}: accepted (verify objects: {found})")),
            Ok(Err((_, false))) => self.wrong.push(format!("{label}: verify has nothing to say")),
            Ok(Err((e, true))) => {
                let text = e.to_string();
                let subjects = [
                    "model.layers.",
                    "model.embed",
                    "model.norm",
                    "lm_head",
                    "safetensors",
                    ".dat",
                    "config.json",
                    "weight_map",
                ];
                if e.code().exit() != 4 || !subjects.iter().any(|s| text.contains(s)) || text.len() > 4000 {
                    self.wrong.push(format!("{label}: {text}"));
                }
            }
        }
    }

    /// `m` with other weights.
    fn weights(&mut self, label: &str, m: &Model, name: &str, weights: Vec<u8>) {
        let mut files = m.side();
        files.push((name.into(), weights));
        self.check(label, files);
    }

    fn edited(&mut self, label: &str, m: &Model, edit: impl FnOnce(&mut Model)) {
        let mut m = m.clone();
        edit(&mut m);
        self.weights(label, &m, "model.safetensors", m.safetensors());
    }

    fn finish(self) {
        println!("{} damaged checkpoints, at most {} KiB allocated", self.cases, self.peak >> 10);
        assert!(self.wrong.is_empty(), "{} of {}:\n{}", self.wrong.len(), self.cases, self.wrong.join("\n"));
        assert!(self.cases >= 200);
    }
}

/// One test, so that the count of allocated bytes belongs to one case at a time.
#[test]
fn damage_is_an_error_that_says_where() {
    let mut run = Run::default();
    for variant in VARIANTS {
        let m = Model::golden(if variant.is_empty() { "b" } else { "a" }, variant);
        m.open().unwrap().bind_all().unwrap();
        truncated(&mut run, variant, &m);
        flipped(&mut run, variant, &m);
        values(&mut run, variant, &m);
        parts(&mut run, variant, &m);
    }
    let m = Model::golden("a", "nvfp4_modelopt");
    headers(&mut run, &m);
    shards(&mut run, &m);
    configurations(&mut run);
    dat(&mut run, &Model::golden("a", "nvfp4_torchao_nogs"));
    run.finish();
}

fn truncated(run: &mut Run, variant: &str, m: &Model) {
    let file = m.safetensors();
    for percent in 0..100 {
        let part = file[..file.len() * percent / 100].to_vec();
        run.weights(&format!("{variant} cut at {percent} %"), m, "model.safetensors", part);
    }
    run.weights(&format!("{variant} less one byte"), m, "model.safetensors", file[..file.len() - 1].to_vec());
    run.weights(&format!("{variant} and one byte"), m, "model.safetensors", [&file[..], &[0]].concat());
}

/// One bit of the header. The metadata and the optional scale of inputs may change without anything being
/// wrong.
fn flipped(run: &mut Run, variant: &str, m: &Model) {
    let file = m.safetensors();
    let (header, _) = split(&file);
    let metadata = header.find("__metadata__").map(|at| at..at + 16 + json!(m.metadata).to_string().len());
    let free = |at: usize| {
        let near = &header[at.saturating_sub(80)..(at + 80).min(header.len())];
        metadata.as_ref().is_some_and(|r| r.contains(&at)) || near.contains("input_scale")
    };
    let mut random = Random(7);
    let mut done = 0;
    while done < 40 {
        let (at, bit) = (random.below(header.len()), random.below(8));
        if free(at) {
            continue;
        }
        let mut file = file.clone();
        file[8 + at] ^= 1 << bit;
        run.weights(&format!("{variant} header byte {at} bit {bit}"), m, "model.safetensors", file);
        done += 1;
    }
    for bit in 0..64 {
        let mut file = file.clone();
        file[bit / 8] ^= 1 << (bit % 8);
        run.weights(&format!("{variant} header length bit {bit}"), m, "model.safetensors", file);
    }
}

/// NaN, infinity, zero and negative values wherever one of them is not allowed.
fn values(run: &mut Run, variant: &str, m: &Model) {
    const SCALARS: [&str; 6] = [
        "weight_scale_2",
        "input_scale",
        "weight_global_scale",
        "input_global_scale",
        "per_tensor_scale",
        "nothing",
    ];
    let first = |t: &&Tensor| !t.name.contains("layers.1.");
    for t in m.tensors.iter().filter(first) {
        let is = |suffix: &str| t.name.ends_with(suffix);
        let mut put = |label: &str, at: usize, bytes: &[u8]| {
            run.edited(&format!("{variant} {} {label}", t.name), m, |m| {
                m.edit(&t.name).bytes[at..at + bytes.len()].copy_from_slice(bytes);
            });
        };
        let last = t.bytes.len();
        if SCALARS.iter().any(|s| is(s)) {
            for bad in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY] {
                put(&bad.to_string(), 0, &bad.to_le_bytes());
            }
        } else if is("weight_scale") {
            for bad in [0x7f, 0xff, 0x80, 0xb8] {
                put(&format!("{bad:#x}"), 0, &[bad]);
            }
        } else if is("absmax") && t.dtype == "F32" {
            for bad in [f32::NAN, f32::INFINITY] {
                put(&bad.to_string(), last - 4, &bad.to_le_bytes());
            }
            if !is("nested_absmax") {
                put("negative", last - 4, &(-1f32).to_le_bytes());
            }
        } else if is("quant_map") {
            put("NaN", 4, &f32::NAN.to_le_bytes());
            if !is("nested_quant_map") {
                put("one ulp", 4, &f32::from_bits((-0.6961928f32).to_bits() + 1).to_le_bytes());
                put("sign of zero", 28, &(-0f32).to_le_bytes());
            }
        } else if t.dtype == "F32" {
            put("NaN", last - 4, &f32::NAN.to_le_bytes());
            put("infinity", 0, &f32::NEG_INFINITY.to_le_bytes());
        } else if t.dtype == "BF16" {
            put("NaN", last - 2, &0x7fc0u16.to_le_bytes());
            put("infinity", 0, &0xff80u16.to_le_bytes());
        }
    }
}

/// Each tensor of the first layer missing, one element short, or of another type.
fn parts(run: &mut Run, variant: &str, m: &Model) {
    for t in m.tensors.iter().filter(|t| !t.name.contains("layers.1.")) {
        if !t.name.ends_with(".input_scale") {
            run.edited(&format!("{variant} without {}", t.name), m, |m| drop(m.remove(&t.name)));
        }
        run.edited(&format!("{variant} {} resized", t.name), m, |m| {
            let t = m.edit(&t.name);
            let elements = t.shape.iter().product::<usize>();
            let size = t.bytes.len() / elements;
            let shape = if elements == 1 { 2 } else { elements - 1 };
            t.bytes.resize(shape * size, 0);
            t.shape = vec![shape];
        });
        run.edited(&format!("{variant} {} retyped", t.name), m, |m| {
            let t = m.edit(&t.name);
            let other = match t.dtype.as_str() {
                "F32" => "I32",
                "BF16" => "I16",
                "F8_E4M3" => "F8_E5M2",
                _ => "BOOL",
            };
            t.dtype = other.into();
        });
    }
}

/// Headers that are wrong as texts.
fn headers(run: &mut Run, m: &Model) {
    let (header, data) = split(&m.safetensors());
    let fine: Value = serde_json::from_str(&header).unwrap();
    let key = "model.layers.0.mlp.up_proj.weight";
    let entry = fine[key].to_string();
    let [start, end] = [0, 1].map(|i| fine[key]["data_offsets"][i].as_u64().unwrap());
    let mut text = |label: &str, header: String| {
        assert_ne!(header, fine.to_string(), "{label}");
        run.weights(label, m, "model.safetensors", join(&header, &data));
    };
    let with = |field: &str, value: Value| {
        let mut header = fine.clone();
        header[key][field] = value;
        header.to_string()
    };
    for shape in [
        json!([1u64 << 60, 1u64 << 60]),
        json!([1u64 << 60, 32]),
        json!([u64::MAX]),
        json!([0, 32]),
        json!([-192, 32]),
        json!([192.0, 32]),
        json!(["192", 32]),
        json!(null),
        json!({}),
        json!([192, 32, 1, 1, 1, 1, 1, 1, 1]),
        json!(vec![1; 100_000]),
    ] {
        text(
            &format!("shape {}", shape.to_string().chars().take(40).collect::<String>()),
            with("shape", shape),
        );
    }
    for (label, offsets) in [
        ("overlap", json!([start - 8, end - 8])),
        ("hole", json!([start + 8, end + 8])),
        ("same bytes twice", fine["model.layers.1.mlp.up_proj.weight"]["data_offsets"].clone()),
        ("backwards", json!([end, start])),
        ("beyond the file", json!([start + (1u64 << 40), end + (1u64 << 40)])),
        ("overflow", json!([u64::MAX - 10, u64::MAX])),
        ("one offset", json!([start])),
        ("three offsets", json!([start, end, end])),
        ("negative offset", json!([-1, end])),
    ] {
        text(label, with("data_offsets", offsets));
    }
    for dtype in ["F33", "", "u8", "F4", "C64"] {
        text(&format!("type {dtype}"), with("dtype", json!(dtype)));
    }
    text("unknown field", with("compression", json!("zip")));
    text("duplicate tensor", header.replacen('{', &format!("{{\"{key}\":{entry},"), 1));
    text(
        "duplicate tensor, escaped",
        header.replacen('{', &format!("{{\"\\u006dodel{}\":{entry},", &key[5..]), 1),
    );
    text("duplicate field", header.replace(&entry, &entry.replacen('{', "{\"dtype\":\"U8\",", 1)));
    text("duplicate metadata", header.replacen('{', "{\"__metadata__\":{\"a\":\"b\"},", 1));
    text(
        "duplicate metadata key",
        header.replacen("\"__metadata__\":{", "\"__metadata__\":{\"a\":\"\",\"a\":\"\",", 1),
    );
    text("metadata of numbers", header.replacen("\"__metadata__\":{", "\"__metadata__\":{\"a\":1,", 1));
    text("long name", header.replace(key, &"x".repeat(5000)));
    text("nested deeply", format!("{}{}", "{\"a\":".repeat(100_000), "}".repeat(100_000)));
    text("arrays nested deeply", "[".repeat(100_000));
    text("not an object", "[]".into());
    text("empty object", "{}".into());
    text("no text", String::new());
    text("two objects", format!("{header}{{}}"));
    text("NUL at the end", format!("{header}\0"));
    text("not closed", header[..header.len() - 1].into());
    let mut bytes = m.safetensors();
    bytes[20] = 0xff;
    run.weights("not UTF-8", m, "model.safetensors", bytes);
    for length in [0, 1, 7, 8, header.len() as u64 + 1, 100_000_001, 1 << 40, 1 << 63, u64::MAX] {
        let file = [&length.to_le_bytes()[..], header.as_bytes(), &data].concat();
        run.weights(&format!("header length {length}"), m, "model.safetensors", file);
    }
    run.weights("a pickle", m, "pytorch_model.bin", b"\x80\x02}q\x00.".to_vec());
    run.check("no weights", m.side());
}

fn shards(run: &mut Run, m: &Model) {
    let files = m.shards();
    let at = files.iter().position(|f| f.0.ends_with("index.json")).unwrap();
    let index: Value = serde_json::from_slice(&files[at].1).unwrap();
    let key = "model.layers.1.mlp.up_proj.weight";
    let mut changed = |label: &str, index: String| {
        let mut files = files.clone();
        files[at].1 = index.into_bytes();
        run.check(&format!("index: {label}"), files);
    };
    for name in [
        "..",
        "../model-00001-of-00002.safetensors",
        "../../etc/passwd.safetensors",
        "/etc/passwd.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "..safetensors",
        ".safetensors",
        "",
        "C:model.safetensors",
        "model.bin",
        "model-00001-of-00002.safetensors\u{0}",
        "model-00003-of-00003.safetensors",
        "model-00002-OF-00002.safetensors",
        "ｍodel.safetensors",
    ] {
        let mut index = index.clone();
        index["weight_map"][key] = json!(name);
        changed(&format!("shard {name:?}"), index.to_string());
    }
    let mut index_of = |label: &str, edit: &dyn Fn(&mut Value)| {
        let mut index = index.clone();
        edit(&mut index);
        changed(label, index.to_string());
    };
    index_of("the wrong shard", &|i| {
        i["weight_map"][key] = i["weight_map"]["model.embed_tokens.weight"].clone()
    });
    index_of("a key too many", &|i| i["weight_map"]["model.x"] = i["weight_map"][key].clone());
    index_of("no map", &|i| i["weight_map"] = json!(null));
    index_of("an empty map", &|i| i["weight_map"] = json!({}));
    index_of("a list", &|i| i["weight_map"] = json!([]));
    index_of("numbers", &|i| i["weight_map"][key] = json!(1));
    let text = index.to_string();
    changed(
        "duplicate key",
        text.replace(
            "\"weight_map\":{",
            &format!("\"weight_map\":{{\"{key}\":\"model-00001-of-00002.safetensors\","),
        ),
    );
    changed("duplicate map", text.replacen('{', "{\"weight_map\":{},", 1));
    for percent in (0..100).step_by(10) {
        changed(&format!("cut at {percent} %"), text[..text.len() * percent / 100].into());
    }
    let start = text.find("weight_map").unwrap() + 12;
    let mut random = Random(11);
    for _ in 0..30 {
        let (at, bit) = (start + random.below(text.len() - start - 1), random.below(7));
        let mut bytes = text.clone().into_bytes();
        bytes[at] ^= 1 << bit;
        changed(&format!("byte {at} bit {bit}"), String::from_utf8(bytes).unwrap());
    }
    for (i, (name, bytes)) in files.iter().enumerate().filter(|f| f.1.0.ends_with(".safetensors")) {
        let mut missing = files.clone();
        missing.remove(i);
        run.check(&format!("without {name}"), missing);
        for percent in (0..100).step_by(10) {
            let mut cut = files.clone();
            cut[i].1 = bytes[..bytes.len() * percent / 100].to_vec();
            run.check(&format!("{name} cut at {percent} %"), cut);
        }
        let mut twice = files.clone();
        twice[i].1 = m.safetensors();
        run.check(&format!("{name} with every tensor"), twice);
    }
    let mut both = files.clone();
    both.push(("model.safetensors".into(), m.safetensors()));
    run.check("shards and one file", both);
}

fn configurations(run: &mut Run) {
    let modelopt = Model::golden("a", "nvfp4_modelopt");
    for (field, value) in [
        ("hidden_size", json!(128)),
        ("hidden_size", json!(1 << 20)),
        ("intermediate_size", json!(191)),
        ("num_attention_heads", json!(8)),
        ("num_key_value_heads", json!(4)),
        ("head_dim", json!(16)),
        ("vocab_size", json!(255)),
        ("vocab_size", json!(1 << 24)),
        ("num_hidden_layers", json!(3)),
        ("num_hidden_layers", json!(1u64 << 60)),
        ("tie_word_embeddings", json!(false)),
        ("hidden_size", json!(null)),
        ("quantization_config", json!([])),
        ("quantization_config", json!({})),
        ("quantization_config", json!({"quant_method": "awq"})),
        ("quantization_config", json!({"quant_method": "compressed-tensors"})),
        ("quantization_config", json!({"quant_method": "modelopt"})),
        ("quantization_config", json!({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})),
        ("quantization_config", json!({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"})),
        ("quantization_config", json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32})),
        ("quantization_config", json!({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"})),
    ] {
        run.edited(&format!("{field} {value}"), &modelopt, |m| m.config[field] = value);
    }
    for hf in [
        json!([]),
        json!({}),
        json!({"quantization": {"quant_algo": "FP8"}}),
        json!({"quantization": {"quant_algo": 4}}),
    ] {
        run.edited(&format!("hf_quant_config {hf}"), &modelopt, |m| m.hf_quant = Some(hf));
    }
    for text in ["", "{", "null", "[]", "\u{0}", "{\"model_type\":\"llama\"}"] {
        let files =
            vec![("config.json".into(), text.into()), ("model.safetensors".into(), modelopt.safetensors())];
        run.check(&format!("config.json {text:?}"), files);
    }
    run.check("no config.json", vec![("model.safetensors".into(), modelopt.safetensors())]);
    for (from, to) in [
        ("nvfp4_modelopt", "nvfp4_ct"),
        ("nvfp4_ct", "nvfp4_modelopt"),
        ("nf4_bnb", "nvfp4_ct"),
        ("nvfp4_ct", "nf4_bnb"),
    ] {
        let (from_model, to_model) = (Model::golden("a", from), Model::golden("a", to));
        run.edited(&format!("{from} with the configuration of {to}"), &from_model, |m| {
            m.config = to_model.config.clone();
            m.hf_quant = None;
        });
    }
    let torchao = Model::golden("a", "nvfp4_torchao_gs");
    for (from, to) in [
        ("\"is_swizzled_scales\": true", "\"is_swizzled_scales\": false"),
        ("\"block_size\": 16", "\"block_size\": 32"),
        ("NVFP4Tensor", "MXTensor"),
        ("\"qdata\"", "\"act_per_tensor_scale\", \"qdata\""),
        ("\"per_tensor_scale\", ", ""),
        ("}", ""),
    ] {
        run.edited(&format!("torchao record {to}"), &torchao, |m| {
            for record in m.metadata.values_mut() {
                *record = json!(record.as_str().unwrap().replace(from, to));
            }
        });
    }
    let bnb = Model::golden("a", "nf4_bnb_dq");
    let key = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4";
    for (field, value) in [
        ("quant_type", json!("fp4")),
        ("blocksize", json!(0)),
        ("blocksize", json!(128)),
        ("blocksize", json!(u64::MAX)),
        ("shape", json!([64, 192])),
        ("shape", json!([1u64 << 60, 1u64 << 60])),
        ("shape", json!([12288])),
        ("shape", json!([])),
        ("nested_blocksize", json!(0)),
        ("nested_blocksize", json!(64)),
        ("nested_blocksize", json!(null)),
        ("nested_offset", json!(1e300)),
        ("nested_offset", json!("nan")),
        ("nested_dtype", json!("float16")),
    ] {
        run.edited(&format!("quant_state {field} {value}"), &bnb, |m| {
            let t = m.edit(key);
            let mut state: Value = serde_json::from_slice(&t.bytes).unwrap();
            state[field] = value;
            t.bytes = state.to_string().into_bytes();
            t.shape = vec![t.bytes.len()];
        });
    }
    let dense = Model::golden("a", "");
    for suffix in [
        "bias",
        "weight_scale",
        "weight_scale_2",
        "weight.absmax",
        "weight_packed",
        "weight.qdata",
        "pre_quant_scale",
    ] {
        run.edited(&format!("a dense layer with {suffix}"), &dense, |m| {
            m.tensors.push(Tensor::new(
                &format!("model.layers.0.mlp.up_proj.{suffix}"),
                "F32",
                &[1],
                vec![0; 4],
            ));
        });
    }
}

fn dat(run: &mut Run, m: &Model) {
    let entries = m.dat();
    let file = write_dat(&entries);
    m.open_with("tiny.dat", file.clone()).unwrap().bind_all().unwrap();
    let mut whole = |label: &str, file: Vec<u8>| run.weights(&format!("dat {label}"), m, "tiny.dat", file);
    for percent in 0..100 {
        whole(&format!("cut at {percent} %"), file[..file.len() * percent / 100].to_vec());
    }
    whole("less one byte", file[..file.len() - 1].to_vec());
    whole("and one byte", [&file[..], &[0]].concat());
    for count in [0, 1, entries.len() as u64 - 1, entries.len() as u64 + 1, 1 << 40, u64::MAX] {
        whole(
            &format!("{count} entries"),
            [&leb128(count)[..], &file[leb128(entries.len() as u64).len()..]].concat(),
        );
    }
    whole("endless number", vec![0xff; 4096]);
    // Structure of the first entry: the length of its key, the key, type, rank and extents.
    let start = leb128(entries.len() as u64).len();
    for at in start..start + 1 + entries[0].key.len() {
        for bit in [0, 3, 6] {
            let mut file = file.clone();
            file[at] ^= 1 << bit;
            whole(&format!("byte {at} bit {bit}"), file);
        }
    }
    let mut edited = |label: &str, edit: &dyn Fn(&mut Vec<DatEntry>)| {
        let mut entries = entries.clone();
        edit(&mut entries);
        whole(label, write_dat(&entries));
    };
    let at = |suffix: &str| entries.iter().position(|e| e.key.ends_with(suffix)).unwrap();
    let (codes, scales, norm) = (at("qdata"), at("scale"), at("norm.weight"));
    for code in [4711, 8, 9, 10, 12, 99, 102, 1 << 40, u64::MAX] {
        edited(&format!("type {code}"), &|e| e[codes].code = code);
    }
    for (i, code) in [(codes, 101), (codes, 11), (scales, 1), (scales, 11), (norm, 2)] {
        edited(&format!("type {code} for {}", entries[i].key), &|e| e[i].code = code);
    }
    for dims in [vec![1 << 60, 1 << 60], vec![u64::MAX], vec![0, 32], vec![1; 9], vec![1; 10_000], vec![]] {
        edited(&format!("extents {:?}", &dims[..dims.len().min(3)]), &|e| e[codes].dims = dims.clone());
    }
    for (i, label) in [(codes, "codes"), (scales, "scales"), (norm, "norm")] {
        edited(&format!("without {label}"), &|e| drop(e.remove(i)));
        edited(&format!("{label} twice"), &|e| e.push(e[i].clone()));
        edited(&format!("{label} transposed"), &|e| e[i].dims.insert(0, 1));
        edited(&format!("{label} with an empty key"), &|e| e[i].key.clear());
        edited(&format!("{label} with a long key"), &|e| e[i].key = "k".repeat(2000));
        edited(&format!("{label} with another key"), &|e| e[i].key.push('x'));
    }
    for bad in [0x7f, 0xff, 0x80] {
        edited(&format!("scale {bad:#x}"), &|e| *e[scales].bytes.last_mut().unwrap() = bad);
    }
    edited("infinite norm", &|e| e[norm].bytes[1] = 0x7c);
    edited("a global scale of zero", &|e| {
        let key = e[codes].key.replace("qdata", "global_scale");
        e.push(DatEntry::new(&key, 6, &[1], vec![0; 4]));
    });
    run.weights("dat named safetensors", m, "model.safetensors", file);
    run.weights("safetensors named dat", m, "tiny.dat", m.safetensors());
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}
