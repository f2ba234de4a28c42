//! FP8 products, in process: weights stay a byte from memory to register, their scales on the CPU as wide as
//! they are stored. `q4-codebook` has the products and says how they sum.
mod prepare;

use q4_codebook::{Levels, OnCuda, Own, Refuse, Width};
use q4_core::formats::fp8::BLOCK;
use q4_core::{LinearSpec, Q4Schema, Registration, RejectCode, inventory};

inventory::submit! {
    Registration { name: OWN.name, construct: |options, env| OWN.construct(options, env) }
}

static OWN: Own = Own {
    name: "fp8-kernel",
    version: env!("CARGO_PKG_VERSION"),
    schemas: &["fp8"],
    has_dots: false,
    refuse,
    scale: |spec| match &spec.schema {
        Q4Schema::Fp8(format) => {
            let group = q4_codebook::scale_group(spec.k, format.reach(spec.k) as u32);
            Some((group as u32, group / 2 + format.scales.size()))
        }
        _ => None,
    },
    prepare: prepare::prepare,
    cuda: Some(OnCuda { levels: Levels::E4m3, scales: |_| (Width::Single, false), may_round: true }),
};

fn refuse(spec: &LinearSpec, reject: &mut Refuse<'_>) {
    use RejectCode::*;
    let Q4Schema::Fp8(format) = &spec.schema else {
        return reject(SchemaUnsupported, "fp8", spec.schema.id().name.into());
    };
    if !spec.k.is_multiple_of(BLOCK) {
        reject(ShapeUnsupported, &format!("k % {BLOCK} == 0"), format!("k = {}", spec.k));
    }
    let [rows, columns] = format.tile;
    if !columns.is_multiple_of(BLOCK as u32) {
        let need = format!("tiles of a multiple of {BLOCK} in features");
        reject(ShapeUnsupported, &need, format!("{rows} x {columns}"));
    }
    if !format.scales.is_io() {
        reject(DtypeUnsupported, "scales of float32, float16 or bfloat16", format.scales.to_string());
    }
}
