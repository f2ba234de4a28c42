//! From weights one by one to a graph of them on the device that computes.
use crate::arch::Arch;
use crate::cpu::CpuHome;
use crate::cuda::{CudaHome, CudaModel};
use crate::executor::Shape;
use crate::graph::{Block, Decoder};
use crate::runner::Model;
use crate::weights::{Head, Home, Linear, StoredTable};
use q4_core::memory::UnifiedMemory;
use q4_core::{Code, DType, Device, Error, Result};
use std::sync::Arc;

/// The weights of a model, as a checkpoint or a generator has them; asked for in the order of the methods.
pub(crate) trait Source {
    /// Products of layer `layer`: q/k/v, attention output, gate/up, MLP output.
    fn products(&mut self, layer: usize) -> Result<[Linear; 4]>;
    /// The head, if it is a product.
    fn head(&mut self) -> Result<Option<Linear>>;
    /// Token embeddings.
    fn embedding(&mut self) -> Result<StoredTable>;
    /// A dense head that is not the embeddings.
    fn dense_head(&mut self) -> Result<Option<StoredTable>>;
    /// The norm of module `name`, `[width]`.
    fn norm(&mut self, name: &str, width: usize) -> Result<Vec<f32>>;
}

/// What a graph is made by.
#[derive(Clone, Copy)]
pub(crate) struct Form<'a> {
    pub arch: &'static Arch,
    pub shape: &'a Shape,
    /// Of every norm.
    pub eps: f32,
}

/// The graph on `device`, with outputs of products in `dtype`; tables and norms go where `memory` wants
/// weights. [`Code::Unsupported`] for a family that the device does not compute.
pub(crate) fn assemble(
    form: Form<'_>,
    (device, dtype, memory): (Device, DType, UnifiedMemory),
    source: &mut dyn Source,
) -> Result<Arc<dyn Model>> {
    let Device::Cuda(ordinal) = device else {
        let root = (form.shape.hidden as f32).sqrt();
        let home = CpuHome { embedding_scale: if form.arch.scaled_embedding { root } else { 1.0 } };
        return Ok(Arc::new(decoder(&home, form, source)?));
    };
    form.arch.plain("CUDA").map_err(|e| e.fix("compute it on the CPU: --device cpu"))?;
    let home = CudaHome::new(ordinal, memory)?;
    std::thread::scope(|scope| {
        // Kernels that are not on disk yet compile while weights are prepared.
        let kernels = scope.spawn(|| CudaModel::kernels(ordinal, form.shape, dtype));
        let graph = decoder(&home, form, source)?;
        let _held = kernels.join().map_err(|_| Error::new(Code::Internal, "loading kernels"))??;
        Ok(Arc::new(CudaModel::new(graph, home, dtype)?) as Arc<dyn Model>)
    })
}

/// Every product first, then tables, then norms: what is large is placed before what is small.
fn decoder<H: Home>(home: &H, form: Form<'_>, source: &mut dyn Source) -> Result<Decoder<H::Executor>> {
    let Form { arch, shape, eps } = form;
    let placed = |linear| home.linear(linear);
    let products = (0..shape.layers)
        .map(|i| {
            let [qkv, o, gate_up, down] = source.products(i)?;
            Ok([placed(qkv)?, placed(o)?, placed(gate_up)?, placed(down)?])
        })
        .collect::<Result<Vec<_>>>()?;
    let head = source.head()?.map(placed).transpose()?;
    let table = home.table(source.embedding()?)?;
    let head = match head {
        Some(product) => Head::Product(product),
        None => Head::Dense(match source.dense_head()? {
            Some(own) => home.table(own)?,
            None => table.clone(),
        }),
    };
    let mut blocks = Vec::with_capacity(shape.layers);
    for (i, [qkv, o, gate_up, down]) in products.into_iter().enumerate() {
        let n = &arch.names;
        let mut norm = |name: Option<&str>, width| {
            name.map(|name| home.norm(source.norm(&n.of(i, name), width)?, eps)).transpose()
        };
        let (h, d) = (shape.hidden, shape.head_dim);
        blocks.push(Block {
            input_norm: norm(n.attention.before, h)?,
            attention_norm: norm(n.attention.after, h)?,
            head_norms: match n.heads {
                Some([q, k]) => norm(Some(q), d)?.zip(norm(Some(k), d)?).map(<[_; 2]>::from),
                None => None,
            },
            post_norm: norm(n.mlp.before, h)?,
            mlp_norm: norm(n.mlp.after, h)?,
            activation: arch.mlp.activation(),
            qkv,
            o,
            gate_up,
            down,
        });
    }
    let norm = home.norm(source.norm(arch.names.final_norm, shape.hidden)?, eps)?;
    Ok(Decoder { shape: shape.clone(), table, blocks, norm, head })
}
