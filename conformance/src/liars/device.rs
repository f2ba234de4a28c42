//! Mutants of a device's memory: products are right, and what is copied there, back, or taken is not.
use super::Mutant;
use super::card::{CardParts, RIGHT};
use super::parts::{ON_CARD, Parts};
use crate::Level::{L2, L5};

pub(super) const MUTANTS: &[Mutant] = mutants! {
    ON_CARD;
    L2 "upload-one-short": "the last byte is not copied to the device" {
        card: Some(CardParts { upload: |count| count.saturating_sub(1), ..RIGHT }),
    }
    L2 "upload-in-words": "copies to the device end at a multiple of eight bytes" {
        card: Some(CardParts { upload: |count| count / 8 * 8, ..RIGHT }),
    }
    L2 "upload-in-pages": "no more than 64 KiB are copied to the device at once" {
        card: Some(CardParts { upload: |count| count.min(1 << 16), ..RIGHT }),
    }
    L2 "download-from-the-start": "what comes back begins where the allocation does" {
        card: Some(CardParts { download: |_, count| (0, count), ..RIGHT }),
    }
    L2 "download-one-short": "the last byte does not come back" {
        card: Some(CardParts { download: |at, count| (at, count.saturating_sub(1)), ..RIGHT }),
    }
    L2 "download-in-pages": "no more than 64 KiB come back at once" {
        card: Some(CardParts { download: |at, count| (at, count.min(1 << 16)), ..RIGHT }),
    }
    L2 "download-on-a-boundary": "what comes back begins at a multiple of 256" {
        card: Some(CardParts { download: |at, count| (at / 256 * 256, count), ..RIGHT }),
    }
    // What reads and writes the same bytes may end a process that checks for it.
    L2 lethal "allocations-in-one-place": "two allocations share their bytes" {
        card: Some(CardParts { shares: true, ..RIGHT }),
    }
    L2 "device-writes-on": "a byte behind y is written on the device" {
        card: Some(CardParts { writes_on: true, ..RIGHT }),
    }
    L2 "device-writes-x": "x is written on the device" { card: Some(CardParts { spoils: true, ..RIGHT }) }
    L2 "device-writes-offsets": "the offsets of a group are written on the device" {
        card: Some(CardParts { bends: true, ..RIGHT }),
    }
    L5 "device-memory-leaks": "what is given back does not become free" {
        card: Some(CardParts { leaks: true, ..RIGHT }),
    }
    L5 "dense-copy-on-the-device": "a dense copy is kept on the device" {
        card: Some(CardParts { copies: true, ..RIGHT }),
    }
};
