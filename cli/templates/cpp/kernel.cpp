// A plain kernel that is right. Yours goes here: keep the three rules in the comments, and the suite will agree.
#include "kernel.hpp"

static constexpr float E2M1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                   -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

// Rule 1: a decoded weight is code * scale, rounded to f32, and dequantize() must give exactly that.
std::array<float, GROUP> kernel_decode(const Packed &w, std::size_t row, std::size_t group)
{
    const std::uint8_t *codes = &w.codes[row * (w.k / 2) + group * (GROUP / 2)];
    const float         scale = w.scales[row * (w.k / GROUP) + group];
    std::array<float, GROUP> out{};
    for (std::size_t i = 0; i < GROUP / 2; i++) {
        out[2 * i] = E2M1[codes[i] & 15] * scale;
        out[2 * i + 1] = E2M1[codes[i] >> 4] * scale;
    }
    return out;
}

// Rule 2: 16 sums side by side, added up at the end. One chain of k additions would be outside of the error bound,
// (k/16 + 32) * 2^-24 * sum |x w|; so would sums in f16 or bf16.
// Rule 3: what is computed for a row of x does not depend on how many rows there are.
void kernel_row(const Packed &w, std::size_t row, const float *x, std::size_t ld, std::size_t rows, float *sums)
{
    float lanes[TILE][GROUP] = {};
    for (std::size_t group = 0; group < w.k / GROUP; group++) {
        const auto values = kernel_decode(w, row, group);
        for (std::size_t r = 0; r < rows; r++)
            for (std::size_t i = 0; i < GROUP; i++)
                lanes[r][i] += x[r * ld + group * GROUP + i] * values[i];
    }
    for (std::size_t r = 0; r < rows; r++) {
        for (std::size_t half = GROUP / 2; half; half /= 2)
            for (std::size_t i = 0; i < half; i++)
                lanes[r][i] += lanes[r][i + half];
        sums[r] = lanes[r][0];
    }
}
