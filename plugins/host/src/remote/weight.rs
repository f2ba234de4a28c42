//! A weight there: how its bytes and the operands of its calls are lent, and what comes back.
use super::link::{Answer, Broken, Channel, Link};
use super::memory::{ALIGN, Shared, page, place};
use super::wire::{GROUPED, Malformed, ask};
use q4_core::{
    Code, DType, Error, ExecContext, FuseSet, Fusion, PreparedGroup, PreparedInfo, PreparedWeight, Result,
    TensorView, TensorViewMut,
};
use q4_plugin_abi as abi;
use q4_plugin_abi::{Q4Matrix, Q4Segment};
use q4_plugin_sdk::{codes, lend};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What lies around operands that are watched: as f32, f16 and bf16 it is NaN.
const MARK: u8 = 0xff;

/// Bytes of it on each side.
const APRON: usize = 4096;

type Pieces = Vec<(usize, usize)>;

/// Memory, its readable pages, and the parts in it.
type Laid = (Shared, Pieces, Vec<(u64, u64)>);

/// The bytes of a weight as the other process will see them: memory, the pages of it that can be read there,
/// and the place and length of each part, five to a segment. With `is_judged`, every part ends or begins
/// where the pages do.
pub(super) fn lay_out(segments: &[Q4Segment], is_judged: bool) -> Answer<Laid> {
    let parts = segments.iter().flat_map(|s| {
        [
            (s.codes, s.codes_bytes),
            (s.scales, s.scales_bytes),
            (s.nested_map, s.nested_map_bytes),
            (s.nested_absmax, s.nested_absmax_bytes),
            (s.zeros, s.zeros_bytes),
        ]
    });
    let (mut end, mut pieces, mut places) = (0, Pieces::new(), Vec::new());
    let parts: Vec<_> = parts.collect();
    for &(at, len) in &parts {
        let (phase, len) = (at as usize % ALIGN, len as usize);
        if at.is_null() {
            places.push((u64::MAX, 0));
        } else if is_judged {
            let room = (len + ALIGN).next_multiple_of(page());
            let inside = place(room, len, phase, places.len() % 2 == 0).ok_or(Malformed)?;
            places.push(((end + inside) as u64, len as u64));
            pieces.push((end, room));
            end += room + page();
        } else {
            let first = end.next_multiple_of(ALIGN) + phase;
            places.push((first as u64, len as u64));
            end = first + len;
        }
    }
    if !is_judged {
        pieces.push((0, end.next_multiple_of(page())));
    }
    let mut bytes = Shared::new(end, false).map_err(|e| {
        Broken::Here(
            Error::new(Code::OutOfMemory, "a weight for another process")
                .need(format!("{end} bytes that both share"))
                .have(e.to_string()),
        )
    })?;
    if is_judged {
        bytes.fill(0, bytes.len(), MARK);
    }
    for (&(at, _), &(place, len)) in parts.iter().zip(&places).filter(|p| !p.0.0.is_null()) {
        // SAFETY: a part of a weight that is lent for this call.
        bytes.write(place as usize, unsafe { std::slice::from_raw_parts(at.cast(), len as usize) });
    }
    Ok((bytes, pieces, places))
}

/// A weight there; released with this.
pub(super) struct Held {
    pub(super) link: Arc<Link>,
    pub(super) id: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        // A process that is gone has released everything.
        let _ = self.link.ask("release", |c| {
            c.port.out.begin(ask::RELEASE).u64(self.id);
            c.exchange(&[], |_| Ok(()))
        });
    }
}

pub(super) struct RemoteWeight {
    pub(super) held: Held,
    pub(super) info: PreparedInfo,
    /// What it said it fuses, by rows and parts: a call should not have to ask twice.
    pub(super) fuses: Mutex<BTreeMap<(usize, u8), bool>>,
}

/// Weights there that one call multiplies; released with this, and before them.
pub(super) struct RemoteGroup {
    pub(super) link: Arc<Link>,
    pub(super) id: u64,
    pub(super) weights: Vec<Arc<dyn PreparedWeight>>,
}

impl Drop for RemoteGroup {
    fn drop(&mut self) {
        // As of a weight.
        let _ = self.link.ask("release_group", |c| {
            c.port.out.begin(ask::RELEASE_GROUP).u64(self.id);
            c.exchange(&[], |_| Ok(()))
        });
    }
}

impl PreparedGroup for RemoteGroup {
    fn workspace(&self, m: usize) -> usize {
        let asked = self.link.ask("group_workspace", |c| {
            c.port.out.begin(ask::GROUP_WORKSPACE).u64(self.id).u64(m as u64);
            c.exchange(&[], |f| f.u64())
        });
        asked.ok().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
    }

    fn forward(
        &self,
        x: TensorView<'_>,
        offsets: TensorView<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let at = lend::offsets(&offsets, self.weights.len())?;
        // SAFETY: as many numbers as were checked; whatever device they name, another process is lent host
        // memory.
        let offsets = unsafe { std::slice::from_raw_parts(at, self.weights.len() + 1) };
        let asked = Asked { what: "forward_grouped", op: GROUPED, id: self.id, fused: None, offsets };
        call(&self.link, &asked, Some(x), y, cx)
    }
}

/// A call.
struct Asked<'a> {
    what: &'a str,
    op: u32,
    /// The weight or the group.
    id: u64,
    fused: Option<&'a Fused<'a>>,
    /// Of a group.
    offsets: &'a [i32],
}

/// What is asked besides a plain call.
struct Fused<'a> {
    parts: u8,
    eps: f32,
    /// Elements of the norm's weight.
    weight: &'a [f32],
}

/// Where an operand lies.
struct Placed {
    at: usize,
    len: usize,
    /// Bytes around it that hold [`MARK`].
    apron: [(usize, usize); 2],
}

impl PreparedWeight for RemoteWeight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        let asked = self.held.link.ask("workspace", |c| {
            c.port.out.begin(ask::WORKSPACE).u64(self.held.id).u64(m as u64);
            c.exchange(&[], |f| f.u64())
        });
        asked.ok().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX)
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.call("forward", abi::op::FORWARD, Some(x), None, y, cx)
    }
    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        if set == FuseSet::NONE {
            return true;
        }
        *super::lock(&self.fuses).entry((m, set.0)).or_insert_with(|| {
            let asked = self.held.link.ask("fuses", |c| {
                c.port.out.begin(ask::FUSES).u64(self.held.id).u64(m as u64).u32(u32::from(set.0));
                c.exchange(&[], |f| f.u32())
            });
            asked.is_ok_and(|yes| yes == 1)
        })
    }
    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let mut fused = Fused { parts: fusion.set().0, eps: 0.0, weight: &[] };
        if let Some(norm) = &fusion.norm {
            if norm.weight.dtype() != DType::F32 {
                return Err(Error::new(Code::TensorType, "weight of a norm").need("float32"));
            }
            (fused.eps, fused.weight) = (norm.eps, norm.weight.as_slice::<f32>()?);
        }
        let fused = (fused.parts != 0).then_some(&fused);
        self.call("forward_fused", abi::op::FORWARD, Some(x), fused, y, cx)
    }
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        self.call("backward_input", abi::op::BACKWARD_INPUT, Some(dy), None, dx, cx)
    }
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.call("dequantize", abi::op::DEQUANTIZE, None, None, out, cx)
    }
}

impl RemoteWeight {
    fn call(
        &self,
        what: &str,
        op: u32,
        x: Option<TensorView<'_>>,
        fused: Option<&Fused<'_>>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let asked = Asked { what, op, id: self.held.id, fused, offsets: &[] };
        call(&self.held.link, &asked, x, y, cx)
    }
}

/// Lends the operands, asks, and takes what was written.
fn call(
    link: &Link,
    asked: &Asked<'_>,
    x: Option<TensorView<'_>>,
    mut y: TensorViewMut<'_>,
    cx: &mut ExecContext<'_>,
) -> Result<()> {
    let fused = asked.fused;
    let xm = x.as_ref().map(lend::matrix).transpose()?;
    let ym = lend::matrix_mut(&mut y)?;
    let mut exec = lend::exec(cx)?;
    let is_judged = link.is_judged;
    if let Some(scratch) = &mut cx.workspace {
        exec.workspace = scratch.as_mut_ptr();
    }
    link.ask(asked.what, |c| {
        // Which edge is up to the shape, so that a case is the same when it runs again.
        let at_end = (ym.rows + ym.cols) % 2 == 0;
        let x = xm.as_ref().map(|m| c.lend(0, m, true, is_judged, at_end)).transpose()?;
        // A sum is added to what is there.
        let y = c.lend(1, &ym, is_judged || fused.is_some(), is_judged, at_end)?;
        let w = if exec.workspace.is_null() {
            None
        } else {
            // As bytes.
            let m = Q4Matrix {
                data: exec.workspace,
                rows: 1,
                cols: exec.workspace_bytes,
                ld: exec.workspace_bytes,
                dtype: 0,
                ..ym
            };
            Some(c.lend(2, &m, is_judged, is_judged, at_end)?)
        };
        let out = c.port.out.begin(ask::CALL).u32(asked.op).u64(asked.id).u32(exec.threads);
        out.u32(exec.device_type).u32(exec.device_id);
        let none = Placed { at: usize::MAX, len: 0, apron: [(0, 0); 2] };
        let scratch = w.as_ref().unwrap_or(&none);
        out.u64(scratch.at as u64).u64(scratch.len as u64);
        for (m, p) in xm.iter().zip(&x).chain([(&ym, &y)]) {
            out.u64(p.at as u64).u64(p.len as u64).u64(m.rows).u64(m.cols).u64(m.ld);
            out.u32(m.dtype).u32(m.device_type).u32(m.device_id);
        }
        let parts = fused.map_or(0, |f| u32::from(f.parts));
        out.u32(parts).f32(fused.map_or(0.0, |f| f.eps));
        let weight = fused.map_or(&[][..], |f| f.weight);
        out.raw(weight.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>().as_slice());
        out.raw(asked.offsets.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>().as_slice());
        let answered = c.exchange(&[], |_| Ok(()))?;
        let [_, results, scratch] = &c.regions;
        let (Some(results), true) = (results, is_judged || answered.is_ok()) else { return Ok(answered) };
        // SAFETY: the bytes of y, a unique view, and no others.
        unsafe { take(results, &y, &ym, is_judged) };
        if !is_judged {
            return Ok(answered);
        }
        let around = |of: &str, region: &Shared, placed: &Placed| {
            let hit = placed.apron.iter().find_map(|a| region.other_than(a.0, a.1, MARK));
            hit.map_or(Ok(()), |hit| Err(outside(of, hit as i64 - placed.at as i64, placed.len)))
        };
        let mut checked = around("the output", results, &y);
        if let (Some(region), Some(w)) = (scratch, &w) {
            checked = checked.and_then(|()| around("the workspace", region, w));
        }
        Ok(answered.and(checked))
    })
}

fn outside(of: &str, at: i64, len: usize) -> Error {
    Error::new(Code::ConformanceFailed, format!("a byte outside {of} was written"))
        .need(format!("nothing but the {len} bytes that were lent"))
        .have(format!("byte {at} from the first"))
}

/// Bytes from the first element to the last.
fn span(m: &Q4Matrix) -> usize {
    if m.rows == 0 || m.cols == 0 {
        return 0;
    }
    let size = codes::dtype_from(m.dtype).map_or(1, |d| d.size() as u64);
    (((m.rows - 1) * m.ld + m.cols) * size) as usize
}

impl Channel {
    /// Copies an operand to its region, if it `is_read`, and says where it lies.
    fn lend(
        &mut self,
        which: usize,
        m: &Q4Matrix,
        is_read: bool,
        is_judged: bool,
        at_end: bool,
    ) -> Answer<Placed> {
        let len = span(m);
        let region = self.region(which, len)?;
        let phase = m.data as usize % ALIGN;
        let at = place(region.len(), len, phase, at_end && is_judged).ok_or(Malformed)?;
        let mut apron = [(0, 0); 2];
        if is_judged {
            let (first, end) = (at.saturating_sub(APRON), (at + len + APRON).min(region.len()));
            apron = [(first, at - first), (at + len, end - at - len)];
            apron.iter().for_each(|a| region.fill(a.0, a.1, MARK));
        }
        if is_read {
            // SAFETY: `span` bytes of a view from its first element on; whatever device it names, a weight in
            // another process is lent host memory.
            region.write(at, unsafe { std::slice::from_raw_parts(m.data.cast(), len) });
        }
        Ok(Placed { at, len, apron })
    }
}

/// Copies results back: everything between the first and the last element, or the elements alone.
///
/// # Safety
/// `m` describes writable bytes that nobody else uses.
unsafe fn take(region: &Shared, placed: &Placed, m: &Q4Matrix, whole: bool) {
    let data = m.data.cast::<u8>();
    let size = codes::dtype_from(m.dtype).map_or(1, |d| d.size());
    if whole || m.ld == m.cols || m.rows == 1 {
        // SAFETY: forwarded to the caller.
        return unsafe { region.read(placed.at, data, placed.len) };
    }
    for r in 0..m.rows as usize {
        let at = r * m.ld as usize * size;
        // SAFETY: as above; a row of it.
        unsafe { region.read(placed.at + at, data.wrapping_add(at), m.cols as usize * size) };
    }
}
