//! Seeded problems over the shapes where kernels break: one row and many, one below and above every tile.
use crate::measure::Problem;
use q4_core::formats::{nf4, swizzle};
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    Absmax, ActGlobal, ActQuant, Activations, Convention, DType, GlobalScale, NibbleOrder, Q4Schema,
    Q4Weight, Result, Rule, ScaleLayout, Segment, SegmentData, TensorView,
};

/// Out features of the segments, in features, rows.
const SHAPES: [(&[usize], usize, usize); 12] = [
    (&[1], 16, 1),
    (&[16], 64, 2),
    (&[15], 80, 3),
    (&[17], 256, 4),
    (&[48], 64, 5),
    (&[33], 320, 7),
    (&[130], 128, 8),
    (&[64, 16, 16], 256, 9),
    (&[96, 96], 96, 17),
    (&[31], 1024, 1),
    (&[40], 192, 33),
    (&[20, 12], 512, 65),
];

/// Every encoding a checkpoint can have.
pub const SCHEMAS: [Q4Schema; 9] = [
    Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None },
    Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Multiply) },
    Q4Schema::Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Divide) },
    Q4Schema::Nvfp4 { scale_layout: ScaleLayout::Swizzled128x4, global: Some(Convention::Multiply) },
    Q4Schema::Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: None },
    Q4Schema::Nf4 { nibble_order: NibbleOrder::LowFirst, block: 128, nested: None },
    Q4Schema::Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested: Some(256) },
    Q4Schema::Dense { dtype: DType::BF16 },
    Q4Schema::Dense { dtype: DType::F32 },
];

/// Activation formats that make sense for an encoding.
pub fn activations(schema: &Q4Schema) -> Vec<Activations> {
    match schema {
        Q4Schema::Dense { .. } => vec![Activations::Native],
        Q4Schema::Nf4 { .. } => vec![Activations::Native, Activations::Int8],
        _ => {
            let quantizers = [
                ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None },
                ActQuant { rule: Rule::TorchAo, global: ActGlobal::PerCall },
                ActQuant { rule: Rule::CompressedTensors, global: ActGlobal::PerCall },
                ActQuant { rule: Rule::Runtime, global: ActGlobal::None },
            ];
            let nvfp4 = quantizers.into_iter().map(Activations::Nvfp4);
            [Activations::Native, Activations::Int8].into_iter().chain(nvfp4).collect()
        }
    }
}

/// Hands every problem of one encoding to `visit`. The name of a problem holds all that makes it.
pub fn each(schema: Q4Schema, visit: &mut dyn FnMut(&Problem<'_>) -> Result<()>) -> Result<()> {
    for (at, (rows, k, m)) in SHAPES.iter().enumerate() {
        let seed = at as u64;
        let stored: Vec<Stored> =
            rows.iter().enumerate().map(|(i, r)| Stored::new(schema, *r, *k, seed << 8 | i as u64)).collect();
        let segments = stored.iter().map(|s| s.segment(schema, *k)).collect::<Result<Vec<_>>>()?;
        for activations in activations(&schema) {
            for io in [DType::F32, DType::BF16, DType::F16] {
                // Sixteen-bit types change the edges of a kernel, not its middle: every third shape is enough.
                if io != DType::F32 && at % 3 != 0 {
                    continue;
                }
                let raw: Vec<f32> = (0..m * k).map(|i| activation(seed, i as u64)).collect();
                visit(&Problem {
                    name: format!("lattice/{schema:?}/{activations:?}/{io}/n{rows:?}.k{k}.m{m}"),
                    weight: Q4Weight { schema, k: *k, segments: &segments },
                    x: IoBuffer::new(io, &raw).to_f32(),
                    m: *m,
                    activations,
                    io,
                    recorded: None,
                })?;
            }
        }
    }
    Ok(())
}

struct Stored {
    rows: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    absmax: Vec<f32>,
    nested: Option<(Vec<u8>, Vec<f32>, f32)>,
    global: Option<GlobalScale>,
    dense: IoBuffer,
}

impl Stored {
    fn new(schema: Q4Schema, rows: usize, k: usize, seed: u64) -> Self {
        let word = |i: usize| mix(seed << 40 | i as u64);
        let mut out = Self {
            rows,
            codes: (0..(rows * k).div_ceil(2)).map(|i| word(i) as u8).collect(),
            scales: Vec::new(),
            absmax: Vec::new(),
            nested: None,
            global: None,
            dense: IoBuffer::F32(Vec::new()),
        };
        match schema {
            Q4Schema::Nvfp4 { scale_layout, global } => {
                // Every scale that is not NaN; without a per-tensor scale only those whose sums fit f16.
                let scales = if global.is_some() { 0x7f } else { 0x49 };
                let linear: Vec<u8> = (0..rows * k / 16).map(|i| (word(i) >> 16) as u8 % scales).collect();
                out.scales = match scale_layout {
                    ScaleLayout::RowMajor => linear,
                    ScaleLayout::Swizzled128x4 => swizzle::to_blocked(&linear, rows, k / 16),
                };
                let value = 0.01 + uniform(word(0)) / 100.0;
                out.global = global.and_then(|c| match c {
                    Convention::Multiply => GlobalScale::multiply(value).ok(),
                    Convention::Divide => GlobalScale::divide(1.0 / value).ok(),
                });
            }
            Q4Schema::Nf4 { block, nested, .. } => {
                let blocks = (rows * k).div_ceil(block as usize);
                out.absmax = (0..blocks).map(|i| 0.01 + uniform(word(i))).collect();
                out.nested = nested.map(|_| nf4::nest(&out.absmax));
            }
            Q4Schema::Dense { dtype } => {
                let values: Vec<f32> = (0..rows * k).map(|i| uniform(word(i)) - 0.5).collect();
                out.dense = IoBuffer::new(dtype, &values);
            }
            _ => {}
        }
        out
    }

    fn segment(&self, schema: Q4Schema, k: usize) -> Result<Segment<'_>> {
        let codes = TensorView::of(&self.codes, &[self.codes.len()])?;
        let data = match schema {
            Q4Schema::Nvfp4 { .. } => SegmentData::Nvfp4 {
                codes,
                scales: TensorView::of_bytes(&self.scales, DType::F8E4M3, &[self.scales.len()])?,
                global: self.global,
            },
            Q4Schema::Nf4 { .. } => SegmentData::Nf4 {
                codes,
                absmax: match &self.nested {
                    None => Absmax::Plain(TensorView::of(&self.absmax, &[self.absmax.len()])?),
                    Some((codes, absmax, offset)) => Absmax::Nested {
                        codes: TensorView::of(codes, &[codes.len()])?,
                        map: TensorView::of(nf4::dynamic_map().as_slice(), &[256])?,
                        absmax: TensorView::of(absmax, &[absmax.len()])?,
                        offset: *offset,
                        block: 256,
                    },
                },
            },
            _ => SegmentData::Dense { weight: self.dense.view(self.rows, k)? },
        };
        Ok(Segment { rows: self.rows, data })
    }
}

/// Heavy-tailed, with exact zeros and whole blocks of them.
fn activation(seed: u64, i: u64) -> f32 {
    let u = mix(seed << 20 ^ i ^ 0xa5a5);
    let v = (uniform(u) - 0.5) * 2.0;
    match (u & 31, i / 16 % 7) {
        (0, _) | (_, 6) => 0.0,
        (1, _) => v * 20.0,
        _ => v,
    }
}

fn mix(i: u64) -> u64 {
    let mut z = i.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// `[0, 1)` from the upper bits.
fn uniform(word: u64) -> f32 {
    (word >> 40) as f32 / (1u32 << 24) as f32
}
