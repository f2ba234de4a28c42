// Where the tiles of a product lie. Definition: TN, rows of x of a tile.
#include "types.cuh"

// Where a pair of tiles lies. Bands of eight token tiles: what runs at a time then shares rows of x and of
// the weight.
struct Place {
    int pair, token;
    DEVICE Place of(int tile, int pairs, int token_tiles) {
        int band = tile / (8 * pairs), in = tile - band * 8 * pairs, high = min(8, token_tiles - 8 * band);
        return {in / high, (8 * band + in % high) * TN};
    }
};
