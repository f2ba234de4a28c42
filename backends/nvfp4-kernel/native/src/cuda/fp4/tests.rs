//! The kernels of the native path without their device: a compiler for CPUs takes them too, so here they run
//! as they are, with the launches they get, and what they write is read back by the documented layout. Only
//! cuBLASLt's product is replaced.
use super::super::decode;
use super::super::simple::{self, Raw, Span};
use super::forward::Room;
use super::kernels::{
    Backward, Dequantize, Finish, Kernels, Laid, Operand, Pack, Place, Rows, SOURCE, ToOperand,
};
use crate::call::Mat;
use q4_core::formats::sample::Draw;
use q4_core::formats::{Format, e2m1, e4m3, nvfp4, swizzle};
use q4_core::{
    ActGlobal, ActQuant, Activations, Convention, DType, ExecPath, GlobalScale, Nvfp4, OwnedParts, Part,
    Q4Schema, Q4Weight, Result, RowDecoder, Rule, ScaleLayout, Segment, oracle,
};
use q4_cuda::{Launch, Matrix, Mirror, Source, addresses, convention, mirror, number, rule};
use std::ffi::c_void;
use std::process::Command;
use std::sync::OnceLock;

/// This CPU.
struct OnCpu;

impl Place for OnCpu {
    type Kernel<A: Mirror> = unsafe extern "C" fn(*const u32, *mut *mut c_void);
    unsafe fn run<A: Mirror>(kernel: &Self::Kernel<A>, how: Launch, args: A) -> Result<()> {
        let dimensions = [how.grid, how.block];
        // SAFETY: by contract.
        unsafe { kernel(dimensions.as_ptr().cast(), addresses(&args).as_mut_ptr()) };
        Ok(())
    }
}

type Quantiser = <OnCpu as Place>::Kernel<Quantise>;

mirror! {
    /// Of `q4_nvfp4`.
    struct Quantise {
        x: Matrix, rule: u32, source: u32, global: u64, q: u64, steps: u64, codes: u64, bytes: u64, bad: u64,
    }
}

const NAMES: [&str; 6] =
    ["q4_fp4_pack", "q4_fp4_operand", "q4_fp4_finish", "q4_fp4_dequantize", "q4_fp4_backward", "q4_nvfp4"];

/// The kernels of `fp4.cu` and the quantiser of `rows.cu`; `None`, said in words, without a C++ compiler.
fn on_cpu() -> Option<(Kernels<OnCpu>, Quantiser)> {
    static BUILT: OnceLock<Option<libloading::Library>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a folder");
        let (text, image) = (dir.path().join("fp4.cpp"), dir.path().join("fp4.so"));
        let runs: String = NAMES.iter().map(|n| format!("RUN({n})\n")).collect();
        let both = concat!(include_str!("../../../cuda/fp4.cu"), "\n#include \"rows.cu\"\n");
        let both = Source { text: both, ..SOURCE }.whole();
        let all = format!("{}\n{both}\n{runs}", include_str!("../../../cuda/host.h"));
        std::fs::write(&text, all).expect("written");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let options = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-o"];
        match Command::new(&compiler).args(options).arg(&image).arg(&text).output() {
            Err(e) => {
                println!("skipped: no C++ compiler ({compiler}: {e})");
                None
            }
            Ok(out) => {
                assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
                // SAFETY: our own code without initialisers.
                Some(unsafe { libloading::Library::new(&image) }.expect("a library"))
            }
        }
    });
    let library = built.as_ref()?;
    let [pack, operand, finish, dequantize, backward, quantise] = NAMES.map(|name| {
        // SAFETY: host.h declares it so; the library is never closed.
        *unsafe { library.get::<Quantiser>(format!("run_{name}").as_bytes()) }.expect("an entry")
    });
    Some((Kernels { pack, operand, finish, dequantize, backward }, quantise))
}

fn at<T>(slice: &[T]) -> u64 {
    slice.as_ptr().expose_provenance() as u64
}

/// Of what kernels write.
fn at_mut<T>(slice: &mut [T]) -> u64 {
    slice.as_mut_ptr().expose_provenance() as u64
}

/// Random bytes, the same each time.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    fn float(&mut self) -> f32 {
        (self.next() % 4001) as f32 / 1000.0 - 2.0
    }
}

/// A segment of a weight, its scales row-major.
struct Piece {
    rows: usize,
    parts: OwnedParts,
}

impl Piece {
    fn new(rows: usize, k: usize, global: Option<GlobalScale>, noise: &mut Noise) -> Self {
        let format = Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None };
        let parts = format.sample([rows, k], &Draw { seed: noise.next(), tame: false });
        Self { rows, parts: parts.with_global(global) }
    }

    fn codes(&self) -> &[u8] {
        self.parts.bytes(Part::Codes)
    }

    fn scales(&self) -> &[u8] {
        self.parts.bytes(Part::Scales)
    }
}

/// A weight in the memory of this CPU as `prepare` would make it.
struct Packed {
    k: usize,
    parts: Vec<Piece>,
    codes: Vec<u64>,
    scales: Vec<u8>,
    spans: Vec<Span>,
    operand: Operand,
}

impl Packed {
    fn new(kernels: &Kernels<OnCpu>, parts: Vec<Piece>, k: usize, is_tiled: bool) -> Result<Self> {
        let n = parts.iter().map(|p| p.rows).sum();
        let [rows, columns] = super::padded(n, k);
        let mut codes = vec![0u64; rows * columns / 16];
        let mut scales = vec![0; swizzle::blocked_len(rows, columns / 16)];
        let mut end = 0;
        let spans: Vec<_> = parts
            .iter()
            .map(|p| {
                end += p.rows;
                Span::new(end, 0, p.parts.global)
            })
            .collect();
        let operand = Operand {
            codes: at_mut(&mut codes),
            scales: at_mut(&mut scales),
            spans: at(&spans),
            n: n as u32,
            k: k as u32,
            groups: (columns / 16) as u32,
            span_count: spans.len() as u32,
        };
        let mut first = 0;
        for p in &parts {
            let tiled = swizzle::to_blocked(p.scales(), p.rows, k / 16);
            let mut codes = vec![0u64; p.codes().len() / 8];
            bytes_of(&mut codes).copy_from_slice(p.codes());
            let mut bad = [u64::MAX];
            let raw = Raw {
                codes: at(&codes),
                scales: at(if is_tiled { &tiled } else { p.scales() }),
                is_tiled,
                rows: p.rows,
                groups: k / 16,
                bad: at_mut(&mut bad),
            };
            // SAFETY: memory of the sizes of the layout.
            unsafe { kernels.pack(&raw, first, &operand)? };
            assert_eq!(bad, [u64::MAX]);
            first += p.rows;
        }
        Ok(Self { k, parts, codes, scales, spans, operand })
    }

    fn n(&self) -> usize {
        self.operand.n as usize
    }

    /// The definition of the weight's values.
    fn values(&self) -> Vec<f32> {
        let mut out = Vec::new();
        for p in &self.parts {
            for r in 0..p.rows {
                let mut row = vec![0.0; self.k];
                let (c, s) = (self.k / 2, self.k / 16);
                nvfp4::dequantize_row(
                    &p.codes()[r * c..][..c],
                    &p.scales()[r * s..][..s],
                    p.parts.global,
                    &mut row,
                );
                out.extend(row);
            }
        }
        out
    }
}

fn bytes_of(words: &mut [u64]) -> &mut [u8] {
    let len = size_of_val(words);
    // SAFETY: plain bytes.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len) }
}

/// An element of an operand without per-tensor scale, by the layout that cuBLASLt documents.
fn element(codes: &[u8], scales: &[u8], row: usize, k: usize, columns: usize) -> f64 {
    let code = codes[(row * columns + k) / 2] >> (4 * (k % 2)) & 15;
    let scale = scales[swizzle::offset(row, k / 16, columns / 16)];
    f64::from(e2m1::decode(code)) * f64::from(e4m3::decode(scale))
}

fn mat(values: &mut [f32], cols: usize) -> Mat {
    let rows = values.len() / cols;
    let mut view = q4_core::TensorViewMut::of(values, &[rows, cols]).expect("a matrix");
    Mat::output(&mut view, "matrix", cols, q4_core::DType::F32).expect("a matrix")
}

fn scale(c: Convention, v: f32) -> Option<GlobalScale> {
    GlobalScale::new(c, v).ok()
}

#[test]
fn packed_weights_are_read_back_by_the_documented_layout() -> Result<()> {
    let Some((kernels, _)) = on_cpu() else { return Ok(()) };
    for (rows, k) in [([1, 1], 16), ([37, 128], 80), ([200, 100], 272), ([130, 3], 1040)] {
        for is_tiled in [false, true] {
            let mut noise = Noise(k as u64);
            let globals = match is_tiled {
                true => [None, None],
                false => [scale(Convention::Multiply, 0.37), scale(Convention::Divide, 1713.0)],
            };
            let parts = rows.iter().zip(globals).map(|(&r, g)| Piece::new(r, k, g, &mut noise)).collect();
            let mut w = Packed::new(&kernels, parts, k, is_tiled)?;
            let (n, columns) = (w.n(), w.operand.groups as usize * 16);
            let plain: Vec<f32> = w.values();
            let mut bytes = std::mem::take(&mut w.codes);
            let bytes = bytes_of(&mut bytes);
            let mut row = 0;
            for p in &w.parts {
                let mut want = vec![0.0; k];
                for r in 0..p.rows {
                    let (c, s) = (&p.codes()[r * k / 2..][..k / 2], &p.scales()[r * k / 16..][..k / 16]);
                    nvfp4::dequantize_row(c, s, None, &mut want);
                    for (i, want) in want.iter().enumerate() {
                        let have = element(bytes, &w.scales, row, i, columns);
                        assert_eq!(
                            have,
                            f64::from(*want),
                            "[{row}, {i}] of {rows:?} x {k}, tiled {is_tiled}"
                        );
                    }
                    row += 1;
                }
            }
            let used: usize = w.scales.iter().filter(|s| **s != 0).count();
            let stored: usize = w.parts.iter().flat_map(|p| p.scales()).filter(|s| **s != 0).count();
            assert_eq!(used, stored, "padding of scales is zero");
            assert!(bytes[n * columns / 2..].iter().all(|b| *b == 0), "padding of codes is zero");
            let mut out = vec![f32::NAN; n * k];
            w.operand.codes = at_mut(bytes);
            // SAFETY: memory of the sizes of the layout.
            unsafe { kernels.dequantize(&w.operand, &mat(&mut out, k), 0)? };
            for (i, (have, want)) in out.iter().zip(&plain).enumerate() {
                assert_eq!(have.to_bits(), want.to_bits(), "[{}, {}]: {have} {want}", i / k, i % k);
            }
        }
    }
    Ok(())
}

#[test]
fn a_bad_scale_is_found() -> Result<()> {
    let Some((kernels, _)) = on_cpu() else { return Ok(()) };
    let w = Packed::new(&kernels, vec![Piece::new(40, 80, None, &mut Noise(1))], 80, false)?;
    for byte in [0x7f, 0x80, 0xff] {
        let mut scales = w.parts[0].scales().to_vec();
        (scales[17 * 5 + 3], scales[39 * 5]) = (byte, byte);
        let (codes, mut bad) = (vec![0u64; 40 * 5], [u64::MAX]);
        let raw = Raw {
            codes: at(&codes),
            scales: at(&scales),
            is_tiled: false,
            rows: 40,
            groups: 5,
            bad: at_mut(&mut bad),
        };
        // SAFETY: memory of the sizes of the layout.
        unsafe { kernels.pack(&raw, 0, &w.operand)? };
        assert_eq!(bad, [17 * 5 + 3]);
    }
    Ok(())
}

/// `x W^T` as the device computes it, cuBLASLt's part by the documented layout in f64. Rows of x are f32.
fn product(
    (kernels, quantise): &(Kernels<OnCpu>, Quantiser),
    w: &mut Packed,
    x: &mut [f32],
    act: ActQuant,
    rows: usize,
) -> Result<Vec<f32>> {
    let (n, k, m) = (w.n(), w.k, x.len() / w.k);
    let padded = super::padded(n, k);
    let room = Room::new(m, rows, w.spans.len(), k, padded);
    let mut workspace = vec![0xa5a5_a5a5_a5a5_a5a5u64; room.all as usize / 8];
    let base = at_mut(&mut workspace);
    let place = |offset: u64| base + offset;
    let amax = x.iter().fold(0f32, |a, v| a.max(v.abs()));
    let global = match act.global {
        ActGlobal::None => None,
        ActGlobal::Static(g) => Some(g),
        ActGlobal::PerCall => Some(nvfp4::global_from_amax(act.rule, amax, DType::F32)?),
    };
    bytes_of(&mut workspace)[room.bad as usize..][..4 * m].fill(0);
    if let Some(g) = global {
        bytes_of(&mut workspace)[..4].copy_from_slice(&g.value().to_ne_bytes());
    }
    let global = if global.is_some() { base } else { 0 };
    let stored = Rows {
        codes: place(room.codes),
        scales: place(room.scales),
        steps: place(room.steps),
        rows: m,
        global,
        convention: convention(act.rule),
    };
    let laid = Laid {
        codes: place(room.laid),
        scales: place(room.tiles),
        rows,
        bad: place(room.bad),
        factors: place(room.factors),
    };
    let input = Matrix::new(at(x), DType::F32, m, k, k);
    let how = Launch::new([(k / 16).div_ceil(128), m, 1], [128, 1, 1], 0);
    let args = Quantise {
        x: input,
        rule: rule(act.rule),
        source: number(DType::F32),
        global,
        q: 0,
        steps: stored.steps,
        codes: stored.codes,
        bytes: stored.scales,
        bad: 0,
    };
    // SAFETY: memory of the sizes of the layout.
    unsafe {
        OnCpu::run::<Quantise>(quantise, how, args)?;
        kernels.operand(&w.operand, &stored, &laid, 0)?;
    }
    let (tiles, codes) = (room.tiles as usize, room.laid as usize);
    let scales_len = swizzle::blocked_len(rows, padded[1] / 16);
    let mut sums = vec![0f32; rows * padded[0]];
    {
        let all = bytes_of(&mut workspace);
        let (codes, scales) = (&all[codes..][..rows * padded[1] / 2], &all[tiles..][..scales_len]);
        for (r, row) in codes.chunks_exact(padded[1] / 2).enumerate() {
            let padding = if r < m { &row[k / 2..] } else { row };
            assert!(padding.iter().all(|b| *b == 0), "padding of row {r} is zero");
        }
        let own = bytes_of(&mut w.codes).to_vec();
        for r in 0..rows {
            for j in 0..padded[0] {
                let terms = (0..padded[1]).map(|i| {
                    element(codes, scales, r, i, padded[1]) * element(&own, &w.scales, j, i, padded[1])
                });
                sums[r * padded[0] + j] = terms.sum::<f64>() as f32;
            }
        }
        assert!(sums[m * padded[0]..].iter().all(|v| *v == 0.0), "padded rows are zero");
    }
    let mut y = vec![7f32; m * n];
    // SAFETY: as above.
    unsafe { kernels.finish(&w.operand, &laid, at(&sums), padded[0], &mat(&mut y, n), 0)? };
    Ok(y)
}

#[test]
fn products_are_those_of_the_oracle() -> Result<()> {
    let Some(all) = on_cpu() else { return Ok(()) };
    let k = 80;
    let mut noise = Noise(9);
    for (c, value) in [(Convention::Multiply, 0.02), (Convention::Divide, 3e-30)] {
        let (one, other) = (scale(c, value), scale(c, value * 5.0));
        let parts = vec![Piece::new(37, k, one, &mut noise), Piece::new(20, k, other, &mut noise)];
        let mut w = Packed::new(&all.0, parts, k, true)?;
        for rule in Rule::ALL {
            let stated = GlobalScale::new(rule.convention(), 0.004)?;
            for (m, global) in
                [(5, ActGlobal::None), (16, ActGlobal::Static(stated)), (9, ActGlobal::PerCall)]
            {
                let act = ActQuant { rule, global };
                let mut x: Vec<f32> = (0..m * k).map(|_| noise.float()).collect();
                let y = product(&all, &mut w, &mut x, act, 16)?;
                let segments = w
                    .parts
                    .iter()
                    .map(|p| Ok(Segment { rows: p.rows, data: p.parts.lend()? }))
                    .collect::<Result<Vec<_>>>()?;
                let schema = Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(c) });
                let decoder = RowDecoder::new(&Q4Weight { schema, k, segments: &segments })?;
                let input = oracle::Input::new(&x, k, &Activations::Nvfp4(act), DType::F32)?;
                for j in 0..w.n() {
                    let column = oracle::Column::new(&decoder, j);
                    for r in 0..m {
                        let (exact, abs) = input.dot(r, &column);
                        let limit = oracle::bound(
                            ExecPath::NativeKernel,
                            oracle::Units::Full,
                            DType::F32,
                            k,
                            exact,
                            abs,
                        );
                        let have = f64::from(y[r * w.n() + j]);
                        assert!(
                            (have - exact).abs() <= limit,
                            "{act:?} [{r}, {j}]: {have:e}, exactly {exact:e}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_row_that_cannot_be_quantised_is_nan_and_alone() -> Result<()> {
    let Some(all) = on_cpu() else { return Ok(()) };
    let (m, k, n) = (130, 96, 20);
    let mut noise = Noise(4);
    let mut w = Packed::new(&all.0, vec![Piece::new(n, k, None, &mut noise)], k, false)?;
    let mut x: Vec<f32> = (0..m * k).map(|_| noise.float()).collect();
    (x[3 * k + 70], x[129 * k]) = (f32::NAN, f32::INFINITY);
    let act = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None };
    let y = product(&all, &mut w, &mut x, act, 256)?;
    for r in 0..m {
        let row = &y[r * n..][..n];
        assert!(row.iter().all(|v| v.is_nan() == matches!(r, 3 | 129)), "row {r}: {row:?}");
    }
    Ok(())
}

#[test]
fn factors_outside_the_range_of_f32_leave_results_inside_it_alone() -> Result<()> {
    let Some(all) = on_cpu() else { return Ok(()) };
    let (k, g) = (64, 1e20f32);
    let global = scale(Convention::Multiply, g);
    let parts = OwnedParts::default()
        .with(Part::Codes, DType::U8, &[1, k / 2], vec![0x11; k / 2])
        .with(Part::Scales, DType::F8E4M3, &[1, k / 16], vec![0x01; k / 16])
        .with_global(global);
    let part = Piece { rows: 1, parts };
    let mut w = Packed::new(&all.0, vec![part], k, false)?;
    let act = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::Static(GlobalScale::multiply(g)?) };
    // Sixes at a scale of 2^-9, by halves at the same.
    let unit = 0.5f32.powi(9);
    let mut x = vec![6.0 * unit * g; k];
    let y = f64::from(product(&all, &mut w, &mut x, act, 16)?[0]);
    let exact = 64.0 * 3.0 * f64::from(unit).powi(2) * f64::from(g).powi(2);
    assert!((y - exact).abs() <= exact * 1e-6, "{y:e} for {exact:e}");
    Ok(())
}

#[test]
fn gradients_are_those_of_the_decoded_weight() -> Result<()> {
    let Some((kernels, _)) = on_cpu() else { return Ok(()) };
    let (m, k) = (3, 80);
    let mut noise = Noise(2);
    let parts = vec![
        Piece::new(37, k, scale(Convention::Multiply, 0.02), &mut noise),
        Piece::new(140, k, scale(Convention::Multiply, 0.3), &mut noise),
    ];
    let w = Packed::new(&kernels, parts, k, false)?;
    let (n, values) = (w.n(), w.values());
    let mut dy: Vec<f32> = (0..m * n).map(|_| noise.float()).collect();
    let mut dx = vec![f32::NAN; m * k];
    // SAFETY: memory of the sizes of the layout.
    unsafe { kernels.backward(&w.operand, &mat(&mut dy, n), &mat(&mut dx, k), 0)? };
    for r in 0..m {
        for i in 0..k {
            let terms = (0..n).map(|j| f64::from(dy[r * n + j]) * f64::from(values[j * k + i]));
            let (exact, abs) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
            let limit = oracle::bound(ExecPath::NativeKernel, oracle::Units::Full, DType::F32, n, exact, abs);
            assert!((f64::from(dx[r * k + i]) - exact).abs() <= limit, "[{r}, {i}]");
        }
    }
    Ok(())
}

#[test]
fn kernels_take_what_they_are_given() -> Result<()> {
    SOURCE.takes::<Pack>("q4_fp4_pack")?;
    SOURCE.takes::<ToOperand>("q4_fp4_operand")?;
    SOURCE.takes::<Finish>("q4_fp4_finish")?;
    SOURCE.takes::<Dequantize>("q4_fp4_dequantize")?;
    SOURCE.takes::<Backward>("q4_fp4_backward")?;
    q4_cuda::ROWS.takes::<Quantise>("q4_nvfp4")
}

/// Those of the native path, and the others without which such a device cannot be opened or used.
#[test]
fn kernels_compile_for_every_device_with_fp4_tensor_cores() -> Result<()> {
    if let Err(why) = q4_cuda::libraries().nvrtc.version() {
        println!("skipped: {why}");
        return Ok(());
    }
    for arch in q4_cuda::ARCHS.into_iter().filter(|a| a.fp4 && a.is_known()) {
        simple::SOURCE.compile(&arch, &[])?;
        q4_cuda::ROWS.compile(&arch, &[])?;
        for family in [0, 4] {
            let options = decode::options(family);
            let options = options.each_ref().map(String::as_str);
            decode::GEMV.compile(&arch, &options[..3])?;
            decode::ROW.compile(&arch, &options)?;
        }
        let image = SOURCE.compile(&arch, &[])?;
        assert!(image.starts_with(b"\x7fELF"));
        for name in &NAMES[..5] {
            assert!(image.windows(name.len()).any(|w| w == name.as_bytes()), "{name} for {arch:?}");
        }
    }
    Ok(())
}
