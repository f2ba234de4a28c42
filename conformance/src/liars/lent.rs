//! Liars about what a caller lends: element types that differ, rows that lie apart in one operand and not in
//! the other, addresses, what y held, and more scratch than was asked for.
use super::Liar;
use super::parts::{HONEST, Parts};
use super::situation::{Fault, Situation};
use crate::Level::{self, L2, L3, L4, L5};
use q4_core::{DType, OpSet, Scratch};

/// Wrong in a forward call.
const fn on(level: Level, name: &'static str, lie: &'static str, fault: fn(&Situation<'_>) -> Fault) -> Liar {
    Liar::new(level, name, lie, Parts { fault, ..HONEST })
}
/// Wrong in a backward call.
const fn back(name: &'static str, lie: &'static str, backward_fault: fn(&Situation<'_>) -> Fault) -> Liar {
    Liar::new(L3, name, lie, Parts { backward_fault, ..HONEST })
}

fn last(s: &Situation<'_>) -> Fault {
    Fault::Element(s.m - 1, s.n - 1)
}

pub(super) const LIARS: &[Liar] = &[
    on(L2, "narrower-results", "f32 inputs and bf16 results", |s| {
        Fault::when((s.io, s.out) == (DType::F32, DType::BF16), last(s))
    }),
    on(L2, "results-in-half", "f32 inputs and f16 results, of many rows", |s| {
        Fault::when((s.io, s.out) == (DType::F32, DType::F16) && s.m > 4, Fault::Row(0))
    }),
    on(L2, "wider-results", "bf16 inputs and f32 results", |s| {
        Fault::when((s.io, s.out) == (DType::BF16, DType::F32), Fault::Factor(1.01))
    }),
    on(L2, "two-halves", "f16 inputs and bf16 results", |s| {
        Fault::when((s.io, s.out) == (DType::F16, DType::BF16), last(s))
    }),
    back("gradient-of-other-types", "x and y of different types", |s| {
        Fault::when(s.io != s.out, Fault::Row(0))
    }),
    on(L5, "gap-of-x-alone", "rows of x lie apart and those of y do not", |s| {
        Fault::when(s.x.gap() > 0 && s.y.gap() == 0, last(s))
    }),
    on(L5, "gap-of-y-alone", "rows of y lie apart and those of x do not", |s| {
        Fault::when(s.y.gap() > 0 && s.x.gap() == 0, last(s))
    }),
    on(L5, "gaps-that-differ", "both have gaps, and not the same", |s| {
        Fault::when(s.y.gap() > 0 && s.x.gap() > 0 && s.x.gap() != s.y.gap(), last(s))
    }),
    on(L5, "wide-gaps", "rows of y that are further apart than they are long", |s| {
        Fault::when(s.y.ld > 2 * s.y.cols, Fault::Row(s.m - 1))
    }),
    on(L5, "gap-of-one-row", "a single row of x of which a wider matrix is left", |s| {
        Fault::when(s.m == 1 && s.x.gap() > 64, last(s))
    }),
    on(L5, "begins-at-a-page", "x begins with a page", |s| Fault::when(s.x.address % 4096 == 0, last(s))),
    on(L5, "y-off-its-vectors", "y off a vector and x on one", |s| {
        Fault::when(s.x.address % 64 == 0 && s.y.address % 16 != 0, last(s))
    }),
    on(L5, "x-off-its-vectors", "x off a vector and y on one", |s| {
        Fault::when(s.y.address % 64 == 0 && s.x.address % 16 != 0, last(s))
    }),
    on(L5, "codes-at-odd-bytes", "stored codes at an odd address", |s| {
        Fault::when(s.source % 2 == 1, last(s))
    }),
    on(L5, "codes-off-their-vectors", "stored codes that are 8 bytes off a vector", |s| {
        Fault::when(s.source % 16 == 8, last(s))
    }),
    on(L5, "y-that-holds-numbers", "an element is only written over NaN", |s| {
        Fault::when(!s.y.is_nan, last(s))
    }),
    back("gradient-over-numbers", "a gradient is only right in memory that held NaN", |s| {
        Fault::when(!s.y.is_nan, Fault::Row(s.m - 1))
    }),
    on(L5, "more-scratch-than-asked", "scratch that is larger than what was asked for", |s| {
        Fault::when(s.lent >= 4096, last(s))
    }),
    back("gradient-with-much-scratch", "the same of gradients", |s| {
        Fault::when(s.lent >= 4096, Fault::Row(s.m - 1))
    }),
    Liar::new(
        L5,
        "few-rows-much-scratch",
        "three rows need more scratch than the most there may be",
        Parts {
            workspace: |m, k, max| Scratch::bytes(&[4 * k * if m == 3 { 2 * max.max(3) } else { m }]),
            ..HONEST
        },
    ),
    Liar::new(
        L5,
        "scratch-of-odd-rows",
        "an odd number of rows, from 33 on, needs one row of scratch more than the next even one",
        Parts {
            workspace: |m, k, _| Scratch::bytes(&[4 * k * if m > 32 && m % 2 == 1 { m + 2 } else { m }]),
            ..HONEST
        },
    ),
    Liar::lethal(
        L5,
        "reads-before-x",
        "whole vectors are loaded, from before the start of x",
        Parts {
            after: |_, x, _| {
                // SAFETY: it is not. The page may be nobody's; the process may end, and that is the point.
                std::hint::black_box(unsafe { x.as_ptr().cast::<u8>().sub(1).read_volatile() });
            },
            ..HONEST
        },
    ),
    Liar::new(
        L4,
        "wrong-after-a-refusal",
        "the call after one whose operands did not fit",
        Parts { fault: |s| Fault::when(s.done.failed() > s.done.forward(), last(s)), ..HONEST },
    ),
    Liar::new(
        L2,
        "wrong-after-nan",
        "every call after one that could not be quantised",
        Parts { fault: |s| Fault::when(s.done.failed() > 0 && s.done.forward() > 0, last(s)), ..HONEST },
    ),
    Liar::new(
        L4,
        "wrong-after-a-damaged-weight",
        "the weight after one that was refused",
        Parts { fault: |s| Fault::when(s.was_refused, last(s)), ..HONEST },
    ),
    Liar::new(
        L3,
        "forward-of-trained-weights",
        "forward, of a weight that was prepared for all operations",
        Parts { fault: |s| Fault::when(s.ops == OpSet::ALL, last(s)), ..HONEST },
    ),
    Liar::new(
        L5,
        "decodes-into-wide-rows",
        "rows of the decoded matrix that are far apart",
        Parts { decode_fault: |s| Fault::when(s.y.ld > s.y.cols + 8, Fault::Row(s.n - 1)), ..HONEST },
    ),
];
