//! The two calls that need the weight as numbers: the gradient of the input, and the decoded matrix. Both
//! decode tile by tile, so neither ever has a dense copy.
use crate::call::{Exec, Mat, Outcome, part};
use crate::kernels::{LANES, TILE_K};
use crate::weight::{Weight, check_rows};

/// Rows of dy that run against one decoded tile.
const ROWS: usize = 64;

/// `dx = dy W`; each task has columns of its own, n ascending.
///
/// # Safety
/// The matrices are readable and writable and do not overlap.
pub unsafe fn backward_input(w: &Weight, dy: Mat, dx: Mat, exec: &Exec) -> Outcome {
    check_rows(w, &dy, &dx, ["dy", "dx"])?;
    let tiles = w.tiles();
    let tasks = exec.tasks(tiles);
    exec.run(tasks, |t| {
        let (mut tile, mut input) = ([[0.0; TILE_K]; LANES], [[0.0; LANES]; ROWS]);
        let mut sums = [[0.0; TILE_K]; ROWS];
        for k in part(tiles, tasks, t) {
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
    })
}

/// The whole matrix; each task has rows of its own.
///
/// # Safety
/// The matrix is writable.
pub unsafe fn dequantize(w: &Weight, out: Mat, exec: &Exec) -> Outcome {
    let blocks = w.row_blocks();
    let tasks = exec.tasks(blocks);
    exec.run(tasks, |t| {
        let mut tile = [[0.0; TILE_K]; LANES];
        for block in part(blocks, tasks, t) {
            for k in 0..w.tiles() {
                let width = w.decode(block, k, &mut tile);
                for (lane, row) in tile.iter().enumerate().take(w.n - block * LANES) {
                    // SAFETY: inside the matrix, and the rows are this task's.
                    unsafe { out.store(block * LANES + lane, k * TILE_K, &row[..width]) };
                }
            }
        }
    })
}
