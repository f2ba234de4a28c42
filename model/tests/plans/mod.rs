//! Exports by format and layout.
use q4_core::DType;
use q4_core::detect::Layout;
use q4_core::formats::int4::ToInt4;
use q4_model::export::ExportPlan;
use q4_model::quantize::{Method, Scales, Target, ToNf4, ToNvfp4};

pub fn nvfp4(layout: Layout, scales: Option<Scales>, method: Method) -> ExportPlan {
    ExportPlan::new(layout, Target::Nvfp4(ToNvfp4::new(layout, scales, method)))
}

pub fn nf4(layout: Layout, block: u32, double: bool) -> ExportPlan {
    ExportPlan::new(layout, Target::Nf4(ToNf4 { block, double }))
}

pub fn int4(layout: Layout, group: u32) -> ExportPlan {
    let scales = if layout == Layout::CompressedTensors { DType::BF16 } else { DType::F16 };
    ExportPlan::new(layout, Target::Int4(ToInt4 { group, method: Method::Search, scales }))
}
