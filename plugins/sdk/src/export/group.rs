//! The entries of the table about several weights in one call.
use super::calls::{guarded, of, quietly, scratch, with};
use super::{Instance, Weight};
use crate::borrow;
use q4_core::{Code, Device, Error, PreparedGroup, PreparedWeight, rows};
use q4_plugin_abi::{self as abi, Q4Backend, Q4Error, Q4Exec, Q4Group, Q4Matrix, Q4Prepared, Q4Status};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Most weights of a group; more is a damaged call.
const MAX_WEIGHTS: u64 = 1 << 16;

/// What a `q4_group` is.
struct Group {
    group: Box<dyn PreparedGroup>,
    /// Weights in it.
    count: usize,
    poisoned: Arc<AtomicBool>,
}

pub(super) unsafe extern "C" fn group(
    b: *const Q4Backend,
    weights: *const *const Q4Prepared,
    n_weights: u64,
    exec: *const Q4Exec,
    out: *mut *mut Q4Group,
    err: *mut Q4Error,
) -> Q4Status {
    let body = |instance: &Instance| {
        if !(1..=MAX_WEIGHTS).contains(&n_weights) || weights.is_null() || out.is_null() {
            return Err(Error::new(Code::ShapeMismatch, "a group of weights")
                .need(format!("1 to {MAX_WEIGHTS} weights and a place for the group"))
                .have(format!("{n_weights} at {weights:p}, {out:p}")));
        }
        // SAFETY: the contract puts as many live weights there.
        let all = unsafe { std::slice::from_raw_parts(weights, n_weights as usize) };
        // SAFETY: as above, each made by `prepare`.
        let all: Vec<Arc<dyn PreparedWeight>> =
            all.iter().map(|p| unsafe { &*p.cast::<Weight>() }.weight.clone()).collect();
        // SAFETY: the caller's structure.
        let made = unsafe { with(exec, |cx| instance.backend.group(&all, cx)) }?;
        let group = made.ok_or_else(|| {
            Error::new(Code::Unsupported, "a group of weights").have("weights that are called one by one")
        })?;
        let made = Group { group, count: all.len(), poisoned: instance.poisoned.clone() };
        // SAFETY: the caller's place for a pointer.
        unsafe { *out = Box::into_raw(Box::new(made)).cast() };
        Ok(())
    };
    // SAFETY: a live backend and the caller's buffer.
    unsafe { of(b, err, body) }
}

pub(super) unsafe extern "C" fn release_group(g: *mut Q4Group) {
    // SAFETY: made by `group`, released once.
    let group = unsafe { Box::from_raw(g.cast::<Group>()) };
    quietly(&AtomicBool::default(), || drop(group));
}

pub(super) unsafe extern "C" fn group_workspace(g: *const Q4Group, m: u64) -> u64 {
    // SAFETY: a live group.
    let g = unsafe { &*g.cast::<Group>() };
    let Ok(m) = usize::try_from(m) else { return abi::WORKSPACE_OVERFLOW };
    quietly(&g.poisoned, || g.group.workspace(m) as u64).unwrap_or(abi::WORKSPACE_OVERFLOW)
}

pub(super) unsafe extern "C" fn forward_grouped(
    g: *const Q4Group,
    x: *const Q4Matrix,
    offsets: *const i32,
    y: *const Q4Matrix,
    exec: *const Q4Exec,
    err: *mut Q4Error,
) -> Q4Status {
    // SAFETY: a live group; operands, scratch and buffer of the caller, good until this call returns.
    unsafe {
        let g = &*g.cast::<Group>();
        guarded(&g.poisoned, err, || {
            let (x, y) = (borrow::view(x)?, borrow::view_mut(y)?);
            with(exec, |cx| {
                let offsets = borrow::offsets(offsets, g.count, cx.device)?;
                if cx.device == Device::Cpu {
                    rows::offsets(&offsets, g.count, x.as_matrix()?.0)?;
                }
                borrow::apart([Some(&x), Some(&y.as_view()), scratch(cx).as_ref(), Some(&offsets)])?;
                g.group.forward(x, offsets, y, cx)
            })
        })
    }
}
