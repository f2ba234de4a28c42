//! L5, steadiness: the bits of a result depend on the operands and on nothing else.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::{Guarded, Layout, Place, Workspace};
use crate::lattice::Problem;
use crate::product::{self, Lent, failed};
use q4_core::selfcheck::IoBuffer;
use q4_core::{DType, ExecPath, OpSet, PreparedWeight, Result, ThreadPool};
use std::sync::Barrier;

/// A product that was called once, and the bits that it gave.
struct First<'a> {
    bench: &'a Bench<'a>,
    path: ExecPath,
    problem: &'a Problem<'a>,
    w: &'a dyn PreparedWeight,
    want: Vec<u8>,
}

type Check = fn(&First<'_>) -> Result<usize>;

const CHECKS: [(&str, Check); 9] = [
    ("rare-threads", rare_threads),
    ("threads", threads),
    ("alignment", alignment),
    ("stride", stride),
    ("stale-workspace", stale_workspace),
    ("stale-output", stale_output),
    ("previous-call", previous_call),
    ("verdicts", verdicts),
    ("concurrent", concurrent),
];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let Some((_, activations)) = scope.usual() else { return };
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        for (name, check) in CHECKS {
            if name == "rare-threads" && (i > 0 || scope.repeats()) {
                continue;
            }
            // Some kernels take whole runs of 64 or 128 of k alone: the last one shows where those write.
            let strided = (name == "stride").then_some((DType::BF16, [97, 256, 33]));
            let usual =
                [(DType::F32, [130, 272, 5]), (DType::F32, [64, 256, 1]), (DType::BF16, [97, 144, 33])];
            let sketch = |(io, shape)| scope.sketch(schema, activations, io, shape);
            let mut sketches: Vec<_> = usual.into_iter().chain(strided).map(sketch).collect();
            // Where no shorter k has whole groups, the last two are one.
            sketches.dedup_by_key(|sketch| sketch.name());
            for sketch in sketches {
                let id = format!("{name}/{}", sketch.name());
                scope.add(all, Level::L5, id, move |bench| {
                    sketch.with(|problem| {
                        product::with(bench, path, problem, OpSet::FORWARD, |w| {
                            let y = product::forward_lent(w, problem, Lent::PLAIN, bench.threads)?;
                            check(&First { bench, path, problem, w, want: y.bits() }).map(Seen::exactly)
                        })
                    })
                });
            }
        }
    }
}

fn same(what: &str, problem: &Problem<'_>, got: &Guarded, want: &[u8]) -> Result<usize> {
    let (bits, n, size) = (got.bits(), problem.weight.n(), problem.io.size());
    match bits.iter().zip(want).position(|(a, b)| a != b) {
        None => Ok(bits.len() / size),
        Some(at) => {
            let (r, c) = (at / size / n, at / size % n);
            Err(failed(&format!("the bits of y depend on {what}")).have(format!("y[{r}, {c}] differs")))
        }
    }
}

impl First<'_> {
    /// The same bits with operands and scratch that are lent in another way.
    fn again(&self, what: &str, lent: Lent) -> Result<usize> {
        let y = product::forward_lent(self.w, self.problem, lent, self.bench.threads)?;
        same(what, self.problem, &y, &self.want)
    }

    /// The same bits from so many threads.
    fn with_threads(&self, counts: impl IntoIterator<Item = usize>) -> Result<usize> {
        let with = |count| {
            let y = product::forward_lent(self.w, self.problem, Lent::PLAIN, &ThreadPool::new(count))?;
            same(&format!("the number of threads, here {count}"), self.problem, &y, &self.want)
        };
        counts.into_iter().map(with).sum()
    }
}

/// Counts that few machines have: together the three products of a claim see all of them.
fn rare_threads(first: &First<'_>) -> Result<usize> {
    let all = [5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 24, 32, 48, 64, 96, 128];
    first.with_threads(all.into_iter().skip(first.problem.m % 3).step_by(3))
}

fn threads(first: &First<'_>) -> Result<usize> {
    first.with_threads([1, 2, 3, 4, 8])
}

fn alignment(first: &First<'_>) -> Result<usize> {
    let at = |offset| Layout { gap: 0, place: Place::Offset(offset) };
    let mut seen = 0;
    for offset in [1, 2, 4, 8, 15] {
        // Both, and each by itself.
        for (input, output) in [(at(offset), at(offset)), (at(offset), at(0)), (at(0), at(offset))] {
            let lent = Lent { input, output, ..Lent::PLAIN };
            seen += first.again(&format!("alignment, here {offset} elements off"), lent)?;
        }
    }
    let page = Lent::alike(Layout { gap: 0, place: Place::Start });
    Ok(seen + first.again("alignment, here that of a page", page)?)
}

fn stride(first: &First<'_>) -> Result<usize> {
    let apart = |gap| Layout { gap, ..Layout::PLAIN };
    let mut seen = 0;
    // A part of a wider matrix, of x, of y, or of both.
    for (x, y) in [(1, 1), (7, 7), (16, 16), (64, 64), (0, 8), (8, 0), (3, 9), (0, 1024), (1000, 0), (999, 1)]
    {
        let lent = Lent { input: apart(x), output: apart(y), ..Lent::PLAIN };
        seen += first.again(&format!("the stride, here gaps of {x} and {y} elements"), lent)?;
    }
    Ok(seen)
}

fn stale_workspace(first: &First<'_>) -> Result<usize> {
    let mut seen = 0;
    for fill in [0x00, 0x01, 0x3f, 0xa5, 0xff] {
        let what = format!("what the workspace held, here {fill:#04x}");
        seen += first.again(&what, Lent { fill, ..Lent::PLAIN })?;
    }
    // A program has one for all of its products.
    for spare in [64, 4096, 100_032] {
        let what = format!("{spare} bytes of workspace that nobody asked for");
        seen += first.again(&what, Lent { spare, ..Lent::PLAIN })?;
    }
    Ok(seen)
}

/// What y holds is overwritten, whatever it is: zeros, ordinary numbers, the result of the call before.
fn stale_output(first: &First<'_>) -> Result<usize> {
    let mut seen = 0;
    for byte in [0x00, 0x3f, 0xbe] {
        let lent = Lent { held: Some(byte), ..Lent::PLAIN };
        seen += first.again(&format!("what y held, here bytes of {byte:#04x}"), lent)?;
    }
    let First { bench, problem, w, .. } = first;
    let (m, k, n) = (problem.m, problem.weight.k, problem.weight.n());
    let x = Guarded::input(problem.io, &problem.x, m, k, Layout::PLAIN);
    let mut y = Guarded::output(problem.io, m, n, Layout::PLAIN);
    let mut scratch = Workspace::new(w.workspace(m), product::STALE);
    for _ in 0..2 {
        product::call(*w, OpSet::FORWARD, ("x", &x), ("y", &mut y), &mut scratch, bench.threads)?;
        seen += same("the result that y held", problem, &y, &first.want)?;
    }
    Ok(seen)
}

fn previous_call(first: &First<'_>) -> Result<usize> {
    let problem = first.problem;
    let mut seen = 0;
    for (scale, m) in [(1000.0, problem.m), (-1.0, 1), (0.0, problem.m), (1e-6, problem.m)] {
        let x: Vec<f32> = problem.x[..m * problem.weight.k].iter().rev().map(|v| v * scale).collect();
        let x = IoBuffer::new(problem.io, &x).to_f32();
        let other = Problem { name: String::new(), x, m, recorded: None, ..*problem };
        product::forward_lent(first.w, &other, Lent::PLAIN, first.bench.threads)?;
        seen += first.again("the call before", Lent::PLAIN)?;
    }
    Ok(seen)
}

/// `can_prepare` says after the calls what it said before them, again and again.
fn verdicts(first: &First<'_>) -> Result<usize> {
    let bench = first.bench;
    let spec = product::spec(bench, first.problem, OpSet::FORWARD);
    for i in 0..8 {
        if let Err(reasons) = bench.backend.can_prepare(&spec, first.path, bench.env) {
            return Err(failed("the verdict on a prepared product changed")
                .need("yes, as before")
                .have(format!("at question {}: {}", i + 1, super::abi::no(&reasons))));
        }
    }
    first.again("the questions asked", Lent::PLAIN)
}

/// Eight callers share two weights made alike, each with its own buffers and its own order of two inputs.
fn concurrent(first: &First<'_>) -> Result<usize> {
    const CALLERS: usize = 8;
    let &First { bench, path, problem, w, ref want } = first;
    let x: Vec<f32> = problem.x.iter().map(|v| -2.0 * v).collect();
    let other = Problem { name: String::new(), x, recorded: None, ..*problem };
    let want_other = product::forward_lent(w, &other, Lent::PLAIN, bench.threads)?.bits();
    let spec = product::spec(bench, problem, OpSet::FORWARD);
    let twin =
        product::prepare(bench, path, &problem.weight, &spec)?.map_err(|_| failed("the verdict changed"))?;
    let twin = &*twin;
    let start = Barrier::new(CALLERS);
    let caller = |i: usize| -> Result<usize> {
        let own = ThreadPool::new(1);
        start.wait();
        let mut seen = 0;
        for call in 0..6 {
            let (problem, want) =
                if (i + call) % 2 == 0 { (problem, &want[..]) } else { (&other, &want_other[..]) };
            let w = if i / 2 % 2 == 0 { w } else { twin };
            let y = product::forward_lent(w, problem, Lent::PLAIN, &own)?;
            seen += same("other calls at the same time", problem, &y, want)?;
        }
        if i % 4 == 0 {
            // Preparing while others compute.
            product::prepare(bench, path, &problem.weight, &spec)?
                .map_err(|_| failed("the verdict changed"))?;
        }
        Ok(seen)
    };
    let results = std::thread::scope(|scope| {
        let all: Vec<_> = (0..CALLERS).map(|i| scope.spawn(move || caller(i))).collect();
        all.into_iter().map(|t| t.join()).collect::<Vec<_>>()
    });
    let mut seen = 0;
    for result in results {
        seen += result.map_err(|_| failed("a concurrent call panicked"))??;
    }
    Ok(seen)
}
