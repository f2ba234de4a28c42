//! What the layouts of MLX have in common: `weight` in words of eight codes, the lowest bits first, and
//! `scales`. A reader of files hands the words over as the bytes that they are, which are codes with the low
//! nibble first.
use super::storage::{LayerKeys, Probe};
use crate::DType;

/// How many elements a scale of one byte has, where the tensors are MLX's; nothing, where scales are floats.
pub(super) fn group(p: &Probe<'_>) -> Option<Option<usize>> {
    let weight = p.meta("weight").filter(|meta| meta.dtype == Some(DType::U8))?;
    let scales = p.meta("scales")?;
    if scales.dtype != Some(DType::U8) {
        return Some(None);
    }
    match (&*weight.shape, &*scales.shape) {
        ([_, half], [_, groups]) if *groups > 0 => Some(Some(2 * half / groups)),
        _ => Some(Some(0)),
    }
}

/// The tensors of a layer whose scales are bytes, `[n, k]`, after what is wrong with them was said.
pub(super) fn read(p: &mut Probe<'_>, block: usize) -> Option<([usize; 2], LayerKeys)> {
    let [n, half] = p.matrix("weight", &[DType::U8])?;
    let (k, scales) = (2 * half, p.matrix("scales", &[DType::U8])?);
    let need = [n, k / block];
    if !k.is_multiple_of(block) || scales != need {
        p.problem("scales", &format!("{need:?} for weight [{n}, {}]", k / 8), &format!("{scales:?}"));
    }
    if p.has("biases") {
        p.problem("biases", "none beside scales of a byte", "a tensor");
    }
    let keys = LayerKeys { weight: p.key("weight")?, scales: p.key("scales"), ..LayerKeys::default() };
    Some(([n, k], keys))
}
