//! L4, calls: operands that do not fit are refused, and a refused call leaves its output alone.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::{Guarded, Layout, Workspace};
use crate::lattice::Problem;
use crate::product::{self, failed};
use q4_core::{
    DType, Device, ExecContext, ExecPath, OpSet, PreparedWeight, Result, TensorView, TensorViewMut,
};

const N: usize = 48;
const K: usize = 128;
const M: usize = 4;

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    if let Some((schema, activations)) = scope.usual() {
        for io in [DType::F32, DType::BF16] {
            let sketch = scope.sketch(schema, activations, io, [N, K, M]);
            let offered = |op: &Op| scope.limits.has(op.set(), Some(sketch.io));
            for op in [Op::Forward, Op::Backward, Op::Dequantize].into_iter().filter(offered) {
                for wrong in WRONG {
                    if op == Op::Dequantize && !matches!(wrong.on, On::Output) {
                        continue;
                    }
                    let name = format!("call/{}/{}/{}", op.as_str(), wrong.name, sketch.name());
                    let sketch = sketch.clone();
                    scope.add(all, Level::L4, name, move |bench| {
                        sketch.with(|problem| refused(bench, path, problem, op, &wrong))
                    });
                }
            }
            let name = format!("call/forward/short-workspace/{}", sketch.name());
            scope.add(all, Level::L4, name, move |bench| {
                sketch.with(|problem| short_workspace(bench, path, problem))
            });
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Op {
    Forward,
    Backward,
    Dequantize,
}

impl Op {
    fn as_str(self) -> &'static str {
        ["forward", "backward", "dequantize"][self as usize]
    }
    fn set(self) -> OpSet {
        [OpSet::FORWARD, OpSet::BACKWARD_INPUT, OpSet::DEQUANTIZE][self as usize]
    }
}

/// The operand that is wrong.
#[derive(Clone, Copy)]
enum On {
    Input,
    Output,
}

/// How: another type (of the same size or smaller, so that the bytes suffice), fewer rows, fewer columns.
#[derive(Clone, Copy)]
struct Wrong {
    name: &'static str,
    on: On,
    dtype: fn(DType) -> DType,
    rows: usize,
    cols: usize,
    device: Device,
}

const fn same(d: DType) -> DType {
    d
}
const fn other(d: DType) -> DType {
    match d {
        DType::F32 => DType::BF16,
        _ => DType::F16,
    }
}
const fn integer(d: DType) -> DType {
    match d {
        DType::F32 => DType::I32,
        _ => DType::U8,
    }
}

const HERE: Device = Device::Cpu;

const WRONG: [Wrong; 10] = [
    Wrong { name: "input-elsewhere", on: On::Input, dtype: same, rows: 0, cols: 0, device: Device::Cuda(63) },
    Wrong {
        name: "output-elsewhere",
        on: On::Output,
        dtype: same,
        rows: 0,
        cols: 0,
        device: Device::Cuda(63),
    },
    Wrong { name: "input-of-another-type", on: On::Input, dtype: other, rows: 0, cols: 0, device: HERE },
    Wrong { name: "input-of-integers", on: On::Input, dtype: integer, rows: 0, cols: 0, device: HERE },
    Wrong { name: "input-one-row-short", on: On::Input, dtype: same, rows: 1, cols: 0, device: HERE },
    Wrong { name: "input-one-block-short", on: On::Input, dtype: same, rows: 0, cols: 16, device: HERE },
    Wrong { name: "output-of-another-type", on: On::Output, dtype: other, rows: 0, cols: 0, device: HERE },
    Wrong { name: "output-of-integers", on: On::Output, dtype: integer, rows: 0, cols: 0, device: HERE },
    Wrong { name: "output-one-row-short", on: On::Output, dtype: same, rows: 1, cols: 0, device: HERE },
    Wrong { name: "output-one-column-short", on: On::Output, dtype: same, rows: 0, cols: 1, device: HERE },
];

fn refused(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>, op: Op, wrong: &Wrong) -> Result<Seen> {
    product::with(bench, path, problem, OpSet::FORWARD.with(op.set()), |w| {
        // Decoding may go to any type of activations, so another one of them is not wrong.
        if op == Op::Dequantize && wrong.name == "output-of-another-type" {
            return Ok(Seen::exactly(0));
        }
        let (io, m, k, n) = (problem.io, problem.m, problem.weight.k, problem.weight.n());
        let [(rows_in, cols_in), (rows_out, cols_out)] = match op {
            Op::Forward => [(m, k), (m, n)],
            Op::Backward => [(m, n), (m, k)],
            Op::Dequantize => [(m, k), (n, k)],
        };
        let x = Guarded::input(io, &vec![0.5; rows_in * cols_in], rows_in, cols_in, Layout::PLAIN);
        let mut y = Guarded::output(io, rows_out, cols_out, Layout::PLAIN);
        let before = y.snapshot();
        let mut scratch = Workspace::new(w.workspace(m), product::STALE);
        let mut cx = ExecContext::cpu(bench.threads);
        cx.workspace = scratch.view()?;
        let (x, out) = match wrong.on {
            On::Input => (
                x.view_as((wrong.dtype)(io), wrong.device, rows_in - wrong.rows, cols_in - wrong.cols)?,
                y.view_mut()?,
            ),
            On::Output => {
                let out = y.view_mut_as(
                    (wrong.dtype)(io),
                    wrong.device,
                    rows_out - wrong.rows,
                    cols_out - wrong.cols,
                )?;
                (x.view()?, out)
            }
        };
        let described = format!("{x:?} -> {out:?}");
        let result = run(w, op, x, out, &mut cx);
        if result.is_ok() {
            return Err(failed("a call with operands that do not fit was served").have(described));
        }
        y.check_unchanged("the output of a refused call", &before)?;
        scratch.check_guards()?;
        // It leaves nothing behind.
        let y = product::forward(w, problem, Layout::PLAIN, product::STALE, bench.threads)?.values();
        let terms = product::forward_bound(path, problem);
        let worst = product::exact_forward(problem)?.compare("y after a refused call", &y, terms)?;
        Ok(Seen::within(1 + y.len(), worst))
    })
}

fn run(
    w: &dyn PreparedWeight,
    op: Op,
    x: TensorView<'_>,
    y: TensorViewMut<'_>,
    cx: &mut ExecContext<'_>,
) -> Result<()> {
    match op {
        Op::Forward => w.forward(x, y, cx),
        Op::Backward => w.backward_input(x, y, cx),
        Op::Dequantize => w.dequantize(y, cx),
    }
}

/// Less scratch than asked for: refused without a trace, or not needed after all and the result is right.
fn short_workspace(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Seen> {
    product::with(bench, path, problem, OpSet::FORWARD, |w| {
        let (m, k, n) = (problem.m, problem.weight.k, problem.weight.n());
        let need = w.workspace(m);
        let mut sizes = vec![0, need / 2, need.saturating_sub(64)];
        sizes.dedup();
        for len in sizes.iter().filter(|len| **len < need) {
            let x = Guarded::input(problem.io, &problem.x, m, k, Layout::PLAIN);
            let mut y = Guarded::output(problem.io, m, n, Layout::PLAIN);
            let before = y.snapshot();
            let mut scratch = Workspace::new(*len, product::STALE);
            match product::call(w, OpSet::FORWARD, ("x", &x), ("y", &mut y), &mut scratch, bench.threads) {
                Ok(()) => {
                    let exact = product::exact_forward(problem)?;
                    exact.compare("y", &y.values(), product::forward_bound(path, problem))?;
                }
                Err(e) if e.code() == q4_core::Code::ConformanceFailed => return Err(e),
                Err(_) => {
                    y.check_unchanged("the output of a refused call", &before)?;
                    scratch.check_guards()?;
                }
            }
        }
        Ok(Seen::exactly(sizes.len()))
    })
}
