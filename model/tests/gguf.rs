//! GGUF files give what the checkpoints give whose codes and scales they hold.
#![allow(clippy::unwrap_used)]
mod support;

use q4_core::formats::ggml::Blocks;
use q4_core::formats::int4::Zeros;
use q4_core::{Code, DType, Device, Ggml, Int4, Part, Q4Schema, Q4Weight, Result, RowDecoder};
use q4_model::checkpoint::{Checkpoint, Container, Elements, Head, OpenOptions, names};
use q4_model::plan::{ActivationRequest, Plan};
use std::path::Path;
use support::{Setup, golden};

const FILES: [(&str, &str, &str); 2] =
    [("mxfp4.gguf", "mxfp4_ct", "mxfp4@1"), ("nvfp4.gguf", "nvfp4_modelopt", "nvfp4@1")];

#[test]
fn weights_are_those_of_the_checkpoint_bit_for_bit() -> Result<()> {
    let decoded = |checkpoint: &Checkpoint, name: &str, n, k| -> Result<Vec<u32>> {
        let layer = checkpoint.layer(name, n, k)?;
        let weight = Q4Weight { schema: layer.detected.schema, k, segments: &[layer.segment] };
        let (decoder, mut row, mut all) = (RowDecoder::new(&weight)?, vec![0.0; k], Vec::new());
        (0..n).for_each(|r| {
            decoder.row(r, &mut row);
            all.extend(row.iter().map(|v| v.to_bits()));
        });
        Ok(all)
    };
    for (file, folder, schema) in FILES {
        let (gguf, other) = (open(file)?, open(folder)?);
        assert_eq!(gguf.store().container(), Container::Gguf);
        gguf.bind_all()?;
        for i in 0..gguf.config().num_hidden_layers {
            for (name, n, k) in names::linears(gguf.config(), i) {
                assert_eq!(gguf.layer(&name, n, k)?.detected.schema.id().to_string(), schema);
                assert_eq!(decoded(&gguf, &name, n, k)?, decoded(&other, &name, n, k)?, "{file}: {name}");
            }
        }
        let (a, b) = (gguf.embedding()?.to_f32(), other.embedding()?.to_f32());
        assert_eq!(a, b, "{file}: embedding");
    }
    Ok(())
}

#[test]
fn logits_are_those_of_the_checkpoint() -> Result<()> {
    for (file, folder, _) in FILES {
        let logits = |path: &str| -> Result<Vec<f32>> {
            let activations = ActivationRequest::Native;
            let setup = Setup { activations, all_logits: true, ..Setup::default() };
            let (_dispatch, mut runner) = setup.open(&format!("qwen3_tiny_a/{path}"))?;
            let mut all = Vec::new();
            runner.accept_all(&[5, 17, 3, 200, 41], &mut |rows| all.extend_from_slice(rows))?;
            Ok(all)
        };
        let (a, b) = (logits(file)?, logits(folder)?);
        let largest = b.iter().fold(0f32, |l, v| l.max(v.abs()));
        let worst = a.iter().zip(&b).fold(0f32, |w, (a, b)| w.max((a - b).abs()));
        println!("{file}: {worst:e} of {largest}");
        // The embedding, which is the head, is of another type.
        assert!(a.len() == b.len() && worst <= 2e-6 * largest, "{file}: {worst:e} of {largest}");
    }
    Ok(())
}

/// Layers of Q4_0 are int4 in groups of 32; the embedding is a product where it is the head.
#[test]
fn blocks_of_integers_give_the_logits_of_transformers() -> Result<()> {
    let checkpoint = open("q4_0.gguf")?;
    let layer = checkpoint.layer("model.layers.0.mlp.up_proj", 192, 64)?;
    let int4 = Int4 { group: 32, scales: DType::F16, zeros: Zeros::Middle };
    assert_eq!(layer.detected.schema, Q4Schema::Int4(int4));
    assert_eq!(checkpoint.embedding_elements()?, Elements::Blocks(Blocks::Q80));
    let Head::Quantised(head) = checkpoint.head()? else { panic!("a head of blocks") };
    assert_eq!(head.detected.schema, Q4Schema::Ggml(Ggml { blocks: Blocks::Q80 }));
    for (file, backends) in [
        ("qwen3_tiny_a/q4_0", [None, Some("dequant-matmul"), Some("reference")]),
        ("k_quants", [Some("ggml-kernel"), Some("dequant-matmul"), Some("reference")]),
    ] {
        is_transformers(file, &backends)?;
    }
    Ok(())
}

fn is_transformers(file: &str, backends: &[Option<&'static str>]) -> Result<()> {
    let bytes = std::fs::read(golden(&format!("{file}.expected.safetensors"))).unwrap();
    let expected = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids = expected.tensor("ids").unwrap().data().as_chunks::<8>().0;
    let ids: Vec<u32> = ids.iter().map(|id| u64::from_le_bytes(*id) as u32).collect();
    let logits = expected.tensor("logits").unwrap().data().as_chunks::<4>().0;
    let want: Vec<f32> = logits.iter().map(|v| f32::from_le_bytes(*v)).collect();
    let largest = want.iter().fold(0f32, |l, v| l.max(v.abs()));
    for backend in backends {
        let activations = ActivationRequest::Native;
        let setup = Setup { backend: *backend, activations, all_logits: true, ..Setup::default() };
        let (_dispatch, mut runner) = setup.open(&format!("{file}.gguf"))?;
        let mut got = Vec::new();
        runner.accept_all(&ids, &mut |rows| got.extend_from_slice(rows))?;
        let worst = got.iter().zip(&want).fold(0f32, |w, (a, b)| w.max((a - b).abs()));
        println!("{file}, {backend:?}: {worst:e} of {largest}");
        assert!(got.len() == want.len() && worst <= 1e-4 * largest, "{backend:?}: {worst:e} of {largest}");
    }
    Ok(())
}

/// On a CPU, where llama.cpp rounds them too, and nowhere else; of what is not in a GGUF file never.
#[test]
fn inputs_are_int8_on_a_cpu_unless_somebody_says_what_they_are() -> Result<()> {
    use ActivationRequest::{Auto, Declared, Int8, Native};
    let planned = |path: &str, activations, device| -> Result<Vec<&'static str>> {
        let checkpoint = Checkpoint::open(&golden(path), &OpenOptions::default())?;
        let setup = Setup { activations, device, ..Setup::default() };
        let plan = Plan::new(&checkpoint, &Setup::default().dispatch()?, &setup.options())?;
        let mut all: Vec<_> = plan.products().map(|p| p.spec.activations.as_str()).collect();
        all.dedup();
        Ok(all)
    };
    for (file, folder, _) in FILES {
        let file = format!("qwen3_tiny_a/{file}");
        for (asked, want) in [(Auto, "int8"), (Int8, "int8"), (Native, "native"), (Declared, "native")] {
            assert_eq!(planned(&file, asked, Device::Cpu)?, [want], "{file}: {asked:?}");
        }
        assert_eq!(planned(&file, Auto, Device::Cuda(0))?, ["native"], "{file}");
        assert_ne!(planned(&format!("qwen3_tiny_a/{folder}"), Auto, Device::Cpu)?, ["int8"], "{folder}");
    }
    assert_eq!(planned("k_quants.gguf", Auto, Device::Cpu)?, ["int8"]);
    Ok(())
}

/// A mixture, as llama.cpp makes them: what lies where it was, and what of it is refused.
#[test]
fn mixtures_of_blocks_are_read_where_they_lie() -> Result<()> {
    let path = golden("k_quants.gguf");
    let checkpoint = Checkpoint::open(&path, &OpenOptions::default())?;
    let of = |name: &str, n| checkpoint.layer(name, n, 256).map(|l| l.detected.schema.id().to_string());
    for (name, n, want) in [
        ("model.layers.0.self_attn.q_proj", 256, "q4_k@1"),
        ("model.layers.0.self_attn.v_proj", 64, "q6_k@1"),
        ("model.layers.1.self_attn.o_proj", 256, "q8_0@1"),
        ("model.layers.1.mlp.up_proj", 256, "q5_k@1"),
    ] {
        assert_eq!(of(name, n)?, want, "{name}");
    }
    let layer = checkpoint.layer("model.layers.0.mlp.up_proj", 256, 256)?;
    let (whole, blocks) = (std::fs::read(&path).unwrap(), layer.segment.data.need(Part::Codes)?.as_bytes()?);
    let at = whole.windows(blocks.len()).position(|w| w == blocks).unwrap();
    // An infinite scale, and the minimum of the block behind it.
    let dir = tempfile::tempdir().unwrap();
    let damaged = dir.path().join("damaged.gguf");
    for place in [at, at + 144 + 2] {
        let mut other = whole.clone();
        other[place..][..2].copy_from_slice(&0x7c00u16.to_le_bytes());
        std::fs::write(&damaged, &other).unwrap();
        let checkpoint = Checkpoint::open(&damaged, &OpenOptions::default())?;
        let e = checkpoint.layer("model.layers.0.mlp.up_proj", 256, 256).unwrap_err();
        assert_eq!(e.code(), Code::ScaleInvalid, "{e}");
        assert!(e.to_string().contains("up_proj.weight.q4_k"), "{e}");
    }
    Ok(())
}

/// A configuration from elsewhere that says something else of the head is not followed, nor is the file.
#[test]
fn a_tie_that_the_file_contradicts_is_refused() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let (path, config) = (golden("k_quants.gguf"), dir.path().join("config.json"));
    let own = Checkpoint::open(&path, &OpenOptions::default())?.file("config.json").unwrap();
    for tied in [true, false] {
        let mut fields: serde_json::Value = serde_json::from_slice(&own).unwrap();
        fields["tie_word_embeddings"] = tied.into();
        std::fs::write(&config, fields.to_string()).unwrap();
        let options = OpenOptions { config: Some(config.clone()), ..OpenOptions::default() };
        let head = Checkpoint::open(&path, &options)?.head().map(drop);
        assert_eq!(head.err().map(|e| e.code()), (!tied).then_some(Code::SchemaInvalid), "{tied}");
    }
    Ok(())
}

/// A layer in blocks that nobody multiplies by is named with them, whatever the embedding may be.
#[test]
fn other_blocks_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("other.gguf");
    let mut whole = std::fs::read(golden("qwen3_tiny_a/q4_0.gguf")).unwrap();
    let name = b"blk.0.ffn_down.weight";
    let at = whole.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4 + 2 * 8;
    // IQ4_NL, whose blocks have the size of those of Q4_0.
    assert_eq!(whole[at..][..4], 2u32.to_le_bytes());
    whole[at..][..4].copy_from_slice(&20u32.to_le_bytes());
    std::fs::write(&path, &whole).unwrap();
    let e = Checkpoint::open(&path, &OpenOptions::default()).unwrap_err();
    let text = e.to_string();
    assert!(e.code() == Code::TensorType && text.contains("down_proj") && text.contains("IQ4_NL"), "{text}");
}

#[test]
fn damage_is_refused() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.gguf");
    let whole = std::fs::read(golden("qwen3_tiny_a/mxfp4.gguf")).unwrap();
    for cut in [0, 4, 100, whole.len() / 2, whole.len() - 64] {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let e = Checkpoint::open(&path, &OpenOptions::default()).unwrap_err();
        assert_eq!(e.code(), Code::Container, "{cut}: {e}");
    }
    // The number of the type of a weight in blocks: that of IQ4_NL, whose blocks are larger.
    let at = |needle: &[u8]| whole.windows(needle.len()).position(|w| w == needle).unwrap();
    let kind = at(b"blk.0.ffn_down.weight") + b"blk.0.ffn_down.weight".len() + 4 + 2 * 8;
    assert_eq!(whole[kind..][..4], 39u32.to_le_bytes());
    let mut other = whole.clone();
    other[kind..][..4].copy_from_slice(&20u32.to_le_bytes());
    std::fs::write(&path, &other).unwrap();
    let e = Checkpoint::open(&path, &OpenOptions::default()).unwrap_err();
    assert!(e.to_string().contains("damaged.gguf"), "{e}");
    Ok(())
}

fn open(path: &str) -> Result<Checkpoint> {
    Checkpoint::open(&golden("qwen3_tiny_a").join(Path::new(path)), &OpenOptions::default())
}
