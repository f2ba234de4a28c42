//! Values of metadata. An array stays in the file: it was walked once and is decoded where it is asked for.
use crate::cursor::{Cursor, brief};
use q4_core::Result;
use std::fmt;

/// Arrays in arrays: most of any file are flat.
const DEPTH: usize = 4;

/// Numbers of the types that a number or an array of numbers can have.
pub(crate) const TEXT: u32 = 8;
pub(crate) const ARRAY: u32 = 9;

/// A value of metadata.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// Type 0.
    U8(u8),
    /// Type 1.
    I8(i8),
    /// Type 2.
    U16(u16),
    /// Type 3.
    I16(i16),
    /// Type 4.
    U32(u32),
    /// Type 5.
    I32(i32),
    /// Type 6.
    F32(f32),
    /// Type 7.
    Bool(bool),
    /// Type 8.
    Text(&'a str),
    /// Type 9.
    Array(Array<'a>),
    /// Type 10.
    U64(u64),
    /// Type 11.
    I64(i64),
    /// Type 12.
    F64(f64),
}

/// Elements of one type, still in the file.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    kind: u32,
    length: usize,
    bytes: &'a [u8],
}

impl<'a> Value<'a> {
    /// The type behind the cursor, and a value of it.
    pub(crate) fn read(file: &mut Cursor<'a>) -> Result<Self> {
        let kind = file.u32("the type of a value")?;
        read(file, kind, 0)
    }

    /// A whole number from zero, of whatever type.
    pub fn whole(&self) -> Option<u64> {
        match *self {
            Self::U8(n) => Some(n.into()),
            Self::U16(n) => Some(n.into()),
            Self::U32(n) => Some(n.into()),
            Self::U64(n) => Some(n),
            Self::I8(n) => n.try_into().ok(),
            Self::I16(n) => n.try_into().ok(),
            Self::I32(n) => n.try_into().ok(),
            Self::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// A finite number. Of an f32 the shortest decimal that is no other f32: the writer meant 1e-6, not
    /// 9.999999974752427e-7.
    pub fn number(&self) -> Option<f64> {
        let number = match *self {
            Self::F32(x) => x.to_string().parse().ok()?,
            Self::F64(x) => x,
            Self::I8(n) => n.into(),
            Self::I16(n) => n.into(),
            Self::I32(n) => n.into(),
            Self::I64(n) => n as f64,
            _ => self.whole()? as f64,
        };
        Some(number).filter(|x: &f64| x.is_finite())
    }

    /// True or false.
    pub fn flag(&self) -> Option<bool> {
        if let Self::Bool(flag) = *self { Some(flag) } else { None }
    }

    /// A text.
    pub fn text(&self) -> Option<&'a str> {
        if let Self::Text(text) = *self { Some(text) } else { None }
    }

    /// An array.
    pub fn array(&self) -> Option<Array<'a>> {
        if let Self::Array(array) = *self { Some(array) } else { None }
    }
}

/// A few words for a message, however long the value is.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(flag) => write!(f, "{flag}"),
            Self::Text(text) => write!(f, "`{}`", brief(text)),
            Self::Array(array) => write!(f, "{array:?}"),
            Self::F32(x) => write!(f, "{x:e}"),
            Self::F64(x) => write!(f, "{x:e}"),
            Self::I8(n) => write!(f, "{n}"),
            Self::I16(n) => write!(f, "{n}"),
            Self::I32(n) => write!(f, "{n}"),
            Self::I64(n) => write!(f, "{n}"),
            _ => write!(f, "{}", self.whole().unwrap_or_default()),
        }
    }
}

impl<'a> Array<'a> {
    /// How many elements.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Its elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (mut file, kind) = (Cursor::new(self.bytes), self.kind);
        // They were read when the file was: no error is left.
        (0..self.length).map_while(move |_| read(&mut file, kind, 0).ok())
    }

    /// Its elements, if they are texts.
    pub fn texts(&self) -> Option<impl Iterator<Item = &'a str> + use<'a>> {
        (self.kind == TEXT).then(|| self.iter().filter_map(|v| v.text()))
    }

    /// Its elements, if they are whole numbers of whatever type. One below zero ends them.
    pub fn wholes(&self) -> Option<impl Iterator<Item = u64> + use<'a>> {
        matches!(self.kind, 0..=5 | 10 | 11).then(|| self.iter().map_while(|v| v.whole()))
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of {} values of type {}", self.length, self.kind)
    }
}

/// Bytes of a scalar, or the least that a text or an array takes.
fn least(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        TEXT | 10..=12 => Some(8),
        ARRAY => Some(12),
        _ => None,
    }
}

fn read<'a>(file: &mut Cursor<'a>, kind: u32, depth: usize) -> Result<Value<'a>> {
    const WHAT: &str = "a value";
    Ok(match kind {
        0 => Value::U8(u8::from_le_bytes(file.array(WHAT)?)),
        1 => Value::I8(i8::from_le_bytes(file.array(WHAT)?)),
        2 => Value::U16(u16::from_le_bytes(file.array(WHAT)?)),
        3 => Value::I16(i16::from_le_bytes(file.array(WHAT)?)),
        4 => Value::U32(file.u32(WHAT)?),
        5 => Value::I32(i32::from_le_bytes(file.array(WHAT)?)),
        6 => Value::F32(f32::from_le_bytes(file.array(WHAT)?)),
        7 => match file.array(WHAT)? {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            [byte] => return Err(file.damaged("a truth value").need("0 or 1").have(byte.to_string())),
        },
        TEXT => Value::Text(file.text("a text")?),
        ARRAY => Value::Array(array(file, depth)?),
        10 => Value::U64(file.u64(WHAT)?),
        11 => Value::I64(i64::from_le_bytes(file.array(WHAT)?)),
        12 => Value::F64(f64::from_le_bytes(file.array(WHAT)?)),
        _ => return Err(unknown(file, kind)),
    })
}

/// Walks an array once, so that its elements can be read later without an error.
fn array<'a>(file: &mut Cursor<'a>, depth: usize) -> Result<Array<'a>> {
    if depth == DEPTH {
        return Err(file
            .damaged("arrays in arrays")
            .need(format!("at most {DEPTH} deep"))
            .have("deeper ones"));
    }
    let kind = file.u32("the type of an array")?;
    let least = least(kind).ok_or_else(|| unknown(file, kind))?;
    let length = file.count(least, "the length of an array")?;
    let mut walk = *file;
    if matches!(kind, 7 | TEXT | ARRAY) {
        for _ in 0..length {
            read(&mut walk, kind, depth + 1)?;
        }
    } else {
        walk.take((length * least) as u64, "an array")?;
    }
    let bytes = file.take((walk.at() - file.at()) as u64, "an array")?;
    Ok(Array { kind, length, bytes })
}

fn unknown(file: &Cursor<'_>, kind: u32) -> q4_core::Error {
    file.damaged("the type of a value").need("0 to 12").have(kind.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_f32_is_what_its_writer_meant() {
        for (x, meant) in [(1e-6f32, 1e-6), (1e6, 1e6), (0.95, 0.95), (5e6, 5e6), (1e-5, 1e-5)] {
            assert_eq!(Value::F32(x).number(), Some(meant));
        }
        assert_eq!(Value::F32(f32::NAN).number(), None);
        assert_eq!(Value::F64(f64::INFINITY).number(), None);
        assert_eq!((Value::I32(-1).whole(), Value::I32(-1).number()), (None, Some(-1.0)));
    }
}
