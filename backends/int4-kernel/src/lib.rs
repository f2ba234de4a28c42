//! int4 products on packed weights, in process: codes stay 4-bit from memory to register, scales and biases
//! on the CPU as wide as they are stored, zero points a byte; biases on the CPU alone. `q4-codebook` has the
//! products and says how they sum.
mod prepare;

use q4_codebook::{Levels, OnCuda, Own, Refuse, Width, width_of};
use q4_core::formats::int4::Zeros;
use q4_core::{Device, LinearSpec, Q4Schema, Registration, RejectCode, inventory};

inventory::submit! {
    Registration { name: OWN.name, construct: |options, env| OWN.construct(options, env) }
}

static OWN: Own = Own {
    name: "int4-kernel",
    version: env!("CARGO_PKG_VERSION"),
    schemas: &["int4", "int4-asym", "int4-affine"],
    has_dots: true,
    refuse,
    scale: |spec| match spec.schema {
        Q4Schema::Int4(format) => Some((format.group, format.scales.size() + format.zero_bytes())),
        _ => None,
    },
    prepare: prepare::prepare,
    cuda: Some(OnCuda {
        levels: Levels::Int4,
        scales: |spec| match spec.schema {
            Q4Schema::Int4(format) => (width_of(format.scales), format.zeros.are_stored()),
            _ => (Width::Single, false),
        },
        may_round: true,
    }),
};

fn refuse(spec: &LinearSpec, reject: &mut Refuse<'_>) {
    use RejectCode::*;
    let Q4Schema::Int4(format) = spec.schema else {
        return reject(SchemaUnsupported, "int4, int4-asym or int4-affine", spec.schema.id().name.into());
    };
    if format.zeros == Zeros::Biases && spec.device != Device::Cpu {
        reject(DeviceUnsupported, "cpu, for groups with biases", spec.device.to_string());
    }
    let group = format.group as usize;
    if group == 0 || !group.is_multiple_of(16) {
        reject(ShapeUnsupported, "groups of a multiple of 16", group.to_string());
    } else if !spec.k.is_multiple_of(group) {
        reject(ShapeUnsupported, &format!("k % {group} == 0"), format!("k = {}", spec.k));
    }
    if !format.scales.is_io() {
        reject(DtypeUnsupported, "scales of float32, float16 or bfloat16", format.scales.to_string());
    }
}
