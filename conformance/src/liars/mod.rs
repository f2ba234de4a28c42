//! Backends with one fault each: the suite is as good as those it catches.
//!
//! All are [`honest()`], one small backend of our own, with one part exchanged. The tables say what each
//! pretends and at which level it must be caught.

/// Mutants: level, `lethal` for those that only a child process can be asked, name, what it does wrong, and
/// the parts that it has instead of those of the backend named first.
macro_rules! mutants {
    ($honest:ident; $($(#[$cfg:meta])* $level:ident $($lethal:ident)? $name:literal: $what:literal {
        $($part:ident: $wrong:expr),+ $(,)?
    })+) => {
        &[$(
            $(#[$cfg])*
            Mutant::new($level, $name, $what, Parts { $($part: $wrong,)+ ..$honest })$(.$lethal())?
        ),+]
    };
}

mod address;
mod card;
mod conduct;
mod decode;
mod device;
mod extent;
mod format;
mod fused;
mod group;
mod grouped;
mod history;
mod honest;
mod lent;
mod magnitude;
mod narrow;
mod on_card;
mod parts;
mod process;
mod product;
mod rounded;
mod rows;
mod situation;
mod units;

use crate::Level;
pub use honest::{honest, honest_on_card, honest_units};
pub use parts::Parts;
use q4_core::{Device, Q4Backend};
use std::sync::Arc;

/// One mutant.
pub struct Mutant {
    /// Unique, in kebab case.
    pub name: &'static str,
    /// What it does wrong.
    pub what: &'static str,
    /// Level that must catch it.
    pub level: Level,
    /// It may end its process, or never end: only a child process can be asked.
    pub is_lethal: bool,
    parts: Parts,
}

impl Mutant {
    const fn new(level: Level, name: &'static str, what: &'static str, parts: Parts) -> Self {
        Self { name, what, level, is_lethal: false, parts }
    }
    const fn lethal(self) -> Self {
        Self { is_lethal: true, ..self }
    }
    /// The backend.
    pub fn backend(&self) -> Arc<dyn Q4Backend> {
        honest::with(self.parts)
    }
}

/// The device that a backend is about: its own, if it has one.
pub fn device_of(backend: &dyn Q4Backend) -> Device {
    backend.devices().first().map_or(Device::Cpu, |d| d.device)
}

/// Every mutant.
pub fn mutants() -> impl Iterator<Item = &'static Mutant> {
    decode::MUTANTS
        .iter()
        .chain(product::MUTANTS)
        .chain(conduct::MUTANTS)
        .chain(extent::MUTANTS)
        .chain(magnitude::MUTANTS)
        .chain(address::MUTANTS)
        .chain(narrow::MUTANTS)
        .chain(lent::MUTANTS)
        .chain(history::MUTANTS)
        .chain(format::MUTANTS)
        .chain(rounded::MUTANTS)
        .chain(units::MUTANTS)
        .chain(process::MUTANTS)
        .chain(fused::MUTANTS)
        .chain(grouped::MUTANTS)
        .chain(device::MUTANTS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn there_are_enough_and_each_has_a_name() {
        let names: BTreeSet<_> = mutants().map(|l| l.name).collect();
        assert_eq!(names.len(), mutants().count());
        assert!(names.len() >= 470, "{}", names.len());
        assert!(Level::ALL.iter().all(|level| mutants().any(|l| l.level == *level)));
    }
}
