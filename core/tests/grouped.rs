//! Experts in one call: composed of calls where the backend has none, checked where it has, and refused where
//! offsets or specs do not fit.
use q4_core::{
    ActGlobal, ActQuant, Activations, BackendDescriptor, BuiltinOptions, Candidate, Code, DType, Dense,
    Device, Dispatch, ExecContext, ExecPath, GlobalScale, HostEnv, LinearSpec, OpSet, OwnedParts, Part,
    Policy, PreparedGroup, PreparedInfo, PreparedWeight, ProbeItem, Q4Backend, Q4Group, Q4Schema, Q4Weight,
    Registry, Result, RowDecoder, Rule, Segment, SegmentSpec, TensorView, TensorViewMut, ThreadPool, Verdict,
    rows,
};
use std::any::Any;
use std::sync::Arc;

const PATH: ExecPath = ExecPath::DequantMatmul;
const N: usize = 3;
const K: usize = 16;
const M: usize = 8;
const EXPERTS: usize = 3;

/// Which weight a grouped row is multiplied by, from its own and how many there are.
type Taken = fn(usize, usize) -> usize;

/// Products in f32 of dense weights, grouped or not.
struct Plain {
    descriptor: BackendDescriptor,
    taken: Option<Taken>,
}

struct Weight {
    info: PreparedInfo,
    dense: Vec<f32>,
}

struct Group {
    weights: Vec<Arc<dyn PreparedWeight>>,
    taken: Taken,
}

impl Weight {
    fn row(&self, x: &[f32], y: &mut [f32]) {
        for (y, w) in y.iter_mut().zip(self.dense.chunks(K)) {
            *y = x.iter().zip(w).map(|(x, w)| x * w).sum();
        }
    }
}

impl Q4Backend for Plain {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, _: &HostEnv) -> Vec<ProbeItem> {
        Vec::new()
    }
    fn can_prepare(&self, _: &LinearSpec, _: ExecPath, _: &HostEnv) -> Verdict {
        Ok(())
    }
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        _: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        let decoder = RowDecoder::new(w)?;
        let (n, k) = (decoder.n(), decoder.k());
        let mut dense = vec![0.0; n * k];
        dense.chunks_mut(k).enumerate().for_each(|(row, out)| decoder.row(row, out));
        let (backend, activations, ops) = ("plain".into(), spec.activations, OpSet::FORWARD);
        let info = PreparedInfo { backend, path, activations, n, k, resident_bytes: 0, ops };
        Ok(Box::new(Weight { info, dense }))
    }
    fn group(
        &self,
        weights: &[Arc<dyn PreparedWeight>],
        _: &mut ExecContext<'_>,
    ) -> Result<Option<Box<dyn PreparedGroup>>> {
        Ok(self.taken.map(|taken| Box::new(Group { weights: weights.to_vec(), taken }) as _))
    }
}

impl PreparedWeight for Weight {
    fn info(&self) -> &PreparedInfo {
        &self.info
    }
    fn workspace(&self, m: usize) -> usize {
        8 * m
    }
    fn forward(&self, x: TensorView<'_>, mut y: TensorViewMut<'_>, _: &mut ExecContext<'_>) -> Result<()> {
        (0..x.as_matrix()?.0).try_for_each(|r| {
            self.row(x.row(r)?, y.row_mut(r)?);
            Ok(())
        })
    }
    fn backward_input(&self, _: TensorView<'_>, _: TensorViewMut<'_>, _: &mut ExecContext<'_>) -> Result<()> {
        unreachable!("nobody asks for it")
    }
    fn dequantize(&self, _: TensorViewMut<'_>, _: &mut ExecContext<'_>) -> Result<()> {
        unreachable!("nobody asks for it")
    }
}

impl PreparedGroup for Group {
    fn workspace(&self, m: usize) -> usize {
        16 * m
    }
    fn forward(
        &self,
        x: TensorView<'_>,
        offsets: TensorView<'_>,
        mut y: TensorViewMut<'_>,
        _: &mut ExecContext<'_>,
    ) -> Result<()> {
        let m = x.as_matrix()?.0;
        let at = rows::offsets(&offsets, self.weights.len(), m)?;
        (0..m).try_for_each(|r| {
            let own = at.partition_point(|from| *from as usize <= r) - 1;
            let w = &self.weights[(self.taken)(own, self.weights.len())];
            let w = (&**w as &dyn Any).downcast_ref::<Weight>().expect("a weight of this backend");
            w.row(x.row(r)?, y.row_mut(r)?);
            Ok(())
        })
    }
}

fn dispatch(taken: Option<Taken>) -> Result<Dispatch> {
    let descriptor = BackendDescriptor {
        name: "plain".into(),
        version: "1".into(),
        vendor: "a test".into(),
        priority: 0,
        offers: vec![("dense".into(), PATH)],
    };
    let mut registry = Registry::on(HostEnv::default(), &BuiltinOptions::default())?;
    registry.add(Candidate::Live(Arc::new(Plain { descriptor, taken })))?;
    let mut policy = Policy::default();
    policy.overrides.all = Some("plain".into());
    Ok(Dispatch::new(registry, policy))
}

fn spec(expert: usize) -> LinearSpec {
    LinearSpec {
        segments: vec![SegmentSpec { name: format!("mlp.experts.{expert}.up_proj"), rows: N }],
        schema: Q4Schema::Dense(Dense { dtype: DType::F32 }),
        k: K,
        max_m: M,
        x: DType::F32,
        y: DType::F32,
        activations: Activations::Native,
        device: Device::Cpu,
        ops: OpSet::FORWARD,
    }
}

/// Element of an expert, exact in every sum of K.
fn element(expert: usize, row: usize, column: usize) -> f32 {
    (expert * 5 + row * 3 + column % 4) as f32 - 6.0
}

fn experts(dispatch: &Dispatch, edit: fn(&mut LinearSpec, usize)) -> Result<Q4Group> {
    let stored = |e: usize| {
        let values = (0..N * K).flat_map(|i| element(e, i / K, i % K).to_le_bytes()).collect();
        OwnedParts::default().with(Part::Codes, DType::F32, &[N, K], values)
    };
    let stored: Vec<_> = (0..EXPERTS).map(stored).collect();
    let segments =
        stored.iter().map(|s| Ok([Segment { rows: N, data: s.lend()? }])).collect::<Result<Vec<_>>>()?;
    let weights: Vec<_> =
        segments.iter().map(|segments| Q4Weight { schema: spec(0).schema, k: K, segments }).collect();
    let mut specs: Vec<_> = (0..EXPERTS).map(spec).collect();
    specs.iter_mut().enumerate().for_each(|(e, spec)| edit(spec, e));
    let selection = dispatch.select(&specs[0])?;
    dispatch.prepare_group(&weights, &specs, &selection, &ThreadPool::new(1))
}

fn call(group: &Q4Group, m: usize, offsets: &[i32]) -> Result<Vec<f32>> {
    let pool = ThreadPool::new(1);
    let x: Vec<f32> = (0..m * K).map(|i| (i % 7) as f32 - 3.0).collect();
    let mut y = vec![f32::NAN; m * N];
    group.forward(
        TensorView::of(&x, &[m, K])?,
        TensorView::of(offsets, &[offsets.len()])?,
        TensorViewMut::of(&mut y, &[m, N])?,
        &mut ExecContext::cpu(&pool),
    )?;
    Ok(y)
}

fn exact(expert_of: &[usize]) -> Vec<f32> {
    let x = |r: usize, c: usize| ((r * K + c) % 7) as f32 - 3.0;
    let sum = |r: usize, e: usize, n: usize| (0..K).map(|c| x(r, c) * element(e, n, c)).sum::<f32>();
    expert_of.iter().enumerate().flat_map(|(r, e)| (0..N).map(move |n| sum(r, *e, n))).collect()
}

#[test]
fn rows_go_to_their_experts_in_one_call_or_several() -> Result<()> {
    for taken in [None, Some((|own, _| own) as Taken)] {
        let dispatch = dispatch(taken)?;
        let group = experts(&dispatch, |_, _| {})?;
        assert_eq!(group.is_one_call(), taken.is_some());
        assert_eq!(group.workspace(M), if taken.is_some() { 16 * M } else { 8 * M });
        assert_eq!(group.members().len(), EXPERTS);
        for (offsets, expert_of) in [
            ([0, 2, 2, 5], vec![0, 0, 2, 2, 2]),
            ([0, 0, 1, 1], vec![1]),
            ([0, 8, 8, 8], vec![0; 8]),
            ([0, 1, 2, 3], vec![0, 1, 2]),
        ] {
            assert_eq!(call(&group, expert_of.len(), &offsets)?, exact(&expert_of), "{offsets:?}");
        }
        // Of the calls above: one for each expert that had rows.
        let executed = dispatch.witness().executed();
        assert_eq!(executed.iter().map(|e| e.calls).sum::<u64>(), 2 + 1 + 1 + 3);
    }
    Ok(())
}

#[test]
fn a_group_that_takes_another_expert_is_refused() -> Result<()> {
    let wrong: [Taken; 3] = [|_, _| 0, |own, count| (own + 1) % count, |own, count| own.min(count - 2)];
    for taken in wrong {
        let refused = experts(&dispatch(Some(taken))?, |_, _| {}).err().expect("it computes wrongly");
        assert_eq!(refused.code(), Code::SelfCheckFailed, "{refused}");
        assert!(refused.to_string().contains("3 weights in one call"), "{refused}");
    }
    Ok(())
}

#[test]
fn offsets_that_do_not_fit_are_refused_before_anything_is_written() -> Result<()> {
    for taken in [None, Some((|own, _| own) as Taken)] {
        let group = experts(&dispatch(taken)?, |_, _| {})?;
        for offsets in
            [&[0, 2, 1, 4][..], &[1, 2, 3, 4], &[0, 1, 2, 3], &[0, 1, 2, 5], &[0, 4], &[0, -1, 4, 4]]
        {
            let refused = call(&group, 4, offsets).expect_err("they do not fit");
            assert_eq!(refused.code(), Code::ShapeMismatch, "{offsets:?}: {refused}");
        }
        let refused = call(&group, M + 1, &[0, 9, 9, 9]).expect_err("more rows than it was prepared for");
        assert_eq!(refused.code(), Code::ShapeMismatch, "{refused}");
    }
    Ok(())
}

#[test]
fn experts_of_other_shapes_are_no_group() -> Result<()> {
    let other: [fn(&mut LinearSpec, usize); 3] = [
        |spec, e| spec.max_m += e,
        |spec, e| spec.y = if e == 1 { DType::BF16 } else { DType::F32 },
        |spec, e| spec.activations = if e == 2 { Activations::Int8 } else { Activations::Native },
    ];
    for edit in other {
        let refused = experts(&dispatch(None)?, edit).err().expect("they differ");
        assert_eq!(refused.code(), Code::ShapeMismatch, "{refused}");
    }
    // A recorded scale of the input is each expert's own.
    let recorded: fn(&mut LinearSpec, usize) = |spec, e| {
        let global = GlobalScale::multiply(0.5 + e as f32).map_or(ActGlobal::None, ActGlobal::Static);
        spec.activations = Activations::Nvfp4(ActQuant { rule: Rule::ModelOpt, global });
    };
    // The products of this backend do not quantise, which its own check finds: the group was not refused.
    let refused = experts(&dispatch(None)?, recorded).err().expect("it computes wrongly");
    assert_eq!(refused.code(), Code::SelfCheckFailed, "{refused}");
    Ok(())
}
