//! Exports are compared, bit for bit, with what the tools whose layouts they have wrote from the same dense
//! weights.
#![allow(clippy::unwrap_used)]
mod plans;

use plans::{nf4, nvfp4};
use q4_core::detect::Layout;
use q4_core::formats::nf4;
use q4_core::{
    Code, Convention, DType, Error, Nvfp4, Part, Q4Schema, Q4Weight, Result, RowDecoder, Rule, ThreadPool,
};
use q4_model::checkpoint::{Bytes, Checkpoint, Head, OpenOptions, TensorStore, names};
use q4_model::export::{ExportPlan, Progress, Report, export};
use q4_model::quantize::{Method, Quantized, Rows, Scales, Target, ToNf4, ToNvfp4, amax, quantize, sqnr_db};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const MODELS: [&str; 2] = ["qwen3_tiny_a", "qwen3_tiny_b"];
const NVFP4: [Layout; 3] = [Layout::ModelOpt, Layout::CompressedTensors, Layout::Dat];

#[test]
fn modelopt_is_what_modelopt_writes() -> Result<()> {
    for model in MODELS {
        let (_dir, out, _) = exported(model, &nvfp4(Layout::ModelOpt, None, Method::Rtn))?;
        let same = |name: &str| !name.ends_with(".input_scale");
        assert_same_tensors(
            &TensorStore::open(&out)?,
            &TensorStore::open(&golden(model).join("nvfp4_modelopt"))?,
            &same,
        )?;
        let config = json(&out.join("config.json"));
        assert_eq!(config["quantization_config"]["quant_algo"], "W4A16_NVFP4");
        let file = json(&out.join("hf_quant_config.json"));
        assert_eq!(file["quantization"]["exclude_modules"], serde_json::json!(["lm_head"]));
        assert_eq!(file["producer"]["name"], "modelopt", "readers look for it");
    }
    Ok(())
}

#[test]
fn compressed_tensors_is_what_llm_compressor_writes() -> Result<()> {
    for model in MODELS {
        let (_dir, out, _) = exported(model, &nvfp4(Layout::CompressedTensors, None, Method::Rtn))?;
        let reference = golden(model).join("nvfp4_ct_w4a16");
        assert_same_tensors(&TensorStore::open(&out)?, &TensorStore::open(&reference)?, &|_| true)?;
        assert_config_fields(&out, &reference);
    }
    Ok(())
}

#[test]
fn bitsandbytes_is_what_bitsandbytes_writes() -> Result<()> {
    for model in MODELS {
        let (_dir, out, _) = exported(model, &nf4(Layout::Bitsandbytes, 64, false))?;
        let reference = golden(model).join("nf4_bnb");
        assert_same_tensors(&TensorStore::open(&out)?, &TensorStore::open(&reference)?, &|_| true)?;
        let own = json(&out.join("config.json"))["quantization_config"].clone();
        assert_eq!((&own["quant_method"], &own["load_in_4bit"]), (&"bitsandbytes".into(), &true.into()));
    }
    Ok(())
}

#[test]
fn double_quantisation_stays_within_half_a_step_of_the_map() -> Result<()> {
    // Largest gap between neighbours of the map, halved, and a little for the f32 arithmetic.
    let map = nf4::dynamic_map();
    let half_step = map.windows(2).map(|w| w[1] - w[0]).fold(0f32, f32::max) / 2.0 * 1.0001;
    for model in MODELS {
        let (_dir, out, _) = exported(model, &nf4(Layout::Bitsandbytes, 64, true))?;
        let own = TensorStore::open(&out)?;
        let reference = TensorStore::open(&golden(model).join("nf4_bnb_dq"))?;
        let exact = TensorStore::open(&golden(model).join("nf4_bnb"))?;
        // Second-level codes are data: the tool's own are not always the nearest, and its mean is rounded in
        // f32.
        let second = |name: &str| name.ends_with("absmax") || name.ends_with("quant_state.bitsandbytes__nf4");
        assert_same_tensors(&own, &reference, &|name| !second(name))?;
        for name in own.table().keys().filter(|n| n.ends_with(".absmax") && !n.ends_with("nested_absmax")) {
            let layer = name.strip_suffix(".weight.absmax").unwrap();
            let state = |store: &TensorStore| -> Result<Value> {
                let key = format!("{layer}.weight.quant_state.bitsandbytes__nf4");
                Ok(serde_json::from_slice(store.tensor(&key)?.bytes).expect("JSON"))
            };
            let (mine, theirs) = (state(&own)?, state(&reference)?);
            let offset = |v: &Value| v["nested_offset"].as_f64().expect("a number") as f32;
            let rounding = 2.0 * offset(&theirs) * f32::EPSILON;
            assert!((offset(&mine) - offset(&theirs)).abs() <= rounding, "{layer}");
            for field in ["quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype"] {
                assert_eq!(mine[field], theirs[field], "{layer}: {field}");
            }
            let nested =
                |store: &TensorStore| store.tensor(&format!("{layer}.weight.nested_absmax"))?.to_f32();
            let (nested, tools) = (nested(&own)?, nested(&reference)?);
            assert_eq!(nested.len(), tools.len());
            assert!(
                nested.iter().zip(&tools).all(|(a, b)| (a - b).abs() <= 2.0 * (rounding + a * f32::EPSILON)),
                "{layer}: {nested:?} {tools:?}"
            );
            let decoder = nf4::Nested {
                codes: own.tensor(name)?.bytes,
                map,
                absmax: &nested,
                offset: offset(&mine),
                block: 256,
            };
            for (i, a) in exact.tensor(name)?.to_f32()?.into_iter().enumerate() {
                assert!(
                    (decoder.absmax_at(i) - a).abs() <= half_step * nested[i / 256],
                    "{layer}: absmax {i}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn dat_files_come_back_as_what_was_quantised() -> Result<()> {
    let pool = ThreadPool::new(2);
    for (model, scales) in MODELS.into_iter().flat_map(|m| [(m, Scales::Single), (m, Scales::TwoLevel)]) {
        let dense = open(model)?;
        let plan = nvfp4(Layout::Dat, Some(scales), Method::Rtn);
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("model.dat");
        let report = export(
            &dense,
            &out,
            &ExportPlan { share_groups: false, ..plan.clone() },
            &pool,
            &mut |_| Ok(()),
        )?;
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "one file and nothing else");
        assert!(!report.notes.is_empty(), "says which files to pass with it");
        let options = OpenOptions { config: Some(golden(model)), ..OpenOptions::default() };
        let packed = Checkpoint::open(&out, &options)?;
        packed.bind_all()?;
        assert_eq!(packed.embedding()?.bytes, dense.embedding()?.bytes);
        let Head::Quantised(head) = packed.head()? else {
            panic!("lm_head is packed by convention, tied or not")
        };
        assert_eq!(
            (head.detected.n, head.detected.k),
            (dense.config().vocab_size, dense.config().hidden_size)
        );
        let tied = dense.config().tie_word_embeddings;
        let mut layers: Vec<_> = (0..dense.config().num_hidden_layers)
            .flat_map(|i| names::linears(dense.config(), i))
            .map(|(layer, ..)| (layer.clone(), format!("{layer}.weight")))
            .collect();
        layers.push((
            "lm_head".into(),
            if tied { "model.embed_tokens.weight" } else { "lm_head.weight" }.into(),
        ));
        for (layer, source) in layers {
            let stored = dense.tensor(&source)?;
            let rows = Rows::new(&source, stored.bytes, stored.dtype, stored.shape[0], stored.shape[1])?;
            let q = quantize(&rows, &plan.target, None, &pool)?;
            assert_eq!(
                packed.tensor(&format!("{layer}.weight.qdata"))?.bytes,
                q.parts.bytes(Part::Codes),
                "{layer}"
            );
            assert_eq!(
                packed.tensor(&format!("{layer}.weight.scale"))?.bytes,
                q.parts.bytes(Part::Scales),
                "{layer}"
            );
            let expected = (scales == Scales::TwoLevel).then_some(Convention::Multiply);
            let bound = packed.layer(&layer, q.n, q.k)?;
            assert!(
                matches!(bound.detected.schema, Q4Schema::Nvfp4(Nvfp4 { global, .. }) if global == expected),
                "{layer}"
            );
        }
    }
    Ok(())
}

#[test]
fn every_export_binds_and_decodes_to_the_reported_error() -> Result<()> {
    let pool = ThreadPool::new(2);
    let mut plans: Vec<_> = NVFP4.into_iter().map(|l| nvfp4(l, None, Method::FourOverSix)).collect();
    plans.push(nf4(Layout::Bitsandbytes, 64, true));
    plans.push(nf4(Layout::Dat, 32, false));
    for (model, plan) in MODELS.into_iter().flat_map(|m| plans.iter().map(move |p| (m, p))) {
        let dense = open(model)?;
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out.dat");
        let report = export(&dense, &out, plan, &pool, &mut |_| Ok(()))?;
        let options = OpenOptions {
            config: (plan.layout == Layout::Dat).then(|| golden(model)),
            ..OpenOptions::default()
        };
        let packed = Checkpoint::open(&out, &options)?;
        packed.bind_all()?;
        assert_eq!(report.layout, plan.layout);
        for t in &report.tensors {
            let layer = packed.layer(&t.name, t.n, t.k)?;
            assert_eq!(layer.detected.layout, plan.layout, "{}", t.name);
            let source = if dense.table().contains_key(&format!("{}.weight", t.name)) {
                &t.name
            } else {
                "model.embed_tokens"
            };
            let dense = dense.tensor(&format!("{source}.weight"))?.to_f32()?;
            let segments = [layer.segment.clone()];
            let decoder =
                RowDecoder::new(&Q4Weight { schema: layer.detected.schema, k: t.k, segments: &segments })?;
            let sqnr = sqnr_of(&dense, t.k, &decoder);
            assert!((sqnr - t.sqnr_db).abs() < 1e-9, "{}: reported {}, decoded {sqnr}", t.name, t.sqnr_db);
            assert!(sqnr > 10.0, "{}: {sqnr} dB", t.name);
        }
        let on_disk: u64 = report.files.iter().map(|f| f.1).sum();
        assert_eq!(report.bytes_out, on_disk);
        let copied = dense.table().len()
            - report
                .tensors
                .iter()
                .filter(|t| dense.table().contains_key(&format!("{}.weight", t.name)))
                .count();
        assert_eq!(report.copied, copied);
    }
    Ok(())
}

#[test]
fn the_noise_is_what_the_formats_are_known_for() -> Result<()> {
    let (n, k) = (256, 2048);
    let bytes: Vec<u8> = gaussian(n * k, 0.02).into_iter().flat_map(f32::to_le_bytes).collect();
    let rows = Rows::new("gauss", &bytes, DType::F32, n, k)?;
    let pool = ThreadPool::new(2);
    let sqnr = |target: Target| sqnr_db(&rows, &quantize(&rows, &target, None, &pool)?, &pool);
    let nvfp4 = |rule, scales, method| Target::Nvfp4(ToNvfp4 { rule, scales, method });
    let single = sqnr(nvfp4(Rule::TorchAo, Scales::Single, Method::Rtn))?;
    let two = sqnr(nvfp4(Rule::ModelOpt, Scales::TwoLevel, Method::Rtn))?;
    let best = sqnr(nvfp4(Rule::ModelOpt, Scales::TwoLevel, Method::FourOverSix))?;
    let nf4 = sqnr(Target::Nf4(ToNf4 { block: 64, double: false }))?;
    for (got, published) in [(single, 17.68), (two, 20.42), (best, 21.20), (nf4, 20.71)] {
        assert!((got - published).abs() < 0.5, "{got} dB, published {published}");
    }
    let runtime = sqnr(nvfp4(Rule::Runtime, Scales::Single, Method::Rtn))?;
    assert!(single < two && runtime < two && two < best, "{runtime} {single} {two} {best}");
    for rule in Rule::ALL {
        let (rtn, four) = (
            sqnr(nvfp4(rule, Scales::TwoLevel, Method::Rtn))?,
            sqnr(nvfp4(rule, Scales::TwoLevel, Method::FourOverSix))?,
        );
        assert!(four >= rtn, "{rule:?}: {four} < {rtn}");
    }
    Ok(())
}

#[test]
fn a_result_depends_on_the_weights_alone() -> Result<()> {
    // 70 000 elements: several pieces, the last one ragged; NF4 blocks cross rows.
    let (n, k) = (125, 560);
    let values = gaussian(n * k, 1.0);
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let rows = Rows::new("w", &bytes, DType::F32, n, k)?;
    let (one, three) = (ThreadPool::new(1), ThreadPool::new(3));
    let nvfp4 = Target::Nvfp4(ToNvfp4 {
        rule: Rule::CompressedTensors,
        scales: Scales::TwoLevel,
        method: Method::Rtn,
    });
    for target in [
        nvfp4,
        Target::Nf4(ToNf4 { block: 4096, double: true }),
        Target::Nf4(ToNf4 { block: 32, double: false }),
    ] {
        let (a, b) = (quantize(&rows, &target, None, &one)?, quantize(&rows, &target, None, &three)?);
        Part::ALL.iter().for_each(|part| assert_eq!(a.parts.bytes(*part), b.parts.bytes(*part)));
        assert_eq!(a.parts.offset, b.parts.offset);
        assert_eq!(sqnr_db(&rows, &a, &one)?, sqnr_db(&rows, &b, &three)?);
    }
    let q = quantize(&rows, &Target::Nf4(ToNf4 { block: 64, double: false }), None, &three)?;
    let (mut codes, mut absmax) = (vec![0; n * k / 2], vec![0.0; (n * k).div_ceil(64)]);
    nf4::quantize(&values, 64, &mut codes, &mut absmax)?;
    assert_eq!(
        (q.parts.bytes(Part::Codes), q.parts.to_f32(Part::Scales)),
        (&codes[..], absmax),
        "pieces change nothing"
    );
    assert_eq!(amax(&rows, &three)?, values.iter().fold(0.0, |a: f32, v| a.max(v.abs())));
    Ok(())
}

#[test]
fn a_shared_scale_covers_its_group() -> Result<()> {
    let bytes: Vec<u8> = gaussian(64, 1.0).into_iter().flat_map(f32::to_le_bytes).collect();
    let rows = Rows::new("w", &bytes, DType::F32, 4, 16)?;
    let pool = ThreadPool::new(1);
    let target =
        Target::Nvfp4(ToNvfp4 { rule: Rule::ModelOpt, scales: Scales::TwoLevel, method: Method::Rtn });
    let global = |q: &Quantized| q.parts.global.unwrap().value();
    assert_eq!(global(&quantize(&rows, &target, Some(2688.0), &pool)?), 1.0);
    let e = quantize(&rows, &target, Some(1e-3), &pool).expect_err("would saturate");
    assert_eq!(e.code(), Code::ValueInvalid);
    // Without sharing each matrix has its own scale.
    let plan = ExportPlan { share_groups: false, ..nvfp4(Layout::ModelOpt, None, Method::Rtn) };
    let (_dir, out, _) = exported(MODELS[0], &plan)?;
    let store = TensorStore::open(&out)?;
    let scale = |p: &str| {
        store.tensor(&format!("model.layers.0.self_attn.{p}.weight_scale_2")).and_then(|t| t.to_f32())
    };
    assert!(scale("q_proj")? != scale("k_proj")? || scale("k_proj")? != scale("v_proj")?);
    Ok(())
}

#[test]
fn layers_are_chosen_by_name() -> Result<()> {
    let base = nvfp4(Layout::CompressedTensors, None, Method::Rtn);
    let plan = ExportPlan {
        include: vec!["lm_head".into()],
        exclude: vec!["model.layers.0.*".into(), "down_proj".into()],
        ..base.clone()
    };
    let (_dir, out, report) = exported("qwen3_tiny_b", &plan)?;
    assert!(report.tensors.iter().any(|t| t.name == "lm_head"));
    assert!(
        report
            .tensors
            .iter()
            .all(|t| !t.name.starts_with("model.layers.0.") && !t.name.ends_with("down_proj"))
    );
    Checkpoint::open(&out, &OpenOptions::default())?.bind_all()?;
    let ignore = json(&out.join("config.json"))["quantization_config"]["ignore"].clone();
    let ignore: Vec<&str> = ignore.as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
    assert!(
        ignore.contains(&"model.layers.0.self_attn.q_proj")
            && ignore.contains(&"model.layers.1.mlp.down_proj")
    );
    assert!(!ignore.contains(&"lm_head") && !ignore.contains(&"model.layers.1.self_attn.q_proj"));
    for (include, exclude) in
        [(vec!["lm_haed"], vec![]), (vec![], vec!["*.nothing"]), (vec!["model.embed_tokens"], vec![])]
    {
        let own = |globs: Vec<&str>| globs.into_iter().map(str::to_owned).collect();
        let e = exported(
            "qwen3_tiny_b",
            &ExportPlan { include: own(include), exclude: own(exclude), ..base.clone() },
        );
        assert_eq!(e.expect_err("names nothing").code(), Code::Usage);
    }
    let e = exported("qwen3_tiny_b", &ExportPlan { exclude: vec!["*_proj".into()], ..base });
    assert_eq!(e.expect_err("nothing left").code(), Code::Usage);
    let dat = ExportPlan { exclude: vec!["lm_head".into()], ..nvfp4(Layout::Dat, None, Method::Rtn) };
    assert!(exported("qwen3_tiny_a", &dat)?.2.tensors.iter().all(|t| t.name != "lm_head"));
    Ok(())
}

#[test]
fn large_outputs_are_cut_into_files() -> Result<()> {
    let plan = ExportPlan { max_shard_bytes: 40_000, ..nvfp4(Layout::ModelOpt, None, Method::Rtn) };
    let (_dir, out, report) = exported("qwen3_tiny_b", &plan)?;
    let parts = report.files.iter().filter(|f| f.0.ends_with(".safetensors")).count();
    assert!(parts > 2, "{:?}", report.files);
    let packed = Checkpoint::open(&out, &OpenOptions::default())?;
    packed.bind_all()?;
    let (_whole_dir, whole, _) = exported("qwen3_tiny_b", &nvfp4(Layout::ModelOpt, None, Method::Rtn))?;
    assert_same_tensors(packed.store(), &TensorStore::open(&whole)?, &|_| true)
}

#[test]
fn the_other_files_come_along() -> Result<()> {
    let (_dir, out, report) = exported("qwen3_tiny_a", &nvfp4(Layout::CompressedTensors, None, Method::Rtn))?;
    let original = golden("qwen3_tiny_a");
    let read = |p: &Path| std::fs::read(p).unwrap();
    assert_eq!(read(&out.join("generation_config.json")), read(&original.join("generation_config.json")));
    let original = String::from_utf8(read(&original.join("config.json"))).unwrap();
    let own = String::from_utf8(read(&out.join("config.json"))).unwrap();
    assert!(own.starts_with(original.trim_end().trim_end_matches('}').trim_end()), "every field is kept");
    assert!(json(&out.join("config.json"))["quantization_config"].is_object());
    for (name, bytes) in &report.files {
        assert_eq!(std::fs::metadata(out.join(name)).unwrap().len(), *bytes, "{name}");
    }
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), report.files.len());
    Ok(())
}

#[test]
fn what_exists_is_not_overwritten() -> Result<()> {
    let (dense, pool) = (open(MODELS[0])?, ThreadPool::new(1));
    let dir = tempfile::tempdir().unwrap();
    let (file, full, empty) = (dir.path().join("f"), dir.path().join("full"), dir.path().join("empty"));
    std::fs::write(&file, b"mine").unwrap();
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("x"), b"mine").unwrap();
    std::fs::create_dir(&empty).unwrap();
    for layout in NVFP4 {
        let plan = nvfp4(layout, None, Method::Rtn);
        for out in [&file, &full] {
            let e = export(&dense, out, &plan, &pool, &mut |_| panic!("no work before the check"))
                .expect_err("exists");
            assert_eq!(e.code(), Code::Usage);
            assert!(e.what().contains("exists"), "{e}");
        }
    }
    export(&dense, &empty, &nvfp4(Layout::ModelOpt, None, Method::Rtn), &pool, &mut |_| Ok(()))?;
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
    Ok(())
}

#[test]
fn bad_weights_and_bad_plans_are_named() -> Result<()> {
    let store = TensorStore::open(&golden(MODELS[0]).join("model.safetensors"))?;
    let name = "model.layers.1.mlp.up_proj.weight";
    let offset = store.entries().find(|e| e.name == name).unwrap().offset;
    let mut bytes = std::fs::read(golden(MODELS[0]).join("model.safetensors")).unwrap();
    let at = offset + (3 * 64 + 5) * 4;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let config = std::fs::read(golden(MODELS[0]).join("config.json")).unwrap();
    let damaged = Checkpoint::from_files(
        "m",
        vec![("model.safetensors".into(), bytes.into()), ("config.json".into(), Bytes::from(config))],
    )?;
    let pool = ThreadPool::new(2);
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    for plan in [
        nvfp4(Layout::ModelOpt, None, Method::Rtn),
        nvfp4(Layout::Dat, None, Method::Rtn),
        nf4(Layout::Bitsandbytes, 64, true),
    ] {
        let e = export(&damaged, &out, &plan, &pool, &mut |_| Ok(())).expect_err("NaN");
        assert_eq!(e.code(), Code::NonFinite);
        assert!(e.what().contains(name) && e.what().contains("row 3, column 5"), "{e}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    }
    let dense = open(MODELS[0])?;
    let single = nvfp4(Layout::ModelOpt, Some(Scales::Single), Method::Rtn);
    let crossed = ExportPlan {
        target: nvfp4(Layout::ModelOpt, None, Method::Rtn).target,
        ..nvfp4(Layout::CompressedTensors, None, Method::Rtn)
    };
    let others = [
        nf4(Layout::ModelOpt, 64, false),
        nf4(Layout::Dat, 64, true),
        nf4(Layout::Bitsandbytes, 48, false),
        nvfp4(Layout::TorchAo, None, Method::Rtn),
    ];
    for plan in others.into_iter().chain([single, crossed]) {
        assert_eq!(
            export(&dense, &out, &plan, &pool, &mut |_| Ok(())).expect_err("does not fit").code(),
            Code::Usage,
            "{plan:?}"
        );
    }
    for packed in ["nvfp4_modelopt", "nvfp4_ct", "nf4_bnb"] {
        let packed = Checkpoint::open(&golden(MODELS[0]).join(packed), &OpenOptions::default())?;
        let e = export(&packed, &out, &nvfp4(Layout::ModelOpt, None, Method::Rtn), &pool, &mut |_| Ok(()));
        assert!(e.expect_err("4-bit already").to_string().contains("the original"));
    }
    let ragged = nf4(Layout::Dat, 4096, false);
    let e = exported(MODELS[1], &ragged).expect_err("21504 weights are 5.25 blocks");
    assert!(e.code() == Code::TensorShape && e.to_string().contains("whole blocks"), "{e}");
    let narrow = [0u8; 3 * 24 * 4];
    let rows = Rows::new("narrow.weight", &narrow, DType::F32, 3, 24)?;
    let e = quantize(&rows, &nvfp4(Layout::Dat, None, Method::Rtn).target, None, &pool)
        .expect_err("24 is not 16 n");
    assert_eq!(e.code(), Code::TensorShape);
    assert!(e.to_string().contains("narrow.weight"));
    Ok(())
}

#[test]
fn an_interrupted_export_leaves_nothing() -> Result<()> {
    let (dense, pool) = (open(MODELS[0])?, ThreadPool::new(1));
    for layout in NVFP4 {
        let plan = nvfp4(layout, None, Method::Rtn);
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let list =
            || std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
        let total = dense.table().len();
        for stop in [0, 1, total / 2, total] {
            let mut seen = false;
            let e = export(&dense, &out, &plan, &pool, &mut |p: Progress<'_>| {
                seen |= list().iter().any(|n| n.to_string_lossy().contains(".partial-")) && !out.exists();
                if p.done == stop { Err(Error::new(Code::Internal, "interrupted")) } else { Ok(()) }
            });
            assert_eq!(e.expect_err("stopped").what(), "interrupted");
            assert!(seen, "the work is done under another name");
            assert!(list().is_empty(), "{layout:?} after {stop}: {:?}", list());
        }
        let crash = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            export(&dense, &out, &plan, &pool, &mut |p| {
                if p.done == 5 { std::panic::resume_unwind(Box::new(())) } else { Ok(()) }
            })
        }));
        assert!(crash.is_err());
        assert!(list().is_empty(), "{layout:?} after a panic");
        let mut last = None;
        export(&dense, &out, &plan, &pool, &mut |p| {
            last = Some((p.done, p.total, p.bytes_done, p.bytes_total));
            Ok(())
        })?;
        let (done, total, bytes, all) = last.unwrap();
        assert!(done == total && bytes == all && all > 0);
        assert_eq!(list(), ["out"]);
    }
    Ok(())
}

fn golden(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/golden").join(model)
}

fn open(model: &str) -> Result<Checkpoint> {
    Checkpoint::open(&golden(model), &OpenOptions::default())
}

fn exported(model: &str, plan: &ExportPlan) -> Result<(TempDir, PathBuf, Report)> {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let report = export(&open(model)?, &out, plan, &ThreadPool::new(2), &mut |_| Ok(()))?;
    Ok((dir, out, report))
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The same tensors with the same bytes, in those that `compared` accepts; packed E2M1 codes up to the sign
/// of zero.
fn assert_same_tensors(
    own: &TensorStore,
    reference: &TensorStore,
    compared: &dyn Fn(&str) -> bool,
) -> Result<()> {
    let names =
        |s: &TensorStore| s.table().keys().filter(|n| compared(n)).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(names(own), names(reference));
    for name in names(own) {
        let (a, b) = (own.tensor(&name)?, reference.tensor(&name)?);
        assert_eq!((a.dtype, a.shape), (b.dtype, b.shape), "{name}");
        let nvfp4 = own.table().contains_key(&name.replace("weight_packed", "weight_scale"))
            && name.ends_with("weight_packed")
            || own.table().contains_key(&format!("{name}_scale"));
        let differing = a
            .bytes
            .iter()
            .zip(b.bytes)
            .filter(|(a, b)| if nvfp4 { unsigned(**a) != unsigned(**b) } else { a != b })
            .count();
        assert_eq!(differing, 0, "{name}: of {} bytes", a.bytes.len());
    }
    Ok(())
}

/// Both codes of a byte, with +0 for -0.
fn unsigned(byte: u8) -> (u8, u8) {
    let code = |c: u8| if c == 8 { 0 } else { c };
    (code(byte & 15), code(byte >> 4))
}

/// What we declare, the tool declares too.
fn assert_config_fields(own: &Path, reference: &Path) {
    let config = |dir: &Path| json(&dir.join("config.json"))["quantization_config"].clone();
    let (own, reference) = (config(own), config(reference));
    for (field, value) in own.as_object().unwrap() {
        assert_eq!(value, &reference[field], "{field}");
    }
}

fn sqnr_of(dense: &[f32], k: usize, decoder: &RowDecoder<'_>) -> f64 {
    let mut row = vec![0f32; k];
    let (mut signal, mut noise) = (0f64, 0f64);
    for (r, x) in dense.chunks_exact(k).enumerate() {
        decoder.row(r, &mut row);
        for (&a, &b) in x.iter().zip(&row) {
            signal += f64::from(a).powi(2);
            noise += (f64::from(a) - f64::from(b)).powi(2);
        }
    }
    10.0 * (signal / noise).log10()
}

/// Normal values from a counter: element `i` does not depend on how many there are.
fn gaussian(len: usize, sigma: f64) -> Vec<f32> {
    let uniform = |counter: u64| {
        let mut z = counter.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0x0123_4567_89AB_CDEF);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    let value = |i: u64| {
        let radius = (-2.0 * (1.0 - uniform(2 * i)).ln()).sqrt();
        (sigma * radius * (std::f64::consts::TAU * uniform(2 * i + 1)).cos()) as f32
    };
    (0..len as u64).map(value).collect()
}
