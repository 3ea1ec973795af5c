//! Tiny guests, assembled by hand into ELF files.

use std::io::Write as _;

/// Where the program is loaded and entered.
const ENTRY: u64 = 0x10_0000;

/// An assembler for the few instructions that the guests need.
#[derive(Default)]
pub(crate) struct Asm(Vec<u8>);

impl Asm {
    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// `mov dx, port; mov al, value; out dx, al`
    pub(super) fn out8(self, port: u16, value: u8) -> Self {
        let [low, high] = port.to_le_bytes();
        self.bytes(&[0x66, 0xba, low, high, 0xb0, value, 0xee])
    }

    /// `mov dx, port; mov eax, value; out dx, eax`
    pub(super) fn out32(self, port: u16, value: u32) -> Self {
        let [low, high] = port.to_le_bytes();
        self.bytes(&[0x66, 0xba, low, high, 0xb8]).bytes(&value.to_le_bytes()).bytes(&[0xef])
    }

    /// `mov dx, port; in eax, dx`
    pub(super) fn in32(self, port: u16) -> Self {
        let [low, high] = port.to_le_bytes();
        self.bytes(&[0x66, 0xba, low, high, 0xed])
    }

    /// `mov edi, address; mov ecx, count; mov dx, port; cld; rep ins`, of bytes or of doublewords.
    pub(super) fn repeat_in(self, port: u16, wide: bool, address: u32, count: u32) -> Self {
        let [low, high] = port.to_le_bytes();
        let asm =
            self.bytes(&[0xbf]).bytes(&address.to_le_bytes()).bytes(&[0xb9]).bytes(&count.to_le_bytes());
        asm.bytes(&[0x66, 0xba, low, high, 0xfc, 0xf3, if wide { 0x6d } else { 0x6c }])
    }

    /// `mov rbx, address; mov eax, [rbx]`
    pub(crate) fn load32(self, address: u64) -> Self {
        self.bytes(&[0x48, 0xbb]).bytes(&address.to_le_bytes()).bytes(&[0x8b, 0x03])
    }

    /// `mov rbx, address; mov dword [rbx], value`
    pub(super) fn store32(self, address: u64, value: u32) -> Self {
        self.bytes(&[0x48, 0xbb])
            .bytes(&address.to_le_bytes())
            .bytes(&[0xc7, 0x03])
            .bytes(&value.to_le_bytes())
    }

    /// `mov rbx, address; mov byte [rbx], value`
    pub(super) fn store8(self, address: u64, value: u8) -> Self {
        self.bytes(&[0x48, 0xbb]).bytes(&address.to_le_bytes()).bytes(&[0xc6, 0x03, value])
    }

    /// `mov rbx, address; mov word [rbx], value`
    pub(super) fn store16(self, address: u64, value: u16) -> Self {
        self.bytes(&[0x48, 0xbb])
            .bytes(&address.to_le_bytes())
            .bytes(&[0x66, 0xc7, 0x03])
            .bytes(&value.to_le_bytes())
    }

    /// `mov rbx, address; again: cmp dword [rbx], value; je again`
    pub(super) fn wait_while(self, address: u64, value: u32) -> Self {
        self.bytes(&[0x48, 0xbb])
            .bytes(&address.to_le_bytes())
            .bytes(&[0x81, 0x3b])
            .bytes(&value.to_le_bytes())
            .bytes(&[0x74, 0xf8])
    }

    /// Starts the second vCPU in `code`, in real mode at 0x4000, by INIT and SIPI to all others through the local APIC.
    pub(super) fn start_second(mut self, code: &[u8]) -> Self {
        for (at, bytes) in (0x4000u64..).step_by(4).zip(code.chunks(4)) {
            let mut word = [0; 4];
            word[..bytes.len()].copy_from_slice(bytes);
            self = self.store32(at, u32::from_le_bytes(word));
        }
        self.store32(0xfee0_00f0, 0x1ff).store32(0xfee0_0300, 0x000c_4500).store32(0xfee0_0300, 0x000c_4604)
    }

    pub(crate) fn print(self, text: &str) -> Self {
        text.bytes().fold(self, |asm, byte| asm.out8(0x3f8, byte))
    }

    /// Prints `text` if EAX is `value`, `?` otherwise.
    pub(super) fn expect_eax(self, value: u32, text: &str) -> Self {
        let good = Self::default().print(text).0;
        let bad = Self::default().print("?").0;
        // cmp eax, value; jne over the good part; good part; jmp over the bad part; bad part
        self.bytes(&[0x3d])
            .bytes(&value.to_le_bytes())
            .bytes(&[0x75, good.len() as u8 + 2])
            .bytes(&good)
            .bytes(&[0xeb, bad.len() as u8])
            .bytes(&bad)
    }

    pub(crate) fn power_off(self) -> Self {
        self.out8(0x600, 5 << 2 | 1 << 5).spin()
    }

    /// `jmp $`
    pub(crate) fn spin(self) -> Self {
        self.bytes(&[0xeb, 0xfe])
    }

    /// The bytes alone, for a part that is copied elsewhere.
    pub(super) fn finish(self) -> Vec<u8> {
        self.0
    }

    /// The program in a bzImage that is packed with gzip and would unpack itself at 2 MiB by printing `!`.
    pub(super) fn bzimage(self) -> tempfile::NamedTempFile {
        const RUNS_AT: u64 = 0x20_0000;
        let kernel = std::fs::read(elf(&self.0, RUNS_AT, RUNS_AT, 0x1000).path()).unwrap();
        let packed = crate::vmm::boot::payload_testing::gzip(&kernel);
        let mut image = vec![0; 1024];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x1f1, &[1]);
        put(0x202, b"HdrS");
        put(0x206, &0x20fu16.to_le_bytes());
        put(0x211, &[1]);
        put(0x214, &0x10_0000u32.to_le_bytes());
        put(0x22c, &0x7fff_ffffu32.to_le_bytes());
        put(0x236, &1u16.to_le_bytes());
        put(0x238, &2047u32.to_le_bytes());
        put(0x248, &0x400u32.to_le_bytes());
        put(0x24c, &(packed.len() as u32).to_le_bytes());
        put(0x258, &RUNS_AT.to_le_bytes());
        put(0x260, &0x10_0000u32.to_le_bytes());
        image.resize(1024 + 0x200, 0);
        image.extend(Self::default().print("!").power_off().0);
        image.resize(1024 + 0x400, 0);
        image.extend(packed);
        let mut temporary = tempfile::NamedTempFile::new().unwrap();
        temporary.write_all(&image).unwrap();
        temporary
    }

    /// The program as an ELF file with some zero-initialised memory after it.
    pub(crate) fn elf(self) -> tempfile::NamedTempFile {
        elf(&self.0, ENTRY, ENTRY, 0x1000)
    }
}

/// A guest whose only disk reads into its memory for long.
pub(super) mod reader {
    use super::{Asm, ENTRY, elf};

    /// Bytes that one request reads.
    pub(in crate::vmm::tests) const REQUEST: u64 = (DESCRIPTORS - 2) * PIECE;
    /// What the guest's file has at [`TARGET`]; the disk has zeros.
    pub(in crate::vmm::tests) const LOADED: u32 = 0x600d_600d;
    /// Where all of a request is read to, piece by piece.
    pub(in crate::vmm::tests) const TARGET: u64 = 0x11_0000;
    const PIECE: u64 = 0x1_0000;
    /// Of the indirect table: a header, pieces, a status.
    const DESCRIPTORS: u64 = 16_386;
    const TABLE: u64 = 0x20_0000;
    const QUEUE: u64 = 0x10_1000;
    const AVAILABLE: u64 = 0x10_2000;
    const USED: u64 = 0x10_3000;
    const HEADER: u64 = 0x10_4000;
    const STATUS: u64 = 0x10_4010;
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;

    fn descriptor(address: u64, len: u64, flags: u16, next: u16) -> Vec<u8> {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend((len as u32).to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        bytes
    }

    /// Prints `k` if [`TARGET`] is as the file has it, `?` otherwise; starts the disk with N requests in its queue;
    /// waits until the first of them has begun; and goes on with `then`.
    pub(in crate::vmm::tests) fn kernel(requests: u16, then: Asm) -> tempfile::NamedTempFile {
        const CONFIG: u64 = 0xe000_8000;
        const BAR: u64 = 0xc000_0000;
        let ring = [(0x20, QUEUE), (0x28, AVAILABLE), (0x30, USED)];
        let mut code = Asm::default()
            .load32(TARGET)
            .expect_eax(LOADED, "k")
            // Below 4 GiB, where the guest's page tables end.
            .store32(CONFIG + 0x10, BAR as u32)
            .store32(CONFIG + 0x14, 0)
            .store32(CONFIG + 4, 6);
        for status in [0, 1, 3] {
            code = code.store8(BAR + 0x14, status);
        }
        for (half, features) in [(0, 1 << 28), (1, 1)] {
            code = code.store32(BAR + 8, half).store32(BAR + 0xc, features);
        }
        code = code.store8(BAR + 0x14, 3 | 8);
        for (register, address) in ring {
            code = code.store32(BAR + register, address as u32);
        }
        code = code.store16(BAR + 0x1c, 1).store8(BAR + 0x14, 3 | 8 | 4);
        let mut image = code.wait_while(TARGET, LOADED).bytes(&then.finish()).finish();
        let mut put = |at: u64, bytes: &[u8]| {
            let at = (at - ENTRY) as usize;
            assert!(image.len() <= at);
            image.resize(at, 0);
            image.extend(bytes);
        };
        put(QUEUE, &descriptor(TABLE, DESCRIPTORS * 16, INDIRECT, 0));
        put(AVAILABLE, &[[0, 0], requests.to_le_bytes()].concat());
        put(STATUS + 1, &[]);
        put(TARGET, &LOADED.to_le_bytes().repeat(PIECE as usize / 4));
        put(TABLE, &descriptor(HEADER, 16, NEXT, 1));
        for index in 1..DESCRIPTORS - 1 {
            put(TABLE + index * 16, &descriptor(TARGET, PIECE, WRITE | NEXT, index as u16 + 1));
        }
        put(TABLE + (DESCRIPTORS - 1) * 16, &descriptor(STATUS, 1, WRITE, 0));
        elf(&image, ENTRY, ENTRY, 0x1000)
    }
}

/// An ELF file with one segment at `address`.
pub(super) fn elf(code: &[u8], address: u64, entry: u64, bss: u64) -> tempfile::NamedTempFile {
    let mut file = Vec::new();
    file.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    file.extend(2u16.to_le_bytes());
    file.extend(62u16.to_le_bytes());
    file.extend(1u32.to_le_bytes());
    for word in [entry, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    file.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 1, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    file.extend(1u32.to_le_bytes());
    file.extend(7u32.to_le_bytes());
    for word in [0x1000, address, address, code.len() as u64, code.len() as u64 + bss, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.resize(0x1000, 0);
    file.extend(code);
    let mut temporary = tempfile::NamedTempFile::new().unwrap();
    temporary.write_all(&file).unwrap();
    temporary
}
