//! `q4 quantize`: a dense model in, a 4-bit one out, with the loss of every matrix.
use crate::args::{Format, ModelArgs, OutputLayout, QuantizeArgs, ScaleLevels, ScaleMethod};
use crate::context::Context;
use crate::convert::how_to_run;
use crate::report::Outcome;
use crate::writing::write;
use q4_core::detect::Layout;
use q4_core::formats::{Choices, quantizations};
use q4_core::memory::human;
use q4_core::{Code, Error, Result};
use q4_model::export::{ExportPlan, Report, export};
use q4_model::quantize::{Method, Scales};

/// Runs the verb.
pub fn run(cx: &Context, args: &QuantizeArgs) -> Result<Outcome> {
    let plan = plan(args)?;
    let input = ModelArgs { model: args.input.clone(), config: args.config.clone(), tokenizer: None };
    let checkpoint = cx.open(&input)?;
    let threads = cx.threads();
    let report =
        write(cx, "quantising", |progress| export(&checkpoint, &args.output, &plan, &threads, progress))?;
    for note in &report.notes {
        cx.report().warn(note);
    }
    cx.report().result("quantize", &report, || summary(args, &report))?;
    Ok(Outcome::Done)
}

fn summary(args: &QuantizeArgs, report: &Report) -> String {
    let mut text = format!("{:<44} [out, in]  signal to quantisation noise\n", "layer");
    for t in &report.tensors {
        text.push_str(&format!("{:<44} [{}, {}] {:>7.2} dB\n", t.name, t.n, t.k, t.sqnr_db));
    }
    let worst = report.tensors.iter().map(|t| t.sqnr_db).fold(f64::INFINITY, f64::min);
    text.push_str(&format!(
        "{}: {} layers quantised (worst {worst:.2} dB), {} tensors copied, {} -> {}\n",
        args.output.display(),
        report.tensors.len(),
        report.copied,
        human(report.bytes_in),
        human(report.bytes_out)
    ));
    if matches!(args.layout, Some(OutputLayout::Dat)) {
        text.push_str(&how_to_run(&args.output, args.config.as_deref().unwrap_or(&args.input)));
    }
    text
}

/// Options of another format are refused: they would do nothing.
fn plan(args: &QuantizeArgs) -> Result<ExportPlan> {
    let Format { name, how } = args.format;
    let given = [
        ("--scales", args.scales.is_some()),
        ("--method", args.method.is_some()),
        ("--block-size", args.block_size.is_some()),
        ("--double-quant", args.double_quant),
    ];
    if let Some((option, _)) = given.iter().find(|(o, given)| *given && !how.options.contains(o)) {
        let others = quantizations().filter(|(_, q)| q.options.contains(option));
        let others = others.map(|(kind, _)| kind.name()).collect::<Vec<_>>().join(" or ");
        return Err(Error::new(Code::Usage, format!("{option} is about {others}"))
            .have(format!("--format {name}"))
            .fix(format!("--format {others}, or leave {option} out")));
    }
    let choices = Choices {
        scales: args.scales.map(|s| match s {
            ScaleLevels::TwoLevel => Scales::TwoLevel,
            ScaleLevels::Single => Scales::Single,
        }),
        method: args.method.map(|m| match m {
            ScaleMethod::Search => Method::Search,
            ScaleMethod::Rtn => Method::Rtn,
            ScaleMethod::FourOverSix => Method::FourOverSix,
        }),
        block: args.block_size,
        double: args.double_quant,
    };
    let layout = args.layout.map_or(how.layout, Layout::from);
    let mut plan = ExportPlan::new(layout, (how.target)(layout, &choices));
    plan.include.clone_from(&args.include);
    plan.exclude.clone_from(&args.exclude);
    Ok(plan)
}
