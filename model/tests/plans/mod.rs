//! Exports by format and layout.
use q4_core::detect::Layout;
use q4_model::export::ExportPlan;
use q4_model::quantize::{Method, Scales, Target, ToNf4, ToNvfp4};

pub fn nvfp4(layout: Layout, scales: Option<Scales>, method: Method) -> ExportPlan {
    ExportPlan::new(layout, Target::Nvfp4(ToNvfp4::new(layout, scales, method)))
}

pub fn nf4(layout: Layout, block: u32, double: bool) -> ExportPlan {
    ExportPlan::new(layout, Target::Nf4(ToNf4 { block, double }))
}
