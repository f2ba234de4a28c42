//! Several weights of the library that one call multiplies.
use crate::calls::enough;
use crate::instance::Instance;
use q4_core::{Code, Error, ExecContext, PreparedGroup, PreparedWeight, Result, TensorView, TensorViewMut};
use q4_plugin_abi::{Q4Group, Q4Prepared, status};
use q4_plugin_sdk::lend;
use std::ptr;
use std::sync::Arc;

/// A group of the library, and the weights it is made of: they outlive it.
pub(super) struct Group {
    instance: Arc<Instance>,
    raw: *mut Q4Group,
    weights: Vec<Arc<dyn PreparedWeight>>,
}

// SAFETY: the contract allows any thread to call a group and to release it.
unsafe impl Send for Group {}
// SAFETY: the contract allows many threads at once.
unsafe impl Sync for Group {}

impl Group {
    /// `None` where the library leaves these weights to the caller.
    pub fn new(
        instance: &Arc<Instance>,
        raw: &[*mut Q4Prepared],
        weights: &[Arc<dyn PreparedWeight>],
        cx: &mut ExecContext<'_>,
    ) -> Result<Option<Self>> {
        let Some(group) = instance.table.api.group else { return Ok(None) };
        let (exec, mut out, mut is_left) = (lend::exec(cx)?, ptr::null_mut(), false);
        {
            let _turn = instance.turn();
            instance.call("group", |err| {
                // SAFETY: a live backend, as many live weights of it, and structures that outlive the call.
                let done = unsafe {
                    group(instance.raw, raw.as_ptr().cast(), raw.len() as u64, &exec, &mut out, err)
                };
                is_left = done == status::UNSUPPORTED;
                if is_left { status::OK } else { done }
            })?;
        }
        if is_left {
            return Ok(None);
        }
        if out.is_null() {
            return Err(Error::new(Code::BackendFailed, format!("{}: group", instance.name))
                .need("a group")
                .have("NULL and success"));
        }
        Ok(Some(Self { instance: instance.clone(), raw: out, weights: weights.to_vec() }))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(release) = self.instance.table.api.release_group {
            // SAFETY: made by the same table, released once, before its weights.
            unsafe { release(self.raw) }
        }
    }
}

impl PreparedGroup for Group {
    fn workspace(&self, m: usize) -> usize {
        let entry = self.instance.table.api.group_workspace;
        // SAFETY: a live group.
        let bytes = entry.map_or(0, |f| unsafe { f(self.raw, m as u64) });
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    fn forward(
        &self,
        x: TensorView<'_>,
        offsets: TensorView<'_>,
        mut y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let i = &self.instance;
        let Some(forward) = i.table.api.forward_grouped else { return Err(i.lacks("forward_grouped")) };
        let (xm, ym) = (lend::matrix(&x)?, lend::matrix_mut(&mut y)?);
        let at = lend::offsets(&offsets, self.weights.len())?;
        enough(self.workspace(xm.rows as usize), cx)?;
        let exec = lend::exec(cx)?;
        // SAFETY: a live group; operands, offsets and scratch are views, good for their bytes; those written
        // are unique.
        i.call("forward_grouped", |err| unsafe { forward(self.raw, &xm, at, &ym, &exec, err) })
    }
}
