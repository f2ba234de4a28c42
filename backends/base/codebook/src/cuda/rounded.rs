//! Launchers of `cuda/rounded.cu`: products of many rows of bf16 on sm_90, weights rounded to bf16, or exact
//! in it, with any fusion.
use super::{Call, Coding, FILES, Levels, Packed, load};
use q4_core::{DType, FuseSet, Result};
use q4_cuda::{Gpu, HOPPER, Kernel, Kernels as Module, Launch, Source, TensorMap, mirror, output};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const GEMM: Source =
    Source { name: "levels-rounded", text: include_str!("../../cuda/rounded.cu"), files: FILES };
const ROWS: Source = Source { name: "levels-rows", text: include_str!("../../cuda/rows.cu"), files: FILES };
/// Launches that wait for a warpgroup, as in rounded.cu.
const READERS: usize = 8;
/// Units of k of a round, as in rounded.cu.
const ROUND: usize = 2;

/// A shape of tiles; the constants of rounded.cu.
struct Shape {
    /// Rows of x of a tile.
    tokens: usize,
    /// Warpgroups that multiply, 64 rows of the weight each.
    groups: usize,
    /// Blocks of a cluster that share rows of x.
    pair: usize,
    /// Blocks of a cluster that share k, one tile a cluster.
    split: usize,
    /// Packed weights in flight, 128 of k each, where codes have four bits.
    packs: usize,
    /// Warpgroups multiply one after another, so that others decode meanwhile.
    ordered: bool,
}

/// No clusters along k.
const fn alone(tokens: usize, groups: usize, pair: usize, packs: usize) -> Shape {
    Shape { tokens, groups, pair, split: 1, packs, ordered: tokens < 256 }
}

const SHAPES: [Shape; 10] = [
    alone(32, 2, 1, 12),
    alone(32, 3, 1, 6),
    alone(64, 2, 1, 8),
    alone(64, 3, 1, 6),
    alone(128, 2, 1, 6),
    alone(256, 2, 2, 4),
    Shape { tokens: 64, groups: 3, pair: 1, split: 8, packs: 6, ordered: true },
    Shape { tokens: 64, groups: 2, pair: 1, split: 2, packs: 8, ordered: true },
    Shape { tokens: 176, groups: 2, pair: 2, split: 2, packs: 4, ordered: false },
    Shape { tokens: 128, groups: 3, pair: 2, split: 1, packs: 4, ordered: false },
];
/// The places of those with most sums, and with most rows of the weight.
const LARGEST: usize = 5;
const HIGHEST: usize = 9;
/// Up to so many rows of the weight, low tiles give more blocks something to do.
const FEW_ROWS: u32 = 4096;

impl Shape {
    /// That of a call of `m` rows on a device of so many multiprocessors.
    fn of(w: &Packed, m: usize, processors: usize) -> usize {
        // Clusters that share k need a place for each at once; where they leave much of the device idle, more
        // than two had better share k.
        let shares = |i: &usize| {
            let s = &SHAPES[*i];
            let (tiles, size) = (s.row_tiles(w.n as usize, false) * m.div_ceil(s.tokens), s.pair * s.split);
            let is_filled = s.split > 2 || tiles * size * 2 >= processors;
            rounds(w) >= s.split && tiles <= processors / size * 15 / 16 && is_filled
        };
        let few = w.n <= FEW_ROWS;
        let clusters: &[usize] = match m {
            33..=64 if few => &[6],
            33..=64 => &[7],
            257.. => &[8],
            _ => &[],
        };
        if let Some(shape) = clusters.iter().find(|i| shares(i)) {
            return *shape;
        }
        // About one tile for each pair of blocks: more of the smaller ones are done sooner.
        let tiles = |i: usize| SHAPES[i].row_tiles(w.n as usize, false) * m.div_ceil(SHAPES[i].tokens);
        let is_alone = |i: usize| tiles(i) <= processors / 2 && tiles(i) * 2 > processors / 2;
        let higher = match m {
            65..=128 => !few,
            129.. => is_alone(HIGHEST) && is_alone(LARGEST) && tiles(HIGHEST) > tiles(LARGEST),
            _ => false,
        };
        if higher {
            return HIGHEST;
        }
        let least = if few { 2 } else { 3 };
        let fits = |s: &Shape| m <= s.tokens && (s.tokens > 64 || s.groups == least);
        SHAPES[..=LARGEST].iter().position(fits).unwrap_or(LARGEST)
    }
    /// Rows of the weight.
    const fn rows(&self) -> usize {
        64 * self.groups
    }
    /// Tiles, or pairs of them, of `n` rows of the weight.
    fn row_tiles(&self, n: usize, gate: bool) -> usize {
        let (groups, of_tile) = (n.div_ceil(16), self.rows() / 16 * self.pair);
        if gate { (groups / 2).div_ceil(of_tile / 2) } else { groups.div_ceil(of_tile) }
    }
    /// Bytes of outputs of a warpgroup that leave together, and how many times; none where they leave from
    /// the ring of x.
    const fn pieces(&self) -> (usize, usize) {
        match (self.split, self.tokens) {
            (1, 256) => (4096, 3),
            (1, 128) => (4096, 2),
            (1, _) => (2048, 2),
            _ => (0, 0),
        }
    }
    /// Rows of x of a box of outputs.
    const fn boxed(&self, gate: bool) -> usize {
        if self.split > 1 { self.tokens / self.split } else { self.pieces().0 / if gate { 64 } else { 128 } }
    }
    const fn threads(&self) -> u32 {
        (128 * self.groups + if self.groups * self.tokens > 256 { 128 } else { 64 }) as u32
    }
    /// Two pairs of blocks share k.
    const fn is_of_two(&self) -> bool {
        self.split == 2 && self.pair == 2
    }
    /// Bytes of the table of pairs, `TABLE` of rounded.cu.
    const fn table(&self, coding: Coding) -> usize {
        let has_room = self.tokens > 64 && self.tokens < 256 && !(coding.is_bf16() && self.is_of_two());
        if matches!(coding.levels, Levels::E4m3) { 0 } else { 256 * if has_room { 256 } else { 128 } }
    }
    /// Bytes of a sum on its way to another block of a cluster, `SENT` of rounded.cu.
    const fn sent(&self, coding: Coding) -> usize {
        if self.is_of_two() && !coding.is_bf16() { 3 } else { 4 }
    }
    /// Bytes of packed weights of 128 of k.
    const fn pack(&self, coding: Coding) -> usize {
        4 * self.groups * coding.levels.unit()
    }
    /// Bytes of shared memory beside those of x and of packed weights.
    const fn beside(&self, coding: Coding) -> usize {
        let received = (self.split - 1) * self.rows() * (self.tokens / self.split) * self.sent(coding);
        let (piece, times) = self.pieces();
        self.table(coding) + times * self.groups * piece + received
    }
    /// Packed weights in flight: as many as leave room for a round of x, where codes are bytes.
    fn packs(&self, coding: Coding) -> usize {
        let room = HOPPER.shared - 512 - self.beside(coding) - 2 * ROUND * 128 * self.tokens;
        self.packs.min(room / self.pack(coding) / ROUND * ROUND)
    }
    /// `SHARED` of rounded.cu.
    fn shared(&self, coding: Coding) -> u32 {
        let (slab, packs) = (128 * self.tokens, self.packs(coding));
        let fixed = self.beside(coding) + packs * self.pack(coding);
        let stages = ((HOPPER.shared - 512 - fixed) / slab).min(16) / (2 * ROUND) * (2 * ROUND);
        (stages * (slab + 16) + fixed + 16 * packs + 8) as u32
    }
    fn options(&self, coding: Coding) -> Vec<String> {
        let all = [
            ("TN", self.tokens),
            ("WGS", self.groups),
            ("PAIR", self.pair),
            ("SPLIT", self.split),
            ("PACKS", self.packs(coding)),
            ("ORDERED", self.ordered.into()),
        ];
        all.map(|(name, value)| format!("-D{name}={value}")).into()
    }
}

/// Rounds of k.
fn rounds(w: &Packed) -> usize {
    (w.units as usize).div_ceil(ROUND)
}

mirror! {
    struct Gemm {
        x_map: TensorMap, y_map: TensorMap, units: TensorMap, y: u64, ldy: u64, tokens: i32, n: i32,
        rounds: i32, split_tiles: i32, pairs: i32, token_tiles: i32, partial: u64, flags: u64, mark: u64,
        out: i32, aligned: i32,
    }
    struct Plain { x: u64, ld: u64, k: i32, out: u64 }
    struct Normed { x: u64, ld: u64, k: i32, out: u64, weight: u64, eps: f32 }
}

/// The two functions of rounded.cu.
struct Pair {
    plain: Kernel<Gemm>,
    gate: Kernel<Gemm>,
}

/// Kernels for calls of many rows. A shape is compiled when a call first needs it.
pub struct Kernels {
    gpu: Arc<Gpu>,
    coding: Coding,
    pairs: [OnceLock<Pair>; SHAPES.len()],
    rows: Kernel<Plain>,
    normed: Kernel<Normed>,
}

/// Where the parts of the workspace lie, in bytes.
struct Room {
    rows: usize,
    partial: usize,
    flags: usize,
    all: usize,
}

impl Kernels {
    /// Finds what prepares x; `None` where the device has no wgmma.
    pub fn load(gpu: &Arc<Gpu>, coding: Coding) -> Result<Option<Self>> {
        if !gpu.arch.wgmma {
            return Ok(None);
        }
        let all = Module::load(gpu, &ROWS, &[])?;
        let (rows, normed) = (all.get("levels_rows")?, all.get("levels_rows_normed")?);
        Ok(Some(Self { gpu: gpu.clone(), coding, pairs: Default::default(), rows, normed }))
    }

    fn pair(&self, shape: usize) -> Result<&Pair> {
        if let Some(pair) = self.pairs[shape].get() {
            return Ok(pair);
        }
        let options = SHAPES[shape].options(self.coding);
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        let all = load(&self.gpu, &GEMM, self.coding, &options)?;
        let get = |name| all.get_with(name, SHAPES[shape].shared(self.coding));
        let pair = Pair { plain: get("levels_rounded")?, gate: get("levels_rounded_gate")? };
        Ok(self.pairs[shape].get_or_init(|| pair))
    }

    fn shape(&self, w: &Packed, m: usize) -> usize {
        Shape::of(w, m, self.gpu.processors as usize)
    }

    fn room(&self, w: &Packed, m: usize) -> Room {
        let next = |from: usize, bytes: usize| (from + bytes).next_multiple_of(256);
        let processors = self.gpu.processors as usize;
        let shape = &SHAPES[self.shape(w, m)];
        let blocks = if shape.split > 1 { 0 } else { processors };
        let partial = next(0, m * w.k as usize * 2);
        let flags = next(partial, blocks * shape.rows() * shape.tokens * 4);
        Room { rows: 0, partial, flags, all: next(flags, blocks * shape.groups * READERS * 8) }
    }

    /// Whether they take such calls. Gate and up rows start a group each.
    pub fn takes(&self, w: &Packed, m: usize, set: FuseSet) -> bool {
        w.units > 0 && m > q4_cuda::FEW_ROWS && (!set.contains(FuseSet::GATE) || w.n % 32 == 0)
    }

    /// Scratch bytes of calls they take of up to `m` rows: fewer may need more, where clusters take more.
    pub fn workspace(&self, w: &Packed, m: usize) -> usize {
        let all = [32, 64, 128, 256].into_iter().filter(|fewer| *fewer < m).chain([m]);
        all.filter(|m| self.takes(w, *m, FuseSet::NONE)).map(|m| self.room(w, m).all).max().unwrap_or(0)
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The matrices are device memory that fits the weight, and do not overlap; the workspace has the size
    /// asked for.
    pub unsafe fn forward(&self, w: &Packed, call: &Call) -> Result<()> {
        let (m, k, n) = (call.x.rows as usize, w.k as usize, w.n as usize);
        let room = self.room(w, m);
        let index = self.shape(w, m);
        let shape = &SHAPES[index];
        let at = |part: usize| call.workspace + part as u64;
        // The copy engine wants rows that begin at multiples of 16 bytes.
        let is_readable = call.norm.0 == 0 && call.x.data % 16 == 0 && call.x.ld % 8 == 0;
        let (x, ldx) = if is_readable {
            (call.x.data, call.x.ld as usize)
        } else {
            let (x, ld, k, out) = (call.x.data, call.x.ld, k as i32, at(room.rows));
            let (weight, eps) = call.norm;
            let how = Launch::overlapping([m, 1, 1], 256, 0, call.stream);
            // SAFETY: by contract.
            unsafe {
                match weight {
                    0 => self.rows.launch(how, Plain { x, ld, k, out })?,
                    _ => self.normed.launch(how, Normed { x, ld, k, out, weight, eps })?,
                }
            }
            (out, w.k as usize)
        };
        let x_map = TensorMap::new(x, DType::BF16, [m, k, ldx], [64, shape.tokens / shape.pair])?;
        let (row_groups, boxed) = (n.div_ceil(16), shape.rows() / if call.gate { 32 } else { 16 });
        // An axis of a box has 256 words at most.
        let (unit, parts) = (self.coding.levels.unit() / 8, self.coding.levels.bits() / 4);
        let [words, all] = [unit / parts, w.units as usize * parts];
        let units_map = TensorMap::of_words(w.codes, [row_groups, all, words], [boxed, parts, words])?;
        let out = output(call.accumulate, call.y.dtype);
        let (y, ldy) = (call.y.data, call.y.ld);
        // The copy engine writes outputs of bf16, 16 bytes at a time: also those behind a row that ends
        // between.
        let is_aligned = out == 2 && y % 16 == 0 && ldy % 8 == 0 && call.y.cols % 8 == 0;
        let y_map = if is_aligned {
            let (width, columns) = if call.gate { (32, n / 2) } else { (64, n) };
            TensorMap::new(y, DType::BF16, [m, columns, ldy as usize], [width, shape.boxed(call.gate)])?
        } else {
            x_map
        };
        let (row_tiles, token_tiles) = (shape.row_tiles(n, call.gate), m.div_ceil(shape.tokens));
        let tiles = row_tiles * token_tiles;
        let (grid, split) = match shape.split {
            1 => deal(tiles, token_tiles, rounds(w), self.gpu.processors as usize / shape.pair),
            split => (tiles * split, tiles),
        };
        let [tokens, split_tiles, pairs, token_tiles, rounds] =
            [m, split, row_tiles, token_tiles, rounds(w)].map(|v| v as i32);
        let args = Gemm {
            x_map,
            y_map,
            units: units_map,
            y,
            ldy,
            tokens,
            n: w.n as i32,
            rounds,
            split_tiles,
            pairs,
            token_tiles,
            partial: at(room.partial),
            flags: at(room.flags),
            mark: mark(),
            out,
            aligned: is_aligned.into(),
        };
        let pair = self.pair(index)?;
        let kernel = if call.gate { &pair.gate } else { &pair.plain };
        let grid = [grid * shape.pair, 1, 1];
        let how = Launch::overlapping(grid, shape.threads(), shape.shared(self.coding), call.stream);
        // SAFETY: by contract.
        unsafe { kernel.launch(how, args) }
    }
}

/// A number that no other launch has and that memory does not hold by chance (splitmix64 of a counter).
fn mark() -> u64 {
    static LAUNCHES: AtomicU64 = AtomicU64::new(1);
    let mut z = LAUNCHES.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Up to so many units of a row group, shares of a last round are worth a round more.
const LONG: usize = 40;

/// Workers, and the tiles whose k is shared out among all of them.
fn deal(tiles: usize, token_tiles: usize, rounds: usize, workers: usize) -> (usize, usize) {
    if tiles < workers {
        // As many a tile as there is room for: each then has one part of one tile.
        return (tiles * (workers / tiles).min(rounds).min(READERS), tiles);
    }
    // Where weights are read once or twice, equal shares of everything were fastest; else whole tiles, and
    // shares of those that would not nearly fill a last round, of a round more where k is short. Shares
    // are counted in 32 bits.
    let rest = tiles % workers;
    let split = if token_tiles <= 2 {
        tiles
    } else if rest * 4 > workers * 3 {
        0
    } else if rounds * ROUND <= LONG || rest * rounds < workers {
        rest + workers
    } else {
        rest
    };
    (workers, if (split * rounds * workers) >> 32 == 0 { split } else { 0 })
}

#[test]
fn every_block_has_work() {
    for tiles in 1..400 {
        for rounds in [1, 2, 10, 38] {
            for token_tiles in [1, 2, 16] {
                for workers in [66, 132] {
                    let (grid, split) = deal(tiles, token_tiles, rounds, workers);
                    // Where k is shared, all have a part: rounded.cu counts on it.
                    assert!(
                        grid <= workers
                            && split <= tiles
                            && if split == 0 { tiles >= grid } else { split * rounds >= grid },
                        "{tiles} {token_tiles} {rounds}"
                    );
                }
            }
        }
    }
}

/// What is launched has room on a multiprocessor, rings of at least a round, and one tile a cluster that
/// shares k.
#[test]
fn shapes_fit_the_device() {
    for (s, coding) in SHAPES.iter().flat_map(|s| super::CODINGS.map(|coding| (s, coding))) {
        let ring = 2 * ROUND * (128 * s.tokens + 16);
        let (shared, packs) = (s.shared(coding) as usize, s.packs(coding));
        assert!(shared <= HOPPER.shared, "{} tokens: {shared}", s.tokens);
        assert!(shared >= s.table(coding) + ring + packs * s.pack(coding), "{} tokens: {shared}", s.tokens);
        assert!(packs % ROUND == 0 && packs > 0, "{} tokens", s.tokens);
        assert!(packs == s.packs || coding.levels == Levels::E4m3, "{} tokens", s.tokens);
        assert!(s.pair * s.split <= 8 && s.tokens % (8 * s.split) == 0, "{} tokens", s.tokens);
    }
    let weight = |n, units| Packed { codes: 0, scales: 0, n, k: units * 128, group: 64, units };
    for n in [16, 1000, 2560, 6144, 9728, 151_936] {
        for m in [17, 64, 100, 352, 512, 513, 2048] {
            for units in [1, 3, 20, 76] {
                let w = weight(n, units);
                let s = &SHAPES[Shape::of(&w, m, 132)];
                let clusters = s.row_tiles(n as usize, false) * m.div_ceil(s.tokens);
                let fits = clusters * s.pair * s.split <= 132 && rounds(&w) >= s.split;
                assert!(s.split == 1 || fits, "{n} {units} {m}");
                assert!(m <= s.tokens || s.tokens >= 128, "{n} {units} {m}");
            }
        }
    }
}

/// Shapes that were measured to be the fastest for matrices of a model of 4B (`cuda/NOTES.md`).
#[test]
fn the_fastest_is_taken() {
    let taken = |m, n, k: u32| {
        let w = Packed { codes: 0, scales: 0, n, k, group: 64, units: k / 128 };
        let s = &SHAPES[Shape::of(&w, m, 132)];
        (s.tokens, s.groups, s.split)
    };
    assert_eq!(taken(64, 6144, 2560), (64, 2, 2));
    assert_eq!(taken(64, 2560, 4096), (64, 3, 8));
    assert_eq!(taken(512, 6144, 2560), (128, 3, 1));
    assert_eq!(taken(512, 2560, 4096), (176, 2, 2));
    assert_eq!(taken(512, 2560, 9728), (176, 2, 2));
    assert_eq!(taken(512, 19456, 2560), (256, 2, 1));
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    GEMM.takes::<Gemm>("levels_rounded")?;
    GEMM.takes::<Gemm>("levels_rounded_gate")?;
    ROWS.takes::<Plain>("levels_rows")?;
    ROWS.takes::<Normed>("levels_rows_normed")
}

#[test]
fn every_shape_compiles() -> Result<()> {
    if let Err(why) = q4_cuda::libraries().nvrtc.version() {
        println!("skipped: {why}");
        return Ok(());
    }
    // Every shape for NF4, and for one other coding each; bench/cubins.py compiles all of both.
    for (i, shape) in SHAPES.iter().enumerate() {
        // The one whose sums are exact for the shape that sends them short.
        let other = super::CODINGS[if shape.is_of_two() { 6 } else { [1, 2, 3, 4, 5, 7][i % 6] }];
        for coding in [super::CODINGS[0], other] {
            let options = shape.options(coding);
            let options: Vec<_> = options.iter().map(String::as_str).collect();
            super::compile(&GEMM, &HOPPER, coding, &options)?;
        }
    }
    ROWS.compile(&HOPPER, &[]).map(drop)
}

/// To bf16, ties to even; sums and products of two bf16 are exact in f64.
#[cfg(test)]
fn round(x: f64) -> f64 {
    if x == 0.0 {
        return 0.0;
    }
    let unit = 2f64.powi(x.abs().log2().floor() as i32 - 7);
    (x / unit).round_ties_even() * unit
}

/// The same of whole numbers less zero points, and of scales of every type; a number of E4M3 is a whole one
/// below 16 times a power of two.
#[test]
fn a_weight_of_whole_numbers_is_rounded_once() {
    let mut worst = 0f64;
    for i in 0..4096u32 {
        let scale = f32::from_bits(0x3c00_0000 + i * 2053);
        let high = f32::from_bits(scale.to_bits() & 0xffff_0000);
        let low = round(f64::from(scale - high));
        for level in (-15..16).filter(|l| *l != 0).map(f64::from) {
            let got = round(level * f64::from(high) + round(level * low));
            worst = worst.max((got / (level * f64::from(scale)) - 1.0).abs());
        }
    }
    assert!(worst + 2f64.powi(-15) < 1.01 / 256.0, "{}", worst * 256.0);
}

/// `pairs_of` of levels.cuh, for every code.
#[test]
fn a_byte_of_e4m3_becomes_a_pair_by_shifts() {
    use half::bf16;
    let levels = FILES.iter().find(|f| f.0 == "levels.cuh").map_or("", |f| f.1);
    for line in
        ["risen(w << 8 & 0x80008000 | w << 4 & 0x07f007f0)", "risen(w & 0x80008000 | w >> 4 & 0x07f007f0)"]
    {
        assert!(levels.contains(line), "{line}");
    }
    let risen = |half: u32| bf16::from_bits(half as u16).to_f64() * 2f64.powi(120);
    for code in (0..=255u8).filter(|c| !q4_core::formats::e4m3::is_nan(*c)) {
        // Others beside it have all their bits, or none.
        for others in [0u32, !0] {
            for byte in 0..4 {
                let w = others & !(0xff << (8 * byte)) | u32::from(code) << (8 * byte);
                let pairs =
                    [w << 8 & 0x8000_8000 | w << 4 & 0x07f0_07f0, w & 0x8000_8000 | w >> 4 & 0x07f0_07f0];
                let have = risen(pairs[byte % 2] >> (16 * (byte / 2)) & 0xffff);
                let want = f64::from(q4_core::formats::e4m3::decode(code));
                assert_eq!(have.to_bits(), want.to_bits(), "{code:#04x} at {byte}");
            }
        }
    }
}

/// What rounded.cu computes of a code and a scale is within `oracle::ROUNDED` of the weight, whatever the
/// scale.
#[test]
fn a_weight_is_off_by_less_than_the_bound() {
    use q4_core::formats::nf4::CODEBOOK;
    const DOWN: f32 = 0.841_176_75;
    let table = [
        (0xf020_5498u32, 0xbebf_bfbfu32),
        (0x00de_61ad, 0x00bd_bebe),
        (0xce96_44c2, 0x3e3e_3e3d),
        (0x985c_2b06, 0x3f3f_3f3f),
    ];
    for word in table.iter().flat_map(|(low, high)| [low, high]) {
        assert!(GEMM.text.contains(&format!("{word:#010x}")), "{word:#010x}");
    }
    let wide = |bits: u32| f32::from_bits(bits << 16);
    let level = |code: usize| {
        let (low, high) = table[code / 4];
        wide((low >> (code % 4 * 8) & 0xff) | (high >> (code % 4 * 8) & 0xff) << 8)
    };
    let mut worst = 0f64;
    for i in 0..4096u32 {
        let scale = f32::from_bits(0x3c00_0000 + i * 2053);
        let s = scale * DOWN;
        let high = f32::from_bits(s.to_bits() & 0xffff_0000);
        let low = round(f64::from(s - high));
        for (code, value) in CODEBOOK.iter().enumerate() {
            let l = f64::from(level(code));
            let got = round(l * f64::from(high) + round(l * low));
            let want = f64::from(*value) * f64::from(scale);
            assert!(want != 0.0 || got == 0.0);
            worst = worst.max(if want == 0.0 { 0.0 } else { (got / want - 1.0).abs() });
        }
    }
    // Half of a sum may lose its last 8 bits on the way to another block.
    let cut = 2f64.powi(-15);
    assert!(worst + cut < q4_core::oracle::ROUNDED, "{}", (worst + cut) * 256.0);
    assert!(worst < 1.41 / 256.0, "numerics.md has it closer: {}", worst * 256.0);
    assert!(worst > 1.2 / 256.0, "the bound is far too wide: {}", worst * 256.0);
}
