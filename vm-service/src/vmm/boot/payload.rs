//! Unpacks the Linux kernel that a bzImage carries, so that the guest need not.
//!
//! A bzImage is a small program with a compressed ELF file, the payload (Documentation/arch/x86/boot.rst,
//! `payload_offset`). Started, it moves itself out of the way, unpacks the payload, moves the ELF file's segments to
//! where they run and enters them. A guest does that on cold page tables and on one processor, while nothing else goes
//! on; here it goes on while devices are claimed and reset, and each byte is written once, to where it runs.
//!
//! What is entered is what the bzImage would enter, in the same state: `startup_64` with RSI = `struct boot_params`. Only
//! those are unpacked here of which that is true:
//! - gzip. The pure Rust decoders of other formats are slower than the bzImage's own.
//! - A kernel that runs where it was linked. One that is to choose its address at random (`CONFIG_RANDOMIZE_BASE`, reported by
//!   the relocations behind the ELF file) is left to do so, as no guest should lose that; `nokaslr` on the command line
//!   waives it.
//!
//! Everything else unpacks itself.

use std::io::Read;

use linux_loader::loader::bootparam::setup_header;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};
use zlib_rs::{Inflate, InflateFlush, Status};

use super::elf;
use super::loader::Loader;
use crate::vmm::layout;

/// A gzip header with the only compression method that there is (RFC 1952, 2.3.1).
const GZIP: [u8; 3] = [0x1f, 0x8b, 8];
/// `window_bits` of a 32 KiB window with a gzip header around the stream.
const GZIP_WINDOW: u8 = 16 + 15;
/// What is read and what is unpacked at a time.
const PIECE: usize = 128 << 10;
/// ELF program headers must end within this number of bytes; those of Linux follow the ELF header.
const MAX_HEADERS: usize = 64 << 10;
/// The first version of the boot protocol with a payload's offset and length.
const WITH_PAYLOAD: u16 = 0x208;

/// Bytes at a bzImage's beginning that are not loaded: the boot sector and the setup code for real mode.
pub(super) fn setup_bytes(header: &setup_header) -> u64 {
    let sectors = if header.setup_sects == 0 { 4 } else { u64::from(header.setup_sects) };
    (sectors + 1) * 512
}

/// Where in a bzImage the payload is: offset and length.
pub(super) fn place(header: &setup_header) -> Option<(u64, u64)> {
    let start = setup_bytes(header) + u64::from(header.payload_offset);
    (header.version >= WITH_PAYLOAD && header.payload_length > 0)
        .then_some((start, u64::from(header.payload_length)))
}

/// Unpacks `packed`, the payload, into RAM below `ram_end` and returns where it is entered; or says why the kernel has to
/// do it, where RAM may be written in part.
pub(super) fn unpack(
    loader: &Loader<'_>,
    packed: &mut impl Read,
    header: &setup_header,
    ram_end: u64,
    cmdline: &str,
) -> Result<u64, String> {
    let ram = header.pref_address.max(layout::HIGH_RAM)..ram_end;
    let most = u64::from(header.init_size);
    let mut writer =
        Writer { memory: loader.memory(), ram, most, at: 0, head: Vec::new(), elf: None, after: 0 };
    inflate(packed, |piece| writer.take(piece))?;
    let Writer { elf: Some(elf), after, at, .. } = writer else {
        return Err("it ends within its ELF headers".into());
    };
    if at < elf.file_end {
        return Err("it ends within its ELF file".into());
    }
    if after > 0 && !cmdline.split_ascii_whitespace().any(|word| word == "nokaslr") {
        return Err("it is to choose its address at random".into());
    }
    for segment in elf.segments.iter().filter(|segment| segment.in_memory > segment.in_file) {
        loader
            .zero(segment.address + segment.in_file, segment.in_memory - segment.in_file)
            .map_err(|error| error.to_string())?;
    }
    Ok(elf.entry)
}

/// Unpacks gzip, handing on what comes out piece by piece.
fn inflate(packed: &mut impl Read, mut take: impl FnMut(&[u8]) -> Result<(), String>) -> Result<(), String> {
    let mut input = vec![0; PIECE];
    let mut output = vec![0; PIECE];
    let mut stream = Inflate::new(true, GZIP_WINDOW);
    let mut first = true;
    loop {
        let count = packed.read(&mut input).map_err(|error| error.to_string())?;
        let mut rest = &input[..count];
        if count == 0 {
            return Err("it ends early".into());
        }
        if std::mem::take(&mut first) && !rest.starts_with(&GZIP) {
            return Err("it is not packed with gzip".into());
        }
        loop {
            let before = (stream.total_in(), stream.total_out());
            let status = stream
                .decompress(rest, &mut output, InflateFlush::NoFlush)
                .map_err(|error| error.as_str().to_owned())?;
            let taken = (stream.total_in() - before.0) as usize;
            let made = (stream.total_out() - before.1) as usize;
            take(&output[..made])?;
            rest = &rest[taken..];
            if status == Status::StreamEnd {
                return Ok(());
            }
            // More may be waiting inside while the output was filled.
            if (taken, made) == (0, 0) || rest.is_empty() && made < output.len() {
                break;
            }
        }
        if !rest.is_empty() {
            return Err("it can't be unpacked".into());
        }
    }
}

/// Writes an ELF file that comes in pieces to where its segments run.
struct Writer<'a> {
    memory: &'a GuestMemoryMmap,
    /// Where segments may lie.
    ram: std::ops::Range<u64>,
    /// The most bytes that may come: those of a bzImage fit the memory that it needs.
    most: u64,
    /// Offset in the file of the next piece.
    at: u64,
    /// The file's beginning, until its headers are complete.
    head: Vec<u8>,
    elf: Option<elf::Headers>,
    /// Bytes behind the file.
    after: u64,
}

impl Writer<'_> {
    fn take(&mut self, piece: &[u8]) -> Result<(), String> {
        if self.elf.is_some() {
            return self.write(piece);
        }
        self.head.extend_from_slice(piece);
        match elf::parse(&self.head) {
            Ok(headers) => {
                self.begin(headers)?;
                let head = std::mem::take(&mut self.head);
                self.write(&head)
            }
            Err(elf::Unfit::Short) if self.head.len() < MAX_HEADERS => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn begin(&mut self, headers: elf::Headers) -> Result<(), String> {
        for segment in &headers.segments {
            match segment.address.checked_add(segment.size()) {
                Some(end) if segment.address >= self.ram.start && end <= self.ram.end => {}
                _ => return Err(format!("its segment at {:#x} does not lie in RAM for it", segment.address)),
            }
        }
        if let Some(address) = headers.overlap() {
            return Err(format!("its segments overlap at {address:#x}"));
        }
        if !headers.enters_a_segment() {
            return Err(format!("its entry point {:#x} is not in it", headers.entry));
        }
        self.elf = Some(headers);
        Ok(())
    }

    /// Writes what of `piece` belongs to segments.
    fn write(&mut self, piece: &[u8]) -> Result<(), String> {
        let Some(elf) = &self.elf else { return Ok(()) };
        let end = self.at + piece.len() as u64;
        if end > self.most {
            return Err("it has more bytes than it says to need memory for".into());
        }
        for segment in &elf.segments {
            let from = segment.offset.max(self.at);
            let to = segment.offset.saturating_add(segment.in_file).min(end);
            if from < to {
                let part = &piece[(from - self.at) as usize..(to - self.at) as usize];
                self.memory
                    .write_slice(part, GuestAddress(segment.address + (from - segment.offset)))
                    .map_err(|error| error.to_string())?;
            }
        }
        self.after += end.saturating_sub(elf.file_end.max(self.at));
        self.at = end;
        Ok(())
    }
}

#[cfg(test)]
pub(in crate::vmm) mod testing {
    /// `data` in the gzip format, in stored blocks.
    pub(in crate::vmm) fn gzip(data: &[u8]) -> Vec<u8> {
        let mut packed = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
        let mut blocks = data.chunks(0xffff).peekable();
        while let Some(block) = blocks.next() {
            packed.push(u8::from(blocks.peek().is_none()));
            packed.extend((block.len() as u16).to_le_bytes());
            packed.extend((!(block.len() as u16)).to_le_bytes());
            packed.extend(block);
        }
        let crc = data.iter().fold(!0u32, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (0xedb8_8320 * (crc & 1)))
        });
        packed.extend((!crc).to_le_bytes());
        packed.extend((data.len() as u32).to_le_bytes());
        packed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::testing::gzip;
    use super::*;
    use crate::vmm::quiesced::Quiesced;

    const RUNS_AT: u64 = 0x20_0000;
    const INIT_SIZE: u32 = 0x10_0000;

    /// An ELF file with two segments: 300,000 bytes with 100 zeros after them, and 4 bytes right behind that.
    fn elf() -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
        for word in [RUNS_AT + 0x10, 64, 0] {
            file.extend(word.to_le_bytes());
        }
        file.extend(0u32.to_le_bytes());
        for half in [64u16, 56, 2, 0, 0, 0] {
            file.extend(half.to_le_bytes());
        }
        for (offset, address, in_file, in_memory) in
            [(0x1000, RUNS_AT, 300_000, 300_100), (0x1000 + 300_000, RUNS_AT + 300_100, 4, 4u64)]
        {
            file.extend(1u32.to_le_bytes());
            file.extend(7u32.to_le_bytes());
            for word in [offset, address, address, in_file, in_memory, 1] {
                file.extend(word.to_le_bytes());
            }
        }
        file.resize(0x1000, 0xee);
        file.extend((0..300_000u32).map(|n| (n / 7) as u8));
        file.extend(b"last");
        file
    }

    fn memory() -> GuestMemoryMmap {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        memory.write_slice(&[0xdd; 0x10_0000], GuestAddress(RUNS_AT)).unwrap();
        memory
    }

    fn run(memory: &GuestMemoryMmap, mut packed: &[u8], cmdline: &str) -> Result<u64, String> {
        let header = setup_header { pref_address: RUNS_AT, init_size: INIT_SIZE, ..setup_header::default() };
        let loader = Loader::new(memory, &Quiesced::unstarted(), &|| false);
        unpack(&loader, &mut packed, &header, 4 << 20, cmdline)
    }

    #[test]
    fn segments_come_to_where_they_run() {
        let memory = memory();
        let file = elf();
        assert_eq!(run(&memory, &gzip(&file), ""), Ok(RUNS_AT + 0x10));
        let mut placed = vec![0; 300_105];
        memory.read_slice(&mut placed, GuestAddress(RUNS_AT)).unwrap();
        assert_eq!(placed[..300_000], file[0x1000..0x1000 + 300_000]);
        assert_eq!(placed[300_000..300_100], [0; 100]);
        assert_eq!(placed[300_100..], *b"last\xdd");
    }

    #[test]
    fn what_is_not_understood_unpacks_itself() {
        fn check(packed: &[u8], cmdline: &str, expect: Result<u64, &str>) {
            match (run(&memory(), packed, cmdline), expect) {
                (Err(reason), Err(part)) => assert!(reason.contains(part), "{reason}"),
                (result, expect) => assert_eq!(result, expect.map_err(str::to_owned), "{cmdline}"),
            }
        }
        let with = |at: usize, bytes: &[u8]| {
            let mut file = elf();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            gzip(&file)
        };
        let good = gzip(&elf());
        check(&[], "", Err("ends early"));
        check(&good[..9], "", Err("ends early"));
        check(&good[..good.len() / 2], "", Err("ends early"));
        check(&good[..good.len() - 5], "", Err("ends early"));
        check(b"\x28\xb5\x2f\xfd", "", Err("not packed with gzip"));
        let mut broken = good.clone();
        let crc = broken.len() - 8;
        broken[crc] ^= 1;
        check(&broken, "", Err("data error"));
        check(&gzip(b"no ELF"), "", Err("ends within its ELF headers"));
        check(&gzip(&[0; 100]), "", Err("not a 64-bit"));
        check(&gzip(&elf()[..0x2000]), "", Err("ends within its ELF file"));
        check(&with(18, &[3, 0]), "", Err("ELF machine 3"));
        check(&with(24, &[0; 8]), "", Err("entry point 0x0"));
        check(&with(32, &[0xff; 8]), "", Err("beyond any file's end"));
        check(&with(32, &[0, 0, 1]), "", Err("no segment to load"));
        check(&with(32, &[0, 0, 0, 1]), "", Err("ends within its ELF headers"));
        check(&with(64 + 24, &[0xff; 8]), "", Err("does not lie in RAM"));
        check(&with(64 + 56 + 24, &RUNS_AT.to_le_bytes()), "", Err("overlap at 0x200000"));
        let mut long = elf();
        long.resize(INIT_SIZE as usize + 1, 0);
        check(&gzip(&long), "nokaslr", Err("more bytes than it says"));
        check(&with(64 + 24, &[0; 8]), "", Err("does not lie in RAM"));
        check(&with(64 + 40, &[0, 0, 0, 0, 1]), "", Err("does not lie in RAM"));
        // Relocations.
        let mut file = elf();
        file.extend([0; 12]);
        check(&gzip(&file), "quiet", Err("at random"));
        check(&gzip(&file), "kaslr=nokaslr", Err("at random"));
        check(&gzip(&file), "quiet nokaslr", Ok(RUNS_AT + 0x10));
    }

    #[test]
    fn the_setup_header_tells_where_the_payload_is() {
        fn check(version: u16, setup_sects: u8, len: u32, expect: Option<(u64, u64)>) {
            let header = setup_header {
                version,
                setup_sects,
                payload_offset: 0x2c5,
                payload_length: len,
                ..setup_header::default()
            };
            assert_eq!(place(&header), expect);
        }
        check(0x20f, 39, 7, Some((40 * 512 + 0x2c5, 7)));
        check(0x208, 0, 7, Some((5 * 512 + 0x2c5, 7)));
        check(0x207, 39, 7, None);
        check(0x20f, 39, 0, None);
    }

    proptest! {
        #[test]
        fn no_file_harms(
            changes in prop::collection::vec((0usize..0x100, any::<u8>()), 0..8),
            keep in 0usize..0x2000,
            cut in any::<bool>(),
        ) {
            let mut file = elf();
            for (at, byte) in changes {
                file[at] = byte;
            }
            if cut {
                file.truncate(keep);
            }
            let memory = memory();
            let _ = run(&memory, &gzip(&file), "nokaslr");
            // Nothing below where it runs is touched.
            prop_assert_eq!(memory.read_obj::<u64>(GuestAddress(RUNS_AT - 8)).unwrap(), 0);
        }
    }
}
