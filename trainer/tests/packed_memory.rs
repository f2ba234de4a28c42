//! No tensor of a packed base is ever dense: every allocation of this process is looked at, libtorch's too.
#![cfg(all(feature = "torch", target_os = "linux"))]
use q4_core::{Result, ThreadPool};
use q4_heap::Heap;
use q4_model::config::DecoderConfig;
use q4_trainer::config::Config;
use q4_trainer::optim::{Hyper, MasterFormat, ScaleChoice, Share, StateFormat};
use q4_trainer::torch::engine::Rows;
use q4_trainer::torch::export::{self, Side};
use q4_trainer::torch::kernels::Kernels;
use q4_trainer::torch::loss::Target;
use q4_trainer::torch::phases::Phases;
use q4_trainer::torch::session::{self, Base};
use q4_trainer::torch::weights::{Decay, Keep, Params};
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tch::Device;

/// Bytes of the dense copies that there must not be, f32 and bf16 of every shape, and how often they were
/// asked for.
static WATCHED: [(AtomicUsize, AtomicUsize); 8] = [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; 8];
static LARGEST: AtomicUsize = AtomicUsize::new(0);

fn note(bytes: usize) {
    LARGEST.fetch_max(bytes, Relaxed);
    for (watched, hits) in &WATCHED {
        // Allocators round up, vectors ask for what they hold.
        if bytes > 0 && (watched.load(Relaxed)..=watched.load(Relaxed) + 64).contains(&bytes) {
            hits.fetch_add(1, Relaxed);
        }
    }
}

#[global_allocator]
static HEAP: Heap = Heap { asked: note, freed: |_| {} };

/// libtorch takes memory of tensors by this name, and finds this one before libc's.
#[unsafe(no_mangle)]
extern "C" fn posix_memalign(to: *mut *mut c_void, align: usize, bytes: usize) -> c_int {
    note(bytes);
    // SAFETY: libc's own function of this type.
    let next: extern "C" fn(*mut *mut c_void, usize, usize) -> c_int =
        unsafe { std::mem::transmute(libc::dlsym(libc::RTLD_NEXT, c"posix_memalign".as_ptr())) };
    next(to, align, bytes)
}

const CONFIG: &str = r#"{"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":256,"intermediate_size":4096,
 "num_hidden_layers":1,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":80,"vocab_size":90,
 "max_position_embeddings":128,"rms_norm_eps":1e-6,"rope_theta":10000.0,"tie_word_embeddings":true,
 "hidden_act":"silu","attention_bias":false,"torch_dtype":"bfloat16"}"#;

/// `[n, k]` of every product.
const SHAPES: [(usize, usize); 4] = [(8 * 80 + 2 * 2 * 80, 256), (256, 8 * 80), (2 * 4096, 256), (256, 4096)];

fn write(dir: &Path, pool: &Arc<ThreadPool>) -> Result<()> {
    let kernels = Kernels::new(Device::Cpu, pool.clone(), ScaleChoice::PowerOfTwo)?;
    let keep = Keep {
        state: StateFormat::F32,
        master: MasterFormat::F32,
        lora: None,
        quantised: true,
        decay: Decay::default(),
        share: Share::WHOLE,
    };
    let params = Params::random(&DecoderConfig::parse(CONFIG.as_bytes())?, keep, 1, &kernels)?;
    export::write(
        &params,
        &kernels,
        &Side::new(CONFIG.as_bytes(), Vec::new())?,
        None,
        dir,
        "modelopt".parse()?,
    )?;
    Ok(())
}

/// Loads, takes two steps, and says how often each dense size was asked for, and the largest of the steps.
fn hits(dir: &Path, form: &str, pool: &Arc<ThreadPool>) -> Result<(Vec<usize>, usize)> {
    for ((n, k), pair) in SHAPES.iter().zip(WATCHED.chunks_exact(2)) {
        for ((watched, hits), bytes) in pair.iter().zip([4 * n * k, 2 * n * k]) {
            watched.store(bytes, Relaxed);
            hits.store(0, Relaxed);
        }
    }
    let sets = [("model.path", dir.to_str().expect("a path")), ("lora.base", form), ("lora.rank", "4")];
    let mut sets: Vec<_> = sets.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    sets.extend(
        [("data.train", "x"), ("data.seq", "16"), ("data.rows", "1")].map(|(k, v)| (k.into(), v.into())),
    );
    let config = Config::parse("", &sets)?;
    let base = Base::open(&config.model, &|| unreachable!("a path is named"))?;
    let config = session::settled(&config, &base)?;
    let products = session::products(&config, &base, Device::Cpu, pool)?;
    let mut engine =
        session::engine(&config, &base, Device::Cpu, pool.clone(), products.as_ref(), Share::WHOLE)?;
    // libNVFP4 keeps packed weights in chunks of 32 MiB, whatever their size: the largest is that of the
    // steps.
    LARGEST.store(0, Relaxed);
    let ids: Vec<u32> = (0..16).map(|i| i * 5 % 90).collect();
    let targets: Vec<i64> = ids.iter().map(|id| i64::from((id + 1) % 90)).collect();
    let positions: Vec<i64> = (0..16).collect();
    let target = Target::Tokens(&targets);
    let rows = [Rows { rows: 1, seq: 16, ids: &ids, positions: &positions, documents: None, target }];
    let mut phases = Phases::new(Device::Cpu, None);
    for step in 1..=2 {
        let hyper =
            Hyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, step, grad_scale: 1.0 };
        engine.step(&rows, &hyper, &mut |_, _| Ok(true), &mut phases)?;
    }
    engine.evaluate(&rows[0])?;
    Ok((WATCHED.iter().map(|(_, hits)| hits.load(Relaxed)).collect(), LARGEST.load(Relaxed)))
}

#[test]
fn nothing_of_a_packed_base_is_ever_dense() -> Result<()> {
    let dir = tempfile::tempdir().expect("a folder");
    let model = dir.path().join("model");
    let pool = Arc::new(ThreadPool::new(2));
    session::device("cpu", 1)?;
    write(&model, &pool)?;
    let (n, k) = SHAPES[2];
    let (packed, largest) = hits(&model, "packed", &pool)?;
    assert_eq!(packed, vec![0; 8], "dense copies, f32 and bf16 of each shape");
    assert!(largest < 2 * n * k, "{largest} bytes at once, {} are a dense copy in bf16", 2 * n * k);
    // On decoded values they are seen, one at least of every shape.
    let (decoded, _) = hits(&model, "decoded", &pool)?;
    assert!(decoded.chunks_exact(2).all(|c| c[0] > 0), "{decoded:?}");
    println!(
        "lora allocations: 0 of a dense size packed, {decoded:?} decoded; largest of a step {largest} bytes"
    );
    Ok(())
}
