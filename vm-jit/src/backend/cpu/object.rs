//! The ELF object that machine code is handed over in: one section, a symbol for each kernel, no relocations.

use super::isa::Architecture;
use object::write::{Object, Symbol, SymbolSection};
use object::{BinaryFormat, Endianness, SymbolFlags, SymbolKind, SymbolScope};

/// Functions begin at multiples of this.
const ALIGN: u64 = 64;

/// An object with these functions; `None` if it can't be written, which no known input leads to.
pub(super) fn write(architecture: Architecture, functions: &[(String, Vec<u8>)]) -> Option<Vec<u8>> {
    let machine = match architecture {
        Architecture::X86_64 => object::Architecture::X86_64,
        Architecture::Aarch64 => object::Architecture::Aarch64,
    };
    let mut out = Object::new(BinaryFormat::Elf, machine, Endianness::Little);
    let text = out.section_id(object::write::StandardSection::Text);
    for (name, code) in functions {
        let value = out.append_section_data(text, code, ALIGN);
        out.add_symbol(Symbol {
            name: name.clone().into_bytes(),
            value,
            size: code.len() as u64,
            kind: SymbolKind::Text,
            scope: SymbolScope::Linkage,
            weak: false,
            section: SymbolSection::Section(text),
            flags: SymbolFlags::None,
        });
    }
    out.write().ok()
}
