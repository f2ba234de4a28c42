//! Layers against what the configuration says about them: other engines build a model from these lists.
use super::{Severity, Verifier};
use crate::checkpoint::Method;
use q4_core::detect::Layout;

impl Verifier<'_> {
    /// A packed layer that is excluded from quantisation, and a dense one that is not.
    pub(super) fn declared(&mut self, name: &str, layout: Layout, weight: &str) {
        let declaration = self.c.declaration();
        let listed = matches!(
            declaration.method,
            Method::ModelOpt | Method::CompressedTensors | Method::Bitsandbytes | Method::Fp8
        );
        let is_dense = layout == Layout::Dense;
        let message = match declaration.exclusion(name) {
            Some(entry) if !is_dense => {
                format!("`{weight}` is packed, and {entry} excludes it from quantisation")
            }
            None if is_dense && listed && declaration.excludes(name) == Some(false) => {
                let lists: Vec<_> = declaration.excluded.iter().map(|list| list.place()).collect();
                let lists = if lists.is_empty() { "config.json".to_owned() } else { lists.join(" or ") };
                format!("`{weight}` is dense, and no entry of {lists} excludes it from quantisation")
            }
            _ => return,
        };
        self.add("declared-otherwise", Severity::Warning, name, message);
    }
}
