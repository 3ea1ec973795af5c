"""Writes a program of random CUDA C++ kernels, whose functions are compiled for the device and for the host.

    random_cuda.py SEED COUNT >program.cu

`program device` and `program host` print what each kernel computes, and what its printf prints: the same text, as no operation
leaves anything to the implementation. Signed arithmetic is done in unsigned types, shifts are by less than the width, divisors
are not zero, floating point is IEEE 754 without contraction, and NaNs are stored as one value. Names of kernels are
`k` and the number that follows the seed, so that `random_cuda.py SEED+N 1` writes kernel N of `random_cuda.py SEED …` alone.

A kernel is `rounds` functions of one thread, and between them steps in which the threads of a warp or of a block exchange
values. The host runs each function for all threads, and then the step.
"""

import random
import sys

INTEGERS = ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "i128", "u128"]
FLOATS = ["f32", "f64"]
WIDTH = {"i8": 8, "u8": 8, "i16": 16, "u16": 16, "i32": 32, "u32": 32, "i64": 64, "u64": 64, "i128": 128, "u128": 128}

PRELUDE = r"""
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

typedef int8_t i8; typedef uint8_t u8; typedef int16_t i16; typedef uint16_t u16; typedef int32_t i32; typedef uint32_t u32;
typedef int64_t i64; typedef uint64_t u64; typedef __int128 i128; typedef unsigned __int128 u128;
typedef float f32; typedef double f64;
#define BOTH __host__ __device__
#define CALL __host__ __device__ __noinline__
enum { BLOCKS = 2, THREADS = 64, WORDS = 6, IN = 64 };

template <class T> struct Unsigned { typedef T type; };
template <> struct Unsigned<i8> { typedef u8 type; };
template <> struct Unsigned<i16> { typedef u16 type; };
template <> struct Unsigned<i32> { typedef u32 type; };
template <> struct Unsigned<i64> { typedef u64 type; };
template <> struct Unsigned<i128> { typedef u128 type; };
// What int arithmetic of u8 and u16 would overflow: at least u32.
template <class T> struct Wide { typedef typename Unsigned<T>::type type; };
template <> struct Wide<i8> { typedef u32 type; };
template <> struct Wide<u8> { typedef u32 type; };
template <> struct Wide<i16> { typedef u32 type; };
template <> struct Wide<u16> { typedef u32 type; };
#define W(T) typename Wide<T>::type

template <class T> BOTH T add(T a, T b) { return (T)((W(T))a + (W(T))b); }
template <class T> BOTH T sub(T a, T b) { return (T)((W(T))a - (W(T))b); }
template <class T> BOTH T mul(T a, T b) { return (T)((W(T))a * (W(T))b); }
template <class T> BOTH T neg(T a) { return (T)(0 - (W(T))a); }
template <class T> BOTH T divide(T a, T b) { return b == 0 ? a : (T)-1 < (T)0 && b == (T)-1 ? neg(a) : (T)(a / b); }
template <class T> BOTH T rest(T a, T b) { return b == 0 ? a : (T)-1 < (T)0 && b == (T)-1 ? (T)0 : (T)(a % b); }
template <class T> BOTH T left(T a, u32 n) { return (T)((W(T))a << (n & (8 * sizeof(T) - 1))); }
template <class T> BOTH T right(T a, u32 n) { return (T)(a >> (n & (8 * sizeof(T) - 1))); }
template <class T> BOTH T rotate(T a, u32 n) {
    typedef typename Unsigned<T>::type U;
    U u = (U)a;
    n &= 8 * sizeof(T) - 1;
    return n == 0 ? a : (T)(U)((U)(u << n) | (U)(u >> (8 * sizeof(T) - n)));
}
template <class T> BOTH T least(T a, T b) { return b < a ? b : a; }
template <class T> BOTH T most(T a, T b) { return a < b ? b : a; }
// nvcc makes min and max of these even where they order zeros by their signs and the comparison does not.
#define UNSIGNED_ZERO(T) \
    template <> BOTH T least(T a, T b) { return (b < a ? b : a) + (T)0; } \
    template <> BOTH T most(T a, T b) { return (a < b ? b : a) + (T)0; }
UNSIGNED_ZERO(f32) UNSIGNED_ZERO(f64)

BOTH inline f32 same(f32 x) { return x != x ? 1.5f : x; }
BOTH inline f64 same(f64 x) { return x != x ? 1.5 : x; }
BOTH inline u64 bits(f32 x) { u32 b; x = same(x); memcpy(&b, &x, 4); return b; }
BOTH inline u64 bits(f64 x) { u64 b; x = same(x); memcpy(&b, &x, 8); return b; }
BOTH inline u64 bits(bool x) { return x; }
BOTH inline u64 bits(i128 x) { return (u64)x ^ (u64)((u128)x >> 64) * 3; }
BOTH inline u64 bits(u128 x) { return (u64)x ^ (u64)(x >> 64) * 3; }
template <class T> BOTH u64 bits(T x) { return (u64)x; }
BOTH inline void mix(u64 *out, u64 x) { *out = (*out ^ x) * 0x9E3779B97F4A7C15ull + 0x7F4A7C15ull; }

// What the host has no function for.
#ifdef __CUDA_ARCH__
#define ON(device, host) device
#else
#define ON(device, host) host
#endif
template <class T> BOTH T is_set(u64 x, int n) { return (T)((x >> n) & 1); }
BOTH inline u32 popc(u32 x) { return ON(__popc(x), __builtin_popcount(x)); }
BOTH inline u32 popc64(u64 x) { return ON(__popcll(x), __builtin_popcountll(x)); }
BOTH inline u32 clz(u32 x) { return ON(__clz(x), x ? __builtin_clz(x) : 32); }
BOTH inline u32 clz64(u64 x) { return ON(__clzll(x), x ? __builtin_clzll(x) : 64); }
BOTH inline u32 first(u32 x) { return ON(__ffs(x), __builtin_ffs(x)); }
inline u64 turned(u64 x, int n) { u64 y = 0; for (int i = 0; i < n; ++i) y |= (x >> i & 1) << (n - 1 - i); return y; }
BOTH inline u32 brev(u32 x) { return ON(__brev(x), (u32)turned(x, 32)); }
BOTH inline u64 brev64(u64 x) { return ON(__brevll(x), turned(x, 64)); }
inline u32 permuted(u32 a, u32 b, u32 s) {
    u64 all = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= (u32)(all >> (s >> 4 * i & 7) * 8 & 255) << 8 * i;
    return r;
}
BOTH inline u32 perm(u32 a, u32 b, u32 s) { return ON(__byte_perm(a, b, s), permuted(a, b, s)); }
BOTH inline u32 funnel_l(u32 a, u32 b, u32 s) { return ON(__funnelshift_l(a, b, s), (u32)(((u64)b << 32 | a) << (s & 31) >> 32)); }
BOTH inline u32 funnel_r(u32 a, u32 b, u32 s) { return ON(__funnelshift_r(a, b, s), (u32)(((u64)b << 32 | a) >> (s & 31))); }
BOTH inline u32 funnel_lc(u32 a, u32 b, u32 s) { return ON(__funnelshift_lc(a, b, s), s >= 32 ? a : s == 0 ? b : b << s | a >> (32 - s)); }
BOTH inline u32 funnel_rc(u32 a, u32 b, u32 s) { return ON(__funnelshift_rc(a, b, s), s >= 32 ? b : s == 0 ? a : a >> s | b << (32 - s)); }
BOTH inline i32 high(i32 a, i32 b) { return ON(__mulhi(a, b), (i32)((i64)a * b >> 32)); }
BOTH inline u32 highu(u32 a, u32 b) { return ON(__umulhi(a, b), (u32)((u64)a * b >> 32)); }
BOTH inline i64 high64(i64 a, i64 b) { return ON(__mul64hi(a, b), (i64)((i128)a * b >> 64)); }
BOTH inline u64 highu64(u64 a, u64 b) { return ON(__umul64hi(a, b), (u64)((u128)a * b >> 64)); }
BOTH inline u32 mul24(u32 a, u32 b) { return ON(__umul24(a, b), (a & 0xffffff) * (b & 0xffffff)); }
BOTH inline u32 sad(i32 a, i32 b, u32 c) { return ON(__sad(a, b, c), (u32)(a < b ? (u32)b - (u32)a : (u32)a - (u32)b) + c); }
inline i32 dot(u32 a, u32 b, i32 c) { u32 r = c; for (int i = 0; i < 4; ++i) r += (i32)(i8)(a >> 8 * i) * (i8)(b >> 8 * i); return r; }
inline u32 dotu(u32 a, u32 b, u32 c) { for (int i = 0; i < 4; ++i) c += (a >> 8 * i & 255) * (b >> 8 * i & 255); return c; }
BOTH inline i32 dp4a(u32 a, u32 b, i32 c) { return ON(__dp4a((int)a, (int)b, c), dot(a, b, c)); }
BOTH inline u32 dp4au(u32 a, u32 b, u32 c) { return ON(__dp4a(a, b, c), dotu(a, b, c)); }

// PTX that nvcc writes for no expression: predicated instructions, and the carry flag between them.
#ifdef __CUDA_ARCH__
#define PTX(device, host) device
#else
#define PTX(device, host) host
#endif
BOTH inline u32 predicated(u32 x, u32 y, u32 c) {
    PTX(asm("{ .reg .pred p; setp.lo.u32 p, %1, %2; @p add.u32 %0, %0, %1; @!p xor.b32 %0, %0, %2; @!p mul.lo.u32 %0, %0, %1; }" : "+&r"(x) : "r"(y), "r"(c)),
        if (y < c) x += y; else x = (x ^ c) * y);
    return x;
}
BOTH inline u32 carries(u32 x, u32 y, u32 c) {
    u32 r;
    PTX(asm("{ .reg .pred p; .reg .u32 t; setp.gt.s32 p, %3, %1; add.cc.u32 t, %1, %2; @p add.cc.u32 t, t, %3; @!p addc.cc.u32 t, t, t; addc.u32 %0, t, 7; }" : "=&r"(r) : "r"(x), "r"(y), "r"(c)),
        u64 t = (u64)x + y; t = (i32)c > (i32)x ? (t & 0xffffffff) + c : 2 * (t & 0xffffffff) + (t >> 32); r = (u32)t + (u32)(t >> 32) + 7);
    return r;
}
BOTH inline u64 borrows(u64 x, u64 y, u32 c) {
    u64 r;
    PTX(asm("{ .reg .pred p; .reg .u64 t; setp.ne.u32 p, %3, 0; sub.cc.u64 t, %1, %2; @p subc.cc.u64 t, t, %2; subc.u64 %0, t, 1; }" : "=&l"(r) : "l"(x), "l"(y), "r"(c)),
        u64 t = x - y; bool b = x < y; if (c != 0) { u64 u = t - y; u64 v = u - b; b = t < y || u < b; t = v; } r = t - 1 - b);
    return r;
}
BOTH inline u64 loaded(const u64 *from, u64 x, u32 c) {
    PTX(asm volatile("{ .reg .pred p; setp.eq.u32 p, %2, 0; @!p ld.u64 %0, [%1]; @p ld.u32 %0, [%1+4]; }" : "+&l"(x) : "l"(from), "r"(c & 1) : "memory"),
        x = c & 1 ? *from : *from >> 32);
    return x;
}
BOTH inline u64 stored(u64 *to, u64 x, u32 c) {
    PTX(asm volatile("{ .reg .pred p, q; setp.lt.s32 p|q, %2, 0; @p st.u64 [%0], %1; @q st.u8 [%0+3], %1; }" ::"l"(to), "l"(x), "r"(c) : "memory"),
        if ((i32)c < 0) *to = x; else *to = (*to & ~(0xffull << 24)) | (x & 0xff) << 24);
    return *to;
}
BOTH inline u32 jumped(u32 x, u32 y) {
    PTX(asm("{ .reg .pred p; .reg .u32 n; and.b32 n, %1, 3; more%=: setp.eq.u32 p, n, 0; @p bra out%=; add.u32 %0, %0, %1; sub.u32 n, n, 1; bra more%=; out%=: @!p xor.b32 %0, %0, 1; }" : "+&r"(x) : "r"(y)),
        for (u32 n = y & 3; n; --n) x += y);
    return x;
}

// 16-bit floats, whose sums and products f32 has exactly enough of.
#define HALF(name, type, to, from, op) \
    BOTH inline f32 name(f32 a, f32 b) { return to(op(from(same(a)), from(same(b)))); }
HALF(half_add, __half, __half2float, __float2half_rn, __hadd_rn) HALF(half_sub, __half, __half2float, __float2half_rn, __hsub_rn)
HALF(half_mul, __half, __half2float, __float2half_rn, __hmul_rn)
HALF(bf16_add, __nv_bfloat16, __bfloat162float, __float2bfloat16_rn, __hadd_rn)
HALF(bf16_mul, __nv_bfloat16, __bfloat162float, __float2bfloat16_rn, __hmul_rn)

// Rounding, where the host has a mode for it. `volatile` keeps its compiler from computing in another.
enum { RN, RZ, RU, RD };
#define ROUNDED(T, expression) \
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_UPWARD, FE_DOWNWARD}; \
    fesetround(modes[mode]); \
    volatile T r = expression; \
    fesetround(FE_TONEAREST); \
    return r;
#define BINARY(name, T, op) inline T name(T x, T y, int mode) { volatile T a = x, b = y; ROUNDED(T, a op b) }
BINARY(add_as, f32, +) BINARY(add_as, f64, +) BINARY(sub_as, f32, -) BINARY(sub_as, f64, -)
BINARY(mul_as, f32, *) BINARY(mul_as, f64, *) BINARY(div_as, f32, /) BINARY(div_as, f64, /)
inline f32 fma_as(f32 x, f32 y, f32 z, int mode) { volatile f32 a = x, b = y, c = z; ROUNDED(f32, fmaf(a, b, c)) }
inline f64 fma_as(f64 x, f64 y, f64 z, int mode) { volatile f64 a = x, b = y, c = z; ROUNDED(f64, fma(a, b, c)) }
inline f32 sqrt_as(f32 x, int mode) { volatile f32 a = x; ROUNDED(f32, sqrtf(a)) }
inline f64 sqrt_as(f64 x, int mode) { volatile f64 a = x; ROUNDED(f64, sqrt(a)) }
template <class T> T float_as(T, int) = delete;
inline f32 narrow_as(f64 x, int mode) { volatile f64 a = x; ROUNDED(f32, (f32)a) }
inline f32 f32_of(i64 x, int mode) { volatile i64 a = x; ROUNDED(f32, (f32)a) }
inline f32 f32_ofu(u64 x, int mode) { volatile u64 a = x; ROUNDED(f32, (f32)a) }
inline f64 f64_of(i64 x, int mode) { volatile i64 a = x; ROUNDED(f64, (f64)a) }
inline f64 f64_ofu(u64 x, int mode) { volatile u64 a = x; ROUNDED(f64, (f64)a) }
// To integers as cvt does it: saturating; of NaN 0, or the highest bit alone of and to 64 bits (PTX ISA, cvt).
inline f64 to_whole(f64 x, int mode) { return mode == RN ? nearbyint(x) : mode == RZ ? trunc(x) : mode == RU ? ceil(x) : floor(x); }
template <class T> T saturated(f64 x, int mode, bool is_wide) {
    const T low = (T)-1 < (T)0 ? (T)((u64)1 << (8 * sizeof(T) - 1)) : (T)0;
    const T top = (T)-1 < (T)0 ? (T)~low : (T)-1;
    if (x != x) return is_wide || sizeof(T) == 8 ? (T)((u64)1 << (8 * sizeof(T) - 1)) : (T)0;
    x = to_whole(x, mode);
    if (x <= (f64)low) return low;
    if (x >= ldexp(1.0, 8 * sizeof(T) - ((T)-1 < (T)0))) return top;
    return (T)x;
}
"""

ROUNDINGS = ["rn", "rz", "ru", "rd"]


def intrinsics():
    """The arithmetic and the conversions that name a rounding mode, by device and by host."""
    lines = []
    for mode in ROUNDINGS:
        upper = mode.upper()
        for letter, real in (("f", "f32"), ("d", "f64")):
            for op in ("add", "sub", "mul", "div"):
                # The `sub` of f64 is `__dsub_rn`, of f32 `__fsub_rn`.
                lines.append(
                    f"BOTH inline {real} {op}_{mode}({real} a, {real} b) {{ return ON(__{letter}{op}_{mode}(a, b), {op}_as(a, b, {upper})); }}"
                )
            fma = "__fmaf" if real == "f32" else "__fma"
            lines.append(
                f"BOTH inline {real} fma_{mode}({real} a, {real} b, {real} c) {{ return ON({fma}_{mode}(a, b, c), fma_as(a, b, c, {upper})); }}"
            )
            root = "__fsqrt" if real == "f32" else "__dsqrt"
            lines.append(f"BOTH inline {real} sqrt_{mode}({real} a) {{ return ON({root}_{mode}(a), sqrt_as(a, {upper})); }}")
            name = "float" if real == "f32" else "double"
            for kind, integer in (("int", "i32"), ("uint", "u32"), ("ll", "i64"), ("ull", "u64")):
                wide = "true" if real == "f64" else "false"
                lines.append(
                    f"BOTH inline {integer} to_{integer}_{mode}({real} a) {{ return ON(({integer})__{name}2{kind}_{mode}(a), saturated<{integer}>(a, {upper}, {wide})); }}"
                )
                if real == "f64" and integer in ("i32", "u32"):
                    continue
                host = f"{real}_of{'u' if integer[0] == 'u' else ''}"
                lines.append(
                    f"BOTH inline {real} {real}_of_{mode}({integer} a) {{ return ON(__{kind}2{name}_{mode}(a), {host}(a, {upper})); }}"
                )
        lines.append(f"BOTH inline f32 narrow_{mode}(f64 a) {{ return ON(__double2float_{mode}(a), narrow_as(a, {upper})); }}")
    return "\n".join(lines)


class Struct:
    """A struct of random fields: (name, type, bits or 0, elements or 0)."""

    def __init__(self, name, rng):
        self.name, self.fields = name, []
        for index in range(rng.randint(2, 6)):
            kind = rng.random()
            if kind < 0.35:
                of = rng.choice(["i32", "u32", "u8", "i16", "i64", "u64", "u16", "i8"])
                self.fields.append((f"m{index}", of, rng.randint(1, min(WIDTH[of], 40)), 0))
            elif kind < 0.5:
                of = rng.choice(["u8", "i16", "u32", "i64", "f32", "f64"])
                self.fields.append((f"m{index}", of, 0, rng.choice([2, 4, 8])))
            else:
                of = rng.choice(INTEGERS[:8] + FLOATS + ["u128"])
                self.fields.append((f"m{index}", of, 0, 0))

    def text(self):
        def field(name, of, width, elements):
            return f"{of} {name}" + (f" : {width}" if width else f"[{elements}]" if elements else "")

        return f"struct {self.name} {{ " + " ".join(field(*f) + ";" for f in self.fields) + " };"


class Function:
    """Writes the statements of a function of one thread."""

    def __init__(self, rng, structs, callees, indent=1):
        self.rng, self.structs, self.callees = rng, structs, callees
        self.scopes, self.lines, self.indent = [[]], [], indent
        self.loops, self.names, self.breakable = 0, 0, 0
        # Pointers to four u64, of any space, by scope.
        self.pointers = [[]]

    # Variables that can be read: (text, type, can be assigned).
    def visible(self, of=None, assigned=False):
        return [v for scope in self.scopes for v in scope if (of is None or v[1] == of) and (v[2] or not assigned)]

    def fresh(self):
        self.names += 1
        return f"v{self.names}"

    def line(self, text):
        self.lines.append("    " * self.indent + text)

    def literal(self, of):
        rng = self.rng
        if of == "bool":
            return rng.choice(["true", "false"])
        if of in FLOATS:
            suffix = "f" if of == "f32" else ""
            value = rng.choice([0.0, 1.0, 0.5, 3.0, 1e-3, 0.1, 7.25, 1e10, 33554432.0, 1e-30, 4294967296.0, 123456.789, 1e-40])
            return ("-" if rng.random() < 0.3 else "") + f"{value!r}{suffix}"
        width = WIDTH[of]
        kind = rng.random()
        if kind < 0.4:
            value = rng.randint(0, 20)
        elif kind < 0.6:
            value = rng.choice([1 << (width - 1), (1 << (width - 1)) - 1, (1 << width) - 1, (1 << width) - rng.randint(1, 9), 1 << rng.randrange(width)])
        else:
            value = rng.getrandbits(rng.randint(1, width))
        if width == 128:
            return f"(({of})((u128){value >> 64}ull << 64 | {value & (1 << 64) - 1}ull))"
        return f"({of}){value}{'ull' if value >> 31 else ''}"

    def leaf(self, of):
        here = self.visible(of)
        return self.rng.choice(here)[0] if here and self.rng.random() < 0.8 else self.literal(of)

    def expression(self, of, depth):
        rng = self.rng
        if depth <= 0 or rng.random() < 0.12:
            return self.leaf(of)
        e = lambda t=of: self.expression(t, depth - 1)
        if of == "bool":
            kind = rng.randrange(5)
            if kind < 3:
                t = rng.choice(INTEGERS + FLOATS)
                return f"({e(t)} {rng.choice(['<', '<=', '>', '>=', '==', '!='])} {e(t)})"
            return f"!{e()}" if kind == 3 else f"({e()} {rng.choice(['&&', '||', '^'])} {e()})"
        common = [
            lambda: f"({e('bool')} ? {e()} : {e()})",
            lambda: self.conversion(of, depth),
        ]
        calls = [c for c in self.callees if c[1] == of and ("u64 *" not in c[2] or any(self.pointers))]
        if calls:
            common.append(lambda: self.call(rng.choice(calls), depth))
        if of in FLOATS:
            f = "f" if of == "f32" else ""
            # Of f64, only this mode is supported.
            mode = rng.choice(ROUNDINGS) if of == "f32" else "rn"
            return rng.choice(
                common
                + [
                    lambda: f"({e()} {rng.choice('+-*/')} {e()})",
                    lambda: f"({e()} {rng.choice('+-*')} {e()})",
                    lambda: f"{rng.choice(['add', 'sub', 'mul'])}_{mode}({e()}, {e()})",
                    lambda: f"fma_{mode}({e()}, {e()}, {e()})",
                    lambda: f"sqrt_rn({e()})",
                    lambda: f"{rng.choice(['floor', 'ceil', 'trunc', 'rint', 'fabs'])}{f}({e()})",
                    lambda: f"copysign{f}({e()}, same({e()}))",
                    lambda: f"(- {e()})",
                    lambda: f"{rng.choice(['least', 'most'])}({e()}, {e()})",
                ]
            )()
        n = lambda: e("u32")
        special = {
            "u32": [
                lambda: f"{rng.choice(['popc', 'clz', 'brev', 'first'])}({e()})",
                lambda: f"{rng.choice(['popc64', 'clz64'])}({e('u64')})",
                lambda: f"perm({e()}, {e()}, {e()})",
                lambda: f"{rng.choice(['funnel_l', 'funnel_r', 'funnel_lc', 'funnel_rc', 'dp4au'])}({e()}, {e()}, {e()})",
                lambda: f"{rng.choice(['highu', 'mul24'])}({e()}, {e()})",
                lambda: f"sad({e('i32')}, {e('i32')}, {e()})",
                lambda: f"{rng.choice(['predicated', 'carries'])}({e()}, {e()}, {e()})",
                lambda: f"jumped({e()}, {e()})",
            ],
            "i32": [lambda: f"high({e()}, {e()})", lambda: f"dp4a({e('u32')}, {e('u32')}, {e()})"],
            "i64": [lambda: f"high64({e()}, {e()})"],
            "u64": [
                lambda: f"highu64({e()}, {e()})",
                lambda: f"brev64({e()})",
                lambda: f"borrows({e()}, {e()}, {n()})",
                lambda: f"loaded({self.pointer()} + ({n()} & 3), {e()}, {n()})" if self.pointers[0] else e(),
            ],
        }.get(of, [])
        arithmetic = [
            lambda: f"{rng.choice(['add', 'sub', 'mul'])}<{of}>({e()}, {e()})",
            lambda: f"{rng.choice(['add', 'sub', 'mul'])}<{of}>({e()}, {e()})",
            lambda: f"{rng.choice(['divide', 'rest'])}<{of}>({e()}, {e()})",
            lambda: f"({of})({e()} {rng.choice('&|^')} {e()})",
            lambda: f"{rng.choice(['left', 'right', 'rotate'])}<{of}>({e()}, {n()})",
            lambda: f"{rng.choice(['least', 'most'])}<{of}>({e()}, {e()})",
            lambda: f"{rng.choice([f'neg<{of}>', f'({of})~'])}({e()})",
        ]
        return rng.choice(common + arithmetic + arithmetic + special)()

    def conversion(self, of, depth):
        rng = self.rng
        e = lambda t: self.expression(t, depth - 1)
        mode = rng.choice(ROUNDINGS)
        if of in FLOATS:
            if rng.random() < 0.3:
                return f"narrow_{mode}({e('f64')})" if of == "f32" else f"(f64){e('f32')}"
            if of == "f32" and rng.random() < 0.3:
                return f"{rng.choice(['half_add', 'half_sub', 'half_mul', 'bf16_add', 'bf16_mul'])}({e('f32')}, {e('f32')})"
            source = rng.choice(["i32", "u32", "i64", "u64"] if of == "f32" else ["i64", "u64"])
            return f"{of}_of_rn({e(source)})" if rng.random() < 0.7 else f"({of}){e(rng.choice(INTEGERS[:8]))}"
        if of in ("i32", "u32", "i64", "u64") and rng.random() < 0.4:
            return f"to_{of}_{mode}({e(rng.choice(FLOATS))})"
        if rng.random() < 0.15:
            return f"({of}){e('bool')}"
        return f"({of}){e(rng.choice(INTEGERS))}"

    def call(self, callee, depth):
        name, result, parameters = callee
        arguments = []
        for of in parameters:
            if of == "u64 *":
                arguments.append(self.pointer())
            elif of in [s.name for s in self.structs]:
                arguments.append(self.rng.choice(self.visible(of))[0] if self.visible(of) else f"{of}()")
            else:
                arguments.append(self.expression(of, depth - 2))
        # Each call is a statement: C++ leaves the order of evaluation in an expression open, and a function may write through pointers.
        variable = self.fresh()
        self.line(f"{result} {variable} = {name}(tid, {', '.join(arguments)});")
        return variable

    def declare_struct(self, struct, text=None):
        name = self.fresh()
        self.line(f"{struct.name} {name}{' = ' + text if text else ' = {}'};")
        self.scopes[-1].append((name, struct.name, False))
        self.open_struct(struct, name, True)
        return name

    def open_struct(self, struct, name, assigned, to=None):
        for field, of, _, elements in struct.fields:
            if elements:
                self.scopes[-1].append((f"{name}.{field}[{self.expression('u32', 1)} & {elements - 1}]", of, assigned))
            else:
                self.scopes[-1].append((f"{name}.{field}", of, assigned))

    def assign(self, depth):
        target, of, _ = self.rng.choice(self.visible(assigned=True))
        self.line(f"{target} = {self.expression(of, depth)};")

    def declare(self, depth):
        of = self.rng.choice(INTEGERS + FLOATS + ["bool", "i32", "u32"])
        text = self.expression(of, depth)
        name = self.fresh()
        self.line(f"{of} {name} = {text};")
        self.scopes[-1].append((name, of, True))

    def array(self, depth):
        """A local array, read and written where an index points, and by a pointer that may point elsewhere."""
        rng = self.rng
        of, size, name = rng.choice(INTEGERS + FLOATS), rng.choice([2, 4, 8, 16]), self.fresh()
        self.line(f"{of} {name}[{size}] = {{{', '.join(self.expression(of, 1) for _ in range(rng.randint(1, size)))}}};")
        index = lambda: f"{name}[{self.expression('u32', 2)} & {size - 1}]"
        if rng.random() < 0.4:
            other = self.fresh()
            self.line(f"{of} {other}[{size}] = {{{self.expression(of, 1)}}};")
            pointer = self.fresh()
            self.line(f"{of} *{pointer} = {self.expression('bool', 2)} ? {name} : {other};")
            if rng.random() < 0.5:
                self.line(f"if ({self.expression('bool', 2)}) {pointer} += {self.expression('u32', 1)} & {size - 1}, {pointer}[0] = {self.expression(of, 2)};")
            else:
                self.line(f"{pointer}[{self.expression('u32', 1)} & {size - 1}] = {self.expression(of, 2)};")
            self.scopes[-1].append((f"*{pointer}", of, True))
        if rng.random() < 0.3 and WIDTH.get(of, 32) > 8:
            width = 4 if of == "f32" else 8 if of == "f64" else WIDTH[of] // 8
            self.line(f"for (u32 i = 0; i < {width * size}; i += {rng.choice([1, 3, 5])}) ((u8 *){name})[i] ^= {self.expression('u8', 1)};" if of not in FLOATS else f"((u8 *){name})[{self.expression('u32', 1)} & {width * size - 1}] ^= 1;")
        for _ in range(2):
            self.scopes[-1].append((index(), of, True))

    def pointer(self):
        return self.rng.choice([p for scope in self.pointers for p in scope])

    def element(self, pointer):
        return f"{pointer}[{self.expression('u32', 1)} & 3]"

    def declare_pointer(self, depth):
        """A pointer whose space the translator can't see: chosen at run time, from memory, or made of two halves."""
        rng, name = self.rng, self.fresh()
        if rng.random() < 0.5 or not self.pointers[0]:
            self.line(f"u64 {name}[4] = {{{self.expression('u64', 2)}}};")
        elif rng.random() < 0.4:
            self.line(f"u64 *{name} = {self.expression('bool', depth)} ? {self.pointer()} : {self.pointer()};")
        elif rng.random() < 0.6:
            self.line(f"u64 *{name}_from[2] = {{{self.pointer()}, {self.pointer()}}}, *{name} = {name}_from[{self.expression('u32', 2)} & 1];")
        else:
            of = self.pointer()
            self.line(f"u32 {name}_half[3] = {{(u32)(u64){of}, (u32)((u64){of} >> 32), 0}};")
            self.line(f"u64 *{name} = (u64 *)((u64){name}_half[(tid >> 8) + 1] << 32 | {name}_half[tid >> 8]);")
        self.pointers[-1].append(name)
        self.line(f"{self.element(name)} = {self.expression('u64', depth)};")
        if rng.random() < 0.4:
            self.line(f"stored({name} + ({self.expression('u32', 2)} & 3), {self.expression('u64', 2)}, {self.expression('u32', 2)});")
        self.scopes[-1].append((self.element(name), "u64", True))

    def block(self, depth, budget):
        self.scopes.append([])
        self.pointers.append([])
        self.indent += 1
        for _ in range(budget):
            self.statement(depth, budget - 1)
        self.indent -= 1
        self.scopes.pop()
        self.pointers.pop()

    def statement(self, depth, budget):
        rng = self.rng
        kind = rng.random()
        if kind < 0.3 or not self.visible(assigned=True):
            self.declare(depth)
        elif kind < 0.55:
            self.assign(depth)
        elif kind < 0.58:
            self.array(depth)
        elif kind < 0.62:
            self.declare_pointer(depth)
        elif kind < 0.67 and self.structs:
            struct = rng.choice(self.structs)
            makers = [c for c in self.callees if c[1] == struct.name]
            self.declare_struct(struct, self.call(rng.choice(makers), depth) if makers else None)
        elif kind < 0.79 and budget > 0:
            self.line(f"if ({self.expression('bool', depth)}) {{")
            self.block(depth, budget)
            if rng.random() < 0.5:
                self.line("} else {")
                self.block(depth, budget)
            self.line("}")
        elif kind < 0.88 and budget > 0 and self.loops < 2:
            i = self.fresh()
            bound = rng.choice([str(rng.randint(1, 6)), f"({self.expression('u32', 1)} & 7)"])
            self.line(f"for (u32 {i} = 0; {i} < {bound}; ++{i}) {{")
            self.scopes.append([(i, "u32", False)])
            self.loops += 1
            self.breakable += 1
            self.block(depth, budget)
            self.breakable -= 1
            self.loops -= 1
            self.scopes.pop()
            self.line("}")
        elif kind < 0.93 and budget > 0:
            self.line(f"switch ({self.expression('u32', depth)} % {rng.randint(2, 6)}) {{")
            for case in rng.sample(range(5), rng.randint(1, 4)):
                self.line(f"case {case}: {{")
                self.block(depth, budget)
                self.line("}" + (" break;" if rng.random() < 0.7 else ""))
            self.line("default: {")
            self.block(depth, budget)
            self.line("} }")
        elif kind < 0.97 and self.breakable:
            self.line(f"if ({self.expression('bool', 2)}) {rng.choice(['break', 'continue'])};")
        else:
            of = rng.choice(INTEGERS + FLOATS)
            self.line(f"mix(out + {rng.randrange(6)}, bits({self.expression(of, depth)}));")


PRINTED = {
    "i32": "%d", "u32": "%u", "i64": "%lld", "u64": "%llu", "f64": "%g",
}


class Kernel:
    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.name = f"k{seed}"
        self.structs = [Struct(f"S{seed}_{i}", rng) for i in range(rng.randint(0, 2))]
        self.parts = [s.text() for s in self.structs]
        self.callees = []
        for index in range(rng.randint(0, 3)):
            self.callee(index)
        self.rounds = rng.choice([1, 1, 2, 3])
        self.given = rng.choice(self.structs) if self.structs and rng.random() < 0.6 else None
        for index in range(self.rounds):
            self.round(index)
        self.steps = [self.step(i) for i in range(self.rounds - 1)]

    def parameters(self):
        names = [s.name for s in self.structs]
        return [self.rng.choice(INTEGERS + FLOATS + ["bool", "u64 *", "u64 *"] + names * 3) for _ in range(self.rng.randint(1, 4))]

    def enter(self, function, parameters):
        text = []
        for index, of in enumerate(parameters):
            name = f"p{index}"
            text.append(f"{of} {name}")
            if of == "u64 *":
                function.pointers[0].append(name)
                function.scopes[0].append((function.element(name), "u64", True))
                continue
            struct = next((s for s in self.structs if s.name == of), None)
            function.scopes[0].append((name, of, struct is None))
            if struct:
                function.open_struct(struct, name, True)
        return ", ".join(text)

    def callee(self, index):
        rng, name = self.rng, f"{self.name}_f{index}"
        of = rng.choice(INTEGERS + FLOATS + [s.name for s in self.structs] * 2)
        function = Function(rng, self.structs, list(self.callees))
        parameters = self.parameters()
        function.scopes[0].append(("tid", "u32", False))
        text = "u32 tid, " + self.enter(function, parameters)
        function.line("u64 out[6] = {};")
        function.pointers[0].append("out")
        for _ in range(rng.randint(1, 5)):
            function.statement(2, 1)
        struct = next((s for s in self.structs if s.name == of), None)
        if struct:
            result = function.declare_struct(struct)
            for _ in range(3):
                function.assign(2)
            for field, t, _, elements in struct.fields:
                if not elements:
                    function.line(f"{result}.{field} = {function.expression(t, 2)};")
            function.line(f"return {result};")
        else:
            seen = f"(u64)(out[0] ^ out[3])"
            function.line(f"return {function.expression(of, 3)};" if of in FLOATS else f"return ({of})((u64){function.expression(of, 3)} ^ {seen});")
        how = rng.choice(["CALL", "CALL", "BOTH inline"])
        self.parts.append(f"{how} {of} {name}({text}) {{\n" + "\n".join(function.lines) + "\n}")
        self.callees.append((name, of, parameters))

    def round(self, index):
        """The function of one thread: reads `in`, `from` (what the step gave it) and the kernel's struct, has `own` in shared memory, and
        writes `out`."""
        rng = self.rng
        function = Function(rng, self.structs, self.callees)
        function.scopes[0] += [("tid", "u32", False), ("from", "u64", False)]
        for of in ["i32", "u32", "i64", "u64", "f32", "f64", "u8", "i16", "i128", "u128"]:
            function.line(f"{of} in_{of} = in.{of}_[(tid * {rng.choice([1, 3, 7])} + {rng.randrange(IN)}) % {IN}];")
            function.scopes[0].append((f"in_{of}", of, True))
        function.pointers[0] += ["own", "own", "out"]
        given = ""
        if self.given:
            given = f", {self.given.name} given"
            function.scopes[0].append(("given", self.given.name, False))
            function.open_struct(self.given, "given", False)
        for _ in range(rng.randint(4, 10)):
            function.statement(3, 2)
        for _ in range(3):
            of = rng.choice(INTEGERS + FLOATS)
            function.line(f"mix(out + {rng.randrange(6)}, bits({function.expression(of, 3)}));")
        if rng.random() < 0.15:
            values = [(PRINTED[of], function.expression(of, 2)) for of in rng.choices(list(PRINTED), k=rng.randint(1, 4))]
            values = [(form, f"same({text})" if form == "%g" else f"(long long){text}" if form == "%lld" else f"(unsigned long long){text}" if form == "%llu" else text) for form, text in values]
            function.line(f"if (tid == {rng.randrange(128)}) printf(\"{self.name} {' '.join(f for f, _ in values)} %s\\n\", {', '.join(t for _, t in values)}, \"end\");")
        function.line(f"return {function.expression('u64', 3)};")
        self.parts.append(f"BOTH u64 {self.name}_r{index}(const Inputs &in, u32 tid, u64 from, u64 *out, u64 *own{given}) {{\n" + "\n".join(function.lines) + "\n}")

    def step(self, index):
        """What threads exchange: the device's statement from `x` to `y`, and the host's over all values of a warp or block."""
        rng = self.rng
        warp = {
            "shfl": ("y = __shfl_sync(~0u, x, (u32)x & 31);", "y[t] = x[w + (x[t] & 31)];"),
            "up": ("y = __shfl_up_sync(~0u, x, 3);", "y[t] = t - w < 3 ? x[t] : x[t - 3];"),
            "down": ("y = __shfl_down_sync(~0u, (u32)x, 5, 16);", "y[t] = (t & 15) + 5 > 15 ? (u32)x[t] : (u32)x[t + 5];"),
            "xor": ("y = __shfl_xor_sync(~0u, x, 9);", "y[t] = x[w + ((t - w) ^ 9)];"),
            "ballot": ("y = __ballot_sync(~0u, x >> 7 & 1);", "y[t] = 0; for (u32 i = 0; i < 32; ++i) y[t] |= (x[w + i] >> 7 & 1) << i;"),
            "any": ("y = __any_sync(~0u, (x & 63) == 5) * 2 + __all_sync(~0u, x != 1);", "u32 a = 0, b = 1; for (u32 i = 0; i < 32; ++i) a |= (x[w + i] & 63) == 5, b &= x[w + i] != 1; y[t] = a * 2 + b;"),
        }
        block = {
            "swap": ("__shared__ u64 s[THREADS]; s[threadIdx.x] = x; __syncthreads(); y = s[(threadIdx.x * 5 + (u32)(x >> 60)) % THREADS]; __syncthreads();", "y[t] = x[(t * 5 + (u32)(x[t] >> 60)) % THREADS];"),
            "bytes": ("__shared__ u8 s[THREADS * 8]; for (int i = 0; i < 8; ++i) s[(threadIdx.x * 8 + i * 13) % (THREADS * 8)] = 0; __syncthreads(); memcpy(s + threadIdx.x * 8, &x, 8); __syncthreads(); y = *(u32 *)(s + ((threadIdx.x * 12 + (u32)x % 4 * 4) % (THREADS * 8))); __syncthreads();", "memcpy(&y[t], (u8 *)x + ((t * 12 + (u32)x[t] % 4 * 4) % (THREADS * 8)), 4); y[t] = (u32)y[t];"),
            "atomics": ("__shared__ u32 s[8]; if (threadIdx.x < 8) s[threadIdx.x] = 7; __syncthreads(); atomicAdd(s + (x & 7), (u32)(x >> 9)); __syncthreads(); y = s[x >> 3 & 7]; __syncthreads();", "u32 s[8]; for (int i = 0; i < 8; ++i) s[i] = 7; for (u32 i = 0; i < THREADS; ++i) s[x[i] & 7] += (u32)(x[i] >> 9); y[t] = s[x[t] >> 3 & 7];"),
            "count": ("y = __syncthreads_count((x & 3) == 1);", "u32 c = 0; for (u32 i = 0; i < THREADS; ++i) c += (x[i] & 3) == 1; y[t] = c;"),
        }
        return rng.choice(list({**warp, **block}.values()))

    def text(self):
        name, given = self.name, self.given
        parameter, argument = (f", {given.name} given", ", given") if given else ("", "")
        device, host = [], []
        for index in range(self.rounds):
            device.append(f"x = {name}_r{index}(*in, tid, y, out, own{argument});")
            host.append(f"for (u32 t = 0; t < THREADS; ++t) x[t] = {name}_r{index}(in, b * THREADS + t, y[t], all + (b * THREADS + t) * WORDS, own + 4 * t{argument});")
            if index < self.rounds - 1:
                on_device, on_host = self.steps[index]
                device.append("{ " + on_device + " }")
                host.append(f"for (u32 t = 0; t < THREADS; ++t) {{ u32 w = t & ~31u; (void)w; {on_host} }}")
        make = f"{given.name} given; memset(&given, 0, sizeof given);" if given else ""
        if given:
            fields = "".join(
                f" for (int i = 0; i < {elements}; ++i) given.{field}[i] = ({of})in.{'f64' if of in FLOATS else 'u64'}_[i + {n}];"
                if elements
                else f" given.{field} = ({of})in.{'f64' if of in FLOATS else 'u64'}_[{n}];"
                for n, (field, of, _, elements) in enumerate(given.fields)
            )
            make += fields
        return "\n".join(
            self.parts
            + [
                f"__global__ void {name}(const Inputs *in, u64 *all{parameter}) {{",
                "    u32 tid = blockIdx.x * THREADS + threadIdx.x;",
                "    __shared__ u64 owned[4 * THREADS];",
                "    u64 x = 0, y = tid, *out = all + tid * WORDS, *own = owned + 4 * threadIdx.x;",
                "    for (int i = 0; i < 4; ++i) own[i] = tid * i;",
                *("    " + line for line in device),
                "    mix(out, x);",
                "}",
                f"void host_{name}(const Inputs &in, u64 *all) {{",
                f"    {make}",
                "    for (u32 b = 0; b < BLOCKS; ++b) {",
                "        u64 x[THREADS] = {}, y[THREADS], own[4 * THREADS];",
                "        for (u32 t = 0; t < THREADS; ++t) y[t] = b * THREADS + t;",
                "        for (u32 i = 0; i < 4 * THREADS; ++i) own[i] = (b * THREADS + i / 4) * (i % 4);",
                *("        " + line for line in host),
                "        for (u32 t = 0; t < THREADS; ++t) mix(all + (b * THREADS + t) * WORDS, x[t]);",
                "    }",
                "}",
                f"void device_{name}(const Inputs &in, const Inputs *there, u64 *all) {{",
                f"    {make}",
                f"    {name}<<<BLOCKS, THREADS>>>(there, all{argument});",
                "}",
            ]
        )


IN = 64
MAIN = r"""
struct Case { const char *name; void (*host)(const Inputs &, u64 *); void (*device)(const Inputs &, const Inputs *, u64 *); };
static const Case CASES[] = {
%s
};

static u64 state = 1;
static u64 next() { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return state; }

// Values of all sizes, and often those at which something changes.
template <class T> static T whole() {
    u128 x = (u128)next() << 64 | next();
    switch (next() % 8) {
    case 0: return (T)(x %% 5);
    case 1: return (T)((u128)1 << (next() %% (8 * sizeof(T))));
    case 2: return (T)(((u128)1 << (next() %% (8 * sizeof(T)))) - 1);
    case 3: return (T)(0 - x %% 5);
    case 4: return (T)(x >> next() %% 128);
    default: return (T)x;
    }
}
template <class T> static T real() {
    switch (next() %% 12) {
    case 0: return (T)0;
    case 1: return -(T)0.0;
    case 2: return (T)INFINITY;
    case 3: return (T)NAN;
    case 4: return (T)((f64)(i64)next() * 1e-300) * (T)1e-20;
    case 5: return (T)(i64)(next() %% 2001 - 1000);
    case 6: return (T)((i64)next());
    case 7: return (T)((i32)next()) / 16;
    case 8: return (T)ldexp((f64)(i64)next(), (int)(next() %% 160) - 140);
    default: return (T)((f64)(i64)next() / 9.3e18);
    }
}

int main(int count, char **words) {
    bool on_device = count > 1 && strcmp(words[1], "device") == 0;
    static Inputs in;
    for (int i = 0; i < IN; ++i) {
#define FILL(T, how) in.T##_[i] = how<T>();
        FILL(i32, whole) FILL(u32, whole) FILL(i64, whole) FILL(u64, whole) FILL(u8, whole) FILL(i16, whole) FILL(i128, whole)
        FILL(u128, whole) FILL(f32, real) FILL(f64, real)
    }
    static u64 all[BLOCKS * THREADS * WORDS];
    for (const Case &one : CASES) {
        if (count > 2 && strcmp(words[2], one.name) != 0) continue;
        memset(all, 0, sizeof all);
        if (on_device) {
            Inputs *there = 0;
            u64 *results = 0;
            cudaError_t error = cudaMalloc(&there, sizeof in);
            if (!error) error = cudaMalloc(&results, sizeof all);
            if (!error) error = cudaMemcpy(there, &in, sizeof in, cudaMemcpyHostToDevice);
            if (!error) error = cudaMemset(results, 0, sizeof all);
            if (!error) one.device(in, there, results);
            if (!error) error = cudaGetLastError();
            if (!error) error = cudaMemcpy(all, results, sizeof all, cudaMemcpyDeviceToHost);
            if (error) {
                printf("%%s fails: %%s\n", one.name, cudaGetErrorName(error));
                cudaDeviceReset();
                cudaGetLastError();
                continue;
            }
            cudaFree(there);
            cudaFree(results);
        } else {
            one.host(in, all);
        }
        for (int t = 0; t < BLOCKS * THREADS; ++t) {
            u64 sum = 0;
            for (int i = 0; i < WORDS; ++i) mix(&sum, all[t * WORDS + i]);
            if (count > 2) {
                printf("%%d", t);
                for (int i = 0; i < WORDS; ++i) printf(" %%016llx", (unsigned long long)all[t * WORDS + i]);
                printf("\n");
            } else if (t %% 32 == 31 || t == 0) {
                printf("%%s %%d %%016llx\n", one.name, t, (unsigned long long)sum);
            }
            static u64 chain;
            if (t == 0) chain = 0;
            mix(&chain, sum);
            if (t == BLOCKS * THREADS - 1) printf("%%s %%016llx\n", one.name, (unsigned long long)chain);
        }
        fflush(stdout);
    }
}
"""


def program(seed, count):
    kernels = [Kernel(seed + index) for index in range(count)]
    inputs = "struct Inputs { " + " ".join(f"{of} {of}_[IN];" for of in ["i32", "u32", "i64", "u64", "f32", "f64", "u8", "i16", "i128", "u128"]) + " };"
    cases = "\n".join(f'    {{"{k.name}", host_{k.name}, device_{k.name}}},' for k in kernels)
    return "\n".join([PRELUDE, intrinsics(), inputs, *(k.text() for k in kernels), MAIN.replace("next() % 8", "next() %% 8") % cases])


if __name__ == "__main__":
    print(program(int(sys.argv[1]), int(sys.argv[2])))
