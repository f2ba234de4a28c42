// How the tiles of a launch are dealt to clusters. Definitions: TN and KS, as in gemm.cu.
#include "place.cuh"

constexpr int ROUND = 2; // units of 128 of k, in which gemm.cu has places in its rings known to the compiler

// What a pair has to do, the same for those who load and those who multiply: rounds of k of a tile. Of a tile
// that `count` pairs share it is the `part`th piece, and the last work of each of them.
struct Work {
    int tile, from, to, part, count;
};
// First whole tiles in turn, of which every pair of a cluster does a piece of k, then a piece of one of the
// rest.
struct Plan {
    int rounds, whole, tiles, shares, next;
    DEVICE Plan start(int rounds, int whole, int tiles, int shares) { return {rounds, whole, tiles, shares, (int)blockIdx.x / (2 * KS)}; }
    __device__ __forceinline__ bool take(Work &w) {
        if (next < whole) {
            int piece = blockIdx.x / 2 % KS;
            w = {next, rounds * piece / KS, rounds * (piece + 1) / KS, 0, 1};
            next += gridDim.x / (2 * KS);
            return true;
        }
        int me = blockIdx.x / (2 * KS);
        if (next == NONE || me >= (tiles - whole) * shares) return false;
        next = NONE;
        int part = me % shares;
        w = {whole + me / shares, rounds * part / shares, rounds * (part + 1) / shares, part, shares};
        return true;
    }
    // Rounds of all work.
    __device__ __forceinline__ int total() const {
        Plan p = *this;
        Work w;
        int sum = 0;
        while (p.take(w)) sum += w.to - w.from;
        return sum;
    }
    static constexpr int NONE = 0x7fffffff;
};
