//! One optimiser step: forward by blocks, chunked loss, backward by blocks, update.
//!
//! The gradient of a 4-bit layer is taken with respect to the decoded values and given to the master
//! unchanged. That is the straight-through estimator `w_q + (w - detach(w))` without its second copy of every
//! weight: the value is `w_q` and the derivative with respect to `w` is the identity.
use super::Tch;
use super::adapter::Adapter;
use super::executor::{LowRank, TorchCache, TorchExecutor, TorchLinear, TorchNorm, Weight};
use super::kernels::Kernels;
pub use super::laid::Rows;
use super::laid::{Laid, LaidTarget};
use super::loss;
use super::phases::Phases;
use super::ranks::Team;
use super::weights::{BLOCK, FIRST, Params, Role, Source};
use crate::guard::Norm;
use crate::optim::Hyper;
use q4_core::{Code, Error, Result};
use q4_model::arch::Activation;
use q4_model::executor::{Executor, Logits};
use q4_model::graph::Block;
use std::cell::RefCell;
use std::rc::Rc;
use tch::{Kind, Tensor};

mod ask;
mod shared;

use shared::{Bucket, OnTheWay};

/// Whose norm the clip limit is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClipScope {
    /// The whole gradient's; not with an update in the backward pass, which knows it too late.
    Global,
    /// That of the parameters that move together: a block.
    Block,
    /// The whole gradient's of the step before.
    Previous,
}

/// How a step is computed. Results differ only where it says so.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Blocks are computed again in the backward pass instead of being kept.
    pub recompute: bool,
    /// A block's parameters move as soon as its gradients are there, and these are dropped: with one
    /// micro-batch the gradients of one block live at a time. A gradient that is not finite stops the
    /// step at its block; blocks behind it have moved already, blocks before it stay.
    pub update_in_backward: bool,
    /// Largest gradient norm; 0 is off.
    pub clip: f64,
    /// Whose norm.
    pub clip_scope: ClipScope,
    /// Tokens whose logits exist at a time.
    pub chunk: usize,
    /// The decoded weights are kept from one step to the next, 2 or 4 bytes a weight, instead of being
    /// decoded on each use.
    pub keep_values: bool,
}

/// What a step did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Mean loss over the supervised tokens of all micro-batches.
    pub loss: f64,
    /// Supervised tokens.
    pub supervised: usize,
    /// Norm of the whole gradient before clipping.
    pub norm: f64,
    /// Nothing moved.
    pub skipped: bool,
}

/// How far a step has come with the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// All are as before.
    No,
    /// Some have moved.
    Partly,
    /// All have moved.
    Wholly,
}

/// A model in training.
pub struct Engine {
    /// Masters and states.
    pub params: Params,
    /// Optimiser and quantiser.
    pub kernels: Kernels,
    /// The ranks that share a step.
    pub team: Option<Rc<Team>>,
    ex: TorchExecutor,
    eps: f64,
    options: Options,
    seed: u64,
    /// Decoded values, where kept.
    values: Vec<Option<Tensor>>,
    /// Norm of the last step's gradient, for [`ClipScope::Previous`].
    pub last_norm: f64,
    /// What the step that is computed, or was, has moved.
    pub moved: Moved,
    /// Where the step that is computed, or was, stopped being finite first.
    pub culprit: Culprit,
}

/// A place that is found out inside a step and asked for by whoever judges it.
pub type Culprit = Rc<RefCell<Option<String>>>;

/// Gradients by parameter, waiting for the optimiser: that of the master, or those of an adapter's two parts.
type Gradients = Vec<[Option<Tensor>; 2]>;

/// A leaf of the graph, or its gradient: the parameter, and which part of it.
pub(super) type Leaf = (usize, usize, Tensor);

impl Engine {
    /// Everything needed for steps.
    pub fn new(
        params: Params,
        kernels: Kernels,
        ex: TorchExecutor,
        eps: f32,
        options: Options,
        seed: u64,
    ) -> Self {
        let values = params.all.iter().map(|_| None).collect();
        Self {
            params,
            kernels,
            team: None,
            ex,
            eps: f64::from(eps),
            options,
            seed,
            values,
            last_norm: 0.0,
            moved: Moved::No,
            culprit: Culprit::default(),
        }
    }

    /// The executor, for contexts.
    pub fn executor(&mut self) -> &mut TorchExecutor {
        &mut self.ex
    }

    /// Masters were changed from outside: values are decoded anew.
    pub fn forget_values(&mut self) {
        self.values.iter_mut().for_each(|v| *v = None);
    }

    /// One optimiser step over `micro`, whose losses are averaged over all their supervised tokens. `allow`
    /// sees the loss and the norm and may refuse; then nothing moves, unless blocks have already. Of a team
    /// every rank is given all of `micro`, of which it computes its own.
    pub fn step(
        &mut self,
        micro: &[Rows<'_>],
        hyper: &Hyper,
        allow: &mut dyn FnMut(f64, Norm) -> Result<bool>,
        phases: &mut Phases,
    ) -> Result<Report> {
        self.moved = Moved::No;
        self.culprit.take();
        let supervised: usize = micro.iter().map(|m| m.target.supervised()).sum();
        if supervised == 0 {
            return Err(Error::new(Code::ValueInvalid, "a step without a supervised token")
                .need("answers to learn from")
                .fix("longer rows (data.seq), or data whose answers fit"));
        }
        let (scale, of_last) = (1.0 / supervised as f64, Norm::OfLast(self.last_norm));
        let mut gradients: Gradients = self.params.all.iter().map(|_| [None, None]).collect();
        let mut report = Report { supervised, ..Report::default() };
        let mut squares = 0.0;
        let (team, culprit) = (self.team.clone(), self.culprit.clone());
        let (me, ranks) = team.as_ref().map_or((0, 1), |t| (t.rank(), t.size()));
        for (i, round) in micro.chunks(ranks).enumerate() {
            let fused = self.options.update_in_backward && (i + 1) * ranks >= micro.len();
            let learns: Vec<bool> = round.iter().map(|m| m.target.reaches_head()).collect();
            let mut sink = Sink {
                fused: fused.then_some(hyper),
                squares: &mut squares,
                gradients: &mut gradients,
                learns: &learns,
                way: OnTheWay::default(),
            };
            let before = report.loss;
            let mut judge = |loss: f64| {
                report.loss = match &team {
                    Some(team) => team.losses(before, loss, round.len(), &culprit)?,
                    None => before + loss,
                };
                if fused { allow(report.loss, of_last) } else { Ok(report.loss.is_finite()) }
            };
            let went = match round.get(me) {
                Some(rows) => self.micro(rows, scale, &mut sink, phases, &mut judge)?,
                None => self.idle(&mut sink, &mut judge)?,
            };
            if !went {
                report.skipped = true;
                if !fused {
                    // Whoever judges steps hears of a loss that is not finite, too.
                    allow(report.loss, of_last)?;
                }
                return Ok(report);
            }
        }
        if self.options.update_in_backward {
            report.norm = squares.sqrt();
            let allowed = allow(report.loss, Norm::Moved(report.norm))?;
            report.skipped = !(allowed && report.norm.is_finite());
            if !report.skipped {
                self.last_norm = report.norm;
                self.moved = Moved::Wholly;
            }
            phases.mark("optimizer_step_done")?;
            return Ok(report);
        }
        squares += self.squares_of(&gradients)?;
        report.norm = squares.sqrt();
        report.skipped = !allow(report.loss, Norm::Whole(report.norm))?;
        if !report.skipped {
            let whole =
                if self.options.clip_scope == ClipScope::Previous { self.last_norm } else { report.norm };
            self.last_norm = report.norm;
            let hyper = Hyper { grad_scale: self.clip(whole), ..*hyper };
            if let Some(team) = &team {
                self.update_shared(team, &mut gradients, &hyper)?;
            }
            for (i, grads) in gradients.iter_mut().enumerate() {
                for (part, grad) in grads.iter_mut().enumerate() {
                    if let Some(grad) = grad.take() {
                        self.update(i, part, &grad, &hyper)?;
                    }
                }
            }
            self.moved = Moved::Wholly;
        }
        phases.mark("optimizer_step_done")?;
        Ok(report)
    }

    /// Of everything; what is first not to be finite, in the order of the backward pass, is accused.
    fn squares_of(&self, gradients: &Gradients) -> Result<f64> {
        let all =
            || gradients.iter().enumerate().flat_map(|(i, g)| (0..2).map(move |part| (i, part, &g[part])));
        let there = all().filter_map(|(i, part, g)| Some((i, part, g.as_ref()?)));
        let Some(team) = &self.team else {
            let squares = self.kernels.sum_of_squares(there.map(|(.., g)| g))?;
            if !squares.is_finite() {
                let all = gradients.iter().enumerate().rev();
                self.accuse_gradient(all.flat_map(|(i, g)| g.iter().flatten().map(move |g| (i, g))))?;
            }
            return Ok(squares);
        };
        let sums = self.sums(team, self.shared_squares(team, there)?)?;
        self.accuse_first(sums.iter().rev());
        Ok(sums.iter().fold(0.0, |all, (_, sum)| all + sum))
    }

    fn clip(&self, norm: f64) -> f32 {
        if self.options.clip > 0.0 && norm > self.options.clip {
            (self.options.clip / norm) as f32
        } else {
            1.0
        }
    }

    /// False: refused. `allow` sees the loss, this micro-batch's share of the mean.
    fn micro(
        &mut self,
        rows: &Rows<'_>,
        scale: f64,
        sink: &mut Sink<'_>,
        phases: &mut Phases,
        allow: &mut dyn FnMut(f64) -> Result<bool>,
    ) -> Result<bool> {
        let laid = Laid::of(rows)?;
        let mut cache = self.ex.batch(&laid.groups, &laid.positions)?;
        phases.mark("batch_ready")?;
        let table = self.leaf(0)?;
        let mut kept = Vec::with_capacity(self.params.layers());
        let mut x = tch::no_grad(|| self.embed(&table, &laid.ids))?;
        for i in 0..self.params.layers() {
            let input = x.f_detach().t()?;
            if self.options.recompute {
                x = tch::no_grad(|| self.block(i, &input, &mut cache)).map(|(y, _)| y)?;
                kept.push((input, None));
            } else {
                let input = input.f_set_requires_grad(true).t()?;
                let (y, leaves) = self.block(i, &input, &mut cache)?;
                x = y.f_detach().t()?;
                kept.push((input, Some((y, leaves))));
            }
        }
        phases.mark("forward_done")?;

        let norm = TorchNorm { weight: self.leaf(self.params.norm())?, eps: self.eps };
        let head_index = self.params.head();
        let head = match &self.params.all[head_index].source {
            _ if head_index == 0 => Weight::Dense(table.shallow_clone()),
            Source::Frozen(weight, _) => weight.share(),
            _ => Weight::Dense(self.leaf(head_index)?),
        };
        let head_leaf = match &head {
            Weight::Dense(values) => values.shallow_clone(),
            Weight::Packed(_) => Tensor::new(),
        };
        let out = match &laid.target {
            LaidTarget::Tokens(targets) => {
                let ex = &mut self.ex;
                let mut logits = |x: &Tensor| {
                    let (mut scratch, mut out) = (Tensor::new(), Tensor::new());
                    ex.head(x, &norm, &head, Logits::All, &mut scratch, &mut out)?;
                    Ok(out)
                };
                loss::cross_entropy(
                    &x,
                    targets,
                    scale,
                    self.options.chunk,
                    &[&norm.weight, &head_leaf],
                    &mut logits,
                )?
            }
            LaidTarget::Hidden(wanted) => loss::l1(&x, wanted, scale)?,
        };
        let loss = out.loss;
        phases.mark("loss_done")?;
        if !loss.is_finite() {
            self.accuse_layer(kept.iter().map(|(input, _)| input).chain([&x]))?;
        }
        if !allow(loss)? {
            return Ok(false);
        }
        let [norm_grad, mut table_grad] = out.weights;
        let one = |index, g: Option<Tensor>| g.map(|g| (index, 0, g)).into_iter().collect();
        self.settle(Bucket::Norm, one(self.params.norm(), norm_grad), sink)?;
        if head_index != 0 {
            self.settle(Bucket::Head, one(head_index, table_grad.take()), sink)?;
        }
        let mut gradient = out.input;
        drop(x);
        for i in (0..self.params.layers()).rev() {
            let Some((input, made)) = kept.pop() else { break };
            let (input, (y, leaves)) = match made {
                Some(made) => (input, made),
                None => {
                    let input = input.f_set_requires_grad(true).t()?;
                    let made = self.block(i, &input, &mut cache)?;
                    (input, made)
                }
            };
            let seed = y.f_mul(&gradient).t()?.f_sum(Kind::Float).t()?;
            let mut inputs = vec![input];
            inputs.extend(leaves.iter().map(|(.., leaf)| leaf.shallow_clone()));
            let mut grads = Tensor::f_run_backward(&[seed], &inputs, false, false).t()?;
            drop((y, inputs));
            gradient = grads.remove(0);
            let block = leaves.into_iter().zip(grads).map(|((i, part, _), g)| (i, part, g)).collect();
            if !self.settle(Bucket::Block(i), block, sink)? {
                return Ok(false);
            }
        }
        if matches!(self.params.all[0].source, Source::Trained(_)) {
            let embedded = self.embed(&table, &laid.ids)?;
            let seed = embedded.f_mul(&gradient).t()?.f_sum(Kind::Float).t()?;
            let mut grads = Tensor::f_run_backward(&[seed], &[&table], false, false).t()?;
            let own = grads.remove(0);
            let whole = match table_grad {
                Some(mut g) => g.f_add_(&own).t()?,
                None => own,
            };
            self.settle(Bucket::Table, vec![(0, 0, whole)], sink)?;
        }
        let went = self.take_all(sink)?;
        phases.mark("backward_done")?;
        Ok(went)
    }

    /// Takes gradients: updates at once, or adds them to what waits. False: not finite, nothing of these
    /// moved.
    fn settle(&mut self, bucket: Bucket, grads: Vec<Leaf>, sink: &mut Sink<'_>) -> Result<bool> {
        let mut parts = Vec::with_capacity(grads.len());
        for (i, part, g) in grads {
            match &self.params.all[i].source {
                Source::Adapted(_, adapter) => {
                    let (a, b) = adapter.gradients(&g)?;
                    parts.extend([(i, 0, a), (i, 1, b)]);
                }
                Source::Frozen(_, Some(adapter)) if part == 1 => parts.push((i, part, adapter.masked(g)?)),
                _ => parts.push((i, part, g)),
            }
        }
        if self.team.is_some() {
            return self.give(bucket, parts, sink);
        }
        for (i, part, g) in &mut parts {
            if let Some(sum) = sink.gradients[*i][*part].take() {
                // Sums of several micro-batches are kept in f32, whatever the type of the parts.
                *g = sum.f_to_kind(Kind::Float).t()?.f_add_(g).t()?;
            }
        }
        let Some(hyper) = sink.fused else {
            for (i, part, g) in parts {
                sink.gradients[i][part] = Some(g);
            }
            return Ok(true);
        };
        let squares = self.kernels.sum_of_squares(parts.iter().map(|(.., g)| g))?;
        *sink.squares += squares;
        if !squares.is_finite() {
            self.accuse_gradient(parts.iter().map(|(i, _, g)| (*i, g)))?;
            return Ok(false);
        }
        let hyper = Hyper { grad_scale: self.clip_of(squares.sqrt()), ..*hyper };
        for (i, part, g) in &parts {
            self.update(*i, *part, g, &hyper)?;
        }
        Ok(true)
    }

    /// By the limit for what moves together, whose norm is `own`.
    pub(super) fn clip_of(&self, own: f64) -> f32 {
        self.clip(if self.options.clip_scope == ClipScope::Previous { self.last_norm } else { own })
    }

    /// Names the first gradient that is not finite.
    fn accuse_gradient<'a>(&self, gradients: impl Iterator<Item = (usize, &'a Tensor)>) -> Result<()> {
        for (i, gradient) in gradients {
            if !is_finite(gradient)? {
                self.accuse(i);
                break;
            }
        }
        Ok(())
    }

    /// The same, where only the sums of their squares are here.
    pub(super) fn accuse_first<'a>(&self, mut sums: impl Iterator<Item = &'a (usize, f64)>) {
        if let Some((i, _)) = sums.find(|(_, sum)| !sum.is_finite()) {
            self.accuse(*i);
        }
    }

    fn accuse(&self, index: usize) {
        let modules: Vec<_> = self.params.all[index].parts.iter().map(|(m, _)| m.as_str()).collect();
        *self.culprit.borrow_mut() = Some(format!("the gradient of {}", modules.join(", ")));
    }

    /// Names what made the first of the streams that is not finite: those before each layer, and behind the
    /// last.
    fn accuse_layer<'a>(&self, mut streams: impl Iterator<Item = &'a Tensor>) -> Result<()> {
        let first = streams.by_ref().map(is_finite).position(|finite| !matches!(finite, Ok(true)));
        let (what, modules) = match first {
            Some(0) => ("the embeddings".to_owned(), 0..FIRST),
            Some(i) => {
                (format!("the output of layer {}", i - 1), self.params.block(i - 1)..self.params.block(i))
            }
            None => ("the logits".to_owned(), self.params.norm()..self.params.all.len()),
        };
        let mut broken = None;
        for i in modules {
            if broken.is_none() && !is_finite(&self.params.value(i, &self.kernels)?)? {
                broken = self.params.all[i].parts.first().map(|(module, _)| module.as_str());
            }
        }
        let weight =
            broken.map_or_else(String::new, |module| format!(", whose weight {module} is not finite"));
        *self.culprit.borrow_mut() = Some(what + &weight);
        Ok(())
    }

    pub(super) fn update(&mut self, index: usize, part: usize, grad: &Tensor, hyper: &Hyper) -> Result<()> {
        let Some(moved) = self.params.all[index].source.trained(part) else { return Ok(()) };
        self.moved = Moved::Partly;
        self.kernels.adamw(hyper, moved, grad, self.seed)?;
        self.values[index] = None;
        Ok(())
    }

    /// The value of a parameter as a leaf of the graph; one that does not move takes no gradient.
    fn leaf(&mut self, index: usize) -> Result<Tensor> {
        let value = self.value(index)?;
        let moves = !matches!(self.params.all[index].source, Source::Fixed(_));
        value.f_detach().t()?.f_set_requires_grad(moves).t()
    }

    /// A product of the graph; what of it moves is added to `moving`.
    fn linear(&mut self, index: usize, moving: &mut Vec<Leaf>) -> Result<TorchLinear> {
        let Source::Frozen(weight, adapter) = &self.params.all[index].source else {
            let value = self.leaf(index)?;
            if value.requires_grad() {
                moving.push((index, 0, value.shallow_clone()));
            }
            return Ok(TorchLinear { weight: Weight::Dense(value), adapter: None });
        };
        let compute = self.kernels.compute();
        let leaf = |master: &Tensor| -> Result<Tensor> {
            master.f_to_kind(compute).t()?.f_detach().t()?.f_set_requires_grad(true).t()
        };
        let low_rank = |adapter: &Adapter| -> Result<LowRank> {
            Ok(LowRank { a: leaf(&adapter.a.master)?, b: leaf(&adapter.b.master)?, scale: adapter.scale })
        };
        let adapter = adapter.as_ref().map(low_rank).transpose()?;
        if let Some(LowRank { a, b, .. }) = &adapter {
            moving.extend([(index, 0, a.shallow_clone()), (index, 1, b.shallow_clone())]);
        }
        Ok(TorchLinear { weight: weight.share(), adapter })
    }

    /// A norm of the graph; as [`linear`](Self::linear).
    fn norm(&mut self, index: usize, moving: &mut Vec<Leaf>) -> Result<TorchNorm> {
        let weight = self.leaf(index)?;
        if weight.requires_grad() {
            moving.push((index, 0, weight.shallow_clone()));
        }
        Ok(TorchNorm { weight, eps: self.eps })
    }

    fn value(&mut self, index: usize) -> Result<Tensor> {
        if let Some(kept) = &self.values[index] {
            return Ok(kept.shallow_clone());
        }
        let value = tch::no_grad(|| self.params.value(index, &self.kernels))?;
        if self.options.keep_values {
            self.values[index] = Some(value.shallow_clone());
        }
        Ok(value)
    }

    fn embed(&mut self, table: &Tensor, ids: &[u32]) -> Result<Tensor> {
        let mut out = Tensor::new();
        self.ex.embed(table, ids, &mut out)?;
        Ok(out)
    }

    /// Block `i` through the model's graph: the new residual stream, and the leaves that move with their
    /// parameters.
    fn block(&mut self, i: usize, x: &Tensor, cache: &mut TorchCache) -> Result<(Tensor, Vec<Leaf>)> {
        let first = self.params.block(i);
        let mut moving = Vec::with_capacity(BLOCK);
        let block: Block<TorchExecutor> = Block {
            input_norm: Some(self.norm(first, &mut moving)?),
            qkv: self.linear(first + 1, &mut moving)?,
            head_norms: Some([self.norm(first + 2, &mut moving)?, self.norm(first + 3, &mut moving)?]),
            o: self.linear(first + 4, &mut moving)?,
            attention_norm: None,
            post_norm: Some(self.norm(first + 5, &mut moving)?),
            gate_up: self.linear(first + 6, &mut moving)?,
            activation: Activation::Silu,
            down: self.linear(first + 7, &mut moving)?,
            mlp_norm: None,
        };
        let mut slots = TorchExecutor::slots();
        slots.hidden = x.shallow_clone();
        block.forward(&mut self.ex, i, cache, &mut slots)?;
        Ok((slots.hidden, moving))
    }

    /// Linear layers among the parameters, by index.
    pub fn linears(&self) -> impl Iterator<Item = usize> {
        self.params.all.iter().enumerate().filter(|(_, p)| p.role == Role::Linear).map(|(i, _)| i)
    }
}

fn is_finite(t: &Tensor) -> Result<bool> {
    // Zero times what is finite is zero, and anything else is not.
    let rest = t.f_mul_scalar(0.0).t()?.f_sum(Kind::Float).t()?;
    Ok(rest.f_double_value(&[]).t()? == 0.0)
}

/// Where the gradients of a round of micro-batches, one a rank, go.
struct Sink<'a> {
    /// Update at once, with these.
    fused: Option<&'a Hyper>,
    squares: &'a mut f64,
    gradients: &'a mut Gradients,
    /// Whose micro-batch of this round has a gradient for the last norm and the head.
    learns: &'a [bool],
    /// Between ranks.
    way: OnTheWay,
}
