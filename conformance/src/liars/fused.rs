//! Mutants that multiply rightly and do wrong what they do besides.
use super::Mutant;
use super::parts::{FUSING, Parts};
use crate::Level::L2;
use half::bf16;
use q4_core::FuseSet;

const NORM: FuseSet = FuseSet::NORM;
const GATE: FuseSet = FuseSet::GATE;
const ADD: FuseSet = FuseSet::ACCUMULATE;

/// Without some of the parts.
fn less(set: FuseSet, part: FuseSet) -> FuseSet {
    FuseSet(set.0 & !part.0)
}

/// The norm of a row by its mean square.
fn by(x: &[f32], weight: &[f32], square: f64) -> Vec<f32> {
    x.iter().zip(weight).map(|(v, w)| (f64::from(*v) / square.sqrt() * f64::from(*w)) as f32).collect()
}

fn mean_square(x: &[f32]) -> f64 {
    x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64
}

pub(super) const MUTANTS: &[Mutant] = mutants! {
    FUSING;
    L2 "gate-and-up-swapped": "the up rows are the gates" { gate: |gate, up| (FUSING.gate)(up, gate) }
    L2 "gate-is-a-sigmoid": "the gate is not multiplied with its own value" {
        gate: |gate, up| up / (1.0 + (-gate).exp()),
    }
    L2 "gate-is-gelu": "a tanh approximation of GELU instead of SiLU" {
        gate: |g, up| 0.5 * g * (1.0 + (0.797_884_560_8 * (g + 0.044_715 * g.powi(3))).tanh()) * up,
    }
    L2 "gate-is-relu": "negative gates are shut" { gate: |gate, up| gate.max(0.0) * up }
    L2 "gates-interleaved": "the up row of a column is the next one" {
        up_at: |c, columns| (2 * c + 1).min(2 * columns - 1),
    }
    L2 "gate-in-bf16": "what passes a gate is rounded to bf16 before it is" {
        gate: |gate, up| (FUSING.gate)(bf16::from_f64(gate).to_f64(), up),
    }
    L2 "addition-forgotten": "y is overwritten" { fused: |set| less(set, ADD) }
    L2 "addition-forgotten-with-a-gate": "y is overwritten where there is a gate" {
        fused: |set| if set.contains(GATE) { less(set, ADD) } else { set },
    }
    L2 "added-twice": "y counts double" { add: |before, v, _| 2.0 * before + v }
    L2 "added-in-the-first-rows": "rows from the ninth on are overwritten" {
        add: |before, v, row| if row < 8 { before + v } else { v },
    }
    L2 "residual-in-bf16": "what y holds is rounded to bf16" {
        add: |before, v, _| bf16::from_f64(before + v).to_f64(),
    }
    L2 "norm-forgotten": "the residual is multiplied as it is" { fused: |set| less(set, NORM) }
    L2 "norm-of-one-more": "the norm's weight counts from 1" {
        norm: |x, weight, eps| {
            let weight: Vec<f32> = weight.iter().map(|w| w + 1.0).collect();
            (FUSING.norm)(x, &weight, eps)
        },
    }
    L2 "norm-of-half-a-row": "the mean square is that of the first half" {
        norm: |x, weight, _| by(x, weight, mean_square(&x[..x.len() / 2])),
    }
    L2 "norm-without-its-mean": "squares are summed and not divided" {
        norm: |x, weight, _| by(x, weight, mean_square(x) * x.len() as f64),
    }
};
