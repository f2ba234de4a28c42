//! A library that the program itself found and loaded: its own, and no third party's. Who examines files,
//! asks for certificates and maps sealed copies is [`crate::Loader`].
use crate::backend::Plugin;
use crate::descriptor::Descriptor;
use crate::library::{Query, ask};
use crate::maps::Maps;
use crate::one;
use crate::table::{Speaks, Table};
use q4_core::{BuiltinOptions, Reject, RejectCode};
use q4_plugin_abi::Q4PluginQuery;
use std::ffi::c_void;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// The checked table of a library.
pub struct Found {
    descriptor: Descriptor,
    table: Table,
}

impl Found {
    /// Reads the descriptor, asks for the table and checks it.
    ///
    /// # Safety
    /// `descriptor` and `query` are the addresses of `q4_plugin_descriptor` and `q4_plugin_query` in a
    /// library that is never unloaded.
    ///
    /// # Errors
    /// Everything that is wrong with the first of them that is.
    pub unsafe fn of(descriptor: *const c_void, query: *const c_void) -> Result<Self, Vec<Reject>> {
        let maps = Maps::now();
        let need = "symbols that can be read and called";
        if !maps.readable(descriptor as usize, Descriptor::BYTES) || !maps.runnable(query as usize) {
            return Err(one(RejectCode::AbiMismatch, need, format!("{descriptor:p} and {query:p}")));
        }
        // SAFETY: those bytes are mapped for reading and stay so.
        let descriptor = Descriptor::parse(unsafe { &*descriptor.cast() }).map_err(|r| vec![r])?;
        // SAFETY: the caller vouches for the function, the header for its type.
        let call = unsafe { std::mem::transmute::<*const c_void, Q4PluginQuery>(query) };
        // SAFETY: a live structure that states its size.
        let query: Query = Arc::new(move |major, id, out| unsafe { call(major, id, out) });
        let speaks = Speaks::default();
        let raw = ask(&query, speaks)?;
        // SAFETY: an answer of the library; `adopt` follows no pointer before it has looked it up.
        let table = unsafe { Table::adopt(raw, speaks, &descriptor, &Maps::now()) }?;
        Ok(Self { descriptor, table })
    }

    /// What the library calls itself.
    pub fn name(&self) -> &str {
        &self.descriptor.name
    }

    /// Its version and that of its table, for people.
    pub fn described(&self) -> String {
        let api = &self.table.api;
        format!("{} (interface {}.{})", self.descriptor.version, api.abi_major, api.abi_minor)
    }

    /// A backend of it under `name`, made with `options`.
    ///
    /// # Errors
    /// Every reason of the library.
    pub fn create(&self, name: &str, options: &BuiltinOptions) -> Result<Plugin, Vec<Reject>> {
        let origin = format!("{} {}", self.descriptor.name, self.described());
        Plugin::create(self.table.clone(), &self.descriptor, name, origin, Some(options))
    }
}

/// Fails for a file that is no library of this machine, or was cut off: the system's loader would end the
/// process over it. Nothing is looked at where files of this system cannot be read so.
///
/// # Errors
/// What is wrong with it.
pub fn whole(path: &Path) -> Result<(), Reject> {
    let unreadable = |e: std::io::Error| {
        Reject::new(RejectCode::LibraryMissing, "a shared library", format!("unreadable: {e}"))
    };
    let file = File::open(path).map_err(unreadable)?;
    let len = file.metadata().map_err(unreadable)?.len();
    crate::elf::Elf::known(&file, len).map(drop)
}
