//! What requests in flight take of memory, counted before it is taken.
//!
//! Half of the bound is for what a request keeps: its body as it comes, then its prompts. Who finds that full
//! is told to come again. The other half is for the work of reading one, which is many times its size and
//! over soon: who finds that full waits.
use crate::refusal::{Kind, Refusal};
use q4_core::memory::{Budget, human};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The least that a server can work with.
pub const LEAST: u64 = 16 << 20;
/// Bytes of a permit.
const UNIT: u64 = 1 << 10;
/// What a body takes while it comes, for each of its bytes: a list that has to grow is there twice, and the
/// new one has room for as much again.
const GROWING: u64 = 3;
/// What reading takes for each byte of a body: the text in every form that it has between JSON and tokens,
/// which the tokenizer takes apart with the places of each of its bytes.
const BYTE: u64 = 288;
/// And for each value in it: JSON as a tree, in lists with room for more, and the name of its place.
const VALUE: u64 = 768;
/// Any request.
const REQUEST: u64 = 16 << 10;
/// Seconds after which there may be room.
const RETRY: u64 = 1;

/// The bound, and what is taken of it.
#[derive(Debug)]
pub struct Memory {
    kept: Budget,
    work: Arc<Semaphore>,
    most_work: u64,
}

impl Memory {
    /// For at most `bytes`, at least [`LEAST`].
    pub fn new(bytes: u64) -> Arc<Self> {
        let half = bytes / 2;
        let permits = usize::try_from(half / UNIT).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        let permits = permits.min(u32::MAX as usize);
        Arc::new(Self {
            kept: Budget::new(half),
            work: Arc::new(Semaphore::new(permits)),
            most_work: permits as u64 * UNIT,
        })
    }

    /// Nothing yet, for a request that comes.
    pub fn hold(self: &Arc<Self>) -> Held {
        Held { memory: self.clone(), bytes: 0 }
    }

    /// Bytes that requests in flight keep.
    pub fn kept(&self) -> u64 {
        self.kept.reserved()
    }

    /// Waits for what reading `body` takes.
    ///
    /// # Errors
    /// 413 where it takes more than there is.
    pub async fn work(&self, body: &[u8]) -> Result<OwnedSemaphorePermit, Refusal> {
        let bytes = REQUEST + BYTE * body.len() as u64 + VALUE * values(body);
        if bytes > self.most_work {
            let what = format!(
                "the body is too much to read: need at most {} for it, have {}: {} bytes with {} values; \
                 send less, or serve with a higher --request-memory",
                human(self.most_work),
                human(bytes),
                body.len(),
                values(body)
            );
            return Err(Refusal::new(Kind::TooLarge, what).coded("body_too_large"));
        }
        let permits = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        let permit = self.work.clone().acquire_many_owned(permits).await;
        permit.map_err(|_| Refusal::new(Kind::Fault, "a bug in q4: memory for requests was closed"))
    }
}

/// What a request keeps, given back when it is dropped.
#[derive(Debug)]
pub struct Held {
    memory: Arc<Memory>,
    bytes: u64,
}

impl Held {
    /// What there is while a body comes, of which there are so many bytes.
    ///
    /// # Errors
    /// As [`keep`](Self::keep).
    pub fn grow(&mut self, body: usize) -> Result<(), Refusal> {
        self.keep((GROWING * body as u64).max(self.bytes))
    }

    /// From now on it is `bytes`.
    ///
    /// # Errors
    /// 429 where that is not there; then it is what it was.
    pub fn keep(&mut self, bytes: u64) -> Result<(), Refusal> {
        match bytes.checked_sub(self.bytes) {
            None => self.memory.kept.release(self.bytes - bytes),
            Some(more) => self.memory.kept.reserve(more, "a request").map_err(|_| self.full())?,
        }
        self.bytes = bytes;
        Ok(())
    }

    fn full(&self) -> Refusal {
        let what = format!(
            "requests in flight take all of the {} that they may keep; try again later",
            human(self.memory.kept.limit())
        );
        Refusal::new(Kind::Busy, what).coded("memory_full").again_after(RETRY)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.memory.kept.release(self.bytes);
    }
}

/// Values and names of a JSON text: no more than what opens, separates and names them.
fn values(body: &[u8]) -> u64 {
    let (mut count, mut is_text, mut is_escaped) = (1, false, false);
    for byte in body {
        match (is_text, byte) {
            (true, _) if is_escaped => is_escaped = false,
            (true, b'\\') => is_escaped = true,
            (_, b'"') => is_text = !is_text,
            (false, b'[' | b'{' | b',' | b':') => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn what_is_kept_is_given_back() {
        let memory = Memory::new(2000);
        let mut first = memory.hold();
        first.grow(300).expect("fits");
        assert_eq!(memory.kept(), 900);
        let mut second = memory.hold();
        let refusal = second.grow(50).expect_err("full");
        assert_eq!((refusal.kind, refusal.retry_after), (Kind::Busy, Some(1)));
        first.keep(100).expect("less");
        second.grow(300).expect("fits now");
        assert!(first.keep(101).is_err());
        assert_eq!(memory.kept(), 1000);
        drop((first, second));
        assert_eq!(memory.kept(), 0);
    }

    #[tokio::test]
    async fn work_waits_for_work_and_what_never_fits_is_refused() {
        let memory = Memory::new(LEAST);
        let body = vec![b' '; 20_000];
        let first = memory.work(&body).await.expect("fits");
        let second = memory.work(&body);
        tokio::pin!(second);
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        assert!(second.as_mut().now_or_never().is_some());
        let refusal = memory.work(&vec![b','; 20_000]).await.expect_err("never");
        assert_eq!(refusal.kind.status(), 413);
    }

    #[test]
    fn values_are_no_fewer_than_there_are() {
        for (text, count) in
            [("7", 1), (r#"[1, 2, {"a": 1, "b": []}]"#, 9), (r#"{"a,b:[": "\",,,[[[\\"}"#, 3), ("[[[[", 5)]
        {
            assert_eq!(values(text.as_bytes()), count, "{text}");
        }
    }
}
