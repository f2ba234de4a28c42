//! Until the ranks are connected nothing tells them that one has died. So each leaves a sign of life at the
//! store a few times a second, and the first looks at those of all.
use super::gloo::Store;
use super::watch::{dead, end};
use crate::ranks::Place;
use q4_core::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time between two signs.
const BEAT: Duration = Duration::from_millis(250);
/// Silence of a rank that has come after which it counts as dead.
const SILENCE: Duration = Duration::from_secs(8);

/// Signs of life, until they are no longer needed.
pub(super) struct Meeting(Arc<AtomicBool>);

impl Meeting {
    pub fn begin(place: &Place) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let (rank, size, meet) = (place.rank, place.size, &place.meet);
        // A connection of its own: the other one waits.
        let store = Store::open(&meet.host, meet.port, false, super::MEETING)?.within(&meet.prefix)?;
        store.set(&key(rank), &[0; 8])?;
        let told = over.clone();
        std::thread::spawn(move || {
            let others = if rank == 0 { 1..size } else { 0..1 };
            let mut seen: Vec<_> = others.map(|other| (other, [0; 8], Instant::now())).collect();
            for beat in 1u64.. {
                std::thread::sleep(BEAT);
                if told.load(Ordering::Relaxed) {
                    return;
                }
                // A store that is gone was served by rank 0, or by whoever has started all.
                let lost = look(&store, rank, beat, &mut seen).unwrap_or(Some(0));
                if let (Some(lost), false) = (lost, told.load(Ordering::Relaxed)) {
                    let e = dead(lost, size);
                    eprintln!("{e}");
                    end(e.code().exit());
                }
            }
        });
        Ok(Self(over))
    }

    /// All are connected.
    pub fn end(self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn key(rank: usize) -> String {
    format!("beat/{rank}")
}

/// Leaves a sign; who has died.
fn look(
    store: &Store,
    rank: usize,
    beat: u64,
    seen: &mut [(usize, [u8; 8], Instant)],
) -> Result<Option<usize>> {
    store.set(&key(rank), &beat.to_le_bytes())?;
    if store.has("lost")? {
        let mut lost = [0; 8];
        store.get("lost", &mut lost)?;
        return Ok(Some(u64::from_le_bytes(lost) as usize));
    }
    for (other, last, at) in seen {
        let mut now = *last;
        if store.has(&key(*other))? {
            store.get(&key(*other), &mut now)?;
        } else {
            // It has not come yet.
            *at = Instant::now();
        }
        if now != *last {
            (*last, *at) = (now, Instant::now());
        }
        if at.elapsed() > SILENCE {
            store.set("lost", &(*other as u64).to_le_bytes())?;
            // Time for the others to read it, should the store end with this rank.
            std::thread::sleep(3 * BEAT);
            return Ok(Some(*other));
        }
    }
    Ok(None)
}
