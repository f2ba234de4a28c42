//! Random damage: a file is read or refused, nothing else happens, and memory is bounded by the file.
mod support;

use q4_gguf::{Gguf, config, generation_config, tokenizer, tokenizer_config, weights};
use q4_heap::{COUNTED, Heap};
use support::{Random, small};

/// Files that are damaged, unless `Q4_DAMAGE_RUNS` says how many.
const RUNS: usize = 100_000;
/// Most bytes that reading one may take for each byte of it: entries of the index, and texts of the tokenizer
/// as JSON of several kinds.
const FACTOR: usize = 16;

#[global_allocator]
static HEAP: Heap = COUNTED;

/// Numbers that a damaged field may be.
const EXTREME: [u64; 8] = [0, 1, u64::MAX, 1 << 63, 1 << 60, 1 << 32, (1 << 31) - 1, 0xff];

#[test]
fn damage_is_refused_or_harmless() {
    let whole =
        small().text("tokenizer.chat_template", "{{ messages }}").flag("tokenizer.ggml.add_bos_token", false);
    let whole = whole.bytes();
    let header = whole.len() - (384 + 128 + 1152 + 32);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut read, mut refused, mut most) = (0usize, 0usize, 0f64);
    let runs = std::env::var("Q4_DAMAGE_RUNS").map_or(RUNS, |n| n.parse().expect("a number"));
    for run in 0..runs {
        let mut bytes = whole.clone();
        match run % 4 {
            // One byte, and several.
            0 | 1 => {
                for _ in 0..if run % 4 == 0 { 1 } else { 2 + random.below(6) } {
                    bytes[random.below(header)] = random.next() as u8;
                }
            }
            // A number in the place of whatever was there.
            2 => {
                let (at, width) = (random.below(header - 8), if random.below(2) == 0 { 4 } else { 8 });
                let number = EXTREME[random.below(EXTREME.len())].to_le_bytes();
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            // A piece of the file over another one, or less of it.
            _ => {
                let (from, to, length) = (random.below(header), random.below(header), random.below(64));
                let length = length.min(header - from.max(to));
                bytes.copy_within(from..from + length, to);
                if random.below(4) == 0 {
                    bytes.truncate(random.below(whole.len()));
                }
            }
        }
        let start = q4_heap::begin();
        match Gguf::parse("a.gguf", &bytes) {
            Err(error) => {
                refused += 1;
                assert!(error.to_string().len() < 1000);
            }
            Ok(gguf) => {
                read += 1;
                assert!(gguf.index_bytes() <= 8 * bytes.len());
                assert!(gguf.tensors().iter().all(|t| t.range.end <= bytes.len() && !t.range.is_empty()));
                for made in
                    [config(&gguf), tokenizer(&gguf), tokenizer_config(&gguf), generation_config(&gguf)]
                {
                    match made {
                        Ok(value) => assert!(value.to_string().len() < 16 * bytes.len()),
                        Err(error) => assert!(error.to_string().len() < 8000),
                    }
                }
                let _ = weights(&gguf);
            }
        }
        let taken = (q4_heap::peak() - start) as f64 / whole.len() as f64;
        most = most.max(taken);
    }
    println!("{read} read, {refused} refused, at most {most:.1} bytes taken for one of the file");
    assert!(most <= FACTOR as f64, "{most}");
    // Both happen: texts may be anything, and lengths may not.
    assert!(read > runs / 20 && refused > runs / 20, "{read} read, {refused} refused");
}
