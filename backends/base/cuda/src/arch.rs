//! What devices can do, by compute capability: the one table. A new architecture is a row of it.

/// A compute capability, and what its devices have beside what all have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arch {
    /// Major and minor number.
    pub capability: (u32, u32),
    /// Bytes of shared memory that a block may ask for; `Q4_SHARED` of device code.
    pub shared: usize,
    /// Clusters of blocks, the copy engine, and kernels that start while the one before them drains.
    pub clusters: bool,
    /// Products of warpgroups (`wgmma`).
    pub wgmma: bool,
    /// FP4 tensor cores that take a scale per 16 (PTX ISA, `mma` with `kind::mxf4nvf4`).
    pub fp4: bool,
}

/// The one with `wgmma`, whose shapes of tiles are constants.
pub const HOPPER: Arch = row((9, 0), 227, true, true, false);

/// From old to new; kernels are written for the first and later ones.
pub const ARCHS: [Arch; 9] = [
    // Capability, KiB of shared memory, clusters, wgmma, fp4.
    row((8, 0), 163, false, false, false),
    row((8, 6), 99, false, false, false),
    row((8, 7), 163, false, false, false),
    row((8, 9), 99, false, false, false),
    HOPPER,
    row((10, 0), 227, true, false, true),
    row((10, 3), 227, true, false, true),
    row((12, 0), 99, true, false, true),
    row((12, 1), 99, true, false, true),
];

const fn row(capability: (u32, u32), kib: usize, clusters: bool, wgmma: bool, fp4: bool) -> Arch {
    Arch { capability, shared: kib << 10, clusters, wgmma, fp4 }
}

impl Arch {
    /// That of devices of `capability`. What is not listed has what later devices keep, and 48 KiB.
    pub fn of(capability: (u32, u32)) -> Self {
        match ARCHS.iter().rfind(|a| a.capability <= capability) {
            Some(listed) if listed.capability == capability => *listed,
            before => row(capability, 48, before.is_some_and(|a| a.clusters), false, false),
        }
    }

    /// The name of the machine code it runs best: `sm_90a` where it has instructions of its own.
    pub fn target(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}{}", if major >= HOPPER.capability.0 { "a" } else { "" })
    }

    /// One of each major number: what kernels for all are compiled for where they are checked.
    pub fn majors() -> impl Iterator<Item = Self> {
        ARCHS.into_iter().filter(|a| a.capability.1 == 0)
    }

    /// The names of those that have something, e.g. `sm_100, sm_103`.
    pub fn names(has: impl Fn(&Self) -> bool) -> String {
        let name = |a: Self| format!("sm_{}{}", a.capability.0, a.capability.1);
        ARCHS.into_iter().filter(has).map(name).collect::<Vec<_>>().join(", ")
    }

    /// What the compiler is told of it.
    pub(crate) fn option(&self) -> String {
        format!("-DQ4_SHARED={}", self.shared)
    }
}

#[test]
fn what_is_not_listed_keeps_what_later_devices_keep() {
    assert!(ARCHS.is_sorted_by_key(|a| a.capability));
    for listed in ARCHS {
        assert_eq!(Arch::of(listed.capability), listed);
    }
    let of = |c| (Arch::of(c).clusters, Arch::of(c).wgmma, Arch::of(c).fp4);
    assert_eq!(of((7, 5)), (false, false, false));
    assert_eq!(of((8, 8)), (false, false, false));
    for newer in [(9, 1), (11, 0), (13, 0)] {
        assert_eq!((of(newer), Arch::of(newer).shared), ((true, false, false), 48 << 10));
    }
    assert_eq!([(8, 9), (9, 0), (12, 1)].map(|c| Arch::of(c).target()), ["sm_89", "sm_90a", "sm_121a"]);
    assert_eq!(Arch::names(|a| a.fp4), "sm_100, sm_103, sm_120, sm_121");
}
