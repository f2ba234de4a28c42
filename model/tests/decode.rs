//! A decode step allocates nothing: counted, on every kernel and activation format.
mod handmade;
mod support;

use q4_core::{ComputePath, Result};
use q4_heap::{COUNTED, Heap};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::plan::ActivationRequest;
use q4_model::sampling::{Sampler, SamplingParams};
use support::{Setup, golden};

#[global_allocator]
static HEAP: Heap = COUNTED;

/// A model that is made here.
const ACT_ORDER: &str = "act-order";

fn main() -> Result<()> {
    use ActivationRequest::{Auto, Int8, Native, Nvfp4};
    let cases = [
        ("qwen3_tiny_a/nvfp4_modelopt", Native),
        ("qwen3_tiny_a/nvfp4_modelopt", Int8),
        ("qwen3_tiny_a/nvfp4_ct", Auto),
        ("qwen3_tiny_a/nvfp4_torchao_gs", Nvfp4),
        ("qwen3_tiny_b/nf4_bnb_dq", Native),
        ("qwen3_tiny_b/nf4_bnb", Int8),
        (ACT_ORDER, Native),
        (ACT_ORDER, Int8),
    ];
    for (path, activations) in cases {
        let setup = Setup { activations, compute: ComputePath::KernelOnly, ..Setup::default() };
        let checkpoint = match path {
            ACT_ORDER => handmade::act_order::shuffled("gptq", true).open()?,
            path => Checkpoint::open(&golden(path), &OpenOptions::default())?,
        };
        let dispatch = setup.dispatch()?;
        let loaded = setup.load(&checkpoint, &dispatch)?;
        let mut runner = setup.runner(&loaded)?;
        runner.accept(&[1, 5, 9, 13])?;
        let params = SamplingParams { temperature: 0.8, top_k: 20, top_p: 0.9, ..SamplingParams::default() };
        let mut sampler = Sampler::new(params, runner.logits()?.len())?;
        let mut step = |runner: &mut q4_model::runner::Runner| -> Result<()> {
            let id = runner.sample(&mut sampler)?;
            runner.decode(id)
        };
        step(&mut runner)?;
        let before = q4_heap::calls();
        for _ in 0..32 {
            step(&mut runner)?;
        }
        let made = q4_heap::calls() - before;
        assert_eq!(made, 0, "{path} with {activations:?}: allocations in 32 decode steps");
        println!("test {path} {activations:?}: 0 allocations in 32 decode steps ... ok");
    }
    Ok(())
}
