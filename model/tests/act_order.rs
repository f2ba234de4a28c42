//! GPTQ whose groups are made of any in features: the weights and logits of the same numbers in order, and of
//! the same numbers decoded.
#![allow(clippy::unwrap_used)]
mod handmade;
mod support;

use handmade::act_order::{decoded, dense, modules, moved, shuffled};
use handmade::{Model, golden, parse};
use q4_core::memory::Budget;
use q4_core::{DType, Device, Result};
use q4_model::batch::{Part, company::dependents};
use q4_model::checkpoint::names;
use q4_model::cpu::KvType;
use q4_model::load::{ContextOptions, Many};
use q4_model::plan::ActivationRequest::{Int8, Native};
use q4_model::verify::{Severity, verify};
use serde_json::json;
use support::Setup;

const BACKENDS: [Option<&str>; 3] = [None, Some("dequant-matmul"), Some("reference")];

/// Ids and logits that transformers gave for `gptq`.
fn recorded() -> (Vec<u32>, Vec<f32>) {
    let file = std::fs::read(golden("a", "gptq").join("expected.safetensors")).unwrap();
    let (tensors, _) = parse(&file);
    let find = |name: &str| tensors.iter().find(|t| t.name == name).unwrap();
    let ids = find("ids").bytes.chunks_exact(8);
    (ids.map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect(), find("logits").f32s())
}

/// Logits of every position, in steps of `chunk` rows.
fn logits(m: &Model, setup: &Setup, ids: &[u32]) -> Result<Vec<f32>> {
    let dispatch = setup.dispatch()?;
    let loaded = setup.load(&m.open()?, &dispatch)?;
    let mut all = Vec::new();
    setup.runner(&loaded)?.accept_all(ids, &mut |rows| all.extend_from_slice(rows))?;
    if let Some(backend) = setup.backend {
        assert!(dispatch.witness().executed().iter().all(|e| e.backend == backend));
    }
    Ok(all)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The largest difference, as a share of the largest value.
fn apart(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f32, |most, v| most.max(v.abs()));
    got.iter().zip(want).fold(0f32, |worst, (a, b)| worst.max((a - b).abs())) / largest
}

#[test]
fn weights_have_their_in_features_where_the_model_has_them() -> Result<()> {
    let mut permuted = 0;
    for variant in ["gptq", "gptq_v2", "auto_round"] {
        let m = shuffled(variant, false);
        let c = m.open()?;
        for (name, n, k) in (0..2).flat_map(|i| names::linears(c.config(), i)) {
            let layer = c.layer(&name, n, k)?;
            let (rows, mut values) = (layer.rows()?, vec![0f32; n * k]);
            values.chunks_exact_mut(k).enumerate().for_each(|(r, row)| rows.row(r, row));
            assert_eq!(bits(&values), bits(&decoded(&m, &name)), "{variant}: {name}");
            permuted += usize::from(layer.order.is_some());
        }
    }
    // One group of all in features has one order: of 64 in groups of 64, five layers of seven.
    assert_eq!(permuted, 14 + 4 + 4);
    Ok(())
}

#[test]
fn logits_are_those_of_the_decoded_weights() -> Result<()> {
    let (ids, _) = recorded();
    for variant in ["gptq", "gptq_v2", "auto_round"] {
        for shared in [true, false] {
            let m = shuffled(variant, shared);
            let plain = Setup { backend: Some("reference"), all_logits: true, chunk: 64, ..Setup::default() };
            let want = logits(&dense(&m), &plain, &ids)?;
            for backend in BACKENDS {
                let setup = Setup { backend, all_logits: true, chunk: 64, ..Setup::default() };
                let worst = apart(&logits(&m, &setup, &ids)?, &want);
                println!("{variant}, shared {shared}, {backend:?}: {worst:e}");
                assert!(worst <= 1e-5, "{variant}, shared {shared}, {backend:?}: {worst:e}");
            }
        }
    }
    Ok(())
}

/// One order of inputs is one product; layers with orders of their own are multiplied apart.
#[test]
fn products_are_fused_where_orders_are_the_same() -> Result<()> {
    for (shared, parts) in [(true, [1, 1, 1, 1]), (false, [3, 1, 2, 1])] {
        let setup = Setup::default();
        let dispatch = setup.dispatch()?;
        let loaded = setup.load(&shuffled("gptq", shared).open()?, &dispatch)?;
        for block in loaded.model.blocks() {
            assert_eq!(block.map(|linear| linear.parts.len()), parts, "shared {shared}");
            assert!(block.iter().flat_map(|linear| &linear.parts).all(|part| part.order.is_some()));
        }
    }
    Ok(())
}

/// Features in other places, and inputs back in theirs: the very products, so the very bits.
#[test]
fn features_in_other_places_change_no_bit() -> Result<()> {
    let (ids, _) = recorded();
    let (plain, moved) = (Model::golden("a", "gptq"), moved(false));
    for backend in BACKENDS {
        for activations in [Native, Int8] {
            for dtype in [DType::F32, DType::BF16] {
                for (chunk, threads) in [(1, 1), (5, 2), (64, 1), (64, 2)] {
                    let setup = Setup {
                        backend,
                        activations,
                        dtype,
                        chunk,
                        threads,
                        all_logits: true,
                        ..Setup::default()
                    };
                    let [want, got] = [&plain, &moved].map(|m| logits(m, &setup, &ids));
                    let (want, got) = (want?, got?);
                    let case = format!("{backend:?} {activations:?} {dtype} {chunk} rows, {threads} threads");
                    assert!(got.len() == ids.len() * 256 && bits(&got) == bits(&want), "{case}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn features_in_other_places_have_the_logits_of_transformers() -> Result<()> {
    let (ids, want) = recorded();
    let m = moved(true);
    for backend in BACKENDS {
        let setup = Setup { backend, all_logits: true, chunk: 64, ..Setup::default() };
        let worst = apart(&logits(&m, &setup, &ids)?, &want);
        println!("{backend:?}: {worst:e}");
        assert!(worst <= 1e-5, "{backend:?}: {worst:e}");
    }
    Ok(())
}

/// A gathered row is a copy: neither the rows beside it nor threads change a bit.
#[test]
fn rows_do_not_depend_on_their_company() -> Result<()> {
    let (ids, _) = recorded();
    let m = shuffled("gptq", false);
    for activations in [Native, Int8] {
        let of = |chunk, threads| {
            let backend = Some("int4-kernel");
            let setup = Setup { backend, activations, chunk, threads, all_logits: true, ..Setup::default() };
            logits(&m, &setup, &ids)
        };
        let want = bits(&of(64, 2)?);
        for (chunk, threads) in [(1, 1), (1, 2), (5, 1), (5, 2), (64, 1)] {
            assert!(bits(&of(chunk, threads)?) == want, "{activations:?} {chunk} rows, {threads} threads");
        }
    }
    let setup = Setup { chunk: 64, ..Setup::default() };
    let dispatch = setup.dispatch()?;
    let found = dependents(&setup.load(&m.open()?, &dispatch)?, 64)?;
    assert!(found.is_empty(), "{found:?}");
    Ok(())
}

/// Rows of several sequences in one step have the bits that each has alone.
#[test]
fn sequences_share_a_step() -> Result<()> {
    let setup = Setup { backend: Some("int4-kernel"), ..Setup::default() };
    let dispatch = setup.dispatch()?;
    let loaded = setup.load(&shuffled("gptq", true).open()?, &dispatch)?;
    let (many, kv) = (Many { sequences: 3, pages: 3 }, KvType::F32);
    let options = ContextOptions { context: 64, chunk: setup.chunk, all_logits: false, kv, many: None };
    let mut together = loaded.sequences(options, many, &Budget::of_machine())?;
    (0..3).for_each(|sequence| together.add_page(sequence, sequence as u32));
    let prompts: [&[u32]; 3] = [&[5, 6, 7, 8, 9], &[200], &[1, 2, 3]];
    let parts = [0, 1, 2].map(|sequence| Part { sequence, rows: prompts[sequence].len() });
    together.step(&prompts.concat(), &parts, &[4, 5, 8])?;
    for (i, prompt) in prompts.into_iter().enumerate() {
        let mut alone = setup.runner(&loaded)?;
        alone.accept(prompt)?;
        assert_eq!(bits(together.logits(i)?), bits(alone.logits()?), "sequence {i}");
    }
    Ok(())
}

/// Prompts and single tokens, of a device that there is.
#[test]
fn a_device_has_the_logits_of_the_processor() -> Result<()> {
    if let Err(e) = q4_cuda::Gpu::open(0) {
        println!("skipped: no CUDA device ({e})");
        return Ok(());
    }
    let (ids, _) = recorded();
    for shared in [true, false] {
        let m = shuffled("gptq", shared);
        let plain = Setup { backend: Some("reference"), all_logits: true, chunk: 64, ..Setup::default() };
        let want = logits(&m, &plain, &ids)?;
        for backend in [None, Some("dequant-matmul")] {
            let device = Device::Cuda(0);
            let setup = Setup { backend, device, all_logits: true, chunk: 64, ..Setup::default() };
            let worst = apart(&logits(&m, &setup, &ids)?, &want);
            println!("shared {shared}, {backend:?}: {worst:e}");
            assert!(worst <= 1e-4, "shared {shared}, {backend:?}: {worst:e}");
            let dispatch = setup.dispatch()?;
            let loaded = setup.load(&m.open()?, &dispatch)?;
            let mut runner = setup.runner(&loaded)?;
            runner.accept(&ids[..5])?;
            for (at, id) in ids.iter().enumerate().skip(5) {
                runner.decode(*id)?;
                let worst = apart(runner.logits()?, &want[256 * at..][..256]);
                assert!(worst <= 1e-3, "shared {shared}, {backend:?}, token {at}: {worst:e}");
            }
        }
    }
    Ok(())
}

/// `desc_act` beside groups in order is healthy (static groups), and where nobody says it `g_idx` does.
#[test]
fn what_is_declared_and_what_is_there() -> Result<()> {
    let notes = |m: &Model| -> Result<Vec<String>> {
        let c = m.open()?;
        c.bind_all()?;
        let all = verify(&c);
        assert!(all.iter().all(|f| f.severity == Severity::Note), "{all:?}");
        Ok(all.into_iter().filter(|f| f.code == "act-order").map(|f| f.message).collect())
    };
    let mut said = Model::golden("a", "gptq");
    said.config["quantization_config"]["desc_act"] = json!(true);
    assert_eq!(notes(&said)?, [""; 0]);
    let mut unsaid = shuffled("gptq", true);
    for told in [true, false] {
        let found = notes(&unsaid)?;
        assert!(found.len() == 1 && found[0].contains("inputs of 14 layers"), "told {told}: {found:?}");
        unsaid.config["quantization_config"].as_object_mut().unwrap().remove("desc_act");
    }
    assert_eq!(modules(&unsaid).len(), 14);
    Ok(())
}
