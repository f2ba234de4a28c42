/* The arithmetic of {{name}}, apart from the interface: kernel.c is what you replace by your hardware's
 * own. */
#ifndef KERNEL_H
#define KERNEL_H
#include <stdint.h>

#define GROUP 16u /* elements along k that share a block scale */
#define TILE  8u  /* rows of x that one call of kernel_row() takes */

/* A weight as this backend keeps it.  Any layout will do: pack it in take_segment() of plugin.c as your
 * kernel wants it. */
struct weight {
    uint64_t n, k;
    uint8_t *codes;  /* [n][k/2], the even element in the low nibble */
    float   *scales; /* [n][k/16], block scale and per-tensor scale in one */
};

/* The 16 elements of group `group` in row `row` of W. */
void kernel_decode(const struct weight *w, uint64_t row, uint64_t group, float out[GROUP]);

/* sums[r] = the dot product of row `row` of W and row r of x, for r < rows <= TILE.  Rows of x are `ld`
 * elements apart. */
void kernel_row(const struct weight *w, uint64_t row, const float *x, uint64_t ld, unsigned rows,
                float *sums);
#endif
