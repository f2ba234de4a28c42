//! One step of a run: its batches to the engine, and what the guard says of it.
use super::super::Tch;
use super::super::engine::Report;
use super::Run;
use super::source::rows;
use crate::config::Loss;
use crate::data::Batch;
use crate::guard::{Norm, Verdict};
use crate::optim::Hyper;
use crate::rng::{Philox, streams};
use q4_core::{Code, Error, Result};
use tch::Tensor;

impl Run<'_> {
    /// One optimiser step.
    pub(super) fn one(&mut self, micro: &[Batch], lr: f64) -> Result<Report> {
        let o = &self.c.optimizer;
        let hyper = Hyper {
            lr: lr as f32,
            beta1: o.beta1 as f32,
            beta2: o.beta2 as f32,
            eps: o.eps as f32,
            weight_decay: 0.0,
            step: self.step + 1,
            grad_scale: 1.0,
        };
        let ids: Vec<Vec<u32>> = micro.iter().map(|b| b.ids.iter().map(|id| *id as u32).collect()).collect();
        let wanted: Vec<Option<Tensor>> = micro.iter().map(|b| self.wanted(b)).collect::<Result<_>>()?;
        if self.c.train.loss == Loss::Ce && micro.iter().all(|b| b.supervised == 0) {
            (self.cx.warn)(&format!("step {} is skipped: no token of its rows is to be learnt", self.step));
            self.guard.pass_over();
            return Ok(Report { skipped: true, ..Report::default() });
        }
        let rows: Vec<_> =
            micro.iter().zip(&ids).zip(&wanted).map(|((b, ids), w)| rows(b, ids, w.as_ref())).collect();
        let team = self.team.clone();
        let (guard, good, culprit) = (&mut self.guard, &self.good, self.engine.culprit.clone());
        let place = || culprit.borrow().as_ref().map_or_else(String::new, |c| format!("; first in {c}"));
        let say = self.cx.warn;
        let (step, patience) = (self.step, self.c.guard.patience);
        let mut allow = |loss: f64, norm: Norm| match guard.judge(loss, norm) {
            Verdict::Go => Ok(true),
            Verdict::Skip(reason) => {
                say(&format!("step {step} is skipped: {reason}{}", place()));
                Ok(false)
            }
            Verdict::Stop(reason) => {
                let (last, fix) = match good {
                    Some((step, path)) => (
                        format!("the last good checkpoint is of step {step}, {}", path.display()),
                        "--resume with a smaller optimizer.lr; checkpoints behind the good one set aside",
                    ),
                    None => (
                        "there is no good checkpoint".to_owned(),
                        "begin again with a smaller optimizer.lr, and checkpoint.every",
                    ),
                };
                let e = Error::new(Code::NonFinite, format!("step {step}: {reason}{}", place()))
                    .need(format!("fewer than {patience} bad steps in a row (guard.patience)"))
                    .have(last)
                    .fix(fix);
                Err(match &team {
                    Some(team) => team.agree(e),
                    None => e,
                })
            }
        };
        let report = self.engine.step(&rows, &hyper, &mut allow, &mut self.phases)?;
        if !report.skipped {
            self.good = self.saved.as_ref().map(|(step, _, path)| (*step, path.clone()));
        }
        Ok(report)
    }

    /// Hidden states to match, for the scalar loss: noise that is a function of the seed.
    fn wanted(&self, batch: &Batch) -> Result<Option<Tensor>> {
        if self.c.train.loss == Loss::Ce {
            return Ok(None);
        }
        let hidden = self.base.config.hidden_size;
        let rng = Philox::new(self.c.train.seed, 0, streams::SAMPLE);
        let mut values = vec![0f32; batch.ids.len() * hidden];
        self.engine.kernels.fill(&mut values, &|i| rng.normal(i));
        let shape = [batch.ids.len() as i64, hidden as i64];
        Tensor::f_from_slice(&values).t()?.f_view(shape).t()?.f_to_device(self.device).t().map(Some)
    }
}
