//! What no matrix tells alone: matrices against each other, and the scales of inputs against what can come
//! in.
use super::{Severity, Verifier};
use crate::checkpoint::Layer;
use q4_core::{GlobalScale, detect::Layout};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Root mean square above which no weights of a model were seen.
const LARGE: f64 = 1.0;
/// Factor from the median of the same kind of matrix, where there are enough to have one.
const AMONG_KIND: f64 = 6.0;
/// The same among all matrices.
const AMONG_ALL: f64 = 24.0;
/// Matrices of a kind that make a median.
const KIND: usize = 4;
/// The largest value of an input is its stored scale times this: 6 of the codes times 448 of the block
/// scales.
const INPUT: f64 = 2688.0;

/// A matrix that was looked at.
pub(super) struct Seen {
    name: String,
    rms: f64,
    hash: [u8; 32],
}

impl Seen {
    pub(super) fn new(name: &str, rms: f64, bytes: &[u8]) -> Self {
        Self { name: name.to_owned(), rms, hash: Sha256::digest(bytes).into() }
    }

    /// `mlp.up_proj` of a layer; nothing for what is there once.
    fn kind(&self) -> Option<&str> {
        self.name.strip_prefix("model.layers.")?.split_once('.').map(|(_, kind)| kind)
    }
}

/// Bounds on the largest absolute value of a layer's input.
#[derive(Clone, Copy)]
pub(super) struct Input {
    least: f64,
    most: f64,
}

impl Input {
    /// Behind a norm of these weights: its rows have a mean square of 1 before them, so no element is above
    /// the root of the width times the largest weight. Behind anything else: what was seen of models,
    /// generously.
    pub(super) fn behind(norm: Option<&[f32]>) -> Self {
        let Some(weight) = norm else { return Self { least: 1e-5, most: 1e6 } };
        let largest = weight.iter().fold(0.0f64, |most, w| most.max(f64::from(w.abs())));
        let squares: f64 = weight.iter().map(|w| f64::from(*w) * f64::from(*w)).sum();
        let width = weight.len() as f64;
        Self { least: 0.02 * (squares / width).sqrt(), most: 1.1 * width.sqrt() * largest }
    }
}

impl Verifier<'_> {
    pub(super) fn together(&mut self) {
        self.repeated();
        self.sizes();
    }

    fn repeated(&mut self) {
        let mut first: BTreeMap<[u8; 32], &str> = BTreeMap::new();
        let mut pairs = Vec::new();
        for seen in self.seen.iter().filter(|s| s.rms > 0.0 && s.kind().is_some()) {
            if let Some(other) = first.insert(seen.hash, &seen.name) {
                pairs.push((seen.name.clone(), other.to_owned()));
            }
        }
        for (name, other) in pairs {
            let message = format!("has the very weights of {other}");
            self.add("repeated", Severity::Warning, &name, message);
        }
    }

    fn sizes(&mut self) {
        let mut kinds: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        let mut all = Vec::new();
        for seen in self.seen.iter().filter(|s| s.rms > 0.0) {
            if let Some(kind) = seen.kind() {
                kinds.entry(kind).or_default().push(seen.rms);
                all.push(seen.rms);
            }
        }
        let all = median(all);
        let medians: BTreeMap<_, _> = kinds.into_iter().map(|(k, v)| (k, (v.len(), median(v)))).collect();
        let mut found = Vec::new();
        for seen in self.seen.iter().filter(|s| s.rms > 0.0) {
            let (among, factor) = match seen.kind().and_then(|k| medians.get(k)) {
                Some((count, median)) if *count >= KIND => (*median, AMONG_KIND),
                Some(_) => (all, AMONG_ALL),
                None => (seen.rms, 1.0),
            };
            let ratio = seen.rms / among;
            let text = if ratio > factor || ratio < 1.0 / factor {
                format!("the root mean square is {:.3e}, that of its like {among:.3e}", seen.rms)
            } else if seen.rms > LARGE && seen.name != self.c.config().arch.names.embedding {
                format!("the root mean square is {:.3e}; weights of models are below {LARGE}", seen.rms)
            } else {
                continue;
            };
            found.push((seen.name.clone(), text));
        }
        for (name, text) in found {
            self.add("weights-size", Severity::Warning, &name, text);
        }
    }

    /// The stored scale of a layer's inputs against what its input can be.
    pub(super) fn inputs(&mut self, layer: &Layer<'_>, input: Input) {
        // Targets that cannot be read are an error of the layer, told before.
        let declared = self.c.declaration().inputs(&layer.name).unwrap_or(None);
        let tools = matches!(layer.detected.layout, Layout::ModelOpt | Layout::CompressedTensors);
        let Some(scale) = layer.input_scale() else {
            if layer.lacks_input_scale() {
                let message =
                    "config.json declares NVFP4 inputs but there is no input_scale: inputs stay as they are";
                self.add("input-scale-missing", Severity::Warning, &layer.name, message.into());
            }
            return;
        };
        if tools && declared == Some(false) {
            let message =
                "a scale of inputs is stored, and config.json declares inputs that are not quantised";
            self.add("input-scale-unused", Severity::Warning, &layer.name, message.into());
        }
        let amax = scale.multiplier() * INPUT;
        if amax < input.least || amax > input.most {
            let name = layer.detected.keys.input_global.clone().unwrap_or_else(|| layer.name.clone());
            let message = format!(
                "{} says that inputs reach {amax:.3e}, and they reach {:.3e} to {:.3e}{}",
                scale.value(),
                input.least,
                input.most,
                reciprocal(scale, input)
            );
            self.add("input-scale", Severity::Warning, &name, message);
        }
    }
}

fn reciprocal(scale: GlobalScale, input: Input) -> &'static str {
    let other = INPUT / scale.multiplier();
    if (input.least..=input.most).contains(&other) { "; its reciprocal would fit" } else { "" }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(1.0)
}
