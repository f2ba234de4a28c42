//! Operand checks, scratch and the split of work over the caller's threads.
use crate::kernel;
use crate::layout::{CODES, LANES, QUAD};
use crate::prepare::{self, Packed, Scale};
use q4_core::rows::{Rows, RowsMut, activation_bytes, check_matrix, check_product};
use q4_core::{ExecContext, PreparedInfo, PreparedWeight, Result, Scratch, TensorView, TensorViewMut};

/// Fewest words of 8 input features a task of the backward product takes.
const LEAST_WORDS: usize = 8;

impl<S: Scale, const ZEROS: bool> PreparedWeight for Packed<S, ZEROS> {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        prepare::workspace(self.x, &self.info.activations, m, self.info.n, self.info.k)
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let m = check_product((&x, self.x, self.info.k), (&y.as_view(), self.y, self.info.n))?;
        let threads = cx.threads;
        let need = activation_bytes(self.x, &self.info.activations, m, self.info.k);
        let mut scratch = Scratch::of(cx, need)?;
        let x = Rows::activations(x, &self.info.activations, &mut scratch, threads)?;
        let y = RowsMut::of(y)?;
        let blocks = self.blocks();
        threads.split(blocks.div_ceil(QUAD), 1, &|start, end| {
            // SAFETY: `check_product` compared the shapes, `split` hands every quad out once.
            unsafe { kernel::forward(self, &x, &y, start * QUAD..(end * QUAD).min(blocks)) }
        });
        Ok(())
    }

    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let m = check_product((&dy, self.y, self.info.n), (&dx.as_view(), self.x, self.info.k))?;
        let threads = cx.threads;
        let width = self.blocks() * LANES;
        let mut scratch = Scratch::of(cx, Scratch::bytes(&[4 * m * width]))?;
        let dy = Rows::padded(dy, width, &mut scratch, threads)?;
        let dx = RowsMut::of(dx)?;
        let words = self.info.k / CODES;
        threads.split(words, LEAST_WORDS, &|start, end| {
            // SAFETY: as in `forward`; `padded` made whole blocks of dy.
            unsafe { kernel::backward(self, &dy, &dx, start..end) }
        });
        Ok(())
    }

    /// `(values[code] - zero) * scale`, rounded to f32 as the schema says, then to the type of `out`.
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let (n, k) = (self.info.n, self.info.k);
        check_matrix(&out.as_view(), out.as_view().dtype(), n, k)?;
        let out = RowsMut::of(out)?;
        let (words, groups) = (k / CODES, k / self.group);
        cx.threads.split(self.blocks(), 1, &|start, end| {
            for row in start * LANES..(end * LANES).min(n) {
                let (block, lane) = (row / LANES, row % LANES);
                let (codes, step) = self.lines(block, words);
                let (scales, _) = self.lines(block, groups);
                for i in 0..words {
                    let word = self.codes[codes + i * step].0[lane];
                    let at = scales + i * CODES / self.group * step;
                    let scale = self.scales[at][lane].widen();
                    let zero = self.zeros.as_ref().map_or(0.0, |zeros| f32::from(zeros[at][lane]));
                    let value = |j| (self.table[(word >> (4 * j) & 15) as usize] - zero) * scale;
                    let values: [f32; CODES] = std::array::from_fn(value);
                    // SAFETY: a row belongs to one task.
                    unsafe { out.put(row, i * CODES, &values) };
                }
            }
        });
        Ok(())
    }
}
