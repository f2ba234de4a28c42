//! Several weights of a library in one call: here and in another process what each computes alone, and found
//! out where it is not.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]
mod built;

use q4_conformance::{Level, Options, Profile, Report, run};
use q4_core::{
    Activations, Candidate, Code, DType, Device, ExecContext, ExecPath, HostEnv, LinearSpec, Nvfp4,
    Nvfp4Parts, OpSet, PreparedGroup, PreparedWeight, Q4Backend, Q4Schema, Q4Weight, RejectCode, Result,
    ScaleLayout, Segment, SegmentSpec, TensorView, TensorViewMut, ThreadPool,
};
use q4_plugin_host::Loader;
use q4_plugin_host::remote::{Isolation, Remote};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const N: usize = 48;
const K: usize = 64;
const M: usize = 9;
const EXPERTS: usize = 4;

fn here(path: &Path) -> Arc<dyn Q4Backend> {
    let Candidate::Live(backend) = q4_plugin_host::load(path).unwrap().candidate else {
        unreachable!("loaded libraries live")
    };
    backend
}

fn weight(b: &dyn Q4Backend, expert: usize) -> Result<Arc<dyn PreparedWeight>> {
    let codes: Vec<u8> = (0..N * K / 2).map(|i| ((i * 151 + expert * 77) >> 2) as u8).collect();
    let scales: Vec<u8> = (0..N * K / 16).map(|i| 0x30 + (i % 16) as u8).collect();
    let data = Nvfp4Parts {
        codes: TensorView::of(&codes, &[N, K / 2])?,
        scales: TensorView::of_bytes(&scales, DType::F8E4M3, &[N, K / 16])?,
        global: None,
    }
    .into();
    let spec = LinearSpec {
        segments: vec![SegmentSpec { name: format!("experts.{expert}.up_proj"), rows: N }],
        schema: Q4Schema::Nvfp4(Nvfp4 { scale_layout: ScaleLayout::RowMajor, global: None }),
        k: K,
        max_m: M,
        x: DType::BF16,
        y: DType::F32,
        activations: Activations::Native,
        device: Device::Cpu,
        ops: OpSet::FORWARD,
    };
    let (segments, pool) = ([Segment { rows: N, data }], ThreadPool::new(2));
    let w = Q4Weight { schema: spec.schema, k: K, segments: &segments };
    Ok(b.prepare(&w, &spec, ExecPath::FusedDequant, &mut ExecContext::cpu(&pool))?.into())
}

type Weights = Vec<Arc<dyn PreparedWeight>>;

fn group(b: &dyn Q4Backend) -> Result<(Weights, Option<Box<dyn PreparedGroup>>)> {
    let weights = (0..EXPERTS).map(|e| weight(b, e)).collect::<Result<Vec<_>>>()?;
    let made = b.group(&weights, &mut ExecContext::cpu(&ThreadPool::new(2)))?;
    Ok((weights, made))
}

fn input() -> Vec<half::bf16> {
    (0..M * K).map(|i| half::bf16::from_f32(((i * 37 % 101) as f32 - 50.0) / 32.0)).collect()
}

/// y of a call in scratch of so many bytes, with its rows apart.
fn call(
    bytes: usize,
    job: impl FnOnce(TensorView<'_>, TensorViewMut<'_>, &mut ExecContext<'_>) -> Result<()>,
) -> Result<Vec<f32>> {
    const GAP: usize = 3;
    let (x, mut y, pool) = (input(), vec![-1f32; M * (N + GAP)], ThreadPool::new(2));
    let mut scratch = vec![0u8; bytes + 64];
    let at = scratch.as_ptr().align_offset(64);
    let mut cx = ExecContext::cpu(&pool);
    cx.workspace = Some(TensorViewMut::of(&mut scratch[at..at + bytes], &[bytes])?);
    job(TensorView::of(&x, &[M, K])?, TensorViewMut::matrix(&mut y, M, N, N + GAP)?, &mut cx)?;
    Ok(y.chunks(N + GAP).flat_map(|row| &row[..N]).copied().collect())
}

fn grouped(group: &dyn PreparedGroup, offsets: &[i32]) -> Result<Vec<f32>> {
    call(group.workspace(M), |x, y, cx| group.forward(x, TensorView::of(offsets, &[offsets.len()])?, y, cx))
}

#[test]
fn a_row_is_what_its_weight_makes_of_it() {
    let b = here(&built::acme_c());
    let how = Isolation {
        program: env!("CARGO_BIN_EXE_q4-plugin-probe").into(),
        args: Vec::new(),
        limit: Duration::from_secs(60),
        is_judged: true,
    };
    let remote = Remote::start(&Loader::default().examine(&built::acme_c()).unwrap(), &how).unwrap();
    for b in [&*b, &remote as &dyn Q4Backend] {
        let (weights, group) = group(b).unwrap();
        let group = group.expect("the example groups");
        let alone: Vec<_> =
            weights.iter().map(|w| call(w.workspace(M), |x, y, cx| w.forward(x, y, cx)).unwrap()).collect();
        assert_ne!(alone[0], alone[1]);
        for offsets in [[0, 2, 2, 7, 9], [0, 9, 9, 9, 9], [0, 0, 0, 0, 9], [0, 3, 4, 8, 9]] {
            let y = grouped(&*group, &offsets).unwrap();
            for (r, row) in y.chunks(N).enumerate() {
                let e = offsets.iter().filter(|at| **at as usize <= r).count() - 1;
                assert_eq!(row, &alone[e][r * N..][..N], "row {r} of {offsets:?}");
            }
        }
        for offsets in [[0, 2, 1, 7, 9], [1, 2, 2, 7, 9], [0, 2, 2, 7, 8], [0, 2, 2, 7, 10], [0, -1, 2, 7, 9]]
        {
            assert_eq!(grouped(&*group, &offsets).unwrap_err().code(), Code::ShapeMismatch, "{offsets:?}");
        }
        // The weights are let go of first, and live as long as the group.
        drop(weights);
        grouped(&*group, &[0, 1, 2, 3, 9]).unwrap();
    }
    // Weights of another backend are no group, those of the same library in another process among them.
    let pool = ThreadPool::new(1);
    let strangers = [weight(&*b, 0).unwrap(), weight(&remote, 0).unwrap()];
    for b in [&*b, &remote as &dyn Q4Backend] {
        let refused = b.group(&strangers, &mut ExecContext::cpu(&pool)).err().unwrap();
        assert_eq!(refused.code(), Code::Internal, "{refused}");
    }
}

/// A library of before has no groups, and neither does one that leaves them to the caller.
#[test]
fn weights_are_called_one_by_one_where_a_library_has_no_groups() {
    let dir = tempfile::tempdir().unwrap();
    let old = built::example(dir.path(), "old", &["-DQ4_ABI_MINOR=0u"], &[]);
    let edits = [("weights[i]->n != weights[0]->n ||", "1 ||")];
    let left = built::example(dir.path(), "left", &[], &edits);
    for path in [old, left] {
        assert!(group(&*here(&path)).unwrap().1.is_none(), "{}", path.display());
    }
}

#[test]
fn a_table_with_a_part_of_the_functions_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for entry in ["group", "release_group", "group_workspace", "forward_grouped"] {
        let (from, to) = (format!("    .{entry} = {entry},"), format!("    .{entry} = NULL,"));
        let path = built::example(dir.path(), entry, &["-w"], &[(&from, &to)]);
        let refusal = q4_plugin_host::load(&path).err().unwrap();
        assert_eq!(refusal.reasons[0].code, RejectCode::AbiMismatch, "{refusal}");
        assert!(refusal.reasons[0].need.contains(&format!("`{entry}`")), "{refusal}");
    }
}

/// The cases about groups; others of the same level come along.
fn judged(path: &Path, level: Level) -> Report {
    let mut options = Options { levels: vec![level], ..Options::of(Profile::Inference) };
    match level {
        Level::L2 => options = options.replaying("L2/nvfp4@1/native/cpu/fused-dequant/grouped/float32"),
        _ => options.claims = vec!["nvfp4@1/native/cpu/fused-dequant".into()],
    }
    run(&*here(path), &options, &HostEnv::collect(), &ThreadPool::new(2))
}

#[test]
fn the_suite_finds_rows_that_went_to_another_weight() {
    let dir = tempfile::tempdir().unwrap();
    for level in [Level::L2, Level::L4] {
        let report = judged(&built::acme_c(), level);
        assert!(report.failed == 0 && report.passed > 0, "{}", report.text());
        let own = report.cases.iter().find(|c| c.1.id.contains("/grouped")).unwrap();
        assert!(own.1.values > 0, "{}", report.text());
    }
    for (i, (level, from, to)) in [
        (Level::L2, "multiply(g->weights[e], &in", "multiply(g->weights[0], &in"),
        (Level::L2, "if (offsets[e] < offsets[e + 1]) {", "if (offsets[e] + 1 < offsets[e + 1]) {"),
        (Level::L2, "skipped = (uint64_t)first *", "skipped = (uint64_t)(first & ~1) *"),
        // Those that would lead outside are still refused.
        (Level::L4, "if (offsets[e + 1] < offsets[e])", "if (offsets[e] > (int32_t)x->rows)"),
    ]
    .into_iter()
    .enumerate()
    {
        let report = judged(&built::example(dir.path(), &format!("lie-{i}"), &[], &[(from, to)]), level);
        let failed: Vec<_> = report.cases.iter().filter(|c| c.1.outcome.is_bad()).map(|c| &c.1.id).collect();
        assert!(!failed.is_empty() && failed.iter().all(|id| id.contains("/grouped")), "{i}: {failed:?}");
    }
}
