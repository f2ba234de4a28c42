//! What the tests share: the C table as Rust calls, random operands, and a pool of threads behind the C
//! signature.
#![allow(dead_code)] // each test file uses a part
use NVFP4::abi;
use half::{bf16, f16};
use q4_core::formats::nvfp4;
use q4_core::{Convention, DType, GlobalScale};
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

pub const ISAS: [&str; 8] =
    ["portable", "avx2", "avx512", "avx512vnni", "amx", "neon", "neondotprod", "neoni8mm"];

pub fn api() -> &'static abi::Api {
    // SAFETY: NULL is allowed; the table is static.
    unsafe { NVFP4::nvfp4_get_api(abi::ABI_MAJOR, ptr::null_mut()).as_ref() }.expect("ABI 1")
}

#[derive(Debug, PartialEq)]
pub struct Failure {
    pub status: abi::Status,
    pub text: String,
}

/// Calls an entry with an error buffer.
pub fn call(f: impl FnOnce(*mut abi::Error) -> abi::Status) -> Result<(), Failure> {
    let mut buffer = [0 as c_char; 4096];
    let mut e = abi::Error {
        struct_size: size_of::<abi::Error>(),
        ptr: buffer.as_mut_ptr(),
        cap: buffer.len(),
        len: 7,
        native_code: 7,
    };
    let status = f(&mut e);
    // SAFETY: the entry ends its text with NUL.
    let text = unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_str().expect("UTF-8").to_owned();
    assert_eq!((e.len, e.native_code), (text.len(), 0), "{text}");
    assert_eq!(status == abi::OK, text.is_empty(), "{status}: {text}");
    if status == abi::OK { Ok(()) } else { Err(Failure { status, text }) }
}

/// Reasons by code, need, have.
pub type Reasons = Vec<[String; 3]>;

pub unsafe extern "C" fn collect(
    user: *mut c_void,
    code: *const c_char,
    need: *const c_char,
    have: *const c_char,
) {
    // SAFETY: `user` is the Vec the test passed; the texts are NUL-terminated.
    unsafe {
        let all = &mut *user.cast::<Reasons>();
        all.push([code, need, have].map(|s| CStr::from_ptr(s).to_str().expect("UTF-8").to_owned()));
    }
}

pub struct Ctx(pub *mut abi::Ctx);

impl Ctx {
    pub fn new(isa: &str) -> Self {
        let name = CString::new(isa).expect("no NUL");
        let desc = abi::CtxDesc { isa: name.as_ptr(), ..ctx_desc() };
        let mut c = ptr::null_mut();
        let create = api().ctx_create.expect("entry");
        // SAFETY: valid arguments.
        call(|e| unsafe { create(&desc, &mut c, None, ptr::null_mut(), e) }).expect("an available isa");
        Self(c)
    }
    /// One for every instruction set of this machine.
    pub fn all() -> Vec<(String, Self)> {
        available().into_iter().map(|isa| (isa.clone(), Self::new(&isa))).collect()
    }
}

impl Drop for Ctx {
    fn drop(&mut self) {
        // SAFETY: made by `ctx_create`.
        unsafe { api().ctx_destroy.expect("entry")(self.0) }
    }
}

pub fn ctx_desc() -> abi::CtxDesc {
    abi::CtxDesc {
        struct_size: size_of::<abi::CtxDesc>(),
        device_type: abi::DEVICE_CPU,
        device: 0,
        flags: 0,
        reserved: 0,
        isa: ptr::null(),
    }
}

pub fn available() -> Vec<String> {
    let portable = Ctx::new("portable");
    // SAFETY: all-zero is a valid value of this struct.
    let mut info: abi::DeviceInfo = unsafe { std::mem::zeroed() };
    info.struct_size = size_of_val(&info);
    // SAFETY: valid arguments.
    call(|e| unsafe { api().device_info.expect("entry")(portable.0, &mut info, e) }).expect("device_info");
    // SAFETY: NUL-terminated by the library.
    let list = unsafe { CStr::from_ptr(info.isa_available.as_ptr()) }.to_str().expect("UTF-8").to_owned();
    assert!(list.split(',').all(|isa| ISAS.contains(&isa)), "{list}");
    list.split(',').map(str::to_owned).collect()
}

/// One quantised matrix.
#[derive(Clone)]
pub struct Source {
    pub rows: usize,
    pub k: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub layout: u32,
    pub global: Option<GlobalScale>,
}

impl Source {
    pub fn random(rows: usize, k: usize, global: Option<GlobalScale>, rng: &mut Rng) -> Self {
        let codes = (0..rows * k / 2).map(|_| rng.next() as u8).collect();
        let scales = (0..rows * k / 16).map(|_| 0x20 + (rng.next() % 0x28) as u8).collect();
        Self { rows, k, codes, scales, layout: abi::SCALE_ROW_MAJOR, global }
    }
    pub fn segment(&self) -> abi::Segment {
        abi::Segment {
            struct_size: size_of::<abi::Segment>(),
            rows: self.rows as u64,
            codes: self.codes.as_ptr().cast(),
            codes_bytes: self.codes.len() as u64,
            scales: self.scales.as_ptr().cast(),
            scales_bytes: self.scales.len() as u64,
            global_scale: self.global.map_or(0.0, GlobalScale::value),
            global_convention: convention(self.global),
            scale_layout: self.layout,
            reserved: 0,
        }
    }
    /// The definition of its values.
    pub fn values(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.k];
        for (r, out) in out.chunks_exact_mut(self.k).enumerate() {
            let (c, s) = (self.k / 2, self.k / 16);
            nvfp4::dequantize_row(&self.codes[r * c..][..c], &self.scales[r * s..][..s], self.global, out);
        }
        out
    }
}

pub fn convention(g: Option<GlobalScale>) -> u32 {
    match g.map(GlobalScale::convention) {
        None => abi::CONVENTION_NONE,
        Some(Convention::Multiply) => abi::CONVENTION_MULTIPLY,
        Some(Convention::Divide) => abi::CONVENTION_DIVIDE,
    }
}

pub fn weight_desc(segments: &[abi::Segment], k: usize) -> abi::WeightDesc {
    abi::WeightDesc {
        struct_size: size_of::<abi::WeightDesc>(),
        n: segments.iter().map(|s| s.rows).sum(),
        k: k as u64,
        segments: segments.as_ptr(),
        n_segments: segments.len() as u64,
        path: abi::PATH_FUSED_DEQUANT,
        activations: abi::ACT_NATIVE,
        x_dtype: abi::F32,
        y_dtype: abi::F32,
        act_rule: 0,
        act_global_kind: 0,
        act_global: 0.0,
        act_global_convention: 0,
        max_m: 64,
        reserved: 0,
    }
}

pub struct Weight(pub *mut abi::Weight);

impl Weight {
    pub fn new(ctx: &Ctx, desc: &abi::WeightDesc) -> Result<Self, Failure> {
        Self::with(ctx, desc, &Lent::serial())
    }
    pub fn with(ctx: &Ctx, desc: &abi::WeightDesc, lent: &Lent) -> Result<Self, Failure> {
        let mut w = ptr::null_mut();
        let exec = lent.exec(&mut []);
        // SAFETY: the description's pointers are those of live operands.
        call(|e| unsafe { api().prepare.expect("entry")(ctx.0, desc, &exec, &mut w, e) }).map(|()| Self(w))
    }
    pub fn workspace(&self, m: usize) -> usize {
        // SAFETY: a live weight.
        unsafe { api().workspace.expect("entry")(self.0, m as u64) as usize }
    }
    pub fn forward(&self, x: &Matrix, y: &mut Matrix, lent: &Lent) -> Result<(), Failure> {
        let mut scratch = Scratch::new(self.workspace(x.rows));
        let exec = lent.exec(scratch.bytes());
        let (x, y) = (x.raw(), y.raw());
        // SAFETY: live operands of the stated sizes.
        call(|e| unsafe { api().forward.expect("entry")(self.0, &x, &y, &exec, e) })
    }
    pub fn backward(&self, dy: &Matrix, dx: &mut Matrix, lent: &Lent) -> Result<(), Failure> {
        let mut scratch = Scratch::new(self.workspace(dy.rows));
        let exec = lent.exec(scratch.bytes());
        let (dy, dx) = (dy.raw(), dx.raw());
        // SAFETY: live operands of the stated sizes.
        call(|e| unsafe { api().backward_input.expect("entry")(self.0, &dy, &dx, &exec, e) })
    }
    pub fn dequantize(&self, out: &mut Matrix, lent: &Lent) -> Result<(), Failure> {
        let (out, exec) = (out.raw(), lent.exec(&mut []));
        // SAFETY: live operands of the stated sizes.
        call(|e| unsafe { api().dequantize.expect("entry")(self.0, &out, &exec, e) })
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        // SAFETY: made by `prepare`.
        unsafe { api().release.expect("entry")(self.0) }
    }
}

/// A matrix of any element type whose gaps hold a pattern.
#[derive(Clone)]
pub struct Matrix {
    pub bytes: Vec<u8>,
    pub rows: usize,
    pub cols: usize,
    pub ld: usize,
    pub dtype: DType,
}

/// NaN in every element type.
pub const POISON: u8 = 0xff;

impl Matrix {
    pub fn blank(rows: usize, cols: usize, ld: usize, dtype: DType) -> Self {
        // A Vec of u64 would align better than needed; the allocator gives 16 bytes for these sizes anyway.
        Self { bytes: vec![POISON; ((rows - 1) * ld + cols) * dtype.size()], rows, cols, ld, dtype }
    }
    /// Rounds `values` to `dtype`.
    pub fn of(values: &[f32], rows: usize, ld: usize, dtype: DType) -> Self {
        let cols = values.len() / rows;
        let mut m = Self::blank(rows, cols, ld, dtype);
        for r in 0..rows {
            for c in 0..cols {
                let v = values[r * cols + c];
                let at = (r * ld + c) * dtype.size();
                match dtype {
                    DType::F16 => m.bytes[at..at + 2].copy_from_slice(&f16::from_f32(v).to_le_bytes()),
                    DType::BF16 => m.bytes[at..at + 2].copy_from_slice(&bf16::from_f32(v).to_le_bytes()),
                    _ => m.bytes[at..at + 4].copy_from_slice(&v.to_le_bytes()),
                }
            }
        }
        m
    }
    pub fn raw(&self) -> abi::Matrix {
        abi::Matrix {
            struct_size: size_of::<abi::Matrix>(),
            data: self.bytes.as_ptr().cast_mut().cast(),
            bytes: self.bytes.len() as u64,
            rows: self.rows as u64,
            cols: self.cols as u64,
            ld: self.ld as u64,
            dtype: dtype_code(self.dtype),
            reserved: 0,
        }
    }
    pub fn get(&self, r: usize, c: usize) -> f32 {
        let at = (r * self.ld + c) * self.dtype.size();
        let b = &self.bytes[at..];
        match self.dtype {
            DType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
            DType::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            _ => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        }
    }
    pub fn values(&self) -> Vec<f32> {
        (0..self.rows)
            .flat_map(|r| (0..self.cols).map(move |c| (r, c)))
            .map(|(r, c)| self.get(r, c))
            .collect()
    }
    pub fn gaps_are_untouched(&self) -> bool {
        let size = self.dtype.size();
        (0..self.rows - 1).all(|r| {
            self.bytes[(r * self.ld + self.cols) * size..(r + 1) * self.ld * size]
                .iter()
                .all(|&b| b == POISON)
        })
    }
}

pub fn dtype_code(d: DType) -> u32 {
    match d {
        DType::F16 => abi::F16,
        DType::BF16 => abi::BF16,
        _ => abi::F32,
    }
}

/// 64-byte aligned bytes, poisoned.
pub struct Scratch(Vec<[u8; 64]>, usize);

impl Scratch {
    pub fn new(bytes: usize) -> Self {
        Self(vec![[POISON; 64]; bytes / 64 + 2], bytes)
    }
    pub fn bytes(&mut self) -> &mut [u8] {
        let pad = self.0.as_ptr().cast::<u8>().align_offset(64);
        &mut self.0.as_flattened_mut()[pad..pad + self.1]
    }
}

/// Threads lent to a call.
pub struct Lent(u32);

impl Lent {
    pub fn serial() -> Self {
        Self(1)
    }
    pub fn threads(n: u32) -> Self {
        Self(n)
    }
    pub fn exec(&self, scratch: &mut [u8]) -> abi::Exec {
        abi::Exec {
            struct_size: size_of::<abi::Exec>(),
            stream: ptr::null_mut(),
            workspace: if scratch.is_empty() { ptr::null_mut() } else { scratch.as_mut_ptr().cast() },
            workspace_bytes: scratch.len() as u64,
            parallel: (self.0 > 1).then_some(scoped),
            parallel_user: ptr::without_provenance_mut(self.0 as usize),
            threads: self.0,
            reserved: 0,
        }
    }
}

/// Runs the tasks on `user` threads, last task first.
pub unsafe extern "C" fn scoped(user: *mut c_void, tasks: usize, body: abi::TaskFn, arg: *mut c_void) {
    let left = AtomicUsize::new(tasks);
    let arg = arg.expose_provenance();
    std::thread::scope(|s| {
        for _ in 0..user.addr() {
            s.spawn(|| {
                while let Ok(n) =
                    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
                {
                    // SAFETY: the library's own body and argument, which live until we return.
                    unsafe { body(ptr::with_exposed_provenance_mut(arg), n - 1) };
                }
            });
        }
    });
}

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    /// Uniform in -1 to 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit() * self.unit().exp2()).collect()
    }
}
