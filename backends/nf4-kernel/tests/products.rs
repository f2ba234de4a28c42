//! Products, their reverse and the decoded matrix of the registered backend, against the exact oracle.
#![allow(clippy::unwrap_used)]
use q4_core::oracle::{Input, bound};
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    Absmax, Activations, BuiltinOptions, Code, DType, Device, Dispatch, ExecContext, ExecPath, HostEnv,
    LinearSpec, NibbleOrder, OpSet, Policy, PreparedWeight, Q4Backend, Q4Schema, Q4Weight, Registry,
    RejectCode, RowDecoder, Segment, SegmentData, SegmentSpec, TensorView, TensorViewMut, ThreadPool,
    formats::nf4,
};
use q4_nf4_kernel as _;
use std::sync::Arc;

const IO: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const N: [usize; 6] = [1, 15, 16, 17, 48, 130];
const K: [usize; 7] = [16, 32, 64, 80, 96, 256, 320];
const M: [usize; 8] = [33, 17, 8, 5, 4, 3, 2, 1];

#[test]
fn products_are_those_of_the_oracle_on_every_isa() {
    let pool = ThreadPool::new(2);
    let backends = backends();
    let mut turn = 0;
    for schema in schemas() {
        for (&n, &k) in N.iter().flat_map(|n| K.iter().map(move |k| (n, k))) {
            for activations in [Activations::Native, Activations::Int8] {
                turn += 1;
                let (xt, yt) = (IO[turn % 3], IO[turn / 3 % 3]);
                let weight = Weight::new(schema, k, &split(n, turn));
                let segments = weight.segments();
                let w = Q4Weight { schema, k, segments: &segments };
                let spec = weight.spec(activations, xt, yt);
                let x = IoBuffer::new(xt, &noise(M[0] * k, turn as u64)).to_f32();
                let sums = sums(&w, &x, &activations, xt);
                for (isa, backend) in &backends {
                    let p = prepare(&**backend, &w, &spec, &pool);
                    let mut whole = Vec::new();
                    for m in M {
                        let y = forward(&*p, &x[..m * k], (m, k, n), (xt, yt), &pool);
                        for (i, y) in y.iter().enumerate() {
                            let (exact, abs) = sums[i];
                            let limit = bound(ExecPath::FusedDequant, yt, k, exact, abs);
                            let error = (f64::from(*y) - exact).abs();
                            assert!(
                                error <= limit,
                                "{isa} {schema:?} {activations} {xt}->{yt} n {n} k {k} m {m} y[{}, {}] = {y}, not {exact} within {limit}",
                                i / n,
                                i % n
                            );
                        }
                        if m == M[0] {
                            whole = y;
                        } else {
                            assert_eq!(
                                bits(&y),
                                bits(&whole[..m * n]),
                                "{isa}: rows depend on m = {m} at n {n} k {k}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let weight = Weight::new(schemas()[0], 320, &[130, 301]);
    let segments = weight.segments();
    let w = Q4Weight { schema: weight.schema, k: 320, segments: &segments };
    for (isa, backend) in backends() {
        let p = prepare(
            &*backend,
            &w,
            &weight.spec(Activations::Int8, DType::BF16, DType::F32),
            &ThreadPool::new(1),
        );
        for m in [1, 4, 33] {
            let (x, dy) = (noise(m * 320, 1), noise(m * 431, 2));
            let run = |threads| {
                let pool = ThreadPool::new(threads);
                let y = forward(&*p, &x, (m, 320, 431), (DType::BF16, DType::F32), &pool);
                (bits(&y), bits(&backward(&*p, &dy, (m, 320, 431), (DType::BF16, DType::F32), &pool)))
            };
            let one = run(1);
            assert!([2, 3, 7].into_iter().all(|t| run(t) == one), "{isa}, m = {m}");
        }
    }
}

#[test]
fn strides_are_followed_and_gaps_left_alone() {
    let (n, k, pool) = (17, 80, ThreadPool::new(2));
    let weight = Weight::new(schemas()[1], k, &[n]);
    let segments = weight.segments();
    let w = Q4Weight { schema: weight.schema, k, segments: &segments };
    for (_, backend) in backends() {
        for (m, activations) in [(3, Activations::Native), (9, Activations::Int8)] {
            let p = prepare(&*backend, &w, &weight.spec(activations, DType::F32, DType::F32), &pool);
            let dense = noise(m * k, 5);
            let expect = forward(&*p, &dense, (m, k, n), (DType::F32, DType::F32), &pool);
            let (ldx, ldy) = (k + 5, n + 3);
            let mut x = vec![f32::NAN; m * ldx];
            dense.chunks(k).enumerate().for_each(|(r, row)| x[r * ldx..][..k].copy_from_slice(row));
            let mut y = vec![-7.25; m * ldy];
            let mut scratch = Aligned::new(p.workspace(m));
            let mut cx = ExecContext { workspace: scratch.view(), ..ExecContext::cpu(&pool) };
            let xv = TensorView::matrix(&x, m, k, ldx).unwrap();
            p.forward(xv, TensorViewMut::matrix(&mut y, m, n, ldy).unwrap(), &mut cx).unwrap();
            let expect_dx = backward(&*p, &expect, (m, k, n), (DType::F32, DType::F32), &pool);
            let yv = TensorView::matrix(&y, m, n, ldy).unwrap();
            let mut dx = vec![-7.25; m * ldx];
            p.backward_input(yv, TensorViewMut::matrix(&mut dx, m, k, ldx).unwrap(), &mut cx).unwrap();
            for r in 0..m {
                assert_eq!(bits(&y[r * ldy..][..n]), bits(&expect[r * n..][..n]));
                assert_eq!(bits(&dx[r * ldx..][..k]), bits(&expect_dx[r * k..][..k]));
                assert!(
                    y[r * ldy + n..(r + 1) * ldy]
                        .iter()
                        .chain(&dx[r * ldx + k..(r + 1) * ldx])
                        .all(|v| *v == -7.25)
                );
            }
        }
    }
}

#[test]
fn the_decoded_matrix_is_exact() {
    let pool = ThreadPool::new(2);
    for (i, schema) in schemas().into_iter().enumerate() {
        let k = K[i % K.len()];
        let weight = Weight::new(schema, k, &[5, 29, 1]);
        let (segments, n) = (weight.segments(), 35);
        let w = Q4Weight { schema, k, segments: &segments };
        let values = decoded(&w);
        for (isa, backend) in backends() {
            let p = prepare(&*backend, &w, &weight.spec(Activations::Native, DType::F32, DType::F32), &pool);
            for dtype in IO {
                let mut out = IoBuffer::new(dtype, &vec![f32::NAN; n * k]);
                p.dequantize(out.view_mut(n, k).unwrap(), &mut ExecContext::cpu(&pool)).unwrap();
                assert_eq!(
                    bits(&out.to_f32()),
                    bits(&IoBuffer::new(dtype, &values).to_f32()),
                    "{isa} {schema:?} {dtype}"
                );
            }
        }
    }
}

#[test]
fn the_reverse_product_is_that_of_the_decoded_matrix() {
    let pool = ThreadPool::new(2);
    for (i, schema) in schemas().into_iter().enumerate() {
        for (n, k) in [(1, 16), (17, 80), (48, 256), (130, 96)] {
            let (xt, yt) = (IO[i % 3], IO[i / 3 % 3]);
            let weight = Weight::new(schema, k, &split(n, i));
            let segments = weight.segments();
            let w = Q4Weight { schema, k, segments: &segments };
            let values = decoded(&w);
            for (isa, backend) in backends() {
                let p = prepare(&*backend, &w, &weight.spec(Activations::Native, xt, yt), &pool);
                for m in [1, 2, 3, 7] {
                    let dy = IoBuffer::new(yt, &noise(m * n, 9)).to_f32();
                    let dx = backward(&*p, &dy, (m, k, n), (xt, yt), &pool);
                    for (at, got) in dx.iter().enumerate() {
                        let (r, c) = (at / k, at % k);
                        let terms = (0..n).map(|o| f64::from(dy[r * n + o]) * f64::from(values[o * k + c]));
                        let (exact, abs) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                        let limit = bound(ExecPath::FusedDequant, xt, n, exact, abs);
                        assert!(
                            (f64::from(*got) - exact).abs() <= limit,
                            "{isa} {schema:?} n {n} k {k} m {m} dx[{r}, {c}]"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn every_reason_is_given_at_once() {
    let env = HostEnv::default();
    let (_, backend) = backends().remove(0);
    let good = Weight::new(schemas()[0], 64, &[16]).spec(Activations::Native, DType::F32, DType::F32);
    assert_eq!(backend.can_prepare(&good, ExecPath::FusedDequant, &env), Ok(()));
    let mut bad = good.clone();
    bad.k = 24;
    bad.x = DType::I32;
    bad.y = DType::F64;
    bad.device = Device::Cuda(0);
    bad.activations = q4_core::selfcheck::plain_activations()[2];
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
    ];
    assert_eq!(codes, expect);
    bad = LinearSpec { schema: Q4Schema::Dense { dtype: DType::F32 }, ..good };
    assert_eq!(
        backend.can_prepare(&bad, ExecPath::FusedDequant, &env).unwrap_err()[0].code,
        SchemaUnsupported
    );
}

#[test]
fn an_isa_is_honoured_or_the_backend_does_not_live() {
    for isa in ["avx1024", "neon"] {
        let options = BuiltinOptions { isa: Some(isa.into()), ..Default::default() };
        let registry = Registry::builtin(&options).unwrap();
        assert!(registry.live("nf4-kernel").is_none(), "{isa}");
    }
    for (isa, backend) in backends() {
        let detail = &backend.probe(&HostEnv::default())[0].detail;
        assert!(detail.starts_with(isa.trim_end_matches("vnni")), "{isa}: {detail}");
    }
}

#[test]
fn damage_is_refused() {
    let pool = ThreadPool::new(1);
    let (_, backend) = backends().remove(0);
    let mut weight = Weight::new(schemas()[0], 64, &[16]);
    let spec = weight.spec(Activations::Int8, DType::F32, DType::F32);
    let mut x = noise(64, 3);
    x[7] = f32::NAN;
    {
        let segments = weight.segments();
        let w = Q4Weight { schema: weight.schema, k: 64, segments: &segments };
        let p = prepare(&*backend, &w, &spec, &pool);
        let mut y = [0.0; 16];
        let mut cx = ExecContext::cpu(&pool);
        let e = p.forward(
            TensorView::of(&x, &[1, 64]).unwrap(),
            TensorViewMut::of(&mut y, &[1, 16]).unwrap(),
            &mut cx,
        );
        assert_eq!(e.unwrap_err().code(), Code::ShapeMismatch, "no workspace");
        let mut scratch = Aligned::new(p.workspace(1));
        cx.workspace = scratch.view();
        let e = p.forward(
            TensorView::of(&x, &[1, 64]).unwrap(),
            TensorViewMut::of(&mut y, &[1, 16]).unwrap(),
            &mut cx,
        );
        assert!(e.is_err(), "a NaN has no int8 code");
        let e = p.forward(
            TensorView::of(&x, &[2, 32]).unwrap(),
            TensorViewMut::of(&mut y, &[1, 16]).unwrap(),
            &mut cx,
        );
        assert_eq!(e.unwrap_err().code(), Code::ShapeMismatch);
        let wrong = backend.prepare(&w, &spec, ExecPath::DequantMatmul, &mut cx);
        assert_eq!(wrong.err().map(|e| e.code()), Some(Code::Unsupported));
        assert_eq!(p.info().resident_bytes, 16 * 64 / 2 + 16 * 4);
    }
    weight.parts[0].absmax[3] = f32::INFINITY;
    let segments = weight.segments();
    let w = Q4Weight { schema: weight.schema, k: 64, segments: &segments };
    let e = backend.prepare(&w, &spec, ExecPath::FusedDequant, &mut ExecContext::cpu(&pool)).err().unwrap();
    assert_eq!(e.code(), Code::ScaleInvalid);
}

#[test]
fn dispatch_checks_it_and_counts_its_calls() {
    let pool = ThreadPool::new(2);
    for schema in [schemas()[0], schemas()[3]] {
        let dispatch =
            Dispatch::new(Registry::builtin(&BuiltinOptions::default()).unwrap(), Policy::default());
        let weight = Weight::new(schema, 256, &[48, 17]);
        let segments = weight.segments();
        let w = Q4Weight { schema, k: 256, segments: &segments };
        for activations in [Activations::Native, Activations::Int8] {
            let spec = weight.spec(activations, DType::BF16, DType::BF16);
            let selection = dispatch.select(&spec).unwrap();
            assert_eq!(selection.backend.descriptor().name, "nf4-kernel");
            let linear = dispatch.prepare(&w, &spec, &selection, &pool).unwrap();
            let x = IoBuffer::new(DType::BF16, &noise(512, 4));
            let mut y = IoBuffer::new(DType::BF16, &[0.0; 130]);
            let mut scratch = Aligned::new(linear.workspace(2));
            let mut cx = ExecContext { workspace: scratch.view(), ..ExecContext::cpu(&pool) };
            for _ in 0..3 {
                linear.forward(x.view(2, 256).unwrap(), y.view_mut(2, 65).unwrap(), &mut cx).unwrap();
            }
        }
        let ran = dispatch.witness().executed();
        assert_eq!(ran.len(), 2);
        assert!(
            ran.iter().all(|e| e.calls == 3 && e.path == ExecPath::FusedDequant && e.backend == "nf4-kernel")
        );
        assert_eq!(dispatch.skipped_checks(), 0);
    }
}

/// The backend on every instruction set of this machine.
fn backends() -> Vec<(&'static str, Arc<dyn Q4Backend>)> {
    let one = |isa: &'static str| {
        let options = BuiltinOptions { isa: Some(isa.into()), ..Default::default() };
        Some((isa, Registry::builtin(&options).unwrap().live("nf4-kernel")?.clone()))
    };
    let found: Vec<_> = ["portable", "avx2", "avx512vnni"].into_iter().filter_map(one).collect();
    assert_eq!(found[0].0, "portable");
    found
}

fn schemas() -> Vec<Q4Schema> {
    let mut all = Vec::new();
    for block in [64, 128, 256, 4096, 32] {
        for nibble_order in [NibbleOrder::HighFirst, NibbleOrder::LowFirst] {
            all.extend([None, Some(256)].map(|nested| Q4Schema::Nf4 { nibble_order, block, nested }));
        }
    }
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
    absmax: Vec<f32>,
    nested: (Vec<u8>, Vec<f32>, f32),
}

impl Weight {
    fn new(schema: Q4Schema, k: usize, rows: &[usize]) -> Self {
        let Q4Schema::Nf4 { block, .. } = schema else { panic!("only NF4") };
        let part = |(i, &rows): (usize, &usize)| {
            let codes =
                noise((rows * k).div_ceil(2), i as u64).iter().map(|v| (v.to_bits() >> 5) as u8).collect();
            let blocks = (rows * k).div_ceil(block as usize);
            let absmax: Vec<f32> = noise(blocks, 77 + i as u64).iter().map(|v| 0.01 + v.abs()).collect();
            let nested = nf4::nest(&absmax);
            Part { rows, codes, absmax, nested }
        };
        Self { schema, k, parts: rows.iter().enumerate().map(part).collect() }
    }

    fn segments(&self) -> Vec<Segment<'_>> {
        let Q4Schema::Nf4 { nested, .. } = self.schema else { panic!("only NF4") };
        self.parts.iter().map(|p| part_segment(p, nested)).collect()
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

fn part_segment(p: &Part, nested: Option<u32>) -> Segment<'_> {
    let absmax = match nested {
        None => Absmax::Plain(TensorView::of(&p.absmax, &[p.absmax.len()]).unwrap()),
        Some(block) => Absmax::Nested {
            codes: TensorView::of(&p.nested.0, &[p.nested.0.len()]).unwrap(),
            map: TensorView::of(nf4::dynamic_map(), &[256]).unwrap(),
            absmax: TensorView::of(&p.nested.1, &[p.nested.1.len()]).unwrap(),
            offset: p.nested.2,
            block: block as usize,
        },
    };
    let codes = TensorView::of(&p.codes, &[p.codes.len()]).unwrap();
    Segment { rows: p.rows, data: SegmentData::Nf4 { codes, absmax } }
}

fn prepare(
    backend: &dyn Q4Backend,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    pool: &ThreadPool,
) -> Box<dyn PreparedWeight> {
    backend.prepare(w, spec, ExecPath::FusedDequant, &mut ExecContext::cpu(pool)).unwrap()
}

fn forward(
    p: &dyn PreparedWeight,
    x: &[f32],
    (m, k, n): (usize, usize, usize),
    (xt, yt): (DType, DType),
    pool: &ThreadPool,
) -> Vec<f32> {
    let (x, mut y) = (IoBuffer::new(xt, x), IoBuffer::new(yt, &vec![f32::NAN; m * n]));
    let mut scratch = Aligned::new(p.workspace(m));
    let mut cx = ExecContext { workspace: scratch.view(), ..ExecContext::cpu(pool) };
    p.forward(x.view(m, k).unwrap(), y.view_mut(m, n).unwrap(), &mut cx).unwrap();
    y.to_f32()
}

fn backward(
    p: &dyn PreparedWeight,
    dy: &[f32],
    (m, k, n): (usize, usize, usize),
    (xt, yt): (DType, DType),
    pool: &ThreadPool,
) -> Vec<f32> {
    let (dy, mut dx) = (IoBuffer::new(yt, dy), IoBuffer::new(xt, &vec![f32::NAN; m * k]));
    let mut scratch = Aligned::new(p.workspace(m));
    let mut cx = ExecContext { workspace: scratch.view(), ..ExecContext::cpu(pool) };
    p.backward_input(dy.view(m, n).unwrap(), dx.view_mut(m, k).unwrap(), &mut cx).unwrap();
    dx.to_f32()
}

/// `(Σ x·w, Σ |x·w|)` of every output, row-major.
fn sums(w: &Q4Weight<'_>, x: &[f32], activations: &Activations, source: DType) -> Vec<(f64, f64)> {
    let decoder = RowDecoder::new(w).unwrap();
    let input = Input::new(x, w.k, activations, source).unwrap();
    let (m, n) = (x.len() / w.k, w.n());
    let mut out = vec![(0.0, 0.0); m * n];
    let mut row = vec![0.0; w.k];
    for o in 0..n {
        decoder.row(o, &mut row);
        (0..m).for_each(|r| out[r * n + o] = input.dot(r, &decoder, o, &row));
    }
    out
}

fn decoded(w: &Q4Weight<'_>) -> Vec<f32> {
    let decoder = RowDecoder::new(w).unwrap();
    let mut out = vec![0.0; w.n() * w.k];
    out.chunks_mut(w.k).enumerate().for_each(|(r, row)| decoder.row(r, row));
    out
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// Scratch of exactly the stated size, 64-byte aligned, filled with NaN.
struct Aligned(Vec<u8>, usize);

impl Aligned {
    fn new(bytes: usize) -> Self {
        Self(vec![0xff; bytes + 64], bytes)
    }
    fn view(&mut self) -> Option<TensorViewMut<'_>> {
        let at = self.0.as_ptr().align_offset(64);
        Some(TensorViewMut::of(&mut self.0[at..][..self.1], &[self.1]).unwrap())
    }
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
