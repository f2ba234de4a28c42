//! A library's table, copied once after every pointer in it was looked up, and the calls through it.
use crate::descriptor::Descriptor;
use crate::maps::Maps;
use q4_core::{ExecPath, Reject, RejectCode, Result};
use q4_plugin_abi as abi;
use q4_plugin_abi::{Prefixed, Q4BackendV1, Q4Offer, Q4Str};
use q4_plugin_sdk::{codes, message};
use std::borrow::Cow;
use std::mem::size_of;

/// How much of the contract a program knows. Anything but the default is for tests of the promise that old
/// and new fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speaks {
    /// Minor it says it is.
    pub minor: u32,
    /// Bytes of a table it reads.
    pub table_bytes: usize,
}

impl Speaks {
    /// The first version of this major.
    pub const FIRST: Self = Self { minor: 0, table_bytes: <Q4BackendV1 as Prefixed>::MIN };
}

impl Default for Speaks {
    /// This version.
    fn default() -> Self {
        Self { minor: abi::ABI_MINOR, table_bytes: size_of::<Q4BackendV1>() }
    }
}

/// More offers than this are damage.
const MAX_OFFERS: u64 = 64;

/// A table that is complete. Its functions are called by `backend` alone.
#[derive(Clone)]
pub struct Table {
    /// The copy.
    pub api: Q4BackendV1,
    /// What of its offers this program knows.
    pub offers: Vec<(Cow<'static, str>, ExecPath)>,
}

impl Table {
    /// Checks and copies the table at `raw`.
    ///
    /// # Safety
    /// What `maps` shows at `raw` stays mapped.
    pub unsafe fn adopt(
        raw: *const Q4BackendV1,
        speaks: Speaks,
        descriptor: &Descriptor,
        maps: &Maps,
    ) -> Result<Self, Vec<Reject>> {
        let mismatch = |need: String, have: String| vec![Reject::new(RejectCode::AbiMismatch, need, have)];
        let word = size_of::<usize>();
        if !raw.is_aligned() || !maps.readable(raw as usize, word) {
            return Err(mismatch("an aligned table in memory that can be read".into(), format!("{raw:p}")));
        }
        // SAFETY: aligned and mapped for reading.
        let given = unsafe { raw.cast::<usize>().read() };
        let need = <Q4BackendV1 as Prefixed>::MIN;
        if given < need || !maps.readable(raw as usize, given.min(speaks.table_bytes)) {
            return Err(mismatch(
                format!("a table of at least {need} bytes"),
                format!("struct_size {given}"),
            ));
        }
        // SAFETY: as many bytes as are copied are mapped for reading.
        let api = unsafe { abi::read_known(raw, speaks.table_bytes) };
        let Some(api) = api else {
            return Err(mismatch("a table that begins with its size".into(), "none".into()));
        };
        if api.abi_major != abi::ABI_MAJOR {
            let have = format!("a table of {}.{}", api.abi_major, api.abi_minor);
            return Err(mismatch(format!("a table of interface {}.x", abi::ABI_MAJOR), have));
        }
        let mut reasons = functions(&api, maps);
        for (what, text, want) in [
            ("name", api.name, &descriptor.name),
            ("version", api.version, &descriptor.version),
            ("vendor", api.vendor, &descriptor.vendor),
        ] {
            let have = readable(text, maps);
            if have.as_deref() != Some(want.as_str()) {
                let have = have.map_or_else(|| "no text that can be read".into(), |t| format!("`{t}`"));
                reasons.extend(mismatch(format!("the {what} of the descriptor, `{want}`"), have));
            }
        }
        match offers(&api, maps) {
            Ok(offers) if reasons.is_empty() => Ok(Self { api, offers }),
            Ok(_) => Err(reasons),
            Err(more) => {
                reasons.push(more);
                Err(reasons)
            }
        }
    }
}

fn functions(api: &Q4BackendV1, maps: &Maps) -> Vec<Reject> {
    macro_rules! entries {
        ($($name:ident),*) => { [$((stringify!($name), api.$name.map(|f| f as usize))),*] };
    }
    let needed =
        entries!(create, destroy, can_prepare, prepare, release, info, workspace, forward, dequantize);
    let mut optional = entries!(backward_input, probe, create_with, footprint, fuses, forward_fused).to_vec();
    let device = entries!(device, device_alloc, device_free, copy_in, copy_out, synchronize);
    let grouped = entries!(group, release_group, group_workspace, forward_grouped);
    let mut lacking = Vec::new();
    for (whole, of) in [(&device[..], "the memory of a device"), (&grouped, "grouped products")] {
        optional.extend(whole);
        let is_part = whole.iter().any(|e| e.1.is_some());
        let absent = whole.iter().filter(|e| is_part && e.1.is_none());
        lacking.extend(absent.map(|e| (e.0, format!("NULL beside others of {of}"))));
    }
    let missing = needed.iter().filter(|e| e.1.is_none()).map(|e| (e.0, "NULL".to_owned()));
    let wild =
        needed.iter().chain(&optional).filter_map(|e| Some((e.0, e.1.filter(|f| !maps.runnable(*f))?)));
    missing
        .chain(lacking)
        .chain(wild.map(|(name, at)| (name, format!("{at:#x}, which is no code"))))
        .map(|(name, have)| Reject::new(RejectCode::AbiMismatch, format!("a function `{name}`"), have))
        .collect()
}

fn offers(api: &Q4BackendV1, maps: &Maps) -> Result<Vec<(Cow<'static, str>, ExecPath)>, Reject> {
    let count = api.n_offers;
    let bytes = count.min(MAX_OFFERS) as usize * size_of::<Q4Offer>();
    if count == 0
        || count > MAX_OFFERS
        || !api.offers.is_aligned()
        || !maps.readable(api.offers as usize, bytes)
    {
        let need = format!("1 to {MAX_OFFERS} offers in memory that can be read");
        return Err(Reject::new(RejectCode::AbiMismatch, need, format!("{count} at {:p}", api.offers)));
    }
    // SAFETY: aligned, mapped for reading, and of a library that is never unloaded.
    let all = unsafe { std::slice::from_raw_parts(api.offers, count as usize) };
    let known: Vec<_> = all
        .iter()
        .filter_map(|o| Some((codes::schema_from(o.schema, o.revision)?.into(), codes::path_from(o.path)?)))
        .collect();
    if known.is_empty() {
        let one = |o: &Q4Offer| format!("schema {} revision {} via path {}", o.schema, o.revision, o.path);
        let have = all.iter().map(one).collect::<Vec<_>>().join(", ");
        return Err(Reject::new(RejectCode::SchemaUnsupported, "an offer this program knows", have));
    }
    Ok(known)
}

fn readable(text: Q4Str, maps: &Maps) -> Option<String> {
    let fits = text.len <= 256 && maps.readable(text.ptr as usize, text.len);
    // SAFETY: those bytes are mapped for reading.
    fits.then(|| unsafe { message::text(text, 256) }.into_owned())
}
