//! L5, life: what only shows when a process has lived for a while. Many weights at once, many calls of one,
//! other bytes at the same address, operands of the caller that end where its memory ends.
use super::Scope;
use crate::Level;
use crate::case::{Bench, Case, Seen};
use crate::guarded::{Guarded, Layout, Memory, Workspace};
use crate::lattice::{Problem, Sketch};
use crate::memory::watch_in;
use crate::product::{self, failed};
use crate::stored::{Placed, mix};
use q4_core::{DType, ExecContext, ExecPath, OpSet, PreparedWeight, Result, TensorView, TensorViewMut};

/// Weights that live at once, as many as a model of some layers has, and as many as one of a hundred.
const WEIGHTS: usize = 48;
const MANY_WEIGHTS: usize = 300;
/// Calls of one weight: more than a conversation of a few thousand tokens makes, and more than 16 bits count.
const CALLS: usize = 5000;
const MANY_CALLS: usize = 70_000;
/// Calls between two looks at the memory, and bytes that a call may not leave behind.
const WATCHED: usize = 2000;

type Check = fn(&Bench<'_>, ExecPath, &Sketch, bool) -> Result<Seen>;

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let formats = scope.quantizers();
    let checks: [(&str, [usize; 3], Check); 5] = [
        ("many-weights", [32, 64, 3], many_weights),
        ("many-calls", [16, 32, 3], many_calls),
        ("same-address", [48, 128, 4], same_address),
        ("same-operands", [33, 144, 5], same_operands),
        ("ends-of-memory", [40, 144, 2], ends_of_memory),
    ];
    for (i, schema) in scope.encodings().into_iter().enumerate() {
        for (j, (name, shape, check)) in checks.into_iter().enumerate() {
            // Thousands of calls are for one encoding, the rest for every one.
            if name == "many-calls" && (i > 0 || scope.repeats()) {
                continue;
            }
            // Kernels of packed weights keep more about them than others do.
            let is_long = i == 0 && scope.is_packed() && scope.claim.activations == "native";
            let sketch = scope.sketch(schema, formats[(i + j) % formats.len()], scope.io(), shape);
            let id = format!("{name}/{}", sketch.name());
            scope.add(all, Level::L5, id, move |bench| check(bench, path, &sketch, is_long));
        }
    }
}

type Prepared = std::result::Result<Box<dyn PreparedWeight>, Vec<q4_core::Reject>>;

fn prepared(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Prepared> {
    product::prepare(bench, path, &problem.weight, &product::spec(bench, problem, OpSet::FORWARD))
}

/// Weights of several shapes are made one after the other and called in another order; some go, others come.
fn many_weights(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch, is_long: bool) -> Result<Seen> {
    let count = if is_long { MANY_WEIGHTS } else { WEIGHTS };
    let sketches: Vec<_> = (0..count)
        .map(|i| {
            let n = sketch.rows.iter().sum::<usize>() * (1 + i % 3);
            Sketch { rows: vec![n], seed: sketch.seed ^ (i as u64) << 16, ..sketch.clone() }
        })
        .collect();
    let mut alive = Vec::new();
    for s in &sketches {
        match s.with(|problem| prepared(bench, path, problem))? {
            Ok(w) => alive.push(Some(w)),
            Err(reasons) => return Ok(Seen::Refused(reasons)),
        }
    }
    let mut seen = Seen::Refused(Vec::new());
    for turn in 0..count + 2 * WEIGHTS {
        let i = mix(turn as u64 ^ sketch.seed) as usize % count;
        if turn % 7 == 3 {
            // One that goes stays away for a while.
            alive[(i + 1) % count] = None;
        }
        if alive[i].is_none() {
            alive[i] = sketches[i].with(|problem| prepared(bench, path, problem))?.ok();
        }
        let Some(w) = &alive[i] else { return Err(failed("the verdict on a weight changed")) };
        seen = seen.and(sketches[i].with(|problem| product::checked(&**w, path, problem, bench.threads))?);
    }
    Ok(seen)
}

/// The last of thousands of calls gives the bits of the first.
fn many_calls(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch, is_long: bool) -> Result<Seen> {
    let most = match (is_long, bench.elsewhere()) {
        (false, _) => CALLS,
        (true, None) => MANY_CALLS,
        // Each is a message to another process and one back.
        (true, Some(_)) => MANY_CALLS / 3,
    };
    sketch.with(|problem| {
        product::with(bench, path, problem, OpSet::FORWARD, |w| {
            let (m, k, n) = (problem.m, problem.weight.k, problem.weight.n());
            // One row most of the time, and all of them now and then, as tokens and prompts come.
            let mut calls = [1, m].map(|m| {
                // A problem of its own: some formats have one scale for all rows of a call.
                let part = Problem {
                    name: String::new(),
                    x: problem.x[..m * k].to_vec(),
                    m,
                    recorded: None,
                    ..*problem
                };
                let x = Guarded::input(problem.io, &part.x, m, k, Layout::PLAIN);
                (part, x, Guarded::output(problem.io, m, n, Layout::PLAIN), Vec::new())
            });
            let terms = product::forward_bound(path, problem);
            let mut scratch = Workspace::new(w.workspace(m), product::STALE);
            let mut call = |at: usize| -> Result<()> {
                let (part, x, y, first) = &mut calls[usize::from(at % 7 == 6)];
                y.poison();
                let mut cx = ExecContext::cpu(bench.threads);
                cx.workspace = scratch.view()?;
                w.forward(x.view()?, y.view_mut()?, &mut cx)?;
                let bits = y.bits();
                if first.is_empty() {
                    product::exact_forward(part)?.compare("y", &y.values(), terms)?;
                    first.clone_from(&bits);
                }
                if *first != bits {
                    return Err(failed("the same call gave other bits")
                        .need("those of the first call")
                        .have(format!("others at call {}", at + 1)));
                }
                Ok(())
            };
            (0..WATCHED).try_for_each(&mut call)?;
            let mut watched = Ok(());
            let taken = watch_in(bench.elsewhere().map(|e| e.process()), || {
                watched = (WATCHED..2 * WATCHED).try_for_each(&mut call);
            });
            watched?;
            if let Some(left) = taken.allocated_left.filter(|left| *left >= WATCHED as u64) {
                return Err(failed(&format!("memory after {WATCHED} calls"))
                    .need("no growth")
                    .have(format!("{left} bytes more than before")));
            }
            (2 * WATCHED..most).try_for_each(&mut call)?;
            Ok(Seen::exactly(most * n))
        })
    })
}

/// Other bytes in the caller's buffers, at the same address, are another weight.
fn same_address(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch, _: bool) -> Result<Seen> {
    let mut stored = sketch.weight();
    let mut seen = Seen::Refused(Vec::new());
    for turn in 0..3u64 {
        let next = Sketch { seed: sketch.seed ^ turn << 24, ..sketch.clone() };
        stored.overwrite(&next.weight());
        let made = stored.lend(|weight| {
            let problem = next.problem(weight);
            product::with(bench, path, &problem, OpSet::FORWARD, |w| {
                product::checked(w, path, &problem, bench.threads)
            })
        })?;
        seen = seen.and(made);
    }
    Ok(seen)
}

/// Other values in the caller's x, at the same address, are another input, with and without another row in
/// between.
fn same_operands(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch, _: bool) -> Result<Seen> {
    sketch.with(|problem| {
        product::with(bench, path, problem, OpSet::FORWARD, |w| {
            let (m, k, n) = (problem.m, problem.weight.k, problem.weight.n());
            let mut x = vec![0f32; m * k];
            let mut y = Guarded::output(DType::F32, m, n, Layout::PLAIN);
            if problem.io != DType::F32 {
                y = Guarded::output(problem.io, m, n, Layout::PLAIN);
            }
            let mut scratch = Workspace::new(w.workspace(m), product::STALE);
            let mut buffer = vec![0u8; m * k * problem.io.size()];
            let mut seen = Seen::Refused(Vec::new());
            for turn in 0..4 {
                for (i, x) in x.iter_mut().enumerate() {
                    // The first and the last rows stay: a look at some of the values is no look at all of
                    // them.
                    let is_edge = i < k || i >= (m - 1) * k;
                    *x = problem.x[if is_edge { i } else { (i + turn * 37) % (m * k) }];
                }
                buffer.copy_from_slice(&crate::guarded::bytes_of(&q4_core::selfcheck::IoBuffer::new(
                    problem.io, &x,
                )));
                y.poison();
                let mut cx = ExecContext::cpu(bench.threads);
                cx.workspace = scratch.view()?;
                w.forward(TensorView::of_bytes(&buffer, problem.io, &[m, k])?, y.view_mut()?, &mut cx)?;
                let now = Problem { name: String::new(), x: x.clone(), recorded: None, ..*problem };
                let terms = product::forward_bound(path, &now);
                let worst = product::exact_forward(&now)?.compare("y", &y.values(), terms)?;
                seen = seen.and(Seen::within(m * n, worst));
            }
            Ok(seen)
        })
    })
}

/// The stored bytes and the scratch end where the next page is nobody's: who reads on, dies of it.
fn ends_of_memory(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch, _: bool) -> Result<Seen> {
    let mut seen = Seen::Refused(Vec::new());
    // Bytes of a file may lie anywhere.
    for shift in [0, 1, 8] {
        let stored = sketch.weight().placed(shift);
        seen = seen.and(placed(bench, path, sketch, &stored)?);
    }
    Ok(seen)
}

fn placed(bench: &Bench<'_>, path: ExecPath, sketch: &Sketch, stored: &Placed) -> Result<Seen> {
    stored.lend(|weight| {
        let problem = sketch.problem(weight);
        product::with(bench, path, &problem, OpSet::FORWARD, |w| {
            let (m, k, n) = (problem.m, problem.weight.k, problem.weight.n());
            let x = Guarded::input(problem.io, &problem.x, m, k, Layout::HOSTILE);
            let mut y = Guarded::output(problem.io, m, n, Layout::HOSTILE);
            // Scratch is aligned to 64 bytes and a multiple of them long where backends ask for whole lines.
            let need = w.workspace(m);
            let mut scratch = Memory::before_a_hole(need.next_multiple_of(64).max(64), product::STALE);
            let at = scratch.len() - need.next_multiple_of(64);
            let mut cx = ExecContext::cpu(bench.threads);
            if need > 0 {
                cx.workspace = Some(TensorViewMut::of(&mut scratch[at..at + need], &[need])?);
            }
            w.forward(x.view()?, y.view_mut()?, &mut cx)?;
            let terms = product::forward_bound(path, &problem);
            let worst = product::exact_forward(&problem)?.compare("y", &y.values(), terms)?;
            Ok(Seen::within(m * n, worst))
        })
    })
}
