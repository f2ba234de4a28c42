//! With libtorch: compiles what tch does not bind, and lets q4-train find the libraries it was linked with.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/torch/device.cpp");
    println!("cargo:rerun-if-changed=src/torch/frozen.cpp");
    println!("cargo:rerun-if-changed=src/torch/ranks/gloo.cpp");
    let Some(lib) = std::env::var_os("DEP_TCH_LIBTORCH_LIB") else { return };
    let lib = std::path::Path::new(&lib);
    #[cfg(feature = "torch")]
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .warnings(false)
        .include(lib.join("../include"))
        .file("src/torch/device.cpp")
        .file("src/torch/frozen.cpp")
        .file("src/torch/ranks/gloo.cpp")
        .compile("q4_torch");
    // The wheel's libraries look for CUDA's runtime here, and GNU ld does as well.
    let runtime = lib.join("../../nvidia/cu13/lib");
    for dir in [lib, &runtime] {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", dir.display());
    }
    println!("cargo:rustc-link-arg=-Wl,-rpath-link,{}", runtime.display());
}
