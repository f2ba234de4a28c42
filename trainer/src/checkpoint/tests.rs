//! A save is interrupted at every operation it consists of; what is found afterwards must be whole.
use super::*;
use crate::guard::GuardOptions;
use std::collections::BTreeSet;
use std::rc::Rc;

fn state(step: u64) -> TrainState {
    TrainState {
        step,
        tokens: 100 * step,
        seed: 7,
        cursor: Cursor { epoch: 1, index: step },
        guard: Guard::new(GuardOptions::default()),
        best: Some(0.5),
        best_step: Some(1),
        stale: 1,
        owed: step % 2 == 0,
        threads: 2,
        ranks: 1,
        sources: None,
        config: "[train]\nsteps = 3\n".into(),
    }
}

/// More than one block, and different at every step.
fn weights(step: u64) -> Vec<u8> {
    (0..BLOCK + BLOCK / 2).map(|i| (i as u64 * 31 + step * 7) as u8).collect()
}

fn save(store: &Store, step: u64, metric: Option<f64>) -> Result<PathBuf> {
    store.save(step, metric, |w| {
        w.bytes("masters.bin", &weights(step))?;
        w.state(&state(step))
    })
}

fn whole(dir: &Path) -> Loaded {
    let loaded = newest(dir).expect("loadable").expect("a checkpoint");
    assert_eq!(loaded.read("masters.bin").expect("masters"), weights(loaded.step));
    assert_eq!(loaded.state().expect("state"), state(loaded.step));
    loaded
}

const KEEP: Keep = Keep { last: 2, best: true };

#[test]
fn what_is_saved_is_loaded() {
    let dir = tempfile::tempdir().expect("directory");
    let store = Store::open(dir.path(), KEEP).expect("store");
    assert!(store.newest().expect("empty").is_none());
    save(&store, 3, Some(1.0)).expect("saved");
    save(&store, 12, None).expect("saved");
    let loaded = whole(dir.path());
    assert_eq!((loaded.step, loaded.metric, loaded.damaged.len()), (12, None, 0));
    assert_eq!(loaded.open("other").expect_err("no such file").code(), Code::Container);
    // The same step again, as after a resume from an older one.
    save(&store, 12, Some(0.1)).expect("saved");
    assert_eq!(whole(dir.path()).metric, Some(0.1));
}

#[test]
fn rotation_keeps_the_last_and_the_best() {
    let dir = tempfile::tempdir().expect("directory");
    let store = Store::open(dir.path(), KEEP).expect("store");
    for (step, metric) in [(1, Some(3.0)), (2, Some(1.0)), (3, Some(2.0)), (4, None), (5, Some(f64::NAN))] {
        save(&store, step, metric).expect("saved");
    }
    let left: Vec<u64> = steps(dir.path()).expect("listed").into_iter().map(|(step, _)| step).collect();
    assert_eq!(left, [2, 4, 5]);
    assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 4, "three and the lock");
}

#[test]
fn one_writer_at_a_time() {
    let dir = tempfile::tempdir().expect("directory");
    let first = Store::open(dir.path(), KEEP).expect("store");
    assert_eq!(Store::open(dir.path(), KEEP).err().expect("locked").code(), Code::Usage);
    drop(first);
    assert!(Store::open(dir.path(), KEEP).is_ok());
}

#[test]
fn any_flipped_or_missing_byte_is_found() {
    let dir = tempfile::tempdir().expect("directory");
    let store = Store::open(dir.path(), KEEP).expect("store");
    save(&store, 1, None).expect("saved");
    let newer = save(&store, 2, Some(0.5)).expect("saved");
    for file in ["masters.bin", "state.json", MANIFEST] {
        let path = newer.join(file);
        let good = fs::read(&path).expect("read");
        let spots = [0, good.len() / 2, good.len() - 1];
        let flipped = spots.map(|i| {
            let mut bad = good.clone();
            bad[i] ^= 1;
            bad
        });
        for bad in
            flipped.into_iter().chain(spots.map(|i| good[..i].to_vec())).chain([[&good[..], b" "].concat()])
        {
            fs::write(&path, bad).expect("written");
            let loaded = whole(dir.path());
            assert_eq!((loaded.step, loaded.damaged.len()), (1, 1), "{file}");
        }
        fs::remove_file(&path).expect("removed");
        assert_eq!(whole(dir.path()).step, 1);
        fs::write(&path, &good).expect("written");
        assert_eq!(whole(dir.path()).step, 2);
    }
    fs::write(newer.join("state.json"), "").expect("written");
    fs::write(dir.path().join(name(1)).join("state.json"), "").expect("written");
    assert_eq!(newest(dir.path()).expect_err("all damaged").code(), Code::Container);
}

/// A disk that dies at a given operation, and loses on the way what was not synced.
struct Dying {
    left: Rc<RefCell<usize>>,
    /// Files with unsynced bytes.
    dirty: Rc<RefCell<BTreeSet<PathBuf>>>,
}

impl Dying {
    fn live(&mut self) -> io::Result<()> {
        let mut left = self.left.borrow_mut();
        *left = left.checked_sub(1).ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(())
    }
}

impl Disk for Dying {
    fn create_dir(&mut self, path: &Path) -> io::Result<()> {
        self.live()?;
        RealDisk.create_dir(path)
    }
    fn create(&mut self, path: &Path) -> io::Result<()> {
        self.live()?;
        RealDisk.create(path)
    }
    fn append(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.dirty.borrow_mut().insert(path.into());
        // Two points: after half of the bytes, after all of them.
        let half = bytes.len() / 2;
        self.live()?;
        RealDisk.append(path, &bytes[..half])?;
        self.live()?;
        RealDisk.append(path, &bytes[half..])
    }
    fn sync(&mut self, path: &Path) -> io::Result<()> {
        self.live()?;
        self.dirty.borrow_mut().remove(path);
        RealDisk.sync(path)
    }
    fn sync_dir(&mut self, path: &Path) -> io::Result<()> {
        self.live()?;
        RealDisk.sync_dir(path)
    }
    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.live()?;
        let dirty: Vec<_> = self.dirty.borrow().iter().filter(|p| p.starts_with(from)).cloned().collect();
        assert!(dirty.is_empty(), "renamed before it was synced: {dirty:?}");
        RealDisk.rename(from, to)
    }
    fn remove_dir_all(&mut self, path: &Path) -> io::Result<()> {
        // Dies halfway through: one file is gone.
        if let Some(Ok(first)) = fs::read_dir(path)?.next() {
            self.live()?;
            fs::remove_file(first.path())?;
        }
        self.live()?;
        RealDisk.remove_dir_all(path)
    }
}

#[test]
fn a_crash_at_any_operation_leaves_the_newest_or_the_one_before() {
    let mut crashes = 0;
    for operations in 0.. {
        let dir = tempfile::tempdir().expect("directory");
        let (left, dirty) = (Rc::new(RefCell::new(usize::MAX)), Rc::default());
        let disk = Dying { left: Rc::clone(&left), dirty: Rc::clone(&dirty) };
        let store = Store::with_disk(dir.path(), KEEP, Box::new(disk)).expect("store");
        for step in 1..=3 {
            save(&store, step, Some(step as f64)).expect("saved");
        }
        *left.borrow_mut() = operations;
        let ended = save(&store, 4, Some(4.0)).is_ok();
        drop(store);
        // Power is gone, too: bytes that were never synced are lost.
        for path in &*dirty.borrow() {
            if path.exists() {
                fs::write(path, "").expect("emptied");
            }
        }
        let found = whole(dir.path());
        assert!(found.step >= 3 && found.damaged.is_empty(), "after {operations} operations: {found:?}");
        assert!(!ended || found.step == 4);
        // And the next run goes on from there, with nothing left lying about.
        let store = Store::open(dir.path(), KEEP).expect("store");
        save(&store, 5, None).expect("saved");
        assert_eq!(whole(dir.path()).step, 5);
        let hidden = fs::read_dir(dir.path())
            .expect("listed")
            .flatten()
            .filter(|e| e.file_name().to_string_lossy().starts_with(".partial"));
        assert_eq!(hidden.count(), 0);
        if ended {
            break;
        }
        crashes += 1;
    }
    assert!(crashes > 15, "only {crashes} points of failure");
}

#[test]
fn a_failing_fill_leaves_no_trace() {
    let dir = tempfile::tempdir().expect("directory");
    let store = Store::open(dir.path(), KEEP).expect("store");
    save(&store, 1, None).expect("saved");
    let e = store.save(2, None, |w| {
        w.bytes("a", b"x")?;
        w.bytes("a", b"y")
    });
    assert_eq!(e.expect_err("twice the same name").code(), Code::Internal);
    assert!(store.save(2, None, |w| w.bytes("../x", b"")).is_err());
    assert_eq!(whole(dir.path()).step, 1);
    assert_eq!(fs::read_dir(dir.path()).expect("listed").count(), 2);
}
