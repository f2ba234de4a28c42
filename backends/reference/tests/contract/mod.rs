//! What every in-process backend promises besides right numbers, over problems of the conformance lattice:
//! one file for all of them, since a promise differs only in who makes it.
#![allow(dead_code, clippy::unwrap_used)] // no backend makes every promise
use q4_conformance::{Measured, Problem, lattice, measure};
use q4_core::isa::Isa;
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    ActGlobal, Activations, BuiltinOptions, Code, DType, Device, Dispatch, Error, ExecContext, ExecPath,
    HostEnv, LinearSpec, OpSet, Overrides, Policy, PreparedWeight, Q4Backend, Q4Schema, Q4Weight, Registry,
    RejectCode, Result, SegmentSpec, TensorView, TensorViewMut, ThreadPool,
};
use std::sync::Arc;

pub const IO: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A backend on one instruction set and the path it offers.
pub struct Subject {
    pub name: &'static str,
    pub isa: &'static str,
    pub path: ExecPath,
    pub backend: Arc<dyn Q4Backend>,
}

/// The backend as it is on every instruction set of this machine.
pub fn subjects(name: &'static str, path: ExecPath) -> Vec<Subject> {
    let one = |isa: Isa| {
        let backend = built(Some(isa.name())).live(name)?.clone();
        Some(Subject { name, isa: isa.name(), path, backend })
    };
    let mut found: Vec<_> = Isa::available().filter(|isa| isa.floats() == *isa).filter_map(one).collect();
    found.reverse();
    assert_eq!(found[0].isa, "portable");
    found
}

/// The built-in backends, with kernels for the instruction set named.
pub fn built(isa: Option<&str>) -> Registry {
    Registry::builtin(&BuiltinOptions { isa: isa.map(str::to_owned), ..Default::default() }).unwrap()
}

impl Subject {
    /// Every problem of `schema` is computed, and rightly.
    pub fn is_right_for(&self, schema: Q4Schema) -> Result<()> {
        lattice::each(schema, &mut |p| self.is_right(p).map(drop))
    }

    /// `problem` is computed, and rightly.
    pub fn is_right(&self, problem: &Problem<'_>) -> Result<Measured> {
        let measured = measure(
            Device::Cpu,
            &*self.backend,
            self.path,
            problem,
            &HostEnv::default(),
            &ThreadPool::new(2),
        )?;
        Ok(measured.unwrap_or_else(|reasons| panic!("{} refuses {}: {reasons:?}", self.isa, problem.name)))
    }

    /// Gaps between rows are neither read nor written, and the base needs no alignment but the element's.
    pub fn follows_strides(&self, schema: Q4Schema) -> Result<()> {
        let pool = ThreadPool::new(2);
        self.each(schema, DType::F32, &mut |p| {
            let (m, n, k) = (p.m, p.weight.n(), p.weight.k);
            let w = self.prepare(p, (DType::F32, DType::F32), &pool)?;
            let (y, dy) = (forward(&*w, &p.x, (DType::F32, DType::F32), &pool)?, gradient(m * n));
            let dx = backward(&*w, &dy, (DType::F32, DType::F32), &pool)?;
            let gaps = |values: &[f32], cols: usize, ld: usize, gap: f32| {
                let mut out = vec![gap; 1 + m * ld];
                for (r, row) in values.chunks(cols).enumerate() {
                    out[1 + r * ld..][..cols].copy_from_slice(row);
                }
                out
            };
            let (ldx, ldy) = (k + 5, n + 3);
            let (x, dy) = (gaps(&p.x, k, ldx, f32::NAN), gaps(&dy, n, ldy, f32::NAN));
            let (mut got, mut back) = (vec![-7.25; 1 + m * ldy], vec![-7.25; 1 + m * ldx]);
            with_scratch(&*w, m, &pool, |cx| {
                let x = TensorView::matrix(&x[1..], m, k, ldx)?;
                w.forward(x, TensorViewMut::matrix(&mut got[1..], m, n, ldy)?, cx)?;
                let dy = TensorView::matrix(&dy[1..], m, n, ldy)?;
                w.backward_input(dy, TensorViewMut::matrix(&mut back[1..], m, k, ldx)?, cx)
            })?;
            assert_eq!(bits(&got), bits(&gaps(&y, n, ldy, -7.25)), "{} {}", self.isa, p.name);
            assert_eq!(bits(&back), bits(&gaps(&dx, k, ldx, -7.25)), "{} {}", self.isa, p.name);
            Ok(())
        })
    }

    /// The number of threads changes no bit.
    pub fn ignores_threads(&self, schema: Q4Schema) -> Result<()> {
        let pools = [1, 2, 3, 7].map(ThreadPool::new);
        let types = (DType::BF16, DType::F32);
        self.each(schema, DType::BF16, &mut |p| {
            let w = self.prepare(p, types, &pools[0])?;
            let dy = gradient(p.m * p.weight.n());
            let run = |pool| both(&*w, &p.x, &dy, types, pool);
            let one = run(&pools[0])?;
            for pool in &pools[1..] {
                assert_eq!(run(pool)?, one, "{} {} on {} threads", self.isa, p.name, pool.threads());
            }
            Ok(())
        })
    }

    /// A row's result does not depend on the rows that share its call.
    pub fn keeps_rows_apart(&self, schema: Q4Schema) -> Result<()> {
        let (pool, types) = (ThreadPool::new(2), (DType::F32, DType::F32));
        self.each(schema, DType::F32, &mut |p| {
            // A per-tensor scale of the whole call is such a dependence by definition.
            if matches!(p.activations, Activations::Nvfp4(a) if a.global == ActGlobal::PerCall) {
                return Ok(());
            }
            let w = self.prepare(p, types, &pool)?;
            let (n, k) = (p.weight.n(), p.weight.k);
            let whole = forward(&*w, &p.x, types, &pool)?;
            for m in [1, 2, 3, 4, 5, 8, 17, 33].into_iter().filter(|m| *m < p.m) {
                let part = forward(&*w, &p.x[..m * k], types, &pool)?;
                assert_eq!(bits(&part), bits(&whole[..m * n]), "{} {} m {m}", self.isa, p.name);
            }
            Ok(())
        })
    }

    /// Segments give the bits they give alone.
    pub fn keeps_segments_apart(&self, schema: Q4Schema) -> Result<()> {
        let (pool, types) = (ThreadPool::new(2), (DType::F32, DType::F32));
        self.each(schema, DType::F32, &mut |p| {
            let (n, k) = (p.weight.n(), p.weight.k);
            let whole = forward(&*self.prepare(p, types, &pool)?, &p.x, types, &pool)?;
            let mut first = 0;
            for segment in p.weight.segments {
                let weight = Q4Weight { schema, k, segments: std::slice::from_ref(segment) };
                let single = Problem { weight, name: p.name.clone(), x: Vec::new(), recorded: None, ..*p };
                let alone = forward(&*self.prepare(&single, types, &pool)?, &p.x, types, &pool)?;
                for (alone, whole) in alone.chunks(segment.rows).zip(whole.chunks(n)) {
                    assert_eq!(bits(alone), bits(&whole[first..][..segment.rows]), "{} {}", self.isa, p.name);
                }
                first += segment.rows;
            }
            Ok(())
        })
    }

    /// Inputs are widened exactly, gradients rounded once: types of x change nothing else.
    pub fn takes_any_type_of_x(&self, schema: Q4Schema) -> Result<()> {
        let pool = ThreadPool::new(2);
        self.each(schema, DType::BF16, &mut |p| {
            // The rules of NVFP4 look at the type of x.
            if matches!(p.activations, Activations::Nvfp4(_)) {
                return Ok(());
            }
            for y in IO {
                let wide = self.prepare(p, (DType::F32, y), &pool)?;
                let dx = backward(&*wide, &gradient(p.m * p.weight.n()), (DType::F32, y), &pool)?;
                for x in [DType::F16, DType::BF16] {
                    let values = IoBuffer::new(x, &p.x).to_f32();
                    let narrow = self.prepare(p, (x, y), &pool)?;
                    let got = forward(&*narrow, &values, (x, y), &pool)?;
                    let expect = forward(&*wide, &values, (DType::F32, y), &pool)?;
                    assert_eq!(bits(&got), bits(&expect), "{} {} {x}->{y}", self.isa, p.name);
                    let got = backward(&*narrow, &gradient(p.m * p.weight.n()), (x, y), &pool)?;
                    assert_eq!(bits(&got), bits(&IoBuffer::new(x, &dx).to_f32()), "{} {}", self.isa, p.name);
                }
            }
            Ok(())
        })
    }

    /// The decoded matrix in a narrow type is the exact one rounded once.
    pub fn rounds_the_decoded_matrix_once(&self, schema: Q4Schema) -> Result<()> {
        let pool = ThreadPool::new(2);
        self.each(schema, DType::F32, &mut |p| {
            let (n, k) = (p.weight.n(), p.weight.k);
            let w = self.prepare(p, (DType::F32, DType::F32), &pool)?;
            let [wide, f16, bf16] = IO.map(|dtype| {
                let mut out = IoBuffer::new(dtype, &vec![f32::NAN; n * k]);
                w.dequantize(out.view_mut(n, k).unwrap(), &mut ExecContext::cpu(&pool)).unwrap();
                out.to_f32()
            });
            assert_eq!(bits(&f16), bits(&IoBuffer::new(DType::F16, &wide).to_f32()));
            assert_eq!(bits(&bf16), bits(&IoBuffer::new(DType::BF16, &wide).to_f32()));
            let mut short = vec![0f32; n * k];
            let e = w.dequantize(TensorViewMut::of(&mut short, &[1, n * k])?, &mut ExecContext::cpu(&pool));
            assert_eq!(e.err().map(|e| e.code()), (n > 1).then_some(Code::ShapeMismatch));
            Ok(())
        })
    }

    /// Calls that cannot be served fail: no scratch, no codes for a NaN, other shapes, another path.
    pub fn refuses_damage(&self, schema: Q4Schema) -> Result<()> {
        let pool = ThreadPool::new(1);
        self.each(schema, DType::F32, &mut |p| {
            if p.activations != Activations::Int8 {
                return Ok(());
            }
            let (m, n, k) = (p.m, p.weight.n(), p.weight.k);
            let w = self.prepare(p, (DType::F32, DType::F32), &pool)?;
            let mut y = vec![0.0; m * n];
            let mut x = p.x.clone();
            x[k - 1] = f32::NAN;
            // The code of the refusal; being served is a failure.
            let mut run = |x: &[f32], k, cx: &mut ExecContext<'_>| {
                let (x, y) = (TensorView::of(x, &[x.len() / k, k])?, TensorViewMut::of(&mut y, &[m, n])?);
                match w.forward(x, y, cx) {
                    Ok(()) => Err(Error::new(Code::Internal, format!("{} was computed", p.name))),
                    Err(e) => Ok(e.code()),
                }
            };
            if w.workspace(m) > 0 {
                assert_eq!(run(&p.x, k, &mut ExecContext::cpu(&pool))?, Code::ShapeMismatch, "no scratch");
            }
            with_scratch(&*w, m, &pool, |cx| {
                run(&x, k, cx)?;
                assert_eq!(run(&p.x, k / 2, cx)?, Code::ShapeMismatch);
                let other = if self.path == ExecPath::NativeKernel {
                    ExecPath::Reference
                } else {
                    ExecPath::NativeKernel
                };
                let spec = self.spec(p, (DType::F32, DType::F32));
                let e = self.backend.prepare(&p.weight, &spec, other, cx).err();
                assert_eq!(e.map(|e| e.code()), Some(Code::Unsupported));
                Ok(())
            })
        })
    }

    /// Whoever names it gets it, after its self-check, and every call is counted.
    pub fn is_dispatched_and_counted(&self, schema: Q4Schema) -> Result<()> {
        let pool = ThreadPool::new(2);
        for io in IO {
            self.each(schema, io, &mut |p| {
                let overrides = Overrides { all: Some(self.name.into()), ..Default::default() };
                let dispatch = Dispatch::new(built(None), Policy { overrides, ..Default::default() });
                let spec = self.spec(p, (io, io));
                let selection = dispatch.select(&spec)?;
                let linear = dispatch.prepare(&p.weight, &spec, &selection, &pool)?;
                let (x, mut y) = (IoBuffer::new(io, &p.x), IoBuffer::new(io, &vec![0.0; p.m * p.weight.n()]));
                let mut scratch = Scratch::new(linear.workspace(p.m));
                let mut cx = ExecContext { workspace: scratch.view(), ..ExecContext::cpu(&pool) };
                for _ in 0..3 {
                    linear.forward(x.view(p.m, p.weight.k)?, y.view_mut(p.m, p.weight.n())?, &mut cx)?;
                }
                let ran = dispatch.witness().executed();
                assert_eq!((ran.len(), ran[0].calls, ran[0].path), (1, 3, self.path));
                assert_eq!((ran[0].backend.as_str(), dispatch.skipped_checks()), (self.name, 0));
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Every reason against a product of `schema` that is wrong in all that a spec can say.
    pub fn reasons(&self, schema: Q4Schema, activations: Activations) -> Vec<RejectCode> {
        let bad = LinearSpec {
            segments: vec![SegmentSpec { name: "layer".into(), rows: 16 }],
            schema,
            k: 24,
            max_m: 1,
            x: DType::I32,
            y: DType::F64,
            activations,
            device: Device::Cuda(0),
            ops: OpSet::ALL,
        };
        let reasons =
            self.backend.can_prepare(&bad, ExecPath::NativeKernel, &HostEnv::default()).unwrap_err();
        reasons.iter().map(|r| r.code).collect()
    }

    /// Every operation the backend has for a problem with these types of x and y.
    pub fn spec(&self, p: &Problem<'_>, (x, y): (DType, DType)) -> LinearSpec {
        let name = |(i, s): (usize, &q4_core::Segment<'_>)| SegmentSpec {
            name: format!("layer.{i}_proj"),
            rows: s.rows,
        };
        let mut spec = LinearSpec {
            segments: p.weight.segments.iter().enumerate().map(name).collect(),
            schema: p.weight.schema,
            k: p.weight.k,
            max_m: p.m,
            x,
            y,
            activations: p.activations,
            device: Device::Cpu,
            ops: OpSet::ALL,
        };
        if self.backend.can_prepare(&spec, self.path, &HostEnv::default()).is_err() {
            spec.ops = OpSet::FORWARD.with(OpSet::BACKWARD_INPUT);
        }
        spec
    }

    pub fn prepare(
        &self,
        p: &Problem<'_>,
        types: (DType, DType),
        pool: &ThreadPool,
    ) -> Result<Box<dyn PreparedWeight>> {
        self.backend.prepare(&p.weight, &self.spec(p, types), self.path, &mut ExecContext::cpu(pool))
    }

    /// The problems of `schema` whose input has type `io` and whose activations the backend has.
    fn each(
        &self,
        schema: Q4Schema,
        io: DType,
        visit: &mut dyn FnMut(&Problem<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut visited = 0;
        lattice::each(schema, &mut |p| {
            let spec = self.spec(p, (io, io));
            if p.io != io || self.backend.can_prepare(&spec, self.path, &HostEnv::default()).is_err() {
                return Ok(());
            }
            visited += 1;
            visit(p)
        })?;
        assert!(visited > 0, "no problem of {schema} for {}", self.name);
        Ok(())
    }
}

/// `y[m, n]`, widened.
pub fn forward(
    w: &dyn PreparedWeight,
    x: &[f32],
    (xt, yt): (DType, DType),
    pool: &ThreadPool,
) -> Result<Vec<f32>> {
    let (n, k) = (w.info().n, w.info().k);
    let m = x.len() / k;
    let (x, mut y) = (IoBuffer::new(xt, x), IoBuffer::new(yt, &vec![f32::NAN; m * n]));
    with_scratch(w, m, pool, |cx| w.forward(x.view(m, k)?, y.view_mut(m, n)?, cx))?;
    Ok(y.to_f32())
}

/// `dx[m, k]`, widened.
pub fn backward(
    w: &dyn PreparedWeight,
    dy: &[f32],
    (xt, yt): (DType, DType),
    pool: &ThreadPool,
) -> Result<Vec<f32>> {
    let (n, k) = (w.info().n, w.info().k);
    let m = dy.len() / n;
    let (dy, mut dx) = (IoBuffer::new(yt, dy), IoBuffer::new(xt, &vec![f32::NAN; m * k]));
    with_scratch(w, m, pool, |cx| w.backward_input(dy.view(m, n)?, dx.view_mut(m, k)?, cx))?;
    Ok(dx.to_f32())
}

/// Sets with vectors give the same bits for calls of one to nine rows, of which `x` and `dy` have nine: FNV-1a
/// over all of them is `recorded`, on every architecture.
pub fn vector_kernels_agree(
    subjects: &[Subject],
    weight: Q4Weight<'_>,
    [x, dy]: [&[f32]; 2],
    recorded: u64,
) -> Result<()> {
    let (io, pool) = ((DType::F32, DType::F32), ThreadPool::new(1));
    let (n, k) = (weight.n(), weight.k);
    let mut fnv = 0xcbf2_9ce4_8422_2325u64;
    let subjects: Vec<_> = subjects.iter().filter(|s| s.isa != "portable").collect();
    for m in [1, 2, 3, 4, 9] {
        let mut seen: Option<(&str, Vec<u32>)> = None;
        for subject in &subjects {
            let problem = bare(weight, &x[..m * k], Activations::Native);
            let w = subject.prepare(&problem, io, &pool)?;
            let (y, dx) = both(&*w, &problem.x, &dy[..m * n], io, &pool)?;
            let bits: Vec<u32> = y.into_iter().chain(dx).collect();
            let (other, want) = seen.get_or_insert_with(|| (subject.isa, bits.clone()));
            assert!(bits == *want, "m = {m}: {} differs from {other}", subject.isa);
        }
        for bits in seen.into_iter().flat_map(|(_, bits)| bits) {
            fnv = (fnv ^ u64::from(bits)).wrapping_mul(0x100_0000_01b3);
        }
    }
    if subjects.is_empty() {
        println!("skipped: this processor has no vector kernels");
        return Ok(());
    }
    assert_eq!(fnv, recorded, "{fnv:#x}: not the bits of other architectures");
    Ok(())
}

/// Every set but plain Rust gives a row of int8 the same bits, alone and with up to eight more: FNV-1a over nine
/// rows of `x` is `recorded`, on every architecture. Sets that differ in their integer dots alone count too.
pub fn integer_sums_agree(name: &'static str, weight: Q4Weight<'_>, x: &[f32], recorded: u64) -> Result<()> {
    let (io, pool) = ((DType::F32, DType::F32), ThreadPool::new(1));
    let (n, k) = (weight.n(), weight.k);
    let mut seen: Option<Vec<u32>> = None;
    for isa in Isa::available().filter(|isa| *isa != Isa::Portable) {
        let backend = built(Some(isa.name())).live(name).expect("built for what is here").clone();
        let subject = Subject { name, isa: isa.name(), path: ExecPath::FusedDequant, backend };
        for m in [9, 8, 7, 6, 5, 4, 3, 2, 1] {
            let problem = bare(weight, &x[..m * k], Activations::Int8);
            let w = subject.prepare(&problem, io, &pool)?;
            let y = bits(&forward(&*w, &problem.x, io, &pool)?);
            let want = seen.get_or_insert_with(|| y.clone());
            assert!(y[..] == want[..m * n], "{isa:?}: {m} rows differ from nine, or from another set");
        }
    }
    let Some(bits) = seen else {
        println!("skipped: this processor has no vector kernels");
        return Ok(());
    };
    let fnv = bits
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |fnv, bits| (fnv ^ u64::from(bits)).wrapping_mul(0x100_0000_01b3));
    assert_eq!(fnv, recorded, "{fnv:#x}: not the bits of other architectures");
    Ok(())
}

/// Rows of f32 whose bits are all that is asked.
fn bare<'a>(weight: Q4Weight<'a>, x: &[f32], activations: Activations) -> Problem<'a> {
    let (m, io) = (x.len() / weight.k, DType::F32);
    Problem { name: "bits".into(), weight, x: x.to_vec(), m, max_m: m, activations, io, recorded: None }
}

/// The bits of `y` and of `dx`.
pub fn both(
    w: &dyn PreparedWeight,
    x: &[f32],
    dy: &[f32],
    types: (DType, DType),
    pool: &ThreadPool,
) -> Result<(Vec<u32>, Vec<u32>)> {
    Ok((bits(&forward(w, x, types, pool)?), bits(&backward(w, dy, types, pool)?)))
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|v| v.to_bits()).collect()
}

/// Values in [-1, 1] that every io dtype holds exactly.
fn gradient(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i * 37 % 101) as f32 / 64.0 - 0.75).collect()
}

fn with_scratch(
    w: &dyn PreparedWeight,
    m: usize,
    pool: &ThreadPool,
    call: impl FnOnce(&mut ExecContext<'_>) -> Result<()>,
) -> Result<()> {
    let mut scratch = Scratch::new(w.workspace(m));
    call(&mut ExecContext { workspace: scratch.view(), ..ExecContext::cpu(pool) })
}

/// Scratch of exactly the stated size, 64-byte aligned, filled with NaN.
struct Scratch(Vec<u8>, usize);

impl Scratch {
    fn new(bytes: usize) -> Self {
        Self(vec![0xff; bytes + 64], bytes)
    }
    fn view(&mut self) -> Option<TensorViewMut<'_>> {
        let at = self.0.as_ptr().align_offset(64);
        Some(TensorViewMut::of(&mut self.0[at..][..self.1], &[self.1]).unwrap())
    }
}
