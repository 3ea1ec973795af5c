//! Random numbers that a seed decides, on every machine alike.

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The sequence of a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, or 0 where that is 0.
    pub const fn below(&mut self, end: u64) -> u64 {
        // The upper half of the product: off by less than end / 2^64.
        ((self.next() as u128 * end as u128) >> 64) as u64
    }

    /// How many events of probability `chance` each do not happen before the first that does: geometrically distributed, as are
    /// the bits between two that are flipped. `u64::MAX` where none ever does.
    pub fn gap(&mut self, chance: f64) -> u64 {
        if chance >= 1.0 {
            return 0;
        }
        // From 2^-53 to 1.
        let uniform = ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64;
        let per_event = ln_1m(chance);
        if !chance.is_normal() || chance <= 0.0 || per_event == 0.0 {
            return u64::MAX;
        }
        // A conversion to an integer saturates.
        (ln(uniform) / per_event) as u64
    }
}

/// The natural logarithm of 1 - x, for 0 < x < 1.
fn ln_1m(x: f64) -> f64 {
    // Below this 1 - x loses digits, and the fourth term is too small to be seen.
    if x < 1e-4 { -(x + x * x / 2.0 + x * x * x / 3.0) } else { ln(1.0 - x) }
}

/// The natural logarithm of a normal positive number: by additions, products and quotients alone, which IEEE 754 defines to the
/// last bit. `f64::ln` is not the same on every machine.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = ((bits >> 52) & 0x7ff) as i32 - 1023;
    let mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    // ln m = 2 artanh((m - 1) / (m + 1)), with a ratio of at most 1/3.
    let ratio = (mantissa - 1.0) / (mantissa + 1.0);
    let square = ratio * ratio;
    let (mut term, mut sum, mut divisor) = (ratio, 0.0, 1.0);
    for _ in 0..17 {
        sum += term / divisor;
        term *= square;
        divisor += 2.0;
    }
    2.0 * sum + f64::from(exponent) * std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_that_of_the_paper() {
        // Reference values of the authors' C program, for the seed 1234567.
        let mut random = SplitMix64::new(1_234_567);
        let numbers = [random.next(), random.next(), random.next()];
        assert_eq!(
            numbers,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
        assert!((0..1000).all(|_| random.below(7) < 7) && random.below(0) == 0);
    }

    #[test]
    fn logarithms_are_right() {
        for x in [1e-300, 2.0_f64.powi(-53), 0.3, 0.5, 0.999_999, 1.0, 1.5, 7.25, 1e300] {
            assert!((ln(x) - x.ln()).abs() <= 1e-14 * (1.0 + x.ln().abs()), "ln {x}");
        }
        for x in [1e-15, 1e-9, 9e-5, 1e-3, 0.5, 0.99] {
            assert!((ln_1m(x) / (-x).ln_1p() - 1.0).abs() < 1e-12, "ln 1 - {x}");
        }
    }

    #[test]
    fn gaps_are_as_long_as_their_chance_says() {
        let mut random = SplitMix64::new(3);
        for chance in [1e-6, 0.01, 0.5] {
            let total: u128 = (0..20_000).map(|_| u128::from(random.gap(chance))).sum();
            let (mean, wanted) = (total as f64 / 20_000.0, (1.0 - chance) / chance);
            assert!((mean / wanted - 1.0).abs() < 0.05, "{chance}: {mean}, not {wanted}");
        }
        for chance in [0.0, -1.0, f64::NAN, 1e-320] {
            assert_eq!(random.gap(chance), u64::MAX, "{chance}");
        }
        assert_eq!(random.gap(1.0), 0);
        assert_eq!(random.gap(f64::INFINITY), 0);
    }
}
