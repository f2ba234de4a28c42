//! Act-order: groups that are made of any in features, as GPTQ makes them when it takes those with the
//! largest inputs first. `g_idx` says which group each is in.
//!
//! A weight is read with its columns in the order of their groups, which makes it one like any other, and its
//! inputs are put into that order before they are multiplied.
use super::store::TensorStore;
use q4_core::{Code, DType, Error, Q4Weight, Result, RowDecoder};
use std::sync::Arc;

/// The in feature of each column of a weight that was read so: those of the first group, then those of the
/// next, each group's in their own order. Never the order of the in features themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order(Arc<[u32]>);

impl Order {
    /// That of the layer `module`, `k` in features in as many groups as its scales have. `None` without a
    /// `g_idx`, and with one that is in order.
    ///
    /// # Errors
    /// [`Code::SchemaInvalid`] for a `g_idx` of another type or length, a group without scales, and groups of
    /// several sizes; [`Code::TensorType`] for a type that no weight has.
    pub fn of(store: &TensorStore, module: &str, [k, groups]: [usize; 2]) -> Result<Option<Self>> {
        let name = format!("{module}.g_idx");
        if !store.table().contains_key(&name) {
            return Ok(None);
        }
        let wrong = |need: String, have: String| {
            Err(Error::new(Code::SchemaInvalid, format!("`{name}`")).need(need).have(have))
        };
        let stored = store.tensor(&name)?;
        if stored.dtype != DType::I32 {
            return wrong("i32".into(), stored.dtype.as_str().into());
        }
        if stored.len() != k {
            let need = format!("a group for each of the {k} in features of `{module}.qweight`");
            return wrong(need, stored.len().to_string());
        }
        let mut index = Vec::with_capacity(k);
        let mut sizes = vec![0; groups];
        for (i, word) in stored.bytes.as_chunks::<4>().0.iter().enumerate() {
            let group = i32::from_le_bytes(*word);
            let Some(at) = usize::try_from(group).ok().filter(|group| *group < groups) else {
                let need = format!("a group of 0 to {}, as `{module}.scales` has them", groups - 1);
                return wrong(need, format!("in feature {i} in group {group}"));
            };
            sizes[at] += 1;
            index.push(at);
        }
        let size = k / groups;
        if let Some(group) = sizes.iter().position(|have| *have != size) {
            let need = format!("{size} in features in each of the {groups} groups of `{module}.scales`");
            return wrong(need, format!("{} in group {group}", sizes[group]));
        }
        let mut next: Vec<usize> = (0..groups).map(|group| group * size).collect();
        let mut order = vec![0; k];
        for (feature, group) in index.into_iter().enumerate() {
            order[next[group]] = feature as u32;
            next[group] += 1;
        }
        Ok((!order.is_sorted()).then(|| Self(order.into())))
    }

    /// The in feature of each column.
    pub fn features(&self) -> &[u32] {
        &self.0
    }

    /// Of a row of the model's in features those of each column.
    ///
    /// # Panics
    /// If `row` is shorter than the order.
    pub fn gather<T: Copy>(&self, row: &[T], to: &mut [T]) {
        to.iter_mut().zip(&*self.0).for_each(|(to, feature)| *to = row[*feature as usize]);
    }

    /// The way back of [`gather`](Self::gather).
    ///
    /// # Panics
    /// If `to` is shorter than the order.
    pub fn scatter<T: Copy>(&self, columns: &[T], to: &mut [T]) {
        columns.iter().zip(&*self.0).for_each(|(column, feature)| to[*feature as usize] = *column);
    }

    /// The group of each in feature, where `size` columns are one.
    pub(super) fn groups(&self, size: usize) -> Vec<u32> {
        let groups: Vec<u32> = (0..self.0.len()).map(|column| (column / size) as u32).collect();
        let mut index = vec![0; groups.len()];
        self.scatter(&groups, &mut index);
        index
    }

    /// Puts the in features of rows of codes, two a byte and the even one low, into this order.
    pub(super) fn gather_codes(&self, codes: &mut [u8]) {
        each_row(codes, self.0.len(), |row, to| self.gather(row, to));
    }

    /// The way back of [`gather_codes`](Self::gather_codes).
    pub(super) fn scatter_codes(&self, codes: &mut [u8]) {
        each_row(codes, self.0.len(), |row, to| self.scatter(row, to));
    }
}

/// `arrange` gets each row with a code a byte, and room for another.
fn each_row(codes: &mut [u8], k: usize, arrange: impl Fn(&[u8], &mut [u8])) {
    let (mut row, mut other) = (vec![0u8; k], vec![0u8; k]);
    for codes in codes.chunks_exact_mut(k / 2) {
        for (pair, byte) in row.as_chunks_mut::<2>().0.iter_mut().zip(&*codes) {
            *pair = [byte & 15, byte >> 4];
        }
        arrange(&row, &mut other);
        for (byte, [even, odd]) in codes.iter_mut().zip(other.as_chunks::<2>().0) {
            *byte = even | odd << 4;
        }
    }
}

/// The exact decoder of a stored layer: in features where the model has them, whatever order its columns are
/// in.
pub struct LayerRows<'a> {
    columns: RowDecoder<'a>,
    order: Option<&'a Order>,
}

impl<'a> LayerRows<'a> {
    pub(super) fn new(weight: &Q4Weight<'a>, order: Option<&'a Order>) -> Result<Self> {
        Ok(Self { columns: RowDecoder::new(weight)?, order })
    }

    /// Out and in features.
    pub fn shape(&self) -> [usize; 2] {
        [self.columns.n(), self.columns.k()]
    }

    /// Writes the `k` f32 values of row `r`, bit for bit what the schema defines.
    ///
    /// # Panics
    /// If there is no such row, or `out` has not `k` elements.
    pub fn row(&self, r: usize, out: &mut [f32]) {
        self.columns.row(r, out);
        if let Some(order) = self.order {
            let columns = out.to_vec();
            order.scatter(&columns, out);
        }
    }

    /// Packed codes and block scales of a row of NVFP4, which is never in another order.
    pub(super) fn nvfp4_row(&self, r: usize) -> Option<(&[u8], &[u8])> {
        self.columns.nvfp4_row(r)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_back() {
        let order = Order([5, 0, 3, 1, 4, 2].into());
        let codes = [0x10u8, 0x32, 0x54, 0x98, 0xba, 0xdc];
        let mut moved = codes;
        order.gather_codes(&mut moved);
        assert_eq!(moved, [0x05, 0x13, 0x24, 0x8d, 0x9b, 0xac]);
        order.scatter_codes(&mut moved);
        assert_eq!(moved, codes);
        assert_eq!(order.groups(2), [0, 1, 2, 1, 2, 0]);
    }
}
