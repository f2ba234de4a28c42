//! The table as a [`Q4Backend`]: every question is translated, and its answer compared with the request.
mod group;

use crate::calls::{Held, Prepared, checked};
use crate::descriptor::Descriptor;
use crate::device;
use crate::instance::Instance;
use crate::library::Mapped;
use crate::one;
use crate::table::Table;
use q4_core::device::{DeviceMemory, memory_of};
use q4_core::{
    BackendDescriptor, BuiltinOptions, Code, Device, Error, ExecContext, ExecPath, Footprint, HostEnv,
    LinearSpec, OpSet, PreparedGroup, PreparedInfo, PreparedWeight, ProbeItem, Q4Backend, Q4Weight, Reject,
    RejectCode, Result, VendorDevice, Verdict,
};
use q4_plugin_abi::{Q4Footprint, Q4PreparedInfo, Q4Str, status};
use q4_plugin_sdk::lend::{self, LentEnv, LentSpec, LentWeight};
use q4_plugin_sdk::{codes, message};
use std::any::Any;
use std::ffi::c_void;
use std::mem::size_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;

/// Longest text, and most reasons, that are taken from a library.
const MAX_TEXT: usize = 1024;
const MAX_REASONS: usize = 64;

/// A loaded backend.
pub struct Plugin {
    descriptor: BackendDescriptor,
    origin: String,
    devices: Vec<VendorDevice>,
    instance: Arc<Instance>,
}

impl Plugin {
    /// Creates the library's backend.
    pub fn new(mapped: &Mapped) -> Result<Self, Vec<Reject>> {
        let (d, table) = (&mapped.descriptor, &mapped.table);
        let origin = format!(
            "{} {} by {} from {} (sha256 {}, interface {}.{}, door {})",
            d.name,
            d.version,
            if d.vendor.is_empty() { "nobody" } else { &d.vendor },
            mapped.path.display(),
            mapped.sha256,
            table.api.abi_major,
            table.api.abi_minor,
            mapped.door
        );
        Self::create(table.clone(), d, &d.name, origin, None)
    }

    /// The same under `name`, with options where there are some to give. `origin` says where it came from.
    pub fn create(
        table: Table,
        d: &Descriptor,
        name: &str,
        origin: String,
        options: Option<&BuiltinOptions>,
    ) -> Result<Self, Vec<Reject>> {
        let mut raw = ptr::null_mut();
        let need = format!("a backend `{name}`");
        let refuse = |code, have: String| vec![Reject::new(code, need.clone(), have)];
        let mut reasons = Vec::<Reject>::new();
        let done = match (options, table.api.create_with, table.api.create) {
            (Some(options), Some(create_with), _) => {
                let (options, user) = (lend::options(options), (&raw mut reasons).cast());
                // SAFETY: options, a place for a pointer and a message buffer, all alive, and the sink that
                // fits `user`.
                checked("create_with", |err| unsafe { create_with(&options, &mut raw, on_reason, user, err) })
            }
            // SAFETY: a place for a pointer and a message buffer, both alive.
            (_, _, Some(create)) => checked("create", |err| unsafe { create(&mut raw, err) }),
            _ => return Err(refuse(RejectCode::AbiMismatch, "no `create`".into())),
        };
        if let Err((status, e)) = done {
            let code = if status == status::PANICKED { RejectCode::Panicked } else { RejectCode::Internal };
            let told = reasons.is_empty() || status != status::UNSUPPORTED;
            return Err(if told { refuse(code, message::line(&e)) } else { reasons });
        }
        if raw.is_null() {
            return Err(refuse(RejectCode::Internal, "NULL and success".into()));
        }
        let descriptor = BackendDescriptor {
            name: name.to_owned().into(),
            version: d.version.clone().into(),
            vendor: d.vendor.clone().into(),
            priority: table.api.priority,
            offers: table.offers.clone(),
        };
        let instance = Instance::new(name, table, raw);
        let devices = device::all(&instance).map_err(|reason| vec![reason])?;
        Ok(Self { descriptor, origin, devices, instance: Arc::new(instance) })
    }
}

impl Q4Backend for Plugin {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }

    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        let mut items =
            vec![ProbeItem { id: "plugin.load".into(), reasons: Vec::new(), detail: self.origin.clone() }];
        if let Some(probe) = self.instance.table.api.probe {
            let (env, user, _turn) = (LentEnv::new(env), (&raw mut items).cast(), self.instance.turn());
            // SAFETY: a live backend, facts and buffers that outlive the call, and the sink that fits `user`.
            let done = self
                .instance
                .call("probe", |err| unsafe { probe(self.instance.raw, env.raw(), on_item, user, err) });
            if let Err(e) = done {
                let reasons = vec![Reject::new(RejectCode::Internal, "a probe that ends", message::line(&e))];
                items.push(ProbeItem { id: "plugin.probe".into(), reasons, detail: String::new() });
            }
        }
        items
    }

    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        self.instance.verdict(&question(spec, path, &self.devices, &self.instance.name)?, env)
    }

    fn devices(&self) -> Vec<VendorDevice> {
        self.devices.clone()
    }

    fn memory(&self, device: Device) -> Result<Arc<dyn DeviceMemory>> {
        let Device::Vendor { ordinal, .. } = device else { return memory_of(device) };
        let Some(facts) = self.devices.iter().find(|d| d.device == device) else {
            return Err(Error::new(Code::DeviceMissing, format!("memory of {device}"))
                .need(format!("a device of {}", self.instance.name))
                .have(listed(&self.devices)));
        };
        let instance = self.instance.clone();
        Ok(Arc::new(device::Memory { instance, device: ordinal, facts: facts.clone() }))
    }

    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        self.instance.footprint(spec, path).unwrap_or_else(|| Footprint::usual(spec, path))
    }

    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        let (lent, weight, exec) = (LentSpec::new(spec, path)?, LentWeight::new(w)?, lend::exec(cx)?);
        let i = &self.instance;
        if path == ExecPath::NativeKernel && spec.device == Device::Cpu {
            return Err(i.lacks("native-kernel on a CPU"));
        }
        let Some(prepare) = i.table.api.prepare else { return Err(i.lacks("prepare")) };
        let mut raw = ptr::null_mut();
        {
            let _turn = i.turn();
            // SAFETY: a live backend; spec, weight bytes, scratch and buffers outlive the call.
            i.call("prepare", |err| unsafe {
                prepare(i.raw, lent.raw(), weight.raw(), &exec, &mut raw, err)
            })?;
        }
        if raw.is_null() {
            return Err(Error::new(Code::BackendFailed, format!("{}: prepare", i.name))
                .need("a weight")
                .have("NULL and success"));
        }
        let held = Held { instance: i.clone(), raw };
        let facts = held.facts()?;
        let info = agreed(&facts, spec, path, w, &i.name, i.table.api.backward_input.is_some())?;
        Ok(Box::new(Prepared { held, info }))
    }

    fn group(
        &self,
        weights: &[Arc<dyn PreparedWeight>],
        cx: &mut ExecContext<'_>,
    ) -> Result<Option<Box<dyn PreparedGroup>>> {
        let own = |w: &Arc<dyn PreparedWeight>| {
            let w = (&**w as &dyn Any).downcast_ref::<Prepared>()?;
            Arc::ptr_eq(&w.held.instance, &self.instance).then_some(w.held.raw)
        };
        let raw: Option<Vec<_>> = weights.iter().map(own).collect();
        let Some(raw) = raw else { return Err(strangers(&self.instance.name)) };
        let group = group::Group::new(&self.instance, &raw, weights, cx)?;
        Ok(group.map(|g| Box::new(g) as _))
    }
}

/// Why a group is none.
pub(crate) fn strangers(name: &str) -> Error {
    Error::new(Code::Internal, "a group of weights")
        .need(format!("weights of {name}"))
        .have("one of another backend")
}

/// A product as the library of that name is asked about it. Refused without asking: a device of somebody
/// else, or one that is not there; and what no library can do, whatever it says: no processor multiplies
/// 4-bit operands, and the bound of that path is the widest.
pub(crate) fn question<'a>(
    spec: &'a LinearSpec,
    path: ExecPath,
    devices: &[VendorDevice],
    name: &str,
) -> Result<LentSpec<'a>, Vec<Reject>> {
    let device = spec.device;
    if !matches!(device, Device::Cpu | Device::Cuda(_)) && devices.iter().all(|d| d.device != device) {
        let have = format!("{device}, and {}", listed(devices));
        return Err(one(RejectCode::DeviceAbsent, format!("a device of {name}"), have));
    }
    if path == ExecPath::NativeKernel && device == Device::Cpu {
        let need = "a device with units for 4-bit operands";
        return Err(one(RejectCode::PathUnsupported, need, "the CPU"));
    }
    let unsaid = |e| {
        let need = "a product the interface can express";
        one(RejectCode::SchemaUnsupported, need, message::line(&e))
    };
    LentSpec::new(spec, path).map_err(unsaid)
}

fn listed(devices: &[VendorDevice]) -> String {
    let all: Vec<_> = devices.iter().map(|d| format!("{} ({})", d.device, d.name)).collect();
    if all.is_empty() { "no device of its own".into() } else { all.join(", ") }
}

/// What the library of that name says it made, if that is what was asked for.
pub(crate) fn agreed(
    facts: &Q4PreparedInfo,
    spec: &LinearSpec,
    path: ExecPath,
    w: &Q4Weight<'_>,
    name: &str,
    has_backward: bool,
) -> Result<PreparedInfo> {
    let ops =
        u8::try_from(facts.ops).map(OpSet).ok().filter(|o| OpSet::ALL.contains(*o) && o.contains(spec.ops));
    let backward = ops.is_some_and(|o| o.contains(OpSet::BACKWARD_INPUT));
    let asked = (codes::path_to(path), lend::activation_kind(&spec.activations), w.n() as u64, w.k as u64);
    let made = (codes::path_from(facts.path).and(Some(facts.path)), facts.activations, facts.n, facts.k);
    let Some(ops) = ops.filter(|_| asked == made && (!backward || has_backward)) else {
        let (n, k) = (w.n(), w.k);
        return Err(Error::new(Code::PathBroken, format!("{name}: prepare"))
            .need(format!(
                "{path} with {} activations, [{n}, {k}], operations {:#05b}",
                spec.activations, spec.ops.0
            ))
            .have(format!(
                "{} with activations {}, [{}, {}], operations {:#05b}",
                codes::path_from(facts.path)
                    .map_or_else(|| format!("path {}", facts.path), |p| p.to_string()),
                facts.activations,
                facts.n,
                facts.k,
                facts.ops
            )));
    };
    Ok(PreparedInfo {
        backend: name.to_owned().into(),
        path,
        activations: spec.activations,
        n: w.n(),
        k: w.k,
        resident_bytes: facts.resident_bytes,
        ops,
    })
}

impl Instance {
    /// What the library says; `None` where it says nothing.
    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Option<Footprint> {
        let footprint = self.table.api.footprint?;
        let lent = LentSpec::new(spec, path).ok()?;
        let mut out =
            Q4Footprint { struct_size: size_of::<Q4Footprint>(), resident_bytes: 0, workspace_bytes: 0 };
        let _turn = self.turn();
        // SAFETY: a live backend, a spec that outlives the call, and a structure that states its size.
        self.call("footprint", |err| unsafe { footprint(self.raw, lent.raw(), &mut out, err) }).ok()?;
        Some(Footprint { resident: out.resident_bytes, workspace: out.workspace_bytes })
    }

    fn verdict(&self, lent: &LentSpec<'_>, env: &HostEnv) -> Verdict {
        let no_verdict = |code: Code, have: String| {
            let code = match code {
                _ if self.has_panicked() => RejectCode::Panicked,
                Code::ShapeMismatch => RejectCode::InvalidArgument,
                _ => RejectCode::Internal,
            };
            Reject::new(code, "a verdict", have)
        };
        let Some(can_prepare) = self.table.api.can_prepare else {
            return Err(vec![no_verdict(Code::Internal, "no `can_prepare`".into())]);
        };
        let (env, mut reasons) = (LentEnv::new(env), Vec::<Reject>::new());
        let user = (&raw mut reasons).cast();
        let mut refused = false;
        let done = {
            let _turn = self.turn();
            self.call("can_prepare", |err| {
                // SAFETY: a live backend, a spec and facts that outlive the call, and the sink that fits
                // `user`.
                let status = unsafe { can_prepare(self.raw, lent.raw(), env.raw(), on_reason, user, err) };
                refused = status == status::UNSUPPORTED;
                if refused { status::OK } else { status }
            })
        };
        match done {
            Err(e) => reasons.push(no_verdict(e.code(), message::line(&e))),
            Ok(()) if refused == reasons.is_empty() => {
                let have =
                    if refused { "a refusal without a reason" } else { "consent with reasons against it" };
                reasons.push(no_verdict(Code::Internal, have.into()));
            }
            Ok(()) => {}
        }
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }
}

/// Takes one reason; `user` is a `Vec<Reject>`.
unsafe extern "C" fn on_reason(user: *mut c_void, code: Q4Str, need: Q4Str, have: Q4Str) {
    // Nothing may unwind into the library.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: `user` is what `verdict` passed, and the library calls on its thread before it returns.
        let reasons = unsafe { &mut *user.cast::<Vec<Reject>>() };
        // SAFETY: texts that live until this function returns.
        let [code, need, have] =
            [code, need, have].map(|t| unsafe { message::text(t, MAX_TEXT) }.into_owned());
        if reasons.len() < MAX_REASONS {
            reasons.push(match codes::reason_from(&code) {
                Some(code) => Reject::new(code, need, have),
                None => Reject::new(RejectCode::Internal, need, format!("{have} (`{code}`)")),
            });
        }
    }));
}

/// Takes the outcome of one check; `user` is a `Vec<ProbeItem>`.
unsafe extern "C" fn on_item(user: *mut c_void, id: Q4Str, failed: u32, detail: Q4Str) {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as in `on_reason`.
        let items = unsafe { &mut *user.cast::<Vec<ProbeItem>>() };
        // SAFETY: as in `on_reason`.
        let [id, detail] = [id, detail].map(|t| unsafe { message::text(t, MAX_TEXT) }.into_owned());
        if items.len() < MAX_REASONS {
            let reason = || Reject::new(RejectCode::Internal, "a check that passes", detail.clone());
            let reasons = if failed != 0 { vec![reason()] } else { Vec::new() };
            items.push(ProbeItem { id: id.into(), reasons, detail });
        }
    }));
}
