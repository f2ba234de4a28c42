//! Work recorded once and replayed with one call.
use crate::{Gpu, check, driver};
use q4_core::Result;
use std::sync::Arc;

/// A recorded sequence of launches and copies; what it reads and writes must outlive it.
pub struct Graph {
    gpu: Arc<Gpu>,
    graph: driver::CUgraph,
    exec: driver::CUgraphExec,
}

/// What a graph is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// Launches of kernels.
    pub kernels: usize,
    /// Copies, fills and everything else.
    pub others: usize,
    /// Nodes that may start while the one before them drains.
    pub overlapping: usize,
}

const NO_EDGE: driver::CUgraphEdgeData =
    driver::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };

// SAFETY: graph handles may be used from any thread, one at a time, which `&mut self` of `launch` says.
unsafe impl Send for Graph {}

impl Graph {
    /// Takes a captured graph over.
    pub(crate) fn instantiate(gpu: Arc<Gpu>, graph: driver::CUgraph) -> Result<Self> {
        let mut exec = std::ptr::null_mut();
        // SAFETY: the graph came from a capture and is destroyed here or when what is made of it is dropped.
        unsafe {
            let made = check(driver::cuGraphInstantiateWithFlags(&mut exec, graph, 0), "cuGraphInstantiate");
            if made.is_err() {
                driver::cuGraphDestroy(graph);
            }
            made.map(|()| Self { gpu, graph, exec })
        }
    }
    /// Enqueues all of it on `stream`.
    pub fn launch(&mut self, stream: usize) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: the graph is alive; the stream is the caller's.
        check(unsafe { driver::cuGraphLaunch(self.exec, stream as driver::CUstream) }, "cuGraphLaunch")
    }
    /// Counts what was recorded. For drivers of CUDA 12.3 or newer.
    pub fn nodes(&self) -> Result<Nodes> {
        use driver::CUgraphNodeType_enum::CU_GRAPH_NODE_TYPE_KERNEL as KERNEL;
        let nothing: driver::CUgraphNode = std::ptr::null_mut();
        let (mut count, mut edge_count, mut kernels) = (0, 0, 0);
        self.gpu.bind()?;
        // SAFETY: the graph is alive; without room for handles only their number is stored, and then there is
        // room for as many.
        let edges = unsafe {
            check(driver::cuGraphGetNodes(self.graph, nothing.cast(), &mut count), "cuGraphGetNodes")?;
            let mut nodes = vec![nothing; count];
            check(driver::cuGraphGetNodes(self.graph, nodes.as_mut_ptr(), &mut count), "cuGraphGetNodes")?;
            for node in nodes {
                let mut kind = KERNEL;
                check(driver::cuGraphNodeGetType(node, &mut kind), "cuGraphNodeGetType")?;
                kernels += usize::from(kind == KERNEL);
            }
            let mut get = |from: *mut _, to: *mut _, data: *mut _| {
                let status = driver::cuGraphGetEdges_v2(self.graph, from, to, data, &mut edge_count);
                check(status, "cuGraphGetEdges").map(|()| edge_count)
            };
            let n = get(nothing.cast(), nothing.cast(), std::ptr::null_mut())?;
            let (mut from, mut to, mut edges) = (vec![nothing; n], vec![nothing; n], vec![NO_EDGE; n]);
            get(from.as_mut_ptr(), to.as_mut_ptr(), edges.as_mut_ptr())?;
            edges
        };
        let programmatic = driver::CUgraphDependencyType_enum::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8;
        let overlapping = edges.iter().filter(|e| e.type_ == programmatic).count();
        Ok(Nodes { kernels, others: count - kernels, overlapping })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: made by `instantiate`, dropped once.
            unsafe {
                driver::cuGraphExecDestroy(self.exec);
                driver::cuGraphDestroy(self.graph);
            }
        }
    }
}
