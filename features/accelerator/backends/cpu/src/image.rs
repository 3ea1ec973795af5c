//! The object that a kernel comes in: finds its code, or says why there is none to run.

use object::{Architecture, Object, ObjectSection, ObjectSymbol, SectionKind, SymbolKind, SymbolSection};
use vm_abi::STACK_SUFFIX;

/// The most bytes of code that are taken.
const MAX_CODE: u64 = 256 << 20;

/// Where a kernel's code is in its object.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Image<'a> {
    /// The section that holds the code.
    pub(crate) code: &'a [u8],
    /// Where in it the kernel begins.
    pub(crate) entry: usize,
    /// Bytes of stack that it needs, if the object tells.
    pub(crate) stack: Option<u64>,
}

/// Reads an object.
///
/// # Errors
/// What is wrong with it, in words.
pub(crate) fn read<'a>(bytes: &'a [u8], symbol: &str) -> Result<Image<'a>, String> {
    let object =
        object::File::parse(bytes).map_err(|error| format!("it is no object of machine code: {error}"))?;
    let here = if cfg!(target_arch = "x86_64") { Architecture::X86_64 } else { Architecture::Aarch64 };
    if object.architecture() != here {
        return Err(format!("it is for {:?}, this machine is {here:?}", object.architecture()));
    }
    let found = object
        .symbols()
        .filter(|found| found.kind() == SymbolKind::Text)
        .find(|found| found.name() == Ok(symbol))
        .ok_or_else(|| format!("it has no function {symbol}"))?;
    let index = found.section_index().ok_or_else(|| format!("{symbol} lies in no section"))?;
    let section =
        object.section_by_index(index).map_err(|error| format!("{symbol} lies nowhere: {error}"))?;
    if section.kind() != SectionKind::Text {
        return Err(format!("{symbol} is not code"));
    }
    if object.sections().any(|section| section.relocations().next().is_some()) {
        return Err("it has relocations, so it would call something else".into());
    }
    let code = section.data().map_err(|error| format!("its code can't be read: {error}"))?;
    if code.is_empty() || code.len() as u64 > MAX_CODE {
        return Err(format!("it has {} bytes of code, 1 to {MAX_CODE} are taken", code.len()));
    }
    let offset = found.address().checked_sub(section.address());
    let entry = offset.and_then(|offset| usize::try_from(offset).ok()).filter(|entry| *entry < code.len());
    let entry = entry.ok_or_else(|| format!("{symbol} lies outside of its section"))?;
    let size = usize::try_from(found.size()).ok().filter(|size| *size <= code.len() - entry);
    size.ok_or_else(|| format!("{symbol} ends outside of its section"))?;
    let tells = |other: &object::Symbol<'_, '_>| {
        let name = other.name().ok().and_then(|name| name.strip_suffix(STACK_SUFFIX));
        other.section() == SymbolSection::Absolute && name == Some(symbol)
    };
    let stack = object.symbols().find(tells).map(|found| found.address());
    Ok(Image { code, entry, stack })
}
