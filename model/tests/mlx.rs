//! Checkpoints that mlx-lm wrote: opened, verified, decoded and converted.
#![allow(clippy::unwrap_used)]
mod handmade;

use handmade::{Model, golden};
use q4_core::detect::Layout;
use q4_core::{Code, DType, Result, ThreadPool};
use q4_model::checkpoint::export::convert::{Conversion, convert};
use q4_model::checkpoint::{Checkpoint, Elements, Head, OpenOptions};
use q4_model::verify::{Severity, verify};
use serde_json::json;

const UP: &str = "model.layers.0.mlp.up_proj";
/// Folder, schema, group and the type of the decoded embedding.
const WRITTEN: [(&str, &str, usize, DType); 3] = [
    ("mlx_affine", "int4-affine", 64, DType::F32),
    ("mlx_mxfp4", "mxfp4", 32, DType::BF16),
    ("mlx_nvfp4", "nvfp4", 16, DType::BF16),
];

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(&golden("a", name), &OpenOptions::default()).unwrap()
}

fn decoded(c: &Checkpoint, name: &str, n: usize, k: usize) -> Vec<f32> {
    let layer = c.layer(name, n, k).unwrap();
    let rows = layer.detected.schema.decoder([n, k], &layer.segment.data).unwrap();
    let mut out = vec![0.0; n * k];
    out.chunks_mut(k).enumerate().for_each(|(r, out)| rows.row(r, out));
    out
}

#[test]
fn every_mode_is_recognised_and_healthy() {
    for (name, schema, group, of_embedding) in WRITTEN {
        let c = open(name);
        let found = c.layer(UP, 192, 64).unwrap().detected;
        assert_eq!((found.layout, found.schema.id().name), (Layout::Mlx, schema), "{name}");
        assert_eq!(found.schema.block(), group, "{name}");
        c.bind_all().unwrap();
        let bad: Vec<_> = verify(&c).into_iter().filter(|f| f.severity != Severity::Note).collect();
        assert!(bad.is_empty(), "{name}: {bad:?}");
        // The embedding is looked up in floats and multiplied by as it is stored.
        assert_eq!(c.embedding_elements().unwrap(), Elements::Floats(of_embedding), "{name}");
        let (vocab, hidden) = (c.config().vocab_size, c.config().hidden_size);
        assert!(matches!(c.bind_head().unwrap(), Head::Quantised(_)), "{name}");
        assert_eq!(c.embedding().unwrap().to_f32(), decoded(&c, "lm_head", vocab, hidden), "{name}");
    }
}

#[test]
fn a_bias_is_added_to_a_scaled_code() {
    let c = open("mlx_affine");
    let layer = c.layer(UP, 192, 64).unwrap();
    let m = Model::golden("a", "mlx_affine");
    let part = |part: &str| m.get(&format!("{UP}.{part}"));
    let bf16 = |t: &handmade::Tensor, i: usize| {
        f32::from_bits(u32::from(u16::from_le_bytes([t.bytes[2 * i], t.bytes[2 * i + 1]])) << 16)
    };
    let values = decoded(&c, UP, 192, 64);
    for (i, have) in values.iter().enumerate() {
        let word = u32::from_le_bytes(part("weight").bytes[i / 8 * 4..][..4].try_into().unwrap());
        let code = word >> (4 * (i % 8)) & 15;
        let want = f64::from(code) * f64::from(bf16(part("scales"), i / 64))
            + f64::from(bf16(part("biases"), i / 64));
        assert_eq!(have.to_bits(), (want as f32).to_bits(), "{i}");
    }
    assert_eq!(layer.detected.keys.zeros.as_deref(), Some("model.layers.0.mlp.up_proj.biases"));
}

#[test]
fn the_configuration_may_say_it_in_one_field_and_leave_modules_out() {
    let whole = decoded(&open("mlx_affine"), UP, 192, 64);
    for field in ["quantization", "quantization_config"] {
        let mut m = Model::golden("a", "mlx_affine");
        m.config.as_object_mut().unwrap().remove(field);
        let c = m.open().unwrap();
        c.bind_all().unwrap();
        assert_eq!(decoded(&c, UP, 192, 64), whole, "without {field}");
    }
    // Before there were modes, affine went without saying; a module that stays as it was is false.
    let mut m = Model::golden("a", "mlx_affine");
    m.config.as_object_mut().unwrap().remove("quantization_config");
    m.config["quantization"] = json!({"group_size": 64, "bits": 4});
    m.config["quantization"][UP] = json!(false);
    m.tensors.retain(|t| !t.name.starts_with(UP));
    m.tensors.push(Model::golden("a", "").get(&format!("{UP}.weight")).clone());
    let c = m.open().unwrap();
    c.bind_all().unwrap();
    assert_eq!(c.layer(UP, 192, 64).unwrap().detected.layout, Layout::Dense);
    let bad: Vec<_> = verify(&c).into_iter().filter(|f| f.severity != Severity::Note).collect();
    assert!(bad.is_empty(), "{bad:?}");
    // An embedding of other groups, by name, is the head of these groups too.
    let mut m = Model::golden("a", "mlx_affine");
    for field in ["quantization", "quantization_config"] {
        m.config[field]["model.embed_tokens"] = json!({"group_size": 64, "bits": 4, "mode": "affine"});
    }
    m.open().unwrap().bind_all().unwrap();
}

/// mlx-lm writes an index beside a file that has all; one that names other files is another set.
#[test]
fn an_index_beside_a_whole_file_has_to_be_about_it() {
    let dir = golden("a", "mlx_affine");
    assert!(dir.join("model.safetensors.index.json").exists() && dir.join("model.safetensors").exists());
    let m = Model::golden("a", "mlx_affine");
    let mut files = m.shards();
    files.push(("model.safetensors".into(), m.safetensors()));
    let e = handmade::open(files).unwrap_err();
    assert!(e.code() == Code::Container && e.to_string().contains("two sets of weights"), "{e}");
}

#[test]
fn an_embedding_is_decoded_within_the_memory_there_is() {
    let options = OpenOptions { memory: Some(20_000), ..OpenOptions::default() };
    let e = Checkpoint::open(&golden("a", "mlx_affine"), &options).unwrap_err();
    assert_eq!(e.code(), Code::OutOfMemory, "{e}");
}

#[test]
fn values_go_to_layouts_of_their_format_and_to_no_other() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let threads = ThreadPool::new(2);
    let to = |name: &str, layout| {
        let conversion = Conversion::new(layout);
        let out = dir.path().join(format!("{name}-{}", layout.as_str()));
        convert(&open(name), &out, conversion, &threads, &mut |_| Ok(()))
    };
    for (name, layout) in [
        ("mlx_mxfp4", Layout::CompressedTensors),
        ("mlx_nvfp4", Layout::ModelOpt),
        ("mlx_nvfp4", Layout::Dat),
    ] {
        assert!(to(name, layout)?.lossless, "{name}");
    }
    for layout in [Layout::CompressedTensors, Layout::Gptq, Layout::Awq, Layout::Dat] {
        let e = to("mlx_affine", layout).unwrap_err();
        let text = e.to_string();
        assert!(e.code() == Code::Usage && text.contains("cannot hold its format"), "{text}");
        assert!(text.contains("int4-affine") && text.contains("q4 quantize"), "{text}");
    }
    let e = to("mlx_affine", Layout::Mlx).unwrap_err();
    assert!(e.to_string().contains("layout mlx is not written"), "{e}");
    Ok(())
}
