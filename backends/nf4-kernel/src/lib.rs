//! NF4 products on packed weights, in process: the weights stay 4-bit from memory to register. `q4-codebook`
//! has the products and says how they sum.
mod prepare;

use q4_codebook::{LEAST_GROUP, Levels, OnCuda, Own, Refuse, Width, scale_group};
use q4_core::{LinearSpec, Nf4, Q4Schema, Registration, RejectCode, inventory};

inventory::submit! {
    Registration { name: OWN.name, construct: |options, env| OWN.construct(options, env) }
}

static OWN: Own = Own {
    name: "nf4-kernel",
    version: env!("CARGO_PKG_VERSION"),
    schemas: &["nf4", "nf4-dq"],
    has_dots: false,
    refuse,
    scale: |spec| block(spec).map(|block| (block, size_of::<f32>())),
    prepare: prepare::prepare,
    cuda: Some(OnCuda { levels: Levels::Nf4, scales: |_| (Width::Single, false), may_round: true }),
};

fn block(spec: &LinearSpec) -> Option<u32> {
    match spec.schema {
        Q4Schema::Nf4(Nf4 { block, .. }) => Some(block),
        _ => None,
    }
}

fn refuse(spec: &LinearSpec, reject: &mut Refuse<'_>) {
    let Some(block) = block(spec) else {
        return reject(RejectCode::SchemaUnsupported, "nf4 or nf4-dq", spec.schema.id().name.to_owned());
    };
    if spec.k > 0 && scale_group(spec.k, block) < LEAST_GROUP {
        let need = "gcd(k, block) >= 16, so that every 16 of k share a scale";
        reject(RejectCode::ShapeUnsupported, need, format!("k = {}, block = {block}", spec.k));
    }
}
