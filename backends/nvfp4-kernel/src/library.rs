//! Loads libNVFP4 and accepts it only if its table is one we can call: the first usable file in search order
//! wins, and the report names every file that was not.
use crate::abi;
use crate::find::{self, Place};
use crate::table::Table;
use once_cell::sync::OnceCell;
use q4_core::{ProbeItem, Reject, RejectCode};
use std::path::{Path, PathBuf};
use std::{env, ptr};

#[cfg(unix)]
use libloading::os::unix::Library as Handle;
#[cfg(windows)]
use libloading::os::windows::Library as Handle;

/// A loaded library. Never unloaded: weights and threads of its dependencies may outlive any owner we could
/// name.
pub struct Library {
    /// Its functions.
    pub table: Table,
    /// What it calls its version.
    pub version: String,
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
            Ok((table, version, path)) => {
                let place = place.describe();
                return Ok(Box::leak(Box::new(Library { table, version, path, place, passed_over })));
            }
            Err(reasons) => passed_over.extend(reasons),
        }
    }
    let file = find::file_name().display().to_string();
    let (need, have) = match places.as_slice() {
        [Place::Named(path)] => (
            format!(
                "--nvfp4-lib PATH of a libNVFP4 with ABI {}.x, or neither --nvfp4-lib nor Q4_NVFP4_LIB",
                abi::ABI_MAJOR
            ),
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
fn open(place: &Place, path: &Path) -> Result<(Table, String, String), Vec<Reject>> {
    let reject = |code, need: String, have: String| {
        vec![Reject::new(code, need, format!("{}: {have}", place.describe()))]
    };
    let missing = |have| reject(RejectCode::LibraryMissing, "a shared library of this machine".into(), have);
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    if path.is_absolute() {
        crate::elf::check(path).map_err(missing)?;
    }
    let handle = dlopen(path).map_err(missing)?;
    let Some(get_api) = symbol(&handle, "nvfp4_get_api") else {
        let old: Vec<_> = TENSOR_HANDLE_SYMBOLS.into_iter().filter(|name| has(&handle, name)).collect();
        std::mem::forget(handle);
        let need = format!("nvfp4_get_api, ABI {}.x", abi::ABI_MAJOR);
        return Err(if old.is_empty() {
            reject(RejectCode::SymbolMissing, need, "a library without it".into())
        } else {
            let have = format!("an old libNVFP4 that takes tensor handles ({})", old.join(", "));
            reject(RejectCode::LibraryTooOld, need, have)
        });
    };
    std::mem::forget(handle);
    let mut minor = 0;
    // SAFETY: the one signature this symbol has had; any major may be asked for.
    let table_of = |major, minor: *mut u32| unsafe { get_api(major, minor) };
    let raw = table_of(abi::ABI_MAJOR, &mut minor);
    if raw.is_null() {
        let others = (0..16).filter(|&m| m != abi::ABI_MAJOR && !table_of(m, ptr::null_mut()).is_null());
        let others: Vec<_> = others.map(|m| m.to_string()).collect();
        let have = if others.is_empty() {
            "no ABI it knows below 16".into()
        } else {
            format!("ABI {}", others.join(", "))
        };
        let need =
            format!("ABI {}.x (this program speaks {}.{})", abi::ABI_MAJOR, abi::ABI_MAJOR, abi::ABI_MINOR);
        return Err(reject(RejectCode::AbiMismatch, need, have));
    }
    // SAFETY: not NULL, so it is a table of our major, which starts with its size and lives as long as the
    // library.
    let (table, version) = unsafe { Table::adopt(raw) }.map_err(|problems| {
        problems
            .into_iter()
            .flat_map(|(need, have)| reject(RejectCode::AbiMismatch, need, have))
            .collect::<Vec<_>>()
    })?;
    let path = if path.is_absolute() { Some(path.to_owned()) } else { mapped_at(raw as usize) };
    Ok((table, version, path.map_or_else(|| place.describe(), |p| p.display().to_string())))
}

/// What libNVFP4 exported before it had a table, when it took pointers to tensors of one build of libtorch.
const TENSOR_HANDLE_SYMBOLS: [&str; 3] = ["NVFP4_quantize", "NVFP4_scaled_mm", "THSFP4_quantize"];

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

fn symbol(handle: &Handle, name: &str) -> Option<abi::GetApiFn> {
    // SAFETY: the header gives the symbol this type; the library is never unloaded, so the pointer stays
    // good.
    unsafe { handle.get::<Option<abi::GetApiFn>>(name) }.ok().and_then(|s| *s)
}

fn has(handle: &Handle, name: &str) -> bool {
    // SAFETY: the address is not used.
    unsafe { handle.get::<*const u8>(name) }.is_ok()
}

/// The file whose mapping holds `address`, from the kernel's list; `None` where there is no such list.
fn mapped_at(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let range = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        let file = fields.nth(4)?.trim_start();
        (range.contains(&address) && file.starts_with('/')).then(|| file.into())
    })
}

impl Library {
    /// The first line of `diagnose`: what was loaded, and what was not.
    pub fn note(&self) -> ProbeItem {
        let minor = self.table.minor();
        let mut detail =
            format!("libNVFP4 {} (ABI {}.{minor}) from {}", self.version, abi::ABI_MAJOR, self.place);
        for reason in &self.passed_over {
            detail += &format!("; passed over: {reason}");
        }
        ProbeItem { id: "library.load".into(), reasons: Vec::new(), detail }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn an_address_leads_to_its_file() {
        let own = env::current_exe().and_then(std::fs::canonicalize).ok();
        assert!(own.is_some());
        assert_eq!(mapped_at(mapped_at as fn(usize) -> Option<PathBuf> as usize), own);
        assert_eq!(mapped_at(1), None);
    }
}
