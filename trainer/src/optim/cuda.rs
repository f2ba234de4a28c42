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
use q4_cuda::{Buffer, Gpu, Kernel, Kernels, Launch, Mirror, Source, check, driver, mirror};
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::Arc;

const SOURCE: Source = Source { name: "optimizer", text: include_str!("kernel.cu"), files: &[] };
/// Contraction is off: every rounding is written out.
const OPTIONS: [&str; 1] = ["--fmad=false"];
const THREADS: u32 = 256;

/// The kernels on one device.
pub struct Launcher {
    gpu: Arc<Gpu>,
    adamw: Named<Adamw>,
    amax: Named<Amax>,
    value: Named<Value>,
    squares: Named<Squares>,
    total: Named<Total>,
    /// The code books on the device.
    maps: Buffer,
}

type Named<A> = BTreeMap<String, Kernel<A>>;

mirror! {
    struct Scalars {
        grad_scale: f32, beta1: f32, rest1: f32, beta2: f32, rest2: f32, unbias1: f32, unbias2: f32,
        eps: f32, minus_lr: f32, keep: f32, limit: f32,
    }
    /// `Layout` of `kernel.cu`.
    struct Sections { at: [u64; 6], n: u64 }
    struct Random { key: [u32; 2], counter: [u32; 3], first: u32 }

    struct Adamw {
        s: Scalars, l: Sections, maps: u64, master: u64, grad: u64, state: u64, random: Random,
    }
    struct Amax { w: u64, n: u64, out: u64 }
    struct Value { w: u64, n: u64, power_of_two: u32, info: u64, out: u64 }
    struct Squares { g: u64, n: u64, partial: u64 }
    struct Total { partial: u64, tiles: u64, out: u64 }
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
        let books = [&SIGNED8.values, &SIGNED8.bounds, &UNSIGNED8.values, &UNSIGNED8.bounds];
        let mut floats: Vec<f32> = books.into_iter().flatten().copied().collect();
        floats.extend(SIGNED4.iter().chain(ROOT4.iter()));
        let maps = Buffer::of(&gpu, &floats)?;
        let (adamw, value) = (named(&all, adamw_names())?, named(&all, value_names())?);
        let (amax, squares) = (named(&all, of_floats("amax"))?, named(&all, of_floats("squares"))?);
        Ok(Self { gpu, adamw, amax, value, squares, total: named(&all, vec!["total".into()])?, maps })
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
        let s = Scalars::of(&hyper.scalars()?);
        let l = Sections { at: layout.sections().map(|range| range.start as u64), n: layout.len() as u64 };
        let (key, counter, first) = rng.parts();
        let random = Random { key, counter, first };
        let name = adamw_name(layout.format(), master_format, grad_format);
        let args = Adamw { s, l, maps: self.maps.ptr(), master, grad, state, random };
        // SAFETY: the caller vouches for the memory.
        unsafe { launch(&self.adamw, &name, layout.len().div_ceil(TILE), args) }
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
        let (tiles, n) = (n.div_ceil(TILE), n as u64);
        let power_of_two = (choice == ScaleChoice::PowerOfTwo).into();
        self.gpu.bind()?;
        // SAFETY: the caller vouches for `info`; the rest as in `adamw`.
        unsafe {
            check(driver::cuMemsetD32Async(info, 0, 2, null_mut()), "cuMemsetD32Async")?;
            let name = format!("amax_{}", from.as_str());
            launch(&self.amax, &name, tiles.min(1024), Amax { w, n, out: info })?;
            let name = format!("value_{}_{}", from.as_str(), to.as_str());
            launch(&self.value, &name, tiles, Value { w, n, power_of_two, info, out })
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
        let (tiles, name) = (n.div_ceil(TILE), format!("squares_{}", format.as_str()));
        let squares = Squares { g: grad, n: n as u64, partial: scratch };
        // SAFETY: as in `adamw`.
        unsafe {
            launch(&self.squares, &name, tiles, squares)?;
            launch(&self.total, "total", 1, Total { partial: scratch, tiles: tiles as u64, out })
        }
    }
}

impl Scalars {
    fn of(s: &super::Scalars) -> Self {
        let &super::Scalars { grad_scale, beta1, rest1, beta2, rest2, unbias1, unbias2, .. } = s;
        let &super::Scalars { eps, minus_lr, keep, limit, .. } = s;
        Self { grad_scale, beta1, rest1, beta2, rest2, unbias1, unbias2, eps, minus_lr, keep, limit }
    }
}

fn named<A: Mirror>(all: &Kernels, names: Vec<String>) -> Result<Named<A>> {
    // They stream: with all of the on-chip memory shared, f32 masters take 7 to 12 % longer on an H100.
    let get = |name: String| {
        let kernel = all.get(&name)?;
        kernel.prefer_cache().map(|()| (name, kernel))
    };
    names.into_iter().map(get).collect()
}

/// # Safety
/// As of [`Kernel::launch`].
unsafe fn launch<A: Mirror>(kernels: &Named<A>, name: &str, blocks: usize, args: A) -> Result<()> {
    if blocks == 0 {
        return Ok(());
    }
    let kernel = kernels.get(name);
    let kernel = kernel.ok_or_else(|| Error::new(Code::Internal, format!("no kernel {name}")))?;
    // SAFETY: by contract; stream zero is the default one.
    unsafe { kernel.launch(Launch::new([blocks, 1, 1], [THREADS, 1, 1], 0), args) }
}

fn adamw_name(state: StateFormat, master: MasterFormat, grad: MasterFormat) -> String {
    format!("adamw_{}_{}_{}", state.as_str(), master.as_str(), grad.as_str())
}

const FLOATS: [MasterFormat; 2] = [MasterFormat::F32, MasterFormat::Bf16];

fn of_floats(stem: &str) -> Vec<String> {
    FLOATS.map(|f| format!("{stem}_{}", f.as_str())).into()
}

fn value_names() -> Vec<String> {
    of_floats("value").iter().flat_map(|from| of_floats(from)).collect()
}

fn adamw_names() -> Vec<String> {
    let of_state = |s| FLOATS.into_iter().flat_map(move |a| FLOATS.map(|b| adamw_name(s, a, b)));
    StateFormat::ALL.into_iter().flat_map(of_state).collect()
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
fn kernels_take_what_they_are_given() -> Result<()> {
    adamw_names().iter().try_for_each(|name| SOURCE.takes::<Adamw>(name))?;
    value_names().iter().try_for_each(|name| SOURCE.takes::<Value>(name))?;
    of_floats("amax").iter().try_for_each(|name| SOURCE.takes::<Amax>(name))?;
    of_floats("squares").iter().try_for_each(|name| SOURCE.takes::<Squares>(name))?;
    SOURCE.takes::<Total>("total")
}

#[test]
fn kernels_compile_under_their_names() -> Result<()> {
    if let Err(why) = q4_cuda::libraries().nvrtc.version() {
        println!("skipped: {why}");
        return Ok(());
    }
    for arch in q4_cuda::Arch::majors().filter(q4_cuda::Arch::is_known) {
        let image = SOURCE.compile(&arch, &OPTIONS)?;
        let alone = [of_floats("amax"), of_floats("squares"), vec!["total".into()]];
        for name in alone.concat().into_iter().chain(adamw_names()).chain(value_names()) {
            let section = format!(".text.{name}\0");
            assert!(image.windows(section.len()).any(|w| w == section.as_bytes()), "{name} for {arch:?}");
        }
    }
    Ok(())
}
