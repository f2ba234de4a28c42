//! From a stored weight and its spec to the library's description of both: names become numbers, views become
//! pointers.
use crate::abi;
use crate::forward::{Prepared, dtype, exec};
use crate::probe;
use crate::table::{Ctx, Table};
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, Convention, DType, Error, ExecContext, ExecPath, GlobalScale,
    LinearSpec, OpSet, PreparedInfo, PreparedWeight, Q4Schema, Q4Weight, Result, Rule, ScaleLayout,
    SegmentData,
};
use std::mem::size_of;

/// Repacks `w` in the library for exactly `path`.
pub fn prepare(
    table: &'static Table,
    ctx: &Ctx,
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    cx: &mut ExecContext<'_>,
) -> Result<Box<dyn PreparedWeight>> {
    w.validate()?;
    if (w.n(), w.k, w.schema) != (spec.n(), spec.k, spec.schema) {
        return Err(Error::new(Code::ShapeMismatch, "weight of another spec")
            .need(format!("{} [{}, {}]", spec.schema, spec.n(), spec.k))
            .have(format!("{} [{}, {}]", w.schema, w.n(), w.k)));
    }
    let segments = segments(w)?;
    let desc = describe(&segments, w, spec, path)?;
    // SAFETY: codes, scales and workspace are views, good for their stated bytes while `w` and `cx` are
    // borrowed.
    let weight = unsafe { table.prepare(ctx, &desc, &exec(cx)) }.map_err(|e| explain(e, w))?;
    let info = PreparedInfo {
        backend: probe::NAME.into(),
        path,
        activations: spec.activations,
        n: w.n(),
        k: w.k,
        resident_bytes: weight.bytes(),
        ops: OpSet::ALL,
    };
    Ok(Box::new(Prepared::new(weight, info)))
}

/// Scratch the library asks for on the CPU, at most: activations in the form its kernels read, and panels of
/// them for a matrix unit.
pub fn workspace(spec: &LinearSpec, has_matrix_unit: bool) -> u64 {
    // A block of 64 codes has four scales and four sums beside it.
    const BLOCK: (usize, usize) = (64, 96);
    // Rows of a panel, whole registers, each value as three of two bytes.
    const PANEL: (usize, usize, usize) = (512, 32, 6);
    let (m, k) = (spec.max_m, spec.k);
    let rows = match spec.activations {
        Activations::Native if spec.x == DType::F32 => 0,
        Activations::Native => 4 * m * k,
        _ => m * k.div_ceil(BLOCK.0) * BLOCK.1,
    };
    let (most, register, value) = PANEL;
    let panel = m.min(most).next_multiple_of(register) * k.next_multiple_of(BLOCK.0) * value;
    (rows.next_multiple_of(64) + if has_matrix_unit { panel } else { 0 }) as u64
}

fn segments(w: &Q4Weight<'_>) -> Result<Vec<abi::Segment>> {
    let Q4Schema::Nvfp4 { scale_layout, .. } = w.schema else { return Err(another(w)) };
    let one = |s: &q4_core::Segment<'_>| match &s.data {
        SegmentData::Nvfp4 { codes, scales, global } => {
            let (global_scale, global_convention) = global.map_or((0.0, abi::CONVENTION_NONE), scale);
            Ok(abi::Segment {
                struct_size: size_of::<abi::Segment>(),
                rows: s.rows as u64,
                codes: codes.as_ptr(),
                codes_bytes: codes.len() as u64,
                scales: scales.as_ptr(),
                scales_bytes: scales.len() as u64,
                global_scale,
                global_convention,
                scale_layout: match scale_layout {
                    ScaleLayout::RowMajor => abi::SCALE_ROW_MAJOR,
                    ScaleLayout::Swizzled128x4 => abi::SCALE_128X4,
                },
                reserved: 0,
            })
        }
        _ => Err(another(w)),
    };
    w.segments.iter().map(one).collect()
}

fn describe(
    segments: &[abi::Segment],
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
) -> Result<abi::WeightDesc> {
    let path = match path {
        ExecPath::NativeKernel => abi::PATH_NATIVE,
        ExecPath::FusedDequant => abi::PATH_FUSED_DEQUANT,
        other => {
            return Err(Error::new(Code::Unsupported, probe::NAME)
                .need("native-kernel or fused-dequant")
                .have(other.as_str()));
        }
    };
    let mut desc = abi::WeightDesc {
        struct_size: size_of::<abi::WeightDesc>(),
        n: w.n() as u64,
        k: w.k as u64,
        segments: segments.as_ptr(),
        n_segments: segments.len() as u64,
        path,
        activations: abi::ACT_NATIVE,
        x_dtype: dtype(spec.x)?,
        y_dtype: dtype(spec.y)?,
        act_rule: 0,
        act_global_kind: abi::GLOBAL_NONE,
        act_global: 0.0,
        act_global_convention: abi::CONVENTION_NONE,
        max_m: spec.max_m as u64,
        reserved: 0,
    };
    match spec.activations {
        Activations::Native => {}
        Activations::Int8 => desc.activations = abi::ACT_INT8,
        Activations::Nvfp4(act) => quantised(&mut desc, act)?,
    }
    Ok(desc)
}

fn quantised(desc: &mut abi::WeightDesc, act: ActQuant) -> Result<()> {
    desc.activations = abi::ACT_NVFP4;
    desc.act_rule = match act.rule {
        Rule::TorchAo => abi::RULE_TORCHAO,
        Rule::ModelOpt => abi::RULE_MODELOPT,
        Rule::CompressedTensors => abi::RULE_COMPRESSED_TENSORS,
        Rule::TransformerEngine => abi::RULE_TRANSFORMER_ENGINE,
        Rule::Runtime => abi::RULE_RUNTIME,
        other => return Err(Error::new(Code::Unsupported, "activations of libNVFP4").have(other.as_str())),
    };
    match act.global {
        ActGlobal::None => {}
        ActGlobal::PerCall => desc.act_global_kind = abi::GLOBAL_PER_CALL,
        ActGlobal::Static(g) => {
            desc.act_global_kind = abi::GLOBAL_STATIC;
            (desc.act_global, desc.act_global_convention) = scale(g);
        }
    }
    Ok(())
}

fn scale(g: GlobalScale) -> (f32, u32) {
    let convention = match g.convention() {
        Convention::Multiply => abi::CONVENTION_MULTIPLY,
        Convention::Divide => abi::CONVENTION_DIVIDE,
    };
    (g.value(), convention)
}

/// Names the segment whose block scales are to blame, when they are: the library checks them, its status does
/// not say so.
fn explain(e: Error, w: &Q4Weight<'_>) -> Error {
    for (i, s) in w.segments.iter().enumerate() {
        let SegmentData::Nvfp4 { scales, .. } = &s.data else { continue };
        let bytes = scales.as_bytes().unwrap_or_default();
        // A sign bit, or E4M3's only NaN.
        if let Some(at) = bytes.iter().position(|&b| b >= 0x7f) {
            return Error::new(Code::ScaleInvalid, format!("segment {i}: block scale {at}"))
                .need("E4M3 without sign, not NaN")
                .have(format!("{:#04x}", bytes[at]));
        }
    }
    e
}

fn another(w: &Q4Weight<'_>) -> Error {
    Error::new(Code::Unsupported, probe::NAME).need("nvfp4").have(w.schema.to_string())
}
