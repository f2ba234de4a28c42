//! What a file says before its data, to be written: metadata, and a description of every tensor.
use crate::GgmlType;
use crate::container::ALIGNMENT;
use crate::value::{ARRAY, TEXT};

/// Metadata and tensors of a file to be, each in the order in which they are added.
///
/// ```
/// use q4_gguf::{GgmlType, Gguf, Head, gap};
///
/// let mut head = Head::default();
/// head.text("general.architecture", "qwen3");
/// let length = head.tensor("output_norm.weight", GgmlType::F32, &[8]);
/// let mut file = head.bytes();
/// file.resize(file.len() + length as usize + gap(length), 0);
/// let gguf = Gguf::parse("new.gguf", &file)?;
/// assert_eq!(gguf.tensor("output_norm.weight").unwrap().shape(), [8]);
/// # Ok::<(), q4_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Head {
    metadata: Vec<u8>,
    entries: u64,
    tensors: Vec<u8>,
    count: u64,
    /// Where the next tensor begins, from the start of the data.
    end: u64,
}

impl Head {
    /// A text.
    pub fn text(&mut self, key: &str, value: &str) {
        self.entry(key, TEXT, |to| text(to, value));
    }
    /// A whole number.
    pub fn u32(&mut self, key: &str, value: u32) {
        self.entry(key, 4, |to| to.extend(value.to_le_bytes()));
    }
    /// A number.
    pub fn f32(&mut self, key: &str, value: f32) {
        self.entry(key, 6, |to| to.extend(value.to_le_bytes()));
    }
    /// True or false.
    pub fn flag(&mut self, key: &str, value: bool) {
        self.entry(key, 7, |to| to.push(value.into()));
    }
    /// An array of texts.
    pub fn texts<'t>(&mut self, key: &str, values: impl ExactSizeIterator<Item = &'t str>) {
        self.entry(key, ARRAY, |to| {
            to.extend(TEXT.to_le_bytes());
            to.extend((values.len() as u64).to_le_bytes());
            values.for_each(|value| text(to, value));
        });
    }
    /// An array of whole numbers.
    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        self.entry(key, ARRAY, |to| {
            to.extend(5u32.to_le_bytes());
            to.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| to.extend(value.to_le_bytes()));
        });
    }

    fn entry(&mut self, key: &str, kind: u32, value: impl FnOnce(&mut Vec<u8>)) {
        text(&mut self.metadata, key);
        self.metadata.extend(kind.to_le_bytes());
        value(&mut self.metadata);
        self.entries += 1;
    }

    /// A tensor behind those before it, outermost extent first, in whole blocks. Its bytes, behind which
    /// comes a [`gap`].
    pub fn tensor(&mut self, name: &str, kind: GgmlType, shape: &[usize]) -> u64 {
        text(&mut self.tensors, name);
        self.tensors.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|extent| self.tensors.extend((*extent as u64).to_le_bytes()));
        self.tensors.extend(kind.number().to_le_bytes());
        self.tensors.extend(self.end.to_le_bytes());
        let elements = shape.iter().product::<usize>();
        let length = (elements / kind.block_elements() * kind.block_bytes()) as u64;
        self.count += 1;
        self.end += length + gap(length) as u64;
        length
    }

    /// Everything before the data, which begins behind it.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(self.entries.to_le_bytes());
        bytes.extend(&self.metadata);
        bytes.extend(&self.tensors);
        bytes.resize(bytes.len() + gap(bytes.len() as u64), 0);
        bytes
    }
}

/// Bytes between the end of a tensor of this length and the next.
pub fn gap(length: u64) -> usize {
    (length.next_multiple_of(ALIGNMENT.into()) - length) as usize
}

fn text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gguf, Value};

    #[test]
    fn what_was_added_is_read() {
        let mut head = Head::default();
        head.text("a.text", "ä");
        head.u32("a.whole", u32::MAX);
        head.f32("a.number", 1e-6);
        head.flag("a.flag", true);
        head.texts("a.texts", ["", "b c"].into_iter());
        head.i32s("a.wholes", &[3, -1]);
        let lengths = [
            head.tensor("x", GgmlType::NVFP4, &[3, 128]),
            head.tensor("y", GgmlType::F32, &[1]),
            head.tensor("z", GgmlType::BF16, &[2, 3, 5]),
        ];
        assert_eq!(lengths, [3 * 2 * 36, 4, 60]);
        let mut file = head.bytes();
        for (i, length) in lengths.into_iter().enumerate() {
            file.extend(std::iter::repeat_n(i as u8 + 1, length as usize));
            file.extend(std::iter::repeat_n(0, gap(length)));
        }
        let gguf = Gguf::parse("m", &file).expect("a file");
        assert_eq!(gguf.get("a.text"), Some(&Value::Text("ä")));
        assert_eq!(gguf.get("a.whole").and_then(Value::whole), Some(u32::MAX.into()));
        assert_eq!(gguf.get("a.number").and_then(Value::number), Some(1e-6));
        assert_eq!(gguf.get("a.flag").and_then(Value::flag), Some(true));
        let texts = gguf.get("a.texts").and_then(Value::array).expect("an array");
        assert_eq!(texts.texts().expect("texts").collect::<Vec<_>>(), ["", "b c"]);
        let wholes = gguf.get("a.wholes").and_then(Value::array).expect("an array");
        assert_eq!(wholes.iter().collect::<Vec<_>>(), [Value::I32(3), Value::I32(-1)]);
        for (name, i, shape) in [("x", 1u8, &[3, 128][..]), ("y", 2, &[1]), ("z", 3, &[2, 3, 5])] {
            let tensor = gguf.tensor(name).expect("a tensor");
            assert_eq!(tensor.shape(), shape);
            assert!(file[tensor.range.clone()].iter().all(|byte| *byte == i), "{name}");
        }
    }
}
