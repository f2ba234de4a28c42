//! What a program lends is what a library borrows: every spec, weight and machine survives the way across the
//! boundary.
#![allow(clippy::unwrap_used)]
use q4_core::formats::KINDS;
use q4_core::{
    ActGlobal, ActQuant, Activations, Convention, CudaDevice, DType, Dense, Device, ExecPath, GlobalScale,
    HostEnv, LinearSpec, Nf4, NibbleOrder, Nvfp4, OpSet, Part, Q4Schema, Q4Weight, Rule, ScaleLayout,
    Segment, SegmentData, SegmentSpec, TensorView,
};
use q4_plugin_sdk::lend::{LentEnv, LentSpec, LentWeight};
use q4_plugin_sdk::{abi, borrow};
use std::ptr::NonNull;

/// In features: whole blocks of every format.
const K: usize = 256;

fn schemas() -> Vec<Q4Schema> {
    let mut out = Vec::new();
    for scale_layout in [ScaleLayout::RowMajor, ScaleLayout::Swizzled128x4] {
        for global in [None, Some(Convention::Multiply), Some(Convention::Divide)] {
            out.push(Q4Schema::Nvfp4(Nvfp4 { scale_layout, global }));
        }
    }
    for nibble_order in [NibbleOrder::LowFirst, NibbleOrder::HighFirst] {
        for nested in [None, Some(256)] {
            out.push(Q4Schema::Nf4(Nf4 { nibble_order, block: 64, nested }));
        }
    }
    out.extend([DType::F32, DType::F16, DType::BF16].map(|dtype| Q4Schema::Dense(Dense { dtype })));
    out.extend(KINDS.iter().flat_map(|kind| kind.usual.iter().chain(kind.rarer)));
    out
}

fn activations() -> Vec<Activations> {
    let mut out = vec![Activations::Native, Activations::Int8];
    for rule in Rule::ALL {
        let fixed = GlobalScale::new(rule.convention(), 0.37).unwrap();
        for global in [ActGlobal::None, ActGlobal::PerCall, ActGlobal::Static(fixed)] {
            out.push(Activations::Nvfp4(ActQuant { rule, global }));
        }
    }
    out
}

fn spec(schema: Q4Schema, activations: Activations) -> LinearSpec {
    let segment = |name: &str, rows| SegmentSpec { name: name.into(), rows };
    LinearSpec {
        segments: vec![segment("model.layers.0.self_attn.q_proj", 3), segment("größer", 2)],
        schema,
        k: K,
        max_m: 7,
        x: DType::BF16,
        y: DType::F16,
        activations,
        device: Device::Cuda(2),
        ops: OpSet::FORWARD.with(OpSet::DEQUANTIZE),
    }
}

#[test]
fn every_spec_survives() {
    for schema in schemas() {
        for activations in activations() {
            for path in [
                ExecPath::NativeKernel,
                ExecPath::FusedRounded,
                ExecPath::FusedDequant,
                ExecPath::DequantMatmul,
                ExecPath::Reference,
            ] {
                let spec = spec(schema, activations);
                let lent = LentSpec::new(&spec, path).unwrap();
                // SAFETY: a live spec of this program.
                let back = unsafe { borrow::spec(lent.raw()) }.unwrap();
                assert_eq!(back, (spec, path));
            }
        }
    }
}

#[test]
fn numbers_that_are_not_in_the_contract_are_refused() {
    let spec = spec(schemas()[0], Activations::Native);
    let lent = LentSpec::new(&spec, ExecPath::FusedDequant).unwrap();
    let edits: [fn(&mut abi::Q4LinearSpec); 15] = [
        |s| s.struct_size -= 8,
        |s| s.schema = 0,
        |s| s.schema = 1 + KINDS.iter().flat_map(|kind| kind.names).map(|n| n.1).max().unwrap(),
        |s| s.schema_revision = 2,
        |s| s.scale_layout = 0,
        |s| s.global_convention = 3,
        |s| s.n_segments = 0,
        |s| s.n_segments = u64::MAX,
        |s| s.segment_rows = std::ptr::null(),
        |s| s.n += 1,
        |s| s.k = u64::MAX,
        |s| s.x_dtype = 0,
        |s| s.path = 0,
        |s| s.ops = 8,
        |s| s.activations = 4,
    ];
    for (i, edit) in edits.iter().enumerate() {
        let mut raw = *lent.raw();
        edit(&mut raw);
        // SAFETY: the arrays are live and at least as long as they are read.
        assert!(unsafe { borrow::spec(&raw) }.is_err(), "edit {i}");
    }
}

#[test]
fn every_part_of_a_weight_survives() {
    let (bytes, floats) = ([7u8; 5 * K * 4], [0.5f32.to_ne_bytes(); 5 * K]);
    for schema in schemas() {
        // As many bytes as each part wants, and as many elements.
        let data = |rows: usize| {
            let global = schema.global().map(|c| GlobalScale::new(c, rows as f32).unwrap());
            schema.parts(rows, K).iter().fold(
                SegmentData::default().with_global(global).with_offset(0.25),
                |data, part| {
                    let bytes: &[u8] = if part.dtype == DType::F32 { floats.as_flattened() } else { &bytes };
                    let bytes = &bytes[..part.len() * part.dtype.size()];
                    data.with(part.part, TensorView::of_bytes(bytes, part.dtype, &part.shape).unwrap())
                },
            )
        };
        let segments = [3, 2].map(|rows| Segment { rows, data: data(rows) });
        let w = Q4Weight { schema, k: K, segments: &segments };
        let lent = LentWeight::new(&w).unwrap();
        let spec = spec(schema, Activations::Native);
        // SAFETY: a live weight of this program.
        let back = unsafe { borrow::segments(lent.raw(), &spec) }.unwrap();
        let again = Q4Weight { schema, k: K, segments: &back };
        again.validate().unwrap();
        let views = back.iter().flat_map(|s| s.data.parts());
        let is_here = views.map(|(_, view)| view.device()).all(|d| d == Device::Cpu);
        assert!(is_here, "{schema:?}: a weight for {} is in host memory", spec.device);
        let is_nested = schema.id().name == "nf4-dq";
        let places = |w: &Q4Weight<'_>| {
            let part =
                |(part, view): (Part, &TensorView<'_>)| (part, view.as_ptr(), view.len(), view.dtype());
            let one = |s: &Segment<'_>| {
                let parts: Vec<_> = s.data.parts().map(part).collect();
                (parts, s.data.global, is_nested.then_some(s.data.offset))
            };
            w.segments.iter().map(one).collect::<Vec<_>>()
        };
        assert_eq!(places(&again), places(&w), "{schema:?}");
    }
}

#[test]
fn a_weight_elsewhere_is_not_lent() {
    let bytes = [0u8; 64 * 4];
    let place = NonNull::from(&bytes).cast();
    // SAFETY: as many bytes as are stated; nobody reads them.
    let weight =
        unsafe { TensorView::from_raw(place, 256, Device::Cuda(0), DType::F32, &[1, 64], &[64, 1]) }.unwrap();
    let segments = [Segment { rows: 1, data: SegmentData::default().with(Part::Codes, weight) }];
    let w = Q4Weight { schema: Q4Schema::Dense(Dense { dtype: DType::F32 }), k: 64, segments: &segments };
    assert!(LentWeight::new(&w).is_err());
}

#[test]
fn a_machine_survives() {
    let device = |ordinal| CudaDevice {
        ordinal,
        capability: (12, 0),
        name: format!("GPU {ordinal}"),
        memory: 1 << 35,
    };
    let env = HostEnv {
        arch: "x86_64".into(),
        cpu_features: vec!["avx2".into(), "fma".into()],
        processors: 3,
        cuda: vec![device(0), device(1)],
        cuda_driver: Some(13000),
        ..HostEnv::default()
    };
    for env in [env, HostEnv::default()] {
        // SAFETY: live facts of this program.
        assert_eq!(unsafe { borrow::env(LentEnv::new(&env).raw()) }.unwrap(), env);
    }
}
