//! Where two runs of products with 4-bit inputs part: the first value that was rounded to another code, and
//! how near to the boundary between the two it lies.
//!
//! A product is exact for the codes it is given, to the last bits of a sum. Those bits move the next input by
//! as little, which is nothing, unless it lies so near to a boundary that it takes the other code: half a
//! step of 4 bits, at once.
use q4_core::formats::{e2m1, e4m3, nvfp4};
use q4_core::oracle::act_global;
use q4_core::{ActQuant, Activations, Dispatch, GlobalScale, Result};
use q4_model::checkpoint::Checkpoint;
use q4_model::plan::{Plan, PlanOptions, Product};
use q4_model::watch::{INPUT_NORM, POST_NORM, Site};
use serde::Serialize;

/// The products of a model that round their inputs to NVFP4, and what was seen of those inputs.
pub struct Codes {
    inputs: Vec<(Site, Vec<Input>)>,
    seen: Flips,
}

struct Input {
    product: String,
    act: ActQuant,
    k: usize,
    source: q4_core::DType,
}

/// Codes of both runs.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Flips {
    /// Codes that were compared.
    pub compared: u64,
    /// Those that differ, by themselves or by the scale of their block.
    pub differ: u64,
    /// The first of them.
    pub first: Option<Flip>,
}

/// One value, in the run to compare with and in the other, in that order.
#[derive(Clone, Debug, Serialize)]
pub struct Flip {
    /// Whose input it is.
    pub product: String,
    /// Position in the prompt and what was decoded behind it.
    pub position: usize,
    /// Element of the input.
    pub column: usize,
    /// What was rounded: an element, or the largest magnitude of its block, which gives the block's scale.
    pub what: &'static str,
    /// The values.
    pub values: [f32; 2],
    /// What they were rounded to, in units of the step: elements of E2M1, or scales of E4M3.
    pub rounded: [f32; 2],
    /// The value in the middle between those two, exactly.
    pub boundary: f64,
    /// How far the values are from it, in units of the last place of f32.
    pub ulps: [f64; 2],
}

impl Codes {
    /// `None` when no product of the plan rounds its inputs to NVFP4.
    pub fn of(checkpoint: &Checkpoint, dispatch: &Dispatch, options: &PlanOptions) -> Result<Option<Self>> {
        let plan = Plan::new(checkpoint, dispatch, options)?;
        let rounding = |products: &[Product]| -> Vec<Input> {
            let of = |p: &Product| match p.spec.activations {
                Activations::Nvfp4(act) => {
                    Some(Input { product: p.spec.name(), act, k: p.spec.k, source: p.spec.x })
                }
                _ => None,
            };
            products.iter().filter_map(of).collect()
        };
        let mut inputs = Vec::new();
        for (i, layer) in plan.layers.iter().enumerate() {
            let all = [
                (INPUT_NORM, &layer.qkv),
                ("self_attn", &layer.o),
                (POST_NORM, &layer.gate_up),
                ("mlp.{gate,up}_proj", &layer.down),
            ];
            inputs.extend(all.map(|(call, products)| (Site { layer: Some(i), call }, rounding(products))));
        }
        inputs.retain(|(_, of)| !of.is_empty());
        Ok((!inputs.is_empty()).then(|| Self { inputs, seen: Flips::default() }))
    }

    /// What was seen.
    pub fn flips(&self) -> Flips {
        self.seen.clone()
    }

    /// Rounds both runs' values at `site`, `[rows, width]`, as the products that read them do.
    pub fn compare(&mut self, site: Site, rows: usize, reference: &[f32], got: &[f32]) -> Result<()> {
        let Some((_, inputs)) = self.inputs.iter().find(|(s, _)| *s == site) else { return Ok(()) };
        for input in inputs {
            let both = [reference, got];
            let globals = [
                act_global(&input.act, reference, input.source)?,
                act_global(&input.act, got, input.source)?,
            ];
            for row in 0..rows {
                let rounded =
                    [0, 1].map(|i| Rounded::new(&both[i][row * input.k..][..input.k], input, globals[i]));
                let [a, b] = rounded;
                let (a, b) = (a?, b?);
                let differ = (0..input.k).filter(|c| a.is_apart(&b, *c));
                self.seen.compared += input.k as u64;
                for column in differ {
                    self.seen.differ += 1;
                    if self.seen.first.is_none() {
                        self.seen.first = Some(Flip::of(input, row, column, &a, &b));
                    }
                }
            }
        }
        Ok(())
    }
}

/// A row as a product reads it.
struct Rounded {
    values: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<u8>,
    global: Option<GlobalScale>,
}

impl Rounded {
    fn new(row: &[f32], input: &Input, global: Option<GlobalScale>) -> Result<Self> {
        let quantizer = nvfp4::Quantizer { rule: input.act.rule, global, source: input.source };
        let (mut codes, mut scales) = (vec![0; row.len() / 2], vec![0; row.len() / nvfp4::BLOCK]);
        quantizer.quantize_row(row, &mut codes, &mut scales)?;
        Ok(Self { values: row.to_vec(), codes, scales, global })
    }
    fn code(&self, column: usize) -> u8 {
        self.codes[column / 2] >> (4 * (column % 2)) & 15
    }
    fn scale(&self, column: usize) -> u8 {
        self.scales[column / nvfp4::BLOCK]
    }
    fn is_apart(&self, other: &Self, column: usize) -> bool {
        // Zero has two codes and one value.
        let same = e2m1::decode(self.code(column)) == e2m1::decode(other.code(column));
        self.scale(column) != other.scale(column) || !same
    }
    /// The value of one unit of E4M3.
    fn unit(&self) -> f64 {
        self.global.map_or(1.0, GlobalScale::multiplier)
    }
    fn largest(&self, column: usize) -> f32 {
        let block = column / nvfp4::BLOCK * nvfp4::BLOCK;
        self.values[block..][..nvfp4::BLOCK].iter().fold(0f32, |m, v| m.max(v.abs()))
    }
}

impl Flip {
    fn of(input: &Input, position: usize, column: usize, a: &Rounded, b: &Rounded) -> Self {
        let (what, values, rounded, unit) = if a.scale(column) == b.scale(column) {
            let step = f64::from(e4m3::decode(a.scale(column))) * a.unit();
            let codes = [a, b].map(|r| e2m1::decode(r.code(column)));
            ("element", [a, b].map(|r| r.values[column]), codes, step)
        } else {
            // A scale is the largest magnitude over 6, in units of the tensor's.
            let scales = [a, b].map(|r| e4m3::decode(r.scale(column)));
            ("block scale", [a, b].map(|r| r.largest(column)), scales, 6.0 * a.unit())
        };
        let boundary = (f64::from(rounded[0]) + f64::from(rounded[1])) / 2.0 * unit;
        let ulps = values.map(|v| (f64::from(v) - boundary) / ulp(v));
        Self { product: input.product.clone(), position, column, what, values, rounded, boundary, ulps }
    }
}

/// From `v` to the next f32 away from zero.
fn ulp(v: f32) -> f64 {
    let next = f32::from_bits(v.abs().to_bits() + 1);
    f64::from(next) - f64::from(v.abs())
}

impl Flips {
    /// For people.
    pub fn text(&self, against: &str) -> String {
        let mut text = format!("{} of {} input codes differ from {against}'s", self.differ, self.compared);
        if let Some(f) = &self.first {
            text += &format!(
                "; the first in {}, row {}, column {}: {} {:e} became {}, {:e} became {}; the boundary {:e} is {:.1} and {:.1} \
                 units of the last place away",
                f.product,
                f.position,
                f.column,
                f.what,
                f.values[0],
                f.rounded[0],
                f.values[1],
                f.rounded[1],
                f.boundary,
                f.ulps[0].abs(),
                f.ulps[1].abs()
            );
        }
        text + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use q4_core::{ActGlobal, DType, Rule};

    fn codes() -> Codes {
        let act = ActQuant { rule: Rule::ModelOpt, global: ActGlobal::None };
        let input = Input { product: "p".into(), act, k: 32, source: DType::F32 };
        let site = Site { layer: Some(0), call: "self_attn" };
        Codes { inputs: vec![(site, vec![input])], seen: Flips::default() }
    }

    fn compare(change: impl Fn(&mut [f32])) -> Flips {
        let mut codes = codes();
        let site = codes.inputs[0].0;
        // Two rows; every block has 6 in it, so that its scale is 1 and a value is its own size in steps.
        let row: Vec<f32> = (0..32).map(|i| if i % 16 == 0 { 6.0 } else { 1.0 }).collect();
        let reference = [row.clone(), row].concat();
        let mut got = reference.clone();
        change(&mut got);
        codes.compare(site, 2, &reference, &got).expect("finite");
        codes
            .compare(Site { layer: Some(0), call: "other" }, 2, &[f32::NAN], &[0.0])
            .expect("nobody reads it");
        codes.flips()
    }

    #[test]
    fn a_flip_is_named_with_its_distance_from_the_boundary() {
        let none = compare(|_| ());
        assert_eq!((none.compared, none.differ), (64, 0));
        let below = compare(|x| x[33] = 1.2499999);
        assert_eq!(below.differ, 0, "still 1");
        let above = compare(|x| x[33] = 1.2500001);
        let first = above.first.expect("the code of 1.5");
        assert_eq!((above.differ, first.position, first.column, first.what), (1, 1, 1, "element"));
        assert_eq!((first.rounded, first.boundary), ([1.0, 1.5], 1.25));
        assert_eq!(first.ulps[1], 1.0);
        assert!(compare(|x| x[1] = -0.0).differ == 1 && compare(|x| x[1] = 1.0000001).differ == 0);
    }

    #[test]
    fn a_scale_that_differs_takes_its_block_along() {
        let flips = compare(|x| x[16] = 7.0);
        let first = flips.first.expect("the scale of the second block");
        assert_eq!(
            (flips.differ, first.column, first.what, first.rounded),
            (16, 16, "block scale", [1.0, 1.125])
        );
        assert_eq!((first.values, first.boundary), ([6.0, 7.0], 6.0 * 1.0625));
    }
}
