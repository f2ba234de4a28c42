//! How often a library allocates, starts threads and starts processes: what it and the libraries that came
//! with it import of the C library is exchanged for functions that count.
//!
//! What the C library does for them inside of itself (`printf`, `qsort`) is not seen, nor is a system call
//! without it.
use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// Calls so far, by kind.
static COUNTS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
const ALLOCATIONS: usize = 0;
const THREADS: usize = 1;
const PROCESSES: usize = 2;

/// Allocations, threads and processes.
pub fn counts() -> [u64; 3] {
    [ALLOCATIONS, THREADS, PROCESSES].map(|kind| COUNTS[kind].load(Ordering::SeqCst))
}

thread_local! {
    static UNCOUNTED: Cell<bool> = const { Cell::new(false) };
}

/// Runs what a library may allocate in, on this thread: moving operands to and from its device.
pub fn uncounted<R>(body: impl FnOnce() -> R) -> R {
    let before = UNCOUNTED.replace(true);
    let out = body();
    UNCOUNTED.set(before);
    out
}

macro_rules! counting {
    ($($kind:ident $name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        mod counted {
            use super::*;
            $(pub unsafe extern "C" fn $name($($arg: $type),*) -> $out {
                // A thread that is ending has no place for it any more.
                let is_free = $kind == ALLOCATIONS && UNCOUNTED.try_with(Cell::get).unwrap_or(false);
                COUNTS[$kind].fetch_add(u64::from(!is_free), Ordering::Relaxed);
                // SAFETY: the same arguments, to the function that was asked for.
                unsafe { libc::$name($($arg),*) }
            })*
        }
        /// Name, address in the C library, and address of what counts.
        fn exchanged() -> Vec<(&'static str, usize, usize)> {
            vec![$((
                stringify!($name),
                libc::$name as *const () as usize,
                counted::$name as *const () as usize,
            )),*]
        }
    };
}

counting! {
    ALLOCATIONS malloc(size: usize) -> *mut c_void;
    ALLOCATIONS calloc(n: usize, size: usize) -> *mut c_void;
    ALLOCATIONS realloc(p: *mut c_void, size: usize) -> *mut c_void;
    ALLOCATIONS posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int;
    ALLOCATIONS aligned_alloc(align: usize, size: usize) -> *mut c_void;
    ALLOCATIONS memalign(align: usize, size: usize) -> *mut c_void;
    ALLOCATIONS strdup(text: *const c_char) -> *mut c_char;
    ALLOCATIONS mmap(at: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: libc::off_t) -> *mut c_void;
    ALLOCATIONS mmap64(at: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: libc::off64_t) -> *mut c_void;
    ALLOCATIONS sbrk(increment: libc::intptr_t) -> *mut c_void;
    THREADS pthread_create(out: *mut libc::pthread_t, attributes: *const libc::pthread_attr_t, start: extern "C" fn(*mut c_void) -> *mut c_void, arg: *mut c_void) -> c_int;
    PROCESSES fork() -> libc::pid_t;
    PROCESSES system(line: *const c_char) -> c_int;
    PROCESSES popen(line: *const c_char, mode: *const c_char) -> *mut libc::FILE;
    PROCESSES posix_spawn(pid: *mut libc::pid_t, path: *const c_char, actions: *const libc::posix_spawn_file_actions_t, attributes: *const libc::posix_spawnattr_t, argv: *const *mut c_char, env: *const *mut c_char) -> c_int;
    PROCESSES posix_spawnp(pid: *mut libc::pid_t, file: *const c_char, actions: *const libc::posix_spawn_file_actions_t, attributes: *const libc::posix_spawnattr_t, argv: *const *mut c_char, env: *const *mut c_char) -> c_int;
}

/// Objects that are mapped, by the address of their dynamic section.
pub fn objects() -> BTreeSet<usize> {
    let mut all = BTreeSet::new();
    each(&mut |o| {
        all.insert(o.dynamic);
    });
    all
}

/// Counts what every object imports that is not in `before`. Nothing runs in them meanwhile.
pub fn install(before: &BTreeSet<usize>) {
    let exchanged = exchanged();
    each(&mut |object| {
        if !before.contains(&object.dynamic) {
            // SAFETY: an object that the loader has mapped and relocated.
            unsafe { exchange(object, &exchanged) };
        }
    });
}

#[derive(Clone, Copy)]
struct Object {
    base: usize,
    dynamic: usize,
    /// Pages that the loader made read-only.
    relro: (usize, usize),
}

fn each(visit: &mut dyn FnMut(Object)) {
    unsafe extern "C" fn one(info: *mut libc::dl_phdr_info, _: usize, user: *mut c_void) -> c_int {
        // SAFETY: what `each` passed, and what the loader says of an object that is mapped.
        let (visit, info) = unsafe { (&mut *user.cast::<&mut dyn FnMut(Object)>(), &*info) };
        // SAFETY: as many headers as it says.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let base = info.dlpi_addr as usize;
        let find = |kind| headers.iter().find(|h| h.p_type == kind);
        if let Some(dynamic) = find(libc::PT_DYNAMIC) {
            let range = |h: &libc::Elf64_Phdr| {
                let start = base + h.p_vaddr as usize;
                (start, start + h.p_memsz as usize)
            };
            let relro = find(libc::PT_GNU_RELRO).map_or((0, 0), range);
            visit(Object { base, dynamic: base + dynamic.p_vaddr as usize, relro });
        }
        0
    }
    let mut visit = visit;
    // SAFETY: the function is of that type and gets what it expects, for the length of the call.
    unsafe { libc::dl_iterate_phdr(Some(one), (&raw mut visit).cast()) };
}

#[repr(C)]
struct Entry {
    tag: i64,
    value: u64,
}

#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

#[repr(C)]
struct Symbol {
    name: u32,
    rest: [u8; 20],
}

/// Relocations that hold the address of a symbol: a slot of the procedure table, of the offset table, a
/// pointer in data.
const ADDRESSES: [u64; 3] = if cfg!(target_arch = "aarch64") { [1026, 1025, 257] } else { [7, 6, 1] };

unsafe fn exchange(object: Object, exchanged: &[(&str, usize, usize)]) {
    let [strtab, symtab, rela, relasz, jmprel, pltrelsz] = [5, 6, 7, 8, 23, 2];
    let mut found = [0usize; 24];
    let mut at = object.dynamic as *const Entry;
    // SAFETY: a dynamic section ends with a zero.
    while let Entry { tag: tag @ 1.., value } = unsafe { &*at } {
        if let Some(slot) = found.get_mut(*tag as usize) {
            *slot = *value as usize;
        }
        at = at.wrapping_add(1);
    }
    // Some loaders put addresses there, others leave what is in the file.
    let address = |v: usize| if v != 0 && v < object.base { v + object.base } else { v };
    let (names, symbols) = (address(found[strtab]), address(found[symtab]));
    if names == 0 || symbols == 0 {
        return;
    }
    for (table, bytes) in [(found[rela], found[relasz]), (found[jmprel], found[pltrelsz])] {
        if table == 0 {
            continue;
        }
        let count = bytes / size_of::<Relocation>();
        // SAFETY: a table of the object, as long as it says.
        let all = unsafe { std::slice::from_raw_parts(address(table) as *const Relocation, count) };
        for r in all.iter().filter(|r| ADDRESSES.contains(&(r.info & 0xffff_ffff))) {
            let symbol = (symbols as *const Symbol).wrapping_add((r.info >> 32) as usize);
            // SAFETY: a symbol that the object refers to, and its name in the table of names.
            let name =
                unsafe { CStr::from_ptr((names as *const c_char).wrapping_add((*symbol).name as usize)) };
            let slot = (object.base + r.offset as usize) as *mut usize;
            // SAFETY: the loader has written an address there.
            let now = unsafe { slot.read_unaligned() };
            // One that the library brings itself stays.
            let other = exchanged.iter().find(|e| e.0.as_bytes() == name.to_bytes() && e.1 == now);
            if let Some((_, _, other)) = other {
                // SAFETY: as above.
                unsafe { write(object, slot, *other) };
            }
        }
    }
}

unsafe fn write(object: Object, slot: *mut usize, value: usize) {
    let page = super::memory::page();
    let (first, at) = (slot as usize / page * page, slot as usize);
    let len = (at + size_of::<usize>() - first).next_multiple_of(page);
    let is_fixed = (object.relro.0..object.relro.1).contains(&at);
    let protect = |prot| {
        // SAFETY: pages of data of the object, which stay readable.
        unsafe { libc::mprotect(first as *mut c_void, len, prot) }
    };
    if !is_fixed || protect(libc::PROT_READ | libc::PROT_WRITE) == 0 {
        // SAFETY: the caller's slot, on pages that can be written.
        unsafe { slot.write_unaligned(value) };
        if is_fixed {
            protect(libc::PROT_READ);
        }
    }
}
