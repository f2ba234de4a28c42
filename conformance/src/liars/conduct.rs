//! Mutants whose numbers may be right: what they say, keep, refuse, depend on, or do to the process is not.
use super::Mutant;
use super::parts::{HONEST, Parts, check};
use crate::Level::{L0, L2, L4, L5};
use q4_core::formats::e4m3;
use q4_core::{Code, Error, ExecPath, OpSet, TensorViewMut};
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(super) const MUTANTS: &[Mutant] = mutants! {
    HONEST;
    L0 "refuses-without-a-reason": "the list of reasons is empty" {
        verdict: |_, _, verdict, _| verdict.map_err(|_| Vec::new()),
    }
    L0 "offers-twice": "one offer is listed twice" { descriptor: |d| d.offers.push(d.offers[0].clone()) }
    L0 "invents-a-format": "an encoding that does not exist is offered" {
        descriptor: |d| d.offers.push(("fp3".into(), ExecPath::FusedDequant)),
    }
    L0 "has-no-name": "the name is empty" { descriptor: |d| d.name = "".into() }
    L0 "verdicts-change": "every third answer is another one" {
        verdict: |_, _, verdict, asked| match verdict {
            Err(reasons) if asked % 3 == 2 => Err(reasons.into_iter().rev().chain([extra()]).collect()),
            other => other,
        },
    }
    L4 "computes-what-it-refuses": "prepare serves shapes that can_prepare refuses" {
        verdict: |spec, _, verdict, _| if spec.n() % 2 == 1 { Err(vec![extra()]) } else { verdict },
        obeys: false,
    }
    L4 "refuses-what-it-claims": "prepare fails on shapes that can_prepare agrees to" {
        prepared: |kept| {
            if kept.info.n == 63 {
                Err(Error::new(Code::Unsupported, "n").need("another").have("63"))
            } else {
                Ok(())
            }
        },
    }
    L4 "agrees-to-everything": "can_prepare never says no" { verdict: |_, _, _, _| Ok(()) }
    L4 "serves-another-path": "any path is prepared, and always as the same one" {
        verdict: |spec, _, _, _| (HONEST.verdict)(spec, ExecPath::FusedDequant, Ok(()), 0),
        obeys: false,
    }
    L4 "takes-any-type": "f32 operands of another type are read as their bytes come" {
        check: |input, output| match (input.0.dtype() == input.1, output.0.dtype() == output.1) {
            (true, true) => check(input, output),
            _ => check(
                (input.0, input.0.dtype(), input.2, input.3),
                (output.0, output.0.dtype(), output.2, output.3),
            ),
        },
    }
    L4 "takes-any-shape": "an output with too few columns is filled as far as it goes" {
        check: |input, output| check(input, (output.0, output.1, output.2, output.0.shape()[1] as usize)),
    }
    L4 "clears-before-it-looks": "y is cleared before the operands are checked" {
        before: |_, y| {
            clear(y);
            Ok(())
        },
    }
    L4 "nan-scale-is-zero": "a block scale that is NaN counts as zero" {
        e4m3: |byte| if e4m3::is_nan(byte) { 0.0 } else { e4m3::decode(byte) },
    }
    L5 "hides-a-dense-copy": "a decoded copy is kept and not accounted for" {
        prepared: |kept| {
            kept.hoard = kept.dense();
            Ok(())
        },
    }
    L5 "makes-a-dense-copy": "every call decodes the whole matrix first" {
        before: |kept, _| {
            std::hint::black_box(kept.dense());
            Ok(())
        },
    }
    L5 "admits-a-dense-copy": "the bytes it keeps are those of a dense matrix, on a fused path" {
        prepared: |kept| {
            kept.info.resident_bytes = (4 * kept.info.n * kept.info.k) as u64;
            Ok(())
        },
    }
    L5 "understates-its-size": "resident_bytes is a constant" {
        prepared: |kept| {
            kept.info.resident_bytes = 64;
            Ok(())
        },
    }
    L5 "falls-through": "the plan says fused, info() says dense" {
        prepared: |kept| {
            kept.info.path = ExecPath::DequantMatmul;
            Ok(())
        },
    }
    L5 "reports-other-activations": "info() states another activation format" {
        prepared: |kept| {
            kept.info.activations = q4_core::Activations::Int8;
            Ok(())
        },
    }
    L5 "reports-another-name": "info() names another backend" {
        prepared: |kept| {
            kept.info.backend = "nvfp4-kernel".into();
            Ok(())
        },
    }
    L5 "forgets-an-operation": "info() has no operation at all" {
        prepared: |kept| {
            kept.info.ops = OpSet(0);
            Ok(())
        },
    }
    L5 "depends-on-threads": "more than one thread sums in another order" {
        unsteady: |_, call| call.threads > 1,
    }
    L5 "depends-on-alignment": "operands off a 64-byte boundary are summed in another order" {
        unsteady: |_, call| call.x.as_ptr() as usize % 64 != 0,
    }
    L5 "depends-on-stride": "strided rows are summed in another order" {
        unsteady: |_, call| call.y.strides()[0] != call.y.shape()[1],
    }
    L5 "depends-on-scratch": "what the workspace held decides the order of a sum" {
        unsteady: |_, call| call.scratch == 0xff,
    }
    L5 "depends-on-the-call-before": "a call after one with other rows is summed in another order" {
        unsteady: |kept, call| {
            let rows = call.x.shape()[0] as u64;
            let last = kept.last.swap(rows, Ordering::Relaxed);
            last != 0 && last != rows
        },
    }
    L5 "shares-a-buffer": "all calls of a weight share one scratch buffer" {
        stage: |kept, x| {
            *kept.shared.lock().unwrap_or_else(|e| e.into_inner()) = x;
            std::thread::sleep(Duration::from_micros(300));
            kept.shared.lock().unwrap_or_else(|e| e.into_inner()).clone()
        },
    }
    L5 "verdict-wears-off": "after a hundred questions the answer is no" {
        verdict: |_, _, verdict, asked| if asked > 400 { Err(vec![extra()]) } else { verdict },
    }
    L5 "leaks": "a page stays behind with every weight" {
        prepared: |_| {
            std::mem::forget(std::hint::black_box(vec![1u8; 4096]));
            Ok(())
        },
    }
    L2 "races-when-large": "every other call of a large product sums in another order" {
        unsteady: |kept, call| {
            call.y.shape()[1] >= 512 && kept.last.fetch_add(1, Ordering::Relaxed) % 2 == 1
        },
    }
    L2 "ends-early": "columns behind the first 512 are not computed" { extent: |m, n| (m, n.min(512)) }
    L2 lethal "panics": "a call with 17 rows panics" {
        before: |_, y| if y.as_view().shape()[0] == 17 { panic!("17 rows") } else { Ok(()) },
    }
    L2 lethal "aborts": "a call with 33 rows aborts the process" {
        before: |_, y| if y.as_view().shape()[0] == 33 { std::process::abort() } else { Ok(()) },
    }
    L2 lethal "exits": "a call with 64 rows ends the process as if all were well" {
        before: |_, y| if y.as_view().shape()[0] == 64 { std::process::exit(0) } else { Ok(()) },
    }
    L2 lethal "never-ends": "a call with 65 rows does not return" {
        before: |_, y| {
            while y.as_view().shape()[0] == 65 {
                std::thread::sleep(Duration::from_millis(50));
            }
            Ok(())
        },
    }
    L2 lethal "devours-memory": "a call with 129 rows takes memory until there is none" {
        before: |_, y| {
            while y.as_view().shape()[0] == 129 {
                std::mem::forget(std::hint::black_box(vec![1u8; 32 << 20]));
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(())
        },
    }
};

fn extra() -> q4_core::Reject {
    q4_core::Reject::new(q4_core::RejectCode::ShapeUnsupported, "another shape", "this one")
}

fn clear(y: &mut TensorViewMut<'_>) {
    match y.as_view().dtype() {
        q4_core::DType::F32 => drop(y.row_mut::<f32>(0).map(|r| r.fill(0.0))),
        q4_core::DType::F16 => drop(y.row_mut::<half::f16>(0).map(|r| r.fill(half::f16::ZERO))),
        _ => drop(y.row_mut::<half::bf16>(0).map(|r| r.fill(half::bf16::ZERO))),
    }
}
