//! Layers against what the configuration says about them: other engines build a model from these lists.
use super::{Severity, Verifier};
use crate::checkpoint::Method;
use q4_core::detect::Layout;

impl Verifier<'_> {
    /// A packed layer that is excluded from quantisation, and a dense one that is not.
    pub(super) fn declared(&mut self, name: &str, layout: Layout) {
        let declaration = self.c.declaration();
        let listed = matches!(
            declaration.method,
            Method::ModelOpt | Method::CompressedTensors | Method::Bitsandbytes | Method::Fp8
        );
        let excluded = declaration.excludes(name);
        let message = match (excluded, layout == Layout::Dense) {
            (Some(true), false) => "is packed, and config.json excludes it from quantisation",
            (Some(false), true) if listed => {
                "is dense, and config.json does not exclude it from quantisation"
            }
            _ => return,
        };
        self.add("declared-otherwise", Severity::Warning, name, message.into());
    }
}
