//! What becomes of failures on a device. A fault ends its process's context, so it happens in a child.
#![allow(clippy::unwrap_used)]
use q4_core::Code;
use q4_cuda::{Buffer, Gpu, Kernels, Launch, Source, devices, mirror};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};

const SOURCE: Source = Source {
    name: "fault",
    text: r#"extern "C" __global__ void store(unsigned *to) { to[blockIdx.x * blockDim.x + threadIdx.x] = 7; }"#,
    files: &[],
};
mirror! { struct Store { to: u64 } }
const CHILD: &str = "Q4_TEST_FAULTS";

/// Nobody else takes memory of the device while one looks how much there is.
static ALONE: Mutex<()> = Mutex::new(());

fn gpu() -> Option<(Arc<Gpu>, MutexGuard<'static, ()>)> {
    let alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let found = devices().and_then(|d| match d.is_empty() {
        true => Err(q4_core::Error::new(Code::DeviceMissing, "CUDA").have("no device")),
        false => Gpu::open(0),
    });
    found.inspect_err(|e| println!("skipped: no CUDA device ({e})")).ok().map(|gpu| (gpu, alone))
}

/// Stores to `to` and waits.
fn store(gpu: &Arc<Gpu>, to: u64) -> q4_core::Result<()> {
    let kernel = Kernels::load(gpu, &SOURCE, &[])?.get("store")?;
    let how = Launch::new([2, 1, 1], [32, 1, 1], 0);
    gpu.enqueues(format_args!("`layer`, [1, 32] by [64, 32]"));
    // SAFETY: 64 words at `to`, or, in a child, nothing anyone needs.
    unsafe { kernel.launch(how, Store { to })? };
    gpu.synchronize()
}

#[test]
fn a_fault_is_named_and_the_next_run_works() {
    let Some((gpu, _alone)) = gpu() else { return };
    if std::env::var_os(CHILD).is_some() {
        let e = store(&gpu, 16).unwrap_err();
        println!("{e}");
        std::process::exit(e.code().exit().into());
    }
    let exe = std::env::current_exe().unwrap();
    let test = ["--exact", "a_fault_is_named_and_the_next_run_works", "--nocapture"];
    let child = Command::new(exe).args(test).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert_eq!(child.status.code(), Some(6), "{said}");
    for part in ["CUDA_ERROR_", "`store` of [2, 1, 1] blocks of [32, 1, 1]", "`layer`, [1, 32] by [64, 32]"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let words = Buffer::zeroed(&gpu, 256).unwrap();
    store(&gpu, words.ptr()).unwrap();
    let mut out = [0u32; 64];
    words.download(0, &mut out).unwrap();
    assert_eq!(out, [7; 64]);
}

#[test]
fn too_much_memory_is_refused_and_less_is_not() {
    let Some((gpu, _alone)) = gpu() else { return };
    for ask in [Buffer::new, Buffer::lasting] {
        let e = ask(&gpu, 1 << 50).err().unwrap();
        assert_eq!((e.code(), e.code().exit()), (Code::OutOfMemory, 7), "{e}");
        assert!(e.to_string().contains(&(1u64 << 50).to_string()), "{e}");
        let b = ask(&gpu, 5000).unwrap();
        b.fill(3).unwrap();
        let mut out = [0u8; 5000];
        b.download(0, &mut out).unwrap();
        assert_eq!(out, [3; 5000]);
    }
}

#[test]
fn lasting_memory_comes_back() {
    let Some((gpu, _alone)) = gpu() else { return };
    let keep = Buffer::lasting_of(&gpu, &[1u8; 3000]).unwrap();
    let (before, _) = gpu.memory().unwrap();
    let large: Vec<_> =
        (1..9).map(|i| Buffer::lasting_of(&gpu, &vec![i as u8; i * 3_000_000]).unwrap()).collect();
    let total: usize = large.iter().map(Buffer::len).sum();
    let (during, _) = gpu.memory().unwrap();
    assert!(before - during <= total as u64 + (4 << 20), "{} for {total}", before - during);
    for (i, b) in large.iter().enumerate() {
        let mut out = vec![0u8; b.len()];
        b.download(0, &mut out).unwrap();
        assert!(out.iter().all(|v| *v == i as u8 + 1));
    }
    drop(large);
    assert!(gpu.memory().unwrap().0 >= before - (4 << 20));
    let mut out = [0u8; 3000];
    keep.download(0, &mut out).unwrap();
    assert_eq!(out, [1; 3000]);
}
