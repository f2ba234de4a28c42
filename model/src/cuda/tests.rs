//! Steps that run ahead change nothing but time: the same bits as an engine that waits for every token.
use super::ahead::Stands;
use super::{CudaEngine, CudaModel};
use crate::cpu::KvType;
use crate::executor::{Logits, Shape, Sizes};
use crate::load::{ContextOptions, Loaded, Many};
use crate::places::Part;
use crate::runner::Engine;
use crate::sampling::{Sampler, SamplingParams};
use crate::synthetic::{Recipe, build};
use crate::watch::Watch;
use q4_core::memory::Budget;
use q4_core::{Activations, BuiltinOptions, DType, Device, Dispatch, Policy, Registry, Result, ThreadPool};
use q4_cuda::Nodes;
use std::any::Any;
use std::sync::Arc;
use {
    q4_dequant_matmul as _, q4_fp8_kernel as _, q4_ggml_kernel as _, q4_int4_kernel as _,
    q4_mxfp4_kernel as _, q4_nf4_kernel as _, q4_nvfp4_kernel as _,
};

const VOCAB: usize = 4096;
const CONTEXT: usize = 64;

/// A random model of two layers.
struct Small {
    dispatch: Dispatch,
    loaded: Loaded,
    threads: Arc<ThreadPool>,
}

impl Small {
    fn new() -> Result<Option<Self>> {
        Self::of(DType::BF16)
    }

    /// None, and why, where there is no device.
    fn of(dtype: DType) -> Result<Option<Self>> {
        if let Err(e) = q4_cuda::Gpu::open(0) {
            println!("skipped: no CUDA device ({e})");
            return Ok(None);
        }
        let shape = Shape {
            hidden: 256,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            intermediate: 512,
            vocab: VOCAB,
            layers: 2,
        };
        let recipe = Recipe {
            schema: Recipe::NF4,
            activations: Activations::Native,
            dtype,
            max_rows: 16,
            device: Device::Cuda(0),
        };
        let dispatch = Dispatch::new(
            Registry::builtin(&BuiltinOptions { cuda: Some(0), ..BuiltinOptions::default() })?,
            Policy::default(),
        );
        let threads = Arc::new(ThreadPool::new(2));
        let loaded = build(&shape, &recipe, &dispatch, threads.clone(), &Budget::of_machine())?;
        Ok(Some(Self { dispatch, loaded, threads }))
    }

    fn model(&self) -> Arc<CudaModel> {
        let model: Arc<dyn Any + Send + Sync> = self.loaded.model.clone();
        model.downcast().expect("built for a device")
    }

    fn engine(&self) -> Result<CudaEngine> {
        let sizes = Sizes {
            rows: 16,
            logit_rows: 1,
            sequences: 1,
            context: CONTEXT,
            workspace: self.loaded.workspace(1),
        };
        CudaEngine::new(self.model(), self.threads.clone(), sizes, &self.loaded.rotation, u64::MAX)
    }

    /// Calls of products that were counted so far.
    fn calls(&self) -> u64 {
        self.dispatch.witness().executed().iter().map(|e| e.calls).sum()
    }
}

/// What a caller may do.
#[derive(Clone, Copy, Debug)]
enum Do {
    Prompt(&'static [u32]),
    /// Chooses a token and takes it, so many times.
    Take(usize),
    /// Chooses a token and takes another one.
    Refuse,
    /// Chooses two tokens and takes the second.
    Twice,
    /// Forgets the last positions.
    Back(usize),
}
use Do::{Back, Prompt, Refuse, Take, Twice};

const STORY: [Do; 11] = [
    Prompt(&[3, 1, 4, 1, 5]),
    Take(9),
    Refuse,
    Take(5),
    Back(3),
    Prompt(&[9]),
    Take(4),
    Twice,
    Take(2),
    Prompt(&[2, 6, 5, 3, 5, 8, 9, 7, 9]),
    Take(CONTEXT), // until the context is full
];

/// Runs the story and returns every token that was chosen with the bits of its logits.
fn tell(engine: &mut CudaEngine, params: &SamplingParams, ahead: bool) -> Result<Vec<(u32, Vec<u32>)>> {
    let mut sampler = Sampler::new(params.clone(), VOCAB)?;
    let (mut told, mut tokens) = (Vec::new(), Vec::new());
    let bits = |logits: &mut [f32]| logits.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for part in STORY {
        let (count, choices) = match part {
            Prompt(ids) => {
                engine.step(ids, Logits::Last)?;
                tokens.extend_from_slice(ids);
                continue;
            }
            Back(n) => {
                tokens.truncate(tokens.len() - n);
                engine.truncate(tokens.len());
                continue;
            }
            Take(n) => (n, 1),
            Refuse => (1, 1),
            // A second penalty on the same logits is the caller's business.
            Twice => (1, if params.repetition_penalty == 1.0 { 2 } else { 1 }),
        };
        for _ in 0..count {
            if engine.len() == CONTEXT {
                break;
            }
            for _ in 0..choices {
                let before = bits(engine.logits()?);
                let id = match ahead {
                    true => engine.sample(&mut sampler, &tokens)?,
                    false => sampler.sample(engine.logits()?, &tokens)?,
                };
                assert!(engine.is_finite()?);
                if params.repetition_penalty == 1.0 {
                    assert!(before == bits(engine.logits()?), "logits of another step than the last one");
                }
                told.push((id, before));
            }
            let id = told.last().expect("chosen").0;
            let id = if matches!(part, Refuse) { (id + 1) % VOCAB as u32 } else { id };
            engine.step(&[id], Logits::Last)?;
            tokens.push(id);
        }
    }
    assert_eq!((engine.len(), tokens.len()), (CONTEXT, CONTEXT));
    engine.sample(&mut sampler, &tokens)?;
    assert_ne!(engine.course.stands(), Stands::Ahead, "there is no room ahead");
    engine.truncate(CONTEXT - 1);
    engine.step(&[1], Logits::Last)?;
    Ok(told)
}

#[test]
fn running_ahead_changes_no_bit() -> Result<()> {
    let Some(small) = Small::new()? else { return Ok(()) };
    let greedy = SamplingParams::default();
    let drawn = SamplingParams { temperature: 1.0, top_k: 40, top_p: 0.95, seed: 7, ..greedy.clone() };
    let penalised = SamplingParams { repetition_penalty: 1.3, ..drawn.clone() };
    for params in [greedy, drawn, penalised] {
        let start = small.calls();
        let waits = tell(&mut small.engine()?, &params, false)?;
        let between = small.calls();
        let mut engine = small.engine()?;
        let runs = tell(&mut engine, &params, true)?;
        let end = small.calls();
        assert_eq!(waits.len(), runs.len());
        let other = waits.iter().zip(&runs).position(|(a, b)| a != b);
        assert_eq!(other, None, "the first choice that is another one, {params:?}");
        assert_eq!(between - start, end - between, "only steps that were asked for count");
        for graph in engine.graphs.iter().flatten() {
            let Nodes { kernels, others, overlapping } = graph.nodes()?;
            assert_eq!((others, overlapping), (0, kernels - 1), "kernels that overlap, and nothing else");
        }
        println!("{} choices alike, {params:?}", runs.len());
    }
    Ok(())
}

#[test]
fn a_step_is_ahead_when_its_token_was_chosen() -> Result<()> {
    let Some(small) = Small::new()? else { return Ok(()) };
    let mut engine = small.engine()?;
    engine.step(&[3, 1, 4], Logits::Last)?;
    for step in 0..12 {
        let id = engine.greedy()?;
        // The first step runs every kernel once, the next two record it for either place.
        let ahead = if step < 3 { Stands::Ready } else { Stands::Ahead };
        assert_eq!(engine.course.stands(), ahead, "step {step}");
        engine.step(&[id], Logits::Last)?;
    }
    engine.greedy()?;
    engine.watch(Watch::NonFinite);
    assert_eq!(engine.course.stands(), Stands::Elsewhere, "who watches wants every step to himself");
    Ok(())
}

#[test]
fn a_step_without_finite_logits_is_refused_and_leaves_nothing() -> Result<()> {
    let Some(small) = Small::new()? else { return Ok(()) };
    const BAD: u32 = 5;
    let row = vec![half::bf16::NAN; 256];
    small.model().graph.table.buffer.upload(BAD as usize * 256 * 2, &row)?;
    for params in [SamplingParams::default(), SamplingParams { temperature: 1.0, ..Default::default() }] {
        let mut sampler = Sampler::new(params, VOCAB)?;
        let mut engine = small.engine()?;
        engine.step(&[3, 1, 4], Logits::Last)?;
        for _ in 0..6 {
            let id = engine.greedy()?;
            engine.step(&[id], Logits::Last)?;
        }
        let need = engine.greedy()?;
        engine.step(&[BAD], Logits::Last)?;
        engine.sample(&mut sampler, &[])?;
        assert!(!engine.is_finite()?);
        engine.truncate(engine.len() - 2);
        engine.step(&[need], Logits::Last)?; // in the place of the last good token
        assert!(engine.is_finite()?);
        engine.sample(&mut sampler, &[])?;
        assert!(engine.is_finite()?);
    }
    Ok(())
}

/// Prompts of three sequences come in pieces while others decode; all of them cross pages.
#[test]
fn many_sequences_have_the_logits_that_each_has_alone() -> Result<()> {
    const SEQUENCES: usize = 3;
    for (dtype, bound) in [(DType::BF16, 0.05), (DType::F16, 0.01), (DType::F32, 1e-4)] {
        let Some(small) = Small::of(dtype)? else { return Ok(()) };
        let (context, rows) = (200, 16);
        let many = Many { sequences: SEQUENCES, pages: 12 };
        let options = ContextOptions { context, chunk: rows, all_logits: false, kv: KvType::F32, many: None };
        let mut together = small.loaded.sequences(options, many, &Budget::of_machine())?;
        // Pages lie anywhere.
        for page in 0..12 {
            together.add_page(page % SEQUENCES, (page * 5 % 12) as u32);
        }
        let sizes =
            Sizes { rows, logit_rows: 1, sequences: 1, context, workspace: small.loaded.workspace(1) };
        let mut alone = Vec::new();
        for _ in 0..SEQUENCES {
            let threads = small.threads.clone();
            alone.push(CudaEngine::new(small.model(), threads, sizes, &small.loaded.rotation, u64::MAX)?);
        }
        let mut tokens: Vec<Vec<u32>> = [1u32, 70, 130]
            .iter()
            .map(|len| (0..*len).map(|i| (i * 37 + len) % VOCAB as u32).collect())
            .collect();
        let mut computed = [0; SEQUENCES];
        let drawn = SamplingParams { temperature: 1.0, top_k: 40, seed: 3, ..SamplingParams::default() };
        let mut samplers = Vec::new();
        for i in 0..SEQUENCES {
            let params = if i == 0 { SamplingParams::default() } else { drawn.clone() };
            samplers.push(Sampler::new(params, VOCAB)?);
        }
        let (mut worst, mut steps, mut decoded) = (0f32, 0, 0);
        while tokens.iter().all(|all| all.len() < context) {
            let (mut ids, mut parts, mut picks) = (Vec::new(), Vec::new(), Vec::new());
            for (sequence, all) in tokens.iter().enumerate() {
                let rows = (all.len() - computed[sequence]).min([1, 7, 5][(sequence + steps) % 3]);
                ids.extend_from_slice(&all[computed[sequence]..][..rows]);
                parts.push(Part { sequence, rows });
                picks.push(ids.len() - 1);
            }
            together.step(&ids, &parts, &picks)?;
            steps += 1;
            for (i, Part { sequence, rows }) in parts.into_iter().enumerate() {
                let ids = &tokens[sequence][computed[sequence]..][..rows];
                alone[sequence].step(ids, Logits::Last)?;
                computed[sequence] += rows;
                let need = alone[sequence].logits()?;
                let have = together.logits(i)?.to_vec();
                assert!(have.iter().all(|v| v.is_finite()), "step {steps}");
                let largest = need.iter().fold(0f32, |m, v| m.max(v.abs()));
                let apart = need.iter().zip(&have).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                worst = worst.max(apart / largest);
                if computed[sequence] < tokens[sequence].len() {
                    continue;
                }
                decoded += 1;
                let mut host = samplers[sequence].clone();
                let id = together.sample(i, &mut samplers[sequence], &tokens[sequence])?;
                assert_eq!(id, host.sample(&mut have.clone(), &tokens[sequence])?, "step {steps}");
                tokens[sequence].push(id);
            }
        }
        assert!(decoded > 150, "{decoded} tokens decoded");
        println!("{dtype}: {steps} steps, {decoded} tokens, logits apart by {worst:e} of the largest");
        assert!(worst < bound, "{dtype}: logits apart by {worst:e} of the largest");
    }
    Ok(())
}

/// A step of many that decodes alone runs, is recorded when it comes again, and is replayed then.
#[test]
fn a_recorded_step_of_many_changes_no_bit() -> Result<()> {
    let Some(small) = Small::new()? else { return Ok(()) };
    let many = Many { sequences: 4, pages: 8 };
    let options = ContextOptions { context: 100, chunk: 16, all_logits: false, kv: KvType::F32, many: None };
    let mut together = small.loaded.sequences(options, many, &Budget::of_machine())?;
    (0..8).for_each(|page| together.add_page(page % 4, page as u32));
    let (parts, start) = ([0, 1, 2, 3].map(|sequence| Part { sequence, rows: 1 }), small.calls());
    let (mut before, mut steps) = (Vec::new(), 0);
    for step in 0..70 {
        let ids = [1, 2, 3, 4].map(|i| (step * 31 + i * 7) % VOCAB as u32);
        let mut bits = || -> Result<Vec<u32>> {
            (0..4).for_each(|sequence| together.adopt(sequence, step as usize));
            together.step(&ids, &parts, &[0, 1, 2, 3])?;
            steps += 1;
            let mut bits = Vec::new();
            for i in 0..4 {
                bits.extend(together.logits(i)?.iter().map(|v| v.to_bits()));
            }
            Ok(bits)
        };
        let first = bits()?;
        assert!(first == bits()? && first == bits()?, "step {step}, once more");
        assert!(first != before, "step {step}: logits of the one before");
        before = first;
    }
    assert_eq!((small.calls() - start) % steps, 0, "as many calls in every step");
    Ok(())
}

#[test]
fn who_watches_sees_every_value_and_may_put_another_in_its_place() -> Result<()> {
    let Some(small) = Small::new()? else { return Ok(()) };
    crate::watch::tests::check(&small.loaded)
}
