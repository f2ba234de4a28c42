//! Liars that are right where suites look and wrong where models are: other sizes, more rows, other threads,
//! later calls.
use super::Liar;
use super::parts::{HONEST, Parts};
use super::situation::{Fault, Situation};
use crate::Level::{self, L1, L2, L3, L5};

/// Wrong in a forward call.
const fn on(level: Level, name: &'static str, lie: &'static str, fault: fn(&Situation<'_>) -> Fault) -> Liar {
    Liar::new(level, name, lie, Parts { fault, ..HONEST })
}
/// Wrong in a backward call.
const fn back(name: &'static str, lie: &'static str, backward_fault: fn(&Situation<'_>) -> Fault) -> Liar {
    Liar::new(L3, name, lie, Parts { backward_fault, ..HONEST })
}
/// Wrong when it decodes.
const fn decoding(name: &'static str, lie: &'static str, decode_fault: fn(&Situation<'_>) -> Fault) -> Liar {
    Liar::new(L1, name, lie, Parts { decode_fault, ..HONEST })
}

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

pub(super) const LIARS: &[Liar] = &[
    on(L2, "fewer-rows-than-most", "a call with fewer rows than the most has no last row", |s| {
        Fault::when(s.m < s.max_m, row(s))
    }),
    on(L2, "one-row-less-than-most", "one row less than the most", |s| {
        Fault::when(s.m + 1 == s.max_m, row(s))
    }),
    on(L2, "at-most-half-the-rows", "half of the most rows or less", |s| {
        Fault::when(2 * s.m <= s.max_m, column(s))
    }),
    on(L2, "most-is-a-power-of-two", "a part of a power of two of rows", |s| {
        Fault::when(s.max_m.is_power_of_two() && s.m != s.max_m && s.m > 1, row(s))
    }),
    on(L2, "rows-15-of-16", "m % 16 == 15", |s| Fault::when(s.m % 16 == 15, element(s))),
    on(L2, "rows-7-of-8-of-many", "m % 8 == 7 from 16 on", |s| Fault::when(s.m % 8 == 7 && s.m > 16, row(s))),
    on(L2, "rows-above-400", "m > 400", |s| Fault::when(s.m > 400, Fault::Row(400))),
    on(L2, "rows-above-256", "m > 256, in the first row", |s| Fault::when(s.m > 256, Fault::Row(0))),
    on(L2, "rows-9-to-15", "9 to 15 rows", |s| Fault::when((9..16).contains(&s.m), element(s))),
    on(L2, "rows-above-512", "m > 512", |s| Fault::when(s.m > 512, row(s))),
    on(L2, "halves-of-many-rows", "f16 with more than 40 rows", |s| {
        Fault::when(s.io == q4_core::DType::F16 && s.m > 40, row(s))
    }),
    on(L2, "columns-8-of-16", "n % 16 == 8", |s| Fault::when(s.n % 16 == 8, column(s))),
    on(L2, "columns-40-of-64", "n % 64 == 40", |s| Fault::when(s.n % 64 == 40, element(s))),
    on(L2, "columns-31-of-32", "n % 32 == 31", |s| Fault::when(s.n % 32 == 31, Fault::Column(0))),
    on(L2, "columns-above-640", "n > 640", |s| Fault::when(s.n > 640, column(s))),
    on(L2, "columns-above-700-decoding", "n > 700 and one row", |s| {
        Fault::when(s.n > 700 && s.m == 1, column(s))
    }),
    on(L2, "columns-from-2048", "n >= 2048, one element in the middle", |s| {
        Fault::when(s.n >= 2048, Fault::Element(0, s.n / 2))
    }),
    on(L2, "columns-from-16384", "n >= 16384", |s| Fault::when(s.n >= 16384, column(s))),
    on(L2, "columns-1-of-128", "n % 128 == 1", |s| Fault::when(s.n % 128 == 1 && s.n > 1, column(s))),
    on(L2, "sums-of-768", "k == 768", |s| Fault::when(s.k == 768, Fault::Factor(0.5))),
    on(L2, "sums-of-3584", "k == 3584", |s| Fault::when(s.k == 3584, Fault::Factor(0.9))),
    on(L2, "sums-96-of-128", "k % 128 == 96", |s| Fault::when(s.k % 128 == 96, Fault::Factor(1.01))),
    on(L2, "sums-16-of-256", "k % 256 == 16, from 512 on", |s| {
        Fault::when(s.k % 256 == 16 && s.k > 512, Fault::Factor(1.001))
    }),
    on(L2, "sums-from-2048", "k >= 2048", |s| Fault::when(s.k >= 2048, Fault::Factor(1.0001))),
    on(L2, "sums-from-8192", "k >= 8192", |s| Fault::when(s.k >= 8192, column(s))),
    on(L2, "sums-from-16384", "k >= 16384", |s| Fault::when(s.k >= 16384, element(s))),
    on(L2, "long-sums-of-many-rows", "k > 1040 and m >= 64", |s| {
        Fault::when(s.k > 1040 && s.m >= 64, row(s))
    }),
    on(L2, "odd-blocks-of-long-sums", "an odd number of blocks above 1000", |s| {
        Fault::when(s.k / 16 % 2 == 1 && s.k > 1000, Fault::Factor(1.0002))
    }),
    on(L2, "wide-and-deep", "n and k above 1000", |s| Fault::when(s.n > 1000 && s.k > 1000, element(s))),
    on(L2, "segments-off-16", "a border of segments that 16 does not divide", |s| {
        Fault::when(s.rows.len() > 1 && s.rows[0] % 16 != 0, Fault::Column(s.rows[0]))
    }),
    on(L2, "wide-pairs", "two equal segments of thousands", |s| {
        let is_pair = s.rows.len() == 2 && s.rows[0] == s.rows[1] && s.n > 4096;
        Fault::when(is_pair, Fault::Column(s.n / 2))
    }),
    on(L2, "queries-before-keys", "three segments of which the first is the largest", |s| {
        Fault::when(s.rows.len() == 3 && s.rows[0] > s.rows[1] + 64, Fault::Column(s.rows[0] - 1))
    }),
    on(L2, "keys-before-values", "the border between the second and the third segment", |s| {
        Fault::when(s.rows.len() == 3 && s.rows[1] > 500, Fault::Column(s.rows[0] + s.rows[1]))
    }),
    on(L2, "four-threads", "four threads", |s| Fault::when(s.threads == 4, column(s))),
    on(L2, "six-threads", "six threads", |s| Fault::when(s.threads == 6, row(s))),
    on(L2, "eight-threads", "eight threads", |s| Fault::when(s.threads == 8, element(s))),
    on(L2, "more-threads-than-rows", "more threads than rows, from 5 on", |s| {
        Fault::when(s.threads > s.m && s.threads > 5, element(s))
    }),
    on(L2, "sixteen-threads", "more than eight threads", |s| Fault::when(s.threads > 8, row(s))),
    on(L5, "thirteen-threads", "thirteen threads", |s| Fault::when(s.threads == 13, row(s))),
    on(L5, "the-thousandth-call", "from the thousandth call of a weight on", |s| {
        Fault::when(s.call >= 1000, element(s))
    }),
    on(L5, "the-4096th-call", "the 4096th call of a weight", |s| Fault::when(s.call == 4095, row(s))),
    on(L5, "nine-weights", "more than eight live weights", |s| Fault::when(s.live > 8, element(s))),
    on(L5, "forty-weights", "more than forty live weights", |s| Fault::when(s.live > 40, row(s))),
    on(L2, "wrong-in-models", "layers that have the names of a model", |s| {
        Fault::when(s.name.starts_with("model.layers."), row(s))
    }),
    on(L2, "wrong-in-down", "the last product of a layer", |s| {
        Fault::when(s.name.ends_with("down_proj"), column(s))
    }),
    on(L2, "wrong-in-qkv", "queries, keys and values together", |s| {
        Fault::when(s.name.ends_with("q_proj"), element(s))
    }),
    on(L2, "tall-and-wide", "hundreds of rows of thousands of columns", |s| {
        Fault::when(s.m >= 512 && s.n >= 2048, element(s))
    }),
    on(L2, "tall-and-deep", "hundreds of rows of thousands of terms", |s| {
        Fault::when(s.m >= 512 && s.k >= 4096, row(s))
    }),
    back("gradient-of-a-vocabulary", "n > 8192", |s| Fault::when(s.n > 8192, Fault::Column(0))),
    back("gradient-of-a-batch", "m > 1024", |s| Fault::when(s.m > 1024, row(s))),
    back("gradient-of-long-rows", "k > 8192", |s| Fault::when(s.k > 8192, Fault::Column(8192))),
    back("gradient-of-a-context", "weights for 4096 rows and more", |s| Fault::when(s.max_m >= 4096, row(s))),
    decoding("decodes-4096-rows", "rows from 4097 on decode to zero", |s| {
        Fault::when(s.n > 4096, Fault::Row(4096))
    }),
    decoding("decodes-8192-columns", "columns from 8193 on decode to zero", |s| {
        Fault::when(s.k > 8192, Fault::Column(8192))
    }),
    on(L2, "most-is-a-context", "weights for 4096 rows and more", |s| {
        Fault::when(s.max_m >= 4096, element(s))
    }),
    on(L2, "one-row-of-many", "one row of a weight for more than 3000", |s| {
        Fault::when(s.m == 1 && s.max_m > 3000, column(s))
    }),
    on(L2, "rows-above-1024", "m > 1024", |s| Fault::when(s.m > 1024, Fault::Row(1024))),
    on(L2, "rows-from-2048", "m >= 2048, the last element", |s| Fault::when(s.m >= 2048, element(s))),
    on(L2, "rows-of-a-page", "m >= 4096", |s| Fault::when(s.m >= 4096, Fault::Row(4095))),
    on(L2, "sixteen-bits-of-rows", "rows from 65536 on", |s| Fault::when(s.m > 65_536, Fault::Row(65_536))),
    on(L2, "columns-of-a-head", "n > 50 000", |s| Fault::when(s.n > 50_000, column(s))),
    on(L2, "sixteen-bits-of-columns", "column 65536", |s| Fault::when(s.n > 65_536, Fault::Column(65_536))),
    on(L2, "sums-of-28672", "k > 28 000", |s| Fault::when(s.k > 28_000, element(s))),
    on(L2, "sixteen-bits-of-sums", "k > 65535", |s| Fault::when(s.k > 65_535, Fault::Factor(1.01))),
    on(L2, "many-rows-of-decoding", "17 to 31 rows of a weight for just as many", |s| {
        Fault::when(s.m == s.max_m && (17..32).contains(&s.m) && s.n > 200, row(s))
    }),
    on(L5, "seven-threads", "seven threads", |s| Fault::when(s.threads == 7, row(s))),
    on(L5, "twelve-threads", "nine to twelve threads", |s| Fault::when((9..13).contains(&s.threads), row(s))),
    on(L5, "thirty-two-threads", "32 threads and more", |s| Fault::when(s.threads >= 32, element(s))),
    on(L5, "ninety-six-threads", "more than 64 threads", |s| Fault::when(s.threads > 64, element(s))),
    on(L2, "wrong-in-the-head", "the product that makes logits", |s| {
        Fault::when(s.name.contains("lm_head"), column(s))
    }),
    on(L2, "wrong-in-other-models", "layers that are called otherwise", |s| {
        Fault::when(!s.name.starts_with("model.layers."), column(s))
    }),
    on(L2, "wrong-in-deep-models", "layers from the fortieth on", |s| {
        let layer = s.name.split('.').find_map(|part| part.parse::<u32>().ok());
        Fault::when(layer.is_some_and(|l| l >= 40), column(s))
    }),
    back("gradient-of-many-columns", "n > 130", |s| Fault::when(s.n > 130, Fault::Column(0))),
    back("gradient-of-fewer-rows", "fewer rows than the most", |s| Fault::when(s.m < s.max_m, row(s))),
    back("gradient-96-of-128", "k % 128 == 96", |s| Fault::when(s.k % 128 == 96, Fault::Column(s.k - 1))),
    back("gradient-8-of-16", "n % 16 == 8", |s| Fault::when(s.n % 16 == 8, row(s))),
    back("gradient-of-many-rows", "m > 200", |s| Fault::when(s.m > 200, row(s))),
    back("gradient-of-many-inputs", "k > 2048", |s| Fault::when(s.k > 2048, Fault::Column(2048))),
    decoding("decodes-640-rows", "rows from 641 on decode to zero", |s| {
        Fault::when(s.n > 640, Fault::Row(s.n - 1))
    }),
    decoding("decodes-2048-columns", "columns from 2049 on decode to zero", |s| {
        Fault::when(s.k > 2048, Fault::Column(s.k - 1))
    }),
    decoding("decodes-768-wrongly", "k == 768", |s| Fault::when(s.k == 768, Fault::Column(0))),
];
