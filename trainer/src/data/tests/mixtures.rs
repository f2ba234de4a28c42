//! Files drawn from by weight, and the steps that epochs are.
use super::*;

fn mixed(lengths: &[usize], weights: &[f64]) -> Dataset {
    let mut data = numbered(&vec![3; lengths.iter().sum()]);
    data.counts = lengths.to_vec();
    data.mix(weights).expect("mixed");
    data
}

#[test]
fn an_epoch_has_each_files_share_and_every_row_its_turn() {
    let data = mixed(&[30, 10], &[1.0, 3.0]);
    for shuffle in [false, true] {
        let mut seen = vec![0usize; 40];
        for epoch in 0..3 {
            let order = data.order(5, epoch, shuffle);
            assert_eq!(order, data.order(5, epoch, shuffle), "a function of seed and epoch");
            let first = order.iter().filter(|i| **i < 30).count();
            assert_eq!((order.len(), first), (40, 10));
            order.iter().for_each(|i| seen[*i as usize] += 1);
            // Neither file comes in one piece.
            let half = order[..20].iter().filter(|i| **i < 30).count();
            assert!((1..10).contains(&half), "{half}");
        }
        // Three epochs: the larger file once, each row of it; the smaller nine times.
        assert!(seen[..30].iter().all(|n| *n == 1) && seen[30..].iter().all(|n| *n == 9), "{seen:?}");
    }
    assert_ne!(data.order(5, 0, true), data.order(6, 0, true));
    let equal = mixed(&[3, 3], &[0.5, 0.5]);
    assert_eq!(equal.order(1, 4, false), [0, 3, 1, 4, 2, 5]);
}

#[test]
fn a_weight_that_gives_no_row_is_refused() {
    let mut data = numbered(&[3; 8]);
    data.counts = vec![4, 4];
    let e = data.mix(&[1.0, 1e-6]).expect_err("nothing of file 2").to_string();
    assert!(e.contains("file 2"), "{e}");
    data.counts = vec![8, 0];
    assert!(data.mix(&[1.0, 1.0]).is_err(), "a file without rows");
}

#[test]
fn a_mixture_goes_on_where_it_was() {
    let data = mixed(&[7, 5], &[2.0, 1.0]);
    for packing in [Packing::Rows, Packing::Documents, Packing::Stream] {
        let options = LoaderOptions { packing, shuffle: true, rows: 2, seq: 5, ..OPTIONS };
        let mut loader = Loader::new(&data, options).expect("loader");
        for _ in 0..30 {
            let (cursor, batch) = (loader.cursor(), loader.next_batch());
            let mut other = Loader::new(&data, options).expect("loader");
            other.seek(cursor);
            assert_eq!(other.next_batch(), batch, "{packing:?} {cursor:?}");
        }
    }
}

#[test]
fn epochs_are_the_batches_that_see_all_of_it() {
    let data = numbered(&[4, 5, 9, 3, 3, 6, 2]);
    for packing in [Packing::Rows, Packing::Documents, Packing::Stream] {
        for (rows, shuffle) in [(1, false), (2, true), (3, true)] {
            let options = LoaderOptions { packing, shuffle, rows, ..OPTIONS };
            for epochs in [0.5, 1.0, 2.0, 3.7] {
                let batches = Loader::new(&data, options).expect("loader").batches(epochs);
                let mut loader = Loader::new(&data, options).expect("loader");
                let end = epochs * loader.items() as f64;
                let at = |c: Cursor, items: usize| (c.epoch * items as u64 + c.index) as f64;
                for left in (0..batches).rev() {
                    loader.next_batch();
                    let seen = at(loader.cursor(), loader.items());
                    assert_eq!(seen < end, left > 0, "{packing:?} {rows} {epochs}: {seen} of {end}");
                }
            }
        }
    }
}
