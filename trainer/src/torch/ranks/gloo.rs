//! c10d's TCP store and its process group over Gloo, out of libtorch (`gloo.cpp`).
use q4_core::{Code, Error, Result};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::time::Duration;

/// Room for what was thrown, as the C++ side takes it.
#[repr(C)]
struct Text {
    to: *mut c_char,
    len: usize,
}

unsafe extern "C" {
    fn q4_store_open(
        host: *const c_char,
        port: u16,
        serves: bool,
        timeout_ms: i64,
        text: Text,
    ) -> *mut c_void;
    fn q4_store_within(store: *mut c_void, prefix: *const c_char, text: Text) -> *mut c_void;
    fn q4_store_port(store: *mut c_void) -> u16;
    fn q4_store_set(store: *mut c_void, key: *const c_char, value: *const u8, len: usize, text: Text)
    -> bool;
    fn q4_store_get(store: *mut c_void, key: *const c_char, value: *mut u8, len: usize, text: Text) -> bool;
    fn q4_store_check(store: *mut c_void, key: *const c_char) -> c_int;
    fn q4_store_drop(store: *mut c_void);
    fn q4_gloo_open(
        store: *mut c_void,
        rank: c_int,
        size: c_int,
        timeout_ms: i64,
        interface: *const c_char,
        text: Text,
    ) -> *mut c_void;
    fn q4_gloo_all_to_all(
        group: *mut c_void,
        out: *mut u8,
        take: *const i64,
        input: *mut u8,
        give: *const i64,
        size: usize,
        text: Text,
    ) -> *mut c_void;
    fn q4_gloo_all_gather(
        group: *mut c_void,
        out: *mut u8,
        input: *mut u8,
        len: usize,
        size: usize,
        text: Text,
    ) -> *mut c_void;
    fn q4_gloo_send(group: *mut c_void, input: *mut u8, len: usize, to: c_int, text: Text) -> *mut c_void;
    fn q4_gloo_recv(group: *mut c_void, out: *mut u8, len: usize, from: c_int, text: Text) -> *mut c_void;
    fn q4_work_wait(work: *mut c_void, timeout_ms: i64, text: Text) -> bool;
}

/// Calls the other side; what it throws is the error.
fn call<T: PartialEq>(what: &str, nothing: T, f: impl FnOnce(Text) -> T) -> Result<T> {
    let mut room = [0u8; 1024];
    let found = f(Text { to: room.as_mut_ptr().cast(), len: room.len() });
    if found != nothing {
        return Ok(found);
    }
    let said = CStr::from_bytes_until_nul(&room).map(|s| s.to_string_lossy().into_owned());
    let said = said.unwrap_or_default();
    Err(Error::new(Code::RankLost, what).have(said.lines().next().unwrap_or_default()))
}

fn handle(what: &str, f: impl FnOnce(Text) -> *mut c_void) -> Result<NonNull<c_void>> {
    let found = call(what, std::ptr::null_mut(), f)?;
    NonNull::new(found).ok_or_else(|| Error::new(Code::Internal, what.to_owned()))
}

fn text(s: &str) -> Result<CString> {
    CString::new(s).map_err(|_| Error::new(Code::Usage, format!("{s:?}: a name with a zero in it")))
}

/// Keys and values that all ranks see.
pub struct Store(NonNull<c_void>);

// SAFETY: c10d's stores lock themselves.
unsafe impl Send for Store {}

impl Store {
    /// Joins the one at `host:port`, which this process `serves` or somebody else does. Port 0 is any.
    pub fn open(host: &str, port: u16, serves: bool, patience: Duration) -> Result<Self> {
        let (host, ms) = (text(host)?, patience.as_millis() as i64);
        // SAFETY: a C string that lives through the call.
        handle("meeting", |t| unsafe { q4_store_open(host.as_ptr(), port, serves, ms, t) }).map(Self)
    }

    /// The same with `prefix` before every key.
    pub fn within(&self, prefix: &str) -> Result<Self> {
        let prefix = text(prefix)?;
        // SAFETY: as above, and a store that is alive.
        handle("store", |t| unsafe { q4_store_within(self.0.as_ptr(), prefix.as_ptr(), t) }).map(Self)
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        // SAFETY: a store that is alive.
        unsafe { q4_store_port(self.0.as_ptr()) }
    }

    /// Writes a value.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let key = text(key)?;
        let (p, len) = (value.as_ptr(), value.len());
        // SAFETY: as above; `len` bytes are read.
        call("store", false, |t| unsafe { q4_store_set(self.0.as_ptr(), key.as_ptr(), p, len, t) })
            .map(|_| ())
    }

    /// Whether somebody has written it.
    pub fn has(&self, key: &str) -> Result<bool> {
        let key = text(key)?;
        // SAFETY: as above.
        match unsafe { q4_store_check(self.0.as_ptr(), key.as_ptr()) } {
            -1 => Err(Error::new(Code::RankLost, "the place where ranks meet is gone")),
            found => Ok(found == 1),
        }
    }

    /// Waits for a value, whose first bytes are copied.
    pub fn get(&self, key: &str, value: &mut [u8]) -> Result<()> {
        let key = text(key)?;
        let (p, len) = (value.as_mut_ptr(), value.len());
        // SAFETY: as above; at most `len` bytes are written.
        call("store", false, |t| unsafe { q4_store_get(self.0.as_ptr(), key.as_ptr(), p, len, t) })
            .map(|_| ())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: made by the other side, dropped once.
        unsafe { q4_store_drop(self.0.as_ptr()) }
    }
}

/// Ranks that are connected with each other. It is never taken down: its threads end with the process.
#[derive(Clone, Copy)]
pub struct Gloo {
    group: NonNull<c_void>,
    size: usize,
}

// SAFETY: c10d allows sends and receives from any thread; collectives are called from one.
unsafe impl Send for Gloo {}
// SAFETY: the same.
unsafe impl Sync for Gloo {}

/// Something on its way. Its memory must stay until it is waited for; whoever drops it waits.
#[must_use]
pub struct Work(Option<NonNull<c_void>>);

impl Work {
    fn start(what: &str, f: impl FnOnce(Text) -> *mut c_void) -> Result<Self> {
        handle(what, f).map(|work| Self(Some(work)))
    }

    /// Until it has arrived.
    pub fn wait(mut self) -> Result<()> {
        self.end(0)
    }

    fn end(&mut self, ms: i64) -> Result<()> {
        let Some(work) = self.0.take() else { return Ok(()) };
        // SAFETY: made by the other side, which takes it back.
        call("a message between ranks", false, |t| unsafe { q4_work_wait(work.as_ptr(), ms, t) }).map(|_| ())
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // Whoever drops it has an error already; the memory is free now.
        let _: Result<()> = self.end(0);
    }
}

impl Gloo {
    /// Connects all ranks with each other; that, and every message, may take as long as `patience`.
    /// `GLOO_SOCKET_IFNAME` names the network interface, as for torch.
    pub fn open(store: &Store, rank: usize, size: usize, patience: Duration) -> Result<Self> {
        let interface = std::env::var("GLOO_SOCKET_IFNAME").ok().filter(|v| !v.is_empty());
        let interface = interface.map(|v| text(v.split(',').next().unwrap_or_default())).transpose()?;
        let name = interface.as_ref().map_or(std::ptr::null(), |v| v.as_ptr());
        let (rank, ranks) = (rank as c_int, size as c_int);
        let ms = patience.as_millis() as i64;
        // SAFETY: a store that is alive; strings live through the call.
        let open = |t| unsafe { q4_gloo_open(store.0.as_ptr(), rank, ranks, ms, name, t) };
        Ok(Self { group: handle("connecting the ranks", open)?, size })
    }

    /// `give[i]` bytes to every rank, `take[i]` from it, one behind the other.
    ///
    /// # Safety
    /// Both pointers must have the sums of their counts, and be left alone until the work was waited for.
    pub unsafe fn all_to_all(
        &self,
        out: *mut u8,
        take: &[i64],
        input: *mut u8,
        give: &[i64],
    ) -> Result<Work> {
        let (take, give, n, group) = (take.as_ptr(), give.as_ptr(), self.size, self.group.as_ptr());
        // SAFETY: by contract; the counts are copied.
        let f = |t| unsafe { q4_gloo_all_to_all(group, out, take, input, give, n, t) };
        Work::start("all-to-all", f)
    }

    /// `mine` of every rank, in their order; all have the same length.
    pub fn all_gather(&self, mine: &mut [u8], out: &mut [u8]) -> Result<()> {
        if out.len() != mine.len() * self.size {
            return Err(Error::new(Code::Internal, "all-gather"));
        }
        let (to, from, len) = (out.as_mut_ptr(), mine.as_mut_ptr(), mine.len());
        // SAFETY: as many bytes as said, waited for below.
        let f = |t| unsafe { q4_gloo_all_gather(self.group.as_ptr(), to, from, len, self.size, t) };
        Work::start("all-gather", f)?.wait()
    }

    /// A message to one rank. Gloo does not notice that a connection was closed while it sends: it has two
    /// seconds.
    pub fn send(&self, message: &mut [u8], to: usize) -> Result<()> {
        let (p, len, to) = (message.as_mut_ptr(), message.len(), to as c_int);
        // SAFETY: as above.
        Work::start("send", |t| unsafe { q4_gloo_send(self.group.as_ptr(), p, len, to, t) })?.end(2000)
    }

    /// Waits for a message of one rank; an error as soon as its connection is closed.
    pub fn recv(&self, message: &mut [u8], from: usize) -> Result<()> {
        let (p, len, from) = (message.as_mut_ptr(), message.len(), from as c_int);
        // SAFETY: as above.
        Work::start("receive", |t| unsafe { q4_gloo_recv(self.group.as_ptr(), p, len, from, t) })?.wait()
    }
}
