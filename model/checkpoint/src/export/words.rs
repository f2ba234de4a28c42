//! Parts of int4 put into the words that tools pack them into: what [`crate::words`] takes apart.
use crate::words::{AWQ, transposed, zero_points};
use q4_core::formats::int4::ZERO;
use q4_core::formats::storage::Words;

/// Codes `[n, k / 2]`, the even element low, as words: `[k / 8, n]`, or `[k, n / 8]` of AWQ.
pub(super) fn codes(codes: &[u8], [n, k]: [usize; 2], words: Words) -> Vec<u8> {
    let mut to = vec![0; codes.len()];
    match words {
        Words::Awq => by_in_feature(codes, [n, k], &mut to),
        // Four bytes of a row are a word already.
        Words::Gptq | Words::GptqV2 => transposed(codes.as_chunks::<4>().0, [n, k / 8], &mut to),
    }
    to
}

/// Zero points `[n, groups]`, a byte each, as words `[groups, n / 8]`; of none those that codes have then.
pub(super) fn zeros(zeros: &[u8], [n, groups]: [usize; 2], words: Words) -> Vec<u8> {
    let (order, less) = zero_points(words);
    let zero =
        |row: usize, group: usize| zeros.get(row * groups + group).unwrap_or(&ZERO).wrapping_sub(less) & 15;
    let word = |i: usize| {
        let (group, first) = (i / (n / 8), i % (n / 8) * 8);
        let nibbles = order.iter().enumerate();
        nibbles.fold(0u32, |word, (at, row)| word | u32::from(zero(first + row, group)) << (4 * at))
    };
    (0..groups * (n / 8)).flat_map(|i| word(i).to_le_bytes()).collect()
}

/// Zero points `[n, groups]` as compressed-tensors packs them: words `[n / 8, groups]`.
pub(super) fn zeros_by_row(zeros: &[u8], n: usize) -> Vec<u8> {
    let groups = zeros.len() / n.max(1);
    let mut words = vec![0u32; n.div_ceil(8) * groups];
    for (i, zero) in zeros.iter().enumerate() {
        let (row, group) = (i / groups, i % groups);
        words[row / 8 * groups + group] |= u32::from(*zero & 15) << (4 * (row % 8));
    }
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Elements of `size` bytes, `rows` of them one below the other, with rows as columns.
pub(super) fn columns(bytes: &[u8], size: usize, rows: usize) -> Vec<u8> {
    let mut to = vec![0; bytes.len()];
    let shape = [rows, bytes.len() / size / rows.max(1)];
    match size {
        1 => transposed(bytes.as_chunks::<1>().0, shape, &mut to),
        2 => transposed(bytes.as_chunks::<2>().0, shape, &mut to),
        _ => transposed(bytes.as_chunks::<4>().0, shape, &mut to),
    }
    to
}

/// The group of each of `k` in features.
pub(super) fn groups(k: usize, size: u32) -> Vec<u8> {
    (0..k as u32).flat_map(|i| (i / size.max(1)).to_le_bytes()).collect()
}

fn by_in_feature(codes: &[u8], [n, k]: [usize; 2], to: &mut [u8]) {
    let (half, line) = (k / 2, n / 8);
    for (pair, words) in to.as_chunks_mut::<4>().0.chunks_exact_mut(2 * line).enumerate() {
        let (even, odd) = words.split_at_mut(line);
        for (w, (even, odd)) in even.iter_mut().zip(odd).enumerate() {
            let (mut low, mut high) = (0u32, 0u32);
            for (at, row) in AWQ.into_iter().enumerate() {
                let byte = codes[(8 * w + row) * half + pair];
                low |= u32::from(byte & 15) << (4 * at);
                high |= u32::from(byte >> 4) << (4 * at);
            }
            (*even, *odd) = (low.to_le_bytes(), high.to_le_bytes());
        }
    }
}
