#!/usr/bin/env python3
"""Runs code objects for AMD GPUs on tinygrad's instruction emulator: no card, no ROCm.

    git clone https://github.com/tinygrad/tinygrad && git -C tinygrad checkout a9069c177a9da9cca18593edf55acd2e6073cca6
    TINYGRAD=tinygrad python3 emulate.py

Needs Python 3.10 with nothing installed, and LLVM's library (Debian: libllvm22, which llc-22 has; elsewhere LLVM_PATH
names it). Each kind of instruction is compiled when a process first meets it: the first kernel takes 2 to 3 s, others
0.02 s (median) to 0.5 s, one with the first WMMA about 10 s, MFMA 1 to 3 s; the same kernel again, milliseconds. A wave
may execute a million instructions from barrier to barrier, some seconds. So keep the process for many launches.

Reads launches from standard input, one JSON object a line, and answers each by one line, until the input ends:

    {"arch": "gfx1100", "object": PATH of the linked code object, "symbol": the kernel's name,
     "kernarg": hex, "pointers": [[offset in kernarg, index of a buffer, byte offset in it], ...],
     "buffers": [hex, ...], "grid": [x, y, z] in blocks, "block": [x, y, z] in threads}

    {"buffers": [hex, ...]} as the kernel left them, or {"error": text}

A kernel that reads or writes where nothing is mapped ends the process without an answer. Waves run one after another
from barrier to barrier, blocks one after another: waiting for another's store does not end.
"""
import ctypes
import json
import mmap
import struct
import sys

from emulator import FAMILIES, emu

# What a descriptor's code properties may ask for in user SGPRs: of these, the kernarg pointer alone is set up.
USER_SGPRS = ("private-segment-buffer", "dispatch-ptr", "queue-ptr", "kernarg", "dispatch-id", "flat-scratch-init",
              "private-segment-size")
WAVE32 = 1 << 10
PAGE = mmap.PAGESIZE
FILL = 0xA5


class Memory:
    """Bytes at a page's start, followed by at least a page of filling that nothing may write."""

    def __init__(self, content):
        self.size = len(content)
        self.pages = mmap.mmap(-1, (self.size + 2 * PAGE - 1) // PAGE * PAGE)
        self.pages[:] = bytes(content).ljust(len(self.pages), bytes([FILL]))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))

    def content(self):
        return self.pages[:self.size]

    def overrun(self):
        return self.pages[self.size:].count(FILL) != len(self.pages) - self.size


class CodeObject:
    """A linked ELF file in memory, as the loader of HSA lays it."""

    def __init__(self, path):
        with open(path, "rb") as file:
            elf = file.read()
        if elf[:5] != b"\x7fELF\x02" or struct.unpack_from("<HH", elf, 16) != (3, 224):
            raise ValueError(f"{path}: not a linked code object for AMD GPUs")
        programs, sections = struct.unpack_from("<QQ", elf, 32)
        program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", elf, 54)
        loads = []
        for n in range(program_count):
            at = programs + n * program_size
            kind, _, offset, address, _, stored, size, _ = struct.unpack_from("<IIQQQQQQ", elf, at)
            if kind == 1:
                loads.append((address, elf[offset:offset + stored].ljust(size, b"\0")))
        image = bytearray(max(address + len(content) for address, content in loads))
        for address, content in loads:
            image[address:address + len(content)] = content
        self.memory = Memory(image)
        self.symbols = {}
        headers = [struct.unpack_from("<IIQQQQIIQQ", elf, sections + n * section_size) for n in range(section_count)]
        for _, kind, _, _, offset, size, link, *_ in headers:
            names = headers[link][4]
            # Dynamic symbols: all that a kernel exports.
            for entry in range(offset, offset + size, 24) if kind == 11 else ():
                name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", elf, entry)
                self.symbols[elf[names + name:elf.index(b"\0", names + name)].decode()] = value
            for entry in range(offset, offset + size, 24) if kind == 4 else ():
                raise ValueError(f"{path}: has relocations: make its globals internal")

    def kernel(self, symbol):
        """Address of the code, LDS bytes, scratch bytes of a thread, rsrc2 and code properties."""
        at = self.symbols.get(f"{symbol}.kd")
        if at is None:
            names = sorted(name[:-3] for name in self.symbols if name.endswith(".kd"))
            raise ValueError(f"no kernel {symbol}: there are {', '.join(names)}")
        lds, scratch, _, _, entry = struct.unpack_from("<IIIIq", self.memory.pages, at)
        _, rsrc2, properties = struct.unpack_from("<IIH", self.memory.pages, at + 48)
        return self.memory.address + at + entry, lds, scratch, rsrc2, properties


def launch(arch, object, symbol, kernarg, pointers, buffers, grid, block):
    family = next((family for prefix, family in FAMILIES.items() if arch.startswith(prefix)), None)
    if family is None:
        raise ValueError(f"{arch} is not emulated")
    name, lanes = family
    code = CodeObject(object)
    entry, lds, scratch, rsrc2, properties = code.kernel(symbol)
    for bit, what in enumerate(USER_SGPRS):
        if properties >> bit & 1 and what != "kernarg":
            raise ValueError(f"{symbol} takes {what} in SGPRs, which is not set up: see the head of twice.ll")
    if lanes == 32 and not properties & WAVE32:
        raise ValueError(f"{symbol} is of waves of 64 lanes, which are emulated for CDNA only")
    memories = [Memory(bytes.fromhex(content)) for content in buffers]
    arguments = bytearray.fromhex(kernarg)
    for offset, index, byte in pointers:
        struct.pack_into("<Q", arguments, offset, memories[index].address + byte)
    arguments = Memory(arguments)
    # The dispatcher, not the compiler, sets rsrc2's LDS size: in granules of 512 bytes for the emulator.
    rsrc2 |= (lds + 511) // 512 << 15
    size = code.memory.address + code.memory.size - entry
    emu.run_asm(entry, size, *grid, *block, arguments.address, rsrc2, scratch, name)
    for index, memory in enumerate(memories):
        if memory.overrun():
            raise ValueError(f"{symbol} wrote behind the end of buffer {index}")
    return {"buffers": [memory.content().hex() for memory in memories]}


for line in sys.stdin:
    try:
        answer = launch(**json.loads(line))
    except Exception as error:  # Whatever it was: the next launch can run all the same.
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
