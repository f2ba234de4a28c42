//! From an opened file to a checked table: descriptor, the system's loader, a door.
use crate::descriptor::Descriptor;
use crate::file::Opened;
use crate::maps::Maps;
use crate::needs::{LinkMap, Need};
use crate::one;
use crate::rounding::Mode;
use crate::table::{Speaks, Table};
use q4_core::{Reject, RejectCode};
use q4_plugin_abi::{
    ABI_MAJOR, DESCRIPTOR_SYMBOL, INTERFACE_BACKEND, Q4Interface, Q4PluginQuery, Q4Status, QUERY_SYMBOL,
    status,
};
use std::fmt;
use std::mem::size_of;
use std::path::PathBuf;
use std::sync::Arc;

/// The way to a library's table. Both lead to the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Door {
    /// The C symbol, or else the typed door.
    #[default]
    Any,
    /// The symbol `q4_plugin_query`.
    C,
    /// The root module of `abi_stable`.
    AbiStable,
}

impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "any",
            Self::C => "c",
            Self::AbiStable => "abi-stable",
        })
    }
}

/// A library in memory, for ever.
pub struct Mapped {
    pub descriptor: Descriptor,
    pub sha256: String,
    pub path: PathBuf,
    pub door: Door,
    pub table: Table,
    pub query: Query,
    /// Names under which the system's loader knows it and what was loaded for it.
    pub loaded: Vec<PathBuf>,
}

/// The descriptor in the file, before anything of it is mapped; `None` where files of this system cannot be
/// read so. `name` becomes that of the library as soon as it is known.
pub fn describe(opened: &Opened, door: Door, name: &mut String) -> Result<Option<Descriptor>, Vec<Reject>> {
    let elf = crate::elf::Elf::known(&opened.file, opened.len).map_err(|r| vec![r])?;
    let Some(elf) = elf else { return Ok(None) };
    let Some(symbol) = elf.symbol(DESCRIPTOR_SYMBOL) else {
        return Err(one(RejectCode::SymbolMissing, DESCRIPTOR_SYMBOL, "a library without it"));
    };
    let bytes = elf.bytes(&symbol, Descriptor::BYTES).and_then(|b| b.try_into().ok());
    let Some(bytes) = bytes else {
        let need = format!("{} bytes of constant data at {DESCRIPTOR_SYMBOL}", Descriptor::BYTES);
        return Err(one(RejectCode::AbiMismatch, need, "fewer, or none in the file"));
    };
    let descriptor = Descriptor::parse(&bytes).map_err(|r| vec![r])?;
    name.clone_from(&descriptor.name);
    // The symbol of the second door is a number that no author has typed.
    let doors = [
        (Door::C, QUERY_SYMBOL, QUERY_SYMBOL),
        (Door::AbiStable, typed::SYMBOL, "the root module of q4-plugin-root"),
    ];
    let wanted = || doors.iter().filter(|d| door == Door::Any || door == d.0);
    if !wanted().any(|(_, symbol, _)| elf.symbol(symbol).is_some()) {
        let names: Vec<_> = wanted().map(|(.., name)| *name).collect();
        return Err(one(RejectCode::SymbolMissing, names.join(" or "), "a library without it"));
    }
    Ok(Some(descriptor))
}

/// How a library is mapped and asked.
#[derive(Clone, Copy)]
pub struct How {
    pub door: Door,
    pub speaks: Speaks,
    /// The file itself, and not a copy.
    pub in_place: bool,
}

/// Maps the bytes that were hashed, and those of all it needs, and gets and checks their table. Nothing else
/// may have come into the process since `before`.
pub fn map(
    opened: Opened,
    described: Descriptor,
    needs: &[Need],
    before: &LinkMap,
    how: How,
) -> Result<Mapped, Vec<Reject>> {
    let How { door, speaks, in_place } = how;
    let refused = |e| one(RejectCode::LibraryMissing, "a library the system can load", e);
    let mode = Mode::now();
    let mut loaded = Vec::new();
    for need in needs {
        let now = unchanged(need)?;
        if need.by_name && !before.has(need) {
            // The loader takes a library of that name for the one that is needed.
            let name = loadable(now.file, &now.path, &now.sha256).map_err(|r| vec![r])?;
            dlopen(&name).map_err(refused)?;
            loaded.push(name);
        }
    }
    let Opened { path, file, sha256, .. } = opened;
    let name = if in_place { Ok(path.clone()) } else { loadable(file, &path, &sha256) };
    let name = name.map_err(|r| vec![r])?;
    let handle = dlopen(&name).map_err(refused)?;
    mode.unchanged()?;
    loaded.push(name.clone());
    LinkMap::now().is_expected(before, &loaded, needs).map_err(|r| vec![r])?;
    for need in needs.iter().filter(|n| !n.by_name) {
        // It was opened a second time, by the system.
        unchanged(need)?;
    }
    let in_memory = descriptor(&handle, &Maps::now())?;
    if described != in_memory {
        let need = format!("the descriptor in the file: {} {}", described.name, described.version);
        return Err(one(
            RejectCode::AbiMismatch,
            need,
            format!("{} {} in memory", in_memory.name, in_memory.version),
        ));
    }
    let (door, query) = self::query(&handle, &name, door)?;
    let raw = ask(&query, speaks)?;
    // SAFETY: an answer of the library; `adopt` follows no pointer before it has looked it up.
    let table = unsafe { Table::adopt(raw, speaks, &in_memory, &Maps::now()) }?;
    Ok(Mapped { descriptor: in_memory, sha256, path, door, table, query, loaded })
}

/// A library that is needed, with the bytes it had when it was examined.
fn unchanged(need: &Need) -> Result<Opened, Vec<Reject>> {
    let now = crate::file::open(&need.path).map_err(|r| vec![r])?;
    if now.sha256 == need.sha256 {
        return Ok(now);
    }
    let Reject { need: before, have, .. } = crate::file::changed(&need.sha256, &now.sha256);
    Err(one(RejectCode::LibraryMissing, before, format!("{}, {have}", need.path.display())))
}

/// What to hand to the system's loader: on Linux a sealed copy of what was hashed, so that it is what is
/// mapped, now and as long as it runs. The handle is never closed, because the loader takes two libraries of
/// one name for one, and a closed number would be given out again. A library that looks for others beside
/// itself does not find them that way; it has to name their folder.
///
/// The name goes into the loader's list, and debuggers open it in a process of their own: `/proc/self` would
/// be theirs, and a pipe of theirs may have that number.
#[cfg(target_os = "linux")]
fn loadable(file: std::fs::File, path: &std::path::Path, sha256: &str) -> Result<PathBuf, Reject> {
    use std::collections::BTreeMap;
    use std::fs::metadata;
    use std::os::fd::{IntoRawFd, RawFd};
    use std::os::unix::fs::MetadataExt;
    use std::sync::Mutex;
    /// By hash: the same bytes are one library, with one set of globals, as the same file would be.
    static COPIES: Mutex<BTreeMap<String, RawFd>> = Mutex::new(BTreeMap::new());
    let mut copies = COPIES.lock().unwrap_or_else(|e| e.into_inner());
    let copy = match copies.get(sha256) {
        Some(copy) => *copy,
        None => {
            let called = path.file_name().unwrap_or_default().to_string_lossy();
            let copy = crate::file::sealed(file, &called, sha256)?.into_raw_fd();
            copies.insert(sha256.to_owned(), copy);
            copy
        }
    };
    // The number of this process, which may be a fork of the one that made the copy.
    let [own, ours] = [std::process::id().to_string(), "self".into()]
        .map(|process| PathBuf::from(format!("/proc/{process}/fd/{copy}")));
    let file_of = |name: &PathBuf| metadata(name).map(|m| (m.dev(), m.ino())).ok();
    // Where /proc counts processes otherwise than this one does, the number means somebody else.
    Ok(if file_of(&own).is_some() && file_of(&own) == file_of(&ours) { own } else { ours })
}

#[cfg(not(target_os = "linux"))]
fn loadable(_: std::fs::File, path: &std::path::Path, _: &str) -> Result<PathBuf, Reject> {
    Ok(path.to_owned())
}

#[cfg(unix)]
type Handle = std::mem::ManuallyDrop<libloading::os::unix::Library>;
#[cfg(windows)]
type Handle = std::mem::ManuallyDrop<libloading::os::windows::Library>;

#[cfg(unix)]
fn dlopen(path: &std::path::Path) -> Result<Handle, String> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: running the initialisers of a file that the user named is what loading is.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map(Handle::new).map_err(reason)
}

#[cfg(windows)]
fn dlopen(path: &std::path::Path) -> Result<Handle, String> {
    use libloading::os::windows::{
        LOAD_LIBRARY_SEARCH_DEFAULT_DIRS, LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR, Library,
    };
    // SAFETY: as on Unix; these flags leave the current directory out.
    unsafe {
        Library::load_with_flags(path, LOAD_LIBRARY_SEARCH_DEFAULT_DIRS | LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR)
    }
    .map(Handle::new)
    .map_err(reason)
}

fn reason(e: libloading::Error) -> String {
    std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string)
}

fn descriptor(handle: &Handle, maps: &Maps) -> Result<Descriptor, Vec<Reject>> {
    // SAFETY: only the address is taken.
    let Ok(at) = (unsafe { handle.get::<*const [u8; Descriptor::BYTES]>(DESCRIPTOR_SYMBOL) }) else {
        return Err(one(RejectCode::SymbolMissing, DESCRIPTOR_SYMBOL, "a library without it"));
    };
    if !maps.readable(*at as usize, Descriptor::BYTES) {
        return Err(one(
            RejectCode::AbiMismatch,
            "a descriptor in memory that can be read",
            format!("{:p}", *at),
        ));
    }
    // SAFETY: those bytes are mapped for reading, in a library that is never unloaded.
    Descriptor::parse(unsafe { &**at }).map_err(|r| vec![r])
}

/// `q4_plugin_query`, through either door.
pub type Query = Arc<dyn Fn(u32, u32, &mut Q4Interface) -> Q4Status + Send + Sync>;

fn query(handle: &Handle, name: &std::path::Path, door: Door) -> Result<(Door, Query), Vec<Reject>> {
    if door != Door::AbiStable {
        // SAFETY: the header gives the symbol this type; the library is never unloaded.
        if let Ok(found) = unsafe { handle.get::<Q4PluginQuery>(QUERY_SYMBOL) } {
            let call = *found;
            // SAFETY: a live structure that states its size.
            return Ok((Door::C, Arc::new(move |major, id, out| unsafe { call(major, id, out) })));
        }
        if door == Door::C {
            return Err(one(RejectCode::SymbolMissing, QUERY_SYMBOL, "a library without it"));
        }
    }
    typed::open(name).map(|query| (Door::AbiStable, query))
}

pub fn ask(query: &Query, speaks: Speaks) -> Result<*const q4_plugin_abi::Q4BackendV1, Vec<Reject>> {
    let mut out = Q4Interface {
        struct_size: size_of::<Q4Interface>(),
        abi_minor: speaks.minor,
        reserved: 0,
        table: std::ptr::null(),
    };
    let need = format!("the table of interface {ABI_MAJOR}.{}", speaks.minor);
    match query(ABI_MAJOR, INTERFACE_BACKEND, &mut out) {
        status::OK if out.table.is_null() => Err(one(RejectCode::AbiMismatch, need, "NULL and success")),
        status::OK => Ok(out.table.cast()),
        status::PANICKED => Err(one(RejectCode::Panicked, need, "a library that panicked when it was asked")),
        status::ABI => Err(one(RejectCode::AbiMismatch, need, "a library that does not have it")),
        other => Err(one(RejectCode::Internal, need, format!("status {other}"))),
    }
}

#[cfg(feature = "abi-stable")]
mod typed {
    //! The door of `abi_stable`.
    use super::{Query, Reject, RejectCode, one};
    use std::path::Path;
    use std::sync::Arc;

    pub const SYMBOL: &str = q4_plugin_root::SYMBOL;

    pub fn open(path: &Path) -> Result<Query, Vec<Reject>> {
        let root = q4_plugin_root::open(path).map_err(|e| {
            let text = e.to_string();
            // Its texts are pages long and end with what matters.
            let tail: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
            let tail = tail[tail.len().saturating_sub(4)..].join(" ");
            one(
                RejectCode::AbiMismatch,
                format!("the root module of q4-plugin-root {}", q4_plugin_root::VERSION),
                tail,
            )
        })?;
        let query = root.query();
        // SAFETY: a live structure that states its size.
        Ok(Arc::new(move |major, id, out| unsafe { query(major, id, (&raw mut *out).cast()) }))
    }
}

#[cfg(not(feature = "abi-stable"))]
mod typed {
    //! Without that feature there is no such door.
    use super::{Query, Reject, RejectCode, one};
    use std::path::Path;

    pub const SYMBOL: &str = super::QUERY_SYMBOL;

    pub fn open(_: &Path) -> Result<Query, Vec<Reject>> {
        Err(one(RejectCode::NotCompiledIn, "a build with the feature abi-stable", "this one"))
    }
}
