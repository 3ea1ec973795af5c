//! What a code object says of a kernel: its descriptor (LLVM's "User Guide for AMDGPU Backend", "Kernel Descriptor").

use object::read::elf::ElfFile64;
use object::{Endianness, Object as _, ObjectSection as _, ObjectSymbol as _};

/// Bytes of one.
const BYTES: u64 = 64;
/// The most bytes of a thread's private memory (scratch), to which registers spill: a runtime reserves them for all threads that may
/// run at a time, beside what a guest was given.
const SCRATCH: u32 = 4096;
/// The most bytes behind the parameters that the runtime fills in.
const IMPLICIT: u64 = 256;
/// `ENABLE_WAVEFRONT_SIZE32` of `KERNEL_CODE_PROPERTIES`.
const WAVE32: u16 = 1 << 10;

/// A kernel's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// Bytes of shared memory (LDS) of a block, beside what a launch asks for.
    pub(crate) shared_bytes: u32,
    /// Bytes of a thread's private memory.
    pub(crate) scratch_bytes: u32,
    /// Bytes of its block of parameters, with what the runtime fills in.
    pub(crate) parameter_bytes: u32,
    /// Threads of a wave.
    pub(crate) wavefront: u32,
}

/// What a launch relies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Bytes of the block of parameters that a launch gives.
    pub(crate) parameter_bytes: u32,
    /// Bytes of shared memory that a launch asks for.
    pub(crate) shared_bytes: u32,
    /// Bytes of shared memory that the device has for a block.
    pub(crate) most_shared: u32,
    /// Threads of the device's waves.
    pub(crate) wavefront: u32,
}

impl Descriptor {
    /// That of a kernel in a code object whose parts lie within it.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn of(file: &ElfFile64<'_, Endianness>, kernel: &str) -> Result<Self, String> {
        let name = format!("{kernel}.kd");
        let symbol = file.dynamic_symbols().find(|symbol| symbol.name() == Ok(&name));
        let symbol = symbol.ok_or_else(|| format!("the code object has no kernel {kernel}"))?;
        let section = symbol.section_index().and_then(|index| file.section_by_index(index).ok());
        let bytes = section.filter(|_| symbol.size() == BYTES).and_then(|section| {
            // Nothing of what lies beyond the section.
            section.data_range(symbol.address(), BYTES).ok().flatten()
        });
        let bytes: [u8; BYTES as usize] = bytes
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or_else(|| format!("the descriptor of kernel {kernel} is damaged"))?;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let wave32 = u16::from_le_bytes([bytes[56], bytes[57]]) & WAVE32 != 0;
        Ok(Self {
            shared_bytes: word(0),
            scratch_bytes: word(4),
            parameter_bytes: word(8),
            wavefront: if wave32 { 32 } else { 64 },
        })
    }

    /// That of a kernel in a file.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn in_image(image: &[u8], kernel: &str) -> Result<Self, String> {
        let file = ElfFile64::<Endianness>::parse(image).map_err(|error| error.to_string())?;
        Self::of(&file, kernel)
    }

    /// That its threads need no more private memory than there may be.
    ///
    /// # Errors
    /// What it has, behind the kernel's name.
    pub(crate) fn check_scratch(&self) -> Result<(), String> {
        match self.scratch_bytes {
            0..=SCRATCH => Ok(()),
            bytes => Err(format!(
                "spills {bytes} bytes of registers a thread, local arrays included, {SCRATCH} are possible: keep fewer values at a time"
            )),
        }
    }

    /// That the kernel is what a launch takes it for.
    ///
    /// # Errors
    /// What it is instead.
    pub(crate) fn check(&self, wanted: &Wanted) -> Result<(), String> {
        let given = u64::from(wanted.parameter_bytes);
        if !(given..=given.next_multiple_of(8) + IMPLICIT).contains(&self.parameter_bytes.into()) {
            let own = self.parameter_bytes;
            return Err(format!("its code has {own} bytes of parameters, and launches give it {given}"));
        }
        if self.wavefront != wanted.wavefront {
            let (own, device) = (self.wavefront, wanted.wavefront);
            return Err(format!("its code is for waves of {own} threads, and the device's have {device}"));
        }
        let shared = u64::from(self.shared_bytes) + u64::from(wanted.shared_bytes);
        if shared > wanted.most_shared.into() {
            let most = wanted.most_shared;
            return Err(format!(
                "its blocks need {shared} bytes of shared memory (LDS), the device has {most}"
            ));
        }
        self.check_scratch().map_err(|reason| format!("it {reason}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_launch_takes_it_for() {
        let good = Descriptor { shared_bytes: 1024, scratch_bytes: 0, parameter_bytes: 40, wavefront: 64 };
        let wanted = Wanted { parameter_bytes: 40, shared_bytes: 0, most_shared: 65536, wavefront: 64 };
        let check = |descriptor: Descriptor, wanted: Wanted, told: Option<&str>| match (
            descriptor.check(&wanted),
            told,
        ) {
            (Ok(()), None) => {}
            (Err(reason), Some(told)) => assert!(reason.contains(told), "{reason}"),
            (got, told) => panic!("{descriptor:?}, {wanted:?}: {got:?}, not {told:?}"),
        };
        check(good, wanted, None);
        check(good, Wanted { parameter_bytes: 33, ..wanted }, None);
        check(Descriptor { parameter_bytes: 296, ..good }, wanted, None);
        check(Descriptor { parameter_bytes: 297, ..good }, wanted, Some("has 297 bytes of parameters"));
        check(Descriptor { parameter_bytes: 39, ..good }, wanted, Some("launches give it 40"));
        check(good, Wanted { wavefront: 32, ..wanted }, Some("for waves of 64 threads"));
        check(good, Wanted { shared_bytes: 64512, ..wanted }, None);
        check(good, Wanted { shared_bytes: 64513, ..wanted }, Some("65537 bytes of shared memory"));
        check(Descriptor { shared_bytes: u32::MAX, ..good }, wanted, Some("the device has 65536"));
        check(Descriptor { scratch_bytes: 4097, ..good }, wanted, Some("it spills 4097 bytes"));
    }
}
