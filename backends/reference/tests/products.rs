//! The oracle as a backend, against sums written out here and the values of the exact decoder.
#![allow(clippy::unwrap_used)]
use q4_core::formats::{int8, nf4, nvfp4, swizzle};
use q4_core::oracle::{act_global, roundoff};
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    Absmax, ActGlobal, ActQuant, Activations, BuiltinOptions, Code, Convention, DType, Device, Dispatch,
    ExecContext, ExecPath, GlobalScale, HostEnv, LinearSpec, NibbleOrder, OpSet, Overrides, Policy,
    PreparedWeight, Q4Backend, Q4Schema, Q4Weight, Registry, RejectCode, RowDecoder, Rule, ScaleLayout,
    Segment, SegmentData, SegmentSpec, TensorView, TensorViewMut, ThreadPool,
};
use q4_reference as _;
use std::sync::Arc;

const IO: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn every_operation_is_exact_but_for_one_rounding() {
    let backend = backend();
    let mut turn = 0;
    for schema in schemas() {
        for (n, k) in [(1, 16), (17, 80), (48, 256), (130, 32), (5, 33)] {
            for activations in activations() {
                if k % 16 != 0
                    && (activations != Activations::Native || matches!(schema, Q4Schema::Nvfp4 { .. }))
                {
                    continue;
                }
                turn += 1;
                let (xt, yt, m) = (IO[turn % 3], IO[turn / 3 % 3], [1, 2, 5, 33][turn % 4]);
                let weight = Weight::new(schema, k, &split(n, turn));
                let segments = weight.segments();
                let w = Q4Weight { schema, k, segments: &segments };
                let p = prepare(&*backend, &w, &weight.spec(activations, xt, yt));
                let values = decoded(&w);
                let x = IoBuffer::new(xt, &noise(m * k, turn as u64)).to_f32();
                let seen = as_seen(&x, k, &activations, xt);
                let one = forward(&*p, &x, (m, k, n), (xt, yt), 1);
                assert_eq!(one, forward(&*p, &x, (m, k, n), (xt, yt), 3), "threads");
                for (at, y) in one.iter().enumerate() {
                    let (r, row) = (at / n, at % n);
                    let terms = seen[r * k..][..k]
                        .iter()
                        .zip(&values[row * k..][..k])
                        .map(|(x, w)| x * f64::from(*w));
                    near(*y, terms, yt, &format!("{schema:?} {activations} y[{r}, {row}]"));
                }
                let dy = IoBuffer::new(yt, &noise(m * n, 9)).to_f32();
                for (at, dx) in backward(&*p, &dy, (m, k, n), (xt, yt)).iter().enumerate() {
                    let (r, c) = (at / k, at % k);
                    let terms = (0..n).map(|row| f64::from(dy[r * n + row]) * f64::from(values[row * k + c]));
                    near(*dx, terms, xt, &format!("{schema:?} dx[{r}, {c}]"));
                }
                let mut out = IoBuffer::new(yt, &vec![f32::NAN; n * k]);
                let pool = ThreadPool::new(1);
                p.dequantize(out.view_mut(n, k).unwrap(), &mut ExecContext::cpu(&pool)).unwrap();
                assert_eq!(out.to_f32(), IoBuffer::new(yt, &values).to_f32());
                assert!(p.info().resident_bytes >= schema.stored_bytes(n, k));
            }
        }
    }
}

#[test]
fn strides_are_followed_and_gaps_left_alone() {
    let (m, n, k, pool) = (3, 17, 80, ThreadPool::new(2));
    let weight = Weight::new(schemas()[1], k, &[n]);
    let segments = weight.segments();
    let w = Q4Weight { schema: weight.schema, k, segments: &segments };
    let p = prepare(&*backend(), &w, &weight.spec(Activations::Native, DType::F32, DType::F32));
    let dense = noise(m * k, 5);
    let expect = forward(&*p, &dense, (m, k, n), (DType::F32, DType::F32), 1);
    let (ldx, ldy) = (k + 5, n + 3);
    let mut x = vec![f32::NAN; m * ldx];
    dense.chunks(k).enumerate().for_each(|(r, row)| x[r * ldx..][..k].copy_from_slice(row));
    let mut y = vec![-7.25; m * ldy];
    let xv = TensorView::matrix(&x, m, k, ldx).unwrap();
    let yv = TensorViewMut::matrix(&mut y, m, n, ldy).unwrap();
    p.forward(xv, yv, &mut ExecContext::cpu(&pool)).unwrap();
    for r in 0..m {
        assert_eq!(y[r * ldy..][..n], expect[r * n..][..n]);
        assert!(y[r * ldy + n..(r + 1) * ldy].iter().all(|v| *v == -7.25));
    }
    let short = TensorView::of(&dense, &[m * 2, k / 2]).unwrap();
    let yv = TensorViewMut::matrix(&mut y, m, n, ldy).unwrap();
    let e = p.forward(short, yv, &mut ExecContext::cpu(&pool)).unwrap_err();
    assert_eq!(e.code(), Code::ShapeMismatch);
}

#[test]
fn every_reason_is_given_at_once() {
    let (env, backend) = (HostEnv::default(), backend());
    for schema in schemas() {
        for a in activations() {
            let good = Weight::new(schema, 64, &[16]).spec(a, DType::F16, DType::BF16);
            assert_eq!(backend.can_prepare(&good, ExecPath::Reference, &env), Ok(()));
        }
    }
    let mut bad = Weight::new(schemas()[0], 64, &[16]).spec(Activations::Native, DType::F32, DType::F32);
    bad.k = 24;
    bad.x = DType::I32;
    bad.y = DType::F64;
    bad.device = Device::Cuda(0);
    let global = ActGlobal::Static(GlobalScale::divide(2.0).unwrap());
    bad.activations = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global });
    let reasons = backend.can_prepare(&bad, ExecPath::NativeKernel, &env).unwrap_err();
    let codes: Vec<_> = reasons.iter().map(|r| r.code).collect();
    use RejectCode::*;
    let expect = [
        PathUnsupported,
        DeviceAbsent,
        ActivationsUnsupported,
        DtypeUnsupported,
        DtypeUnsupported,
        ShapeUnsupported,
        ShapeUnsupported,
    ];
    assert_eq!(codes, expect);
}

#[test]
fn it_serves_whoever_names_it_and_nobody_else() {
    let pool = ThreadPool::new(2);
    for schema in schemas() {
        let weight = Weight::new(schema, 256, &[48, 17]);
        let spec = weight.spec(activations()[3], DType::BF16, DType::F16);
        let builtin = || Registry::builtin(&BuiltinOptions::default()).unwrap();
        assert!(
            Dispatch::new(builtin(), Policy::default()).select(&spec).is_err(),
            "only the oracle is linked here"
        );
        let overrides = Overrides { all: Some("reference".into()), ..Default::default() };
        let dispatch = Dispatch::new(builtin(), Policy { overrides, ..Default::default() });
        let selection = dispatch.select(&spec).unwrap();
        let segments = weight.segments();
        let w = Q4Weight { schema, k: 256, segments: &segments };
        let linear = dispatch.prepare(&w, &spec, &selection, &pool).unwrap();
        let (x, mut y) = (IoBuffer::new(DType::BF16, &noise(512, 4)), IoBuffer::new(DType::F16, &[0.0; 130]));
        let mut cx = ExecContext::cpu(&pool);
        linear.forward(x.view(2, 256).unwrap(), y.view_mut(2, 65).unwrap(), &mut cx).unwrap();
        let ran = dispatch.witness().executed();
        assert_eq!((ran.len(), ran[0].calls, ran[0].path), (1, 1, ExecPath::Reference));
        assert_eq!(ran[0].backend, "reference");
    }
}

/// `y` is the sum rounded once; what the sum itself may be off by is what decoded values were rounded by.
fn near(y: f32, terms: impl Iterator<Item = f64>, dtype: DType, what: &str) {
    let (exact, abs) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
    let limit = exact.abs() * roundoff(dtype) * 1.001 + abs * 4.0 * roundoff(DType::F32) + 3e-8;
    assert!((f64::from(y) - exact).abs() <= limit, "{what} = {y}, not {exact} within {limit}");
}

/// x as the product sees it, in f64.
fn as_seen(x: &[f32], k: usize, activations: &Activations, source: DType) -> Vec<f64> {
    let mut out = Vec::new();
    for row in x.chunks(k) {
        match activations {
            Activations::Native => out.extend(row.iter().map(|v| f64::from(*v))),
            Activations::Int8 => {
                let (mut q, mut s) = (vec![0; k], vec![0.0; k / 16]);
                int8::quantize_row(row, &mut q, &mut s).unwrap();
                out.extend(q.iter().enumerate().map(|(i, q)| f64::from(*q) * f64::from(s[i / 16])));
            }
            Activations::Nvfp4(act) => {
                let global = act_global(act, x, source).unwrap();
                let quantizer = nvfp4::Quantizer { rule: act.rule, global, source };
                let (mut codes, mut scales, mut values) = (vec![0; k / 2], vec![0; k / 16], vec![0.0; k]);
                quantizer.quantize_row(row, &mut codes, &mut scales).unwrap();
                nvfp4::dequantize_row(&codes, &scales, global, &mut values);
                out.extend(values.iter().map(|v| f64::from(*v)));
            }
        }
    }
    out
}

fn backend() -> Arc<dyn Q4Backend> {
    Registry::builtin(&BuiltinOptions::default()).unwrap().live("reference").unwrap().clone()
}

fn prepare(backend: &dyn Q4Backend, w: &Q4Weight<'_>, spec: &LinearSpec) -> Box<dyn PreparedWeight> {
    backend.prepare(w, spec, ExecPath::Reference, &mut ExecContext::cpu(&ThreadPool::new(1))).unwrap()
}

fn forward(
    p: &dyn PreparedWeight,
    x: &[f32],
    (m, k, n): (usize, usize, usize),
    (xt, yt): (DType, DType),
    threads: usize,
) -> Vec<f32> {
    let (x, mut y) = (IoBuffer::new(xt, x), IoBuffer::new(yt, &vec![f32::NAN; m * n]));
    let pool = ThreadPool::new(threads);
    p.forward(x.view(m, k).unwrap(), y.view_mut(m, n).unwrap(), &mut ExecContext::cpu(&pool)).unwrap();
    y.to_f32()
}

fn backward(
    p: &dyn PreparedWeight,
    dy: &[f32],
    (m, k, n): (usize, usize, usize),
    (xt, yt): (DType, DType),
) -> Vec<f32> {
    let (dy, mut dx) = (IoBuffer::new(yt, dy), IoBuffer::new(xt, &vec![f32::NAN; m * k]));
    let pool = ThreadPool::new(1);
    p.backward_input(dy.view(m, n).unwrap(), dx.view_mut(m, k).unwrap(), &mut ExecContext::cpu(&pool))
        .unwrap();
    dx.to_f32()
}

fn decoded(w: &Q4Weight<'_>) -> Vec<f32> {
    let decoder = RowDecoder::new(w).unwrap();
    let mut out = vec![0.0; w.n() * w.k];
    out.chunks_mut(w.k).enumerate().for_each(|(r, row)| decoder.row(r, row));
    out
}

fn schemas() -> Vec<Q4Schema> {
    let mut all = Vec::new();
    for scale_layout in [ScaleLayout::RowMajor, ScaleLayout::Swizzled128x4] {
        let globals = [None, Some(Convention::Multiply), Some(Convention::Divide)];
        all.extend(globals.map(|global| Q4Schema::Nvfp4 { scale_layout, global }));
    }
    for (block, nibble_order) in [(64, NibbleOrder::HighFirst), (4096, NibbleOrder::LowFirst)] {
        all.extend([None, Some(256)].map(|nested| Q4Schema::Nf4 { nibble_order, block, nested }));
    }
    all.extend(IO.map(|dtype| Q4Schema::Dense { dtype }));
    all
}

/// One, two or three segments of `n` rows in all.
fn split(n: usize, turn: usize) -> Vec<usize> {
    match (turn % 3, n) {
        (1, 2..) => vec![n / 3 + 1, n - n / 3 - 1],
        (2, 3..) => vec![1, n / 2, n - n / 2 - 1],
        _ => vec![n],
    }
}

struct Weight {
    schema: Q4Schema,
    k: usize,
    parts: Vec<Part>,
}

struct Part {
    rows: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    global: Option<GlobalScale>,
    absmax: Vec<f32>,
    nested: (Vec<u8>, Vec<f32>, f32),
    dense: IoBuffer,
}

impl Weight {
    fn new(schema: Q4Schema, k: usize, rows: &[usize]) -> Self {
        let part = |(i, &rows)| Part::new(schema, k, rows, i as u64);
        Self { schema, k, parts: rows.iter().enumerate().map(part).collect() }
    }

    fn segments(&self) -> Vec<Segment<'_>> {
        self.parts.iter().map(|p| Segment { rows: p.rows, data: p.data(self.schema, self.k) }).collect()
    }

    fn spec(&self, activations: Activations, x: DType, y: DType) -> LinearSpec {
        let name = |(i, p): (usize, &Part)| SegmentSpec { name: format!("layer.{i}_proj"), rows: p.rows };
        LinearSpec {
            segments: self.parts.iter().enumerate().map(name).collect(),
            schema: self.schema,
            k: self.k,
            max_m: 64,
            x,
            y,
            activations,
            device: Device::Cpu,
            ops: OpSet::ALL,
        }
    }
}

impl Part {
    fn new(schema: Q4Schema, k: usize, rows: usize, seed: u64) -> Self {
        let bytes =
            |len, seed| noise(len, seed).iter().map(|v| (v.to_bits() >> 5) as u8).collect::<Vec<u8>>();
        let mut out = Self {
            rows,
            codes: bytes((rows * k).div_ceil(2), seed),
            scales: Vec::new(),
            global: None,
            absmax: Vec::new(),
            nested: Default::default(),
            dense: IoBuffer::F32(Vec::new()),
        };
        match schema {
            Q4Schema::Nvfp4 { scale_layout, global } => {
                // Without a per-tensor scale, small enough for sums in f16.
                let top = if global.is_some() { 0x7f } else { 0x48 };
                out.scales = bytes(rows * k / 16, seed + 50).iter().map(|b| b % top).collect();
                if scale_layout == ScaleLayout::Swizzled128x4 {
                    out.scales = swizzle::to_blocked(&out.scales, rows, k / 16);
                }
                let value = 0.013 * (seed + 1) as f32;
                out.global = global.map(|c| match c {
                    Convention::Multiply => GlobalScale::multiply(value).unwrap(),
                    Convention::Divide => GlobalScale::divide(1.0 / value).unwrap(),
                });
            }
            Q4Schema::Nf4 { block, .. } => {
                let blocks = (rows * k).div_ceil(block as usize);
                out.absmax = noise(blocks, 77 + seed).iter().map(|v| 0.01 + v.abs()).collect();
                out.nested = nf4::nest(&out.absmax);
            }
            Q4Schema::Dense { dtype } => out.dense = IoBuffer::new(dtype, &noise(rows * k, 60 + seed)),
            other => panic!("{other} is not offered"),
        }
        out
    }

    fn data(&self, schema: Q4Schema, k: usize) -> SegmentData<'_> {
        let codes = TensorView::of(&self.codes, &[self.codes.len()]).unwrap();
        match schema {
            Q4Schema::Nvfp4 { .. } => {
                let scales = TensorView::of_bytes(&self.scales, DType::F8E4M3, &[self.scales.len()]).unwrap();
                SegmentData::Nvfp4 { codes, scales, global: self.global }
            }
            Q4Schema::Nf4 { nested: None, .. } => {
                let absmax = Absmax::Plain(TensorView::of(&self.absmax, &[self.absmax.len()]).unwrap());
                SegmentData::Nf4 { codes, absmax }
            }
            Q4Schema::Nf4 { nested: Some(block), .. } => {
                let (nested, absmax, offset) = &self.nested;
                let absmax = Absmax::Nested {
                    codes: TensorView::of(nested, &[nested.len()]).unwrap(),
                    map: TensorView::of(nf4::dynamic_map(), &[256]).unwrap(),
                    absmax: TensorView::of(absmax, &[absmax.len()]).unwrap(),
                    offset: *offset,
                    block: block as usize,
                };
                SegmentData::Nf4 { codes, absmax }
            }
            _ => SegmentData::Dense { weight: self.dense.view(self.rows, k).unwrap() },
        }
    }
}

/// Every activation format; of NVFP4 several rules and sources of the per-tensor scale.
fn activations() -> [Activations; 5] {
    let nvfp4 = |rule, global| Activations::Nvfp4(ActQuant { rule, global });
    let g = GlobalScale::divide(900.0).unwrap();
    [
        Activations::Native,
        Activations::Int8,
        nvfp4(Rule::ModelOpt, ActGlobal::None),
        nvfp4(Rule::CompressedTensors, ActGlobal::Static(g)),
        nvfp4(Rule::TorchAo, ActGlobal::PerCall),
    ]
}

/// Uniform in [-2, 2), the same in every run.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 22) as f32 - 2.0
    };
    (0..len + 8).map(|_| next()).skip(8).collect()
}
