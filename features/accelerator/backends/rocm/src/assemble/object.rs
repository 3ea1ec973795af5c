//! Code objects: ELF files that a driver loads (LLVM's "User Guide for AMDGPU Backend", "ELF Code Object").

use object::Endianness;
use object::elf;
use object::read::elf::ElfFile64;

use crate::descriptor::Descriptor;

/// `ELFOSABI_AMDGPU_HSA`.
const HSA: u8 = 64;
/// `EF_AMDGPU_MACH`: the bits of the head's flags that name a chip.
const MACHINE: u32 = 0xff;

/// `EF_AMDGPU_MACH_AMDGCN_…`: how the head of a file names a chip; `None` for one that is not known here.
fn machine(chip: &str) -> Option<u32> {
    Some(match chip {
        "gfx90a" => 0x3f,
        "gfx942" => 0x4c,
        "gfx950" => 0x4f,
        "gfx1100" => 0x41,
        "gfx1201" => 0x4e,
        _ => return None,
    })
}

/// The kernels that LLVM IR defines.
fn kernels(llvm_ir: &[u8]) -> impl Iterator<Item = &str> {
    llvm_ir.split(|byte| *byte == b'\n').filter_map(|line| {
        let name = line.strip_prefix(b"define amdgpu_kernel void @")?;
        str::from_utf8(&name[..name.iter().position(|byte| *byte == b'(')?]).ok()
    })
}

/// That it is a code object for the chip, of which all parts lie within it, with a descriptor of each kernel.
///
/// # Errors
/// What is wrong, behind the name of the program and "but".
pub(super) fn check(code: &[u8], chip: &str, llvm_ir: &[u8]) -> Result<(), String> {
    if !code.starts_with(vm_assemble::elf::MAGIC) {
        return Err(format!("what it wrote ({} bytes) is no code object", code.len()));
    }
    vm_assemble::elf::check(code)?;
    let file = ElfFile64::<Endianness>::parse(code).map_err(|error| error.to_string())?;
    let head = file.elf_header();
    if head.e_machine.get(Endianness::Little) != elf::EM_AMDGPU
        || head.e_type.get(Endianness::Little) != elf::ET_DYN
        || head.e_ident.os_abi != HSA
    {
        return Err("the ELF file is no code object for HSA's loader".into());
    }
    let made_for = head.e_flags.get(Endianness::Little) & MACHINE;
    if machine(chip).is_some_and(|machine| machine != made_for) {
        return Err(format!("the code object is not for {chip}, but for the machine {made_for:#x}"));
    }
    for kernel in kernels(llvm_ir) {
        let descriptor = Descriptor::of(&file, kernel)?;
        descriptor.check_scratch().map_err(|reason| format!("kernel {kernel} {reason}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_those_that_are_defined() {
        let ir = "define void @f() {\n}\ndefine amdgpu_kernel void @a(ptr %p) {\n}\n; define amdgpu_kernel void @no()\n\
                  define amdgpu_kernel void @b() {\n}";
        assert_eq!(kernels(ir.as_bytes()).collect::<Vec<_>>(), ["a", "b"]);
    }
}
