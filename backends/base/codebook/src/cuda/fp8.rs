//! Launchers of `cuda/fp8.cu`: products of many rows that are rounded to FP8, on FP8 tensor cores of sm_90.
use super::{Coding, FILES, Levels, Packed, load};
use q4_core::{DType, Fp8Inputs, FuseSet, Result};
use q4_cuda::{Gpu, HOPPER, Kernel, Kernels as Module, Launch, Matrix, Source, TensorMap, mirror, output};
use std::sync::{Arc, OnceLock};

const GEMM: Source = Source { name: "levels-fp8", text: include_str!("../../cuda/fp8.cu"), files: FILES };
const CODES: Source =
    Source { name: "levels-codes", text: include_str!("../../cuda/codes.cu"), files: FILES };
/// In features of a slab, after which sums leave the tensor cores; those under one scale of x or of the
/// weight are as many, or multiples.
const SLAB: usize = 128;
/// Threads that round a row.
const CODERS: u32 = 256;

/// A shape of tiles; the constants of fp8.cu.
struct Shape {
    /// Rows of x of a tile.
    tokens: usize,
    /// Warpgroups that multiply, 64 rows of the weight each.
    groups: usize,
    /// Blocks of a cluster that share k, one tile a cluster.
    split: usize,
    /// What a slab takes, in nanoseconds on an H200 (`cuda/NOTES.md`).
    slab: usize,
}

const fn shape(tokens: usize, groups: usize, split: usize, slab: usize) -> Shape {
    Shape { tokens, groups, split, slab }
}

const SHAPES: [Shape; 7] = [
    shape(64, 2, 1, 234),
    shape(64, 3, 1, 288),
    shape(128, 2, 1, 362),
    shape(128, 3, 1, 460),
    shape(64, 2, 2, 234),
    shape(64, 2, 4, 234),
    shape(128, 3, 2, 460),
];
/// Beside its slabs, nanoseconds of a tile, and of clusters that exchange sums.
const TILE: usize = 1500;
const EXCHANGE: usize = 2000;

impl Shape {
    /// That of the shortest time for `m` rows on so many multiprocessors.
    fn of(w: &Packed, m: usize, processors: usize) -> usize {
        let time = |s: &Shape| {
            let tiles = s.row_tiles(w.n as usize, false) * m.div_ceil(s.tokens);
            let slabs = w.units as usize;
            if s.split == 1 {
                return Some(tiles.div_ceil(processors) * (slabs * s.slab + TILE));
            }
            // Clusters of four have a place for each at once on 15 of 16 multiprocessors.
            let most = if s.split > 2 { processors * 15 / 16 } else { processors };
            let fits = slabs >= s.split && tiles * s.split <= most;
            fits.then(|| slabs.div_ceil(s.split) * s.slab + TILE + EXCHANGE)
        };
        let times = SHAPES.iter().enumerate().filter_map(|(i, s)| Some((time(s)?, i)));
        times.min().map_or(0, |(_, i)| i)
    }
    /// Tiles of `n` rows of the weight.
    fn row_tiles(&self, n: usize, gate: bool) -> usize {
        let groups = n.div_ceil(16);
        if gate { (groups / 2).div_ceil(2 * self.groups) } else { groups.div_ceil(4 * self.groups) }
    }
    /// Tokens of a tile whose outputs a block writes.
    const fn kept(&self) -> usize {
        self.tokens / self.split
    }
    const fn threads(&self) -> u32 {
        128 * (self.groups as u32 + 1)
    }
    /// Bytes of shared memory.
    const fn shared(&self, by_blocks: bool) -> u32 {
        let of_x = if by_blocks { (4 * self.tokens).next_multiple_of(128) } else { 0 };
        let stage = self.groups * (64 * 128 + 4 * 128) + 128 * self.tokens + of_x + 16;
        let pieces = if self.split > 1 { 0 } else { 2 * 2048 };
        let received = (self.split - 1) * 64 * self.groups * self.kept() * 4;
        let beside = self.groups * (pieces + 16 * 32 * 4) + received + 8;
        let fitting = (HOPPER.shared - beside) / stage;
        let stages = if fitting < 8 { fitting } else { 8 };
        (stages * stage + beside) as u32
    }
    fn options(&self, by_blocks: bool) -> Vec<String> {
        let all = [
            ("TN", self.tokens),
            ("WGS", self.groups),
            ("SPLIT", self.split),
            ("X_BLOCKS", usize::from(by_blocks)),
        ];
        all.map(|(name, value)| format!("-D{name}={value}")).into()
    }
}

mirror! {
    struct Gemm {
        x_map: TensorMap, y_map: TensorMap, lines_map: TensorMap, scales_map: TensorMap, scales: u64, y: u64,
        ldy: u64, tokens: i32, n: i32, slabs: i32, x_scales_ld: i32, row_tiles: i32, token_tiles: i32,
        out: i32, aligned: i32,
    }
    struct Codes { x: Matrix, by_blocks: u32, fixed: f32, codes: u64, padded: u32, scales: u64, ld: u32 }
}

/// The two functions of fp8.cu.
struct Pair {
    plain: Kernel<Gemm>,
    gate: Kernel<Gemm>,
}

/// Kernels for calls of many rows. A shape is compiled when a call first needs it.
pub struct Kernels {
    gpu: Arc<Gpu>,
    coding: Coding,
    /// Of inputs with a scale a row, then of those with one for 128.
    pairs: [[OnceLock<Pair>; SHAPES.len()]; 2],
    codes: Kernel<Codes>,
}

/// A product to enqueue; addresses of the device.
pub struct Product {
    pub x: Matrix,
    pub y: Matrix,
    pub inputs: Fp8Inputs,
    /// `y[m, n/2] = silu(gate) * up`.
    pub gate: bool,
    /// `y += product`, f32.
    pub accumulate: bool,
    pub stream: usize,
    pub workspace: u64,
}

/// Where the parts of the workspace lie, in bytes.
struct Room {
    scales: usize,
    all: usize,
}

impl Kernels {
    /// Finds what rounds x; `None` where codes are no bytes or the device has no wgmma.
    pub fn load(gpu: &Arc<Gpu>, coding: Coding) -> Result<Option<Self>> {
        if !gpu.arch.wgmma || coding.levels != Levels::E4m3 {
            return Ok(None);
        }
        let codes = Module::load(gpu, &CODES, &[])?.get("levels_codes")?;
        Ok(Some(Self { gpu: gpu.clone(), coding, pairs: Default::default(), codes }))
    }

    fn pair(&self, index: usize, by_blocks: bool) -> Result<&Pair> {
        let place = &self.pairs[usize::from(by_blocks)][index];
        if let Some(pair) = place.get() {
            return Ok(pair);
        }
        let options = SHAPES[index].options(by_blocks);
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        let all = load(&self.gpu, &GEMM, self.coding, &options)?;
        let get = |name| all.get_with(name, SHAPES[index].shared(by_blocks));
        let pair = Pair { plain: get("levels_fp8")?, gate: get("levels_fp8_gate")? };
        Ok(place.get_or_init(|| pair))
    }

    /// Whether they take such calls: of more rows than one, which `row.cu` takes; no slab has two scales of a
    /// row of the weight, and x no norm, since what is rounded is the normed row. Gate and up rows start a
    /// group each.
    pub fn takes(&self, w: &Packed, m: usize, set: FuseSet) -> bool {
        let one_scale = (w.group as usize).is_multiple_of(SLAB) || w.group == w.k;
        let groups = !set.contains(FuseSet::GATE) || w.n % 32 == 0;
        w.units > 0 && m > 1 && one_scale && groups && !set.contains(FuseSet::NORM)
    }

    fn room(w: &Packed, m: usize) -> Room {
        let scales = (m * w.units as usize * SLAB).next_multiple_of(256);
        Room { scales, all: scales + w.units as usize * scales_of(m) * 4 }
    }

    /// Scratch bytes of calls they take of up to `m` rows.
    pub fn workspace(&self, w: &Packed, m: usize) -> usize {
        if self.takes(w, m, FuseSet::NONE) { Self::room(w, m).all } else { 0 }
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The matrices are device memory that fits the weight, and do not overlap; the workspace has the size
    /// asked for.
    pub unsafe fn forward(&self, w: &Packed, call: &Product) -> Result<()> {
        let (m, n, slabs) = (call.x.rows as usize, w.n as usize, w.units as usize);
        let (room, padded, ld) = (Self::room(w, m), slabs * SLAB, scales_of(m));
        let (codes, scales) = (call.workspace, call.workspace + room.scales as u64);
        let (by_blocks, fixed) = match call.inputs {
            Fp8Inputs::Static(scale) => (false, scale.effective(1.0)),
            Fp8Inputs::PerBlock => (true, 0.0),
            Fp8Inputs::PerRow => (false, 0.0),
        };
        let args = Codes {
            x: call.x,
            by_blocks: by_blocks.into(),
            fixed,
            codes,
            padded: padded as u32,
            scales,
            ld: ld as u32,
        };
        // SAFETY: by contract.
        unsafe { self.codes.launch(Launch::overlapping([m, 1, 1], CODERS, 0, call.stream), args)? };

        let index = Shape::of(w, m, self.gpu.processors as usize);
        let shape = &SHAPES[index];
        let x_map = TensorMap::of_bytes(codes, [m, padded], [shape.tokens, SLAB])?;
        // Of a warpgroup's 64 lines, and of their scales, words of eight bytes.
        let (groups, unit) = (n.div_ceil(16), self.coding.levels.unit());
        let (parts, of_part, boxed) = if call.gate { (2, groups / 2, 2) } else { (1, groups, 4) };
        let [of_group, of_parts] = [slabs * unit, of_part * slabs * unit];
        let tile = unit / 2 - 64;
        let lines_map = TensorMap::of_axes(
            w.codes,
            [128, of_part, parts, 2, slabs],
            [of_group, of_parts, tile, unit],
            [128, boxed, parts, 2, 1],
        )?;
        let scales_map = TensorMap::of_axes(
            w.codes + 2 * tile as u64,
            [16, of_part, parts, slabs],
            [of_group, of_parts, unit],
            [16, boxed, parts, 1],
        )?;
        let out = output(call.accumulate, call.y.dtype);
        let (y, ldy) = (call.y.data, call.y.ld);
        // As in rounded.rs.
        let is_aligned = out == 2 && y % 16 == 0 && ldy % 8 == 0 && call.y.cols % 8 == 0;
        let y_map = if is_aligned {
            let (width, columns) = if call.gate { (32, n / 2) } else { (64, n) };
            let tokens = if call.gate || shape.split == 1 { 16 } else { shape.kept() };
            TensorMap::new(y, DType::BF16, [m, columns, ldy as usize], [width, tokens])?
        } else {
            x_map
        };
        let (row_tiles, token_tiles) = (shape.row_tiles(n, call.gate), m.div_ceil(shape.tokens));
        let tiles = row_tiles * token_tiles;
        let blocks =
            if shape.split > 1 { tiles * shape.split } else { tiles.min(self.gpu.processors as usize) };
        let [tokens, slabs, x_scales_ld, row_tiles, token_tiles] =
            [m, slabs, ld, row_tiles, token_tiles].map(|v| v as i32);
        let args = Gemm {
            x_map,
            y_map,
            lines_map,
            scales_map,
            scales,
            y,
            ldy,
            tokens,
            n: w.n as i32,
            slabs,
            x_scales_ld,
            row_tiles,
            token_tiles,
            out,
            aligned: is_aligned.into(),
        };
        let pair = self.pair(index, by_blocks)?;
        let kernel = if call.gate { &pair.gate } else { &pair.plain };
        let how = Launch::overlapping([blocks, 1, 1], shape.threads(), shape.shared(by_blocks), call.stream);
        // SAFETY: by contract.
        unsafe { kernel.launch(how, args) }
    }
}

/// Scales from one slab of x to the next: whole tiles read theirs.
fn scales_of(m: usize) -> usize {
    m.next_multiple_of(128)
}

#[test]
fn a_block_of_inputs_is_a_slab() {
    assert_eq!(q4_core::formats::fp8::inputs::BLOCK, SLAB);
    assert!(SHAPES.iter().all(|s| scales_of(1).is_multiple_of(s.tokens)));
}

/// What is launched has room on a multiprocessor, some stages, and one tile a cluster that shares k.
#[test]
fn shapes_fit_the_device() {
    for (s, by_blocks) in SHAPES.iter().flat_map(|s| [(s, false), (s, true)]) {
        let (shared, stage) = (s.shared(by_blocks) as usize, s.groups * 64 * 128 + 128 * s.tokens);
        assert!(shared <= HOPPER.shared && shared > 3 * stage, "{} tokens: {shared}", s.tokens);
        // Pieces of 16 tokens, of a gate too.
        assert!(s.kept().is_multiple_of(16), "{} tokens", s.tokens);
    }
    for (n, units) in
        [16, 1000, 2560, 6144, 9728, 151_936].into_iter().flat_map(|n| [(n, 1), (n, 3), (n, 76)])
    {
        for m in [17, 64, 100, 352, 512, 513, 2048] {
            let w = Packed { codes: 0, scales: 0, n, k: units * 128, group: 128, units };
            let s = &SHAPES[Shape::of(&w, m, 132)];
            let blocks = |gate| s.row_tiles(n as usize, gate) * m.div_ceil(s.tokens) * s.split;
            // A gate's tiles are no more.
            assert!(s.split == 1 || blocks(false) <= 132 && units as usize >= s.split, "{n} {units} {m}");
            assert!(n % 32 != 0 || blocks(true) <= blocks(false).next_multiple_of(s.split), "{n} {m}");
        }
    }
}

/// Shapes that were measured to be the fastest, or within a tenth of it, for matrices of a model of 4B
/// (`cuda/NOTES.md`).
#[test]
fn the_fastest_is_taken() {
    let taken = |m, n, k: u32| {
        let w = Packed { codes: 0, scales: 0, n, k, group: 128, units: k / 128 };
        let s = &SHAPES[Shape::of(&w, m, 132)];
        (s.tokens, s.groups, s.split)
    };
    assert_eq!(taken(64, 2560, 4096), (64, 2, 4));
    assert_eq!(taken(64, 2560, 9728), (64, 2, 4));
    assert_eq!(taken(64, 19456, 2560), (64, 3, 1));
    assert_eq!(taken(512, 6144, 2560), (128, 3, 1));
    assert_eq!(taken(512, 2560, 4096), (64, 3, 1));
    assert_eq!(taken(512, 2560, 9728), (128, 3, 2));
    assert_eq!(taken(4096, 6144, 2560), (128, 3, 1));
    assert_eq!(taken(4096, 19456, 2560), (128, 3, 1));
}

/// Where two products by the inverse have one code, it is the quotient's: `codes_over` of codes.cu.
#[test]
fn products_by_the_inverse_have_the_codes_of_quotients() {
    use q4_core::formats::e4m3::round;
    for line in [
        "{by, inverse * 0.9999995f, inverse * 1.0000005f, !(by > 2.4e-38f && by < 4e37f)}",
        "pairs[t] = codes_of(v[2 * t] * s.less, v[2 * t + 1] * s.less);",
        "doubt |= pairs[t] ^ codes_of(v[2 * t] * s.more, v[2 * t + 1] * s.more);",
    ] {
        assert!(CODES.text.contains(line), "{line}");
    }
    let scales = [2.5e-38f32, 1e-30, 3.7e-4, 1.0, 0.75, 1.337, 2.0e5, 3.9e37];
    let (mut all, mut doubts) = (0, 0);
    for scale in scales {
        let inverse = 1.0 / scale;
        let (less, more) = (inverse * 0.999_999_5, inverse * 1.000_000_5);
        // Quotients of every binade that has codes and some besides, and the neighbours of every middle.
        let spread = (0..60_000u32).map(|i| f32::from_bits(0x3a00_0000 + i * 2053));
        let middles = (0..500u32).flat_map(|i| {
            let middle = 0x3a08_0000 + (i << 20);
            (-3..12).map(move |off| f32::from_bits(middle.wrapping_add_signed(off)))
        });
        for v in spread.chain(middles).map(|q| q * scale).filter(|v| *v < 1e38) {
            let (low, high) = (round(v * less), round(v * more));
            all += 1;
            doubts += usize::from(low != high);
            assert!(low != high || low == round(v / scale), "{v:e} over {scale:e}");
        }
    }
    assert!(doubts > 0 && doubts < all / 10, "{doubts} of {all}");
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    GEMM.takes::<Gemm>("levels_fp8")?;
    GEMM.takes::<Gemm>("levels_fp8_gate")?;
    CODES.takes::<Codes>("levels_codes")
}

#[test]
fn every_shape_compiles() -> Result<()> {
    if let Err(why) = q4_cuda::libraries().nvrtc.version() {
        println!("skipped: {why}");
        return Ok(());
    }
    let coding = super::CODINGS[super::CODINGS.len() - 1];
    for (i, shape) in SHAPES.iter().enumerate() {
        let options = shape.options(i % 2 == 0);
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        super::compile(&GEMM, &HOPPER, coding, &options)?;
    }
    CODES.compile(&HOPPER, &[]).map(drop)
}
