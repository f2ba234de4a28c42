//! A step that is shared by ranks: gradients go to whoever moves their elements, are summed there in the
//! order of micro-batches, and the moved masters come back to all.
//!
//! Micro-batch `k * ranks + r` of a step is rank r's in round k, and sums run over rounds and within one over
//! ranks. So every element is summed as one rank sums it over all micro-batches, and has the same bits.
use super::super::Tch;
use super::super::ranks::{Pending, Team};
use super::super::trained::Trained;
use super::super::weights::{BLOCK, bytes};
use super::{Culprit, Engine, Moved, Sink};
use crate::optim::{Hyper, Share};
use q4_core::{Code, Error, Result};
use std::rc::Rc;
use tch::{Kind, Tensor};

/// Parameters whose gradients exist together, in the order of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bucket {
    /// The last norm.
    Norm,
    /// A head of its own.
    Head,
    /// A layer.
    Block(usize),
    /// The embeddings.
    Table,
}

/// A bucket that is on its way.
pub(super) struct Waiting {
    bucket: Bucket,
    pending: Pending,
    /// Ranks whose micro-batch has a gradient for it.
    from: Vec<usize>,
}

impl Team {
    /// The sum of the losses of a round behind `before`, in the order of micro-batches, up to the first that
    /// is not finite; what that rank knows of it is everybody's.
    pub(super) fn losses(&self, before: f64, mine: f64, present: usize, culprit: &Culprit) -> Result<f64> {
        let mut sum = before;
        let losses = self.gather_numbers(&[mine])?;
        for (rank, loss) in losses.iter().take(present).enumerate() {
            sum += loss.first().copied().unwrap_or(f64::NAN);
            if !sum.is_finite() {
                let known = culprit.borrow().clone().unwrap_or_default();
                let all = self.gather_any(known.as_bytes())?;
                let text = String::from_utf8_lossy(&all[rank]).into_owned();
                *culprit.borrow_mut() = (!text.is_empty()).then_some(text);
                break;
            }
        }
        Ok(sum)
    }
}

impl Engine {
    /// The parameters of a bucket that move, and their parts.
    fn moving(&self, bucket: Bucket) -> Vec<(usize, usize)> {
        let p = &self.params;
        let indices = match bucket {
            Bucket::Norm => p.norm()..p.norm() + 1,
            Bucket::Head if p.head() == 0 => 0..0,
            Bucket::Head => p.head()..p.head() + 1,
            Bucket::Block(i) => p.block(i)..p.block(i) + BLOCK,
            Bucket::Table => 0..1,
        };
        let parts = |i: usize| (0..2).filter(move |part| p.all[i].source.trained(*part).is_some());
        indices.flat_map(|i| parts(i).map(move |part| (i, part))).collect()
    }

    fn trained(&self, (index, part): (usize, usize)) -> Result<&Trained> {
        let found = self.params.all[index].source.trained(part);
        found.ok_or_else(|| Error::new(Code::Internal, "a gradient of what does not move"))
    }

    fn buckets(&self) -> impl Iterator<Item = Bucket> + use<> {
        let blocks = (0..self.params.layers()).rev().map(Bucket::Block);
        [Bucket::Norm, Bucket::Head].into_iter().chain(blocks).chain([Bucket::Table])
    }

    /// A rank without a micro-batch in the last round does what the others wait for.
    pub(super) fn idle(
        &mut self,
        sink: &mut Sink<'_>,
        judge: &mut dyn FnMut(f64) -> Result<bool>,
    ) -> Result<bool> {
        if !judge(0.0)? {
            return Ok(false);
        }
        for bucket in self.buckets() {
            if !self.give(bucket, Vec::new(), sink)? {
                return Ok(false);
            }
        }
        self.take_in(sink)
    }

    /// Sends gradients to the ranks that sum them, and takes in those that were sent before: while a block's
    /// travel, those of the next are computed. False: as of [`Engine::settle`].
    pub(super) fn give(
        &mut self,
        bucket: Bucket,
        grads: Vec<(usize, usize, Tensor)>,
        sink: &mut Sink<'_>,
    ) -> Result<bool> {
        let Some(team) = self.team.clone() else { return Ok(true) };
        let moving = self.moving(bucket);
        let has = |learns: &bool| *learns || matches!(bucket, Bucket::Block(_) | Bucket::Table);
        let from: Vec<usize> = (0..sink.learns.len()).filter(|r| has(&sink.learns[*r])).collect();
        if moving.is_empty() || from.is_empty() {
            return Ok(true);
        }
        let (me, size) = (team.rank(), team.size());
        let gives = from.contains(&me);
        let keys: Vec<_> = grads.iter().map(|(i, part, _)| (*i, *part)).collect();
        if gives && keys != moving || !gives && !keys.is_empty() {
            return Err(Error::new(Code::Internal, format!("gradients of {bucket:?}"))
                .need(format!("{moving:?}"))
                .have(format!("{keys:?}")));
        }
        let lens: Vec<usize> =
            moving.iter().map(|at| Ok(self.trained(*at)?.whole.len())).collect::<Result<_>>()?;
        let own = |rank: usize| lens.iter().map(move |len| Share { rank, of: size }.range(*len));
        let mut give = vec![0; size];
        let mut pieces = Vec::new();
        if gives {
            let flat: Vec<Tensor> = grads
                .iter()
                .map(|(.., g)| g.f_to_kind(Kind::Float).t()?.f_contiguous().t()?.f_view([-1]).t())
                .collect::<Result<_>>()?;
            for (rank, count) in give.iter_mut().enumerate() {
                for (g, range) in flat.iter().zip(own(rank)) {
                    *count += range.len();
                    pieces.push(g.f_narrow(0, range.start as i64, range.len() as i64).t()?);
                }
            }
        }
        let send = match pieces.is_empty() {
            true => Tensor::f_empty([0], (Kind::Float, self.kernels.device())).t()?,
            false => Tensor::f_cat(&pieces, 0).t()?,
        };
        drop((pieces, grads));
        let mine: usize = own(me).map(|range| range.len()).sum();
        let take: Vec<usize> = (0..size).map(|r| if from.contains(&r) { mine } else { 0 }).collect();
        let pending = team.all_to_all(send, &give, &take)?;
        let went = self.take_in(sink)?;
        sink.waiting = Some(Waiting { bucket, pending, from });
        Ok(went)
    }

    /// Adds what has arrived to what waits, and moves it where blocks move in the backward pass.
    pub(super) fn take_in(&mut self, sink: &mut Sink<'_>) -> Result<bool> {
        let (Some(team), Some(Waiting { bucket, pending, from })) = (self.team.clone(), sink.waiting.take())
        else {
            return Ok(true);
        };
        let moving = self.moving(bucket);
        let arrived = team.arrived(pending)?;
        let mut at = 0;
        for _ in from {
            for (i, part) in &moving {
                let len = self.trained((*i, *part))?.own.len() as i64;
                let piece = arrived.f_narrow(0, at, len).t()?;
                at += len;
                let sum = &mut sink.gradients[*i][*part];
                *sum = Some(match sum.take() {
                    // Not a view: that would keep what all ranks have sent.
                    None => {
                        let mut own = piece.f_empty_like().t()?;
                        own.f_copy_(&piece).t()?;
                        own
                    }
                    Some(mut sum) => sum.f_add_(&piece).t()?,
                });
            }
        }
        drop(arrived);
        let Some(hyper) = sink.fused else { return Ok(true) };
        let mut grads = Vec::with_capacity(moving.len());
        for (i, part) in &moving {
            grads.extend(sink.gradients[*i][*part].take().map(|g| (*i, *part, g)));
        }
        let sums = self.shared_squares(&team, grads.iter().map(|(i, part, g)| (*i, *part, g)))?;
        let squares: f64 = sums.iter().fold(0.0, |all, (_, sum)| all + sum);
        *sink.squares += squares;
        if !squares.is_finite() {
            self.accuse_first(sums.iter());
            return Ok(!matches!(bucket, Bucket::Block(_)));
        }
        let hyper = Hyper { grad_scale: self.clip_of(squares.sqrt()), ..*hyper };
        for (i, part, g) in &grads {
            self.update(*i, *part, g, &hyper)?;
        }
        self.spread(&team, &moving)?;
        Ok(true)
    }

    /// The sums of squares of whole gradients, out of every rank's part, in the order of their tiles.
    pub(super) fn shared_squares<'a>(
        &self,
        team: &Rc<Team>,
        grads: impl Iterator<Item = (usize, usize, &'a Tensor)>,
    ) -> Result<Vec<(usize, f64)>> {
        let (mut mine, mut of) = (Vec::new(), Vec::new());
        for (i, part, g) in grads {
            let own = self.kernels.squares(g)?;
            mine.extend(if g.numel() == 0 { Vec::new() } else { own });
            of.push((i, self.trained((i, part))?.whole.len()));
        }
        let count = |rank, len| {
            let elements = Share { rank, of: team.size() }.range(len).len();
            if elements == 0 { 0 } else { self.kernels.summands(elements) }
        };
        let longest = (0..team.size()).map(|r| of.iter().map(|(_, len)| count(r, *len)).sum()).max();
        mine.resize(longest.unwrap_or(0), 0.0);
        let all = team.gather_numbers(&mine)?;
        let mut at = vec![0; team.size()];
        let mut sums = Vec::with_capacity(of.len());
        for (i, len) in of {
            let mut tiles = Vec::new();
            for (rank, at) in at.iter_mut().enumerate() {
                let n = count(rank, len);
                tiles.extend_from_slice(&all[rank][*at..*at + n]);
                *at += n;
            }
            sums.push((i, tiles.iter().sum::<f64>()));
        }
        Ok(sums)
    }

    /// Moves everything that has gradients, and gives every rank all masters.
    pub(super) fn update_shared(
        &mut self,
        team: &Rc<Team>,
        gradients: &mut [[Option<Tensor>; 2]],
        hyper: &Hyper,
    ) -> Result<()> {
        for bucket in self.buckets() {
            let mut moved = Vec::new();
            for (i, part) in self.moving(bucket) {
                if let Some(grad) = gradients[i][part].take() {
                    self.update(i, part, &grad, hyper)?;
                    moved.push((i, part));
                }
            }
            self.spread(team, &moved)?;
        }
        self.moved = Moved::Wholly;
        Ok(())
    }

    /// Every rank's masters of these become everybody's.
    fn spread(&self, team: &Rc<Team>, moved: &[(usize, usize)]) -> Result<()> {
        let all: Vec<&Trained> = moved.iter().map(|at| self.trained(*at)).collect::<Result<_>>()?;
        let ranges = |rank: usize| {
            let share = Share { rank, of: team.size() };
            all.iter().map(move |t| {
                let range = share.range(t.whole.len());
                range.start * t.format.size()..range.end * t.format.size()
            })
        };
        let bytes = |rank: usize| ranges(rank).map(|range| range.len()).sum::<usize>();
        let longest = (0..team.size()).map(bytes).max().unwrap_or(0);
        if longest == 0 {
            return Ok(());
        }
        let flat: Vec<Tensor> = all
            .iter()
            .map(|t| t.master.f_view([-1]).t()?.f_view_dtype(Kind::Uint8).t())
            .collect::<Result<_>>()?;
        let mine = Tensor::f_zeros([longest as i64], (Kind::Uint8, self.kernels.device())).t()?;
        let mut at = 0;
        for (t, range) in flat.iter().zip(ranges(team.rank())) {
            let len = range.len() as i64;
            mine.f_narrow(0, at, len).t()?.f_copy_(&t.f_narrow(0, range.start as i64, len).t()?).t()?;
            at += len;
        }
        let gathered = team.all_gather(&mine)?;
        for rank in (0..team.size()).filter(|r| *r != team.rank()) {
            let mut at = (rank * longest) as i64;
            for (t, range) in flat.iter().zip(ranges(rank)) {
                let len = range.len() as i64;
                t.f_narrow(0, range.start as i64, len)
                    .t()?
                    .f_copy_(&gathered.f_narrow(0, at, len).t()?)
                    .t()?;
                at += len;
            }
        }
        Ok(())
    }

    /// The moments of everything that moves, as one rank would keep them; ranks other than the first only
    /// give theirs. All must come to the end.
    pub fn states(&self) -> impl Iterator<Item = Result<Vec<u8>>> {
        let of = |t| match &self.team {
            Some(team) => self.whole_state(team, t),
            None if t.own.len() == t.whole.len() => bytes(&t.state),
            None => Err(Error::new(Code::Internal, "moments of other ranks").need("the ranks")),
        };
        self.params.trained().map(of)
    }

    fn whole_state(&self, team: &Team, t: &Trained) -> Result<Vec<u8>> {
        let ranges: Vec<_> = Share::all(team.size(), t.whole.len()).collect();
        let sizes: Vec<usize> = ranges.iter().map(|r| t.whole.part(r).bytes()).collect();
        let longest = sizes.iter().copied().max().unwrap_or(0) as i64;
        let mine = Tensor::f_zeros([longest], (Kind::Uint8, t.state.device())).t()?;
        mine.f_narrow(0, 0, t.state.numel() as i64).t()?.f_copy_(&t.state).t()?;
        let all = team.all_gather(&mine)?;
        if !team.is_first() {
            return Ok(Vec::new());
        }
        let all = bytes(&all)?;
        let mut whole = vec![0; t.whole.bytes()];
        for (rank, range) in ranges.iter().enumerate() {
            t.whole.put(range, &all[rank * longest as usize..][..sizes[rank]], &mut whole);
        }
        Ok(whole)
    }
}
