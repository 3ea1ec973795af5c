//! Number formats: every float type as an exact `f64`, and an `f64` rounded once to any of them; and how
//! numbers are written in text.
//!
//! `f64` holds every value of every other float type exactly, so each conversion is one rounding.

use crate::types::Scalar;

/// A float format below 32 bits.
struct Small {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// Where the largest exponent means infinity and NaN. E4M3 has only one NaN and no infinity.
    ieee: bool,
    /// Does a number that is too large become the largest finite one?
    saturates: bool,
}

const fn small(scalar: Scalar) -> Option<Small> {
    Some(match scalar {
        Scalar::F16 => Small { exponent_bits: 5, mantissa_bits: 10, ieee: true, saturates: false },
        Scalar::Bf16 => Small { exponent_bits: 8, mantissa_bits: 7, ieee: true, saturates: false },
        Scalar::F8E4M3 => Small { exponent_bits: 4, mantissa_bits: 3, ieee: false, saturates: true },
        Scalar::F8E5M2 => Small { exponent_bits: 5, mantissa_bits: 2, ieee: true, saturates: true },
        _ => return None,
    })
}

/// 2 to the `exponent`, for exponents of normal numbers.
fn exp2(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

impl Small {
    fn bias(&self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    fn sign_bit(&self) -> u64 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    fn infinity(&self) -> u64 {
        ((1 << self.exponent_bits) - 1) << self.mantissa_bits
    }

    /// The bits of the largest finite number.
    fn largest(&self) -> u64 {
        if self.ieee { self.infinity() - 1 } else { self.sign_bit() - 2 }
    }

    fn nan(&self) -> u64 {
        if self.ieee { self.infinity() | 1 << (self.mantissa_bits - 1) } else { self.sign_bit() - 1 }
    }

    fn decode(&self, bits: u64) -> f64 {
        let magnitude = bits & (self.sign_bit() - 1);
        let exponent = (magnitude >> self.mantissa_bits) as i32;
        let mantissa = (magnitude & ((1 << self.mantissa_bits) - 1)) as f64;
        let value = if self.ieee && magnitude == self.infinity() {
            f64::INFINITY
        } else if magnitude > self.largest() {
            f64::NAN
        } else if exponent == 0 {
            mantissa * exp2(1 - self.bias() - self.mantissa_bits as i32)
        } else {
            (mantissa + (1u64 << self.mantissa_bits) as f64)
                * exp2(exponent - self.bias() - self.mantissa_bits as i32)
        };
        if bits & self.sign_bit() != 0 { -value } else { value }
    }

    fn encode(&self, value: f64) -> u64 {
        if value.is_nan() {
            return self.nan();
        }
        let sign = if value.is_sign_negative() { self.sign_bit() } else { 0 };
        let magnitude = value.abs();
        let least = 1 - self.bias();
        let too_large = if self.saturates { self.largest() } else { self.infinity() };
        if magnitude >= exp2(self.bias() + 2) {
            return sign | too_large;
        }
        let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(least);
        let steps = (magnitude * exp2(self.mantissa_bits as i32 - exponent)).round_ties_even() as u64;
        // A subnormal's steps are its bits. Above, the implied leading one adds one to the exponent field,
        // and a mantissa that rounded up carries into it by itself.
        let bits = (((exponent - least) as u64) << self.mantissa_bits) + steps;
        sign | if bits > self.largest() { too_large } else { bits }
    }
}

/// The value of a float's bits. An integer's or a bool's bits are taken as an unsigned number.
pub fn to_f64(scalar: Scalar, bits: u64) -> f64 {
    match scalar {
        Scalar::F32 | Scalar::Tf32 => f64::from(f32::from_bits(bits as u32)),
        Scalar::F64 => f64::from_bits(bits),
        _ => match small(scalar) {
            Some(format) => format.decode(bits),
            None => bits as f64,
        },
    }
}

/// The bits of the float nearest to `value`, ties to even. Too large becomes infinity, in fp8 the largest
/// finite number. For an integer type: the nearest integer towards zero.
pub fn from_f64(scalar: Scalar, value: f64) -> u64 {
    match scalar {
        Scalar::F32 | Scalar::Tf32 => u64::from((value as f32).to_bits()),
        Scalar::F64 => value.to_bits(),
        _ => match small(scalar) {
            Some(format) => format.encode(value),
            None => value as i64 as u64 & scalar.mask(),
        },
    }
}

/// The integer's bits as a signed number.
pub fn signed(scalar: Scalar, bits: u64) -> i64 {
    let unused = 64 - scalar.bits();
    ((bits << unused) as i64) >> unused
}

/// How a constant is written: decimal where it reads back as the same bits, else all bits in hexadecimal.
pub fn write_literal(scalar: Scalar, bits: u64) -> String {
    match scalar {
        Scalar::Bool => if bits & 1 != 0 { "true" } else { "false" }.to_owned(),
        s if s.is_int() => signed(s, bits).to_string(),
        _ => {
            let value = to_f64(scalar, bits);
            if value.is_nan() {
                return format!("{bits:#x}");
            }
            match scalar {
                Scalar::F64 => format!("{value:?}"),
                // The shortest decimal for an f32 is well within half a step of any smaller format.
                _ => format!("{:?}", value as f32),
            }
        }
    }
}

/// The bits of a constant as [`write_literal`] writes it; also integers in hexadecimal and unsigned ones.
/// `None` if it is no number of this type.
pub fn read_literal(scalar: Scalar, text: &str) -> Option<u64> {
    if let Some(hex) = text.strip_prefix("0x") {
        let bits = u64::from_str_radix(hex, 16).ok()?;
        return (bits & !scalar.mask() == 0 && scalar != Scalar::Bool).then_some(bits);
    }
    match scalar {
        Scalar::Bool => match text {
            "true" => Some(1),
            "false" => Some(0),
            _ => None,
        },
        s if s.is_int() => {
            let value: i128 = text.parse().ok()?;
            let least = -(1i128 << (s.bits() - 1));
            (value >= least && value <= i128::from(s.mask())).then_some(value as u64 & s.mask())
        }
        _ => {
            if !text.bytes().any(|b| b.is_ascii_digit()) && !["inf", "-inf", "nan"].contains(&text) {
                return None;
            }
            // What is written as infinity is no number that was too large, in fp8 either.
            let infinite = small(scalar).filter(|format| format.ieee);
            match scalar {
                _ if text == "inf" && infinite.is_some() => infinite.map(|format| format.infinity()),
                _ if text == "-inf" && infinite.is_some() => {
                    infinite.map(|format| format.sign_bit() | format.infinity())
                }
                Scalar::F32 | Scalar::Tf32 => text.parse::<f32>().ok().map(|v| u64::from(v.to_bits())),
                _ => text.parse::<f64>().ok().map(|v| from_f64(scalar, v)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_small_float_round_trips() {
        for scalar in [Scalar::F16, Scalar::Bf16, Scalar::F8E4M3, Scalar::F8E5M2] {
            for bits in 0..1u64 << scalar.bits() {
                let value = to_f64(scalar, bits);
                if value.is_nan() {
                    assert!(to_f64(scalar, from_f64(scalar, value)).is_nan());
                } else if value.is_finite() || !small(scalar).unwrap().saturates {
                    assert_eq!(from_f64(scalar, value), bits, "{scalar} {bits:#x} = {value}");
                }
                let text = write_literal(scalar, bits);
                assert_eq!(read_literal(scalar, &text), Some(bits), "{scalar} {text}");
            }
        }
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        let check = |scalar, value, expect: f64| {
            assert_eq!(to_f64(scalar, from_f64(scalar, value)), expect, "{value}")
        };
        check(Scalar::F16, 65504.0, 65504.0);
        check(Scalar::F16, 65519.9, 65504.0);
        check(Scalar::F16, 65520.0, f64::INFINITY);
        check(Scalar::F16, 2049.0, 2048.0);
        check(Scalar::F16, 2051.0, 2052.0);
        check(Scalar::F16, 2_049.000_000_000_001, 2050.0);
        check(Scalar::F16, 2f64.powi(-25), 0.0);
        check(Scalar::F16, 2f64.powi(-25) * 1.000_001, 2f64.powi(-24));
        check(Scalar::Bf16, 1e39, f64::INFINITY);
        check(Scalar::Bf16, 257.0, 256.0);
        check(Scalar::F8E4M3, 448.0, 448.0);
        check(Scalar::F8E4M3, 1e9, 448.0);
        check(Scalar::F8E4M3, -465.0, -448.0);
        check(Scalar::F8E5M2, 60000.0, 57344.0);
        check(Scalar::F8E5M2, f64::NEG_INFINITY, -57344.0);
    }

    #[test]
    fn literals() {
        let check =
            |scalar, text: &str, bits| assert_eq!(read_literal(scalar, text), bits, "{scalar} {text}");
        check(Scalar::I8, "-128", Some(0x80));
        check(Scalar::I8, "255", Some(0xff));
        check(Scalar::I8, "256", None);
        check(Scalar::I64, "18446744073709551615", Some(u64::MAX));
        check(Scalar::I32, "0x1ffffffff", None);
        check(Scalar::F32, "1e-6", Some(0x3586_37bd));
        check(Scalar::F32, "-inf", Some(0xff80_0000));
        check(Scalar::F32, "nan", Some(0x7fc0_0000));
        check(Scalar::F64, "nan", Some(0x7ff8_0000_0000_0000));
        check(Scalar::F16, "nan", Some(0x7e00));
        check(Scalar::F8E4M3, "nan", Some(0x7f));
        check(Scalar::F32, "-nan", None);
        check(Scalar::I32, "nan", None);
        check(Scalar::F32, "0x7fc00001", Some(0x7fc0_0001));
        check(Scalar::Bool, "true", Some(1));
        check(Scalar::Bool, "1", None);
        assert_eq!(write_literal(Scalar::F32, 0x7fc0_0001), "0x7fc00001");
        assert_eq!(write_literal(Scalar::F32, 0x8000_0000), "-0.0");
    }
}
