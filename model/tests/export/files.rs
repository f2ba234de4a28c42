//! What is chosen and written, what is refused, and what an end before the end leaves.
use crate::plans::{nf4, nvfp4};
use crate::{MODELS, NVFP4, assert_same_tensors, exported, golden, json, open};
use q4_core::detect::Layout;
use q4_core::{Code, DType, Error, Result, ThreadPool};
use q4_model::checkpoint::{Bytes, Checkpoint, OpenOptions, TensorStore};
use q4_model::export::{ExportPlan, Progress, export};
use q4_model::quantize::{Method, Rows, Scales, quantize};
use std::path::Path;

#[test]
fn layers_are_chosen_by_name() -> Result<()> {
    let base = nvfp4(Layout::CompressedTensors, None, Method::Rtn);
    let plan = ExportPlan {
        include: vec!["lm_head".into()],
        exclude: vec!["model.layers.0.*".into(), "down_proj".into()],
        ..base.clone()
    };
    let (_dir, out, report) = exported("qwen3_tiny_b", &plan)?;
    assert!(report.tensors.iter().any(|t| t.name == "lm_head"));
    assert!(
        report
            .tensors
            .iter()
            .all(|t| !t.name.starts_with("model.layers.0.") && !t.name.ends_with("down_proj"))
    );
    Checkpoint::open(&out, &OpenOptions::default())?.bind_all()?;
    let ignore = json(&out.join("config.json"))["quantization_config"]["ignore"].clone();
    let ignore: Vec<&str> = ignore.as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
    assert!(
        ignore.contains(&"model.layers.0.self_attn.q_proj")
            && ignore.contains(&"model.layers.1.mlp.down_proj")
    );
    assert!(!ignore.contains(&"lm_head") && !ignore.contains(&"model.layers.1.self_attn.q_proj"));
    for (include, exclude) in
        [(vec!["lm_haed"], vec![]), (vec![], vec!["*.nothing"]), (vec!["model.embed_tokens"], vec![])]
    {
        let own = |globs: Vec<&str>| globs.into_iter().map(str::to_owned).collect();
        let e = exported(
            "qwen3_tiny_b",
            &ExportPlan { include: own(include), exclude: own(exclude), ..base.clone() },
        );
        assert_eq!(e.expect_err("names nothing").code(), Code::Usage);
    }
    let e = exported("qwen3_tiny_b", &ExportPlan { exclude: vec!["*_proj".into()], ..base });
    assert_eq!(e.expect_err("nothing left").code(), Code::Usage);
    let dat = ExportPlan { exclude: vec!["lm_head".into()], ..nvfp4(Layout::Dat, None, Method::Rtn) };
    assert!(exported("qwen3_tiny_a", &dat)?.2.tensors.iter().all(|t| t.name != "lm_head"));
    Ok(())
}

#[test]
fn large_outputs_are_cut_into_files() -> Result<()> {
    let plan = ExportPlan { max_shard_bytes: 40_000, ..nvfp4(Layout::ModelOpt, None, Method::Rtn) };
    let (_dir, out, report) = exported("qwen3_tiny_b", &plan)?;
    let parts = report.files.iter().filter(|f| f.0.ends_with(".safetensors")).count();
    assert!(parts > 2, "{:?}", report.files);
    let packed = Checkpoint::open(&out, &OpenOptions::default())?;
    packed.bind_all()?;
    let (_whole_dir, whole, _) = exported("qwen3_tiny_b", &nvfp4(Layout::ModelOpt, None, Method::Rtn))?;
    assert_same_tensors(packed.store(), &TensorStore::open(&whole)?, &|_| true)
}

#[test]
fn the_other_files_come_along() -> Result<()> {
    let (_dir, out, report) = exported("qwen3_tiny_a", &nvfp4(Layout::CompressedTensors, None, Method::Rtn))?;
    let original = golden("qwen3_tiny_a");
    let read = |p: &Path| std::fs::read(p).unwrap();
    assert_eq!(read(&out.join("generation_config.json")), read(&original.join("generation_config.json")));
    let original = String::from_utf8(read(&original.join("config.json"))).unwrap();
    let own = String::from_utf8(read(&out.join("config.json"))).unwrap();
    assert!(own.starts_with(original.trim_end().trim_end_matches('}').trim_end()), "every field is kept");
    assert!(json(&out.join("config.json"))["quantization_config"].is_object());
    for (name, bytes) in &report.files {
        assert_eq!(std::fs::metadata(out.join(name)).unwrap().len(), *bytes, "{name}");
    }
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), report.files.len());
    Ok(())
}

#[test]
fn what_exists_is_not_overwritten() -> Result<()> {
    let (dense, pool) = (open(MODELS[0])?, ThreadPool::new(1));
    let dir = tempfile::tempdir().unwrap();
    let (file, full, empty) = (dir.path().join("f"), dir.path().join("full"), dir.path().join("empty"));
    std::fs::write(&file, b"mine").unwrap();
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("x"), b"mine").unwrap();
    std::fs::create_dir(&empty).unwrap();
    for layout in NVFP4 {
        let plan = nvfp4(layout, None, Method::Rtn);
        for out in [&file, &full] {
            let e = export(&dense, out, &plan, &pool, &mut |_| panic!("no work before the check"))
                .expect_err("exists");
            assert_eq!(e.code(), Code::Usage);
            assert!(e.what().contains("exists"), "{e}");
        }
    }
    export(&dense, &empty, &nvfp4(Layout::ModelOpt, None, Method::Rtn), &pool, &mut |_| Ok(()))?;
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
    Ok(())
}

#[test]
fn bad_weights_and_bad_plans_are_named() -> Result<()> {
    let store = TensorStore::open(&golden(MODELS[0]).join("model.safetensors"))?;
    let name = "model.layers.1.mlp.up_proj.weight";
    let offset = store.entries().find(|e| e.name == name).unwrap().offset;
    let mut bytes = std::fs::read(golden(MODELS[0]).join("model.safetensors")).unwrap();
    let at = offset + (3 * 64 + 5) * 4;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let config = std::fs::read(golden(MODELS[0]).join("config.json")).unwrap();
    let damaged = Checkpoint::from_files(
        "m",
        vec![("model.safetensors".into(), bytes.into()), ("config.json".into(), Bytes::from(config))],
    )?;
    let pool = ThreadPool::new(2);
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    for plan in [
        nvfp4(Layout::ModelOpt, None, Method::Rtn),
        nvfp4(Layout::Dat, None, Method::Rtn),
        nf4(Layout::Bitsandbytes, 64, true),
    ] {
        let e = export(&damaged, &out, &plan, &pool, &mut |_| Ok(())).expect_err("NaN");
        assert_eq!(e.code(), Code::NonFinite);
        assert!(e.what().contains(name) && e.what().contains("row 3, column 5"), "{e}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    }
    let dense = open(MODELS[0])?;
    let single = nvfp4(Layout::ModelOpt, Some(Scales::Single), Method::Rtn);
    let crossed = ExportPlan {
        target: nvfp4(Layout::ModelOpt, None, Method::Rtn).target,
        ..nvfp4(Layout::CompressedTensors, None, Method::Rtn)
    };
    let others = [
        nf4(Layout::ModelOpt, 64, false),
        nf4(Layout::Dat, 64, true),
        nf4(Layout::Bitsandbytes, 48, false),
        nvfp4(Layout::TorchAo, None, Method::Rtn),
    ];
    for plan in others.into_iter().chain([single, crossed]) {
        assert_eq!(
            export(&dense, &out, &plan, &pool, &mut |_| Ok(())).expect_err("does not fit").code(),
            Code::Usage,
            "{plan:?}"
        );
    }
    for packed in ["nvfp4_modelopt", "nvfp4_ct", "nf4_bnb"] {
        let packed = Checkpoint::open(&golden(MODELS[0]).join(packed), &OpenOptions::default())?;
        let e = export(&packed, &out, &nvfp4(Layout::ModelOpt, None, Method::Rtn), &pool, &mut |_| Ok(()));
        assert!(e.expect_err("4-bit already").to_string().contains("the original"));
    }
    let ragged = nf4(Layout::Dat, 4096, false);
    let e = exported(MODELS[1], &ragged).expect_err("21504 weights are 5.25 blocks");
    assert!(e.code() == Code::TensorShape && e.to_string().contains("whole blocks"), "{e}");
    let narrow = [0u8; 3 * 24 * 4];
    let rows = Rows::new("narrow.weight", &narrow, DType::F32, 3, 24)?;
    let e = quantize(&rows, &nvfp4(Layout::Dat, None, Method::Rtn).target, None, &pool)
        .expect_err("24 is not 16 n");
    assert_eq!(e.code(), Code::TensorShape);
    assert!(e.to_string().contains("narrow.weight"));
    Ok(())
}

#[test]
fn an_interrupted_export_leaves_nothing() -> Result<()> {
    let (dense, pool) = (open(MODELS[0])?, ThreadPool::new(1));
    for layout in NVFP4 {
        let plan = nvfp4(layout, None, Method::Rtn);
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let list =
            || std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
        let total = dense.table().len();
        for stop in [0, 1, total / 2, total] {
            let mut seen = false;
            let e = export(&dense, &out, &plan, &pool, &mut |p: Progress<'_>| {
                seen |= list().iter().any(|n| n.to_string_lossy().contains(".partial-")) && !out.exists();
                if p.done == stop { Err(Error::new(Code::Internal, "interrupted")) } else { Ok(()) }
            });
            assert_eq!(e.expect_err("stopped").what(), "interrupted");
            assert!(seen, "the work is done under another name");
            assert!(list().is_empty(), "{layout:?} after {stop}: {:?}", list());
        }
        let crash = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            export(&dense, &out, &plan, &pool, &mut |p| {
                if p.done == 5 { std::panic::resume_unwind(Box::new(())) } else { Ok(()) }
            })
        }));
        assert!(crash.is_err());
        assert!(list().is_empty(), "{layout:?} after a panic");
        let mut last = None;
        export(&dense, &out, &plan, &pool, &mut |p| {
            last = Some((p.done, p.total, p.bytes_done, p.bytes_total));
            Ok(())
        })?;
        let (done, total, bytes, all) = last.unwrap();
        assert!(done == total && bytes == all && all > 0);
        assert_eq!(list(), ["out"]);
    }
    Ok(())
}
