//! Mutants that multiply rightly and take another weight of a group than the row's.
use super::Mutant;
use super::parts::{FUSING, NOBODY, Parts};
use crate::Level::{L2, L4};
use q4_core::rows;

/// The weight of a row.
fn right(r: usize, at: &[i32]) -> usize {
    (FUSING.expert)(r, at)
}

pub(super) const MUTANTS: &[Mutant] = mutants! {
    FUSING;
    L2 "grouped-by-the-next": "rows are multiplied by the weight behind their own" {
        expert: |r, at| (right(r, at) + 1) % (at.len() - 1),
    }
    L2 "grouped-all-by-the-first": "every row is multiplied by the first weight" { expert: |_, _| 0 }
    L2 "grouped-one-row-late": "the first row of a weight is multiplied by the one before" {
        expert: |r, at| at.partition_point(|from| (*from as usize) < r).max(1) - 1,
    }
    L2 "grouped-one-row-early": "the last row of a weight is multiplied by the one behind" {
        expert: |r, at| right((r + 1).min(at[at.len() - 1] as usize - 1), at),
    }
    L2 "grouped-without-empty-ones": "weights without rows are not counted" {
        expert: |r, at| at.windows(2).take_while(|rows| rows[1] as usize <= r).filter(|rows| rows[0] < rows[1]).count(),
    }
    L2 "grouped-evenly": "every weight gets as many rows" {
        expert: |r, at| r * (at.len() - 1) / at[at.len() - 1] as usize,
    }
    L2 "grouped-in-turns": "rows are dealt in turns" { expert: |r, at| r % (at.len() - 1) }
    L2 "grouped-without-the-last": "rows of the last weight are not written" {
        expert: |r, at| Some(right(r, at)).filter(|e| *e + 2 < at.len()).unwrap_or(NOBODY),
    }
    L2 "grouped-sixteen-rows": "a weight has sixteen rows at most" {
        expert: |r, at| Some(right(r, at)).filter(|e| r - (at[*e] as usize) < 16).unwrap_or(NOBODY),
    }
    L4 "grouped-unchecked": "offsets that do not fit are bent until they do" {
        offsets: |at, count, m| {
            let mut all: Vec<i32> = at.as_slice::<i32>()?.iter().map(|v| (*v).clamp(0, m as i32)).collect();
            all.sort_unstable();
            (all[0], all[count]) = (0, m as i32);
            Ok(all)
        },
    }
    L4 "grouped-up-to-an-end": "offsets may end before the last row" {
        offsets: |at, count, m| {
            let all = at.as_slice::<i32>()?;
            let end = usize::try_from(all[count]).unwrap_or(m).min(m);
            rows::offsets(at, count, end).map(<[i32]>::to_vec)
        },
        expert: |r, at| if r < at[at.len() - 1] as usize { right(r, at) } else { NOBODY },
    }
};
