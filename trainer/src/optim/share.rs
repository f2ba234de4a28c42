//! What of every tensor a rank moves: whole tiles, so that packed moments and random numbers are those of one
//! rank that moves all.
use super::TILE;
use super::layout::StateLayout;
use std::ops::Range;

/// One rank's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Whose, from 0.
    pub rank: usize,
    /// Of how many.
    pub of: usize,
}

impl Share {
    /// Everything.
    pub const WHOLE: Self = Self { rank: 0, of: 1 };

    /// Elements of a tensor of `len`: tiles of about the same number for all ranks, in their order. What has
    /// fewer tiles than there are ranks is the last ones'.
    pub fn range(self, len: usize) -> Range<usize> {
        let tiles = len.div_ceil(TILE);
        let bound = |rank: usize| (tiles * rank / self.of * TILE).min(len);
        bound(self.rank)..bound(self.rank + 1)
    }

    /// Those of every rank.
    pub fn all(of: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
        (0..of).map(move |rank| Self { rank, of }.range(len))
    }
}

impl StateLayout {
    /// The state of elements that begin at a tile.
    pub const fn part(&self, range: &Range<usize>) -> Self {
        Self::new(self.format(), range.end - range.start)
    }

    /// Puts the state of `range` into that of all, as one rank would have it.
    pub fn put(&self, range: &Range<usize>, part: &[u8], whole: &mut [u8]) {
        for (from, to) in self.places(range) {
            whole[to].copy_from_slice(&part[from]);
        }
    }

    /// Takes it out again.
    pub fn take(&self, range: &Range<usize>, whole: &[u8], part: &mut [u8]) {
        for (to, from) in self.places(range) {
            part[to].copy_from_slice(&whole[from]);
        }
    }

    /// Sections of the state of `range`, and where they are in that of all.
    fn places(&self, range: &Range<usize>) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let [codes, scales, seconds] = self.format().tile_bytes().map(|bytes| bytes * (range.start / TILE));
        let skipped = [codes, codes, scales, scales, seconds, seconds];
        let parts = self.part(range).sections();
        self.sections().into_iter().zip(parts).zip(skipped).map(|((whole, part), skip)| {
            let at = whole.start + skip;
            let to = at..at + part.len();
            (part, to)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Gradient, Hyper, Master, StateFormat, adamw};
    use super::*;
    use crate::rng::Philox;
    use q4_core::ThreadPool;

    #[test]
    fn shares_are_everything_once() {
        for len in [0, 1, 4095, 4096, 4097, 12 * TILE + 5] {
            for of in 1..6 {
                let mut end = 0;
                for range in Share::all(of, len) {
                    assert_eq!((range.start, range.start % TILE == 0 || range.is_empty()), (end, true));
                    end = range.end;
                }
                assert_eq!(end, len, "{of} ranks");
            }
        }
    }

    /// Ranks with their shares have the bits of one rank with all, whatever moments and masters are.
    #[test]
    fn shares_move_as_the_whole_does() {
        let pool = ThreadPool::new(2);
        let noise = Philox::new(1, 2, 3);
        for format in StateFormat::ALL {
            for len in [256usize, 3 * TILE + 256 + 7, 5 * TILE] {
                let layout = StateLayout::new(format, len);
                let start: Vec<u16> =
                    (0..len as u64).map(|i| (noise.normal(i).to_bits() >> 16) as u16).collect();
                let (mut whole, mut state) = (start.clone(), vec![0; layout.bytes()]);
                let (mut parts, mut gathered) = (start.clone(), vec![0; layout.bytes()]);
                let mut states: Vec<_> =
                    Share::all(3, len).map(|r| (r.clone(), vec![0; layout.part(&r).bytes()])).collect();
                for step in 1..4 {
                    let hyper = Hyper {
                        lr: 0.01,
                        beta1: 0.9,
                        beta2: 0.95,
                        eps: 1e-8,
                        weight_decay: 0.1,
                        step,
                        grad_scale: 1.0,
                    };
                    let grad: Vec<f32> = (0..len as u64).map(|i| noise.normal(i * step + 7)).collect();
                    let rng = Philox::new(5, step, 9);
                    let master = Master::Bf16(&mut whole);
                    adamw(&hyper, &layout, master, Gradient::F32(&grad), &mut state, rng, &pool)
                        .expect("whole");
                    for (range, state) in &mut states {
                        let master = Master::Bf16(&mut parts[range.clone()]);
                        let grad = Gradient::F32(&grad[range.clone()]);
                        let rng = rng.from_element(range.start);
                        adamw(&hyper, &layout.part(range), master, grad, state, rng, &pool).expect("part");
                    }
                }
                for (range, state) in &mut states {
                    layout.put(range, state, &mut gathered);
                    let mut back = vec![0; state.len()];
                    layout.take(range, &gathered, &mut back);
                    assert!(back == *state, "{format:?} {len}: taken out again");
                }
                assert!(whole == parts && state == gathered, "{format:?} {len}");
            }
        }
    }
}
