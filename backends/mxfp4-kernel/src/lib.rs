//! MXFP4 products on packed weights, in process: the weights stay 4-bit from memory to register, their scales
//! on the CPU a byte. `q4-codebook` has the products and says how they sum.
mod prepare;

use q4_codebook::{Levels, OnCuda, Own, Refuse, Width};
use q4_core::formats::mxfp4::BLOCK;
use q4_core::{LinearSpec, Q4Schema, Registration, RejectCode, inventory};

inventory::submit! {
    Registration { name: OWN.name, construct: |options, env| OWN.construct(options, env) }
}

static OWN: Own = Own {
    name: "mxfp4-kernel",
    version: env!("CARGO_PKG_VERSION"),
    schemas: &["mxfp4"],
    has_dots: true,
    refuse,
    scale: |spec| matches!(spec.schema, Q4Schema::Mxfp4(_)).then_some((BLOCK as u32, 1)),
    prepare: prepare::prepare,
    // A power of two times a code is a bf16: nothing is left to round.
    cuda: Some(OnCuda { levels: Levels::E2m1, scales: |_| (Width::Brain, false), may_round: false }),
};

fn refuse(spec: &LinearSpec, reject: &mut Refuse<'_>) {
    if !matches!(spec.schema, Q4Schema::Mxfp4(_)) {
        reject(RejectCode::SchemaUnsupported, "mxfp4", spec.schema.id().name.into());
    } else if spec.k % BLOCK != 0 {
        reject(RejectCode::ShapeUnsupported, "k % 32 == 0", format!("k = {}", spec.k));
    }
}
