//! Plain loops on the widest registers of the processor that runs them.

/// A function compiled for 256-bit registers too, and run so where there are such. Its results are the same
/// bits everywhere: no addition changes its place, and no product is fused with its addition.
#[macro_export]
macro_rules! wide {
    ($(#[$doc:meta])* $seen:vis fn $name:ident($($of:ident: $kind:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$doc])*
        $seen fn $name($($of: $kind),*) $(-> $out)? {
            #[inline(always)]
            fn body($($of: $kind),*) $(-> $out)? $body
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx2") {
                #[target_feature(enable = "avx2")]
                fn on_avx2($($of: $kind),*) $(-> $out)? {
                    body($($of),*)
                }
                // SAFETY: the feature was found on this processor.
                return unsafe { on_avx2($($of),*) };
            }
            body($($of),*)
        }
    };
}

wide! {
    /// `to[i] = from[i]`.
    pub(crate) fn widen(to: &mut [f64], from: &[f32]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = f64::from(*from));
    }
}

#[cfg(test)]
mod tests {
    wide! {
        fn sum(of: &[f32]) -> f32 {
            of.iter().sum()
        }
    }

    #[test]
    fn terms_keep_their_places() {
        let terms: Vec<f32> = (0..1000).map(|i| 10f32.powi(i % 17 - 8) * (1 - 2 * (i & 1)) as f32).collect();
        let mut plain = 0.0;
        terms.iter().for_each(|term| plain += term);
        assert_eq!(sum(&terms).to_bits(), f32::to_bits(plain));
    }
}
