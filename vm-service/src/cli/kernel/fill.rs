//! What an argument without a file is filled with.

use std::fmt;
use std::str::FromStr;

use vm_ir::Scalar;
use vm_ir::format::from_f64;
use vm_ir::interp::Tensor;

use super::memory;

/// What the elements are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Fill {
    /// All 0.
    #[default]
    Zeros,
    /// All 1.
    Ones,
    /// 0, 1, 2 and so on, row by row, as far as the type goes: integers wrap, floats are rounded.
    Arange,
    /// Random, the same for the same seed on every machine: floats from −1 to 1, integers of all their values.
    Random(u64),
}

impl FromStr for Fill {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || {
            format!("no elements are called `{text}`; there are zeros, ones, arange, random and random:SEED")
        };
        match text {
            "zeros" => Ok(Self::Zeros),
            "ones" => Ok(Self::Ones),
            "arange" => Ok(Self::Arange),
            "random" => Ok(Self::Random(0)),
            _ => {
                let seed = text.strip_prefix("random:").ok_or_else(unknown)?;
                let seed =
                    seed.parse().map_err(|_| format!("the seed `{seed}` is no number from 0 to 2^64 - 1"))?;
                Ok(Self::Random(seed))
            }
        }
    }
}

impl fmt::Display for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zeros => f.write_str("zeros"),
            Self::Ones => f.write_str("ones"),
            Self::Arange => f.write_str("arange"),
            Self::Random(seed) => write!(f, "random:{seed}"),
        }
    }
}

impl Fill {
    /// A tensor of such elements.
    ///
    /// # Errors
    /// When there are more than the machine has memory for.
    pub(super) fn tensor(self, element: Scalar, extents: &[u64]) -> Result<Tensor, String> {
        let size = u64::from(element.bytes());
        let bytes = extents.iter().try_fold(size, |bytes, extent| bytes.checked_mul(*extent));
        let bytes =
            bytes.ok_or_else(|| format!("the extents {extents:?} count more bytes than there can be"))?;
        memory::check(bytes)?;
        let mut tensor = Tensor { element, extents: extents.to_vec(), bytes: Vec::new() };
        tensor.bytes = vec![0; usize::try_from(bytes).map_err(|_| format!("{bytes} bytes don't fit"))?];
        let elements = tensor.len();
        match self {
            Self::Zeros => {}
            Self::Ones => {
                let one = if element.is_int() { 1 } else { from_f64(element, 1.0) };
                (0..elements).for_each(|index| tensor.set_bits(index, one));
            }
            Self::Arange => (0..elements).for_each(|index| {
                let bits = if element.is_int() {
                    index as u64 & element.mask()
                } else {
                    from_f64(element, index as f64)
                };
                tensor.set_bits(index, bits);
            }),
            Self::Random(seed) => {
                let mut random = SplitMix(seed);
                (0..elements).for_each(|index| {
                    let word = random.next();
                    let bits = if element.is_int() {
                        word & element.mask()
                    } else {
                        // 53 bits: every multiple of 2^-52 from −1 to 1.
                        from_f64(element, (word >> 11) as f64 * 2f64.powi(-52) - 1.0)
                    };
                    tensor.set_bits(index, bits);
                });
            }
        }
        Ok(tensor)
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): one addition and a mix for each number.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements() {
        let check = |fill: &str, element, expect: &[f64]| {
            let fill: Fill = fill.parse().unwrap();
            let tensor = fill.tensor(element, &[expect.len() as u64]).unwrap();
            assert_eq!(tensor.to_f64s(), expect, "{fill} {element}");
            assert_eq!(fill.to_string().parse(), Ok(fill));
        };
        for &element in Scalar::ALL.iter().filter(|element| element.in_memory()) {
            check("zeros", element, &[0.0, 0.0]);
            check("ones", element, &[1.0, 1.0, 1.0]);
            check("arange", element, &[0.0, 1.0, 2.0, 3.0]);
        }
        check("zeros", Scalar::F32, &[]);
        // The reference implementation's first number for seed 0 is e220a8397b1dcdaf.
        assert_eq!(SplitMix(0).next(), 0xe220_a839_7b1d_cdaf);
        let random = Fill::Random(7).tensor(Scalar::F32, &[1000]).unwrap().to_f64s();
        assert!(random.iter().all(|value| (-1.0..=1.0).contains(value)));
        let mean = random.iter().sum::<f64>() / 1000.0;
        assert!(mean.abs() < 0.1, "{mean}");
    }

    #[test]
    fn too_much_is_an_error() {
        for extents in [&[1 << 40][..], &[1 << 40, 1 << 40]] {
            assert!(Fill::Zeros.tensor(Scalar::F32, extents).is_err());
        }
        for text in ["", "nought", "random:", "random:-1", "random:18446744073709551616"] {
            assert!(text.parse::<Fill>().is_err(), "{text}");
        }
    }
}
