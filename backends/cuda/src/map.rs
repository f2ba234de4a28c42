//! Tensor maps: what the copy engine of sm_90 and newer is told of a matrix.
use crate::{check, driver};
use q4_core::{DType, Result};
use std::ffi::c_void;
use std::ptr::from_ref;

/// A matrix in device memory and the boxes it is copied in, as a kernel takes it (`__grid_constant__`, 128 bytes).
/// What a box has outside of the matrix reads as zeros and is not written. In shared memory the 16-byte pieces of a
/// line are swizzled as wide as the line is.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct TensorMap(#[allow(dead_code)] driver::CUtensorMap);

impl TensorMap {
    /// `[rows, cols]` of `dtype` at `data`, `ld` elements from one row to the next; boxes of `width` columns (32, 64 or
    /// 128 bytes) by `height` rows (at most 256). The address and the bytes between rows are multiples of 16.
    pub fn new(
        data: u64,
        dtype: DType,
        [rows, cols, ld]: [usize; 3],
        [width, height]: [usize; 2],
    ) -> Result<Self> {
        use driver::CUtensorMapDataType_enum as Kind;
        use driver::CUtensorMapSwizzle_enum as Swizzle;
        let (kind, size) = match dtype {
            DType::BF16 => (Kind::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2),
            DType::F16 => (Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2),
            _ => (Kind::CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4),
        };
        let swizzle = match width * size {
            128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        };
        let sizes = [cols as u64, rows as u64];
        let strides = [(ld * size) as u64];
        let (boxed, steps) = ([width as u32, height as u32], [1u32; 2]);
        let mut map = driver::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have as many elements as the rank says; the driver reads them and writes the map.
        let status = unsafe {
            driver::cuTensorMapEncodeTiled(
                &mut map,
                kind,
                2,
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
        check(
            status,
            &format!("a map of [{rows}, {cols}], rows {ld} apart, in boxes of {height} by {width}"),
        )?;
        Ok(Self(map))
    }
}
