//! The stored parts of a weight, by name: borrowed as a file or a caller has them, or owned.
use crate::{Code, DType, Device, Error, GlobalScale, Result, TensorView};
use half::slice::HalfFloatSliceExt;
use std::borrow::Cow;

/// What a stored part is for. A format uses some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Packed codes, or the matrix of a weight that is not quantised.
    Codes,
    /// Scales of blocks, or their codes where they are quantised themselves.
    Scales,
    /// Zero points of blocks, or what is added to them.
    Zeros,
    /// Values that codes of scales stand for.
    Map,
    /// Scales of scales.
    SecondScales,
}

impl Part {
    /// All of them, in the order of storage.
    pub const ALL: [Self; 5] = [Self::Codes, Self::Scales, Self::Zeros, Self::Map, Self::SecondScales];
}

/// The parts of one stored matrix. Which there have to be, and of what size, its format says
/// ([`Format::parts`](crate::formats::Format::parts)).
#[derive(Clone, Debug, Default)]
pub struct SegmentData<'a> {
    views: [Option<TensorView<'a>>; Part::ALL.len()],
    /// Per-tensor scale, of the convention that the schema has.
    pub global: Option<GlobalScale>,
    /// What was subtracted from scales before they were quantised.
    pub offset: f32,
}

impl<'a> SegmentData<'a> {
    /// With this part besides.
    #[must_use]
    pub fn with(mut self, part: Part, view: TensorView<'a>) -> Self {
        self.views[part as usize] = Some(view);
        self
    }
    /// With this per-tensor scale.
    #[must_use]
    pub fn with_global(self, global: Option<GlobalScale>) -> Self {
        Self { global, ..self }
    }
    /// With scales that this was subtracted from.
    #[must_use]
    pub fn with_offset(self, offset: f32) -> Self {
        Self { offset, ..self }
    }
    /// A part that may be missing.
    pub fn get(&self, part: Part) -> Option<&TensorView<'a>> {
        self.views[part as usize].as_ref()
    }
    /// A part that has to be there.
    ///
    /// # Errors
    /// [`Code::Internal`] when it is not: a weight that was validated has it.
    pub fn need(&self, part: Part) -> Result<TensorView<'a>> {
        self.get(part).copied().ok_or_else(|| self.lacks(part))
    }
    /// All there are, in the order of storage.
    pub fn parts(&self) -> impl Iterator<Item = (Part, &TensorView<'a>)> {
        Part::ALL.into_iter().filter_map(|part| Some((part, self.get(part)?)))
    }
    pub(crate) fn lacks(&self, part: Part) -> Error {
        Error::new(Code::Internal, "validated weight has the parts of another schema")
            .need(format!("{part:?}"))
            .have(format!("{:?}", self.parts().map(|p| p.0).collect::<Vec<_>>()))
    }
}

/// The parts of one stored matrix, owned.
#[derive(Clone, Debug, Default)]
pub struct OwnedParts {
    parts: [Option<Owned>; Part::ALL.len()],
    /// Per-tensor scale.
    pub global: Option<GlobalScale>,
    /// What was subtracted from scales before they were quantised.
    pub offset: f32,
}

#[derive(Clone, Debug)]
struct Owned {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl OwnedParts {
    /// A copy of parts in host memory.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for parts that are not contiguous in host memory.
    pub fn copy(data: &SegmentData<'_>) -> Result<Self> {
        let mut out = Self { global: data.global, offset: data.offset, ..Self::default() };
        for (part, view) in data.parts() {
            let shape: Vec<usize> = view.shape().iter().map(|d| *d as usize).collect();
            out = out.with(part, view.dtype(), &shape, view.as_bytes()?.to_vec());
        }
        Ok(out)
    }
    /// With this part besides, `bytes` in the order of memory.
    #[must_use]
    pub fn with(mut self, part: Part, dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.parts[part as usize] = Some(Owned { dtype, shape: shape.to_vec(), bytes });
        self
    }
    /// Without this part.
    #[must_use]
    pub fn without(mut self, part: Part) -> Self {
        self.parts[part as usize] = None;
        self
    }
    /// With this per-tensor scale.
    #[must_use]
    pub fn with_global(self, global: Option<GlobalScale>) -> Self {
        Self { global, ..self }
    }
    /// With scales that this was subtracted from.
    #[must_use]
    pub fn with_offset(self, offset: f32) -> Self {
        Self { offset, ..self }
    }
    /// With a part of f32 besides.
    #[must_use]
    pub fn with_f32(self, part: Part, values: &[f32]) -> Self {
        self.with(part, DType::F32, &[values.len()], bytemuck::cast_slice(values).to_vec())
    }
    /// Bytes of a part; none where it is missing.
    pub fn bytes(&self, part: Part) -> &[u8] {
        self.parts[part as usize].as_ref().map_or(&[], |p| &p.bytes)
    }
    /// The same, writable.
    pub fn bytes_mut(&mut self, part: Part) -> &mut [u8] {
        self.parts[part as usize].as_mut().map_or(&mut [], |p| &mut p.bytes)
    }
    /// Drops the last `count` elements of a part.
    pub fn shorten(&mut self, part: Part, count: usize) {
        if let Some(p) = &mut self.parts[part as usize] {
            p.bytes.truncate(p.bytes.len().saturating_sub(count * p.dtype.size()));
            p.shape = vec![p.bytes.len() / p.dtype.size()];
        }
    }
    /// Type of a part.
    pub fn dtype(&self, part: Part) -> Option<DType> {
        self.parts[part as usize].as_ref().map(|p| p.dtype)
    }
    /// The elements of a part of f32.
    pub fn to_f32(&self, part: Part) -> Vec<f32> {
        self.bytes(part).as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
    }
    /// Sets element `at` of a part of f32.
    pub fn set_f32(&mut self, part: Part, at: usize, value: f32) {
        self.bytes_mut(part)[4 * at..][..4].copy_from_slice(&value.to_ne_bytes());
    }
    /// Bytes of all parts.
    pub fn len(&self) -> usize {
        self.parts.iter().flatten().map(|p| p.bytes.len()).sum()
    }
    /// No byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Takes the bytes of parts of the same sizes, where they are.
    pub fn overwrite(&mut self, other: &Self) {
        for part in Part::ALL {
            self.bytes_mut(part).copy_from_slice(other.bytes(part));
        }
        (self.global, self.offset) = (other.global, other.offset);
    }
    /// Views of all.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for a part whose bytes are fewer than its extents say.
    pub fn lend(&self) -> Result<SegmentData<'_>> {
        self.lend_at(|part| self.bytes(part))
    }
    /// Views of the same bytes in other places.
    ///
    /// # Errors
    /// As [`lend`](Self::lend), of the bytes in their places.
    pub fn lend_at<'a>(&self, place: impl Fn(Part) -> &'a [u8]) -> Result<SegmentData<'a>> {
        let mut data = SegmentData { global: self.global, offset: self.offset, ..SegmentData::default() };
        for part in Part::ALL {
            if let Some(p) = &self.parts[part as usize] {
                data = data.with(part, TensorView::of_bytes(place(part), p.dtype, &p.shape)?);
            }
        }
        Ok(data)
    }
}

/// The f32 elements of a host view; copied only when the bytes are not aligned.
///
/// # Errors
/// [`Code::TensorType`] for another type or device, [`Code::ShapeMismatch`] for a view with gaps.
pub fn f32s<'a>(view: &TensorView<'a>) -> Result<Cow<'a, [f32]>> {
    if view.dtype() != DType::F32 || view.device() != Device::Cpu {
        return Err(Error::new(Code::TensorType, "operand").need("float32 on cpu").have(format!("{view:?}")));
    }
    if view.as_ptr().cast::<f32>().is_aligned() {
        return view.as_slice::<f32>().map(Cow::Borrowed);
    }
    let mut out = vec![0.0; view.len()];
    read_floats(view.as_bytes()?, DType::F32, &mut out);
    Ok(Cow::Owned(out))
}

/// Widens `out.len()` little-endian elements of an io dtype to f32. Exact.
pub fn read_floats(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = half::bf16::from_le_bytes(*b).to_f32();
            }
        }
        DType::F16 => {
            // Many at a time where the processor can.
            if let Some(Ok(halves)) =
                bytes.get(..2 * out.len()).map(bytemuck::try_cast_slice::<u8, half::f16>)
            {
                return halves.convert_to_f32_slice(out);
            }
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = half::f16::from_le_bytes(*b).to_f32();
            }
        }
        other => panic!("{other} is not a float type of activations or weights"),
    }
}

/// Little-endian elements of an io dtype, each the nearest to its value.
pub(crate) fn write_floats(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
        other => panic!("{other} is not a float type of activations or weights"),
    }
}
