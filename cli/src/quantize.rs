//! `q4 quantize`: a dense model in, a 4-bit one out, with the loss of every matrix.
use crate::args::{Format, ModelArgs, OutputLayout, QuantizeArgs, ScaleLevels, ScaleMethod};
use crate::context::Context;
use crate::convert::how_to_run;
use crate::report::Outcome;
use crate::writing::write;
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
    if cx.report().is_json() {
        cx.report().document("quantize", &report)?;
    } else {
        cx.report().text(&summary(args, &report))?;
    }
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

/// Options of the other format are refused: they would do nothing.
fn plan(args: &QuantizeArgs) -> Result<ExportPlan> {
    let nvfp4 = args.format == Format::Nvfp4;
    let foreign = match nvfp4 {
        true => [("--block-size", args.block_size.is_some()), ("--double-quant", args.double_quant)],
        false => [("--scales", args.scales.is_some()), ("--method", args.method.is_some())],
    };
    if let Some((option, _)) = foreign.iter().find(|(_, given)| *given) {
        let (this, other) = if nvfp4 { ("nvfp4", "nf4") } else { ("nf4", "nvfp4") };
        return Err(Error::new(Code::Usage, format!("{option} is about {other}"))
            .have(format!("--format {this}"))
            .fix(format!("--format {other}, or leave {option} out")));
    }
    let default = if nvfp4 { OutputLayout::Modelopt } else { OutputLayout::Bitsandbytes };
    let layout = args.layout.unwrap_or(default).into();
    let mut plan = match nvfp4 {
        false => ExportPlan::nf4(layout, args.block_size.unwrap_or(64), args.double_quant),
        true => {
            let scales = args.scales.map(|s| match s {
                ScaleLevels::TwoLevel => Scales::TwoLevel,
                ScaleLevels::Single => Scales::Single,
            });
            let method = match args.method.unwrap_or_default() {
                ScaleMethod::Search => Method::Search,
                ScaleMethod::Rtn => Method::Rtn,
                ScaleMethod::FourOverSix => Method::FourOverSix,
            };
            ExportPlan::nvfp4(layout, scales, method)
        }
    };
    plan.include.clone_from(&args.include);
    plan.exclude.clone_from(&args.exclude);
    Ok(plan)
}
