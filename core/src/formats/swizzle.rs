//! The 128 x 4 tiles in which block-scaled tensor cores read their scales (`SWIZZLE_32_4_4`, cuBLAS 1-D block
//! scaling).
//!
//! Row-major and tiled scales have the same bytes in another order, so mixing them up looks like noise, not
//! like an error.
use crate::{Code, Error, Result};

/// Rows of a tile.
pub const TILE_ROWS: usize = 128;
/// Scales per row of a tile.
pub const TILE_COLS: usize = 4;

/// Byte of scale (`row`, `col`) in the tiled buffer of a matrix with `cols` scales per row (`k / 16`).
#[inline]
pub fn offset(row: usize, col: usize, cols: usize) -> usize {
    let tile = (row / TILE_ROWS) * cols.div_ceil(TILE_COLS) + col / TILE_COLS;
    tile * (TILE_ROWS * TILE_COLS) + (row % 32) * 16 + (row % TILE_ROWS / 32) * 4 + col % TILE_COLS
}

/// Bytes of the tiled buffer of `[rows, cols]` scales, padding included.
pub fn blocked_len(rows: usize, cols: usize) -> usize {
    rows.next_multiple_of(TILE_ROWS) * cols.next_multiple_of(TILE_COLS)
}

/// Tiles row-major `[rows, cols]` scales; padding bytes are zero.
///
/// # Panics
/// If `linear` is not `rows * cols` bytes.
pub fn to_blocked(linear: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    assert_eq!(linear.len(), rows * cols, "row-major scales");
    let mut blocked = vec![0; blocked_len(rows, cols)];
    for (i, &scale) in linear.iter().enumerate() {
        blocked[offset(i / cols, i % cols, cols)] = scale;
    }
    blocked
}

/// Row-major `[rows, cols]` scales of a tiled buffer. What the padding holds does not matter.
///
/// # Errors
/// `TensorShape` if `blocked` does not have [`blocked_len`] bytes.
pub fn from_blocked(blocked: &[u8], rows: usize, cols: usize) -> Result<Vec<u8>> {
    let need = blocked_len(rows, cols);
    if blocked.len() != need {
        return Err(Error::new(Code::TensorShape, "tiled block scales")
            .need(format!("{need} bytes for {rows} x {cols} scales in tiles of {TILE_ROWS} x {TILE_COLS}"))
            .have(format!("{} bytes", blocked.len())));
    }
    Ok((0..rows * cols).map(|i| blocked[offset(i / cols, i % cols, cols)]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_offsets() {
        // Any width of 9 to 12 scales has three tiles side by side.
        for cols in 9..=12 {
            for (row, col, want) in [
                (0, 0, 0),
                (0, 1, 1),
                (1, 0, 16),
                (31, 0, 496),
                (32, 0, 4),
                (96, 3, 15),
                (127, 3, 511),
                (0, 4, 512),
                (128, 0, 1536),
            ] {
                assert_eq!(offset(row, col, cols), want, "({row}, {col}) of {cols}");
            }
        }
        assert_eq!(offset(129, 9, 12), 2577);
    }

    #[test]
    fn round_trip_of_every_small_shape_and_nothing_collides() {
        for (rows, cols) in
            (1..=9).flat_map(|r| (1..=9).map(move |c| (r * 31, c))).chain([(128, 4), (129, 4), (256, 8)])
        {
            let linear: Vec<u8> = (0..rows * cols).map(|i| (i % 255 + 1) as u8).collect();
            let blocked = to_blocked(&linear, rows, cols);
            assert_eq!(blocked.len(), blocked_len(rows, cols));
            assert_eq!(blocked.iter().filter(|&&b| b != 0).count(), rows * cols, "{rows} x {cols}");
            assert_eq!(from_blocked(&blocked, rows, cols).expect("right length"), linear);
        }
    }

    #[test]
    fn tiled_scales_are_not_row_major() {
        // Row 1 of a 32 x 4 matrix lands behind the 16 bytes that rows 0, 32, 64 and 96 share.
        let linear: Vec<u8> = (0..128).collect();
        let blocked = to_blocked(&linear, 32, 4);
        assert_eq!(blocked[..20], [0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 5, 6, 7]);
        assert_ne!(blocked[..128], linear[..]);
    }

    #[test]
    fn a_buffer_of_another_length_is_refused() {
        for len in [0, 511, 513, 1024] {
            assert_eq!(
                from_blocked(&vec![0; len], 1, 1).expect_err("must be refused").code(),
                Code::TensorShape
            );
        }
        assert_eq!(from_blocked(&[], 0, 4).expect("empty"), Vec::<u8>::new());
    }
}
