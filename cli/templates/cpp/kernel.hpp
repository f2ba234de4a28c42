// The arithmetic of {{name}}, apart from the interface: kernel.cpp is what you replace by your hardware's
// own.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

constexpr std::size_t GROUP = 16; // elements along k that share a block scale
constexpr std::size_t TILE = 8;   // rows of x that one call of kernel_row() takes

// A weight as this backend keeps it. Any layout will do: pack it in Weight::take() as your kernel wants it.
struct Packed {
    std::size_t               n = 0, k = 0;
    std::vector<std::uint8_t> codes;  // [n][k/2], the even element in the low nibble
    std::vector<float>        scales; // [n][k/16], block scale and per-tensor scale in one
};

// The 16 elements of a group in a row of W.
std::array<float, GROUP> kernel_decode(const Packed &w, std::size_t row, std::size_t group);

// sums[r] = the dot product of row `row` of W and row r of x, for r < rows <= TILE. Rows of x are `ld`
// elements apart.
void kernel_row(const Packed &w, std::size_t row, const float *x, std::size_t ld, std::size_t rows,
                float *sums);
