//! Where a process crashed, said by the process itself: `q4-crash: signal 11 (SIGSEGV) at address 0x8 in
//! libvolta.so+0x1234` on stderr, for `addr2line -Cfe libvolta.so 0x1234`. The signal then ends the process
//! as it would have without.
//!
//! Everything here that runs after the signal uses system calls, static memory and nothing else.
use crate::maps::{Mapping, mappings};
use q4_core::stderr::CRASH;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, size_of};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

const SIGNALS: [(c_int, &str); 5] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGABRT, "SIGABRT"),
];

/// Room for the kernel's list of mappings. A process that has more of them is told about as far as this goes.
const LIST: usize = 256 << 10;
/// Words of the stack that are looked at for addresses in plugins, and how many of those are told.
const DEPTH: usize = 2048;
const CALLERS: usize = 6;

/// Memory of the handler, which runs once.
struct Static<const N: usize>(UnsafeCell<[u8; N]>);
// SAFETY: only the thread that set `TOLD` uses it, or the kernel as that thread's stack.
unsafe impl<const N: usize> Sync for Static<N> {}
static MAPS: Static<LIST> = Static(UnsafeCell::new([0; LIST]));
/// A fault of a stack that is full needs another one.
static STACK: Static<{ 64 << 10 }> = Static(UnsafeCell::new([0; 64 << 10]));
static TOLD: AtomicBool = AtomicBool::new(false);

/// From now on this process says where it crashes. A handler that somebody else installed before, a
/// sanitizer's for example, stays.
pub fn tell_crashes() {
    let stack = libc::stack_t { ss_sp: STACK.0.get().cast(), ss_flags: 0, ss_size: 64 << 10 };
    // SAFETY: a stack that lives as long as the process; handlers that use system calls and static memory
    // alone.
    unsafe {
        libc::sigaltstack(&raw const stack, ptr::null_mut());
        for (signal, _) in SIGNALS {
            let mut old = MaybeUninit::<libc::sigaction>::zeroed();
            if libc::sigaction(signal, ptr::null(), old.as_mut_ptr()) != 0
                || !is_ours(old.assume_init().sa_sigaction)
            {
                continue;
            }
            let mut new = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            new.sa_sigaction = on_crash as *const () as usize;
            new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(signal, &raw const new, ptr::null_mut());
        }
    }
}

/// The default, or the handler for full stacks that every Rust program has.
fn is_ours(handler: usize) -> bool {
    let base = |at: *const c_void| {
        let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: a place for the answer; the address is only looked up.
        let found = unsafe { libc::dladdr(at, info.as_mut_ptr()) } != 0;
        // SAFETY: filled in, or all zero.
        found.then(|| unsafe { info.assume_init() }.dli_fbase)
    };
    handler == libc::SIG_DFL || base(handler as *const c_void) == base(tell_crashes as *const c_void)
}

extern "C" fn on_crash(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if TOLD.swap(true, Ordering::Relaxed) {
        // Another thread is at it, and about to end the process.
        loop {
            // SAFETY: no arguments.
            unsafe { libc::pause() };
        }
    }
    // SAFETY: what the kernel hands to a handler with SA_SIGINFO.
    let (at, [pc, sp]) = unsafe { ((*info).si_addr() as usize, registers(&*context.cast())) };
    // SAFETY: nobody else gets here.
    let maps = read_maps(unsafe { &mut *MAPS.0.get() });
    let mut line = Line { bytes: [0; 1024], len: 0 };
    line.text(CRASH.as_bytes());
    line.text(b"signal ");
    line.decimal(signal.unsigned_abs());
    if let Some((_, name)) = SIGNALS.iter().find(|s| s.0 == signal) {
        line.text(b" (");
        line.text(name.as_bytes());
        line.text(b")");
    }
    if signal == libc::SIGSEGV || signal == libc::SIGBUS {
        line.text(b" at address ");
        line.hex(at);
    }
    line.text(b" in ");
    line.place(maps, pc);
    callers(&mut line, maps, sp);
    line.text(b"\n");
    // SAFETY: bytes of this frame; then the process ends, as soon as this returns. Not before: threads that
    // crash at the same time would end it before anything is said.
    unsafe {
        libc::write(2, line.bytes.as_ptr().cast(), line.len);
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

/// Program counter and stack pointer.
#[cfg(target_arch = "x86_64")]
fn registers(context: &libc::ucontext_t) -> [usize; 2] {
    [libc::REG_RIP, libc::REG_RSP].map(|r| context.uc_mcontext.gregs[r as usize] as usize)
}
#[cfg(target_arch = "aarch64")]
fn registers(context: &libc::ucontext_t) -> [usize; 2] {
    [context.uc_mcontext.pc as usize, context.uc_mcontext.sp as usize]
}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn registers(_: &libc::ucontext_t) -> [usize; 2] {
    [0, 0]
}

fn read_maps(room: &mut [u8]) -> &[u8] {
    let mut len = 0;
    // SAFETY: a terminated name, and reads into what is left of `room`.
    unsafe {
        let file = libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        while len < room.len() {
            let n = libc::read(file, room[len..].as_mut_ptr().cast(), room.len() - len);
            if n <= 0 {
                break;
            }
            len += n.unsigned_abs();
        }
        libc::close(file);
    }
    &room[..len]
}

/// Addresses in plugins that lie on the stack: who called, and what was called before.
fn callers(line: &mut Line, maps: &[u8], sp: usize) {
    let Some(stack) = mappings(maps).find(|m| sp >= m.start && sp < m.end) else { return };
    let mut told = [0; CALLERS];
    let mut count = 0;
    for i in 0..DEPTH {
        let at = (sp & !7) + i * size_of::<usize>();
        if at + size_of::<usize>() > stack.end || count == CALLERS {
            return;
        }
        // SAFETY: an aligned word of a mapping that was just listed.
        let word = unsafe { ptr::read_volatile(at as *const usize) };
        let is_plugin =
            |m: Mapping<'_>| m.is_code && m.name.starts_with(MEMFD) && word >= m.start && word < m.end;
        if !told[..count].contains(&word) && mappings(maps).any(is_plugin) {
            line.text(if count == 0 { b"; on the stack: " } else { b", " });
            line.place(maps, word);
            told[count] = word;
            count += 1;
        }
    }
}

const MEMFD: &[u8] = b"/memfd:q4-";

/// Text of fixed room; what does not fit is left out.
struct Line {
    bytes: [u8; 1024],
    len: usize,
}

impl Line {
    fn text(&mut self, text: &[u8]) {
        for b in text {
            // The last byte is the line's end.
            if self.len < self.bytes.len() - usize::from(*b != b'\n') {
                self.bytes[self.len] = *b;
                self.len += 1;
            }
        }
    }
    fn hex(&mut self, value: usize) {
        self.text(b"0x");
        let digits = (usize::BITS - (value | 1).leading_zeros()).div_ceil(4);
        for i in (0..digits).rev() {
            self.text(&[b"0123456789abcdef"[value >> (4 * i) & 15]]);
        }
    }
    fn decimal(&mut self, value: u32) {
        if value > 9 {
            self.decimal(value / 10);
        }
        self.text(&[b'0' + (value % 10) as u8]);
    }
    /// `libvolta.so+0x1234`: an address as a tool finds it in the file.
    fn place(&mut self, maps: &[u8], at: usize) {
        let Some(found) = mappings(maps).find(|m| at >= m.start && at < m.end && !m.name.is_empty()) else {
            self.hex(at);
            return self.text(b", which no file was mapped to");
        };
        let base = mappings(maps).find(|m| m.name == found.name).map_or(found.start, |m| m.start);
        let name = found.name.strip_suffix(b" (deleted)").unwrap_or(found.name);
        let name = name.strip_prefix(MEMFD).unwrap_or(name);
        self.text(name.rsplit(|b| *b == b'/').next().unwrap_or(name));
        self.text(b"+");
        self.hex(at - base);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &[u8] = b"55e0-55f0 r--p 00000000 08:01 12 /usr/bin/q4\n\
        7f00-7f10 r--p 00000000 00:01 9                          /memfd:q4-lib my.so (deleted)\n\
        7f10-7f20 r-xp 00010000 00:01 9                          /memfd:q4-lib my.so (deleted)\n\
        7f30-7f40 rw-p 00000000 00:00 0 \n";

    #[test]
    fn an_address_becomes_a_file_and_an_offset() {
        let place = |at| {
            let mut line = Line { bytes: [0; 1024], len: 0 };
            line.place(LIST, at);
            String::from_utf8_lossy(&line.bytes[..line.len]).into_owned()
        };
        assert_eq!(place(0x55e5), "q4+0x5");
        assert_eq!(place(0x7f1a), "lib my.so+0x1a");
        assert_eq!(place(0x8), "0x8, which no file was mapped to");
        assert_eq!(place(0x7f35), "0x7f35, which no file was mapped to");
        let code: Vec<_> = mappings(LIST).filter(|m| m.is_code).map(|m| m.start).collect();
        assert_eq!(code, [0x7f10]);
    }

    #[test]
    fn a_line_ends_whatever_is_in_it() {
        let mut line = Line { bytes: [0; 1024], len: 0 };
        line.text(&[b'x'; 5000]);
        line.text(b"\n");
        assert_eq!((line.len, line.bytes[1023], line.bytes[1022]), (1024, b'\n', b'x'));
        let mut line = Line { bytes: [0; 1024], len: 0 };
        line.decimal(11);
        line.hex(0xdead_beef);
        line.hex(0);
        assert_eq!(&line.bytes[..line.len], b"110xdeadbeef0x0");
    }
}
