//! Where the rows of a step go: every sequence is a list of pages of a cache, whoever has its memory.
use q4_core::{Code, Error, Result};

/// Rows of a step that belong to one sequence, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which sequence.
    pub sequence: usize,
    /// How many rows, at least one.
    pub rows: usize,
}

/// Where a row of a step goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Whose row it is.
    pub sequence: usize,
    /// Its position there.
    pub position: usize,
}

/// Sequences that share a cache in pages of positions. A sequence is a list of pages, whose positions follow
/// each other; positions `0..len` are valid. Who may have a page is decided outside; several sequences may
/// read one.
pub struct Places {
    /// Positions of a page.
    page: usize,
    pages: usize,
    /// Positions a sequence may have at most.
    context: usize,
    sequences: Vec<Sequence>,
    /// The rows of the step that was [placed](Self::place).
    rows: Vec<Place>,
    parts: Vec<Part>,
}

#[derive(Default)]
struct Sequence {
    pages: Vec<u32>,
    len: usize,
}

impl Places {
    /// One sequence of up to `capacity` positions in a page of `page`, which is there from the start. Steps
    /// have at most `rows` rows.
    pub fn one(capacity: usize, page: usize, rows: usize) -> Self {
        let mut places = Self::many((page, 1), (1, capacity), rows);
        places.add_page(0, 0);
        places
    }

    /// `pages` pages of `page` positions for up to `sequences` sequences of up to `context` positions, all
    /// empty. Steps have at most `rows` rows.
    pub fn many((page, pages): (usize, usize), (sequences, context): (usize, usize), rows: usize) -> Self {
        let mut all = Vec::new();
        // A list of pages never grows in a step.
        all.resize_with(sequences, || Sequence { pages: Vec::with_capacity(pages), len: 0 });
        let (rows, parts) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        Self { page, pages, context, sequences: all, rows, parts }
    }

    /// Positions of a page.
    pub fn page(&self) -> usize {
        self.page
    }
    /// Positions of a sequence that are valid: tokens accepted.
    pub fn len(&self, sequence: usize) -> usize {
        self.sequences[sequence].len
    }
    /// Positions a sequence has room for.
    pub fn capacity(&self, sequence: usize) -> usize {
        let s = &self.sequences[sequence];
        (s.pages.len() * self.page).min(self.context)
    }
    /// Forgets everything of a sequence behind its first `len` positions; its pages stay.
    pub fn truncate(&mut self, sequence: usize, len: usize) {
        let s = &mut self.sequences[sequence];
        s.len = s.len.min(len);
    }
    /// Gives a sequence one more page.
    pub fn add_page(&mut self, sequence: usize, page: u32) {
        assert!((page as usize) < self.pages, "page {page} of {}", self.pages);
        self.sequences[sequence].pages.push(page);
    }
    /// Says that the first `len` positions of a sequence, which has the pages for them, are valid: another
    /// sequence wrote them, or a device.
    pub fn adopt(&mut self, sequence: usize, len: usize) {
        assert!(len <= self.capacity(sequence), "{len} positions of {}", self.capacity(sequence));
        self.sequences[sequence].len = len;
    }
    /// Pages of a sequence, first to last.
    pub fn pages(&self, sequence: usize) -> &[u32] {
        &self.sequences[sequence].pages
    }
    /// Takes all pages away.
    pub fn clear(&mut self, sequence: usize) {
        let s = &mut self.sequences[sequence];
        s.pages.clear();
        s.len = 0;
    }

    /// Says whose the rows of the next step are, part after part; a sequence has one part at most. The step
    /// [commits](Self::commit) them at its end.
    ///
    /// # Errors
    /// [`Code::ContextFull`] where a sequence has no room for its rows.
    pub fn place(&mut self, parts: &[Part]) -> Result<()> {
        self.rows.clear();
        self.parts.clear();
        for part in parts {
            let (len, capacity) = (self.len(part.sequence), self.capacity(part.sequence));
            if len + part.rows > capacity {
                return Err(Error::new(Code::ContextFull, "the context is full")
                    .need(format!("{} positions", len + part.rows))
                    .have(format!("{capacity} positions"))
                    .fix("raise --context, or start a new conversation"));
            }
            let place = |row| Place { sequence: part.sequence, position: len + row };
            self.rows.extend((0..part.rows).map(place));
            self.parts.push(*part);
        }
        Ok(())
    }
    /// Accepts the rows of the step.
    pub fn commit(&mut self) {
        for part in self.parts.drain(..) {
            self.sequences[part.sequence].len += part.rows;
        }
    }
    /// Whose the rows of the step are.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }
    /// Where each of the `rows` rows of the step goes.
    ///
    /// # Errors
    /// [`Code::Internal`] where another number of rows was placed.
    pub fn rows(&self, rows: usize) -> Result<&[Place]> {
        match self.rows.len() == rows {
            true => Ok(&self.rows),
            false => Err(Error::new(Code::Internal, "rows of a step that have no place in the cache")
                .need(rows.to_string())
                .have(self.rows.len().to_string())),
        }
    }
    /// Position of row `row` of the step in its sequence.
    pub fn position(&self, row: usize) -> usize {
        self.rows[row].position
    }
    /// Where row `row` of the step goes: a page, and a position in it.
    pub fn page_of(&self, row: usize) -> (u32, usize) {
        let Place { sequence, position } = self.rows[row];
        assert!(position < self.capacity(sequence), "position {position} of sequence {sequence}");
        (self.sequences[sequence].pages[position / self.page], position % self.page)
    }
}
