//! The recorded models against their recorded logits and greedy tokens, in every flavour they were saved in.
mod support;

use q4_core::{ComputePath, Result};
use q4_model::plan::ActivationRequest::{self, Native, Nvfp4};
use safetensors::SafeTensors;
use support::{Setup, golden, greedy};

/// Variant of the record, checkpoint, activations, tolerance relative to the largest |logit| (absolute for
/// dense).
const VARIANTS: [(&str, &str, ActivationRequest, f32); 10] = [
    ("dense", "", Native, 0.0),
    ("torchao_nogs_w4a16", "nvfp4_torchao_nogs", Native, 1e-3),
    ("torchao_gs_w4a16", "nvfp4_torchao_gs", Native, 1e-3),
    ("torchao_nogs_w4a4", "nvfp4_torchao_nogs", Nvfp4, 1e-3),
    ("torchao_gs_w4a4_dyn", "nvfp4_torchao_gs", Nvfp4, 1e-3),
    ("ct_w4a16", "nvfp4_ct", Native, 1e-3),
    ("ct_w4a4", "nvfp4_ct", ActivationRequest::Auto, 1e-3),
    ("modelopt_w4a16", "nvfp4_modelopt", Native, 1e-3),
    ("modelopt_w4a4", "nvfp4_modelopt", ActivationRequest::Auto, 1e-3),
    ("nf4", "nf4_bnb", Native, 1e-3),
];

#[test]
fn logits_and_greedy_tokens_are_those_of_the_libraries() -> Result<()> {
    let mut compared = 0;
    for model in ["qwen3_tiny_a", "qwen3_tiny_b"] {
        let bytes = std::fs::read(golden(model).join("expected.safetensors")).expect("record");
        let expected = SafeTensors::deserialize(&bytes).expect("record");
        let dq = [
            ("nf4_dq", "nf4_bnb_dq", Native, 1e-3),
            ("ct_w4a16", "nvfp4_ct_w4a16", ActivationRequest::Auto, 1e-3),
        ];
        for (variant, directory, activations, tolerance) in VARIANTS.into_iter().chain(dq) {
            let backends: &[Option<&'static str>] = match directory {
                "" => &[Some("dequant-matmul"), Some("reference")],
                _ => &[None, Some("dequant-matmul"), Some("reference")],
            };
            for &backend in backends {
                let path = format!("{model}/{directory}");
                let setup = Setup { backend, activations, all_logits: true, chunk: 64, ..Setup::default() };
                for length in [1, 7, 33] {
                    let ids = integers(&expected, &format!("inputs.ids.len{length}"));
                    let want = floats(&expected, &format!("{variant}.logits.len{length}"));
                    let (_d, mut runner) = setup.open(&path)?;
                    let mut got = Vec::new();
                    runner.accept_all(&ids, &mut |rows| got.extend_from_slice(rows))?;
                    assert_eq!(got.len(), want.len(), "{path} {variant}");
                    let worst = got.iter().zip(&want).fold(0f32, |w, (a, b)| w.max((a - b).abs()));
                    let largest = want.iter().fold(0f32, |w, v| w.max(v.abs()));
                    let limit = if tolerance == 0.0 { 2e-4 } else { tolerance * largest };
                    assert!(
                        worst <= limit,
                        "{path} {variant} len{length} {backend:?}: {worst:e} > {limit:e}"
                    );
                    compared += got.len();
                }
                let (_d, mut runner) = setup.open(&path)?;
                runner.accept(&integers(&expected, "inputs.ids.len7"))?;
                let want = integers(&expected, &format!("{variant}.greedy_ids"));
                assert_eq!(greedy(&mut runner, want.len())?, want, "{path} {variant} {backend:?}");
            }
        }
    }
    println!("{compared} logits compared");
    assert!(compared > 500_000);
    Ok(())
}

/// Written by other tools, decoded by them, and run by transformers in f32.
#[test]
fn what_other_tools_packed_gives_the_logits_of_transformers() -> Result<()> {
    for (name, kernel) in [
        ("mxfp4_ct", "mxfp4-kernel"),
        ("int4_ct", "int4-kernel"),
        ("int4_channel_ct", "int4-kernel"),
        ("int4_asym_ct", "int4-kernel"),
        ("gptq", "int4-kernel"),
        ("gptq_v2", "int4-kernel"),
        ("awq", "int4-kernel"),
        ("auto_round", "int4-kernel"),
        ("mlx_affine", "int4-kernel"),
        ("mlx_mxfp4", "mxfp4-kernel"),
        ("mlx_nvfp4", "nvfp4-kernel"),
        ("fp8_channel_ct", "fp8-kernel"),
        ("fp8_tensor_ct", "fp8-kernel"),
        ("fp8_blocks", "fp8-kernel"),
    ] {
        let path = format!("qwen3_tiny_a/{name}");
        let bytes = std::fs::read(golden(&format!("{path}/expected.safetensors"))).expect("record");
        let expected = SafeTensors::deserialize(&bytes).expect("record");
        let (ids, want) = (integers(&expected, "ids"), floats(&expected, "logits"));
        let largest = want.iter().fold(0f32, |w, v| w.max(v.abs()));
        for backend in [None, Some("dequant-matmul"), Some("reference")] {
            let setup = Setup { backend, all_logits: true, chunk: 64, ..Setup::default() };
            let (dispatch, mut runner) = setup.open(&path)?;
            let mut got = Vec::new();
            runner.accept_all(&ids, &mut |rows| got.extend_from_slice(rows))?;
            let worst = got.iter().zip(&want).fold(0f32, |w, (a, b)| w.max((a - b).abs()));
            println!("{name} {backend:?}: {worst:e} of {largest}");
            assert!(got.len() == want.len() && worst <= 1e-5 * largest, "{name} {backend:?}: {worst:e}");
            let executed = dispatch.witness().executed();
            let by = backend.unwrap_or(kernel);
            assert!(!executed.is_empty() && executed.iter().all(|e| e.backend == by), "{executed:?}");
        }
    }
    Ok(())
}

#[test]
fn kernels_serve_every_quantised_flavour() -> Result<()> {
    for (_, directory, activations, _) in VARIANTS.into_iter().filter(|v| !v.1.is_empty()) {
        let setup = Setup { activations, compute: ComputePath::KernelOnly, ..Setup::default() };
        let (dispatch, mut runner) = setup.open(&format!("qwen3_tiny_a/{directory}"))?;
        runner.accept(&[1, 2, 3])?;
        let executed = dispatch.witness().executed();
        assert!(
            !executed.is_empty() && executed.iter().all(|e| e.backend.ends_with("-kernel")),
            "{executed:?}"
        );
        assert!(dispatch.witness().downgraded().is_empty());
    }
    Ok(())
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let t = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    t.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn integers(file: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let t = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    t.data().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect()
}

#[test]
fn layers_of_two_formats_give_the_logits_of_transformers() -> Result<()> {
    let path = "qwen3_tiny_a/mixed_ct";
    let bytes = std::fs::read(golden(&format!("{path}/expected.safetensors"))).expect("record");
    let expected = SafeTensors::deserialize(&bytes).expect("record");
    let (ids, want) = (integers(&expected, "ids"), floats(&expected, "logits"));
    let largest = want.iter().fold(0f32, |w, v| w.max(v.abs()));
    let setup = Setup { compute: ComputePath::KernelOnly, all_logits: true, chunk: 64, ..Setup::default() };
    let (dispatch, mut runner) = setup.open(path)?;
    let mut got = Vec::new();
    runner.accept_all(&ids, &mut |rows| got.extend_from_slice(rows))?;
    let worst = got.iter().zip(&want).fold(0f32, |w, (a, b)| w.max((a - b).abs()));
    assert!(got.len() == want.len() && worst <= 1e-5 * largest, "{worst:e} of {largest}");
    let executed = dispatch.witness().executed();
    let by: std::collections::BTreeSet<_> = executed.iter().map(|e| e.backend.to_string()).collect();
    assert_eq!(by.into_iter().collect::<Vec<_>>(), ["fp8-kernel", "nvfp4-kernel"]);
    Ok(())
}
