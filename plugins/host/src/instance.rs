//! The library's object: what it has handed out, whose turn it is, and whether it panicked.
use crate::table::Table;
use q4_core::{Code, Error};
use q4_plugin_abi as abi;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// A backend of a table. Weights hold it, so it is destroyed after the last of them.
pub(crate) struct Instance {
    pub name: String,
    pub table: Table,
    pub raw: *mut abi::Q4Backend,
    pub live: Live,
    /// The contract promises one thread at a time.
    turn: Mutex<()>,
    pub(super) poisoned: AtomicBool,
}

// SAFETY: the contract ties a backend to one thread at a time, not to one thread; `turn` keeps that.
unsafe impl Send for Instance {}
// SAFETY: as above; what weights use of it is the immutable table.
unsafe impl Sync for Instance {}

impl Instance {
    /// Of an object that the table's `create` gave.
    pub fn new(name: &str, table: Table, raw: *mut abi::Q4Backend) -> Self {
        let (live, turn, poisoned) = Default::default();
        Self { name: name.to_owned(), table, raw, live, turn, poisoned }
    }

    /// Held while a function runs that the contract promises to one thread at a time.
    pub fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub fn lacks(&self, what: &str) -> Error {
        Error::new(Code::Unsupported, format!("{}: {what}", self.name))
            .need(what)
            .have("a library without it")
    }

    /// Whether a call of it has panicked.
    pub fn has_panicked(&self) -> bool {
        self.poisoned.load(Ordering::Relaxed)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Some(destroy) = self.table.api.destroy {
            // SAFETY: created by the same table, destroyed once, after the last weight.
            unsafe { destroy(self.raw) }
        }
    }
}

/// Addresses that a library has handed out and not been given back, by device.
#[derive(Default)]
pub(crate) struct Live(Mutex<BTreeMap<(u32, u64), u64>>);

impl Live {
    pub fn lock(&self) -> MutexGuard<'_, BTreeMap<(u32, u64), u64>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// What of a device is handed out and shares a byte with `range`.
    pub fn within(&self, device: u32, range: &Range<u64>) -> Option<Range<u64>> {
        let live = self.lock();
        let last = live.range((device, 0)..(device, range.end)).next_back();
        last.map(|(&(_, at), len)| at..at + len).filter(|other| other.end > range.start)
    }
}
