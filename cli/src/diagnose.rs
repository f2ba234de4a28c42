//! `q4 diagnose`: the machine, the backends, and what their kernels make of recorded products.
//!
//! Nothing here is inferred from a name or a file that exists: every live path computes, and the exit status
//! says whether it computed rightly.
mod page;

use crate::args::DiagnoseArgs;
use crate::context::Context;
use crate::report::Outcome;
use q4_conformance::{PathReport, Verdict, check_paths};
use q4_core::memory::{available, human};
use q4_core::{Candidate, Code, Device, HostEnv, ProbeItem, Reject, Result};
use q4_cuda::{Arch, Cache, CachedImage, Found, fp4_lacks};
use serde::Serialize;
use std::fmt::Write;

#[derive(Serialize)]
struct Body {
    version: &'static str,
    host: Host,
    backends: Vec<Backend>,
    findings: Vec<Finding>,
}

#[derive(Serialize)]
struct Host {
    #[serde(flatten)]
    env: HostEnv,
    fingerprint: String,
    available_bytes: Option<u64>,
    cuda_libraries: CudaLibraries,
    /// Where the paths below were run, and why there.
    device: String,
    device_why: String,
    /// Environment variables that were read, and what they say.
    environment: Vec<(String, String)>,
}

/// What can be opened of CUDA, and the machine code kept of it.
#[derive(Serialize)]
struct CudaLibraries {
    driver: String,
    nvrtc: String,
    cublaslt: String,
    cubin_cache: Option<String>,
    cubins: Vec<String>,
}

impl CudaLibraries {
    fn look() -> Self {
        let all = q4_cuda::libraries();
        let version = |f: &Found| match f {
            Found::Yes(v) => format!("{}.{}", v / 1000, v % 1000 / 10),
            Found::No(why) => format!("none: {why}"),
        };
        let cache = Cache::of_user();
        let image = |i: &CachedImage| {
            let name = i.path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
            format!("{name} ({})", human(i.bytes))
        };
        Self {
            driver: version(&all.driver),
            nvrtc: version(&all.nvrtc),
            cublaslt: match &all.cublaslt {
                Found::Yes(v) => v.to_string(),
                Found::No(why) => format!("none: {why}"),
            },
            cubin_cache: cache.folder().map(|f| f.display().to_string()),
            cubins: cache.images().iter().map(image).collect(),
        }
    }
}

#[derive(Serialize)]
struct Backend {
    name: String,
    state: &'static str,
    version: String,
    probes: Vec<ProbeItem>,
    paths: Vec<PathReport>,
    reasons: Vec<Reject>,
}

#[derive(Serialize)]
struct Finding {
    code: &'static str,
    backend: String,
    message: String,
}

/// Variables that change what this program does.
const VARIABLES: [&str; 8] = [
    "Q4_ISA",
    "Q4_NVFP4_LIB",
    "Q4_THREADS",
    "Q4_CUDA_LIBS",
    "Q4_CUBIN_CACHE",
    "Q4_CUBINS",
    "RUST_LOG",
    "NO_COLOR",
];

/// Runs the verb. [`Code::Findings`] when a live path is wrong, a library is refused, or no kernel works.
pub fn run(cx: &Context, args: &DiagnoseArgs) -> Result<Outcome> {
    let (registry, _) = cx.backends()?;
    let (device, device_why) = (cx.device()?, cx.device_choice()?.why.clone());
    let mut measured = check_paths(&registry, device, &cx.threads())?;
    if args.matrix {
        cx.report().result("diagnose-matrix", &Matrix { rows: matrix_rows(&measured) }, || {
            matrix(&matrix_rows(&measured))
        })?;
        return Ok(Outcome::Done);
    }
    let mut env = registry.env().clone();
    let fingerprint = format!("{:016x}", env.fingerprint());
    if device == Device::Cpu {
        env.find_cuda(None); // to be shown; nothing runs there
    }
    let mut findings = Vec::new();
    let mut backends = Vec::new();
    for candidate in registry.candidates() {
        let paths = measured.remove(candidate.name()).unwrap_or_default();
        let row = match candidate {
            Candidate::Live(b) => Backend {
                name: candidate.name().to_owned(),
                state: "live",
                version: b.descriptor().version.to_string(),
                probes: b.probe(registry.env()),
                paths,
                reasons: Vec::new(),
            },
            Candidate::Dead { reasons, .. } => Backend {
                name: candidate.name().to_owned(),
                state: "dead",
                version: String::new(),
                probes: Vec::new(),
                paths,
                reasons: reasons.clone(),
            },
        };
        findings.extend(problems(&row));
        backends.push(row);
    }
    // What runs on a device that a plugin brings is that plugin.
    let is_kernel = |b: &Backend| b.name.ends_with("-kernel") || matches!(device, Device::Vendor { .. });
    let kernel = |b: &Backend| is_kernel(b) && b.paths.iter().any(|p| p.verdict == Verdict::Pass);
    if !backends.iter().any(kernel) {
        findings.push(Finding {
            code: "no-kernel",
            backend: String::new(),
            message: "no kernel path works here".into(),
        });
    }
    let read = |name: &&str| std::env::var(name).ok().map(|value| ((*name).to_owned(), value));
    let body = Body {
        version: env!("CARGO_PKG_VERSION"),
        host: Host {
            fingerprint,
            env,
            device: device.to_string(),
            device_why,
            cuda_libraries: CudaLibraries::look(),
            available_bytes: available(),
            environment: VARIABLES.iter().filter_map(read).collect(),
        },
        backends,
        findings,
    };
    if let Some(path) = &args.html {
        page::page(&body).write(path)?;
    }
    cx.report().result("diagnose", &body, || text(&body))?;
    Ok(if body.findings.is_empty() { Outcome::Done } else { Outcome::Found(Code::Findings) })
}

fn problems(b: &Backend) -> Vec<Finding> {
    let mut found = Vec::new();
    if b.state == "dead" {
        let reasons: Vec<_> = b.reasons.iter().map(|r| format!("{}: {}", r.code.as_str(), r.have)).collect();
        found.push(Finding { code: "backend-dead", backend: b.name.clone(), message: reasons.join("; ") });
    }
    for p in b.paths.iter().filter(|p| p.verdict == Verdict::Fail) {
        let message =
            format!("{} {} {}: {}", p.path, p.schema, p.activations, p.message.as_deref().unwrap_or("wrong"));
        found.push(Finding { code: "wrong-result", backend: b.name.clone(), message });
    }
    for probe in b.probes.iter().filter(|p| !p.reasons.is_empty()) {
        let reasons: Vec<_> = probe.reasons.iter().map(ToString::to_string).collect();
        let message = format!("{}: {}", probe.id, reasons.join("; "));
        found.push(Finding { code: "probe-failed", backend: b.name.clone(), message });
    }
    found
}

fn text(b: &Body) -> String {
    let mut out = String::new();
    let h = &b.host;
    let _ = writeln!(out, "q4 {}", b.version);
    let _ = writeln!(
        out,
        "host      {}, {} processors, {}",
        h.env.arch,
        h.env.processors,
        h.env.cpu_features.join(" ")
    );
    if h.env.arch == "aarch64" {
        let _ = writeln!(out, "          NEON kernels: run under an emulator, not timed on hardware");
    }
    let _ = writeln!(out, "memory    {} available", h.available_bytes.map_or("unknown".into(), human));
    let devices: Vec<_> =
        h.env.cuda.iter().map(|d| format!("{} ({}, {})", d.ordinal, d.name, d.arch())).collect();
    let cuda = h.env.cuda_missing.clone().unwrap_or_else(|| devices.join(", "));
    let _ = writeln!(out, "cuda      {cuda}");
    for d in &h.env.vendor {
        let _ = writeln!(out, "vendor    {} ({}, {})", d.device, d.name, d.fingerprint);
    }
    let c = &h.cuda_libraries;
    if !devices.is_empty() {
        let _ = writeln!(out, "          driver {}, NVRTC {}, cuBLASLt {}", c.driver, c.nvrtc, c.cublaslt);
        let place = c.cubin_cache.as_deref().unwrap_or("nowhere");
        let _ = writeln!(out, "          cubins in {place}: {}", c.cubins.len());
        for image in &c.cubins {
            let _ = writeln!(out, "            {image}");
        }
        let has_fp4 = |d: &q4_core::CudaDevice| Arch::of(d.capability).fp4;
        if h.env.cuda.iter().any(has_fp4) {
            let lacks = fp4_lacks(&h.env.cuda_tools.cublaslt);
            let how = if lacks.is_none() { "used by the native path" } else { "not used" };
            let _ = writeln!(out, "          FP4 tensor cores: {how}");
            if let Some(r) = lacks {
                let _ = writeln!(out, "            {r}");
            }
            let _ = writeln!(
                out,
                "          nothing of q4 was run on such hardware: the self-checks decide here"
            );
        }
    }
    let idle = if h.device == "cpu" && !devices.is_empty() { "; --device cuda uses the GPU" } else { "" };
    let _ = writeln!(out, "device    {} ({}{idle})", h.device, h.device_why);
    for (name, value) in &h.environment {
        let _ = writeln!(out, "variable  {name}={value}");
    }
    for backend in &b.backends {
        let _ = writeln!(out, "\n{:<16}{} {}", backend.name, backend.state, backend.version);
        for r in &backend.reasons {
            let _ = writeln!(out, "  {r}");
        }
        for p in &backend.probes {
            let mark = if p.reasons.is_empty() { "ok" } else { "no" };
            let _ = writeln!(out, "  {mark}  {:<18} {}", p.id, p.detail);
            for r in &p.reasons {
                let _ = writeln!(out, "        {r}");
            }
        }
        for p in &backend.paths {
            let verdict = match p.verdict {
                Verdict::Pass => {
                    format!("pass, {} outputs, error {:.3} of its bound", p.outputs, p.error_over_bound)
                }
                Verdict::Fail => format!("WRONG: {}", p.message.as_deref().unwrap_or("")),
                Verdict::Unsupported => format!("refused: {}", p.message.as_deref().unwrap_or("")),
            };
            let _ = writeln!(out, "  {:<14} {:<9} {:<7} {verdict}", p.path, p.schema, p.activations);
        }
    }
    let _ = match b.findings.len() {
        0 => writeln!(out, "\nno findings"),
        n => writeln!(out, "\n{n} findings"),
    };
    for f in &b.findings {
        let _ = writeln!(out, "  {:<14} {}: {}", f.code, f.backend, f.message);
    }
    out
}

/// The README's table, for programs.
#[derive(Serialize)]
struct Matrix {
    rows: Vec<MatrixRow>,
}

#[derive(Serialize)]
struct MatrixRow {
    backend: String,
    path: String,
    schema: String,
    activations: Vec<&'static str>,
}

/// What was computed rightly here, activation formats of a path together.
fn matrix_rows(measured: &std::collections::BTreeMap<String, Vec<PathReport>>) -> Vec<MatrixRow> {
    let mut out: Vec<MatrixRow> = Vec::new();
    for (name, rows) in measured {
        for r in rows.iter().filter(|r| r.verdict == Verdict::Pass) {
            let (path, schema) = (r.path.to_string(), r.schema.clone());
            match out.iter_mut().find(|s| s.backend == *name && s.path == path && s.schema == schema) {
                Some(row) => row.activations.push(r.activations),
                None => {
                    let activations = vec![r.activations];
                    out.push(MatrixRow { backend: name.clone(), path, schema, activations });
                }
            }
        }
    }
    out
}

fn matrix(rows: &[MatrixRow]) -> String {
    let mut out = String::from("| backend | path | schema | activations |\n|---|---|---|---|\n");
    for MatrixRow { backend, path, schema, activations } in rows {
        let _ = writeln!(out, "| `{backend}` | {path} | {schema} | {} |", activations.join(", "));
    }
    out
}
