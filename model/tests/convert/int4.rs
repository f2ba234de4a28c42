//! int4 between the layouts of three tools: there and back the bytes that they wrote, and refused by name
//! what one of them cannot say.
use super::handmade::act_order::{decoded, modules, shuffled};
use super::handmade::{self, Model, Tensor};
use super::plans::int4;
use super::{answers, assert_on_disk, assert_same_tensors, converted, refused};
use q4_core::detect::Layout;
use q4_core::{Code, Result, ThreadPool};
use q4_model::checkpoint::{Checkpoint, OpenOptions};
use q4_model::export::{ExportPlan, export};
use q4_model::verify::{Severity, verify};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::Path;

const LAYOUTS: [Layout; 3] = [Layout::CompressedTensors, Layout::Gptq, Layout::Awq];
const UP: &str = "model.layers.0.mlp.up_proj";

fn open(path: &Path) -> Result<Checkpoint> {
    Checkpoint::open(path, &OpenOptions::default())
}

fn declared(dir: &Path) -> Value {
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    config["quantization_config"].clone()
}

fn is_healthy(checkpoint: &Checkpoint) -> Result<()> {
    checkpoint.bind_all()?;
    let bad: Vec<_> = verify(checkpoint).into_iter().filter(|f| f.severity != Severity::Note).collect();
    assert!(bad.is_empty(), "{bad:?}");
    Ok(())
}

#[test]
fn what_tools_wrote_comes_back_by_every_way() -> Result<()> {
    for (name, own) in [
        ("int4_ct", Layout::CompressedTensors),
        ("int4_asym_ct", Layout::CompressedTensors),
        ("int4_channel_ct", Layout::CompressedTensors),
        ("gptq", Layout::Gptq),
        ("auto_round", Layout::Gptq),
        ("awq", Layout::Awq),
    ] {
        let source = open(&handmade::golden("a", name))?;
        let expected = answers(&source)?;
        let mut hashes = Vec::new();
        for layout in LAYOUTS {
            let dir = tempfile::tempdir().unwrap();
            let (out, again) = (dir.path().join("out"), dir.path().join("again"));
            let case = format!("{name} -> {}", layout.as_str());
            let report = converted(&source, &out, layout).map_err(|e| e.within(&case))?;
            assert!(report.lossless && report.tensors.len() == 14, "{case}: {report:?}");
            assert_on_disk(&out, &report);
            hashes.push(report.sha256_decoded);
            let there = open(&out)?;
            is_healthy(&there)?;
            assert_eq!(there.bind(UP, 192, 64)?.detected.layout, layout, "{case}");
            assert_eq!(answers(&there)?, expected, "{case}");

            let report = converted(&there, &again, own)?;
            hashes.push(report.sha256_decoded);
            let back = open(&again)?;
            // Of a bf16 scale there is none left, where it was an f16 in between.
            let is_bf16 = own == Layout::CompressedTensors && layout != own;
            if !is_bf16 {
                same_bytes(name, &again)?;
            }
            assert_eq!(answers(&back)?, expected, "{case} and back");
        }
        assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{name}: {hashes:?}");
    }
    Ok(())
}

/// The tensors of a file are those that the tool wrote, byte for byte.
fn same_bytes(name: &str, dir: &Path) -> Result<()> {
    let read = |dir: &Path| handmade::parse(&std::fs::read(dir.join("model.safetensors")).unwrap()).0;
    let sorted = |mut tensors: Vec<Tensor>| {
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        tensors
    };
    let (tool, own) = (sorted(read(&handmade::golden("a", name))), sorted(read(dir)));
    let names = |tensors: &[Tensor]| tensors.iter().map(|t| t.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&tool), names(&own), "{name}");
    for (tool, own) in tool.iter().zip(&own) {
        assert!(tool == own, "{name}: {}", tool.name);
    }
    Ok(())
}

/// Act-order stays in GPTQ: every tensor as it was, and what is said of it.
#[test]
fn groups_of_any_in_features_are_written_back() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    for (variant, shared) in [("gptq", true), ("gptq", false), ("auto_round", true)] {
        let model = shuffled(variant, shared);
        let (source, out) = (model.open()?, dir.path().join(format!("{variant}-{shared}")));
        let report = converted(&source, &out, Layout::Gptq)?;
        assert!(report.lossless && report.tensors.len() == 14, "{report:?}");
        let (back, again) = (open(&out)?, dir.path().join(format!("{variant}-{shared}-again")));
        let mut written = handmade::parse(&std::fs::read(out.join("model.safetensors")).unwrap()).0;
        let mut stored = model.tensors.clone();
        [&mut written, &mut stored].into_iter().for_each(|all| all.sort_by(|a, b| a.name.cmp(&b.name)));
        assert!(written == stored, "{variant}, shared {shared}");
        assert_eq!(declared(&out)["desc_act"], true);
        back.bind_all()?;
        assert_eq!(answers(&back)?, answers(&source)?, "{variant}, shared {shared}");
        assert_eq!(converted(&back, &again, Layout::Gptq)?.sha256_decoded, report.sha256_decoded);

        // The hash is that of the values where the model has them: by GPTQ's formula alone.
        let mut hash = Sha256::new();
        let mut contents: Vec<_> = stored.iter().filter(|t| t.name.ends_with(".weight")).cloned().collect();
        for module in modules(&model) {
            let values = decoded(&model, &module);
            let n = model.get(&format!("{module}.qweight")).shape[1];
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            contents.push(Tensor::new(&format!("{module}.weight"), "F32", &[n, values.len() / n], bytes));
        }
        contents.sort_by(|a, b| a.name.cmp(&b.name));
        for t in contents {
            let dtype = if t.dtype == "F32" { "float32" } else { "float16" };
            let extents: Vec<_> = t.shape.iter().map(usize::to_string).collect();
            hash.update(format!("{} {dtype} [{}]\n", t.name, extents.join(",")));
            hash.update(&t.bytes);
        }
        assert_eq!(report.sha256_decoded, format!("{:x}", hash.finalize()), "{variant}, shared {shared}");
    }
    Ok(())
}

/// GPTQModel stores scales of AWQ in the type that the model computes in.
#[test]
fn scales_in_bf16_become_f16() -> Result<()> {
    let mut model = Model::golden("a", "awq");
    let scales: Vec<_> = model.tensors.iter_mut().filter(|t| t.name.ends_with(".scales")).collect();
    for t in scales {
        t.dtype = "BF16".into();
        for bytes in t.bytes.chunks_exact_mut(2) {
            let wide = half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            bytes.copy_from_slice(&half::bf16::from_f32(wide).to_le_bytes());
        }
    }
    let (source, dir) = (model.open()?, tempfile::tempdir().unwrap());
    is_healthy(&source)?;
    let mut hashes = Vec::new();
    for layout in LAYOUTS {
        let out = dir.path().join(layout.as_str());
        hashes.push(converted(&source, &out, layout)?.sha256_decoded);
        assert_eq!(answers(&open(&out)?)?, answers(&source)?, "{}", layout.as_str());
        let name = if layout == Layout::CompressedTensors { "weight_scale" } else { "scales" };
        let dtype = open(&out)?.store().entry(&format!("{UP}.{name}")).map(|e| e.stored_type.to_owned());
        // Where they may be either, they stay.
        let kept = if layout == Layout::CompressedTensors { "BF16" } else { "F16" };
        assert_eq!(dtype.as_deref(), Some(kept), "{}", layout.as_str());
    }
    assert!(hashes.iter().all(|hash| *hash == hashes[0]));
    Ok(())
}

/// AutoRound's first form is what GPTQ's second becomes.
#[test]
fn forms_of_gptq_become_one() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let mut hashes = Vec::new();
    for name in ["gptq_v2", "auto_round"] {
        let out = dir.path().join(name);
        hashes.push(converted(&open(&handmade::golden("a", name))?, &out, Layout::Gptq)?.sha256_decoded);
        let declared = declared(&out);
        assert_eq!(declared["checkpoint_format"], "gptq", "{declared}");
        assert_eq!(declared["meta"]["quantizer"][1], "gptqmodel:0.9.0", "{declared}");
    }
    assert_eq!(hashes[0], hashes[1]);
    let [a, b] = ["gptq_v2", "auto_round"].map(|name| open(&dir.path().join(name)));
    assert_same_tensors(a?.store(), b?.store())
}

#[test]
fn configurations_say_what_tools_say() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, layout: Layout| -> Result<Value> {
        let out = dir.path().join(format!("{name}-{}", layout.as_str()));
        converted(&open(&handmade::golden("a", name))?, &out, layout)?;
        Ok(declared(&out))
    };
    // Every field that the tool has, but for those of how it found its values.
    let gptq = of("gptq", Layout::Gptq)?;
    let tool = declared(&handmade::golden("a", "gptq"));
    for field in ["quant_method", "bits", "group_size", "sym", "desc_act", "lm_head"] {
        assert_eq!(gptq[field], tool[field], "{field}");
    }
    let awq = of("awq", Layout::Awq)?;
    let tool = declared(&handmade::golden("a", "awq"));
    for field in ["quant_method", "bits", "group_size", "version", "zero_point"] {
        assert_eq!(awq[field], tool[field], "{field}");
    }
    let weights = |name: &str| -> Result<Value> {
        Ok(of(name, Layout::CompressedTensors)?["config_groups"]["group_0"]["weights"].clone())
    };
    // Zero points that are all in the middle are none.
    for (name, group, symmetric) in [("gptq", 32, true), ("auto_round", 64, false), ("awq", 32, false)] {
        let weights = weights(name)?;
        let have = (&weights["group_size"], &weights["symmetric"], &weights["strategy"]);
        assert_eq!(have, (&json!(group), &json!(symmetric), &json!("group")), "{name}");
    }
    // A scale for a whole out feature is -1.
    for layout in [Layout::Gptq, Layout::Awq] {
        assert_eq!(of("int4_channel_ct", layout)?["group_size"], -1, "{}", layout.as_str());
    }
    Ok(())
}

#[test]
fn what_a_layout_cannot_say_is_refused_with_the_layer() -> Result<()> {
    let usage = |source: &Checkpoint, layout, parts: &[&str]| refused(source, layout, Code::Usage, parts);
    // Groups of any in features, which GPTQ alone can say here.
    let mut act_order = Model::golden("a", "gptq");
    act_order.config["quantization_config"]["desc_act"] = json!(true);
    act_order.edit(&format!("{UP}.g_idx")).bytes.swap(0, 4 * 40);
    for layout in [Layout::CompressedTensors, Layout::Awq, Layout::Gguf] {
        let parts = [&format!("`{UP}.g_idx`: act-order")[..], "exact counterpart", "--layout gptq"];
        usage(&act_order.open()?, layout, &parts);
    }

    // float16 holds neither 2^-30 nor 2^17, and bf16 does.
    for (bits, told) in
        [(0x3080u16, "9.313226e-10, which would be 0e0"), (0x4800, "1.31072e5, which would be inf")]
    {
        let mut small = Model::golden("a", "int4_ct");
        small.edit(&format!("{UP}.weight_scale")).bytes[6..8].copy_from_slice(&bits.to_le_bytes());
        for layout in [Layout::Gptq, Layout::Awq] {
            let place = "at row 1, group 1";
            usage(&small.open()?, layout, &[&format!("`{UP}.weight_scale`"), "float16", told, place]);
        }
        let dir = tempfile::tempdir().unwrap();
        converted(&small.open()?, &dir.path().join("out"), Layout::CompressedTensors)?;
    }

    // Zero point 0 would be stored as -1. The first nibble of AWQ is the first out feature's.
    let mut zero = Model::golden("a", "awq");
    zero.edit(&format!("{UP}.qzeros")).bytes[0] &= 0xf0;
    let parts = [&format!("`{UP}.qzeros`")[..], "zero points of 1 to 15", "have: 0 at row 0, group 0"];
    usage(&zero.open()?, Layout::Gptq, &parts);
    for layout in [Layout::Awq, Layout::CompressedTensors] {
        let dir = tempfile::tempdir().unwrap();
        converted(&zero.open()?, &dir.path().join("out"), layout)?;
    }

    // Parts of layers that nobody knows are in no other layout's order.
    for part in ["qweight", "qzeros", "scales", "g_idx"] {
        let mut more = Model::golden("a", "gptq");
        let name = format!("model.mtp.fc.{part}");
        more.tensors.push(Tensor::new(&name, "I32", &[8, 8], vec![0; 256]));
        usage(&more.open()?, Layout::CompressedTensors, &[&format!("`{name}`"), "has no place for it"]);
        usage(&more.open()?, Layout::Gptq, &[&format!("`{name}`"), "has no place for it"]);
    }
    for (name, layout) in [("nvfp4_modelopt", Layout::Gptq), ("mxfp4_ct", Layout::Awq)] {
        usage(&open(&handmade::golden("a", name))?, layout, &["need: int4", "have: "]);
    }
    for layout in [Layout::ModelOpt, Layout::Dat, Layout::Bitsandbytes] {
        usage(&open(&handmade::golden("a", "gptq"))?, layout, &["have: int4@1"]);
    }
    Ok(())
}

#[test]
fn groups_that_no_reader_takes_are_refused() -> Result<()> {
    // Of 192 in features, 48: compressed-tensors says any.
    let dense = open(&handmade::golden("a", ""))?;
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    let plan = ExportPlan {
        exclude: vec!["*.self_attn.*".into(), "*.up_proj".into(), "*.gate_proj".into()],
        ..int4(Layout::CompressedTensors, 48)
    };
    export(&dense, &source, &plan, &ThreadPool::new(1), &mut |_| Ok(()))?;
    for layout in [Layout::Gptq, Layout::Awq] {
        let parts = ["model.layers.0.mlp.down_proj", "groups of 16, 32, 64 or 128", "in groups of 48"];
        refused(&open(&source)?, layout, Code::Usage, &parts);
        let plan = ExportPlan { exclude: plan.exclude.clone(), ..int4(layout, 48) };
        let e = export(&dense, &dir.path().join("out"), &plan, &ThreadPool::new(1), &mut |_| Ok(()));
        let e = e.expect_err("a group of 48").to_string();
        assert!(e.contains("in groups of 16, 32, 64 or 128") && e.contains("--block-size"), "{e}");
    }
    Ok(())
}

/// Layers that stay dense are said so in each way there is.
#[test]
fn dense_layers_and_heads_are_declared() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let dense = open(&handmade::golden("b", ""))?;
    let down = "model.layers.0.mlp.down_proj";
    let plan = |layout| ExportPlan { exclude: vec![down.into()], ..int4(layout, 16) };
    let pattern = r"-:^model\.layers\.0\.mlp\.down_proj$";
    for layout in LAYOUTS {
        let out = dir.path().join(layout.as_str());
        export(&dense, &out, &plan(layout), &ThreadPool::new(2), &mut |_| Ok(()))?;
        let written = open(&out)?;
        is_healthy(&written)?;
        let said = declared(&out);
        match layout {
            Layout::Gptq => {
                assert_eq!((&said["lm_head"], &said["sym"]), (&json!(false), &json!(true)), "{said}");
                assert_eq!(said["dynamic"], json!({ pattern: {} }));
            }
            Layout::Awq => assert_eq!(said["modules_to_not_convert"], json!(["lm_head", down])),
            _ => assert_eq!(said["ignore"], json!(["lm_head", down])),
        }
        assert_eq!(written.declaration().excludes(down), Some(true), "{}", layout.as_str());
        for other in LAYOUTS {
            let to = dir.path().join(format!("{}-{}", layout.as_str(), other.as_str()));
            let report = converted(&written, &to, other)?;
            assert!(report.lossless && report.tensors.iter().all(|t| t.name != down));
            is_healthy(&open(&to)?)?;
        }
    }
    // A packed head: GPTQ has a field for it, readers of AWQ leave it out.
    let with_head = |layout| ExportPlan { include: vec!["lm_head".into()], ..int4(layout, 16) };
    let out = dir.path().join("head");
    export(&dense, &out, &with_head(Layout::Gptq), &ThreadPool::new(2), &mut |_| Ok(()))?;
    assert_eq!(declared(&out)["lm_head"], true);
    is_healthy(&open(&out)?)?;
    refused(&open(&out)?, Layout::Awq, Code::Usage, &["`lm_head`", "layout awq"]);
    let none = dir.path().join("none");
    let e = export(&dense, &none, &with_head(Layout::Awq), &ThreadPool::new(1), &mut |_| Ok(()));
    assert!(e.expect_err("a packed head").to_string().contains("`lm_head`"));
    assert!(!none.exists());
    Ok(())
}
