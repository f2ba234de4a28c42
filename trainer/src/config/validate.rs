//! What types cannot say about a configuration.
use super::*;
use crate::adapters::TARGETS;

const LAYOUTS: [&str; 6] = ["auto", "bf16", "modelopt", "compressed-tensors", "dat", "peft"];

impl Config {
    pub(super) fn validate(&self, p: &mut Problems) {
        self.sizes(p);
        self.rates(p);
        self.combinations(p);
    }

    fn sizes(&self, p: &mut Problems) {
        let mut size = |field: &str, value: u64, least: u64, most: u64| {
            if !(least..=most).contains(&value) {
                p.add(field, format_args!("a whole number from {least} to {most}"), value);
            }
        };
        size("data.seq", self.data.seq as u64, 2, 1 << 20);
        size("data.rows", self.data.rows as u64, 1, 1 << 16);
        size("train.steps", self.train.steps, 1, 1 << 40);
        size("train.accumulate", self.train.accumulate as u64, 1, 1 << 16);
        size("train.chunk", self.train.chunk as u64, 1, 1 << 24);
        size("train.log_every", self.train.log_every, 1, 1 << 40);
        size("guard.patience", self.guard.patience.into(), 1, 1 << 20);
        size("guard.window", self.guard.window as u64, 2, 1 << 20);
        size("checkpoint.keep", self.checkpoint.keep as u64, 1, 1 << 20);
        size("eval.rows", self.eval.rows as u64, 0, 1 << 16);
        size("eval.seq", self.eval.seq as u64, 0, 1 << 20);
        size("sample.tokens", self.sample.tokens as u64, 1, 1 << 20);
        size("behaviour.tokens", self.behaviour.tokens as u64, 1, 1 << 20);
        if let Some(lora) = &self.lora {
            size("lora.rank", lora.rank as u64, 1, 4096);
        }
    }

    fn rates(&self, p: &mut Problems) {
        let mut number = |field: &str, value: f64, need: &str, ok: bool| {
            if !ok || !value.is_finite() {
                p.add(field, need, value);
            }
        };
        let o = &self.optimizer;
        number("optimizer.lr", o.lr, "a number above 0, at most 1", o.lr > 0.0 && o.lr <= 1.0);
        for (field, beta) in [("optimizer.beta1", o.beta1), ("optimizer.beta2", o.beta2)] {
            number(
                field,
                beta,
                "a number from 0, below 1",
                (0.0..1.0).contains(&beta) && (beta as f32) < 1.0,
            );
        }
        number("optimizer.eps", o.eps, "a number from 1e-30 to 1", (1e-30..=1.0).contains(&o.eps));
        let decays = [
            ("optimizer.weight_decay", o.weight_decay),
            ("optimizer.norm_decay", o.norm_decay),
            ("optimizer.embedding_decay", o.embedding_decay),
        ];
        for (field, decay) in decays {
            number(field, decay, "a number from 0 to 10", (0.0..=10.0).contains(&decay));
        }
        let s = &self.schedule;
        number("schedule.min_ratio", s.min_ratio, "a number from 0 to 1", (0.0..=1.0).contains(&s.min_ratio));
        number("schedule.decay", s.decay, "a number from 0 to 1", (0.0..=1.0).contains(&s.decay));
        number("train.clip", self.train.clip, "a number from 0", self.train.clip >= 0.0);
        number("guard.spike", self.guard.spike, "a number from 0", self.guard.spike >= 0.0);
        if let Some(epochs) = self.train.epochs {
            number("train.epochs", epochs, "a number above 0, at most 1e6", epochs > 0.0 && epochs <= 1e6);
        }
        for weight in &self.data.train.weights {
            number("data.train", *weight, "weights above 0, at most 1e9", *weight > 0.0 && *weight <= 1e9);
        }
        if let Some(lora) = &self.lora {
            number("lora.alpha", lora.alpha, "a number above 0", lora.alpha > 0.0);
        }
        for (group, rate) in &self.behaviour.gates {
            number(
                &format!("behaviour.gates.{group}"),
                *rate,
                "a number from 0 to 1",
                (0.0..=1.0).contains(rate),
            );
        }
        if let Some(limit) = &self.memory.limit
            && memory::parse_bytes(limit).is_err()
        {
            p.add("memory.limit", "a number and a unit, e.g. 24GiB", limit);
        }
    }

    /// Whether nothing is there to learn from.
    pub fn learns_nothing(&self) -> bool {
        self.train.loss == Loss::Ce && self.data.train.is_empty() && self.model.shape.is_none()
    }

    fn combinations(&self, p: &mut Problems) {
        // Held-out data alone can be judged by.
        if self.learns_nothing() && self.data.valid.is_empty() {
            p.add("data.train", "at least one file", "none");
        }
        if self.train.epochs.is_none() && self.schedule.warmup > self.train.steps {
            let need = format_args!("at most train.steps ({})", self.train.steps);
            p.add("schedule.warmup", need, self.schedule.warmup);
        }
        if self.train.epochs.is_some() && self.model.shape.is_some() {
            p.add("train.epochs", "train.steps, because model.shape has no data", "epochs");
        }
        if self.train.update_in_backward {
            let need = "another value, because train.update_in_backward drops gradients as they come";
            if self.train.accumulate > 1 {
                p.add("train.accumulate", need, self.train.accumulate);
            }
            if self.train.clip > 0.0 && self.train.clip_scope == ClipScope::Global {
                p.add(
                    "train.clip_scope",
                    "block or previous, because train.update_in_backward is set",
                    "global",
                );
            }
            if self.lora.is_some() {
                p.add("lora", "no adapters together with train.update_in_backward", "some");
            }
        }
        if self.model.shape.is_some() && self.model.init == Init::Checkpoint {
            p.add("model.init", "random, because model.shape has no files", "checkpoint");
        }
        if self.checkpoint.resume && self.checkpoint.dir.is_none() {
            p.add("checkpoint.dir", "a directory to resume from", "none");
        }
        self.choices(p);
        if !self.behaviour.gates.is_empty() && self.behaviour.suite.is_none() {
            p.add("behaviour.suite", "a file, because there are gates", "none");
        }
        let device = self.model.device.as_str();
        let numbered = device.strip_prefix("cuda:").is_some_and(|n| n.parse::<u16>().is_ok());
        if !matches!(device, "auto" | "cpu" | "cuda") && !numbered {
            p.add("model.device", "auto, cpu, cuda or cuda:N", device);
        }
        self.moving(p);
        let layouts = &self.export.layouts;
        for layout in layouts.iter().filter(|l| !LAYOUTS.contains(&l.as_str())) {
            p.add("export.layouts", LAYOUTS.join(", "), layout);
        }
        if layouts.is_empty() {
            p.add("export.layouts", format_args!("at least one of {}", LAYOUTS.join(", ")), "none");
        }
        let forms = self.lora.as_ref().map(|l| l.base);
        if layouts.iter().any(|l| l == PEFT) && !forms.is_some_and(|f| f != BaseForm::Merged) {
            p.add("export.layouts", "adapters beside a packed or decoded base, because of `peft`", "none");
        }
        if layouts.len() > 1 && layouts.iter().any(|l| l == "auto") {
            p.add("export.layouts", "`auto` alone, or names", layouts.join(", "));
        }
        if let Err(e) = q4_core::Overrides::parse(&self.quant.backend) {
            p.add("quant.backend", "names of backends, or LAYER_GLOB=NAME", e.to_string());
        }
        if let Some(twice) = layouts.iter().enumerate().find(|(i, l)| layouts[..*i].contains(l)) {
            p.add("export.layouts", "each once", format_args!("`{}` twice", twice.1));
        }
    }

    /// What moves of a model.
    fn moving(&self, p: &mut Problems) {
        let Some(lora) = &self.lora else { return };
        if !self.train.freeze.is_empty() {
            p.add("train.freeze", "lora.targets, because adapters alone move", "train.freeze beside [lora]");
        }
        for target in lora.targets.iter().filter(|t| !TARGETS.contains(&t.as_str())) {
            p.add("lora.targets", format_args!("any of {}", TARGETS.join(", ")), format_args!("{target:?}"));
        }
    }

    /// What ends a run early or is exported needs evaluations, and somewhere to keep the best step.
    fn choices(&self, p: &mut Problems) {
        let early = self.eval.patience > 0;
        let best = self.export.step == Pick::Best;
        for (field, wanted) in [("eval.patience", early), ("export.step = \"best\"", best)] {
            if wanted && self.data.valid.is_empty() {
                p.add("data.valid", format_args!("held-out files, because of {field}"), "none");
            }
            if wanted && self.eval.every == 0 {
                p.add("eval.every", format_args!("a number of steps, because of {field}"), 0);
            }
        }
        let kept = self.checkpoint.dir.is_some() && self.checkpoint.keep_best;
        let exports_best = self.export.dir.is_some() && (best || early && self.export.step == Pick::Auto);
        if exports_best && !kept {
            p.add(
                "checkpoint.dir",
                "a folder that keeps the best step (and checkpoint.keep_best), or export.step = \"last\"",
                if self.checkpoint.dir.is_some() { "checkpoint.keep_best = false" } else { "none" },
            );
        }
    }
}
