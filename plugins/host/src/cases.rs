//! Checks of a table that only its loader can make, for level L0 of a conformance run: structures of other
//! sizes, numbers that do not exist yet, buffers that are too small. Each is what an older or a newer program
//! would do.
mod accepted;
mod device;
mod session;
mod stored;

use crate::calls::checked;
use crate::library::Query;
use crate::table::Table;
use accepted::Accepted;
use q4_core::{Code, Device, Error, LinearSpec, Q4Weight, Result};
use q4_plugin_abi as abi;
use q4_plugin_abi::{
    ABI_MAJOR, INTERFACE_BACKEND, Q4Error, Q4Interface, Q4LinearSpec, Q4Matrix, Q4PreparedInfo, Q4Status,
    status,
};
use q4_plugin_sdk::lend::{LentSpec, LentWeight};
use session::{Backend, Session};
use std::ffi::c_void;
use std::mem::size_of;
use std::ptr;
use stored::Stored;

/// The checks of one library. They make backends and weights of their own; run them where a crash is no
/// disaster.
#[derive(Clone)]
pub struct TableCases {
    table: Table,
    query: Query,
}

type Check = fn(&TableCases) -> Result<()>;
type Edit = fn(&mut Q4LinearSpec);

const CASES: [(&str, Check); 13] = [
    ("query-of-an-unknown-major", |t| t.no_interface(ABI_MAJOR + 1, INTERFACE_BACKEND)),
    ("query-of-an-unknown-interface", |t| t.no_interface(ABI_MAJOR, u32::MAX)),
    ("query-repeats", TableCases::query_repeats),
    ("two-backends", TableCases::two_backends),
    ("longer-spec", TableCases::longer_spec),
    ("shorter-spec", TableCases::shorter_spec),
    ("unknown-numbers", TableCases::unknown_numbers),
    ("error-buffers", TableCases::error_buffers),
    ("longer-segments", TableCases::longer_segments),
    ("longer-info", TableCases::longer_info),
    ("longer-operands", TableCases::longer_operands),
    ("overlapping-operands", TableCases::overlapping_operands),
    ("no-threads", TableCases::no_threads),
];

/// A structure as a newer program has it: its size says more than the library knows, and there is something
/// there.
#[repr(C)]
#[derive(Clone, Copy)]
struct Newer<T> {
    known: T,
    later: [u64; 8],
}

impl<T> Newer<T> {
    const GARBAGE: [u64; 8] = [0xa5a5_a5a5_a5a5_a5a5; 8];
    fn of(known: T) -> Self {
        Self { known, later: Self::GARBAGE }
    }
}

impl TableCases {
    pub(crate) fn new(table: Table, query: Query) -> Self {
        Self { table, query }
    }

    /// Names of the checks, stable and unique: those of every library, and those of one that has devices of
    /// its own.
    pub fn names(has_devices: bool) -> Vec<String> {
        let own = device::CASES.iter().filter(|_| has_devices);
        CASES.iter().chain(own).map(|(name, _)| (*name).to_owned()).collect()
    }

    /// Those of this one.
    pub fn cases(&self) -> Vec<String> {
        Self::names(Backend::new(&self.table).is_ok_and(|b| b.has_device()))
    }

    /// Runs one. The error says what is wrong.
    pub fn run(&self, case: &str) -> Result<()> {
        match CASES.iter().chain(&device::CASES).find(|(name, _)| *name == case) {
            Some((_, check)) => check(self),
            None => Err(Error::new(Code::Usage, format!("no check of a table is named `{case}`"))),
        }
    }

    fn no_interface(&self, major: u32, id: u32) -> Result<()> {
        let (code, _) = self.ask(major, id);
        expect("query", code == status::ABI, "Q4_E_ABI", || format!("status {code}"))
    }

    fn query_repeats(&self) -> Result<()> {
        let (first, again) = (self.ask(ABI_MAJOR, INTERFACE_BACKEND), self.ask(ABI_MAJOR, INTERFACE_BACKEND));
        expect("query", first.0 == status::OK && first == again, "the same table twice", || {
            format!("status {} and {:p}, then status {} and {:p}", first.0, first.1, again.0, again.1)
        })
    }

    fn two_backends(&self) -> Result<()> {
        let (first, second) = (self.session()?, self.session()?);
        let before = second.forward(&second.exec_of(Some(1)))?;
        drop(first);
        let after = second.forward(&second.exec_of(Some(1)))?;
        same("a product after another backend was destroyed", &before, &after)
    }

    fn longer_spec(&self) -> Result<()> {
        let Accepted { spec: served, path } = self.accepted()?;
        // No path of any schema is on all devices.
        let refused = LinearSpec { device: Device::Cuda(u32::MAX), ..served.clone() };
        for spec in [served, refused] {
            let lent = LentSpec::new(&spec, path)?;
            let mut newer = Newer::of(*lent.raw());
            newer.known.struct_size = size_of_val(&newer);
            let (exact, longer) = (self.verdict(lent.raw())?, self.verdict((&raw const newer).cast())?);
            let words = |(code, reasons): (Q4Status, usize)| format!("status {code} with {reasons} reasons");
            expect("verdict on a longer spec", exact == longer, &words(exact), || words(longer))?;
        }
        Ok(())
    }

    fn shorter_spec(&self) -> Result<()> {
        let Accepted { spec, path } = self.accepted()?;
        let lent = LentSpec::new(&spec, path)?;
        let mut raw = *lent.raw();
        raw.struct_size = size_of::<usize>() * 4;
        let (code, _) = self.verdict(&raw)?;
        expect("verdict on a spec shorter than its first version", code != status::OK, "an error", || {
            "consent".into()
        })
    }

    fn unknown_numbers(&self) -> Result<()> {
        let edits: [(&str, Edit); 6] = [
            ("schema", |s| s.schema = 999),
            ("schema revision", |s| s.schema_revision = 999),
            ("path", |s| s.path = 999),
            ("activations", |s| s.activations = 999),
            ("x_dtype", |s| s.x_dtype = 999),
            ("device_type", |s| s.device_type = 999),
        ];
        let Accepted { spec, path } = self.accepted()?;
        let lent = LentSpec::new(&spec, path)?;
        for (what, edit) in edits {
            let mut raw = *lent.raw();
            edit(&mut raw);
            let (code, _) = self.verdict(&raw)?;
            expect(&format!("verdict on an unknown {what}"), code != status::OK, "a refusal", || {
                "consent".into()
            })?;
        }
        Ok(())
    }

    /// The whole length is told, nothing is written past `cap`, and no buffer at all is allowed.
    fn error_buffers(&self) -> Result<()> {
        let session = self.session()?;
        let (mut x, y) = session.operands()?;
        x.cols += 1;
        let exec = session.exec_of(Some(1));
        let fails = |cap: usize| -> Result<(Vec<u8>, usize)> {
            let mut room = vec![0xeeu8; 4096];
            let mut err = Q4Error {
                struct_size: size_of::<Q4Error>(),
                ptr: room.as_mut_ptr(),
                cap,
                len: 0,
                native_code: 0,
            };
            let code = session.call(&x, &y, &exec, &mut err)?;
            expect("a product of operands that do not fit", code != status::OK, "an error", || {
                "success".into()
            })?;
            Ok((room, err.len))
        };
        let ((long, full), (short, told)) = (fails(4096)?, fails(3)?);
        let need = format!("{full} bytes told, at most 3 written");
        let shown = String::from_utf8_lossy(&short[..8]).into_owned();
        let fits =
            full > 0 && told == full && short[3..].iter().all(|b| *b == 0xee) && long[..2] == short[..2];
        expect("text of an error in 3 bytes", fits, &need, || {
            format!("{told} told, `{shown}` in the buffer")
        })?;
        let code = session.call(&x, &y, &exec, ptr::null_mut())?;
        expect("an error without a buffer", code != status::OK, "an error", || "success".into())
    }

    fn longer_segments(&self) -> Result<()> {
        let accepted = self.accepted()?;
        let exact = self.session_of(&accepted)?;
        let stored = Stored::new(&accepted.spec)?;
        let segments = stored.segments()?;
        let w = Q4Weight { schema: accepted.spec.schema, k: accepted.spec.k, segments: &segments };
        let (lent, weight) = (LentSpec::new(&accepted.spec, accepted.path)?, LentWeight::new(&w)?);
        // SAFETY: a lent weight has the segments of its spec.
        let lent_segments = unsafe { std::slice::from_raw_parts(weight.raw().segments, segments.len()) };
        let mut longer: Vec<_> = lent_segments.iter().map(|s| Newer::of(*s)).collect();
        longer.iter_mut().for_each(|s| s.known.struct_size = size_of_val(s));
        let mut newer = Newer::of(*weight.raw());
        newer.known.struct_size = size_of_val(&newer);
        newer.known.segments = longer.as_ptr().cast();
        let longer = Backend::new(&self.table)?.prepare(&accepted.spec, &lent, (&raw const newer).cast())?;
        let (exact, longer) =
            (exact.forward(&exact.exec_of(Some(1)))?, longer.forward(&longer.exec_of(Some(1)))?);
        same("a product of a longer weight", &exact, &longer)
    }

    fn longer_info(&self) -> Result<()> {
        let session = self.session()?;
        // SAFETY: all-zero bytes are a valid value.
        let mut newer = Newer::of(unsafe { std::mem::zeroed::<Q4PreparedInfo>() });
        newer.known.struct_size = size_of_val(&newer);
        let info = need(self.table.api.info, "info")?;
        // SAFETY: a live weight, and a structure that states its size.
        checked("info", |err| unsafe { info(session.weight, (&raw mut newer).cast(), err) })
            .map_err(|e| e.1)?;
        let kept = newer.later == Newer::<()>::GARBAGE && newer.known.struct_size == size_of_val(&newer);
        expect("info of a longer structure", kept, "nothing written past what is known", || {
            "something was".into()
        })?;
        let n = session.shape[1];
        expect("info", newer.known.n == n as u64, &format!("n = {n}"), || format!("n = {}", newer.known.n))
    }

    fn longer_operands(&self) -> Result<()> {
        let session = self.session()?;
        let exact = session.forward(&session.exec_of(Some(1)))?;
        session.poison()?;
        let operands = session.operands()?;
        let (mut x, mut y) = (Newer::of(operands.0), Newer::of(operands.1));
        let mut exec = Newer::of(session.exec_of(Some(1)));
        x.known.struct_size = size_of_val(&x);
        y.known.struct_size = size_of_val(&y);
        exec.known.struct_size = size_of_val(&exec);
        let (x, y, exec) = ((&raw const x).cast(), (&raw const y).cast(), (&raw const exec).cast());
        let code = session.call(x, y, exec, ptr::null_mut())?;
        expect("a product of longer structures", code == status::OK, "success", || format!("status {code}"))?;
        same("a product of longer structures", &exact, &session.written()?)
    }

    /// Operands that share bytes are refused; those that only touch are not.
    fn overlapping_operands(&self) -> Result<()> {
        let accepted = self.accepted()?;
        let session = self.session_of(&accepted)?;
        let exec = session.exec_of(Some(1));
        let exact = session.forward(&exec)?;
        let (x, y) = session.operands()?;
        let (input, output) = (session.x.len(), exact.len());
        let first = session.side_by_side()?;
        let at = |m: Q4Matrix, element: usize| Q4Matrix {
            data: first.wrapping_byte_add(element * accepted.spec.x.size()),
            ..m
        };
        let code = session.call(&at(x, 0), &at(y, input), &exec, ptr::null_mut())?;
        expect("a product of operands that touch", code == status::OK, "success", || {
            format!("status {code}")
        })?;
        same("a product of operands that touch", &exact, &session.written_beside()?)?;
        let inside = Q4Matrix { data: exec.workspace, ..y };
        for (what, x, y) in [
            ("the same memory", at(x, 0), at(y, 0)),
            ("one element in common", at(x, 0), at(y, input - 1)),
            ("one element in common, the output first", at(x, output - 1), at(y, 0)),
            ("an output in the workspace", x, inside),
        ] {
            let code = session.call(&x, &y, &exec, ptr::null_mut())?;
            expect(&format!("a product with {what}"), code != status::OK, "an error", || "success".into())?;
        }
        Ok(())
    }

    fn no_threads(&self) -> Result<()> {
        let session = self.session()?;
        let (lent, none) =
            (session.forward(&session.exec_of(Some(3)))?, session.forward(&session.exec_of(None))?);
        same("a product without threads", &lent, &none)
    }

    fn ask(&self, major: u32, id: u32) -> (Q4Status, *const c_void) {
        let mut out = Q4Interface {
            struct_size: size_of::<Q4Interface>(),
            abi_minor: abi::ABI_MINOR,
            reserved: 0,
            table: ptr::null(),
        };
        ((self.query)(major, id, &mut out), out.table)
    }

    /// Status and number of reasons.
    fn verdict(&self, spec: *const Q4LinearSpec) -> Result<(Q4Status, usize)> {
        Backend::new(&self.table)?.verdict(spec)
    }

    fn accepted(&self) -> Result<Accepted> {
        Accepted::find(&Backend::new(&self.table)?)
    }

    fn session(&self) -> Result<Session<'_>> {
        self.session_of(&self.accepted()?)
    }

    fn session_of(&self, accepted: &Accepted) -> Result<Session<'_>> {
        let stored = Stored::new(&accepted.spec)?;
        let segments = stored.segments()?;
        let w = Q4Weight { schema: accepted.spec.schema, k: accepted.spec.k, segments: &segments };
        let (lent, weight) = (LentSpec::new(&accepted.spec, accepted.path)?, LentWeight::new(&w)?);
        Backend::new(&self.table)?.prepare(&accepted.spec, &lent, weight.raw())
    }
}

fn need<F>(entry: Option<F>, name: &str) -> Result<F> {
    entry.ok_or_else(|| Error::new(Code::Internal, format!("a table without `{name}` was adopted")))
}

fn expect(what: &str, holds: bool, need: &str, have: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::new(Code::ConformanceFailed, what).need(need).have(have())) }
}

fn same(what: &str, a: &[f32], b: &[f32]) -> Result<()> {
    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let first = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
    expect(what, bits(a) == bits(b) && !a.iter().any(|v| v.is_nan()), "the same bits, all written", || {
        first.map_or_else(
            || "outputs that were not written".into(),
            |i| format!("y[{i}]: {:e} and {:e}", a[i], b[i]),
        )
    })
}
