//! FP8 inputs as checkpoints declare them, held to what compressed-tensors rounds and transformers makes of it.
#![allow(clippy::unwrap_used)]
mod handmade;
mod support;

use handmade::{Model, Tensor};
use q4_core::formats::fp8::inputs::round_row;
use q4_core::{Activations, Code, ComputePath, Error, Fp8Inputs, GlobalScale, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::plan::{ActivationRequest, Plan, PlanOptions};
use safetensors::SafeTensors;
use serde_json::json;
use support::Setup;

const UP: &str = "model.layers.0.mlp.up_proj";
/// The stored scale of the record.
const STORED: f32 = 0.004;

fn record() -> Vec<u8> {
    std::fs::read(support::golden("qwen3_tiny_a/fp8_inputs.safetensors")).unwrap()
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let bytes = file.tensor(name).unwrap().data();
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// What config.json says of inputs, and a stored scale for each layer of FP8.
fn declaring(inputs: serde_json::Value, has_scales: bool) -> Model {
    let mut m = Model::golden("a", "fp8_tensor_ct");
    let groups = &mut m.config["quantization_config"]["config_groups"];
    groups["group_0"]["input_activations"] = inputs;
    if has_scales {
        let names = m.tensors.iter().filter_map(|t| t.name.strip_suffix(".weight_scale"));
        let scale =
            |name| Tensor::new(&format!("{name}.input_scale"), "F32", &[1], STORED.to_le_bytes().into());
        let scales: Vec<_> = names.map(scale).collect();
        m.tensors.extend(scales);
    }
    m
}

fn stored() -> serde_json::Value {
    json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "tensor", "dynamic": false})
}

#[test]
fn rows_are_rounded_as_compressed_tensors_rounds_them() -> Result<()> {
    let bytes = record();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let x = floats(&file, "x");
    let k = file.tensor("x").unwrap().shape()[1];
    let fixed = Fp8Inputs::Static(GlobalScale::multiply(STORED)?);
    for (name, how) in [("token", Fp8Inputs::PerRow), ("block", Fp8Inputs::PerBlock), ("stored", fixed)] {
        let want = floats(&file, &format!("{name}.values"));
        let mut have = x.clone();
        for row in have.chunks_mut(k) {
            round_row(row, how)?;
        }
        let differ = (0..x.len()).filter(|i| have[*i] != want[*i]);
        let first = differ.clone().next().map(|i| (i / k, i % k, x[i], have[i], want[i]));
        assert_eq!(differ.count(), 0, "{name}: {first:?}");
    }
    Ok(())
}

#[test]
fn logits_are_those_of_transformers_on_rounded_inputs() -> Result<()> {
    let bytes = record();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ids: Vec<u32> = file
        .tensor("ids")
        .unwrap()
        .data()
        .as_chunks::<8>()
        .0
        .iter()
        .map(|b| i64::from_le_bytes(*b) as u32)
        .collect();
    let tokens = Model::golden("a", "fp8_channel_ct").open()?;
    let blocks = Model::golden("a", "fp8_blocks").open()?;
    let fixed = declaring(stored(), true).open()?;
    for (name, checkpoint) in [("token", tokens), ("block", blocks), ("stored", fixed)] {
        let want = floats(&file, &format!("{name}.logits"));
        let largest = want.iter().fold(0f32, |w, v| w.max(v.abs()));
        // One call and rows one by one: a row has the scale that it has alone. The sums of dequant-matmul are in
        // another order for many rows.
        let ways = [(None, 64), (None, 1), (Some("reference"), 64), (Some("dequant-matmul"), 1)];
        for (backend, chunk) in ways {
            let got = logits(&checkpoint, backend, chunk, ActivationRequest::Fp8, &ids)?;
            assert_eq!(got.len(), want.len());
            let n = want.len() / ids.len();
            let apart =
                |(a, b): (&[f32], &[f32])| a.iter().zip(b).fold(0f32, |w, (a, b)| w.max((a - b).abs()));
            let rows: Vec<_> = got.chunks(n).zip(want.chunks(n)).map(apart).collect();
            // Sums in another order can put an input on the other side of a tie, and it moves by a step.
            let moved = rows.iter().filter(|w| **w > 2e-6 * largest).count();
            let worst = rows.iter().fold(0f32, |w, v| w.max(*v));
            println!("{name} {backend:?} {chunk}: {worst:e} of {largest}, {moved} rows moved");
            assert!(moved <= 1 && worst <= 1e-3 * largest, "{name} {backend:?} {chunk}: {rows:?}");
        }
        let float = logits(&checkpoint, None, 64, ActivationRequest::Auto, &ids)?;
        let moved = float.iter().zip(&want).fold(0f32, |w, (a, b)| w.max((a - b).abs()));
        assert!(moved > 1e-2 * largest, "{name}: inputs are not rounded at all: {moved:e} of {largest}");
    }
    Ok(())
}

fn logits(
    checkpoint: &Checkpoint,
    backend: Option<&'static str>,
    chunk: usize,
    activations: ActivationRequest,
    ids: &[u32],
) -> Result<Vec<f32>> {
    let compute = if backend.is_none() { ComputePath::KernelOnly } else { ComputePath::Auto };
    let setup = Setup { backend, compute, activations, all_logits: true, chunk, ..Setup::default() };
    let dispatch = setup.dispatch()?;
    let mut runner = setup.runner(&setup.load(checkpoint, &dispatch)?)?;
    let mut got = Vec::new();
    runner.accept_all(ids, &mut |rows| got.extend_from_slice(rows))?;
    let wanted = if activations == ActivationRequest::Fp8 { "fp8" } else { "native" };
    let executed = dispatch.witness().executed();
    assert!(!executed.is_empty() && executed.iter().all(|e| e.activations == wanted), "{executed:?}");
    Ok(got)
}

#[test]
fn each_writer_declares_a_scale_of_its_own() -> Result<()> {
    let of = |m: &Model, layer: &str, shape: [usize; 2]| {
        let c = m.open()?;
        let found = c.layer(layer, shape[0], shape[1])?;
        assert_eq!(found.declared, Activations::Native);
        found.fp8_activations()
    };
    let fixed = Fp8Inputs::Static(GlobalScale::multiply(STORED)?);
    assert_eq!(of(&Model::golden("a", "fp8_channel_ct"), UP, [192, 64])?, Fp8Inputs::PerRow);
    assert_eq!(of(&Model::golden("a", "fp8_blocks"), UP, [192, 64])?, Fp8Inputs::PerBlock);
    assert_eq!(of(&declaring(stored(), true), UP, [192, 64])?, fixed);
    assert_eq!(of(&declaring(json!(null), false), UP, [192, 64])?, Fp8Inputs::PerRow);
    let groups = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "group", "group_size": 128,
        "dynamic": true});
    assert_eq!(of(&declaring(groups, false), UP, [192, 64])?, Fp8Inputs::PerBlock);

    let refused = |m: &Model, code: Code, words: &[&str]| {
        let e = of(m, UP, [192, 64]).expect_err("no such scale");
        let text = e.to_string();
        assert!(
            e.code() == code && words.iter().all(|w| text.contains(w)),
            "{text}; need {code:?} {words:?}"
        );
    };
    let lost = [UP, "input_scale", "static FP8 inputs", "no such tensor"];
    refused(&declaring(stored(), false), Code::SchemaInvalid, &lost);
    let call =
        json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "tensor", "dynamic": true});
    refused(&declaring(call, false), Code::Unsupported, &[UP, "dynamic strategy tensor", "native"]);
    let mut zero = declaring(stored(), true);
    zero.edit(&format!("{UP}.input_scale")).bytes = 0f32.to_le_bytes().into();
    refused(&zero, Code::ScaleInvalid, &[UP, "input_scale", "above zero"]);
    let mut wide = declaring(stored(), true);
    let t = wide.edit(&format!("{UP}.input_scale"));
    (t.shape, t.bytes) = (vec![2], [0u8, 0, 0x80, 0x3f].repeat(2));
    refused(&wide, Code::TensorShape, &[UP, "input_scale", "one float32"]);
    Ok(())
}

#[test]
fn layers_of_other_formats_stay_as_declared_and_one_of_fp8_there_must_be() -> Result<()> {
    let plan = |m: Model| {
        let setup = Setup { activations: ActivationRequest::Fp8, ..Setup::default() };
        let options = PlanOptions {
            activations: setup.activations,
            dtype: setup.dtype,
            device: q4_core::Device::Cpu,
            quantize: None,
            max_rows: 1,
            ops: q4_core::OpSet::FORWARD,
        };
        let plan = Plan::new(&m.open()?, &setup.dispatch()?, &options)?;
        let kinds = plan.products().map(|p| (p.spec.schema.id().name, p.spec.activations.as_str()));
        Ok::<_, Error>(kinds.collect::<std::collections::BTreeSet<_>>())
    };
    let mixed = plan(Model::golden("a", "mixed_ct"))?;
    assert_eq!(mixed.into_iter().collect::<Vec<_>>(), [("fp8", "fp8"), ("nvfp4", "native")]);
    let e = plan(Model::golden("a", "nvfp4_ct")).expect_err("no FP8 weight");
    assert_eq!(e.code(), Code::OverrideUnused);
    assert!(e.to_string().contains("nvfp4@1"), "{e}");
    Ok(())
}
