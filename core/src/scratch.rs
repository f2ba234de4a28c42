//! The scratch of a call, taken apart.
use crate::{Code, Element, Error, ExecContext, Result};

/// Splits the scratch of a call into typed, aligned pieces without allocating.
pub struct Scratch<'a> {
    rest: &'a mut [u8],
}

impl<'a> Scratch<'a> {
    /// Takes the workspace of `cx`, of which a call needs `need` bytes.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] when it is smaller than `need` bytes, or not contiguous bytes on the CPU.
    pub fn of(cx: &'a mut ExecContext<'_>, need: usize) -> Result<Self> {
        let rest = match (&mut cx.workspace, need) {
            (_, 0) => &mut [],
            (Some(w), _) => w.as_mut_slice::<u8>()?,
            (None, _) => &mut [],
        };
        if rest.len() < need {
            return Err(Error::new(Code::ShapeMismatch, "workspace of a product")
                .need(format!("{need} bytes"))
                .have(format!("{} bytes", rest.len())));
        }
        Ok(Self { rest })
    }
    /// The next `len` elements, 64-byte aligned.
    ///
    /// # Errors
    /// [`Code::ShapeMismatch`] when what is left is too small.
    pub fn take<T: Element>(&mut self, len: usize) -> Result<&'a mut [T]> {
        let pad = self.rest.as_ptr().align_offset(64);
        let bytes = len * size_of::<T>();
        let have = self.rest.len();
        if pad + bytes > have {
            return Err(Error::new(Code::ShapeMismatch, "workspace of a product")
                .need(format!("{} bytes", pad + bytes))
                .have(format!("{have} bytes")));
        }
        let (now, rest) = std::mem::take(&mut self.rest)[pad..].split_at_mut(bytes);
        self.rest = rest;
        // SAFETY: the piece is unique, 64-byte aligned and `bytes` long; every bit pattern is an Element.
        Ok(unsafe { std::slice::from_raw_parts_mut(now.as_mut_ptr().cast(), len) })
    }
    /// Bytes to reserve so that pieces of these sizes can be taken.
    pub fn bytes(pieces: &[usize]) -> usize {
        pieces.iter().map(|b| b.next_multiple_of(64)).sum::<usize>() + if pieces.is_empty() { 0 } else { 64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TensorViewMut, ThreadPool};

    #[test]
    fn scratch_is_aligned_and_bounded() -> Result<()> {
        let pool = ThreadPool::new(1);
        let mut bytes = [0u8; 512];
        let mut cx = ExecContext::cpu(&pool);
        cx.workspace = Some(TensorViewMut::of(&mut bytes[1..], &[511])?);
        let mut s = Scratch::of(&mut cx, Scratch::bytes(&[64, 40]))?;
        let a = s.take::<f32>(16)?;
        assert_eq!(a.as_ptr() as usize % 64, 0);
        assert_eq!(s.take::<i8>(40)?.as_ptr() as usize % 64, 0);
        assert!(s.take::<f32>(400).is_err());
        Ok(())
    }
}
