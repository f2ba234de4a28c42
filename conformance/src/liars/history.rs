//! Mutants that are wrong at some time: after so many calls or weights, after another operation, on another
//! thread, while others compute.
use super::Mutant;
use super::parts::{HONEST, Parts};
use super::situation::{Fault, Situation};
use crate::Level::{L3, L5};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

fn last(s: &Situation<'_>) -> Fault {
    Fault::Element(s.m - 1, s.n - 1)
}

thread_local! {
    static CALLED: Cell<bool> = const { Cell::new(false) };
}
/// Scratch of all weights.
static SCRATCH: Mutex<Vec<f64>> = Mutex::new(Vec::new());
/// Calls of all weights.
static CALLS: AtomicU64 = AtomicU64::new(0);

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L5 "the-6000th-call": "from the 6000th call of a weight on" {
        fault: |s| Fault::when(s.call >= 6000, last(s)),
    }
    L5 "sixteen-bits-of-calls": "the 65536th call of a weight" {
        fault: |s| Fault::when(s.call == 65_535, last(s)),
    }
    L5 "the-500th-call-of-rows": "a call with several rows after 500 others" {
        fault: |s| Fault::when(s.m > 1 && s.call > 500, last(s)),
    }
    L5 "calls-of-all-weights": "from call 15000 of all weights together on" {
        fault: |_| Fault::when(CALLS.fetch_add(1, Ordering::Relaxed) >= 15_000, Fault::Factor(0.0)),
    }
    L5 "a-hundred-weights": "more than a hundred live weights" {
        fault: |s| Fault::when(s.live > 100, last(s)),
    }
    L5 "more-weights-than-a-byte": "more than 256 live weights" {
        fault: |s| Fault::when(s.live > 256, last(s)),
    }
    L5 "the-1000th-weight": "the thousandth weight and all after it" {
        fault: |s| Fault::when(s.nth >= 1000, last(s)),
    }
    L5 "after-a-weight-went": "until the next weight comes, when one has gone" {
        fault: |s| Fault::when(s.gone > 0 && s.live > 1, last(s)),
    }
    L5 "first-call-of-a-thread": "the first call on a thread that is not the main one's" {
        fault: |s| {
            let is_first = !CALLED.replace(true);
            Fault::when(is_first && std::thread::current().name() != Some("main"), last(s))
        },
    }
    L3 "forward-after-backward": "forward, once there was a backward call" {
        fault: |s| Fault::when(s.done.backward() > 0, last(s)),
    }
    L5 "forward-after-decoding": "forward, once the weight was decoded" {
        fault: |s| Fault::when(s.done.decoded() > 0, last(s)),
    }
    L3 "backward-after-decoding": "a gradient, once the weight was decoded" {
        backward_fault: |s| Fault::when(s.done.decoded() > 0, Fault::Row(0)),
    }
    L3 "backward-after-forward": "a gradient after two forward calls" {
        backward_fault: |s| Fault::when(s.done.forward() >= 2, Fault::Row(0)),
    }
    L3 "the-500th-gradient": "from the 500th gradient of a weight on" {
        backward_fault: |s| Fault::when(s.done.backward() >= 500, Fault::Row(s.m - 1)),
    }
    L3 "gradient-of-three-threads": "gradients with three threads" {
        backward_fault: |s| Fault::when(s.threads == 3, Fault::Row(s.m - 1)),
    }
    L3 "gradient-of-many-threads": "gradients with more than eight threads" {
        backward_fault: |s| Fault::when(s.threads > 8, Fault::Row(s.m - 1)),
    }
    L3 "gradient-of-one-thread": "gradients with one thread" {
        backward_fault: |s| Fault::when(s.threads == 1, Fault::Row(s.m - 1)),
    }
    L3 "gradient-with-gaps": "gradients whose rows are far apart" {
        backward_fault: |s| Fault::when(s.y.gap() > 8, Fault::Row(s.m - 1)),
    }
    L3 "gradient-off-its-vectors": "gradients off a vector" {
        backward_fault: |s| Fault::when(s.y.gap() == 0 && s.y.address % 64 == 16, Fault::Row(s.m - 1)),
    }
    L5 "decodes-after-forward": "the decoded matrix, after a forward call" {
        decode_fault: |s| Fault::when(s.done.forward() > 0, Fault::Row(0)),
    }
    L5 "decodes-with-many-threads": "the decoded matrix, with four threads and more" {
        decode_fault: |s| Fault::when(s.threads >= 4, Fault::Row(s.n - 1)),
    }
    L5 "decodes-often": "the decoded matrix, from the tenth time on" {
        decode_fault: |s| Fault::when(s.done.decoded() >= 10, Fault::Row(0)),
    }
    L5 "one-scratch-for-all":
        "all weights share one scratch buffer, which calls of one weight take in turns" {
        stage: |kept, x| {
            let _turn = kept.shared.lock().unwrap_or_else(PoisonError::into_inner);
            *SCRATCH.lock().unwrap_or_else(PoisonError::into_inner) = x;
            std::thread::sleep(Duration::from_micros(300));
            SCRATCH.lock().unwrap_or_else(PoisonError::into_inner).clone()
        },
    }
    L5 "leaks-in-calls": "a thousand bytes stay behind with every call" {
        before: |_, _| {
            std::mem::forget(std::hint::black_box(vec![1u8; 1000]));
            Ok(())
        },
    }
    L5 "keeps-twice-what-it-says": "a second copy of the codes is kept and not accounted for" {
        prepared: |kept| {
            kept.hoard = vec![1.0; kept.info.n * kept.info.k / 8];
            Ok(())
        },
    }
    L5 "forgets-its-scales": "resident_bytes are those of the codes alone" {
        prepared: |kept| {
            kept.info.resident_bytes = (kept.info.n * kept.info.k / 2) as u64;
            Ok(())
        },
    }
};
