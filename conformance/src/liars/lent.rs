//! Mutants about what a caller lends: element types that differ, rows that what apart in one operand and not
//! in the other, addresses, what y held, and more scratch than was asked for.
use super::Mutant;
use super::parts::{HONEST, Parts};
use super::situation::{Fault, Situation};
use crate::Level::{L2, L3, L4, L5};
use q4_core::{DType, OpSet, Scratch};

fn last(s: &Situation<'_>) -> Fault {
    Fault::Element(s.m - 1, s.n - 1)
}

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L2 "narrower-results": "f32 inputs and bf16 results" {
        fault: |s| Fault::when((s.io, s.out) == (DType::F32, DType::BF16), last(s)),
    }
    L2 "results-in-half": "f32 inputs and f16 results, of many rows" {
        fault: |s| Fault::when((s.io, s.out) == (DType::F32, DType::F16) && s.m > 4, Fault::Row(0)),
    }
    L2 "wider-results": "bf16 inputs and f32 results" {
        fault: |s| Fault::when((s.io, s.out) == (DType::BF16, DType::F32), Fault::Factor(1.01)),
    }
    L2 "two-halves": "f16 inputs and bf16 results" {
        fault: |s| Fault::when((s.io, s.out) == (DType::F16, DType::BF16), last(s)),
    }
    L3 "gradient-of-other-types": "x and y of different types" {
        backward_fault: |s| Fault::when(s.io != s.out, Fault::Row(0)),
    }
    L5 "gap-of-x-alone": "rows of x what apart and those of y do not" {
        fault: |s| Fault::when(s.x.gap() > 0 && s.y.gap() == 0, last(s)),
    }
    L5 "gap-of-y-alone": "rows of y what apart and those of x do not" {
        fault: |s| Fault::when(s.y.gap() > 0 && s.x.gap() == 0, last(s)),
    }
    L5 "gaps-that-differ": "both have gaps, and not the same" {
        fault: |s| Fault::when(s.y.gap() > 0 && s.x.gap() > 0 && s.x.gap() != s.y.gap(), last(s)),
    }
    L5 "wide-gaps": "rows of y that are further apart than they are long" {
        fault: |s| Fault::when(s.y.ld > 2 * s.y.cols, Fault::Row(s.m - 1)),
    }
    L5 "gap-of-one-row": "a single row of x of which a wider matrix is left" {
        fault: |s| Fault::when(s.m == 1 && s.x.gap() > 64, last(s)),
    }
    L5 "begins-at-a-page": "x begins with a page" { fault: |s| Fault::when(s.x.address % 4096 == 0, last(s)) }
    L5 "y-off-its-vectors": "y off a vector and x on one" {
        fault: |s| Fault::when(s.x.address % 64 == 0 && s.y.address % 16 != 0, last(s)),
    }
    L5 "x-off-its-vectors": "x off a vector and y on one" {
        fault: |s| Fault::when(s.y.address % 64 == 0 && s.x.address % 16 != 0, last(s)),
    }
    L5 "codes-at-odd-bytes": "stored codes at an odd address" {
        fault: |s| Fault::when(s.source % 2 == 1, last(s)),
    }
    L5 "codes-off-their-vectors": "stored codes that are 8 bytes off a vector" {
        fault: |s| Fault::when(s.source % 16 == 8, last(s)),
    }
    L5 "y-that-holds-numbers": "an element is only written over NaN" {
        fault: |s| Fault::when(!s.y.is_nan, last(s)),
    }
    L3 "gradient-over-numbers": "a gradient is only right in memory that held NaN" {
        backward_fault: |s| Fault::when(!s.y.is_nan, Fault::Row(s.m - 1)),
    }
    L5 "more-scratch-than-asked": "scratch that is larger than what was asked for" {
        fault: |s| Fault::when(s.lent >= 4096, last(s)),
    }
    L3 "gradient-with-much-scratch": "the same of gradients" {
        backward_fault: |s| Fault::when(s.lent >= 4096, Fault::Row(s.m - 1)),
    }
    L5 "few-rows-much-scratch": "three rows need more scratch than the most there may be" {
        workspace: |m, k, max| Scratch::bytes(&[4 * k * if m == 3 { 2 * max.max(3) } else { m }]),
    }
    L5 "scratch-of-odd-rows":
        "an odd number of rows, from 33 on, needs one row of scratch more than the next even one" {
        workspace: |m, k, _| Scratch::bytes(&[4 * k * if m > 32 && m % 2 == 1 { m + 2 } else { m }]),
    }
    L5 lethal "reads-before-x": "whole vectors are loaded, from before the start of x" {
        after: |_, x, _| {
            // SAFETY: it is not. The page may be nobody's; the process may end, and that is the point.
            std::hint::black_box(unsafe { x.as_ptr().cast::<u8>().sub(1).read_volatile() });
        },
    }
    L4 "wrong-after-a-refusal": "the call after one whose operands did not fit" {
        fault: |s| Fault::when(s.done.failed() > s.done.forward(), last(s)),
    }
    L2 "wrong-after-nan": "every call after one that could not be quantised" {
        fault: |s| Fault::when(s.done.failed() > 0 && s.done.forward() > 0, last(s)),
    }
    L4 "wrong-after-a-damaged-weight": "the weight after one that was refused" {
        fault: |s| Fault::when(s.was_refused, last(s)),
    }
    L3 "forward-of-trained-weights": "forward, of a weight that was prepared for all operations" {
        fault: |s| Fault::when(s.ops == OpSet::ALL, last(s)),
    }
    L5 "decodes-into-wide-rows": "rows of the decoded matrix that are far apart" {
        decode_fault: |s| Fault::when(s.y.ld > s.y.cols + 8, Fault::Row(s.n - 1)),
    }
};
