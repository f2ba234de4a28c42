//! Whose a page of the cache is, and what is in those that nobody has.
//!
//! A page whose positions are all computed is kept by its content: what lies before it, and its tokens.
//! Whoever begins with the same tokens reads it. Tokens are compared, not their hashes alone. What nobody
//! reads any longer stays until its page is needed, the longest unread first.
use super::PAGE;
use std::collections::{BTreeMap, HashMap};

/// All pages of a cache.
pub struct Pages {
    all: Vec<Page>,
    free: Vec<u32>,
    kept: HashMap<Content, u32>,
    /// Kept pages that nobody reads, the longest unread first.
    idle: BTreeMap<u64, u32>,
    /// Counts what is kept and what becomes idle.
    next: u64,
}

#[derive(Default)]
struct Page {
    readers: u32,
    kept: Option<Kept>,
    /// Its place in `idle`.
    unread: u64,
}

struct Kept {
    content: Content,
    name: Chain,
}

/// What is in a page.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Content {
    before: Chain,
    tokens: Box<[u32]>,
}

/// Names all tokens up to the end of a kept page; no two pages that were ever kept share one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Chain(u64);

impl Pages {
    /// `count` pages, all free.
    pub fn new(count: usize) -> Self {
        let mut all = Vec::new();
        all.resize_with(count, Page::default);
        // The first is handed out first.
        let free = (0..count as u32).rev().collect();
        Self { all, free, kept: HashMap::new(), idle: BTreeMap::new(), next: 0 }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.all.len()
    }
    /// How many can be had: free ones, and kept ones that nobody reads.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// A page for one owner; the longest unread one is given up where none is free.
    pub fn take(&mut self) -> Option<u32> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                let (_, page) = self.idle.pop_first()?;
                if let Some(kept) = self.all[page as usize].kept.take() {
                    self.kept.remove(&kept.content);
                }
                page
            }
        };
        self.all[page as usize].readers = 1;
        Some(page)
    }

    /// The kept pages that `tokens` begin with, which have one more reader from now on, and the name of all
    /// that is in them.
    pub fn find(&mut self, tokens: &[u32]) -> (Vec<u32>, Chain) {
        let (mut found, mut chain) = (Vec::new(), Chain::default());
        for tokens in tokens.chunks_exact(PAGE) {
            let Some(&page) = self.kept.get(&Content { before: chain, tokens: tokens.into() }) else { break };
            let entry = &mut self.all[page as usize];
            let Some(kept) = &entry.kept else { break };
            chain = kept.name;
            if entry.readers == 0 {
                self.idle.remove(&entry.unread);
            }
            entry.readers += 1;
            found.push(page);
        }
        (found, chain)
    }

    /// Keeps a page whose positions are all computed: its `tokens` behind what `before` names. Where another
    /// page with the same content is kept already, that one stays. The name of all of it.
    pub fn keep(&mut self, page: u32, before: Chain, tokens: &[u32]) -> Chain {
        let content = Content { before, tokens: tokens.into() };
        let other = self.kept.get(&content).and_then(|other| self.all[*other as usize].kept.as_ref());
        if let Some(kept) = other {
            return kept.name;
        }
        self.next += 1;
        let name = Chain(self.next);
        self.kept.insert(content.clone(), page);
        self.all[page as usize].kept = Some(Kept { content, name });
        name
    }

    /// One reader fewer of each of a sequence's pages, given first to last.
    pub fn release(&mut self, pages: &[u32]) {
        // What lies behind is of no use without what lies before it, so it goes first.
        for &page in pages.iter().rev() {
            let entry = &mut self.all[page as usize];
            entry.readers -= 1;
            if entry.readers > 0 {
                continue;
            }
            if entry.kept.is_none() {
                self.free.push(page);
                continue;
            }
            self.next += 1;
            entry.unread = self.next;
            self.idle.insert(self.next, page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(seed: u32) -> Vec<u32> {
        (0..PAGE as u32).map(|i| seed * 1000 + i).collect()
    }

    #[test]
    fn what_begins_alike_is_shared_and_nothing_else() {
        let mut pages = Pages::new(4);
        let (a, b) = (pages.take().expect("free"), pages.take().expect("free"));
        let first = pages.keep(a, Chain::default(), &tokens(1));
        pages.keep(b, first, &tokens(2));
        let both: Vec<u32> = [tokens(1), tokens(2)].concat();
        assert_eq!(pages.find(&both).0, [a, b]);
        assert_eq!(pages.find(&both[..2 * PAGE - 1]).0, [a], "half a page is none");
        assert_eq!(pages.find(&tokens(2)).0, [0u32; 0], "the same tokens elsewhere are not the same");
        pages.release(&[a, b]);
        pages.release(&[a, b]);
        assert_eq!(pages.available(), 3, "somebody still reads the first");
        pages.release(&[a]);
        assert_eq!(pages.available(), 4);
    }

    #[test]
    fn the_longest_unread_goes_first_and_is_forgotten() {
        let mut pages = Pages::new(3);
        let all: Vec<u32> = (0..3).map_while(|_| pages.take()).collect();
        let mut chain = Chain::default();
        for (i, page) in (1..).zip(&all) {
            chain = pages.keep(*page, chain, &tokens(i));
        }
        assert_eq!(pages.take(), None);
        pages.release(&all);
        assert_eq!(pages.take(), Some(all[2]), "the end of a sequence goes before its beginning");
        let whole = [tokens(1), tokens(2), tokens(3)].concat();
        assert_eq!(pages.find(&whole).0, all[..2]);
    }

    #[test]
    fn a_second_page_with_the_same_content_is_not_kept() {
        let mut pages = Pages::new(2);
        let (a, b) = (pages.take().expect("free"), pages.take().expect("free"));
        let name = pages.keep(a, Chain::default(), &tokens(1));
        assert_eq!(pages.keep(b, Chain::default(), &tokens(1)), name);
        pages.release(&[b]);
        assert_eq!((pages.take(), pages.take()), (Some(b), None), "it is free at once");
    }
}
