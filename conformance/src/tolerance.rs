//! How far a result may be from the exact one: the only place of the suite that knows.
//!
//! The elementwise bound is that of the core, which states its derivation. Rows and columns are held to a
//! share of it: one error may use its bound up, dozens of independent ones never all do. The rounding of a
//! result is evenly spread over at most its bound, a mean square of 1/3 with a deviation of 0.3 per element;
//! over 32 elements the share below is more than four deviations away from the worst case of that, so a row
//! that exceeds it is biased. Elements that are the same but for a power of two round alike and count once.
use q4_core::oracle::{self, Units};
use q4_core::{Code, DType, Error, ExecPath, Result};
use std::collections::BTreeSet;

/// Root mean square of error over bound that a row or a column may have.
pub const AGGREGATE: f64 = 0.75;
/// Fewest elements a row or a column needs to be judged as a whole.
pub const AGGREGATE_FROM: usize = 32;

/// A matrix of exact results with the sums of magnitudes that bounds are made of.
#[derive(Clone)]
pub struct Exact {
    /// Rows.
    pub m: usize,
    /// Columns.
    pub n: usize,
    /// `(value, Σ|terms|)`, row-major.
    pub values: Vec<(f64, f64)>,
}

/// What the bound depends on besides the exact values.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Path that computed.
    pub path: ExecPath,
    /// What added up.
    pub units: Units,
    /// Type of the results.
    pub out: DType,
    /// Terms of each sum.
    pub k: usize,
}

impl Exact {
    /// Largest error of one result over its bound.
    ///
    /// # Errors
    /// `ConformanceFailed` with the element, when a result is outside its bound, is not exactly zero where
    /// every term is, or when the errors of a row or column together are too large.
    pub fn compare(&self, what: &str, got: &[f32], terms: Terms) -> Result<f64> {
        let [rows, columns] = [self.m, self.n].map(|n| (0..n).collect::<Vec<_>>());
        self.compare_at(what, got, terms, &rows, &columns)
    }

    /// The same of a part of a matrix: these rows and columns of it.
    ///
    /// # Errors
    /// Those of [`compare`](Self::compare).
    pub fn compare_at(
        &self,
        what: &str,
        got: &[f32],
        terms: Terms,
        at_rows: &[usize],
        at_columns: &[usize],
    ) -> Result<f64> {
        let (m, n) = (self.m, self.n);
        let (mut worst, mut wrong_ones, mut first) = (0f64, 0usize, None);
        let (mut rows, mut columns) = (vec![0f64; m], vec![0f64; n]);
        for (i, (&(exact, abs), &got)) in self.values.iter().zip(got).enumerate() {
            let (r, c) = (at_rows[i / n], at_columns[i % n]);
            let got = f64::from(got);
            let limit = self::bound(terms, exact, abs);
            let error = (got - exact).abs();
            if abs == 0.0 && got != 0.0 {
                wrong_ones += 1;
                first.get_or_insert((r, c, "0, for every term is zero".to_owned(), format!("{got:e}")));
                continue;
            }
            if saturates(terms.out, exact, limit) {
                // Past the range of the type, infinity is the right answer.
                if got.is_infinite() && got.signum() == exact.signum() || error <= limit {
                    continue;
                }
            }
            let ratio = error / limit;
            if ratio.is_nan() || ratio > 1.0 {
                wrong_ones += 1;
                let have = || format!("{got:e}, {ratio:.3} of the bound away");
                first.get_or_insert_with(|| (r, c, format!("{exact:e} within {limit:e}"), have()));
                continue;
            }
            worst = worst.max(ratio);
            rows[i / n] += ratio * ratio;
            columns[i % n] += ratio * ratio;
        }
        if let Some((r, c, need, have)) = first {
            let others = match wrong_ones {
                1 => String::new(),
                some => format!(" and {} more of {}", some - 1, m * n),
            };
            let what = format!("{what}[{r}, {c}]{others}");
            return Err(Error::new(Code::ConformanceFailed, what).need(need).have(have));
        }
        for (name, sums, count, at) in [("row", rows, n, at_rows), ("column", columns, m, at_columns)] {
            for (i, squares) in sums.into_iter().enumerate() {
                let share = (squares / count as f64).sqrt();
                if count >= AGGREGATE_FROM && share > AGGREGATE && self.independent(name, i) >= AGGREGATE_FROM
                {
                    return Err(Error::new(Code::ConformanceFailed, format!("{what}: {name} {}", at[i]))
                        .need(format!(
                            "errors of at most {AGGREGATE} of their bounds in the root mean square"
                        ))
                        .have(format!("{share:.3}")));
                }
            }
        }
        Ok(worst)
    }
}

impl Exact {
    /// Different roundings in a row or a column: a gradient of one out feature has as many as its codes have
    /// values that are no doubles of each other.
    fn independent(&self, what: &str, i: usize) -> usize {
        const SIGNIFICAND: u64 = (1 << 52) - 1;
        let is_of = |at: usize| if what == "row" { at / self.n == i } else { at % self.n == i };
        let of = self.values.iter().enumerate().filter(|(at, _)| is_of(*at));
        of.map(|(_, (exact, _))| exact.to_bits() & SIGNIFICAND).collect::<BTreeSet<_>>().len()
    }
}

/// The elementwise bound.
pub fn bound(t: Terms, exact: f64, abs_sum: f64) -> f64 {
    oracle::bound(t.path, t.units, t.out, t.k, exact, abs_sum)
}

/// Largest error of a sum of results, each with its sign, from the sums of their exact magnitudes and of the
/// sums of magnitudes that bounds are made of.
pub(crate) fn bound_of_sum(t: Terms, count: usize, exact: f64, abs_sum: f64) -> f64 {
    // The bound is a sum of multiples of both and of a constant.
    bound(t, exact, abs_sum) + (count as f64 - 1.0) * bound(t, 0.0, 0.0) + abs_sum * 1e-12
}

/// Terms of a gradient's sums: n of them, in tiles that are padded.
pub fn backward_terms(n: usize) -> usize {
    n.next_multiple_of(16) + 16
}

fn saturates(out: DType, exact: f64, limit: f64) -> bool {
    let largest = match out {
        DType::F16 => 65504.0,
        _ => f64::from(f32::MAX) * 0.996,
    };
    exact.abs() + limit >= largest
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms { path: ExecPath::FusedDequant, units: Units::Full, out: DType::F32, k: 64 };

    fn exact(n: usize) -> Exact {
        Exact { m: 1, n, values: (0..n).map(|i| (1.0 + i as f64, 40.0)).collect() }
    }

    /// How many are wrong tells a wrong nibble from a wrong scale.
    #[test]
    fn the_first_wrong_result_is_named_and_the_others_are_counted() {
        let e = exact(512);
        let right: Vec<f32> = e.values.iter().map(|v| v.0 as f32).collect();
        let mut y = right.clone();
        y[7] = 0.0;
        let text = |y: &[f32]| e.compare("y", y, TERMS).expect_err("wrong").to_string();
        assert!(text(&y).contains("y[0, 7]\n"), "{}", text(&y));
        (y[9], y[10]) = (f32::NAN, -1.0);
        assert!(text(&y).contains("y[0, 7] and 2 more of 512\n"), "{}", text(&y));
        assert!(e.compare("y", &right, TERMS).is_ok());
    }

    #[test]
    fn one_dead_column_of_many_is_seen() {
        let e = exact(512);
        let mut y: Vec<f32> = e.values.iter().map(|v| v.0 as f32).collect();
        assert!(e.compare("y", &y, TERMS).is_ok_and(|r| r == 0.0));
        y[300] = 0.0;
        let error = e.compare("y", &y, TERMS).expect_err("dead column");
        assert!(error.to_string().contains("y[0, 300]"), "{error}");
    }

    #[test]
    fn errors_that_all_use_their_bound_up_are_a_bias() {
        let e = exact(64);
        let shifted = |share: f64| -> Vec<f32> {
            e.values.iter().map(|v| (v.0 + share * bound(TERMS, v.0, v.1)) as f32).collect()
        };
        assert!(e.compare("y", &shifted(0.5), TERMS).is_ok());
        let error = e.compare("y", &shifted(0.9), TERMS).expect_err("biased");
        assert!(error.to_string().contains("row 0"), "{error}");
    }

    #[test]
    fn elements_that_round_alike_are_no_bias() {
        // Multiples of one scale: of their 15 magnitudes eight are no doubles of others.
        let code = |i: usize| (1 + i % 15) as f64 * if i % 2 == 0 { 0.3 } else { -0.3 };
        let e = Exact { m: 1, n: 64, values: (0..64).map(|i| (code(i), code(i).abs())).collect() };
        let y: Vec<f32> = e.values.iter().map(|v| (v.0 + 0.9 * bound(TERMS, v.0, v.1)) as f32).collect();
        assert!(e.compare("dx", &y, TERMS).is_ok());
        assert!(e.independent("row", 0) < AGGREGATE_FROM && e.independent("column", 3) == 1);
    }

    #[test]
    fn nan_and_noise_instead_of_zero_are_wrong() {
        let e = Exact { m: 1, n: 2, values: vec![(0.0, 0.0), (1.0, 1.0)] };
        assert!(e.compare("y", &[0.0, 1.0], TERMS).is_ok());
        assert!(e.compare("y", &[-0.0, 1.0], TERMS).is_ok());
        assert!(e.compare("y", &[1e-39, 1.0], TERMS).is_err());
        assert!(e.compare("y", &[0.0, f32::NAN], TERMS).is_err());
        assert!(e.compare("y", &[f32::NAN, 1.0], TERMS).is_err());
    }

    #[test]
    fn infinity_is_right_where_the_type_ends() {
        let e = Exact { m: 1, n: 1, values: vec![(-1e6, 1e6)] };
        let half = Terms { out: DType::F16, ..TERMS };
        assert!(e.compare("y", &[f32::NEG_INFINITY], half).is_ok());
        assert!(e.compare("y", &[f32::INFINITY], half).is_err());
        assert!(e.compare("y", &[f32::NEG_INFINITY], TERMS).is_err());
        assert!(e.compare("y", &[65504.0], half).is_err());
    }
}
