//! What a file says, and files that contradict themselves.
mod support;

use q4_core::Code;
use q4_gguf::{GgmlType, Gguf, Value};
use support::{File, array, entry, small, text};

fn refused(file: &File) -> String {
    refused_bytes(&file.bytes())
}

fn refused_bytes(bytes: &[u8]) -> String {
    let error = Gguf::parse("a.gguf", bytes).expect_err("must be refused");
    assert_eq!(error.code(), Code::Container);
    let text = error.to_string();
    assert!(text.contains("a.gguf: ") && text.len() < 700, "{text}");
    text
}

#[test]
fn every_type_of_value_is_read() {
    let nested = array(9, &[array(0, &[vec![1], vec![2]]), array(8, &[text("x"), text("")])]);
    let bytes = File::new()
        .entry("u8", 0, &[255])
        .entry("i8", 1, &[255])
        .entry("u16", 2, &[1, 2])
        .entry("i16", 3, &[0, 128])
        .u32("u32", 7)
        .entry("i32", 5, &(-7i32).to_le_bytes())
        .f32("f32", 0.1)
        .flag("bool", true)
        .text("text", "é")
        .entry("u64", 10, &u64::MAX.to_le_bytes())
        .entry("i64", 11, &i64::MIN.to_le_bytes())
        .entry("f64", 12, &0.1f64.to_le_bytes())
        .entry("nested", 9, &nested)
        .entry("none", 9, &array(5, &[]))
        .bytes();
    let gguf = Gguf::parse("a.gguf", &bytes).expect("valid");
    let get = |key: &str| *gguf.get(key).expect(key);
    assert_eq!(get("u8"), Value::U8(255));
    assert_eq!(get("i8"), Value::I8(-1));
    assert_eq!(get("u16"), Value::U16(513));
    assert_eq!(get("i16"), Value::I16(i16::MIN));
    assert_eq!(get("u32"), Value::U32(7));
    assert_eq!(get("i32"), Value::I32(-7));
    assert_eq!(get("f32"), Value::F32(0.1));
    assert_eq!(get("bool"), Value::Bool(true));
    assert_eq!(get("text"), Value::Text("é"));
    assert_eq!(get("u64"), Value::U64(u64::MAX));
    assert_eq!(get("i64"), Value::I64(i64::MIN));
    assert_eq!(get("f64"), Value::F64(0.1));
    assert_eq!(gguf.get("other"), None);
    assert_eq!(gguf.metadata().len(), 14);

    let lists: Vec<_> = get("nested").array().expect("an array").iter().collect();
    let [Value::Array(numbers), Value::Array(texts)] = lists[..] else { panic!("{lists:?}") };
    assert_eq!(numbers.wholes().expect("numbers").collect::<Vec<_>>(), [1, 2]);
    assert_eq!(texts.texts().expect("texts").collect::<Vec<_>>(), ["x", ""]);
    assert!(texts.wholes().is_none() && numbers.texts().is_none());
    assert!(get("none").array().expect("an array").is_empty());
}

#[test]
fn tensors_have_their_bytes() {
    for version in [2, 3] {
        let bytes = File { version, ..small() }.bytes();
        let gguf = Gguf::parse("a.gguf", &bytes).expect("valid");
        assert_eq!((gguf.version(), gguf.alignment(), gguf.tensors().len()), (version, 32, 4));
        let q = gguf.tensor("blk.0.attn_q.weight").expect("a tensor");
        assert_eq!((q.kind, q.shape(), q.range.len()), (GgmlType::Q4_0, &[64, 32][..], 64 * 18));
        for t in gguf.tensors() {
            assert_eq!(t.range.start % 32, 0);
            assert!(bytes[t.range.clone()].iter().enumerate().all(|(i, b)| *b == i as u8), "{}", t.name);
        }
        assert_eq!(gguf.tensor("blk.1.attn_q.weight"), None);
    }
}

#[test]
fn every_type_has_the_bytes_of_its_blocks() {
    for kind in GgmlType::ALL {
        let (elements, bytes) = (3 * kind.block_elements() as u64, 3 * kind.block_bytes() as u64);
        let file = File::new().tensor("w", &[elements, 2], kind.number(), 2 * bytes).bytes();
        let gguf = Gguf::parse("a.gguf", &file).expect("valid");
        let w = gguf.tensor("w").expect("a tensor");
        assert_eq!((w.kind, w.range.len() as u64), (*kind, 2 * bytes));
        if kind.block_elements() > 1 {
            let error = refused(&File::new().tensor("w", &[elements - 1, 2], kind.number(), 2 * bytes));
            assert!(error.contains("a multiple of") && error.contains(kind.name()), "{error}");
        }
    }
}

#[test]
fn alignment_is_the_files_own() {
    let aligned = |n: u64| {
        let file = File::new().u32("general.alignment", n as u32);
        File { alignment: n, ..file }.tensor("a", &[3], 24, 3).tensor("b", &[5], 24, 5)
    };
    for n in [1, 8, 64, 4096] {
        let bytes = aligned(n).bytes();
        let gguf = Gguf::parse("a.gguf", &bytes).expect("valid");
        assert_eq!(gguf.alignment() as u64, n);
        assert_eq!(gguf.tensor("b").map(|t| t.range.len()), Some(5));
    }
    for n in [0, 3, 48, u32::MAX] {
        let file = small().u32("general.alignment", n);
        assert!(refused(&file).contains("a power of two"));
    }
    assert!(refused(&small().text("general.alignment", "32")).contains("as u32"));
    // Nothing to align, and padding for ever.
    let empty = File::new().u32("general.alignment", 1 << 31).bytes();
    assert!(Gguf::parse("a.gguf", &empty).is_ok());
    assert!(refused(&small().u32("general.alignment", 1 << 31)).contains("the file ends before it"));
}

#[test]
fn a_scalar_and_a_file_without_padding_at_its_end_are_read() {
    let mut bytes = File::new().tensor("s", &[], 0, 4).bytes();
    bytes.truncate(bytes.len() - 28);
    let gguf = Gguf::parse("a.gguf", &bytes).expect("valid");
    assert_eq!(gguf.tensor("s").map(|t| (t.shape().len(), t.range.len())), Some((0, 4)));
}

#[test]
fn no_shorter_file_is_read() {
    let mut bytes = small().bytes();
    // The padding of the last tensor may be missing, its bytes may not.
    bytes.truncate(bytes.len() - 28);
    assert!(Gguf::parse("a.gguf", &bytes).is_ok());
    for length in 0..bytes.len() {
        let text = refused_bytes(&bytes[..length]);
        assert!(text.contains("need: ") && text.contains("have: "), "{length}: {text}");
    }
}

#[test]
fn other_files_are_refused_by_name() {
    let with = |version: u32| File { version, ..small() };
    assert!(refused_bytes(b"PK\x03\x04 and so on").contains("`PK\\x03\\x04`"));
    assert!(refused(&with(1)).contains("version 1, whose lengths have 32 bits"));
    assert!(refused(&with(3u32.swap_bytes())).contains("version 3, big-endian"));
    assert!(refused(&with(4)).contains("version 4"));
}

#[test]
fn numbers_are_not_believed() {
    let huge = |value: &[u8]| refused(&File::new().entry("k", 8, value));
    assert!(huge(&(1u64 << 63).to_le_bytes()).contains("need: 9223372036854775808 bytes"));
    assert!(huge(&u64::MAX.to_le_bytes()).contains("metadata `k`: at byte"));
    assert!(refused(&File { counts: [None, Some(1 << 60)], ..small() }).contains("metadata entries"));
    assert!(refused(&File { counts: [Some(1 << 60), None], ..small() }).contains("number of tensors"));
    // As many as the whole file has room for, and not what is behind the metadata.
    let most = (small().bytes().len() - 16) as u64 / 25;
    assert!(refused(&File { counts: [Some(most), None], ..small() }).contains("number of tensors"));
    for kind in [0u32, 3, 6, 7, 8, 9, 12] {
        let value = [&kind.to_le_bytes()[..], &(1u64 << 61).to_le_bytes()].concat();
        let error = refused(&File::new().entry("k", 9, &value));
        assert!(error.contains("the length of an array"), "{error}");
    }
    assert!(refused(&File::new().entry("k", 13, &[0; 8])).contains("have: 13"));
    assert!(refused(&File::new().entry("k", 9, &[13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])).contains("have: 13"));
    assert!(refused(&File::new().entry("k", 7, &[2])).contains("0 or 1"));
    assert!(refused(&File::new().entry("k", 9, &array(7, &[vec![1], vec![3]]))).contains("0 or 1"));
    assert!(refused(&File::new().entry("k", 8, b"\x01\0\0\0\0\0\0\0\xff")).contains("UTF-8"));
    assert!(refused(&File::new().u32("", 1)).contains("a key"));
    assert!(refused(&File::new().u32(&"k".repeat(65536), 1)).contains("1 to 65535 bytes"));
}

#[test]
fn deep_arrays_are_refused() {
    let nested = |depth: usize| {
        let outer = array(9, &[Vec::new()]);
        File::new().entry("k", 9, &[outer.repeat(depth - 1), array(0, &[])].concat())
    };
    for depth in 1..=4 {
        assert!(Gguf::parse("a.gguf", &nested(depth).bytes()).is_ok());
    }
    for depth in [5, 1000, 100_000] {
        assert!(refused(&nested(depth)).contains("arrays in arrays"));
    }
}

#[test]
fn names_stand_there_once() {
    assert!(
        refused(&small().u32("qwen3.block_count", 2))
            .contains("metadata `qwen3.block_count` stands in the file twice")
    );
    let twice = small().tensor("output_norm.weight", &[32], 0, 128);
    assert!(refused(&twice).contains("tensor `output_norm.weight` stands in the file twice"));
}

#[test]
fn tensors_lie_side_by_side() {
    let at = |offset: u64| {
        let mut file = File::new().tensor("a", &[32], 0, 128).tensor("b", &[8], 0, 32);
        file.tensors[1].offset = Some(offset);
        refused(&file)
    };
    assert!(at(0).contains("`b`: overlaps") || at(0).contains("`a`: overlaps"));
    assert!(at(96).contains("tensor `b`: overlaps the one before it\n  need: byte 128"));
    assert!(at(100).contains("not aligned"));
    assert!(at(160).contains("the file ends before it\n  need: 192 bytes of data\n  have: 160 bytes"));
    assert!(at(1 << 40).contains("the file ends before it"));
    assert!(at(u64::MAX - 5).contains("the offset"));
    let mut hole = File::new().tensor("a", &[32], 0, 128).tensor("b", &[8], 0, 32);
    hole.tensors[1].offset = Some(160);
    hole.tail = 32;
    assert!(refused(&hole).contains("leaves a hole"));
    assert!(refused(&File { tail: 1, ..small() }).contains("bytes after the last tensor"));
    assert!(refused(&File { tail: 64, ..File::new() }).contains("bytes after the last tensor"));
}

#[test]
fn sizes_do_not_wrap() {
    let sized = |extents: &[u64], kind: u32| refused(&File::new().tensor("w", extents, kind, 64));
    assert!(sized(&[1 << 32, 1 << 32], 0).contains("its size overflows"));
    assert!(sized(&[1 << 62], 0).contains("its size overflows"));
    assert!(sized(&[u64::MAX, u64::MAX, u64::MAX, u64::MAX], 24).contains("its size overflows"));
    assert!(sized(&[256, u64::MAX / 256], 14).contains("the file ends before it"));
    assert!(sized(&[8, 0], 0).contains("has no element"));
    assert!(sized(&[0], 0).contains("has no element"));
    assert!(sized(&[1; 5], 0).contains("at most 4"));
    for number in [4, 9, 31, 42, u32::MAX] {
        let error = sized(&[32], number);
        assert!(error.contains("unsupported element type") && error.contains(&format!("have: {number}")));
    }
    let mut long = File::new().tensor(&"n".repeat(1025), &[8], 0, 32);
    assert!(refused(&long).contains("the name of a tensor"));
    long.tensors[0].name.clear();
    assert!(refused(&long).contains("the name of a tensor"));
}

#[test]
fn an_index_is_bounded_by_the_file() {
    let mut file = File::new();
    for i in 0..1000 {
        file.entries.push(entry(&format!("{i}"), 0, &[0]));
        file = file.tensor(&format!("{i}"), &[], 24, 1);
    }
    let bytes = file.bytes();
    let before = bytes.len() - 1000 * 32;
    let gguf = Gguf::parse("a.gguf", &bytes).expect("valid");
    assert!(gguf.index_bytes() <= 8 * before, "{} of {before}", gguf.index_bytes());
}
