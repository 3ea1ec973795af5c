//! `exp` and `exp2` of sixteen floats at once, on machines whose vectors are longer than the code generator's.
//!
//! Cranelift's vectors have 16 bytes. On a machine with AVX-512 four of them go through these together, in a routine that
//! is put behind the code of each kernel that calls it. It computes what `function` writes into the code elsewhere, in
//! the same steps and so to the same bits, but needs no branch: `vscalefps` multiplies by a power of two, rounded once, also
//! where the result is subnormal, zero or infinite.
//!
//! The routine takes four vectors in `xmm0` to `xmm3` and an address in `rdi`, where it puts the sixteen results. It changes
//! `zmm16` to `zmm18` only, which the code generator does not know of, so nothing must be saved around the call, and the
//! registers that older instructions merge into stay clean.

use super::function::{Base, LN_2_F32, MAGIC_F32};
use super::isa::Isa;
use super::lanes::own;
use super::routine::Routine;
use super::writer::Writer;
use crate::legalise::poly::{EXP_F32, EXP2_F32};
use cranelift_codegen::ir::{InstBuilder, Value as Ssa, types};
use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// Vectors that the routine takes.
pub(super) const VECTORS: usize = 4;
/// Bytes of its results.
pub(super) const BYTES: u32 = 64;
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

impl Writer<'_, '_> {
    /// A base to the power of each of these vectors of four floats; `None` where the machine has no longer ones, or there is but
    /// one.
    pub(super) fn wide_exponentials(&mut self, base: Base, all: &[Ssa]) -> Option<Vec<Ssa>> {
        let at = self.wide_at?;
        if all.len() < 2 || self.type_of(all[0]) != types::F32X4 {
            return None;
        }
        let routine = self.routine(Routine::Exponential(base));
        let to = self.b.ins().iadd_imm_s(self.scratch, i64::from(at));
        let mut results = Vec::with_capacity(all.len());
        for some in all.chunks(VECTORS) {
            // Where there are fewer, the last is repeated.
            let mut arguments: Vec<Ssa> = (0..VECTORS).map(|i| some[i.min(some.len() - 1)]).collect();
            arguments.push(to);
            self.b.ins().call(routine, &arguments);
            results
                .extend((0..some.len()).map(|i| self.b.ins().load(types::F32X4, own(), to, 16 * i as i32)));
        }
        Some(results)
    }
}

/// The routine; see `Writer::parts` for the same, vector by vector.
pub(super) fn code(base: Base) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let mut constants = Vec::new();
    let mut constant = |a: &mut CodeAssembler, value: f32| {
        let label = a.create_label();
        constants.push((label, value));
        label
    };
    let (x, n, p) = (zmm16, zmm17, zmm18);
    a.vinsertf32x4(ymm16, ymm0, xmm1, 1)?;
    a.vinsertf32x4(ymm17, ymm2, xmm3, 1)?;
    a.vinsertf64x4(x, x, ymm17, 1)?;
    // Of a NaN and another they give the second, so a NaN stays one.
    let [low, high] = range(base).map(|bound| constant(&mut a, bound));
    a.vbroadcastss(n, dword_ptr(low))?;
    a.vbroadcastss(p, dword_ptr(high))?;
    a.vmaxps(x, n, x)?;
    a.vminps(x, p, x)?;
    // The nearest whole number of x in powers of two, and what is left of x.
    let magic = constant(&mut a, MAGIC_F32 as f32);
    let mut coefficients: Vec<u32> = Vec::new();
    match base {
        Base::E => {
            let log2e = constant(&mut a, std::f32::consts::LOG2_E);
            a.vbroadcastss(n, dword_ptr(log2e))?;
            a.vfmadd213ps(n, x, dword_bcst(magic))?;
            a.vsubps(n, n, dword_bcst(magic))?;
            for part in LN_2_F32 {
                let part = constant(&mut a, f32::from_bits(part));
                a.vfnmadd231ps(x, n, dword_bcst(part))?;
            }
            coefficients.extend([1.0f32.to_bits(); 2].iter().chain(&EXP_F32));
        }
        Base::Two => {
            a.vaddps(n, x, dword_bcst(magic))?;
            a.vsubps(n, n, dword_bcst(magic))?;
            a.vsubps(x, x, n)?;
            coefficients.extend([1.0f32.to_bits()].iter().chain(&EXP2_F32));
        }
    }
    let mut coefficients = coefficients
        .into_iter()
        .rev()
        .map(|bits| constant(&mut a, f32::from_bits(bits)))
        .collect::<Vec<_>>()
        .into_iter();
    if let Some(first) = coefficients.next() {
        a.vbroadcastss(p, dword_ptr(first))?;
    }
    for coefficient in coefficients {
        a.vfmadd213ps(p, x, dword_bcst(coefficient))?;
    }
    a.vscalefps(p, p, n)?;
    a.vmovups(zmmword_ptr(rdi), p)?;
    a.ret()?;
    for (mut label, value) in constants {
        a.set_label(&mut label)?;
        a.dd(&[value.to_bits()])?;
    }
    a.assemble(0)
}
