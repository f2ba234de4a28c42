//! Where products run: as named, or the first CUDA device whose kernels compute rightly, else the CPU.
use crate::choices::DeviceChoice;
use q4_conformance::{StoredPasses, Verdict, certificate, check_paths};
use q4_core::selfcheck::Passes;
use q4_core::{BuiltinOptions, Code, CudaDevice, Device, Error, Registry, Result, ThreadPool};

/// A device, and why it is that one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Where products run.
    pub device: Device,
    /// For people.
    pub why: String,
    /// A GPU is there, nobody said that it should not be used, and it is not.
    pub idle: bool,
}

impl Choice {
    fn cpu(why: impl Into<String>, idle: bool) -> Self {
        Self { device: Device::Cpu, why: why.into(), idle }
    }
}

/// What `--device` comes to. A device that was named is used, or is an error that says what is missing.
/// `bound_to_cpu`: why no other device may be chosen, where somebody asked for something that only the CPU
/// does.
pub fn choose(asked: DeviceChoice, bound_to_cpu: Option<&str>, options: &BuiltinOptions) -> Result<Choice> {
    match asked {
        DeviceChoice::Cpu => Ok(Choice::cpu("as named", false)),
        DeviceChoice::Cuda(n) => match usable(n) {
            Ok(()) => Ok(Choice { device: Device::Cuda(n), why: "as named".into(), idle: false }),
            Err(e) => {
                Err(e.within(format!("--device cuda:{n}")).fix("--device cpu, or leave the option out"))
            }
        },
        // Whether it is there is known once its library is.
        DeviceChoice::Vendor(device) => Ok(Choice { device, why: "as named".into(), idle: false }),
        DeviceChoice::Auto => {
            if let Some(why) = bound_to_cpu {
                return Ok(Choice::cpu(format!("auto: {why}"), is_card_there()));
            }
            let devices = match q4_cuda::devices() {
                Ok(devices) => devices,
                Err(e) => return Ok(Choice::cpu(format!("auto: {}", short(&e)), is_card_there())),
            };
            Ok(first_right(&devices, &mut |n| usable(n).and_then(|()| computes_rightly(n, options))))
        }
    }
}

/// The first of `devices` that `check` has nothing against.
fn first_right(devices: &[CudaDevice], check: &mut dyn FnMut(u32) -> Result<()>) -> Choice {
    let mut refused = Vec::new();
    for d in devices {
        match check(d.ordinal) {
            Ok(()) => {
                let why = format!("auto: the kernels of {} pass their self-check", d.name);
                return Choice { device: Device::Cuda(d.ordinal), why, idle: false };
            }
            Err(e) => refused.push(format!("cuda:{} ({}): {}", d.ordinal, d.name, short(&e))),
        }
    }
    match refused.is_empty() {
        true => Choice::cpu("auto: no CUDA device", false),
        false => Choice::cpu(format!("auto: {}", refused.join("; ")), true),
    }
}

/// What happened and what was found, on one line.
fn short(e: &Error) -> String {
    let have = e.parts().find(|(name, _)| *name == "have").map(|(_, text)| text.replace('\n', "; "));
    have.map_or_else(|| e.what().to_owned(), |have| format!("{}: {have}", e.what()))
}

/// A driver that is loaded has its cards in a folder; nothing is opened to see them.
fn is_card_there() -> bool {
    std::fs::read_dir("/proc/driver/nvidia/gpus").is_ok_and(|mut cards| cards.next().is_some())
}

/// Whether CUDA device `n` is there and can be given kernels; else what is missing.
fn usable(n: u32) -> Result<()> {
    let devices = q4_cuda::devices()?;
    let Some(device) = devices.iter().find(|d| d.ordinal == n) else {
        let names: Vec<_> = devices.iter().map(|d| format!("cuda:{} ({})", d.ordinal, d.name)).collect();
        return Err(Error::new(Code::DeviceMissing, "no such CUDA device")
            .need(format!("cuda:{n}"))
            .have(if names.is_empty() { "none".to_owned() } else { names.join(", ") }));
    };
    let oldest = q4_cuda::ARCHS[0].capability;
    if device.capability < oldest {
        return Err(Error::new(Code::DeviceMissing, device.name.clone())
            .need(format!("compute capability {}.{} or later", oldest.0, oldest.1))
            .have(format!("{}.{}", device.capability.0, device.capability.1)));
    }
    if let q4_cuda::Found::No(why) = &q4_cuda::libraries().nvrtc
        && q4_cuda::Cache::of_user().is_empty()
    {
        return Err(Error::new(Code::DeviceMissing, "kernels for CUDA")
            .need("NVRTC (CUDA's run-time compiler), or prebuilt images")
            .have(why.clone()));
    }
    Ok(())
}

/// Every kernel of device `n` that lives, on recorded products; a machine on which they passed is remembered.
fn computes_rightly(n: u32, options: &BuiltinOptions) -> Result<()> {
    // Its library is what may change while the program stays the same.
    const WHO: &str = q4_nvfp4_kernel::NAME;
    let kind = format!("every path on cuda:{n}");
    let registry = Registry::builtin(&BuiltinOptions { cuda: Some(n), ..options.clone() })?;
    let passes = certificate::data_dir()
        .zip(std::env::current_exe().ok())
        .map(|(data, program)| StoredPasses::new(&data, program, registry.env(), options.isa.as_deref()));
    if passes.as_ref().is_some_and(|p| p.recall(WHO, &kind)) {
        return Ok(());
    }
    let measured = check_paths(&registry, Device::Cuda(n), &ThreadPool::new(1))?;
    let kernels = || measured.iter().filter(|(name, _)| name.ends_with("-kernel")).flat_map(|(_, rows)| rows);
    if let Some((name, wrong)) = measured
        .iter()
        .find_map(|(name, rows)| Some((name, rows.iter().find(|r| r.verdict == Verdict::Fail)?)))
    {
        return Err(Error::new(Code::SelfCheckFailed, format!("{name} {}", wrong.path))
            .have(wrong.message.clone().unwrap_or_else(|| "wrong values".into())));
    }
    if !kernels().any(|r| r.verdict == Verdict::Pass) {
        return Err(Error::new(Code::DeviceMissing, "no kernel runs there"));
    }
    if let Some(passes) = passes {
        passes.remember(WHO, &kind);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(names: &[&str]) -> Vec<CudaDevice> {
        let device = |(i, name): (usize, &&str)| CudaDevice {
            ordinal: i as u32,
            name: (*name).to_owned(),
            capability: (9, 0),
            memory: 0,
        };
        names.iter().enumerate().map(device).collect()
    }

    #[test]
    fn auto_takes_the_first_device_whose_kernels_are_right() {
        let wrong = |which: &'static [u32]| {
            move |n: u32| match which.contains(&n) {
                true => Err(Error::new(Code::SelfCheckFailed, "nf4-kernel").have("y[0, 0]\nis wrong")),
                false => Ok(()),
            }
        };
        let choose = |names: &[&str], which| first_right(&machine(names), &mut wrong(which));
        let none = choose(&[], &[]);
        assert_eq!((none.device, none.idle, none.why.as_str()), (Device::Cpu, false, "auto: no CUDA device"));
        let one = choose(&["A"], &[]);
        assert_eq!((one.device, one.idle), (Device::Cuda(0), false));
        let second = choose(&["A", "B"], &[0]);
        assert_eq!(second.device, Device::Cuda(1));
        assert_eq!(second.why, "auto: the kernels of B pass their self-check");
        let idle = choose(&["A", "B"], &[0, 1]);
        assert_eq!((idle.device, idle.idle), (Device::Cpu, true));
        assert_eq!(
            idle.why,
            "auto: cuda:0 (A): nf4-kernel: y[0, 0]; is wrong; cuda:1 (B): nf4-kernel: y[0, 0]; is wrong"
        );
    }

    #[test]
    fn what_only_the_cpu_does_is_done_there() -> Result<()> {
        let options = BuiltinOptions::default();
        let choice = choose(DeviceChoice::Auto, Some("--isolate runs there"), &options)?;
        assert_eq!((choice.device, choice.why.as_str()), (Device::Cpu, "auto: --isolate runs there"));
        assert_eq!(choose(DeviceChoice::Cpu, None, &options)?, Choice::cpu("as named", false));
        Ok(())
    }
}
