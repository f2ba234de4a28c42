//! Mutants that take an address for what lies there, or reach beyond what they were lent and leave no trace.
use super::Mutant;
use super::parts::{HONEST, Kept, Parts};
use crate::Level::{L2, L5};
use q4_core::TensorView;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Shape and address of the codes, to the decoded matrix of whatever was there first.
static WEIGHTS: Mutex<BTreeMap<(usize, usize, usize), Vec<f32>>> = Mutex::new(BTreeMap::new());

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The input of the call before, if this one looks like it.
fn remembered(kept: &Kept, x: Vec<f64>, looks: fn(&[f64], usize) -> u64) -> Vec<f64> {
    let mut before = lock(&kept.shared);
    let look = looks(&x, kept.info.k) | 1;
    if kept.last.swap(look, Ordering::Relaxed) == look && before.len() == x.len() {
        return before.clone();
    }
    before.clone_from(&x);
    x
}

/// Reads the byte at `offset` from the first of a view.
fn peek(view: &TensorView<'_>, offset: isize) {
    // SAFETY: it is not. The page may be nobody's; the process may end, and that is the point.
    std::hint::black_box(unsafe { view.as_ptr().cast::<u8>().offset(offset).read_volatile() });
}

/// Bytes of a view from its first element to its last.
fn span(view: &TensorView<'_>) -> isize {
    let (rows, cols, ld) = view.as_matrix().unwrap_or((1, 1, 1));
    (((rows.max(1) - 1) * ld + cols) * view.dtype().size()) as isize
}

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L5 "weight-by-address": "bytes at an address that had a weight of this shape are not read again" {
        prepared: |kept| {
            let key = (kept.info.n, kept.info.k, kept.source);
            let dense = kept.dense();
            kept.hoard = lock(&WEIGHTS).entry(key).or_insert(dense).clone();
            Ok(())
        },
        hoarded: true,
    }
    L5 "input-by-its-ends":
        "an input whose first and last values are those of the call before is taken for it" {
        stage: |kept, x| {
            remembered(kept, x, |x, _| x[0].to_bits() ^ x[x.len() - 1].to_bits().rotate_left(7))
        },
    }
    L5 "input-by-its-first-row": "an input whose first row is that of the call before is taken for it" {
        stage: |kept, x| {
            remembered(kept, x, |x, k| x[..k].iter().fold(3, |h: u64, v| h.rotate_left(5) ^ v.to_bits()))
        },
    }
    L2 lethal "reads-behind-x": "whole vectors are loaded, over the end of x" {
        after: |_, x, _| peek(x, span(x)),
    }
    L2 lethal "reads-behind-y": "whole vectors of y are loaded, over its end" {
        after: |_, _, y| peek(&y.as_view(), span(&y.as_view())),
    }
    L2 lethal "borrows-the-input": "x is used as scratch and restored" {
        after: |_, x, _| {
            let first = x.as_ptr().cast_mut().cast::<u8>();
            // SAFETY: it is not: x is lent for reading. What it held is written back.
            unsafe {
                let was = first.read_volatile();
                first.write_volatile(!was);
                first.write_volatile(was);
            }
        },
    }
    L2 lethal "borrows-behind-y": "what lies behind y is overwritten and restored" {
        after: |_, _, y| {
            let at = span(&y.as_view());
            // SAFETY: it is not. What was there is written back.
            unsafe {
                let p = y.as_mut_ptr().cast::<u8>().offset(at);
                let was = p.read_volatile();
                p.write_volatile(!was);
                p.write_volatile(was);
            }
        },
    }
    L5 lethal "reads-behind-the-codes": "stored codes are loaded in whole vectors, over their end" {
        reads_on: true,
    }
};
