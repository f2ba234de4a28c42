//! The numbers of the binary contract and the types they stand for, in both directions. A number without a
//! type, or a type without a number, is `None`: nothing is guessed.
use q4_core::formats::KINDS;
use q4_core::{Code, Convention, DType, Device, ExecPath, NibbleOrder, RejectCode, Rule, ScaleLayout};
use q4_plugin_abi as abi;
use q4_plugin_abi::status;

macro_rules! numbers {
    ($(#[$doc:meta])* $to:ident, $from:ident: $type:ty { $($number:path = $value:path,)* }) => {
        $(#[$doc])*
        pub fn $to(value: $type) -> Option<u32> {
            match value {
                $($value => Some($number),)*
                #[allow(unreachable_patterns)] // the types of core may grow
                _ => None,
            }
        }
        /// The type a number stands for.
        pub fn $from(number: u32) -> Option<$type> {
            match number {
                $($number => Some($value),)*
                _ => None,
            }
        }
    };
}

numbers! {
    /// Number of a path.
    path_to, path_from: ExecPath {
        abi::path::NATIVE_KERNEL = ExecPath::NativeKernel,
        abi::path::FUSED_DEQUANT = ExecPath::FusedDequant,
        abi::path::DEQUANT_MATMUL = ExecPath::DequantMatmul,
        abi::path::REFERENCE = ExecPath::Reference,
        abi::path::FUSED_ROUNDED = ExecPath::FusedRounded,
    }
}
numbers! {
    /// Number of an io type.
    dtype_to, dtype_from: DType {
        abi::dtype::F32 = DType::F32,
        abi::dtype::F16 = DType::F16,
        abi::dtype::BF16 = DType::BF16,
    }
}
numbers! {
    /// Number of a quantiser's rule.
    rule_to, rule_from: Rule {
        abi::rule::TORCHAO = Rule::TorchAo,
        abi::rule::MODELOPT = Rule::ModelOpt,
        abi::rule::COMPRESSED_TENSORS = Rule::CompressedTensors,
        abi::rule::TRANSFORMER_ENGINE = Rule::TransformerEngine,
        abi::rule::RUNTIME = Rule::Runtime,
    }
}
numbers! {
    /// Number of a convention; 0 is none.
    convention_to, convention_from: Convention {
        abi::convention::MULTIPLY = Convention::Multiply,
        abi::convention::DIVIDE = Convention::Divide,
    }
}
numbers! {
    /// Number of a scale layout.
    layout_to, layout_from: ScaleLayout {
        abi::scale_layout::ROW_MAJOR = ScaleLayout::RowMajor,
        abi::scale_layout::TILES_128X4 = ScaleLayout::Swizzled128x4,
    }
}
numbers! {
    /// Number of a nibble order.
    order_to, order_from: NibbleOrder {
        abi::nibble_order::LOW_FIRST = NibbleOrder::LowFirst,
        abi::nibble_order::HIGH_FIRST = NibbleOrder::HighFirst,
    }
}

/// `(number, revision)` of a schema, by the name core gives it or the one that reports have, `nvfp4@1`.
pub fn schema_to(name: &str) -> Option<(u32, u32)> {
    let name = name.strip_suffix("@1").unwrap_or(name);
    names().find(|n| n.0 == name).map(|n| (n.1, 1))
}

/// Name of a schema core knows.
pub fn schema_from(number: u32, revision: u32) -> Option<&'static str> {
    names().find(|n| n.1 == number && revision == 1).map(|n| n.0)
}

fn names() -> impl Iterator<Item = &'static (&'static str, u32)> {
    KINDS.iter().flat_map(|kind| kind.names)
}

/// `(type, ordinal)` of a device; whose it is, is for the caller to look at.
pub fn device_to(device: Device) -> Option<(u32, u32)> {
    match device {
        Device::Cpu => Some((abi::DEVICE_CPU, 0)),
        Device::Cuda(ordinal) => Some((abi::DEVICE_CUDA, ordinal)),
        Device::Vendor { ordinal, .. } => Some((abi::DEVICE_VENDOR, ordinal)),
        _ => None,
    }
}

/// The device of a type and an ordinal; a vendor's is the library's own.
pub fn device_from(kind: u32, ordinal: u32) -> Option<Device> {
    match (kind, ordinal) {
        (abi::DEVICE_CPU, 0) => Some(Device::Cpu),
        (abi::DEVICE_CUDA, ordinal) => Some(Device::Cuda(ordinal)),
        (abi::DEVICE_VENDOR, ordinal) => Some(Device::Vendor { backend: Device::OWN, ordinal }),
        _ => None,
    }
}

/// Status of a call that failed with `code`.
pub fn status_to(code: Code) -> abi::Q4Status {
    match code {
        Code::Unsupported => status::UNSUPPORTED,
        Code::ShapeMismatch | Code::SchemaInvalid | Code::TensorType | Code::TensorShape => {
            status::INVALID_ARGUMENT
        }
        Code::OutOfMemory => status::OUT_OF_MEMORY,
        Code::DeviceMissing => status::DEVICE,
        Code::LibraryRefused => status::ABI,
        Code::NonFinite | Code::ValueInvalid => status::NON_FINITE,
        Code::ScaleInvalid => status::SCALE_INVALID,
        _ => status::INTERNAL,
    }
}

/// Code of a failed call.
pub fn status_from(status: abi::Q4Status) -> Code {
    match status {
        status::UNSUPPORTED => Code::Unsupported,
        status::INVALID_ARGUMENT => Code::ShapeMismatch,
        status::OUT_OF_MEMORY => Code::OutOfMemory,
        status::DEVICE => Code::DeviceMissing,
        status::ABI => Code::LibraryRefused,
        status::NON_FINITE => Code::NonFinite,
        status::SCALE_INVALID => Code::ScaleInvalid,
        _ => Code::BackendFailed,
    }
}

/// The reason a backend may give by that spelling. Those that only q4 itself can know are not its to give.
pub fn reason_from(text: &str) -> Option<RejectCode> {
    use RejectCode::*;
    const OWN: [RejectCode; 10] = [
        NotSelected,
        PathNotAdmitted,
        NameTaken,
        ConformanceMissing,
        DisabledByUser,
        SelfCheckFailed,
        LibraryUntrusted,
        DiedInProbe,
        TimedOut,
        UnifiedMemory,
    ];
    RejectCode::parse(text).filter(|c| !OWN.contains(c))
}
