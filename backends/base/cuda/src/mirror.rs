//! What kernels take: structs that are compared with the device's text, by name and by type, before anything
//! is launched.
use crate::Source;
use q4_core::{Code, Error, Result};
use std::ffi::c_void;

/// A value that Rust and the device lay out the same way: a number, an address, a struct of them. As what a
/// kernel takes, the fields are its parameters.
///
/// # Safety
/// `FIELDS` are all fields of a `repr(C)` struct in order; what is none has the size and alignment of
/// `TYPES`.
pub unsafe trait Mirror: Copy {
    /// What the text may call it; `*` is any pointer.
    const TYPES: &'static [&'static str] = &[];
    /// Of an array.
    const COUNT: usize = 1;
    /// Of a struct.
    const FIELDS: &'static [Field] = &[];
}

/// A field of a struct, or a parameter of a kernel.
#[derive(Debug)]
pub struct Field {
    name: &'static str,
    offset: usize,
    types: &'static [&'static str],
    count: usize,
    fields: &'static [Field],
}

impl Field {
    /// `name`, of type `T`, so many bytes from the start.
    pub const fn of<T: Mirror>(name: &'static str, offset: usize) -> Self {
        Self { name, offset, types: T::TYPES, count: T::COUNT, fields: T::FIELDS }
    }
}

/// Declares structs that are [`Mirror`]s: of the device's structs, and of parameters of kernels.
#[macro_export]
macro_rules! mirror {
    ($($(#[$meta:meta])* $vis:vis struct $name:ident {
        $($(#[$doc:meta])* $of:vis $field:ident: $type:ty),* $(,)?
    })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        $vis struct $name { $($(#[$doc])* $of $field: $type),* }
        // SAFETY: it is `repr(C)`, and these are its fields in order.
        unsafe impl $crate::Mirror for $name {
            const FIELDS: &'static [$crate::Field] =
                &[$($crate::Field::of::<$type>(stringify!($field), ::std::mem::offset_of!(Self, $field))),*];
        }
    )*};
}

macro_rules! numbers {
    ($($type:ty = $($text:literal)|*),*) => {$(
        // SAFETY: the sizes and alignments of types.cuh.
        unsafe impl Mirror for $type {
            const TYPES: &'static [&'static str] = &[$($text),*];
        }
    )*};
}
numbers!(u32 = "u32", i32 = "int", u64 = "u64" | "*", f32 = "float", f64 = "double");

// SAFETY: as many side by side.
unsafe impl<T: Mirror, const N: usize> Mirror for [T; N] {
    const TYPES: &'static [&'static str] = T::TYPES;
    const COUNT: usize = N;
    const FIELDS: &'static [Field] = T::FIELDS;
}

/// Most parameters of a kernel.
const MOST: usize = 24;

/// The addresses of all parameters, as launches take them; they live as long as `args`.
pub fn addresses<A: Mirror>(args: &A) -> [*mut c_void; MOST] {
    const { assert!(A::FIELDS.len() <= MOST) }
    let mut all = [std::ptr::null_mut(); MOST];
    for (at, field) in all.iter_mut().zip(A::FIELDS) {
        *at = std::ptr::from_ref(args).cast::<c_void>().wrapping_byte_add(field.offset).cast_mut();
    }
    all
}

impl Source {
    /// Fails unless `kernel` takes the fields of `A`, of these names and types and in this order. Where
    /// macros declare kernels, one that may be it has to.
    pub fn takes<A: Mirror>(&self, kernel: &str) -> Result<()> {
        let text = self.whole();
        let all: Vec<_> = parameters(&text, kernel).collect();
        if all.iter().any(|list| declares(&text, list, A::FIELDS)) {
            return Ok(());
        }
        let one_line = |list: &&str| {
            list.split(['\n', '\\', ' ']).filter(|w| !w.is_empty()).collect::<Vec<_>>().join(" ")
        };
        Err(Error::new(Code::Internal, format!("arguments of kernel `{kernel}` of `{}`", self.name))
            .need(all.iter().map(one_line).collect::<Vec<_>>().join("; or "))
            .have(said(A::FIELDS)))
    }
}

/// Lists of parameters of what may be `kernel`.
fn parameters<'t>(text: &'t str, kernel: &str) -> impl Iterator<Item = &'t str> {
    text.match_indices("__global__").filter_map(move |(at, _)| {
        let (head, list) = text[at..].split_once('{')?.0.rsplit_once('(')?;
        // Parameters of a macro stand for anything.
        let of_macro =
            text[..at].rsplit_once("#define ").and_then(|t| t.1.lines().next()).unwrap_or_default();
        let of_macro = of_macro.split_once('(').and_then(|m| m.1.split_once(')')).unwrap_or_default().0;
        let part = |part| of_macro.split(", ").all(|p| p != part).then_some(part);
        let name: Vec<_> = head.split_whitespace().last()?.split("##").map(part).collect();
        is_named(&name, kernel).then_some(list.rsplit_once(')')?.0)
    })
}

/// Whether `kernel` is made of these parts; `None` is anything.
fn is_named(parts: &[Option<&str>], kernel: &str) -> bool {
    match parts {
        [] => kernel.is_empty(),
        [Some(part), more @ ..] => kernel.strip_prefix(part).is_some_and(|rest| is_named(more, rest)),
        [None, more @ ..] => (0..=kernel.len()).any(|n| is_named(more, &kernel[n..])),
    }
}

/// Whether a list of parameters, or the fields of a struct, are `fields`.
fn declares(text: &str, list: &str, fields: &[Field]) -> bool {
    let code: String = list.lines().filter_map(|l| l.split("//").next()).collect();
    let all: Vec<_> = code.split([',', ';']).filter(|d| !d.trim().is_empty()).collect();
    let mut of = "";
    all.len() == fields.len()
        && all.into_iter().zip(fields).all(|(declaration, field)| {
            let (one, count) = declaration.split_once('[').unwrap_or((declaration, "1]"));
            let mut words = one.rsplit(|c: char| c != '_' && !c.is_alphanumeric()).filter(|w| !w.is_empty());
            let name = words.next();
            // `u32 n, k`: behind a comma the type of a field goes on.
            of = words.next().unwrap_or(of);
            let of = if one.contains('*') { "*" } else { of };
            let has_type = || match field.fields {
                [] => field.types.contains(&of),
                fields => {
                    let body = text.split_once(&format!("struct {of} {{")).and_then(|t| t.1.split_once('}'));
                    body.is_some_and(|(list, _)| declares(text, list, fields))
                }
            };
            name == Some(field.name) && count.trim_end() == format!("{}]", field.count) && has_type()
        })
}

fn said(fields: &[Field]) -> String {
    let one = |f: &Field| match f.fields {
        [] => format!("{} {}", f.types.join("|"), f.name),
        fields => format!("{{{}}} {}", said(fields), f.name),
    };
    fields.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::File;

    const FILES: &[File] =
        &[("pair.cuh", "struct Pair {\n    u64 at[2], n; // of both\n    const float *f, *g;\n};\n")];
    const TEXT: &str = "#include \"pair.cuh\"\n\
        // Two kernels.\n\
        extern \"C\" __global__ void __launch_bounds__(256, 1) plain(const u16 *x, u32 a, u32 b, const Pair p, float f) { }\n\
        #define MANY(T, N) \\\n    extern \"C\" __global__ void many_##N( \\\n        const T *x, int rows, \\\n        double d) { }\n";
    const SOURCE: Source = Source { name: "test", text: TEXT, files: FILES };

    mirror! {
        struct Pair { at: [u64; 2], n: u64, f: u64, g: u64 }
        struct Plain { x: u64, a: u32, b: u32, p: Pair, f: f32 }
        struct Many { x: u64, rows: i32, d: f64 }
    }

    #[test]
    fn what_a_kernel_takes_is_accepted() -> Result<()> {
        SOURCE.takes::<Plain>("plain")?;
        SOURCE.takes::<Many>("many_f32")?;
        let args = Many { x: 3, rows: -7, d: 0.5 };
        let at = addresses(&args);
        // SAFETY: the addresses of fields of those types.
        let read = unsafe { (*at[0].cast::<u64>(), *at[1].cast::<i32>(), *at[2].cast::<f64>()) };
        assert_eq!((read, at[3].is_null()), ((3, -7, 0.5), true));
        Ok(())
    }

    #[test]
    fn a_wrong_order_size_type_or_number_is_refused() {
        mirror! {
            struct Swapped { x: u64, b: u32, a: u32, p: Pair, f: f32 }
            struct Wider { x: u64, a: u64, b: u32, p: Pair, f: f32 }
            struct Whole { x: u64, a: u32, b: u32, p: Pair, f: i32 }
            struct Fewer { x: u64, a: u32, b: u32, p: Pair }
            struct More { x: u64, a: u32, b: u32, p: Pair, f: f32, g: f32 }
            struct Crossed { at: [u64; 2], n: u64, g: u64, f: u64 }
            struct Within { x: u64, a: u32, b: u32, p: Crossed, f: f32 }
            struct Short { at: [u64; 1], n: u64, f: u64, g: u64 }
            struct Shorter { x: u64, a: u32, b: u32, p: Short, f: f32 }
            struct Unsigned { x: u64, rows: u32, d: f64 }
        }
        fn refused<A: Mirror>(kernel: &str) -> String {
            SOURCE.takes::<A>(kernel).expect_err("refused").to_string()
        }
        for why in [
            refused::<Swapped>("plain"),
            refused::<Wider>("plain"),
            refused::<Whole>("plain"),
            refused::<Fewer>("plain"),
            refused::<More>("plain"),
            refused::<Within>("plain"),
            refused::<Shorter>("plain"),
            refused::<Many>("plain"),
        ] {
            assert!(why.contains("const u16 *x, u32 a, u32 b, const Pair p, float f"), "{why}");
        }
        assert!(refused::<Unsigned>("many_f32").contains("u64|* x, u32 rows, double d"));
        for unknown in ["many", "plainer", "any_f32"] {
            refused::<Many>(unknown);
        }
    }
}
