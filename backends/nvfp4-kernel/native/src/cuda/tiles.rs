//! Shapes of the tiles of `cuda/gemm.cu`, and which a call takes.
use q4_cuda::{HOPPER, UNIT};

/// The most pairs of blocks that share a tile through memory, as in gemm.cu.
const SHARES: usize = 8;
/// Bytes of outputs that a warpgroup puts together, as in gemm.cu.
const PIECE: usize = 8192;
/// Units of 128 of k that are done as one, as in gemm.cu.
pub const ROUND: usize = 2;
/// Tokens that one of those who share a tile through memory sums up at least, as in gemm.cu.
const BOX: usize = 16;

/// A shape of tiles; each compiles to kernels of its own.
#[derive(Debug)]
pub struct Shape {
    /// Rows of x of a tile.
    pub tokens: usize,
    /// Warpgroups of 64 rows of the weight of a tile.
    pub groups: usize,
    /// Pairs of blocks of a cluster, which share the k of a tile.
    pub pieces: usize,
    /// Of 66 pairs of blocks, how many clusters run at once: they leave a few multiprocessors of a group of
    /// them alone.
    fitting: usize,
    /// Cycles of a multiprocessor for 64 of k, measured (cuda/NOTES-gemm.md).
    slab: usize,
}

/// From few rows of x to many.
pub const SHAPES: [Shape; 8] = [
    Shape { tokens: 32, groups: 2, pieces: 1, fitting: 66, slab: 400 },
    Shape { tokens: 64, groups: 2, pieces: 1, fitting: 66, slab: 460 },
    Shape { tokens: 64, groups: 2, pieces: 2, fitting: 30, slab: 460 },
    Shape { tokens: 64, groups: 2, pieces: 4, fitting: 14, slab: 460 },
    Shape { tokens: 128, groups: 2, pieces: 1, fitting: 66, slab: 550 },
    Shape { tokens: 128, groups: 3, pieces: 1, fitting: 66, slab: 792 },
    Shape { tokens: 176, groups: 2, pieces: 2, fitting: 30, slab: 710 },
    Shape { tokens: 256, groups: 2, pieces: 1, fitting: 66, slab: 1010 },
];

impl Shape {
    /// Whether calls of `m` rows may take it: half of its tokens would do for none.
    fn is_for(&self, m: usize) -> bool {
        self.tokens <= 64 && m <= 64 || self.tokens > 64 && m > 64 && (self.tokens == 128 || m > 128)
    }

    /// Rows of the weight of a tile.
    pub fn rows(&self) -> usize {
        64 * self.groups
    }

    /// Pairs of tiles of a weight of so many row groups.
    pub fn pairs(&self, row_groups: usize, gate: bool) -> usize {
        let of_pair = self.rows() / 8;
        if gate { (row_groups / 2).div_ceil(of_pair / 2) } else { row_groups.div_ceil(of_pair) }
    }

    /// `SETS` of gemm.cu.
    fn sets(&self) -> usize {
        if self.tokens <= 64 { 2 } else { 1 }
    }

    /// `THREADS` of gemm.cu: the warpgroups that multiply, and one that brings.
    pub fn threads(&self) -> u32 {
        (128 * self.groups * self.sets() + 128) as u32
    }

    /// `SHARED` of gemm.cu.
    pub fn shared(&self) -> u32 {
        let packs = if self.groups == 3 || self.tokens > 128 { 4 } else { 8 };
        let sums = 256 * self.tokens * self.groups;
        let meeting = if self.sets() == 2 { sums } else { self.groups * PIECE };
        let arriving = (self.pieces - 1) * sums / self.pieces;
        let (pack, stage) = (4 * self.groups * UNIT, self.tokens * 128);
        let fixed = 8 * self.groups + meeting + arriving + packs * (pack + 16);
        let most = if self.sets() == 1 { 2 * ROUND } else { 16 };
        let stages = ((HOPPER.shared - fixed) / (stage + 16)).min(most) / (2 * ROUND) * (2 * ROUND);
        let rings = stages * stage + packs * pack;
        (fixed + stages * (stage + 16) + rings.max(self.gathered()) - rings) as u32
    }

    /// Bytes of sums of the others that one of those who share a tile through memory may get,
    /// `gathered_bytes` of gemm.cu.
    fn gathered(&self) -> usize {
        let boxes = self.tokens / BOX;
        let of = |count: usize| self.groups * (count - 1) * boxes.div_ceil(count.min(boxes)) * 256 * BOX;
        if self.pieces == 1 { (2..=SHARES).map(of).max().unwrap_or(0) } else { 0 }
    }

    /// What the compiler is told.
    pub fn options(&self) -> [String; 3] {
        [("TN", self.tokens), ("WGS", self.groups), ("KS", self.pieces)]
            .map(|(name, v)| format!("-D{name}={v}"))
    }

    /// How `tiles` pairs of tiles of `rounds` of k are dealt to `clusters` pairs of blocks; `None` where
    /// clusters that share k have no place at once.
    pub fn deal(&self, tiles: usize, rounds: usize, clusters: usize) -> Option<Deal> {
        if self.pieces > 1 {
            let fits = tiles * 66 <= self.fitting * clusters && self.pieces <= rounds;
            return fits.then_some(Deal { grid: tiles, whole: tiles, shares: 1 });
        }
        let rest = tiles % clusters;
        let shares = clusters.checked_div(rest).map_or(1, |s| s.min(SHARES).min(rounds));
        let whole = if shares == 1 { tiles } else { tiles - rest };
        Some(Deal { grid: if tiles < clusters { tiles * shares } else { clusters }, whole, shares })
    }

    /// Cycles until the last block is done, about: slabs, outputs, and what meeting the others who share a
    /// tile takes, all measured.
    fn cycles(&self, deal: &Deal, rounds: usize) -> usize {
        let (area, round) = (self.tokens * self.rows(), 2 * ROUND * self.slab);
        if self.pieces > 1 {
            return rounds.div_ceil(self.pieces) * round + area * 3 / 20;
        }
        let turns = deal.whole.div_ceil(deal.grid);
        let shared = match deal.shares {
            1 => 0,
            n => rounds.div_ceil(n) * round + area * 23 / 100 + 750 * n,
        };
        turns * (rounds * round + area * 2 / 25) + shared
    }
}

/// How pairs of tiles are dealt to clusters.
#[derive(Clone, Copy, Debug)]
pub struct Deal {
    /// Clusters.
    pub grid: usize,
    /// Pairs of tiles that are dealt whole.
    pub whole: usize,
    /// Pairs of blocks that do each of the others together, as their last work.
    pub shares: usize,
}

/// The place in [`SHAPES`] of what is done soonest, and how: `m` rows of x by so many row groups and rounds
/// of k, on a device with `clusters` pairs of multiprocessors.
pub fn best(m: usize, row_groups: usize, gate: bool, rounds: usize, clusters: usize) -> (usize, Deal) {
    let one = |(i, s): (usize, &Shape)| {
        let deal = s.deal(s.pairs(row_groups, gate) * m.div_ceil(s.tokens), rounds, clusters)?;
        s.is_for(m).then(|| (s.cycles(&deal, rounds), i, deal))
    };
    let fastest = SHAPES.iter().enumerate().filter_map(one).min_by_key(|(cycles, i, _)| (*cycles, *i));
    // There is a shape without clusters for any number of rows.
    fastest.map_or((0, Deal { grid: 1, whole: 1, shares: 1 }), |(_, i, deal)| (i, deal))
}

/// The most sums a block may have to store of calls of up to `m` rows, and warpgroups that do.
pub fn largest(m: usize) -> (usize, usize) {
    let may = |s: &&Shape| (LEAST_ROWS..=m.min(129)).any(|fewer| s.is_for(fewer)) && s.pieces == 1;
    let of = |f: fn(&Shape) -> usize| SHAPES.iter().filter(may).map(f).max().unwrap_or(0);
    (of(|s| s.tokens * s.rows()), of(|s| s.groups))
}

/// Calls of fewer rows are for others.
pub const LEAST_ROWS: usize = 17;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_is_dealt_once() {
        for s in &SHAPES {
            for tiles in 1..300 {
                for rounds in [1, 2, 5, 10, 38] {
                    let Some(d) = s.deal(tiles, rounds, 66) else {
                        assert!(s.pieces > 1);
                        continue;
                    };
                    let rest = tiles - d.whole;
                    assert!(d.grid * s.pieces <= 66 && rest * d.shares <= d.grid, "{tiles} {rounds} {d:?}");
                    let is_shared = d.whole == 0 && rest * d.shares == d.grid;
                    assert!(d.whole >= d.grid || is_shared, "{tiles} {rounds} {d:?}");
                    assert!((1..=SHARES.min(rounds)).contains(&d.shares), "{tiles} {rounds} {d:?}");
                    assert!(
                        s.pieces == 1 || (d.whole == tiles && s.pieces <= rounds),
                        "{tiles} {rounds} {d:?}"
                    );
                }
            }
        }
    }

    /// What is launched has room on a multiprocessor, a round in it at least, and the workspace has room for
    /// it.
    #[test]
    fn shapes_fit_the_device() {
        for s in &SHAPES {
            let shared = s.shared() as usize;
            assert!(shared <= HOPPER.shared && shared > 2 * ROUND * s.tokens * 128, "{s:?}");
            assert!(s.tokens % (8 * s.pieces) == 0 && s.pieces <= 4, "{s:?}");
        }
        for m in LEAST_ROWS..700 {
            for (row_groups, rounds) in [(1, 1), (160, 16), (160, 38), (384, 10), (1216, 10), (9496, 10)] {
                let (i, _) = best(m, row_groups, false, rounds, 66);
                let s = &SHAPES[i];
                assert!(s.is_for(m) && (s.tokens >= 128 || m <= s.tokens * 2), "{m} {s:?}");
                let (area, groups) = largest(m + 100);
                assert!(s.pieces > 1 || (s.tokens * s.rows() <= area && s.groups <= groups), "{m} {s:?}");
            }
        }
    }

    /// What was fastest on the card at the shapes of Qwen3-4B.
    #[test]
    fn the_fastest_is_taken() {
        let taken = |m, n: usize, k: usize| {
            let s = &SHAPES[best(m, n / 16, false, k / 128 / ROUND, 66).0];
            (s.tokens, s.groups, s.pieces)
        };
        assert_eq!(taken(64, 6144, 2560), (64, 2, 2));
        assert_eq!(taken(64, 2560, 4096), (64, 2, 4));
        assert_eq!(taken(64, 19456, 2560), (64, 2, 1));
        assert_eq!(taken(64, 2560, 9728), (64, 2, 1));
        assert_eq!(taken(128, 2560, 4096), (128, 2, 1));
        assert_eq!(taken(128, 19456, 2560), (128, 3, 1));
        assert_eq!(taken(512, 6144, 2560), (128, 3, 1));
        assert_eq!(taken(512, 2560, 4096), (176, 2, 2));
        assert_eq!(taken(512, 2560, 9728), (176, 2, 2));
        for n in [6144, 2560, 19456, 151_936] {
            assert_eq!(taken(4096, n, 2560), (256, 2, 1));
        }
        assert_eq!(taken(512, 19456, 2560), (256, 2, 1));
        assert_eq!(taken(512, 151_936, 2560), (256, 2, 1));
    }
}
