//! From a description to a prepared weight: one reading of the description for `can_prepare` and `prepare`,
//! so that the two cannot disagree, then the interleaving.
use crate::abi;
use crate::call::{Exec, Fail, Finding, Outcome, dtype, part, read};
use crate::ctx::Context;
use crate::kernels::pack::StoredRows;
use crate::kernels::{GROUPS, LANES, SCALES_AT, TILE_BYTES};
use crate::weight::{Span, Weight, spread_nibbles};
use q4_core::formats::swizzle;
use q4_core::{ActGlobal, ActQuant, Activations, Convention, DType, GlobalScale, Rule};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{array, slice};

/// A description that was understood.
pub struct Plan {
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Row segments.
    pub parts: Vec<Part>,
    /// What happens to x.
    pub activations: Activations,
    /// Type of x.
    pub x: DType,
    /// Type of y.
    pub y: DType,
    /// Rows of the largest call.
    pub max_m: usize,
    /// For FP4 tensor cores.
    pub is_native: bool,
}

/// One checked row segment, borrowed from the caller.
#[derive(Clone, Copy)]
pub struct Part {
    /// Rows.
    pub rows: usize,
    /// k / 16.
    pub groups: usize,
    /// Per-tensor scale.
    pub global: Option<GlobalScale>,
    /// First byte of the codes.
    pub codes: *const u8,
    /// First byte of the scales.
    pub scales: *const u8,
    /// Scales in tiles of 128 rows by 4.
    pub is_tiled: bool,
}

// SAFETY: read-only addresses of the caller's bytes, used while the call that got them runs.
unsafe impl Send for Part {}
// SAFETY: as above.
unsafe impl Sync for Part {}

impl Plan {
    /// Everything that is wrong with `desc`, or the plan. `refuse_native` says why there is no native path:
    /// for a weight of `[n, k]` and calls of so many rows, or, where the description makes no sense, at
    /// all.
    ///
    /// # Safety
    /// `desc` and its segments are NULL or size-prefixed structs; `n_segments` of them exist.
    pub unsafe fn read(
        desc: *const abi::WeightDesc,
        refuse_native: impl FnOnce(Option<[usize; 3]>) -> Option<Finding>,
    ) -> Result<Self, Vec<Finding>> {
        // SAFETY: forwarded.
        let d = unsafe { read(desc, "weight_desc") }
            .map_err(|f| vec![Finding::mistake("a weight_desc", f.text)])?;
        let mut all = Vec::new();
        let (n, k) = shape(&d, &mut all);
        // SAFETY: forwarded.
        let parts = unsafe { segments(&d, n, k, &mut all) };
        match d.path {
            abi::PATH_FUSED_DEQUANT => {}
            abi::PATH_NATIVE => {
                let shape = all.is_empty().then_some([n, k, d.max_m as usize]);
                all.extend(refuse_native(shape));
            }
            abi::PATH_DEQUANT_MATMUL => {
                all.push(Finding::limit("path-unsupported", "path 2 (fused dequant)", "3 (dequant matmul)"));
            }
            other => all.push(Finding::mistake("path 1, 2 or 3", other.to_string())),
        }
        let mut io = |name: &str, code| {
            dtype(code).unwrap_or_else(|| {
                all.push(Finding::mistake(format!("{name} 1 (f32), 2 (f16) or 3 (bf16)"), code.to_string()));
                DType::F32
            })
        };
        let (x, y) = (io("x_dtype", d.x_dtype), io("y_dtype", d.y_dtype));
        let activations = activations(&d, &mut all);
        let is_native = d.path == abi::PATH_NATIVE;
        if is_native && !matches!(activations, Activations::Nvfp4(_)) {
            let need = "activations 3 (nvfp4) on the native path";
            all.push(Finding::limit("activations-unsupported", need, d.activations.to_string()));
        }
        if d.reserved != 0 {
            all.push(Finding::mistake("reserved = 0", d.reserved.to_string()));
        }
        if !all.is_empty() {
            return Err(all);
        }
        Ok(Self { n, k, parts, activations, x, y, max_m: d.max_m as usize, is_native })
    }

    /// Fails unless every segment has codes and scales.
    pub fn require_bytes(&self) -> Outcome {
        match self.parts.iter().position(|p| !p.has_bytes()) {
            None => Ok(()),
            Some(i) => Err(Fail::invalid(format!("segment {i}"), "codes and scales", "NULL")),
        }
    }

    /// Row segments with their per-tensor scales.
    pub fn spans(&self) -> Vec<Span> {
        let mut end = 0;
        let one = |p: &Part| {
            end += p.rows;
            Span { end, global: p.global }
        };
        self.parts.iter().map(one).collect()
    }

    /// Builds the weight.
    ///
    /// # Safety
    /// The segments' bytes are readable.
    pub unsafe fn build(self, ctx: &Context, exec: &Exec) -> Outcome<Weight> {
        self.require_bytes()?;
        // SAFETY: forwarded.
        unsafe { check_scales(&self.parts, exec)? };
        let spans = self.spans();
        let (blocks, tiles) = (self.n.div_ceil(LANES), self.k.div_ceil(GROUPS * 16));
        let packed = ctx.arena.take(blocks * tiles * TILE_BYTES)?;
        let w = Weight {
            packed,
            n: self.n,
            k: self.k,
            spans,
            activations: self.activations,
            x: self.x,
            y: self.y,
            max_m: self.max_m,
            isa: ctx.isa,
        };
        let tasks = exec.tasks(blocks);
        // SAFETY: tasks write disjoint row blocks; the segments are readable by contract.
        exec.run(tasks, |t| part(blocks, tasks, t).for_each(|b| unsafe { interleave(&self.parts, &w, b) }))?;
        Ok(w)
    }
}

impl Part {
    /// Reads one segment of `k` columns. Pointers may be NULL; where they are not, their bytes must suffice.
    pub fn new(s: &abi::Segment, name: &str, k: usize, all: &mut Vec<Finding>) -> Self {
        let global = global(s.global_convention, s.global_scale, &format!("{name}: global_scale"), all);
        let is_tiled = s.scale_layout == abi::SCALE_128X4;
        if !is_tiled && s.scale_layout != abi::SCALE_ROW_MAJOR {
            let need = format!("{name}: scale_layout 1 (row-major) or 2 (128x4)");
            all.push(Finding::mistake(need, s.scale_layout.to_string()));
        }
        if s.rows == 0 || s.reserved != 0 {
            let have = format!("rows = {}, reserved = {}", s.rows, s.reserved);
            all.push(Finding::mistake(format!("{name}: rows > 0, reserved = 0"), have));
        }
        let (rows, groups) = (usize::try_from(s.rows).unwrap_or(usize::MAX), k / 16);
        let sizes = rows.checked_next_multiple_of(swizzle::TILE_ROWS).and_then(|padded| {
            let scales = padded.checked_mul(groups.checked_next_multiple_of(swizzle::TILE_COLS)?)?;
            Some((rows.checked_mul(k)? / 2, if is_tiled { scales } else { rows.checked_mul(groups)? }))
        });
        let Some((codes, scales)) = sizes else {
            let have = format!("{} rows, k = {k}", s.rows);
            all.push(Finding::mistake(format!("{name}: a size that fits the address space"), have));
            return Self {
                rows: 0,
                groups: 0,
                global,
                codes: s.codes.cast(),
                scales: s.scales.cast(),
                is_tiled,
            };
        };
        for (what, at, have, need) in
            [("codes", s.codes, s.codes_bytes, codes), ("scales", s.scales, s.scales_bytes, scales)]
        {
            if !at.is_null() && have < need as u64 {
                all.push(Finding::mistake(
                    format!("{name}: {need} bytes of {what}"),
                    format!("{have} bytes"),
                ));
            }
        }
        Self { rows, groups, global, codes: s.codes.cast(), scales: s.scales.cast(), is_tiled }
    }

    /// Whether there is something to read.
    pub fn has_bytes(&self) -> bool {
        !self.codes.is_null() && !self.scales.is_null()
    }

    /// Codes of 8 bytes and the scale of group `g` of `row`.
    ///
    /// # Safety
    /// They are inside the segment, whose bytes are readable.
    pub unsafe fn group(&self, row: usize, g: usize) -> ([u8; 8], u8) {
        // SAFETY: inside, by contract.
        unsafe { (self.codes.add((row * self.groups + g) * 8).cast::<[u8; 8]>().read(), self.scale(row, g)) }
    }

    /// Row-major scales.
    unsafe fn scales_of(&self, rows: &Range<usize>) -> &[u8] {
        // SAFETY: inside, by contract.
        unsafe { slice::from_raw_parts(self.scales.add(rows.start * self.groups), rows.len() * self.groups) }
    }

    unsafe fn scale(&self, row: usize, g: usize) -> u8 {
        // SAFETY: inside, by contract.
        unsafe { *self.scales.add(self.scale_at(row, g)) }
    }

    fn scale_at(&self, row: usize, g: usize) -> usize {
        if self.is_tiled { swizzle::offset(row, g, self.groups) } else { row * self.groups + g }
    }

    /// Bytes from four scales of a row to the next four.
    fn scale_step(&self) -> usize {
        if self.is_tiled { swizzle::TILE_ROWS * swizzle::TILE_COLS } else { GROUPS }
    }
}

/// Refuses scales that are NaN or have a sign.
///
/// # Safety
/// The parts' bytes are readable.
pub unsafe fn check_scales(parts: &[Part], exec: &Exec) -> Outcome {
    for (i, p) in parts.iter().enumerate() {
        let first = AtomicUsize::new(usize::MAX);
        let tasks = exec.tasks(p.rows);
        exec.run(tasks, |t| {
            let rows = part(p.rows, tasks, t);
            // SAFETY: row-major scales of all rows are readable.
            if !p.is_tiled && unsafe { p.scales_of(&rows) }.iter().fold(0, |m, &s| m.max(s)) < 0x7f {
                return;
            }
            for row in rows {
                // SAFETY: row and group are inside the part.
                if let Some(g) = (0..p.groups).find(|&g| unsafe { p.scale(row, g) } >= 0x7f) {
                    first.fetch_min(row * p.groups + g, Ordering::Relaxed);
                    return;
                }
            }
        })?;
        let at = first.into_inner();
        if at != usize::MAX {
            let (row, g) = (at / p.groups, at % p.groups);
            // SAFETY: row and group are inside the part.
            return Err(bad_scale(i, row, g, unsafe { p.scale(row, g) }));
        }
    }
    Ok(())
}

/// A block scale that is NaN or negative.
pub fn bad_scale(segment: usize, row: usize, group: usize, byte: u8) -> Fail {
    let what = format!("segment {segment}: scale of row {row}, block {group}");
    Fail::invalid(what, "e4m3 without sign and NaN (0x00 to 0x7e)", format!("{byte:#04x}"))
}

fn shape(d: &abi::WeightDesc, all: &mut Vec<Finding>) -> (usize, usize) {
    let size = |name: &str, v: u64, all: &mut Vec<Finding>| match usize::try_from(v) {
        Ok(v) if v > 0 => v,
        _ => {
            all.push(Finding::mistake(format!("{name} > 0 that fits the address space"), v.to_string()));
            0
        }
    };
    let (n, k) = (size("n", d.n, all), size("k", d.k, all));
    size("max_m", d.max_m, all);
    if k % 16 != 0 {
        all.push(Finding::limit("shape-unsupported", "k % 16 == 0", format!("k = {k}")));
    }
    // Padded to whole tiles, and as f32, so that no product of sizes below can overflow.
    let padded = n.checked_next_multiple_of(LANES).zip(k.checked_next_multiple_of(GROUPS * 16));
    let floats = padded.and_then(|(n, k)| n.checked_mul(k)).and_then(|v| v.checked_mul(4));
    if floats.is_none_or(|b| b > isize::MAX as usize) {
        all.push(Finding::mistake("n * k that fits the address space", format!("{n} * {k}")));
    }
    (n, k)
}

unsafe fn segments(d: &abi::WeightDesc, n: usize, k: usize, all: &mut Vec<Finding>) -> Vec<Part> {
    if d.segments.is_null() || d.n_segments == 0 || d.n_segments > d.n {
        let have = if d.segments.is_null() { "NULL".into() } else { d.n_segments.to_string() };
        all.push(Finding::mistake("segments: one to n", have));
        return Vec::new();
    }
    // SAFETY: at least one exists, by contract.
    let stride = unsafe { d.segments.cast::<usize>().read_unaligned() };
    let mut parts = Vec::new();
    for i in 0..d.n_segments as usize {
        let name = format!("segment {i}");
        // SAFETY: `n_segments` of them exist, `stride` bytes apart, by contract.
        match unsafe { read(d.segments.byte_add(i * stride), &name) } {
            Ok(s) if s.struct_size == stride => parts.push(Part::new(&s, &name, k, all)),
            Ok(s) => {
                all.push(Finding::mistake(
                    format!("{name}: struct_size = {stride}, as the first"),
                    s.struct_size.to_string(),
                ));
                return parts;
            }
            Err(f) => {
                all.push(Finding::mistake("segments", f.text));
                return parts;
            }
        }
    }
    let sum = parts.iter().try_fold(0usize, |sum, p| sum.checked_add(p.rows));
    if sum != Some(n) {
        let have = sum.map_or("an overflow".into(), |s| s.to_string());
        all.push(Finding::mistake(format!("segments of n = {n} rows in all"), have));
    }
    parts
}

fn activations(d: &abi::WeightDesc, all: &mut Vec<Finding>) -> Activations {
    let plain = match d.activations {
        abi::ACT_NATIVE => Activations::Native,
        abi::ACT_INT8 => Activations::Int8,
        abi::ACT_NVFP4 => return nvfp4_activations(d, all),
        other => {
            all.push(Finding::mistake("activations 1 (native), 2 (int8) or 3 (nvfp4)", other.to_string()));
            return Activations::Native;
        }
    };
    if d.act_rule != 0 || d.act_global_kind != 0 || d.act_global != 0.0 || d.act_global_convention != 0 {
        let have =
            format!("{}, {}, {}, {}", d.act_rule, d.act_global_kind, d.act_global, d.act_global_convention);
        all.push(Finding::mistake(format!("act_rule and act_global* = 0 with {plain} activations"), have));
    }
    plain
}

fn nvfp4_activations(d: &abi::WeightDesc, all: &mut Vec<Finding>) -> Activations {
    let rule = rule(d.act_rule, all);
    let global = act_global(rule, d.act_global_kind, d.act_global_convention, d.act_global, all);
    Activations::Nvfp4(ActQuant { rule, global })
}

/// `nvfp4_rule`.
pub fn rule(code: u32, all: &mut Vec<Finding>) -> Rule {
    match code {
        abi::RULE_TORCHAO => Rule::TorchAo,
        abi::RULE_MODELOPT => Rule::ModelOpt,
        abi::RULE_COMPRESSED_TENSORS => Rule::CompressedTensors,
        abi::RULE_TRANSFORMER_ENGINE => Rule::TransformerEngine,
        abi::RULE_RUNTIME => Rule::Runtime,
        other => {
            all.push(Finding::mistake("rule 1 to 5", other.to_string()));
            Rule::TorchAo
        }
    }
}

/// Where a quantiser's per-tensor scale comes from.
pub fn act_global(rule: Rule, kind: u32, convention: u32, value: f32, all: &mut Vec<Finding>) -> ActGlobal {
    let unused = |all: &mut Vec<Finding>| {
        if convention != 0 || value != 0.0 {
            let have = format!("convention {convention}, {value}");
            all.push(Finding::mistake("no per-tensor scale unless the kind is 1 (static)", have));
        }
    };
    match kind {
        abi::GLOBAL_NONE => {
            unused(all);
            ActGlobal::None
        }
        abi::GLOBAL_PER_CALL => {
            unused(all);
            ActGlobal::PerCall
        }
        abi::GLOBAL_STATIC => match global(convention, value, "static per-tensor scale", all) {
            Some(g) if g.convention() == rule.convention() => ActGlobal::Static(g),
            Some(g) => {
                let need = format!("the convention of {}: {:?}", rule.as_str(), rule.convention());
                all.push(Finding::mistake(need, format!("{:?}", g.convention())));
                ActGlobal::None
            }
            None => {
                if convention == abi::CONVENTION_NONE {
                    all.push(Finding::mistake(
                        "a static per-tensor scale with convention 1 or 2",
                        "convention 0",
                    ));
                }
                ActGlobal::None
            }
        },
        other => {
            all.push(Finding::mistake("global kind 0 (none), 1 (static) or 2 (per call)", other.to_string()));
            ActGlobal::None
        }
    }
}

fn global(convention: u32, value: f32, name: &str, all: &mut Vec<Finding>) -> Option<GlobalScale> {
    let convention = match convention {
        abi::CONVENTION_NONE if value == 0.0 => return None,
        abi::CONVENTION_NONE => {
            all.push(Finding::mistake(format!("{name}: 0 without a convention"), value.to_string()));
            return None;
        }
        abi::CONVENTION_MULTIPLY => Convention::Multiply,
        abi::CONVENTION_DIVIDE => Convention::Divide,
        other => {
            all.push(Finding::mistake(format!("{name}: convention 0, 1 or 2"), other.to_string()));
            return None;
        }
    };
    let scale = GlobalScale::new(convention, value).ok();
    if scale.is_none() {
        all.push(Finding::mistake(format!("{name}: finite and above 0"), value.to_string()));
    }
    scale
}

/// Writes row block `block`, every byte of it.
unsafe fn interleave(parts: &[Part], w: &Weight, block: usize) {
    let rows: [Option<(&Part, usize)>; LANES] = array::from_fn(|lane| {
        let mut row = block * LANES + lane;
        parts.iter().find_map(|p| {
            let inside = (row < p.rows).then_some((p, row));
            row = row.wrapping_sub(p.rows);
            inside
        })
    });
    let b = w.blocks(block, 1);
    let mut whole = 0;
    if let Some(stored) = stored_rows(&rows) {
        whole = b.groups / GROUPS;
        // SAFETY: the rows have that many whole tiles; the row block is this task's alone.
        unsafe { (w.kernels().pack)(&stored, whole, b.tiles.cast_mut()) };
    }
    for t in whole..w.tiles() {
        let groups = t * GROUPS..((t + 1) * GROUPS).min(b.groups);
        // Zero is a code of value 0 and a scale of 0.
        let (mut codes, mut scales) = ([[0u32; LANES]; 2 * GROUPS], [[0u8; LANES]; GROUPS]);
        for (lane, row) in rows.iter().enumerate() {
            let Some((p, row)) = *row else { continue };
            for (i, g) in groups.clone().enumerate() {
                // SAFETY: row and group are inside the part.
                let (bytes, scale) = unsafe { p.group(row, g) };
                let word = u64::from_le_bytes(bytes);
                (codes[2 * i][lane], codes[2 * i + 1][lane]) = (word as u32, (word >> 32) as u32);
                scales[i][lane] = scale;
            }
        }
        let codes = codes.map(|half| half.map(|word| spread_nibbles(word).to_le_bytes()));
        // SAFETY: tile `t` is inside the row block, which is this task's alone.
        unsafe {
            let tile = b.tiles.cast_mut().add(t * TILE_BYTES);
            tile.cast::<[u8; SCALES_AT]>().write_unaligned(*codes.as_ptr().cast());
            tile.add(SCALES_AT).cast::<[[u8; LANES]; GROUPS]>().write(scales);
        }
    }
}

/// Where sixteen rows start, if all of them exist and keep their scales in one arrangement.
fn stored_rows(rows: &[Option<(&Part, usize)>; LANES]) -> Option<StoredRows> {
    let (first, _) = rows[0]?;
    let mut stored = StoredRows {
        codes: [first.codes; LANES],
        scales: [first.scales; LANES],
        scale_step: first.scale_step(),
    };
    for (lane, row) in rows.iter().enumerate() {
        let (p, row) = row.filter(|(p, _)| p.is_tiled == first.is_tiled)?;
        stored.codes[lane] = p.codes.wrapping_add(row * p.groups * 8);
        stored.scales[lane] = p.scales.wrapping_add(p.scale_at(row, 0));
    }
    Some(stored)
}
