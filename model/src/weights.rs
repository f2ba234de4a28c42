//! Weights on their way from where they are stored to an executor, and those that executors have alike.
use crate::checkpoint::{Bytes, Elements, Order};
use crate::executor::Executor;
use q4_core::{DType, FuseSet, Q4Linear, Result};
use q4_cuda::Buffer;
use std::ops::Range;

/// Where the weights of a model come to lie: what is read goes there at once, in the form its executor wants.
/// Products are prepared there by their backends.
pub trait Home {
    /// Weight of a norm.
    type Norm;
    /// Embeddings or a dense head.
    type Table: Clone;
    /// What computes with them.
    type Executor: Executor<Linear = Linear, Norm = Self::Norm, Table = Self::Table, Head = Head<Self::Table>>;

    /// A norm of `weight`, `[width]`, with what is added to the mean square.
    fn norm(&self, weight: Vec<f32>, eps: f32) -> Result<Self::Norm>;
    /// A table that lies in a file or in memory.
    fn table(&self, table: StoredTable) -> Result<Self::Table>;
    /// Products with what is read beside their weights.
    fn linear(&self, linear: Linear) -> Result<Linear>;
}

/// Token embeddings or a dense head, `[rows, width]`, where the checkpoint has them.
#[derive(Clone)]
pub struct StoredTable {
    /// The file.
    pub bytes: Bytes,
    /// The stored elements in it, aligned for their type.
    pub range: Range<usize>,
    /// What they are.
    pub elements: Elements,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Layer name, for messages.
    pub name: String,
    /// Every element is read in every step; else only the rows of a step's tokens.
    pub whole: bool,
}

impl StoredTable {
    /// Its bytes.
    pub fn stored(&self) -> &[u8] {
        &self.bytes[self.range.clone()]
    }
}

/// One or more products that share their input and write side by side.
pub struct Linear {
    /// The products, from the first column to the last.
    pub parts: Vec<Part>,
    /// Out features of all parts.
    pub n: usize,
    /// Added to every row, `[n]`.
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    /// Whether all parts take `set` along for `m` rows. A gate needs its rows in one weight, what is added
    /// behind the product cannot be overtaken, and a norm comes before inputs change places.
    pub fn fuses(&self, m: usize, set: FuseSet) -> bool {
        let one = self.parts.len() == 1 || !set.contains(FuseSet::GATE);
        let fuses = |part: &Part| {
            part.product.fuses(m, set) && (part.order.is_none() || !set.contains(FuseSet::NORM))
        };
        one && self.bias.is_none() && self.parts.iter().all(fuses)
    }
}

/// A product of a [`Linear`].
pub struct Part {
    /// The product.
    pub product: Q4Linear,
    /// The column of the output that it starts at.
    pub column: usize,
    /// The in feature of each column of its weight, where that is not the column's own number (act-order): a
    /// row of its input is gathered by it, once, and then multiplied.
    pub order: Option<Inputs>,
}

/// An order of inputs, where the executor reads it.
pub enum Inputs {
    /// In host memory.
    Host(Order),
    /// u32 `[k]` in the memory of a CUDA device.
    Cuda(Buffer),
}

impl Part {
    /// Bytes at the start of the scratch for `m` gathered rows, 0 where nothing is gathered; what the product
    /// itself needs lies behind them.
    pub fn gathered(&self, m: usize) -> usize {
        let (k, x) = (self.product.info().k, self.product.types().0);
        if self.order.is_some() { gathered(m, k, x) } else { 0 }
    }
    /// Scratch bytes for `m` rows.
    pub fn workspace(&self, m: usize) -> usize {
        self.gathered(m) + self.product.workspace(m)
    }
}

/// Bytes of `m` gathered rows of `k` elements: a multiple of what scratch is aligned to.
pub(crate) fn gathered(m: usize, k: usize, x: DType) -> usize {
    (m * k * x.size()).next_multiple_of(256)
}

/// What turns the last hidden state into logits.
pub enum Head<T> {
    /// A dense matrix, tied to the embeddings or not.
    Dense(T),
    /// A 4-bit product.
    Product(Linear),
}

impl<T> Head<T> {
    /// The product, if it is one.
    pub fn product(&self) -> Option<&Linear> {
        match self {
            Self::Product(linear) => Some(linear),
            Self::Dense(_) => None,
        }
    }
}
