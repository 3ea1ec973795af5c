//! The ELF object that machine code is handed over in: one section, a symbol for each kernel, and one for its stack; no
//! relocations.

use super::isa::Architecture;
use object::write::{Object, Symbol, SymbolSection};
use object::{BinaryFormat, Endianness, SymbolFlags, SymbolKind, SymbolScope};
use vm_abi::STACK_SUFFIX;

/// What our routines, which a kernel calls, need at most of it.
const ROUTINES: u64 = 4096;
/// Functions begin at multiples of this.
const ALIGN: u64 = 64;

/// A function.
pub(super) struct Function {
    pub(super) symbol: String,
    pub(super) code: Vec<u8>,
    /// Bytes of its frame.
    pub(super) frame: u32,
}

/// An object with these functions; `None` if it can't be written, which no known input leads to.
pub(super) fn write(architecture: Architecture, functions: &[Function]) -> Option<Vec<u8>> {
    let machine = match architecture {
        Architecture::X86_64 => object::Architecture::X86_64,
        Architecture::Aarch64 => object::Architecture::Aarch64,
    };
    let mut out = Object::new(BinaryFormat::Elf, machine, Endianness::Little);
    let text = out.section_id(object::write::StandardSection::Text);
    for Function { symbol, code, frame } in functions {
        let known = Symbol {
            name: symbol.clone().into_bytes(),
            value: out.append_section_data(text, code, ALIGN),
            size: code.len() as u64,
            kind: SymbolKind::Text,
            scope: SymbolScope::Linkage,
            weak: false,
            section: SymbolSection::Section(text),
            flags: SymbolFlags::None,
        };
        let stack = Symbol {
            name: [symbol, STACK_SUFFIX].concat().into_bytes(),
            value: u64::from(*frame) + ROUTINES,
            size: 0,
            kind: SymbolKind::Data,
            scope: SymbolScope::Linkage,
            weak: false,
            section: SymbolSection::Absolute,
            flags: SymbolFlags::None,
        };
        out.add_symbol(known);
        out.add_symbol(stack);
    }
    out.write().ok()
}
