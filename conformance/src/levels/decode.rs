//! L1: `dequantize` is the definition of the values, bit for bit: every code under every scale, every layout.
use crate::case::{Bench, Case, Seen};
use crate::guarded::Layout;
use crate::measure::Problem;
use crate::stored::Stored;
use crate::{Claim, Level, lattice, product};
use q4_core::{
    Activations, Convention, DType, ExecPath, GlobalScale, NibbleOrder, OpSet, Result, ScaleLayout,
};

/// Per-tensor scales at the ends of f32: results are subnormal, or nearly overflow, or are rounded twice.
const GLOBALS: [(&str, Option<(Convention, f32)>); 10] = [
    ("single", None),
    ("multiply-one", Some((Convention::Multiply, 1.0))),
    ("multiply-third", Some((Convention::Multiply, 1.0 / 3.0))),
    ("multiply-tiny", Some((Convention::Multiply, 1e-35))),
    ("multiply-subnormal", Some((Convention::Multiply, 1e-40))),
    ("multiply-huge", Some((Convention::Multiply, 1e34))),
    ("divide-one", Some((Convention::Divide, 1.0))),
    ("divide-third", Some((Convention::Divide, 1.0 / 3.0))),
    ("divide-huge", Some((Convention::Divide, 3e38))),
    ("divide-tiny", Some((Convention::Divide, 1e-34))),
];

pub(super) fn cases(claim: &Claim, seed: u64, all: &mut Vec<Case>) {
    let format = lattice::quantizers(claim.activations)[0];
    let path = claim.path;
    match claim.schema {
        "nvfp4" => {
            for (layout_name, layout) in
                [("row-major", ScaleLayout::RowMajor), ("swizzled", ScaleLayout::Swizzled128x4)]
            {
                for (name, global) in GLOBALS {
                    let id = format!("every-code/{layout_name}/{name}");
                    all.push(Case::new(Level::L1, Some(claim), id, move |bench| {
                        let global = global.map(|(c, g)| GlobalScale::new(c, g)).transpose()?;
                        let scales: Vec<u8> = (0..0x7f).collect();
                        run(bench, path, format, &Stored::every_nvfp4(layout, global, &scales), true)
                    }));
                }
                // A sign on a scale is legal in the encoding and nowhere written: serve it rightly or refuse it.
                all.push(Case::new(
                    Level::L1,
                    Some(claim),
                    format!("signed-scales/{layout_name}"),
                    move |bench| {
                        let scales: Vec<u8> = (0x80..0xff).collect();
                        run(bench, path, format, &Stored::every_nvfp4(layout, None, &scales), false)
                    },
                ));
            }
        }
        "nf4" | "nf4-dq" => {
            let nested = claim.schema == "nf4-dq";
            for (name, order) in [("high", NibbleOrder::HighFirst), ("low", NibbleOrder::LowFirst)] {
                for block in [32, 64, 128, 256, 512, 1024, 2048, 4096] {
                    let id = format!("every-code/{name}/{block}");
                    all.push(Case::new(Level::L1, Some(claim), id, move |bench| {
                        run(bench, path, format, &Stored::every_nf4(order, block, nested, 24, 512), true)
                    }));
                }
            }
        }
        _ => {}
    }
    let io = lattice::io_of(path);
    for schema in lattice::encodings(claim.schema) {
        for (rows, k) in [
            (vec![1], 16),
            (vec![15], 48),
            (vec![17], 80),
            (vec![33], 144),
            (vec![65], 272),
            (vec![16, 48, 3], 64),
            (vec![130], 1040),
        ] {
            let sketch = lattice::Sketch { schema, activations: format, io, rows, k, m: 1, seed };
            all.push(Case::new(Level::L1, Some(claim), format!("shape/{}", sketch.name()), move |bench| {
                run(bench, path, format, &sketch.weight(), true)
            }));
        }
    }
}

/// Decodes to all three types; with `must`, refusing the weight is wrong once `can_prepare` agreed.
fn run(
    bench: &Bench<'_>,
    path: ExecPath,
    activations: Activations,
    stored: &Stored,
    must: bool,
) -> Result<Seen> {
    stored.lend(|w| {
        let problem = Problem {
            name: String::new(),
            weight: *w,
            x: Vec::new(),
            m: 1,
            activations,
            io: lattice::io_of(path),
            recorded: None,
        };
        let spec = product::spec(bench, &problem, OpSet::FORWARD.with(OpSet::DEQUANTIZE));
        let prepared = match product::prepare(bench, path, w, &spec) {
            Ok(Ok(prepared)) => prepared,
            Ok(Err(reasons)) => return Ok(Seen::Refused(reasons)),
            Err(e) if must => return Err(e),
            Err(_) => return Ok(Seen::exactly(0)),
        };
        let mut values = 0;
        for (dtype, layout) in [
            (DType::F32, Layout::PLAIN),
            (DType::F32, Layout::HOSTILE),
            (DType::F16, Layout::PLAIN),
            (DType::BF16, Layout::HOSTILE),
        ] {
            values += product::check_decode(&*prepared, w, dtype, layout, bench.threads)?;
        }
        Ok(Seen::exactly(values))
    })
}
