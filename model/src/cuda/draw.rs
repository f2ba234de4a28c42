//! Drawing a token on the device: what [`Sampler::sample`] draws from the same logits, bit for bit.
use super::kernels::{Argmax, Chosen, Embedding, SAMPLE, argmax_blocks, launch_argmax};
use crate::sampling::{Sampler, SamplingParams};
use q4_core::Result;
use q4_cuda::{Buffer, Gpu, Kernel, Kernels, Launch, Pinned, mirror};
use std::sync::Arc;

mirror! {
    /// `Choice` of `cuda/draw.cu`.
    struct Choice { uniform: f64, temperature: f32, top_p: f32, min_p: f32, top_k: u32 }

    struct Penalise { logits: u64, recent: u64, count: u32, penalty: f32, seen: u64 }
    struct Weigh { logits: u64, vocab: i32, best: u64, flags: u64, choice: Choice, buckets: u64 }
    struct Narrow { logits: u64, vocab: i32, best: u64, flags: u64, choice: Choice, buckets: u64, list: u64 }
    struct Last {
        logits: u64, best: u64, flags: u64, choice: Choice, buckets: u64, list: u64, records: u64, out: u64,
        stride: u32, embedding: Embedding,
    }
}

/// Bytes of its `Buckets`.
const BUCKETS: usize = 2048 * 12 + 8;
/// Blocks that narrow the vocabulary down: more weigh it faster, but each leaves its counts of every bucket
/// to add up.
const BLOCKS: usize = 16;

/// What drawing needs besides the logits, for one sequence.
pub(super) struct Draw {
    /// Of `cuda/sample.cu` and `cuda/draw.cu`.
    argmax: Kernel<Argmax>,
    penalise: Kernel<Penalise>,
    weigh: Kernel<Weigh>,
    narrow: Kernel<Narrow>,
    draw: Kernel<Last>,
    vocab: usize,
    buckets: Buffer,
    /// 16 bytes for each token of the vocabulary.
    list: Buffer,
    /// A bit for each; zero between draws.
    seen: Buffer,
    /// What `argmax` keeps and leaves after a penalty: keys of its blocks, and words.
    keys: Buffer,
    best: Buffer,
    /// Ids that the penalty applies to, and the same in host memory.
    recent: Buffer,
    staged: Pinned,
}

impl Draw {
    /// For a vocabulary, and a history of up to `context` tokens.
    pub fn new(gpu: &Arc<Gpu>, vocab: usize, context: usize) -> Result<Self> {
        let kernels = Kernels::load(gpu, &SAMPLE, &[])?;
        Ok(Self {
            argmax: kernels.get("argmax")?,
            penalise: kernels.get("penalise")?,
            weigh: kernels.get("weigh")?,
            narrow: kernels.get("narrow")?,
            draw: kernels.get("draw")?,
            vocab,
            buckets: Buffer::zeroed(gpu, BUCKETS)?,
            list: Buffer::new(gpu, 16 * vocab)?,
            seen: Buffer::zeroed(gpu, vocab.div_ceil(32) * 4)?,
            keys: Buffer::zeroed(gpu, 8 * argmax_blocks(gpu, vocab, 1) as usize)?,
            best: Buffer::zeroed(gpu, 16)?,
            recent: Buffer::new(gpu, 4 * context)?,
            staged: Pinned::new(gpu, 4 * context)?,
        })
    }

    /// Where `argmax` leaves the largest logit after a penalty; the drawn token is embedded and handed over,
    /// not this one.
    fn likeliest(&self) -> Chosen {
        let [turns, token, position, flags] = [0, 4, 8, 12].map(|at| self.best.ptr() + at);
        let blocks = (self.keys.len() / 8) as u32;
        let (keys, embedding) = (self.keys.ptr(), Embedding::none());
        Chosen { keys, blocks, turns, token, position, flags, records: 0, out: 0, stride: 0, embedding }
    }

    /// Enqueues a draw from `logits` f32 `[vocab]`, which the penalty on `recent` changes. The token is
    /// embedded and handed over where `to` says, with its flags and as 0 where those are not clear.
    ///
    /// # Safety
    /// The logits and all words are on the stream's device and nobody else uses them. `to` holds the token
    /// and the flags that `argmax` found for the logits. Ids of `recent` are below the vocabulary's size,
    /// and no more than `context`. The temperature is above 0. The last draw's token was waited for.
    pub unsafe fn draw(
        &mut self,
        logits: u64,
        sampler: &mut Sampler,
        recent: &[u32],
        to: Chosen,
        stream: usize,
    ) -> Result<()> {
        let &SamplingParams { temperature, top_k, top_p, min_p, repetition_penalty, .. } = sampler.params();
        let top_k = top_k.min(self.vocab) as u32;
        let choice = Choice { uniform: sampler.uniform(), temperature, top_p, min_p, top_k };
        let vocab = self.vocab as i32;
        let how = |blocks| Launch::overlapping([blocks, 1, 1], 1024, 0, stream);
        let (buckets, list) = (self.buckets.ptr(), self.list.ptr());
        let Chosen { token, flags, records, out, stride, embedding, .. } = to;
        let mut best = token;
        // SAFETY: by contract; the buffers have the sizes the kernels ask for.
        unsafe {
            if repetition_penalty != 1.0 && !recent.is_empty() {
                // The last draw came behind what read the staging memory.
                self.staged.as_mut_slice::<u32>()[..recent.len()].copy_from_slice(recent);
                self.staged.send(0, self.recent.ptr(), 4 * recent.len(), stream)?;
                let (count, penalty, seen) = (recent.len() as u32, repetition_penalty, self.seen.ptr());
                let args = Penalise { logits, recent: self.recent.ptr(), count, penalty, seen };
                self.penalise.launch(how(1), args)?;
                let to = self.likeliest();
                best = to.token;
                launch_argmax(&self.argmax, (logits, self.vocab), 0, to, 1, stream)?;
            }
            let args = Weigh { logits, vocab, best, flags, choice, buckets };
            self.weigh.launch(how(BLOCKS), args)?;
            let args = Narrow { logits, vocab, best, flags, choice, buckets, list };
            self.narrow.launch(how(BLOCKS), args)?;
            let args = Last { logits, best, flags, choice, buckets, list, records, out, stride, embedding };
            self.draw.launch(how(1), args)
        }
    }
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    SAMPLE.takes::<Penalise>("penalise")?;
    SAMPLE.takes::<Weigh>("weigh")?;
    SAMPLE.takes::<Narrow>("narrow")?;
    SAMPLE.takes::<Last>("draw")
}

#[cfg(test)]
mod tests {
    use super::super::kernels::{Chosen, Embedding, SAMPLE, argmax_blocks, launch_argmax};
    use super::super::outbox::{Choice, Outbox};
    use super::{Draw, Sampler, SamplingParams};
    use q4_core::{DType, Result};
    use q4_cuda::{Buffer, Gpu, Kernels, Stream};
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};
    use std::sync::Arc;

    /// None, and why, where there is no device.
    fn device() -> Result<Option<(Arc<Gpu>, Stream)>> {
        let gpu = match Gpu::open(0) {
            Ok(gpu) => gpu,
            Err(e) => {
                println!("skipped: no CUDA device ({e})");
                return Ok(None);
            }
        };
        let stream = Stream::new(&gpu)?;
        Ok(Some((gpu, stream)))
    }

    /// Sums of uniform numbers: a peak, a body and a tail.
    fn logits(rng: &mut ChaCha8Rng, n: usize, spread: f32) -> Vec<f32> {
        let mut one = || (rng.next_u32() >> 8) as f32 / (1 << 24) as f32 - 0.5;
        (0..n).map(|_| (one() + one() + one() + one()) * spread).collect()
    }

    #[test]
    fn draws_what_the_host_draws() -> Result<()> {
        let Some((gpu, stream)) = device()? else { return Ok(()) };
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut drawn = 0;
        for (vocab, spread) in [(7, 3.0), (2048, 4.0), (2048, 40.0), (151_936, 6.0), (151_936, 40.0)] {
            let words = Buffer::zeroed(&gpu, 12)?;
            let mut outbox = Outbox::new(&gpu, 1)?;
            let [token, flags, records] = [0, 4, 8].map(|at| words.ptr() + at);
            let [keys, turns, position] = [0; 3]; // those of `argmax` alone
            let (out, stride) = (outbox.address(), 1);
            // A token's embedding is its number.
            let numbers: Vec<f32> = (0..vocab).map(|i| i as f32).collect();
            let (table, hidden) = (Buffer::of(&gpu, &numbers)?, Buffer::zeroed(&gpu, 4)?);
            let embedding = Embedding::new((table.ptr(), DType::F32), hidden.ptr(), 1);
            let to =
                Chosen { keys, blocks: 0, turns, token, position, flags, records, out, stride, embedding };
            let mut draw = Draw::new(&gpu, vocab, 64)?;
            for temperature in [0.01, 0.6, 1.0, 4.0] {
                for (top_k, top_p, min_p, repetition_penalty) in [
                    (0, 1.0, 0.0, 1.0),
                    (20, 0.95, 0.0, 1.0),
                    (1500, 0.9, 0.0, 1.3),
                    (0, 0.9, 0.0, 0.8),
                    (0, 1.0, 0.02, 1.1),
                    (40, 0.01, 0.5, 1.0),
                    (1, 1.0, 0.0, 1.0),
                ] {
                    let seed = u64::from(rng.next_u32());
                    let params =
                        SamplingParams { temperature, top_k, top_p, min_p, repetition_penalty, seed };
                    let mut host = Sampler::new(params, vocab)?;
                    let mut device = host.clone();
                    let mut have = Choice { token: 0, finite: false };
                    for round in 0..6 {
                        let mut x = logits(&mut rng, vocab, spread);
                        if round % 2 == 1 {
                            // Equals, both zeros, and tokens without a chance.
                            x.iter_mut().for_each(|v| *v = v.round());
                            x[vocab / 2] = -0.0;
                            x[vocab / 3] = f32::NEG_INFINITY;
                        }
                        let recent: Vec<u32> = (0..40).map(|_| rng.next_u32() % vocab as u32).collect();
                        let there = Buffer::of(&gpu, &x)?;
                        let likeliest = (0..vocab).max_by(|a, b| x[*a].total_cmp(&x[*b])).expect("one");
                        // Where logits cannot be used nothing is drawn, and nothing is left for the next
                        // draw.
                        for flags in [u32::from(round == 3), 0] {
                            words.upload(0, &[likeliest as u32, flags])?;
                            let mut sampler = device.clone();
                            // SAFETY: as the contract asks.
                            unsafe { draw.draw(there.ptr(), &mut sampler, &recent, to, stream.raw())? };
                            let ticket = outbox.issue(0);
                            have = outbox.wait(0, ticket, &stream)?;
                            if flags == 0 {
                                device = sampler;
                                break;
                            }
                            assert_eq!(have, Choice { token: 0, finite: false });
                            there.upload(0, &x)?; // the penalty changed them
                        }
                        let need = Choice { token: host.sample(&mut x, &recent)?, finite: true };
                        assert_eq!(have, need, "{vocab} tokens, spread {spread}, {:?}", host.params());
                        stream.synchronize()?; // the token is handed over before it is embedded
                        let mut input = [0f32];
                        hidden.download(0, &mut input)?;
                        assert_eq!(input, [need.token as f32], "the next step's input");
                        drawn += 1;
                    }
                }
            }
        }
        println!("{drawn} tokens drawn alike on {}", gpu.device());
        Ok(())
    }

    /// The first of the largest, and whether the logits can be used.
    fn chosen(x: &[f32]) -> Choice {
        let bad = x.iter().any(|v| v.is_nan() || *v == f32::INFINITY);
        let mut best = 0;
        for (i, v) in x.iter().enumerate() {
            if *v > x[best] {
                best = i;
            }
        }
        let finite = !bad && x[best] > f32::NEG_INFINITY;
        Choice { token: if finite { best as u32 } else { 0 }, finite }
    }

    #[test]
    fn the_first_of_the_largest_logits_is_chosen() -> Result<()> {
        let Some((gpu, stream)) = device()? else { return Ok(()) };
        let argmax = Kernels::load(&gpu, &SAMPLE, &[])?.get("argmax")?;
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        for (vocab, sequences) in
            [(1, 1), (7, 2), (1000, 3), (4099, 1), (151_936, 1), (151_936, 5), (32_000, 64)]
        {
            let blocks = argmax_blocks(&gpu, vocab, sequences);
            let keys = Buffer::zeroed(&gpu, 8 * sequences * blocks as usize)?;
            let words = Buffer::zeroed(&gpu, 20 * sequences)?;
            let [turns, token, position, flags, records] =
                [0, 1, 2, 3, 4].map(|i| words.ptr() + (4 * i * sequences) as u64);
            // A token's embedding is three numbers.
            let numbers: Vec<f32> = (0..3 * vocab).map(|i| i as f32).collect();
            let (table, hidden) = (Buffer::of(&gpu, &numbers)?, Buffer::zeroed(&gpu, 12 * sequences)?);
            let embedding = Embedding::new((table.ptr(), DType::F32), hidden.ptr(), 3);
            let mut outbox = Outbox::new(&gpu, sequences)?;
            let (keys, out, stride) = (keys.ptr(), outbox.address(), sequences as u32);
            let to = Chosen { keys, blocks, turns, token, position, flags, records, out, stride, embedding };
            for round in 0..12 {
                let mut x = logits(&mut rng, sequences * vocab, 8.0);
                if round % 3 == 1 {
                    x.iter_mut().for_each(|v| *v = v.round());
                }
                if round % 3 == 2 {
                    for unusable in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                        x[rng.next_u32() as usize % (sequences * vocab)] = unusable;
                    }
                    if sequences > 1 {
                        x[..vocab].fill(f32::NEG_INFINITY);
                    }
                }
                let there = Buffer::of(&gpu, &x)?;
                // SAFETY: everything has the sizes the kernel asks for.
                unsafe {
                    launch_argmax(&argmax, (there.ptr(), vocab), 2, to, sequences, stream.raw())?;
                }
                let mut inputs = vec![0f32; 3 * sequences];
                for (s, x) in x.chunks(vocab).enumerate() {
                    let ticket = outbox.issue(s);
                    let have = outbox.wait(s, ticket, &stream)?;
                    assert_eq!(have, chosen(x), "round {round}, sequence {s} of {sequences}, {vocab} tokens");
                    let first = 3 * have.token;
                    inputs[3 * s..][..3].copy_from_slice(&[
                        first as f32,
                        (first + 1) as f32,
                        (first + 2) as f32,
                    ]);
                }
                stream.synchronize()?;
                let (mut have, mut at) = (vec![0f32; 3 * sequences], vec![0u32; sequences]);
                hidden.download(0, &mut have)?;
                words.download(8 * sequences, &mut at)?;
                assert_eq!((have, at), (inputs, vec![2 * (round + 1); sequences]), "inputs and positions");
            }
        }
        Ok(())
    }
}
