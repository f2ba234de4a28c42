//! Tensors by name, in little more memory than the headers that list them.
//!
//! A header may be all that a file is: one list in the order of the names, without nodes and without a second
//! copy of a name.
use q4_core::detect::{TensorMeta, Tensors};
use q4_core::{Code, DType, Error, Result};
use std::{fmt, ops::Range};

/// Types and shapes by name.
#[derive(Clone, Default)]
pub struct Table(Vec<Tensor>);

/// A tensor of one file; its `range` lies inside it and has the size of `meta`.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub name: Box<str>,
    pub meta: TensorMeta,
    pub kind: &'static Kind,
    /// Which of the files it is in; a reader of one file says 0.
    pub file: u32,
    pub range: Range<usize>,
}

/// An element type as a container knows it.
#[derive(Debug)]
pub(super) struct Kind {
    pub spelled: &'static str,
    pub bits: usize,
    /// The type that weights of ours have; others are listed but never bound.
    pub dtype: Option<DType>,
}

impl Kind {
    pub const fn new(spelled: &'static str, bits: usize, dtype: Option<DType>) -> Self {
        Self { spelled, bits, dtype }
    }
}

impl Table {
    /// The tensors of all `files`, in their order. One that two of them have is [`Code::Container`].
    pub(super) fn of(mut parts: Vec<Vec<Tensor>>, files: &[&str]) -> Result<Self> {
        let mut tensors = Vec::new();
        if let [one] = &mut parts[..] {
            std::mem::swap(&mut tensors, one);
        } else {
            tensors.reserve_exact(parts.iter().map(Vec::len).sum());
        }
        for (file, part) in parts.into_iter().enumerate() {
            tensors.extend(part.into_iter().map(|t| Tensor { file: file as u32, ..t }));
        }
        tensors.sort_unstable_by(|a, b| (&a.name, a.file).cmp(&(&b.name, b.file)));
        match tensors.array_windows().find(|[a, b]| a.name == b.name) {
            None => Ok(Self(tensors)),
            Some([a, b]) => Err(Error::new(Code::Container, format!("tensor `{}` is stored twice", a.name))
                .need("one shard for each tensor")
                .have(format!("{} and {}", files[a.file as usize], files[b.file as usize]))),
        }
    }

    /// The same tensors under other names.
    pub(super) fn renamed(&self, name: impl Fn(&str) -> String) -> Self {
        let mut tensors = self.0.clone();
        tensors.iter_mut().for_each(|t| t.name = name(&t.name).into());
        tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Self(tensors)
    }

    /// Puts tensors in the places of those of their names.
    pub(super) fn replace(&mut self, tensors: impl Iterator<Item = Tensor>) {
        for tensor in tensors {
            if let Ok(at) = self.0.binary_search_by(|t| t.name.cmp(&tensor.name)) {
                self.0[at] = tensor;
            }
        }
    }

    /// Adds tensors of names that none has.
    pub(super) fn add(&mut self, tensors: Vec<Tensor>) {
        self.0.extend(tensors);
        self.0.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    }

    /// Drops the tensor of that name.
    pub(super) fn remove(&mut self, name: &str) {
        if let Ok(at) = self.0.binary_search_by(|t| (*t.name).cmp(name)) {
            self.0.remove(at);
        }
    }

    pub(super) fn find(&self, name: &str) -> Option<&Tensor> {
        self.0.binary_search_by(|t| (*t.name).cmp(name)).ok().map(|at| &self.0[at])
    }

    pub(super) fn tensors(&self) -> &[Tensor] {
        &self.0
    }

    /// Type and shape of one.
    pub fn get(&self, name: &str) -> Option<&TensorMeta> {
        self.find(name).map(|t| &t.meta)
    }

    /// Whether there is one of that name.
    pub fn contains_key(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// Whether the name of one begins so.
    pub fn has_prefix(&self, prefix: &str) -> bool {
        let at = self.0.partition_point(|t| *t.name < *prefix);
        self.0.get(at).is_some_and(|t| t.name.starts_with(prefix))
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &TensorMeta)> {
        self.0.iter().map(|t| (&*t.name, &t.meta))
    }

    /// Their names, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|t| &*t.name)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Tensors for Table {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.get(name)
    }
}

impl PartialEq for Table {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}
