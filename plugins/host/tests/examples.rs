//! Both example plugins, built outside of the workspace, through every door: they load, say who they are, and
//! compute the recorded products and the lattice right.
#![allow(clippy::unwrap_used)]
mod built;

use q4_conformance::{golden, lattice, measure};
use q4_core::{
    Activations, Candidate, CudaDevice, DType, Device, ExecContext, ExecPath, FuseSet, HostEnv, LinearSpec,
    OpSet, Q4Backend, RejectCode, Result, SegmentSpec, ThreadPool,
};
use q4_plugin_host::{Door, Loader};
use std::path::Path;
use std::sync::Arc;

fn load(path: &Path, door: Door) -> Arc<dyn Q4Backend> {
    let loaded = Loader { door, ..Loader::default() }.load(path).unwrap();
    assert_eq!(loaded.door, door);
    assert_eq!(loaded.sha256.len(), 64);
    match loaded.candidate {
        Candidate::Live(backend) => backend,
        Candidate::Dead { name, .. } => panic!("{name} is dead"),
    }
}

/// Outputs that were compared, decoded values that were compared.
fn products(backend: &dyn Q4Backend, schema: &str) -> Result<(usize, usize)> {
    let (env, mut count) = (HostEnv::collect(), (0, 0));
    for threads in [1, 3] {
        let pool = ThreadPool::new(threads);
        let mut visit = |problem: &q4_conformance::Problem<'_>| {
            // Every encoding and kind of activation, in the type that costs least time: f16 and bf16 on few.
            if problem.weight.schema.id().name != schema || (threads == 3 && problem.io != DType::F32) {
                return Ok(());
            }
            match measure(Device::Cpu, backend, ExecPath::FusedDequant, problem, &env, &pool)? {
                Ok(m) => {
                    count.0 += m.outputs;
                    count.1 += m.decoded.unwrap();
                    assert!(m.backward.is_some(), "{}", problem.name);
                }
                Err(reasons) => {
                    let native = problem.activations == q4_core::Activations::Native;
                    let served = native && problem.weight.k % 16 == 0;
                    assert!(!served, "{}: {reasons:?}", problem.name);
                }
            }
            Ok(())
        };
        golden::each(&mut visit)?;
        for encoding in lattice::usual().into_iter().filter(|s| s.id().name == schema) {
            lattice::each(encoding, &mut visit)?;
        }
    }
    Ok(count)
}

#[test]
fn the_rust_example_computes_nvfp4_through_both_doors() -> Result<()> {
    for door in [Door::C, Door::AbiStable] {
        let backend = load(&built::acme_nvfp4(), door);
        assert_eq!((&*backend.descriptor().name, &*backend.descriptor().vendor), ("acme-nvfp4", "ACME"));
        let (outputs, decoded) = products(&*backend, "nvfp4")?;
        assert!(outputs > 100_000 && decoded > 100_000, "{outputs} {decoded}");
    }
    Ok(())
}

#[test]
fn the_c_example_computes_nvfp4_and_nf4() -> Result<()> {
    let backend = load(&built::acme_c(), Door::C);
    for schema in ["nvfp4", "nf4", "nf4-dq"] {
        let (outputs, decoded) = products(&*backend, schema)?;
        assert!(outputs > 10_000 && decoded > 10_000, "{schema}: {outputs} {decoded}");
    }
    let refusal = Loader { door: Door::AbiStable, ..Loader::default() }.load(&built::acme_c()).err().unwrap();
    assert_eq!((refusal.reasons[0].code, &*refusal.name), (RejectCode::SymbolMissing, "acme-c"));
    Ok(())
}

/// The suite lets a weight decline what it does not fuse; these do not.
#[test]
fn both_examples_fuse_a_gate_and_a_residual() -> Result<()> {
    let pool = ThreadPool::new(1);
    for path in [built::acme_c(), built::acme_nvfp4()] {
        let backend = load(&path, Door::C);
        let sketch =
            lattice::Sketch::plain(lattice::usual()[0], Activations::Native, DType::F32, [96, 256, 4], 0);
        let weight = sketch.with(|problem| {
            let spec = LinearSpec {
                segments: vec![SegmentSpec { name: "mlp.{gate,up}_proj".into(), rows: 96 }],
                schema: problem.weight.schema,
                k: 256,
                max_m: 4,
                x: DType::F32,
                y: DType::F32,
                activations: Activations::Native,
                device: Device::Cpu,
                ops: OpSet::FORWARD,
            };
            let mut cx = ExecContext::cpu(&pool);
            backend.prepare(&problem.weight, &spec, ExecPath::FusedDequant, &mut cx)
        })?;
        let both = FuseSet::GATE.with(FuseSet::ACCUMULATE);
        for set in [FuseSet::GATE, FuseSet::ACCUMULATE, both] {
            assert!((1..=4).all(|m| weight.fuses(m, set)), "{} of {}", set.0, path.display());
        }
    }
    Ok(())
}

#[test]
fn two_plugins_are_two_plugins() {
    let names: Vec<String> = [built::acme_c(), built::acme_nvfp4(), built::acme_c()]
        .iter()
        .map(|path| load(path, Door::C).descriptor().name.to_string())
        .collect();
    assert_eq!(names, ["acme-c", "acme-nvfp4", "acme-c"]);
    for path in [built::acme_nvfp4(), built::acme_nvfp4()] {
        assert_eq!(load(&path, Door::AbiStable).descriptor().name, "acme-nvfp4");
    }
}

#[test]
fn a_folder_is_loaded_in_order() {
    let folder = built::acme_c().parent().unwrap().to_owned();
    let names: Vec<String> = q4_plugin_host::load_dir(&folder)
        .unwrap()
        .into_iter()
        .map(|r| r.map(|l| l.candidate.name().to_owned()).unwrap())
        .collect();
    assert_eq!(names, ["acme-arena", "acme-c", "acme-nvfp4"]);
}

#[test]
fn a_probe_says_what_was_loaded_from_where() {
    for (path, check) in [(built::acme_c(), "acme.isa"), (built::acme_nvfp4(), "acme.isa")] {
        let items = load(&path, Door::C).probe(&HostEnv::collect());
        assert!(items[0].detail.contains("sha256") && items[0].detail.contains(&*path.to_string_lossy()));
        assert!(items.iter().any(|i| i.id == check && i.reasons.is_empty()), "{items:?}");
    }
}

/// Without a card, too: facts may be another machine's.
#[test]
fn the_rust_example_says_what_is_missing_on_a_device() {
    let backend = load(&built::acme_nvfp4(), Door::C);
    let codes = |capability: Option<(u32, u32)>, activations, device| {
        let device_of =
            |capability| CudaDevice { ordinal: 0, capability, name: "GPU".into(), memory: 1 << 34 };
        let env = HostEnv { cuda: capability.map(device_of).into_iter().collect(), ..HostEnv::collect() };
        let spec = LinearSpec {
            segments: vec![SegmentSpec { name: "w".into(), rows: 64 }],
            schema: lattice::usual()[0],
            k: 128,
            max_m: 4,
            x: DType::BF16,
            y: DType::BF16,
            activations,
            device,
            ops: OpSet::ALL,
        };
        let verdict = backend.can_prepare(&spec, ExecPath::FusedDequant, &env);
        verdict.err().unwrap_or_default().iter().map(|r| r.code).collect::<Vec<_>>()
    };
    use Activations::{Int8, Native};
    assert_eq!(codes(None, Native, Device::Cpu), []);
    assert_eq!(codes(None, Native, Device::Cuda(0)), [RejectCode::DeviceAbsent]);
    assert_eq!(codes(Some((9, 0)), Native, Device::Cuda(3)), [RejectCode::DeviceAbsent]);
    assert_eq!(codes(Some((7, 5)), Native, Device::Cuda(0)), [RejectCode::DeviceArch]);
    assert_eq!(
        codes(None, Int8, Device::Cuda(0)),
        [RejectCode::ActivationsUnsupported, RejectCode::DeviceAbsent]
    );
    let missing = codes(Some((9, 0)), Native, Device::Cuda(0));
    // What this machine lacks: a driver, the compiler, kernels of that compiler, or nothing.
    use RejectCode::{DeviceAbsent, KernelImageMissing, LibraryMissing};
    let known = matches!(missing[..], [] | [DeviceAbsent | LibraryMissing | KernelImageMissing]);
    assert!(known, "{missing:?}");
    let probed = backend.probe(&HostEnv::collect());
    let cuda = probed.iter().find(|i| i.id == "acme.cuda").unwrap();
    assert!(cuda.reasons.is_empty() && cuda.detail.starts_with("none: "), "{cuda:?}");
}
