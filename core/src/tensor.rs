//! Devices, element types and borrowed, DLPack-shaped views: the only form in which data crosses a boundary.
use crate::{Code, Error, Result};
use half::{bf16, f16};
use std::{collections::BTreeSet, ffi::c_void, fmt, marker::PhantomData, ptr::NonNull, sync::Mutex};

/// Where bytes live. Ordinals are those of the vendor's runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Device {
    /// Host memory.
    #[default]
    Cpu,
    /// CUDA device with this ordinal.
    Cuda(u32),
    /// Device of a third party's backend, which supplies its memory: see [`crate::Q4Backend::devices`].
    Vendor {
        /// Name of the backend. [`Device::vendor`] makes one of any text.
        backend: &'static str,
        /// Place among the devices of that backend.
        ordinal: u32,
    },
}

impl Device {
    /// How a library calls the backend of its own devices, whatever name a program knows it by.
    pub const OWN: &'static str = "vendor";

    /// The device of a backend. Names are kept for the life of the process, each once.
    pub fn vendor(backend: &str, ordinal: u32) -> Self {
        static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
        let mut names = NAMES.lock().unwrap_or_else(|e| e.into_inner());
        let known = names.get(backend).copied();
        let backend = known.unwrap_or_else(|| Box::leak(backend.to_owned().into_boxed_str()));
        names.insert(backend);
        Self::Vendor { backend, ordinal }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(i) => write!(f, "cuda:{i}"),
            Self::Vendor { backend, ordinal } => write!(f, "{backend}:{ordinal}"),
        }
    }
}

/// Element type of a *storage* tensor. Packed 4-bit codes are `U8`; their meaning is in the schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// Raw bytes and packed codes.
    U8,
    /// Signed bytes.
    I8,
    /// Block scales: E4M3FN, where only 0x7F and 0xFF are NaN.
    F8E4M3,
    /// IEEE binary16.
    F16,
    /// Upper half of an f32.
    BF16,
    /// IEEE binary32.
    F32,
    /// IEEE binary64.
    F64,
    /// Signed 32-bit integers.
    I32,
    /// Signed 64-bit integers.
    I64,
}

impl DType {
    /// Bytes an element takes (whole bytes on purpose).
    pub const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::F8E4M3 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }
    /// Spelling used in reports and on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::F8E4M3 => "f8_e4m3",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::I32 => "i32",
            Self::I64 => "i64",
        }
    }
    /// f16, bf16 or f32: what activations and outputs may be.
    pub const fn is_io(self) -> bool {
        matches!(self, Self::F16 | Self::BF16 | Self::F32)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl serde::Serialize for DType {
    fn serialize<S: serde::Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.serialize_str(self.as_str())
    }
}
impl serde::Serialize for Device {
    fn serialize<S: serde::Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

/// Rust types that have a [`DType`].
///
/// # Safety
/// `DTYPE.size()` is `size_of::<Self>()` and every bit pattern is a valid value.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The storage type.
    const DTYPE: DType;
}
macro_rules! element {
    ($($t:ty = $d:ident),*) => { $(
        // SAFETY: plain old data of the size its DType states.
        unsafe impl Element for $t { const DTYPE: DType = DType::$d; }
    )* };
}
element!(u8 = U8, i8 = I8, f16 = F16, bf16 = BF16, f32 = F32, f64 = F64, i32 = I32, i64 = I64);

/// Largest number of dimensions a view has.
pub const MAX_RANK: usize = 4;

/// Extents and strides of a view, in elements.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Dims {
    rank: usize,
    shape: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
    /// Elements from the first to the last one, inclusive.
    span: usize,
}

/// Borrowed strided tensor. Copying it copies a pointer.
#[derive(Clone, Copy)]
pub struct TensorView<'a> {
    data: NonNull<c_void>,
    nbytes: usize,
    device: Device,
    dtype: DType,
    dims: Dims,
    _borrow: PhantomData<&'a [u8]>,
}

/// The same, writable and therefore not `Copy`.
pub struct TensorViewMut<'a> {
    inner: TensorView<'a>,
    _unique: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view is a borrow of plain bytes; device work on it is ordered by the stream of the call.
unsafe impl Send for TensorView<'_> {}
// SAFETY: as above; nothing can be written through a shared view.
unsafe impl Sync for TensorView<'_> {}
// SAFETY: as above; the borrow is unique.
unsafe impl Send for TensorViewMut<'_> {}

impl<'a> TensorView<'a> {
    /// Builds a view after checking that `shape` and `strides` stay inside `nbytes`.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for more than [`MAX_RANK`] dimensions, negative extents or strides, and
    /// elements behind the last byte.
    ///
    /// # Safety
    /// `data` addresses `nbytes` readable bytes on `device` for `'a`.
    #[inline]
    pub unsafe fn from_raw(
        data: NonNull<c_void>,
        nbytes: usize,
        device: Device,
        dtype: DType,
        shape: &[i64],
        strides: &[i64],
    ) -> Result<Self> {
        let dims = Dims::new(shape, strides)?;
        let need = dims.span.checked_mul(dtype.size()).ok_or_else(|| overflow(shape))?;
        if need > nbytes {
            return Err(too_short(need, shape, dtype, nbytes));
        }
        Ok(Self { data, nbytes, device, dtype, dims, _borrow: PhantomData })
    }

    /// A contiguous host view of `shape` over typed elements.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] when `data` has fewer elements.
    pub fn of<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Self::of_bytes(bytes_of(data), T::DTYPE, shape)
    }

    /// A contiguous host view of `shape` over raw bytes holding `dtype` elements.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] when `data` has fewer bytes.
    pub fn of_bytes(data: &'a [u8], dtype: DType, shape: &[usize]) -> Result<Self> {
        let (shape, strides, rank) = contiguous(shape)?;
        // SAFETY: a slice is readable for its lifetime; the bounds are checked by `from_raw`.
        unsafe {
            Self::from_raw(
                dangling_or(data.as_ptr()),
                data.len(),
                Device::Cpu,
                dtype,
                &shape[..rank],
                &strides[..rank],
            )
        }
    }

    /// A host matrix `[rows, cols]` whose rows start `ld` elements apart.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] when the last row ends behind `data`.
    pub fn matrix<T: Element>(data: &'a [T], rows: usize, cols: usize, ld: usize) -> Result<Self> {
        let (shape, strides) = ([rows as i64, cols as i64], [ld as i64, 1]);
        let bytes = bytes_of(data);
        // SAFETY: as in `of_bytes`.
        unsafe {
            Self::from_raw(dangling_or(bytes.as_ptr()), bytes.len(), Device::Cpu, T::DTYPE, &shape, &strides)
        }
    }

    /// Extents in elements.
    pub fn shape(&self) -> &[i64] {
        &self.dims.shape[..self.dims.rank]
    }
    /// Strides in elements.
    pub fn strides(&self) -> &[i64] {
        &self.dims.strides[..self.dims.rank]
    }
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Device the bytes live on.
    pub fn device(&self) -> Device {
        self.device
    }
    /// Base address.
    pub fn as_ptr(&self) -> *const c_void {
        self.data.as_ptr()
    }
    /// Bytes reachable from `as_ptr`.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product::<i64>() as usize
    }
    /// No element at all.
    pub fn is_empty(&self) -> bool {
        self.dims.span == 0
    }
    /// Bytes from the first element to the end of the last.
    pub fn span(&self) -> usize {
        self.dims.span * self.dtype.size()
    }
    /// Row-major without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut expect = 1;
        self.shape().iter().zip(self.strides()).rev().all(|(&d, &s)| {
            let ok = d == 1 || s == expect;
            expect *= d;
            ok
        })
    }
    /// `(rows, cols, leading stride)` of a rank-2 view with adjacent columns.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for another rank or columns that are not adjacent.
    pub fn as_matrix(&self) -> Result<(usize, usize, usize)> {
        match (self.shape(), self.strides()) {
            (&[r, c], &[ld, s]) if s == 1 || c <= 1 => Ok((r as usize, c as usize, ld as usize)),
            (shape, strides) => {
                Err(Error::new(Code::ShapeMismatch, "operand is not a matrix with adjacent columns")
                    .need("rank 2, last stride 1")
                    .have(format!("shape {shape:?}, strides {strides:?}")))
            }
        }
    }
    /// The elements of a contiguous host view.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for gaps, another element type, another device, or bytes that are not aligned
    /// for it.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        self.host::<T>()?;
        if !self.is_contiguous() {
            return Err(
                Error::new(Code::ShapeMismatch, "view has gaps between its rows").need("contiguous elements")
            );
        }
        // SAFETY: `host` proved device, type and alignment; `from_raw` proved the bounds; 'a is the borrow's
        // life.
        Ok(unsafe { std::slice::from_raw_parts(self.data.as_ptr().cast(), self.len()) })
    }
    /// Row `r` of a host matrix.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] as of [`as_matrix`](Self::as_matrix), for another element type or device, and
    /// for bytes that are not aligned for it.
    pub fn row<T: Element>(&self, r: usize) -> Result<&'a [T]> {
        self.host::<T>()?;
        let (rows, cols, ld) = self.as_matrix()?;
        assert!(r < rows, "row {r} of {rows}");
        // SAFETY: `from_raw` proved that (rows - 1) * ld + cols elements are inside the allocation.
        Ok(unsafe { std::slice::from_raw_parts(self.data.as_ptr().cast::<T>().add(r * ld), cols) })
    }
    /// `count` rows of a matrix from row `from` on, wherever it lives.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] as of [`as_matrix`](Self::as_matrix), and for rows that it does not have.
    pub fn rows(&self, from: usize, count: usize) -> Result<Self> {
        let (rows, cols, ld) = self.as_matrix()?;
        if from.checked_add(count).is_none_or(|end| end > rows) {
            return Err(Error::new(Code::ShapeMismatch, "rows of a matrix")
                .need(format!("some of {rows}"))
                .have(format!("{count} from {from} on")));
        }
        let at = if count == 0 { 0 } else { from * ld * self.dtype.size() };
        let (shape, strides) = ([count as i64, cols as i64], [ld as i64, 1]);
        // SAFETY: a part of what `from_raw` was promised, on the same device for the same time; a row that is
        // there begins inside of it.
        unsafe {
            let data = self.data.cast::<u8>().add(at).cast();
            Self::from_raw(data, self.nbytes - at, self.device, self.dtype, &shape, &strides)
        }
    }
    /// The raw bytes of a contiguous host view, whatever its type.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] for gaps and on another device.
    pub fn as_bytes(&self) -> Result<&'a [u8]> {
        if self.device != Device::Cpu || !self.is_contiguous() {
            return Err(Error::new(Code::ShapeMismatch, "bytes of a view")
                .need("contiguous, on cpu")
                .have(format!("{self:?}")));
        }
        // SAFETY: bounds proved by `from_raw`.
        Ok(unsafe { std::slice::from_raw_parts(self.data.as_ptr().cast(), self.len() * self.dtype.size()) })
    }

    fn host<T: Element>(&self) -> Result<()> {
        if self.device != Device::Cpu || self.dtype.size() != size_of::<T>() || self.dtype != T::DTYPE {
            return Err(Error::new(Code::ShapeMismatch, "operand has another element type or device")
                .need(format!("{} on cpu", T::DTYPE))
                .have(format!("{} on {}", self.dtype, self.device)));
        }
        if !self.data.cast::<T>().is_aligned() {
            return Err(Error::new(Code::ShapeMismatch, "operand is not aligned for its element type")
                .need(format!("{}-byte alignment", align_of::<T>())));
        }
        Ok(())
    }
}

impl<'a> TensorViewMut<'a> {
    /// As [`TensorView::from_raw`], writable.
    ///
    /// # Errors
    /// As there; [`Code::ShapeMismatch`] also for a view that overlaps itself.
    ///
    /// # Safety
    /// As there, and the bytes are writable and not aliased for `'a`.
    #[inline]
    pub unsafe fn from_raw(
        data: NonNull<c_void>,
        nbytes: usize,
        device: Device,
        dtype: DType,
        shape: &[i64],
        strides: &[i64],
    ) -> Result<Self> {
        // SAFETY: forwarded to the caller.
        let inner = unsafe { TensorView::from_raw(data, nbytes, device, dtype, shape, strides)? };
        if inner.shape().iter().zip(inner.strides()).any(|(&d, &s)| d > 1 && s == 0) {
            return Err(Error::new(Code::ShapeMismatch, "writable view overlaps itself").need("strides > 0"));
        }
        Ok(Self { inner, _unique: PhantomData })
    }
    /// A contiguous writable host view of `shape`.
    ///
    /// # Errors
    /// As [`TensorView::of`].
    pub fn of<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        let (shape, strides, rank) = contiguous(shape)?;
        let n = size_of_val(data);
        // SAFETY: a unique slice is writable for its lifetime; bounds are checked by `from_raw`.
        unsafe {
            Self::from_raw(
                dangling_or(data.as_mut_ptr().cast()),
                n,
                Device::Cpu,
                T::DTYPE,
                &shape[..rank],
                &strides[..rank],
            )
        }
    }
    /// A writable host matrix `[rows, cols]` whose rows start `ld` elements apart.
    ///
    /// # Errors
    /// As [`TensorView::matrix`]; [`Code::ShapeMismatch`] also for rows that overlap.
    pub fn matrix<T: Element>(data: &'a mut [T], rows: usize, cols: usize, ld: usize) -> Result<Self> {
        if rows > 1 && ld < cols {
            return Err(Error::new(Code::ShapeMismatch, "rows overlap")
                .need(format!("stride >= {cols}"))
                .have(ld.to_string()));
        }
        let n = size_of_val(data);
        let (shape, strides) = ([rows as i64, cols as i64], [ld as i64, 1]);
        // SAFETY: as in `of`.
        unsafe {
            Self::from_raw(dangling_or(data.as_mut_ptr().cast()), n, Device::Cpu, T::DTYPE, &shape, &strides)
        }
    }
    /// Reborrow for reading.
    pub fn as_view(&self) -> TensorView<'_> {
        self.inner
    }
    /// Writable base address.
    pub fn as_mut_ptr(&mut self) -> *mut c_void {
        self.inner.data.as_ptr()
    }
    /// `count` rows of a matrix from row `from` on.
    ///
    /// # Errors
    /// As [`TensorView::rows`].
    pub fn rows_mut(&mut self, from: usize, count: usize) -> Result<TensorViewMut<'_>> {
        Ok(TensorViewMut { inner: self.inner.rows(from, count)?, _unique: PhantomData })
    }
    /// The elements of a contiguous host view.
    ///
    /// # Errors
    /// As [`TensorView::as_slice`].
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let n = self.inner.as_slice::<T>()?.len();
        // SAFETY: as in `TensorView::as_slice`, and the borrow is unique.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.inner.data.as_ptr().cast(), n) })
    }
    /// Row `r` of a host matrix.
    ///
    /// # Errors
    /// As [`TensorView::row`].
    pub fn row_mut<T: Element>(&mut self, r: usize) -> Result<&mut [T]> {
        let n = self.inner.row::<T>(r)?.len();
        let (_, _, ld) = self.inner.as_matrix()?;
        // SAFETY: as in `TensorView::row`, and the borrow is unique.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.inner.data.as_ptr().cast::<T>().add(r * ld), n) })
    }
}

impl fmt::Debug for TensorView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?} on {}", self.dtype, self.shape(), self.device)
    }
}
impl fmt::Debug for TensorViewMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Dims {
    /// Every operand of every product passes here, several times: one loop, and errors out of the way.
    #[inline]
    fn new(shape: &[i64], strides: &[i64]) -> Result<Self> {
        let rank = shape.len();
        if rank != strides.len() || rank > MAX_RANK {
            return Err(wrong_rank(rank, strides.len()));
        }
        let mut d = Self { rank, shape: [1; MAX_RANK], strides: [1; MAX_RANK], span: 0 };
        let (mut last, mut count) = (0i64, 1i64);
        for i in 0..rank {
            let (extent, stride) = (shape[i], strides[i]);
            if extent < 0 || stride < 0 {
                return Err(negative(shape, strides));
            }
            (d.shape[i], d.strides[i]) = (extent, stride);
            let reach = (extent - 1).max(0).checked_mul(stride).and_then(|reach| last.checked_add(reach));
            let (Some(reach), Some(all)) = (reach, count.checked_mul(extent)) else {
                return Err(overflow(shape));
            };
            (last, count) = (reach, all);
        }
        if count > 0 {
            let span = usize::try_from(last).ok().and_then(|last| last.checked_add(1));
            d.span = span.ok_or_else(|| overflow(shape))?;
        }
        Ok(d)
    }
}

#[cold]
fn wrong_rank(shape: usize, strides: usize) -> Error {
    Error::new(Code::ShapeMismatch, "rank of a view")
        .need(format!("at most {MAX_RANK}, the same for shape and strides"))
        .have(format!("{shape} and {strides}"))
}

#[cold]
fn negative(shape: &[i64], strides: &[i64]) -> Error {
    Error::new(Code::ShapeMismatch, "negative extent or stride").have(format!("{shape:?} {strides:?}"))
}

#[cold]
fn too_short(need: usize, shape: &[i64], dtype: DType, nbytes: usize) -> Error {
    Error::new(Code::ShapeMismatch, "view reaches past its allocation")
        .need(format!("{need} bytes for {shape:?} {dtype}"))
        .have(format!("{nbytes} bytes"))
}

fn contiguous(shape: &[usize]) -> Result<([i64; MAX_RANK], [i64; MAX_RANK], usize)> {
    let (mut s, mut st) = ([1i64; MAX_RANK], [1i64; MAX_RANK]);
    if shape.len() > MAX_RANK {
        return Err(Error::new(Code::ShapeMismatch, "rank of a view")
            .need(format!("<= {MAX_RANK}"))
            .have(shape.len().to_string()));
    }
    let mut stride = 1i64;
    for i in (0..shape.len()).rev() {
        s[i] = i64::try_from(shape[i]).map_err(|_| Error::new(Code::ShapeMismatch, "extent overflows"))?;
        st[i] = stride;
        stride = stride
            .checked_mul(s[i].max(1))
            .ok_or_else(|| Error::new(Code::ShapeMismatch, "extent overflows"))?;
    }
    Ok((s, st, shape.len()))
}

#[cold]
fn overflow(shape: &[i64]) -> Error {
    Error::new(Code::ShapeMismatch, "number of elements overflows").have(format!("{shape:?}"))
}

fn dangling_or(p: *const u8) -> NonNull<c_void> {
    NonNull::new(p.cast_mut().cast()).unwrap_or(NonNull::<u64>::dangling().cast())
}

fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: `Element` types are plain old data without padding.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_checked() {
        let v = [0f32; 12];
        assert!(TensorView::matrix(&v, 3, 4, 4).is_ok());
        assert!(TensorView::matrix(&v, 3, 4, 5).is_err());
        assert!(TensorView::matrix(&v, 2, 4, 8).is_ok());
        assert!(TensorView::of(&v, &[usize::MAX, 2]).is_err());
        assert!(TensorView::of(&v, &[1 << 40, 1 << 40]).is_err());
        assert!(TensorView::of(&v, &[13]).is_err());
        assert_eq!(TensorView::of(&v, &[0, 7]).expect("empty").len(), 0);
    }

    #[test]
    fn writable_rows_must_not_overlap() {
        let mut v = [0f32; 12];
        assert!(TensorViewMut::matrix(&mut v, 3, 4, 2).is_err());
        let mut m = TensorViewMut::matrix(&mut v, 3, 3, 4).expect("fits");
        m.row_mut::<f32>(2).expect("row")[2] = 1.0;
        assert_eq!(v[10], 1.0);
    }

    #[test]
    fn element_type_is_not_reinterpreted() {
        let v = [0u8; 8];
        let t = TensorView::of(&v, &[8]).expect("fits");
        assert!(t.as_slice::<f32>().is_err());
        assert!(t.as_slice::<u8>().is_ok());
    }
}
