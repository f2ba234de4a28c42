//! Calls through a table: a weight's products, whose operands are lent, and any other call, whose status
//! becomes a result.
use crate::instance::Instance;
use q4_core::{
    Code, Error, ExecContext, FuseSet, Fusion, PreparedInfo, PreparedWeight, Result, TensorView,
    TensorViewMut,
};
use q4_plugin_abi as abi;
use q4_plugin_abi::{Q4Error, Q4PreparedInfo, Q4Status, status};
use q4_plugin_sdk::{codes, lend, message};
use std::mem::size_of;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A weight of a library, as one of this program.
pub(super) struct Prepared {
    pub held: Held,
    pub info: PreparedInfo,
}

impl PreparedWeight for Prepared {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        // SAFETY: a live weight.
        let bytes =
            self.held.instance.table.api.workspace.map_or(0, |f| unsafe { f(self.held.raw, m as u64) });
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    fn forward(&self, x: TensorView<'_>, mut y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let i = &self.held.instance;
        let Some(forward) = i.table.api.forward else { return Err(i.lacks("forward")) };
        let (xm, ym) = (lend::matrix(&x)?, lend::matrix_mut(&mut y)?);
        self.scratch(xm.rows, cx)?;
        let exec = lend::exec(cx)?;
        // SAFETY: a live weight; operands and scratch are views, good for their bytes; those written are
        // unique.
        i.call("forward", |err| unsafe { forward(self.held.raw, &xm, &ym, &exec, err) })
    }

    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        let api = &self.held.instance.table.api;
        let Some(fuses) = api.fuses.filter(|_| api.forward_fused.is_some()) else {
            return set == FuseSet::NONE;
        };
        // SAFETY: a live weight.
        set == FuseSet::NONE || unsafe { fuses(self.held.raw, m as u64, u32::from(set.0)) } == 1
    }

    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        mut y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        if fusion.set() == FuseSet::NONE {
            return self.forward(x, y, cx);
        }
        let i = &self.held.instance;
        let Some(forward_fused) = i.table.api.forward_fused else { return Err(i.lacks("forward_fused")) };
        let (xm, norm, ym) = (lend::matrix(&x)?, lend::norm_weight(fusion)?, lend::matrix_mut(&mut y)?);
        let fusion = lend::fusion(fusion, norm.as_ref());
        self.scratch(xm.rows, cx)?;
        let exec = lend::exec(cx)?;
        // SAFETY: as in `forward`; the norm's weight is a view too.
        i.call("forward_fused", |err| unsafe { forward_fused(self.held.raw, &xm, &fusion, &ym, &exec, err) })
    }

    fn backward_input(
        &self,
        dy: TensorView<'_>,
        mut dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let i = &self.held.instance;
        let Some(backward) = i.table.api.backward_input else { return Err(i.lacks("backward_input")) };
        let (dym, dxm) = (lend::matrix(&dy)?, lend::matrix_mut(&mut dx)?);
        self.scratch(dym.rows, cx)?;
        let exec = lend::exec(cx)?;
        // SAFETY: as in `forward`.
        i.call("backward_input", |err| unsafe { backward(self.held.raw, &dym, &dxm, &exec, err) })
    }

    fn dequantize(&self, mut out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let i = &self.held.instance;
        let Some(dequantize) = i.table.api.dequantize else { return Err(i.lacks("dequantize")) };
        let (out, exec) = (lend::matrix_mut(&mut out)?, lend::exec(cx)?);
        // SAFETY: as in `forward`.
        i.call("dequantize", |err| unsafe { dequantize(self.held.raw, &out, &exec, err) })
    }
}

impl Prepared {
    fn scratch(&self, m: u64, cx: &ExecContext<'_>) -> Result<()> {
        enough(self.workspace(m as usize), cx)
    }
}

/// A library may rely on the scratch it asked for.
pub(super) fn enough(need: usize, cx: &ExecContext<'_>) -> Result<()> {
    let have = cx.workspace.as_ref().map_or(0, |w| w.as_view().nbytes());
    if have >= need {
        return Ok(());
    }
    Err(Error::new(Code::ShapeMismatch, "workspace of a product")
        .need(format!("{need} bytes"))
        .have(format!("{have} bytes")))
}

/// A weight of the library and the backend it came from.
pub(super) struct Held {
    pub instance: Arc<Instance>,
    pub raw: *mut abi::Q4Prepared,
}

// SAFETY: the contract allows any thread to call a weight and to release it.
unsafe impl Send for Held {}
// SAFETY: the contract allows many threads at once.
unsafe impl Sync for Held {}

impl Held {
    /// What the library says of it.
    pub fn facts(&self) -> Result<Q4PreparedInfo> {
        let Some(info) = self.instance.table.api.info else { return Err(self.instance.lacks("info")) };
        let mut facts = Q4PreparedInfo {
            struct_size: size_of::<Q4PreparedInfo>(),
            n: 0,
            k: 0,
            resident_bytes: 0,
            path: 0,
            activations: 0,
            ops: 0,
            reserved: 0,
        };
        // SAFETY: a live weight, and a structure that states its size.
        self.instance.call("info", |err| unsafe { info(self.raw, &mut facts, err) })?;
        Ok(facts)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(release) = self.instance.table.api.release {
            // SAFETY: prepared by the same table, released once; `&mut self` proves that no call on it is
            // running.
            unsafe { release(self.raw) }
        }
    }
}

impl Instance {
    /// A call that can fail, of a backend that has not panicked yet.
    pub fn call(&self, what: &str, call: impl FnOnce(*mut abi::Q4Error) -> abi::Q4Status) -> Result<()> {
        if self.has_panicked() {
            return Err(Error::new(Code::BackendFailed, format!("{}: {what}", self.name))
                .need("a backend that never panicked")
                .have("an earlier call of it panicked"));
        }
        checked(what, call).map_err(|(status, e)| {
            if status == status::PANICKED {
                self.poisoned.store(true, Ordering::Relaxed);
            }
            e.within(&self.name)
        })
    }
}

/// Lends a message buffer to `call` and turns its status into a result. Allocates only for an error.
pub(crate) fn checked(
    what: &str,
    call: impl FnOnce(*mut Q4Error) -> Q4Status,
) -> Result<(), (Q4Status, Error)> {
    let mut message = message::Message::new();
    let mut raw = message.raw();
    let status = call(&mut raw);
    if status == status::OK {
        return Ok(());
    }
    let mut have = match message.text(&raw) {
        text if text.is_empty() => format!("status {status}"),
        text if status == status::PANICKED => format!("a panic: {text}"),
        text => text.into_owned(),
    };
    if raw.native_code != 0 {
        have += &format!(" (device code {})", raw.native_code);
    }
    let code = match status {
        status::PANICKED => Code::BackendFailed,
        other => codes::status_from(other),
    };
    Err((status, Error::new(code, what).have(have)))
}
