//! What leaves the device of a step: the token it chose, written into host memory by the kernel that chose
//! it.
use q4_core::{Code, Error, Result};
use q4_cuda::{Gpu, Pinned, Stream};
use std::sync::Arc;

/// A token and whether its logits could be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// 0 where the logits could not be used.
    pub token: u32,
    /// No NaN or +inf among the logits, and not -inf everywhere.
    pub finite: bool,
}

/// `hand_over` of `cuda/sample.cu` writes here. Of every sequence it keeps the last two records, so one step
/// may run ahead of the one whose record is still to be read.
pub(super) struct Outbox {
    /// u64 `[2, sequences]`.
    memory: Pinned,
    address: u64,
    /// Records that enqueued work has written or will write, of every sequence; the device counts the same.
    issued: Vec<u32>,
}

/// The number of a sequence's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket(u32);

impl Outbox {
    pub fn new(gpu: &Arc<Gpu>, sequences: usize) -> Result<Self> {
        let memory = Pinned::new(gpu, 16 * sequences)?;
        Ok(Self { address: memory.on_device()?, memory, issued: vec![0; sequences] })
    }
    /// Where kernels write.
    pub fn address(&self) -> u64 {
        self.address
    }
    /// Sequences side by side.
    pub fn sequences(&self) -> usize {
        self.issued.len()
    }
    /// Work that hands over one more record of `sequence` was enqueued.
    pub fn issue(&mut self, sequence: usize) -> Ticket {
        self.issued[sequence] = self.issued[sequence].wrapping_add(1);
        Ticket(self.issued[sequence])
    }
    /// The last record issued.
    pub fn last(&self, sequence: usize) -> Ticket {
        Ticket(self.issued[sequence])
    }
    /// Waits for a record, one of the last two of its sequence. A fault of what comes before it surfaces
    /// here.
    pub fn wait(&self, sequence: usize, ticket: Ticket, stream: &Stream) -> Result<Choice> {
        let at = (ticket.0 & 1) as usize * self.sequences() + sequence;
        loop {
            for _ in 0..1024 {
                if let Some(choice) = read(self.memory.word(at), ticket) {
                    return Ok(choice);
                }
                std::hint::spin_loop();
            }
            // What a stream that is done has written is there.
            if stream.is_idle()? {
                return read(self.memory.word(at), ticket).ok_or_else(|| {
                    Error::new(Code::Internal, "a step ended without handing its token over")
                });
            }
            std::thread::yield_now();
        }
    }
}

/// The choice in a word, if the word is that record.
fn read(word: u64, Ticket(n): Ticket) -> Option<Choice> {
    let head = (word >> 32) as u32;
    (head >> 2 == n & (u32::MAX >> 2)).then_some(Choice { token: word as u32, finite: head & 3 == 0 })
}

#[cfg(test)]
pub(super) fn ticket(n: u32) -> Ticket {
    Ticket(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_read_as_the_record_it_is() {
        let word = |n: u32, flags: u32, token: u32| u64::from(n << 2 | flags) << 32 | u64::from(token);
        let choice = |token, finite| Some(Choice { token, finite });
        assert_eq!(read(word(1, 0, 7), Ticket(1)), choice(7, true));
        assert_eq!(read(word(1, 2, 0), Ticket(1)), choice(0, false));
        assert_eq!(read(word(1, 0, 7), Ticket(3)), None, "two records later, in the same half");
        assert_eq!(read(0, Ticket(1)), None, "before the first one");
        // Thirty bits of the number are there.
        assert_eq!(read(word(u32::MAX, 1, 5), Ticket(u32::MAX)), choice(5, false));
        assert_eq!(read(word(1 << 30, 0, 9), Ticket(1 << 30)), choice(9, true));
    }
}
