//! Operand checks, scratch and the split of work over the caller's threads.
use crate::io::{Out, activation_bytes, activations, padded};
use crate::kernel;
use crate::prepare::{Dense, LANES};
use half::{bf16, f16};
use q4_core::{
    Code, DType, Error, ExecContext, OpSet, PreparedInfo, PreparedWeight, Result, Scratch, TensorView,
    TensorViewMut,
};

/// Fewest blocks of 16 output rows a task takes: what one pass of the one-row kernel keeps in flight.
const LEAST_BLOCKS: usize = 4;
/// Fewest groups of columns a task of the backward product takes.
const LEAST_GROUPS: usize = 8;

impl PreparedWeight for Dense {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    /// The converted activations (nothing for native f32) or the widened dy, whichever is larger.
    fn workspace(&self, m: usize) -> usize {
        let forward = activation_bytes(self.x, &self.info.activations, m, self.info.k);
        forward.max(Scratch::bytes(&[4 * m * self.blocks() * LANES]))
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let m = check((&x, self.x, self.info.k), (&y.as_view(), self.y, self.info.n))?;
        let threads = cx.threads;
        let need = activation_bytes(self.x, &self.info.activations, m, self.info.k);
        let mut scratch = Scratch::of(cx, need)?;
        let x = activations(x, &self.info.activations, &mut scratch, threads)?;
        let y = Out::of(y)?;
        threads.split(self.blocks(), LEAST_BLOCKS, &|start, end| {
            // SAFETY: `check` compared the shapes, `split` hands every block out once.
            unsafe { kernel::forward(self, &x, &y, start..end) }
        });
        Ok(())
    }

    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let m = check((&dy, self.y, self.info.n), (&dx.as_view(), self.x, self.info.k))?;
        let threads = cx.threads;
        let width = self.blocks() * LANES;
        let mut scratch = Scratch::of(cx, Scratch::bytes(&[4 * m * width]))?;
        let dy = padded(dy, &self.scales, &mut scratch, threads)?;
        let dx = Out::of(dx)?;
        let k = self.info.k;
        threads.split(k.div_ceil(kernel::COLUMNS), LEAST_GROUPS, &|start, end| {
            let columns = start * kernel::COLUMNS..k.min(end * kernel::COLUMNS);
            // SAFETY: as in `forward`; `padded` made whole blocks of dy.
            unsafe { kernel::backward(self, &dy, &dx, columns) }
        });
        Ok(())
    }

    /// Refused where the copy was rounded: its values are not those of the schema.
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        if !self.info.ops.contains(OpSet::DEQUANTIZE) {
            return Err(Error::new(Code::Unsupported, "dequantize")
                .need("a copy that holds the decoded values exactly: y of float32")
                .have(format!("a copy in {}", self.y))
                .fix("prepare the weight with y of float32"));
        }
        match self.y {
            DType::F16 => self.copy_out::<f16>(out, cx, f16::to_f32),
            DType::BF16 => self.copy_out::<bf16>(out, cx, bf16::to_f32),
            _ => self.copy_out::<f32>(out, cx, |v| v),
        }
    }
}

impl Dense {
    fn copy_out<T: bytemuck::Pod>(
        &self,
        out: TensorViewMut<'_>,
        cx: &ExecContext<'_>,
        widen: impl Fn(T) -> f32 + Sync,
    ) -> Result<()> {
        let (n, k) = (self.info.n, self.info.k);
        let (rows, cols, _) = out.as_view().as_matrix()?;
        if (rows, cols) != (n, k) {
            return Err(Error::new(Code::ShapeMismatch, "output of dequantize")
                .need(format!("[{n}, {k}]"))
                .have(format!("[{rows}, {cols}]")));
        }
        let out = Out::of(out)?;
        cx.threads.split(self.blocks(), 1, &|start, end| {
            for row in start * LANES..(end * LANES).min(n) {
                let scale = self.scales[row];
                let lane = &self.block::<T>(row / LANES)[row % LANES..];
                for c in (0..k).step_by(LANES) {
                    let len = LANES.min(k - c);
                    let mut values = [0.0; LANES];
                    (0..len).for_each(|j| values[j] = widen(lane[(c + j) * LANES]) * scale);
                    // SAFETY: a row belongs to one task.
                    unsafe { out.put(row, c, &values[..len]) };
                }
            }
        });
        Ok(())
    }
}

/// Rows of a call, after checking the shapes and types the kernels rely on.
fn check(input: (&TensorView<'_>, DType, usize), output: (&TensorView<'_>, DType, usize)) -> Result<usize> {
    let (m, cols_in, _) = input.0.as_matrix()?;
    let (rows_out, cols_out, _) = output.0.as_matrix()?;
    let is_typed = input.0.dtype() == input.1 && output.0.dtype() == output.1;
    if m == rows_out && cols_in == input.2 && cols_out == output.2 && is_typed {
        return Ok(m);
    }
    Err(Error::new(Code::ShapeMismatch, "operands of a product")
        .need(format!("{}[m, {}] and {}[m, {}]", input.1, input.2, output.1, output.2))
        .have(format!("{:?} and {:?}", input.0, output.0)))
}
