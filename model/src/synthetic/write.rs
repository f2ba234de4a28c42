//! The same random model as a checkpoint: what it takes to load a file can be measured without a download.
use super::Random;
use crate::arch::qwen3::QWEN3;
use crate::checkpoint::names;
use crate::config::DecoderConfig;
use crate::executor::Shape;
use crate::export::Progress;
use crate::export::atomic::Output;
use crate::export::safetensors::{Entry, Writer, file_name};
use q4_core::{Convention, DType, GlobalScale, Nvfp4, Part, Q4Schema, Result, ScaleLayout};
use serde_json::json;
use std::path::Path;

/// The format of what [`write()`] writes.
pub const WRITTEN: &str = "nvfp4";
const SCHEMA: Q4Schema =
    Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: Some(Convention::Multiply) });

/// Writes NVFP4 weights of these sizes to the directory `out`, which must not exist, as ModelOpt arranges
/// them, with a 4-bit head of its own; returns the bytes written. One tensor is held at a time. `progress` is
/// called before each product; its error ends the work, and nothing is left of it.
///
/// # Errors
/// [`Code::Usage`](q4_core::Code::Usage): `out` exists. [`Code::Io`](q4_core::Code::Io): the system refused
/// to write.
pub fn write(shape: &Shape, out: &Path, progress: &mut dyn FnMut(Progress<'_>) -> Result<()>) -> Result<u64> {
    let config = config(shape);
    let parsed = DecoderConfig::parse(config.as_bytes())?;
    let mut linears = vec![(QWEN3.names.head.to_owned(), shape.vocab, shape.hidden)];
    let mut norms = vec![(QWEN3.names.final_norm.to_owned(), shape.hidden)];
    for i in 0..shape.layers {
        linears.extend(names::linears(&parsed, i));
        norms.extend(names::norms(&parsed, i));
    }
    let mut entries =
        vec![Entry::new(weight(QWEN3.names.embedding), DType::BF16, &[shape.vocab, shape.hidden])];
    entries.extend(norms.iter().map(|(name, len)| Entry::new(weight(name), DType::BF16, &[*len])));
    for (name, n, k) in &linears {
        entries.push(Entry::new(weight(name), DType::U8, &[*n, k / 2]));
        entries.push(Entry::new(format!("{name}.weight_scale"), DType::F8E4M3, &[*n, k / 16]));
        entries.push(Entry::new(format!("{name}.weight_scale_2"), DType::F32, &[]));
    }

    let output = Output::directory(out)?;
    let mut file = Writer::create(&output.path().join(file_name(0, 1)), &entries)?;
    let mut random = Random::new();
    let (total, bytes_total) = (linears.len(), entries.iter().map(Entry::bytes).sum());
    let mut bytes_done = 0;
    progress(Progress { tensor: QWEN3.names.embedding, done: 0, total, bytes_done, bytes_total })?;
    file.write(&weight(QWEN3.names.embedding), &random.embedding(shape.vocab * shape.hidden))?;
    for (name, len) in &norms {
        file.write(&weight(name), &[0x80, 0x3f].repeat(*len))?;
    }
    for (done, (name, n, k)) in linears.iter().enumerate() {
        progress(Progress { tensor: name, done, total, bytes_done, bytes_total })?;
        let part = SCHEMA.plausible([*n, *k], &mut |bytes| random.fill(bytes))?;
        let global = part.global.map_or(1.0, GlobalScale::value);
        file.write(&weight(name), part.bytes(Part::Codes))?;
        file.write(&format!("{name}.weight_scale"), part.bytes(Part::Scales))?;
        file.write(&format!("{name}.weight_scale_2"), &global.to_le_bytes())?;
        bytes_done += SCHEMA.stored_bytes(*n, *k);
    }
    progress(Progress { tensor: "", done: total, total, bytes_done: bytes_total, bytes_total })?;
    let bytes = file.finish()? + output.write("config.json", config.as_bytes())?;
    output.commit()?;
    Ok(bytes)
}

fn weight(module: &str) -> String {
    format!("{module}.weight")
}

fn config(s: &Shape) -> String {
    let quantization = json!({
        "config_groups": { "group_0": {
            "weights": { "dynamic": false, "num_bits": 4, "type": "float", "group_size": 16 },
            "targets": ["Linear"],
        } },
        "ignore": [],
        "quant_algo": "W4A16_NVFP4",
        "producer": { "name": "modelopt", "version": concat!("q4-", env!("CARGO_PKG_VERSION")) },
        "quant_method": "modelopt",
    });
    let config = json!({
        "architectures": [QWEN3.class],
        "model_type": QWEN3.model_type,
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "hidden_act": "silu",
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "quantization_config": quantization,
    });
    format!("{config:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Checkpoint, Head, OpenOptions};
    use q4_core::{Code, Error};

    #[test]
    fn the_checkpoint_binds() -> Result<()> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let out = dir.path().join("model");
        let shape =
            Shape { hidden: 64, heads: 2, kv_heads: 1, head_dim: 32, intermediate: 96, vocab: 50, layers: 2 };
        let bytes = write(&shape, &out, &mut |_| Ok(()))?;
        let files = std::fs::read_dir(&out)
            .expect("listing")
            .map(|f| f.expect("entry").metadata().expect("size").len());
        assert_eq!(bytes, files.sum::<u64>());
        let checkpoint = Checkpoint::open(&out, &OpenOptions::default())?;
        checkpoint.bind_all()?;
        assert!(matches!(checkpoint.bind_head()?, Head::Quantised(_)));
        let again = write(&shape, &out, &mut |_| Ok(()));
        assert_eq!(again.expect_err("exists").code(), Code::Usage);
        let stopped = write(&shape, &dir.path().join("stopped"), &mut |p| match p.done {
            0..5 => Ok(()),
            _ => Err(Error::new(Code::Io, "interrupted")),
        });
        assert_eq!(stopped.expect_err("told to stop").code(), Code::Io);
        assert_eq!(std::fs::read_dir(dir.path()).expect("listing").count(), 1, "nothing is left of it");
        Ok(())
    }
}
