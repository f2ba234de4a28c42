//! Queues of device work and marks in them.
use crate::{Gpu, Graph, check, driver};
use q4_core::Result;
use std::sync::Arc;

/// A queue that does not wait for the legacy default stream.
pub struct Stream {
    gpu: Arc<Gpu>,
    raw: driver::CUstream,
}

// SAFETY: stream handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver serialises what is enqueued.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new queue.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = driver::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; the out pointer is valid.
        check(unsafe { driver::cuStreamCreate(&mut raw, flags) }, "cuStreamCreate")?;
        Ok(Self { gpu: gpu.clone(), raw })
    }
    /// The device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
    /// The handle as contexts of products carry it.
    pub fn raw(&self) -> usize {
        self.raw as usize
    }
    /// Waits until all work in it is done; a fault of a kernel surfaces here.
    pub fn synchronize(&self) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: the stream is alive.
        self.gpu.blame(check(unsafe { driver::cuStreamSynchronize(self.raw) }, "cuStreamSynchronize"))
    }
    /// Whether all work in it is done; does not wait. A fault of a kernel surfaces here too.
    pub fn is_idle(&self) -> Result<bool> {
        self.gpu.bind()?;
        // SAFETY: the stream is alive.
        match unsafe { driver::cuStreamQuery(self.raw) } {
            driver::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => self.gpu.blame(check(status, "cuStreamQuery")).map(|()| true),
        }
    }
    /// Records what `body` enqueues on this stream as a graph; none of it runs. Nothing in `body` may
    /// allocate device memory or wait.
    pub fn capture(&self, body: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.begin_capture()?;
        let outcome = body();
        let graph = self.end_capture(); // in every case; the graph of a failed body is dropped
        outcome?;
        graph
    }
    /// Starts recording; [`Stream::end_capture`] follows in every case.
    pub fn begin_capture(&self) -> Result<()> {
        self.gpu.bind()?;
        let mode = driver::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        check(unsafe { driver::cuStreamBeginCapture_v2(self.raw, mode) }, "cuStreamBeginCapture")
    }
    /// Ends recording.
    pub fn end_capture(&self) -> Result<Graph> {
        self.gpu.bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive; the out pointer is valid.
        check(unsafe { driver::cuStreamEndCapture(self.raw, &mut graph) }, "cuStreamEndCapture")?;
        Graph::instantiate(self.gpu.clone(), graph)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: created by `new`, dropped once; pending work completes first.
            unsafe { driver::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A point in a queue, with its time.
pub struct Event {
    gpu: Arc<Gpu>,
    raw: driver::CUevent,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// Marks the point `stream` (0: the default one) has reached in its queue.
    pub fn record(gpu: &Arc<Gpu>, stream: usize) -> Result<Self> {
        gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current; the out pointer is valid; the stream is the caller's and alive.
        unsafe {
            check(driver::cuEventCreate(&mut raw, 0), "cuEventCreate")?;
            let event = Self { gpu: gpu.clone(), raw };
            check(driver::cuEventRecord(raw, stream as driver::CUstream), "cuEventRecord")?;
            Ok(event)
        }
    }
    /// Waits until the queue has reached it.
    pub fn wait(&self) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: the event is alive and recorded.
        self.gpu.blame(check(unsafe { driver::cuEventSynchronize(self.raw) }, "cuEventSynchronize"))
    }
    /// What is enqueued on `stream` (0: the default one) from here on waits for it; the host does not.
    pub fn precede(&self, stream: usize) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: the event is alive and recorded; the stream is the caller's and alive.
        let status = unsafe { driver::cuStreamWaitEvent(stream as driver::CUstream, self.raw, 0) };
        check(status, "cuStreamWaitEvent")
    }
    /// Seconds from `self` to `later`; waits for both.
    pub fn seconds_until(&self, later: &Self) -> Result<f64> {
        self.gpu.bind()?;
        let mut ms = 0f32;
        // SAFETY: both events are alive and recorded.
        unsafe {
            self.gpu.blame(check(driver::cuEventSynchronize(later.raw), "cuEventSynchronize"))?;
            check(driver::cuEventElapsedTime_v2(&mut ms, self.raw, later.raw), "cuEventElapsedTime")?;
        }
        Ok(f64::from(ms) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: created by `record`, dropped once.
            unsafe { driver::cuEventDestroy_v2(self.raw) };
        }
    }
}
