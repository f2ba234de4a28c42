//! A step that is shared by ranks: gradients go to whoever moves their elements, are summed there in the
//! order of micro-batches, and the moved masters come back to all.
//!
//! Micro-batch `k * ranks + r` of a step is rank r's in round k, and sums run over rounds and within one over
//! ranks. So every element is summed as one rank sums it over all micro-batches, and has the same bits.
//!
//! Three things are on their way at a time, each of an earlier block than the next: gradients, the sums of
//! their squares, which all must know before any moves, and masters. So a device computes blocks while they
//! travel, and its queue never runs dry for an answer of the host.
use super::super::Tch;
use super::super::copied;
use super::super::ranks::{Numbers, Pending, Piece, Team};
use super::super::trained::Trained;
use super::super::weights::{BLOCK, Role, Source, bytes};
use super::{Culprit, Engine, Moved, Sink};
use crate::optim::{Hyper, MasterFormat, Share};
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

/// What a pass has not waited for yet.
#[derive(Default)]
pub(super) struct OnTheWay {
    gradients: Option<Given>,
    squares: Option<Judged>,
    masters: Option<Spread>,
}

/// Gradients of a bucket.
struct Given {
    bucket: Bucket,
    pending: Pending,
    /// Ranks whose micro-batch has a gradient for it.
    from: Vec<usize>,
    /// This rank's part of its own.
    own: Vec<Tensor>,
}

/// Sums of gradients that move when everybody knows their norm.
struct Judged {
    bucket: Bucket,
    grads: Vec<(usize, usize, Tensor)>,
    squares: Squares,
}

/// Sums of squares of everybody's parts.
pub(super) struct Squares {
    /// Parameters, and elements of each.
    of: Vec<(usize, usize)>,
    /// Summands of each rank.
    count: usize,
    numbers: Numbers,
}

/// Masters of other ranks, and where they belong.
struct Spread {
    pending: Pending,
    to: Vec<Tensor>,
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
        self.take_all(sink)
    }

    /// Sends gradients to the ranks that sum them, and goes on with those that were sent before: while a
    /// block's travel, those of the next are computed. False: as of [`Engine::settle`].
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
        let mut sent = Vec::with_capacity(grads.len());
        for (i, _, g) in grads {
            sent.push(g.f_to_kind(self.travels_as(i)).t()?.f_contiguous().t()?.f_view([-1]).t()?);
        }
        let ranges: Vec<Vec<_>> = (0..size)
            .map(|rank| {
                let part = |at| Ok(Share { rank, of: size }.range(self.trained(at)?.whole.len()));
                moving.iter().map(|at| part(*at)).collect()
            })
            .collect::<Result<_>>()?;
        let (mut give, mut take, mut own) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, of_rank) in ranges.iter().enumerate() {
            for (g, range) in sent.iter().zip(of_rank) {
                let piece = g.f_narrow(0, range.start as i64, range.len() as i64).t()?;
                match rank == me {
                    // A view would keep the whole.
                    true if piece.kind() == Kind::Float => own.push(copied(&piece)?),
                    true => own.push(piece),
                    false if range.is_empty() => {}
                    false => give.push((rank, piece)),
                }
            }
            if rank != me && from.contains(&rank) {
                let pieces = moving.iter().zip(&ranges[me]);
                let pieces =
                    pieces.map(|((i, _), r)| Piece { rank, len: r.len(), kind: self.travels_as(*i) });
                take.extend(pieces.filter(|p| p.len > 0));
            }
        }
        drop(sent);
        let pending = team.exchange(give, &take)?;
        let went = self.go_on(sink)?;
        sink.way.gradients = Some(Given { bucket, pending, from, own });
        Ok(went)
    }

    /// The type of gradients between ranks: that of the values they were taken with, which is theirs, or f32.
    fn travels_as(&self, index: usize) -> Kind {
        let p = &self.params.all[index];
        match (p.role, &p.source) {
            (Role::Linear, Source::Trained(_)) => self.kernels.compute(),
            _ => Kind::Float,
        }
    }

    /// All that is on its way: [`Engine::go_on`] to the end.
    pub(super) fn take_all(&mut self, sink: &mut Sink<'_>) -> Result<bool> {
        let went = self.go_on(sink)? && self.go_on(sink)?;
        match sink.way.masters.take() {
            Some(spread) => self.land(spread).map(|()| went),
            None => Ok(went),
        }
    }

    /// Moves what waited for its norm, where blocks move in the backward pass; and adds the gradients that
    /// have arrived to those before them, whose norm is then asked for.
    fn go_on(&mut self, sink: &mut Sink<'_>) -> Result<bool> {
        let Some(team) = self.team.clone() else { return Ok(true) };
        if let Some(judged) = sink.way.squares.take()
            && !self.judged(&team, judged, sink)?
        {
            return Ok(false);
        }
        let Some(Given { bucket, pending, from, own }) = sink.way.gradients.take() else { return Ok(true) };
        let moving = self.moving(bucket);
        let mut arrived = team.arrived(pending)?.into_iter();
        for rank in from {
            for (n, (i, part)) in moving.iter().enumerate() {
                let few = || Error::new(Code::Internal, "fewer gradients than ranks give");
                let own = own.get(n).filter(|_| rank == team.rank());
                let piece = match own {
                    Some(own) => own.shallow_clone(),
                    None if self.trained((*i, *part))?.own.is_empty() => {
                        Tensor::f_empty([0], (Kind::Float, self.kernels.device())).t()?
                    }
                    None => arrived.next().ok_or_else(few)?,
                };
                let sum = &mut sink.gradients[*i][*part];
                *sum = Some(match sum.take() {
                    // A view of what all have sent would keep that.
                    None if own.is_none() && piece.kind() == Kind::Float => copied(&piece)?,
                    None => piece.f_to_kind(Kind::Float).t()?,
                    Some(mut sum) => sum.f_add_(&piece).t()?,
                });
            }
        }
        if sink.fused.is_none() {
            return Ok(true);
        }
        let mut grads = Vec::with_capacity(moving.len());
        for (i, part) in &moving {
            grads.extend(sink.gradients[*i][*part].take().map(|g| (*i, *part, g)));
        }
        let squares = self.shared_squares(&team, grads.iter().map(|(i, part, g)| (*i, *part, g)))?;
        sink.way.squares = Some(Judged { bucket, grads, squares });
        Ok(true)
    }

    fn judged(&mut self, team: &Rc<Team>, judged: Judged, sink: &mut Sink<'_>) -> Result<bool> {
        let (Some(hyper), Judged { bucket, grads, squares }) = (sink.fused, judged) else { return Ok(true) };
        let sums = self.sums(team, squares)?;
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
        let moved: Vec<_> = grads.iter().map(|(i, part, _)| (*i, *part)).collect();
        let next = self.spread(team, &moved)?;
        match sink.way.masters.replace(next) {
            Some(last) => self.land(last).map(|()| true),
            None => Ok(true),
        }
    }

    /// Asks for the sums of squares of whole gradients, out of every rank's part.
    pub(super) fn shared_squares<'a>(
        &self,
        team: &Rc<Team>,
        grads: impl Iterator<Item = (usize, usize, &'a Tensor)>,
    ) -> Result<Squares> {
        let (mut mine, mut of) = (Vec::new(), Vec::new());
        for (i, part, g) in grads {
            mine.push(g);
            of.push((i, self.trained((i, part))?.whole.len()));
        }
        let summands = |r| of.iter().map(|(_, len)| self.summands(team, r, *len)).sum::<usize>();
        let count = (0..team.size()).map(summands).max().unwrap_or(0);
        let mine = self.kernels.squares(mine.into_iter())?;
        // All ranks give as many.
        let missing = count as i64 - mine.numel() as i64;
        let mine = if missing > 0 { mine.f_constant_pad_nd([0, missing]).t()? } else { mine };
        Ok(Squares { of, count, numbers: team.gather_there(&mine)? })
    }

    fn summands(&self, team: &Team, rank: usize, len: usize) -> usize {
        self.kernels.summands(Share { rank, of: team.size() }.range(len).len())
    }

    /// The sums, in the order of their tiles.
    pub(super) fn sums(&self, team: &Rc<Team>, squares: Squares) -> Result<Vec<(usize, f64)>> {
        let Squares { of, count, numbers } = squares;
        let all = team.read(numbers)?;
        let mut at: Vec<usize> = (0..team.size()).map(|rank| rank * count).collect();
        let mut sums = Vec::with_capacity(of.len());
        for (i, len) in of {
            let mut sum = 0.0;
            for (rank, at) in at.iter_mut().enumerate() {
                let n = self.summands(team, rank, len);
                sum = all[*at..*at + n].iter().fold(sum, |sum, x| sum + x);
                *at += n;
            }
            sums.push((i, sum));
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
        let mut last = None;
        for bucket in self.buckets() {
            let mut moved = Vec::new();
            for (i, part) in self.moving(bucket) {
                if let Some(grad) = gradients[i][part].take() {
                    self.update(i, part, &grad, hyper)?;
                    moved.push((i, part));
                }
            }
            let next = self.spread(team, &moved)?;
            last.replace(next).map_or(Ok(()), |last| self.land(last))?;
        }
        self.moved = Moved::Wholly;
        last.map_or(Ok(()), |last| self.land(last))
    }

    /// Every rank's masters of these go to everybody.
    fn spread(&self, team: &Rc<Team>, moved: &[(usize, usize)]) -> Result<Spread> {
        let (mut give, mut take, mut to) = (Vec::new(), Vec::new(), Vec::new());
        for rank in (0..team.size()).filter(|r| *r != team.rank()) {
            for at in moved {
                let t = self.trained(*at)?;
                let kind = match t.format {
                    MasterFormat::F32 => Kind::Float,
                    MasterFormat::Bf16 => Kind::BFloat16,
                };
                let flat = t.master.f_view([-1]).t()?;
                let part = |range: &std::ops::Range<usize>| {
                    flat.f_narrow(0, range.start as i64, range.len() as i64).t()
                };
                if !t.own.is_empty() {
                    give.push((rank, part(&t.own)?));
                }
                let theirs = Share { rank, of: team.size() }.range(t.whole.len());
                if !theirs.is_empty() {
                    take.push(Piece { rank, len: theirs.len(), kind });
                    to.push(part(&theirs)?);
                }
            }
        }
        Ok(Spread { pending: team.exchange(give, &take)?, to })
    }

    fn land(&self, spread: Spread) -> Result<()> {
        let Some(team) = &self.team else { return Ok(()) };
        for (mut to, from) in spread.to.into_iter().zip(team.arrived(spread.pending)?) {
            to.f_copy_(&from).t()?;
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
        let mut give = Vec::new();
        let mut take = Vec::new();
        if team.is_first() {
            let piece = |(rank, r)| Piece { rank, len: t.whole.part(r).bytes(), kind: Kind::Uint8 };
            take.extend(ranges.iter().enumerate().skip(1).map(piece).filter(|p| p.len > 0));
        } else if t.state.numel() > 0 {
            give.push((0, t.state.shallow_clone()));
        }
        let arrived = team.arrived(team.exchange(give, &take)?)?;
        if !team.is_first() {
            return Ok(Vec::new());
        }
        let mut whole = vec![0; t.whole.bytes()];
        t.whole.put(&ranges[0], &bytes(&t.state)?, &mut whole);
        for (piece, state) in take.iter().zip(&arrived) {
            t.whole.put(&ranges[piece.rank], &bytes(state)?, &mut whole);
        }
        Ok(whole)
    }
}
