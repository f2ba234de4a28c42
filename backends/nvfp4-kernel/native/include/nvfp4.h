/* libNVFP4: linear kernels on block-scaled 4-bit weights (e2m1 codes, e4m3 scale per 16 of k, optional fp32 per-tensor
 * scale).  C11.
 *
 * One exported symbol, nvfp4_get_api(); everything else is reached through the table it returns.
 *
 * Rules of the interface
 *   Structs    start with struct_size = sizeof(the struct as the caller knows it).  The reader ignores bytes past its own
 *              size and treats missing ones as zero; nothing is written past struct_size.
 *   Enums      values not listed here are NVFP4_E_INVALID.  Fields named reserved must be 0.
 *   Bytes      beside every pointer is the number of bytes that may be touched; sizes are checked, contents are not
 *              trusted.
 *   Errors     every call that can fail returns a status and describes the failure in a caller-owned nvfp4_error (NULL
 *              is allowed).  Nothing prints, exits, throws or unwinds.
 *   Threads    a weight is immutable: any number of threads may call workspace, weight_bytes, forward, backward_input
 *              and dequantize on it at once, each with its own exec, error and outputs.  A ctx is used by one thread at
 *              a time.  A weight keeps what it needs and may outlive its ctx.
 *   Numerics   value = e2m1(code) * fl32(e4m3(scale) op global).  A result depends on the operands, the ctx's isa and
 *              nothing else: not on the number of threads, not on strides, and row i of a call does not depend on the
 *              other rows (NVFP4_GLOBAL_PER_CALL excepted, whose scale is an amax over all rows).
 *   CUDA       matrices and workspaces are in memory of the ctx's device, reached through its primary context; codes and
 *              scales may be in host or device memory.  Calls on a weight, and quantize, are enqueued on exec's stream and
 *              return before they are done; a fault shows when the stream is waited for.  prepare, scaled_mm and quantize
 *              with a per-call scale wait.  A row that cannot be quantised (NaN, infinity) is NaN in y, since a call that
 *              does not wait cannot refuse it. */
#ifndef NVFP4_H
#define NVFP4_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#if defined(_WIN32)
#  define NVFP4_EXPORT __declspec(dllexport)
#else
#  define NVFP4_EXPORT __attribute__((visibility("default")))
#endif

#define NVFP4_ABI_MAJOR 1u /* layout or meaning of an existing field changed */
#define NVFP4_ABI_MINOR 1u /* fields or codes were appended; 1: fuses, forward_fused, NVFP4_CTX_MANAGED, CUDA */

typedef int32_t nvfp4_status;
enum {
    NVFP4_OK            =  0,
    NVFP4_E_INVALID     = -1, /* bad argument; nothing was computed */
    NVFP4_E_UNSUPPORTED = -2, /* valid, but this build, device or shape cannot do it */
    NVFP4_E_NOMEM       = -3,
    NVFP4_E_CUDA        = -4, /* native_code holds the CUresult; the text names the kernel and the shape */
    NVFP4_E_ABI         = -5,
    NVFP4_E_INTERNAL    = -6
};

typedef enum nvfp4_device_type { NVFP4_DEVICE_CPU = 1, NVFP4_DEVICE_CUDA = 2 } nvfp4_device_type;
typedef enum nvfp4_dtype { NVFP4_F32 = 1, NVFP4_F16 = 2, NVFP4_BF16 = 3 } nvfp4_dtype;
typedef enum nvfp4_path {
    NVFP4_PATH_NATIVE         = 1, /* e2m1 operands reach the tensor cores */
    NVFP4_PATH_FUSED_DEQUANT  = 2, /* packed in memory, decoded in registers */
    NVFP4_PATH_DEQUANT_MATMUL = 3  /* dense copy in the workspace */
} nvfp4_path;
typedef enum nvfp4_activations {
    NVFP4_ACT_NATIVE = 1, /* W4A16: as they are, f32 accumulation */
    NVFP4_ACT_INT8   = 2, /* W4A8: per 16 of k, scale = amax/127, exact integer block dots */
    NVFP4_ACT_NVFP4  = 3  /* W4A4: quantised by act_rule, exact integer block dots */
} nvfp4_activations;
typedef enum nvfp4_rule { /* how a library rounds scales and codes; they differ in bits */
    NVFP4_RULE_TORCHAO            = 1,
    NVFP4_RULE_MODELOPT           = 2,
    NVFP4_RULE_COMPRESSED_TENSORS = 3,
    NVFP4_RULE_TRANSFORMER_ENGINE = 4,
    NVFP4_RULE_RUNTIME            = 5
} nvfp4_rule;
typedef enum nvfp4_global_kind {
    NVFP4_GLOBAL_NONE     = 0,
    NVFP4_GLOBAL_STATIC   = 1, /* the number given */
    NVFP4_GLOBAL_PER_CALL = 2  /* from the amax of all rows of the call */
} nvfp4_global_kind;
typedef enum nvfp4_convention {
    NVFP4_CONVENTION_NONE     = 0, /* no per-tensor scale; the number beside it must be 0 */
    NVFP4_CONVENTION_MULTIPLY = 1, /* code * (scale * g) */
    NVFP4_CONVENTION_DIVIDE   = 2  /* code * (scale / g) */
} nvfp4_convention;
typedef enum nvfp4_scale_layout {
    NVFP4_SCALE_ROW_MAJOR = 1, /* [rows][k/16] */
    NVFP4_SCALE_128X4     = 2  /* cuBLAS 1D block scaling layout: tiles of 128 rows by 4 scales, zero padded */
} nvfp4_scale_layout;

typedef struct nvfp4_ctx nvfp4_ctx;
typedef struct nvfp4_weight nvfp4_weight;

/* Caller-owned text of a failure.  At most cap - 1 bytes of UTF-8 and a NUL are written to ptr (nothing when ptr is NULL
 * or cap is 0); len becomes the full length without the NUL, 0 after a success. */
typedef struct nvfp4_error {
    size_t  struct_size;
    char   *ptr;
    size_t  cap;
    size_t  len;
    int64_t native_code; /* CUresult of NVFP4_E_CUDA, and of NVFP4_E_NOMEM on CUDA, else 0 */
} nvfp4_error;

/* Receives one reason; the texts live until it returns.  Stable codes: "invalid-argument", "shape-unsupported",
 * "path-unsupported", "activations-unsupported", "device-absent", "device-arch", "driver-too-old",
 * "kernel-image-missing", "library-missing" (cuBLASLt, for the native path). */
typedef void (*nvfp4_reason_fn)(void *user, const char *code, const char *need, const char *have);

enum { NVFP4_CTX_MANAGED = 1 }; /* CUDA: weights in managed memory, prefetched to the device (since 1.1) */

typedef struct nvfp4_ctx_desc {
    size_t      struct_size;
    int32_t     device_type; /* nvfp4_device_type */
    int32_t     device;      /* ordinal; 0 for the CPU */
    uint32_t    flags;       /* 0 or NVFP4_CTX_MANAGED */
    uint32_t    reserved;
    const char *isa;         /* NULL: the best there is; on the CPU "portable", "avx2", "avx512", "avx512vnni", "amx", "neon",
                                "neondotprod" or "neoni8mm" */
} nvfp4_ctx_desc;

/* Some rows of a quantised matrix with a per-tensor scale of their own.  In an array, elements are segments[0].struct_size
 * bytes apart and all have that size. */
typedef struct nvfp4_segment {
    size_t      struct_size;
    uint64_t    rows;
    const void *codes;             /* [rows][k/2], low nibble = even element */
    uint64_t    codes_bytes;
    const void *scales;            /* e4m3, one per 16 of k, no sign bit, no NaN */
    uint64_t    scales_bytes;
    float       global_scale;      /* finite and above 0, or 0 with NVFP4_CONVENTION_NONE */
    uint32_t    global_convention; /* nvfp4_convention */
    uint32_t    scale_layout;      /* nvfp4_scale_layout, of this segment by itself */
    uint32_t    reserved;
} nvfp4_segment;

typedef struct nvfp4_weight_desc {
    size_t               struct_size;
    uint64_t             n, k;     /* out features = sum of the segments' rows; in features, a multiple of 16 */
    const nvfp4_segment *segments; /* stacked top to bottom; codes and scales may be NULL for can_prepare */
    uint64_t             n_segments;
    uint32_t             path;     /* nvfp4_path; exactly this one, never another */
    uint32_t             activations;
    uint32_t             x_dtype, y_dtype;
    uint32_t             act_rule;        /* nvfp4_rule with NVFP4_ACT_NVFP4, else 0; so the three below */
    uint32_t             act_global_kind; /* nvfp4_global_kind */
    float                act_global;      /* with NVFP4_GLOBAL_STATIC */
    uint32_t             act_global_convention;
    uint64_t             max_m;           /* rows of the largest call */
    uint64_t             reserved;
} nvfp4_weight_desc;

typedef struct nvfp4_matrix { /* row-major; data aligned for its element */
    size_t   struct_size;
    void    *data;
    uint64_t bytes;           /* readable (inputs) or writable (outputs) from data */
    uint64_t rows, cols, ld;  /* ld in elements, at least cols; elements between cols and ld are never touched */
    uint32_t dtype;
    uint32_t reserved;
} nvfp4_matrix;

/* What a call may use.  NULL: this thread alone, no workspace. */
typedef struct nvfp4_exec {
    size_t   struct_size;
    void    *stream;          /* cudaStream_t; NULL is the legacy default stream; not looked at on the CPU */
    void    *workspace;       /* 64-byte aligned on the CPU, 256 on CUDA */
    uint64_t workspace_bytes;
    /* The caller's threads: runs body(arg, 0) ... body(arg, tasks - 1), each once, in any order, on any threads, and
     * returns when all are done.  NULL: the calling thread runs them.  The library starts no thread.
     * Tasks n and n + 1 read neighbouring weights: a thread that runs them one after the other is faster. */
    void   (*parallel)(void *user, size_t tasks, void (*body)(void *arg, size_t task), void *arg);
    void    *parallel_user;
    uint32_t threads;         /* how many threads parallel has; work is split for it, results do not depend on it */
    uint32_t reserved;
} nvfp4_exec;

/* What a call does besides the product, in the same pass (since 1.1). */
enum { NVFP4_FUSE_NORM = 1, NVFP4_FUSE_GATE = 2, NVFP4_FUSE_ACCUMULATE = 4 };
typedef struct nvfp4_fusion {
    size_t      struct_size;
    uint32_t    parts;       /* NVFP4_FUSE_* */
    float       norm_eps;    /* NORM: x is f32; x / sqrt(mean(x^2) + eps) * weight, rounded to x_dtype, takes its place */
    const void *norm_weight; /* f32 [k], where the matrices are; NULL without NORM */
    /* GATE: the rows of the weight are gate rows, then as many up rows: y[m, n/2] = silu(gate) * up.
     * ACCUMULATE: y is f32 and the product is added to it. */
} nvfp4_fusion;

typedef struct nvfp4_device_info {
    size_t   struct_size;
    int32_t  device_type;
    int32_t  cc_major, cc_minor; /* compute capability; 0 on the CPU */
    uint32_t paths;              /* bit (1u << nvfp4_path) */
    uint32_t activations;        /* bit (1u << nvfp4_activations) */
    uint32_t has_native_image;   /* machine code for this very device is in the file */
    char     isa[32];            /* what this ctx runs */
    char     isa_available[96];  /* what it could run, best first, comma separated */
    char     build[64];          /* target and compile-time features */
} nvfp4_device_info;

typedef struct nvfp4_quantizer {
    size_t   struct_size;
    uint32_t rule;
    uint32_t source_dtype;      /* nvfp4_dtype whose rounding NVFP4_RULE_COMPRESSED_TENSORS imitates; 0: that of x */
    uint32_t global_kind;
    uint32_t global_convention; /* with NVFP4_GLOBAL_STATIC, else 0 */
    float    global_scale;      /* with NVFP4_GLOBAL_STATIC, else 0 */
    uint32_t reserved;
} nvfp4_quantizer;

typedef struct nvfp4_quantized {
    size_t   struct_size;
    void    *codes;             /* out [rows][k/2] */
    uint64_t codes_bytes;
    void    *scales;            /* out e4m3 [rows][k/16], row-major */
    uint64_t scales_bytes;
    float    global_scale;      /* out; 0 without one */
    uint32_t global_convention; /* out */
} nvfp4_quantized;

typedef struct nvfp4_api {
    size_t      struct_size;
    uint32_t    abi_major, abi_minor;
    const char *version;

    /* sink may be NULL; with NVFP4_E_UNSUPPORTED it received every reason. */
    nvfp4_status (*ctx_create)(const nvfp4_ctx_desc *, nvfp4_ctx **out, nvfp4_reason_fn sink, void *user, nvfp4_error *);
    void         (*ctx_destroy)(nvfp4_ctx *); /* NULL is allowed */
    nvfp4_status (*device_info)(nvfp4_ctx *, nvfp4_device_info *out, nvfp4_error *);

    /* NVFP4_OK exactly when prepare would take the description, the contents of codes and scales apart.  Else the sink
     * received every reason.  Looks at no weight bytes. */
    nvfp4_status (*can_prepare)(nvfp4_ctx *, const nvfp4_weight_desc *, nvfp4_reason_fn sink, void *user, nvfp4_error *);
    /* Repacks; the caller's bytes are not kept.  Refuses scales that are NaN or negative. */
    nvfp4_status (*prepare)(nvfp4_ctx *, const nvfp4_weight_desc *, const nvfp4_exec *, nvfp4_weight **out, nvfp4_error *);
    void         (*release)(nvfp4_weight *); /* NULL is allowed; no call on it may be running */
    uint64_t     (*weight_bytes)(const nvfp4_weight *); /* memory it keeps */
    uint64_t     (*workspace)(const nvfp4_weight *, uint64_t m); /* bytes any call on m rows needs; UINT64_MAX: overflow */

    /* y[m, n] = x[m, k] W^T.  Operands must not overlap.  NaN and infinity in x spread to y with NVFP4_ACT_NATIVE and are
     * NVFP4_E_INVALID with the others; y is undefined after an error. */
    nvfp4_status (*forward)(const nvfp4_weight *, const nvfp4_matrix *x, const nvfp4_matrix *y, const nvfp4_exec *,
                            nvfp4_error *);
    /* dx[m, k] = dy[m, n] W with the decoded W, in f32, rounded once; dy of y_dtype, dx of x_dtype. */
    nvfp4_status (*backward_input)(const nvfp4_weight *, const nvfp4_matrix *dy, const nvfp4_matrix *dx,
                                   const nvfp4_exec *, nvfp4_error *);
    /* out[n, k]: exact in f32, rounded once to f16 or bf16. */
    nvfp4_status (*dequantize)(const nvfp4_weight *, const nvfp4_matrix *out, const nvfp4_exec *, nvfp4_error *);

    /* x[rows, k] to codes and scales. */
    nvfp4_status (*quantize)(nvfp4_ctx *, const nvfp4_matrix *x, const nvfp4_quantizer *, nvfp4_quantized *out,
                             const nvfp4_exec *, nvfp4_error *);
    /* y[a->rows, b->rows] = A B^T of two quantised matrices with k columns.  Repacks b in every call: for weights that
     * are used again, prepare them. */
    nvfp4_status (*scaled_mm)(nvfp4_ctx *, const nvfp4_segment *a, const nvfp4_segment *b, uint64_t k,
                              const nvfp4_matrix *y, const nvfp4_exec *, nvfp4_error *);

    /* Memory that host and device share.  On the CPU: unsupported, with the reason; managed_is answers 0. */
    nvfp4_status (*managed_supported)(nvfp4_ctx *, nvfp4_reason_fn sink, void *user, nvfp4_error *);
    nvfp4_status (*managed_alloc)(nvfp4_ctx *, uint64_t bytes, void **out, nvfp4_error *);
    nvfp4_status (*managed_free)(nvfp4_ctx *, void *, nvfp4_error *);
    int32_t      (*managed_is)(nvfp4_ctx *, const void *);
    nvfp4_status (*managed_prefetch)(nvfp4_ctx *, const void *, uint64_t bytes, int32_t device, void *stream,
                                     nvfp4_error *);
    /* Gives cached device memory back; nothing to do on the CPU. */
    nvfp4_status (*empty_cache)(nvfp4_ctx *, nvfp4_error *);

    /* Since 1.1.  Whether forward_fused takes exactly these parts for m rows (1 or 0); no parts: always. */
    int32_t      (*fuses)(const nvfp4_weight *, uint64_t m, uint32_t parts);
    /* forward with a fusion; NVFP4_E_UNSUPPORTED where fuses answers 0. */
    nvfp4_status (*forward_fused)(const nvfp4_weight *, const nvfp4_matrix *x, const nvfp4_fusion *, const nvfp4_matrix *y,
                                  const nvfp4_exec *, nvfp4_error *);
} nvfp4_api;

/* NULL if this library has no table of that major.  *minor_out (NULL is allowed) gets its minor. */
typedef const nvfp4_api *(*nvfp4_get_api_fn)(uint32_t abi_major, uint32_t *minor_out);
NVFP4_EXPORT const nvfp4_api *nvfp4_get_api(uint32_t abi_major, uint32_t *minor_out);

/* Whether the table has an entry: its size covers it and it is set. */
#define NVFP4_HAS(api, field) \
    ((api)->struct_size >= offsetof(nvfp4_api, field) + sizeof((api)->field) && (api)->field != NULL)
#ifdef __cplusplus
}
#endif
#endif
