//! Stored values that no decoder may meet: scans over whole tensors, fast enough to run at every load.
//!
//! A tensor is first reduced to "anything wrong here?" in loops the compiler vectorises; only a hit is
//! located.
use super::stored::Stored;
use q4_core::formats::{Codebook, Test, ValueRule};
use q4_core::{Code, DType, Error, Result, ThreadPool, detect::Detected};
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
///
/// # Errors
/// Those of `tensor`.
pub fn problems<'a>(
    tensor: impl Fn(&str) -> Result<Stored<'a>>,
    layer: &Detected,
    helpers: Helpers<'_>,
) -> Result<Vec<Problem>> {
    let keys = &layer.keys;
    let mut problems = Vec::new();
    if let (Some(book), Some(name)) = (layer.schema.codebook(), &keys.quant_map) {
        problems.extend(codebook(name, &tensor(name)?, book));
    }
    let before = problems.len();
    for rule in layer.schema.values() {
        let Some(name) = keys.of(rule.part) else { continue };
        let stored = tensor(name)?;
        problems.extend(match rule.test {
            Test::Byte { .. } => bad_bytes(name, &stored, layer, &rule, helpers)?,
            Test::Float32 { is_bad } => bad_floats(name, &stored, &rule, is_bad, helpers),
            Test::Code { is_bad } => bad_codes(name, &stored, layer, &rule, is_bad, helpers),
            Test::Finite => non_finite(name, &stored, helpers),
            Test::Blocks { bytes, floats } => bad_blocks(name, &stored, layer, &rule, (bytes, floats)),
        });
    }
    if let (true, Some(map), Some(scales)) = (before == problems.len(), &keys.nested_map, &keys.nested_absmax)
    {
        let [map, scales] = [tensor(map)?, tensor(scales)?].map(|s| largest(&s));
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
    Ok(problems)
}

/// One of the scales of a block along k. What pads them in another order is not read by anyone.
fn bad_bytes(
    name: &str,
    stored: &Stored<'_>,
    layer: &Detected,
    rule: &ValueRule,
    helpers: Helpers<'_>,
) -> Result<Option<Problem>> {
    let Test::Byte { is_bad, in_words } = rule.test else { return Ok(None) };
    let bad = |b: [u8; 1]| is_bad(b[0]);
    if scan::<1>(stored.bytes, helpers, bad).is_none() {
        return Ok(None);
    }
    let scales = layer.schema.in_rows(rule.part, stored.bytes, [layer.n, layer.k])?;
    let Some(found) = scan::<1>(&scales, helpers, bad) else { return Ok(None) };
    let (byte, blocks) = (scales[found.first], layer.k / layer.schema.block());
    let place = format!("row {}, block {}", found.first / blocks, found.first % blocks);
    Ok(Some(Problem {
        code: Code::ScaleInvalid,
        tensor: name.to_owned(),
        need: rule.need,
        have: found.tell(&format!("{byte:#04x} ({})", in_words(byte)), &place),
    }))
}

fn bad_codes(
    name: &str,
    stored: &Stored<'_>,
    layer: &Detected,
    rule: &ValueRule,
    is_bad: fn(u8) -> bool,
    helpers: Helpers<'_>,
) -> Option<Problem> {
    let found = scan::<1>(stored.bytes, helpers, |b| is_bad(b[0]))?;
    let place = format!("row {}, column {}", found.first / layer.k, found.first % layer.k);
    Some(Problem {
        code: Code::ValueInvalid,
        tensor: name.to_owned(),
        need: rule.need,
        have: found.tell(&format!("{:#04x}", stored.bytes[found.first]), &place),
    })
}

fn bad_floats(
    name: &str,
    stored: &Stored<'_>,
    rule: &ValueRule,
    is_bad: fn(u32) -> bool,
    helpers: Helpers<'_>,
) -> Option<Problem> {
    let found = scan::<4>(stored.bytes, helpers, |b| is_bad(u32::from_le_bytes(b)))?;
    let value = f32::from_le_bytes(*stored.bytes[4 * found.first..].first_chunk()?);
    Some(Problem {
        code: Code::ScaleInvalid,
        tensor: name.to_owned(),
        need: rule.need,
        have: found.tell(&value.to_string(), &format!("block {}", found.first)),
    })
}

/// An f16 of a block of `bytes` that is NaN or infinite.
fn bad_blocks(
    name: &str,
    stored: &Stored<'_>,
    layer: &Detected,
    rule: &ValueRule,
    (bytes, floats): (usize, &[usize]),
) -> Option<Problem> {
    let exponent = |block: &[u8], at: usize| block[at + 1] & 0x7c == 0x7c;
    let is_bad = |block: &[u8]| floats.iter().any(|at| exponent(block, *at));
    let mut bad = stored.bytes.chunks_exact(bytes).enumerate().filter(|(_, block)| is_bad(block));
    let (first, _) = bad.next()?;
    let found = Found { first, count: 1 + bad.count() };
    let blocks = (stored.bytes.len() / bytes / layer.n.max(1)).max(1);
    let place = format!("row {}, block {}", first / blocks, first % blocks);
    Some(Problem {
        code: Code::ScaleInvalid,
        tensor: name.to_owned(),
        need: rule.need,
        have: found.tell("NaN or infinity", &place),
    })
}

/// The values must be those of the format, bit for bit: another codebook under that name is another format.
fn codebook(name: &str, stored: &Stored<'_>, book: &Codebook) -> Option<Problem> {
    let values = stored.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
    let (code, value) = values
        .enumerate()
        .find(|(code, value)| book.values.get(*code).map(|v| v.to_bits()) != Some(value.to_bits()))?;
    Some(Problem {
        code: Code::ValueInvalid,
        tensor: name.to_owned(),
        need: book.need,
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
}
