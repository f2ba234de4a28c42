//! Norms of rows and columns of matrices that belong together.
//!
//! `down (gate * up)` stays the same when a row of `up` doubles and its column of `down` halves; so does `o
//! v`. Decay of weights picks the even split, so after training the norms agree row by column, whatever was
//! learned. Rows of q and k, and of gate and up, meet in products too, and the columns of what reads a norm
//! follow its weights. How well two lists agree is the correlation of their ranks. Random weights agree in
//! nothing; then nothing is said.
use super::super::{Finding, Severity};
use crate::checkpoint::{Checkpoint, Layer, names};
use q4_core::Result;

/// Median over the layers from which on a pair agrees.
const AGREES: f64 = 0.5;
/// Median below which it does not.
const SCATTERED: f64 = 0.25;
/// Powers of two by which the sizes of a pair may differ from those of other layers.
const RATIO: f64 = 0.7;
/// By how much neighbours may agree better than the halves of a head.
const ROTARY: (f64, f64) = (0.2, 0.1);
/// Layers that make a median, and entries that make a correlation.
const LEAST: (usize, usize) = (3, 64);

/// What the weights look like.
pub(super) struct Aligned {
    /// Some pair agrees in most layers.
    pub trained: bool,
    /// No pair does in any.
    pub scattered: bool,
    /// Pairs that do in most layers and not in one.
    pub findings: Vec<Finding>,
    /// In all layers together, rows agree as if neighbours were rotated together. A small model may look so
    /// by chance, and one that predicts is rotated rightly: it means something where the text is lost.
    pub rotary: Option<Finding>,
}

/// One pair of matrices of a layer.
struct Pair {
    names: [&'static str; 2],
    what: &'static str,
    agreement: f64,
    /// log2 of the ratio of their root mean squares, where it is fixed by training.
    ratio: Option<f64>,
}

/// Reads every matrix once.
pub(super) fn look(c: &Checkpoint) -> Result<Aligned> {
    let config = c.config();
    let layers = (0..config.num_hidden_layers).map(|i| pairs(c, i)).collect::<Result<Vec<_>>>()?;
    let mut aligned = Aligned { trained: false, scattered: true, findings: Vec::new(), rotary: None };
    if layers.len() < LEAST.0 || config.num_key_value_heads * config.head_dim < LEAST.1 {
        return Ok(Aligned { scattered: false, ..aligned });
    }
    for p in 0..layers[0].0.len() {
        let of = |l: &(Vec<Pair>, f64)| (l.0[p].agreement, l.0[p].ratio);
        let agreement = median(layers.iter().map(|l| of(l).0));
        aligned.scattered &= agreement < SCATTERED;
        if agreement < AGREES {
            continue;
        }
        aligned.trained = true;
        let ratio = median(layers.iter().map(|l| of(l).1.unwrap_or(0.0)));
        for (i, layer) in layers.iter().enumerate() {
            let pair = &layer.0[p];
            let [a, b] = pair.names;
            let mut add = |code, message| {
                let tensor = format!("model.layers.{i}.{a}");
                aligned.findings.push(Finding { code, severity: Severity::Warning, tensor, message });
            };
            if pair.agreement < agreement / 2.0 {
                add(
                    "misaligned",
                    format!(
                        "{} {b} do not go together ({:.2}, in most layers {agreement:.2}): one of the two is in another order, or another matrix",
                        pair.what, pair.agreement
                    ),
                );
            } else if pair.ratio.is_some_and(|r| (r - ratio).abs() > RATIO) {
                let times = (pair.ratio.unwrap_or(0.0) - ratio).exp2();
                add(
                    "unbalanced",
                    format!(
                        "is {times:.2} times as large beside {b} as in other layers: a scale is not its own"
                    ),
                );
            }
        }
    }
    if aligned.trained {
        rotary(&layers, &mut aligned);
    }
    Ok(aligned)
}

/// Rows that are rotated together are a half of the head apart; in other arrangements they are neighbours.
fn rotary(layers: &[(Vec<Pair>, f64)], aligned: &mut Aligned) {
    let mean = layers.iter().map(|l| l.1).sum::<f64>() / layers.len() as f64;
    let finding = |tensor: String, excess: f64| {
        let message = format!(
            "rows that are neighbours agree better than rows half a head apart, by {excess:.2}: the rotary order is another"
        );
        Finding { code: "rotary-order", severity: Severity::Warning, tensor, message }
    };
    if mean > ROTARY.1 {
        aligned.rotary = Some(finding("self_attn.q_proj".into(), mean));
        return;
    }
    for (i, (_, excess)) in layers.iter().enumerate().filter(|(_, l)| l.1 > ROTARY.0) {
        aligned.findings.push(finding(format!("model.layers.{i}.self_attn.q_proj"), *excess));
    }
}

/// All pairs of layer `i`, and by how much neighbouring rows of q and k agree better than those half a head
/// apart.
fn pairs(c: &Checkpoint, i: usize) -> Result<(Vec<Pair>, f64)> {
    let config = c.config();
    let norms: Vec<Norms> = names::linears(config, i)
        .iter()
        .map(|(name, n, k)| Norms::of(&c.layer(name, *n, *k)?))
        .collect::<Result<_>>()?;
    let [q, k, v, o, gate, up, down] = [0, 1, 2, 3, 4, 5, 6].map(|at: usize| &norms[at]);
    let (groups, dim) = (config.num_attention_heads / config.num_key_value_heads, config.head_dim);
    let post = match config.arch.names.mlp.before {
        Some(name) => c.norm(&config.arch.names.of(i, name), config.hidden_size)?,
        None => vec![1.0; config.hidden_size],
    };
    let post: Vec<f64> = post.iter().map(|w| f64::from(w.abs())).collect();
    let (q_rows, o_columns) = (grouped(&q.rows, groups, dim), grouped(&o.columns, groups, dim));
    let pair = |names, what, a: &[f64], b: &[f64], sized: bool| Pair {
        names,
        what,
        agreement: correlation(a, b),
        ratio: sized.then(|| (size(a) / size(b)).log2()),
    };
    let rotated = [&q.rows, &k.rows].map(|rows| {
        let apart = |x: usize| (x / dim * dim + x % dim / 2 * 2, x % 2);
        let half = |x: usize| (x / dim * dim + x % (dim / 2), x % dim * 2 / dim);
        agreement_of(rows, apart) - agreement_of(rows, half)
    });
    let all = vec![
        pair(["mlp.up_proj", "mlp.down_proj"], "its rows and the columns of", &up.rows, &down.columns, true),
        pair(["mlp.gate_proj", "mlp.up_proj"], "its rows and the rows of", &gate.rows, &up.rows, true),
        pair(
            ["mlp.gate_proj", "mlp.down_proj"],
            "its rows and the columns of",
            &gate.rows,
            &down.columns,
            false,
        ),
        pair(
            ["self_attn.v_proj", "self_attn.o_proj"],
            "its rows and the columns of",
            &v.rows,
            &o_columns,
            true,
        ),
        pair(["self_attn.q_proj", "self_attn.k_proj"], "its rows and the rows of", &q_rows, &k.rows, true),
        pair(["mlp.gate_proj", "post_attention_layernorm"], "its columns and", &gate.columns, &post, false),
        pair(["mlp.up_proj", "post_attention_layernorm"], "its columns and", &up.columns, &post, false),
    ];
    Ok((all, (rotated[0] + rotated[1]) / 2.0))
}

/// Splits `rows` into two lists of partners by `place`, which gives a row the name of its pair and its side.
fn agreement_of(rows: &[f64], place: impl Fn(usize) -> (usize, usize)) -> f64 {
    let mut pairs: Vec<(usize, usize, f64)> =
        rows.iter().enumerate().map(|(x, v)| (place(x).0, place(x).1, *v)).collect();
    pairs.sort_by_key(|p| (p.0, p.1));
    let side = |s: usize| pairs.iter().filter(|p| p.1 == s).map(|p| p.2).collect::<Vec<_>>();
    correlation(&side(0), &side(1))
}

/// Mean over the query heads that share a key head.
fn grouped(values: &[f64], groups: usize, dim: usize) -> Vec<f64> {
    let one = |shared: &[f64]| {
        (0..dim).map(|d| shared.iter().skip(d).step_by(dim).sum::<f64>() / groups as f64).collect::<Vec<_>>()
    };
    values.chunks(groups * dim).flat_map(one).collect()
}

fn size(values: &[f64]) -> f64 {
    (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64).sqrt()
}

/// Correlation of ranks; 0 for lists without any order.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let ranks = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|x, y| values[*x].total_cmp(&values[*y]));
        let mut ranks = vec![0.0; values.len()];
        order.iter().enumerate().for_each(|(rank, at)| ranks[*at] = rank as f64);
        ranks
    };
    let n = a.len().min(b.len()) as f64;
    if n < 2.0 {
        return 0.0;
    }
    let squares: f64 = ranks(a).iter().zip(ranks(b)).map(|(x, y)| (x - y) * (x - y)).sum();
    1.0 - 6.0 * squares / (n * (n * n - 1.0))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Euclidean norms of a matrix.
struct Norms {
    rows: Vec<f64>,
    columns: Vec<f64>,
}

impl Norms {
    fn of(layer: &Layer<'_>) -> Result<Self> {
        let d = &layer.detected;
        let mut norms = Self { rows: Vec::with_capacity(d.n), columns: vec![0.0; d.k] };
        let mut row = vec![0.0f32; d.k];
        let rows = layer.rows()?;
        for r in 0..d.n {
            rows.row(r, &mut row);
            norms.add(&row);
        }
        norms.rows.iter_mut().chain(&mut norms.columns).for_each(|v| *v = v.sqrt());
        Ok(norms)
    }

    fn add(&mut self, row: &[f32]) {
        let mut all = 0.0;
        for (column, v) in self.columns.iter_mut().zip(row) {
            let square = f64::from(*v) * f64::from(*v);
            *column += square;
            all += square;
        }
        self.rows.push(all);
    }
}
