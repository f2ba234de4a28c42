//! Bytes of a weight of a check, in any encoding.
use q4_core::formats::sample::Draw;
use q4_core::{LinearSpec, OwnedParts, Result, Segment};

/// All segments have the same bytes.
pub(super) struct Stored {
    segments: usize,
    rows: usize,
    parts: OwnedParts,
}

impl Stored {
    pub fn new(spec: &LinearSpec) -> Result<Self> {
        let rows = spec.segments[0].rows;
        let parts = spec.schema.sample([rows, spec.k], &Draw { seed: 1, tame: true });
        Ok(Self { segments: spec.segments.len(), rows, parts })
    }

    pub fn segments(&self) -> Result<Vec<Segment<'_>>> {
        (0..self.segments).map(|_| Ok(Segment { rows: self.rows, data: self.parts.lend()? })).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::accepted::tests::specs;
    use super::*;
    use q4_core::Q4Weight;

    #[test]
    fn every_encoding_has_its_parts() -> Result<()> {
        for spec in specs(1 << 16)? {
            let stored = Stored::new(&spec)?;
            let segments = stored.segments()?;
            assert_eq!(segments.len(), spec.segments.len());
            Q4Weight { schema: spec.schema, k: spec.k, segments: &segments }.validate()?;
        }
        Ok(())
    }
}
