//! The product that the checks of a table are made with: the first that the library accepts, small ones
//! asked first.
use super::session::Backend;
use q4_core::formats;
use q4_core::{
    ActGlobal, ActQuant, Activations, Code, DType, Device, Error, ExecPath, Fp8Inputs, GlobalScale,
    LinearSpec, OpSet, Q4Schema, Result, Rule, SegmentSpec,
};
use q4_plugin_abi::status;
use q4_plugin_sdk::lend::LentSpec;
use std::borrow::Cow;

type Offer = (Cow<'static, str>, ExecPath);

/// Row segments, and most rows of a call. One of either hides what two show.
const COUNTS: [(usize, usize); 6] = [(2, 2), (2, 16), (2, 1), (1, 2), (1, 16), (1, 1)];
/// Out features of a segment, and in features. Some libraries begin with a tile, or with several.
const SHAPES: [[usize; 2]; 5] = [[32, 256], [128, 256], [1024, 1024], [256, 4096], [4096, 4096]];
/// Types of input and output, and of dense weights.
const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// A product that a library accepts.
pub(super) struct Accepted {
    pub spec: LinearSpec,
    pub path: ExecPath,
}

impl Accepted {
    /// Whatever a claim can be found with is asked for: a library that can be certified has one.
    pub fn find(backend: &Backend<'_>) -> Result<Self> {
        let offers = &backend.table.offers;
        let mut asked = 0;
        let own = backend.has_device().then_some(Device::Vendor { backend: Device::OWN, ordinal: 0 });
        let devices = [Device::Cpu].into_iter().chain(own);
        let on =
            |device| Ok(products(offers)?.map(move |(spec, path)| (LinearSpec { device, ..spec }, path)));
        for (spec, path) in devices.map(on).collect::<Result<Vec<_>>>()?.into_iter().flatten() {
            asked += 1;
            if backend.verdict(LentSpec::new(&spec, path)?.raw())?.0 == status::OK {
                return Ok(Self { spec, path });
            }
        }
        let offers: Vec<_> = offers.iter().map(|(name, path)| format!("{name} via {path}")).collect();
        let need = format!(
            "`can_prepare` to accept a product on {}: {}, one or two segments of [n, k] in \
             {SHAPES:?}, 1, 2 or 16 rows, float32, bfloat16 or float16, any encoding",
            if own.is_some() { "the CPU or its first device" } else { "the CPU" },
            offers.join(" or ")
        );
        let have = format!("{asked} products that it refuses");
        Err(Error::new(Code::ConformanceFailed, "checks of the table").need(need).have(have))
    }
}

/// All that are asked for, in this order.
fn products(offers: &[Offer]) -> Result<impl Iterator<Item = (LinearSpec, ExecPath)>> {
    let kinds = kinds(offers)?;
    let shapes = COUNTS.into_iter().flat_map(|count| SHAPES.map(|shape| (count, shape)));
    let places = shapes.flat_map(|(count, shape)| TYPES.map(|io| (count, shape, io)));
    Ok(places.flat_map(move |((segments, max_m), [rows, k], io)| {
        let product = move |(schema, activations, path)| {
            let spec = LinearSpec {
                segments: vec![SegmentSpec { name: "check".into(), rows }; segments],
                schema,
                k,
                max_m,
                x: io,
                y: io,
                activations,
                device: Device::Cpu,
                ops: OpSet::FORWARD,
            };
            (spec, path)
        };
        kinds.clone().into_iter().map(product)
    }))
}

/// Every encoding of what is offered with every activation format, the plainest first.
fn kinds(offers: &[Offer]) -> Result<Vec<(Q4Schema, Activations, ExecPath)>> {
    let formats = activations()?;
    let encodings = offers.iter().flat_map(|(name, path)| encodings(name).into_iter().map(|e| (e, *path)));
    Ok(encodings.flat_map(|(schema, path)| formats.iter().map(move |f| (schema, *f, path))).collect())
}

/// Those that the suite knows, then the other blocks of each.
fn encodings(name: &str) -> Vec<Q4Schema> {
    let mut all = formats::encodings(name);
    for other in all.clone().iter().flat_map(|e| e.blocks()) {
        if !all.contains(&other) {
            all.push(other);
        }
    }
    all
}

fn activations() -> Result<Vec<Activations>> {
    let quantizers = [
        (Rule::ModelOpt, ActGlobal::None),
        (Rule::TorchAo, ActGlobal::PerCall),
        (Rule::CompressedTensors, ActGlobal::PerCall),
        (Rule::Runtime, ActGlobal::None),
        (Rule::ModelOpt, ActGlobal::Static(GlobalScale::multiply(0.0021)?)),
        (Rule::CompressedTensors, ActGlobal::Static(GlobalScale::divide(390.0)?)),
        (Rule::TransformerEngine, ActGlobal::PerCall),
    ];
    let nvfp4 = quantizers.map(|(rule, global)| Activations::Nvfp4(ActQuant { rule, global }));
    let stored = Fp8Inputs::Static(GlobalScale::multiply(0.03125)?);
    let fp8 = [Fp8Inputs::PerRow, Fp8Inputs::PerBlock, stored].map(Activations::Fp8);
    Ok([&[Activations::Native, Activations::Int8][..], &nvfp4, &fp8].concat())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use q4_conformance::lattice;

    /// One product of every encoding for each number of segments and each shape of at most so many elements.
    pub fn specs(most: usize) -> Result<Vec<LinearSpec>> {
        let offers: Vec<_> = formats::names().map(|name| (name.into(), ExecPath::Reference)).collect();
        let plain =
            |s: &LinearSpec| s.x == DType::F32 && s.activations == Activations::Native && s.max_m == 2;
        let all = products(&offers)?.map(|(spec, _)| spec);
        Ok(all.filter(|s| plain(s) && s.segments[0].rows * s.k <= most).collect())
    }

    #[test]
    fn the_plainest_small_product_is_asked_for_first() -> Result<()> {
        let schema = formats::encodings("nf4")[0];
        let segment = SegmentSpec { name: "check".into(), rows: 32 };
        let want = LinearSpec {
            segments: vec![segment.clone(), segment],
            schema,
            k: 256,
            max_m: 2,
            x: DType::F32,
            y: DType::F32,
            activations: Activations::Native,
            device: Device::Cpu,
            ops: OpSet::FORWARD,
        };
        let first = products(&[("nf4".into(), ExecPath::Reference)])?.next();
        assert_eq!(first, Some((want, ExecPath::Reference)));
        Ok(())
    }

    #[test]
    fn all_that_the_suite_multiplies_is_asked_for() -> Result<()> {
        for schema in lattice::usual() {
            assert!(encodings(schema.id().name).contains(&schema), "{schema:?}");
            for activations in lattice::activations(&schema) {
                assert!(super::activations()?.contains(&activations), "{activations:?}");
            }
        }
        Ok(())
    }
}
