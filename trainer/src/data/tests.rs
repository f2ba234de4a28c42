use super::*;
use q4_core::Code;

mod mixtures;

/// Samples whose tokens say which sample they are from.
fn numbered(lengths: &[usize]) -> Dataset {
    let samples: Vec<_> = lengths
        .iter()
        .enumerate()
        .map(|(i, n)| Sample {
            ids: (0..*n as u32).map(|j| 100 * (i as u32 + 1) + j).collect(),
            supervised: vec![true; *n],
        })
        .collect();
    Dataset {
        samples,
        report: Report::default(),
        counts: vec![lengths.len()],
        mixture: None,
        separator: (0, false),
        notes: Vec::new(),
    }
}

const OPTIONS: LoaderOptions =
    LoaderOptions { rows: 2, seq: 8, packing: Packing::Documents, seed: 3, shuffle: false, pad: 0 };

#[test]
fn documents_share_rows_but_not_positions() {
    let data = numbered(&[4, 5, 9, 3, 3]);
    let mut loader = Loader::new(&data, OPTIONS).expect("loader");
    let b = loader.next_batch();
    assert_eq!(b.ids[..8], [100, 101, 102, 200, 201, 202, 203, 0]);
    assert_eq!(b.targets[..8], [101, 102, 103, 201, 202, 203, 204, IGNORE]);
    assert_eq!(b.positions[..8], [0, 1, 2, 0, 1, 2, 3, 0]);
    assert_eq!(b.documents[..8], [0, 0, 0, 1, 1, 1, 1, -1]);
    assert_eq!(b.ids[8..], [300, 301, 302, 303, 304, 305, 306, 307]);
    assert_eq!((b.supervised, b.tokens(), b.is_packed()), (15, 15, true));
    assert_eq!(loader.cursor(), Cursor { epoch: 0, index: 3 });
    // The epoch ends inside a row and the next begins there.
    let b = loader.next_batch();
    assert_eq!(b.ids[..8], [400, 401, 500, 501, 100, 101, 102, 0]);
    assert_eq!(loader.cursor(), Cursor { epoch: 1, index: 2 });
    let alone =
        Loader::new(&data, LoaderOptions { packing: Packing::Rows, ..OPTIONS }).expect("loader").next_batch();
    assert!(!alone.is_packed());
    assert_eq!(
        (alone.ids[..4].to_vec(), alone.ids[8..12].to_vec()),
        (vec![100, 101, 102, 0], vec![200, 201, 202, 203])
    );
}

#[test]
fn a_stream_is_cut_into_windows_that_miss_no_token() {
    let data = numbered(&[4, 5, 9, 3]);
    let stream: Vec<i64> =
        data.samples.iter().flat_map(|s| s.ids.iter().map(|i| i64::from(*i)).chain([0])).collect();
    let batches: Vec<_> = eval_batches(&data, 2, 8, Packing::Stream, 7).collect();
    let inputs: Vec<i64> = batches
        .iter()
        .flat_map(|b| b.ids.iter().zip(&b.documents).filter(|(_, d)| **d >= 0).map(|(i, _)| *i))
        .collect();
    assert_eq!(inputs, stream[..stream.len() - 1]);
    let targets: usize = batches.iter().map(|b| b.supervised).sum();
    assert_eq!(targets, 4 + 5 + 9 + 3 - 1, "separators are not learnt here, the first token has no past");
    let mut loader =
        Loader::new(&data, LoaderOptions { packing: Packing::Stream, rows: 1, ..OPTIONS }).expect("loader");
    assert_eq!(loader.items(), 3);
    assert_eq!(loader.next_batch().ids, stream[..8]);
    assert_eq!(loader.next_batch().targets[0], stream[9]);
}

#[test]
fn every_epoch_is_a_permutation_and_a_cursor_is_all_there_is() {
    let data = numbered(&[3; 50]);
    for packing in [Packing::Rows, Packing::Documents, Packing::Stream] {
        let options = LoaderOptions { packing, shuffle: true, rows: 3, seq: 9, ..OPTIONS };
        let mut loader = Loader::new(&data, options).expect("loader");
        let mut seen = Vec::new();
        let mut batches = Vec::new();
        for _ in 0..40 {
            batches.push((loader.cursor(), loader.next_batch()));
        }
        for (cursor, batch) in &batches {
            let mut other = Loader::new(&data, options).expect("loader");
            other.seek(*cursor);
            assert_eq!(other.next_batch(), *batch, "{packing:?} {cursor:?}");
            if packing == Packing::Documents {
                let firsts = batch.ids.iter().zip(batch.positions.iter().zip(&batch.documents));
                seen.extend(firsts.filter(|(_, (p, d))| **p == 0 && **d >= 0).map(|(id, _)| *id));
            }
        }
        if packing == Packing::Documents {
            let sorted = |range: std::ops::Range<usize>| {
                let mut v = seen[range].to_vec();
                v.sort_unstable();
                v
            };
            let all: Vec<i64> = (1..=50).map(|i| 100 * i).collect();
            assert_eq!((sorted(0..50), sorted(50..100)), (all.clone(), all));
            assert_ne!(seen[..50], seen[50..100], "another order each epoch");
        }
        if packing == Packing::Stream {
            // 50 samples of three tokens and a separator: 22 windows of nine an epoch, 66 of the 120 rows are
            // three epochs.
            let ids: Vec<i64> = batches.iter().flat_map(|(_, b)| b.ids.clone()).collect();
            let epochs: Vec<&[i64]> = ids.chunks(22 * 9).take(3).collect();
            let following = |epoch: &[i64]| {
                epoch.windows(3).filter(|w| w[1] == 0).map(|w| (w[0], w[2])).collect::<Vec<_>>()
            };
            assert!(epochs.iter().all(|e| {
                let mut firsts: Vec<i64> = e.iter().copied().filter(|id| id % 100 == 0 && *id > 0).collect();
                firsts.sort_unstable();
                firsts.windows(2).all(|w| w[0] < w[1]) && firsts.len() >= 49
            }));
            let (a, b) = (following(epochs[0]), following(epochs[1]));
            assert!(a.iter().filter(|pair| b.contains(pair)).count() < 10, "the same neighbours again");
        }
    }
}

#[test]
fn evaluation_sees_every_sample_once() {
    let data = numbered(&[4, 5, 9, 3, 3]);
    for packing in [Packing::Rows, Packing::Documents] {
        let batches: Vec<_> = eval_batches(&data, 2, 8, packing, 0).collect();
        assert_eq!(batches.iter().map(|b| b.supervised).sum::<usize>(), 3 + 4 + 8 + 2 + 2, "{packing:?}");
        assert!(batches.iter().all(|b| b.rows <= 2 && b.ids.len() == b.rows * b.seq));
    }
}

#[test]
fn data_that_cannot_fill_a_row_is_refused() {
    let data = numbered(&[20]);
    assert!(Loader::new(&data, OPTIONS).is_err_and(|e| e.code() == Code::Usage), "too long");
    assert!(Loader::new(&numbered(&[3]), LoaderOptions { packing: Packing::Stream, ..OPTIONS }).is_err());
    assert!(Loader::new(&numbered(&[3]), LoaderOptions { rows: 0, ..OPTIONS }).is_err());
}
