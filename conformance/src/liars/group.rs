//! Several weights of the correct backend in one call: a row at a time, each by its own.
use super::parts::{NOBODY, Parts};
use q4_core::{DType, ExecContext, PreparedGroup, PreparedWeight, Result, TensorView, TensorViewMut};
use std::sync::Arc;

/// Weights of the backend, each of types, out and in features.
pub(super) struct Group {
    pub weights: Vec<Arc<dyn PreparedWeight>>,
    pub parts: Parts,
    pub types: (DType, DType),
}

impl PreparedGroup for Group {
    fn workspace(&self, m: usize) -> usize {
        self.weights.first().map_or(0, |w| w.workspace(m))
    }

    fn forward(
        &self,
        x: TensorView<'_>,
        offsets: TensorView<'_>,
        mut y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let (Some(w), p) = (self.weights.first(), &self.parts) else { return Ok(()) };
        let (m, info) = (x.shape().first().map_or(0, |m| *m as usize), w.info());
        (p.check)((&x, self.types.0, m, info.k), (&y.as_view(), self.types.1, m, info.n))?;
        let at = (p.offsets)(&offsets, self.weights.len(), m)?;
        for r in 0..m {
            let e = (p.expert)(r, &at);
            if e != NOBODY {
                self.weights[e].forward(x.rows(r, 1)?, y.rows_mut(r, 1)?, cx)?;
            }
        }
        Ok(())
    }
}
