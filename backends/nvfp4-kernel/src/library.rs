//! Loads libNVFP4 and accepts it only if its table is one we can call: the first usable file in search order
//! wins, and the report names every file that was not.
use crate::find::{self, Place};
use once_cell::sync::OnceCell;
use q4_core::{ProbeItem, Reject, RejectCode};
use q4_plugin_host::Found;
use std::env;
use std::path::Path;

#[cfg(unix)]
use libloading::os::unix::Library as Handle;
#[cfg(windows)]
use libloading::os::windows::Library as Handle;

/// What the library calls itself.
const CALLED: &str = "libnvfp4";

/// A loaded library. Never unloaded: weights and threads of its dependencies may outlive any owner we could
/// name.
pub struct Library {
    /// Its table.
    pub found: Found,
    /// File it came from.
    pub path: String,
    /// How that file came to be tried.
    place: String,
    /// Places that were tried before it.
    passed_over: Vec<Reject>,
}

/// The library found without being named. A failed search is not kept, so that a later one may succeed.
static FOUND: OnceCell<&'static Library> = OnceCell::new();

/// The library at `named`, or the first usable one in search order.
///
/// # Errors
/// Every place with its reason; the `need` of the last reason is the command that would help.
pub fn load(named: Option<&Path>) -> Result<&'static Library, Vec<Reject>> {
    if named.is_some() {
        return first(find::places(named, None));
    }
    FOUND.get_or_try_init(|| first(find::places(None, env::current_exe().ok().as_deref()))).copied()
}

fn first(places: Vec<Place>) -> Result<&'static Library, Vec<Reject>> {
    let mut passed_over = Vec::new();
    for place in &places {
        match place.resolve().map_err(|r| vec![r]).and_then(|path| open(place, &path)) {
            Ok((found, path)) => {
                let place = place.describe();
                return Ok(Box::leak(Box::new(Library { found, path, place, passed_over })));
            }
            Err(reasons) => passed_over.extend(reasons),
        }
    }
    let file = find::file_name().display().to_string();
    let (need, have) = match places.as_slice() {
        [Place::Named(path)] => (
            "--nvfp4-lib PATH of a libNVFP4 that this program knows, or neither --nvfp4-lib nor Q4_NVFP4_LIB"
                .to_owned(),
            path.display().to_string(),
        ),
        _ => (
            format!("--nvfp4-lib PATH, Q4_NVFP4_LIB, or {file} beside the executable"),
            format!("no usable {file}"),
        ),
    };
    passed_over.push(Reject::new(RejectCode::LibraryMissing, need, have));
    Err(passed_over)
}

/// Loads `path` and checks its table.
fn open(place: &Place, path: &Path) -> Result<(Found, String), Vec<Reject>> {
    let at = |r: Reject| Reject::new(r.code, r.need, format!("{}: {}", place.describe(), r.have));
    let missing = |have: String| {
        vec![at(Reject::new(RejectCode::LibraryMissing, "a shared library of this machine", have))]
    };
    if path.is_absolute() {
        q4_plugin_host::whole(path).map_err(|r| vec![at(r)])?;
    }
    let handle = dlopen(path).map_err(missing)?;
    let symbols = (address(&handle, DESCRIPTOR), address(&handle, QUERY));
    let older: Vec<_> = OLDER.into_iter().filter(|name| address(&handle, name).is_some()).collect();
    std::mem::forget(handle);
    let (Some(descriptor), Some(query)) = symbols else {
        let need = format!("{QUERY}, the table of q4_plugin.h");
        return Err(vec![at(match older.as_slice() {
            [] => Reject::new(RejectCode::SymbolMissing, need, "a library without it"),
            names => {
                let have = format!("an older libNVFP4 with a table of its own ({})", names.join(", "));
                Reject::new(RejectCode::LibraryTooOld, need, have)
            }
        })]);
    };
    // SAFETY: `q4_plugin.h` gives the symbols these types, and the library is never unloaded.
    let found = unsafe { Found::of(descriptor, query) };
    let found = found.map_err(|all| all.into_iter().map(at).collect::<Vec<_>>())?;
    if found.name() != CALLED {
        let have = format!("`{}`", found.name());
        return Err(vec![at(Reject::new(RejectCode::AbiMismatch, format!("a library `{CALLED}`"), have))]);
    }
    let path =
        if path.is_absolute() { Some(path.to_owned()) } else { q4_plugin_host::file_at(query as usize) };
    Ok((found, path.map_or_else(|| place.describe(), |p| p.display().to_string())))
}

/// The symbols of a plugin.
const DESCRIPTOR: &str = "q4_plugin_descriptor";
const QUERY: &str = "q4_plugin_query";
/// What libNVFP4 exported before: a table of its own, and functions that took pointers to tensors of one
/// build of libtorch.
const OLDER: [&str; 4] = ["nvfp4_get_api", "NVFP4_quantize", "NVFP4_scaled_mm", "THSFP4_quantize"];

#[cfg(unix)]
fn dlopen(path: &Path) -> Result<Handle, String> {
    use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};
    // SAFETY: running the initialisers of a file that the user named, or that lies in a guarded place, is
    // what loading is.
    unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(describe)
}

#[cfg(windows)]
fn dlopen(path: &Path) -> Result<Handle, String> {
    use libloading::os::windows::{LOAD_LIBRARY_SEARCH_DEFAULT_DIRS, LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR};
    let beside = if path.is_absolute() { LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR } else { 0 };
    // SAFETY: as on Unix; these flags leave the current directory out.
    unsafe { Handle::load_with_flags(path, LOAD_LIBRARY_SEARCH_DEFAULT_DIRS | beside) }.map_err(describe)
}

fn describe(e: libloading::Error) -> String {
    std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string)
}

fn address(handle: &Handle, name: &str) -> Option<*const std::ffi::c_void> {
    // SAFETY: only the address is taken.
    unsafe { handle.get::<*const std::ffi::c_void>(name) }.ok().map(|symbol| *symbol)
}

impl Library {
    /// The first line of `diagnose`: what was loaded, and what was not.
    pub fn note(&self) -> ProbeItem {
        let mut detail = format!("libNVFP4 {} from {}", self.found.described(), self.place);
        for reason in &self.passed_over {
            detail += &format!("; passed over: {reason}");
        }
        ProbeItem { id: "library.load".into(), reasons: Vec::new(), detail }
    }
}
