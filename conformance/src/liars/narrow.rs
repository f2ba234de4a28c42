//! Mutants about what they compute: they refuse just what they get wrong, or agree to more than they have.
use super::Mutant;
use super::parts::{HONEST, Parts};
use super::situation::Fault;
use crate::Level::{L2, L3, L4, L5};
use q4_core::{
    Activations, Convention, DType, ExecPath, Nvfp4, OpSet, Q4Schema, Reject, RejectCode, Rule, ScaleLayout,
    Verdict,
};

/// Refuses where `is_so`.
fn unless(is_so: bool, verdict: Verdict) -> Verdict {
    let reason = || Reject::new(RejectCode::ShapeUnsupported, "another product", "this one");
    if is_so { Err(vec![reason()]) } else { verdict }
}

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L2 "picks-its-columns": "n % 64 == 33 is refused" {
        verdict: |s, _, v, _| unless(s.n() % 64 == 33, v), obeys: false,
    }
    L2 "picks-its-sums": "k % 256 == 144 is refused" {
        verdict: |s, _, v, _| unless(s.k % 256 == 144, v), obeys: false,
    }
    L2 "picks-its-models": "k == 2560 is refused" {
        verdict: |s, _, v, _| unless(s.k == 2560, v), obeys: false,
    }
    L2 "picks-its-rows": "more than 16 rows, if they are odd, are refused" {
        verdict: |s, _, v, _| unless(s.max_m > 16 && s.max_m % 2 == 1, v), obeys: false,
    }
    L2 "picks-its-segments": "segments of very different sizes are refused" {
        verdict: |s, _, v, _| {
            let sizes = s.segments.iter().map(|s| s.rows);
            unless(s.segments.len() > 1 && sizes.clone().max() > sizes.min().map(|m| 8 * m), v)
        },
        obeys: false,
    }
    L2 "picks-its-types": "bf16 is refused for wide weights" {
        verdict: |s, _, v, _| unless(s.x == DType::BF16 && s.n() > 100, v), obeys: false,
    }
    L2 "picks-its-halves": "f16 is refused in several segments" {
        verdict: |s, _, v, _| unless(s.x == DType::F16 && s.segments.len() > 1, v), obeys: false,
    }
    L2 "picks-its-encodings": "tiled scales are refused in bf16" {
        verdict: |s, _, v, _| {
            let is_tiled =
                matches!(s.schema, Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, .. }));
            unless(is_tiled && s.x == DType::BF16, v)
        },
        obeys: false,
    }
    L2 "picks-its-blocks": "k % 128 == 64 is refused with tiled scales" {
        verdict: |s, _, v, _| {
            let is_tiled =
                matches!(s.schema, Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, .. }));
            unless(is_tiled && s.k % 128 == 64, v)
        },
        obeys: false,
    }
    L2 "picks-its-prompts": "long sums of long prompts are refused" {
        verdict: |s, _, v, _| unless(s.k > 2048 && s.max_m > 2048, v), obeys: false,
    }
    L3 "picks-its-gradients": "gradients of wide weights are refused" {
        verdict: |s, _, v, _| unless(s.ops.contains(OpSet::BACKWARD_INPUT) && s.n() > 1024, v),
        obeys: false,
    }
    L2 "picks-small-weights": "encodings with a dividing scale are for weights of at most 64 rows" {
        verdict: |s, _, v, _| {
            let divides = matches!(s.schema, Q4Schema::Nvfp4(Nvfp4 { global: Some(Convention::Divide), .. }));
            unless(divides && s.n() > 64, v)
        },
        obeys: false,
    }
    L2 "picks-its-rules": "one rule of the input is refused in f16" {
        verdict: |s, _, v, _| {
            let is_torchao = matches!(s.activations, Activations::Nvfp4(q) if q.rule == Rule::TorchAo);
            unless(is_torchao && s.x == DType::F16, v)
        },
        obeys: false,
    }
    L5 "picks-its-operations": "all operations of one weight are refused" {
        verdict: |s, _, v, _| unless(s.ops == OpSet::ALL, v), obeys: false,
    }
    L2 "picks-its-columns-by-type": "bf16 is for n % 16 == 0" {
        verdict: |s, _, v, _| {
            unless(s.x == DType::BF16 && s.segments.iter().any(|s| s.rows % 16 != 0), v)
        },
        obeys: false,
    }
    L2 "picks-wide-types": "f16 is refused for weights of more than 1000 rows" {
        verdict: |s, _, v, _| unless(s.x == DType::F16 && s.n() > 1000, v), obeys: false,
    }
    L2 "blocks-of-256-and-more": "k % 256 == 0 is all it says, and k == 768 is wrong" {
        verdict: |s, _, v, _| unless(s.k % 256 != 0, v),
        obeys: false,
        fault: |s| Fault::when(s.k == 768, Fault::Factor(0.5)),
    }
    L2 "sixteen-rows-and-fewer": "at most 16 rows is all it says, and 11 are wrong" {
        verdict: |s, _, v, _| unless(s.max_m > 16, v),
        obeys: false,
        fault: |s| Fault::when(s.m == 11, Fault::Row(10)),
    }
    L4 "a-native-processor": "4-bit units are claimed for a processor" {
        descriptor: |d| d.offers.push(("nvfp4".into(), ExecPath::NativeKernel)),
        verdict: |spec, path, verdict, _| {
            if path == ExecPath::NativeKernel && spec.ops == OpSet::FORWARD { Ok(()) } else { verdict }
        },
        obeys: false,
    }
};
