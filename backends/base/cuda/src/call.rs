//! Checks of a product's operands in device memory, for backends in this process.
use q4_core::rows::check_product;
use q4_core::{Code, DType, Error, ExecContext, Result, TensorView};

/// Types, shapes and device of a call; returns its rows.
pub fn check_call(
    (input, x, columns_in): (&TensorView<'_>, DType, usize),
    (output, y, columns_out): (&TensorView<'_>, DType, usize),
    cx: &ExecContext<'_>,
) -> Result<usize> {
    check_place(input, cx)?;
    check_place(output, cx)?;
    check_product((input, x, columns_in), (output, y, columns_out))
}

/// An operand is on the device of the call.
pub fn check_place(view: &TensorView<'_>, cx: &ExecContext<'_>) -> Result<()> {
    if view.device() == cx.device {
        return Ok(());
    }
    Err(Error::new(Code::ShapeMismatch, "operand on another device")
        .need(cx.device.to_string())
        .have(view.device().to_string()))
}

/// The address of a workspace of at least `need` bytes, aligned to 256; 0 where none is needed.
pub fn scratch(cx: &mut ExecContext<'_>, need: usize) -> Result<u64> {
    if need == 0 {
        return Ok(0);
    }
    let device = cx.device;
    let (at, have, on) = match &mut cx.workspace {
        Some(w) => (w.as_mut_ptr().addr() as u64, w.as_view().nbytes(), w.as_view().device()),
        None => (0, 0, device),
    };
    if have < need || on != device || at % 256 != 0 {
        return Err(Error::new(Code::ShapeMismatch, "workspace of a product")
            .need(format!("{need} bytes on {device}, aligned to 256"))
            .have(format!("{have} bytes on {on} at {at:#x}")));
    }
    Ok(at)
}

/// The address of a norm's weight, f32 `[k]` on the device of the call.
pub fn check_norm(weight: &TensorView<'_>, k: usize, cx: &ExecContext<'_>) -> Result<u64> {
    check_place(weight, cx)?;
    if weight.dtype() == DType::F32 && weight.len() == k && weight.is_contiguous() {
        return Ok(weight.as_ptr().addr() as u64);
    }
    let what = "weight of a norm";
    Err(Error::new(Code::ShapeMismatch, what).need(format!("float32[{k}]")).have(format!("{weight:?}")))
}
