//! A device for a backend, or every reason why it has none, in selection's own words.
use crate::{Found, Gpu, devices, libraries};
use q4_core::{Code, CudaDevice, Device, Error, HostEnv, ProbeItem, Reject, RejectCode, Result, Verdict};
use std::sync::{Arc, OnceLock};

/// Oldest capability kernels are written for.
const SINCE: (u32, u32) = (8, 0);

/// What a backend has of CUDA: nothing was asked for, an engine on one device, or the reasons why there is none.
pub enum Access<T> {
    /// The program stays on the CPU.
    Unasked,
    /// Ready, on this ordinal.
    Ready(u32, Lazy<T>),
    /// Asked for and refused.
    Refused(u32, Vec<Reject>),
}

/// An engine that is built when its first weight is prepared: who computes nothing compiles nothing.
pub struct Lazy<T> {
    gpu: Arc<Gpu>,
    build: fn(&Arc<Gpu>) -> Result<T>,
    built: OnceLock<Result<Arc<T>>>,
}

impl<T> Access<T> {
    /// Opens `ordinal` where one is asked for. `check` says what `build` would miss.
    pub fn open(
        ordinal: Option<u32>,
        check: impl FnOnce(&Arc<Gpu>) -> Result<()>,
        build: fn(&Arc<Gpu>) -> Result<T>,
    ) -> Self {
        let Some(ordinal) = ordinal else { return Self::Unasked };
        match gpu(ordinal)
            .and_then(|gpu| check(&gpu).map(|()| gpu.clone()).map_err(|e| vec![reason(&e, &gpu)]))
        {
            Ok(gpu) => Self::Ready(ordinal, Lazy { gpu, build, built: OnceLock::new() }),
            Err(reasons) => Self::Refused(ordinal, reasons),
        }
    }

    /// Whether products can run on `device`; the reasons name what the machine lacks first.
    pub fn verdict(&self, device: Device, env: &HostEnv) -> Verdict {
        let one = |code, need: &'static str, have: String| Err(vec![Reject::new(code, need, have)]);
        let Device::Cuda(wanted) = device else { return Ok(()) };
        if env.cuda_device(wanted).is_none() {
            return one(RejectCode::DeviceAbsent, "a CUDA device", env.no_cuda(wanted));
        }
        match self {
            Self::Ready(ordinal, _) if *ordinal == wanted => Ok(()),
            Self::Refused(ordinal, reasons) if *ordinal == wanted => Err(reasons.clone()),
            Self::Unasked => one(RejectCode::DeviceAbsent, "a CUDA device that was opened", "none".into()),
            Self::Ready(other, _) | Self::Refused(other, _) => {
                one(RejectCode::DeviceAbsent, "the CUDA device that was opened", format!("cuda:{other}"))
            }
        }
    }

    /// A line of a probe, once a device was asked for.
    pub fn item(&self) -> Option<ProbeItem> {
        let (ordinal, reasons, detail) = match self {
            Self::Unasked => return None,
            Self::Ready(ordinal, _) => (ordinal, Vec::new(), "kernels load with the first weight".to_owned()),
            Self::Refused(ordinal, reasons) if reasons.iter().all(|r| r.code == RejectCode::DeviceAbsent) => {
                // A machine without a GPU is no finding; the text still says why there is none.
                (ordinal, Vec::new(), format!("none: {}", reasons.first().map_or("", |r| &r.have)))
            }
            Self::Refused(ordinal, reasons) => (ordinal, reasons.clone(), String::new()),
        };
        Some(ProbeItem { id: format!("context.cuda:{ordinal}").into(), reasons, detail })
    }

    /// The device behind it, as facts.
    pub fn devices(&self) -> Vec<CudaDevice> {
        match self {
            Self::Ready(ordinal, _) => {
                devices().unwrap_or_default().into_iter().filter(|d| d.ordinal == *ordinal).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The engine, built by the first call.
    pub fn engine(&self) -> Result<&Arc<T>> {
        match self {
            Self::Ready(_, lazy) => {
                let built = lazy.built.get_or_init(|| (lazy.build)(&lazy.gpu).map(Arc::new));
                built.as_ref().map_err(Clone::clone)
            }
            _ => Err(Error::new(Code::DeviceMissing, "CUDA").need("a device that was opened").have("none")),
        }
    }
}

fn gpu(ordinal: u32) -> std::result::Result<Arc<Gpu>, Vec<Reject>> {
    let absent =
        |have: String| vec![Reject::new(RejectCode::DeviceAbsent, "a CUDA device and its driver", have)];
    if let Found::No(why) = &libraries().driver {
        return Err(absent(why.clone()));
    }
    let all = devices().map_err(|e| absent(e.to_string()))?;
    let Some(device) = all.iter().find(|d| d.ordinal == ordinal) else {
        return Err(absent(format!("no cuda:{ordinal} among {} devices", all.len())));
    };
    if device.capability < SINCE {
        return Err(vec![Reject::new(RejectCode::DeviceArch, "sm_80 or newer", device.arch())]);
    }
    Gpu::open(ordinal).map_err(|e| absent(e.to_string()))
}

/// Why an engine could not be built.
fn reason(e: &Error, gpu: &Gpu) -> Reject {
    let parts: Vec<_> = e.parts().filter(|(name, _)| *name != "fix").map(|p| p.1).collect();
    let have = parts.join("; ");
    let code = match () {
        () if have.contains("UNSUPPORTED_PTX") || have.contains("NO_BINARY") => RejectCode::DriverTooOld,
        () if have.contains("cublasLt") || have.contains("cuBLASLt") => RejectCode::LibraryMissing,
        () => RejectCode::KernelImageMissing,
    };
    let need = match code {
        RejectCode::LibraryMissing => "cuBLASLt".to_owned(),
        _ => format!("kernels for {}", gpu.arch()),
    };
    Reject::new(code, need, have)
}
