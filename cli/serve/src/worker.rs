//! The scheduler in a thread of its own, as the server's [`Engine`].
use crate::engine::{Busy, Engine, Readiness};
use crate::served::Served;
use q4_core::{Code, Error, Result};
use q4_model::batch::{Event, Gauges, Nudges, Options, Request, Scheduler, Sequences, Sink};
use q4_model::generate::Limits;
use q4_model::sampling::SamplingParams;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long somebody who has to wait is told to wait, at least and at most.
const RETRY: std::ops::RangeInclusive<u64> = 1..=60;

/// Steps a scheduler as long as somebody asks.
pub struct Worker {
    inbox: Sender<Asked>,
    shared: Arc<Mutex<Shared>>,
    /// Requests that may wait.
    queue: usize,
    sequences: usize,
}

type Asked = (Request, Box<dyn Sink>);

struct Shared {
    readiness: Readiness,
    gauges: Gauges,
    /// Requests that the thread has not seen yet.
    unseen: usize,
    /// Time of steps.
    busy: Duration,
}

impl Worker {
    /// Takes `engine`, which was made for `options`, to a thread. It answers to nobody until a request of its
    /// own went through every layer, whose backends check themselves on it. `queue` requests may wait.
    ///
    /// # Errors
    /// [`Code::Io`] where the system gives no thread.
    pub fn start(
        engine: Box<dyn Sequences>,
        options: Options,
        served: Arc<Served>,
        queue: usize,
    ) -> Result<Self> {
        let (inbox, asked) = mpsc::channel();
        let shared = Arc::new(Mutex::new(Shared {
            readiness: Readiness::NotYet("every layer's backend is checking itself".to_owned()),
            gauges: Gauges::default(),
            unseen: 0,
            busy: Duration::ZERO,
        }));
        let own = shared.clone();
        let work = move || {
            let run = || {
                let mut scheduler = Scheduler::new(engine, &served.tokenizer, options);
                let readiness = match check(&mut scheduler, &options) {
                    Ok(()) => Readiness::Ready,
                    Err(e) => Readiness::Failed(e),
                };
                let is_ready = readiness == Readiness::Ready;
                lock(&own).readiness = readiness;
                if is_ready {
                    steps(&mut scheduler, &asked, &own);
                }
            };
            // The message is on standard error; whoever waits for an answer learns that there is none.
            if catch_unwind(AssertUnwindSafe(run)).is_err() {
                let bug = Error::new(Code::Internal, "the engine stopped because of a bug");
                lock(&own).readiness = Readiness::Failed(bug.fix("please report it with the server's log"));
            }
        };
        thread::Builder::new()
            .name("q4-engine".to_owned())
            .spawn(work)
            .map_err(|e| Error::new(Code::Io, format!("no thread for the engine: {e}")))?;
        Ok(Self { inbox, shared, queue, sequences: options.sequences })
    }
}

impl Engine for Worker {
    fn submit(&self, request: Request, sink: Box<dyn Sink>) -> Result<(), Busy> {
        let mut shared = lock(&self.shared);
        let waiting = shared.gauges.waiting + shared.unseen;
        // What finds a free place does not wait.
        let free = self.sequences.saturating_sub(shared.gauges.running);
        if waiting >= self.queue + free {
            let each = shared.busy.as_secs_f64() / shared.gauges.ended.max(1) as f64;
            let retry_after = (each * waiting as f64).ceil() as u64;
            return Err(Busy { retry_after: retry_after.clamp(*RETRY.start(), *RETRY.end()) });
        }
        shared.unseen += 1;
        // Where the thread is gone the sink is dropped, and its owner sees that.
        let _ = self.inbox.send((request, sink));
        Ok(())
    }
    fn capacity(&self) -> usize {
        self.queue.saturating_add(self.sequences)
    }
    fn gauges(&self) -> Gauges {
        let shared = lock(&self.shared);
        Gauges { waiting: shared.gauges.waiting + shared.unseen, ..shared.gauges }
    }
    fn readiness(&self) -> Readiness {
        lock(&self.shared).readiness.clone()
    }
}

/// Until nobody can ask any longer.
fn steps(scheduler: &mut Scheduler<'_>, asked: &Receiver<Asked>, shared: &Mutex<Shared>) {
    loop {
        if scheduler.is_idle() {
            let Ok(first) = asked.recv() else { return };
            take(scheduler, first, shared);
        }
        loop {
            match asked.try_recv() {
                Ok(more) => take(scheduler, more, shared),
                Err(TryRecvError::Empty) => break,
                // Those who ask are gone, and their sinks with them.
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let start = Instant::now();
        scheduler.step();
        publish(scheduler, shared, start.elapsed());
    }
}

fn take(scheduler: &mut Scheduler<'_>, (request, sink): Asked, shared: &Mutex<Shared>) {
    scheduler.submit(request, sink);
    lock(shared).unseen -= 1;
    publish(scheduler, shared, Duration::ZERO);
}

fn publish(scheduler: &Scheduler<'_>, shared: &Mutex<Shared>, busy: Duration) {
    let mut shared = lock(shared);
    shared.busy += busy;
    shared.gauges = scheduler.gauges();
}

/// A request through every layer: a step of as many rows as there can be, and one of a single row.
fn check(scheduler: &mut Scheduler<'_>, options: &Options) -> Result<()> {
    let rows = options.rows.min(options.context.saturating_sub(2)).max(1);
    let request = Request {
        // Any token is as good as another.
        prompt: vec![0; rows],
        params: SamplingParams::default(),
        nudges: Nudges::default(),
        limits: Limits { max_tokens: 2, ..Limits::default() },
        reuse: false,
        prompt_logprobs: false,
    };
    let failed = Arc::new(Mutex::new(None));
    scheduler.submit(request, Box::new(Check(failed.clone())));
    while !scheduler.is_idle() {
        scheduler.step();
    }
    match lock(&failed).take() {
        Some(e) => Err(e),
        None => Ok(()),
    }
}

/// Remembers a failure.
struct Check(Arc<Mutex<Option<Error>>>);

impl Sink for Check {
    fn tell(&mut self, event: Event) {
        if let Event::Failed(e) = event {
            *lock(&self.0) = Some(e);
        }
    }
}

/// Nobody panics while he holds one of these.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
