//! What the tests share: the backend on every instruction set of this machine, random operands, and scratch.
#![allow(dead_code)] // each test file uses a part
use half::{bf16, f16};
use q4_core::formats::nvfp4;
use q4_core::isa::Isa;
use q4_core::{
    Activations, BuiltinOptions, DType, Device, ExecContext, ExecPath, FuseSet, Fusion, GlobalScale,
    LinearSpec, Nvfp4, Nvfp4Parts, OpSet, PreparedWeight, Q4Backend, Q4Schema, Q4Weight, Reject, Result,
    ScaleLayout, Segment, SegmentSpec, TensorView, TensorViewMut, ThreadPool,
};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

pub fn construct(isa: &str) -> std::result::Result<Arc<dyn Q4Backend>, Vec<Reject>> {
    NVFP4::construct(&BuiltinOptions { isa: Some(isa.into()), ..BuiltinOptions::default() })
}

pub struct Ctx(pub Arc<dyn Q4Backend>);

impl Ctx {
    pub fn new(isa: &str) -> Self {
        Self(construct(isa).unwrap_or_else(|e| panic!("{isa}: {e:?}")))
    }
    /// One for every instruction set of this machine.
    pub fn all() -> Vec<(String, Self)> {
        Isa::available().map(|isa| (isa.name().to_owned(), Self::new(isa.name()))).collect()
    }
}

/// One quantised matrix.
#[derive(Clone)]
pub struct Source {
    pub rows: usize,
    pub k: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub layout: ScaleLayout,
    pub global: Option<GlobalScale>,
}

impl Source {
    pub fn random(rows: usize, k: usize, global: Option<GlobalScale>, rng: &mut Rng) -> Self {
        let codes = (0..rows * k / 2).map(|_| rng.next() as u8).collect();
        let scales = (0..rows * k / 16).map(|_| 0x20 + (rng.next() % 0x28) as u8).collect();
        Self { rows, k, codes, scales, layout: ScaleLayout::RowMajor, global }
    }
    /// The definition of its values.
    pub fn values(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.k];
        for (r, out) in out.chunks_exact_mut(self.k).enumerate() {
            let (c, s) = (self.k / 2, self.k / 16);
            nvfp4::dequantize_row(&self.codes[r * c..][..c], &self.scales[r * s..][..s], self.global, out);
        }
        out
    }
    fn segment(&self) -> Segment<'_> {
        let codes = TensorView::of(&self.codes, &[self.codes.len()]).expect("bytes");
        let scales = TensorView::of_bytes(&self.scales, DType::F8E4M3, &[self.scales.len()]).expect("bytes");
        Segment { rows: self.rows, data: Nvfp4Parts { codes, scales, global: self.global }.into() }
    }
}

/// A product of segments that are stored alike; where some have a per-tensor scale and some have none, those
/// get one of 1.
pub struct Desc {
    pub sources: Vec<Source>,
    pub k: usize,
    pub activations: Activations,
    pub x: DType,
    pub y: DType,
    pub max_m: usize,
}

impl Desc {
    pub fn of(sources: &[Source], k: usize) -> Self {
        let mut sources = sources.to_vec();
        let convention = sources.iter().find_map(|s| s.global).map(|g| g.convention());
        if let Some(convention) = convention {
            for s in &mut sources {
                let value = s
                    .global
                    .map_or(1.0, |g| if g.convention() == convention { g.value() } else { 1.0 / g.value() });
                s.global = GlobalScale::new(convention, value).ok();
            }
        }
        let (x, y) = (DType::F32, DType::F32);
        Self { sources, k, activations: Activations::Native, x, y, max_m: 64 }
    }
    pub fn n(&self) -> usize {
        self.sources.iter().map(|s| s.rows).sum()
    }
    pub fn spec(&self) -> LinearSpec {
        let segment = |(i, s): (usize, &Source)| SegmentSpec { name: format!("part.{i}"), rows: s.rows };
        let first = &self.sources[0];
        LinearSpec {
            segments: self.sources.iter().enumerate().map(segment).collect(),
            schema: Q4Schema::Nvfp4(Nvfp4 {
                scale_layout: first.layout,
                global: first.global.map(GlobalScale::convention),
            }),
            k: self.k,
            max_m: self.max_m,
            x: self.x,
            y: self.y,
            activations: self.activations,
            device: Device::Cpu,
            ops: OpSet::ALL,
        }
    }
}

pub struct Weight(pub Box<dyn PreparedWeight>);

impl Weight {
    pub fn new(ctx: &Ctx, desc: &Desc) -> Result<Self> {
        Self::with(ctx, desc, &Lent::serial())
    }
    pub fn with(ctx: &Ctx, desc: &Desc, lent: &Lent) -> Result<Self> {
        let (spec, segments): (_, Vec<_>) = (desc.spec(), desc.sources.iter().map(Source::segment).collect());
        let w = Q4Weight { schema: spec.schema, k: desc.k, segments: &segments };
        ctx.0.prepare(&w, &spec, ExecPath::FusedDequant, &mut ExecContext::cpu(&lent.0)).map(Self)
    }
    pub fn workspace(&self, m: usize) -> usize {
        self.0.workspace(m)
    }
    pub fn forward(&self, x: &Matrix, y: &mut Matrix, lent: &Lent) -> Result<()> {
        let mut scratch = Scratch::new(self.workspace(x.rows));
        self.0.forward(x.view(), y.view_mut(), &mut lent.context(scratch.bytes()))
    }
    pub fn fuses(&self, m: usize, set: FuseSet) -> bool {
        self.0.fuses(m, set)
    }
    pub fn fused(&self, x: &Matrix, set: FuseSet, y: &mut Matrix, lent: &Lent) -> Result<()> {
        let mut scratch = Scratch::new(self.workspace(x.rows));
        let (gate, accumulate) = (set.contains(FuseSet::GATE), set.contains(FuseSet::ACCUMULATE));
        let fusion = Fusion { norm: None, gate, accumulate };
        self.0.forward_fused(x.view(), &fusion, y.view_mut(), &mut lent.context(scratch.bytes()))
    }
    pub fn backward(&self, dy: &Matrix, dx: &mut Matrix, lent: &Lent) -> Result<()> {
        let mut scratch = Scratch::new(self.workspace(dy.rows));
        self.0.backward_input(dy.view(), dx.view_mut(), &mut lent.context(scratch.bytes()))
    }
    pub fn dequantize(&self, out: &mut Matrix, lent: &Lent) -> Result<()> {
        self.0.dequantize(out.view_mut(), &mut lent.context(&mut []))
    }
}

/// A matrix of any element type whose gaps hold a pattern.
#[derive(Clone)]
pub struct Matrix {
    pub bytes: Vec<u8>,
    pub rows: usize,
    pub cols: usize,
    pub ld: usize,
    pub dtype: DType,
}

/// NaN in every element type.
pub const POISON: u8 = 0xff;

impl Matrix {
    pub fn blank(rows: usize, cols: usize, ld: usize, dtype: DType) -> Self {
        // A Vec of u64 would align better than needed; the allocator gives 16 bytes for these sizes anyway.
        Self { bytes: vec![POISON; ((rows - 1) * ld + cols) * dtype.size()], rows, cols, ld, dtype }
    }
    /// Rounds `values` to `dtype`.
    pub fn of(values: &[f32], rows: usize, ld: usize, dtype: DType) -> Self {
        let cols = values.len() / rows;
        let mut m = Self::blank(rows, cols, ld, dtype);
        for r in 0..rows {
            for c in 0..cols {
                let v = values[r * cols + c];
                let at = (r * ld + c) * dtype.size();
                match dtype {
                    DType::F16 => m.bytes[at..at + 2].copy_from_slice(&f16::from_f32(v).to_le_bytes()),
                    DType::BF16 => m.bytes[at..at + 2].copy_from_slice(&bf16::from_f32(v).to_le_bytes()),
                    _ => m.bytes[at..at + 4].copy_from_slice(&v.to_le_bytes()),
                }
            }
        }
        m
    }
    pub fn view(&self) -> TensorView<'_> {
        let (data, shape, strides) = self.parts();
        // SAFETY: our own bytes.
        unsafe { TensorView::from_raw(data, self.bytes.len(), Device::Cpu, self.dtype, &shape, &strides) }
            .expect("inside")
    }
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let (data, shape, strides) = self.parts();
        // SAFETY: our own bytes, uniquely borrowed.
        unsafe { TensorViewMut::from_raw(data, self.bytes.len(), Device::Cpu, self.dtype, &shape, &strides) }
            .expect("inside")
    }
    fn parts(&self) -> (NonNull<c_void>, [i64; 2], [i64; 2]) {
        let data = NonNull::from(&self.bytes[..]).cast();
        (data, [self.rows as i64, self.cols as i64], [self.ld as i64, 1])
    }
    pub fn get(&self, r: usize, c: usize) -> f32 {
        let at = (r * self.ld + c) * self.dtype.size();
        let b = &self.bytes[at..];
        match self.dtype {
            DType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
            DType::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            _ => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        }
    }
    pub fn values(&self) -> Vec<f32> {
        (0..self.rows)
            .flat_map(|r| (0..self.cols).map(move |c| (r, c)))
            .map(|(r, c)| self.get(r, c))
            .collect()
    }
    pub fn gaps_are_untouched(&self) -> bool {
        let size = self.dtype.size();
        (0..self.rows - 1).all(|r| {
            self.bytes[(r * self.ld + self.cols) * size..(r + 1) * self.ld * size]
                .iter()
                .all(|&b| b == POISON)
        })
    }
}

/// 64-byte aligned bytes, poisoned.
pub struct Scratch(Vec<[u8; 64]>, usize);

impl Scratch {
    pub fn new(bytes: usize) -> Self {
        Self(vec![[POISON; 64]; bytes / 64 + 2], bytes)
    }
    pub fn bytes(&mut self) -> &mut [u8] {
        let pad = self.0.as_ptr().cast::<u8>().align_offset(64);
        &mut self.0.as_flattened_mut()[pad..pad + self.1]
    }
}

/// Threads lent to a call.
pub struct Lent(pub ThreadPool);

impl Lent {
    pub fn serial() -> Self {
        Self::threads(1)
    }
    pub fn threads(n: usize) -> Self {
        Self(ThreadPool::new(n))
    }
    pub fn context<'a>(&'a self, scratch: &'a mut [u8]) -> ExecContext<'a> {
        let len = scratch.len();
        let workspace = (len > 0).then(|| TensorViewMut::of(scratch, &[len]).expect("bytes"));
        ExecContext { workspace, ..ExecContext::cpu(&self.0) }
    }
}

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    /// Uniform in -1 to 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit() * self.unit().exp2()).collect()
    }
}
