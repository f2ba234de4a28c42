//! The two calls that need the weight as numbers: the gradient of the input, and the decoded matrix. Both
//! decode tile by tile, so neither ever has a dense copy.
use crate::call::{Mat, Threads, check_rows, invalid};
use crate::kernels::{LANES, TILE_K};
use crate::weight::Weight;
use q4_core::Result;

/// Rows of dy that run against one decoded tile.
const ROWS: usize = 64;

/// `dx = dy W`; each task has columns of its own, n ascending.
///
/// # Safety
/// The matrices are readable and writable and do not overlap.
pub unsafe fn backward_input(w: &Weight, dy: Mat, dx: Mat, threads: &Threads<'_>) -> Result<()> {
    check_rows(w.max_m, &dy, &dx)?;
    let tiles = w.tiles();
    threads.each(threads.tasks(tiles), tiles, |tiles| {
        let (mut tile, mut input) = ([[0.0; TILE_K]; LANES], [[0.0; LANES]; ROWS]);
        let mut sums = [[0.0; TILE_K]; ROWS];
        for k in tiles {
            for first in (0..dy.rows).step_by(ROWS) {
                let m = ROWS.min(dy.rows - first);
                sums[..m].fill([0.0; TILE_K]);
                let mut width = 0;
                for block in 0..w.row_blocks() {
                    width = w.decode(block, k, &mut tile);
                    let lanes = LANES.min(w.n - block * LANES);
                    for (r, input) in input[..m].iter_mut().enumerate() {
                        input[lanes..].fill(0.0);
                        // SAFETY: inside dy.
                        unsafe { dy.load(first + r, block * LANES, &mut input[..lanes]) };
                    }
                    // SAFETY: the weight's kernels run on this processor.
                    unsafe { (w.kernels().axpy)(&input[..m], &tile, &mut sums[..m]) };
                }
                for (r, sums) in sums[..m].iter().enumerate() {
                    // SAFETY: inside dx, and the columns are this task's.
                    unsafe { dx.store(first + r, k * TILE_K, &sums[..width]) };
                }
            }
        }
    });
    Ok(())
}

/// The whole matrix; each task has rows of its own.
///
/// # Safety
/// The matrix is writable.
pub unsafe fn dequantize(w: &Weight, out: Mat, threads: &Threads<'_>) -> Result<()> {
    if out.rows != w.n {
        return Err(invalid("decoded weight", format!("{} rows", w.n), out.rows));
    }
    let blocks = w.row_blocks();
    threads.each(threads.tasks(blocks), blocks, |blocks| {
        let mut tile = [[0.0; TILE_K]; LANES];
        for block in blocks {
            for k in 0..w.tiles() {
                let width = w.decode(block, k, &mut tile);
                for (lane, row) in tile.iter().enumerate().take(w.n - block * LANES) {
                    // SAFETY: inside the matrix, and the rows are this task's.
                    unsafe { out.store(block * LANES + lane, k * TILE_K, &row[..width]) };
                }
            }
        }
    });
    Ok(())
}
