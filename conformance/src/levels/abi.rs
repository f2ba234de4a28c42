//! L0: what a backend says about itself is well formed and does not change; the C table where a host reports
//! one.
use crate::Level;
use crate::case::{AbiProbe, Bench, Case, Seen};
use crate::lattice;
use crate::limits::plain_spec;
use crate::product::failed;
use q4_core::formats::names;
use q4_core::{
    BackendDescriptor, Device, ExecPath, LinearSpec, ProbeItem, Q4Schema, Reject, Result, Verdict,
};
use std::collections::BTreeSet;

/// Every path there is.
pub(super) const PATHS: [ExecPath; 5] = [
    ExecPath::NativeKernel,
    ExecPath::FusedRounded,
    ExecPath::FusedDequant,
    ExecPath::DequantMatmul,
    ExecPath::Reference,
];

pub(super) fn cases(abi: Option<&dyn AbiProbe>, all: &mut Vec<Case>) {
    let mut add =
        |name: &str, body: fn(&Bench<'_>) -> Result<Seen>| all.push(Case::new(Level::L0, None, name, body));
    add("descriptor", descriptor);
    add("probe", probe);
    add("verdicts-repeat", verdicts_repeat);
    add("verdicts-on-threads", verdicts_on_threads);
    for name in abi.map(AbiProbe::cases).unwrap_or_default() {
        all.push(Case::new(Level::L0, None, format!("table/{name}"), move |bench| {
            bench.abi.map_or(Ok(()), |abi| abi.run(&name))?;
            Ok(Seen::exactly(1))
        }));
    }
}

fn descriptor(bench: &Bench<'_>) -> Result<Seen> {
    let d = bench.backend.descriptor();
    let is_name = |s: &str| {
        s.starts_with(|c: char| c.is_ascii_lowercase())
            && s.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    if !is_name(&d.name) {
        return Err(failed("descriptor: name")
            .need("lower-case letters, digits and `-`")
            .have(d.name.to_string()));
    }
    if d.version.is_empty() || d.vendor.is_empty() {
        return Err(failed("descriptor")
            .need("a version and a vendor")
            .have(format!("version `{}`, vendor `{}`", d.version, d.vendor)));
    }
    let unique: BTreeSet<_> = d.offers.iter().collect();
    if d.offers.is_empty() || unique.len() != d.offers.len() {
        return Err(failed("descriptor: offers").need("at least one, each once").have(offers(d)));
    }
    if let Some((unknown, _)) = d.offers.iter().find(|(s, _)| names().all(|name| name != s.as_ref())) {
        return Err(failed("descriptor: offers")
            .need(names().collect::<Vec<_>>().join(", "))
            .have(unknown.to_string()));
    }
    let first = described(d);
    for _ in 0..3 {
        let again = described(bench.backend.descriptor());
        if again != first {
            return Err(failed("descriptor changed between calls").need(first).have(again));
        }
    }
    Ok(Seen::exactly(4))
}

fn described(d: &BackendDescriptor) -> String {
    format!("{} {} by {}, priority {}, offers {}", d.name, d.version, d.vendor, d.priority, offers(d))
}

fn offers(d: &BackendDescriptor) -> String {
    let all: Vec<_> = d.offers.iter().map(|(schema, path)| format!("{schema} via {path}")).collect();
    if all.is_empty() { "none".into() } else { all.join(", ") }
}

/// A verdict in words.
fn said(verdict: &Verdict) -> String {
    match verdict {
        Ok(()) => "yes".into(),
        Err(reasons) => no(reasons),
    }
}

/// A refusal in words.
pub(super) fn no(reasons: &[Reject]) -> String {
    let one = |r: &Reject| format!("{}: need {}; have {}", r.code.as_str(), r.need, r.have);
    match reasons {
        [] => "no, without a reason".into(),
        reasons => format!("no: {}", reasons.iter().map(one).collect::<Vec<_>>().join("\n")),
    }
}

fn probe(bench: &Bench<'_>) -> Result<Seen> {
    // Details may carry timings; what was probed and what it says may not change.
    let facts = |items: Vec<ProbeItem>| -> Vec<(String, Vec<Reject>)> {
        items.into_iter().map(|i| (i.id.into_owned(), i.reasons)).collect()
    };
    let first = facts(bench.backend.probe(bench.env));
    if first.iter().any(|(id, _)| id.is_empty()) {
        return Err(failed("probe: an item without an id"));
    }
    let again = facts(bench.backend.probe(bench.env));
    if first != again {
        let words = |facts: &[(String, Vec<Reject>)]| -> String {
            let one = |(id, reasons): &(String, Vec<Reject>)| match &reasons[..] {
                [] => format!("{id}: passed"),
                reasons => format!("{id}: {}", no(reasons)),
            };
            facts.iter().map(one).collect::<Vec<_>>().join("\n")
        };
        return Err(failed("probe changed between calls").need(words(&first)).have(words(&again)));
    }
    Ok(Seen::exactly(first.len()))
}

fn verdicts_repeat(bench: &Bench<'_>) -> Result<Seen> {
    let questions = questions(bench.device);
    let ask = |(spec, path): &(LinearSpec, ExecPath)| bench.backend.can_prepare(spec, *path, bench.env);
    let first: Vec<Verdict> = questions.iter().map(ask).collect();
    for (verdict, (spec, path)) in first.iter().zip(&questions) {
        let Err(reasons) = verdict else { continue };
        if reasons.is_empty() || reasons.iter().any(|r| r.need.is_empty() || r.have.is_empty()) {
            return Err(failed(&format!("refusing {} via {path}", spec.schema.label()))
                .need("at least one reason, each with need and have")
                .have(no(reasons)));
        }
    }
    // In the other order: an answer must not depend on the question before.
    for (verdict, question) in first.iter().zip(&questions).rev() {
        let again = ask(question);
        if again != *verdict {
            let (spec, path) = question;
            return Err(failed(&format!("verdict on {} via {path} changed", spec.schema.label()))
                .need(said(verdict))
                .have(said(&again)));
        }
    }
    Ok(Seen::exactly(2 * questions.len()))
}

fn verdicts_on_threads(bench: &Bench<'_>) -> Result<Seen> {
    let questions = questions(bench.device);
    let (backend, env) = (bench.backend, bench.env);
    let ask = || -> Vec<Verdict> { questions.iter().map(|(s, p)| backend.can_prepare(s, *p, env)).collect() };
    let want = ask();
    let answers = std::thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        all.into_iter().map(|t| t.join()).collect::<Vec<_>>()
    });
    for answer in answers {
        match answer {
            Ok(answer) if answer == want => {}
            Ok(_) => return Err(failed("verdicts differ between threads")),
            Err(_) => return Err(failed("can_prepare panicked on another thread")),
        }
    }
    Ok(Seen::exactly(4 * questions.len()))
}

/// Specs that some backends serve and others do not, on every path.
fn questions(device: Device) -> Vec<(LinearSpec, ExecPath)> {
    let mut all = Vec::new();
    let kinds = lattice::ACTIVATIONS.map(|kind| lattice::quantizers(kind)[0]);
    for schema in lattice::usual() {
        for activations in kinds {
            for path in PATHS {
                let plain = plain_spec(schema, activations, device);
                let mut odd = plain.clone();
                (odd.k, odd.segments[0].rows) = (ragged(&schema), 3);
                all.extend([(plain, path), (odd, path)]);
            }
        }
    }
    all
}

fn ragged(schema: &Q4Schema) -> usize {
    if schema.k_block() == 1 { 33 } else { 3 * schema.k_block() }
}
