//! What only a run tells: matrices in another order are as plausible as before, one by one.
//!
//! Training leaves marks that no shuffle keeps. Two matrices that share a scale nobody needs (up and down, v
//! and o, q and k) come to share it evenly, row by column, so their norms go together (`alignment`). And a
//! trained model predicts what everybody's text says: where it does not, or where a changed model predicts it
//! better, something was exchanged.
use super::{Finding, Severity};
use crate::checkpoint::Checkpoint;
use crate::config::{DecoderConfig, Rope, RopeScaling};
use crate::likelihood::Loss;
use crate::runner::Runner;
use crate::template::Message;
use crate::text;
use crate::watch::{Each, Written};
use q4_core::{Code, Error, Result};
use serde::Serialize;

mod alignment;

/// Questions whose answers every trained model has read.
const TALK: [(&str, &str); 12] = [
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("Count to ten.", "one, two, three, four, five, six, seven, eight, nine, ten."),
    ("What day comes after Monday?", "After Monday comes Tuesday."),
    ("What color is the sky?", "The sky is blue."),
    ("What does the cat say?", "The cat says meow."),
    ("What is 2 plus 3?", "2 plus 3 is 5."),
    ("天空是什麼顏色？", "天空是藍色的。"),
    ("一年有幾個月？", "一年有十二個月。"),
    ("Quelle est la capitale de l'Italie ?", "La capitale de l'Italie est Rome."),
    ("Zähle bis fünf.", "eins, zwei, drei, vier, fünf."),
    ("¿De qué color es la nieve?", "La nieve es blanca."),
];
/// Share of ln(vocabulary) from which on the better half of the answers is not predicted.
const LOST: f64 = 0.2;
/// Nats by which a changed model must predict better to be believed, and the share of the loss that must be
/// left.
const GAIN: (f64, f64) = (0.1, 0.8);

/// A model with one thing changed, and what it would mean if it predicted better.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Stable name of the finding.
    pub code: &'static str,
    /// What the finding is about.
    pub subject: String,
    /// What would be true.
    pub message: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Rope(Rope),
    Epsilon(f32),
    GateUp,
}

/// What a run came to.
#[derive(Clone, Debug, Serialize)]
pub struct Told {
    /// Mean of -ln p over the better half of the answers, in nats; nothing without a tokenizer.
    pub loss: Option<f64>,
    /// ln of the vocabulary: the loss of a model that knows nothing.
    pub even: f64,
    /// Whether the weights look trained.
    pub trained: bool,
    /// Runs of the text.
    pub runs: usize,
    /// What was found, worst first.
    pub findings: Vec<Finding>,
}

/// The built-in text as tokens of a model: each sample with the place where its answer begins.
pub struct Samples(Vec<(Vec<u32>, usize)>);

impl Samples {
    /// Renders and encodes it. `None` without a tokenizer.
    ///
    /// # Errors
    /// Those of the text files: [`Code::TokenizerInvalid`], [`Code::TemplateInvalid`].
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        if checkpoint.file(text::TOKENIZER).is_none() {
            return Ok(None);
        }
        let tokenizer = text::tokenizer(checkpoint)?;
        let template = text::template(checkpoint)?.unwrap_or_else(|| text::of_family(checkpoint));
        let variables = text::variables(checkpoint)?;
        let sample = |(question, answer): &(&str, &str)| {
            let prompt = template.render(&[Message::new("user", *question)], None, true, &variables)?;
            let mut ids = tokenizer.encode(&prompt, false)?;
            let from = ids.len();
            ids.extend(tokenizer.encode(answer, false)?);
            Ok((ids, from))
        };
        TALK.iter().map(sample).collect::<Result<_>>().map(|s| Some(Self(s)))
    }

    /// The longest one: a context must have room for it.
    pub fn longest(&self) -> usize {
        self.0.iter().map(|s| s.0.len()).max().unwrap_or(1)
    }

    /// Mean loss over the better half of the answers. The runner keeps nothing.
    ///
    /// # Errors
    /// As [`Runner::accept_all`].
    pub fn loss(&self, runner: &mut Runner, vocab: usize, without: Option<Part>) -> Result<f64> {
        let mut losses = Vec::new();
        for (ids, from) in &self.0 {
            runner.truncate(0);
            let rows = score(runner, &ids[..ids.len() - 1], without)?;
            // The first token of an answer may be a thought's, or a blank: it is not counted.
            let mut loss = Loss::default();
            let next = &ids[from + 1..];
            if !next.is_empty() {
                loss.add(&rows[from * vocab..(ids.len() - 1) * vocab], next);
                losses.push(loss.mean());
            }
        }
        runner.truncate(0);
        losses.sort_unstable_by(f64::total_cmp);
        losses.truncate(losses.len().div_ceil(2));
        Ok(losses.iter().sum::<f64>() / losses.len() as f64)
    }
}

/// Half a layer: its attention or its MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The layer.
    pub layer: usize,
    /// The MLP, not the attention.
    pub mlp: bool,
}

/// Logits of every position, `[ids, vocab]`; `without` adds nothing to the residual stream.
fn score(runner: &mut Runner, ids: &[u32], without: Option<Part>) -> Result<Vec<f32>> {
    let (send, receive) = std::sync::mpsc::channel();
    let mut before: Vec<f32> = Vec::new();
    let each: Each = Box::new(move |w: Written<'_>| {
        let Part { layer, mlp } = without.unwrap_or(Part { layer: usize::MAX, mlp: false });
        // The stream as it enters the part, and as it leaves it.
        let (entry, exit) = match mlp {
            true => (w.site.layer == Some(layer) && w.site.call == "self_attn.o_proj", "mlp.down_proj"),
            false => (
                match layer {
                    0 => w.site.call == "embed_tokens",
                    _ => w.site.layer.is_some_and(|l| l + 1 == layer) && w.site.call == "mlp.down_proj",
                },
                "self_attn.o_proj",
            ),
        };
        if entry {
            before.clear();
            before.extend_from_slice(w.values);
        } else if w.site.layer == Some(layer) && w.site.call == exit {
            w.values.copy_from_slice(&before);
        }
        if w.site.call == "lm_head" {
            if let Some(bad) = w.values.iter().find(|v| !v.is_finite()) {
                return Err(Error::new(Code::NonFinite, "logits are not finite").have(bad.to_string()));
            }
            // Whoever hung up has an error of its own.
            let _ = send.send(w.values.to_vec());
        }
        Ok(())
    });
    runner.accept_watched(ids, each)?;
    Ok(receive.try_iter().flatten().collect())
}

/// Changes that mean a fault if they make a model better, each of which takes a load of its own.
pub fn changes(config: &DecoderConfig) -> Vec<Change> {
    let mut changes = Vec::new();
    for theta in [1e4, 1e5, 1e6, 5e6] {
        let rope = Rope { theta, scaling: RopeScaling::None };
        if rope != config.rope {
            let message = format!("the text is predicted better with rope_theta {theta:e} and no scaling");
            changes.push(change("rope", "config.json", message, Kind::Rope(rope)));
        }
    }
    if config.rms_norm_eps > 1e-5 {
        let message = "the text is predicted better with rms_norm_eps 1e-6".to_owned();
        changes.push(change("epsilon", "config.json", message, Kind::Epsilon(1e-6)));
    }
    let message = "the text is predicted better with gate_proj and up_proj exchanged".to_owned();
    changes.push(change("gate-up", "mlp.gate_proj", message, Kind::GateUp));
    changes
}

fn change(code: &'static str, subject: &str, message: String, kind: Kind) -> Change {
    Change { code, subject: subject.to_owned(), message, kind }
}

impl Change {
    /// The model with the change.
    pub fn of(&self, checkpoint: &Checkpoint) -> Checkpoint {
        let n = &checkpoint.config().arch.names;
        match &self.kind {
            Kind::Rope(rope) => checkpoint.changed(|c| c.rope = rope.clone(), None),
            Kind::Epsilon(eps) => checkpoint.changed(|c| c.rms_norm_eps = *eps, None),
            Kind::GateUp => {
                let [gate, up] = [n.gate, n.up].map(|name| format!(".{name}."));
                checkpoint.changed(|_| {}, Some((&gate, &up)))
            }
        }
    }
}

/// Runs the built-in text through `checkpoint` and through changed ones that `open` makes runners of, with a
/// logit row for each of so many positions; then looks at the weights. `progress` is told what is done and of
/// how much.
///
/// # Errors
/// Damage of the files, and those of `open` and of the runs.
pub fn run(
    checkpoint: &Checkpoint,
    open: &mut dyn FnMut(&Checkpoint, usize) -> Result<Runner>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Told> {
    let config = checkpoint.config();
    let even = (config.vocab_size as f64).ln();
    let aligned = alignment::look(checkpoint)?;
    let mut told = Told { loss: None, even, trained: aligned.trained, runs: 0, findings: aligned.findings };
    let Some(samples) = Samples::of(checkpoint)? else {
        told.findings.extend(aligned.rotary);
        told.add("not-run", Severity::Note, text::TOKENIZER, "no tokenizer: no text was run".into());
        return Ok(told);
    };
    let (vocab, rows) = (config.vocab_size, samples.longest());
    let mut runner = open(checkpoint, rows)?;
    let loss = samples.loss(&mut runner, vocab, None)?;
    (told.loss, told.runs) = (Some(loss), 1);
    told.trained |= loss < LOST * even;
    if !told.trained {
        let message = format!("untrained: {loss:.3} nats a token, an even choice has {even:.3}");
        told.add("untrained", Severity::Note, checkpoint.name(), message);
        return Ok(told);
    }
    if loss > LOST * even {
        let message = format!(
            "trained, and yet {} nats a token on text that trained models know, above {:.3}; an even choice has {even:.3}",
            nats(loss),
            LOST * even
        );
        told.add("text-lost", Severity::Warning, checkpoint.name(), message);
        told.findings.extend(aligned.rotary);
    } else if aligned.scattered {
        let message =
            "the model predicts, and yet no two matrices of its layers go together as training leaves them";
        told.add("scattered", Severity::Warning, checkpoint.name(), message.into());
    }
    // A change that must gain 0.1 nats cannot where there are fewer to gain.
    if loss < GAIN.0 {
        return Ok(told);
    }
    let parts: Vec<Part> = (0..config.num_hidden_layers)
        .flat_map(|layer| [false, true].map(|mlp| Part { layer, mlp }))
        .collect();
    let changes = changes(config);
    let all = parts.len() + changes.len();
    let better = |other: f64| other < loss - GAIN.0 && other < loss * GAIN.1;
    for (done, part) in parts.into_iter().enumerate() {
        progress(done, all);
        let other = samples.loss(&mut runner, vocab, Some(part))?;
        told.runs += 1;
        if better(other) {
            let half = if part.mlp { "mlp" } else { "self_attn" };
            let subject = format!("model.layers.{}.{half}", part.layer);
            let message =
                format!("without it the text is predicted better: {other:.3} nats a token, not {loss:.3}");
            told.add("part-harms", Severity::Warning, &subject, message);
        }
    }
    drop(runner);
    for (done, change) in changes.iter().enumerate() {
        progress(all - changes.len() + done, all);
        let other = samples.loss(&mut open(&change.of(checkpoint), rows)?, vocab, None)?;
        told.runs += 1;
        if better(other) {
            let message = format!("{}: {other:.3} nats a token, not {loss:.3}", change.message);
            told.add(change.code, Severity::Warning, &change.subject, message);
        }
    }
    told.findings.sort_by_key(|f| f.severity);
    Ok(told)
}

fn nats(loss: f64) -> String {
    if loss < 1e4 { format!("{loss:.3}") } else { format!("{loss:.1e}") }
}

impl Told {
    fn add(&mut self, code: &'static str, severity: Severity, subject: &str, message: String) {
        self.findings.push(Finding { code, severity, tensor: subject.to_owned(), message });
    }
}
