//! L5: a weight that was prepared for several operations does each as if it were the only one, in any order.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::lattice::Problem;
use crate::product::{self, failed};
use q4_core::{DType, ExecPath, OpSet, Result, ThreadPool};

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let formats = scope.quantizers();
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        let sketch = scope.sketch(schema, formats[i % formats.len()], scope.io(), [72, 144, 3]);
        let has = |op| scope.limits.has(op, Some(sketch.io));
        if !has(OpSet::DEQUANTIZE) {
            continue;
        }
        let ops = OpSet::FORWARD.with(OpSet::DEQUANTIZE);
        let ops = if has(OpSet::BACKWARD_INPUT) { ops.with(OpSet::BACKWARD_INPUT) } else { ops };
        let name = format!("operations/{}", sketch.name());
        scope.add(all, Level::L5, name, move |bench| {
            sketch.with(|problem| in_turns(bench, path, problem, ops))
        });
    }
}

fn in_turns(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>, ops: OpSet) -> Result<Seen> {
    product::with(bench, path, problem, ops, |w| {
        let forward = || product::forward(w, problem, Layout::PLAIN, product::STALE, bench.threads);
        let first = forward()?;
        let worst = product::exact_forward(problem)?.compare(
            "y",
            &first.values(),
            product::forward_bound(path, problem),
        )?;
        let mut seen = first.values().len();
        let wide = Layout { gap: 100, ..Layout::PLAIN };
        let pools = [1, 4, 7].map(ThreadPool::new);
        for turn in 0..12 {
            let layout = if turn % 2 == 0 { Layout::PLAIN } else { wide };
            let dtype = [DType::F32, DType::BF16, DType::F16][turn % 3];
            seen += product::check_decode(w, &problem.weight, dtype, layout, &pools[turn / 4])?;
            if turn % 3 == 0 && forward()?.bits() != first.bits() {
                return Err(
                    failed("the bits of y depend on the operations before").have("another y after decoding")
                );
            }
        }
        Ok(Seen::within(seen, worst))
    })
}
