//! Functions and conversions of sixteen floats at once, on machines whose vectors are longer than the code generator's.
//!
//! Cranelift's vectors have 16 bytes. On a machine with AVX-512 four of them go through these together, in a routine that
//! is put behind the code of each kernel that calls it. It computes what is written into the code elsewhere (the exponentials of
//! `function`, the expansions of `legalise`), in
//! the same steps and so to the same bits, but needs no branch: `vscalefps` multiplies by a power of two, rounded once, also
//! where the result is subnormal, zero or infinite.
//!
//! The routine takes four vectors in `xmm0` to `xmm3` and an address in `rdi`, where it puts the sixteen results. It changes
//! `k1` and registers from `zmm16` on only, which the code generator does not know of, so nothing must be saved around the call, and the
//! registers that older instructions merge into stay clean.

use super::function::{Base, LN_2_F32, MAGIC_F32};
use super::isa::Isa;
use super::lanes::own;
use super::routine::Routine;
use super::writer::Writer;
use crate::legalise::poly::{ERF_F32, ERF_POWER_F32, ERF_SPLIT_F32, EXP_F32, EXP2_F32, TANH_F32};
use cranelift_codegen::ir::{InstBuilder, Type, Value as Ssa, types};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use vm_ir::Scalar;

/// Vectors that the routine takes.
pub(super) const VECTORS: usize = 4;
/// Bytes of its results.
pub(super) const BYTES: u32 = 64;

/// What is computed of f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    Exp,
    Exp2,
    Tanh,
    Erf,
    /// Rounded to bf16; a NaN becomes the one that arithmetic gives.
    ToBf16,
    /// Rounded to f16.
    ToF16,
    /// Of f16s in the first two vectors, eight in each.
    FromF16,
}

impl From<Base> for Function {
    fn from(base: Base) -> Function {
        match base {
            Base::E => Function::Exp,
            Base::Two => Function::Exp2,
        }
    }
}

/// Below it a power is zero, and above the other infinite.
const fn range(base: Base) -> [f32; 2] {
    match base {
        Base::E => [-104.0, 89.0],
        Base::Two => [-151.0, 129.0],
    }
}

/// Does the machine have what the routine needs?
pub(super) fn has(isa: Isa) -> bool {
    isa == Isa::X86V4
}

/// The conversion between these types, if there is a routine for it.
pub(super) fn conversion(from: Scalar, to: Scalar) -> Option<Function> {
    match (from, to) {
        (Scalar::F32, Scalar::Bf16) => Some(Function::ToBf16),
        (Scalar::F32, Scalar::F16) => Some(Function::ToF16),
        (Scalar::F16, Scalar::F32) => Some(Function::FromF16),
        _ => None,
    }
}

impl Writer<'_, '_> {
    /// A function of each of these vectors of four floats; `None` where the machine has no longer ones, or of other vectors.
    pub(super) fn wide_function(&mut self, function: Function, all: &[Ssa]) -> Option<Vec<Ssa>> {
        self.wide_at?;
        if all.is_empty() || self.type_of(all[0]) != types::F32X4 {
            return None;
        }
        Some(self.call_wide(function, all, VECTORS, (types::F32X4, 16)))
    }

    /// Converts what is in these vectors: four of f32, or two of f16, at once.
    pub(super) fn wide_conversion(&mut self, function: Function, all: &[Ssa]) -> Vec<Ssa> {
        match function {
            Function::FromF16 => {
                let all: Vec<Ssa> = all.iter().map(|halves| self.cast(types::F32X4, *halves)).collect();
                self.call_wide(function, &all, VECTORS / 2, (types::F32X4, 32))
            }
            _ => self.call_wide(function, all, VECTORS, (types::I16X8, 8)),
        }
    }

    /// The same of one float.
    pub(super) fn wide_conversion_of_one(&mut self, function: Function, a: Ssa) -> Ssa {
        if function == Function::FromF16 {
            let bits = self.b.ins().uextend(types::I32, a);
            let vector = self.b.ins().scalar_to_vector(types::I32X4, bits);
            let vector = self.cast(types::F32X4, vector);
            return self.call_wide(function, &[vector], 1, (types::F32, 4))[0];
        }
        let vector = self.b.ins().scalar_to_vector(types::F32X4, a);
        self.call_wide(function, &[vector], 1, (types::I16, 2))[0]
    }

    /// Calls a routine for so many of these vectors at once. Results of a type are loaded, of which there are so many bytes for each vector.
    fn call_wide(
        &mut self,
        function: Function,
        all: &[Ssa],
        at_once: usize,
        (ty, bytes): (Type, usize),
    ) -> Vec<Ssa> {
        let Some(at) = self.wide_at else { return Vec::new() };
        let routine = self.routine(Routine::Wide(function));
        let to = self.b.ins().iadd_imm_s(self.scratch, i64::from(at));
        let mut results = Vec::new();
        for some in all.chunks(at_once) {
            // Where there are fewer, the last is repeated.
            let mut arguments: Vec<Ssa> = (0..VECTORS).map(|i| some[i.min(some.len() - 1)]).collect();
            arguments.push(to);
            self.b.ins().call(routine, &arguments);
            let places = (0..(some.len() * bytes) as i32).step_by(ty.bytes() as usize);
            results.extend(places.map(|place| self.b.ins().load(ty, own(), to, place)));
        }
        results
    }

    /// The same of one float or one vector, which the machine has longer ones than.
    pub(super) fn wide_one(&mut self, function: Function, a: Ssa) -> Ssa {
        if self.type_of(a).is_vector() {
            return self.wide_function(function, &[a]).map_or(a, |all| all[0]);
        }
        let wide = self.b.ins().scalar_to_vector(types::F32X4, a);
        let result = self.wide_one(function, wide);
        self.b.ins().extractlane(result, 0)
    }
}

/// A routine being written.
struct Code {
    a: CodeAssembler,
    /// What lies behind it.
    constants: Vec<(CodeLabel, u32)>,
}

/// The argument.
const X: AsmRegisterZmm = zmm16;

/// The routine; see `Writer::parts` and `legalise` for the same, vector by vector.
pub(super) fn code(function: Function) -> Result<Vec<u8>, IcedError> {
    let mut code = Code { a: CodeAssembler::new(64)?, constants: Vec::new() };
    code.a.vinsertf32x4(ymm16, ymm0, xmm1, 1)?;
    if function != Function::FromF16 {
        code.a.vinsertf32x4(ymm17, ymm2, xmm3, 1)?;
        code.a.vinsertf64x4(X, X, ymm17, 1)?;
    }
    let result = match function {
        Function::FromF16 => {
            code.a.vcvtph2ps(zmm17, ymm16)?;
            zmm17
        }
        Function::ToF16 => {
            // To the nearest, ties to even.
            code.a.vcvtps2ph(ymm17, X, 0)?;
            zmm17
        }
        Function::ToBf16 => code.bf16()?,
        Function::Exp => code.power(Base::E, X)?,
        Function::Exp2 => code.power(Base::Two, X)?,
        Function::Tanh => code.tanh()?,
        Function::Erf => code.erf()?,
    };
    let Code { mut a, constants } = code;
    match function {
        Function::ToF16 | Function::ToBf16 => a.vmovdqu32(ymmword_ptr(rdi), ymm17)?,
        _ => a.vmovups(zmmword_ptr(rdi), result)?,
    }
    a.ret()?;
    for (mut label, bits) in constants {
        a.set_label(&mut label)?;
        a.dd(&[bits])?;
    }
    a.assemble(0)
}

impl Code {
    fn bits(&mut self, bits: u32) -> CodeLabel {
        let label = self.a.create_label();
        self.constants.push((label, bits));
        label
    }

    fn constant(&mut self, value: f32) -> CodeLabel {
        self.bits(value.to_bits())
    }

    /// A polynomial of `x` in `sum`, lowest power first.
    fn polynomial(
        &mut self,
        sum: AsmRegisterZmm,
        x: AsmRegisterZmm,
        coefficients: &[u32],
    ) -> Result<(), IcedError> {
        for (at, bits) in coefficients.iter().rev().enumerate() {
            let coefficient = self.bits(*bits);
            match at {
                0 => self.a.vbroadcastss(sum, dword_ptr(coefficient))?,
                _ => self.a.vfmadd213ps(sum, x, dword_bcst(coefficient))?,
            }
        }
        Ok(())
    }

    /// A base to the power of `x`, which it changes, as well as `zmm17` and `zmm18`, where the result is.
    fn power(&mut self, base: Base, x: AsmRegisterZmm) -> Result<AsmRegisterZmm, IcedError> {
        let (n, p) = (zmm17, zmm18);
        // Of a NaN and another they give the second, so a NaN stays one.
        let [low, high] = range(base).map(|bound| self.constant(bound));
        self.a.vbroadcastss(n, dword_ptr(low))?;
        self.a.vbroadcastss(p, dword_ptr(high))?;
        self.a.vmaxps(x, n, x)?;
        self.a.vminps(x, p, x)?;
        // The nearest whole number of x in powers of two, and what is left of x.
        let magic = self.constant(MAGIC_F32 as f32);
        match base {
            Base::E => {
                let log2e = self.constant(std::f32::consts::LOG2_E);
                self.a.vbroadcastss(n, dword_ptr(log2e))?;
                self.a.vfmadd213ps(n, x, dword_bcst(magic))?;
                self.a.vsubps(n, n, dword_bcst(magic))?;
                for part in LN_2_F32 {
                    let part = self.bits(part);
                    self.a.vfnmadd231ps(x, n, dword_bcst(part))?;
                }
                let coefficients = [&[1.0f32.to_bits(); 2][..], &EXP_F32].concat();
                self.polynomial(p, x, &coefficients)?;
            }
            Base::Two => {
                self.a.vaddps(n, x, dword_bcst(magic))?;
                self.a.vsubps(n, n, dword_bcst(magic))?;
                self.a.vsubps(x, x, n)?;
                let coefficients = [&[1.0f32.to_bits()][..], &EXP2_F32].concat();
                self.polynomial(p, x, &coefficients)?;
            }
        }
        self.a.vscalefps(p, p, n)?;
        Ok(p)
    }

    /// The argument as bf16 in `ymm17`: to the nearest, ties to even.
    fn bf16(&mut self) -> Result<AsmRegisterZmm, IcedError> {
        /// Not equal, or not comparable.
        const DIFFERS: u32 = 4;
        let (one, half, nan) = (self.bits(1), self.bits(0x7fff), self.bits(0x7fc0));
        self.a.vpsrld(zmm17, X, 16)?;
        self.a.vpandd(zmm17, zmm17, dword_bcst(one))?;
        self.a.vpaddd(zmm17, zmm17, dword_bcst(half))?;
        self.a.vpaddd(zmm17, zmm17, X)?;
        self.a.vpsrld(zmm17, zmm17, 16)?;
        self.a.vcmpps(k1, X, X, DIFFERS)?;
        self.a.vpbroadcastd(zmm17.k1(), dword_ptr(nan))?;
        self.a.vpmovdw(ymm17, zmm17)?;
        Ok(zmm17)
    }

    /// The magnitude of the argument in `size`, and in `most` that or, if it is less, `bound`; a NaN stays one.
    fn sizes(&mut self, size: AsmRegisterZmm, most: AsmRegisterZmm, bound: f32) -> Result<(), IcedError> {
        let rest = self.bits(i32::MAX.cast_unsigned());
        let bound = self.constant(bound);
        self.a.vpandd(size, X, dword_bcst(rest))?;
        self.a.vbroadcastss(most, dword_ptr(bound))?;
        self.a.vminps(most, most, size)
    }

    /// Where the magnitude is above `bound`, puts `far`, with the argument's sign, in the place of `near`.
    fn far(
        &mut self,
        (near, far): (AsmRegisterZmm, AsmRegisterZmm),
        size: AsmRegisterZmm,
        bound: f32,
    ) -> Result<(), IcedError> {
        /// Greater, of numbers alone.
        const GREATER: u32 = 0x1e;
        let (sign, bound) = (self.bits(i32::MIN.cast_unsigned()), self.constant(bound));
        self.a.vcmpps(k1, size, dword_bcst(bound), GREATER)?;
        self.a.vpandd(zmm23, X, dword_bcst(sign))?;
        self.a.vpord(near.k1(), far, zmm23)
    }

    fn tanh(&mut self) -> Result<AsmRegisterZmm, IcedError> {
        let (near, z, size, most) = (zmm19, zmm20, zmm21, zmm22);
        self.a.vmulps(z, X, X)?;
        self.polynomial(near, z, &TANH_F32)?;
        self.a.vmulps(z, z, X)?;
        self.a.vfmadd213ps(near, z, X)?;
        // Of a zero that is its own, with its sign.
        let (zero, one, two) = (self.constant(0.0), self.constant(1.0), self.constant(2.0));
        self.a.vcmpps(k1, X, dword_bcst(zero), 0)?;
        self.a.vmovaps(near.k1(), X)?;
        self.sizes(size, most, 10.0)?;
        self.a.vaddps(most, most, most)?;
        let power = self.power(Base::E, most)?;
        self.a.vaddps(power, power, dword_bcst(one))?;
        self.a.vbroadcastss(zmm23, dword_ptr(two))?;
        self.a.vdivps(power, zmm23, power)?;
        self.a.vbroadcastss(zmm23, dword_ptr(one))?;
        self.a.vsubps(power, zmm23, power)?;
        self.far((near, power), size, 0.62)?;
        Ok(near)
    }

    fn erf(&mut self) -> Result<AsmRegisterZmm, IcedError> {
        let (near, z, size, most, far) = (zmm19, zmm20, zmm21, zmm22, zmm24);
        self.a.vmulps(z, X, X)?;
        self.polynomial(near, z, &ERF_F32)?;
        self.a.vfmadd213ps(near, X, X)?;
        self.sizes(size, most, 4.0)?;
        self.polynomial(far, most, &ERF_POWER_F32)?;
        self.a.vfmsub213ps(far, most, most)?;
        let power = self.power(Base::E, far)?;
        let one = self.constant(1.0);
        self.a.vbroadcastss(zmm23, dword_ptr(one))?;
        self.a.vsubps(power, zmm23, power)?;
        self.far((near, power), size, ERF_SPLIT_F32 as f32)?;
        Ok(near)
    }
}
