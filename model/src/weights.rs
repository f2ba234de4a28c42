//! Weights on their way from where they are stored to an executor, and those that executors have alike.
use crate::checkpoint::{Bytes, Elements};
use crate::executor::Executor;
use q4_core::{FuseSet, Q4Linear, Result};
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
    /// The products and the column each starts at.
    pub parts: Vec<(Q4Linear, usize)>,
    /// Out features of all parts.
    pub n: usize,
    /// Added to every row, `[n]`.
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    /// Whether all parts take `set` along for `m` rows. A gate needs its rows in one weight, and what is
    /// added behind the product cannot be overtaken.
    pub fn fuses(&self, m: usize, set: FuseSet) -> bool {
        let one = self.parts.len() == 1 || !set.contains(FuseSet::GATE);
        one && self.bias.is_none() && self.parts.iter().all(|(part, _)| part.fuses(m, set))
    }
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
