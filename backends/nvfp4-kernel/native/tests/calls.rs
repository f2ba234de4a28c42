//! What a caller can get wrong, and what the library cannot do.
#![allow(clippy::unwrap_used)]
mod harness;
use harness::{Ctx, Desc, Lent, Matrix, Rng, Scratch, Source, Weight, construct};
use q4_core::{Activations, Code, DType, ExecContext, RejectCode, ScaleLayout, ThreadPool};

#[test]
fn instruction_sets_that_cannot_be_had_say_why() {
    let reason = |isa: &str| construct(isa).err().unwrap()[0].clone();
    let unknown = reason("sse9");
    assert_eq!((unknown.code, unknown.have.as_ref()), (RejectCode::KernelImageMissing, "`sse9`"));
    assert!(unknown.need.contains("avx512vnni, avx512, avx2"), "{unknown}");
    let foreign = reason(if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" });
    assert_eq!(foreign.code, RejectCode::DeviceArch);
    assert!(foreign.have.ends_with("portable"), "{foreign}");
}

#[test]
fn scales_that_are_nan_or_negative_are_refused_with_their_place() {
    let ctx = Ctx::new("portable");
    for lent in [Lent::serial(), Lent::threads(3)] {
        for byte in [0x7f, 0x80, 0x81, 0xff] {
            let (first, mut second) =
                (Source::random(4, 64, None, &mut Rng(1)), Source::random(40, 64, None, &mut Rng(2)));
            (second.scales[4 * 9 + 2], second.scales[4 * 30]) = (byte, byte);
            let tiled = |s: &Source| Source {
                scales: q4_core::formats::swizzle::to_blocked(&s.scales, s.rows, 4),
                layout: ScaleLayout::Swizzled128x4,
                ..s.clone()
            };
            let both = [tiled(&first), tiled(&second)];
            for sources in [[first, second], both] {
                let e = Weight::with(&ctx, &Desc::of(&sources, 64), &lent).err().unwrap();
                assert_eq!(e.code(), Code::ScaleInvalid);
                assert!(e.what().starts_with("segment 1: block scale "), "{e}");
                assert!(e.what().ends_with("(row 9, block 2)"), "{e}");
                assert!(e.to_string().contains(&format!("{byte:#04x}")), "{e}");
            }
        }
    }
}

#[test]
fn wrong_operands_are_refused_and_nothing_is_written() {
    let ctx = Ctx::new("portable");
    let source = Source::random(20, 32, None, &mut Rng(1));
    let mut desc = Desc::of(std::slice::from_ref(&source), 32);
    (desc.activations, desc.max_m) = (Activations::Int8, 2);
    let w = Weight::new(&ctx, &desc).unwrap();
    let (rows, floats) =
        (|n: usize| Rng(2).floats(32 * n), |rows, cols| Matrix::blank(rows, cols, cols, DType::F32));
    let refused = |x: &Matrix, y: &mut Matrix, part: &str| {
        let e = w.forward(x, y, &Lent::serial()).expect_err(part);
        assert_eq!(e.code(), Code::ShapeMismatch, "{part}: {e}");
        assert!(e.to_string().contains(part), "{part}: {e}");
        assert!(y.bytes.iter().all(|&b| b == harness::POISON), "{part}: y was written");
    };
    let x = Matrix::of(&rows(2), 2, 32, DType::F32);
    refused(&Matrix::of(&rows(1), 2, 16, DType::F32), &mut floats(2, 20), "float32[at least 1, 32]");
    refused(&Matrix::of(&rows(2), 2, 32, DType::BF16), &mut floats(2, 20), "float32[at least 1, 32]");
    refused(&x, &mut floats(2, 21), "float32[at least 1, 20]");
    refused(&Matrix::of(&rows(1), 1, 32, DType::F32), &mut floats(2, 20), "the same number of rows");
    refused(&Matrix::of(&rows(3), 3, 32, DType::F32), &mut floats(3, 20), "at most max_m = 2");
    let mut scratch = Scratch::new(w.workspace(2));
    let (pool, mut y) = (ThreadPool::new(1), floats(2, 20));
    let e = w.0.forward(x.view(), y.view_mut(), &mut ExecContext::cpu(&pool)).unwrap_err();
    assert!(e.to_string().contains("0 bytes"), "{e}");
    let lent = Lent::serial();
    let short = scratch.bytes().len() - 1;
    for part in [&mut scratch.bytes()[..short], &mut Scratch::new(w.workspace(2) + 64).bytes()[32..]] {
        let e = w.0.forward(x.view(), y.view_mut(), &mut lent.context(part)).unwrap_err();
        assert_eq!(e.what(), "workspace of a product");
    }
    for (i, bad) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
        let mut values = rows(2);
        values[32 + i] = bad;
        let e = w.forward(&Matrix::of(&values, 2, 32, DType::F32), &mut y, &lent).unwrap_err();
        assert_eq!(e.code(), Code::NonFinite);
        assert!(e.to_string().contains(&format!("x[1, {i}] = {bad}")), "{e}");
    }
    assert!(y.bytes.iter().all(|&b| b == harness::POISON), "y was written");
    w.forward(&x, &mut y, &lent).unwrap();
    assert_eq!(w.workspace(usize::MAX), usize::MAX);
}

#[test]
fn not_a_number_spreads_where_nothing_is_quantised() {
    let source = Source::random(20, 32, None, &mut Rng(1));
    for (isa, ctx) in Ctx::all() {
        let mut values = Rng(2).floats(64);
        values[40] = f32::NAN;
        let mut y = Matrix::blank(2, 20, 20, DType::F32);
        let w = Weight::new(&ctx, &Desc::of(std::slice::from_ref(&source), 32)).unwrap();
        w.forward(&Matrix::of(&values, 2, 32, DType::F32), &mut y, &Lent::serial()).unwrap();
        let y = y.values();
        assert!(y[..20].iter().all(|v| v.is_finite()) && y[20..].iter().all(|v| v.is_nan()), "{isa}");
    }
}

#[test]
fn memory_is_what_the_format_needs() {
    let ctx = Ctx::new("portable");
    let (n, k, m) = (512, 4096, 8);
    let source = Source::random(n, k, None, &mut Rng(1));
    for (activations, x, bytes) in [
        (Activations::Native, DType::F32, 0),
        (Activations::Native, DType::BF16, 4 * m * k),
        (Activations::Int8, DType::BF16, m * k + m * k / 2),
    ] {
        let mut desc = Desc::of(std::slice::from_ref(&source), k);
        (desc.activations, desc.x, desc.max_m) = (activations, x, m);
        let w = Weight::new(&ctx, &desc).unwrap();
        assert_eq!(w.workspace(m), bytes);
        let resident = w.0.info().resident_bytes;
        assert!((n * k * 9 / 16..n * k * 9 / 16 + 1024).contains(&(resident as usize)), "{resident}");
        let said = ctx.0.footprint(&desc.spec(), q4_core::ExecPath::FusedDequant);
        assert_eq!(said.workspace, bytes as u64);
    }
}
