//! int4 weights as tools pack them into words, taken apart once into the parts that the format has elsewhere:
//! eight out features' zero points of compressed-tensors, and all of GPTQ and AWQ, whose matrices lie the
//! other way round; in features of GPTQ may be in any group. Codes and scales of compressed-tensors are read
//! where they lie.
use super::order::Order;
use super::store::TensorStore;
use super::table::Table;
use super::table::{Kind, Tensor};
use q4_core::detect::{Detected, Layout, TensorMeta};
use q4_core::formats::int4::ZERO;
pub use q4_core::formats::storage::Words;
use q4_core::{Code, DType, Error, Result};

/// How `qweight` and `qzeros` are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// What a word holds.
    pub words: Words,
    /// Every zero point is to be the middle, and none is kept.
    pub symmetric: bool,
    /// What `desc_act` says: whether in features may be in any group, as `g_idx` then has to tell. Where
    /// nobody says it, `g_idx` does.
    pub act_order: Option<bool>,
}

/// What is in place of words.
#[derive(Default)]
pub(super) struct Apart {
    /// In place of those of their names.
    pub tensors: Vec<Tensor>,
    /// Of the tensors.
    pub bytes: Vec<u8>,
    /// Names of tensors that say nothing any more.
    pub gone: Vec<String>,
}

static U8: Kind = Kind::new("U8", 8, Some(DType::U8));
static I8: Kind = Kind::new("I8", 8, Some(DType::I8));
static F16: Kind = Kind::new("F16", 16, Some(DType::F16));
static BF16: Kind = Kind::new("BF16", 16, Some(DType::BF16));

/// Out feature of each nibble of AWQ's words, the lowest first.
pub(super) const AWQ: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Those of everybody else.
const ASCENDING: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

/// The out feature of each nibble of a word of zero points, and how much less is stored than there is.
pub(super) fn zero_points(words: Words) -> ([usize; 8], u8) {
    let order = if words == Words::Awq { AWQ } else { ASCENDING };
    (order, u8::from(words == Words::Gptq))
}

/// What has to be taken apart of `store`, whose words are packed so. What does not fit together stays as it
/// is, for whoever reads the layer to refuse.
///
/// # Errors
/// [`Code::OutOfMemory`] for more than `memory` bytes, [`Code::SchemaInvalid`] for a file that stores as
/// bytes what tools store as words, groups that contradict each other or what is declared of their order, or
/// a layer of which nobody says how it is packed.
pub(super) fn apart(store: &TensorStore, packing: Option<Packing>, memory: Option<u64>) -> Result<Apart> {
    let mut out = Apart::default();
    // Bytes are what this file puts in the words' place: stored, they would be taken for them.
    let is_word = |name: &str| match name.strip_suffix(".weight_zero_point") {
        Some(layer) => store.table().contains_key(&format!("{layer}.weight_packed")),
        None => name.ends_with(".qweight") || name.ends_with(".qzeros"),
    };
    let bytes = |meta: &TensorMeta| matches!(meta.dtype, Some(DType::U8 | DType::I8));
    if let Some((name, meta)) = store.table().iter().find(|(name, meta)| is_word(name) && bytes(meta)) {
        let have = meta.dtype.map_or("another type", DType::as_str);
        return Err(Error::new(Code::SchemaInvalid, format!("`{name}`")).need("words: i32").have(have));
    }
    let names: Vec<&str> = store.table().keys().collect();
    let layers = names.iter().filter_map(|name| Layer::of(store, name));
    let layers: Vec<_> = layers.collect();
    let need: usize = layers.iter().map(Layer::bytes).sum();
    if let Some(memory) = memory.filter(|m| need as u64 > *m) {
        return Err(Error::new(Code::OutOfMemory, "words of int4 weights taken apart")
            .need(format!("{need} bytes"))
            .have(format!("{memory} bytes"))
            .fix("raise --memory-limit"));
    }
    out.bytes.reserve_exact(need);
    for layer in layers {
        layer.take_apart(store, packing, &mut out)?;
    }
    Ok(out)
}

impl Packing {
    /// Refuses another order than is declared, and one that is declared and not there: `order` of the layer
    /// `name`, whose groups have `size` in features.
    fn allows(&self, name: &str, order: Option<&Order>, has_index: bool, size: usize) -> Result<()> {
        if self.act_order == Some(true) && !has_index {
            return Err(Error::new(Code::SchemaInvalid, format!("`{name}`"))
                .need("g_idx, as desc_act of config.json declares")
                .have("no such tensor"));
        }
        let Some(order) = order.filter(|_| self.act_order == Some(false)) else { return Ok(()) };
        let groups = order.groups(size).into_iter().enumerate();
        let moved = groups.filter(|(i, group)| i / size != *group as usize);
        let have = moved.map(|(i, group)| format!("in feature {i} in group {group}: act-order")).next();
        let error = Error::new(Code::SchemaInvalid, format!("`{name}.g_idx`")).have(have.unwrap_or_default());
        Err(match self.words {
            Words::Awq => error.need("groups in the order of the in features: words of AWQ are in no other"),
            Words::Gptq | Words::GptqV2 => error
                .need("groups in the order of the in features, as desc_act false of config.json declares")
                .fix("the config.json that was written with these weights: it says desc_act true"),
        })
    }
}

impl Apart {
    fn add(&mut self, name: String, kind: &'static Kind, shape: [usize; 2], fill: impl FnOnce(&mut [u8])) {
        let start = self.bytes.len();
        self.bytes.resize(start + shape[0] * shape[1] * kind.bits / 8, 0);
        fill(&mut self.bytes[start..]);
        let meta = TensorMeta { dtype: kind.dtype, shape: shape.into() };
        let range = start..self.bytes.len();
        self.tensors.push(Tensor { name: name.into(), meta, kind, file: 0, range });
    }
}

/// Whether words of a bound layer were taken apart: its tensors are not those of the file.
pub(super) fn were_apart(found: &Detected) -> bool {
    found.keys.zeros.is_some() || matches!(found.layout, Layout::Gptq | Layout::Awq)
}

/// Refuses a layer whose words did not fit together, so that they are still what they were.
pub(super) fn refuse_packed(found: &Detected, table: &Table) -> Result<()> {
    let keys = &found.keys;
    let mut telling = vec![keys.zeros.as_deref()];
    if matches!(found.layout, Layout::Gptq | Layout::Awq) {
        telling.push(Some(&keys.weight));
    }
    let is_packed = |name: &&str| table.get(name).is_some_and(|meta| meta.dtype == Some(DType::I32));
    let Some(name) = telling.into_iter().flatten().find(is_packed) else { return Ok(()) };
    let layer = keys.weight.rsplit_once('.').map_or(&*keys.weight, |(layer, _)| layer);
    let shape = |part: &str| match table.get(&format!("{layer}.{part}")) {
        Some(meta) => format!("{part} {:?}", meta.shape),
        None => format!("no {part}"),
    };
    let have = ["qweight", "scales", "qzeros"].map(shape).join(", ");
    Err(Error::new(Code::SchemaInvalid, format!("`{name}`: words that fit no scales and zero points"))
        .need("scales [groups, n] in f16 or bf16 and qzeros [groups, n / 8], n a multiple of 8")
        .have(have))
}

/// A layer with words to be taken apart, `[n, k]` in so many groups.
struct Layer<'a> {
    name: &'a str,
    /// Its codes are in the words too, not its zero points alone.
    whole: bool,
    /// A word has eight in features.
    by_rows: bool,
    /// Type of its scales.
    scales: &'static Kind,
    n: usize,
    k: usize,
    groups: usize,
}

impl<'a> Layer<'a> {
    /// The layer that `tensor` is the telling one of.
    fn of(store: &TensorStore, tensor: &'a str) -> Option<Self> {
        let shape = |name: &str, suffix: &str, dtype| {
            let meta = store.table().get(&format!("{name}.{suffix}")).filter(|m| m.dtype == Some(dtype))?;
            <[usize; 2]>::try_from(&*meta.shape).ok()
        };
        if let Some(name) = tensor.strip_suffix(".weight_zero_point") {
            let [rows, groups] = shape(name, "weight_zero_point", DType::I32)?;
            let [n, words] = shape(name, "weight_packed", DType::I32)?;
            let fits = rows == n.div_ceil(8);
            let k = 8 * words;
            return fits.then_some(Self { name, whole: false, by_rows: true, scales: &F16, n, k, groups });
        }
        let name = tensor.strip_suffix(".qweight")?;
        let [rows, columns] = shape(name, "qweight", DType::I32)?;
        // GPTQModel stores scales of AWQ in the type that the model computes in.
        let of = |kind: &'static Kind| Some((kind, shape(name, "scales", kind.dtype?)?));
        let (scales, [groups, n]) = of(&F16).or_else(|| of(&BF16))?;
        let by_rows = columns == n;
        let k = if by_rows { rows.checked_mul(8)? } else { rows };
        let is_whole =
            (by_rows || columns * 8 == n) && groups > 0 && n % 8 == 0 && k % 2 == 0 && k % groups == 0;
        let zeros = shape(name, "qzeros", DType::I32)? == [groups, n / 8];
        (is_whole && zeros).then_some(Self { name, whole: true, by_rows, scales, n, k, groups })
    }

    fn bytes(&self) -> usize {
        let groups = self.n * self.groups;
        if self.whole { self.n * self.k / 2 + 3 * groups } else { groups }
    }

    fn take_apart(&self, store: &TensorStore, packing: Option<Packing>, out: &mut Apart) -> Result<()> {
        let Self { name, whole, by_rows, scales: kind, n, k, groups } = *self;
        let words = |suffix: &str| -> Result<&[[u8; 4]]> {
            Ok(store.tensor(&format!("{name}.{suffix}"))?.bytes.as_chunks::<4>().0)
        };
        if !whole {
            let zeros = words("weight_zero_point")?;
            out.add(format!("{name}.weight_zero_point"), &U8, [n, groups], |to| {
                for (i, zero) in to.iter_mut().enumerate() {
                    let (row, group) = (i / groups, i % groups);
                    *zero = nibble(zeros[row / 8 * groups + group], row % 8);
                }
            });
            return Ok(());
        }
        let Some(packing) = packing else {
            return Err(Error::new(Code::SchemaInvalid, format!("`{name}.qweight`"))
                .need("a quantization_config of gptq, awq or auto-round, which says how words are packed")
                .have("none"));
        };
        let is_awq = packing.words == Words::Awq;
        let qweight = words("qweight")?;
        if by_rows == is_awq {
            let [need, have] = if is_awq { ["out", "in"] } else { ["in", "out"] };
            return Err(Error::new(Code::SchemaInvalid, format!("`{name}.qweight`"))
                .need(format!("eight {need} features in a word, as config.json declares"))
                .have(format!("eight {have} features")));
        }
        let order = Order::of(store, name, [k, groups])?;
        let has_index = store.table().contains_key(&format!("{name}.g_idx"));
        packing.allows(name, order.as_ref(), has_index, k / groups)?;
        // Signed and not, the two are told from each other.
        out.add(format!("{name}.qweight"), if is_awq { &I8 } else { &U8 }, [n, k / 2], |to| {
            match is_awq {
                true => by_out_feature(qweight, [n, k], to),
                false => transposed(qweight, [k / 8, n], to),
            }
            if let Some(order) = &order {
                order.gather_codes(to);
            }
        });
        let scales = store.tensor(&format!("{name}.scales"))?.bytes.as_chunks::<2>().0;
        out.add(format!("{name}.scales"), kind, [n, groups], |to| transposed(scales, [groups, n], to));
        let zeros = words("qzeros")?;
        let (order, less) = zero_points(packing.words);
        let mut place = [0; 8];
        order.iter().enumerate().for_each(|(at, row)| place[*row] = at);
        let zero = |row: usize, group: usize| nibble(zeros[group * (n / 8) + row / 8], place[row % 8]) + less;
        // Where one is elsewhere all are kept, and what config.json declares is not what is stored.
        if packing.symmetric && (0..n).all(|row| (0..groups).all(|group| zero(row, group) == ZERO)) {
            out.gone.push(format!("{name}.qzeros"));
        } else {
            out.add(format!("{name}.qzeros"), &U8, [n, groups], |to| {
                to.iter_mut().enumerate().for_each(|(i, to)| *to = zero(i / groups, i % groups));
            });
        }
        ["qweight", "scales", "qzeros"]
            .iter()
            .for_each(|part| store.release_tensor(&format!("{name}.{part}")));
        Ok(())
    }
}

fn nibble(word: [u8; 4], at: usize) -> u8 {
    (u32::from_le_bytes(word) >> (4 * at)) as u8 & 15
}

/// Rows and columns of elements exchanged, a square of them at a time.
pub(super) fn transposed<const W: usize>(from: &[[u8; W]], [rows, columns]: [usize; 2], to: &mut [u8]) {
    const SIDE: usize = 32;
    let to = to.as_chunks_mut::<W>().0;
    for r0 in (0..rows).step_by(SIDE) {
        for c0 in (0..columns).step_by(SIDE) {
            for c in c0..columns.min(c0 + SIDE) {
                for r in r0..rows.min(r0 + SIDE) {
                    to[c * rows + r] = from[r * columns + c];
                }
            }
        }
    }
}

/// Codes of AWQ, `[k, n / 8]` words, two of a row in a byte.
fn by_out_feature(words: &[[u8; 4]], [n, k]: [usize; 2], to: &mut [u8]) {
    for (pair, words) in words.chunks_exact(2 * (n / 8)).enumerate() {
        let (even, odd) = words.split_at(n / 8);
        for (w, (even, odd)) in even.iter().zip(odd).enumerate() {
            for (at, row) in AWQ.into_iter().enumerate() {
                to[(8 * w + row) * (k / 2) + pair] = nibble(*even, at) | nibble(*odd, at) << 4;
            }
        }
    }
}
