//! Backends and weights of the checks, and calls of them.
use super::accepted::Accepted;
use super::{expect, need};
use crate::table::{Table, checked};
use half::{bf16, f16};
use q4_core::selfcheck::IoBuffer;
use q4_core::{ExecContext, HostEnv, Result, ThreadPool};
use q4_plugin_abi as abi;
use q4_plugin_abi::{Q4Error, Q4Exec, Q4LinearSpec, Q4Matrix, Q4Status, Q4Str, status};
use q4_plugin_sdk::lend::{self, LentEnv, LentSpec};
use std::cell::RefCell;
use std::ffi::c_void;
use std::mem::size_of;
use std::ptr;

/// A backend of a check.
pub(super) struct Backend<'t> {
    pub table: &'t Table,
    raw: *mut abi::Q4Backend,
    facts: HostEnv,
}

impl<'t> Backend<'t> {
    pub fn new(table: &'t Table) -> Result<Self> {
        let (create, mut raw) = (need(table.api.create, "create")?, ptr::null_mut());
        // SAFETY: a place for a pointer.
        checked("create", |err| unsafe { create(&mut raw, err) }).map_err(|e| e.1)?;
        expect("create", !raw.is_null(), "a backend", || "NULL and success".into())?;
        Ok(Self { table, raw, facts: HostEnv::collect() })
    }

    /// Status and number of reasons.
    pub fn verdict(&self, spec: *const Q4LinearSpec) -> Result<(Q4Status, usize)> {
        unsafe extern "C" fn count(user: *mut c_void, _: Q4Str, _: Q4Str, _: Q4Str) {
            // SAFETY: what `verdict` passed.
            unsafe { *user.cast::<usize>() += 1 };
        }
        let can_prepare = need(self.table.api.can_prepare, "can_prepare")?;
        let (env, mut reasons) = (LentEnv::new(&self.facts), 0usize);
        let user = (&raw mut reasons).cast();
        // SAFETY: a live backend, structures that state their sizes, and the sink that fits `user`; NULL is
        // allowed.
        let code = unsafe { can_prepare(self.raw, spec, env.raw(), count, user, ptr::null_mut()) };
        Ok((code, reasons))
    }

    /// A weight of the product `accepted`, which `lent` describes.
    pub fn prepare(
        self,
        accepted: &Accepted,
        lent: &LentSpec<'_>,
        weight: *const abi::Q4Weight,
    ) -> Result<Session<'t>> {
        let prepare = need(self.table.api.prepare, "prepare")?;
        let (pool, mut out) = (ThreadPool::new(1), ptr::null_mut());
        let exec = lend::exec(&mut ExecContext::cpu(&pool))?;
        // SAFETY: a live backend; spec, weight and context outlive the call.
        checked("prepare", |err| unsafe { prepare(self.raw, lent.raw(), weight, &exec, &mut out, err) })
            .map_err(|e| e.1)?;
        expect("prepare", !out.is_null(), "a weight", || "NULL and success".into())?;
        Session::new(self, out, accepted)
    }
}

impl Drop for Backend<'_> {
    fn drop(&mut self) {
        if let Some(destroy) = self.table.api.destroy {
            // SAFETY: created by the same table, destroyed once; weights go first.
            unsafe { destroy(self.raw) }
        }
    }
}

/// A weight of a check, its operands and its scratch.
pub(super) struct Session<'t> {
    pub weight: *mut abi::Q4Prepared,
    backend: Backend<'t>,
    /// Rows of a call, out features and in features.
    pub shape: [usize; 3],
    /// Values of the input, exact in every type.
    pub x: Vec<f32>,
    input: IoBuffer,
    output: RefCell<IoBuffer>,
    scratch: RefCell<Vec<u64>>,
    pool: ThreadPool,
}

impl<'t> Session<'t> {
    fn new(backend: Backend<'t>, weight: *mut abi::Q4Prepared, accepted: &Accepted) -> Result<Self> {
        let workspace = need(backend.table.api.workspace, "workspace")?;
        let (m, spec) = (accepted.m(), &accepted.spec);
        let (n, k) = (spec.n(), spec.k);
        // SAFETY: a live weight.
        let bytes = unsafe { workspace(weight, m as u64) };
        let fits = bytes < 1 << 30;
        let x: Vec<f32> = (0..m * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 32.0).collect();
        let out = Self {
            weight,
            backend,
            shape: [m, n, k],
            input: IoBuffer::new(spec.x, &x),
            output: IoBuffer::new(spec.y, &vec![f32::NAN; m * n]).into(),
            x,
            // An output fits in.
            scratch: vec![0u64; if fits { bytes as usize / 8 + 16 + m * n } else { 0 }].into(),
            pool: ThreadPool::new(3),
        };
        expect("workspace", fits, "less than 1 GiB for a small product", || format!("{bytes} bytes"))
            .map(|()| out)
    }

    pub fn operands(&self) -> Result<(Q4Matrix, Q4Matrix)> {
        let [m, n, k] = self.shape;
        let x = lend::matrix(&self.input.view(m, k)?)?;
        Ok((x, lend::matrix_mut(&mut self.output.borrow_mut().view_mut(m, n)?)?))
    }

    /// A context with so many threads; `None`: without a function to run them.
    pub fn exec_of(&self, threads: Option<u32>) -> Q4Exec {
        let mut scratch = self.scratch.borrow_mut();
        let at = scratch.as_ptr().align_offset(64);
        let bytes = (scratch.len() - at) * 8;
        let context = lend::exec(&mut ExecContext::cpu(&self.pool)).ok();
        Q4Exec {
            struct_size: size_of::<Q4Exec>(),
            stream: ptr::null_mut(),
            workspace: scratch[at..].as_mut_ptr().cast(),
            workspace_bytes: bytes as u64,
            parallel: context.and_then(|c| c.parallel).filter(|_| threads.is_some()),
            parallel_user: ptr::from_ref(&self.pool).cast_mut().cast(),
            threads: threads.unwrap_or(0),
            device_type: abi::DEVICE_CPU,
            device_id: 0,
            reserved: 0,
        }
    }

    /// Nothing that was written before can be taken for an output.
    pub fn poison(&self) {
        match &mut *self.output.borrow_mut() {
            IoBuffer::F32(y) => y.fill(f32::NAN),
            IoBuffer::F16(y) => y.fill(f16::NAN),
            IoBuffer::BF16(y) => y.fill(bf16::NAN),
        }
    }

    /// What was written. Each value of 16 bits has an f32 of its own: bits that differ differ here too.
    pub fn written(&self) -> Vec<f32> {
        self.output.borrow().to_f32()
    }

    pub fn forward(&self, exec: &Q4Exec) -> Result<Vec<f32>> {
        self.poison();
        let (x, y) = self.operands()?;
        let code = self.call(&x, &y, exec, ptr::null_mut())?;
        expect("forward", code == status::OK, "success", || format!("status {code}"))?;
        Ok(self.written())
    }

    pub fn call(
        &self,
        x: *const Q4Matrix,
        y: *const Q4Matrix,
        exec: *const Q4Exec,
        err: *mut Q4Error,
    ) -> Result<Q4Status> {
        let forward = need(self.backend.table.api.forward, "forward")?;
        // SAFETY: a live weight; operands and scratch are buffers of this run, and the structures state their
        // sizes.
        Ok(unsafe { forward(self.weight, x, y, exec, err) })
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if let Some(release) = self.backend.table.api.release {
            // SAFETY: prepared by the same table, released once, before its backend.
            unsafe { release(self.weight) }
        }
    }
}
