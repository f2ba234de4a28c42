//! What a weight file holds, as its readers hand it over.
use super::table::Tensor;
use q4_core::{Code, DType, Error, Result, TensorView, read_floats};
use serde::Serialize;
use std::collections::BTreeMap;

/// How weight files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Container {
    /// `*.safetensors`, alone or in shards.
    Safetensors,
    /// `*.dat`.
    Dat,
    /// `*.gguf`, which holds configuration and tokenizer too.
    Gguf,
}

/// What a container's reader hands over.
pub(super) struct Index {
    pub tensors: Vec<Tensor>,
    pub metadata: BTreeMap<String, String>,
}

/// A tensor as it is stored, borrowed from the file and perhaps not aligned.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// Little-endian elements, row-major.
    pub bytes: &'a [u8],
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: &'a [usize],
}

impl<'a> Stored<'a> {
    /// The same as a view.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for more than four dimensions.
    pub fn view(&self) -> Result<TensorView<'a>> {
        TensorView::of_bytes(self.bytes, self.dtype, self.shape)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Never: containers with empty tensors are refused.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The elements widened to f32, exactly.
    ///
    /// # Errors
    /// [`Code::TensorType`] unless they are f16, bf16 or f32.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        if !self.dtype.is_io() {
            return Err(Error::new(Code::TensorType, "a tensor of floats")
                .need("float16, bfloat16 or float32")
                .have(self.dtype.as_str()));
        }
        let mut out = vec![0.0; self.len()];
        read_floats(self.bytes, self.dtype, &mut out);
        Ok(out)
    }
}
