//! The comparison must see whatever could go wrong between the input and what was read back.
use super::*;
use crate::TensorStore;
use std::collections::BTreeSet;
use std::path::PathBuf;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance/golden").join(path)
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let names = ["model.safetensors", "config.json", "hf_quant_config.json"];
    let read = |name: &str| Some((name.to_owned(), std::fs::read(dir.join(name)).ok()?));
    names.into_iter().filter_map(read).collect()
}

fn open(files: Vec<(String, Vec<u8>)>) -> Result<Checkpoint> {
    Checkpoint::from_files("m", files.into_iter().map(|(n, b)| (n, Bytes::from(b))).collect())
}

fn compare(a: &Checkpoint, b: &Checkpoint) -> Result<String> {
    let (x, y) = (contents(a)?, contents(b)?);
    proof::prove((a, &x), (b, &y), &BTreeSet::new(), &ThreadPool::new(2), &mut |_, _| Ok(()))
}

/// `dir` with the bits `flip` of byte `at` of `tensor` inverted.
fn damaged(dir: &Path, tensor: &str, at: usize, flip: u8) -> Result<Checkpoint> {
    let store = TensorStore::open(dir)?;
    let offset = store.entries().find(|e| e.name == tensor).unwrap_or_else(|| panic!("no {tensor}")).offset;
    let mut files = files(dir);
    files[0].1[offset + at] ^= flip;
    open(files)
}

#[test]
fn one_changed_bit_is_found_and_named() -> Result<()> {
    const UP: &str = "model.layers.1.mlp.up_proj";
    // Byte 100 of codes `[192, 32]` is row 3, columns 8 and 9.
    for (variant, part, at, flip, told) in [
        ("nvfp4_modelopt", "weight", 100, 0x01, "weight: row 3, column 8"),
        ("nvfp4_modelopt", "weight", 100, 0x80, "weight: row 3, column 9"),
        ("nvfp4_modelopt", "weight_scale", 4, 0x01, "weight: row 1, column"),
        ("nvfp4_modelopt", "weight_scale_2", 0, 0x01, "weight: row 0"),
        ("nvfp4_modelopt", "input_scale", 0, 0x01, "inputs: block scale 0x01"),
        ("nvfp4_ct", "weight_global_scale", 0, 0x01, "weight: row 0"),
        ("nvfp4_ct", "input_global_scale", 1, 0x01, "inputs: block scale"),
        ("nf4_bnb", "weight", 100, 0x10, "weight: row 3, column 8"),
        ("nf4_bnb", "weight.absmax", 0, 0x01, "weight: row 0"),
        ("nf4_bnb_dq", "weight.absmax", 1, 0x01, "weight: row 1"),
        ("nf4_bnb_dq", "weight.nested_absmax", 2, 0x01, "weight: row 0"),
    ] {
        let dir = golden("qwen3_tiny_a").join(variant);
        let whole = open(files(&dir))?;
        compare(&whole, &whole)?;
        let e = compare(&whole, &damaged(&dir, &format!("{UP}.{part}"), at, flip)?).expect_err("differs");
        assert_eq!((e.code(), e.code().exit()), (Code::Findings, 3), "{variant} {part}: {e}");
        assert!(e.what().contains(&format!("{UP}.{told}")), "{variant} {part}: {e}");
        assert!(e.parts().filter(|(name, _)| matches!(*name, "need" | "have")).count() == 2, "{e}");
    }
    let dir = golden("qwen3_tiny_a/nvfp4_modelopt");
    let norm = damaged(&dir, "model.norm.weight", 5, 0x40)?;
    let e = compare(&open(files(&dir))?, &norm).expect_err("differs");
    assert!(e.code() == Code::Findings && e.what().starts_with("model.norm.weight: byte 5"), "{e}");
    Ok(())
}

#[test]
fn parts_without_a_value_of_their_own_are_compared() -> Result<()> {
    // A block of zeros decodes alike under any scale.
    let dir = golden("qwen3_tiny_a/nvfp4_modelopt");
    const UP: &str = "model.layers.0.mlp.up_proj";
    let store = TensorStore::open(&dir)?;
    let offset = |name: String| store.entries().find(|e| e.name == name).expect("present").offset;
    let mut zeros = files(&dir);
    let codes = offset(format!("{UP}.weight"));
    zeros[0].1[codes..codes + 8].fill(0);
    let mut other = zeros.clone();
    other[0].1[offset(format!("{UP}.weight_scale"))] ^= 1;
    let e = compare(&open(zeros)?, &open(other)?).expect_err("another scale");
    assert!(e.code() == Code::Findings && e.what().contains("weight: row 0"), "{e}");
    Ok(())
}

#[test]
fn lost_and_new_tensors_are_named() -> Result<()> {
    let with = open(files(&golden("qwen3_tiny_a/nvfp4_ct")))?;
    let without = open(files(&golden("qwen3_tiny_a/nvfp4_ct_w4a16")))?;
    for (a, b) in [(&with, &without), (&without, &with)] {
        let e = compare(a, b).expect_err("scales of inputs in one of them");
        assert!(e.code() == Code::Findings && e.what().contains(".inputs"), "{e}");
    }
    let dense = open(files(&golden("qwen3_tiny_a")))?;
    let e = compare(&with, &dense).expect_err("another model");
    assert_eq!(e.code(), Code::Findings);
    Ok(())
}
