//! A backend in this process: the products of this crate, and what its format alone knows.
use crate::cuda::{self, Engine, Levels, Width};
use crate::encoding::{Biases, Encoding, Kept, Offset, Plain, Scale, Values, Zeros};
use crate::prepare::{footprint, pack};
use crate::probe::{operands, probe};
use crate::stored::{Flat, FlatWithBiases, Stored};
use q4_core::isa::Isa;
use q4_core::rows;
use q4_core::{
    Activations, BackendDescriptor, Built, BuiltinOptions, Code, CudaDevice, DType, Device, Error,
    ExecContext, ExecPath, Footprint, HostEnv, LinearSpec, PreparedWeight, ProbeItem, Q4Backend, Q4Weight,
    Reject, RejectCode, Result, ThreadPool, Verdict,
};
use q4_cuda::{Arch, Engines, Needs};
use q4_simd::Vectors;
use std::sync::Arc;

/// What a format's backend says of itself.
pub struct Own {
    /// Its name.
    pub name: &'static str,
    /// That of its package.
    pub version: &'static str,
    /// Schemas that it multiplies by.
    pub schemas: &'static [&'static str],
    /// Whether int8 inputs are summed by dots of bytes, so that instruction sets with those matter.
    pub has_dots: bool,
    /// What is wrong with the schema of a product, or with its shape under that schema.
    pub refuse: fn(&LinearSpec, &mut Refuse<'_>),
    /// Elements per scale and what is kept for each beside four bits of each code, in bytes; `None` for other
    /// schemas.
    pub scale: fn(&LinearSpec) -> Option<(u32, usize)>,
    /// Packs a weight that was not refused.
    pub prepare: Prepare,
    /// Kernels of CUDA devices, where there are some.
    pub cuda: Option<OnCuda>,
}

/// What kernels of CUDA devices have to know.
pub struct OnCuda {
    /// What codes are worth.
    pub levels: Levels,
    /// Type of the scales of a spec that is not refused, and whether there are zero points.
    pub scales: fn(&LinearSpec) -> (Width, bool),
    /// Whether products of many rows may take weights rounded to bf16.
    pub may_round: bool,
}

/// Takes a reason: its code, what is needed, what is there.
pub type Refuse<'a> = dyn FnMut(RejectCode, &str, String) + 'a;

/// Packs a weight for a spec and a path.
pub type Prepare = fn(&Q4Weight<'_>, &LinearSpec, ExecPath, &Place<'_>) -> Result<Box<dyn PreparedWeight>>;

/// Where a weight is packed.
pub enum Place<'a> {
    /// Here, by these threads for that instruction set.
    Cpu(Vectors, &'a ThreadPool),
    /// On a device.
    Cuda(Arc<Engine>, Levels),
}

impl Place<'_> {
    /// Packs codes of four bits whose scales were checked: what they are worth, less a zero point where there
    /// are some.
    ///
    /// # Errors
    /// Memory that cannot be had, and what a device says.
    pub fn pack<S: Scale>(
        &self,
        of: (&'static str, ExecPath),
        stored: &[Flat<'_, S>],
        values: Values,
        spec: &LinearSpec,
    ) -> Result<Box<dyn PreparedWeight>> {
        if let Self::Cuda(..) = self {
            return self.pack_there(of, stored, spec);
        }
        let worth = (values, S::KEPT, stored.first().map_or(1, |s| s.block));
        let has_zeros = stored.iter().any(|s| !s.zeros.is_empty());
        self.pack_four_bits(
            of,
            &each(stored),
            worth,
            if has_zeros { Offset::Zero } else { Offset::None },
            spec,
        )
    }

    /// Packs the same with biases, of which a device has no kernels.
    ///
    /// # Errors
    /// [`Code::Unsupported`] elsewhere, and memory that cannot be had.
    pub fn pack_with_biases<S: Scale>(
        &self,
        of: (&'static str, ExecPath),
        stored: &[FlatWithBiases<'_, S>],
        values: Values,
        spec: &LinearSpec,
    ) -> Result<Box<dyn PreparedWeight>> {
        let worth = (values, S::KEPT, stored.first().map_or(1, |s| s.flat.block));
        self.pack_four_bits(of, &each(stored), worth, Offset::Bias, spec)
    }

    /// One home of the kernels for codes of four bits, which every format would compile again.
    fn pack_four_bits(
        &self,
        of: (&'static str, ExecPath),
        stored: &[&dyn Stored],
        worth: (Values, Kept, u32),
        beside: Offset,
        spec: &LinearSpec,
    ) -> Result<Box<dyn PreparedWeight>> {
        match beside {
            Offset::Zero => self.pack_here::<Zeros>(of, stored, worth, spec),
            Offset::Bias => self.pack_here::<Biases>(of, stored, worth, spec),
            Offset::None => self.pack_here::<Plain>(of, stored, worth, spec),
            Offset::Minimum => unreachable!("formats with minima have encodings of their own"),
        }
    }

    /// Packs codes that a device has kernels for: of the levels that its backend names.
    ///
    /// # Errors
    /// [`Code::Unsupported`] here, and what a device says.
    pub fn pack_there<S: Scale>(
        &self,
        of: (&'static str, ExecPath),
        stored: &[Flat<'_, S>],
        spec: &LinearSpec,
    ) -> Result<Box<dyn PreparedWeight>> {
        match self {
            Self::Cuda(engine, levels) => cuda::prepare(engine, *levels, of, stored, spec),
            Self::Cpu(..) => Err(elsewhere(of, "a device", spec)),
        }
    }

    /// Packs what the kernels of the CPU alone take: what codes are worth, what scales are kept in, and for
    /// how many elements each.
    ///
    /// # Errors
    /// [`Code::Unsupported`] elsewhere, and memory that cannot be had.
    pub fn pack_here<E: Encoding>(
        &self,
        of: (&'static str, ExecPath),
        stored: &[&dyn Stored],
        worth: (Values, Kept, u32),
        spec: &LinearSpec,
    ) -> Result<Box<dyn PreparedWeight>> {
        match self {
            Self::Cpu(vectors, threads) => {
                Ok(Box::new(pack::<E>(of, stored, worth, spec, *vectors, threads)?))
            }
            Self::Cuda(..) => Err(elsewhere(of, "cpu", spec)),
        }
    }
}

/// Matrices as what [`Place::pack_here`] takes.
pub fn each<T: Stored>(stored: &[T]) -> Vec<&dyn Stored> {
    stored.iter().map(|s| s as &dyn Stored).collect()
}

fn elsewhere(of: (&'static str, ExecPath), need: &str, spec: &LinearSpec) -> Error {
    Error::new(Code::Unsupported, of.0).need(need.to_owned()).have(spec.device.to_string())
}

impl Own {
    /// The backend on the best instruction set of this machine, or on the one that `options.isa` names.
    ///
    /// # Errors
    /// An instruction set that is unknown or that this machine lacks.
    pub fn construct(
        &'static self,
        options: &BuiltinOptions,
        env: &HostEnv,
    ) -> std::result::Result<Built, Vec<Reject>> {
        let vectors = Vectors::choose(options.isa.as_deref()).map_err(|reason| vec![reason])?;
        let paths = self.paths(&env.cuda);
        let offer =
            |schema: &&'static str| paths.iter().map(|path| ((*schema).into(), *path)).collect::<Vec<_>>();
        let descriptor = BackendDescriptor {
            name: self.name.into(),
            version: self.version.into(),
            vendor: "q4".into(),
            priority: 0,
            offers: self.schemas.iter().flat_map(offer).collect(),
        };
        let images = self.cuda.as_ref().map_or_else(Vec::new, |on| {
            let (source, told) = cuda::images(on.levels);
            q4_cuda::images(options, source, &told)
        });
        let engines = Engines::new(Engine::new);
        Ok(Built { images, ..Built::new(Arc::new(Backend { own: self, vectors, descriptor, engines })) })
    }

    fn may_round(&self) -> bool {
        self.cuda.as_ref().is_some_and(|on| on.may_round)
    }

    /// The paths there are with these devices, best first.
    fn paths(&self, devices: &[CudaDevice]) -> Vec<ExecPath> {
        let rounded = self.may_round() && devices.iter().any(|d| Arch::of(d.capability).wgmma);
        rounded.then_some(ExecPath::FusedRounded).into_iter().chain([ExecPath::FusedDequant]).collect()
    }

    /// What products on a device take.
    fn needs(&self) -> Needs {
        Needs { backend: self.name, cublaslt: false }
    }

    /// What is wrong with `spec` on every machine.
    fn reasons(&self, spec: &LinearSpec, path: ExecPath) -> Vec<Reject> {
        use RejectCode::*;
        let mut reasons = Vec::new();
        let mut reject =
            |code, need: &str, have: String| reasons.push(Reject::new(code, need.to_owned(), have));
        match path {
            ExecPath::FusedDequant => {}
            ExecPath::FusedRounded if self.may_round() => {
                if spec.device == Device::Cpu {
                    reject(DeviceArch, &Arch::names(|a| a.wgmma), spec.device.to_string());
                }
                let has_fp8 = self.cuda.as_ref().is_some_and(|on| on.levels == Levels::E4m3);
                let need = match spec.activations {
                    Activations::Native => None,
                    Activations::Fp8(_) if has_fp8 => None,
                    _ if has_fp8 => Some("native or fp8, where many rows are rounded"),
                    _ => Some("native, for rounded weights"),
                };
                if let Some(need) = need {
                    reject(ActivationsUnsupported, need, spec.activations.to_string());
                }
                if spec.x != DType::BF16 {
                    reject(DtypeUnsupported, "x of bfloat16, for rounded weights", spec.x.to_string());
                }
            }
            other if self.may_round() => {
                reject(PathUnsupported, "fused-rounded or fused-dequant", other.to_string());
            }
            other => reject(PathUnsupported, "fused-dequant", other.to_string()),
        }
        if spec.device != Device::Cpu && self.cuda.is_none() {
            reject(DeviceUnsupported, "cpu", spec.device.to_string());
        }
        (self.refuse)(spec, &mut reject);
        reasons.extend(operands(spec));
        reasons
    }
}

struct Backend {
    own: &'static Own,
    vectors: Vectors,
    descriptor: BackendDescriptor,
    engines: Engines<Engine>,
}

impl Q4Backend for Backend {
    fn descriptor(&self) -> &BackendDescriptor {
        &self.descriptor
    }
    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem> {
        let mut items = if self.own.has_dots {
            probe(self.vectors.set(), Isa::available())
        } else {
            probe(self.vectors.isa(), Vectors::all().map(Vectors::isa))
        };
        if self.own.cuda.is_some() {
            items.extend(self.own.needs().items(env));
        }
        items
    }
    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict {
        let mut reasons = Vec::new();
        if let (ExecPath::FusedRounded, Device::Cuda(ordinal)) = (path, spec.device)
            && let Some(gpu) = env.cuda_device(ordinal).filter(|gpu| !Arch::of(gpu.capability).wgmma)
        {
            reasons.push(Reject::new(RejectCode::DeviceArch, Arch::names(|a| a.wgmma), gpu.arch()));
        }
        reasons.extend(self.own.reasons(spec, path));
        if self.own.cuda.is_some() {
            reasons.extend(self.own.needs().verdict(spec.device, env).err().into_iter().flatten());
        }
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }
    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        let usual = Footprint::usual(spec, path);
        let Some((block, bytes)) = (self.own.scale)(spec) else { return usual };
        match (&self.own.cuda, spec.device) {
            (_, Device::Cpu) => footprint(spec, block, bytes),
            (Some(on), _) => {
                let (width, has_zeros) = (on.scales)(spec);
                let shape = [spec.n(), spec.k.max(1)];
                Footprint { resident: cuda::resident((on.levels, width), has_zeros, shape, block), ..usual }
            }
            (None, _) => usual,
        }
    }
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>> {
        rows::agree(w, spec, &self.own.reasons(spec, path), cx)?;
        let place = match (&self.own.cuda, spec.device) {
            (Some(on), Device::Cuda(_)) => Place::Cuda(self.engines.of(spec.device)?, on.levels),
            _ => Place::Cpu(self.vectors, cx.threads),
        };
        (self.own.prepare)(w, spec, path, &place)
    }
}

/// The width of scales of that type on a device.
pub fn width_of(scales: DType) -> Width {
    match scales {
        DType::F16 => Width::Half,
        DType::BF16 => Width::Brain,
        _ => Width::Single,
    }
}
