//! A loaded model's tables and norms, moved to the device its products were prepared on.
use super::executor::{CudaExecutor, CudaHead, CudaNorm, CudaTable};
use super::kernels::ModelKernels;
use crate::cpu::{CpuExecutor, CpuHead, CpuLinear, CpuNorm, CpuTable};
use crate::executor::Shape;
use crate::graph::{Block, Qwen3};
use bytemuck::Pod;
use q4_core::memory::{Placement, Role, UnifiedMemory};
use q4_core::{DType, FuseSet, Q4Linear, Result};
use q4_cuda::{Buffer, Gpu};
use std::sync::Arc;

/// The graph with its weights on one device, and the kernels between its products.
pub struct CudaModel {
    /// The graph.
    pub graph: Qwen3<CudaExecutor>,
    pub(super) gpu: Arc<Gpu>,
    pub(super) kernels: Arc<ModelKernels>,
    pub(super) dtype: DType,
}

impl CudaModel {
    /// The kernels [`upload`](Self::upload) will ask for; it finds them while these are kept.
    pub fn kernels(ordinal: u32, shape: &Shape, dtype: DType) -> Result<impl Sized + use<>> {
        ModelKernels::load(&Gpu::open(ordinal)?, shape, dtype)
    }

    /// Uploads everything of `model` but its products, which are on device `ordinal` already. `dtype`: what
    /// products read and write. Tables and norms go where `memory` wants weights;
    /// [`q4_core::Code::UnifiedMemory`] where that is required and cannot be.
    pub fn upload(
        model: Qwen3<CpuExecutor>,
        ordinal: u32,
        dtype: DType,
        memory: UnifiedMemory,
    ) -> Result<Self> {
        let gpu = Gpu::open(ordinal)?;
        let place = memory.place(Role::Weight, false, &gpu.managed())?;
        let kernels = Arc::new(ModelKernels::load(&gpu, &model.shape, dtype)?);
        let table = upload_table(&gpu, &model.table, place)?;
        let head = match model.head {
            CpuHead::Q4(linear) => CudaHead::Q4(linear),
            CpuHead::Dense(t) if t.name == model.table.name => CudaHead::Dense(table.clone()),
            CpuHead::Dense(t) => CudaHead::Dense(upload_table(&gpu, &t, place)?),
        };
        let norm = |n: CpuNorm| -> Result<CudaNorm> {
            Ok(CudaNorm { weight: stored(&gpu, &n.weight, place)?, eps: n.eps })
        };
        let block = |b: Block<CpuExecutor>| -> Result<Block<CudaExecutor>> {
            Ok(Block {
                input_norm: norm(b.input_norm)?,
                qkv: b.qkv,
                q_norm: norm(b.q_norm)?,
                k_norm: norm(b.k_norm)?,
                o: b.o,
                post_norm: norm(b.post_norm)?,
                gate_up: b.gate_up,
                down: b.down,
            })
        };
        let blocks = model.blocks.into_iter().map(block).collect::<Result<_>>()?;
        let graph = Qwen3 { shape: model.shape, table, blocks, norm: norm(model.norm)?, head };
        Ok(Self { graph, gpu, kernels, dtype })
    }

    /// Whether every product of gate and up becomes `silu(gate) * up` itself, in steps of up to `rows` rows.
    pub(super) fn gates(&self, rows: usize) -> bool {
        let alone = FuseSet::GATE;
        let all = FuseSet::NORM.with(FuseSet::GATE);
        let gates = |l: &CpuLinear| matches!(&l.parts[..], [(p, _)] if (1..=rows).all(|m| p.fuses(m, all) || p.fuses(m, alone)));
        self.graph.blocks.iter().all(|b| gates(&b.gate_up))
    }

    /// The head, if it is a 4-bit product.
    pub(crate) fn head(&self) -> Option<&CpuLinear> {
        match &self.graph.head {
            CudaHead::Q4(linear) => Some(linear),
            CudaHead::Dense(_) => None,
        }
    }

    /// Every product, first layer first, the head last.
    pub fn products(&self) -> impl Iterator<Item = &Q4Linear> {
        let layers = self.graph.blocks.iter().flat_map(|b| [&b.qkv, &b.o, &b.gate_up, &b.down]);
        layers.chain(self.head()).flat_map(|l: &CpuLinear| l.parts.iter().map(|(p, _)| p))
    }
}

fn stored<T: Pod>(gpu: &Arc<Gpu>, data: &[T], place: Placement) -> Result<Buffer> {
    match place {
        Placement::Promote => Buffer::managed_of(gpu, data),
        Placement::Keep | Placement::Prefetch => Buffer::lasting_of(gpu, data),
    }
}

fn upload_table(gpu: &Arc<Gpu>, table: &CpuTable, place: Placement) -> Result<CudaTable> {
    let buffer = stored(gpu, table.elements(), place).map_err(|e| e.within(&table.name))?;
    Ok(CudaTable { buffer: Arc::new(buffer), dtype: table.dtype, rows: table.rows })
}
