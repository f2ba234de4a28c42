//! Backends with one fault each: the suite is as good as those it catches.
//!
//! All are [`honest()`], one small backend of our own, with one part exchanged. The tables say what each
//! pretends and at which level it must be caught.

/// Saboteurs: level, `lethal` for those that only a child process can be asked, name, what it does wrong, and
/// the parts that it has instead of those of the backend named first.
macro_rules! liars {
    ($honest:ident; $($(#[$cfg:meta])* $level:ident $($lethal:ident)? $name:literal: $lie:literal {
        $($part:ident: $wrong:expr),+ $(,)?
    })+) => {
        &[$(
            $(#[$cfg])*
            Liar::new($level, $name, $lie, Parts { $($part: $wrong,)+ ..$honest })$(.$lethal())?
        ),+]
    };
}

mod address;
mod conduct;
mod decode;
mod extent;
mod format;
mod fused;
mod history;
mod honest;
mod lent;
mod magnitude;
mod narrow;
mod parts;
mod process;
mod product;
mod situation;

use crate::Level;
pub use honest::honest;
pub use parts::Parts;
use q4_core::Q4Backend;
use std::sync::Arc;

/// One saboteur.
pub struct Liar {
    /// Unique, in kebab case.
    pub name: &'static str,
    /// What it does wrong.
    pub lie: &'static str,
    /// Level that must catch it.
    pub level: Level,
    /// It may end its process, or never end: only a child process can be asked.
    pub is_lethal: bool,
    parts: Parts,
}

impl Liar {
    const fn new(level: Level, name: &'static str, lie: &'static str, parts: Parts) -> Self {
        Self { name, lie, level, is_lethal: false, parts }
    }
    const fn lethal(self) -> Self {
        Self { is_lethal: true, ..self }
    }
    /// The backend.
    pub fn backend(&self) -> Arc<dyn Q4Backend> {
        honest::with(self.parts)
    }
}

/// Every saboteur.
pub fn liars() -> impl Iterator<Item = &'static Liar> {
    decode::LIARS
        .iter()
        .chain(product::LIARS)
        .chain(conduct::LIARS)
        .chain(extent::LIARS)
        .chain(magnitude::LIARS)
        .chain(address::LIARS)
        .chain(narrow::LIARS)
        .chain(lent::LIARS)
        .chain(history::LIARS)
        .chain(format::LIARS)
        .chain(process::LIARS)
        .chain(fused::LIARS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn there_are_enough_and_each_has_a_name() {
        let names: BTreeSet<_> = liars().map(|l| l.name).collect();
        assert_eq!(names.len(), liars().count());
        assert!(names.len() >= 310, "{}", names.len());
        assert!(Level::ALL.iter().all(|level| liars().any(|l| l.level == *level)));
    }
}
