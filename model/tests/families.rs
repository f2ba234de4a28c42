//! What a description says is what is computed: made-up families beside a forward pass in f64.
use q4_core::memory::Budget;
use q4_core::{BuiltinOptions, Code, DType, Device, Dispatch, OpSet, Policy, Registry, Result, ThreadPool};
use q4_model::arch::qwen3::QWEN3;
use q4_model::arch::{Activation, Arch, Around, Mlp, Names, Pairs, Rotary};
use q4_model::checkpoint::{Bytes, Checkpoint, names};
use q4_model::config::DecoderConfig;
use q4_model::cpu::KvType;
use q4_model::load::{ContextOptions, load};
use q4_model::plan::{ActivationRequest, Plan, PlanOptions};
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::sync::Arc;
use {q4_dequant_matmul as _, q4_reference as _};

const CONFIG: &str = r#"{"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 40,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "float32"}"#;
const IDS: [u32; 7] = [3, 1, 4, 1, 5, 9, 26];
const BOTH: [Around; 2] = [
    Around { before: Some("input_layernorm"), after: Some("post_attention_layernorm") },
    Around { before: Some("pre_feedforward_layernorm"), after: Some("post_feedforward_layernorm") },
];

/// As Qwen2: biases of q, k and v, no norms of heads.
fn biased() -> Arch {
    let names = Names::USUAL;
    Arch { names, biases: &[Names::USUAL.q, Names::USUAL.k, Names::USUAL.v], ..QWEN3 }
}

/// Norms behind each half alone, heads turned by neighbours, GELU, biases of all that is added to the stream.
fn behind() -> Arch {
    let after = |a: Around| Around { before: None, after: a.after };
    Arch {
        names: Names { attention: after(BOTH[0]), mlp: after(BOTH[1]), ..Names::USUAL },
        biases: &[Names::USUAL.o, Names::USUAL.down],
        rotary: Rotary { pairs: Pairs::Neighbours, partial: None },
        mlp: Mlp::Dense(Activation::GeluTanh),
        ..QWEN3
    }
}

/// Norms everywhere, half of a head turned, embeddings scaled, biases of the MLP.
fn around() -> Arch {
    Arch {
        names: Names { attention: BOTH[0], mlp: BOTH[1], ..QWEN3.names },
        biases: &[Names::USUAL.gate, Names::USUAL.up],
        rotary: Rotary { pairs: Pairs::Halves, partial: Some(0.5) },
        scaled_embedding: true,
        ..QWEN3
    }
}

type Weights = BTreeMap<String, Vec<f32>>;

/// Of every module that the description names, with some numbers in it.
fn weights(c: &DecoderConfig) -> Vec<(String, Vec<usize>)> {
    let (n, h) = (&c.arch.names, c.hidden_size);
    let mut all = vec![(format!("{}.weight", n.embedding), vec![c.vocab_size, h])];
    all.push((format!("{}.weight", n.head), vec![c.vocab_size, h]));
    all.push((format!("{}.weight", n.final_norm), vec![h]));
    for i in 0..c.num_hidden_layers {
        for (name, out, k) in names::linears(c, i) {
            all.push((format!("{name}.weight"), vec![out, k]));
            if c.arch.is_biased(&name) {
                all.push((format!("{name}.bias"), vec![out]));
            }
        }
        let norms = names::norms(c, i);
        all.extend(norms.into_iter().map(|(name, len)| (format!("{name}.weight"), vec![len])));
    }
    all
}

fn files(c: &DecoderConfig) -> (Weights, Vec<(String, Bytes)>) {
    let mut seed = 7u64;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut values = Weights::new();
    let mut stored = Vec::new();
    for (name, shape) in weights(c) {
        let len = shape.iter().product();
        let offset = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let w: Vec<f32> = (0..len).map(|_| offset + 0.3 * next()).collect();
        stored.push((name.clone(), shape, w.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()));
        values.insert(name, w);
    }
    let views = stored.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(Dtype::F32, shape.clone(), bytes).expect("sizes agree"))
    });
    let file = safetensors::serialize(views, None).expect("serialises");
    let config = Bytes::from(CONFIG.as_bytes().to_vec());
    (values, vec![("config.json".into(), config), ("model.safetensors".into(), Bytes::from(file))])
}

struct Reference<'a> {
    c: &'a DecoderConfig,
    weights: &'a Weights,
}

impl Reference<'_> {
    fn tensor(&self, name: &str) -> Vec<f64> {
        self.weights[name].iter().map(|v| f64::from(*v)).collect()
    }

    fn linear(&self, module: &str, x: &[f64]) -> Vec<f64> {
        let w = self.tensor(&format!("{module}.weight"));
        let mut y: Vec<f64> =
            w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect();
        if self.c.arch.is_biased(module) {
            y.iter_mut().zip(self.tensor(&format!("{module}.bias"))).for_each(|(y, b)| *y += b);
        }
        y
    }

    fn norm(&self, module: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + f64::from(self.c.rms_norm_eps)).sqrt();
        x.iter().zip(self.tensor(&format!("{module}.weight"))).map(|(v, w)| v * factor * w).collect()
    }

    fn maybe(&self, layer: usize, name: Option<&str>, x: Vec<f64>) -> Vec<f64> {
        name.map_or(x.clone(), |name| self.norm(&self.c.arch.names.of(layer, name), &x))
    }

    fn turned(&self, head: &[f64], position: usize) -> Vec<f64> {
        let (dim, mut out) = (self.c.rotary_dim, head.to_vec());
        for i in 0..dim / 2 {
            let angle = position as f64 * 10000f64.powf(-2.0 * i as f64 / dim as f64);
            let (a, b) = match self.c.arch.rotary.pairs {
                Pairs::Halves => (i, i + dim / 2),
                Pairs::Neighbours => (2 * i, 2 * i + 1),
            };
            out[a] = head[a] * angle.cos() - head[b] * angle.sin();
            out[b] = head[b] * angle.cos() + head[a] * angle.sin();
        }
        out
    }

    /// Heads of a projection, normalised and turned where `norm` says which.
    fn heads(&self, layer: usize, module: &str, x: &[f64], which: Option<usize>, at: usize) -> Vec<Vec<f64>> {
        let n = &self.c.arch.names;
        let all = self.linear(&n.of(layer, module), x);
        let heads = all.chunks_exact(self.c.head_dim).map(<[f64]>::to_vec);
        let Some(which) = which else { return heads.collect() };
        heads.map(|head| self.turned(&self.maybe(layer, n.heads.map(|h| h[which]), head), at)).collect()
    }

    fn logits(&self, ids: &[u32]) -> Vec<f64> {
        let (c, n) = (self.c, &self.c.arch.names);
        let (table, h) = (self.tensor(&format!("{}.weight", n.embedding)), c.hidden_size);
        let scale = if c.arch.scaled_embedding { (h as f64).sqrt() } else { 1.0 };
        let row = |id: &u32| table[*id as usize * h..][..h].iter().map(|v| v * scale).collect();
        let mut stream: Vec<Vec<f64>> = ids.iter().map(row).collect();
        for l in 0..c.num_hidden_layers {
            let x: Vec<_> = stream.iter().map(|x| self.maybe(l, n.attention.before, x.clone())).collect();
            let of = |module, which| -> Vec<_> {
                x.iter().enumerate().map(|(at, x)| self.heads(l, module, x, which, at)).collect()
            };
            let (q, k, v) = (of(n.q, Some(0)), of(n.k, Some(1)), of(n.v, None));
            for at in 0..ids.len() {
                let mut context = Vec::new();
                for (head, q) in q[at].iter().enumerate() {
                    let kv = head / (c.num_attention_heads / c.num_key_value_heads);
                    let dot = |p: usize| -> f64 { q.iter().zip(&k[p][kv]).map(|(a, b)| a * b).sum() };
                    let e: Vec<f64> = (0..=at).map(|p| (dot(p) / (c.head_dim as f64).sqrt()).exp()).collect();
                    let sum: f64 = e.iter().sum();
                    let mixed = |d| e.iter().enumerate().map(|(p, e)| e / sum * v[p][kv][d]).sum::<f64>();
                    context.extend((0..c.head_dim).map(mixed));
                }
                let y = self.maybe(l, n.attention.after, self.linear(&n.of(l, n.o), &context));
                stream[at].iter_mut().zip(y).for_each(|(x, y)| *x += y);
            }
            for x in &mut stream {
                let y = self.maybe(l, n.mlp.before, x.clone());
                let (gate, up) = (self.linear(&n.of(l, n.gate), &y), self.linear(&n.of(l, n.up), &y));
                let activated = |g: f64| match c.arch.mlp.activation() {
                    Activation::Silu => g / (1.0 + (-g).exp()),
                    Activation::GeluTanh => {
                        0.5 * g * (1.0 + ((2.0 / PI).sqrt() * (g + 0.044715 * g * g * g)).tanh())
                    }
                };
                let gated: Vec<f64> = gate.iter().zip(up).map(|(g, u)| activated(*g) * u).collect();
                let y = self.maybe(l, n.mlp.after, self.linear(&n.of(l, n.down), &gated));
                x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
            }
        }
        stream.iter().flat_map(|x| self.linear(n.head, &self.norm(n.final_norm, x))).collect()
    }
}

#[test]
fn described_families_match_a_reference_in_f64() -> Result<()> {
    for (what, arch) in
        [("qwen3", Arch { ..QWEN3 }), ("biased", biased()), ("behind", behind()), ("around", around())]
    {
        let arch: &'static Arch = Box::leak(Box::new(arch));
        let mut config = DecoderConfig::parse(CONFIG.as_bytes())?;
        let edit = |c: &mut DecoderConfig| {
            c.arch = arch;
            c.rotary_dim = (arch.rotary.partial.unwrap_or(1.0) * c.head_dim as f64) as usize;
        };
        edit(&mut config);
        let (weights, files) = files(&config);
        let checkpoint = Checkpoint::from_files(what, files)?.changed(edit, None);
        checkpoint.bind_all()?;
        let need = Reference { c: &config, weights: &weights }.logits(&IDS);
        let largest = need.iter().fold(0f64, |m, v| m.max(v.abs()));
        let dispatch = Dispatch::new(Registry::builtin(&BuiltinOptions::default())?, Policy::default());
        let options = PlanOptions {
            activations: ActivationRequest::Native,
            dtype: DType::F32,
            device: Device::Cpu,
            quantize: None,
            max_rows: 16,
            ops: OpSet::FORWARD,
        };
        let plan = Plan::new(&checkpoint, &dispatch, &options)?;
        let (threads, budget) = (Arc::new(ThreadPool::new(2)), Budget::of_machine());
        let loaded = load(&checkpoint, &plan, &dispatch, &options, threads, &budget, &mut |_, _| {})?;
        // At once, and the last tokens one by one.
        for at_once in [IDS.len(), 4] {
            let cx = ContextOptions { context: 32, chunk: 16, all_logits: true, kv: KvType::F32, many: None };
            let (mut runner, mut have) = (loaded.runner(cx, &budget)?, Vec::new());
            runner.accept_all(&IDS[..at_once], &mut |rows| have.extend_from_slice(rows))?;
            for id in &IDS[at_once..] {
                runner.decode(*id)?;
                have.extend_from_slice(runner.logits()?);
            }
            assert_eq!(have.len(), need.len());
            let worst = have.iter().zip(&need).fold(0f64, |m, (a, b)| m.max((f64::from(*a) - b).abs()));
            println!("{what}: {worst:e} of {largest}");
            assert!(worst < 1e-5 * largest, "{what}, {at_once} at once: {worst:e} of {largest}");
        }
    }
    Ok(())
}

#[test]
fn what_one_kind_of_executor_lacks_is_named() {
    assert!(QWEN3.plain("CUDA").is_ok());
    let e = behind().plain("CUDA").expect_err("not plain");
    assert_eq!(e.code(), Code::Unsupported);
    for word in ["norms elsewhere", "heads without norms", "biases", "by neighbours", "without SiLU"] {
        assert!(e.to_string().contains(word), "{word} in {e}");
    }
}
