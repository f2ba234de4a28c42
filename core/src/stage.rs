//! Products on a device with operands in host memory, as checks need them: operands go up, a product runs,
//! results come back.
use crate::device::{DeviceBytes, DeviceMemory};
use crate::{
    Code, Device, Error, ExecContext, FuseSet, Fusion, PreparedGroup, PreparedInfo, PreparedWeight, Result,
    TensorView, TensorViewMut,
};
use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// A weight on a device that is called with operands in host memory: they are copied there, guarded on both
/// sides, and what was written comes back, gaps between rows included. For checks; a product of a program
/// stays on its device.
pub struct Staged {
    inner: Arc<dyn PreparedWeight>,
    there: There,
}

/// The same of a group of weights: its offsets are copied there too.
pub struct StagedGroup {
    inner: Box<dyn PreparedGroup>,
    there: There,
}

/// Where operands are staged.
struct There {
    device: Device,
    memory: Arc<dyn DeviceMemory>,
}

/// Bytes before and behind every operand on the device.
const GUARD: usize = 256;
/// What they hold.
const MARK: u8 = 0x5a;

impl Staged {
    /// `inner` was prepared for `device`, whose memory is `memory`.
    pub fn new(
        inner: impl Into<Arc<dyn PreparedWeight>>,
        device: Device,
        memory: Arc<dyn DeviceMemory>,
    ) -> Self {
        let inner = inner.into();
        Self { inner, there: There { device, memory } }
    }

    /// The weight, to be called where it is from now on.
    pub fn into_inner(self) -> Arc<dyn PreparedWeight> {
        self.inner
    }

    /// The weight that a backend prepared, whether it is staged or not.
    pub fn unstaged(weight: &Arc<dyn PreparedWeight>) -> Arc<dyn PreparedWeight> {
        let staged = (&**weight as &dyn Any).downcast_ref::<Self>();
        staged.map_or_else(|| weight.clone(), |staged| staged.inner.clone())
    }
}

impl StagedGroup {
    /// `inner` was made of weights for `device`, whose memory is `memory`.
    pub fn new(inner: Box<dyn PreparedGroup>, device: Device, memory: Arc<dyn DeviceMemory>) -> Self {
        Self { inner, there: There { device, memory } }
    }

    /// The group, to be called where it is from now on.
    pub fn into_inner(self) -> Box<dyn PreparedGroup> {
        self.inner
    }
}

impl PreparedGroup for StagedGroup {
    fn workspace(&self, m: usize) -> usize {
        self.inner.workspace(m)
    }
    fn forward(
        &self,
        x: TensorView<'_>,
        offsets: TensorView<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let copy = Copy::of(&*self.there.memory, &offsets)?;
        self.there.run(Some(&x), y, cx, |x, y, cx| match x {
            Some(x) => self.inner.forward(x, copy.view(&offsets, self.there.device)?, y, cx),
            None => Ok(()),
        })?;
        copy.check_guards("offsets")?;
        copy.check_same(&offsets)
    }
}

impl There {
    /// Runs `call` with operands of the device in place of host ones; waits.
    fn run(
        &self,
        input: Option<&TensorView<'_>>,
        mut output: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
        call: impl FnOnce(Option<TensorView<'_>>, TensorViewMut<'_>, &mut ExecContext<'_>) -> Result<()>,
    ) -> Result<()> {
        let memory = &*self.memory;
        let x = input.map(|x| Copy::of(memory, x)).transpose()?;
        let y = Copy::of(memory, &output.as_view())?;
        let scratch = cx.workspace.as_ref().map(|w| Copy::at(memory, &w.as_view(), 0)).transpose()?;
        let elsewhere = |device| if device == Device::Cpu { self.device } else { device };
        let mut inner = ExecContext::on(self.device, memory.stream(), cx.threads);
        if let (Some(copy), Some(view)) = (&scratch, &cx.workspace) {
            inner.workspace = Some(copy.view_mut(&view.as_view(), self.device)?);
        }
        let outcome = {
            let x = match (&x, input) {
                (Some(copy), Some(v)) => Some(copy.view(v, elsewhere(v.device()))?),
                _ => None,
            };
            let v = output.as_view();
            let y = y.view_mut(&v, elsewhere(v.device()))?;
            call(x, y, &mut inner)
        };
        memory.synchronize()?;
        if let Err(e) = outcome {
            // What a refused call wrote is for the caller to see.
            y.back(&mut output)?;
            return Err(e);
        }
        for (copy, what) in [(&x, "input"), (&scratch, "workspace")] {
            if let Some(copy) = copy {
                copy.check_guards(what)?;
            }
        }
        if let (Some(copy), Some(v)) = (&x, input) {
            copy.check_same(v)?;
        }
        y.check_guards("output")?;
        y.back(&mut output)
    }
}

impl PreparedWeight for Staged {
    fn info(&self) -> &PreparedInfo {
        self.inner.info()
    }
    fn workspace(&self, m: usize) -> usize {
        self.inner.workspace(m)
    }
    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.there.run(Some(&x), y, cx, |x, y, cx| match x {
            Some(x) => self.inner.forward(x, y, cx),
            None => Ok(()),
        })
    }
    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        self.inner.fuses(m, set)
    }
    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let weight = fusion.norm.as_ref().map(|n| Copy::of(&*self.there.memory, &n.weight)).transpose()?;
        self.there.run(Some(&x), y, cx, |x, y, cx| {
            let mut fusion = *fusion;
            if let (Some(norm), Some(copy)) = (&mut fusion.norm, &weight) {
                norm.weight = copy.view(&norm.weight, self.there.device)?;
            }
            match x {
                Some(x) => self.inner.forward_fused(x, &fusion, y, cx),
                None => Ok(()),
            }
        })
    }
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        self.there.run(Some(&dy), dx, cx, |dy, dx, cx| match dy {
            Some(dy) => self.inner.backward_input(dy, dx, cx),
            None => Ok(()),
        })
    }
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        self.there.run(None, out, cx, |_, out, cx| self.inner.dequantize(out, cx))
    }
}

/// The bytes of a host view on the device, on the same offset from a 256-byte boundary, between guards.
struct Copy {
    bytes: Box<dyn DeviceBytes>,
    at: usize,
    len: usize,
}

impl Copy {
    fn of(memory: &dyn DeviceMemory, view: &TensorView<'_>) -> Result<Self> {
        Self::at(memory, view, view.as_ptr().addr() % GUARD)
    }

    /// The same, `offset` bytes behind a boundary: 0 for scratch, which devices want aligned further than
    /// hosts.
    fn at(memory: &dyn DeviceMemory, view: &TensorView<'_>, offset: usize) -> Result<Self> {
        let len = view.nbytes();
        let at = GUARD + offset;
        let bytes = memory.alloc(at + len + GUARD)?;
        let mut host = vec![MARK; at + len + GUARD];
        host[at..at + len].copy_from_slice(raw(view));
        bytes.upload(0, &host)?;
        Ok(Self { bytes, at, len })
    }

    fn view<'a>(&'a self, like: &TensorView<'_>, device: Device) -> Result<TensorView<'a>> {
        // SAFETY: `len` bytes from here are ours while we are borrowed; the host reads them nowhere.
        unsafe {
            TensorView::from_raw(self.place()?, self.len, device, like.dtype(), like.shape(), like.strides())
        }
    }

    fn view_mut<'a>(&'a self, like: &TensorView<'_>, device: Device) -> Result<TensorViewMut<'a>> {
        // SAFETY: as above, and made once per call.
        unsafe {
            TensorViewMut::from_raw(
                self.place()?,
                self.len,
                device,
                like.dtype(),
                like.shape(),
                like.strides(),
            )
        }
    }

    fn place(&self) -> Result<NonNull<c_void>> {
        NonNull::new((self.bytes.address() as usize + self.at) as *mut c_void)
            .ok_or_else(|| Error::new(Code::Internal, "device memory at address 0"))
    }

    fn all(&self) -> Result<Vec<u8>> {
        let mut host = vec![0; self.at + self.len + GUARD];
        self.bytes.download(0, &mut host)?;
        Ok(host)
    }

    fn check_guards(&self, what: &str) -> Result<()> {
        let host = self.all()?;
        let is_marked = |b: &[u8]| b.iter().all(|b| *b == MARK);
        if is_marked(&host[..self.at]) && is_marked(&host[self.at + self.len..]) {
            return Ok(());
        }
        Err(Error::new(
            Code::ConformanceFailed,
            format!("a byte of the device outside the {what} was written"),
        )
        .need(format!("writes inside its {} bytes", self.len)))
    }

    fn check_same(&self, view: &TensorView<'_>) -> Result<()> {
        if self.all()?[self.at..self.at + self.len] == *raw(view) {
            return Ok(());
        }
        Err(Error::new(Code::ConformanceFailed, "the input on the device was modified"))
    }

    fn back(&self, view: &mut TensorViewMut<'_>) -> Result<()> {
        let len = view.as_view().nbytes().min(self.len);
        // SAFETY: a unique host view of `nbytes` bytes.
        let out = unsafe { std::slice::from_raw_parts_mut(view.as_mut_ptr().cast::<u8>(), len) };
        self.bytes.download(self.at, out)
    }
}

/// Every byte a host view reaches, gaps included. A view that says it is elsewhere is still one of the host's
/// here: cases lie about the device to be refused.
fn raw<'a>(view: &TensorView<'a>) -> &'a [u8] {
    // SAFETY: `nbytes` bytes are readable for the life of the borrow.
    unsafe { std::slice::from_raw_parts(view.as_ptr().cast(), view.nbytes()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activations, ExecPath, OpSet, ThreadPool};
    use std::sync::Mutex;

    /// A device whose memory is the host's.
    struct Fake;
    struct FakeBytes(Mutex<Vec<u128>>);

    impl FakeBytes {
        fn slice(&self, f: impl FnOnce(&mut [u8])) {
            let mut words = self.0.lock().unwrap_or_else(|e| e.into_inner());
            f(bytemuck::cast_slice_mut(&mut words));
        }
    }
    impl DeviceMemory for Fake {
        fn alloc(&self, len: usize) -> Result<Box<dyn DeviceBytes>> {
            Ok(Box::new(FakeBytes(Mutex::new(vec![0; len.div_ceil(16)]))))
        }
        fn stream(&self) -> usize {
            7
        }
        fn synchronize(&self) -> Result<()> {
            Ok(())
        }
        fn free(&self) -> Result<u64> {
            Ok(0)
        }
    }
    impl DeviceBytes for FakeBytes {
        fn address(&self) -> u64 {
            let mut at = 0;
            self.slice(|b| at = b.as_ptr().addr() as u64);
            at
        }
        fn upload(&self, at: usize, data: &[u8]) -> Result<()> {
            self.slice(|b| b[at..at + data.len()].copy_from_slice(data));
            Ok(())
        }
        fn download(&self, at: usize, out: &mut [u8]) -> Result<()> {
            self.slice(|b| out.copy_from_slice(&b[at..at + out.len()]));
            Ok(())
        }
    }

    /// Doubles one row; writes `past` elements too many, or into its input, or refuses.
    struct Doubler {
        info: PreparedInfo,
        past: usize,
        spoils: bool,
        refuses: bool,
    }

    impl PreparedWeight for Doubler {
        fn info(&self) -> &PreparedInfo {
            &self.info
        }
        fn workspace(&self, _: usize) -> usize {
            0
        }
        fn forward(
            &self,
            x: TensorView<'_>,
            mut y: TensorViewMut<'_>,
            cx: &mut ExecContext<'_>,
        ) -> Result<()> {
            assert_eq!((x.device(), cx.device, cx.stream), (Device::Cuda(0), Device::Cuda(0), 7));
            let (n, from, to) = (x.len(), x.as_ptr().cast::<f32>(), y.as_mut_ptr().cast::<f32>());
            // SAFETY: the fake device's memory; a guard of 256 bytes follows.
            unsafe {
                for i in 0..n + self.past {
                    to.add(i).write(2.0 * from.add(i.min(n - 1)).read());
                }
                if self.spoils {
                    from.cast_mut().write(0.5);
                }
            }
            if self.refuses { Err(Error::new(Code::Unsupported, "no")) } else { Ok(()) }
        }
        fn backward_input(
            &self,
            _: TensorView<'_>,
            _: TensorViewMut<'_>,
            _: &mut ExecContext<'_>,
        ) -> Result<()> {
            Err(Error::new(Code::Unsupported, "backward"))
        }
        fn dequantize(&self, _: TensorViewMut<'_>, _: &mut ExecContext<'_>) -> Result<()> {
            Err(Error::new(Code::Unsupported, "dequantize"))
        }
    }

    fn run(past: usize, spoils: bool, refuses: bool) -> (Result<()>, [f32; 4]) {
        let info = PreparedInfo {
            backend: "fake".into(),
            path: ExecPath::FusedDequant,
            activations: Activations::Native,
            n: 3,
            k: 3,
            resident_bytes: 0,
            ops: OpSet::FORWARD,
        };
        let inner: Arc<dyn PreparedWeight> = Arc::new(Doubler { info, past, spoils, refuses });
        let staged = Staged::new(inner, Device::Cuda(0), Arc::new(Fake));
        let (x, mut y) = ([1f32, 2.0, 3.0], [9f32; 4]);
        let pool = ThreadPool::new(1);
        let call = |y: &mut [f32]| {
            let (x, y) = (TensorView::of(&x, &[1, 3])?, TensorViewMut::of(y, &[1, 3])?);
            staged.forward(x, y, &mut ExecContext::cpu(&pool))
        };
        let outcome = call(&mut y[..3]);
        (outcome, y)
    }

    #[test]
    fn operands_go_up_and_results_come_back() {
        let (outcome, y) = run(0, false, false);
        outcome.expect("a plain product");
        assert_eq!(y, [2.0, 4.0, 6.0, 9.0]);
    }

    #[test]
    fn what_a_kernel_may_not_touch_is_noticed() {
        let (outcome, _) = run(1, false, false);
        assert_eq!(outcome.expect_err("one element too many").code(), Code::ConformanceFailed);
        let (outcome, _) = run(0, true, false);
        assert_eq!(outcome.expect_err("an input was written").code(), Code::ConformanceFailed);
        let (outcome, y) = run(0, false, true);
        assert_eq!(outcome.expect_err("refused").code(), Code::Unsupported);
        assert_eq!(y[0], 2.0, "what a refused call wrote is seen");
    }
}
