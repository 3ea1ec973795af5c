//! Products of a strip of rows and a panel of columns, for x86-64: the vectors that the code generator lacks, of 32 bytes with
//! AVX2 and of 64 with AVX-512. Twelve or twenty-four sums stay in registers; for each step of the inner dimension two vectors of
//! the panel are loaded, and a number of each row is broadcast (Van Zee and van de Geijn, "BLIS: A Framework for Rapidly
//! Instantiating BLAS Functionality", 2015).
//!
//! A routine is called as a C function:
//!
//! ```c
//! void micro(const float *left, const float *panel, float *sums, int64_t inner, int64_t stride, int64_t pitch);
//! ```
//!
//! `stride` is the bytes between rows of `left`, whose columns are neighbours, or of a turned one the other way round. The
//! panel lies row by row without gaps, `pitch` is the bytes from row to row of the sums. `inner` is at least 1.

use super::isa::Isa;
use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// Steps of the inner dimension that are taken at once.
const UNROLL: i32 = 4;
/// Rows that one base register reaches.
const REACH: usize = 3;

/// A routine's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Micro {
    /// Rows of the strip.
    pub(super) rows: u8,
    /// Are rows of the left factor neighbours?
    pub(super) turned: bool,
    /// Is it added to what the sums are?
    pub(super) adds: bool,
}

/// The most rows of a strip, by the columns of a panel.
pub(super) fn rows(panel: u32) -> u32 {
    if panel == 32 { 12 } else { 6 }
}

/// What differs between the two sizes of vectors.
struct Size {
    bytes: i32,
}

impl Micro {
    /// Its code.
    pub(super) fn code(self, isa: Isa) -> Result<Vec<u8>, IcedError> {
        let mut a = CodeAssembler::new(64)?;
        match isa {
            Isa::X86V4 => self.long(&mut a)?,
            _ => self.short(&mut a)?,
        }
        a.assemble(0)
    }

    fn short(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        const SUMS: [AsmRegisterYmm; 12] =
            [ymm4, ymm5, ymm6, ymm7, ymm8, ymm9, ymm10, ymm11, ymm12, ymm13, ymm14, ymm15];
        let rows = usize::from(self.rows);
        self.begin(a)?;
        for sum in &SUMS[..2 * rows] {
            a.vxorps(*sum, *sum, *sum)?;
        }
        self.steps(a, &Size { bytes: 32 }, |a, step| {
            a.vmovups(ymm0, ymmword_ptr(rsi + 64 * step))?;
            a.vmovups(ymm1, ymmword_ptr(rsi + 64 * step + 32))?;
            for row in 0..rows {
                let number = if row % 2 == 0 { ymm2 } else { ymm3 };
                a.vbroadcastss(number, self.number(row, step))?;
                a.vfmadd231ps(SUMS[2 * row], number, ymm0)?;
                a.vfmadd231ps(SUMS[2 * row + 1], number, ymm1)?;
            }
            Ok(())
        })?;
        for pair in SUMS[..2 * rows].chunks(2) {
            for (i, sum) in pair.iter().enumerate() {
                let at = ymmword_ptr(rdx + 32 * i as i32);
                if self.adds {
                    a.vaddps(*sum, *sum, at)?;
                }
                a.vmovups(at, *sum)?;
            }
            a.add(rdx, r9)?;
        }
        a.vzeroupper()?;
        a.ret()
    }

    fn long(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        const SUMS: [AsmRegisterZmm; 24] = [
            zmm8, zmm9, zmm10, zmm11, zmm12, zmm13, zmm14, zmm15, zmm16, zmm17, zmm18, zmm19, zmm20, zmm21,
            zmm22, zmm23, zmm24, zmm25, zmm26, zmm27, zmm28, zmm29, zmm30, zmm31,
        ];
        let rows = usize::from(self.rows);
        self.begin(a)?;
        for sum in &SUMS[..2 * rows] {
            a.vpxord(*sum, *sum, *sum)?;
        }
        self.steps(a, &Size { bytes: 64 }, |a, step| {
            a.vmovups(zmm0, zmmword_ptr(rsi + 128 * step))?;
            a.vmovups(zmm1, zmmword_ptr(rsi + 128 * step + 64))?;
            for row in 0..rows {
                let number = [zmm2, zmm3, zmm4, zmm5][row % 4];
                a.vbroadcastss(number, self.number(row, step))?;
                a.vfmadd231ps(SUMS[2 * row], number, zmm0)?;
                a.vfmadd231ps(SUMS[2 * row + 1], number, zmm1)?;
            }
            Ok(())
        })?;
        for pair in SUMS[..2 * rows].chunks(2) {
            for (i, sum) in pair.iter().enumerate() {
                let at = zmmword_ptr(rdx + 64 * i as i32);
                if self.adds {
                    a.vaddps(*sum, *sum, at)?;
                }
                a.vmovups(at, *sum)?;
            }
            a.add(rdx, r9)?;
        }
        a.vzeroupper()?;
        a.ret()
    }

    /// The rows' base registers, and what is wanted at the end into the cache.
    fn begin(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        a.mov(rax, rdx)?;
        for row in 0..self.rows {
            a.prefetcht0(byte_ptr(rax))?;
            if row + 1 < self.rows {
                a.add(rax, r9)?;
            }
        }
        for pair in self.bases().windows(2) {
            a.lea(pair[1], ptr(pair[0] + r8 * 2))?;
            a.add(pair[1], r8)?;
        }
        Ok(())
    }

    /// Registers of the rows number 0, 3, 6 and 9; of neighbouring rows, of the first alone.
    fn bases(self) -> &'static [AsmRegister64] {
        const BASES: [AsmRegister64; 4] = [rdi, r10, r11, rax];
        &BASES[..if self.turned { 1 } else { usize::from(self.rows).div_ceil(REACH) }]
    }

    /// The number of a row at a step from where the base registers are.
    fn number(self, row: usize, step: i32) -> AsmMemoryOperand {
        if self.turned {
            return dword_ptr(rdi + 4 * row as i32);
        }
        let base = self.bases()[row / REACH];
        match row % REACH {
            0 => dword_ptr(base + 4 * step),
            1 => dword_ptr(base + r8 + 4 * step),
            _ => dword_ptr(base + r8 * 2 + 4 * step),
        }
    }

    /// All steps of the inner dimension, `rcx` of them.
    fn steps(
        self,
        a: &mut CodeAssembler,
        size: &Size,
        step: impl Fn(&mut CodeAssembler, i32) -> Result<(), IcedError>,
    ) -> Result<(), IcedError> {
        let [mut many, mut rest, mut one, mut end] = [0; 4].map(|_| a.create_label());
        // Of a turned one each step has another row.
        let advance = |a: &mut CodeAssembler, by: i32| {
            a.add(rsi, 2 * size.bytes * by)?;
            match self.turned {
                true => a.add(rdi, r8),
                false => self.bases().iter().try_for_each(|base| a.add(*base, 4 * by)),
            }
        };
        a.sub(rcx, UNROLL)?;
        a.jb(rest)?;
        a.set_label(&mut many)?;
        match self.turned {
            true => {
                for _ in 0..UNROLL {
                    step(a, 0)?;
                    advance(a, 1)?;
                }
            }
            false => {
                (0..UNROLL).try_for_each(|i| step(a, i))?;
                advance(a, UNROLL)?;
            }
        }
        a.sub(rcx, UNROLL)?;
        a.jae(many)?;
        a.set_label(&mut rest)?;
        a.add(rcx, UNROLL)?;
        a.je(end)?;
        a.set_label(&mut one)?;
        step(a, 0)?;
        advance(a, 1)?;
        a.dec(rcx)?;
        a.jne(one)?;
        a.set_label(&mut end)?;
        // A label must stand before an instruction.
        a.nop()
    }
}
