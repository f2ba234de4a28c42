/* {{name}}: NVFP4 weights, inputs as they are (W4A16), on the CPU.  This file is the interface, kernel.c the arithmetic.
 * q4_plugin.h has the rules; what is refused here is refused in check(), each with a reason. */
#include "kernel.h"
#include "q4_plugin.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME    "{{name}}"
#define VERSION "0.1.0"
#define VENDOR  "{{vendor}}"

Q4_PLUGIN_DESCRIPTOR(NAME, VERSION, VENDOR);

struct q4_backend {
    int unused; /* handles of your driver, if there are any */
};

struct q4_prepared {
    struct weight w;
    uint64_t      max_m;
    uint32_t      x_dtype, y_dtype;
};

/* ---- errors: text into the caller's buffer, never more than fits ---- */

static q4_status fail(q4_error *err, q4_status status, const char *text)
{
    size_t len = strlen(text);
    if (err && err->struct_size >= sizeof *err) {
        if (err->ptr)
            memcpy(err->ptr, text, len < err->cap ? len : err->cap);
        err->len = len;
        err->native_code = 0;
    }
    return status;
}

static q4_status done(q4_error *err)
{
    return fail(err, Q4_OK, "");
}

/* ---- which products: every reason, and the same ones whoever asks ---- */

struct verdict {
    q4_reject_fn sink; /* NULL: only whether */
    void        *user;
    int          is_refused;
};

static void refuse(struct verdict *v, const char *code, const char *need, const char *what, uint64_t have)
{
    char   text[64];
    q4_str c = {code, strlen(code)}, n = {need, strlen(need)}, h = {text, 0};
    h.len = (size_t)snprintf(text, sizeof text, "%s %llu", what, (unsigned long long)have);
    if (v->sink)
        v->sink(v->user, c, n, h);
    v->is_refused = 1;
}

static int is_float(uint32_t dtype)
{
    return dtype == Q4_F32 || dtype == Q4_F16 || dtype == Q4_BF16;
}

static void check(const q4_linear_spec *s, struct verdict *v)
{
    uint64_t i;
    if (s->schema != Q4_SCHEMA_NVFP4 || s->schema_revision != 1)
        refuse(v, "schema-unsupported", "nvfp4@1", "schema", s->schema);
    if (s->path != Q4_PATH_FUSED_DEQUANT)
        refuse(v, "path-unsupported", "fused-dequant", "path", s->path);
    if (s->activations != Q4_ACT_NATIVE)
        refuse(v, "activations-unsupported", "native activations", "activations", s->activations);
    if (s->ops & ~(uint32_t)(Q4_OP_FORWARD | Q4_OP_DEQUANTIZE))
        refuse(v, "op-unsupported", "forward and dequantize", "ops", s->ops);
    if (!is_float(s->x_dtype))
        refuse(v, "dtype-unsupported", "float32, float16 or bfloat16", "x of type", s->x_dtype);
    if (!is_float(s->y_dtype))
        refuse(v, "dtype-unsupported", "float32, float16 or bfloat16", "y of type", s->y_dtype);
    if (s->scale_layout != Q4_SCALE_ROW_MAJOR && s->scale_layout != Q4_SCALE_128X4)
        refuse(v, "layout-unsupported", "row-major scales or tiles of 128 x 4", "layout", s->scale_layout);
    if (s->device_type != Q4_DEVICE_CPU)
        refuse(v, "device-absent", "the CPU", "device type", s->device_type);
    if (s->k == 0 || s->k % GROUP != 0)
        refuse(v, "shape-unsupported", "k % 16 == 0, k > 0", "k =", s->k);
    if (s->n_segments == 0 || s->max_m == 0)
        refuse(v, "shape-unsupported", "a segment, and a row in a call", "segments:", s->n_segments);
    for (i = 0; i < s->n_segments; i++)
        if (s->segment_rows[i] == 0)
            refuse(v, "shape-unsupported", "a row in every segment", "no row in segment", i);
    /* An instruction set: ask env->cpu_features in can_prepare(), a list of words (q4_plugin.h has all there are), and
     * the CPU itself in prepare(), which has no env.  The code of such a reason is "device-arch". */
}

static q4_status can_prepare(const q4_backend *b, const q4_linear_spec *spec, const q4_env *env, q4_reject_fn sink,
                             void *user, q4_error *err)
{
    struct verdict v = {0};
    (void)b, (void)env;
    if (spec->struct_size < sizeof *spec)
        return fail(err, Q4_E_ABI, "a spec of an unknown version");
    v.sink = sink;
    v.user = user;
    check(spec, &v);
    return v.is_refused ? fail(err, Q4_E_UNSUPPORTED, "see the reasons") : done(err);
}

/* ---- prepare: repack once, keep nothing of the caller's ---- */

/* Values of the E4M3 bytes 0x00 to 0x7e. */
static float e4m3(uint8_t byte)
{
    unsigned exponent = byte >> 3, mantissa = byte & 7;
    float    value = exponent ? (float)(8 + mantissa) / 512.f : (float)mantissa / 512.f;
    for (; exponent > 1; exponent--)
        value *= 2.f;
    return value;
}

/* Byte of a block scale in tiles of 128 rows by 4 scales. */
static uint64_t tiled(uint64_t row, uint64_t group, uint64_t groups)
{
    uint64_t tile = row / 128 * ((groups + 3) / 4) + group / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
}

static q4_status take_segment(struct weight *w, const q4_linear_spec *spec, const q4_segment *s, uint64_t first,
                              q4_error *err)
{
    uint64_t groups = w->k / GROUP, row, group;
    int      is_tiled = spec->scale_layout == Q4_SCALE_128X4;
    uint64_t scales = is_tiled ? (s->rows + 127) / 128 * 128 * ((groups + 3) / 4 * 4) : s->rows * groups;
    if (s->codes_bytes != s->rows * (w->k / 2) || s->scales_bytes != scales)
        return fail(err, Q4_E_INVALID, "other bytes than rows and k say");
    if (s->global_convention != spec->global_convention || s->global_convention > Q4_CONVENTION_DIVIDE)
        return fail(err, Q4_E_INVALID, "another convention than the spec says");
    if (s->global_convention != Q4_CONVENTION_NONE && !(s->global_scale > 0.f && s->global_scale <= 3.4028235e38f))
        return fail(err, Q4_E_SCALE_INVALID, "a per-tensor scale that is not finite and above 0");
    memcpy(w->codes + first * (w->k / 2), s->codes, (size_t)s->codes_bytes);
    for (row = 0; row < s->rows; row++)
        for (group = 0; group < groups; group++) {
            uint8_t byte = ((const uint8_t *)s->scales)[is_tiled ? tiled(row, group, groups) : row * groups + group];
            float   scale;
            if (byte >= 0x7f) /* a set sign bit, -0 included, or NaN */
                return fail(err, Q4_E_SCALE_INVALID, "a block scale is NaN or negative");
            scale = e4m3(byte);
            if (s->global_convention == Q4_CONVENTION_MULTIPLY)
                scale *= s->global_scale;
            else if (s->global_convention == Q4_CONVENTION_DIVIDE)
                scale /= s->global_scale;
            w->scales[(first + row) * groups + group] = scale;
        }
    return Q4_OK;
}

static void release(q4_prepared *p)
{
    if (p) {
        free(p->w.codes);
        free(p->w.scales);
        free(p);
    }
}

static q4_status prepare(const q4_backend *b, const q4_linear_spec *spec, const q4_weight *weight, const q4_exec *exec,
                         q4_prepared **out, q4_error *err)
{
    struct verdict v = {0};
    q4_prepared   *p;
    q4_status      status = Q4_OK;
    uint64_t       first = 0, i;
    (void)b, (void)exec;
    if (spec->struct_size < sizeof *spec || weight->struct_size < sizeof *weight)
        return fail(err, Q4_E_ABI, "a spec or a weight of an unknown version");
    check(spec, &v);
    if (v.is_refused)
        return fail(err, Q4_E_UNSUPPORTED, "can_prepare refuses this product");
    if (spec->n == 0 || spec->n > SIZE_MAX / 8 / spec->k || weight->n_segments != spec->n_segments)
        return fail(err, Q4_E_INVALID, "a shape that contradicts itself");
    p = calloc(1, sizeof *p);
    if (!p)
        return fail(err, Q4_E_NOMEM, "weight");
    p->w.n = spec->n, p->w.k = spec->k, p->max_m = spec->max_m;
    p->x_dtype = spec->x_dtype, p->y_dtype = spec->y_dtype;
    p->w.codes = malloc((size_t)(p->w.n * (p->w.k / 2)));
    p->w.scales = malloc((size_t)(p->w.n * (p->w.k / GROUP)) * sizeof *p->w.scales);
    if (!p->w.codes || !p->w.scales)
        status = fail(err, Q4_E_NOMEM, "weight");
    for (i = 0; status == Q4_OK && i < weight->n_segments; i++) {
        /* Elements are as far apart as the first one says: the program may know more fields. */
        const char       *at = (const char *)weight->segments + i * weight->segments[0].struct_size;
        const q4_segment *s = (const q4_segment *)(const void *)at;
        if (s->struct_size < sizeof *s || s->rows > p->w.n - first)
            status = fail(err, Q4_E_INVALID, "segments that are not those of the spec");
        else
            status = take_segment(&p->w, spec, s, first, err);
        first += s->rows;
    }
    if (status == Q4_OK && first != p->w.n)
        status = fail(err, Q4_E_INVALID, "fewer rows than n");
    if (status != Q4_OK) {
        release(p);
        return status;
    }
    *out = p;
    return done(err);
}

static q4_status info(const q4_prepared *p, q4_prepared_info *out, q4_error *err)
{
    if (out->struct_size < sizeof *out)
        return fail(err, Q4_E_ABI, "info of an unknown version");
    out->n = p->w.n, out->k = p->w.k;
    out->resident_bytes = sizeof *p + p->w.n * (p->w.k / 2 + p->w.k / GROUP * sizeof *p->w.scales);
    out->path = Q4_PATH_FUSED_DEQUANT;
    out->activations = Q4_ACT_NATIVE;
    out->ops = Q4_OP_FORWARD | Q4_OP_DEQUANTIZE;
    out->reserved = 0;
    return done(err);
}

/* ---- types of 16 bits ---- */

static uint32_t bits_of(float v)
{
    uint32_t u;
    memcpy(&u, &v, sizeof u);
    return u;
}

static float float_of(uint32_t u)
{
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}

static float from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    float    small = (float)mantissa / 16777216.f; /* 2^-24 */
    if (exponent == 31)
        return float_of(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0)
        return sign ? -small : small;
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* To nearest, ties to even; NaN stays a quiet NaN. */
static uint16_t to_f16(float v)
{
    uint32_t u = bits_of(v), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00);
    if (a >= 0x477ff000u) /* 65520 and above */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000u) /* multiples of 2^-24: an addition rounds */
        return (uint16_t)(sign | (bits_of(float_of(a) + .5f) - bits_of(.5f)));
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | ((a >> 13) - (112u << 10)));
}

static uint16_t to_bf16(float v)
{
    uint32_t u = bits_of(v);
    if ((u & 0x7fffffff) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static size_t size_of(uint32_t dtype)
{
    return dtype == Q4_F32 ? 4 : 2;
}

static float load(const void *row, uint32_t dtype, uint64_t i)
{
    if (dtype == Q4_F32)
        return ((const float *)row)[i];
    if (dtype == Q4_F16)
        return from_f16(((const uint16_t *)row)[i]);
    return float_of((uint32_t)((const uint16_t *)row)[i] << 16);
}

static void store(void *row, uint32_t dtype, uint64_t i, float v)
{
    if (dtype == Q4_F32)
        ((float *)row)[i] = v;
    else
        ((uint16_t *)row)[i] = dtype == Q4_F16 ? to_f16(v) : to_bf16(v);
}

/* ---- operands ---- */

static int fits(const q4_matrix *m, uint64_t rows, uint64_t cols)
{
    return m->struct_size >= sizeof *m && rows > 0 && m->rows == rows && m->cols == cols && m->ld >= cols &&
           is_float(m->dtype) && m->device_type == Q4_DEVICE_CPU &&
           (rows - 1) * m->ld + cols <= m->bytes / size_of(m->dtype);
}

static void *row_of(const q4_matrix *m, uint64_t row)
{
    return (char *)m->data + row * m->ld * size_of(m->dtype);
}

/* From the first byte to the last that are used. */
static int overlap(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes)
{
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x < y + b_bytes && y < x + a_bytes;
}

static uint64_t reach(const q4_matrix *m)
{
    return ((m->rows - 1) * m->ld + m->cols) * size_of(m->dtype);
}

static int in_workspace(const q4_matrix *m, const q4_exec *exec)
{
    return exec && exec->workspace && overlap(exec->workspace, exec->workspace_bytes, m->data, reach(m));
}

/* ---- calls: no allocation, the caller's threads, the same bits for any number of them ---- */

struct job {
    const q4_prepared *p;
    const float       *x; /* rows of f32 */
    uint64_t           ld, first, piece;
    unsigned           rows;
    const q4_matrix   *y;
};

/* Splits `items` over the caller's threads.  The split may depend on their number, results may not. */
static void run(const q4_exec *exec, struct job *j, uint64_t items, q4_task_fn task)
{
    uint64_t pieces = exec && exec->parallel && exec->threads ? 4 * (uint64_t)exec->threads : 1;
    if (pieces > items)
        pieces = items;
    j->piece = (items + pieces - 1) / pieces;
    pieces = (items + j->piece - 1) / j->piece;
    if (pieces > 1)
        exec->parallel(exec->parallel_user, (size_t)pieces, task, j);
    else
        task(j, 0);
}

static void forward_task(void *arg, size_t task)
{
    const struct job  *j = arg;
    const q4_prepared *p = j->p;
    uint64_t           row = task * j->piece, end = row + j->piece < p->w.n ? row + j->piece : p->w.n;
    float              sums[TILE];
    unsigned           r;
    for (; row < end; row++) {
        kernel_row(&p->w, row, j->x, j->ld, j->rows, sums);
        for (r = 0; r < j->rows; r++)
            store(row_of(j->y, j->first + r), j->y->dtype, row, sums[r]);
    }
}

static uint64_t workspace(const q4_prepared *p, uint64_t m)
{
    /* Inputs of 16 bits are widened a tile at a time. */
    return p->x_dtype == Q4_F32 ? 0 : (m < TILE ? m : TILE) * p->w.k * sizeof(float);
}

static q4_status forward(const q4_prepared *p, const q4_matrix *x, const q4_matrix *y, const q4_exec *exec, q4_error *err)
{
    uint64_t first, i, m = x->rows;
    unsigned r;
    if (!fits(x, m, p->w.k) || !fits(y, m, p->w.n) || m > p->max_m || x->dtype != p->x_dtype || y->dtype != p->y_dtype)
        return fail(err, Q4_E_INVALID, "operands that do not fit the weight");
    if (overlap(x->data, reach(x), y->data, reach(y)) || in_workspace(x, exec) || in_workspace(y, exec))
        return fail(err, Q4_E_INVALID, "operands that overlap");
    if (workspace(p, m) > 0 && (!exec || !exec->workspace || exec->workspace_bytes < workspace(p, m)))
        return fail(err, Q4_E_INVALID, "a workspace that is too small");
    for (first = 0; first < m; first += TILE) {
        struct job j = {0};
        j.p = p, j.y = y, j.first = first;
        j.rows = (unsigned)(m - first < TILE ? m - first : TILE);
        if (x->dtype == Q4_F32) {
            j.x = row_of(x, first), j.ld = x->ld;
        } else {
            float *wide = exec->workspace;
            for (r = 0; r < j.rows; r++)
                for (i = 0; i < p->w.k; i++)
                    wide[r * p->w.k + i] = load(row_of(x, first + r), x->dtype, i);
            j.x = wide, j.ld = p->w.k;
        }
        run(exec, &j, p->w.n, forward_task);
    }
    return done(err);
}

static void dequantize_task(void *arg, size_t task)
{
    const struct job  *j = arg;
    const q4_prepared *p = j->p;
    uint64_t           row = task * j->piece, end = row + j->piece < p->w.n ? row + j->piece : p->w.n, group;
    float              values[GROUP];
    unsigned           i;
    for (; row < end; row++)
        for (group = 0; group < p->w.k / GROUP; group++) {
            kernel_decode(&p->w, row, group, values);
            for (i = 0; i < GROUP; i++)
                store(row_of(j->y, row), j->y->dtype, group * GROUP + i, values[i]);
        }
}

static q4_status dequantize(const q4_prepared *p, const q4_matrix *out, const q4_exec *exec, q4_error *err)
{
    struct job j = {0};
    if (!fits(out, p->w.n, p->w.k) || in_workspace(out, exec))
        return fail(err, Q4_E_INVALID, "an output that does not fit the weight");
    j.p = p, j.y = out;
    run(exec, &j, p->w.n, dequantize_task);
    return done(err);
}

/* ---- the table ---- */

static q4_status create(q4_backend **out, q4_error *err)
{
    *out = calloc(1, sizeof **out);
    return *out ? done(err) : fail(err, Q4_E_NOMEM, "backend");
}

static void destroy(q4_backend *b)
{
    free(b);
}

/* (schema, revision, path) that can_prepare() may ever accept. */
static const q4_offer OFFERS[] = {{Q4_SCHEMA_NVFP4, 1, Q4_PATH_FUSED_DEQUANT, 0}};

static const q4_backend_v1 TABLE = {
    .struct_size = sizeof(q4_backend_v1),
    .abi_major = Q4_ABI_MAJOR,
    .abi_minor = Q4_ABI_MINOR,
    .name = Q4_STR(NAME),
    .version = Q4_STR(VERSION),
    .vendor = Q4_STR(VENDOR),
    .priority = -20, /* below the kernels q4 comes with, which have 0 */
    .n_offers = sizeof OFFERS / sizeof *OFFERS,
    .offers = OFFERS,
    .create = create,
    .destroy = destroy,
    .can_prepare = can_prepare,
    .prepare = prepare,
    .release = release,
    .info = info,
    .workspace = workspace,
    .forward = forward,
    .dequantize = dequantize,
    .backward_input = NULL, /* inference only */
};

q4_status q4_plugin_query(uint32_t abi_major, uint32_t id, q4_interface *out)
{
    if (abi_major != Q4_ABI_MAJOR || id != Q4_INTERFACE_BACKEND || out->struct_size < sizeof *out)
        return Q4_E_ABI;
    out->abi_minor = Q4_ABI_MINOR;
    out->table = &TABLE;
    return Q4_OK;
}
