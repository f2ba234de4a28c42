//! How files store blocks: a tensor for a matrix, named by their type behind the name of the weight.
use super::{Blocks, encoding};
use crate::DType;
use crate::formats::storage::{Detected, LayerKeys, Layout, Probe, Rule};

pub(super) static RULES: [Rule; 1] =
    [Rule { layout: Layout::Gguf, is_there: |p| blocks(p).is_some(), read: |p, _| Ok(read(p)) }];

/// [`Blocks::tensor`] of `weight`.
const fn suffix(blocks: Blocks) -> &'static str {
    match blocks {
        Blocks::Q4K => "weight.q4_k",
        Blocks::Q5K => "weight.q5_k",
        Blocks::Q6K => "weight.q6_k",
        Blocks::Q80 => "weight.q8_0",
    }
}

fn blocks(p: &Probe<'_>) -> Option<Blocks> {
    Blocks::ALL.into_iter().find(|blocks| p.has(suffix(*blocks)))
}

fn read(p: &mut Probe<'_>) -> Option<Detected> {
    let blocks = blocks(p)?;
    let [n, bytes] = p.matrix(suffix(blocks), &[DType::U8])?;
    if !bytes.is_multiple_of(blocks.bytes()) {
        p.problem(suffix(blocks), &format!("blocks of {} bytes", blocks.bytes()), &format!("[{n}, {bytes}]"));
        return None;
    }
    let k = bytes / blocks.bytes() * blocks.elements();
    let keys = LayerKeys { weight: p.key(suffix(blocks))?, ..LayerKeys::default() };
    Some(Detected { layout: Layout::Gguf, schema: encoding(blocks), n, k, keys, nested_offset: 0.0 })
}
