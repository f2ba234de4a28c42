/* q4 plugin interface 1.2: 4-bit linear layers in a shared library.  C99 and newer, C++98 and newer.
 *
 * A library exports two symbols and nothing else is looked at:
 *   q4_plugin_descriptor  constant data, see Q4_PLUGIN_DESCRIPTOR.  It is read from the file before that is
 *                         loaded.
 *   q4_plugin_query()     hands out a table of functions, q4_backend_v1.
 *
 * Rules of the interface
 *   Structs    those that may grow start with struct_size = sizeof(the struct as the writer knows it).  The
 *              reader ignores bytes past its own size and treats missing ones as zero; nothing is written
 *              past struct_size.  Tables are copied when the library is loaded: later changes have no effect.
 *   Numbers    those not listed here are Q4_E_INVALID in a call.  In can_prepare and prepare they are a
 *              product that cannot be served, a later schema_revision too: Q4_E_UNSUPPORTED with a reason, or
 *              Q4_E_INVALID.  Fields named reserved are 0 and may get a meaning later.
 *   Bytes      beside every pointer is the number of bytes that may be touched.  Those of a weight are
 *              exactly as many as its rows, k and layout say, at any alignment; those of a matrix are at
 *              least as many.
 *   Overlap    no operand shares a byte, from its first element to its last, with another one or with the
 *              workspace: else Q4_E_INVALID, before anything is written.
 *   Errors     every call that can fail returns a status and describes the failure in a caller-owned
 *              q4_error, which may be NULL.
 *   Calls      a call has 1 to max_m rows; m = 0 is refused before a library sees it.  exec is never NULL.
 *              Its workspace is NULL in prepare, which may use parallel, and may be NULL where workspace(m)
 *              is 0; dequantize gets that of m = 1.  parallel may be NULL, parallel_user may be anything.  A
 *              workspace smaller than workspace(m): Q4_E_INVALID, or a right result.
 *   Effects    no function prints, exits, throws, unwinds, starts threads, or changes the process (signals,
 *              locale, environment) or which CUDA device is current in the thread that calls.  The suite has
 *              no case for the last.
 *   Threads    create, destroy, can_prepare, prepare and probe of one backend are called by one thread at a
 *              time, any thread.  A prepared weight is immutable: any number of threads may call it at once.
 *              It may outlive no backend: destroy comes after the last release.
 *   Devices    the bytes of a weight are in host memory, whatever the device, and a weight is ready when
 *              prepare returns.  With Q4_DEVICE_CUDA operands and workspace are memory of the device's
 *              primary context, and forward, backward_input and dequantize enqueue on exec->stream and do not
 *              wait: a program may be recording the stream into a graph.  A fault then shows where the
 *              program waits.  With Q4_DEVICE_VENDOR operands and workspace are memory of the backend's own
 *              device, allocated and filled through its table.  An address is a number: what lies there
 *              nobody but the backend touches, it need not be mapped, and address + i is that of byte i of an
 *              allocation.  A device has one queue (exec->stream is NULL); forward, backward_input and
 *              dequantize may enqueue there and not wait.  Copies come after all that was enqueued before
 *              them and are complete when they return.
 *   Memory     forward, backward_input and dequantize allocate nothing; scratch is what workspace() asked
 *              for.
 *   Numerics   a result depends on the operands and the machine and on nothing else: not on the number of
 *              threads, on strides, or on earlier calls; and row i of a call not on its other rows
 *              (Q4_GLOBAL_PER_CALL excepted).
 *   Honesty    the path, the activations and the rule asked for are computed, or the request is refused.
 *              Nothing is replaced by something similar.
 *   Libraries  a library is never unloaded.
 *
 * Numbers of the formats
 *   E2M1       codes 0 to 15 are 0 .5 1 1.5 2 3 4 6 -0 -.5 -1 -1.5 -2 -3 -4 -6.  The even element is in bits
 *              0 to 3 of its byte, and nibble_order says Q4_NIBBLE_LOW_FIRST.
 *   E4M3       s eeee mmm, without infinities: e = 0: m * 2^-9, else (8 + m) * 2^(e - 10); the largest is
 *              0x7e = 448.  0x7f and 0xff are NaN, and nothing else is.
 *   E8M0       a byte b is 2^(b - 127), which for 0 is subnormal in f32; 255 is NaN.  Scales above 252, under
 *              which 6 is no f32, are in no weight that q4 accepts.
 *   Scales     A block scale that is NaN is refused with Q4_E_SCALE_INVALID, or every result it is part of is
 *              NaN.  One with a sign bit (0x80 and above, -0 included), which no checkpoint has, is refused
 *              with Q4_E_SCALE_INVALID, or means the negative number that it is.  global_scale is finite and
 *              above 0: q4 sees to that.
 *   128x4      Q4_SCALE_128X4 stores the scale of row r and group g = column / 16 of a segment, whose rows
 *              have G = k / 16 groups, at byte
 *                (r / 128 * ((G + 3) / 4) + g / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + g % 4
 *              of ceil(rows / 128) * 128 * ceil(G / 4) * 4 bytes.  Each segment begins a tile of its own.
 *              What the padding holds does not matter.  It is the layout of cuBLASLt's 1-D block scaling,
 *              SWIZZLE_32_4_4.
 *   NF4        codebook: -1 -0.6961928 -0.52507305 -0.3949175 -0.28444138 -0.18477343 -0.091050036 0
 *              0.0795803 0.1609302 0.2461123 0.33791524 0.44070983 0.562617 0.72295684 1, each the nearest
 *              f32.
 *   Decoding   it is IEEE arithmetic in f32, rounded to nearest even after each operation; an infinite scale
 *              times 0 is NaN.  dequantize() gives those values bit for bit, subnormals too; only the sign of
 *              a zero is not looked at.
 *   Rounding   to f16 and bf16 it is to nearest even, once, from f32: past the range to infinity, NaN to any
 *              quiet NaN.
 *   Not finite With Q4_ACT_NATIVE a NaN in row i of x makes row i of y NaN, an infinity makes it NaN or
 *              infinite, and other rows keep their bits; or the call fails.  Where inputs are quantised the
 *              call fails with Q4_E_NON_FINITE on the CPU; a device that does not wait writes NaN.
 *   Bound      that of the paths REFERENCE and FUSED_DEQUANT, for every element, u being half a unit in the
 *              last place of y:
 *                |y - exact| <= (K/16 + 32) * 2^-24 * sum |x w| + u |exact|
 *              and y is 0 where every term is.  K is k, in gradients n rounded up to 16, and 16 more.  One
 *              chain of K f32 additions can be K * 2^-24 off, which is more from K = 35 on: keep 16 sums side
 *              by side, or add in a tree.  The root mean square over a row or column of 32 and more is at
 *              most 3/4 of the bound.  NATIVE_KERNEL has 2 K for K/16, DEQUANT_MATMUL has K and a dense copy
 *              rounded to y's type, FUSED_ROUNDED bf16 weights (1.5 * 2^-8 of sum |x w|), or, with
 *              Q4_ACT_FP8, what FP8 tensor cores leave out of sums (4 * 33 * 2^-13 of it).
 *   Features   q4_env.cpu_features are some of these words and no others:
 *                x86_64   amx-bf16 avx2 avx512bf16 avx512bw avx512f avx512fp16 avx512vbmi avx512vl
 *                         avx512vnni avxvnni f16c fma
 *                aarch64  bf16 dotprod fp16 i8mm neon sve sve2
 *              Ask for the nearest of them where yours has no word: every processor with avx512bw and
 *              avx512vl has avx512dq and avx512cd.  prepare has no env: it asks the processor.  A feature
 *              that is missing is "device-arch". */
#ifndef Q4_PLUGIN_H
#define Q4_PLUGIN_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#if defined(_WIN32)
#  define Q4_EXPORT __declspec(dllexport)
#else
#  define Q4_EXPORT __attribute__((visibility("default")))
#endif

#define Q4_ABI_MAJOR 1u /* layout or meaning of something that exists changed */
/* Fields or numbers were appended.  Define it as 0 before including this file to build against the first
 * version. */
#ifndef Q4_ABI_MINOR
#  define Q4_ABI_MINOR 2u
#endif
#define Q4_INTERFACE_BACKEND 1u

typedef int32_t q4_status;
enum {
    Q4_OK              = 0,
    Q4_E_UNSUPPORTED   = -1, /* valid, but this library, device or shape cannot do it; a later
                              * schema_revision */
    Q4_E_INVALID       = -2, /* operands, bytes or a workspace that do not fit, or a number that is not in
                              * this file */
    Q4_E_NOMEM         = -3,
    Q4_E_DEVICE        = -4, /* native_code holds the number of the device's runtime */
    Q4_E_ABI           = -5, /* no table of that major, or a structure shorter than its first version */
    Q4_E_INTERNAL      = -6,
    Q4_E_NON_FINITE    = -7, /* NaN or infinity where the product quantises its input */
    Q4_E_SCALE_INVALID = -8, /* a stored scale that is NaN, infinite or negative */
    Q4_E_PANICKED      = -99 /* caught a panic or an exception; the backend must not be used any more */
};

enum {
    Q4_SCHEMA_NVFP4  = 1,
    Q4_SCHEMA_NF4    = 2,
    Q4_SCHEMA_NF4_DQ = 3,
    Q4_SCHEMA_DENSE  = 4,
    Q4_SCHEMA_MXFP4  = 5, /* since 1.2, as those below */
    Q4_SCHEMA_INT4   = 6,
    Q4_SCHEMA_INT4_ASYM = 7,
    Q4_SCHEMA_Q4_K   = 8, /* blocks of GGML, as GGUF files hold them */
    Q4_SCHEMA_Q5_K   = 9,
    Q4_SCHEMA_Q6_K   = 10,
    Q4_SCHEMA_Q8_0   = 11,
    Q4_SCHEMA_FP8    = 12,
    Q4_SCHEMA_INT4_AFFINE = 13
};
enum { Q4_F32 = 1, Q4_F16 = 2, Q4_BF16 = 3 };
enum {
    Q4_PATH_NATIVE_KERNEL  = 1, /* 4-bit operands reach the arithmetic units */
    Q4_PATH_FUSED_DEQUANT  = 2, /* packed in memory, decoded in registers */
    Q4_PATH_DEQUANT_MATMUL = 3, /* a dense copy is made, then a dense product runs */
    Q4_PATH_REFERENCE      = 4, /* a slow oracle */
    Q4_PATH_FUSED_ROUNDED  = 5  /* as FUSED_DEQUANT, weights rounded to bf16 in products of many rows */
};
enum { Q4_OP_FORWARD = 1, Q4_OP_BACKWARD_INPUT = 2, Q4_OP_DEQUANTIZE = 4 };
enum {
    Q4_FUSE_NORM       = 1, /* x is f32 [m, k]; x / sqrt(mean(x^2) + eps) * weight, in f32, rounded to the
                             * type of x in the spec, is what is quantised or multiplied */
    Q4_FUSE_GATE       = 2, /* rows of the weight are gate rows, then as many up rows:
                             * y[m, n / 2] = silu(gate) * up */
    Q4_FUSE_ACCUMULATE = 4  /* y += product; y is f32 whatever the spec says */
};
enum { Q4_UNIFIED_DISABLED = 0, Q4_UNIFIED_PREFER = 1, Q4_UNIFIED_REQUIRE = 2 };
enum {
    Q4_ACT_NATIVE = 1, /* W4A16: as they are, f32 accumulation */
    Q4_ACT_INT8   = 2, /* W4A8: per 16 of k, in f32: scale = amax/127, q = round_half_even(x * (127/amax));
                        * exact integer block products */
    Q4_ACT_NVFP4  = 3, /* W4A4: quantised by act_rule, exact integer block products */
    Q4_ACT_FP8    = 4  /* W8A8, since 1.2: E4M3 of x / scale to the nearest, ties to even, past 448 to 448, in
                        * f32, f32 accumulation.  scale is act_global with Q4_GLOBAL_STATIC, else amax / 448
                        * of the row or of each 128 columns; where that is 0, so are the codes */
};
enum {
    Q4_RULE_TORCHAO            = 1,
    Q4_RULE_MODELOPT           = 2,
    Q4_RULE_COMPRESSED_TENSORS = 3,
    Q4_RULE_TRANSFORMER_ENGINE = 4,
    Q4_RULE_RUNTIME            = 5
};
enum {
    Q4_GLOBAL_NONE      = 0,
    Q4_GLOBAL_STATIC    = 1,
    Q4_GLOBAL_PER_CALL  = 2,
    Q4_GLOBAL_PER_ROW   = 3, /* Q4_ACT_FP8 alone; so the next */
    Q4_GLOBAL_PER_BLOCK = 4
};
enum {
    Q4_CONVENTION_NONE     = 0,
    Q4_CONVENTION_MULTIPLY = 1, /* scale * g */
    Q4_CONVENTION_DIVIDE   = 2  /* scale / g */
};
enum { Q4_SCALE_NONE = 0, Q4_SCALE_ROW_MAJOR = 1, Q4_SCALE_128X4 = 2 };
enum { Q4_NIBBLE_NONE = 0, Q4_NIBBLE_LOW_FIRST = 1, Q4_NIBBLE_HIGH_FIRST = 2 };
enum {
    Q4_DEVICE_CPU    = 1,
    Q4_DEVICE_CUDA   = 2,
    Q4_DEVICE_VENDOR = 3 /* since 1.2: device device_id of the backend that is called */
};

/* Borrowed UTF-8 without a terminator. */
typedef struct q4_str {
    const char *ptr;
    size_t      len;
} q4_str;

/* Caller-owned text of a failure.  At most cap bytes of UTF-8 are written to ptr (nothing when ptr is NULL),
 * without a terminator; len becomes the length of the whole text, 0 after a success. */
typedef struct q4_error {
    size_t  struct_size;
    char   *ptr;
    size_t  cap;
    size_t  len;
    int64_t native_code;
} q4_error;

/* Constant data.  Texts are filled up with NUL. */
typedef struct q4_descriptor {
    char     magic[8]; /* "q4plugin", no terminator */
    uint32_t descriptor_size;
    uint32_t abi_major, abi_minor;
    uint32_t flags;    /* 0 */
    char     name[64]; /* 1 to 63 of a-z, 0-9 and -, a letter first */
    char     version[32];
    char     vendor[64];
} q4_descriptor;

typedef struct q4_offer {
    uint32_t schema, revision, path, reserved;
} q4_offer;

/* One product.  No weight bytes. */
typedef struct q4_linear_spec {
    size_t          struct_size;
    uint32_t        schema;            /* Q4_SCHEMA_* */
    uint32_t        schema_revision;   /* 1 */
    uint32_t        scale_layout;      /* Q4_SCALE_*, of each NVFP4 segment by itself */
    uint32_t        global_convention; /* Q4_CONVENTION_*, of every segment's per-tensor scale */
    uint32_t        nibble_order;      /* Q4_NIBBLE_*: either with NF4, NONE with DENSE and FP8, else LOW_FIRST */
    uint32_t        block;             /* elements per scale: 16 for NVFP4 and Q6_K, 32 for MXFP4, Q4_K, Q5_K
                                        * and Q8_0, 32 to 4096 for NF4, a multiple of 16 that divides k for
                                        * INT4*, 0 for DENSE; of FP8 the in features of a tile, a multiple of
                                        * 16, or 0 for all */
    uint32_t        nested_block;      /* NF4_DQ: absmax codes per nested absmax; of FP8 the out features of a
                                        * tile, or 0 for all of a segment; else 0 */
    uint32_t        dense_dtype;       /* Q4_F32..Q4_BF16 of a dense weight, else 0 */
    uint64_t        n_segments;        /* row segments, top to bottom; at least one */
    const uint64_t *segment_rows;
    const q4_str   *segment_names;     /* for messages */
    uint64_t        n, k;              /* out features of all segments; in features */
    uint64_t        max_m;             /* rows of the largest call; calls may have fewer */
    uint32_t        x_dtype, y_dtype;  /* x and dx; y and dy */
    uint32_t        path;              /* Q4_PATH_*: exactly this one */
    uint32_t        ops;               /* Q4_OP_* bits the caller needs */
    uint32_t        activations;       /* Q4_ACT_* */
    uint32_t        act_rule;          /* Q4_RULE_* with Q4_ACT_NVFP4, else 0 */
    uint32_t        act_global_kind;   /* Q4_GLOBAL_* with Q4_ACT_NVFP4 and Q4_ACT_FP8, else 0 */
    uint32_t        act_global_convention;
    float           act_global;        /* with Q4_GLOBAL_STATIC */
    uint32_t        device_type;       /* Q4_DEVICE_* */
    uint32_t        device_id;
    uint32_t        scale_dtype;       /* Q4_F32..Q4_BF16 of the scales of INT4* and FP8, else 0; since
                                        * 1.2 */
} q4_linear_spec;

/* Some rows of a stored matrix.  In an array, elements are segments[0].struct_size bytes apart and all have
 * that size.
 *   NVFP4   codes [rows][k/2], low nibble = even element; scales E4M3, one per 16 of k.
 *           value = fl32(e2m1(code) * fl32(e4m3(scale) op global))
 *   NF4     codes ceil(rows*k/2) bytes; scales f32, one per block of the flattened segment (blocks cross
 *           rows).
 *           value = fl32(codebook[code] * absmax)
 *   NF4_DQ  scales are 8-bit codes of the absmax:
 *           absmax[i] = map[scales[i]] * nested_absmax[i / nested_block] + offset, each operation rounded to
 *           f32
 *   DENSE   codes are the elements [rows][k]
 *   MXFP4   codes [rows][k/2], low nibble = even element; scales E8M0, one per 32 of k.
 *           value = e2m1(code) * 2^(scale - 127), which is exact in f32
 *   INT4    codes [rows][k/2], 0 to 15, low nibble = even element; scales of scale_dtype [rows][k/block],
 *           finite, of either sign.
 *           value = fl32((code - 8) * scale)
 *   INT4_ASYM  zeros a byte of 0 to 15 for each scale.
 *           value = fl32((code - zero) * scale)
 *   INT4_AFFINE  zeros a bias of scale_dtype for each scale, finite, of either sign.
 *           value = fl32(fl32(code * scale) + bias)
 *   Q4_K    codes are the blocks of GGML, [rows][k/256] of 144 bytes: d and dmin, f16; 12 bytes of eight
 *           scales and eight minima of 6 bits, for 32 elements each; 128 bytes of codes, of which each 32
 *           have elements j and j + 32 of 64 in their low and high nibbles.  For i < 4, byte i has scale i
 *           and byte 4+i minimum i in its low 6 bits; byte 8+i has the low 4 bits of scale 4+i and, above
 *           them, of minimum 4+i, whose upper 2 bits are those of bytes i and 4+i.
 *           value = fl32(d * scale * code - dmin * minimum), of which only the difference is rounded
 *   Q5_K    blocks of 176 bytes: as Q4_K, with 32 bytes before the codes, bit i of which is the fifth bit of
 *           elements 32*i to 32*i+31
 *   Q6_K    blocks of 210 bytes: 128 of lower and 64 of upper bits, 16 scales (int8, for 16 elements), d
 *           (f16).  Element i of a half of 128 has bits 4*(i/64) and up of lower byte 64*half + i%64, and
 *           above them two bits from 2*(i/32) of upper byte 32*half + i%32.
 *           value = d * scale * (code - 32), which is exact in f32
 *   Q8_0    [rows][k/32] blocks of 34 bytes: d (f16), 32 codes (int8).  value = d * code, exact in f32
 *   FP8     codes [rows][k], E4M3, none of them NaN; scales of scale_dtype
 *           [ceil(rows/nested_block)][ceil(k/block)], of which a size of 0 has one, finite, of either sign.
 *           value = fl32(e4m3(code) * scale) */
typedef struct q4_segment {
    size_t      struct_size;
    uint64_t    rows;
    const void *codes;
    uint64_t    codes_bytes;
    const void *scales;
    uint64_t    scales_bytes;
    const void *nested_map;        /* 256 f32 */
    uint64_t    nested_map_bytes;
    const void *nested_absmax;     /* f32 */
    uint64_t    nested_absmax_bytes;
    float       nested_offset;
    float       global_scale;      /* finite and above 0, or 0 with Q4_CONVENTION_NONE */
    uint32_t    global_convention; /* that of the spec */
    uint32_t    reserved;
#if Q4_ABI_MINOR >= 2
    const void *zeros;             /* INT4_ASYM and INT4_AFFINE, else NULL */
    uint64_t    zeros_bytes;
#endif
} q4_segment;

typedef struct q4_weight {
    size_t            struct_size;
    uint64_t          n_segments;
    const q4_segment *segments;
} q4_weight;

typedef struct q4_cuda_device {
    size_t   struct_size;
    uint32_t ordinal;
    uint32_t cc_major, cc_minor;
    uint32_t reserved;
    uint64_t memory;
    q4_str   name;
#if Q4_ABI_MINOR >= 2
    q4_str   unusable; /* why the device cannot be opened; empty where it can */
#endif
} q4_cuda_device;

#if Q4_ABI_MINOR >= 2
/* Whether a library of the device's vendor can be used. */
typedef struct q4_found {
    uint32_t version;  /* as it counts itself, major * 1000 + minor * 10 for NVRTC; 0: it cannot be used */
    uint32_t reserved;
    q4_str   missing;  /* why */
} q4_found;
#endif

/* The machine a verdict is asked for: facts, which may be another machine's. */
typedef struct q4_env {
    size_t                struct_size;
    q4_str                arch;         /* "x86_64", "aarch64" */
    q4_str                cpu_features; /* sorted, separated by spaces: "avx2 f16c fma" */
    uint32_t              processors;
    uint32_t              cuda_driver;  /* e.g. 13000; 0 without one */
    uint64_t              n_cuda;
    const q4_cuda_device *cuda;         /* cuda[0].struct_size bytes apart */
#if Q4_ABI_MINOR >= 2
    q4_str                cuda_missing; /* what is missing where devices were looked for and none is usable */
    q4_found              nvrtc, cublaslt;
#endif
} q4_env;

typedef struct q4_matrix { /* row-major; data aligned for its element */
    size_t   struct_size;
    void    *data;
    uint64_t bytes;          /* readable (inputs) or writable (outputs) from data */
    uint64_t rows, cols, ld; /* ld in elements, at least cols; elements between cols and ld are never
                              * touched */
    uint32_t dtype;
    uint32_t device_type;
    uint32_t device_id;
    uint32_t reserved;
} q4_matrix;

typedef void (*q4_task_fn)(void *arg, size_t task);
/* Runs body(arg, 0) ... body(arg, tasks - 1), each once, in any order, on any threads; returns when all are
 * done. */
typedef void (*q4_parallel_fn)(void *user, size_t tasks, q4_task_fn body, void *arg);

typedef struct q4_exec {
    size_t         struct_size;
    void          *stream;    /* cudaStream_t; NULL is the legacy default stream; not looked at elsewhere */
    void          *workspace; /* 64-byte aligned on the CPU, 256 on devices */
    uint64_t       workspace_bytes;
    q4_parallel_fn parallel;  /* NULL: the calling thread runs the tasks */
    void          *parallel_user;
    uint32_t       threads;   /* how many parallel has; results do not depend on it */
    uint32_t       device_type;
    uint32_t       device_id;
    uint32_t       reserved;
} q4_exec;

typedef struct q4_prepared_info {
    size_t   struct_size;
    uint64_t n, k;
    uint64_t resident_bytes; /* memory it keeps */
    uint32_t path;           /* what every call of it runs */
    uint32_t activations;    /* what every forward of it does */
    uint32_t ops;            /* what this weight really has */
    uint32_t reserved;
} q4_prepared_info;

#if Q4_ABI_MINOR >= 2
/* What a product does besides multiplying. */
typedef struct q4_fusion {
    size_t           struct_size;
    uint32_t         parts;       /* Q4_FUSE_* bits */
    float            norm_eps;    /* with Q4_FUSE_NORM, added to the mean square; else 0 */
    const q4_matrix *norm_weight; /* with Q4_FUSE_NORM, f32 [1, k] on the device of the call; else NULL */
} q4_fusion;

/* Bytes that a weight would take. */
typedef struct q4_footprint {
    size_t   struct_size;
    uint64_t resident_bytes;  /* what it keeps */
    uint64_t workspace_bytes; /* scratch of its largest call, of max_m rows */
} q4_footprint;

/* A device of the backend's own. */
typedef struct q4_device {
    size_t   struct_size;
    q4_str   name;         /* for people, 1 to 256 bytes: "ACME A100" */
    q4_str   fingerprint;  /* 1 to 256 bytes: all that results may depend on: model, driver, firmware.  A
                            * certificate is about one of them.  Both texts are the same in every call and
                            * live as long as the backend. */
    uint64_t memory_bytes; /* that it has */
    uint64_t free_bytes;   /* of them, now: what weights and allocations take is not free, what is given back
                            * is */
} q4_device;

/* What a backend is told when it is made. */
typedef struct q4_options {
    size_t   struct_size;
    q4_str   isa;            /* instruction set instead of the best, as you spell it; empty: your choice */
    uint32_t has_cuda, cuda; /* 1: the device of this ordinal will be used, and may be looked for now */
    uint32_t unified_memory; /* Q4_UNIFIED_*: where weights of a device are put */
    uint32_t reserved;
} q4_options;
#endif

/* Takes one reason; the texts live until it returns.  Stable codes: "schema-unsupported", "path-unsupported",
 * "op-unsupported", "activations-unsupported", "dtype-unsupported", "layout-unsupported",
 * "shape-unsupported", "device-absent", "device-unsupported", "device-arch", "kernel-image-missing",
 * "driver-too-old", "library-missing", "internal".  need and have are short: "k % 32 == 0", "k = 4000". */
typedef void (*q4_reject_fn)(void *user, q4_str code, q4_str need, q4_str have);
/* Takes the outcome of one check; with failed not 0, detail says why. */
typedef void (*q4_probe_fn)(void *user, q4_str id, uint32_t failed, q4_str detail);

typedef struct q4_backend q4_backend;   /* yours */
typedef struct q4_prepared q4_prepared; /* yours */
typedef struct q4_group q4_group;       /* yours */

typedef struct q4_backend_v1 {
    size_t          struct_size;
    uint32_t        abi_major, abi_minor;
    q4_str          name, version, vendor; /* those of the descriptor */
    int32_t         priority;              /* tie-break between equal paths, larger wins */
    uint32_t        reserved;
    uint64_t        n_offers;              /* (schema, revision, path) it can ever serve */
    const q4_offer *offers;

    q4_status (*create)(q4_backend **out, q4_error *);
    void      (*destroy)(q4_backend *);

    /* Q4_OK exactly when prepare would take the product, the contents of the weight apart.  Else
     * Q4_E_UNSUPPORTED, and the sink received every reason.  Pure: the same arguments give the same
     * answer. */
    q4_status (*can_prepare)(const q4_backend *, const q4_linear_spec *, const q4_env *, q4_reject_fn sink,
                             void *user, q4_error *);
    /* Repacks; the caller's bytes are not kept.  Serves spec->path or fails.  Scales that no number is made
     * of: see above. */
    q4_status (*prepare)(const q4_backend *, const q4_linear_spec *, const q4_weight *, const q4_exec *,
                         q4_prepared **out, q4_error *);
    void      (*release)(q4_prepared *);
    q4_status (*info)(const q4_prepared *, q4_prepared_info *out, q4_error *);
    /* Bytes any call on m rows needs; UINT64_MAX: overflow.  Below one dense copy unless the path is
     * Q4_PATH_DEQUANT_MATMUL. */
    uint64_t  (*workspace)(const q4_prepared *, uint64_t m);
    /* y[m, n] = x[m, k] W^T.  y is undefined after an error. */
    q4_status (*forward)(const q4_prepared *, const q4_matrix *x, const q4_matrix *y, const q4_exec *,
                         q4_error *);
    /* out[n, k]: exact in f32, rounded once to f16 or bf16.  Any of the three types, whatever x and y are.
     * Must be there. */
    q4_status (*dequantize)(const q4_prepared *, const q4_matrix *out, const q4_exec *, q4_error *);
    /* dx[m, k] = dy[m, n] W with the decoded W, accumulated in f32 and rounded once.  NULL: inference
     * only. */
    q4_status (*backward_input)(const q4_prepared *, const q4_matrix *dy, const q4_matrix *dx,
                                const q4_exec *, q4_error *);
#if Q4_ABI_MINOR >= 1
    /* Checks for diagnostics; may be slow.  NULL: none. */
    q4_status (*probe)(const q4_backend *, const q4_env *, q4_probe_fn sink, void *user, q4_error *);
#endif
#if Q4_ABI_MINOR >= 2
    /* create for who has options.  What cannot be had as it is asked for is Q4_E_UNSUPPORTED, and the sink
     * received every reason: another instruction set is never taken instead.  NULL: there are none, and
     * programs call create. */
    q4_status (*create_with)(const q4_options *, q4_backend **out, q4_reject_fn sink, void *user, q4_error *);
    /* Never less than a weight of the spec will take, which can_prepare accepted.  NULL: programs
     * estimate. */
    q4_status (*footprint)(const q4_backend *, const q4_linear_spec *, q4_footprint *out, q4_error *);
    /* Whether forward_fused takes exactly these parts for m rows; the same for every call of a weight.  Where
     * it does not, the program composes.  NULL: never. */
    uint32_t  (*fuses)(const q4_prepared *, uint64_t m, uint32_t parts);
    /* forward with what the fusion adds; parts that fuses denies are Q4_E_UNSUPPORTED.  Gates and sums are in
     * f32 and rounded to y once.  There when fuses is. */
    q4_status (*forward_fused)(const q4_prepared *, const q4_matrix *x, const q4_fusion *, const q4_matrix *y,
                               const q4_exec *, q4_error *);

    /* Memory of Q4_DEVICE_VENDOR: all six, or all NULL.  Any number of threads may call them at once, and
     * they may allocate on the host.  They touch the bytes they are given and no others.  Devices are counted
     * from 0 without a gap; Q4_E_UNSUPPORTED from the first number on that is none. */
    q4_status (*device)(const q4_backend *, uint32_t device_id, q4_device *out, q4_error *);
    /* *out: the address of `bytes` bytes, at least 1, of any content; a multiple of 256, not 0, apart from
     * everything else that is allocated there.  Q4_E_NOMEM where there is not so much.  Never memory of the
     * program. */
    q4_status (*device_alloc)(const q4_backend *, uint32_t device_id, uint64_t bytes, void **out, q4_error *);
    /* Takes an address that device_alloc gave, once. */
    q4_status (*device_free)(const q4_backend *, uint32_t device_id, void *at, q4_error *);
    /* `bytes` bytes from host memory to any byte of an allocation, and back. */
    q4_status (*copy_in)(const q4_backend *, uint32_t device_id, void *to, const void *from, uint64_t bytes,
                         q4_error *);
    q4_status (*copy_out)(const q4_backend *, uint32_t device_id, void *to, const void *from, uint64_t bytes,
                          q4_error *);
    /* Waits for all that was enqueued; Q4_E_DEVICE where some of it failed. */
    q4_status (*synchronize)(const q4_backend *, uint32_t device_id, q4_error *);

    /* Several weights in one call, as a layer of experts has them: all four, or all NULL, and programs call
     * one weight after the other. */
    /* Weights of this backend, one at least, whose specs differ in segment_names and act_global at most.  The
     * array is the caller's; the weights outlive the group and may be called besides.  As create, can_prepare
     * and prepare: one thread at a time.  Q4_E_UNSUPPORTED, always with Q4_GLOBAL_PER_CALL: this one is left
     * to the caller. */
    q4_status (*group)(const q4_backend *, const q4_prepared *const *weights, uint64_t n_weights,
                       const q4_exec *, q4_group **out, q4_error *);
    void      (*release_group)(q4_group *);
    /* As workspace, for m rows in all. */
    uint64_t  (*group_workspace)(const q4_group *, uint64_t m);
    /* Rows offsets[e] to offsets[e + 1] - 1 of y are those of x times weight e; everything else as in
     * forward, with 1 to max_m rows in all.  offsets are n_weights + 1 numbers on the device of the call,
     * which begin with 0, never fall and end with m; an expert may have no row.  Others are Q4_E_INVALID
     * before anything is written; a device that does not wait writes any values of y and nothing else. */
    q4_status (*forward_grouped)(const q4_group *, const q4_matrix *x, const int32_t *offsets,
                                 const q4_matrix *y, const q4_exec *, q4_error *);
#endif
} q4_backend_v1;

typedef struct q4_interface {
    size_t      struct_size;
    uint32_t    abi_minor; /* in: the program's; out: the table's */
    uint32_t    reserved;
    const void *table;     /* out: lives as long as the library */
} q4_interface;

extern Q4_EXPORT const q4_descriptor q4_plugin_descriptor;
/* Fills *out with the table of that major and id; Q4_E_ABI when there is none.  May be called more than
 * once. */
typedef q4_status (*q4_plugin_query_fn)(uint32_t abi_major, uint32_t id, q4_interface *out);
Q4_EXPORT q4_status q4_plugin_query(uint32_t abi_major, uint32_t id, q4_interface *out);

/* Q4_PLUGIN_DESCRIPTOR("acme-c", "1.0.0", "ACME"); at file scope.  The declaration above exports it. */
#define Q4_PLUGIN_DESCRIPTOR(name_, version_, vendor_)                                                       \
    const q4_descriptor q4_plugin_descriptor = {                                                             \
        {'q', '4', 'p', 'l', 'u', 'g', 'i', 'n'}, (uint32_t)sizeof(q4_descriptor), Q4_ABI_MAJOR,             \
        Q4_ABI_MINOR, 0u, name_, version_, vendor_}
/* A q4_str of a literal. */
#define Q4_STR(literal) {literal, sizeof(literal) - 1}
/* Whether *p, which may come from an older writer, has a field. */
#define Q4_HAS(p, field) ((p)->struct_size >= (size_t)((const char *)(&(p)->field + 1) - (const char *)(p)))
#ifdef __cplusplus
}
#endif
#endif
