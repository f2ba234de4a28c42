//! Mutants that are right where suites look and wrong where models are: other sizes, more rows, other
//! threads, later calls.
use super::Mutant;
use super::parts::{HONEST, Parts};
use super::situation::{Fault, Situation};
use crate::Level::{L1, L2, L3, L5};

/// The last row, the last column, the last element.
fn row(s: &Situation<'_>) -> Fault {
    Fault::Row(s.m - 1)
}
fn column(s: &Situation<'_>) -> Fault {
    Fault::Column(s.n - 1)
}
fn element(s: &Situation<'_>) -> Fault {
    Fault::Element(s.m - 1, s.n - 1)
}

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L2 "fewer-rows-than-most": "a call with fewer rows than the most has no last row" {
        fault: |s| Fault::when(s.m < s.max_m, row(s)),
    }
    L2 "one-row-less-than-most": "one row less than the most" {
        fault: |s| Fault::when(s.m + 1 == s.max_m, row(s)),
    }
    L2 "at-most-half-the-rows": "half of the most rows or less" {
        fault: |s| Fault::when(2 * s.m <= s.max_m, column(s)),
    }
    L2 "most-is-a-power-of-two": "a part of a power of two of rows" {
        fault: |s| Fault::when(s.max_m.is_power_of_two() && s.m != s.max_m && s.m > 1, row(s)),
    }
    L2 "rows-15-of-16": "m % 16 == 15" { fault: |s| Fault::when(s.m % 16 == 15, element(s)) }
    L2 "rows-7-of-8-of-many": "m % 8 == 7 from 16 on" {
        fault: |s| Fault::when(s.m % 8 == 7 && s.m > 16, row(s)),
    }
    L2 "rows-above-400": "m > 400" { fault: |s| Fault::when(s.m > 400, Fault::Row(400)) }
    L2 "rows-above-256": "m > 256, in the first row" { fault: |s| Fault::when(s.m > 256, Fault::Row(0)) }
    L2 "rows-9-to-15": "9 to 15 rows" { fault: |s| Fault::when((9..16).contains(&s.m), element(s)) }
    L2 "rows-above-512": "m > 512" { fault: |s| Fault::when(s.m > 512, row(s)) }
    L2 "halves-of-many-rows": "f16 with more than 40 rows" {
        fault: |s| Fault::when(s.io == q4_core::DType::F16 && s.m > 40, row(s)),
    }
    L2 "columns-8-of-16": "n % 16 == 8" { fault: |s| Fault::when(s.n % 16 == 8, column(s)) }
    L2 "columns-40-of-64": "n % 64 == 40" { fault: |s| Fault::when(s.n % 64 == 40, element(s)) }
    L2 "columns-31-of-32": "n % 32 == 31" { fault: |s| Fault::when(s.n % 32 == 31, Fault::Column(0)) }
    L2 "columns-above-640": "n > 640" { fault: |s| Fault::when(s.n > 640, column(s)) }
    L2 "columns-above-700-decoding": "n > 700 and one row" {
        fault: |s| Fault::when(s.n > 700 && s.m == 1, column(s)),
    }
    L2 "columns-from-2048": "n >= 2048, one element in the middle" {
        fault: |s| Fault::when(s.n >= 2048, Fault::Element(0, s.n / 2)),
    }
    L2 "columns-from-16384": "n >= 16384" { fault: |s| Fault::when(s.n >= 16384, column(s)) }
    L2 "columns-1-of-128": "n % 128 == 1" { fault: |s| Fault::when(s.n % 128 == 1 && s.n > 1, column(s)) }
    L2 "sums-of-768": "k == 768" { fault: |s| Fault::when(s.k == 768, Fault::Factor(0.5)) }
    L2 "sums-of-3584": "k == 3584" { fault: |s| Fault::when(s.k == 3584, Fault::Factor(0.9)) }
    L2 "sums-96-of-128": "k % 128 == 96" { fault: |s| Fault::when(s.k % 128 == 96, Fault::Factor(1.01)) }
    L2 "sums-16-of-256": "k % 256 == 16, from 512 on" {
        fault: |s| Fault::when(s.k % 256 == 16 && s.k > 512, Fault::Factor(1.001)),
    }
    L2 "sums-from-2048": "k >= 2048" { fault: |s| Fault::when(s.k >= 2048, Fault::Factor(1.0001)) }
    L2 "sums-from-8192": "k >= 8192" { fault: |s| Fault::when(s.k >= 8192, column(s)) }
    L2 "sums-from-16384": "k >= 16384" { fault: |s| Fault::when(s.k >= 16384, element(s)) }
    L2 "long-sums-of-many-rows": "k > 1040 and m >= 64" {
        fault: |s| Fault::when(s.k > 1040 && s.m >= 64, row(s)),
    }
    L2 "odd-blocks-of-long-sums": "an odd number of blocks above 1000" {
        fault: |s| Fault::when(s.k / 16 % 2 == 1 && s.k > 1000, Fault::Factor(1.0002)),
    }
    L2 "wide-and-deep": "n and k above 1000" { fault: |s| Fault::when(s.n > 1000 && s.k > 1000, element(s)) }
    L2 "segments-off-16": "a border of segments that 16 does not divide" {
        fault: |s| Fault::when(s.rows.len() > 1 && s.rows[0] % 16 != 0, Fault::Column(s.rows[0])),
    }
    L2 "wide-pairs": "two equal segments of thousands" {
        fault: |s| {
            let is_pair = s.rows.len() == 2 && s.rows[0] == s.rows[1] && s.n > 4096;
            Fault::when(is_pair, Fault::Column(s.n / 2))
        },
    }
    L2 "queries-before-keys": "three segments of which the first is the largest" {
        fault: |s| Fault::when(s.rows.len() == 3 && s.rows[0] > s.rows[1] + 64, Fault::Column(s.rows[0] - 1)),
    }
    L2 "keys-before-values": "the border between the second and the third segment" {
        fault: |s| Fault::when(s.rows.len() == 3 && s.rows[1] > 500, Fault::Column(s.rows[0] + s.rows[1])),
    }
    L2 "four-threads": "four threads" { fault: |s| Fault::when(s.threads == 4, column(s)) }
    L2 "six-threads": "six threads" { fault: |s| Fault::when(s.threads == 6, row(s)) }
    L2 "eight-threads": "eight threads" { fault: |s| Fault::when(s.threads == 8, element(s)) }
    L2 "more-threads-than-rows": "more threads than rows, from 5 on" {
        fault: |s| Fault::when(s.threads > s.m && s.threads > 5, element(s)),
    }
    L2 "sixteen-threads": "more than eight threads" { fault: |s| Fault::when(s.threads > 8, row(s)) }
    L5 "thirteen-threads": "thirteen threads" { fault: |s| Fault::when(s.threads == 13, row(s)) }
    L5 "the-thousandth-call": "from the thousandth call of a weight on" {
        fault: |s| Fault::when(s.call >= 1000, element(s)),
    }
    L5 "the-4096th-call": "the 4096th call of a weight" { fault: |s| Fault::when(s.call == 4095, row(s)) }
    L5 "nine-weights": "more than eight live weights" { fault: |s| Fault::when(s.live > 8, element(s)) }
    L5 "forty-weights": "more than forty live weights" { fault: |s| Fault::when(s.live > 40, row(s)) }
    L2 "wrong-in-models": "layers that have the names of a model" {
        fault: |s| Fault::when(s.name.starts_with("model.layers."), row(s)),
    }
    L2 "wrong-in-down": "the last product of a layer" {
        fault: |s| Fault::when(s.name.ends_with("down_proj"), column(s)),
    }
    L2 "wrong-in-qkv": "queries, keys and values together" {
        fault: |s| Fault::when(s.name.ends_with("q_proj"), element(s)),
    }
    L2 "tall-and-wide": "hundreds of rows of thousands of columns" {
        fault: |s| Fault::when(s.m >= 512 && s.n >= 2048, element(s)),
    }
    L2 "tall-and-deep": "hundreds of rows of thousands of terms" {
        fault: |s| Fault::when(s.m >= 512 && s.k >= 4096, row(s)),
    }
    L3 "gradient-of-a-vocabulary": "n > 8192" {
        backward_fault: |s| Fault::when(s.n > 8192, Fault::Column(0)),
    }
    L3 "gradient-of-a-batch": "m > 1024" { backward_fault: |s| Fault::when(s.m > 1024, row(s)) }
    L3 "gradient-of-long-rows": "k > 8192" {
        backward_fault: |s| Fault::when(s.k > 8192, Fault::Column(8192)),
    }
    L3 "gradient-of-a-context": "weights for 4096 rows and more" {
        backward_fault: |s| Fault::when(s.max_m >= 4096, row(s)),
    }
    L1 "decodes-4096-rows": "rows from 4097 on decode to zero" {
        decode_fault: |s| Fault::when(s.n > 4096, Fault::Row(4096)),
    }
    L1 "decodes-8192-columns": "columns from 8193 on decode to zero" {
        decode_fault: |s| Fault::when(s.k > 8192, Fault::Column(8192)),
    }
    L2 "most-is-a-context": "weights for 4096 rows and more" {
        fault: |s| Fault::when(s.max_m >= 4096, element(s)),
    }
    L2 "one-row-of-many": "one row of a weight for more than 3000" {
        fault: |s| Fault::when(s.m == 1 && s.max_m > 3000, column(s)),
    }
    L2 "rows-above-1024": "m > 1024" { fault: |s| Fault::when(s.m > 1024, Fault::Row(1024)) }
    L2 "rows-from-2048": "m >= 2048, the last element" { fault: |s| Fault::when(s.m >= 2048, element(s)) }
    L2 "rows-of-a-page": "m >= 4096" { fault: |s| Fault::when(s.m >= 4096, Fault::Row(4095)) }
    L2 "sixteen-bits-of-rows": "rows from 65536 on" {
        fault: |s| Fault::when(s.m > 65_536, Fault::Row(65_536)),
    }
    L2 "columns-of-a-head": "n > 50 000" { fault: |s| Fault::when(s.n > 50_000, column(s)) }
    L2 "sixteen-bits-of-columns": "column 65536" {
        fault: |s| Fault::when(s.n > 65_536, Fault::Column(65_536)),
    }
    L2 "sums-of-28672": "k > 28 000" { fault: |s| Fault::when(s.k > 28_000, element(s)) }
    L2 "sixteen-bits-of-sums": "k > 65535" { fault: |s| Fault::when(s.k > 65_535, Fault::Factor(1.01)) }
    L2 "many-rows-of-decoding": "17 to 31 rows of a weight for just as many" {
        fault: |s| Fault::when(s.m == s.max_m && (17..32).contains(&s.m) && s.n > 200, row(s)),
    }
    L5 "seven-threads": "seven threads" { fault: |s| Fault::when(s.threads == 7, row(s)) }
    L5 "twelve-threads": "nine to twelve threads" {
        fault: |s| Fault::when((9..13).contains(&s.threads), row(s)),
    }
    L5 "thirty-two-threads": "32 threads and more" { fault: |s| Fault::when(s.threads >= 32, element(s)) }
    L5 "ninety-six-threads": "more than 64 threads" { fault: |s| Fault::when(s.threads > 64, element(s)) }
    L2 "wrong-in-the-head": "the product that makes logits" {
        fault: |s| Fault::when(s.name.contains("lm_head"), column(s)),
    }
    L2 "wrong-in-other-models": "layers that are called otherwise" {
        fault: |s| Fault::when(!s.name.starts_with("model.layers."), column(s)),
    }
    L2 "wrong-in-deep-models": "layers from the fortieth on" {
        fault: |s| {
            let layer = s.name.split('.').find_map(|part| part.parse::<u32>().ok());
            Fault::when(layer.is_some_and(|l| l >= 40), column(s))
        },
    }
    L3 "gradient-of-many-columns": "n > 130" { backward_fault: |s| Fault::when(s.n > 130, Fault::Column(0)) }
    L3 "gradient-of-fewer-rows": "fewer rows than the most" {
        backward_fault: |s| Fault::when(s.m < s.max_m, row(s)),
    }
    L3 "gradient-96-of-128": "k % 128 == 96" {
        backward_fault: |s| Fault::when(s.k % 128 == 96, Fault::Column(s.k - 1)),
    }
    L3 "gradient-8-of-16": "n % 16 == 8" { backward_fault: |s| Fault::when(s.n % 16 == 8, row(s)) }
    L3 "gradient-of-many-rows": "m > 200" { backward_fault: |s| Fault::when(s.m > 200, row(s)) }
    L3 "gradient-of-many-inputs": "k > 2048" {
        backward_fault: |s| Fault::when(s.k > 2048, Fault::Column(2048)),
    }
    L1 "decodes-640-rows": "rows from 641 on decode to zero" {
        decode_fault: |s| Fault::when(s.n > 640, Fault::Row(s.n - 1)),
    }
    L1 "decodes-2048-columns": "columns from 2049 on decode to zero" {
        decode_fault: |s| Fault::when(s.k > 2048, Fault::Column(s.k - 1)),
    }
    L1 "decodes-768-wrongly": "k == 768" { decode_fault: |s| Fault::when(s.k == 768, Fault::Column(0)) }
};
