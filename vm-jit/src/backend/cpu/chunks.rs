//! Copies of a row in chunks of a panel's width, for x86-64: the rows that come next are prefetched, since what fetches neighbouring
//! addresses by itself ends with each page of memory, and rows of large matrices lie pages apart.
//!
//! A routine is called as a C function:
//!
//! ```c
//! void chunks(const void *from, void *to, int64_t across, int64_t count, int64_t ahead);
//! ```
//!
//! Chunks lie without gaps in `from`, and `across` bytes apart in `to`. There is at least one. What is `ahead` bytes further
//! than each is prefetched, which does no harm wherever that is.

use super::isa::Isa;
use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// Its code.
pub(super) fn code(isa: Isa) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let mut next = a.create_label();
    a.set_label(&mut next)?;
    let bytes = match isa {
        Isa::X86V4 => {
            a.prefetcht0(byte_ptr(rdi + r8))?;
            a.prefetcht0(byte_ptr(rdi + r8 + 64))?;
            a.vmovups(zmm16, zmmword_ptr(rdi))?;
            a.vmovups(zmm17, zmmword_ptr(rdi + 64))?;
            a.vmovups(zmmword_ptr(rsi), zmm16)?;
            a.vmovups(zmmword_ptr(rsi + 64), zmm17)?;
            128
        }
        _ => {
            a.prefetcht0(byte_ptr(rdi + r8))?;
            a.vmovups(ymm0, ymmword_ptr(rdi))?;
            a.vmovups(ymm1, ymmword_ptr(rdi + 32))?;
            a.vmovups(ymmword_ptr(rsi), ymm0)?;
            a.vmovups(ymmword_ptr(rsi + 32), ymm1)?;
            64
        }
    };
    a.add(rdi, bytes)?;
    a.add(rsi, rdx)?;
    a.dec(rcx)?;
    a.jne(next)?;
    a.vzeroupper()?;
    a.ret()?;
    a.assemble(0)
}
