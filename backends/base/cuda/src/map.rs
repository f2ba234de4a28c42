//! Tensor maps: what the copy engine of sm_90 and newer is told of a matrix.
use crate::{Mirror, check, driver};
use q4_core::{DType, Result};
use std::ffi::c_void;
use std::ptr::from_ref;

/// A matrix in device memory and the boxes it is copied in, as a kernel takes it (`__grid_constant__`, 128
/// bytes). What a box has outside of the matrix reads as zeros and is not written. In shared memory the
/// 16-byte pieces of a line are swizzled as wide as the line is.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct TensorMap(#[allow(dead_code)] driver::CUtensorMap);

// SAFETY: 128 bytes, aligned to 64.
unsafe impl Mirror for TensorMap {
    const TYPES: &'static [&'static str] = &["Map"];
}

impl TensorMap {
    /// `[rows, cols]` of `dtype` at `data`, `ld` elements from one row to the next; boxes of `width` columns
    /// (32, 64 or 128 bytes) by `height` rows (at most 256). The address and the bytes between rows are
    /// multiples of 16.
    pub fn new(
        data: u64,
        dtype: DType,
        [rows, cols, ld]: [usize; 3],
        [width, height]: [usize; 2],
    ) -> Result<Self> {
        use driver::CUtensorMapDataType_enum as Kind;
        let (kind, size) = match dtype {
            DType::BF16 => (Kind::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2),
            DType::F16 => (Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2),
            _ => (Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4),
        };
        let what = format!("a map of [{rows}, {cols}], rows {ld} apart, in boxes of {height} by {width}");
        Self::encode(data, kind, [cols, rows], [ld * size], [width, height], swizzle(width * size), &what)
    }

    /// Bytes `[rows, cols]` side by side at `data`, `cols` a multiple of 16; boxes of `height` rows by
    /// `width`, which is 32, 64 or 128.
    pub fn of_bytes(data: u64, [rows, cols]: [usize; 2], [height, width]: [usize; 2]) -> Result<Self> {
        let kind = driver::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_UINT8;
        let what = format!("a map of [{rows}, {cols}] bytes in boxes of {height} by {width}");
        Self::encode(data, kind, [cols, rows], [cols], [width, height], swizzle(width), &what)
    }

    /// Words of eight bytes: the innermost side by side at `data`, and for every other axis the bytes from
    /// one of it to the next, which are multiples of 16; boxes of as many of each (at most 256). Nothing is
    /// swizzled.
    pub fn of_axes<const N: usize, const STRIDES: usize>(
        data: u64,
        sizes: [usize; N],
        strides: [usize; STRIDES],
        boxed: [usize; N],
    ) -> Result<Self> {
        let kind = driver::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
        let none = driver::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_NONE;
        let what = format!("a map of {sizes:?} words, {strides:?} bytes apart, in boxes of {boxed:?}");
        Self::encode(data, kind, sizes, strides, boxed, none, &what)
    }

    /// `[outer, middle, inner]` words of eight bytes side by side at `data`, 16-byte aligned; boxes of as
    /// many of each (at most 256). `inner` is even; nothing is swizzled.
    pub fn of_words(data: u64, shape: [usize; 3], boxed: [usize; 3]) -> Result<Self> {
        let ([outer, middle, inner], [a, b, c]) = (shape, boxed);
        Self::of_axes(data, [inner, middle, outer], [inner * 8, middle * inner * 8], [c, b, a])
    }

    /// Sizes and boxes from the innermost dimension on; bytes between neighbours of the others.
    fn encode<const N: usize, const STRIDES: usize>(
        data: u64,
        kind: driver::CUtensorMapDataType_enum,
        sizes: [usize; N],
        strides: [usize; STRIDES],
        boxed: [usize; N],
        swizzle: driver::CUtensorMapSwizzle_enum,
        what: &str,
    ) -> Result<Self> {
        let (sizes, strides) = (sizes.map(|v| v as u64), strides.map(|v| v as u64));
        let (boxed, steps) = (boxed.map(|v| v as u32), [1u32; N]);
        let mut map = driver::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have as many elements as the rank says; the driver reads them and writes the
        // map.
        let status = unsafe {
            driver::cuTensorMapEncodeTiled(
                &mut map,
                kind,
                N as u32,
                data as *mut c_void,
                from_ref(&sizes).cast(),
                from_ref(&strides).cast(),
                from_ref(&boxed).cast(),
                from_ref(&steps).cast(),
                driver::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                driver::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                driver::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(status, what)?;
        Ok(Self(map))
    }
}

/// As wide as a line of so many bytes.
fn swizzle(line: usize) -> driver::CUtensorMapSwizzle_enum {
    use driver::CUtensorMapSwizzle_enum as Swizzle;
    match line {
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
    }
}
