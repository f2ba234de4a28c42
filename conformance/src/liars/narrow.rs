//! Liars about what they compute: they refuse just what they get wrong, or agree to more than they have.
use super::Liar;
use super::honest::{Fault, HONEST, Parts};
use crate::Level::{L2, L4};
use q4_core::{ExecPath, LinearSpec, OpSet, Reject, RejectCode, Verdict};

/// Refuses where `is_so`.
fn unless(is_so: bool, verdict: Verdict) -> Verdict {
    let reason = || Reject::new(RejectCode::ShapeUnsupported, "another product", "this one");
    if is_so { Err(vec![reason()]) } else { verdict }
}

/// Refuses, inside of what it agrees to otherwise, what it would get wrong.
const fn picky(
    name: &'static str,
    lie: &'static str,
    verdict: fn(&LinearSpec, ExecPath, Verdict, u64) -> Verdict,
) -> Liar {
    Liar::new(L2, name, lie, Parts { verdict, obeys: false, ..HONEST })
}

pub(super) const LIARS: &[Liar] = &[
    picky("picks-its-columns", "n % 64 == 33 is refused", |s, _, v, _| unless(s.n() % 64 == 33, v)),
    picky("picks-its-sums", "k % 256 == 144 is refused", |s, _, v, _| unless(s.k % 256 == 144, v)),
    picky("picks-its-models", "k == 2560 is refused", |s, _, v, _| unless(s.k == 2560, v)),
    picky("picks-its-rows", "more than 16 rows, if they are odd, are refused", |s, _, v, _| {
        unless(s.max_m > 16 && s.max_m % 2 == 1, v)
    }),
    picky("picks-its-segments", "segments of very different sizes are refused", |s, _, v, _| {
        let sizes = s.segments.iter().map(|s| s.rows);
        unless(s.segments.len() > 1 && sizes.clone().max() > sizes.min().map(|m| 8 * m), v)
    }),
    picky("picks-its-types", "bf16 is refused for wide weights", |s, _, v, _| {
        unless(s.x == q4_core::DType::BF16 && s.n() > 100, v)
    }),
    Liar::new(
        L2,
        "blocks-of-256-and-more",
        "k % 256 == 0 is all it says, and k == 768 is wrong",
        Parts {
            verdict: |s, _, v, _| unless(s.k % 256 != 0, v),
            obeys: false,
            fault: |s| Fault::when(s.k == 768, Fault::Factor(0.5)),
            ..HONEST
        },
    ),
    Liar::new(
        L2,
        "sixteen-rows-and-fewer",
        "at most 16 rows is all it says, and 11 are wrong",
        Parts {
            verdict: |s, _, v, _| unless(s.max_m > 16, v),
            obeys: false,
            fault: |s| Fault::when(s.m == 11, Fault::Row(10)),
            ..HONEST
        },
    ),
    Liar::new(
        L4,
        "a-native-processor",
        "4-bit units are claimed for a processor",
        Parts {
            descriptor: |d| d.offers.push(("nvfp4".into(), ExecPath::NativeKernel)),
            verdict: |spec, path, verdict, _| {
                if path == ExecPath::NativeKernel && spec.ops == OpSet::FORWARD { Ok(()) } else { verdict }
            },
            obeys: false,
            ..HONEST
        },
    ),
];
