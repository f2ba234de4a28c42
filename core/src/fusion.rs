//! What a product may do besides, in the same pass over its weights.
use crate::TensorView;
use serde::Serialize;

/// What one call does besides the product, in the same pass over the weights. Empty: a plain `forward`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fusion<'a> {
    /// x is the f32 residual `[m, k]`; its norm, rounded to the spec's x type, is what is quantised or
    /// multiplied.
    pub norm: Option<RmsNorm<'a>>,
    /// The rows of the weight are gate rows, then as many up rows: `y[m, n/2] = silu(gate) * up`.
    pub gate: bool,
    /// `y += product`; y is f32 whatever the spec says.
    pub accumulate: bool,
}

/// `x / sqrt(mean(x^2) + eps) * weight`, in f32.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    /// f32 `[k]`, on the device of the call.
    pub weight: TensorView<'a>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Which parts of a [`Fusion`] are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct FuseSet(pub u8);

impl FuseSet {
    /// Nothing but the product.
    pub const NONE: Self = Self(0);
    /// [`Fusion::norm`].
    pub const NORM: Self = Self(1);
    /// [`Fusion::gate`].
    pub const GATE: Self = Self(2);
    /// [`Fusion::accumulate`].
    pub const ACCUMULATE: Self = Self(4);
    /// All of them.
    pub const ALL: Self = Self(7);
    /// `o` is a subset.
    pub const fn contains(self, o: Self) -> bool {
        self.0 & o.0 == o.0
    }
    /// The union.
    pub const fn with(self, o: Self) -> Self {
        Self(self.0 | o.0)
    }
}

impl Fusion<'_> {
    /// The parts that are there.
    pub fn set(&self) -> FuseSet {
        let part = |there: bool, s: FuseSet| if there { s } else { FuseSet::NONE };
        part(self.norm.is_some(), FuseSet::NORM)
            .with(part(self.gate, FuseSet::GATE))
            .with(part(self.accumulate, FuseSet::ACCUMULATE))
    }
}
