//! Backends and weights of the checks, and calls of them.
use super::{expect, need};
use crate::calls::checked;
use crate::table::Table;
use half::{bf16, f16};
use q4_core::selfcheck::IoBuffer;
use q4_core::{Code, DType, Device, Error, ExecContext, HostEnv, LinearSpec, Result, TensorView, ThreadPool};
use q4_plugin_abi as abi;
use q4_plugin_abi::{Q4Error, Q4Exec, Q4LinearSpec, Q4Matrix, Q4Status, Q4Str, status};
use q4_plugin_sdk::codes;
use q4_plugin_sdk::lend::{self, LentEnv, LentSpec};
use std::cell::RefCell;
use std::ffi::c_void;
use std::mem::size_of;
use std::ptr::{self, NonNull};

/// A backend of a check.
pub(super) struct Backend<'t> {
    pub table: &'t Table,
    pub(super) raw: *mut abi::Q4Backend,
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

    /// A weight of a product, which `lent` describes.
    pub fn prepare(
        self,
        spec: &LinearSpec,
        lent: &LentSpec<'_>,
        weight: *const abi::Q4Weight,
    ) -> Result<Session<'t>> {
        let prepare = need(self.table.api.prepare, "prepare")?;
        let (pool, mut out) = (ThreadPool::new(1), ptr::null_mut());
        let exec = lend::exec(&mut ExecContext::on(spec.device, 0, &pool))?;
        // SAFETY: a live backend; spec, weight and context outlive the call.
        checked("prepare", |err| unsafe { prepare(self.raw, lent.raw(), weight, &exec, &mut out, err) })
            .map_err(|e| e.1)?;
        expect("prepare", !out.is_null(), "a weight", || "NULL and success".into())?;
        Session::new(self, out, spec)
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

/// Memory that operands lie in: the program's, or that of the library's first device.
enum Place {
    Host(RefCell<Vec<u64>>),
    Device(*mut c_void),
}

/// Where the parts of a place begin.
const ALIGN: usize = 256;

/// A weight of a check, its operands and its scratch.
pub(super) struct Session<'t> {
    pub weight: *mut abi::Q4Prepared,
    backend: Backend<'t>,
    /// Rows of a call, out features and in features.
    pub shape: [usize; 3],
    /// Values of the input, exact in every type.
    pub x: Vec<f32>,
    types: (DType, DType),
    device: Device,
    place: Place,
    /// First bytes of the input, of the output, of the scratch, and of operands side by side.
    starts: [usize; 4],
    scratch: usize,
    pool: ThreadPool,
}

impl<'t> Session<'t> {
    fn new(backend: Backend<'t>, weight: *mut abi::Q4Prepared, spec: &LinearSpec) -> Result<Self> {
        let workspace = need(backend.table.api.workspace, "workspace")?;
        let (m, n, k) = (spec.max_m.min(2), spec.n(), spec.k);
        // SAFETY: a live weight.
        let bytes = unsafe { workspace(weight, m as u64) };
        let fits = bytes < 1 << 30;
        let x: Vec<f32> = (0..m * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 32.0).collect();
        let (input, output) = (m * k * spec.x.size(), m * n * spec.y.size());
        // An output fits into the scratch.
        let scratch = if fits { bytes as usize + ALIGN + output } else { 0 };
        let (mut starts, mut end) = ([0; 4], 0);
        for (start, len) in starts.iter_mut().zip([input, output, scratch, input + output]) {
            *start = end;
            end = (end + len).next_multiple_of(ALIGN);
        }
        let place = match spec.device {
            Device::Cpu => Place::Host(vec![0u64; (end + ALIGN) / 8].into()),
            _ => Place::Device(backend.alloc(end as u64)?),
        };
        let (types, device, pool) = ((spec.x, spec.y), spec.device, ThreadPool::new(3));
        let shape = [m, n, k];
        let out = Self { weight, backend, shape, x, types, device, place, starts, scratch, pool };
        expect("workspace", fits, "less than 1 GiB for a small product", || format!("{bytes} bytes"))?;
        out.put(out.starts[0], &packed(spec.x, &out.x))?;
        out.poison()?;
        Ok(out)
    }

    /// Address of a byte of the place.
    fn address(&self, byte: usize) -> *mut c_void {
        match &self.place {
            Place::Host(words) => {
                let mut words = words.borrow_mut();
                let at = words.as_ptr().align_offset(ALIGN);
                words[at..].as_mut_ptr().wrapping_byte_add(byte).cast()
            }
            Place::Device(at) => at.wrapping_byte_add(byte),
        }
    }

    fn put(&self, byte: usize, bytes: &[u8]) -> Result<()> {
        match self.place {
            // SAFETY: bytes of the place, which nobody else uses now.
            Place::Host(_) => unsafe {
                ptr::copy_nonoverlapping(bytes.as_ptr(), self.address(byte).cast(), bytes.len());
            },
            Place::Device(_) => self.backend.copy_in(self.address(byte), bytes)?,
        }
        Ok(())
    }

    fn get(&self, byte: usize, len: usize) -> Result<Vec<u8>> {
        let mut out = vec![0; len];
        match self.place {
            // SAFETY: as above.
            Place::Host(_) => unsafe {
                ptr::copy_nonoverlapping(self.address(byte).cast(), out.as_mut_ptr(), len);
            },
            Place::Device(_) => {
                self.backend.synchronize()?;
                self.backend.copy_out(&mut out, self.address(byte))?;
            }
        }
        Ok(out)
    }

    fn matrix(&self, byte: usize, dtype: DType, rows: usize, cols: usize) -> Result<Q4Matrix> {
        let bytes = rows * cols * dtype.size();
        let data = NonNull::new(self.address(byte)).ok_or_else(|| Error::new(Code::Internal, "no memory"))?;
        let (shape, strides) = ([rows as i64, cols as i64], [cols as i64, 1]);
        // SAFETY: bytes of the place, for a description of them.
        lend::matrix(&unsafe { TensorView::from_raw(data, bytes, self.device, dtype, &shape, &strides) }?)
    }

    pub fn operands(&self) -> Result<(Q4Matrix, Q4Matrix)> {
        let [m, n, k] = self.shape;
        let x = self.matrix(self.starts[0], self.types.0, m, k)?;
        Ok((x, self.matrix(self.starts[1], self.types.1, m, n)?))
    }

    /// The values of the input, and behind them an output that nobody has written: the address of the first.
    pub fn side_by_side(&self) -> Result<*mut c_void> {
        let [m, n, _] = self.shape;
        let output = packed(self.types.1, &vec![f32::NAN; m * n]);
        self.put(self.starts[3], &[packed(self.types.0, &self.x), output].concat())?;
        Ok(self.address(self.starts[3]))
    }

    /// What was written behind that input.
    pub fn written_beside(&self) -> Result<Vec<f32>> {
        let [m, n, k] = self.shape;
        let first = self.starts[3] + m * k * self.types.0.size();
        Ok(unpacked(self.types.1, &self.get(first, m * n * self.types.1.size())?))
    }

    /// A context with so many threads; `None`: without a function to run them.
    pub fn exec_of(&self, threads: Option<u32>) -> Q4Exec {
        let context = lend::exec(&mut ExecContext::cpu(&self.pool)).ok();
        let (device_type, device_id) = codes::device_to(self.device).unwrap_or((abi::DEVICE_CPU, 0));
        Q4Exec {
            struct_size: size_of::<Q4Exec>(),
            stream: ptr::null_mut(),
            workspace: self.address(self.starts[2]),
            workspace_bytes: self.scratch as u64,
            parallel: context.and_then(|c| c.parallel).filter(|_| threads.is_some()),
            parallel_user: ptr::from_ref(&self.pool).cast_mut().cast(),
            threads: threads.unwrap_or(0),
            device_type,
            device_id,
            reserved: 0,
        }
    }

    /// Nothing that was written before can be taken for an output.
    pub fn poison(&self) -> Result<()> {
        let [m, n, _] = self.shape;
        self.put(self.starts[1], &packed(self.types.1, &vec![f32::NAN; m * n]))
    }

    /// What was written. Each value of 16 bits has an f32 of its own: bits that differ differ here too.
    pub fn written(&self) -> Result<Vec<f32>> {
        let [m, n, _] = self.shape;
        Ok(unpacked(self.types.1, &self.get(self.starts[1], m * n * self.types.1.size())?))
    }

    pub fn forward(&self, exec: &Q4Exec) -> Result<Vec<f32>> {
        self.poison()?;
        let (x, y) = self.operands()?;
        let code = self.call(&x, &y, exec, ptr::null_mut())?;
        expect("forward", code == status::OK, "success", || format!("status {code}"))?;
        self.written()
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
        if let Place::Device(at) = self.place {
            // What is not taken back is missed by the checks of a device.
            let _ = self.backend.free(at);
        }
        if let Some(release) = self.backend.table.api.release {
            // SAFETY: prepared by the same table, released once, before its backend.
            unsafe { release(self.weight) }
        }
    }
}

/// Values as their type has them.
fn packed(dtype: DType, values: &[f32]) -> Vec<u8> {
    match IoBuffer::new(dtype, values) {
        IoBuffer::F32(v) => v.iter().flat_map(|v| v.to_ne_bytes()).collect(),
        IoBuffer::F16(v) => v.iter().flat_map(|v| v.to_bits().to_ne_bytes()).collect(),
        IoBuffer::BF16(v) => v.iter().flat_map(|v| v.to_bits().to_ne_bytes()).collect(),
    }
}

fn unpacked(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.as_chunks::<2>().0.iter().map(|b| u16::from_ne_bytes(*b));
    match dtype {
        DType::F16 => halves().map(|b| f16::from_bits(b).to_f32()).collect(),
        DType::BF16 => halves().map(|b| bf16::from_bits(b).to_f32()).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect(),
    }
}
