// How the blocks of a launch share the tiles of a product: the same for those of a block who load and those who
// multiply, who each go through their own copy of a plan.
#include "types.cuh"

// Rounds of k of a tile. Of a tile that several share it is the `part`th of `count` pieces, where a plan says so.
struct Work {
    int tile, from, to, part, count;
};

// Tiles below split_tiles are cut into equal shares of k, one a worker (stream-K), the others are dealt whole. A
// worker is BLOCKS blocks; All holds rounds * split_tiles times the workers.
template <int BLOCKS, class All> struct Shares {
    int rounds, split_tiles, tiles, begin, end, next;
    DEVICE Shares start(int rounds, int split_tiles, int tiles) {
        Shares p;
        All all = (All)rounds * split_tiles;
        p.rounds = rounds, p.split_tiles = split_tiles, p.tiles = tiles;
        u32 me = blockIdx.x / BLOCKS, count = gridDim.x / BLOCKS;
        p.begin = (int)(all * me / count), p.end = (int)(all * (me + 1) / count);
        p.next = split_tiles + me;
        return p;
    }
    __device__ __forceinline__ bool take(Work &w) {
        if (begin < end) {
            w.tile = begin / rounds, w.from = begin - w.tile * rounds, w.to = min(rounds, w.from + end - begin);
            begin += w.to - w.from;
            return true;
        }
        if (next >= tiles) return false;
        w.tile = next, w.from = 0, w.to = rounds;
        next += gridDim.x / BLOCKS;
        return true;
    }
    // Rounds of all work.
    __device__ __forceinline__ int total() const {
        int whole = next < tiles ? (tiles - 1 - next) / (int)(gridDim.x / BLOCKS) + 1 : 0;
        return end - begin + whole * rounds;
    }
};

// First whole tiles in turn, of which each of the PAIRS pairs of blocks of a cluster does a piece of k, then a
// piece of one of the rest, which `shares` pairs share: the last work of each of them.
template <int PAIRS> struct Pieces {
    int rounds, whole, tiles, shares, next;
    DEVICE Pieces start(int rounds, int whole, int tiles, int shares) { return {rounds, whole, tiles, shares, (int)blockIdx.x / (2 * PAIRS)}; }
    __device__ __forceinline__ bool take(Work &w) {
        if (next < whole) {
            int piece = blockIdx.x / 2 % PAIRS;
            w = {next, rounds * piece / PAIRS, rounds * (piece + 1) / PAIRS, 0, 1};
            next += gridDim.x / (2 * PAIRS);
            return true;
        }
        int me = blockIdx.x / (2 * PAIRS);
        if (next == NONE || me >= (tiles - whole) * shares) return false;
        next = NONE;
        int part = me % shares;
        w = {whole + me / shares, rounds * part / shares, rounds * (part + 1) / shares, part, shares};
        return true;
    }
    // Rounds of all work.
    __device__ __forceinline__ int total() const {
        Pieces p = *this;
        Work w;
        int sum = 0;
        while (p.take(w)) sum += w.to - w.from;
        return sum;
    }
    static constexpr int NONE = 0x7fffffff;
};
