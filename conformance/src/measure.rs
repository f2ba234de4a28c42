//! One problem through one backend: forward, backward and decode, each output against the exact value.
use q4_core::oracle::{Input, bound};
use q4_core::selfcheck::IoBuffer;
use q4_core::{
    Activations, Code, DType, Device, Error, ExecContext, ExecPath, HostEnv, LinearSpec, OpSet,
    PreparedWeight, Q4Backend, Q4Weight, Reject, Result, RowDecoder, SegmentSpec, TensorViewMut, ThreadPool,
};

/// A product with its operands.
pub struct Problem<'a> {
    /// Name, which is also its seed where it has one.
    pub name: String,
    /// The stored weight.
    pub weight: Q4Weight<'a>,
    /// `[m, k]`, already representable in `io`.
    pub x: Vec<f32>,
    /// Rows.
    pub m: usize,
    /// Activation format.
    pub activations: Activations,
    /// Type of input and output.
    pub io: DType,
    /// Result recorded elsewhere, `[m, n]`; it must agree with our own exact product.
    pub recorded: Option<Vec<f64>>,
}

/// What a backend made of a problem.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Outputs compared.
    pub outputs: usize,
    /// Largest forward error over its bound.
    pub forward: f64,
    /// Largest `dx` error over its bound; `None` when the backend does not offer it.
    pub backward: Option<f64>,
    /// Decoded values compared bit for bit; `None` when the backend does not offer it.
    pub decoded: Option<usize>,
}

/// Runs `problem` through `backend` on `path`. `Ok(Err(reasons))` when it is refused beforehand; an error when a result
/// is wrong, with the element.
pub fn measure(
    backend: &dyn Q4Backend,
    path: ExecPath,
    problem: &Problem<'_>,
    env: &HostEnv,
    threads: &ThreadPool,
) -> Result<std::result::Result<Measured, Vec<Reject>>> {
    let w = &problem.weight;
    let mut spec = LinearSpec {
        segments: w
            .segments
            .iter()
            .map(|s| SegmentSpec { name: problem.name.clone(), rows: s.rows })
            .collect(),
        schema: w.schema,
        k: w.k,
        max_m: problem.m,
        x: problem.io,
        y: problem.io,
        activations: problem.activations,
        device: Device::Cpu,
        ops: OpSet::ALL,
    };
    if backend.can_prepare(&spec, path, env).is_err() {
        spec.ops = OpSet::FORWARD;
    }
    if let Err(reasons) = backend.can_prepare(&spec, path, env) {
        return Ok(Err(reasons));
    }
    let mut cx = ExecContext::cpu(threads);
    let prepared = backend.prepare(w, &spec, path, &mut cx)?;
    if prepared.info().path != path || prepared.info().activations != problem.activations {
        return Err(Error::new(Code::PathBroken, &problem.name)
            .need(format!("{path}, {}", problem.activations))
            .have(format!("{}, {}", prepared.info().path, prepared.info().activations)));
    }
    let decoder = RowDecoder::new(w)?;
    let mut run = Run {
        prepared: &*prepared,
        path,
        problem,
        decoder,
        threads,
        scratch: vec![0; prepared.workspace(problem.m) + 64],
    };
    let ops = prepared.info().ops;
    Ok(Ok(Measured {
        outputs: problem.m * run.decoder.n(),
        forward: run.forward()?,
        backward: ops.contains(OpSet::BACKWARD_INPUT).then(|| run.backward()).transpose()?,
        decoded: ops.contains(OpSet::DEQUANTIZE).then(|| run.decode()).transpose()?,
    }))
}

struct Run<'a> {
    prepared: &'a dyn PreparedWeight,
    path: ExecPath,
    problem: &'a Problem<'a>,
    decoder: RowDecoder<'a>,
    threads: &'a ThreadPool,
    scratch: Vec<u8>,
}

impl Run<'_> {
    fn call(
        &mut self,
        f: impl FnOnce(&dyn PreparedWeight, &mut ExecContext<'_>) -> Result<()>,
    ) -> Result<()> {
        let at = self.scratch.as_ptr().align_offset(64);
        let len = self.scratch.len() - at;
        // Stale scratch must not show in a result.
        self.scratch.fill(0xa5);
        let mut cx = ExecContext::cpu(self.threads);
        cx.workspace = Some(TensorViewMut::of(&mut self.scratch[at..], &[len])?);
        f(self.prepared, &mut cx)
    }

    fn forward(&mut self) -> Result<f64> {
        let (p, k, n) = (self.problem, self.problem.weight.k, self.decoder.n());
        let x = IoBuffer::new(p.io, &p.x);
        let mut y = IoBuffer::new(p.io, &vec![f32::NAN; p.m * n]);
        self.call(|w, cx| w.forward(x.view(p.m, k)?, y.view_mut(p.m, n)?, cx))?;
        let y = y.to_f32();
        let input = Input::new(&p.x, k, &p.activations, p.io)?;
        let mut row = vec![0.0; k];
        let mut worst = 0f64;
        for j in 0..n {
            self.decoder.row(j, &mut row);
            for r in 0..p.m {
                let (exact, abs) = input.dot(r, &self.decoder, j, &row);
                if let Some(recorded) = p.recorded.as_ref().map(|y| y[r * n + j])
                    && (recorded - exact).abs() > abs * 1e-6 + 1e-30
                {
                    return Err(Error::new(
                        Code::Internal,
                        format!("{}: the exact product disagrees with the record", p.name),
                    )
                    .need(format!("{recorded:e} at [{r}, {j}]"))
                    .have(format!("{exact:e}")));
                }
                let limit = bound(self.path, p.io, k, exact, abs);
                worst = worst.max(self.judge("y", (r, j), f64::from(y[r * n + j]), exact, limit)?);
            }
        }
        Ok(worst)
    }

    fn backward(&mut self) -> Result<f64> {
        let (p, k, n) = (self.problem, self.problem.weight.k, self.decoder.n());
        let dy: Vec<f32> = (0..p.m * n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect();
        let mut dx = IoBuffer::new(p.io, &vec![f32::NAN; p.m * k]);
        let dy_io = IoBuffer::new(p.io, &dy);
        self.call(|w, cx| w.backward_input(dy_io.view(p.m, n)?, dx.view_mut(p.m, k)?, cx))?;
        let (dx, dy) = (dx.to_f32(), dy_io.to_f32());
        let mut exact = vec![(0f64, 0f64); p.m * k];
        let mut row = vec![0.0; k];
        for j in 0..n {
            self.decoder.row(j, &mut row);
            for r in 0..p.m {
                for (i, w) in row.iter().enumerate() {
                    let product = f64::from(dy[r * n + j]) * f64::from(*w);
                    exact[r * k + i].0 += product;
                    exact[r * k + i].1 += product.abs();
                }
            }
        }
        let mut worst = 0f64;
        for (i, (value, abs)) in exact.iter().enumerate() {
            let limit = bound(self.path, p.io, n.next_multiple_of(16) + 16, *value, *abs);
            worst = worst.max(self.judge("dx", (i / k, i % k), f64::from(dx[i]), *value, limit)?);
        }
        Ok(worst)
    }

    fn decode(&mut self) -> Result<usize> {
        let (k, n) = (self.problem.weight.k, self.decoder.n());
        let mut out = vec![f32::NAN; n * k];
        self.call(|w, cx| w.dequantize(TensorViewMut::of(&mut out, &[n, k])?, cx))?;
        let mut row = vec![0.0; k];
        for j in 0..n {
            self.decoder.row(j, &mut row);
            for (i, (got, want)) in out[j * k..][..k].iter().zip(&row).enumerate() {
                if got.to_bits() != want.to_bits() && !(*got == 0.0 && *want == 0.0) {
                    return Err(Error::new(
                        Code::ConformanceFailed,
                        format!("{}: w[{j}, {i}]", self.problem.name),
                    )
                    .need(format!("{want:e}, bit for bit"))
                    .have(format!("{got:e}")));
                }
            }
        }
        Ok(n * k)
    }

    fn judge(&self, what: &str, at: (usize, usize), got: f64, exact: f64, limit: f64) -> Result<f64> {
        let ratio = (got - exact).abs() / limit;
        if ratio <= 1.0 {
            return Ok(ratio);
        }
        Err(Error::new(Code::ConformanceFailed, format!("{}: {what}[{}, {}]", self.problem.name, at.0, at.1))
            .need(format!("{exact:e} within {limit:e}"))
            .have(format!("{got:e}")))
    }
}
