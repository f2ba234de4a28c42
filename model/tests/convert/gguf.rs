//! GGUF files: the blocks that the gguf package writes, metadata that say what the configuration and the
//! tokenizer did, and refused by name what has no place there.
use super::handmade::{self, Model, Tensor};
use super::plans::int4;
use super::{answers, converted, refused};
use q4_core::detect::Layout;
use q4_core::{Code, Result, ThreadPool};
use q4_gguf::{GgmlType, Gguf};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::export::export;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

const DOWN: &str = "`model.layers.0.mlp.down_proj.scales`";

fn open(path: &Path) -> Result<Checkpoint> {
    Checkpoint::open(path, &OpenOptions::default())
}

/// A golden model with a tokenizer of as many words as it has rows, two of which begin and end texts.
fn with_words(variant: &str) -> Model {
    let mut model = Model::golden("a", variant);
    let vocab: Map<_, _> = (0..250).map(|id| (format!("w{id}"), Value::from(id))).collect();
    let added =
        [(1, "w1"), (2, "w2")].map(|(id, text)| json!({ "id": id, "content": text, "special": true }));
    let tokenizer = json!({
        "added_tokens": added,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "use_regex": true },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    model.others.push(("tokenizer.json".into(), tokenizer.to_string().into_bytes()));
    model
}

fn gguf_of(dir: &Path) -> PathBuf {
    dir.join("model.gguf")
}

#[test]
fn blocks_are_those_of_the_gguf_package() -> Result<()> {
    for (variant, recorded, kind, layout) in [
        ("nvfp4_modelopt", "nvfp4.gguf", GgmlType::NVFP4, Layout::ModelOpt),
        ("mxfp4_ct", "mxfp4.gguf", GgmlType::MXFP4, Layout::CompressedTensors),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (out, again) = (gguf_of(dir.path()), dir.path().join("again"));
        let source = with_words(variant);
        let report = converted(&source.open()?, &out, Layout::Gguf)?;
        assert!(report.lossless && report.tensors.len() == 14, "{report:?}");
        let files = [out.clone(), handmade::golden("a", recorded)].map(|path| std::fs::read(path).unwrap());
        let [own, tool] = [Gguf::parse("own", &files[0])?, Gguf::parse("tool", &files[1])?];
        let mut packed = 0;
        for tensor in tool.tensors() {
            let other = own.tensor(tensor.name).unwrap_or_else(|| panic!("no {}", tensor.name));
            let is_scale = tensor.name.ends_with(".scale");
            if tensor.kind == kind || is_scale {
                assert_eq!((other.kind, other.shape()), (tensor.kind, tensor.shape()), "{}", tensor.name);
                let [a, b] = [&files[0][other.range.clone()], &files[1][tensor.range.clone()]];
                assert!(a == b, "{}: other bytes", tensor.name);
                packed += usize::from(!is_scale);
            }
            // Engines multiply by vectors of f32 alone.
            assert!(other.shape().len() == 2 || other.kind == GgmlType::F32, "{}", tensor.name);
        }
        assert_eq!(packed, 14, "{variant}");
        let written = open(&out)?;
        assert_eq!(answers(&written)?, answers(&source.open()?)?, "{variant}");
        let back = converted(&written, &again, layout)?;
        assert_eq!(back.sha256_decoded, report.sha256_decoded, "{variant}");
        assert_eq!(answers(&open(&again)?)?, answers(&written)?, "{variant}");
        // There again, it is the same file but for what the metadata say of the tokenizer.
        let third = dir.path().join("third.gguf");
        let report = converted(&open(&again)?, &third, Layout::Gguf)?;
        assert_eq!(report.sha256_decoded, back.sha256_decoded, "{variant}");
    }
    Ok(())
}

/// The published forms of configuration and tokenizer, of a model that talks.
#[test]
fn metadata_say_what_the_files_did() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let demo = open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo"))?;
    let out = gguf_of(dir.path());
    let report = converted(&demo, &out, Layout::Gguf)?;
    assert!(report.lossless, "{:?}", report.notes);
    let [files, inputs] = &report.notes[..] else { panic!("{:?}", report.notes) };
    assert_eq!(files, "files not carried over: README.md, reference.py");
    // On CPUs a GGUF file's inputs are rounded where it says nothing of them, and the demo's are not.
    assert!(
        inputs.starts_with("answers differ: inputs of 42 layers were native and are now int8"),
        "{inputs}"
    );
    let written = open(&out)?;
    assert_eq!(answers(&written)?, answers(&demo)?);
    let of = |c: &Checkpoint, name: &str| -> Value {
        c.file(name).map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).unwrap())
    };
    let [a, b] = [&demo, &written].map(|c| of(c, "tokenizer.json"));
    assert_eq!(a["model"]["vocab"].as_object(), b["model"]["vocab"].as_object());
    let merges = |t: &Value| -> Vec<String> {
        let all = t["model"]["merges"].as_array().unwrap().iter();
        all.map(|m| {
            m.as_str().map_or_else(
                || format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap()),
                str::to_owned,
            )
        })
        .collect()
    };
    assert_eq!(merges(&a), merges(&b));
    assert_eq!(a["added_tokens"], b["added_tokens"]);
    let template =
        |c: &Checkpoint| c.file("chat_template.jinja").map(|t| String::from_utf8(t.to_vec()).unwrap());
    assert_eq!(of(&written, "tokenizer_config.json")["chat_template"].as_str(), template(&demo).as_deref());
    for field in ["eos_token", "pad_token"] {
        let of = |c| of(c, "tokenizer_config.json")[field].clone();
        assert_eq!(of(&demo), of(&written), "{field}");
    }
    Ok(())
}

#[test]
fn symmetric_groups_of_32_are_q4_0() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let (out, again) = (gguf_of(dir.path()), dir.path().join("again"));
    let source = with_words("gptq").open()?;
    let report = converted(&source, &out, Layout::Gguf)?;
    let bytes = std::fs::read(&out).unwrap();
    let kind = Gguf::parse("out", &bytes)?.tensor("blk.1.ffn_down.weight").map(|t| t.kind);
    assert_eq!(kind, Some(GgmlType::Q4_0));
    assert_eq!(answers(&open(&out)?)?, answers(&source)?);
    let back = converted(&open(&out)?, &again, Layout::Gptq)?;
    assert_eq!(back.sha256_decoded, report.sha256_decoded);
    // Everything that the layout has, and not what happens to be in a block.
    let compressed = dir.path().join("compressed");
    converted(&open(&out)?, &compressed, Layout::CompressedTensors)?;
    let (written, _) = handmade::parse(&std::fs::read(compressed.join("model.safetensors")).unwrap());
    let shapes = written.iter().filter(|t| t.name.ends_with(".weight_shape")).count();
    assert_eq!(shapes, 14);
    let tool = Model::golden("a", "gptq");
    let (own, _) = handmade::parse(&std::fs::read(again.join("model.safetensors")).unwrap());
    for part in ["qweight", "qzeros", "scales", "g_idx"] {
        let name = format!("model.layers.1.mlp.down_proj.{part}");
        assert_eq!(own.iter().find(|t| t.name == name).unwrap(), tool.get(&name));
    }
    Ok(())
}

#[test]
fn what_has_no_place_is_refused_by_name() -> Result<()> {
    let usage = |source: &Checkpoint, parts: &[&str]| refused(source, Layout::Gguf, Code::Usage, parts);
    usage(&with_words("awq").open()?, &[DOWN, "groups of 32 without zero points", "with zero points"]);
    usage(&with_words("auto_round").open()?, &[DOWN, "in groups of 64"]);
    usage(&with_words("nf4_bnb").open()?, &["need: nvfp4 or mxfp4 or int4", "have: nf4@1"]);
    usage(
        &open(&handmade::golden("b", "nvfp4_modelopt"))?,
        &["down_proj.weight`", "divisible by 64", "have: [96, 224]"],
    );
    let mut more = with_words("nvfp4_modelopt");
    more.tensors.push(Tensor::new("model.rotary.inv_freq", "F32", &[2], vec![0; 8]));
    usage(&more.open()?, &["`model.rotary.inv_freq`", "GGUF has a name for"]);
    usage(&open(&handmade::golden("a", "nvfp4.gguf"))?, &["a GGUF file already"]);

    let invalid = |source: &Model, code, parts: &[&str]| -> Result<()> {
        refused(&source.open()?, Layout::Gguf, code, parts);
        Ok(())
    };
    invalid(
        &Model::golden("a", "nvfp4_modelopt"),
        Code::TokenizerInvalid,
        &["tokenizer.json", "--tokenizer"],
    )?;
    let mut ends = with_words("nvfp4_modelopt");
    ends.config["eos_token_id"] = json!([2, 3]);
    invalid(&ends, Code::ConfigInvalid, &["eos_token_id", "have: [2, 3]"])?;
    let mut turned = with_words("nvfp4_modelopt");
    turned.config["rope_scaling"] = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 0.5,
    });
    invalid(&turned, Code::ConfigInvalid, &["how heads are turned", "0.5"])?;
    let mut many = with_words("nvfp4_modelopt");
    let ends = |ids: Value| {
        ("generation_config.json".to_owned(), json!({ "eos_token_id": ids }).to_string().into_bytes())
    };
    many.others.push(ends(json!([2, 3, 4, 5])));
    invalid(&many, Code::ConfigInvalid, &["generation_config.json", "have: [2, 3, 4, 5]"])?;
    *many.others.last_mut().unwrap() = ends(json!([2, 4]));
    let dir = tempfile::tempdir().unwrap();
    converted(&many.open()?, &gguf_of(dir.path()), Layout::Gguf)?;
    let back: Value =
        serde_json::from_slice(&open(&gguf_of(dir.path()))?.file("generation_config.json").unwrap()).unwrap();
    assert_eq!(back["eos_token_id"], json!([2, 4]));
    // The default factor, and linear scaling, are said.
    for scaling in [
        json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0 }),
        json!({ "rope_type": "linear", "factor": 2.0 }),
    ] {
        turned.config["rope_scaling"] = scaling;
        let dir = tempfile::tempdir().unwrap();
        converted(&turned.open()?, &gguf_of(dir.path()), Layout::Gguf)?;
        assert_eq!(open(&gguf_of(dir.path()))?.config().rope, turned.open()?.config().rope);
    }
    let dense = open(&handmade::golden("a", ""))?;
    let dir = tempfile::tempdir().unwrap();
    let plan = int4(Layout::Gguf, 32);
    let e = export(&dense, &gguf_of(dir.path()), &plan, &ThreadPool::new(1), &mut |_| Ok(()));
    assert_eq!(e.expect_err("dense ones are not written so").code(), Code::Usage);
    Ok(())
}
