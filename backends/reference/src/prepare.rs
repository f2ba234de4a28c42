//! An owned copy of the stored bytes: the caller's file may be unmapped after `prepare`.
use crate::probe::can_prepare;
use q4_core::rows;
use q4_core::{
    DType, ExecContext, ExecPath, LinearSpec, OpSet, OwnedParts, PreparedInfo, Q4Schema, Q4Weight, Result,
    Segment,
};

/// A weight as it was stored.
pub(crate) struct Stored {
    pub info: PreparedInfo,
    pub x: DType,
    pub y: DType,
    schema: Q4Schema,
    parts: Vec<(usize, OwnedParts)>,
}

/// Copies `w`. Fails on parts that contradict the schema and on a spec that `can_prepare` refuses.
pub(crate) fn prepare(
    w: &Q4Weight<'_>,
    spec: &LinearSpec,
    path: ExecPath,
    cx: &ExecContext<'_>,
) -> Result<Stored> {
    rows::agree(w, spec, &can_prepare(spec, path).err().unwrap_or_default(), cx)?;
    let copy = |s: &Segment<'_>| Ok((s.rows, OwnedParts::copy(&s.data)?));
    let parts = w.segments.iter().map(copy).collect::<Result<Vec<_>>>()?;
    let info = PreparedInfo {
        backend: crate::NAME.into(),
        path,
        activations: spec.activations,
        n: w.n(),
        k: w.k,
        resident_bytes: parts.iter().map(|p| p.1.len() as u64).sum(),
        ops: OpSet::ALL,
    };
    Ok(Stored { info, x: spec.x, y: spec.y, schema: w.schema, parts })
}

impl Stored {
    /// Lends the weight to `body` in the form it came in.
    pub fn with<R>(&self, body: impl FnOnce(&Q4Weight<'_>) -> Result<R>) -> Result<R> {
        let segments =
            self.parts.iter().map(|(rows, parts)| Ok(Segment { rows: *rows, data: parts.lend()? }));
        let segments = segments.collect::<Result<Vec<_>>>()?;
        body(&Q4Weight { schema: self.schema, k: self.info.k, segments: &segments })
    }
}
