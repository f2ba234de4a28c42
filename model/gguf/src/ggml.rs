//! Element types of tensors: their numbers in the file, and the size of a block.
use std::fmt;

macro_rules! types {
    ($($name:ident = $number:literal, $elements:literal, $bytes:literal;)*) => {
        /// An element type of GGUF. Elements lie in blocks along the innermost extent, and a row is a whole
        /// number of blocks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[allow(non_camel_case_types, reason = "the names that everybody knows them by")]
        pub enum GgmlType {
            $(#[doc = concat!("Blocks of ", $elements, " elements in ", $bytes, " bytes.")] $name,)*
        }

        impl GgmlType {
            /// Every type, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The type of that number.
            pub const fn of(number: u32) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }
            /// Its number in the file.
            pub const fn number(self) -> u32 { match self { $(Self::$name => $number,)* } }
            /// Its name.
            pub const fn name(self) -> &'static str { match self { $(Self::$name => stringify!($name),)* } }
            /// Elements of a block.
            pub const fn block_elements(self) -> usize { match self { $(Self::$name => $elements,)* } }
            /// Bytes of a block.
            pub const fn block_bytes(self) -> usize { match self { $(Self::$name => $bytes,)* } }
        }
    };
}

// Numbers that are missing were given up (4, 5, 31 to 33, 36 to 38) or are of no file (9, Q8_1: activations).
types! {
    F32     = 0,  1,   4;
    F16     = 1,  1,   2;
    Q4_0    = 2,  32,  18;
    Q4_1    = 3,  32,  20;
    Q5_0    = 6,  32,  22;
    Q5_1    = 7,  32,  24;
    Q8_0    = 8,  32,  34;
    Q2_K    = 10, 256, 84;
    Q3_K    = 11, 256, 110;
    Q4_K    = 12, 256, 144;
    Q5_K    = 13, 256, 176;
    Q6_K    = 14, 256, 210;
    Q8_K    = 15, 256, 292;
    IQ2_XXS = 16, 256, 66;
    IQ2_XS  = 17, 256, 74;
    IQ3_XXS = 18, 256, 98;
    IQ1_S   = 19, 256, 50;
    IQ4_NL  = 20, 32,  18;
    IQ3_S   = 21, 256, 110;
    IQ2_S   = 22, 256, 82;
    IQ4_XS  = 23, 256, 136;
    I8      = 24, 1,   1;
    I16     = 25, 1,   2;
    I32     = 26, 1,   4;
    I64     = 27, 1,   8;
    F64     = 28, 1,   8;
    IQ1_M   = 29, 256, 56;
    BF16    = 30, 1,   2;
    TQ1_0   = 34, 256, 54;
    TQ2_0   = 35, 256, 66;
    MXFP4   = 39, 32,  17;
    NVFP4   = 40, 64,  36;
    Q1_0    = 41, 128, 18;
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_distinct_and_lead_back() {
        for (a, b) in GgmlType::ALL.iter().zip(&GgmlType::ALL[1..]) {
            assert!(a.number() < b.number(), "{a} and {b}");
        }
        for kind in GgmlType::ALL {
            assert_eq!(GgmlType::of(kind.number()), Some(*kind));
        }
        for number in [4, 5, 9, 31, 36, 42, u32::MAX] {
            assert_eq!(GgmlType::of(number), None);
        }
    }
}
