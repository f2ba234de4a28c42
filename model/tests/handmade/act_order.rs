//! Act-order by hand: models of GPTQ whose groups are made of any in features, and what they decode to.
use super::{Model, Tensor};
use serde_json::json;

/// Modules of 4 bits.
pub fn modules(m: &Model) -> Vec<String> {
    m.tensors.iter().filter_map(|t| t.name.strip_suffix(".g_idx").map(str::to_owned)).collect()
}

/// A recorded model with groups of in features drawn at random; codes and scales stay. `shared`: layers that
/// share their inputs share the order, as GPTQ's tools have it.
pub fn shuffled(variant: &str, shared: bool) -> Model {
    let mut m = Model::golden("a", variant);
    m.config["quantization_config"]["desc_act"] = json!(true);
    for module in modules(&m) {
        let inputs = match shared {
            true => module.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_", "gate_"),
            false => module.clone(),
        };
        let mut state = inputs.bytes().fold(7u64, |state, b| state.wrapping_mul(31) + u64::from(b));
        let index = m.edit(&format!("{module}.g_idx"));
        let mut groups = words(index);
        for i in (1..groups.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            groups.swap(i, (state >> 33) as usize % (i + 1));
        }
        put(index, &groups);
    }
    m
}

/// What a layer decodes to, `[n, k]`, by GPTQ's formula alone.
pub fn decoded(m: &Model, module: &str) -> Vec<f32> {
    let part = |part: &str| m.get(&format!("{module}.{part}"));
    let [codes, zeros, groups] = ["qweight", "qzeros", "g_idx"].map(|name| words(part(name)));
    let scales: Vec<f32> = halves(part("scales")).map(|s| half::f16::from_bits(s).to_f32()).collect();
    let (n, k) = (part("qweight").shape[1], groups.len());
    let form = &m.config["quantization_config"]["checkpoint_format"];
    let less = if form == "gptq_v2" { 0 } else { 1 };
    let value = |row: usize, i: usize| {
        let group = groups[i] as usize;
        let code = codes[i / 8 * n + row] >> (4 * (i % 8)) & 15;
        let zero = (zeros[group * (n / 8) + row / 8] >> (4 * (row % 8)) & 15) + less;
        (code as f32 - zero as f32) * scales[group * n + row]
    };
    (0..n * k).map(|at| value(at / k, at % k)).collect()
}

/// The same model with every layer decoded.
pub fn dense(m: &Model) -> Model {
    let mut out = m.clone();
    for module in modules(m) {
        let n = m.get(&format!("{module}.qweight")).shape[1];
        let values = decoded(m, &module);
        for part in ["qweight", "qzeros", "scales", "g_idx"] {
            out.remove(&format!("{module}.{part}"));
        }
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        out.tensors.push(Tensor::new(&format!("{module}.weight"), "F32", &[n, values.len() / n], bytes));
    }
    out.config.as_object_mut().unwrap().remove("quantization_config");
    out
}

/// The recorded model `gptq`, whose groups are in order, with features in other places: heads that share
/// their keys, and what the MLP computes between its matrices. So `o_proj` and `down_proj` have act-order, and
/// the function stays the same, to the bit. With `hidden` those of the residual stream are elsewhere too, and
/// so all layers have act-order; norms then add up in another order.
pub fn moved(hidden: bool) -> Model {
    let mut m = Model::golden("a", "gptq");
    m.config["quantization_config"]["desc_act"] = json!(true);
    // Of four heads of 32 the first two share their keys, and the last two.
    let heads: Vec<usize> = (0..128).map(|i| i ^ 32).collect();
    let inner: Vec<usize> = (0..192).map(|i| i % 32 * 6 + i / 32).collect();
    let residual: Vec<usize> = (0..64).map(|i| i % 32 * 2 + i / 32).collect();
    for layer in 0..2 {
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let [q, k, v, o] = ["q", "k", "v", "o"].map(|name| at(&format!("self_attn.{name}_proj")));
        let [gate, up, down] = ["gate", "up", "down"].map(|name| at(&format!("mlp.{name}_proj")));
        move_out(&mut m, &q, &heads);
        move_in(&mut m, &o, &heads);
        move_out(&mut m, &gate, &inner);
        move_out(&mut m, &up, &inner);
        move_in(&mut m, &down, &inner);
        if hidden {
            [&q, &k, &v, &gate, &up].into_iter().for_each(|module| move_in(&mut m, module, &residual));
            [&o, &down].into_iter().for_each(|module| move_out(&mut m, module, &residual));
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                move_columns(m.edit(&at(&format!("{norm}.weight"))), 2, &residual);
            }
        }
    }
    if hidden {
        move_columns(m.edit("model.norm.weight"), 2, &residual);
        move_columns(m.edit("model.embed_tokens.weight"), 2, &residual);
    }
    m
}

/// In feature i becomes in feature `to[i]`.
fn move_in(m: &mut Model, module: &str, to: &[usize]) {
    move_columns(m.edit(&format!("{module}.g_idx")), 4, to);
    let codes = m.edit(&format!("{module}.qweight"));
    let (n, from) = (codes.shape[1], words(codes));
    let mut moved = vec![0u32; from.len()];
    for (i, to) in to.iter().enumerate() {
        for row in 0..n {
            let code = from[i / 8 * n + row] >> (4 * (i % 8)) & 15;
            moved[to / 8 * n + row] |= code << (4 * (to % 8));
        }
    }
    put(codes, &moved);
}

/// Out feature i becomes out feature `to[i]`. Zero points are all in the middle.
fn move_out(m: &mut Model, module: &str, to: &[usize]) {
    assert!(words(m.get(&format!("{module}.qzeros"))).iter().all(|word| *word == 0x7777_7777));
    move_columns(m.edit(&format!("{module}.qweight")), 4, to);
    move_columns(m.edit(&format!("{module}.scales")), 2, to);
}

/// Elements of `size` bytes: column i becomes column `to[i]`.
fn move_columns(t: &mut Tensor, size: usize, to: &[usize]) {
    let from = t.bytes.clone();
    for (row, from) in t.bytes.chunks_exact_mut(size * to.len()).zip(from.chunks_exact(size * to.len())) {
        for (element, to) in from.chunks_exact(size).zip(to) {
            row[size * to..][..size].copy_from_slice(element);
        }
    }
}

fn words(t: &Tensor) -> Vec<u32> {
    assert_eq!(t.dtype, "I32", "{}", t.name);
    t.bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn put(t: &mut Tensor, words: &[u32]) {
    t.bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
}

fn halves(t: &Tensor) -> impl Iterator<Item = u16> + '_ {
    assert_eq!(t.dtype, "F16", "{}", t.name);
    t.bytes.chunks_exact(2).map(|b| u16::from_le_bytes(b.try_into().unwrap()))
}
