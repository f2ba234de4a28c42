//! Bit for bit what the tools wrote, and what is read back.
use crate::plans::{int4, nf4, nvfp4};
use crate::{MODELS, NVFP4, assert_same_tensors, exported, golden, json, open};
use q4_core::detect::Layout;
use q4_core::formats::nf4;
use q4_core::{Convention, Nvfp4, Part, Q4Schema, Q4Weight, Result, RowDecoder, ThreadPool};
use q4_model::checkpoint::{Checkpoint, Head, OpenOptions, TensorStore, names};
use q4_model::export::{ExportPlan, export};
use q4_model::quantize::{Method, Rows, Scales, quantize};
use serde_json::Value;
use std::path::Path;

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
    plans.extend([Layout::CompressedTensors, Layout::Gptq, Layout::Awq].map(|layout| int4(layout, 16)));
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
