//! `row.cu` without a device: a compiler for CPUs takes its text too, instructions of PTX replaced by
//! functions of `host.h` with the same operands. So it runs as it is, with the launches it gets, and is held
//! against the oracle's bound.
use super::decode::{Gemv, ROW, fixed, row};
use super::pairs::{Kind, code_at};
use super::{CODINGS, Coding, Levels, Packed, Scales};
use half::{bf16, f16};
use libloading::Library;
use q4_core::formats::sample::Draw;
use q4_core::formats::{e2m1, e4m3, fp8, nf4};
use q4_core::{DType, ExecPath, Fp8Inputs, GlobalScale, oracle};
use q4_cuda::{Chip, FewPlan, RowWidth, number};
use std::process::Command;

/// Instructions by the first words of their text, and functions of host.h.
const INSTRUCTIONS: [(&str, &str); 15] = [
    ("griddepcontrol.", "(void)"),
    ("cvt.rn.bf16.f32 %0, %1;", "cvt_bf16"),
    ("cvt.rn.bf16x2.f32 %0, %1, %2;", "cvt_bf16_pair"),
    ("cvt.f32.f16 %0, %1;", "cvt_from_f16"),
    ("cvt.rn.f16.f32 %0, %1;", "cvt_f16"),
    ("fma.rn.bf16x2 %0, %1, %2, %3;", "fma_bf16_pair"),
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};",
        "mma_bf16",
    ),
    ("ld.shared.v2.u32 {%0, %1}, [%2];", "load_shared2"),
    ("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];", "load_shared4"),
    ("{.reg .pred p; setp.eq.u32 p, %5, %6; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];}", "load_shared4_if"),
    ("st.shared.v2.u32 [%0], {%1, %2};", "store_shared2"),
    ("st.shared.v4.u32 [%0], {%1, %2, %1, %2};", "store_shared_twice"),
    ("ld.global.nc.L1::no_allocate.u32 %0, [%1];", "load_global"),
    ("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];", "load_global4"),
    ("", "not_for_cpus"),
];

/// What stands in the brackets that `text` begins with, and what behind them.
fn bracketed(text: &str) -> (&str, &str) {
    let (mut depth, mut quoted) = (0, false);
    for (i, c) in text.char_indices() {
        quoted ^= c == '"';
        match c {
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth -= 1,
            _ => {}
        }
        if depth == 0 && c == ')' {
            return (&text[1..i], &text[i + 1..]);
        }
    }
    panic!("brackets without an end: {text}");
}

/// The text with functions in the place of instructions.
fn for_cpus(text: &str) -> String {
    let (mut whole, mut rest) = (String::new(), text);
    while let Some(at) = rest.find("asm(").into_iter().chain(rest.find("asm volatile(")).min() {
        whole += &rest[..at];
        let (body, behind) = bracketed(&rest[at + rest[at..].find('(').expect("found")..]);
        let (instruction, mut operands) = body[1..].split_once('"').expect("an instruction");
        let (_, function) = INSTRUCTIONS.iter().find(|i| instruction.starts_with(i.0)).expect("the last");
        let mut all = Vec::new();
        // Each is a constraint in quotes, then the value in brackets; names in quotes alone are clobbered.
        while let Some((_, more)) = operands.split_once('"').and_then(|o| o.1.split_once('"')) {
            operands = more;
            if more.starts_with('(') {
                let (value, more) = bracketed(more);
                all.push(value);
                operands = more;
            }
        }
        match *function {
            "(void)" => whole += "(void)0",
            "not_for_cpus" => whole += "not_for_cpus()",
            function => whole += &format!("{function}({})", all.join(", ")),
        }
        rest = behind;
    }
    whole + rest
}

/// The kernels of a coding; `None`, said in words, without a C++ compiler.
fn built(coding: Coding) -> Option<Library> {
    let dir = tempfile::tempdir().expect("a folder");
    let (text, image) = (dir.path().join("row.cpp"), dir.path().join("row.so"));
    let entry = |run: &str, kernel: &str| {
        format!(
            "extern \"C\" void {run}(unsigned blocks, unsigned count, unsigned bytes, u64 all, const Gemv *p) {{
                static Gemv given;
                asked = bytes, weight = p->w, lent = all, given = *p;
                launch(blocks, count,
                       count == 512 ? +[] {{ {kernel}(given); }} : +[] {{ {kernel}_narrow(given); }});
            }}\n"
        )
    };
    let mut entries = entry("run", "levels_row");
    if coding.levels == Levels::E4m3 {
        entries += &entry("run_rounded", "levels_row_rounded");
    }
    let all = format!("{}\n{}\n{entries}\n", include_str!("../../cuda/host.h"), for_cpus(&ROW.whole()));
    std::fs::write(&text, all).expect("written");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O1", "-w", "-fpermissive", "-shared", "-fPIC", "-o"]);
    match command.arg(&image).arg(&text).args(coding.options()).output() {
        Err(e) => {
            println!("skipped: no C++ compiler ({compiler}: {e})");
            None
        }
        Ok(out) => {
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            // SAFETY: our own code; its initialisers make empty vectors.
            Some(unsafe { Library::new(&image) }.expect("a library"))
        }
    }
}

type Run = unsafe extern "C" fn(u32, u32, u32, u64, *const Gemv);

/// A weight in units, and its values.
struct Weight {
    packed: Packed,
    units: Vec<u32>,
    values: Vec<f64>,
}

impl Weight {
    fn new(coding: Coding, n: usize, k: usize, draw: &Draw) -> Self {
        let (levels, columns) = (coding.levels, k.div_ceil(128));
        let (unit, tile) = (levels.unit(), 64 * 16 * levels.bits() / 8);
        let mut bytes = vec![0u8; n.div_ceil(16) * columns * unit];
        let mut values = vec![0.0; n * k];
        let kind = match levels {
            Levels::Nf4 => Kind::Bytes,
            Levels::E4m3 => Kind::Codes,
            _ => Kind::Apart,
        };
        let float = |i: usize| (draw.word(i) % 4001) as f32 / 40_000.0 - 0.05;
        for (row, from) in (0..n).flat_map(|row| (0..k).step_by(64).map(move |k| (row, k))) {
            let first = (row / 16 * columns + from / 128) * unit;
            let seed = row * k + from;
            let point = match (levels, coding.has_zeros()) {
                (Levels::Int4, true) => (draw.word(seed) >> 20) as u32 % 16,
                (Levels::Int4, false) => 8,
                _ => 0,
            };
            let half = |v: f32| match coding.scales {
                Scales::HalvesF16 | Scales::ZerosF16 => {
                    (f16::from_f32(v).to_bits(), f16::from_f32(v).to_f64())
                }
                _ => (bf16::from_f32(v).to_bits(), bf16::from_f32(v).to_f64()),
            };
            let (low, high) = (half(float(seed)), half(float(seed + 1)));
            let (word, scales) = match coding.scales {
                Scales::Whole => (float(seed).to_bits(), [f64::from(float(seed)); 2]),
                _ if coding.has_zeros() => {
                    let negative = (-(point as f32)).to_bits() & 0xffff_0000;
                    (u32::from(low.0) | negative, [low.1; 2])
                }
                _ => (u32::from(low.0) | u32::from(high.0) << 16, [low.1, high.1]),
            };
            let at = first + 2 * tile + ((row & 7) * 4 + (from >> 6 & 1) * 2 + (row >> 3 & 1)) * 4;
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            for k_at in from..from + 64 {
                let code = (draw.word(row * k + k_at) >> 40) as u8 & (0xff >> (8 - levels.bits()));
                let code = if levels == Levels::E4m3 && e4m3::is_nan(code) { 1 } else { code };
                let level = match levels {
                    Levels::Nf4 => f64::from(nf4::CODEBOOK[usize::from(code)]),
                    Levels::Int4 => f64::from(code) - f64::from(point),
                    Levels::E2m1 => f64::from(e2m1::VALUES[usize::from(code)]),
                    Levels::E4m3 => f64::from(e4m3::decode(code)),
                };
                let (byte, bit) = code_at(kind, row % 16, k_at);
                bytes[first + byte] |= code << bit;
                values[row * k + k_at] = level * scales[k_at / 32 % 2];
            }
        }
        let units = bytes.chunks(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let packed =
            Packed { codes: 0, scales: 0, n: n as u32, k: k as u32, group: 64, units: columns as u32 };
        Self { packed, units, values }
    }

    /// The exact product of a row, and the sum of magnitudes.
    fn dot(&self, row: usize, x: &[f64]) -> (f64, f64) {
        let terms = x.iter().zip(&self.values[row * x.len()..]).map(|(x, w)| x * w);
        terms.fold((0.0, 0.0), |(sum, all), term| (sum + term, all + term.abs()))
    }
}

/// Shape, multiprocessors, and what is fused.
#[derive(Clone, Copy, Debug)]
struct Case {
    n: usize,
    k: usize,
    processors: usize,
    gate: bool,
    norm: bool,
    y: DType,
}

/// Row groups that are not whole, k of one tile, warps without units, of one and of many; one block and
/// several.
const CASES: [Case; 12] = {
    const fn of(n: usize, k: usize, processors: usize, gate: bool, norm: bool, y: DType) -> Case {
        Case { n, k, processors, gate, norm, y }
    }
    [
        of(16, 64, 3, false, false, DType::F32),
        of(40, 128, 3, false, true, DType::BF16),
        of(96, 320, 2, true, false, DType::F16),
        of(96, 320, 3, false, true, DType::F32),
        of(1000, 64, 5, false, false, DType::F32),
        of(224, 1088, 3, true, true, DType::BF16),
        of(544, 1088, 1, false, false, DType::F32),
        of(544, 1088, 1, true, true, DType::F32),
        of(33, 2560, 2, false, false, DType::F32),
        of(64, 4160, 2, true, false, DType::F32),
        of(16, 8192, 1, false, true, DType::F32),
        of(16, 16_384, 1, false, false, DType::F32),
    ]
};

impl Case {
    /// Runs the kernel, compares, and gives the width that the launch has. `rounding`: of x to FP8.
    fn check(self, coding: Coding, rounding: Option<Fp8Inputs>, run: Run) -> RowWidth {
        let Self { n, k, processors, gate, norm, y: dtype } = self;
        let draw = Draw { seed: (n * k) as u64, tame: true };
        let w = Weight::new(coding, n, k, &draw);
        // Behind a norm of ones x is the norm's weight, rounded.
        let float = |i: usize| {
            let v = ((draw.word(i) >> 30) % 4001) as f32 / 2000.0 - 1.0;
            // With a scale for 128 that is not the row's, and zeros alone.
            if rounding.is_some() { v * [1.0, 1e-3, 0.0, 16.0][i / 128 % 4] } else { v }
        };
        let weights: Vec<f32> = (0..k).map(float).collect();
        let rounded: Vec<u16> = weights.iter().map(|v| bf16::from_f32(*v).to_bits()).collect();
        let mut x: Vec<f32> = rounded.iter().map(|v| bf16::from_bits(*v).to_f32()).collect();
        if let Some(inputs) = rounding {
            fp8::inputs::round_row(&mut x, inputs).expect("finite values");
        }
        let x: Vec<f64> = x.into_iter().map(f64::from).collect();
        let ones = vec![1.0f32; k];
        let on = Chip { processors, shared: 227 << 10, clusters: true };
        let (width, plan) =
            row(coding.levels, &w.packed, (norm, gate, rounding.is_some()), on).expect("a launch");
        let FewPlan { how, .. } = plan;
        let [each, extra, gate_at] = plan.deal(gate);
        let (columns, accumulate) = (if gate { n / 2 } else { n }, dtype == DType::F32 && !gate);
        let (mut wide, mut narrow) = (vec![0.25f32; columns], vec![0x7fffu16; columns]);
        let p = Gemv {
            w: w.units.as_ptr().expose_provenance() as u64,
            x: if norm { ones.as_ptr().expose_provenance() } else { rounded.as_ptr().expose_provenance() }
                as u64,
            y: if dtype == DType::F32 {
                wide.as_mut_ptr().expose_provenance()
            } else {
                narrow.as_mut_ptr().expose_provenance()
            } as u64,
            norm: if norm { weights.as_ptr().expose_provenance() as u64 } else { 0 },
            ldx: k as u64,
            ldy: columns as u64,
            m: 1,
            n: n as u32,
            k: k as u32,
            units: w.packed.units,
            each,
            extra,
            gate_at,
            x_dtype: number(DType::BF16),
            y_dtype: number(dtype),
            accumulate: accumulate.into(),
            eps: 0.0,
            fixed: rounding.map_or(0.0, fixed),
        };
        // SAFETY: what p addresses lives, and has the sizes its numbers say.
        unsafe { run(how.grid[0], how.block[0], how.shared, 4 * w.units.len() as u64, &p) };
        for column in 0..columns {
            let have = match dtype {
                DType::F32 => f64::from(wide[column]),
                DType::F16 => f16::from_bits(narrow[column]).to_f64(),
                _ => bf16::from_bits(narrow[column]).to_f64(),
            };
            let bound = |exact, all| {
                oracle::bound(ExecPath::FusedDequant, oracle::Units::Full, DType::F32, k, exact, all)
            };
            let (mut want, all) = w.dot(column, &x);
            let mut limit = bound(want, all);
            if gate {
                let (up, all_up) = w.dot(column + columns, &x);
                // The slope of silu is at most 1.1.
                let silu = want / (1.0 + (-want).exp());
                limit = 1.1 * limit * up.abs() + bound(up, all_up) * silu.abs() + 1e-6 * (silu * up).abs();
                want = silu * up;
            }
            want += if accumulate { 0.25 } else { 0.0 };
            limit +=
                oracle::roundoff(dtype) * want.abs() * 1.01 + if dtype == DType::F16 { 3e-8 } else { 1e-30 };
            assert!(
                (have - want).abs() <= limit,
                "{coding:?} {self:?}: y[{column}] {have} for {want}, {limit:e}"
            );
        }
        width
    }
}

#[test]
fn a_row_is_within_its_bound() {
    std::thread::scope(|scope| {
        for coding in CODINGS {
            scope.spawn(move || {
                let Some(library) = built(coding) else { return };
                // SAFETY: `built` declares it so.
                let run = |name: &str| *unsafe { library.get::<Run>(name.as_bytes()) }.expect("an entry");
                let widths = CASES.map(|case| case.check(coding, None, run("run")));
                assert!(widths.contains(&RowWidth::Narrow) && widths.contains(&RowWidth::Full));
                if coding.levels == Levels::E4m3 {
                    let stored = GlobalScale::multiply(1.0 / 300.0).expect("a scale");
                    for inputs in [Fp8Inputs::PerRow, Fp8Inputs::PerBlock, Fp8Inputs::Static(stored)] {
                        for case in CASES {
                            case.check(coding, Some(inputs), run("run_rounded"));
                        }
                    }
                }
            });
        }
    });
}
