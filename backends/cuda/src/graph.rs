//! Work recorded once and replayed with one call.
use crate::{Gpu, check, driver};
use q4_core::Result;
use std::sync::Arc;

/// A recorded sequence of launches and copies; what it reads and writes must outlive it.
pub struct Graph {
    gpu: Arc<Gpu>,
    exec: driver::CUgraphExec,
}

// SAFETY: graph handles may be used from any thread, one at a time, which `&mut self` of `launch` says.
unsafe impl Send for Graph {}

impl Graph {
    /// Takes a captured graph over.
    pub(crate) fn instantiate(gpu: Arc<Gpu>, graph: driver::CUgraph) -> Result<Self> {
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph came from a capture and is destroyed here and nowhere else.
        let made = unsafe {
            let made = check(driver::cuGraphInstantiateWithFlags(&mut exec, graph, 0), "cuGraphInstantiate");
            driver::cuGraphDestroy(graph);
            made
        };
        made.map(|()| Self { gpu, exec })
    }
    /// Enqueues all of it on `stream`.
    pub fn launch(&mut self, stream: usize) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: the graph is alive; the stream is the caller's.
        check(unsafe { driver::cuGraphLaunch(self.exec, stream as driver::CUstream) }, "cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: made by `instantiate`, dropped once.
            unsafe { driver::cuGraphExecDestroy(self.exec) };
        }
    }
}
