//! Draws that count their nats, at random or one after the other until every outcome was there.
use crate::rng::Philox;

/// Where the numbers come from.
enum Source {
    Random {
        philox: Philox,
        next: u64,
    },
    /// The choices of this pass, each with how many there are, and how many were made so far.
    Listed {
        path: Vec<(usize, usize)>,
        made: usize,
    },
}

pub(super) struct Dice {
    source: Source,
    pub(super) nats: f64,
}

impl Dice {
    pub(super) fn new(philox: Philox) -> Self {
        Self { source: Source::Random { philox, next: 0 }, nats: 0.0 }
    }

    /// What `draw` gives for every sequence of choices it can meet.
    pub(super) fn every<T>(mut draw: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let (mut all, mut path) = (Vec::new(), Vec::new());
        loop {
            let mut dice = Self { source: Source::Listed { path, made: 0 }, nats: 0.0 };
            all.push(draw(&mut dice));
            let Source::Listed { path: met, .. } = dice.source else { return all };
            path = met;
            while path.last().is_some_and(|(choice, n)| choice + 1 == *n) {
                path.pop();
            }
            match path.last_mut() {
                Some((choice, _)) => *choice += 1,
                None => return all,
            }
        }
    }

    /// A number below `n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.nats += (n as f64).ln();
        match &mut self.source {
            Source::Random { philox, next } => {
                *next += 1;
                philox.below(*next - 1, n as u32) as usize
            }
            Source::Listed { path, made } => {
                if *made == path.len() {
                    path.push((0, n));
                }
                *made += 1;
                path[*made - 1].0
            }
        }
    }

    /// One of `n` wordings. Where every outcome is listed this is no choice: the one before it decides.
    pub(super) fn turn(&mut self, n: usize) -> usize {
        match &self.source {
            Source::Random { .. } => self.below(n),
            Source::Listed { path, .. } => path.last().map_or(0, |(choice, _)| choice % n),
        }
    }

    /// One of a list.
    pub(super) fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sequence_of_choices_is_met_once() {
        let pairs = Dice::every(|dice| {
            let first = dice.below(3);
            (first, if first == 1 { dice.below(2) } else { 7 })
        });
        assert_eq!(pairs, [(0, 7), (1, 0), (1, 1), (2, 7)]);
    }
}
