//! Matrices whose rows are looked up: the embedding, and a dense head.
use super::{Checkpoint, Stored};
use q4_core::formats::ggml::Blocks;
use q4_core::{DType, Part, Q4Schema, Result, ThreadPool, read_floats};

/// What the elements of a matrix are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// f16, bf16 or f32.
    Floats(DType),
    /// Blocks of a GGUF file.
    Blocks(Blocks),
}

impl Elements {
    /// Bytes of a row of `width` elements.
    pub fn row_bytes(self, width: usize) -> usize {
        match self {
            Self::Floats(dtype) => width * dtype.size(),
            Self::Blocks(blocks) => blocks.row(width),
        }
    }
    /// What their addresses are a multiple of where loops read them.
    pub fn align(self) -> usize {
        match self {
            Self::Floats(dtype) => dtype.size(),
            Self::Blocks(_) => 1,
        }
    }
    /// The type of floats that holds them exactly.
    pub fn dtype(self) -> DType {
        match self {
            Self::Floats(dtype) => dtype,
            Self::Blocks(_) => DType::F32,
        }
    }
    /// Widens `out.len()` elements of whole rows to f32. Exact, but for what the format of blocks rounds.
    ///
    /// # Panics
    /// If `bytes` are those of another number of elements.
    pub fn read(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::Floats(dtype) => read_floats(bytes, dtype, out),
            Self::Blocks(blocks) => blocks.decode(bytes, out),
        }
    }
}

/// A matrix `[rows, width]` as it is stored, every value finite.
#[derive(Clone, Debug)]
pub struct Matrix<'a> {
    /// Its tensor.
    pub name: String,
    /// Their type.
    pub elements: Elements,
    /// Row-major, perhaps not aligned.
    pub bytes: &'a [u8],
    /// Extents.
    pub shape: [usize; 2],
}

impl Matrix<'_> {
    /// The elements widened to f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.shape[0] * self.shape[1]];
        self.elements.read(self.bytes, &mut out);
        out
    }
}

impl Checkpoint {
    /// The embedding, `[vocab, hidden]`.
    ///
    /// # Errors
    /// As [`floats`](Self::floats), or [`layer`](Self::layer) for blocks.
    pub fn embedding(&self) -> Result<Matrix<'_>> {
        self.matrix(self.config().arch.names.embedding, |name, shape| self.floats(name, shape))
    }

    /// As [`embedding`](Self::embedding), or a dense head, of which a few rows are read later; `threads`
    /// share the reading.
    ///
    /// # Errors
    /// As [`embedding`](Self::embedding).
    pub fn matrix_in_passing(&self, module: &str, threads: &ThreadPool) -> Result<Matrix<'_>> {
        let matrix = self.matrix(module, |name, shape| self.floats_in_passing(threads, name, shape))?;
        if let Elements::Blocks(_) = matrix.elements {
            self.release_tensor(&matrix.name);
        }
        Ok(matrix)
    }

    /// What the embedding is stored as; reads nothing of it.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    pub fn embedding_elements(&self) -> Result<Elements> {
        let module = self.config().arch.names.embedding;
        match self.blocks_of(module) {
            Some(blocks) => Ok(Elements::Blocks(blocks)),
            None => Ok(Elements::Floats(self.tensor(&format!("{module}.weight"))?.dtype)),
        }
    }

    /// The blocks that a module is stored in, if it is.
    pub(crate) fn blocks_of(&self, module: &str) -> Option<Blocks> {
        let name = format!("{module}.weight");
        Blocks::ALL.into_iter().find(|blocks| self.table().contains_key(&blocks.tensor(&name)))
    }

    fn matrix<'a>(
        &'a self,
        module: &str,
        floats: impl Fn(&str, &[usize]) -> Result<Stored<'a>>,
    ) -> Result<Matrix<'a>> {
        let shape @ [n, k] = [self.config().vocab_size, self.config().hidden_size];
        if self.blocks_of(module).is_some() {
            let layer = self.layer(module, n, k)?;
            if let Q4Schema::Ggml(of) = layer.detected.schema {
                let bytes = layer.segment.data.need(Part::Codes)?.as_bytes()?;
                let (name, elements) = (layer.detected.keys.weight, Elements::Blocks(of.blocks));
                return Ok(Matrix { name, elements, bytes, shape });
            }
        }
        let name = format!("{module}.weight");
        let stored = floats(&name, &shape)?;
        Ok(Matrix { name, elements: Elements::Floats(stored.dtype), bytes: stored.bytes, shape })
    }
}
