/* acme-c: NVFP4 and NF4 products on the CPU with the input as it is (W4A16), in C11 without dependencies.
 *
 * All encodings become one layout: 16-element groups along k, codes packed low nibble first, one f32 scale per
 * group and a table of 16 values.  A group never crosses an absmax block, because k and every block size are
 * multiples of 16.  Weights stay packed; a group is decoded into registers where it is used.
 *
 * What numbers are is in acme_numbers.h, what a task computes in acme_kernels.h, and everything that the table
 * hands out is here. */
#include "q4_plugin.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "acme_numbers.h"
#include "acme_kernels.h"

#ifndef NAME
#define NAME    "acme-c"
#endif
#define VERSION "1.0.0"
#define VENDOR  "ACME"

Q4_PLUGIN_DESCRIPTOR(NAME, VERSION, VENDOR);

struct q4_backend {
    int unused; /* there is no state; an object makes create and destroy mean something */
};

/* ---- errors ------------------------------------------------------------------------------------------------------- */

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

/* ---- can_prepare -------------------------------------------------------------------------------------------------- */

struct verdict {
    q4_reject_fn sink;
    void        *user;
    int          refused;
};

static void refuse(struct verdict *v, const char *code, const char *need, const char *have)
{
    q4_str c = {code, strlen(code)}, n = {need, strlen(need)}, h = {have, strlen(have)};
    v->sink(v->user, c, n, h);
    v->refused = 1;
}

static int is_io(uint32_t dtype)
{
    return dtype == Q4_F32 || dtype == Q4_F16 || dtype == Q4_BF16;
}

static void check(const q4_linear_spec *s, struct verdict *v)
{
    char     have[32];
    uint64_t rows = UINT64_MAX;
    if (s->schema_revision != 1 || (s->schema != Q4_SCHEMA_NVFP4 && s->schema != Q4_SCHEMA_NF4 && s->schema != Q4_SCHEMA_NF4_DQ))
        refuse(v, "schema-unsupported", "nvfp4@1, nf4@1 or nf4-dq@1", "another schema");
    if (s->path != Q4_PATH_FUSED_DEQUANT)
        refuse(v, "path-unsupported", "fused-dequant", "another path");
    if (s->activations != Q4_ACT_NATIVE)
        refuse(v, "activations-unsupported", "native", "quantised activations");
    if (!is_io(s->x_dtype) || !is_io(s->y_dtype))
        refuse(v, "dtype-unsupported", "float32, float16 or bfloat16", "another type");
    if (s->device_type != Q4_DEVICE_CPU)
        refuse(v, "device-absent", "cpu", "another device");
    if (s->k % GROUP != 0 || s->k == 0) {
        snprintf(have, sizeof have, "k = %llu", (unsigned long long)s->k);
        refuse(v, "shape-unsupported", "k % 16 == 0", have);
    }
    for (uint64_t i = 0; i < s->n_segments; i++)
        rows = s->segment_rows[i] < rows ? s->segment_rows[i] : rows;
    if (s->n_segments == 0 || rows == 0 || s->max_m == 0)
        refuse(v, "shape-unsupported", "at least one segment, one row in each, one row in a call", "none");
    if (s->ops & ~(uint32_t)(Q4_OP_FORWARD | Q4_OP_BACKWARD_INPUT | Q4_OP_DEQUANTIZE))
        refuse(v, "op-unsupported", "forward, backward_input, dequantize", "another operation");
    if (s->schema == Q4_SCHEMA_NVFP4 ? s->block != GROUP : s->block == 0 || s->block % GROUP != 0)
        refuse(v, "layout-unsupported", "blocks of 16 (nvfp4) or a multiple of it (nf4)", "another block size");
}

static q4_status can_prepare(const q4_backend *b, const q4_linear_spec *spec, const q4_env *env, q4_reject_fn sink,
                             void *user, q4_error *err)
{
    struct verdict v = {sink, user, 0};
    (void)b, (void)env;
    if (spec->struct_size < sizeof *spec)
        return fail(err, Q4_E_ABI, "spec of an unknown version");
    check(spec, &v);
    return v.refused ? fail(err, Q4_E_UNSUPPORTED, "see the reasons") : done(err);
}

/* ---- prepare ------------------------------------------------------------------------------------------------------ */

static float f32_at(const void *p, uint64_t i)
{
    float v; /* weight bytes may have any alignment */
    memcpy(&v, (const char *)p + 4 * i, 4);
    return v;
}

/* Byte of a scale in tiles of 128 rows by 4 scales. */
static uint64_t tiled(uint64_t row, uint64_t col, uint64_t cols)
{
    uint64_t tile = row / 128 * ((cols + 3) / 4) + col / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + col % 4;
}

static q4_status take_nvfp4(q4_prepared *p, const q4_linear_spec *spec, const q4_segment *s, uint64_t first, q4_error *err)
{
    uint64_t groups = p->k / GROUP;
    int      is_tiled = spec->scale_layout == Q4_SCALE_128X4;
    uint64_t stored = is_tiled ? (s->rows + 127) / 128 * 128 * ((groups + 3) / 4 * 4) : s->rows * groups;
    if (s->codes_bytes < s->rows * (p->k / 2) || s->scales_bytes < stored)
        return fail(err, Q4_E_INVALID, "fewer bytes than rows and k say");
    memcpy(p->codes + first * (p->k / 2), s->codes, s->rows * (p->k / 2));
    for (uint64_t r = 0; r < s->rows; r++)
        for (uint64_t g = 0; g < groups; g++) {
            uint8_t byte = ((const uint8_t *)s->scales)[is_tiled ? tiled(r, g, groups) : r * groups + g];
            float   scale;
            if (byte >= 0x7f)
                return fail(err, Q4_E_SCALE_INVALID, "a block scale is NaN or negative");
            scale = e4m3(byte);
            if (s->global_convention == Q4_CONVENTION_MULTIPLY)
                scale *= s->global_scale;
            else if (s->global_convention == Q4_CONVENTION_DIVIDE)
                scale /= s->global_scale;
            p->scales[(first + r) * groups + g] = scale;
        }
    return Q4_OK;
}

static q4_status take_nf4(q4_prepared *p, const q4_linear_spec *spec, const q4_segment *s, uint64_t first, q4_error *err)
{
    uint64_t       elements = s->rows * p->k, blocks = (elements + spec->block - 1) / spec->block;
    int            nested = spec->schema == Q4_SCHEMA_NF4_DQ;
    const uint8_t *from = s->codes;
    uint8_t       *to = p->codes + first * (p->k / 2);
    if (s->codes_bytes < elements / 2 || s->scales_bytes < blocks * (nested ? 1 : 4) ||
        (nested && (spec->nested_block == 0 || s->nested_map_bytes < 1024 ||
                    s->nested_absmax_bytes < 4 * ((blocks + spec->nested_block - 1) / spec->nested_block))))
        return fail(err, Q4_E_INVALID, "fewer bytes than rows and k say");
    for (uint64_t i = 0; i < elements / 2; i++)
        to[i] = spec->nibble_order == Q4_NIBBLE_HIGH_FIRST ? (uint8_t)(from[i] << 4 | from[i] >> 4) : from[i];
    for (uint64_t g = 0; g < elements / GROUP; g++) {
        uint64_t block = g * GROUP / spec->block;
        float    absmax;
        if (nested) {
            uint8_t code = ((const uint8_t *)s->scales)[block];
            float   product = f32_at(s->nested_map, code) * f32_at(s->nested_absmax, block / spec->nested_block);
            absmax = product + s->nested_offset;
        } else {
            absmax = f32_at(s->scales, block);
        }
        p->scales[first * (p->k / GROUP) + g] = absmax;
    }
    return Q4_OK;
}

static void release(q4_prepared *p)
{
    if (p) {
        free(p->codes);
        free(p->scales);
        free(p);
    }
}

static void ignore(void *user, q4_str code, q4_str need, q4_str have)
{
    (void)user, (void)code, (void)need, (void)have;
}

static q4_status prepare(const q4_backend *b, const q4_linear_spec *spec, const q4_weight *w, const q4_exec *exec,
                         q4_prepared **out, q4_error *err)
{
    struct verdict v = {ignore, NULL, 0};
    q4_prepared   *p;
    q4_status      status = Q4_OK;
    uint64_t       first = 0;
    (void)b, (void)exec;
    if (spec->struct_size < sizeof *spec || w->struct_size < sizeof *w)
        return fail(err, Q4_E_ABI, "spec or weight of an unknown version");
    check(spec, &v);
    if (v.refused)
        return fail(err, Q4_E_UNSUPPORTED, "can_prepare refuses this product");
    if (spec->n == 0 || spec->n > SIZE_MAX / 4 / spec->k || w->n_segments != spec->n_segments)
        return fail(err, Q4_E_INVALID, "shape");
    p = calloc(1, sizeof *p);
    if (!p)
        return fail(err, Q4_E_NOMEM, "weight");
    p->n = spec->n, p->k = spec->k, p->max_m = spec->max_m;
    p->ops = Q4_OP_FORWARD | Q4_OP_BACKWARD_INPUT | Q4_OP_DEQUANTIZE;
    p->x_dtype = spec->x_dtype, p->y_dtype = spec->y_dtype;
    memcpy(p->table, spec->schema == Q4_SCHEMA_NVFP4 ? E2M1 : NF4, sizeof p->table);
    p->codes = malloc((size_t)(p->n * (p->k / 2)));
    p->scales = malloc((size_t)(p->n * (p->k / GROUP) * 4));
    if (!p->codes || !p->scales)
        status = fail(err, Q4_E_NOMEM, "weight");
    for (uint64_t i = 0; status == Q4_OK && i < w->n_segments; i++) {
        const q4_segment *s = (const q4_segment *)((const char *)w->segments + i * w->segments[0].struct_size);
        if (s->rows > p->n - first)
            status = fail(err, Q4_E_INVALID, "more rows than n");
        else if (spec->schema == Q4_SCHEMA_NVFP4)
            status = take_nvfp4(p, spec, s, first, err);
        else
            status = take_nf4(p, spec, s, first, err);
        first += s->rows;
    }
    if (status == Q4_OK && first != p->n)
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
    out->n = p->n, out->k = p->k;
    out->resident_bytes = sizeof *p + p->n * (p->k / 2) + p->n * (p->k / GROUP) * 4;
    out->path = Q4_PATH_FUSED_DEQUANT;
    out->activations = Q4_ACT_NATIVE;
    out->ops = p->ops;
    out->reserved = 0;
    return done(err);
}

/* Inputs of 16 bits are widened, a tile at a time. */
static uint64_t workspace(const q4_prepared *p, uint64_t m)
{
    uint64_t columns = p->k > p->n ? p->k : p->n;
    if (p->x_dtype == Q4_F32 && p->y_dtype == Q4_F32)
        return 0;
    return 4 * columns * (m < TILE ? m : TILE);
}

/* ---- products ----------------------------------------------------------------------------------------------------- */

static int fits(const q4_matrix *m, uint64_t rows, uint64_t cols)
{
    uint64_t last;
    if (m->struct_size < sizeof *m || m->rows != rows || m->cols != cols || m->ld < cols || !is_io(m->dtype) ||
        m->device_type != Q4_DEVICE_CPU || rows == 0)
        return 0;
    last = (rows - 1) * m->ld + cols;
    return last <= m->bytes / size_of(m->dtype);
}

static int overlap(const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes)
{
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x < y + b_bytes && y < x + a_bytes;
}

static uint64_t reach(const q4_matrix *m)
{
    return ((m->rows - 1) * m->ld + m->cols) * size_of(m->dtype);
}

/* Whether two operands, or one and the workspace, share a byte. */
static int share(const q4_matrix *a, const q4_matrix *b, const q4_exec *exec)
{
    const void *work = exec ? exec->workspace : NULL;
    return overlap(a->data, reach(a), b->data, reach(b)) ||
           (work && (overlap(work, exec->workspace_bytes, a->data, reach(a)) ||
                     overlap(work, exec->workspace_bytes, b->data, reach(b))));
}

static q4_status product(const q4_prepared *p, const q4_matrix *in, const q4_matrix *out, uint64_t in_cols,
                         uint64_t out_cols, uint64_t items, q4_task_fn task, uint32_t parts, const q4_exec *exec,
                         q4_error *err)
{
    uint32_t in_dtype = task == forward_task ? p->x_dtype : p->y_dtype;
    uint32_t out_dtype = parts & ADD ? Q4_F32 : task == forward_task ? p->y_dtype : p->x_dtype;
    uint64_t m = in->rows;
    if (!fits(in, m, in_cols) || !fits(out, m, out_cols) || m > p->max_m || in->dtype != in_dtype || out->dtype != out_dtype)
        return fail(err, Q4_E_INVALID, "operands do not fit the weight");
    if (share(in, out, exec))
        return fail(err, Q4_E_INVALID, "operands overlap");
    if (in->dtype != Q4_F32 && (!exec || exec->workspace_bytes < 4 * in_cols * (m < TILE ? m : TILE)))
        return fail(err, Q4_E_INVALID, "workspace is too small");
    for (uint64_t first = 0; first < m; first += TILE) {
        const char *rows = (const char *)in->data + first * in->ld * size_of(in->dtype);
        struct job  j = {p, (const float *)(const void *)rows, in->ld, m - first < TILE ? m - first : TILE, NULL, out->ld,
                         0, 0, out->dtype, parts};
        j.out = (char *)out->data + first * out->ld * size_of(out->dtype);
        if (in->dtype != Q4_F32) {
            float *wide = exec->workspace;
            for (uint64_t r = 0; r < j.rows; r++)
                load_row(wide + r * in_cols, rows + r * in->ld * 2, in->dtype, in_cols);
            j.in = wide, j.in_ld = in_cols;
        }
        run(exec, &j, items, task);
    }
    return done(err);
}

/* y = x W^T and what the parts add. */
static q4_status multiply(const q4_prepared *p, const q4_matrix *x, uint32_t parts, const q4_matrix *y,
                          const q4_exec *exec, q4_error *err)
{
    uint64_t all = columns(p, parts);
    return product(p, x, y, p->k, all, all, forward_task, parts, exec, err);
}

static q4_status forward(const q4_prepared *p, const q4_matrix *x, const q4_matrix *y, const q4_exec *exec, q4_error *err)
{
    return multiply(p, x, 0, y, exec, err);
}

#if Q4_ABI_MINOR >= 2
static uint32_t fuses(const q4_prepared *p, uint64_t m, uint32_t parts)
{
    return m <= p->max_m && !(parts & ~(uint32_t)(GATE | ADD)) && !(parts & GATE && p->n % 2);
}

static q4_status forward_fused(const q4_prepared *p, const q4_matrix *x, const q4_fusion *f, const q4_matrix *y,
                               const q4_exec *exec, q4_error *err)
{
    if (f->struct_size < sizeof *f)
        return fail(err, Q4_E_ABI, "fusion of an unknown version");
    if (!fuses(p, x->rows, f->parts))
        return fail(err, Q4_E_UNSUPPORTED, "a gate or an addition, and gates of as many up rows");
    return multiply(p, x, f->parts, y, exec, err);
}

/* Several weights in one call: their rows of x are multiplied one weight after the other. */
struct q4_group {
    uint64_t           count;
    const q4_prepared *weights[];
};

static q4_status group(const q4_backend *b, const q4_prepared *const *weights, uint64_t count, const q4_exec *exec,
                       q4_group **out, q4_error *err)
{
    q4_group *g;
    (void)b, (void)exec;
    for (uint64_t i = 0; i < count; i++)
        if (weights[i]->n != weights[0]->n || weights[i]->k != weights[0]->k || weights[i]->max_m != weights[0]->max_m ||
            weights[i]->x_dtype != weights[0]->x_dtype || weights[i]->y_dtype != weights[0]->y_dtype)
            return fail(err, Q4_E_UNSUPPORTED, "weights of one shape and type");
    if (count == 0 || count > 65536)
        return fail(err, Q4_E_INVALID, "1 to 65536 weights");
    g = malloc(sizeof *g + (size_t)count * sizeof *weights);
    if (!g)
        return fail(err, Q4_E_NOMEM, "group");
    g->count = count;
    memcpy(g->weights, weights, (size_t)count * sizeof *weights);
    *out = g;
    return done(err);
}

static void release_group(q4_group *g)
{
    free(g);
}

static uint64_t group_workspace(const q4_group *g, uint64_t m)
{
    return workspace(g->weights[0], m);
}

/* Rows first to last - 1 of a matrix. */
static q4_matrix rows_of(const q4_matrix *m, int32_t first, int32_t last)
{
    q4_matrix part = *m;
    uint64_t  skipped = (uint64_t)first * m->ld * size_of(m->dtype);
    part.data = (char *)m->data + skipped;
    part.bytes -= skipped;
    part.rows = (uint64_t)(last - first);
    return part;
}

static q4_status forward_grouped(const q4_group *g, const q4_matrix *x, const int32_t *offsets, const q4_matrix *y,
                                 const q4_exec *exec, q4_error *err)
{
    const q4_prepared *p = g->weights[0];
    uint64_t           bytes = (g->count + 1) * sizeof *offsets;
    if (!fits(x, x->rows, p->k) || !fits(y, x->rows, p->n) || x->rows > p->max_m)
        return fail(err, Q4_E_INVALID, "operands do not fit the weights");
    if (share(x, y, exec) || overlap(offsets, bytes, x->data, reach(x)) || overlap(offsets, bytes, y->data, reach(y)))
        return fail(err, Q4_E_INVALID, "operands overlap");
    if (offsets[0] != 0 || offsets[g->count] < 0 || (uint64_t)offsets[g->count] != x->rows)
        return fail(err, Q4_E_INVALID, "offsets from 0 to the number of rows");
    for (uint64_t e = 0; e < g->count; e++)
        if (offsets[e + 1] < offsets[e])
            return fail(err, Q4_E_INVALID, "offsets that never fall");
    for (uint64_t e = 0; e < g->count; e++) {
        if (offsets[e] < offsets[e + 1]) {
            q4_matrix in = rows_of(x, offsets[e], offsets[e + 1]), out = rows_of(y, offsets[e], offsets[e + 1]);
            q4_status status = multiply(g->weights[e], &in, 0, &out, exec, err);
            if (status != Q4_OK)
                return status;
        }
    }
    return done(err);
}
#endif

static q4_status backward_input(const q4_prepared *p, const q4_matrix *dy, const q4_matrix *dx, const q4_exec *exec,
                                q4_error *err)
{
    return product(p, dy, dx, p->n, p->k, p->k / GROUP, backward_task, 0, exec, err);
}

static q4_status dequantize(const q4_prepared *p, const q4_matrix *out, const q4_exec *exec, q4_error *err)
{
    struct job j = {p, NULL, 0, 0, out->data, out->ld, 0, 0, out->dtype, 0};
    if (!fits(out, p->n, p->k))
        return fail(err, Q4_E_INVALID, "output does not fit the weight");
    if (exec && exec->workspace && overlap(exec->workspace, exec->workspace_bytes, out->data, reach(out)))
        return fail(err, Q4_E_INVALID, "operands overlap");
    run(exec, &j, p->n, dequantize_task);
    return done(err);
}

/* ---- the table ---------------------------------------------------------------------------------------------------- */

static q4_status create(q4_backend **out, q4_error *err)
{
    *out = calloc(1, sizeof **out);
    return *out ? done(err) : fail(err, Q4_E_NOMEM, "backend");
}

static void destroy(q4_backend *b)
{
    free(b);
}

#if Q4_ABI_MINOR >= 1
static q4_status probe(const q4_backend *b, const q4_env *env, q4_probe_fn sink, void *user, q4_error *err)
{
    q4_str id = Q4_STR("acme.isa"), detail = Q4_STR("whatever the compiler was told");
    (void)b, (void)env;
    sink(user, id, 0, detail);
    return done(err);
}
#endif

static const q4_offer OFFERS[] = {
    {Q4_SCHEMA_NVFP4, 1, Q4_PATH_FUSED_DEQUANT, 0},
    {Q4_SCHEMA_NF4, 1, Q4_PATH_FUSED_DEQUANT, 0},
    {Q4_SCHEMA_NF4_DQ, 1, Q4_PATH_FUSED_DEQUANT, 0},
};

static const q4_backend_v1 TABLE = {
    .struct_size = sizeof(q4_backend_v1),
    .abi_major = Q4_ABI_MAJOR,
    .abi_minor = Q4_ABI_MINOR,
    .name = Q4_STR(NAME),
    .version = Q4_STR(VERSION),
    .vendor = Q4_STR(VENDOR),
    .priority = -20, /* below the kernels q4 comes with: used when it is named, or when those cannot */
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
    .backward_input = backward_input,
#if Q4_ABI_MINOR >= 1
    .probe = probe,
#endif
#if Q4_ABI_MINOR >= 2
    .fuses = fuses,
    .forward_fused = forward_fused,
    .group = group,
    .release_group = release_group,
    .group_workspace = group_workspace,
    .forward_grouped = forward_grouped,
#endif
};

q4_status q4_plugin_query(uint32_t abi_major, uint32_t id, q4_interface *out)
{
    if (abi_major != Q4_ABI_MAJOR || id != Q4_INTERFACE_BACKEND || out->struct_size < sizeof *out)
        return Q4_E_ABI;
    out->abi_minor = Q4_ABI_MINOR;
    out->table = &TABLE;
    return Q4_OK;
}
