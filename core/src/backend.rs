//! The contract that a backend implements: [`Q4Backend`] and [`PreparedWeight`]. Four methods of a backend
//! and five of a weight have to be written; the others have defaults.
use crate::device::{DeviceMemory, memory_of};
use crate::{
    Activations, Code, DType, Device, Error, FuseSet, Fusion, HostEnv, Q4Schema, Q4Weight, Reject, Result,
    TensorView, TensorViewMut, ThreadPool, VendorDevice, Verdict,
};
use serde::Serialize;
use std::{any::Any, borrow::Cow, fmt, sync::Arc};

/// How a product is really computed: a fact, recorded on every prepared weight. Ordered best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ExecPath {
    /// 4-bit operands reach the arithmetic units (block-scaled tensor cores).
    NativeKernel,
    /// As `FusedDequant`, but what is decoded is rounded to bf16 where tensor cores multiply many rows: about
    /// twice as fast as exact weights are there, within one and a half times the bound of a dense copy in
    /// bf16.
    FusedRounded,
    /// Weights stay packed in memory and are decoded in registers inside the product.
    FusedDequant,
    /// A dense copy of the weight is made, then a dense product runs.
    DequantMatmul,
    /// The slow oracle. Never chosen unless named.
    Reference,
}

impl ExecPath {
    /// Stable spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NativeKernel => "native-kernel",
            Self::FusedRounded => "fused-rounded",
            Self::FusedDequant => "fused-dequant",
            Self::DequantMatmul => "dequant-matmul",
            Self::Reference => "reference",
        }
    }
}
impl fmt::Display for ExecPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What the caller accepts: a policy.
///
/// ```
/// use q4_core::{ComputePath, ExecPath};
///
/// assert!(ComputePath::Auto.admits().contains(&ExecPath::DequantMatmul));
/// assert!(!ComputePath::KernelOnly.admits().contains(&ExecPath::DequantMatmul));
/// // Paths are ordered, the best first, and no policy admits the oracle: it has to be named.
/// assert!(ExecPath::FusedDequant < ExecPath::DequantMatmul);
/// assert!(ComputePath::ALL.iter().all(|p| !p.admits().contains(&ExecPath::Reference)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ComputePath {
    /// The best eligible path. A dense product only of a weight that is dense, or whose encoding no kernel
    /// serves anywhere: a downgrade, which is a dense copy where a kernel was to be had, is an error that
    /// says what is missing.
    #[default]
    Auto,
    /// A kernel on packed weights, else an error.
    KernelOnly,
    /// As `Auto`, and downgrades are agreed to in advance; each is counted and reported.
    KernelOrFallback,
    /// The dense product only (bisecting, golden runs).
    DequantMatmulOnly,
}

impl ComputePath {
    /// Every policy.
    pub const ALL: [Self; 4] =
        [Self::Auto, Self::KernelOnly, Self::KernelOrFallback, Self::DequantMatmulOnly];
    /// Paths this policy admits, best first.
    pub const fn admits(self) -> &'static [ExecPath] {
        use ExecPath::*;
        match self {
            Self::Auto | Self::KernelOrFallback => &[NativeKernel, FusedRounded, FusedDequant, DequantMatmul],
            Self::KernelOnly => &[NativeKernel, FusedRounded, FusedDequant],
            Self::DequantMatmulOnly => &[DequantMatmul],
        }
    }
    /// Spelling of `--compute`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::KernelOnly => "kernel-only",
            Self::KernelOrFallback => "kernel-or-fallback",
            Self::DequantMatmulOnly => "dequant-matmul-only",
        }
    }
}
impl fmt::Display for ComputePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Operations a caller needs from one prepared weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct OpSet(pub u8);

impl OpSet {
    /// `y = x W^T`.
    pub const FORWARD: Self = Self(1);
    /// `dx = dy W`.
    pub const BACKWARD_INPUT: Self = Self(2);
    /// The decoded matrix.
    pub const DEQUANTIZE: Self = Self(4);
    /// All of them.
    pub const ALL: Self = Self(7);
    /// `o` is a subset.
    pub const fn contains(self, o: Self) -> bool {
        self.0 & o.0 == o.0
    }
    /// The union.
    pub const fn with(self, o: Self) -> Self {
        Self(self.0 | o.0)
    }
}

/// Name and out features of one row segment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SegmentSpec {
    /// Layer name as in the checkpoint, e.g. `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// Out features.
    pub rows: usize,
}

/// Everything selection may look at about one product. No pointers.
///
/// ```
/// use q4_core::{Activations, DType, Device, LinearSpec, OpSet, SegmentSpec, formats};
///
/// // The query, key and value projections of Qwen3-0.6B share their input: one product of three segments.
/// let rows = [("q", 2048), ("k", 1024), ("v", 1024)];
/// let segment = |(p, rows)| SegmentSpec { name: format!("model.layers.0.self_attn.{p}_proj"), rows };
/// let spec = LinearSpec {
///     segments: rows.map(segment).into(),
///     schema: formats::encodings("nvfp4")[0],
///     k: 1024,
///     max_m: 512,
///     x: DType::BF16,
///     y: DType::BF16,
///     activations: Activations::Native,
///     device: Device::Cpu,
///     ops: OpSet::FORWARD,
/// };
/// assert_eq!((spec.n(), spec.k), (4096, 1024));
/// assert_eq!(spec.name(), "model.layers.0.self_attn.{q,k,v}_proj");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinearSpec {
    /// The row segments, top to bottom.
    pub segments: Vec<SegmentSpec>,
    /// Encoding of all of them.
    pub schema: Q4Schema,
    /// In features.
    pub k: usize,
    /// Largest number of rows a call will have.
    pub max_m: usize,
    /// Element type of the input.
    pub x: DType,
    /// Element type of the output.
    pub y: DType,
    /// What happens to the input before the product.
    pub activations: Activations,
    /// Where it runs.
    pub device: Device,
    /// Operations needed.
    pub ops: OpSet,
}

impl LinearSpec {
    /// Out features of all segments.
    pub fn n(&self) -> usize {
        self.segments.iter().map(|s| s.rows).sum()
    }
    /// Name for reports: the segments' common prefix, then what differs:
    /// `model.layers.0.self_attn.{q,k,v}_proj`.
    pub fn name(&self) -> String {
        let names: Vec<&str> = self.segments.iter().map(|s| s.name.as_str()).collect();
        let [first, rest @ ..] = names.as_slice() else { return String::new() };
        if rest.is_empty() {
            return (*first).to_owned();
        }
        let shared = |a: &str, b: &str| a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
        let head = rest.iter().map(|n| shared(first, n)).min().unwrap_or(0);
        let reversed = |s: &str| s.bytes().rev().collect::<Vec<_>>();
        let tail = rest
            .iter()
            .map(|n| reversed(first).iter().zip(&reversed(n)).take_while(|(x, y)| x == y).count())
            .min()
            .unwrap_or(0);
        let tail = names.iter().map(|n| n.len() - head).min().unwrap_or(0).min(tail);
        let middle: Vec<_> = names.iter().map(|n| &n[head..n.len() - tail]).collect();
        format!("{}{{{}}}{}", &first[..head], middle.join(","), &first[first.len() - tail..])
    }
}

/// Static facts about a backend, readable without touching a device.
#[derive(Clone, Debug, Serialize)]
pub struct BackendDescriptor {
    /// Unique name, e.g. `nvfp4-kernel`.
    pub name: Cow<'static, str>,
    /// Version of the code that computes.
    pub version: Cow<'static, str>,
    /// Who made it.
    pub vendor: Cow<'static, str>,
    /// Tie-break between equal paths, larger wins. Equal priorities on one path are an error.
    pub priority: i32,
    /// `(schema name, path)` pairs it can ever serve.
    pub offers: Vec<(Cow<'static, str>, ExecPath)>,
}

/// Outcome of one dynamic check.
#[derive(Clone, Debug, Serialize)]
pub struct ProbeItem {
    /// Dotted id, e.g. `library.load`.
    pub id: Cow<'static, str>,
    /// Empty when it passed.
    pub reasons: Vec<Reject>,
    /// What was measured or found.
    pub detail: String,
}

/// What a call may use besides its operands.
pub struct ExecContext<'a> {
    /// Device the work is issued to.
    pub device: Device,
    /// Raw queue handle (`cudaStream_t`), 0 for the device's default queue and for the CPU. Work is complete
    /// only when the caller has synchronised the queue.
    pub stream: usize,
    /// Scratch of at least `PreparedWeight::workspace(m)` bytes, 64-byte aligned on the CPU, 256 on devices.
    pub workspace: Option<TensorViewMut<'a>>,
    /// Threads the caller lends. A backend starts none of its own.
    pub threads: &'a ThreadPool,
}

impl<'a> ExecContext<'a> {
    /// A call on `device` whose work goes to `stream`, without scratch.
    pub fn on(device: Device, stream: usize, threads: &'a ThreadPool) -> Self {
        Self { device, stream, workspace: None, threads }
    }
    /// A CPU call without scratch.
    pub fn cpu(threads: &'a ThreadPool) -> Self {
        Self { device: Device::Cpu, stream: 0, workspace: None, threads }
    }
}

/// A family of kernels for 4-bit linear layers: the contract between q4 and the code that multiplies.
///
/// [`select`](crate::select) asks a backend what it can do, [`Dispatch`](crate::Dispatch) has it pack a
/// weight once, and [`Q4Linear`](crate::Q4Linear) calls the [`PreparedWeight`] for every product. To write
/// one, copy [`NullBackend`](crate::NullBackend), which refuses everything, and accept one kind of product at
/// a time.
///
/// # Selection
///
/// * [`descriptor`](Self::descriptor) is constant. What its `offers` do not list is never selected, and has
///   to be refused by `can_prepare` all the same.
/// * [`can_prepare`](Self::can_prepare) answers from its arguments alone: `env` may describe another machine.
///   The answer binds. What it accepts, [`prepare`](Self::prepare) and every call must serve; what it
///   refuses, `prepare` must refuse too.
/// * A refusal is a list of [`Reject`]s, never empty, with *every* reason: a stable code, what was needed and
///   what was found. Users read it as it is.
/// * The path, the activations and the quantiser rule of the spec are computed, or refused. Something similar
///   is never computed instead, and no backend falls back: who computes is decided by selection alone.
/// * [`probe`](Self::probe) informs `q4 diagnose` and decides nothing.
///
/// # Preparing
///
/// * The bytes of a weight are in host memory, whatever `spec.device`, at any alignment, and are the caller's
///   again when `prepare` returns. It copies or repacks them, may use `cx.threads`, and gets no workspace.
/// * `prepare` checks the weight ([`Q4Weight::validate`]) and that it is the one of the spec. `Dispatch` does
///   so before it, the conformance suite does not.
/// * [`group`](Self::group) is for layers of experts and may be left out: weights are then called one by one.
/// * [`PreparedWeight::info`] states path, activations and shape as in the spec; anything else is
///   [`Code::PathBroken`]. [`footprint`](Self::footprint) is the memory plan's, and is never too small.
///
/// # Calls
///
/// * **Shapes.** `y[m, n] = x[m, k] W^T` and `dx[m, k] = dy[m, n] W` with `1 <= m <= spec.max_m`; n are the
///   out features of all segments, k the in features.
/// * **Types.** x and dx have the type `spec.x`, y and dy have `spec.y`: f32, f16 or bf16, in row-major
///   matrices with adjacent columns. Rows may lie further apart than their columns reach (`ld`); the gaps are
///   neither read nor written. A result is rounded to its type once, to nearest even.
/// * **Aliasing.** No operand shares a byte with another or with the workspace. The old content of an output
///   and of the workspace is not read ([`Fusion::accumulate`] excepted), and inputs are never written.
/// * **Place.** Operands lie on `cx.device`. Work for a device is enqueued on `cx.stream` without waiting,
///   and the device that is current in the calling thread stays current.
/// * **Threads.** A prepared weight is immutable and may be called by any number of threads at once. Work is
///   shared out over `cx.threads`; a backend starts no threads.
/// * **Memory.** A call allocates nothing: scratch is what [`PreparedWeight::workspace`] asked for. The dense
///   path, whose GEMM packs its operands, and the oracle are excepted.
/// * **Errors.** Operands that do not fit are [`Code::ShapeMismatch`], and nothing is written then. An
///   operation that the weight does not have is [`Code::Unsupported`], NaN or infinity where the input is
///   quantised [`Code::NonFinite`] or [`Code::ValueInvalid`], a fault of a library or device
///   [`Code::BackendFailed`]. Nothing panics, prints, exits or changes the process.
/// * **Not finite.** With native activations a NaN in row i of x makes row i of y NaN, or the call fails, and
///   other rows keep their bits. A device that does not wait may write NaN where an error would be too late.
/// * **Determinism.** Bits depend on the operands and the machine: not on the number of threads, strides,
///   alignment, earlier calls or what other rows hold ([`crate::ActGlobal::PerCall`] excepted). They may
///   depend on m where the kernel does: on the dense path, with AMX and on CUDA.
/// * **Accuracy.** Every element is within the bound of its path (docs/numerics.md, "The bound") of the exact
///   product; `dequantize` to f32 is exact, bit for bit.
///
/// # Proof
///
/// The first weight of each kind and shape is checked before it is used ([`crate::selfcheck`]): calls of 1,
/// 3, 17 and as many rows as are cheap; outputs are poisoned first, all must be written, and a sample of 64
/// is compared with the oracle. The conformance suite asks for the rest: L0 the C table of a plugin, L1
/// decoding, L2 products, L3 gradients, L4 what must be refused, L5 that results are steady and the process
/// stays as it was. Author's guide: docs/backend-authors.md.
pub trait Q4Backend: Send + Sync + 'static {
    /// Static facts, the same in every call. Touches no device.
    fn descriptor(&self) -> &BackendDescriptor;

    /// Dynamic checks for `diagnose`: what was loaded, from where, what it can do. May be slow.
    fn probe(&self, env: &HostEnv) -> Vec<ProbeItem>;

    /// Whether `spec` is served on `path` on the machine `env`. Pure: the same arguments give the same
    /// answer.
    ///
    /// # Errors
    /// Every reason why `prepare` or a call could not serve it; never an empty list.
    fn can_prepare(&self, spec: &LinearSpec, path: ExecPath, env: &HostEnv) -> Verdict;

    /// Whether `prepare` puts weights of a device into memory shared with the host where
    /// [`crate::BuiltinOptions::unified_memory`] asks for it. Who does not is refused where the user
    /// requires it.
    fn manages_memory(&self) -> bool {
        false
    }

    /// Devices of its own, besides the CPU and CUDA devices, the same in every call: each is
    /// [`Device::Vendor`] with the name of this backend and its place in the list.
    fn devices(&self) -> Vec<VendorDevice> {
        Vec::new()
    }

    /// Memory of one of them, or of a CUDA device: for checks, which stage operands there.
    ///
    /// # Errors
    /// `DeviceMissing`.
    fn memory(&self, device: Device) -> Result<Arc<dyn DeviceMemory>> {
        memory_of(device)
    }

    /// What a weight of `spec` would take on `path`, before it is prepared; never less than it will.
    fn footprint(&self, spec: &LinearSpec, path: ExecPath) -> Footprint {
        Footprint::usual(spec, path)
    }

    /// Repacks `w` for `path` and no other. `w` is in host memory, whatever `spec.device`; it is not kept,
    /// and the weight is ready when this returns.
    ///
    /// # Errors
    /// [`Code::Unsupported`] for what `can_prepare` refuses, [`Code::SchemaInvalid`] or
    /// [`Code::ShapeMismatch`] for a weight that contradicts its schema or the spec, [`Code::ScaleInvalid`]
    /// or [`Code::ValueInvalid`] for scales that no product can use, [`Code::OutOfMemory`] and errors of the
    /// device. Never another path.
    fn prepare(
        &self,
        w: &Q4Weight<'_>,
        spec: &LinearSpec,
        path: ExecPath,
        cx: &mut ExecContext<'_>,
    ) -> Result<Box<dyn PreparedWeight>>;

    /// Weights that it prepared, for calls that multiply rows of x by all of them: experts. Their specs
    /// differ in names, and in a recorded scale of the input, at most; none has a scale of the whole call
    /// ([`crate::ActGlobal::PerCall`]). They live at least as long as what is made of them. `None`, which is
    /// what happens where nothing is said, for weights that are called one after the other.
    ///
    /// # Errors
    /// [`Code::OutOfMemory`] and errors of the device.
    fn group(
        &self,
        weights: &[Arc<dyn PreparedWeight>],
        cx: &mut ExecContext<'_>,
    ) -> Result<Option<Box<dyn PreparedGroup>>> {
        let _ = (weights, cx);
        Ok(None)
    }
}

/// Bytes that a weight will take where it computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// What it keeps.
    pub resident: u64,
    /// Scratch of its largest call, of `max_m` rows.
    pub workspace: u64,
}

impl Footprint {
    /// Scratch of libraries on a device that a product may ask for besides its operands.
    const DEVICE: u64 = 64 << 20;

    /// That of a weight whose backend says nothing: the stored size up to padding, or a dense copy; and
    /// scratch for one f32 copy of each operand.
    pub fn usual(spec: &LinearSpec, path: ExecPath) -> Self {
        let (n, k, m) = (spec.n(), spec.k, spec.max_m as u64);
        let resident = match path {
            ExecPath::DequantMatmul => (n * k.next_multiple_of(16) * spec.y.size()) as u64,
            _ => spec.schema.stored_bytes(n.next_multiple_of(16), k.next_multiple_of(64)),
        };
        let on_device = if spec.device == Device::Cpu { 0 } else { Self::DEVICE };
        Self { resident, workspace: 4 * m * (n + k.next_multiple_of(64)) as u64 + on_device }
    }
}

/// Facts a prepared weight states about itself.
#[derive(Clone, Debug, Serialize)]
pub struct PreparedInfo {
    /// Backend that made it.
    pub backend: Cow<'static, str>,
    /// Path every call of it runs.
    pub path: ExecPath,
    /// Activation format every forward call of it uses.
    pub activations: Activations,
    /// Out features.
    pub n: usize,
    /// In features.
    pub k: usize,
    /// Bytes it keeps.
    pub resident_bytes: u64,
    /// Operations it has.
    pub ops: OpSet,
}

/// A weight in the layout one path wants, made by [`Q4Backend::prepare`]. What its calls may assume and must
/// do is the contract of [`Q4Backend`], "Calls": the caller allocates every output, `1 <= m <= max_m`.
///
/// # Errors
/// All calls: [`Code::ShapeMismatch`] for operands or a workspace that do not fit, [`Code::Unsupported`] for
/// an operation that [`PreparedInfo::ops`] lacks, [`Code::NonFinite`] or [`Code::ValueInvalid`] where an
/// input that is quantised is NaN or infinite, [`Code::BackendFailed`] for faults of a library or device.
pub trait PreparedWeight: Any + Send + Sync {
    /// What was built.
    fn info(&self) -> &PreparedInfo;
    /// Scratch bytes for `m` rows, for any operation. Below one dense copy unless the path is
    /// `DequantMatmul`.
    fn workspace(&self, m: usize) -> usize;
    /// `y[m, n] = x[m, k] W^T`, types as in the spec, rows may be strided.
    fn forward(&self, x: TensorView<'_>, y: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()>;
    /// Whether `forward_fused` takes exactly this combination for `m` rows. Where it does not, the caller
    /// composes.
    fn fuses(&self, m: usize, set: FuseSet) -> bool {
        let _ = m;
        set == FuseSet::NONE
    }
    /// `forward` with what `fusion` adds. x is f32 with a norm, y is `[m, n/2]` with a gate and f32 when it
    /// accumulates; else types and shapes are those of `forward`. [`Code::Unsupported`] for a combination
    /// that [`fuses`](Self::fuses) denies.
    fn forward_fused(
        &self,
        x: TensorView<'_>,
        fusion: &Fusion<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        if fusion.set() == FuseSet::NONE {
            return self.forward(x, y, cx);
        }
        Err(Error::new(Code::Unsupported, "a fused product")
            .need("a combination that this weight says it fuses")
            .have(format!("{:?}", fusion.set())))
    }
    /// `dx[m, k] = dy[m, n] W` with the decoded weight; `dy` has the type of y, `dx` that of x.
    fn backward_input(
        &self,
        dy: TensorView<'_>,
        dx: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()>;
    /// Decodes the whole matrix into `out[n, k]`, f32 (exact), f16 or bf16 (rounded once).
    fn dequantize(&self, out: TensorViewMut<'_>, cx: &mut ExecContext<'_>) -> Result<()>;
}

/// Weights that one call multiplies, made by [`Q4Backend::group`]: experts. Rows of
/// x are sorted by expert; `offsets` says where those of each begin.
///
/// # Errors
/// Those of [`PreparedWeight::forward`], and [`Code::ShapeMismatch`] for offsets that fall, or do not begin
/// with 0 and end with m.
pub trait PreparedGroup: Send + Sync {
    /// Scratch bytes for a call of `m` rows in all.
    fn workspace(&self, m: usize) -> usize;
    /// Row r of `y[m, n]` is row r of `x[m, k]` times the weight e for which
    /// `offsets[e] <= r < offsets[e + 1]`. `offsets` are as many i32 as there are weights and one more, on
    /// the device of the call, where the host need not know them. An expert may have no row. Types, strides
    /// and everything else are as in [`PreparedWeight::forward`], with `1 <= m <= max_m` of the weights.
    fn forward(
        &self,
        x: TensorView<'_>,
        offsets: TensorView<'_>,
        y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()>;
}

/// A backend the process knows, usable or not.
#[derive(Clone)]
pub enum Candidate {
    /// Linked in or loaded.
    Live(Arc<dyn Q4Backend>),
    /// Known by name but not usable: library missing, plugin refused, feature off.
    Dead {
        /// The name it would have.
        name: Cow<'static, str>,
        /// Why it is not usable; never empty.
        reasons: Vec<Reject>,
    },
}

impl Candidate {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Live(b) => &b.descriptor().name,
            Self::Dead { name, .. } => name,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dense, Q4Schema};

    #[test]
    fn groups_have_short_names() {
        let mut spec = LinearSpec {
            segments: ["m.q_proj", "m.k_proj", "m.v_proj"]
                .map(|n| SegmentSpec { name: n.into(), rows: 1 })
                .into(),
            schema: Q4Schema::Dense(Dense { dtype: DType::F32 }),
            k: 1,
            max_m: 1,
            x: DType::F32,
            y: DType::F32,
            activations: Activations::Native,
            device: Device::Cpu,
            ops: OpSet::FORWARD,
        };
        assert_eq!(spec.name(), "m.{q,k,v}_proj");
        spec.segments.truncate(1);
        assert_eq!(spec.name(), "m.q_proj");
        spec.segments =
            ["mlp.gate_proj", "mlp.up_proj"].map(|n| SegmentSpec { name: n.into(), rows: 1 }).into();
        assert_eq!(spec.name(), "mlp.{gate,up}_proj");
    }
}
