//! Bytes of a weight of a check, in any encoding.
use q4_core::formats::{nvfp4, swizzle};
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    Absmax, Convention, DType, GlobalScale, LinearSpec, Q4Schema, Result, ScaleLayout, Segment, SegmentData,
    TensorView,
};

/// All segments have the same bytes.
pub(super) struct Stored {
    schema: Q4Schema,
    segments: usize,
    rows: usize,
    k: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    floats: Vec<f32>,
    global: Option<GlobalScale>,
    dense: Option<IoBuffer>,
}

impl Stored {
    pub fn new(spec: &LinearSpec) -> Result<Self> {
        let (rows, k) = (spec.segments[0].rows, spec.k);
        let bytes = |n: usize, f: fn(usize) -> u8| (0..n).map(f).collect::<Vec<_>>();
        let floats = |n: usize| (0..n).map(|i| 0.25 + (i % 7) as f32 / 8.0).collect::<Vec<_>>();
        let mut scales = bytes(rows * k / nvfp4::BLOCK, |i| 0x30 + (i % 16) as u8);
        let (mut global, mut dense, mut count) = (None, None, 256);
        match spec.schema {
            Q4Schema::Nvfp4 { scale_layout, global: convention } => {
                if scale_layout == ScaleLayout::Swizzled128x4 {
                    scales = swizzle::to_blocked(&scales, rows, k / nvfp4::BLOCK);
                }
                global = match convention {
                    None => None,
                    Some(Convention::Multiply) => Some(GlobalScale::multiply(0.37)?),
                    Some(Convention::Divide) => Some(GlobalScale::divide(2.7)?),
                };
            }
            Q4Schema::Nf4 { block, .. } => count = count.max((rows * k).div_ceil(block as usize)),
            // Exact in all of the types.
            Q4Schema::Dense { dtype } => dense = Some(IoBuffer::new(dtype, &floats(rows * k))),
            _ => {}
        }
        let codes = bytes((rows * k).div_ceil(2), |i| ((i * 151) >> 2) as u8);
        let (schema, segments) = (spec.schema, spec.segments.len());
        Ok(Self { schema, segments, rows, k, codes, scales, floats: floats(count), global, dense })
    }

    pub fn segments(&self) -> Result<Vec<Segment<'_>>> {
        (0..self.segments).map(|_| Ok(Segment { rows: self.rows, data: self.data()? })).collect()
    }

    fn data(&self) -> Result<SegmentData<'_>> {
        let codes = TensorView::of(&self.codes, &[self.codes.len()])?;
        let blocks = |block: u32| (self.rows * self.k).div_ceil(block as usize);
        Ok(match self.schema {
            Q4Schema::Nf4 { block, nested: None, .. } => {
                let blocks = blocks(block);
                let absmax = Absmax::Plain(TensorView::of(&self.floats[..blocks], &[blocks])?);
                SegmentData::Nf4 { codes, absmax }
            }
            Q4Schema::Nf4 { block, nested: Some(second), .. } => {
                let (blocks, second) = (blocks(block), second as usize);
                let count = blocks.div_ceil(second);
                SegmentData::Nf4 {
                    codes,
                    absmax: Absmax::Nested {
                        codes: TensorView::of(&self.scales[..blocks], &[blocks])?,
                        map: TensorView::of(&self.floats[..256], &[256])?,
                        absmax: TensorView::of(&self.floats[..count], &[count])?,
                        offset: 0.5,
                        block: second,
                    },
                }
            }
            _ => match &self.dense {
                Some(weight) => SegmentData::Dense { weight: weight.view(self.rows, self.k)? },
                None => SegmentData::Nvfp4 {
                    codes,
                    scales: TensorView::of_bytes(&self.scales, DType::F8E4M3, &[self.scales.len()])?,
                    global: self.global,
                },
            },
        })
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
