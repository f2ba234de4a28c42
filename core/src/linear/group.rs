//! Products of several weights in one call: a layer of experts, of which every row of the input takes one.
use super::{Dispatch, Q4Linear};
use crate::{
    ActGlobal, Activations, Code, DType, Device, Error, ExecContext, Fp8Inputs, LinearSpec, OpSet,
    PreparedGroup, Q4Weight, Result, Selection, TensorView, TensorViewMut, ThreadPool, rows,
};

impl Dispatch {
    /// Prepares the experts of a layer, each as [`prepare`](Self::prepare) does, and has them multiplied in
    /// one call where the backend can; that is checked before its first use as well.
    ///
    /// # Errors
    /// Those of `prepare`; [`Code::ShapeMismatch`] for specs that differ in more than names and a recorded
    /// scale of the input, and [`Code::Unsupported`] on a device whose backend does not group them.
    pub fn prepare_group(
        &self,
        weights: &[Q4Weight<'_>],
        specs: &[LinearSpec],
        selection: &Selection,
        threads: &ThreadPool,
    ) -> Result<Q4Group> {
        let Some(spec) = specs.first() else { return Err(nobody()) };
        if weights.len() != specs.len() || !is_one_kind(specs) {
            return Err(Error::new(Code::ShapeMismatch, format!("experts of {}", spec.name()))
                .need("a weight for each spec, which differ in names")
                .have(format!("{} weights, {} specs", weights.len(), specs.len())));
        }
        let each = weights.iter().zip(specs);
        let members = each.map(|(w, spec)| self.prepare(w, spec, selection, threads));
        let members = members.collect::<Result<Vec<_>>>()?;
        let per_call = |a: &Activations| matches!(a, Activations::Nvfp4(q) if q.global == ActGlobal::PerCall);
        let mut grouped = None;
        if !per_call(&spec.activations) {
            let prepared: Vec<_> = members.iter().map(|m| m.weight.clone()).collect();
            let mut cx = ExecContext::on(spec.device, 0, threads);
            grouped = selection.backend.group(&prepared, &mut cx)?;
        }
        if let Some(group) = grouped.take() {
            let checked = (members[0].info(), threads);
            let group = self.checks.require_group(selection, specs, weights, group, checked);
            grouped = Some(group.map_err(|e| members[0].named(e))?);
        } else if spec.device != Device::Cpu {
            return Err(elsewhere(spec.device).within(members[0].name()));
        }
        Ok(Q4Group { members, grouped })
    }
}

/// Experts that are multiplied together: in one call of the backend where that has one, else one after the
/// other. Made by [`Dispatch::prepare_group`].
pub struct Q4Group {
    members: Vec<Q4Linear>,
    /// Lives no longer than the members.
    grouped: Option<Box<dyn PreparedGroup>>,
}

impl Q4Group {
    /// The experts, in the order of the offsets.
    pub fn members(&self) -> &[Q4Linear] {
        &self.members
    }
    /// Whether one call of the backend multiplies all of them.
    pub fn is_one_call(&self) -> bool {
        self.grouped.is_some()
    }
    /// Scratch bytes for a call of `m` rows in all.
    pub fn workspace(&self, m: usize) -> usize {
        match &self.grouped {
            Some(group) => group.workspace(m),
            // Any of them may get all rows, or some; they are of one kind and shape.
            None => {
                let first = self.members.first();
                first.map_or(0, |w| (1..=m).map(|m| w.workspace(m)).max().unwrap_or(0))
            }
        }
    }

    /// Rows of `y[m, n]` are those of `x[m, k]` times the expert they belong to, as
    /// [`PreparedGroup::forward`] says. Counts a product for each expert that has rows.
    ///
    /// # Errors
    /// As [`Q4Linear::forward`], and [`Code::ShapeMismatch`] for offsets that do not fit.
    pub fn forward(
        &self,
        x: TensorView<'_>,
        offsets: TensorView<'_>,
        mut y: TensorViewMut<'_>,
        cx: &mut ExecContext<'_>,
    ) -> Result<()> {
        let Some(first) = self.members.first() else { return Err(nobody()) };
        let (info, out) = (first.info(), y.as_view());
        first.check(OpSet::FORWARD, (&x, info.k, first.x), (&out, info.n, first.y), cx)?;
        if offsets.device() != cx.device || offsets.dtype() != DType::I32 {
            return Err(Error::new(Code::ShapeMismatch, "offsets of a grouped product")
                .need(format!("i32[{}] on {}", self.members.len() + 1, cx.device))
                .have(format!("{offsets:?}")));
        }
        let m = x.as_matrix()?.0;
        let known = match cx.device {
            Device::Cpu => Some(rows::offsets(&offsets, self.members.len(), m)?),
            _ => None,
        };
        if let Some(group) = &self.grouped {
            for (e, w) in self.members.iter().enumerate() {
                // What a device has is not read back to be counted: every expert may have had rows.
                if known.is_none_or(|at| at[e] < at[e + 1]) {
                    w.replayed();
                }
            }
            return group.forward(x, offsets, y, cx).map_err(|e| first.named(e));
        }
        let Some(at) = known else { return Err(elsewhere(cx.device)) };
        for (w, rows) in self.members.iter().zip(at.windows(2)).filter(|(_, rows)| rows[0] < rows[1]) {
            let (from, count) = (rows[0] as usize, (rows[1] - rows[0]) as usize);
            w.forward(x.rows(from, count)?, y.rows_mut(from, count)?, cx)?;
        }
        Ok(())
    }
}

/// Whether weights of these specs can be experts of one layer: they differ in names, and in a recorded scale
/// of the input, at most.
fn is_one_kind(specs: &[LinearSpec]) -> bool {
    let bare = |spec: &LinearSpec| {
        let mut spec = spec.clone();
        spec.segments.iter_mut().for_each(|s| s.name.clear());
        let mut convention = None;
        match &mut spec.activations {
            Activations::Nvfp4(act) => {
                if let ActGlobal::Static(global) = act.global {
                    (act.global, convention) = (ActGlobal::None, Some(global.convention()));
                }
            }
            Activations::Fp8(how) => {
                if let Fp8Inputs::Static(scale) = *how {
                    (*how, convention) = (Fp8Inputs::PerRow, Some(scale.convention()));
                }
            }
            Activations::Native | Activations::Int8 => {}
        }
        (spec, convention)
    };
    specs.windows(2).all(|pair| bare(&pair[0]) == bare(&pair[1]))
}

fn nobody() -> Error {
    Error::new(Code::ShapeMismatch, "a group of weights").need("at least one weight").have("none")
}

fn elsewhere(device: Device) -> Error {
    Error::new(Code::Unsupported, "experts in one call")
        .need("a backend that groups them, for what a device has of offsets nobody else can read")
        .have(device.to_string())
}
