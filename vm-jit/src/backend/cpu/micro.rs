//! Products of a strip of rows and a panel of columns, for x86-64: the vectors that the code generator lacks, of 32 bytes with
//! AVX2 and of 64 with AVX-512. Twelve or twenty-four sums stay in registers; for each step of the inner dimension two vectors of
//! the panel are loaded, and a number of each row is broadcast (Van Zee and van de Geijn, "BLIS: A Framework for Rapidly
//! Instantiating BLAS Functionality", 2015).
//!
//! A routine is called as a C function:
//!
//! ```c
//! void micro(const float *left, const float *panel, float *sums, int64_t inner, int64_t stride, int64_t pitch, int64_t down);
//! ```
//!
//! `stride` is the bytes between rows of `left`, whose columns are neighbours, or of a turned one the other way round. `down` is
//! the bytes from row to row of the panel, and `pitch` of the sums. `inner` is at least 1.

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
    /// Has the panel one vector only?
    pub(super) narrow: bool,
}

/// The most rows of a strip, by the columns of a panel.
pub(super) fn rows(panel: u32) -> u32 {
    if panel == 32 { 12 } else { 6 }
}

/// The longest vectors of a machine, and the instructions that a routine takes on them.
trait Vectors {
    /// A register of the machine.
    type Register: Copy + 'static;
    /// Its bytes.
    const BYTES: i32;
    /// Two for a row of the panel, then those that numbers are broadcast to in turn, then sums.
    const PANEL: [Self::Register; 2];
    const NUMBERS: &'static [Self::Register];
    const SUMS: &'static [Self::Register];

    fn zero(a: &mut CodeAssembler, to: Self::Register) -> Result<(), IcedError>;
    fn load(a: &mut CodeAssembler, to: Self::Register, from: AsmMemoryOperand) -> Result<(), IcedError>;
    fn store(a: &mut CodeAssembler, to: AsmMemoryOperand, from: Self::Register) -> Result<(), IcedError>;
    fn broadcast(a: &mut CodeAssembler, to: Self::Register, from: AsmMemoryOperand) -> Result<(), IcedError>;
    fn add(a: &mut CodeAssembler, to: Self::Register, from: AsmMemoryOperand) -> Result<(), IcedError>;
    fn fma(
        a: &mut CodeAssembler,
        to: Self::Register,
        x: Self::Register,
        y: Self::Register,
    ) -> Result<(), IcedError>;
}

/// The same instructions by the same names, on registers of either length.
macro_rules! vectors {
    ($name:ident, $register:ty, $bytes:literal, $panel:expr, $numbers:expr, $sums:expr) => {
        struct $name;

        impl Vectors for $name {
            type Register = $register;
            const BYTES: i32 = $bytes;
            const PANEL: [$register; 2] = $panel;
            const NUMBERS: &'static [$register] = &$numbers;
            const SUMS: &'static [$register] = &$sums;

            fn zero(a: &mut CodeAssembler, to: $register) -> Result<(), IcedError> {
                a.vxorps(to, to, to)
            }

            fn load(a: &mut CodeAssembler, to: $register, from: AsmMemoryOperand) -> Result<(), IcedError> {
                a.vmovups(to, from)
            }

            fn store(a: &mut CodeAssembler, to: AsmMemoryOperand, from: $register) -> Result<(), IcedError> {
                a.vmovups(to, from)
            }

            fn broadcast(
                a: &mut CodeAssembler,
                to: $register,
                from: AsmMemoryOperand,
            ) -> Result<(), IcedError> {
                a.vbroadcastss(to, from)
            }

            fn add(a: &mut CodeAssembler, to: $register, from: AsmMemoryOperand) -> Result<(), IcedError> {
                a.vaddps(to, to, from)
            }

            fn fma(
                a: &mut CodeAssembler,
                to: $register,
                x: $register,
                y: $register,
            ) -> Result<(), IcedError> {
                a.vfmadd231ps(to, x, y)
            }
        }
    };
}

vectors!(
    Avx2,
    AsmRegisterYmm,
    32,
    [ymm0, ymm1],
    [ymm2, ymm3],
    [ymm4, ymm5, ymm6, ymm7, ymm8, ymm9, ymm10, ymm11, ymm12, ymm13, ymm14, ymm15]
);
vectors!(
    Avx512,
    AsmRegisterZmm,
    64,
    [zmm0, zmm1],
    [zmm2, zmm3, zmm4, zmm5],
    [
        zmm8, zmm9, zmm10, zmm11, zmm12, zmm13, zmm14, zmm15, zmm16, zmm17, zmm18, zmm19, zmm20, zmm21,
        zmm22, zmm23, zmm24, zmm25, zmm26, zmm27, zmm28, zmm29, zmm30, zmm31,
    ]
);

impl Micro {
    /// Its code.
    pub(super) fn code(self, isa: Isa) -> Result<Vec<u8>, IcedError> {
        match isa {
            Isa::X86V4 => self.with::<Avx512>(),
            _ => self.with::<Avx2>(),
        }
    }

    fn with<V: Vectors>(self) -> Result<Vec<u8>, IcedError> {
        let mut a = CodeAssembler::new(64)?;
        let rows = usize::from(self.rows);
        let panel = &V::PANEL[..if self.narrow { 1 } else { 2 }];
        let sums: Vec<&[V::Register]> = V::SUMS.chunks(panel.len()).take(rows).collect();
        self.begin(&mut a)?;
        for sum in sums.iter().copied().flatten() {
            V::zero(&mut a, *sum)?;
        }
        self.steps(&mut a, |a, step| {
            for (i, part) in (0..).zip(panel) {
                V::load(a, *part, ptr(rsi + V::BYTES * i))?;
            }
            a.add(rsi, rbx)?;
            for ((row, sums), number) in sums.iter().enumerate().zip(V::NUMBERS.iter().cycle()) {
                V::broadcast(a, *number, self.number(row, step))?;
                for (sum, part) in sums.iter().zip(panel) {
                    V::fma(a, *sum, *number, *part)?;
                }
            }
            Ok(())
        })?;
        for sums in sums {
            for (i, sum) in (0..).zip(sums) {
                let at = ptr(rdx + V::BYTES * i);
                if self.adds {
                    V::add(&mut a, *sum, at)?;
                }
                V::store(&mut a, at, *sum)?;
            }
            a.add(rdx, r9)?;
        }
        a.vzeroupper()?;
        a.pop(rbx)?;
        a.ret()?;
        a.assemble(0)
    }

    /// The rows' base registers, and what is wanted at the end into the cache.
    fn begin(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        // The seventh argument, above the address to return to.
        a.push(rbx)?;
        a.mov(rbx, qword_ptr(rsp + 16))?;
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
        step: impl Fn(&mut CodeAssembler, i32) -> Result<(), IcedError>,
    ) -> Result<(), IcedError> {
        let [mut many, mut rest, mut one, mut end] = [0; 4].map(|_| a.create_label());
        // Of a turned one each step has another row.
        let advance = |a: &mut CodeAssembler, by: i32| match self.turned {
            true => a.add(rdi, r8),
            false => self.bases().iter().try_for_each(|base| a.add(*base, 4 * by)),
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
