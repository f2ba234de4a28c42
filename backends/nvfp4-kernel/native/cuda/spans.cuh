// Row segments of a weight: where the rows of each lie, and its per-tensor scale.
#include "rows.cuh"

struct Span {
    u32 end;   // first row behind it
    u32 skip;  // padding rows before it
    u32 convention;
    float global;
};
template <class Weight> DEVICE Span span_of(const Weight &w, u32 row) {
    u32 i = 0;
    while (row >= w.spans[i].end) i++;
    return w.spans[i];
}
DEVICE float effective(const Span &s, float scale) {
    return s.convention == MULTIPLY ? __fmul_rn(scale, s.global)
         : s.convention == DIVIDE   ? __fdiv_rn(scale, s.global)
                                    : scale;
}
