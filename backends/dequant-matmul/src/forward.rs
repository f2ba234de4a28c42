//! Operand checks, scratch, and the cut of a product into tiles that one thread hands to the GEMM.
use crate::prepare::Dense;
use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;
use q4_core::rows::{Rows, RowsMut, activation_bytes, check_matrix, check_product};
use q4_core::{
    Activations, Code, DType, Error, ExecContext, Footprint, LinearSpec, OpSet, PreparedInfo, PreparedWeight,
    Result, Scratch, TensorView, TensorViewMut, ThreadPool,
};
use std::ops::Range;
use std::sync::Mutex;

/// Outputs of a tile: a multiple of the heights of the GEMM's register tiles.
const WIDTH: usize = 96;
/// Rows of a tile.
const HEIGHT: usize = 256;
/// Terms of a sum that are widened together, where the copy is not f32.
const DEPTH: usize = 512;
/// Most tiles at a time: each has scratch of its own.
const SLOTS: usize = 32;
/// Bytes the GEMM keeps for a thread, at most: its share of a large second-level cache, and packed operands.
const GEMM: u64 = 3 << 20;

impl PreparedWeight for Dense {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        workspace((self.x, self.y), &self.info.activations, m, self.info.n, self.info.k)
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let m = check_product((&x, self.x, self.info.k), (&y.as_view(), self.y, self.info.n))?;
        let threads = cx.threads;
        let mut scratch = Scratch::of(cx, self.workspace(m))?;
        let x = Rows::activations(x, &self.info.activations, &mut scratch, threads)?;
        self.product(Direction::Forward, &x, &RowsMut::of(y)?, &mut scratch, threads)
    }

    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let m = check_product((&dy, self.y, self.info.n), (&dx.as_view(), self.x, self.info.k))?;
        let threads = cx.threads;
        let mut scratch = Scratch::of(cx, self.workspace(m))?;
        let dy = Rows::activations(dy, &Activations::Native, &mut scratch, threads)?;
        self.product(Direction::Backward, &dy, &RowsMut::of(dx)?, &mut scratch, threads)
    }

    /// Refused where the copy was rounded: its values are not those of the schema.
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        if !self.info.ops.contains(OpSet::DEQUANTIZE) {
            return Err(Error::new(Code::Unsupported, "dequantize")
                .need("a copy that holds the decoded values exactly: y of float32")
                .have(format!("a copy in {}", self.y))
                .fix("prepare the weight with y of float32"));
        }
        let (n, k) = (self.info.n, self.info.k);
        check_matrix(&out.as_view(), out.as_view().dtype(), n, k)?;
        let out = RowsMut::of(out)?;
        cx.threads.split(n, 16, &|start, end| {
            let mut values = [0.0; DEPTH];
            for row in start..end {
                for c in (0..k).step_by(DEPTH) {
                    let values = &mut values[..DEPTH.min(k - c)];
                    self.widen(row, c..c + values.len(), values);
                    // SAFETY: a row belongs to one task.
                    unsafe { out.put(row, c, values) };
                }
            }
        });
        Ok(())
    }
}

/// Which dimension of the copy is summed over.
#[derive(Clone, Copy)]
enum Direction {
    /// Columns: `y = x W^T`.
    Forward,
    /// Rows: `dx = dy W`.
    Backward,
}

impl Dense {
    /// Every tile of `y`. Its bounds depend on the shapes alone, and so does, with one thread to a tile,
    /// every bit.
    fn product(
        &self,
        direction: Direction,
        x: &Rows<'_>,
        y: &RowsMut<'_>,
        scratch: &mut Scratch<'_>,
        threads: &ThreadPool,
    ) -> Result<()> {
        if x.m() == 0 {
            return Ok(());
        }
        let (terms, outputs) = match direction {
            Direction::Forward => (self.info.k, self.info.n),
            Direction::Backward => (self.info.n, self.info.k),
        };
        let (tiles, slots) = tiles(x.m(), outputs);
        let (columns, size) = (outputs.div_ceil(WIDTH), self.slot(x.m()));
        let scratch = scratch.take::<f32>(slots * size)?;
        let slots: Vec<_> = scratch.chunks_mut(size).map(Mutex::new).collect();
        let depth = if self.y == DType::F32 { terms } else { DEPTH };
        threads.run(slots.len(), &|slot| {
            let mut scratch = slots[slot].lock().unwrap_or_else(|e| e.into_inner());
            let (sums, panel) = scratch.split_at_mut(x.m().min(HEIGHT) * WIDTH);
            for tile in (slot..tiles).step_by(slots.len()) {
                let (r, c) = (tile / columns * HEIGHT, tile % columns * WIDTH);
                let (rows, wide) = (r..x.m().min(r + HEIGHT), c..outputs.min(c + WIDTH));
                for t in (0..terms).step_by(depth) {
                    let deep = t..terms.min(t + depth);
                    let (w, strides) = match direction {
                        Direction::Forward => {
                            let (w, ld) = self.part(wide.clone(), deep.clone(), panel);
                            (w, (1, ld))
                        }
                        Direction::Backward => {
                            let (w, ld) = self.part(deep.clone(), wide.clone(), panel);
                            (w, (ld, 1))
                        }
                    };
                    let part = Part { x, rows: rows.clone(), terms: deep, w, strides, outputs: wide.len() };
                    if self.is_plain { part.add_plainly_to(sums) } else { part.add_to(sums) }
                }
                for (r, sums) in rows.zip(sums.chunks(WIDTH)) {
                    // SAFETY: a tile belongs to one task.
                    unsafe { y.put(r, c, &sums[..wide.len()]) };
                }
            }
        });
        Ok(())
    }

    fn slot(&self, m: usize) -> usize {
        slot(self.y, m)
    }
}

/// What a copy keeps and its calls take: scratch, and what the GEMM allocates for each thread.
pub(crate) fn footprint(spec: &LinearSpec) -> Footprint {
    let (n, k) = (spec.n(), spec.k);
    let scales = if spec.y == DType::F16 { 4 * n } else { 0 };
    let scratch = workspace((spec.x, spec.y), &spec.activations, spec.max_m, n, k);
    Footprint {
        resident: (n * k * spec.y.size() + scales) as u64,
        workspace: scratch as u64 + GEMM * q4_core::processors() as u64,
    }
}

/// Scratch of a call of `m` rows: the converted activations (nothing for native f32) and the tiles, for the
/// direction that needs more.
fn workspace((x, y): (DType, DType), activations: &Activations, m: usize, n: usize, k: usize) -> usize {
    let tile_bytes = |outputs| Scratch::bytes(&[4 * tiles(m, outputs).1 * slot(y, m)]);
    let forward = activation_bytes(x, activations, m, k) + tile_bytes(n);
    forward.max(activation_bytes(y, &Activations::Native, m, n) + tile_bytes(k))
}

/// f32 elements of scratch a tile of `m` rows needs: its sums, and a panel of widened weights.
fn slot(y: DType, m: usize) -> usize {
    let panel = if y == DType::F32 { 0 } else { WIDTH * DEPTH };
    m.min(HEIGHT) * WIDTH + panel
}

/// Tiles of an output, and how many of them are computed at a time.
fn tiles(m: usize, outputs: usize) -> (usize, usize) {
    let tiles = m.div_ceil(HEIGHT) * outputs.div_ceil(WIDTH);
    (tiles, tiles.min(SLOTS))
}

/// `x[rows, terms] w`, where element (term, output) of `w` is at `term · strides.0 + output · strides.1`.
/// Added to sums whose rows are `WIDTH` apart; the first terms overwrite what these held.
struct Part<'a> {
    x: &'a Rows<'a>,
    rows: Range<usize>,
    terms: Range<usize>,
    w: &'a [f32],
    strides: (usize, usize),
    outputs: usize,
}

impl Part<'_> {
    fn add_to(self, sums: &mut [f32]) {
        let Self { x, rows, terms, w, strides, outputs } = self;
        let (m, k) = (rows.len(), terms.len());
        assert!(terms.end <= x.row(rows.end - 1).len() && outputs <= WIDTH && m * WIDTH <= sums.len());
        assert!((k - 1) * strides.0 + (outputs - 1) * strides.1 < w.len());
        let first = x.row(rows.start)[terms.start..].as_ptr();
        // SAFETY: the assertions prove that every element of x, w and sums which these extents and strides
        // name exists; sums is borrowed uniquely, and `read_dst` is false where it may hold anything.
        unsafe {
            // Outputs are its rows, which it wants beside each other.
            get_gemm_fn()(
                outputs,
                m,
                k,
                sums.as_mut_ptr(),
                WIDTH as isize,
                1,
                terms.start > 0,
                w.as_ptr(),
                strides.0 as isize,
                strides.1 as isize,
                first,
                x.ld() as isize,
                1,
                1.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }

    /// The same in the order of the terms, with what every processor of the architecture has.
    fn add_plainly_to(self, sums: &mut [f32]) {
        let Self { x, rows, terms, w, strides, outputs } = self;
        for (row, sums) in rows.zip(sums.chunks_mut(WIDTH)) {
            let sums = &mut sums[..outputs];
            if terms.start == 0 {
                sums.fill(0.0);
            }
            for (t, x) in x.row(row)[terms.clone()].iter().enumerate() {
                let w = w[t * strides.0..].iter().step_by(strides.1.max(1));
                sums.iter_mut().zip(w).for_each(|(sum, w)| *sum += x * w);
            }
        }
    }
}
