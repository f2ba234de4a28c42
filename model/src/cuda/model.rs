//! A model on a device: weights go there as they are read, products are prepared there.
use super::CudaCache;
use super::executor::{CudaExecutor, CudaNorm, CudaTable};
use super::kernels::ModelKernels;
use super::slots::Layout;
use crate::checkpoint::Elements;
use crate::executor::Shape;
use crate::graph::Decoder;
use crate::weights::{Home, Inputs, Linear, StoredTable};
use bytemuck::Pod;
use q4_core::memory::UnifiedMemory;
use q4_core::{Code, DType, Error, FuseSet, Q4Linear, Result};
use q4_cuda::{Buffer, Gpu};
use std::sync::Arc;

/// The memory of a device.
pub struct CudaHome {
    gpu: Arc<Gpu>,
    is_shared: bool,
}

impl CudaHome {
    /// Tables and norms go where `memory` wants weights; [`q4_core::Code::UnifiedMemory`] where that is
    /// required and cannot be.
    pub fn new(ordinal: u32, memory: UnifiedMemory) -> Result<Self> {
        let gpu = Gpu::open(ordinal)?;
        let is_shared = memory.grant(&gpu.managed())?;
        Ok(Self { gpu, is_shared })
    }

    fn stored<T: Pod>(&self, data: &[T]) -> Result<Buffer> {
        if self.is_shared { Buffer::managed_of(&self.gpu, data) } else { Buffer::lasting_of(&self.gpu, data) }
    }
}

impl Home for CudaHome {
    type Norm = CudaNorm;
    type Table = CudaTable;
    type Executor = CudaExecutor;

    fn norm(&self, weight: Vec<f32>, eps: f32) -> Result<CudaNorm> {
        Ok(CudaNorm { weight: self.stored(&weight)?, eps })
    }
    fn table(&self, table: StoredTable) -> Result<CudaTable> {
        let buffer = match table.elements {
            Elements::Floats(_) => self.stored(table.stored()),
            // Its kernels read floats.
            Elements::Blocks(_) => {
                let mut values = vec![0f32; table.rows * table.width];
                table.elements.read(table.stored(), &mut values);
                self.stored(bytemuck::cast_slice::<f32, u8>(&values))
            }
        };
        let buffer = buffer.map_err(|e| e.within(&table.name))?;
        Ok(CudaTable { buffer: Arc::new(buffer), dtype: table.elements.dtype(), rows: table.rows })
    }
    fn linear(&self, mut linear: Linear) -> Result<Linear> {
        for part in &mut linear.parts {
            if let Some(Inputs::Host(order)) = &part.order {
                let buffer = self.stored(order.features());
                part.order = Some(Inputs::Cuda(buffer.map_err(|e| e.within(part.product.name()))?));
            }
        }
        Ok(linear)
    }
}

/// The graph with its weights on one device, and the kernels between its products.
pub struct CudaModel {
    /// The graph.
    pub graph: Decoder<CudaExecutor>,
    pub(super) kernels: Arc<ModelKernels>,
}

impl CudaModel {
    /// The kernels [`new`](Self::new) will ask for; it finds them while these are kept.
    pub fn kernels(ordinal: u32, shape: &Shape, dtype: DType) -> Result<impl Sized + use<>> {
        ModelKernels::load(&Gpu::open(ordinal)?, shape, dtype)
    }

    /// A graph whose weights came to lie in `home`. `dtype`: what products read and write.
    pub fn new(graph: Decoder<CudaExecutor>, home: CudaHome, dtype: DType) -> Result<Self> {
        let kernels = Arc::new(ModelKernels::load(&home.gpu, &graph.shape, dtype)?);
        Ok(Self { graph, kernels })
    }

    /// Memory of steps of up to `rows` rows, with logits of `logit_rows`.
    pub(super) fn layout(&self, rows: usize, logit_rows: usize) -> Layout<'_> {
        let gate_up_rows = if self.gates(rows) { 0 } else { rows };
        Layout::of((&self.graph.shape, self.kernels.dtype), rows, logit_rows, gate_up_rows)
    }

    /// Whether a cache of so many positions and `rest` bytes more fit what is free and `allowed`.
    pub(super) fn has_room(&self, positions: usize, rest: u64, allowed: u64) -> Result<()> {
        let (gpu, s, human) = (&self.kernels.gpu, &self.graph.shape, q4_core::memory::human);
        let kv = CudaCache::bytes(self.kernels.dtype, s.layers, s.kv_heads, s.head_dim, positions);
        let free = gpu.memory()?.0.min(allowed);
        if kv + rest <= free {
            return Ok(());
        }
        Err(Error::new(Code::OutOfMemory, format!("a context on {}", gpu.device()))
            .need(format!("{} for keys and values, {} for activations", human(kv), human(rest)))
            .have(format!("{} free and allowed", human(free)))
            .fix("shorten the context with --context, raise --memory-limit, or choose a smaller model"))
    }

    /// Whether every product of gate and up becomes `silu(gate) * up` itself, in steps of up to `rows` rows.
    fn gates(&self, rows: usize) -> bool {
        let alone = FuseSet::GATE;
        let all = FuseSet::NORM.with(FuseSet::GATE);
        let gates = |l: &Linear| (1..=rows).all(|m| l.fuses(m, all) || l.fuses(m, alone));
        self.graph.blocks.iter().all(|b| gates(&b.gate_up))
    }

    /// Every product, first layer first, the head last.
    pub fn products(&self) -> impl Iterator<Item = &Q4Linear> {
        let layers = self.graph.blocks.iter().flat_map(|b| [&b.qkv, &b.o, &b.gate_up, &b.down]);
        layers.chain(self.graph.head.product()).flat_map(|l| l.parts.iter().map(|p| &p.product))
    }
}
