//! Random damage of what a file says before its data: the model opens, binds every layer, or is refused;
//! nothing panics, and memory is bounded by the file.
#![allow(clippy::unwrap_used)]
mod handmade;

use handmade::{Model, golden};
use q4_heap::{COUNTED, Heap};
use q4_model::checkpoint::{Bytes, Checkpoint};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[global_allocator]
static HEAP: Heap = COUNTED;

/// Files that are damaged, unless `Q4_DAMAGE_RUNS` says how many.
const RUNS: usize = 4000;
/// Most bytes that opening one may take: so many, and for each byte of the file.
const ALLOWED: (usize, f64) = (1 << 20, 4.0);
/// Numbers that a damaged field may be.
const EXTREME: [u64; 8] = [0, 1, u64::MAX, 1 << 63, 1 << 60, 1 << 32, (1 << 31) - 1, 0xff];

/// A name, the bytes, and what stands beside it.
type File = (&'static str, Vec<u8>, Vec<(String, Vec<u8>)>);

#[test]
fn damaged_headers_are_refused_or_harmless() {
    let names = ["mxfp4", "nvfp4", "q4_0", "../k_quants"];
    let mut files: Vec<File> = names
        .map(|name| ("m.gguf", std::fs::read(golden("a", &format!("{name}.gguf"))).unwrap(), Vec::new()))
        .into();
    for variant in
        ["nvfp4_modelopt", "gptq_v2", "awq", "int4_asym_ct", "fp8_channel_ct", "nf4_bnb_dq", "mlx_affine"]
    {
        let mut m = Model::golden("a", variant);
        m.hf_quant = m.hf_quant.filter(|_| variant == "nvfp4_modelopt");
        files.push(("model.safetensors", m.safetensors(), m.side()));
    }
    let runs = std::env::var("Q4_DAMAGE_RUNS").map_or(RUNS, |n| n.parse().unwrap());
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let (mut read, mut refused, mut most) = (0usize, 0usize, 0f64);
    for run in 0..runs {
        let (name, whole, side) = &files[run % files.len()];
        let header = header(name, whole);
        let bytes = damaged(whole, header, run / files.len(), &mut random);
        let size = bytes.len().max(1) as f64;
        let mut all: Vec<_> = side.iter().map(|(name, b)| (name.clone(), Bytes::from(b.clone()))).collect();
        all.push(((*name).to_owned(), Bytes::from(bytes)));
        let start = q4_heap::begin();
        let opened = catch_unwind(AssertUnwindSafe(|| Checkpoint::from_files("m", all)?.bind_all()));
        let taken = q4_heap::peak() - start;
        let each = taken.saturating_sub(ALLOWED.0) as f64 / size;
        most = most.max(each);
        assert!(each <= ALLOWED.1, "run {run} of {name}: {taken} bytes for a file of {size}");
        match opened.unwrap_or_else(|_| panic!("run {run} of {name} panics")) {
            Ok(()) => read += 1,
            Err(e) => {
                refused += 1;
                assert!(e.code().exit() == 4 && e.to_string().len() < 8000, "run {run} of {name}: {e}");
            }
        }
    }
    println!(
        "{read} opened, {refused} refused, at most {most:.2} bytes taken for one of the file, and 1 MiB"
    );
    assert!(read > runs / 100 && refused > runs / 4, "{read} opened, {refused} refused");
}

/// Bytes before the data, about.
fn header(name: &str, whole: &[u8]) -> usize {
    match name.ends_with(".gguf") {
        true => {
            let last = b"token_embd.weight";
            whole.windows(last.len()).rposition(|w| w == last).unwrap() + last.len() + 32
        }
        false => 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize,
    }
}

fn damaged(whole: &[u8], header: usize, run: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    match run % 5 {
        0 | 1 => {
            for _ in 0..if run % 5 == 0 { 1 } else { 2 + random.below(6) } {
                bytes[random.below(header)] = random.next() as u8;
            }
        }
        // A digit or a letter for another one, so that JSON stays JSON.
        2 => {
            let at = (0..50).map(|_| random.below(header)).find(|at| bytes[*at].is_ascii_alphanumeric());
            bytes[at.unwrap_or(8)] = b"0123456789abcFIU"[random.below(16)];
        }
        3 => {
            let (at, width) = (random.below(header - 8), if random.below(2) == 0 { 4 } else { 8 });
            let number = EXTREME[random.below(EXTREME.len())].to_le_bytes();
            bytes[at..at + width].copy_from_slice(&number[..width]);
        }
        _ => {
            let (from, to, length) = (random.below(header), random.below(header), random.below(64));
            let length = length.min(header - from.max(to));
            bytes.copy_within(from..from + length, to);
            if random.below(4) == 0 {
                bytes.truncate(random.below(whole.len()));
            }
        }
    }
    bytes
}

/// Numbers that look random, the same ones always.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}
