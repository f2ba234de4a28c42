//! Operand checks, scratch and the split of work over the caller's threads.
use crate::encoding::{Encoding, NEST, Offset, share};
use crate::integers::Inputs;
use crate::layout::{CODES, LANES, QUAD};
use crate::prepare::{self, Packed, inputs_bytes};
use crate::shape::Shape;
use crate::{exact, kernel};
use q4_core::rows::{Rows, RowsMut, check_matrix, check_product};
use q4_core::{
    Activations, ExecContext, PreparedInfo, PreparedWeight, Result, Scratch, TensorView, TensorViewMut,
};
use q4_simd::Widen;

/// Fewest words of 8 input features a task of the backward product takes.
const LEAST_WORDS: usize = 8;

impl<E: Encoding> PreparedWeight for Packed<E> {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }

    fn workspace(&self, m: usize) -> usize {
        prepare::workspace(self.x, &self.info.activations, m, self.info.n, self.info.k)
    }

    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let m = check_product((&x, self.x, self.info.k), (&y.as_view(), self.y, self.info.n))?;
        let (threads, blocks) = (cx.threads, self.blocks());
        let mut scratch = Scratch::of(cx, inputs_bytes(self.x, &self.info.activations, m, self.info.k))?;
        // `check_product` compared the shapes, and `split` hands every quad out once.
        let quads = blocks.div_ceil(QUAD);
        let range = |start, end: usize| start * QUAD..(end * QUAD).min(blocks);
        if let Some(integers) = self.integers.as_ref().filter(|_| self.info.activations == Activations::Int8)
        {
            let chain = Shape::of(self).sixteens_per_chain();
            let x = Inputs::of::<E>(x, (integers, chain), &mut scratch, threads)?;
            let y = RowsMut::of(y)?;
            threads.split(quads, 1, &|start, end| {
                // SAFETY: as said above.
                unsafe { exact::forward(self, integers, &x, &y, range(start, end)) }
            });
            return Ok(());
        }
        let x = Rows::activations(x, &self.info.activations, &mut scratch, threads)?;
        let y = RowsMut::of(y)?;
        threads.split(quads, 1, &|start, end| {
            // SAFETY: as said above.
            unsafe { kernel::forward(self, &x, &y, range(start, end)) }
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

    /// Values of the encoding, rounded to f32 as the schema says, then to the type of `out`.
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()> {
        let (n, k) = (self.info.n, self.info.k);
        check_matrix(&out.as_view(), out.as_view().dtype(), n, k)?;
        let out = RowsMut::of(out)?;
        let words = k / CODES;
        cx.threads.split(self.blocks(), 1, &|start, end| {
            for row in start * LANES..(end * LANES).min(n) {
                for word in 0..words {
                    let values = self.values_of(row, word);
                    // SAFETY: a row belongs to one task.
                    unsafe { out.put(row, word * CODES, &values) };
                }
            }
        });
        Ok(())
    }
}

impl<E: Encoding> Packed<E> {
    /// Values of word `word` of a row.
    fn values_of(&self, row: usize, word: usize) -> [f32; CODES] {
        let (k, block, lane) = (self.info.k, row / LANES, row % LANES);
        let line = |lines: usize, at: usize| {
            let (first, step) = self.lines(block, lines);
            first + at * step
        };
        let share = share::<E>();
        let low = self.codes[line(k / CODES, word)].0[lane];
        let high = self.high.as_ref().map_or(0, |h| h[line(k / CODES / share, word / share)].0[lane]);
        let group = line(k / self.group, word * CODES / self.group);
        let offset = self.offsets.as_ref().map_or(0.0, |offsets| offsets.get(group, lane));
        let nest = self.nests.as_ref().map_or([1.0; 2], |nests| {
            let [scale, min] = nests[line(k / NEST, word * CODES / NEST)];
            [scale[lane].widen(), min[lane].widen()]
        });
        let scale = self.scales.get(group, lane) * nest[0];
        std::array::from_fn(|j| {
            let nibble = |word: u32| (word >> (4 * j) & 15) as usize;
            let value = match E::BYTES {
                Some(bytes) => bytes.value([low, high][j / 4].to_le_bytes()[j % 4]),
                None if E::HIGH > 0 => {
                    self.values.low[nibble(low)] + self.values.high[word % share][nibble(high)]
                }
                None => self.values.low[nibble(low)],
            };
            match E::OFFSET {
                Offset::None => value * scale,
                Offset::Zero => (value - offset) * scale,
                Offset::Minimum => value * scale + offset * nest[1],
                Offset::Bias => value * scale + offset,
            }
        })
    }
}
