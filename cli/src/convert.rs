//! `q4 convert`: a 4-bit model in another layout of its format, with the proof that no value changed.
use crate::args::{ConvertArgs, ModelArgs, OutputLayout};
use crate::context::Context;
use crate::mistakes::quoted;
use crate::report::Outcome;
use crate::writing::write;
use q4_core::Result;
use q4_core::memory::human;
use q4_model::export::convert::{Conversion, Report, convert};
use std::path::Path;

/// Runs the verb.
pub fn run(cx: &Context, args: &ConvertArgs) -> Result<Outcome> {
    let (config, tokenizer) = (args.config.clone(), args.tokenizer.clone());
    let checkpoint = cx.open(&ModelArgs { model: args.input.clone(), config, tokenizer })?;
    let conversion =
        Conversion { allow_last_bit: args.allow_last_bit, ..Conversion::new(args.layout.into()) };
    let threads = cx.threads();
    let report = write(cx, "converting", |progress| {
        convert(&checkpoint, &args.output, conversion, &threads, progress)
    })?;
    for note in &report.notes {
        cx.report().warn(note);
    }
    cx.report().result("convert", &report, || summary(args, &report))?;
    Ok(Outcome::Done)
}

fn summary(args: &ConvertArgs, report: &Report) -> String {
    let scale = |s: Option<f32>| s.map_or("none".into(), |v| v.to_string());
    let mut text = String::new();
    for t in report.tensors.iter().filter(|t| t.scale_in != t.scale_out) {
        let (before, after) = (scale(t.scale_in), scale(t.scale_out));
        text.push_str(&format!("{:<44} per-tensor scale {before} -> {after}\n", t.name));
    }
    for c in &report.changed {
        text.push_str(&format!(
            "{:<44} last bit: {} of {} block scales, at most {:.1e} of a value\n",
            c.name, c.block_scales, c.of, c.largest_relative
        ));
    }
    text.push_str(&format!(
        "{}: {} layers as {}, {} tensors copied, {} -> {}\n",
        args.output.display(),
        report.tensors.len(),
        report.layout.as_str(),
        report.copied,
        human(report.bytes_in),
        human(report.bytes_out)
    ));
    let (input, sha) = (args.input.display(), &report.sha256_decoded);
    text.push_str(&match report.changed.len() {
        0 => format!("lossless: read back, every decoded value is that of {input}, SHA-256 {sha}\n"),
        n => format!(
            "read back: the values of {n} scales differ from {input} in their last bits, all others are the same, \
             SHA-256 {sha}\n"
        ),
    });
    if matches!(args.layout, OutputLayout::Dat) {
        text.push_str(&how_to_run(&args.output, args.config.as_deref().unwrap_or(&args.input)));
    }
    text
}

/// The line that runs a `.dat` file, which has no configuration and no tokenizer of its own.
pub fn how_to_run(file: &Path, original: &Path) -> String {
    let [file, original] = [file, original].map(|path| quoted(&path.display().to_string()));
    format!("q4 generate {file} --config {original} --tokenizer {original} -p TEXT\n")
}
