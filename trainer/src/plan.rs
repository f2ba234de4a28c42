//! Bytes a run will need, phase by phase, before anything is allocated.
//!
//! ```text
//! P = trained elements; m = master, s = state, c = compute bytes of an element; T = rows * seq;
//! h, f, q, kv = widths
//! masters      m P                        states       StateLayout::bytes of every tensor
//! base         adapters only. merged: 9/16 a linear weight, c an embedding; decoded: c every weight;
//!              packed: what the backends say they will keep, and `dense` 2 the rest
//! scratch      of the largest product of a packed base
//! values       c * (all weights, or while blocks run those of the largest) + c * (embeddings and head)
//! inputs       4 T h (layers + 1)         only when blocks are recomputed
//! block        c T (6 h + 6 q + 8 kv + 5 f)     activations autograd keeps of one block;
//!                                         times layers when not recomputed
//! logits       12 chunk vocab + 12 T h    log-softmax and two gradients; hidden states, their gradient,
//!                                         those of a chunk
//! gradients    g * (all blocks, or the largest) + 4 * (embeddings and head); g = c, 4 when accumulating
//!              of N ranks each keeps its share: states and sums of gradients divided by N, in whole tiles
//! exchange     (8 + master) * (the largest of blocks and embeddings, + own * (N - 2)): gradients that ranks
//!              send and receive, of two at a time, and masters of one
//! ```
//! A phase holds what its name says and everything that lives across it; the peak is the largest phase.
use crate::config::{Config, Weights};
use crate::freeze::Still;
use crate::optim::{Share, StateLayout, TILE};
use q4_core::Result;
use q4_core::memory::{Budget, human};
use q4_model::config::DecoderConfig;
use serde::Serialize;
use std::fmt;

/// A trained matrix or vector, as the plan sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tensor {
    /// Extents.
    pub shape: Vec<usize>,
    /// Its block, or none for embeddings, head and last norm.
    pub block: Option<usize>,
    /// Computed with in 4 bits.
    pub linear: bool,
    /// Modules it is made of; none of an adapter.
    #[serde(skip)]
    pub modules: Vec<String>,
    /// It stays as it is.
    #[serde(skip)]
    pub still: bool,
}

/// What the plan knows of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shapes {
    /// Layers.
    pub layers: usize,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Width between gate and down.
    pub inter: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of all queries.
    pub q: usize,
    /// Width of all keys.
    pub kv: usize,
    /// Tokens known.
    pub vocab: usize,
    /// Every weight.
    pub tensors: Vec<Tensor>,
}

/// The weights that adapters stand beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// There are none, all move; or they are merged with their adapters in every step.
    Merged,
    /// Their values, dense.
    Decoded,
    /// As they are stored.
    Packed {
        /// Bytes kept.
        resident: u64,
        /// Bytes of scratch of one product.
        workspace: u64,
        /// The head is one of them.
        head: bool,
    },
}

/// Where it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Bytes of an element in forward and backward: 2 for bf16, 4 for f32.
    pub compute: usize,
    /// Bytes the device needs before the first tensor: context and library workspaces.
    pub context: u64,
}

/// One part of a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// What it is.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
}

/// One phase of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Phase {
    /// `load`, `forward`, `loss`, `backward`, `optimizer`.
    pub name: &'static str,
    /// What lives in it.
    pub parts: Vec<Part>,
}

/// All phases.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// In order.
    pub phases: Vec<Phase>,
}

impl Shapes {
    /// The shapes of a configuration; q/k/v and gate/up are one matrix each.
    pub fn of(c: &DecoderConfig) -> Self {
        let (hidden, inter) = (c.hidden_size, c.intermediate_size);
        let (q, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
        let names = &c.arch.names;
        let one = |shape: Vec<usize>, name: &str| Tensor {
            shape,
            block: None,
            linear: false,
            modules: vec![name.to_owned()],
            still: false,
        };
        let mut tensors = vec![one(vec![c.vocab_size, hidden], names.embedding)];
        for block in 0..c.num_hidden_layers {
            let of = |list: &[&str]| list.iter().map(|name| names.of(block, name)).collect::<Vec<_>>();
            for (shape, modules) in [
                (vec![q + 2 * kv, hidden], of(&[names.q, names.k, names.v])),
                (vec![hidden, q], of(&[names.o])),
                (vec![2 * inter, hidden], of(&[names.gate, names.up])),
                (vec![hidden, inter], of(&[names.down])),
            ] {
                tensors.push(Tensor { shape, block: Some(block), linear: true, modules, still: false });
            }
            let norms = [names.attention.before, names.mlp.before].map(Option::unwrap_or_default);
            let heads = names.heads.unwrap_or_default();
            for (width, name) in
                [(hidden, norms[0]), (hidden, norms[1]), (c.head_dim, heads[0]), (c.head_dim, heads[1])]
            {
                tensors.push(Tensor { block: Some(block), ..one(vec![width], &names.of(block, name)) });
            }
        }
        tensors.push(one(vec![hidden], names.final_norm));
        if !c.tie_word_embeddings {
            tensors.push(one(vec![c.vocab_size, hidden], names.head));
        }
        let (layers, heads, vocab) = (c.num_hidden_layers, c.num_attention_heads, c.vocab_size);
        Self { layers, hidden, inter, heads, q, kv, vocab, tensors }
    }

    /// Marks what stays.
    ///
    /// # Errors
    /// As [`Still::new`].
    pub fn freeze(mut self, patterns: &[String]) -> Result<(Self, Still)> {
        let groups: Vec<_> = self.tensors.iter().map(|t| t.modules.clone()).collect();
        let still = Still::new(patterns, &groups)?;
        for t in &mut self.tensors {
            t.still = still.holds(&t.modules.iter().map(String::as_str).collect::<Vec<_>>());
        }
        Ok((self, still))
    }

    /// Modules that move: all that do not stay, or those beside which adapters stand.
    pub fn moving(&self, config: &Config) -> Vec<String> {
        let targeted = |module: &String, targets: &[String]| {
            targets.is_empty() || targets.iter().any(|t| module.rsplit('.').next() == Some(t))
        };
        let tensors = self.tensors.iter().filter(|t| match &config.lora {
            Some(_) => t.linear,
            None => !t.still,
        });
        let modules = tensors.flat_map(|t| &t.modules);
        match &config.lora {
            Some(lora) => modules.filter(|m| targeted(m, &lora.targets)).cloned().collect(),
            None => modules.cloned().collect(),
        }
    }

    /// Elements for which `which` holds.
    pub fn elements(&self, which: impl Fn(&Tensor) -> bool) -> u64 {
        self.tensors.iter().filter(|t| which(t)).map(Tensor::len).sum()
    }

    /// What adapters of a rank add: `[rank, in]` and `[out, rank]` beside every linear weight.
    fn adapters(&self, rank: usize) -> Vec<Tensor> {
        let linear = self.tensors.iter().filter(|t| t.linear);
        linear
            .flat_map(|t| {
                [vec![rank, t.shape[1]], vec![t.shape[0], rank]].map(|shape| Tensor {
                    shape,
                    linear: false,
                    block: t.block,
                    modules: Vec::new(),
                    still: false,
                })
            })
            .collect()
    }
}

impl Tensor {
    fn len(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).product()
    }
}

/// Predicts every phase of a step.
pub fn predict(shapes: &Shapes, config: &Config, machine: &Machine, base: Base, share: Share) -> Plan {
    let c = machine.compute as u64;
    let (train, data) = (&config.train, &config.data);
    let trained = match &config.lora {
        None => shapes.tensors.iter().filter(|t| !t.still).cloned().collect(),
        // At most three modules have matrices of their own beside one another.
        Some(lora) => shapes.adapters(if lora.targets.is_empty() { lora.rank } else { 3 * lora.rank }),
    };
    let sum = |tensors: &[Tensor], which: &dyn Fn(&Tensor) -> bool| -> u64 {
        tensors.iter().filter(|t| which(t)).map(Tensor::len).sum()
    };
    let in_block = |t: &Tensor| t.block == Some(0);
    let outside = |t: &Tensor| t.block.is_none();
    // Vectors and small matrices stay in f32, masters as well as states.
    let small = |t: &Tensor| t.shape.len() < 2 || t.len() < TILE as u64;
    let held = shapes.tensors.iter().filter(|t| t.still && config.lora.is_none());
    let masters: u64 = trained
        .iter()
        .chain(held)
        .map(|t| t.len() * if small(t) { 4 } else { config.optimizer.master.size() as u64 })
        .sum();
    let state = |t: &Tensor| {
        let whole = StateLayout::choose(config.optimizer.state, &t.shape);
        whole.part(&share.range(whole.len())).bytes() as u64
    };
    let states: u64 = trained.iter().map(state).sum();
    let (linear, other) = (shapes.elements(|t| t.linear), shapes.elements(|t| !t.linear));
    let (frozen, dense, scratch) = match (base, &config.lora) {
        (_, None) => (0, 0, 0),
        (Base::Merged, _) => (linear * 9 / 16 + c * other, 0, 0),
        (Base::Decoded, _) => (c * (linear + other), 0, 0),
        (Base::Packed { resident, workspace, head }, _) => {
            let head = if head { (shapes.vocab * shapes.hidden) as u64 } else { 0 };
            (resident, 2 * (other - head), workspace)
        }
    };
    let quantised = config.quant.weights == Weights::Nvfp4 || config.lora.is_some();
    let block_values = c * sum(&shapes.tensors, &in_block);
    let all_values = c * sum(&shapes.tensors, &|t| t.block.is_some());
    // A dense f32 master is itself what the forward pass reads.
    let copies = base == Base::Merged && (quantised || config.optimizer.master.size() != machine.compute);
    // While blocks run, and while none does.
    let [values, idle_values] = [block_values, 0].map(|one| {
        let of_blocks = match (copies, train.keep_values) {
            (false, _) => 0,
            (true, true) => all_values,
            (true, false) => one,
        };
        of_blocks + if config.lora.is_some() { 0 } else { c * sum(&shapes.tensors, &outside) }
    });
    let (rows, seq) = (data.rows as u64, data.seq as u64);
    let tokens = rows * seq;
    let [h, f, q, kv] = [shapes.hidden, shapes.inter, shapes.q, shapes.kv].map(|n| n as u64);
    let layers = shapes.layers as u64;
    // Of each adapter the narrow product, before and behind its factor.
    let narrow = match (&config.lora, base) {
        (Some(lora), Base::Decoded | Base::Packed { .. }) => 2 * 4 * lora.rank as u64,
        _ => 0,
    };
    let one_block = c * tokens * (6 * h + 6 * q + 8 * kv + 5 * f + narrow);
    let (inputs, activations) =
        if train.recompute { (4 * tokens * h * (layers + 1), one_block) } else { (0, one_block * layers) };
    let chunk = tokens.min(train.chunk as u64);
    // In the backward pass of a chunk: log-softmax, its gradient and that of the logits, all f32; and hidden
    // states in, out and of the chunk.
    let logits = 12 * chunk * shapes.vocab as u64 + 12 * tokens * h;
    let g = if train.accumulate > 1 { 4 } else { c };
    // Chunks are summed in f32.
    let table = 4 * sum(&trained, &outside);
    let all_gradients = table
        + g * if train.update_in_backward {
            sum(&trained, &in_block)
        } else {
            sum(&trained, &|t| t.block.is_some())
        };
    // Accumulated gradients live from the first backward pass to the update.
    let (gradients, exchange, carried) = match share.of {
        1 => (all_gradients, 0, if train.accumulate > 1 { all_gradients } else { 0 }),
        ranks => {
            let own = |t: &Tensor| share.range(t.len() as usize).len() as u64;
            let of = |which: &dyn Fn(&Tensor) -> bool| -> [u64; 2] {
                let tensors = || trained.iter().filter(|t| which(t));
                [tensors().map(Tensor::len).sum(), tensors().map(own).sum()]
            };
            // Embeddings and head travel one after the other.
            let alone = trained.iter().filter(|t| outside(t)).map(|t| [t.len(), own(t)]).max();
            let largest = of(&in_block).max(alone.unwrap_or_default());
            let kept = 4 * if train.update_in_backward { largest[1] } else { of(&|_| true)[1] };
            // Sent and received: gradients of the block that travels and of the next, masters of another.
            let other = largest[0] + (ranks as u64 - 2) * largest[1];
            let exchange = (2 * 4 + config.optimizer.master.size() as u64) * other;
            (kept + 4 * largest[0], exchange, if train.accumulate > ranks { kept } else { 0 })
        }
    };
    let standing = [
        ("context", machine.context),
        ("base", frozen),
        ("dense", dense),
        ("masters", masters),
        ("states", states),
    ];
    let phase = |name, more: &[(&'static str, u64)]| Phase {
        name,
        parts: standing
            .iter()
            .chain(more)
            .filter(|(_, bytes)| *bytes > 0)
            .map(|&(name, bytes)| Part { name, bytes })
            .collect(),
    };
    let kept = |block: u64| if train.recompute { block } else { activations };
    Plan {
        phases: vec![
            phase("load", &[]),
            phase(
                "forward",
                &[
                    ("values", values),
                    ("inputs", inputs),
                    ("activations", activations),
                    ("scratch", scratch),
                    ("gradients", carried),
                ],
            ),
            phase(
                "loss",
                &[
                    ("values", idle_values),
                    ("inputs", inputs),
                    ("activations", kept(0)),
                    ("logits", logits),
                    ("gradients", carried.max(table)),
                ],
            ),
            phase(
                "backward",
                &[
                    ("values", values),
                    ("inputs", inputs),
                    ("activations", kept(one_block)),
                    ("scratch", scratch),
                    ("gradients", gradients),
                    ("exchange", exchange),
                ],
            ),
            phase(
                "optimizer",
                &[
                    ("values", if train.keep_values { values } else { 0 }),
                    ("gradients", gradients),
                    ("exchange", exchange / 2),
                ],
            ),
        ],
    }
}

impl Phase {
    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes).sum()
    }
}

impl Plan {
    /// Bytes of a part that lives as long as the model does.
    pub fn part(&self, name: &str) -> u64 {
        let load = self.phases.first().into_iter().flat_map(|p| &p.parts);
        load.filter(|p| p.name == name).map(|p| p.bytes).sum()
    }

    /// The largest phase.
    pub fn peak(&self) -> Option<&Phase> {
        self.phases.iter().max_by_key(|p| p.bytes())
    }

    /// Refuses what does not fit, with the phase that does not and what it consists of.
    pub fn check(&self, budget: &Budget) -> Result<()> {
        let Some(peak) = self.peak() else { return Ok(()) };
        let parts: Vec<_> = peak.parts.iter().map(|p| format!("{} {}", p.name, human(p.bytes))).collect();
        budget.reserve(peak.bytes(), &format!("training ({}: {})", peak.name, parts.join(", "))).map_err(|e| {
            e.fix("raise --memory-limit, lower data.rows or data.seq, or take a preset: full-128g, full-24g, lora-8g")
        })
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peak = self.peak().map_or(0, Phase::bytes);
        for phase in &self.phases {
            let parts: Vec<_> =
                phase.parts.iter().map(|p| format!("{} {}", p.name, human(p.bytes))).collect();
            let mark = if phase.bytes() == peak { "  <- peak" } else { "" };
            writeln!(f, "{:<10} {:>11}  {}{mark}", phase.name, human(phase.bytes()), parts.join(", "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;

    const GPU: Machine = Machine { compute: 2, context: 0 };

    fn qwen3_4b() -> Shapes {
        let json = r#"{"model_type": "qwen3", "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
            "tie_word_embeddings": true}"#;
        Shapes::of(&DecoderConfig::parse(json.as_bytes()).expect("configuration"))
    }

    fn plan(preset: Preset, change: impl Fn(&mut Config)) -> Plan {
        let mut config = Config::preset(preset);
        (config.data.rows, config.data.seq, config.train.chunk) = (1, 2048, 256);
        change(&mut config);
        predict(&qwen3_4b(), &config, &GPU, Base::Merged, Share::WHOLE)
    }

    fn part(plan: &Plan, phase: &str, part: &str) -> f64 {
        let phase = plan.phases.iter().find(|p| p.name == phase).expect("phase");
        phase.parts.iter().filter(|p| p.name == part).map(|p| p.bytes as f64 / 1e9).sum()
    }

    fn peak(plan: &Plan) -> f64 {
        plan.peak().expect("phases").bytes() as f64 / 1e9
    }

    #[test]
    fn the_4b_shape_has_the_known_number_of_weights() {
        let s = qwen3_4b();
        assert_eq!(s.elements(|t| t.linear), 3_633_315_840);
        assert_eq!(s.elements(|_| true), 4_022_468_096);
    }

    #[test]
    fn presets_keep_what_their_names_promise() {
        let full = plan(Preset::Full128g, |_| {});
        assert!((part(&full, "load", "masters") - 16.09).abs() < 0.01);
        assert!((part(&full, "load", "states") - 8.17).abs() < 0.01);
        assert!(peak(&full) < 40.0, "{full}");
        let small = plan(Preset::Full24g, |_| {});
        assert!((part(&small, "load", "masters") - 8.05).abs() < 0.01);
        assert!((part(&small, "load", "states") - 4.53).abs() < 0.01);
        assert!(peak(&small) < 17.0, "{small}");
        let lora = plan(Preset::Lora8g, |_| {});
        assert!((part(&lora, "load", "base") - 2.82).abs() < 0.01);
        assert!(peak(&lora) < 6.0, "{lora}");
    }

    #[test]
    fn ranks_have_the_moments_of_one_between_them() {
        let config = Config::preset(Preset::Full128g);
        let of = |rank, of| predict(&qwen3_4b(), &config, &GPU, Base::Merged, Share { rank, of });
        let whole = of(0, 1);
        for ranks in [2, 4, 7] {
            let plans: Vec<_> = (0..ranks).map(|rank| of(rank, ranks)).collect();
            let states: u64 = plans.iter().map(|p| p.part("states")).sum();
            let all = whole.part("states");
            assert!(states >= all && states < all + all / 1000, "{ranks} ranks: {states} of {all}");
            for p in &plans {
                assert!(p.part("states") * (ranks as u64) < all + all / 50, "{ranks} ranks: {p}");
                assert_eq!(p.part("masters"), whole.part("masters"));
                assert!(part(p, "backward", "exchange") > 0.0, "{ranks} ranks: {p}");
                // Two still pay more for the exchange, and for sums in f32, than they save.
                assert!(ranks == 2 || peak(p) < peak(&whole), "{ranks} ranks: {p}");
            }
        }
        assert_eq!(part(&whole, "backward", "exchange"), 0.0);
    }

    #[test]
    fn a_packed_base_counts_what_its_backends_say_and_no_values() {
        let mut config = Config::preset(Preset::Lora8g);
        config.train.keep_values = true;
        let [packed, decoded, merged] = [
            Base::Packed { resident: 7 << 30, workspace: 1 << 20, head: false },
            Base::Decoded,
            Base::Merged,
        ]
        .map(|base| predict(&qwen3_4b(), &config, &GPU, base, Share::WHOLE));
        assert_eq!(part(&packed, "load", "base"), (7u64 << 30) as f64 / 1e9);
        assert!((part(&decoded, "load", "base") - 8.04).abs() < 0.01);
        assert_eq!(part(&packed, "backward", "values") + part(&decoded, "forward", "values"), 0.0);
        assert!(part(&merged, "forward", "values") > 7.0 && part(&packed, "forward", "scratch") > 0.0);
    }

    #[test]
    fn every_switch_costs_what_it_should() {
        let base = plan(Preset::Full24g, |_| {});
        assert!(peak(&plan(Preset::Full24g, |c| c.train.recompute = false)) > peak(&base) + 5.0);
        assert!(peak(&plan(Preset::Full24g, |c| c.train.update_in_backward = false)) > peak(&base) + 5.0);
        assert!(peak(&plan(Preset::Full24g, |c| c.train.keep_values = true)) > peak(&base) + 5.0);
        let big = plan(Preset::Full24g, |c| c.train.chunk = 2048);
        assert!(part(&big, "loss", "logits") > 7.0 * part(&base, "loss", "logits"));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_plan() {
        let p = plan(Preset::Full24g, |_| {});
        p.check(&Budget::new(24 << 30)).expect("fits");
        let e = p.check(&Budget::new(8 << 30)).expect_err("too small").to_string();
        assert!(e.contains("masters") && e.contains("lora-8g"), "{e}");
        assert!(p.to_string().contains("<- peak"));
    }
}
