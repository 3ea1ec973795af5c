"""Instructions whose lanes read each other, executed one at a time over a wave's registers.

The emulator compiles an instruction as a loop over lanes that reads and writes registers in place: wrong where the
destination is a source that a later lane reads. Some encodings it does not decode at all. Here they read first.
"""
import ctypes
import struct
import time

S_ENDPGM = 0xBFB00000
EXEC, PC, LITERAL = 126, 256, 255
M0 = 124
SPARE = (127, 111, 95, 79, 63)


class Wave:
    """The registers of a wave, where the emulator keeps them."""

    def __init__(self, sgprs, vgprs, lanes):
        self.lanes = lanes
        self.scalars = (ctypes.c_uint32 * 260).from_address(sgprs.value)
        self.vectors = (ctypes.c_uint32 * (256 * lanes)).from_address(vgprs.value)

    def pair(self, register):
        return self.scalars[register] | self.scalars[register + 1] << 32

    def set_pair(self, register, value):
        self.scalars[register], self.scalars[register + 1] = value & 0xFFFFFFFF, value >> 32

    def active(self):
        return self.pair(EXEC) if self.lanes == 64 else self.scalars[EXEC]

    def set_active(self, mask):
        self.set_pair(EXEC, mask) if self.lanes == 64 else self.scalars.__setitem__(EXEC, mask)

    def vector(self, register):
        return self.vectors[register * self.lanes:(register + 1) * self.lanes]

    def set_vector(self, register, values):
        self.vectors[register * self.lanes:(register + 1) * self.lanes] = values

    def write(self, register, values):
        """Writes active lanes whose value is not None."""
        active, old = self.active(), self.vector(register)
        self.set_vector(register, [old[lane] if value is None or not active >> lane & 1 else value
                                   for lane, value in enumerate(values)])


def dpp_source(control, lane, lanes):
    """The lane that DPP16 reads, or None behind an end."""
    row, at, n = lane & ~15, lane & 15, control & 15
    if control < 0x100:
        return lane & ~3 | control >> 2 * (lane & 3) & 3
    match control >> 4:
        case 0x10:
            return lane + n if at + n < 16 else None
        case 0x11:
            return lane - n if at >= n else None
        case 0x12:
            return row | at - n & 15
        case 0x15:  # row_share, row_newbcast
            return row | n
        case 0x16:  # row_xmask
            return row | at ^ n
    match control:
        case 0x130:
            return lane + 1 if lane + 1 < lanes else None
        case 0x134:
            return (lane + 1) % lanes
        case 0x138:
            return lane - 1 if lane else None
        case 0x13C:
            return (lane - 1) % lanes
        case 0x140:
            return row | 15 - at
        case 0x141:
            return lane ^ 7
        case 0x142:
            return row - 1 if row else None
        case 0x143:
            return 31 if lane > 31 else None
    raise ValueError(f"DPP control {control:#x} is not emulated")


def swizzle_source(offset, lane):
    if offset & 0x8000:
        if offset & 0x7F00:
            raise ValueError(f"ds_swizzle_b32 offset {offset:#x} is not emulated")
        return lane & ~3 | offset >> 2 * (lane & 3) & 3
    return lane & ~31 | (lane & offset & 31 | offset >> 5 & 31) ^ offset >> 10 & 31


def dpp(words, arch, lanes, decode_at):
    """An instruction with a DPP operand, which is gathered to a spare register: the same instruction without DPP reads
    it there, in the lanes that DPP leaves enabled."""
    first, second, third = words
    long = arch != "cdna" and (first >> 26 == 0b110101 or first >> 24 == 0xCC)
    if not long and first >> 31:
        return None
    kind = (second if long else first) & 0x1FF
    if kind not in ((0xFA,) if arch == "cdna" else (0xFA, 0xE9, 0xEA)):
        return None
    if arch == "cdna" and first >> 25 == 0x3F and first >> 9 & 0xFF == 0x38:
        raise ValueError("v_mov_b64 with DPP is not emulated")
    control = third if long else second
    negate = absolute = False
    bound, masks = 1, 0xFF
    if kind == 0xFA:
        inactive, bound, masks = control >> 18 & 1, control >> 19 & 1, control >> 24
        sources = [dpp_source(control >> 8 & 0x1FF, lane, lanes) for lane in range(lanes)]
        if not long:
            negate, absolute = control >> 20 & 1, control >> 21 & 1
            if control >> 22 & 3:
                raise ValueError("DPP with a modifier of its second operand is not emulated")
    else:
        inactive = kind == 0xEA
        sources = [lane & ~7 | control >> 8 + 3 * (lane & 7) & 7 for lane in range(lanes)]
    enabled = [masks >> 4 + lane // 16 & masks >> lane // 4 % 4 & 1 for lane in range(lanes)]
    if long:
        used = (first & 0xFF, (second >> 9 & 0x1FF) - 256, (second >> 18 & 0x1FF) - 256)
    else:
        used = (first >> 17 & 0xFF, first >> 9 & 0xFF)
    spare = next(register for register in SPARE if all(abs(register - other) > 8 for other in used))
    plain = (first, second & ~0x1FF | 256 + spare) if long else (first & ~0x1FF | 256 + spare,)
    code = (ctypes.c_uint32 * 8)(*plain, *[S_ENDPGM] * 6)
    (program, runtime), _ = decode_at(ctypes.addressof(code), arch)
    size = 12 if long else 8

    def step(wave, buffers):
        pc, active, values = wave.pair(PC), wave.active(), wave.vector(control & 0xFF)
        gathered, on = [0] * lanes, 0
        for lane in range(lanes):
            source = sources[lane]
            if not (active >> lane & 1 and enabled[lane]):
                continue
            if source is not None and (inactive or active >> source & 1):
                value = values[source] & 0x7FFFFFFF if absolute else values[source]
                gathered[lane] = value ^ 0x80000000 if negate else value
            elif not bound:
                continue
            on |= 1 << lane
        saved = wave.vector(spare)
        wave.set_vector(spare, gathered)
        wave.set_active(on)
        wave.set_pair(PC, ctypes.addressof(code))
        runtime.fxn(*[buffers[index] for index in program.arg.globals])
        wave.set_active(active)
        wave.set_vector(spare, saved)
        wave.set_pair(PC, pc + size)

    return step


def ds(words, arch, lanes):
    """ds_swizzle_b32, ds_permute_b32 and ds_bpermute_b32."""
    first, second, _ = words
    if first >> 26 != 0b110110:
        return None
    name = {61: "swizzle", 62: "permute", 63: "bpermute"}.get(first >> 17 & 0xFF) if arch == "cdna" else \
        {53: "swizzle", 178: "permute", 179: "bpermute", 205: "bpermute_fi"}.get(first >> 18 & 0xFF)
    if name is None:
        return None
    offset, address, data, to = first & 0xFFFF, second & 0xFF, second >> 8 & 0xFF, second >> 24

    def step(wave, _):
        active, at = wave.active(), wave.vector(address)
        values = at if name == "swizzle" else wave.vector(data)
        there = [swizzle_source(offset, lane) if name == "swizzle" else (at[lane] + offset >> 2) % lanes
                 for lane in range(lanes)]
        result = [0] * lanes
        for lane in range(lanes):
            if name == "permute":
                if active >> lane & 1:
                    result[there[lane]] = values[lane]
            elif name == "bpermute_fi" or active >> there[lane] & 1:
                result[lane] = values[there[lane]]
        wave.write(to, result)
        wave.set_pair(PC, wave.pair(PC) + 8)

    return step


def permlane(words, arch, lanes):
    """v_permlane16_b32, v_permlanex16_b32 of RDNA; v_permlane16_swap_b32, v_permlane32_swap_b32 of gfx950."""
    first, second, literal = words
    if arch != "cdna" and first >> 16 in (0xD65B, 0xD65C):
        across = 16 * (first >> 16 == 0xD65C)
        to, inactive, bound = first & 0xFF, first >> 11 & 1, first >> 12 & 1
        value, low, high = second & 0xFF, second >> 9 & 0x1FF, second >> 18 & 0x1FF
        size = 12 if LITERAL in (low, high) else 8

        def step(wave, _):
            active, values = wave.active(), wave.vector(value)
            low_half, high_half = (literal if half == LITERAL else wave.scalars[half] for half in (low, high))
            select = low_half | high_half << 32
            sources = [(lane & ~15 | select >> 4 * (lane & 15) & 15) ^ across for lane in range(lanes)]
            wave.write(to, [values[source] if inactive or active >> source & 1 else 0 if bound else None
                            for source in sources])
            wave.set_pair(PC, wave.pair(PC) + size)

        return step
    short = arch == "cdna" and first >> 25 == 0x3F and first >> 9 & 0xFF
    long = arch == "cdna" and first >> 16
    if short in (0x59, 0x5A) or long in (0xD199, 0xD19A):
        half = 16 if short == 0x59 or long == 0xD199 else 32
        here, there = (first >> 17 & 0xFF, first & 0xFF) if short else (first & 0xFF, second & 0xFF)

        def step(wave, _):
            mine, theirs = wave.vector(here), wave.vector(there)
            for lane in range(lanes):
                if not lane & half:
                    mine[lane + half], theirs[lane] = theirs[lane], mine[lane + half]
            wave.set_vector(here, mine)
            wave.set_vector(there, theirs)
            wave.set_pair(PC, wave.pair(PC) + (4 if short else 8))

        return step
    return None


def load_lds(words, arch, lanes):
    """global_load_lds_dword and global_load_lds_dwordx4 of CDNA: lanes' words to consecutive places of LDS."""
    first, second, _ = words
    count = {42: 1, 125: 4}.get(first >> 18 & 0x7F)
    if arch != "cdna" or first >> 26 != 0b110111 or first >> 14 & 3 != 2 or count is None:
        return None
    offset = (first & 0x1FFF ^ 0x1000) - 0x1000
    register, base = second & 0xFF, second >> 16 & 0x7F

    def step(wave, buffers):
        low = wave.vector(register)
        start = wave.pair(base) if base < M0 else 0
        high = [0] * lanes if base < M0 else wave.vector(register + 1)
        for lane in range(lanes):
            if wave.active() >> lane & 1:
                place = buffers[3].value + wave.scalars[M0] + offset + 4 * count * lane
                ctypes.memmove(place, start + (low[lane] | high[lane] << 32) + offset, 4 * count)
        wave.set_pair(PC, wave.pair(PC) + 8)

    return step


def scalar(words, arch, lanes):
    """The program counter's instructions, and clocks."""
    first = words[0]
    get, to = (0x1C, 0x1D) if arch == "cdna" else (0x47, 0x48)
    operation, register, source = first >> 8 & 0xFF, first >> 16 & 0x7F, first & 0xFF
    if first >> 23 == 0x17D and get <= operation <= get + 2:  # s_getpc_b64, s_setpc_b64, s_swappc_b64

        def step(wave, _):
            after = wave.pair(PC) + 4
            target = after if operation == get else wave.pair(source)
            if operation != to:
                wave.set_pair(register, after)
            wave.set_pair(PC, target)

        return step
    clock = first >> 18 in (0x3024, 0x3025) if arch == "cdna" else first >> 23 == 0x17D and operation in (0x4C, 0x4D)
    if clock:  # s_memtime, s_memrealtime, s_sendmsg_rtn
        register = first >> 6 & 0x7F if arch == "cdna" else register

        def step(wave, _):
            wave.set_pair(register, time.monotonic_ns())
            wave.set_pair(PC, wave.pair(PC) + (8 if arch == "cdna" else 4))

        return step
    return None


def step_of(pc, arch, lanes, decode_at):
    """What executes the instruction at an address with (wave, the emulator's buffers), or None for the emulator."""
    words = struct.unpack("<III", ctypes.string_at(pc, 12))
    return (dpp(words, arch, lanes, decode_at) or ds(words, arch, lanes) or permlane(words, arch, lanes)
            or load_lds(words, arch, lanes) or scalar(words, arch, lanes))
