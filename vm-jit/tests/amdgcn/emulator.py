"""tinygrad's emulator of AMD GPUs, mended where LLVM's code meets its faults.

The environment's TINYGRAD is a checkout of tinygrad: commit a9069c177a9da9cca18593edf55acd2e6073cca6, whose names
the mending relies on (the package on PyPI has no emulator). Instructions are compiled by LLVM's library, LLVM_PATH.
"""
import ctypes
import inspect
import os
import random
import re
import struct
import sys
from collections import deque
from types import SimpleNamespace

import lanes

os.environ.setdefault("DEV", "CPU:LLVM")
os.environ.setdefault("LLVM_PATH", "/usr/lib/x86_64-linux-gnu/libLLVM.so.22.1")
sys.path.insert(0, os.environ["TINYGRAD"])
from tinygrad.dtype import dtypes  # noqa: E402
from tinygrad.renderer import llvmir  # noqa: E402
from tinygrad.runtime import ops_cpu  # noqa: E402
from test.mockgpu.amd import emu, pcode  # noqa: E402

# The emulator's name of each family, and the lanes of a wave.
FAMILIES = {"gfx11": ("rdna3", 32), "gfx120": ("rdna4", 32), "gfx942": ("cdna", 64), "gfx950": ("cdna", 64)}
LANES = dict(FAMILIES.values())
# Of a block.
MOST_WAVES = 32
S_NOP = 0xBF800000
# What is in registers, LDS and scratch before a block writes there, by byte: of floats no number.
LEFT = 0xFF
# Does nothing that is emulated: mask, encoding and words.
NOTHING = {
    "rdna3": [(0xFFFC0000, 0xE0AC0000, 2), (0xFFFC0000, 0xE0B00000, 2),  # buffer_gl0_inv, buffer_gl1_inv
              (0xFFFF0000, 0xBFB50000, 1),  # s_setprio
              (0xFFFFFFFF, 0x7E000000, 1)],  # v_nop
    "rdna4": [(0xFFFFC000, op << 14 | 0xEE000000, 3) for op in (43, 44, 79)] + [(0xFFFFFFFF, 0x7E000000, 1)],  # global_inv, global_wb, global_wbinv, v_nop
    "cdna": [(0xFFFC0000, 0xE0A00000, 2), (0xFFFC0000, 0xE0A40000, 2)],  # buffer_wbl2, buffer_inv
}

# The device's workers would take Clang, and no emulated instruction runs on one: they are a return here.
WORKER = SimpleNamespace(name="", lib=b"\xc3", signature=(), target=SimpleNamespace(renderer=""))
ops_cpu.do_to_program = lambda *_: SimpleNamespace(to_elf=lambda: WORKER)

# Denormals are kept, as LLVM's kernels ask for in their descriptor: the emulator would flush them always.
emu._get_ftz_lib = lambda: (None, 0)

# The emulator cannot store in both arms of a branch.
MOST = "tmp = MEM[ADDR].f32;\nsrc = DATA.f32;\nMEM[ADDR].f32 = (isNAN(64'F(tmp.f32)) || (src {} tmp)) ? src : tmp;\n" \
       "RETURN_DATA.f32 = tmp"
for op, text in emu.PCODE_RDNA4.items():
    if "_NUM_" in op.name and op.name.endswith("F32") and "MEM[ADDR]" in text:
        emu._pcode_fixes[op.name] = (text, MOST.format(">" if "_MAX_" in op.name else "<"))

# The manuals' sum with a half is rounded where there is no room for one.
for op, text in emu.PCODE_RDNA3.items():
    if op.name in ("V_RNDNE_F32_E32", "V_RNDNE_F64_E32"):
        name = op.name.removesuffix("_E32")
        f = name[8:].lower()
        emu._pcode_fixes[name] = (text, f"D0.{f} = floor(S0.{f});\nif fract(S0.{f}) > 0.5 then\nD0.{f} += 1.0\n"
                                  f"elsif (fract(S0.{f}) == 0.5) && !isEven(64'F(floor(S0.{f}))) then\nD0.{f} += 1.0\nendif")


# Integers of 24 bits are taken for all 32.
SIGNED, UNSIGNED = r"32'I(signext_from_bit(\1.u32 & 0xffffffU, 24U))", r"(\1.u32 & 0xffffffU)"
for texts in (emu.PCODE_CDNA, emu.PCODE_RDNA3, emu.PCODE_RDNA4):
    for op, text in texts.items():
        # A quotient below half of the least number is zero.
        text = text.replace("UNDERFLOW_F32", "0.0F").replace("UNDERFLOW_F64", "0.0")
        texts[op] = re.sub(r"(S\d)\.u24", UNSIGNED, re.sub(r"(S\d)\.i24", SIGNED, text))
        # A comparison does not tell zeros apart.
        texts[op] = re.sub(r"\(64'F\((S\d)\.f32\) == \+0\.0\)", r"(\1.u32 == 0U)", texts[op])
        texts[op] = re.sub(r"\(64'F\((S\d)\.f32\) == -0\.0\)", r"(\1.u32 == 0x80000000U)", texts[op])


def minmax(is_max, dtype, *sources, reduce=pcode._minmax_reduce):
    """The greatest or the least of what medians, packed instructions and those of three compare: of floats a number, and -0 is the lesser."""
    if dtype not in (dtypes.float32, dtypes.half):
        return reduce(is_max, dtype, *sources)
    word = dtypes.uint32 if dtype == dtypes.float32 else dtypes.uint16
    first, *others = (source.bitcast(dtype) if source.dtype == word else source.cast(dtype) for source in sources)
    for other in others:
        a, b = first.bitcast(word), other.bitcast(word)
        same = (a & b if is_max else a | b).bitcast(dtype)
        ordered = first.eq(other).where(same, (other < first).ne(is_max).where(other, first))
        first = pcode._isnan(first).where(other, pcode._isnan(other).where(first, ordered))
    return first


pcode._minmax_reduce = minmax


def load(parser, addr, dtype, load=pcode.Parser._handle_mem_load):
    """A load of memory, of 16 bits at odd addresses too."""
    if dtype not in (dtypes.uint16, dtypes.int16):
        return load(parser, addr, dtype)
    low, high = (load(parser, addr + addr.const_like(byte), dtypes.uint8).cast(dtypes.uint32) for byte in (0, 1))
    return (low | high << high.const_like(8)).cast(dtypes.uint16).bitcast(dtype)


pcode.Parser._handle_mem_load = load


def init_wave(*arguments, init_wave=emu._init_wave):
    """A wave, in whose registers is whatever was there, and whose inline constant 1 / (2 pi) the emulator's HW_ID would overwrite."""
    wave = init_wave(*arguments)
    wave._write_sgpr(248, 0x3E22F983)
    # The first has the thread's number.
    first = 4 * wave.wave_size
    ctypes.memset(wave.vgpr_buf._buf.va_addr + first, LEFT, 255 * first)
    if wave.wave_size == 64:
        ctypes.memset(wave.accvgpr_buf._buf.va_addr, LEFT, 256 * first)
    return wave


emu._init_wave = init_wave


def mend(function, *texts):
    """Replaces texts in a function of the emulator by others."""
    source = inspect.getsource(function)
    for text, mended in texts:
        assert text in source, text
        source = source.replace(text, mended)
    exec(source, vars(emu))
    new = getattr(emu, function.__name__)
    emu._INST_HANDLERS.update((kind, new) for kind, old in emu._INST_HANDLERS.items() if old is function)


emu.LEFT, emu.ORDER = LEFT, random.Random(0)

# Rows of a 32 x 32 product go by fours to the wave's halves in turn, not by sixteens. Factors may be in accumulators; halves that are
# subnormal, infinite or no number are factors too.
mend(emu._compile_mfma,
     ("c_grp * UOp.const(16, dtypes.int) + UOp.const((out_reg // 4) * 4 + out_reg % 4, dtypes.int)",
      "c_grp * UOp.const(4, dtypes.int) + UOp.const((out_reg // 4) * 8 + out_reg % 4, dtypes.int)"),
     ("is_vgpr.where(ctx.rvgpr_dyn(off",
      "is_vgpr.where((ctx.raccvgpr_dyn if _iattr(inst, 'acc') >> (base != 0) & 1 else ctx.rvgpr_dyn)(off"),
     ("return exp.eq(_c(0)).where(_c(0), f32_bits)",
      "high = exp.eq(_c(31)).where(f32_bits | _c(0xFF << 23), f32_bits)\n"
      "    low = (sign << _c(31)) | (mant.cast(dtypes.float32) * UOp.const(2.0**-24, dtypes.float32)).bitcast(dtypes.uint32)\n"
      "    return exp.eq(_c(0)).where(low, high)"))

mend(emu.run_asm,
     ("lds_buf = Buffer('CPU', max(lds_size // 4, 1), dtypes.uint32).ensure_allocated()",
      "lds_buf = Buffer('CPU', max(lds_size // 4, 1), dtypes.uint32).ensure_allocated()\n"
      "  ctypes.memset(lds_buf._buf.va_addr, LEFT, max(lds_size, 4))"),
     ("ctypes.memset(lds_buf._buf.va_addr, 0,", "ctypes.memset(lds_buf._buf.va_addr, LEFT,"),
     # Waves come to barriers in any order.
     ("in enumerate(waves):\n        if done", "in ORDER.sample(list(enumerate(waves)), len(waves)):\n        if done"))

# What is added to may be a constant.
mend(emu._compile_wmma,
     ("src2_r = (src2_r >= 256).where(src2_r - _c(256), src2_r)",
      "src2_v = src2_r >= 256\n  src2_s = ctx.rsgpr_dyn(src2_r, src2_v.ne(True))\n  src2_r = src2_v.where(src2_r - _c(256), _c(0))"),
     ("mat_c = [ctx.rvgpr_dyn(src2_r + _c(vgpr), UOp.const(lane, dtypes.int)).bitcast(out_dt)",
      "mat_c = [src2_v.where(ctx.rvgpr_dyn(src2_r + _c(vgpr), UOp.const(lane, dtypes.int)), src2_s).bitcast(out_dt)"))

# Registers from 128 on are registers: halves of others are RDNA's alone.
RDNA = "bits['s0'] == 16 and ctx.wave_size == 32"
mend(emu._load_vsrc0, ("bits['s0'] == 16:  # src0 >= 384", RDNA + ":  # src0 >= 384"))
mend(emu._compile_vop12, ("bits['d'] == 16 and", RDNA.replace("s0", "d") + " and"), ("bits['s0'] == 16 and (vsrc1", RDNA + " and (vsrc1"))
mend(emu._compile_vopc, ("if bits['s0'] == 16:\n      vsrc1_hi", f"if {RDNA}:\n      vsrc1_hi"))

# The sum to which a product is added has 64 bits, too.
mend(emu._compile_vop3,
     ("srcs['D0'] = ctx.rvgpr_dyn(vdst_reg, lane)",
      "srcs['D0'] = _u64(ctx.rvgpr_dyn(vdst_reg, lane), ctx.rvgpr_dyn(vdst_reg + _c(1), lane)) if bits['d'] == 64 "
      "else ctx.rvgpr_dyn(vdst_reg, lane)"))

# So may what atomics and stores to LDS are given. Loads from LDS of half a register leave the other.
HALF = r"""      if (m := re.match(r'RETURN_DATA\[(31|15)\s*:\s*(16|0)\]', dest)) and 'D16' in op_name:
        shift = int(m.group(2))
        old = ctx.rvgpr_dyn(vdst_reg, lane) & _c(0xFFFF0000 >> shift)
        return [_wdata(vdst_reg, old | (val.cast(dtypes.uint32) & _c(0xFFFF)) << _c(shift), lane, exec_mask)]
"""
WHOLE = r"      if (m := re.match(r'RETURN_DATA\[(\d+)\s*:\s*(\d+)\]', dest)):"
# Where scratch is addressed by registers, they have a sign.
SIGN = ".bitcast(dtypes.int32).cast(dtypes.int64).cast(dtypes.uint64)"
mend(emu._compile_mem_op, ("ctx.rvgpr_dyn(vdata_reg", "(ctx.raccvgpr_dyn if use_acc else ctx.rvgpr_dyn)(vdata_reg"),
     ("vaddr = ctx.rvgpr_dyn(addr_reg, lane).cast(dtypes.uint64)", "vaddr = ctx.rvgpr_dyn(addr_reg, lane)" + SIGN),
     ("ctx.rsgpr_dyn(saddr_reg).cast(dtypes.uint64), UOp.const(0", "ctx.rsgpr_dyn(saddr_reg)" + SIGN + ", UOp.const(0"),
     ("ctx.rvgpr_dyn(data1_reg", "(ctx.raccvgpr_dyn if use_acc else ctx.rvgpr_dyn)(data1_reg"),
     (WHOLE, HALF + WHOLE))


# Halves are LLVM's own: what the emulator makes of them without has no denormals.
supported = llvmir.CPULLVMRenderer.supported_dtypes
llvmir.CPULLVMRenderer.supported_dtypes = lambda renderer: supported(renderer) | {dtypes.half}


def constant(value, dtype, lconst=llvmir.lconst):
    """A constant in LLVM's text, which has no 5e-324."""
    if dtype not in (dtypes.float32, dtypes.float64):
        return lconst(value, dtype)
    if dtype == dtypes.float32:
        value = ctypes.c_float(value).value
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


llvmir.lconst = constant


def attribute(inst, name, default=0, iattr=emu._iattr):
    """What makes an atomic return: the bit has another name on each family."""
    if name == "glc" and hasattr(inst, "th"):
        return iattr(inst, "th") & 1
    return iattr(inst, "sc0" if name == "glc" and hasattr(inst, "sc0") else name, default)


emu._iattr = attribute


class Scratch:
    """Scratch memory that each wave has for itself: the emulator takes the address once a wave."""

    def __init__(self, size):
        self.size, self._buf = size, self
        self.waves = deque(maxlen=MOST_WAVES)

    @property
    def va_addr(self):
        self.waves.append((ctypes.c_uint8 * self.size).from_buffer(bytearray([LEFT]) * self.size))
        return ctypes.addressof(self.waves[-1])

    def ensure_allocated(self):
        return self


def buffer(device, size, dtype, buffer=emu.Buffer, **options):
    return Scratch(size) if dtype == dtypes.uint8 else buffer(device, size, dtype, **options)


emu.Buffer = buffer


def rewrite(pc, arch):
    """Writes instructions that the emulator takes for others in the way that it takes."""
    words = (ctypes.c_uint32 * 3).from_address(pc)
    for mask, encoding, count in NOTHING[arch]:
        if words[0] & mask == encoding:
            words[:count] = [S_NOP] * count
    # Flat addresses are of global memory, neither of LDS nor of scratch.
    if arch == "rdna4" and words[0] >> 24 == 0xEC:
        words[0] |= 0x02000000
    elif arch == "rdna3" and words[0] >> 26 == 0b110111 and not words[0] >> 16 & 3:
        words[0] |= 2 << 16
    elif arch == "cdna" and words[0] >> 26 == 0b110111 and not words[0] >> 14 & 3:
        words[0] |= 2 << 14
        words[1] = words[1] & 0xFF80FFFF | 0x7F << 16


def decode(pc, arch, decode_at=emu._decode_at):
    rewrite(pc, arch)
    step = lanes.step_of(pc, arch, LANES[arch], decode_at)
    if step is None:
        return decode_at(pc, arch)

    def run(*buffers):
        step(lanes.Wave(buffers[0], buffers[1], LANES[arch]), buffers)

    return (SimpleNamespace(arg=SimpleNamespace(globals=range(6))), SimpleNamespace(fxn=run)), None


emu._decode_at = decode
