//! Stored values that no decoder may meet: scans over whole tensors, fast enough to run at every load.
//!
//! A tensor is first reduced to "anything wrong here?" in loops the compiler vectorises; only a hit is
//! located.
use super::store::{Stored, TensorStore};
use q4_core::{
    Code, DType, Error, Q4Schema, Result, ScaleLayout, ThreadPool,
    detect::Detected,
    formats::{e4m3, nf4, nvfp4, swizzle},
};
use std::sync::atomic::{AtomicBool, Ordering};

/// Elements reduced before the result is looked at.
const CHUNK: usize = 1 << 14;

/// Something wrong with the values of a tensor.
#[derive(Clone, Debug)]
pub struct Problem {
    /// What kind.
    pub code: Code,
    /// Where.
    pub tensor: String,
    /// What a decoder takes.
    pub need: &'static str,
    /// What is there.
    pub have: String,
}

impl From<Problem> for Error {
    fn from(p: Problem) -> Self {
        Error::new(p.code, format!("`{}`", p.tensor)).need(p.need).have(p.have)
    }
}

/// Threads that share a scan, or nothing: this one alone.
pub type Helpers<'a> = Option<&'a ThreadPool>;

/// NaN and infinity in an f16, bf16 or f32 tensor.
pub(super) fn non_finite(name: &str, stored: &Stored<'_>, helpers: Helpers<'_>) -> Option<Problem> {
    let found = match stored.dtype {
        DType::F16 => scan::<2>(stored.bytes, helpers, |b| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
        DType::BF16 => scan::<2>(stored.bytes, helpers, |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
        _ => scan::<4>(stored.bytes, helpers, |b| u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000),
    };
    found.map(|f| Problem {
        code: Code::ValueInvalid,
        tensor: name.to_owned(),
        need: "finite values",
        have: f.tell("NaN or infinity", &index_of(f.first, stored.shape)),
    })
}

/// Everything wrong with the values of a layer whose parts fit together, a problem for each tensor at most.
pub fn problems(store: &TensorStore, layer: &Detected, helpers: Helpers<'_>) -> Result<Vec<Problem>> {
    let keys = &layer.keys;
    let mut problems = Vec::new();
    match layer.schema {
        Q4Schema::Nvfp4 { scale_layout, .. } => {
            if let Some(name) = &keys.scales {
                problems.extend(block_scales(name, store.tensor(name)?.bytes, layer, scale_layout, helpers)?);
            }
        }
        Q4Schema::Nf4 { nested, .. } => {
            if let Some(name) = &keys.quant_map {
                problems.extend(codebook(name, &store.tensor(name)?));
            }
            if let (None, Some(name)) = (nested, &keys.absmax) {
                problems.extend(absmax(name, &store.tensor(name)?, helpers));
            }
            let before = problems.len();
            for name in [&keys.nested_map, &keys.nested_absmax].into_iter().flatten() {
                problems.extend(non_finite(name, &store.tensor(name)?, helpers));
            }
            if let (true, Some(map), Some(scales)) =
                (before == problems.len(), &keys.nested_map, &keys.nested_absmax)
            {
                let [map, scales] = [store.tensor(map)?, store.tensor(scales)?].map(|s| largest(&s));
                let most = map * scales + layer.nested_offset.abs();
                if !most.is_finite() {
                    problems.push(Problem {
                        code: Code::ScaleInvalid,
                        tensor: keys.nested_absmax.clone().unwrap_or_default(),
                        need: "products with nested_quant_map within f32",
                        have: most.to_string(),
                    });
                }
            }
        }
        _ => problems.extend(non_finite(&keys.weight, &store.tensor(&keys.weight)?, helpers)),
    }
    Ok(problems)
}

/// Block scales must be finite and not negative: as bytes, below 0x7f. Padding of a swizzled buffer is not
/// read by anyone.
fn block_scales(
    name: &str,
    bytes: &[u8],
    layer: &Detected,
    order: ScaleLayout,
    helpers: Helpers<'_>,
) -> Result<Option<Problem>> {
    let bad = |b: [u8; 1]| b[0] >= 0x7f;
    let Some(mut found) = scan::<1>(bytes, helpers, bad) else { return Ok(None) };
    let blocks = layer.k / nvfp4::BLOCK;
    let linear;
    let mut scales = bytes;
    if order == ScaleLayout::Swizzled128x4 {
        linear = swizzle::from_blocked(bytes, layer.n, blocks)?;
        scales = &linear;
        match scan::<1>(scales, helpers, bad) {
            Some(real) => found = real,
            None => return Ok(None),
        }
    }
    let byte = scales[found.first];
    let value = if e4m3::is_nan(byte) { "NaN".to_owned() } else { e4m3::decode(byte).to_string() };
    let place = format!("row {}, block {}", found.first / blocks, found.first % blocks);
    Ok(Some(Problem {
        code: Code::ScaleInvalid,
        tensor: name.to_owned(),
        need: "block scales that are finite and not negative",
        have: found.tell(&format!("{byte:#04x} ({value})"), &place),
    }))
}

fn absmax(name: &str, stored: &Stored<'_>, helpers: Helpers<'_>) -> Option<Problem> {
    let found = scan::<4>(stored.bytes, helpers, |b| {
        let bits = u32::from_le_bytes(b);
        bits >= 0x7f80_0000 && bits != 0x8000_0000
    })?;
    let value = f32::from_le_bytes(*stored.bytes[4 * found.first..].first_chunk()?);
    Some(Problem {
        code: Code::ScaleInvalid,
        tensor: name.to_owned(),
        need: "absmax that is finite and not negative",
        have: found.tell(&value.to_string(), &format!("block {}", found.first)),
    })
}

/// The 16 values must be those of NF4, bit for bit: another codebook under that name is another format.
fn codebook(name: &str, stored: &Stored<'_>) -> Option<Problem> {
    let values = stored.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
    let (code, value) = (0u8..)
        .zip(values)
        .find(|(code, value)| *code > 15 || nf4::decode(*code).to_bits() != value.to_bits())?;
    Some(Problem {
        code: Code::ValueInvalid,
        tensor: name.to_owned(),
        need: "the 16 values of NF4",
        have: format!("{value} for code {code}"),
    })
}

fn largest(stored: &Stored<'_>) -> f32 {
    let values = stored.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
    values.fold(0.0, |most, v| most.max(v.abs()))
}

/// Where the first hit is and how many there are.
struct Found {
    first: usize,
    count: usize,
}

impl Found {
    fn tell(&self, what: &str, place: &str) -> String {
        let more = if self.count == 1 { String::new() } else { format!(", the first of {}", self.count) };
        format!("{what} at {place}{more}")
    }
}

fn scan<const W: usize>(
    bytes: &[u8],
    helpers: Helpers<'_>,
    bad: impl Fn([u8; W]) -> bool + Sync,
) -> Option<Found> {
    let items = bytes.as_chunks::<W>().0;
    let any = |items: &[[u8; W]]| items.iter().fold(false, |any, item| any | bad(*item));
    if let Some(threads) = helpers.filter(|_| items.len() > CHUNK) {
        let hit = AtomicBool::new(false);
        threads.run(items.len().div_ceil(CHUNK), &|c| {
            if any(&items[c * CHUNK..((c + 1) * CHUNK).min(items.len())]) {
                hit.store(true, Ordering::Relaxed);
            }
        });
        if !hit.into_inner() {
            return None;
        }
    }
    let mut found: Option<Found> = None;
    for (c, chunk) in items.chunks(CHUNK).enumerate() {
        if !any(chunk) {
            continue;
        }
        for (i, _) in chunk.iter().enumerate().filter(|(_, item)| bad(**item)) {
            found.get_or_insert(Found { first: c * CHUNK + i, count: 0 }).count += 1;
        }
    }
    found
}

fn index_of(mut flat: usize, shape: &[usize]) -> String {
    let mut index = Vec::new();
    for extent in shape.iter().rev() {
        index.push(flat % extent);
        flat /= extent;
    }
    index.reverse();
    format!("index {index:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hit_is_located_across_chunks() {
        let mut bytes = vec![0u8; 2 * (CHUNK + 10)];
        let pool = ThreadPool::new(2);
        assert!(scan::<2>(&bytes, Some(&pool), |b| b == [0, 0x7c]).is_none());
        for i in [CHUNK + 3, CHUNK + 7] {
            bytes[2 * i + 1] = 0x7c;
        }
        let stored = Stored { bytes: &bytes, dtype: DType::F16, shape: &[2, CHUNK / 2 + 5] };
        let alone = non_finite("w", &stored, None).expect("two infinities");
        let problem = non_finite("w", &stored, Some(&pool)).expect("the same");
        assert_eq!(alone.have, problem.have);
        assert_eq!(problem.have, format!("NaN or infinity at index [1, {}], the first of 2", CHUNK / 2 - 2));
        assert!(non_finite("w", &Stored { dtype: DType::BF16, ..stored }, Some(&pool)).is_none());
    }

    #[test]
    fn absmax_may_be_zero_of_either_sign_only() {
        let check = |v: f32| {
            absmax("a", &Stored { bytes: &v.to_le_bytes(), dtype: DType::F32, shape: &[1] }, None).is_some()
        };
        for good in [0.0, -0.0, 1.0, f32::MAX, f32::MIN_POSITIVE / 2.0] {
            assert!(!check(good), "{good}");
        }
        for bad in [-1.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::MIN_POSITIVE] {
            assert!(check(bad), "{bad}");
        }
    }
}
