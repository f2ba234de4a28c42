//! Every golden vector of the scalar codecs, bit for bit: what the libraries that write checkpoints compute
//! is what we compute.
//!
//! The manifest drives the test: a file, case or tensor that nobody compares or names as foreign fails it.
#![allow(clippy::unwrap_used)]
use half::{bf16, f16};
use q4_core::formats::{e2m1, e4m3, e8m0, mxfp4, nf4, nvfp4, swizzle};
use q4_core::{Code, DType, GlobalScale, Rule};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;
use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    fs,
    path::Path,
};

/// Files of the manifest that are compared elsewhere: where blocks of GGUF are taken apart.
const FOREIGN_FILES: [&str; 1] = ["gguf.safetensors"];
/// Tensors of formats q4 does not have.
const FOREIGN_TENSORS: [&str; 2] = ["bnb_fp4", "emul_ggml.blocks"];

#[test]
fn golden_vectors() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let manifest: Value = serde_json::from_slice(&fs::read(root.join("manifest.json")).unwrap()).unwrap();
    let (mut vectors, mut elements, mut problems) = (0, 0, Vec::new());
    for (name, entry) in manifest["files"].as_object().unwrap() {
        let check: fn(&Case<'_>) = match name.as_str() {
            "tables.safetensors" => tables,
            "nvfp4_quantize.safetensors" => quantize,
            "nvfp4_nonfinite.safetensors" => refuse,
            "nvfp4_dequant.safetensors" => dequantize,
            "nvfp4_swizzle.safetensors" => swizzled,
            "nvfp4_scaled_mm.safetensors" => products,
            "nf4.safetensors" => nf4_case,
            "mxfp4.safetensors" => mxfp4_case,
            // Logits and layer probes of whole models are compared where the models run.
            model if model.starts_with("qwen3_tiny_") => continue,
            foreign if FOREIGN_FILES.contains(&foreign) => continue,
            unknown => panic!("{unknown}: nobody compares this file"),
        };
        let bytes = fs::read(root.join(name)).unwrap();
        assert_eq!(bytes.len() as u64, entry["bytes"], "{name}: not the file of the manifest");
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let log = Log::default();
        let mut in_manifest = BTreeSet::new();
        for meta in entry["cases"].as_array().unwrap() {
            let case = Case {
                name: meta["name"].as_str().unwrap(),
                meta,
                file: &file,
                log: &log,
                used: RefCell::default(),
            };
            in_manifest.extend(meta["tensors"].as_object().unwrap().keys().cloned());
            check(&case);
            case.close();
        }
        let in_file: BTreeSet<_> = file.names().into_iter().map(String::from).collect();
        assert_eq!(in_file, in_manifest, "{name}: tensors of the file and of the manifest");
        let (v, e, s) = (log.vectors.get(), log.elements.get(), log.skipped.get());
        println!("{name}: {v} vectors, {e} elements compared, {s} vectors not normative or foreign");
        assert!(v > 0 && e > 0, "{name}: nothing compared");
        vectors += v;
        elements += e;
        problems.extend(log.problems.into_inner().into_iter().map(|p| format!("{name}: {p}")));
    }
    println!("total: {vectors} vectors, {elements} elements compared");
    assert!(vectors > 0 && problems.is_empty(), "{} problems\n{}", problems.len(), problems.join("\n"));
}

fn tables(case: &Case<'_>) {
    match case.name {
        "decode" => {
            case.same_f32("e2m1", &e2m1::VALUES, &case.f32s("e2m1"));
            case.same_f32("e4m3fn", &e4m3::TABLE, &case.f32s("e4m3fn"));
            case.same_f32("e8m0", &(0..=255).map(e8m0::decode).collect::<Vec<_>>(), &case.f32s("e8m0"));
            case.same_f32("nf4", &nf4::CODEBOOK, &case.f32s("nf4"));
            case.same_f32("bnb_dynamic_map", nf4::dynamic_map(), &case.f32s("bnb_dynamic_map"));
        }
        "f32_to_e2m1" => {
            let got: Vec<u8> = case.f32s("input").into_iter().map(e2m1::encode).collect();
            case.same("torchao", &got, case.bytes("torchao"));
            for library in ["modelopt", "compressed_tensors"] {
                let want: Vec<u8> = case.bytes(library).iter().map(|&c| one_zero(c)).collect();
                case.same(library, &got.iter().map(|&c| one_zero(c)).collect::<Vec<_>>(), &want);
            }
        }
        "f32_to_e4m3fn" => {
            let input = case.f32s("input");
            let got: Vec<u8> = input.iter().map(|&x| e4m3::encode(x)).collect();
            case.same("saturating", &got, case.bytes("saturating"));
            // torch's cast overflows to NaN above the last midpoint where every quantiser saturates.
            let raw: Vec<u8> =
                got.iter().zip(&input).map(|(&b, &x)| if x > 464.0 { 0x7f } else { b }).collect();
            case.same("raw_cast", &raw, case.bytes("raw_cast"));
        }
        _ => case.unknown(),
    }
}

fn quantize(case: &Case<'_>) {
    let x = case.f32s("input");
    let source = case.dtype("input");
    let k = case.shape("input")[1];
    // A calibrated amax is an f32 of its own; otherwise it has the type of the tensor.
    let (amax, amax_source) = match case.has("amax_cal") {
        true => (case.f32s("amax_cal")[0], DType::F32),
        false => (x.iter().fold(0f32, |a, v| a.max(v.abs())), source),
    };
    for (library, rule, two_level, global_name) in [
        ("torchao", Rule::TorchAo, false, ""),
        ("torchao_gs", Rule::TorchAo, true, "global"),
        ("ct", Rule::CompressedTensors, true, "global"),
        ("modelopt", Rule::ModelOpt, true, "global"),
        ("emul_te", Rule::TransformerEngine, true, "global_enc"),
    ] {
        let key = |part: &str| format!("{library}.{part}");
        if !case.has(&key("codes")) {
            continue;
        }
        let global = two_level.then(|| nvfp4::global_from_amax(rule, amax, amax_source).unwrap());
        let (codes, scales) = quantize_rows(&nvfp4::Quantizer { rule, global, source }, &x, k);
        assert!(scales.iter().all(|&s| s < 0x7f), "{}: {library}: scale is NaN or negative", case.name);
        if case.nonnormative(library) {
            case.skip(|t| t.starts_with(&format!("{library}.")));
            continue;
        }
        if case.has(&key(global_name)) {
            case.same_f32(&key(global_name), &[global.unwrap().value()], &case.f32s(&key(global_name)));
        }
        // What an all-zero block has for a scale does not matter; each library has its own.
        let of_data = |scales: &[u8]| -> Vec<u8> {
            let zero = |b: usize| x[16 * b..][..16].iter().all(|&v| v == 0.0);
            scales.iter().enumerate().map(|(b, &s)| if zero(b) { 0 } else { s }).collect()
        };
        case.same(&key("scale"), &of_data(&scales), &of_data(case.bytes(&key("scale"))));
        case.same(&key("codes"), &one_zero_each(&codes), &one_zero_each(case.bytes(&key("codes"))));
        if case.has(&key("dequant")) {
            let got = dequantize_rows(case.bytes(&key("codes")), case.bytes(&key("scale")), global);
            case.same_f32(&key("dequant"), &got, &case.f32s(&key("dequant")));
        }
        if case.has(&key("act_fake_quant")) {
            let got = cast(&dequantize_rows(&codes, &scales, global), source);
            let want = case.f32s(&key("act_fake_quant"));
            case.same_f32(&key("act_fake_quant"), &unsigned_zeros(&got), &unsigned_zeros(&want));
        }
    }
}

fn refuse(case: &Case<'_>) {
    assert_eq!(
        case.meta["normative"], false,
        "{}: what libraries do with such input is not a rule",
        case.name
    );
    let x = case.f32s("input");
    let k = case.shape("input")[1];
    for rule in Rule::ALL {
        let quantizer = nvfp4::Quantizer { rule, global: None, source: DType::F32 };
        let refused = x.chunks(k).any(|row| {
            quantizer
                .quantize_row(row, &mut vec![0; k / 2], &mut vec![0; k / 16])
                .is_err_and(|e| e.code() == Code::ValueInvalid)
        });
        case.same(rule.as_str(), &[refused], &[true]);
    }
    case.skip(|_| true);
}

fn dequantize(case: &Case<'_>) {
    let (codes, scales) = (case.bytes("codes"), case.bytes("scale"));
    let (rows, cols) = (case.shape("scale")[0], case.shape("scale")[1]);
    let multiply = GlobalScale::multiply(case.f32s("global")[0]).unwrap();
    let divide = GlobalScale::divide(case.f32s("ct_global")[0]).unwrap();
    case.same("scale_blocked", &swizzle::to_blocked(scales, rows, cols), case.bytes("scale_blocked"));
    for (tensor, global) in [
        ("torchao_nogs.f32", None),
        ("torchao_gs.f32", Some(multiply)),
        ("torchao_gs.bf16", Some(multiply)),
        ("torchao_gs.f16", Some(multiply)),
        ("modelopt.f32", Some(multiply)),
        ("ct.f32", Some(divide)),
    ] {
        let (got, want) =
            (cast(&dequantize_rows(codes, scales, global), case.dtype(tensor)), case.f32s(tensor));
        match tensor {
            // It decodes code 8 to 0.0.
            "modelopt.f32" => case.same_f32(tensor, &unsigned_zeros(&got), &unsigned_zeros(&want)),
            _ => case.same_f32(tensor, &got, &want),
        }
    }
    let g = f64::from(multiply.value());
    let exact: Vec<u64> = (0..2 * codes.len())
        .map(|i| {
            let code = codes[i / 2] >> (4 * (i % 2)) & 15;
            (f64::from(e2m1::decode(code)) * f64::from(e4m3::decode(scales[i / 16])) * g).to_bits()
        })
        .collect();
    case.same("exact.f64", &exact, &case.f64s("exact.f64").iter().map(|v| v.to_bits()).collect::<Vec<_>>());
}

fn swizzled(case: &Case<'_>) {
    let (linear, blocked) = (case.bytes("linear"), case.bytes("blocked"));
    let (rows, cols) = (case.shape("linear")[0], case.shape("linear")[1]);
    case.same("blocked", &swizzle::to_blocked(linear, rows, cols), blocked);
    case.same("linear", &swizzle::from_blocked(blocked, rows, cols).unwrap(), linear);
}

fn products(case: &Case<'_>) {
    let x = case.f32s("x");
    let k = case.shape("x")[1];
    let bias = case.f32s("bias");
    for flavour in ["nogs", "gs"] {
        let key = |part: &str| format!("{flavour}.{part}");
        for (side, tensor) in [("a", "x"), ("b", "w")] {
            let part = |p: &str| format!("{flavour}.{side}_{p}");
            let stored = case
                .has(&part("global"))
                .then(|| GlobalScale::multiply(case.f32s(&part("global"))[0]).unwrap());
            assert_eq!(stored.is_some(), flavour == "gs");
            let (codes, scales) = (case.bytes(&part("codes")), case.bytes(&part("scale")));
            if case.has(tensor) {
                let values = case.f32s(tensor);
                let amax = values.iter().fold(0f32, |a, v| a.max(v.abs()));
                let global =
                    stored.map(|_| nvfp4::global_from_amax(Rule::TorchAo, amax, DType::BF16).unwrap());
                let q = nvfp4::Quantizer { rule: Rule::TorchAo, global, source: DType::BF16 };
                let got = quantize_rows(&q, &values, k);
                let bits = |g: Option<GlobalScale>| [g.map_or(0, |g| g.value().to_bits())];
                case.same(&part("global"), &bits(global), &bits(stored));
                case.same(&part("codes"), &one_zero_each(&got.0), &one_zero_each(codes));
                case.same(&part("scale"), &got.1, scales);
            }
            if case.has(&part("scale_blocked")) {
                let (rows, cols) = (case.shape(&part("scale"))[0], case.shape(&part("scale"))[1]);
                case.same(
                    &part("scale_blocked"),
                    &swizzle::to_blocked(scales, rows, cols),
                    case.bytes(&part("scale_blocked")),
                );
            }
        }
        let (a, sa) = (case.bytes(&key("a_codes")), case.bytes(&key("a_scale")));
        let (b, sb) = (case.bytes(&key("b_codes")), case.bytes(&key("b_scale")));
        let global = |name: &str| {
            let g = case.has(&key(name)).then(|| GlobalScale::multiply(case.f32s(&key(name))[0]).unwrap());
            (g, g.map_or(1.0, |g| f64::from(g.value())))
        };
        let ((_, ga), (weight_global, gb)) = (global("a_global"), global("b_global"));
        let (m, n) = (x.len() / k, b.len() / (k / 2));

        let mut y = Vec::with_capacity(m * n);
        for (row, col) in (0..m).flat_map(|r| (0..n).map(move |c| (r, c))) {
            let (a, sa) = (&a[row * k / 2..][..k / 2], &sa[row * k / 16..][..k / 16]);
            let (b, sb) = (&b[col * k / 2..][..k / 2], &sb[col * k / 16..][..k / 16]);
            // The integer sum is exact and below 2^53; ga * gb has 48 bits. One rounding is left, the
            // reference has up to two.
            let value = exact_sum(a, sa, b, sb) as f64 / f64::from(1 << 20) * (ga * gb);
            y.push((value, value.abs() * f64::EPSILON));
        }
        case.near(&key("w4a4"), &y);
        if case.has(&key("w4a4_bias_bf16")) {
            let add = |(i, y): (usize, &(f64, f64))| {
                let sum = y.0 + f64::from(bias[i % n]);
                (sum, y.1 + sum.abs() * f64::EPSILON)
            };
            let biased: Vec<(f64, f64)> = y.iter().enumerate().map(add).collect();
            case.near(&key("w4a4_bias_bf16"), &biased);
        }
        if case.has(&key("w4a16")) {
            // The reference scales exact weights. Ours are rounded to f32 twice, by 2^-24 each.
            let sums = f64_product(&x, &dequantize_rows(b, sb, None), k);
            let exact: Vec<_> =
                sums.iter().map(|s| (s.0 * gb, (sum_error(k) + f64::EPSILON) * s.1 * gb)).collect();
            case.near(&key("w4a16"), &exact);
            let sums = f64_product(&x, &dequantize_rows(b, sb, weight_global), k);
            let rounded: Vec<_> = sums.iter().map(|s| (s.0, (sum_error(k) + 2f64.powi(-23)) * s.1)).collect();
            case.near(&key("w4a16"), &rounded);
        }
    }
}

/// Scales are chosen in several ways: q4 writes those of compressed-tensors, which torchao calls EVEN.
fn mxfp4_case(case: &Case<'_>) {
    if case.has("blocks") {
        let (blocks, scales) = (case.bytes("blocks"), case.bytes("scales"));
        let [experts, n, groups, _] = case.shape("blocks")[..] else { panic!("{}: extents", case.name) };
        let k = groups * mxfp4::BLOCK;
        let mut out = vec![0.0; experts * n * k];
        mxfp4::dequantize_row(blocks, scales, &mut out);
        // transformers has the experts transposed.
        let by_k = |i: usize| out[(i / (k * n) * n + i % n) * k + i / n % k];
        let got: Vec<f32> = (0..out.len()).map(by_k).collect();
        case.same_f32("dequant", &unsigned_zeros(&got), &unsigned_zeros(&case.f32s("dequant")));
        return;
    }
    let x = case.f32s("input");
    let (mut codes, mut scales) = (vec![0; x.len() / 2], vec![0; x.len() / mxfp4::BLOCK]);
    mxfp4::quantize(&x, nvfp4::Method::Rtn, &mut codes, &mut scales).unwrap();
    for library in ["ct", "torchao_even"] {
        let key = |part: &str| format!("{library}.{part}");
        case.same(&key("scale"), &scales, case.bytes(&key("scale")));
        case.same(&key("codes"), &one_zero_each(&codes), &one_zero_each(case.bytes(&key("codes"))));
    }
    case.skip(|t| {
        ["torchao_floor", "torchao_ceil", "torchao_rceil", "modelopt"].iter().any(|l| t.starts_with(l))
    });
}

fn nf4_case(case: &Case<'_>) {
    let block = case.meta["blocksize"].as_u64().unwrap() as usize;
    let linear = case.name.starts_with("linear_");
    let key = |part: &str| if linear { format!("w.{part}") } else { part.to_owned() };
    let packed = case.bytes(&key("packed"));

    let absmax: Vec<f32> = if case.meta["nested"] == true {
        let (scales, offset) = (case.f32s(&key("nested_absmax")), case.f32s(&key("nested_offset"))[0]);
        let codes = case.bytes(&key("absmax"));
        let nested =
            nf4::Nested { codes, map: nf4::dynamic_map(), absmax: &scales, offset, block: nf4::NESTED_BLOCK };
        (0..codes.len()).map(|i| nested.absmax_at(i)).collect()
    } else {
        case.f32s(&key("absmax"))
    };
    if case.has("absmax_dequant") {
        case.same_f32("absmax_dequant", &absmax, &case.f32s("absmax_dequant"));
    }
    let values = |count: usize| {
        let mut out = vec![0.0; count];
        nf4::dequantize(packed, |i| absmax[i], block, &mut out);
        out
    };

    if linear {
        let w = values(case.f32s("w_dequant").len());
        case.same_f32("w_dequant", &w, &case.f32s("w_dequant"));
        let k = case.shape("x")[1];
        let sums = f64_product(&case.f32s("x"), &w, k);
        case.near("y", &sums.iter().map(|s| (s.0, sum_error(k) * s.1)).collect::<Vec<_>>());
        return;
    }
    let x = case.f32s("input");
    let (mut codes, mut own) = (vec![0; packed.len()], vec![0.0; x.len().div_ceil(block)]);
    nf4::quantize(&x, block, &mut codes, &mut own).unwrap();
    case.same("packed", &codes, packed);
    if case.meta["nested"] == false {
        case.same_f32("absmax", &own, &absmax);
    }
    case.same_f32("dequant", &cast(&values(x.len()), case.dtype("dequant")), &case.f32s("dequant"));
    if case.has("thresholds") {
        case.same_f32("thresholds", &nf4::THRESHOLDS, &case.f32s("thresholds"));
    }
}

/// One case of the manifest: its tensors, and a note of which of them were used.
struct Case<'a> {
    name: &'a str,
    meta: &'a Value,
    file: &'a SafeTensors<'a>,
    log: &'a Log,
    used: RefCell<BTreeSet<String>>,
}

#[derive(Default)]
struct Log {
    vectors: Cell<usize>,
    elements: Cell<usize>,
    skipped: Cell<usize>,
    problems: RefCell<Vec<String>>,
}

impl<'a> Case<'a> {
    fn has(&self, tensor: &str) -> bool {
        self.meta["tensors"].get(format!("{}.{tensor}", self.name)).is_some()
    }

    fn view(&self, tensor: &str) -> TensorView<'a> {
        let name = format!("{}.{tensor}", self.name);
        let view = self.file.tensor(&name).unwrap_or_else(|e| panic!("{name}: {e}"));
        self.used.borrow_mut().insert(name);
        view
    }

    fn bytes(&self, tensor: &str) -> &'a [u8] {
        let view = self.view(tensor);
        assert!(matches!(view.dtype(), Dtype::U8 | Dtype::F8_E4M3), "{}.{tensor}", self.name);
        view.data()
    }

    fn f32s(&self, tensor: &str) -> Vec<f32> {
        let view = self.view(tensor);
        let (halves, words) = (view.data().as_chunks::<2>().0, view.data().as_chunks::<4>().0);
        match self.dtype(tensor) {
            DType::F32 => words.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            DType::BF16 => halves.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            _ => halves.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        }
    }

    fn f64s(&self, tensor: &str) -> Vec<f64> {
        match self.view(tensor).dtype() {
            Dtype::F64 => {
                self.view(tensor).data().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
            }
            _ => self.f32s(tensor).into_iter().map(f64::from).collect(),
        }
    }

    fn dtype(&self, tensor: &str) -> DType {
        match self.view(tensor).dtype() {
            Dtype::F32 => DType::F32,
            Dtype::BF16 => DType::BF16,
            Dtype::F16 => DType::F16,
            other => panic!("{}.{tensor}: {other:?} is not a float of 16 or 32 bits", self.name),
        }
    }

    fn shape(&self, tensor: &str) -> Vec<usize> {
        self.view(tensor).shape().to_vec()
    }

    fn nonnormative(&self, library: &str) -> bool {
        let globs = self.meta.get("nonnormative").and_then(Value::as_array);
        globs.is_some_and(|globs| globs.iter().any(|g| g == format!("{library}.*").as_str()))
    }

    fn unknown(&self) {
        panic!("{}: nobody compares this case", self.name);
    }

    /// Names tensors as not to be compared.
    fn skip(&self, which: impl Fn(&str) -> bool) {
        let prefix = format!("{}.", self.name);
        for name in self.meta["tensors"].as_object().unwrap().keys() {
            if which(&name[prefix.len()..]) && self.used.borrow_mut().insert(name.clone()) {
                self.log.skipped.set(self.log.skipped.get() + 1);
            }
        }
    }

    fn close(&self) {
        self.skip(|tensor| FOREIGN_TENSORS.contains(&tensor));
        for name in self.meta["tensors"].as_object().unwrap().keys() {
            assert!(self.used.borrow().contains(name), "{name}: nobody compares this tensor");
        }
    }

    fn compare<T>(
        &self,
        tensor: &str,
        got: &[T],
        want: &[T],
        same: impl Fn(&T, &T) -> bool,
        show: impl Fn(&T) -> String,
    ) {
        assert_eq!(got.len(), want.len(), "{}.{tensor}: number of elements", self.name);
        self.log.vectors.set(self.log.vectors.get() + 1);
        self.log.elements.set(self.log.elements.get() + got.len());
        let wrong: Vec<usize> = (0..got.len()).filter(|&i| !same(&got[i], &want[i])).collect();
        if let Some(&i) = wrong.first() {
            let text = format!(
                "{}.{tensor}: {} of {} differ, first at {i}: got {}, want {}",
                self.name,
                wrong.len(),
                got.len(),
                show(&got[i]),
                show(&want[i])
            );
            self.log.problems.borrow_mut().push(text);
        }
    }

    fn same<T: PartialEq + std::fmt::Debug>(&self, tensor: &str, got: &[T], want: &[T]) {
        self.compare(tensor, got, want, T::eq, |v| format!("{v:x?}"));
    }

    /// Bit for bit, except that a NaN is a NaN.
    fn same_f32(&self, tensor: &str, got: &[f32], want: &[f32]) {
        let same = |a: &f32, b: &f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        self.compare(tensor, got, want, same, |v| format!("{v:e} ({:#010x})", v.to_bits()));
    }

    /// `got` is (value, absolute error that both sums together may have); the rounding of the stored type is
    /// added.
    fn near(&self, tensor: &str, got: &[(f64, f64)]) {
        // Half a unit in the last place of the stored type; bf16 results were rounded to f32 on the way.
        let rounding = |v: f64| {
            let binade = f64::from_bits(v.abs().to_bits() >> 52 << 52);
            match self.view(tensor).dtype() {
                Dtype::F64 => 0.0,
                Dtype::F32 => binade * 2f64.powi(-24),
                _ => binade * (2f64.powi(-8) + 2f64.powi(-24)),
            }
        };
        let want: Vec<(f64, f64)> = self.f64s(tensor).into_iter().map(|v| (v, 0.0)).collect();
        let same =
            |a: &(f64, f64), b: &(f64, f64)| (a.0 - b.0).abs() <= a.1 + rounding(a.0.abs().max(b.0.abs()));
        self.compare(tensor, got, &want, same, |v| format!("{:e} +- {:e}", v.0, v.1));
    }
}

fn quantize_rows(q: &nvfp4::Quantizer, x: &[f32], k: usize) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut scales) = (vec![0; x.len() / 2], vec![0; x.len() / 16]);
    for ((x, codes), scales) in x.chunks(k).zip(codes.chunks_mut(k / 2)).zip(scales.chunks_mut(k / 16)) {
        q.quantize_row(x, codes, scales).unwrap();
    }
    (codes, scales)
}

fn dequantize_rows(codes: &[u8], scales: &[u8], global: Option<GlobalScale>) -> Vec<f32> {
    let mut out = vec![0.0; 2 * codes.len()];
    nvfp4::dequantize_row(codes, scales, global, &mut out);
    out
}

/// `Σ a·b` without per-tensor scales, in units of 2^-20: doubled codes are integers, scales multiples of
/// 2^-9.
fn exact_sum(a: &[u8], sa: &[u8], b: &[u8], sb: &[u8]) -> i64 {
    let code =
        |codes: &[u8], i: usize| i64::from(e2m1::DOUBLED[usize::from(codes[i / 2] >> (4 * (i % 2)) & 15)]);
    let scale = |byte: u8| (e4m3::decode(byte) * 512.0) as i64;
    (0..sa.len())
        .map(|g| {
            (16 * g..16 * g + 16).map(|i| code(a, i) * code(b, i)).sum::<i64>() * scale(sa[g]) * scale(sb[g])
        })
        .sum()
}

/// `Σ x·w` and `Σ |x·w|` of every row of `x` with every row of `w`; the products (8 by 24 bits) are exact.
fn f64_product(x: &[f32], w: &[f32], k: usize) -> Vec<(f64, f64)> {
    let dot = |x: &[f32], w: &[f32]| {
        let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
        terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()))
    };
    x.chunks(k).flat_map(|x| w.chunks(k).map(move |w| dot(x, w))).collect()
}

/// How far two f64 sums of the same k terms may be apart, times `Σ |term|`: each is off by less than `k *
/// 2^-53` of it.
fn sum_error(k: usize) -> f64 {
    k as f64 * f64::EPSILON
}

fn cast(values: &[f32], dtype: DType) -> Vec<f32> {
    let round = |v: &f32| match dtype {
        DType::BF16 => bf16::from_f32(*v).to_f32(),
        DType::F16 => f16::from_f32(*v).to_f32(),
        _ => *v,
    };
    values.iter().map(round).collect()
}

/// Adding zero turns -0.0 into 0.0 and changes nothing else.
fn unsigned_zeros(values: &[f32]) -> Vec<f32> {
    values.iter().map(|v| v + 0.0).collect()
}

/// Codes 0 and 8 are the same number; libraries differ in which they write.
fn one_zero(code: u8) -> u8 {
    if code & 7 == 0 { 0 } else { code }
}

fn one_zero_each(packed: &[u8]) -> Vec<u8> {
    packed.iter().map(|&b| e2m1::pair(one_zero(b & 15), one_zero(b >> 4))).collect()
}
