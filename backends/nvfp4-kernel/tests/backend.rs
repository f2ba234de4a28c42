//! The real libNVFP4 behind the real dispatch, against the exact product: every activation format and
//! dtype, fused segments, stored layouts, and many threads on one weight.
#![allow(clippy::unwrap_used)]
use half::{bf16, f16};
use q4_core::formats::Format;
use q4_core::formats::sample::{Draw, mix, uniform};
use q4_core::oracle::{Column, Input, Units, bound};
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    ActGlobal, ActQuant, Activations, BuiltinOptions, Code, Convention, DType, Device, Dispatch, ExecContext,
    ExecPath, GlobalScale, LinearSpec, Nvfp4, OpSet, Overrides, OwnedParts, Part, Policy, Q4Linear, Q4Schema,
    Q4Weight, Registry, RowDecoder, Rule, ScaleLayout, Segment, SegmentSpec, TensorView, TensorViewMut,
    ThreadPool,
};
use q4_nvfp4_kernel::NAME;

const IO: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

#[test]
fn every_activation_format_agrees_with_the_oracle() {
    let dispatch = dispatch(BuiltinOptions::default());
    let w4a4 = |rule, global| Activations::Nvfp4(ActQuant { rule, global });
    let calibrated = ActGlobal::Static(GlobalScale::divide(640.0).unwrap());
    let formats = [
        Activations::Native,
        Activations::Int8,
        w4a4(Rule::ModelOpt, ActGlobal::None),
        w4a4(Rule::Runtime, ActGlobal::None),
        w4a4(Rule::ModelOpt, ActGlobal::PerCall),
        w4a4(Rule::TorchAo, ActGlobal::PerCall),
        w4a4(Rule::CompressedTensors, calibrated),
        w4a4(Rule::TransformerEngine, ActGlobal::PerCall),
    ];
    for (i, activations) in formats.into_iter().enumerate() {
        for (n, k, m) in [(1, 16, 1), (48, 64, 1), (33, 160, 3), (130, 256, 17)] {
            let stored = Weight::new(&[n], k, Some(Convention::Multiply), ScaleLayout::RowMajor);
            let io = IO[i % 3];
            stored.check(&dispatch, m, io, io, activations);
        }
    }
    let calls: u64 = dispatch.witness().executed().iter().map(|e| e.calls).sum();
    assert_eq!(calls, 8 * 4);
    assert!(
        dispatch.witness().executed().iter().all(|e| e.backend == NAME && e.path == ExecPath::FusedDequant)
    );
    assert_eq!(dispatch.skipped_checks(), 0);
}

#[test]
fn every_pair_of_dtypes_is_served() {
    let dispatch = dispatch(BuiltinOptions::default());
    let stored = Weight::new(&[40], 96, None, ScaleLayout::RowMajor);
    for x in IO {
        for y in IO {
            for activations in [Activations::Native, Activations::Int8] {
                stored.check(&dispatch, 5, x, y, activations);
            }
        }
    }
}

#[test]
fn segments_keep_their_own_scales_in_either_convention() {
    let dispatch = dispatch(BuiltinOptions::default());
    for convention in [Convention::Multiply, Convention::Divide] {
        for layout in [ScaleLayout::RowMajor, ScaleLayout::Swizzled128x4] {
            for activations in [Activations::Native, Activations::Int8] {
                let stored = Weight::new(&[64, 17, 130], 112, Some(convention), layout);
                stored.check(&dispatch, 2, DType::F32, DType::F32, activations);
            }
        }
    }
}

#[test]
fn decoding_is_exact_and_the_gradient_is_that_of_the_decoded_weight() {
    let dispatch = dispatch(BuiltinOptions::default());
    let (m, k) = (3, 96);
    for convention in [None, Some(Convention::Multiply), Some(Convention::Divide)] {
        let stored = Weight::new(&[20, 33], k, convention, ScaleLayout::Swizzled128x4);
        let (linear, pool) =
            (stored.prepare(&dispatch, m, DType::F32, DType::F32, Activations::Int8), ThreadPool::new(2));
        let decoded = stored.decoded();
        let n = decoded.len() / k;
        for dtype in IO {
            let mut got = IoBuffer::new(dtype, &vec![f32::NAN; n * k]);
            with_scratch(&linear, m, &pool, |cx| linear.dequantize(got.view_mut(n, k).unwrap(), cx).unwrap());
            let want = IoBuffer::new(dtype, &decoded).to_f32();
            assert!(
                got.to_f32().iter().zip(&want).all(|(g, w)| g.to_bits() == w.to_bits()),
                "{convention:?} {dtype}"
            );
        }
        let dy: Vec<f32> = (0..m * n).map(|i| uniform(mix(i as u64)) - 0.5).collect();
        let mut dx = vec![f32::NAN; m * k];
        with_scratch(&linear, m, &pool, |cx| {
            let view = TensorViewMut::of(&mut dx, &[m, k]).unwrap();
            linear.backward_input(TensorView::of(&dy, &[m, n]).unwrap(), view, cx).unwrap();
        });
        for r in 0..m {
            for c in 0..k {
                let terms = (0..n).map(|o| f64::from(dy[r * n + o]) * f64::from(decoded[o * k + c]));
                let (exact, abs) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                let limit = bound(ExecPath::FusedDequant, Units::Full, DType::F32, n, exact, abs);
                assert!((f64::from(dx[r * k + c]) - exact).abs() <= limit, "dx[{r}, {c}]");
            }
        }
    }
}

#[test]
fn strided_rows_are_read_and_nothing_between_them_is_written() {
    let dispatch = dispatch(BuiltinOptions::default());
    let (m, n, k) = (3, 40, 64);
    let stored = Weight::new(&[n], k, None, ScaleLayout::RowMajor);
    let (linear, pool) =
        (stored.prepare(&dispatch, m, DType::F32, DType::F32, Activations::Native), ThreadPool::new(2));
    let x = input(DType::F32, m * k);
    let mut dense = vec![0f32; m * n];
    with_scratch(&linear, m, &pool, |cx| {
        let y = TensorViewMut::of(&mut dense, &[m, n]).unwrap();
        linear.forward(TensorView::of(&x, &[m, k]).unwrap(), y, cx).unwrap();
    });
    let (ldx, ldy) = (k + 5, n + 3);
    let mut apart = vec![f32::NAN; m * ldx];
    (0..m).for_each(|r| apart[r * ldx..][..k].copy_from_slice(&x[r * k..][..k]));
    let mut y = vec![f32::MAX; m * ldy];
    with_scratch(&linear, m, &pool, |cx| {
        let x = TensorView::matrix(&apart, m, k, ldx).unwrap();
        linear.forward(x, TensorViewMut::matrix(&mut y, m, n, ldy).unwrap(), cx).unwrap();
    });
    for r in 0..m {
        assert_eq!(y[r * ldy..][..n], dense[r * n..][..n]);
        assert!(y[r * ldy + n..(r + 1) * ldy].iter().all(|&v| v == f32::MAX));
    }
}

#[test]
fn one_weight_serves_many_threads() {
    let dispatch = dispatch(BuiltinOptions::default());
    let (m, n, k) = (4, 96, 128);
    let stored = Weight::new(&[n], k, Some(Convention::Multiply), ScaleLayout::RowMajor);
    let linear = stored.prepare(&dispatch, m, DType::F32, DType::F32, Activations::Int8);
    let x = input(DType::F32, m * k);
    let product = |pool: &ThreadPool| {
        let mut y = vec![f32::NAN; m * n];
        with_scratch(&linear, m, pool, |cx| {
            let out = TensorViewMut::of(&mut y, &[m, n]).unwrap();
            linear.forward(TensorView::of(&x, &[m, k]).unwrap(), out, cx).unwrap();
        });
        y
    };
    let want = product(&ThreadPool::new(1));
    std::thread::scope(|scope| {
        for t in 0..8 {
            let (product, want) = (&product, &want);
            scope.spawn(move || {
                let pool = ThreadPool::new(1 + t % 2);
                for _ in 0..20 {
                    assert_eq!(product(&pool), *want, "results never depend on threads");
                }
            });
        }
    });
}

#[test]
fn bad_values_become_errors_with_the_layers_name() {
    let dispatch = dispatch(BuiltinOptions::default());
    let k = 32;
    let w4a4 = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None });
    let stored = Weight::new(&[16], k, None, ScaleLayout::RowMajor);
    let (linear, pool) = (stored.prepare(&dispatch, 1, DType::F32, DType::F32, w4a4), ThreadPool::new(1));
    let mut x = input(DType::F32, k);
    x[5] = f32::NAN;
    let mut y = vec![0f32; 16];
    with_scratch(&linear, 1, &pool, |cx| {
        let view = TensorViewMut::of(&mut y, &[1, 16]).unwrap();
        let e = linear.forward(TensorView::of(&x, &[1, k]).unwrap(), view, cx).unwrap_err();
        assert_eq!(e.code(), Code::NonFinite);
        assert!(e.what().starts_with("layer.0 (nvfp4-kernel)") && e.to_string().contains("x[0, 5]"), "{e}");
    });
}

#[test]
fn a_call_without_its_workspace_is_refused() {
    let dispatch = dispatch(BuiltinOptions::default());
    let stored = Weight::new(&[16], 32, None, ScaleLayout::RowMajor);
    let (linear, pool) =
        (stored.prepare(&dispatch, 1, DType::F32, DType::F32, Activations::Int8), ThreadPool::new(1));
    assert!(linear.workspace(1) > 0, "int8 activations are kept somewhere");
    let (x, mut y) = (input(DType::F32, 32), vec![0f32; 16]);
    let y = TensorViewMut::of(&mut y, &[1, 16]).unwrap();
    let e =
        linear.forward(TensorView::of(&x, &[1, 32]).unwrap(), y, &mut ExecContext::cpu(&pool)).unwrap_err();
    assert!(e.to_string().contains("workspace"), "{e}");
}

#[test]
fn scales_that_are_no_scales_are_refused_by_name() {
    let dispatch = dispatch(BuiltinOptions::default());
    for bad in [0x7f, 0x80, 0xff] {
        let mut stored = Weight::new(&[16, 32], 32, None, ScaleLayout::RowMajor);
        stored.parts[1].1.bytes_mut(Part::Scales)[3] = bad;
        let spec = stored.spec(1, DType::F32, DType::F32, Activations::Int8);
        let selection = dispatch.select(&spec).unwrap();
        let e = stored
            .with(|w| dispatch.prepare(w, &spec, &selection, &ThreadPool::new(1)).map(|_| ()))
            .expect_err("a NaN or negative scale");
        assert_eq!(e.code(), Code::ScaleInvalid, "{bad:#x}: {e}");
        assert!(e.to_string().contains("segment 1: block scale 3"), "{e}");
    }
}

/// A registry with the real library, where every 4-bit layer is bound to this backend.
fn dispatch(options: BuiltinOptions) -> Dispatch {
    let overrides = Overrides { all: Some(NAME.into()), ..Overrides::default() };
    Dispatch::new(Registry::builtin(&options).unwrap(), Policy { overrides, ..Policy::default() })
}

/// A weight of several segments.
struct Weight {
    k: usize,
    schema: Q4Schema,
    /// Rows, and what is stored of them.
    parts: Vec<(usize, OwnedParts)>,
}

impl Weight {
    fn new(rows: &[usize], k: usize, global: Option<Convention>, scale_layout: ScaleLayout) -> Self {
        let format = Nvfp4 { scale_layout, global };
        let part = |(i, &rows): (usize, &usize)| {
            (rows, format.sample([rows, k], &Draw { seed: i as u64, tame: false }))
        };
        let parts = rows.iter().enumerate().map(part).collect();
        Self { k, schema: Q4Schema::Nvfp4(format), parts }
    }

    fn with<R>(&self, use_it: impl FnOnce(&Q4Weight<'_>) -> R) -> R {
        let segments: Vec<_> = self
            .parts
            .iter()
            .map(|(rows, parts)| Segment { rows: *rows, data: parts.lend().unwrap() })
            .collect();
        use_it(&Q4Weight { schema: self.schema, k: self.k, segments: &segments })
    }

    fn decoded(&self) -> Vec<f32> {
        self.with(|w| {
            let decoder = RowDecoder::new(w).unwrap();
            let mut all = vec![0f32; decoder.n() * self.k];
            all.chunks_exact_mut(self.k).enumerate().for_each(|(r, row)| decoder.row(r, row));
            all
        })
    }

    fn spec(&self, max_m: usize, x: DType, y: DType, activations: Activations) -> LinearSpec {
        let segment =
            |(i, p): (usize, &(usize, OwnedParts))| SegmentSpec { name: format!("layer.{i}"), rows: p.0 };
        LinearSpec {
            segments: self.parts.iter().enumerate().map(segment).collect(),
            schema: self.schema,
            k: self.k,
            max_m,
            x,
            y,
            activations,
            device: Device::Cpu,
            ops: OpSet::ALL,
        }
    }

    fn prepare(&self, dispatch: &Dispatch, max_m: usize, x: DType, y: DType, act: Activations) -> Q4Linear {
        let spec = self.spec(max_m, x, y, act);
        let selection = dispatch.select(&spec).unwrap();
        self.with(|w| dispatch.prepare(w, &spec, &selection, &ThreadPool::new(2)).unwrap())
    }

    /// Every output of a random product is within the bound.
    fn check(&self, dispatch: &Dispatch, m: usize, x: DType, y: DType, activations: Activations) {
        let (linear, pool) = (self.prepare(dispatch, m, x, y, activations), ThreadPool::new(2));
        let n = linear.info().n;
        let values = input(x, m * self.k);
        let (stored_x, mut out) = (IoBuffer::new(x, &values), IoBuffer::new(y, &vec![f32::NAN; m * n]));
        with_scratch(&linear, m, &pool, |cx| {
            let (x, y) = (stored_x.view(m, self.k).unwrap(), out.view_mut(m, n).unwrap());
            linear.forward(x, y, cx).unwrap();
        });
        let out = out.to_f32();
        let quantised = Input::new(&values, self.k, &activations, x).unwrap();
        self.with(|w| {
            let decoder = RowDecoder::new(w).unwrap();
            for o in 0..n {
                let column = Column::new(&decoder, o);
                for r in 0..m {
                    let (exact, abs) = quantised.dot(r, &column);
                    let limit = bound(ExecPath::FusedDequant, Units::Full, y, self.k, exact, abs);
                    let got = f64::from(out[r * n + o]);
                    let what = format!("y[{r}, {o}] of {m}x{n}x{} {activations:?} {x}->{y}", self.k);
                    assert!((got - exact).abs() <= limit, "{what}: {got} for {exact} within {limit}");
                }
            }
        });
    }
}

fn with_scratch(linear: &Q4Linear, m: usize, pool: &ThreadPool, call: impl FnOnce(&mut ExecContext<'_>)) {
    let mut bytes = vec![0xffu8; linear.workspace(m) + 64];
    let at = bytes.as_ptr().align_offset(64);
    let len = bytes.len() - at;
    let mut cx = ExecContext::cpu(pool);
    cx.workspace = Some(TensorViewMut::of(&mut bytes[at..], &[len]).unwrap());
    call(&mut cx);
}

/// Values of `dtype`, widened.
fn input(dtype: DType, len: usize) -> Vec<f32> {
    (0..len as u64)
        .map(|i| (uniform(mix(i ^ 0xabcd)) - 0.5) * 3.0)
        .map(|v| match dtype {
            DType::F16 => f16::from_f32(v).to_f32(),
            DType::BF16 => bf16::from_f32(v).to_f32(),
            _ => v,
        })
        .collect()
}
