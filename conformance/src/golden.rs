//! Recorded products: operands and exact results made with torchao and bitsandbytes, part of the executable.
use crate::lattice::Problem;
use q4_core::formats::nf4;
use q4_core::{
    Absmax, ActGlobal, ActQuant, Activations, Code, Convention, DType, Error, GlobalScale, Nf4, Nf4Parts,
    NibbleOrder, Nvfp4, Nvfp4Parts, Q4Schema, Q4Weight, Result, Rule, ScaleLayout, Segment, TensorView,
    read_floats,
};
use safetensors::{SafeTensors, tensor::TensorView as Stored};

static SCALED_MM: &[u8] = include_bytes!("../golden/nvfp4_scaled_mm.safetensors");
static NF4: &[u8] = include_bytes!("../golden/nf4.safetensors");

/// Hands every recorded product to `visit`: NVFP4 with one- and two-level scales, row-major and swizzled,
/// W4A16 and W4A4; NF4 with and without double quantisation.
///
/// # Errors
/// Those of `visit`.
pub fn each(visit: &mut dyn FnMut(&Problem<'_>) -> Result<()>) -> Result<()> {
    let file = open(SCALED_MM)?;
    let mut cases: Vec<&str> = file.names().into_iter().filter_map(|n| n.strip_suffix(".x")).collect();
    cases.sort_unstable();
    for case in cases {
        for scales in ["nogs", "gs"] {
            for layout in [ScaleLayout::RowMajor, ScaleLayout::Swizzled128x4] {
                nvfp4(&file, case, scales, layout, visit)?;
            }
        }
    }
    let file = open(NF4)?;
    let mut cases: Vec<&str> = file.names().into_iter().filter_map(|n| n.strip_suffix(".w.packed")).collect();
    cases.sort_unstable();
    for case in cases {
        nf4_linear(&file, case, visit)?;
    }
    Ok(())
}

/// Names of the recorded products of one encoding and kind of activations.
pub(crate) fn names(schema: &str, activations: &str) -> Vec<String> {
    let mut names = Vec::new();
    // The records are part of the executable: they are readable, or every case of them fails and says so.
    let _ = each(&mut |p| {
        if p.weight.schema.id().name == schema && p.activations.as_str() == activations {
            names.push(p.name.clone());
        }
        Ok(())
    });
    names
}

/// Hands the recorded product of that name to `body`.
pub(crate) fn one<R>(name: &str, body: impl Fn(&Problem<'_>) -> Result<R>) -> Result<R> {
    let mut found = None;
    each(&mut |p| {
        if p.name == name {
            found = Some(body(p));
        }
        Ok(())
    })?;
    found.unwrap_or_else(|| Err(Error::new(Code::Internal, format!("no recorded product is called {name}"))))
}

fn nvfp4(
    file: &SafeTensors<'_>,
    case: &str,
    scales: &str,
    scale_layout: ScaleLayout,
    visit: &mut dyn FnMut(&Problem<'_>) -> Result<()>,
) -> Result<()> {
    let get = |what: &str| tensor(file, &format!("{case}.{scales}.{what}"));
    let x = tensor(file, &format!("{case}.x"))?;
    let (m, k) = (x.shape()[0], x.shape()[1]);
    let codes = get("b_codes")?;
    let n = codes.shape()[0];
    // The largest case is recorded row-major only.
    let stored = match (scale_layout, get("b_scale_blocked")) {
        (ScaleLayout::RowMajor, _) => get("b_scale")?,
        (ScaleLayout::Swizzled128x4, Ok(blocked)) => blocked,
        (ScaleLayout::Swizzled128x4, Err(_)) => return Ok(()),
    };
    let global = |name: &str| get(name).ok().map(|t| GlobalScale::multiply(scalar(&t))).transpose();
    let (a_global, b_global) = (global("a_global")?, global("b_global")?);
    let segments = [Segment {
        rows: n,
        data: Nvfp4Parts {
            codes: TensorView::of(codes.data(), &[n, k / 2])?,
            scales: TensorView::of_bytes(stored.data(), DType::F8E4M3, &[stored.data().len()])?,
            global: b_global,
        }
        .into(),
    }];
    let schema = Q4Schema::Nvfp4(Nvfp4 { scale_layout, global: b_global.map(|_| Convention::Multiply) });
    let quantized =
        ActQuant { rule: Rule::TorchAo, global: a_global.map_or(ActGlobal::None, ActGlobal::Static) };
    // The largest case records one result only.
    let recorded = |name: &str| get(name).ok().map(|t| doubles(&t));
    // No library defines W4A8 as we do: the oracle alone judges it.
    let rows = [
        (Activations::Native, "w4a16", recorded("w4a16")),
        (Activations::Nvfp4(quantized), "w4a4", recorded("w4a4")),
        (Activations::Int8, "w4a8", None),
    ];
    for (activations, result, recorded) in rows {
        let layout = if scale_layout == ScaleLayout::RowMajor { "row-major" } else { "swizzled" };
        visit(&Problem {
            name: format!("golden/nvfp4/{case}/{scales}/{layout}/{result}"),
            weight: Q4Weight { schema, k, segments: &segments },
            x: floats(&x)?,
            m,
            max_m: m,
            activations,
            io: DType::F32,
            recorded,
        })?;
    }
    Ok(())
}

fn nf4_linear(
    file: &SafeTensors<'_>,
    case: &str,
    visit: &mut dyn FnMut(&Problem<'_>) -> Result<()>,
) -> Result<()> {
    let get = |what: &str| tensor(file, &format!("{case}.{what}"));
    let x = get("x")?;
    let dense = get("w_dequant")?;
    let (m, n, k) = (x.shape()[0], dense.shape()[0], dense.shape()[1]);
    let (codes, absmax) = (get("w.packed")?, get("w.absmax")?);
    let nested_absmax = get("w.nested_absmax").ok().map(|t| floats(&t)).transpose()?;
    let plain = if nested_absmax.is_some() { Vec::new() } else { floats(&absmax)? };
    let absmax = match &nested_absmax {
        None => Absmax::Plain(TensorView::of(&plain, &[plain.len()])?),
        Some(nested) => Absmax::Nested {
            codes: TensorView::of(absmax.data(), &[absmax.data().len()])?,
            map: TensorView::of(nf4::dynamic_map().as_slice(), &[256])?,
            absmax: TensorView::of(nested, &[nested.len()])?,
            offset: scalar(&get("w.nested_offset")?),
            block: 256,
        },
    };
    let nested = nested_absmax.as_ref().map(|_| 256);
    let data = Nf4Parts { codes: TensorView::of(codes.data(), &[codes.data().len()])?, absmax }.into();
    let segments = [Segment { rows: n, data }];
    let schema = Q4Schema::Nf4(Nf4 { nibble_order: NibbleOrder::HighFirst, block: 64, nested });
    let rows = [(Activations::Native, Some(doubles(&get("y")?))), (Activations::Int8, None)];
    for (activations, recorded) in rows {
        // int8 inputs have a scale per 16.
        if activations == Activations::Int8 && k % 16 != 0 {
            continue;
        }
        visit(&Problem {
            name: format!("golden/nf4/{case}/{activations}"),
            weight: Q4Weight { schema, k, segments: &segments },
            x: floats(&x)?,
            m,
            max_m: m,
            activations,
            io: DType::F32,
            recorded,
        })?;
    }
    Ok(())
}

fn open(bytes: &[u8]) -> Result<SafeTensors<'_>> {
    SafeTensors::deserialize(bytes).map_err(|e| Error::new(Code::Internal, format!("recorded products: {e}")))
}

fn tensor<'a>(file: &SafeTensors<'a>, name: &str) -> Result<Stored<'a>> {
    file.tensor(name).map_err(|e| Error::new(Code::Internal, format!("recorded products: {name}: {e}")))
}

fn floats(t: &Stored<'_>) -> Result<Vec<f32>> {
    let dtype = match t.dtype() {
        safetensors::Dtype::F32 => DType::F32,
        safetensors::Dtype::BF16 => DType::BF16,
        other => {
            return Err(Error::new(Code::Internal, "recorded products")
                .need("f32 or bf16")
                .have(format!("{other:?}")));
        }
    };
    let mut out = vec![0.0; t.data().len() / dtype.size()];
    read_floats(t.data(), dtype, &mut out);
    Ok(out)
}

/// Results are f64, those of the largest case f32.
fn doubles(t: &Stored<'_>) -> Vec<f64> {
    match t.dtype() {
        safetensors::Dtype::F32 => {
            t.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect()
        }
        _ => t.data().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
    }
}

fn scalar(t: &Stored<'_>) -> f32 {
    t.data().first_chunk::<4>().map_or(f32::NAN, |b| f32::from_le_bytes(*b))
}
