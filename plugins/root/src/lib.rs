//! The typed door to a plugin: an `abi_stable` root module of two functions that hand over the same C table
//! as the symbol `q4_plugin_query`, so that loader, checks and versions exist once.
//!
//! Frozen: `abi_stable` refuses a library whose root module has fewer fields than the program's, so
//! nothing is ever added here; what grows is the table, by its size.
use abi_stable::StableAbi;
use abi_stable::library::{
    CheckTypeLayout, LibHeader, LibraryError, ROOT_MODULE_LOADER_NAME, RootModule, RootModuleResult,
    lib_header_from_path,
};
use abi_stable::sabi_types::VersionStrings;
use abi_stable::std_types::RStr;
use std::ffi::c_void;
use std::path::Path;

#[doc(hidden)]
pub use abi_stable;

/// Version `abi_stable` compares: that of the root module, not of a crate.
pub const VERSION: &str = "1.0.0";

/// As `q4_plugin_query` of the C door.
pub type Query = unsafe extern "C" fn(abi_major: u32, id: u32, out: *mut c_void) -> i32;

/// The root module of a library.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PluginRootRef)))]
#[sabi(missing_field(panic))]
pub struct PluginRoot {
    /// Who made it, as in its descriptor.
    pub vendor: extern "C" fn() -> RStr<'static>,
    /// Fills a `q4_interface`.
    #[sabi(last_prefix_field)]
    pub query: unsafe extern "C" fn(abi_major: u32, id: u32, out: *mut c_void) -> i32,
}

impl RootModule for PluginRootRef {
    abi_stable::declare_root_module_statics! {PluginRootRef}
    const BASE_NAME: &'static str = "q4_plugin";
    const NAME: &'static str = "q4 plugin";
    const VERSION_STRINGS: VersionStrings = VersionStrings::new(VERSION);
}

/// Name of the symbol this door is behind.
pub const SYMBOL: &str = ROOT_MODULE_LOADER_NAME;

/// Opens the door of the library at `path`, which stays loaded for ever.
///
/// Never through `RootModule::load_from*`: those remember one library per type and hand it out for every
/// path.
///
/// # Errors
/// What `abi_stable` finds: no such symbol, another `abi_stable`, another root module.
pub fn open(path: &Path) -> Result<PluginRootRef, LibraryError> {
    lib_header_from_path(path)?.init_root_module::<PluginRootRef>()
}

/// The header a library exports, for [`export_root`].
#[doc(hidden)]
pub const fn header(constructor: extern "C" fn() -> RootModuleResult) -> LibHeader {
    // SAFETY: `export_root` passes a function that returns a `PluginRootRef`.
    unsafe { LibHeader::from_constructor::<PluginRootRef>(constructor, CheckTypeLayout::Yes) }
}

/// Exports the root module of a library: `export_root!(vendor, query)`, an `extern "C" fn() -> RStr<'static>`
/// and a [`Query`].
#[macro_export]
macro_rules! export_root {
    ($vendor:path, $query:path) => {
        #[doc(hidden)]
        #[unsafe(export_name = "_1as_0lib_1header_0root_bmodule_bloader")]
        pub static Q4_PLUGIN_ROOT: $crate::abi_stable::library::LibHeader = {
            fn module() -> $crate::PluginRootRef {
                $crate::abi_stable::prefix_type::PrefixTypeTrait::leak_into_prefix($crate::PluginRoot {
                    vendor: $vendor,
                    query: $query,
                })
            }
            extern "C" fn constructor() -> $crate::abi_stable::library::RootModuleResult {
                $crate::abi_stable::library::__call_root_module_loader(module)
            }
            $crate::header(constructor)
        };
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exported_name_is_the_one_that_is_looked_up() {
        assert!(include_str!("lib.rs").contains(&format!("#[unsafe(export_name = \"{SYMBOL}\")]")));
    }
}
