//! The backends of this executable: naming a crate here is all it takes for its registration to be linked in.
use q4_cuda as _;
use q4_dequant_matmul as _;
use q4_fp8_kernel as _;
use q4_ggml_kernel as _;
use q4_int4_kernel as _;
use q4_mxfp4_kernel as _;
use q4_nf4_kernel as _;
use q4_nvfp4_kernel as _;
use q4_reference as _;

#[cfg(test)]
mod tests {
    use q4_core::{BUILTINS, BuiltinOptions, Candidate, Registry, RejectCode};

    #[test]
    fn every_builtin_is_linked_in_and_nothing_else() {
        let registry = Registry::builtin(&BuiltinOptions::default()).expect("no name is registered twice");
        let names: Vec<_> = registry.candidates().iter().map(Candidate::name).collect();
        assert_eq!(names, BUILTINS);
        for candidate in registry.candidates() {
            if let Candidate::Dead { name, reasons } = candidate {
                let absent = reasons.iter().any(|r| r.code == RejectCode::NotCompiledIn);
                assert!(!absent, "{name} is not linked into q4");
            }
        }
    }
}
