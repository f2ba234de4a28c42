//! The same steps on device memory: `kernel.cu`, launched on the default stream of the device's primary
//! context, which is where libtorch works.
//!
//! Results have the bits of the CPU's, sums of squares aside, which are added in another order, always the
//! same.
use super::layout::{MasterFormat, StateFormat, StateLayout};
use super::maps::{ROOT4, SIGNED4, SIGNED8, UNSIGNED8};
use super::{Hyper, ScaleChoice, TILE};
use crate::rng::Philox;
use q4_core::{Code, Error, Result};
use q4_cuda::{Buffer, Gpu, Kernel, Kernels, Launch, Source, args, check, driver};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

const SOURCE: Source = Source { name: "optimizer", text: include_str!("kernel.cu"), files: &[] };
/// Contraction is off: every rounding is written out.
const OPTIONS: [&str; 1] = ["--fmad=false"];
const THREADS: u32 = 256;

/// The kernels on one device.
pub struct Launcher {
    gpu: Arc<Gpu>,
    kernels: BTreeMap<String, Kernel>,
    /// The code books on the device.
    maps: Buffer,
}

/// `Layout` of `kernel.cu`.
#[repr(C)]
struct Sections {
    at: [u64; 6],
    n: u64,
}

#[repr(C)]
struct Random {
    key: [u32; 2],
    counter: [u32; 3],
}

impl Launcher {
    /// Compiles or finds them for device `ordinal`.
    ///
    /// # Errors
    /// [`Code::DeviceMissing`] when there is no driver or no such device, [`Code::BackendFailed`] when there
    /// is neither NVRTC nor a compiled image.
    pub fn new(ordinal: usize) -> Result<Self> {
        let gpu = Gpu::open(ordinal as u32)?;
        let all = Kernels::load(&gpu, &SOURCE, &OPTIONS)?;
        // They stream: with all of the on-chip memory shared, f32 masters take 7 to 12 % longer on an H100.
        let get = |name: String| {
            let kernel = all.get(&name)?;
            kernel.prefer_cache().map(|()| (name, kernel))
        };
        let kernels = names().into_iter().map(get).collect::<Result<_>>()?;
        let books = [&SIGNED8.values, &SIGNED8.bounds, &UNSIGNED8.values, &UNSIGNED8.bounds];
        let mut floats: Vec<f32> = books.into_iter().flatten().copied().collect();
        floats.extend(SIGNED4.iter().chain(ROOT4.iter()));
        let maps = Buffer::of(&gpu, &floats)?;
        Ok(Self { gpu, kernels, maps })
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// As [`super::adamw`], on device pointers aligned to 16 bytes; returns before it has run.
    ///
    /// # Safety
    /// `master` and `grad` must have `layout.len()` elements of their types and `state` `layout.bytes()`
    /// bytes, in memory of this device that nothing else uses before the default stream gets there.
    pub unsafe fn adamw(
        &self,
        hyper: &Hyper,
        layout: &StateLayout,
        (master, master_format): (u64, MasterFormat),
        (grad, grad_format): (u64, MasterFormat),
        state: u64,
        rng: Philox,
    ) -> Result<()> {
        aligned(&[master, grad, state])?;
        let scalars = hyper.scalars()?;
        let sections =
            Sections { at: layout.sections().map(|range| range.start as u64), n: layout.len() as u64 };
        let (key, counter) = rng.parts();
        let random = Random { key, counter };
        let name = adamw_name(layout.format(), master_format, grad_format);
        let maps = self.maps.ptr();
        let args = args![scalars, sections, maps, master, grad, state, random];
        // SAFETY: the arguments are those of the kernel; the caller vouches for the memory.
        unsafe { self.launch(&name, layout.len().div_ceil(TILE), args) }
    }

    /// As [`super::quantize_dequantize`] for `n` elements whose rows are multiples of 16, from and to f32 or
    /// bf16; a free scale rounds to bf16 once more. `info` receives two words: bits of the largest
    /// magnitude and the per-tensor scale. Where an element is not finite, all values and the scale are
    /// NaN.
    ///
    /// # Safety
    /// As [`Launcher::adamw`]; `info` has 8 bytes.
    pub unsafe fn quantize_dequantize(
        &self,
        (w, from): (u64, MasterFormat),
        n: usize,
        choice: ScaleChoice,
        (out, to): (u64, MasterFormat),
        info: u64,
    ) -> Result<()> {
        aligned(&[w, out])?;
        if n % 16 != 0 {
            return Err(Error::new(Code::ShapeMismatch, "weight to quantise")
                .need("a multiple of 16")
                .have(n.to_string()));
        }
        let (count, power) = (n as u64, u32::from(choice == ScaleChoice::PowerOfTwo));
        let tiles = n.div_ceil(TILE);
        self.gpu.bind()?;
        // SAFETY: the caller vouches for `info`; the rest as in `adamw`.
        unsafe {
            check(driver::cuMemsetD32Async(info, 0, 2, null_mut()), "cuMemsetD32Async")?;
            self.launch(&format!("amax_{}", from.as_str()), tiles.min(1024), args![w, count, info])?;
            let name = format!("value_{}_{}", from.as_str(), to.as_str());
            self.launch(&name, tiles, args![w, count, power, info, out])
        }
    }

    /// Writes the sum of the squares of `n` elements to the f64 at `out`. `scratch` has 8 bytes for each 4096
    /// elements.
    ///
    /// # Safety
    /// As [`Launcher::adamw`].
    pub unsafe fn sum_of_squares(
        &self,
        (grad, format): (u64, MasterFormat),
        n: usize,
        scratch: u64,
        out: u64,
    ) -> Result<()> {
        aligned(&[grad])?;
        let (count, tiles) = (n as u64, n.div_ceil(TILE) as u64);
        // SAFETY: as in `adamw`.
        unsafe {
            let name = format!("squares_{}", format.as_str());
            self.launch(&name, tiles as usize, args![grad, count, scratch])?;
            self.launch("total", 1, args![scratch, tiles, out])
        }
    }

    /// # Safety
    /// `args` must fit the kernel.
    unsafe fn launch(&self, name: &str, blocks: usize, args: &mut [*mut c_void]) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let kernel = self.kernels.get(name);
        let kernel = kernel.ok_or_else(|| Error::new(Code::Internal, format!("no kernel {name}")))?;
        let (grid, block) = ([blocks as u32, 1, 1], [THREADS, 1, 1]);
        // SAFETY: the caller vouches for the arguments; stream zero is the default one.
        unsafe { kernel.launch(Launch { grid, block, shared: 0, stream: 0, overlap: false }, args) }
    }
}

fn adamw_name(state: StateFormat, master: MasterFormat, grad: MasterFormat) -> String {
    format!("adamw_{}_{}_{}", state.as_str(), master.as_str(), grad.as_str())
}

/// Every kernel of the source.
fn names() -> Vec<String> {
    let floats = [MasterFormat::F32, MasterFormat::Bf16];
    let pairs = || floats.into_iter().flat_map(|a| floats.map(|b| (a, b)));
    let mut names: Vec<String> =
        StateFormat::ALL.into_iter().flat_map(|s| pairs().map(move |(a, b)| adamw_name(s, a, b))).collect();
    names.extend(pairs().map(|(a, b)| format!("value_{}_{}", a.as_str(), b.as_str())));
    names.extend(
        floats.iter().flat_map(|f| [format!("amax_{}", f.as_str()), format!("squares_{}", f.as_str())]),
    );
    names.push("total".into());
    names
}

fn aligned(pointers: &[u64]) -> Result<()> {
    match pointers.iter().find(|p| *p % 16 != 0) {
        None => Ok(()),
        Some(p) => Err(Error::new(Code::ShapeMismatch, "device pointer")
            .need("alignment to 16 bytes")
            .have(format!("{p:#x}"))),
    }
}

#[test]
fn kernels_compile_under_their_names() -> Result<()> {
    if let Err(why) = q4_cuda::libraries().nvrtc.version() {
        println!("skipped: {why}");
        return Ok(());
    }
    for arch in q4_cuda::Arch::majors() {
        let image = SOURCE.compile(&arch, &OPTIONS)?;
        for name in names() {
            let section = format!(".text.{name}\0");
            assert!(image.windows(section.len()).any(|w| w == section.as_bytes()), "{name} for {arch:?}");
        }
    }
    Ok(())
}
