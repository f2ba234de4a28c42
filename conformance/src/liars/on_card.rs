//! The correct backend on a device of its own: its weights, alone and in groups.
use super::card::{Card, Room};
use super::group::Group;
use super::parts::Kept;
use q4_core::{
    Device, ExecContext, FuseSet, Fusion, PreparedGroup, PreparedInfo, PreparedWeight, Result, TensorView,
    TensorViewMut,
};
use std::ptr::NonNull;
use std::sync::Arc;

/// A weight there, which computes with what its operands are to the host.
pub(super) struct OnCard {
    pub kept: Kept,
    card: Arc<Card>,
    _there: Room,
}

impl OnCard {
    pub fn new(kept: Kept, card: &Arc<Card>) -> Self {
        let bytes = match card.parts.copies {
            true => 4 * kept.info.n * kept.info.k,
            false => kept.info.resident_bytes as usize,
        };
        Self { kept, card: card.clone(), _there: card.reserve(bytes) }
    }

    /// Runs a product, and writes what it may not.
    fn run(
        &self,
        x: Option<TensorView<'_>>,
        mut y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
        call: impl FnOnce(Option<TensorView<'_>>, TensorViewMut<'_>, &mut ExecContext<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut inner = ExecContext::cpu(cx.threads);
        inner.workspace = cx.workspace.as_mut().map(here_mut).transpose()?;
        call(x.as_ref().map(here).transpose()?, here_mut(&mut y)?, &mut inner)?;
        spoil(&self.card, x.as_ref(), &mut y);
        Ok(())
    }
}

/// What a faulty product writes besides.
fn spoil(card: &Card, x: Option<&TensorView<'_>>, y: &mut TensorViewMut<'_>) {
    if card.parts.writes_on {
        let len = y.as_view().nbytes();
        // SAFETY: the suite keeps guards behind every operand on the device.
        unsafe { y.as_mut_ptr().cast::<u8>().add(len).write(0) };
    }
    if let Some(x) = x.filter(|x| card.parts.spoils && x.nbytes() > 0) {
        let first = x.as_ptr().cast_mut().cast::<u8>();
        // SAFETY: operands on the device are copies that the suite has to itself; it compares them later.
        unsafe { first.write(first.read() ^ 1) };
    }
}

/// The same operand in host memory, which the card's is.
fn here<'a>(view: &TensorView<'a>) -> Result<TensorView<'a>> {
    if !matches!(view.device(), Device::Vendor { .. }) {
        return Ok(*view);
    }
    let data = NonNull::new(view.as_ptr().cast_mut()).unwrap_or(NonNull::dangling());
    let (dtype, shape, strides) = (view.dtype(), view.shape(), view.strides());
    // SAFETY: the bytes of the view, for as long as it has them.
    unsafe { TensorView::from_raw(data, view.nbytes(), Device::Cpu, dtype, shape, strides) }
}

fn here_mut<'a>(view: &'a mut TensorViewMut<'_>) -> Result<TensorViewMut<'a>> {
    let data = NonNull::new(view.as_mut_ptr()).unwrap_or(NonNull::dangling());
    let on_host = here(&view.as_view())?;
    let (device, dtype, shape, strides) =
        (on_host.device(), on_host.dtype(), on_host.shape(), on_host.strides());
    // SAFETY: as above, and the borrow is unique.
    unsafe { TensorViewMut::from_raw(data, on_host.nbytes(), device, dtype, shape, strides) }
}

impl PreparedWeight for OnCard {
    fn info(&self) -> &PreparedInfo {
        self.kept.info()
    }
    fn workspace(&self, m: usize) -> usize {
        self.kept.workspace(m)
    }
    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.run(Some(x), y, cx, |x, y, cx| x.map_or(Ok(()), |x| self.kept.forward(x, y, cx)))
    }
    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        self.kept.fuses(m, set)
    }
    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let mut fusion = *fusion;
        if let Some(norm) = &mut fusion.norm {
            norm.weight = here(&norm.weight)?;
        }
        self.run(Some(x), y, cx, |x, y, cx| x.map_or(Ok(()), |x| self.kept.forward_fused(x, &fusion, y, cx)))
    }
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        self.run(Some(dy), dx, cx, |dy, dx, cx| dy.map_or(Ok(()), |dy| self.kept.backward_input(dy, dx, cx)))
    }
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.run(None, out, cx, |_, out, cx| self.kept.dequantize(out, cx))
    }
}

/// Weights there in one call.
pub(super) struct GroupOnCard {
    pub group: Group,
    pub card: Arc<Card>,
}

impl PreparedGroup for GroupOnCard {
    fn workspace(&self, m: usize) -> usize {
        self.group.workspace(m)
    }
    fn forward(
        &self,
        x: TensorView<'_>,
        offsets: TensorView<'_>,
        mut y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let mut inner = ExecContext::cpu(cx.threads);
        inner.workspace = cx.workspace.as_mut().map(here_mut).transpose()?;
        self.group.forward(here(&x)?, here(&offsets)?, here_mut(&mut y)?, &mut inner)?;
        if self.card.parts.bends {
            let last = offsets.as_ptr().cast_mut().cast::<i32>().wrapping_add(offsets.len() - 1);
            // SAFETY: as in `spoil`.
            unsafe { last.write(last.read() + 1) };
        }
        Ok(())
    }
}
