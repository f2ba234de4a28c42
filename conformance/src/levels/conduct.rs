//! L5, conduct: a backend is a guest in its process. What is one for the whole process, and how its threads
//! compute, is after a call as it was before.
use super::Scope;
use crate::Level;
use crate::case::{AbiProbe, Bench, Case, Seen};
use crate::guarded::{Guarded, Layout, Workspace};
use crate::lattice::Problem;
use crate::printed::Printed;
use crate::product::{self, failed};

use q4_core::conduct::{ALLOCATIONS, Facts, THREADS, facts_here};
use q4_core::{ExecContext, ExecPath, OpSet, PreparedWeight, Result};
use std::collections::BTreeMap;
use std::time::Duration;

/// Other threads of a process change things too; what a backend does, it does every time.
const ATTEMPTS: usize = 6;
/// Calls between two looks; odd, so that what every second call undoes is seen.
const CALLS: usize = 7;
/// Time for what comes and goes to go.
const PAUSE: Duration = Duration::from_millis(4);
/// Neither the smallest nor the plainest product.
const SHAPE: [usize; 3] = [96, 272, 5];

type Changes = BTreeMap<String, String>;
type Phase = fn(&Bench<'_>, ExecPath, &Problem<'_>) -> Result<Result<Changes, Seen>>;

const PHASES: [(&str, Phase); 5] = [
    ("prepare", |bench, path, problem| {
        ready(bench, path, problem, OpSet::FORWARD, |_| {
            let mut made = None;
            let changes = changes(bench, || made_again(bench, path, problem).map(|w| made = Some(w)));
            drop(made);
            changes.map(allocating)
        })
    }),
    ("forward", |bench, path, problem| {
        ready(bench, path, problem, OpSet::FORWARD, |w| {
            changes(bench, || {
                for call in 0..CALLS {
                    // In its range, and seldom its most.
                    let m = if call % 2 == 0 { 1 } else { problem.m };
                    let x = problem.x[..m * problem.weight.k].to_vec();
                    let part = Problem { name: String::new(), x, m, recorded: None, ..*problem };
                    product::forward(w, &part, Layout::PLAIN, product::STALE, bench.threads)?;
                }
                Ok(())
            })
        })
    }),
    ("backward", |bench, path, problem| {
        ready(bench, path, problem, OpSet::BACKWARD_INPUT, |w| {
            let dy = vec![0.5; problem.m * problem.weight.n()];
            changes(bench, || {
                (0..CALLS).try_for_each(|_| {
                    product::backward(w, problem, &dy, Layout::PLAIN, bench.threads).map(drop)
                })
            })
        })
    }),
    ("dequantize", |bench, path, problem| {
        ready(bench, path, problem, OpSet::DEQUANTIZE, |w| {
            let (n, k) = (problem.weight.n(), problem.weight.k);
            changes(bench, || {
                (0..CALLS).try_for_each(|_| {
                    let mut out = Guarded::output(problem.io, n, k, Layout::PLAIN);
                    let mut scratch = Workspace::new(w.workspace(1), product::STALE);
                    let mut cx = ExecContext::cpu(bench.threads);
                    cx.workspace = scratch.view()?;
                    w.dequantize(out.view_mut()?, &mut cx)
                })
            })
        })
    }),
    ("release", |bench, path, problem| {
        ready(bench, path, problem, OpSet::FORWARD, |_| {
            let made = made_again(bench, path, problem)?;
            product::forward(&*made, problem, Layout::PLAIN, product::STALE, bench.threads)?;
            changes(bench, || {
                drop(made);
                Ok(())
            })
            .map(allocating)
        })
    }),
];

pub(super) fn cases(scope: &Scope<'_>, all: &mut Vec<Case>) {
    let path = scope.claim.path;
    let Some((schema, activations)) = scope.usual() else { return };
    let sketch = scope.sketch(schema, activations, scope.io(), SHAPE);
    for (name, phase) in PHASES {
        let sketch = sketch.clone();
        let id = format!("conduct/{name}/{}", sketch.name());
        scope.add(all, Level::L5, id, move |bench| {
            sketch.with(|problem| every_time(|| phase(bench, path, problem)))
        });
    }
}

/// What loading a library does to a process that knew nothing of it before.
pub(super) fn backend_cases(abi: Option<&dyn AbiProbe>, all: &mut Vec<Case>) {
    if abi.and_then(AbiProbe::elsewhere).is_none() {
        return;
    }
    all.push(Case::new(Level::L5, None, "conduct/load", |bench| {
        let Some(process) = bench.elsewhere() else { return Ok(Seen::exactly(0)) };
        let (before, after) = (process.facts_before(), process.facts()?);
        judged(before.len(), &allocating(differing(&before, &after)))
    }));
}

/// Of a call that may allocate.
fn allocating(mut changes: Changes) -> Changes {
    changes.remove(ALLOCATIONS);
    changes
}

/// Fails with what changed in every attempt.
fn every_time(attempt: impl Fn() -> Result<Result<Changes, Seen>>) -> Result<Seen> {
    let mut left: Option<Changes> = None;
    for _ in 0..ATTEMPTS {
        let now = match attempt()? {
            Ok(changes) => changes,
            Err(seen) => return Ok(seen),
        };
        let both = match left {
            Some(mut before) => {
                before.retain(|name, _| now.contains_key(name));
                before
            }
            None => now,
        };
        if both.is_empty() {
            return Ok(Seen::exactly(facts_here().len()));
        }
        left = Some(both);
    }
    judged(0, &left.unwrap_or_default())
}

fn judged(seen: usize, changes: &Changes) -> Result<Seen> {
    if changes.is_empty() {
        return Ok(Seen::exactly(seen));
    }
    let names: Vec<_> = changes.keys().map(String::as_str).collect();
    let have: Vec<_> = changes.iter().map(|(name, change)| format!("{name}: {change}")).collect();
    Err(failed(&format!("it changed what is not its own: {}", names.join(", ")))
        .need("the process as it was before")
        .have(have.join("\n")))
}

/// A weight that was called once, for `body`; what a first call does once is not its conduct. Refusing an
/// operation is allowed.
fn ready(
    bench: &Bench<'_>,
    path: ExecPath,
    problem: &Problem<'_>,
    op: OpSet,
    body: impl FnOnce(&dyn PreparedWeight) -> Result<Changes>,
) -> Result<Result<Changes, Seen>> {
    let spec = product::spec(bench, problem, OpSet::FORWARD.with(op));
    if let Err(reasons) = bench.backend.can_prepare(&spec, path, bench.env) {
        return Ok(Err(Seen::Refused(reasons)));
    }
    let w = product::build(bench, path, &problem.weight, &spec)?;
    product::forward(&*w, problem, Layout::PLAIN, product::STALE, bench.threads)?;
    body(&*w).map(Ok)
}

fn made_again(bench: &Bench<'_>, path: ExecPath, problem: &Problem<'_>) -> Result<Box<dyn PreparedWeight>> {
    product::build(bench, path, &problem.weight, &product::spec(bench, problem, OpSet::FORWARD))
}

/// What is another after `body`.
fn changes(bench: &Bench<'_>, body: impl FnOnce() -> Result<()>) -> Result<Changes> {
    let look = || bench.elsewhere().map_or_else(|| Ok(facts_here()), |e| e.facts());
    // A process of its own is judged from before it knew of the library: the first call may do what later
    // ones need not. Its threads are ours too, and preparing allocates.
    let since = |before: Facts| match bench.elsewhere().map(|e| e.facts_before()) {
        Some(mut first) => {
            first.extend(before.into_iter().filter(|fact| fact.0 == THREADS || fact.0 == ALLOCATIONS));
            first
        }
        None => before,
    };
    // In this process what is printed goes where results go.
    let printed = if bench.elsewhere().is_none() { Printed::begin() } else { None };
    let before = look();
    let done = before.is_ok().then(body);
    let mut after = look();
    let said = printed.map_or([0, 0], Printed::end);
    let before = since(before?);
    done.transpose()?;
    if after.as_ref().is_ok_and(|after| !differing(&before, after).is_empty()) {
        std::thread::sleep(PAUSE);
        after = look();
    }
    let mut all = differing(&before, &after?);
    for (name, bytes) in ["standard output", "standard error"].into_iter().zip(said) {
        if bytes > 0 {
            all.insert(format!("bytes on its {name}"), format!("0, then {bytes}"));
        }
    }
    Ok(all)
}

fn differing(before: &Facts, after: &Facts) -> Changes {
    let mut all = Changes::new();
    for (name, was) in before {
        let is = after.get(name).map_or("unknown", String::as_str);
        if name == THREADS {
            let old: Vec<_> = was.split(' ').collect();
            let new: Vec<_> = is.split(' ').filter(|t| !old.contains(t)).collect();
            if !new.is_empty() {
                all.insert(name.clone(), format!("{} more", new.len()));
            }
        } else if was != is {
            all.insert(name.clone(), told(was, is));
        }
    }
    all
}

/// The parts that differ of two texts that may be long.
fn told(was: &str, is: &str) -> String {
    let parts = |text: &str, other: &str| -> String {
        let split = |c: char| c == '\n' || c == ';';
        let other: Vec<_> = other.split(split).map(str::trim).collect();
        let own: Vec<_> = text.split(split).map(str::trim).filter(|p| !other.contains(p)).collect();
        own.join("; ")
    };
    format!("`{}`, then `{}`", parts(was, is), parts(is, was))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_ends_is_no_change_and_one_that_begins_is() {
        let facts = |threads: &str, umask: &str| -> Facts {
            [(THREADS, threads), ("umask", umask)].map(|(n, v)| (n.to_owned(), v.to_owned())).into()
        };
        assert!(differing(&facts("1 2 3", "0022"), &facts("1 3", "0022")).is_empty());
        let changes = differing(&facts("1 2", "0022"), &facts("1 4 5", "0000"));
        assert_eq!(changes[THREADS], "2 more");
        assert_eq!(changes["umask"], "`0022`, then `0000`");
    }
}
