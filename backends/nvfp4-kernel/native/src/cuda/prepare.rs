//! A described weight to the device: raw bytes through pinned memory, packed by a kernel.
use super::fp4;
use super::memory::{Memory, Staging};
use super::simple::{Raw, Span as DeviceSpan};
use super::{Engine, Weight};
use crate::prepare::{self, Part, Plan};
use q4_core::formats::swizzle;
use q4_core::memory::UnifiedMemory;
use q4_core::{Convention, ExecPath, GlobalScale, PreparedWeight, Result, ThreadPool};
use q4_cuda::UNIT;
use std::ops::Range;
use std::sync::Arc;

/// Rows a segment is padded to.
const ROWS: usize = 16;
/// Columns k is padded to.
const COLUMNS: usize = 128;

/// Packs a weight on the device; waits until it is complete.
pub fn prepare(
    engine: &Arc<Engine>,
    plan: &Plan<'_>,
    unified: UnifiedMemory,
    threads: &ThreadPool,
) -> Result<Box<dyn PreparedWeight>> {
    if plan.path == ExecPath::NativeKernel {
        return Ok(Box::new(fp4::prepare(engine, plan, unified, threads)?));
    }
    Ok(Box::new(finished(engine, plan, build(engine, plan, unified, threads))?))
}

/// A weight that was built, unless one of its scales is none.
pub(super) fn finished<W>(
    engine: &Engine,
    plan: &Plan<'_>,
    built: Result<(W, Option<(usize, usize)>)>,
) -> Result<W> {
    let what = format!("prepare of [{}, {}] on {}", plan.n, plan.k, engine.gpu.device());
    match built.map_err(|e| e.within(what))? {
        (weight, None) => Ok(weight),
        (_, Some((segment, at))) => Err(prepare::bad_scale(segment, &plan.parts[segment], at)),
    }
}

/// The weight, and the first scale that no weight may have.
fn build(
    engine: &Arc<Engine>,
    plan: &Plan<'_>,
    unified: UnifiedMemory,
    threads: &ThreadPool,
) -> Result<(Weight, Option<(usize, usize)>)> {
    let gpu = &engine.gpu;
    let units = plan.k.div_ceil(COLUMNS);
    let padded: usize = plan.parts.iter().map(|p| p.rows.next_multiple_of(ROWS)).sum();
    let units_end = padded / ROWS * units * UNIT;
    let spans = plan.spans();
    let (mut skip, mut row, mut table, mut groups) = (0, 0, Vec::new(), Vec::with_capacity(padded / ROWS));
    for (p, s) in plan.parts.iter().zip(&spans) {
        table.push(DeviceSpan::new(s.end, skip, p.global));
        let factor = p.global.map_or(1.0, GlobalScale::multiplier) as f32;
        for first in (0..p.rows).step_by(ROWS) {
            let place = (row + first) * 32 + ROWS.min(p.rows - first);
            groups.push(u64::from(factor.to_bits()) | (place as u64) << 32);
        }
        row += p.rows;
        skip += p.rows.next_multiple_of(ROWS) - p.rows;
    }
    let groups_at = units_end.next_multiple_of(256);
    let spans_at = (groups_at + 8 * groups.len()).next_multiple_of(256);
    let memory = Memory::new(gpu, spans_at + size_of_val(&table[..]), unified)?;
    let base = memory.ptr();
    memory.upload(gpu, groups_at, &groups.iter().flat_map(|g| g.to_ne_bytes()).collect::<Vec<_>>())?;
    memory.upload(gpu, spans_at, DeviceSpan::bytes(&table))?;

    let pack = |raw: &Raw, first| {
        // SAFETY: the memory has the size of the layout.
        unsafe { engine.simple.pack(raw, first, 2 * units, base, base) }
    };
    let bad_scale = stream(engine, plan, ROWS, threads, pack)?;
    let weight = Weight {
        info: plan.info(memory.len() as u64),
        engine: engine.clone(),
        _memory: memory,
        codes: base,
        scales: base,
        groups: base + groups_at as u64,
        spans_at: base + spans_at as u64,
        n: plan.n,
        k: plan.k,
        slabs: 2 * units,
        padded,
        spans,
        activations: plan.activations,
        x: plan.x,
        y: plan.y,
        max_m: plan.max_m,
    };
    engine.fast.iter().for_each(|f| f.expect(&weight));
    Ok((weight, bad_scale))
}

/// Brings all segments to the device, piece by piece, where `pack` takes each with the number of rows before
/// it; segments are padded to `pad` rows there. Returns segment and block of the first scale that is none;
/// waits.
pub(super) fn stream(
    engine: &Engine,
    plan: &Plan<'_>,
    pad: usize,
    threads: &ThreadPool,
    mut pack: impl FnMut(&Raw, usize) -> Result<()>,
) -> Result<Option<(usize, usize)>> {
    let mut staging = engine.staging.lock().unwrap_or_else(|e| e.into_inner());
    let staging = match &mut *staging {
        Some(s) => s,
        none => none.insert(Staging::new(&engine.gpu)?),
    };
    let pieces = pieces(&plan.parts, pad);
    let largest = pieces.iter().map(|p| p.code_bytes().next_multiple_of(256) + p.scale_bytes()).max();
    let bad_bytes = (8 * pieces.len()).next_multiple_of(256);
    let bad = staging.raw(bad_bytes + largest.unwrap_or(0))?;
    let codes = bad + bad_bytes as u64;
    // SAFETY: there is room on the device for every piece. One queue: a piece is packed before the next one
    // takes its place.
    let found = unsafe {
        engine.simple.set_largest(bad, pieces.len())?;
        for (i, p) in pieces.iter().enumerate() {
            let scales = codes + p.code_bytes().next_multiple_of(256) as u64;
            staging.copy(p.codes(), codes, threads)?;
            staging.copy(p.scales(), scales, threads)?;
            let source = Raw {
                codes,
                scales,
                is_tiled: p.part.is_tiled,
                rows: p.rows.len(),
                groups: p.part.groups,
                bad: bad + 8 * i as u64,
            };
            pack(&source, p.first)?;
        }
        engine.simple.get_words(bad, pieces.len())? // waits
    };
    let bad = pieces.iter().zip(found).find(|(_, bad)| *bad != u64::MAX);
    Ok(bad.map(|(p, bad)| (p.segment, p.rows.start * p.part.groups + bad as usize)))
}

/// Raw bytes of a piece, about: as many as one half of the pinned memory holds.
const PIECE: usize = 16 << 20;

/// Rows of one segment that are on the device together before they are packed.
struct Piece<'a> {
    part: &'a Part<'a>,
    segment: usize,
    rows: Range<usize>,
    /// Rows before the first, padding included.
    first: usize,
}

/// Pieces of whole scale tiles, top to bottom; segments are padded to `pad` rows.
fn pieces<'a>(parts: &'a [Part<'a>], pad: usize) -> Vec<Piece<'a>> {
    let tile = swizzle::TILE_ROWS;
    let (mut all, mut first) = (Vec::new(), 0);
    for (segment, part) in parts.iter().enumerate() {
        let rows = (PIECE / (9 * part.groups * tile)).max(1) * tile;
        all.extend((0..part.rows).step_by(rows).map(|at| Piece {
            part,
            segment,
            rows: at..part.rows.min(at + rows),
            first: first + at,
        }));
        first += part.rows.next_multiple_of(pad);
    }
    all
}

impl Piece<'_> {
    fn code_bytes(&self) -> usize {
        self.rows.len() * self.part.groups * 8
    }
    fn scale_bytes(&self) -> usize {
        scale_bytes(self.part, self.rows.len())
    }
    fn codes(&self) -> &[u8] {
        &self.part.codes[self.rows.start * self.part.groups * 8..][..self.code_bytes()]
    }
    /// Pieces start with a tile.
    fn scales(&self) -> &[u8] {
        &self.part.scales[scale_bytes(self.part, self.rows.start)..][..self.scale_bytes()]
    }
}

/// Bytes of the scales of so many rows of a segment.
fn scale_bytes(p: &Part<'_>, rows: usize) -> usize {
    if p.is_tiled { swizzle::blocked_len(rows, p.groups) } else { rows * p.groups }
}

impl DeviceSpan {
    /// Up to row `end`, behind `skip` rows of padding.
    pub fn new(end: usize, skip: usize, global: Option<GlobalScale>) -> Self {
        let convention = match global.map(GlobalScale::convention) {
            None => 0,
            Some(Convention::Multiply) => 1,
            Some(Convention::Divide) => 2,
        };
        Self {
            end: end as u32,
            skip: skip as u32,
            convention,
            global: global.map_or(0.0, GlobalScale::value),
        }
    }
}
