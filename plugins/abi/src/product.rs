//! What is asked for and what is stored: one product, its encoding, the bytes of its weight, and the machine.
use crate::Q4Str;
use core::ffi::c_void;

macro_rules! numbers {
    ($(#[$doc:meta])* $module:ident { $($(#[$value_doc:meta])* $name:ident = $value:literal,)* }) => {
        $(#[$doc])*
        pub mod $module {
            $($(#[$value_doc])* pub const $name: u32 = $value;)*
        }
    };
}

numbers! {
    /// Encodings. What the bits mean is defined by name and revision.
    schema {
        /// E2M1 codes, low nibble first, an E4M3 scale per 16 of k, usually a per-tensor scale:
        /// `value = fl32(code * fl32(scale ∘ global))`.
        NVFP4 = 1,
        /// Codes into the NF4 codebook, an f32 absmax per block of the flattened segment: `codebook[code] *
        /// absmax`.
        NF4 = 2,
        /// NF4 whose absmax are 8-bit themselves: `absmax = map[code] * nested_absmax[i / nested_block] +
        /// offset`.
        NF4_DQ = 3,
        /// Not quantised.
        DENSE = 4,
        /// E2M1 codes, low nibble first, an E8M0 scale per 32 of k: `value = code * 2^(scale - 127)`. Since
        /// 1.2.
        MXFP4 = 5,
        /// Codes of 0 to 15, low nibble first, a scale per block of k: `value = (code - 8) * scale`. Since
        /// 1.2.
        INT4 = 6,
        /// As `INT4` with a zero point per block: `value = (code - zero) * scale`. Since 1.2.
        INT4_ASYM = 7,
        /// Blocks of GGML, 256 codes of 4 bits in 144 bytes; `q4_plugin.h` has their layout. Since 1.2.
        Q4_K = 8,
        /// As `Q4_K`, 5 bits in 176 bytes. Since 1.2.
        Q5_K = 9,
        /// 256 codes of 6 bits in 210 bytes. Since 1.2.
        Q6_K = 10,
        /// 32 codes of 8 bits in 34 bytes. Since 1.2.
        Q8_0 = 11,
        /// Codes of E4M3, none of them NaN, a scale per tile of `nested_block` out and `block` in features:
        /// `value = fl32(code * scale)`. Since 1.2.
        FP8 = 12,
        /// As `INT4` with a bias per block: `value = fl32(fl32(code * scale) + bias)`. Since 1.2.
        INT4_AFFINE = 13,
    }
}
numbers! {
    /// Element types of inputs, outputs and dense weights.
    dtype {
        /// IEEE binary32.
        F32 = 1,
        /// IEEE binary16.
        F16 = 2,
        /// Upper half of an f32.
        BF16 = 3,
    }
}
numbers! {
    /// How a product is computed. A request and a fact, never a hint.
    path {
        /// 4-bit operands reach the arithmetic units.
        NATIVE_KERNEL = 1,
        /// Packed in memory, decoded in registers inside the product.
        FUSED_DEQUANT = 2,
        /// A dense copy is made, then a dense product runs.
        DEQUANT_MATMUL = 3,
        /// A slow oracle.
        REFERENCE = 4,
        /// As `FUSED_DEQUANT`, weights rounded to bf16 in products of many rows.
        FUSED_ROUNDED = 5,
    }
}
numbers! {
    /// Operations, as bits.
    op {
        /// `y = x W^T`.
        FORWARD = 1,
        /// `dx = dy W`.
        BACKWARD_INPUT = 2,
        /// The decoded matrix.
        DEQUANTIZE = 4,
    }
}
numbers! {
    /// Parts of a fused product, as bits. Since 1.2.
    fuse {
        /// x is f32 `[m, k]`; `x / sqrt(mean(x^2) + eps) * weight`, in f32, rounded to the spec's x type, is
        /// what is quantised or multiplied.
        NORM = 1,
        /// Rows of the weight are gate rows, then as many up rows: `y[m, n / 2] = silu(gate) * up`.
        GATE = 2,
        /// `y += product`; y is f32 whatever the spec says.
        ACCUMULATE = 4,
    }
}
numbers! {
    /// Where weights of a device are put. Since 1.2.
    unified_memory {
        /// In memory of the device alone.
        DISABLED = 0,
        /// In memory that host and device share, where there is some.
        PREFER = 1,
        /// There, or an error.
        REQUIRE = 2,
    }
}
numbers! {
    /// What happens to the input before the product.
    activations {
        /// Used as it is, f32 accumulation.
        NATIVE = 1,
        /// Per 16 of k: `scale = amax / 127`, `q = round_ties_even(x * (127 / amax))`, each operation in f32,
        /// exact integer block products.
        INT8 = 2,
        /// Quantised to NVFP4 by `act_rule`, exact integer block products.
        NVFP4 = 3,
        /// E4M3 of `x / scale`, saturating, each operation in f32, f32 accumulation: with `PER_ROW` and
        /// `PER_BLOCK` `scale = amax / 448` of what it is of, with `STATIC` `act_global`. Since 1.2.
        FP8 = 4,
    }
}
numbers! {
    /// How an NVFP4 quantiser rounds; they differ in bits.
    rule {
        /// torchao.
        TORCHAO = 1,
        /// NVIDIA ModelOpt.
        MODELOPT = 2,
        /// compressed-tensors.
        COMPRESSED_TENSORS = 3,
        /// TransformerEngine.
        TRANSFORMER_ENGINE = 4,
        /// libNVFP4 and `.dat` at run time.
        RUNTIME = 5,
    }
}
numbers! {
    /// Source of the activations' scale: of NVFP4 the per-tensor one.
    global_kind {
        /// Single-level scales.
        NONE = 0,
        /// The number in the spec.
        STATIC = 1,
        /// From the amax of all rows of a call; not with FP8.
        PER_CALL = 2,
        /// From the amax of a row; FP8 alone. Since 1.2.
        PER_ROW = 3,
        /// From that of each 128 in features of a row, the last perhaps fewer; FP8 alone. Since 1.2.
        PER_BLOCK = 4,
    }
}
numbers! {
    /// What a per-tensor scale does to a block scale.
    convention {
        /// There is none; the number beside it is 0.
        NONE = 0,
        /// `scale * g`.
        MULTIPLY = 1,
        /// `scale / g`.
        DIVIDE = 2,
    }
}
numbers! {
    /// Order of NVFP4 block scales, per segment.
    scale_layout {
        /// Not NVFP4.
        NONE = 0,
        /// `[rows][k/16]`.
        ROW_MAJOR = 1,
        /// Tiles of 128 rows by 4 scales, zero padded.
        TILES_128X4 = 2,
    }
}
numbers! {
    /// Which half of a byte holds the even element.
    nibble_order {
        /// No codes.
        NONE = 0,
        /// Bits 0 to 3.
        LOW_FIRST = 1,
        /// Bits 4 to 7.
        HIGH_FIRST = 2,
    }
}

/// One product, as selection sees it. No weight bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4LinearSpec {
    /// Bytes of this structure.
    pub struct_size: usize,
    /// [`schema`].
    pub schema: u32,
    /// Revision of the encoding, 1.
    pub schema_revision: u32,
    /// [`scale_layout`] of every segment.
    pub scale_layout: u32,
    /// [`convention`] of every segment's per-tensor scale.
    pub global_convention: u32,
    /// [`nibble_order`].
    pub nibble_order: u32,
    /// Elements per scale: 16 for NVFP4 and Q6_K, 32 for MXFP4, Q4_K, Q5_K and Q8_0, any power of two from 32
    /// to 4096 for NF4, any multiple of 16 that divides k for those of INT4, 0 for dense. Of FP8 the in
    /// features of a tile, a multiple of 16, or 0 for all.
    pub block: u32,
    /// NF4_DQ: absmax codes per nested absmax. FP8: out features of a tile, or 0 for all of a segment. Else
    /// 0.
    pub nested_block: u32,
    /// [`dtype`] of a dense weight, else 0.
    pub dense_dtype: u32,
    /// Row segments, top to bottom; at least one.
    pub n_segments: u64,
    /// Out features of each.
    pub segment_rows: *const u64,
    /// Layer name of each, for messages.
    pub segment_names: *const Q4Str,
    /// Out features of all segments.
    pub n: u64,
    /// In features.
    pub k: u64,
    /// Rows of the largest call.
    pub max_m: u64,
    /// [`dtype`] of x and dx.
    pub x_dtype: u32,
    /// [`dtype`] of y and dy.
    pub y_dtype: u32,
    /// [`path`]: exactly this one.
    pub path: u32,
    /// [`op`] bits the caller needs.
    pub ops: u32,
    /// [`activations`].
    pub activations: u32,
    /// [`rule`] with NVFP4 activations, else 0.
    pub act_rule: u32,
    /// [`global_kind`] with NVFP4 and FP8 activations, else 0.
    pub act_global_kind: u32,
    /// [`convention`] of `act_global` with `STATIC`, else 0.
    pub act_global_convention: u32,
    /// With `STATIC`, else 0.
    pub act_global: f32,
    /// `DEVICE_CPU`, `DEVICE_CUDA` or `DEVICE_VENDOR`.
    pub device_type: u32,
    /// Ordinal; 0 for the CPU.
    pub device_id: u32,
    /// [`dtype`] of the scales of FP8 and those of INT4, else 0. Since 1.2.
    pub scale_dtype: u32,
}

/// Some rows of a stored matrix, with scales of their own. In an array, elements are
/// `segments[0].struct_size` bytes apart and all have that size. Pointers may have any alignment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Segment {
    /// Bytes of this structure.
    pub struct_size: usize,
    /// Out features.
    pub rows: u64,
    /// Packed codes, bytes, blocks of GGML, or the elements of a dense weight.
    pub codes: *const c_void,
    /// Bytes at `codes`.
    pub codes_bytes: u64,
    /// NVFP4: E4M3. MXFP4: E8M0. FP8 and those of INT4: of the spec's `scale_dtype`. NF4: f32 absmax.
    /// NF4_DQ: 8-bit absmax codes. Dense and blocks of GGML: NULL.
    pub scales: *const c_void,
    /// Bytes at `scales`.
    pub scales_bytes: u64,
    /// NF4_DQ: 256 f32, else NULL.
    pub nested_map: *const c_void,
    /// Bytes at `nested_map`.
    pub nested_map_bytes: u64,
    /// NF4_DQ: one f32 per `nested_block` absmax codes, else NULL.
    pub nested_absmax: *const c_void,
    /// Bytes at `nested_absmax`.
    pub nested_absmax_bytes: u64,
    /// NF4_DQ: added to every absmax, else 0.
    pub nested_offset: f32,
    /// NVFP4: finite and above 0, or 0 with convention `NONE`.
    pub global_scale: f32,
    /// [`convention`], that of the spec.
    pub global_convention: u32,
    /// 0.
    pub reserved: u32,
    /// INT4_ASYM: a byte of 0 to 15 for each scale. INT4_AFFINE: a bias of the spec's `scale_dtype`, else
    /// NULL. Since 1.2.
    pub zeros: *const c_void,
    /// Bytes at `zeros`.
    pub zeros_bytes: u64,
}

/// A stored weight: the segments of its spec, with bytes, on the device of the spec.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Weight {
    /// Bytes of this structure.
    pub struct_size: usize,
    /// As in the spec.
    pub n_segments: u64,
    /// The segments.
    pub segments: *const Q4Segment,
}

/// The machine a verdict is asked for: facts, which may be another machine's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Env {
    /// Bytes of this structure.
    pub struct_size: usize,
    /// `x86_64`, `aarch64`.
    pub arch: Q4Str,
    /// CPU features, sorted, separated by spaces: `avx2 f16c fma`.
    pub cpu_features: Q4Str,
    /// Processors the process may use.
    pub processors: u32,
    /// Version of the CUDA driver, e.g. 13000; 0 without one.
    pub cuda_driver: u32,
    /// Number of `cuda`.
    pub n_cuda: u64,
    /// Devices, `cuda[0].struct_size` bytes apart.
    pub cuda: *const Q4CudaDevice,
    /// Since 1.2. What is missing where devices were looked for and none can be used.
    pub cuda_missing: Q4Str,
    /// Since 1.2. NVRTC, which compiles kernels.
    pub nvrtc: Q4Found,
    /// Since 1.2. cuBLASLt, behind dense products.
    pub cublaslt: Q4Found,
}

/// Whether a library of the device's vendor can be used. Since 1.2.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Found {
    /// Its version as it counts itself, major * 1000 + minor * 10 for NVRTC; 0: it cannot be used.
    pub version: u32,
    /// 0.
    pub reserved: u32,
    /// Why it cannot be used.
    pub missing: Q4Str,
}

/// What a backend is told when it is made. Since 1.2.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4Options {
    /// Bytes of this structure.
    pub struct_size: usize,
    /// Name of the instruction set to use instead of the best one, as the library spells it; empty: its
    /// choice.
    pub isa: Q4Str,
    /// 1: the program will use the device `cuda`, so the library may look for it now. 0: it may not.
    pub has_cuda: u32,
    /// Ordinal of that device.
    pub cuda: u32,
    /// [`unified_memory`].
    pub unified_memory: u32,
    /// 0.
    pub reserved: u32,
}

/// One CUDA device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Q4CudaDevice {
    /// Bytes of this structure.
    pub struct_size: usize,
    /// Ordinal of the CUDA runtime.
    pub ordinal: u32,
    /// Compute capability.
    pub cc_major: u32,
    /// Its second part.
    pub cc_minor: u32,
    /// 0.
    pub reserved: u32,
    /// Bytes of device memory.
    pub memory: u64,
    /// Name for display.
    pub name: Q4Str,
    /// Since 1.2. Why the device cannot be opened; empty where it can.
    pub unusable: Q4Str,
}
