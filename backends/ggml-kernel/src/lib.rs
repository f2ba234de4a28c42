//! Products on blocks of GGML, in process, on the CPU: codes of 4, 5, 6 and 8 bits stay so from memory to
//! register, with their scales a byte and the scales of these an f16. `q4-codebook` has the products and says
//! how they sum.
mod prepare;

use q4_codebook::{Own, Refuse};
use q4_core::{LinearSpec, Q4Schema, Registration, RejectCode, inventory};

inventory::submit! {
    Registration { name: OWN.name, construct: |options, env| OWN.construct(options, env) }
}

static OWN: Own = Own {
    name: "ggml-kernel",
    version: env!("CARGO_PKG_VERSION"),
    schemas: &["q4_k", "q5_k", "q6_k", "q8_0"],
    has_dots: true,
    refuse,
    scale: |spec| match spec.schema {
        Q4Schema::Ggml(format) => Some(prepare::beside(format.blocks)),
        _ => None,
    },
    prepare: prepare::prepare,
    cuda: None,
};

fn refuse(spec: &LinearSpec, reject: &mut Refuse<'_>) {
    use RejectCode::*;
    let Q4Schema::Ggml(format) = spec.schema else {
        return reject(SchemaUnsupported, "q4_k, q5_k, q6_k or q8_0", spec.schema.id().name.into());
    };
    let elements = format.blocks.elements();
    if !spec.k.is_multiple_of(elements) {
        reject(ShapeUnsupported, &format!("k % {elements} == 0"), format!("k = {}", spec.k));
    }
}
