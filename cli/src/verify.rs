//! `q4 verify`: what is wrong with a model, or merely odd about it.
use crate::args::VerifyArgs;
use crate::context::Context;
use crate::report::Outcome;
use q4_core::{Code, Result};
use q4_model::verify::{Finding, Severity, verify};
use serde::Serialize;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    errors: usize,
    warnings: usize,
    findings: &'a [Finding],
}

/// Runs the verb.
pub fn run(cx: &Context, args: &VerifyArgs) -> Result<Outcome> {
    let checkpoint = cx.open(&args.model)?;
    let findings = verify(&checkpoint);
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
    if cx.report().is_json() {
        let body = Body { model: checkpoint.name(), errors, warnings, findings: &findings };
        cx.report().document("verify", &body)?;
    } else {
        let mut text = String::new();
        for f in &findings {
            let severity = match f.severity {
                Severity::Error => "error",
                Severity::Warning => "warning",
                Severity::Note => "note",
            };
            text.push_str(&format!("{severity:<8} {:<20} {}: {}\n", f.code, f.tensor, f.message));
        }
        text.push_str(&format!(
            "{}: {} tensors, {errors} errors, {warnings} warnings, {} notes\n",
            checkpoint.name(),
            checkpoint.table().len(),
            count(Severity::Note)
        ));
        cx.report().text(&text)?;
    }
    Ok(if errors > 0 { Outcome::Found(Code::Findings) } else { Outcome::Done })
}
