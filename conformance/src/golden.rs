//! Recorded products: operands and exact results made with torchao, bitsandbytes, compressed-tensors, mlx and
//! gguf, part of the executable.
use crate::lattice::Problem;
use q4_core::formats::{encodings, names as schemas, nf4};
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, DType, Error, Fp8Inputs, GlobalScale, OwnedParts, Part, Q4Schema,
    Q4Weight, Result, Rule, Segment, read_floats,
};
use safetensors::{SafeTensors, tensor::TensorView as Stored};

/// One file of recorded products. A case is what it has the inputs `CASE.x` of.
struct Recording {
    file: &'static [u8],
    /// Of names of problems.
    family: &'static str,
    /// Those that cases are recorded in; one whose parts a case lacks is none of its.
    encodings: &'static [Encoding],
    /// Kinds of activations with the names of their results: in problems and, if there is one, in the file.
    results: &'static [(&'static str, &'static str, Option<&'static str>)],
}

/// Where a file has the parts of one encoding, behind the name of a case.
struct Encoding {
    /// Its label.
    schema: &'static str,
    /// Of names of problems, between those of the case and of the result.
    name: &'static str,
    /// Before every name below.
    under: &'static str,
    parts: &'static [(Part, &'static str)],
    offset: Option<&'static str>,
    /// What no file has, because all have the same.
    map: Option<fn() -> &'static [f32; 256]>,
}

const fn nvfp4(
    schema: &'static str,
    [name, under]: [&'static str; 2],
    parts: &'static [(Part, &'static str)],
) -> Encoding {
    Encoding { schema, name, under, parts, offset: None, map: None }
}

const ROW_MAJOR: &[(Part, &str)] = &[(Part::Codes, "b_codes"), (Part::Scales, "b_scale")];
/// The largest case is recorded row-major only.
const SWIZZLED: &[(Part, &str)] = &[(Part::Codes, "b_codes"), (Part::Scales, "b_scale_blocked")];
const NF4: Encoding = Encoding {
    schema: "nf4.high.64",
    name: "",
    under: "",
    parts: &[(Part::Codes, "w.packed"), (Part::Scales, "w.absmax")],
    offset: None,
    map: None,
};

const INT4: Encoding = Encoding { parts: &[(Part::Codes, "codes"), (Part::Scales, "scale")], ..NF4 };

const AFFINE: Encoding =
    Encoding { parts: &[(Part::Codes, "codes"), (Part::Scales, "scale"), (Part::Zeros, "bias")], ..NF4 };
const FP8: Encoding = INT4;
const GGML: Encoding = Encoding { parts: &[(Part::Codes, "blocks")], ..NF4 };

static RECORDINGS: [Recording; 7] = [
    Recording {
        file: include_bytes!("../golden/nvfp4_scaled_mm.safetensors"),
        family: "nvfp4",
        encodings: &[
            nvfp4("nvfp4.row-major.single", ["nogs/row-major/", "nogs."], ROW_MAJOR),
            nvfp4("nvfp4.swizzled.single", ["nogs/swizzled/", "nogs."], SWIZZLED),
            nvfp4("nvfp4.row-major.multiply", ["gs/row-major/", "gs."], ROW_MAJOR),
            nvfp4("nvfp4.swizzled.multiply", ["gs/swizzled/", "gs."], SWIZZLED),
        ],
        // No library defines W4A8 as we do: the oracle alone judges it.
        results: &[
            ("native", "w4a16", Some("w4a16")),
            ("nvfp4", "w4a4", Some("w4a4")),
            ("int8", "w4a8", None),
        ],
    },
    Recording {
        file: include_bytes!("../golden/nf4.safetensors"),
        family: "nf4",
        encodings: &[
            NF4,
            Encoding {
                schema: "nf4-dq.high.64",
                parts: &[
                    (Part::Codes, "w.packed"),
                    (Part::Scales, "w.absmax"),
                    (Part::SecondScales, "w.nested_absmax"),
                ],
                offset: Some("w.nested_offset"),
                map: Some(nf4::dynamic_map),
                ..NF4
            },
        ],
        results: &[("native", "native", Some("y")), ("int8", "int8", None)],
    },
    Recording {
        file: include_bytes!("../golden/mxfp4_products.safetensors"),
        family: "mxfp4",
        encodings: &[Encoding {
            schema: "mxfp4",
            parts: &[(Part::Codes, "w.codes"), (Part::Scales, "w.scale")],
            ..NF4
        }],
        results: &[("native", "native", Some("y")), ("int8", "int8", None)],
    },
    Recording {
        file: include_bytes!("../golden/int4_products.safetensors"),
        family: "int4",
        encodings: &[
            Encoding { schema: "int4.128.bf16", under: "int4.128.bf16.", ..INT4 },
            Encoding { schema: "int4.32.f16", under: "int4.32.f16.", ..INT4 },
            Encoding {
                schema: "int4-asym.128.f16",
                under: "int4-asym.128.f16.",
                parts: &[(Part::Codes, "codes"), (Part::Scales, "scale"), (Part::Zeros, "zero")],
                ..INT4
            },
        ],
        results: &[("native", "native", Some("y")), ("int8", "int8", None)],
    },
    Recording {
        file: include_bytes!("../golden/mlx_products.safetensors"),
        family: "mlx",
        encodings: &[
            Encoding { schema: "int4-affine.64.bf16", under: "int4-affine.64.bf16.", ..AFFINE },
            Encoding { schema: "int4-affine.32.f16", under: "int4-affine.32.f16.", ..AFFINE },
        ],
        results: &[("native", "native", Some("y")), ("int8", "int8", None)],
    },
    Recording {
        file: include_bytes!("../golden/ggml_products.safetensors"),
        family: "ggml",
        encodings: &[
            Encoding { schema: "q4_k", under: "q4_k.", ..GGML },
            Encoding { schema: "q5_k", under: "q5_k.", ..GGML },
            Encoding { schema: "q6_k", under: "q6_k.", ..GGML },
            Encoding { schema: "q8_0", under: "q8_0.", ..GGML },
        ],
        results: &[("native", "native", Some("y")), ("int8", "int8", None)],
    },
    Recording {
        file: include_bytes!("../golden/fp8_products.safetensors"),
        family: "fp8",
        encodings: &[
            Encoding { schema: "fp8.128x128.bf16", under: "fp8.128x128.bf16.", ..FP8 },
            Encoding { schema: "fp8.channel.bf16", under: "fp8.channel.bf16.", ..FP8 },
            Encoding { schema: "fp8.tensor.f32", under: "fp8.tensor.f32.", ..FP8 },
        ],
        results: &[("native", "native", Some("y")), ("int8", "int8", None), ("fp8", "fp8", None)],
    },
];

/// Hands every recorded product to `visit`: NVFP4 with one- and two-level scales, row-major and swizzled,
/// W4A16 and W4A4; NF4 with and without double quantisation; MXFP4; int4 with and without zero points, and
/// with biases; blocks of GGML; FP8 under scales of every reach.
///
/// # Errors
/// Those of `visit`.
pub fn each(visit: &mut dyn FnMut(&Problem<'_>) -> Result<()>) -> Result<()> {
    for recording in &RECORDINGS {
        let file = SafeTensors::deserialize(recording.file).map_err(|e| broken(&e))?;
        let mut cases: Vec<&str> = file.names().into_iter().filter_map(|n| n.strip_suffix(".x")).collect();
        cases.sort_unstable();
        for case in cases {
            let mut is_read = false;
            for encoding in recording.encodings {
                is_read |= recording.read(&file, case, encoding, visit)?;
            }
            if !is_read {
                return Err(broken(&format!("{case} is of no encoding")));
            }
        }
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

impl Recording {
    /// Whether the case is recorded in the encoding.
    fn read(
        &self,
        file: &SafeTensors<'_>,
        case: &str,
        encoding: &Encoding,
        visit: &mut dyn FnMut(&Problem<'_>) -> Result<()>,
    ) -> Result<bool> {
        let schema = schema(encoding.schema)?;
        let get = |name: &str| file.tensor(&format!("{case}.{}{name}", encoding.under)).ok();
        let x = file.tensor(&format!("{case}.x")).map_err(|e| broken(&e))?;
        let (m, k) = (x.shape()[0], x.shape()[1]);
        let results: Vec<_> =
            self.results.iter().map(|(kind, name, stored)| (*kind, *name, stored.and_then(get))).collect();
        let Some(n) = results.iter().find_map(|(.., y)| Some(y.as_ref()?.shape()[1])) else {
            return Ok(false);
        };
        let Some(parts) = encoding.parts(schema, [n, k], &get)? else { return Ok(false) };
        let segments = [Segment { rows: n, data: parts.lend()? }];
        // The largest case records one result only.
        for (kind, result, recorded) in results {
            // int8 inputs have a scale per 16.
            if kind == "int8" && k % 16 != 0 {
                continue;
            }
            visit(&Problem {
                name: format!("golden/{}/{case}/{}{result}", self.family, encoding.name),
                weight: Q4Weight { schema, k, segments: &segments },
                x: floats(&x)?,
                m,
                max_m: m,
                activations: activations(kind, get("a_global"))?,
                io: DType::F32,
                recorded: recorded.map(|y| doubles(&y)),
            })?;
        }
        Ok(true)
    }
}

impl Encoding {
    /// `None`: the file has a part of another type, or none.
    fn parts<'a>(
        &self,
        schema: Q4Schema,
        [n, k]: [usize; 2],
        get: &dyn Fn(&str) -> Option<Stored<'a>>,
    ) -> Result<Option<OwnedParts>> {
        let mut parts = OwnedParts::default();
        let specs = schema.parts(n, k);
        for (part, name) in self.parts {
            let spec = specs.iter().find(|s| s.part == *part);
            let spec = spec.ok_or_else(|| broken(&format!("{name} is no part of {schema}")))?;
            let is_it = |t: &Stored<'_>| dtype(t).is_some_and(|d| d == spec.dtype || Some(d) == spec.or);
            let Some(stored) = get(name).filter(is_it) else { return Ok(None) };
            parts = parts.with(*part, spec.dtype, &spec.shape, stored.data().to_vec());
        }
        if let Some(map) = self.map {
            parts = parts.with_f32(Part::Map, map());
        }
        if let Some(offset) = self.offset.and_then(get) {
            parts = parts.with_offset(scalar(&offset));
        }
        let global = get("b_global").map(|t| GlobalScale::multiply(scalar(&t))).transpose()?;
        Ok(Some(parts.with_global(global)))
    }
}

fn schema(label: &str) -> Result<Q4Schema> {
    let found = schemas().flat_map(encodings).find(|s| s.label() == label);
    found.ok_or_else(|| broken(&format!("no encoding is called {label}")))
}

/// `global` is the per-tensor scale that inputs were recorded with.
fn activations(kind: &str, global: Option<Stored<'_>>) -> Result<Activations> {
    Ok(match kind {
        "native" => Activations::Native,
        "int8" => Activations::Int8,
        "fp8" => Activations::Fp8(Fp8Inputs::PerRow),
        _ => {
            let global = global.map(|t| GlobalScale::multiply(scalar(&t))).transpose()?;
            let global = global.map_or(ActGlobal::None, ActGlobal::Static);
            Activations::Nvfp4(ActQuant { rule: Rule::TorchAo, global })
        }
    })
}

fn broken(why: &dyn std::fmt::Display) -> Error {
    Error::new(Code::Internal, format!("recorded products: {why}"))
}

fn dtype(t: &Stored<'_>) -> Option<DType> {
    Some(match t.dtype() {
        safetensors::Dtype::F32 => DType::F32,
        safetensors::Dtype::BF16 => DType::BF16,
        safetensors::Dtype::F16 => DType::F16,
        safetensors::Dtype::F8_E4M3 => DType::F8E4M3,
        safetensors::Dtype::U8 => DType::U8,
        _ => return None,
    })
}

fn floats(t: &Stored<'_>) -> Result<Vec<f32>> {
    let dtype = dtype(t).filter(|d| d.is_io()).ok_or_else(|| broken(&"inputs are neither f32 nor bf16"))?;
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
