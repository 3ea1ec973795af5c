//! Names of functions, by the symbols that files have.

use std::fs::File;
use std::path::Path;

use object::read::elf::ElfFile64;
use object::{Endianness, Object as _, ObjectSegment as _, ObjectSymbol as _, ReadCache, SymbolKind};
use vm_hook::control::{Frame, Holder};

/// Names the functions that files do not export, where the file here is the one there.
pub(crate) fn name(holders: &mut [Holder]) {
    let mut unnamed: Vec<&mut Frame> = holders.iter_mut().flat_map(|holder| &mut holder.frames).collect();
    unnamed.retain(|frame| frame.function.is_none() && !frame.file.is_empty());
    unnamed.sort_by(|one, other| one.file.cmp(&other.file));
    for frames in unnamed.chunk_by_mut(|one, other| one.file == other.file) {
        name_in(frames);
    }
}

/// Names those of one file. One that can't be read has no names.
fn name_in(frames: &mut [&mut Frame]) -> Option<()> {
    let path = Path::new(&frames.first()?.file).to_owned();
    let cache = ReadCache::new(File::open(path).ok()?);
    let file = ElfFile64::<Endianness, _>::parse(&cache).ok()?;
    let base = file.segments().map(|segment| segment.address()).min()?;
    let mut best: Vec<u64> = vec![0; frames.len()];
    for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.is_definition())
    {
        let start = symbol.address();
        for (frame, best) in frames.iter_mut().zip(&mut best) {
            // Behind a call that does not return there may be the next function.
            let Some(at) = (frame.offset.checked_add(base)).and_then(|at| at.checked_sub(1)) else {
                continue;
            };
            let is_within = start <= at && at - start < symbol.size();
            if let (true, true, Ok(name)) = (is_within, start >= *best, symbol.name()) {
                *best = start;
                frame.function = Some(name.to_owned());
            }
        }
    }
    Some(())
}
