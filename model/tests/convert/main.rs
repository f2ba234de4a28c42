//! Every pair of layouts there and back: the same bytes, the same hash, the same logits; and what has no
//! counterpart refused.
#![allow(clippy::unwrap_used)]
mod gguf;
#[path = "../handmade/mod.rs"]
mod handmade;
mod int4;
#[path = "../plans/mod.rs"]
mod plans;
#[path = "../support/mod.rs"]
mod support;

use handmade::{Model, Tensor};
use plans::{nf4, nvfp4};
use q4_core::detect::Layout;
use q4_core::{Activations, Code, Error, Result, ThreadPool};
use q4_model::checkpoint::{Checkpoint, Head, OpenOptions, TensorStore};
use q4_model::export::convert::{Conversion, Report, convert};
use q4_model::export::{ExportPlan, export};
use q4_model::plan::ActivationRequest;
use q4_model::quantize::{Method, Scales};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use support::{Setup, greedy};

const NVFP4: [Layout; 3] = [Layout::ModelOpt, Layout::CompressedTensors, Layout::Dat];
const NF4: [Layout; 2] = [Layout::Bitsandbytes, Layout::Dat];

#[test]
fn every_pair_of_layouts_there_and_back() -> Result<()> {
    for model in ["a", "b"] {
        let mut plans: Vec<_> =
            NVFP4.into_iter().map(|l| (nvfp4(l, Some(Scales::TwoLevel), Method::Rtn), &NVFP4[..])).collect();
        plans.push((nvfp4(Layout::Dat, Some(Scales::Single), Method::Rtn), &NVFP4));
        plans.extend(NF4.map(|l| (nf4(l, 32, false), &NF4[..])));
        for (plan, layouts) in plans {
            let dir = tempfile::tempdir().unwrap();
            let source = dir.path().join("source");
            let plan = ExportPlan { power_of_two: true, ..plan };
            let dense = Checkpoint::open(&handmade::golden(model, ""), &OpenOptions::default())?;
            export(&dense, &source, &plan, &ThreadPool::new(2), &mut |_| Ok(()))?;
            let source = named(&source, plan.layout);
            let original = opened(&source, model)?;
            let expected = answers(&original)?;
            for &layout in layouts {
                let case =
                    format!("{model}: {:?} {} -> {}", plan.target, plan.layout.as_str(), layout.as_str());
                let there = dir.path().join(format!("there-{}", layout.as_str()));
                let report = converted(&original, &there, layout)?;
                assert!(report.lossless && report.layout == layout, "{case}");
                assert!(report.tensors.len() >= 14 && report.tensors.iter().all(|t| t.from == plan.layout));
                let there = named(&there, layout);
                let other = opened(&there, model)?;
                for t in &report.tensors {
                    assert_eq!(other.bind(&t.name, t.n, t.k)?.detected.layout, layout, "{case}");
                }
                assert_eq!(answers(&other)?, expected, "{case}");
                assert_on_disk(&there, &report);
                let back = dir.path().join(format!("back-{}", layout.as_str()));
                let again = converted(&other, &back, plan.layout)?;
                assert_eq!(again.sha256_decoded, report.sha256_decoded, "{case}");
                assert_same_tensors(original.store(), opened(&named(&back, plan.layout), model)?.store())?;
            }
        }
    }
    Ok(())
}

#[test]
fn the_checkpoints_of_other_tools() -> Result<()> {
    let (modelopt, compressed, bnb) = (Layout::ModelOpt, Layout::CompressedTensors, Layout::Bitsandbytes);
    for model in ["a", "b"] {
        for (variant, layout) in [
            ("nvfp4_torchao_gs", modelopt),
            ("nvfp4_torchao_gs", Layout::Dat),
            ("nvfp4_torchao_nogs", modelopt),
            ("nvfp4_torchao_nogs", compressed),
            ("nvfp4_torchao_nogs", Layout::Dat),
            ("nvfp4_modelopt", modelopt),
            ("nvfp4_ct", compressed),
            ("nvfp4_ct_w4a16", compressed),
            ("nf4_bnb", bnb),
            ("nf4_bnb_dq", bnb),
            ("nf4_bnb", Layout::Dat),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let out = dir.path().join("out");
            let source = Checkpoint::open(&handmade::golden(model, variant), &OpenOptions::default())?;
            let report = converted(&source, &out, layout).map_err(|e| e.within(variant))?;
            let other = opened(&named(&out, layout), model)?;
            assert_eq!(answers(&source)?, answers(&other)?, "{model} {variant} {}", layout.as_str());
            if report.tensors.iter().all(|t| t.from == layout) {
                assert_same_tensors(source.store(), other.store())?;
                for file in ["config.json", "hf_quant_config.json", "generation_config.json"] {
                    let (a, b) = (source.file(file), other.file(file));
                    assert_eq!(a.as_deref(), b.as_deref(), "{variant}: {file} is copied");
                }
                assert!(report.tensors.iter().all(|t| t.scale_in == t.scale_out));
            }
            let declared = other.declaration().activations;
            assert_eq!(declared == Some(true), matches!(variant, "nvfp4_modelopt" | "nvfp4_ct"), "{variant}");
        }
    }
    Ok(())
}

/// The hash again, from the bytes of the files and the formulas of the formats.
#[test]
fn the_hash_is_what_the_documentation_defines() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::golden("b", "nvfp4_modelopt");
    let report = converted(&model.open()?, &dir.path().join("out"), Layout::ModelOpt)?;
    let e2m1 = |code: u8| {
        let value = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
        if code & 8 == 0 { value } else { -value }
    };
    let e4m3 = |byte: u8| match (i32::from(byte >> 3), f32::from(byte & 7)) {
        (0, m) => m / 512.0,
        (e, m) => (1.0 + m / 8.0) * 2f32.powi(e - 7),
    };
    let mut values: Vec<(String, String, Vec<u8>)> = Vec::new();
    let bytes = |v: Vec<f32>| v.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
    for t in &model.tensors {
        if let Some(layer) = t.name.strip_suffix(".weight").filter(|_| t.dtype == "U8") {
            let (n, k) = (t.shape[0], 2 * t.shape[1]);
            let scales = &model.get(&format!("{layer}.weight_scale")).bytes;
            let g = model.get(&format!("{layer}.weight_scale_2")).f32s()[0];
            let value = |i: usize| e2m1(t.bytes[i / 2] >> (4 * (i % 2))) * (e4m3(scales[i / 16]) * g);
            values.push((
                t.name.clone(),
                format!("float32 [{n},{k}]"),
                bytes((0..n * k).map(value).collect()),
            ));
        } else if let Some(layer) = t.name.strip_suffix(".input_scale") {
            let factors = (0..127).map(|byte| e4m3(byte) * t.f32s()[0]).collect();
            values.push((format!("{layer}.inputs"), "float32 [127]".into(), bytes(factors)));
        } else if !t.name.ends_with("weight_scale") && !t.name.ends_with("weight_scale_2") {
            let dtype = if t.dtype == "BF16" { "bfloat16" } else { "float32" };
            let extents: Vec<_> = t.shape.iter().map(usize::to_string).collect();
            values.push((t.name.clone(), format!("{dtype} [{}]", extents.join(",")), t.bytes.clone()));
        }
    }
    values.sort();
    let mut hash = Sha256::new();
    for (name, kind, bytes) in values {
        hash.update(format!("{name} {kind}\n"));
        hash.update(bytes);
    }
    let expected = format!("{:x}", hash.finalize());
    assert_eq!(report.sha256_decoded, expected);
    Ok(())
}

#[test]
fn what_a_layout_cannot_hold_is_refused_by_name() -> Result<()> {
    let (modelopt, compressed, dat) = (Layout::ModelOpt, Layout::CompressedTensors, Layout::Dat);
    for (variant, layout, parts) in [
        ("nvfp4_modelopt", compressed, &[".weight_scale_2`", "block scales", "another last bit"][..]),
        ("nvfp4_ct", modelopt, &[".weight_global_scale`", "another last bit"]),
        ("nvfp4_ct_w4a16", dat, &[".weight_global_scale`", "another last bit"]),
        ("nvfp4_torchao_gs", compressed, &["._weight_per_tensor_scale`", "another last bit"]),
        ("nvfp4_modelopt", dat, &[".input_scale`: layout dat has no place for it", "nothing is dropped"]),
        (
            "nf4_bnb_dq",
            dat,
            &[".weight.absmax`: layout dat", "need: absmax in float32", "double quantisation"],
        ),
        ("nf4_bnb", modelopt, &["need: nvfp4", "have: nf4@1", "q4 quantize"]),
        ("nf4_bnb_dq", compressed, &["need: nvfp4", "have: nf4-dq@1", "q4 quantize"]),
        ("nvfp4_ct", Layout::Bitsandbytes, &["need: nf4", "have: nvfp4@1", "q4 quantize"]),
        ("nvfp4_modelopt", Layout::TorchAo, &["layout torchao is not written"]),
        ("", modelopt, &["no 4-bit layer", "q4 quantize"]),
    ] {
        for model in ["a", "b"] {
            let source = Checkpoint::open(&handmade::golden(model, variant), &OpenOptions::default())?;
            refused(&source, layout, Code::Usage, parts);
        }
    }
    // Blocks of 4096 that do not fill the last one: a .dat file has no place for their size.
    let dir = tempfile::tempdir().unwrap();
    let dense = Checkpoint::open(&handmade::golden("b", ""), &OpenOptions::default())?;
    let ragged = nf4(Layout::Bitsandbytes, 4096, false);
    export(&dense, &dir.path().join("ragged"), &ragged, &ThreadPool::new(1), &mut |_| Ok(()))?;
    let parts = [".weight.absmax`", "need: whole blocks", "in blocks of 4096"];
    refused(&opened(&dir.path().join("ragged"), "b")?, dat, Code::Usage, &parts);
    Ok(())
}

#[test]
fn scales_of_inputs_go_with_the_weights() -> Result<()> {
    let source = powers_of_two("b", "nvfp4_modelopt");
    let dir = tempfile::tempdir().unwrap();
    let (there, back) = (dir.path().join("there"), dir.path().join("back"));
    let report = converted(&source.open()?, &there, Layout::CompressedTensors)?;
    assert!(
        report.notes.iter().any(|n| n.contains("rounded as compressed-tensors does")),
        "{:?}",
        report.notes
    );
    let compressed = Checkpoint::open(&there, &OpenOptions::default())?;
    let config = |dir: &Path| -> Value {
        serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap()
    };
    let tool = config(&handmade::golden("b", "nvfp4_ct"))["quantization_config"].clone();
    for (field, value) in config(&there)["quantization_config"].as_object().unwrap() {
        assert_eq!(value, &tool[field], "{field}, as llm-compressor declares it");
    }
    for t in &report.tensors {
        let (a, b) = (t.scale_in.unwrap(), t.scale_out.unwrap());
        assert_eq!(a * b, 1.0, "{}", t.name);
        assert!(matches!(compressed.bind(&t.name, t.n, t.k)?.declared, Activations::Nvfp4(_)));
    }
    let report = converted(&compressed, &back, Layout::ModelOpt)?;
    assert!(report.lossless);
    let back = Checkpoint::open(&back, &OpenOptions::default())?;
    assert_same_tensors(source.open()?.store(), back.store())?;
    assert_eq!(back.declaration().activations, Some(true));

    // Inputs have any block scale, so theirs must be exact for all of them, and all layers must agree.
    let mut odd = source.clone();
    odd.edit("model.layers.1.mlp.up_proj.input_scale").bytes = 0.000_3f32.to_le_bytes().into();
    refused(
        &odd.open()?,
        Layout::CompressedTensors,
        Code::Usage,
        &["`model.layers.1.mlp.up_proj.input_scale`", "127 block scales"],
    );
    let mut some = source.clone();
    some.remove("model.layers.0.mlp.up_proj.input_scale");
    refused(
        &some.open()?,
        Layout::CompressedTensors,
        Code::Usage,
        &["`model.layers.0.mlp.up_proj`: no scale of its inputs"],
    );
    Ok(())
}

/// A scale that is stored and, by the declaration, not used stays so.
#[test]
fn a_scale_of_inputs_that_is_not_used_stays_unused() -> Result<()> {
    let mut source = powers_of_two("a", "nvfp4_modelopt");
    source.hf_quant.as_mut().unwrap()["quantization"]["quant_algo"] = "W4A16_NVFP4".into();
    let own = source.config["quantization_config"].as_object_mut().unwrap();
    own.insert("quant_algo".into(), "W4A16_NVFP4".into());
    own["config_groups"]["group_0"].as_object_mut().unwrap().remove("input_activations");
    let dir = tempfile::tempdir().unwrap();
    converted(&source.open()?, &dir.path().join("out"), Layout::CompressedTensors)?;
    let out = Checkpoint::open(&dir.path().join("out"), &OpenOptions::default())?;
    assert_eq!(out.declaration().activations, Some(false));
    assert!(out.table().contains_key("model.layers.0.mlp.up_proj.input_global_scale"));
    Ok(())
}

#[test]
fn nothing_is_dropped() -> Result<()> {
    let source = powers_of_two("a", "nvfp4_modelopt");
    let scalar = |name: &str| Tensor::new(name, "F32", &[], 1f32.to_le_bytes().into());
    for name in [
        "model.layers.0.self_attn.k_proj.k_scale",
        "model.layers.0.self_attn.v_scale",
        "model.layers.0.mlp.up_proj.anything",
        "model.other.weight_scale",
    ] {
        let mut more = source.clone();
        more.tensors.push(scalar(name));
        refused(&more.open()?, Layout::CompressedTensors, Code::Usage, &[name, "has no place for it"]);
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        converted(&more.open()?, &out, Layout::ModelOpt)?;
        assert_same_tensors(more.open()?.store(), &TensorStore::open(&out)?)?;
    }
    // A tensor that nothing is known of is copied.
    let mut more = source.clone();
    more.tensors.push(Tensor::new("model.rotary.inv_freq", "I64", &[2], vec![7; 16]));
    let dir = tempfile::tempdir().unwrap();
    converted(&more.open()?, &dir.path().join("out"), Layout::CompressedTensors)?;
    let out = TensorStore::open(&dir.path().join("out"))?;
    assert_eq!(out.tensor("model.rotary.inv_freq")?.bytes, [7; 16]);
    let mut strange = source.clone();
    strange.tensors.push(Tensor::new("model.mask", "BOOL", &[2], vec![1; 2]));
    refused(&strange.open()?, Layout::CompressedTensors, Code::TensorType, &["`model.mask`", "BOOL"]);

    let mut kv = source.clone();
    kv.hf_quant.as_mut().unwrap()["quantization"]["kv_cache_quant_algo"] = "FP8".into();
    refused(&kv.open()?, Layout::CompressedTensors, Code::Usage, &["key/value cache is declared as", "FP8"]);
    let dir = tempfile::tempdir().unwrap();
    converted(&kv.open()?, &dir.path().join("out"), Layout::ModelOpt)?;
    let file = std::fs::read_to_string(dir.path().join("out/hf_quant_config.json")).unwrap();
    assert!(file.contains("FP8"), "{file}");
    Ok(())
}

#[test]
fn other_files_are_carried_or_told() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    std::fs::create_dir(&source).unwrap();
    let mut model = powers_of_two("a", "nvfp4_modelopt");
    model.metadata.insert("author".into(), "somebody".into());
    let text = std::fs::read_to_string(handmade::golden("a", "nvfp4_modelopt").join("config.json")).unwrap();
    let carried =
        ["generation_config.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "LICENSE"];
    for (name, bytes) in model.side() {
        std::fs::write(source.join(name), bytes).unwrap();
    }
    std::fs::write(source.join("config.json"), &text).unwrap();
    std::fs::write(source.join("model.safetensors"), model.safetensors()).unwrap();
    for name in carried.into_iter().chain(["README.md", "recipe.yaml"]) {
        std::fs::write(source.join(name), "{}").unwrap();
    }
    let out = dir.path().join("out");
    let report =
        converted(&Checkpoint::open(&source, &OpenOptions::default())?, &out, Layout::CompressedTensors)?;
    for name in carried {
        assert_eq!(std::fs::read(out.join(name)).unwrap(), b"{}", "{name}");
    }
    assert!(!out.join("hf_quant_config.json").exists(), "it would contradict config.json");
    let notes = report.notes.join("\n");
    assert!(notes.contains("files not carried over: README.md, recipe.yaml"), "{notes}");
    assert!(notes.contains("metadata of the weight files not carried over: author"), "{notes}");
    let own = std::fs::read_to_string(out.join("config.json")).unwrap();
    let before = text.split("\"quantization_config\"").next().unwrap().trim_end().trim_end_matches(',');
    assert!(own.starts_with(before), "every other field keeps its text: {own}");
    assert_on_disk(&out, &report);

    // A tied model with a packed head of its own is one that is not tied.
    let single = nvfp4(Layout::Dat, None, Method::Rtn);
    let dense = Checkpoint::open(&handmade::golden("a", ""), &OpenOptions::default())?;
    let dat = dir.path().join("m.dat");
    export(&dense, &dat, &single, &ThreadPool::new(1), &mut |_| Ok(()))?;
    let packed = opened(&dat, "a")?;
    assert!(packed.config().tie_word_embeddings && matches!(packed.head()?, Head::Quantised(_)));
    let out = dir.path().join("untied");
    let report = converted(&packed, &out, Layout::ModelOpt)?;
    assert!(report.notes.iter().any(|n| n.contains("now native")), "{:?}", report.notes);
    assert!(report.tensors.iter().all(|t| (t.scale_in, t.scale_out) == (None, Some(1.0))));
    let out = Checkpoint::open(&out, &OpenOptions::default())?;
    assert!(!out.config().tie_word_embeddings && matches!(out.head()?, Head::Quantised(_)));
    let config: Value = serde_json::from_slice(&out.file("config.json").unwrap()).unwrap();
    assert_eq!(config["quantization_config"]["ignore"], json!([]));
    Ok(())
}

#[test]
fn layers_that_are_dense_stay_so() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let plan = ExportPlan {
        power_of_two: true,
        exclude: vec!["model.layers.0.*".into()],
        include: vec!["lm_head".into()],
        ..nvfp4(Layout::ModelOpt, None, Method::Rtn)
    };
    let dense = Checkpoint::open(&handmade::golden("b", ""), &OpenOptions::default())?;
    let source = dir.path().join("source");
    export(&dense, &source, &plan, &ThreadPool::new(1), &mut |_| Ok(()))?;
    let out = dir.path().join("out");
    let source = opened(&source, "b")?;
    let report = converted(&source, &out, Layout::CompressedTensors)?;
    assert_eq!(report.tensors.len(), 8);
    let out = opened(&out, "b")?;
    assert_eq!(answers(&source)?, answers(&out)?);
    let config: Value = serde_json::from_slice(&out.file("config.json").unwrap()).unwrap();
    let ignore = config["quantization_config"]["ignore"].as_array().unwrap();
    assert!(ignore.len() == 7 && ignore.contains(&"model.layers.0.mlp.down_proj".into()), "{ignore:?}");
    Ok(())
}

#[test]
fn files_are_cut_and_joined() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let source = powers_of_two("b", "nvfp4_modelopt");
    let out = dir.path().join("out");
    let conversion = Conversion { max_shard_bytes: 40_000, ..Conversion::new(Layout::CompressedTensors) };
    let sharded = handmade::open(source.shards())?;
    let report = convert(&sharded, &out, conversion, &ThreadPool::new(2), &mut |_| Ok(()))?;
    assert!(report.files.iter().filter(|f| f.0.ends_with(".safetensors")).count() > 2, "{:?}", report.files);
    let again = dir.path().join("again");
    let joined = converted(&Checkpoint::open(&out, &OpenOptions::default())?, &again, Layout::ModelOpt)?;
    assert_eq!(joined.files.iter().filter(|f| f.0.contains("safetensors")).count(), 1);
    assert_eq!(joined.sha256_decoded, report.sha256_decoded);
    assert_same_tensors(source.open()?.store(), &TensorStore::open(&again)?)
}

#[test]
fn damage_is_an_error_of_the_input() -> Result<()> {
    let source = powers_of_two("a", "nvfp4_modelopt");
    let up = "model.layers.1.mlp.up_proj";
    let mut nan = source.clone();
    nan.edit(&format!("{up}.weight_scale")).bytes[9] = 0x7f;
    refused(&nan.open()?, Layout::CompressedTensors, Code::ScaleInvalid, &[up, "weight_scale"]);
    let mut missing = source.clone();
    missing.remove(&format!("{up}.weight_scale_2"));
    refused(&missing.open()?, Layout::CompressedTensors, Code::SchemaInvalid, &[up]);
    let mut norm = source.clone();
    norm.remove("model.norm.weight");
    refused(&norm.open()?, Layout::Dat, Code::TensorMissing, &["model.norm.weight"]);
    let mut both = source.clone();
    let codes = both.get(&format!("{up}.weight")).clone();
    both.tensors.push(Tensor { name: format!("{up}.weight_packed"), ..codes });
    refused(&both.open()?, Layout::CompressedTensors, Code::SchemaInvalid, &["one layout"]);
    let mut declared = source.clone();
    declared.config["quantization_config"] =
        Model::golden("a", "nvfp4_ct").config["quantization_config"].clone();
    declared.hf_quant = None;
    refused(
        &declared.open()?,
        Layout::ModelOpt,
        Code::SchemaInvalid,
        &["another layout than config.json declares"],
    );
    Ok(())
}

#[test]
fn nothing_is_overwritten_and_an_interrupted_conversion_leaves_nothing() -> Result<()> {
    let source = powers_of_two("a", "nvfp4_modelopt").open()?;
    let pool = ThreadPool::new(1);
    for layout in [Layout::ModelOpt, Layout::CompressedTensors] {
        let dir = tempfile::tempdir().unwrap();
        let (out, full) = (dir.path().join("out"), dir.path().join("full"));
        std::fs::create_dir(&full).unwrap();
        std::fs::write(full.join("x"), "mine").unwrap();
        let e = convert(&source, &full, Conversion::new(layout), &pool, &mut |_| {
            panic!("no work before the check")
        });
        let e = e.expect_err("exists");
        assert!(e.code() == Code::Usage && e.what().contains("exists"), "{e}");
        let list = || {
            let mut names: Vec<_> =
                std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.retain(|n| n != "full");
            names
        };
        let mut total = 0;
        convert(&source, &out, Conversion::new(layout), &pool, &mut |p| {
            assert!(!out.exists(), "it has its name when it is proven");
            total = p.total;
            Ok(())
        })?;
        std::fs::remove_dir_all(&out).unwrap();
        for stop in [0, 1, total / 2, total - 1, total] {
            let mut seen = 0;
            let e = convert(&source, &out, Conversion::new(layout), &pool, &mut |p| {
                assert_eq!((p.done, p.total), (seen, total));
                seen += 1;
                if p.done == stop { Err(Error::new(Code::Internal, "interrupted")) } else { Ok(()) }
            });
            assert_eq!(e.expect_err("stopped").what(), "interrupted");
            assert!(list().is_empty(), "{layout:?} after {stop}: {:?}", list());
        }
    }
    Ok(())
}

/// What comes back is looked at, not what was meant to be written.
#[test]
fn an_output_that_changes_before_it_is_read_again_is_refused() -> Result<()> {
    use std::io::{Seek, SeekFrom, Write};
    let source = powers_of_two("a", "nvfp4_modelopt").open()?;
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut damaged = false;
    let e =
        convert(&source, &out, Conversion::new(Layout::CompressedTensors), &ThreadPool::new(1), &mut |p| {
            let partial = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
            let file = partial.join("model.safetensors");
            if p.tensor == "model.norm.weight" && !damaged {
                damaged = true;
                let name = "model.layers.0.mlp.down_proj.weight_packed";
                let offset = TensorStore::open(&file)?.entries().find(|e| e.name == name).unwrap().offset;
                let mut file = std::fs::OpenOptions::new().read(true).write(true).open(&file).unwrap();
                file.seek(SeekFrom::Start(offset as u64 + 40)).unwrap();
                file.write_all(&[0x55]).unwrap();
            }
            Ok(())
        });
    let e = e.expect_err("a byte is another");
    assert_eq!((e.code(), e.code().exit()), (Code::Findings, 3), "{e}");
    assert!(damaged && e.what().contains("model.layers.0.mlp.down_proj.weight: row"), "{e}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    Ok(())
}

fn converted(source: &Checkpoint, out: &Path, layout: Layout) -> Result<Report> {
    convert(source, out, Conversion::new(layout), &ThreadPool::new(2), &mut |_| Ok(()))
}

fn refused(source: &Checkpoint, layout: Layout, code: Code, parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let text = match converted(source, &dir.path().join("out.gguf"), layout) {
        Ok(_) => panic!("{parts:?} is refused"),
        Err(e) => {
            assert_eq!(e.code(), code, "{e}");
            e.to_string()
        }
    };
    for part in parts {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
}

/// A `.dat` file must end in that to be opened.
fn named(path: &Path, layout: Layout) -> PathBuf {
    if layout != Layout::Dat {
        return path.to_owned();
    }
    let dat = path.with_extension("dat");
    std::fs::rename(path, &dat).unwrap();
    dat
}

fn opened(path: &Path, model: &str) -> Result<Checkpoint> {
    let config = path.is_file().then(|| handmade::golden(model, ""));
    Checkpoint::open(path, &OpenOptions { config, ..OpenOptions::default() })
}

/// Logits of a prompt, bit for bit, and what follows it, by the oracle on inputs as they are.
fn answers(checkpoint: &Checkpoint) -> Result<(Vec<u32>, Vec<u32>)> {
    let setup = Setup {
        backend: Some("reference"),
        activations: ActivationRequest::Native,
        context: 32,
        ..Setup::default()
    };
    let dispatch = setup.dispatch()?;
    let loaded = setup.load(checkpoint, &dispatch)?;
    let mut runner = setup.runner(&loaded)?;
    runner.accept(&[1, 2, 3, 5, 8])?;
    let logits = runner.logits()?.iter().map(|v| v.to_bits()).collect();
    Ok((logits, greedy(&mut runner, 6)?))
}

/// A golden model with every per-tensor scale, of weights and of inputs, at the next power of two.
fn powers_of_two(model: &str, variant: &str) -> Model {
    let mut source = Model::golden(model, variant);
    for t in &mut source.tensors {
        if t.name.ends_with(".weight_scale_2") || t.name.ends_with(".input_scale") {
            let value = t.f32s()[0].log2().ceil().exp2();
            t.bytes = value.to_le_bytes().into();
        }
    }
    source
}

fn assert_same_tensors(a: &TensorStore, b: &TensorStore) -> Result<()> {
    assert_eq!(a.table(), b.table());
    for name in a.table().keys() {
        assert_eq!(a.tensor(name)?.bytes, b.tensor(name)?.bytes, "{name}");
    }
    Ok(())
}

fn assert_on_disk(out: &Path, report: &Report) {
    let size = |name: &str| {
        let path = if out.is_dir() { out.join(name) } else { out.to_owned() };
        std::fs::metadata(path).unwrap().len()
    };
    assert!(report.files.iter().all(|(name, bytes)| size(name) == *bytes), "{:?}", report.files);
    assert_eq!(report.bytes_out, report.files.iter().map(|f| f.1).sum::<u64>());
    if out.is_dir() {
        assert_eq!(std::fs::read_dir(out).unwrap().count(), report.files.len());
    }
}
