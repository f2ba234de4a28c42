/* Kernels of acme-c: a weight as it is kept, and the tasks of a call. */
#ifndef ACME_KERNELS_H
#define ACME_KERNELS_H
#include "acme_numbers.h"

#define GROUP 16u
#define TILE  8u /* rows of the input that share one decoded group */

struct q4_prepared {
    uint64_t n, k, max_m;
    uint32_t ops, x_dtype, y_dtype;
    float    table[16];
    uint8_t *codes;  /* [n][k/2] */
    float   *scales; /* [n][k/16] */
};

static void decode(const q4_prepared *p, uint64_t row, uint64_t group, float out[GROUP])
{
    const uint8_t *c = p->codes + row * (p->k / 2) + group * (GROUP / 2);
    float          s = p->scales[row * (p->k / GROUP) + group];
    for (unsigned i = 0; i < GROUP / 2; i++) {
        out[2 * i] = p->table[c[i] & 15] * s;
        out[2 * i + 1] = p->table[c[i] >> 4] * s;
    }
}

enum { GATE = 2, ADD = 4 }; /* Q4_FUSE_GATE and Q4_FUSE_ACCUMULATE, which came with 1.2 */

struct job {
    const q4_prepared *p;
    const float       *in; /* rows of f32, in_ld apart */
    uint64_t           in_ld, rows;
    char              *out; /* first row of the tile */
    uint64_t           out_ld, piece, pieces;
    uint32_t           out_dtype, parts;
};

/* Products of one row of the weight with the rows of the tile. */
static void sums(const struct job *j, uint64_t row, float out[TILE])
{
    const q4_prepared *p = j->p;
    float              acc[TILE][GROUP] = {{0}}, w[GROUP];
    for (uint64_t g = 0; g < p->k / GROUP; g++) {
        decode(p, row, g, w);
        for (uint64_t r = 0; r < j->rows; r++) {
            const float *x = j->in + r * j->in_ld + g * GROUP;
            for (unsigned i = 0; i < GROUP; i++)
                acc[r][i] += x[i] * w[i];
        }
    }
    for (uint64_t r = 0; r < j->rows; r++) {
        for (unsigned half = GROUP / 2; half; half /= 2)
            for (unsigned i = 0; i < half; i++)
                acc[r][i] += acc[r][i + half];
        out[r] = acc[r][0];
    }
}

/* Columns of y: with a gate, half of the rows of the weight let the other half through. */
static uint64_t columns(const q4_prepared *p, uint32_t parts)
{
    return parts & GATE ? p->n / 2 : p->n;
}

static void forward_task(void *arg, size_t task)
{
    const struct job *j = arg;
    uint64_t          all = columns(j->p, j->parts), end = (task + 1) * j->piece < all ? (task + 1) * j->piece : all;
    for (uint64_t col = task * j->piece; col < end; col++) {
        float value[TILE], up[TILE];
        sums(j, col, value);
        if (j->parts & GATE)
            sums(j, col + all, up);
        for (uint64_t r = 0; r < j->rows; r++) {
            char *row = j->out + r * j->out_ld * size_of(j->out_dtype);
            if (j->parts & GATE)
                value[r] = value[r] / (1.0f + expf(-value[r])) * up[r];
            if (j->parts & ADD)
                value[r] += ((const float *)(const void *)row)[col];
            store(row, j->out_dtype, col, value[r]);
        }
    }
}

static void backward_task(void *arg, size_t task)
{
    const struct job  *j = arg;
    const q4_prepared *p = j->p;
    uint64_t           groups = p->k / GROUP, end = (task + 1) * j->piece < groups ? (task + 1) * j->piece : groups;
    for (uint64_t g = task * j->piece; g < end; g++) {
        float acc[TILE][GROUP] = {{0}}, w[GROUP];
        for (uint64_t row = 0; row < p->n; row += GROUP) { /* short chains keep the rounding error small */
            float    part[TILE][GROUP] = {{0}};
            uint64_t last = row + GROUP < p->n ? row + GROUP : p->n;
            for (uint64_t o = row; o < last; o++) {
                decode(p, o, g, w);
                for (uint64_t r = 0; r < j->rows; r++)
                    for (unsigned i = 0; i < GROUP; i++)
                        part[r][i] += j->in[r * j->in_ld + o] * w[i];
            }
            for (uint64_t r = 0; r < j->rows; r++)
                for (unsigned i = 0; i < GROUP; i++)
                    acc[r][i] += part[r][i];
        }
        for (uint64_t r = 0; r < j->rows; r++)
            for (unsigned i = 0; i < GROUP; i++)
                store(j->out + r * j->out_ld * size_of(j->out_dtype), j->out_dtype, g * GROUP + i, acc[r][i]);
    }
}

static void dequantize_task(void *arg, size_t task)
{
    const struct job  *j = arg;
    const q4_prepared *p = j->p;
    uint64_t           end = (task + 1) * j->piece < p->n ? (task + 1) * j->piece : p->n;
    float              w[GROUP];
    for (uint64_t row = task * j->piece; row < end; row++)
        for (uint64_t g = 0; g < p->k / GROUP; g++) {
            decode(p, row, g, w);
            for (unsigned i = 0; i < GROUP; i++)
                store(j->out + row * j->out_ld * size_of(j->out_dtype), j->out_dtype, g * GROUP + i, w[i]);
        }
}

/* Splits `items` over the caller's threads; the split changes no result. */
static void run(const q4_exec *exec, struct job *j, uint64_t items, q4_task_fn task)
{
    uint64_t pieces = exec && exec->threads ? 4 * (uint64_t)exec->threads : 1;
    if (pieces > items)
        pieces = items;
    j->piece = (items + pieces - 1) / pieces;
    j->pieces = (items + j->piece - 1) / j->piece;
    if (exec && exec->parallel && j->pieces > 1) {
        exec->parallel(exec->parallel_user, (size_t)j->pieces, task, j);
        return;
    }
    for (uint64_t i = 0; i < j->pieces; i++)
        task(j, (size_t)i);
}

#endif
