//! What the file says of its tensors, and whether their bytes are there: each once, none between them.
use crate::cursor::{Cursor, brief};
use crate::ggml::GgmlType;
use q4_core::{Code, Error, Result};
use std::ops::Range;

/// Longest name, in bytes.
const NAME_LIMIT: usize = 1024;
/// Most extents, as the format has them.
const RANK_LIMIT: u32 = 4;

/// A tensor: its bytes are there, in whole blocks.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<'a> {
    /// Its name, as in `blk.0.attn_q.weight`.
    pub name: &'a str,
    /// Its element type.
    pub kind: GgmlType,
    /// Its bytes in the file.
    pub range: Range<usize>,
    extents: [usize; RANK_LIMIT as usize],
    rank: usize,
}

impl<'a> Tensor<'a> {
    /// The least that the description of one takes in a file: a name of one byte and no extent.
    pub(crate) const LEAST: usize = 8 + 1 + 4 + 4 + 8;

    /// Extents, outermost first: `[n, k]` of a linear layer with `k` inputs. In the file they stand the other
    /// way round. Without one it is a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.extents[..self.rank]
    }

    /// The description behind the cursor. Its `range` is still one of the data.
    pub(crate) fn read(file: &mut Cursor<'a>) -> Result<Self> {
        let name = file.name(NAME_LIMIT, "the name of a tensor")?;
        described(file, name).map_err(|e| e.within(named(name)))
    }
}

fn described<'a>(file: &mut Cursor<'a>, name: &'a str) -> Result<Tensor<'a>> {
    let rank = file.u32("the number of extents")?;
    if rank > RANK_LIMIT {
        return Err(file
            .damaged("the number of extents")
            .need(format!("at most {RANK_LIMIT}"))
            .have(rank.to_string()));
    }
    let (mut extents, rank) = ([0; RANK_LIMIT as usize], rank as usize);
    for extent in extents[..rank].iter_mut().rev() {
        let stated = file.u64("an extent")?;
        *extent = usize::try_from(stated).map_err(|_| overflows(file, &[stated]))?;
    }
    let shape = &extents[..rank];
    let number = file.u32("the element type")?;
    let kind = GgmlType::of(number).ok_or_else(|| {
        let known = GgmlType::ALL.iter().map(|t| t.number().to_string()).collect::<Vec<_>>().join(", ");
        file.damaged("unsupported element type").need(known).have(number.to_string())
    })?;
    let inner = shape.last().copied().unwrap_or(1);
    if inner % kind.block_elements() != 0 {
        return Err(file
            .damaged("the innermost extent")
            .need(format!("a multiple of {}, the block of {kind}", kind.block_elements()))
            .have(inner.to_string()));
    }
    let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    let length = match elements.map(|n| (n / kind.block_elements()).checked_mul(kind.block_bytes())) {
        Some(Some(0)) => {
            return Err(file.damaged("has no element").need("extents above zero").have(format!("{shape:?}")));
        }
        Some(Some(length)) => length,
        _ => return Err(overflows(file, shape)),
    };
    let offset = file.u64("the offset")?;
    let start = usize::try_from(offset).ok();
    match start.and_then(|start| Some(start..start.checked_add(length)?)) {
        Some(range) => Ok(Tensor { name, kind, range, extents, rank }),
        None => {
            Err(file.damaged("the offset").need(format!("{length} bytes behind it")).have(offset.to_string()))
        }
    }
}

/// Makes ranges of the data ranges of the file: from `start` on, every tensor begins where the one before it
/// ends, rounded up to `alignment`, and the last ends where the file does. Tensors are in the order of names.
pub(crate) fn place(tensors: &mut [Tensor<'_>], file: usize, start: usize, alignment: usize) -> Result<()> {
    let data = file.saturating_sub(start);
    for Tensor { name, range, .. } in tensors.iter() {
        if range.end > data {
            return Err(Error::new(Code::Container, format!("{}: the file ends before it", named(name)))
                .need(format!("{} bytes of data", range.end))
                .have(format!("{data} bytes"))
                .fix("copy or download the file again"));
        }
    }
    // Descriptions of 25 bytes: a file with more of them than a u32 counts has 100 GB of names.
    let mut order: Vec<u32> = (0..tensors.len() as u32).collect();
    order.sort_unstable_by_key(|&i| tensors[i as usize].range.start);
    let (mut at, mut before) = (0usize, None);
    for i in order {
        let Tensor { name, range, .. } = &mut tensors[i as usize];
        if range.start != at {
            let before = before.map_or("the head of the file".to_owned(), named);
            let fault = match range.start {
                s if s % alignment != 0 => "its offset is not aligned",
                s if s < at => "overlaps the one before it",
                _ => "leaves a hole before it",
            };
            return Err(Error::new(Code::Container, format!("{}: {fault}", named(name)))
                .need(format!("byte {at} of the data, behind {before}, with an alignment of {alignment}"))
                .have(range.start.to_string()));
        }
        at = range.end.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
        *range = start + range.start..start + range.end;
        before = Some(*name);
    }
    if data > at {
        return Err(Error::new(Code::Container, "bytes after the last tensor")
            .need(format!("{at} bytes of data, as the tensors take"))
            .have(format!("{data} bytes")));
    }
    Ok(())
}

fn overflows(file: &Cursor<'_>, extents: &[impl std::fmt::Debug]) -> Error {
    file.damaged("its size overflows").need("a size in bytes of 64 bits").have(format!("{extents:?}"))
}

fn named(name: &str) -> String {
    format!("tensor `{}`", brief(name))
}
