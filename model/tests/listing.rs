//! Files that are nearly all header: what their lists of tensors take is bounded by their size.
#![allow(clippy::unwrap_used)]

use q4_core::Code;
use q4_heap::{COUNTED, Heap};
use q4_model::checkpoint::TensorStore;
use std::path::Path;

/// Bytes for a byte of header; the mapped file itself is one more while it is read.
const ALLOWED: usize = 3;
/// What a process takes for other things.
const BESIDE: usize = 1 << 20;

#[global_allocator]
static HEAP: Heap = COUNTED;

/// One test, so that the count belongs to one file at a time.
#[test]
fn a_list_of_tensors_takes_no_more_than_three_times_its_header() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    for shape in ["", "1", "1,1,1,1", "1,1,1,1,1,1,1,1"] {
        let size = write(&path, &list(0..200_000, shape, ""));
        assert_bounded(&path, size, &format!("[{shape}]"));
    }
    // Braces in a text promise tensors that are not there.
    let size = write(&path, &list(0..10, "", &format!("\"a\":\"{}\"", "{".repeat(10 << 20))));
    assert_bounded(&path, size, "braces");
    let texts = |n: u32| (0..n).map(|i| format!("\"{i:x}\":\"\"")).collect::<Vec<_>>().join(",");
    write(&path, &list(0..10, "", &texts(1 << 16)));
    assert!(TensorStore::open(&path).is_ok());
    write(&path, &list(0..10, "", &texts((1 << 16) + 1)));
    let e = TensorStore::open(&path).unwrap_err();
    assert!(e.code() == Code::Container && e.to_string().contains("more than 65536 texts"), "{e}");
    sharded();
}

fn sharded() {
    let dir = tempfile::tempdir().unwrap();
    let (mut size, mut map) = (0, Vec::new());
    for (i, name) in ["a.safetensors", "b.safetensors"].into_iter().enumerate() {
        let tensors = i * 100_000..(i + 1) * 100_000;
        size += write(&dir.path().join(name), &list(tensors.clone(), "", ""));
        map.extend(tensors.map(|t| format!("\"{t:x}\":\"{name}\"")));
    }
    let index = format!("{{\"weight_map\":{{{}}}}}", map.join(","));
    let path = dir.path().join("model.safetensors.index.json");
    std::fs::write(&path, &index).unwrap();
    assert_bounded(&path, size + index.len(), "an index and its shards");
    let files: Vec<_> = (0..5000).map(|i| format!("\"{i}\":\"{i}.safetensors\"")).collect();
    std::fs::write(&path, format!("{{\"weight_map\":{{{}}}}}", files.join(","))).unwrap();
    let e = TensorStore::open(&path).unwrap_err();
    assert!(e.code() == Code::Container && e.to_string().contains("more than 4096 files"), "{e}");
}

fn assert_bounded(path: &Path, size: usize, what: &str) {
    let before = q4_heap::begin();
    let tensors = TensorStore::open(path).unwrap().table().len();
    let peak = q4_heap::peak() - before;
    println!("{what}: {tensors} tensors, header of {size}, peak {peak}: {:.2}", peak as f64 / size as f64);
    assert!(peak <= ALLOWED * size + BESIDE, "{what}: {peak} bytes for a header of {size}");
    assert!(tensors >= 10);
    // What it takes is what --memory-limit was told beforehand.
    let e = TensorStore::open_within(path, Some(2 * size as u64)).unwrap_err();
    assert_eq!(e.code(), Code::OutOfMemory, "{what}: {e}");
}

/// Header of tensors of one byte.
fn list(tensors: std::ops::Range<usize>, shape: &str, texts: &str) -> String {
    let entry = |(at, t): (usize, usize)| {
        format!("\"{t:x}\":{{\"dtype\":\"U8\",\"shape\":[{shape}],\"data_offsets\":[{at},{}]}}", at + 1)
    };
    let metadata = format!("\"__metadata__\":{{{texts}}}");
    let entries: Vec<_> = std::iter::once(metadata).chain(tensors.enumerate().map(entry)).collect();
    format!("{{{}}}", entries.join(","))
}

/// Size of the file's header.
fn write(path: &Path, header: &str) -> usize {
    let data = header.matches("\"dtype\"").count();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat();
    std::fs::write(path, file).unwrap();
    header.len()
}
