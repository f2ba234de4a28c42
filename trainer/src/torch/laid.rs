//! How a batch lies in memory: documents of about one length side by side, each a sequence of its own. So
//! attention is computed within documents alone, by kernels that know no masks, and what pads a row is not
//! computed at all.
use super::Tch;
use super::executor::Group;
use super::loss::{IGNORE, Target};
use q4_core::Result;
use std::borrow::Cow;
use std::collections::BTreeMap;
use tch::Tensor;

/// One micro-batch, as [`crate::data::Batch`] has it.
pub struct Rows<'a> {
    /// Sequences.
    pub rows: usize,
    /// Tokens of each.
    pub seq: usize,
    /// `[rows * seq]`.
    pub ids: &'a [u32],
    /// Positions to rotate by.
    pub positions: &'a [i64],
    /// Documents that must not see each other; `None`: a row is one.
    pub documents: Option<&'a [i32]>,
    /// What is predicted.
    pub target: Target<'a>,
}

/// Lengths are rounded up to multiples of one of these: groups cost calls, rounding costs tokens.
const UNITS: [usize; 5] = [16, 8, 4, 2, 1];

/// Tokens in the order in which they are computed.
pub struct Laid<'a> {
    /// Sequences.
    pub groups: Vec<Group>,
    /// As of [`Rows`].
    pub ids: Cow<'a, [u32]>,
    /// As of [`Rows`].
    pub positions: Cow<'a, [i64]>,
    /// As of [`Rows`].
    pub target: LaidTarget<'a>,
}

/// As [`Target`].
pub enum LaidTarget<'a> {
    /// As [`Target::Tokens`].
    Tokens(Cow<'a, [i64]>),
    /// As [`Target::Hidden`].
    Hidden(Tensor),
}

/// A run of tokens.
#[derive(Clone, Copy)]
struct Document {
    at: usize,
    len: usize,
}

impl<'a> Laid<'a> {
    /// Of `rows`, never more tokens than those have.
    pub fn of(rows: &Rows<'a>) -> Result<Self> {
        let whole = [Group { count: rows.rows, len: rows.seq }];
        let Some(numbers) = rows.documents else {
            return Ok(Self {
                groups: whole.into(),
                ids: rows.ids.into(),
                positions: rows.positions.into(),
                target: match rows.target {
                    Target::Tokens(targets) => LaidTarget::Tokens(targets.into()),
                    Target::Hidden(wanted) => LaidTarget::Hidden(wanted.shallow_clone()),
                },
            });
        };
        // Where every position has a wanted value, padding has one too.
        let all = matches!(rows.target, Target::Hidden(_));
        let documents = documents(numbers, rows.seq, all);
        let rounded = |unit: usize| documents.iter().map(|d| d.len.next_multiple_of(unit)).sum::<usize>();
        let fits = |unit: &usize| if all { *unit == 1 } else { rounded(*unit) <= rows.ids.len() };
        let unit = UNITS.into_iter().find(fits).unwrap_or(1);
        let mut by_length: BTreeMap<usize, Vec<Document>> = BTreeMap::new();
        for d in documents {
            by_length.entry(d.len.next_multiple_of(unit)).or_default().push(d);
        }
        let groups = by_length.iter().map(|(len, of)| Group { count: of.len(), len: *len }).collect();
        // Behind a document its last token stands again, which nobody sees.
        let order: Vec<(usize, bool)> = by_length
            .iter()
            .flat_map(|(len, of)| of.iter().map(move |d| (d, *len)))
            .flat_map(|(d, len)| (0..len).map(move |i| (d.at + i.min(d.len - 1), i < d.len)))
            .collect();
        let target = match rows.target {
            Target::Tokens(targets) => {
                let of = |(at, own): &(usize, bool)| if *own { targets[*at] } else { IGNORE };
                LaidTarget::Tokens(order.iter().map(of).collect())
            }
            Target::Hidden(wanted) => {
                let index: Vec<i64> = order.iter().map(|(at, _)| *at as i64).collect();
                let index = Tensor::f_from_slice(&index).t()?.f_to_device(wanted.device()).t()?;
                LaidTarget::Hidden(wanted.f_index_select(0, &index).t()?)
            }
        };
        Ok(Self {
            groups,
            ids: order.iter().map(|(at, _)| rows.ids[*at]).collect(),
            positions: order.iter().map(|(at, _)| rows.positions[*at]).collect(),
            target,
        })
    }
}

/// Runs of one number, those of padding (-1) only where `all` are wanted.
fn documents(numbers: &[i32], seq: usize, all: bool) -> Vec<Document> {
    let mut found = Vec::new();
    for (r, row) in numbers.chunks(seq.max(1)).enumerate() {
        let mut at = r * seq;
        for run in row.chunk_by(|a, b| a == b) {
            if all || run[0] >= 0 {
                found.push(Document { at, len: run.len() });
            }
            at += run.len();
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_lie_by_length_and_padding_nowhere() -> Result<()> {
        // Two rows of nine: 4 + 4 + padding, and 1 + 5 + 3.
        let documents = [0, 0, 0, 0, 1, 1, 1, 1, -1, 0, 1, 1, 1, 1, 1, 2, 2, 2];
        let ids: Vec<u32> = (0..18).collect();
        let positions = [0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 4, 0, 1, 2];
        let targets: Vec<i64> = (100..118).collect();
        let rows = Rows {
            rows: 2,
            seq: 9,
            ids: &ids,
            positions: &positions,
            documents: Some(&documents),
            target: Target::Tokens(&targets),
        };
        let laid = Laid::of(&rows)?;
        // 18 positions have room for multiples of two alone: 2 + 4 + 4 + 4 + 6 are too many.
        let lens: Vec<_> = laid.groups.iter().map(|g| (g.count, g.len)).collect();
        assert_eq!(lens, [(1, 1), (1, 3), (2, 4), (1, 5)]);
        assert_eq!(*laid.ids, [9, 15, 16, 17, 0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14]);
        let LaidTarget::Tokens(laid_targets) = &laid.target else { panic!("tokens") };
        assert_eq!(
            laid_targets.iter().sum::<i64>(),
            targets.iter().sum::<i64>() - 108,
            "all but the padding's"
        );
        // With room, lengths are rounded, and what fills them is not learnt.
        let roomy: Vec<i32> = documents.iter().copied().chain([-1; 90]).collect();
        let (ids, targets) = (vec![7; 108], vec![1; 108]);
        let positions = vec![0; 108];
        let laid = Laid::of(&Rows {
            rows: 12,
            ids: &ids,
            positions: &positions,
            documents: Some(&roomy),
            target: Target::Tokens(&targets),
            ..rows
        })?;
        assert_eq!(laid.groups, [Group { count: 5, len: 16 }]);
        let LaidTarget::Tokens(targets) = &laid.target else { panic!("tokens") };
        assert_eq!(targets.iter().filter(|t| **t != IGNORE).count(), 17);
        Ok(())
    }
}
