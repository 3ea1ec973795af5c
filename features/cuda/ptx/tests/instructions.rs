//! Single instructions on numbers of all kinds, against the same in Rust.

mod common;

use common::{Machine, Program, Random};

const N: usize = 128;

/// `a` and `b` are in `%rd1` and `%rd2`, their low halves in `%r1` and `%r2`, those as floats in `%f1` and `%f2`; `%rd9` is the result.
#[track_caller]
fn check(body: &str, expect: impl Fn(u64, u64) -> u64) {
    let text = format!(
        ".version 8.0\n.target sm_75\n.address_size 64\n.global .align 8 .u64 word = 5;\n\
         .func (.param .align 4 .b8 halves[8]) by_halves(.param .b64 whole) {{\n\
         .reg .b32 %r<3>; ld.param.v2.b32 {{%r1, %r2}}, [whole]; st.param.b32 [halves], %r1; st.param.b32 [halves+4], %r2; ret;\n}}\n\
         .visible .entry k(.param .u64 a, .param .u64 b, .param .u64 out) {{\n\
         .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<20>; .reg .b64 %rd<30>; .reg .f32 %f<9>; .reg .f64 %fd<9>;\n\
         .shared .align 8 .b8 s[1536]; .local .align 8 .b8 l[64];\n\
         ld.param.u64 %rd20, [a]; ld.param.u64 %rd21, [b]; ld.param.u64 %rd22, [out];\n\
         mov.u32 %r19, %tid.x; mul.wide.u32 %rd23, %r19, 8; add.s64 %rd20, %rd20, %rd23; add.s64 %rd21, %rd21, %rd23;\n\
         add.s64 %rd22, %rd22, %rd23; ld.global.u64 %rd1, [%rd20]; ld.global.u64 %rd2, [%rd21];\n\
         cvt.u32.u64 %r1, %rd1; cvt.u32.u64 %r2, %rd2; mov.b32 %f1, %r1; mov.b32 %f2, %r2;\n\
         mov.b64 %fd1, %rd1; mov.b64 %fd2, %rd2; cvt.u16.u32 %rs1, %r1; cvt.u16.u32 %rs2, %r2;\n\
         {body}\n st.global.u64 [%rd22], %rd9; ret;\n}}\n"
    );
    let mut random = Random::new(1);
    let mut number = || match random.below(6) {
        0 => random.below(70),
        1 => random.below(70).wrapping_neg(),
        2 => u64::from((random.between(-100.0, 100.0) as f32).to_bits()) | random.next() << 32,
        3 => random.between(-1e6, 1e6).to_bits(),
        4 => [0, 1 << 31, u64::MAX, 1 << 63, 0x7fff_ffff, u64::from(f32::NAN.to_bits())]
            [random.below(6) as usize],
        _ => random.next(),
    };
    let (a, b): (Vec<u64>, Vec<u64>) = (0..N).map(|_| (number(), number())).unzip();
    let wanted: Vec<u64> = a.iter().zip(&b).map(|(a, b)| expect(*a, *b)).collect();
    for machine in Machine::all() {
        let mut program = Program::on(&text, machine);
        let (at_a, at_b, out) = (program.put(&a), program.put(&b), program.put(&[0u64; N]));
        program.launch("k", [1, 1, 1], [N as u32, 1, 1], &[at_a.into(), at_b.into(), out.into()]);
        for (at, (found, wanted)) in program.get::<u64>(out, N).iter().zip(&wanted).enumerate() {
            assert_eq!(
                found, wanted,
                "{body} of {:#x} and {:#x} on {machine:?}: {found:#x}, not {wanted:#x}",
                a[at], b[at]
            );
        }
    }
}

/// The same of a result in `%r9`.
#[track_caller]
fn check32(body: &str, expect: impl Fn(u32, u32) -> u32) {
    check(&format!("{body} cvt.u64.u32 %rd9, %r9;"), |a, b| u64::from(expect(a as u32, b as u32)));
}

/// `fns` as the PTX ISA writes it down.
fn find_nth(mask: u32, base: u32, offset: i32) -> u32 {
    if offset == 0 {
        return if mask >> base & 1 == 1 { base } else { u32::MAX };
    }
    let (mut at, mut count) = (base as i32, offset.unsigned_abs() - 1);
    while (0..32).contains(&at) {
        if mask >> at & 1 == 1 {
            if count == 0 {
                return at as u32;
            }
            count -= 1;
        }
        at += offset.signum();
    }
    u32::MAX
}

#[test]
fn the_nth_bit() {
    for offset in [0, 1, 3, 32, 33, -1, -2, -40, i32::MIN] {
        check32(&format!("and.b32 %r3, %r2, 31; fns.b32 %r9, %r1, %r3, {offset};"), |a, b| {
            find_nth(a, b & 31, offset)
        });
    }
    check32("fns.b32 %r9, %r1, 0, %r2;", |a, b| find_nth(a, 0, b as i32));
}

#[test]
fn integers() {
    check("add.cc.u32 %r3, %r1, %r2; addc.u32 %r4, %r1, 0; mov.b64 %rd9, {%r3, %r4};", |a, b| {
        let (a, b) = (a & 0xffff_ffff, b & 0xffff_ffff);
        ((a + b) & 0xffff_ffff) | (a + ((a + b) >> 32)) << 32
    });
    check("sub.cc.u64 %rd3, %rd1, %rd2; subc.cc.u64 %rd4, 0, 0; subc.u64 %rd9, %rd3, %rd4;", |a, b| {
        let borrow = u64::from(a < b);
        a.wrapping_sub(b).wrapping_sub(0u64.wrapping_sub(borrow)).wrapping_sub(borrow)
    });
    check(
        "mad.lo.cc.u32 %r3, %r1, %r2, %r1; madc.hi.u32 %r4, %r1, %r2, 7; mov.b64 %rd9, {%r3, %r4};",
        |a, b| {
            let (a, b) = (a & 0xffff_ffff, b & 0xffff_ffff);
            let low = ((a * b) & 0xffff_ffff) + a;
            low & 0xffff_ffff | (((a * b) >> 32) + 7 + (low >> 32)) << 32
        },
    );
    check32("add.sat.s32 %r9, %r1, %r2;", |a, b| (a as i32).saturating_add(b as i32) as u32);
    check32("sub.sat.s32 %r9, %r1, %r2;", |a, b| (a as i32).saturating_sub(b as i32) as u32);
    check("mul.hi.s64 %rd9, %rd1, %rd2;", |a, b| {
        ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
    });
    check("mad.wide.s32 %rd9, %r1, %r2, %rd1;", |a, b| {
        (i64::from(a as i32) * i64::from(b as i32)).wrapping_add(a as i64) as u64
    });
    check32("mul.wide.u16 %r9, %rs1, %rs2;", |a, b| (a & 0xffff) * (b & 0xffff));
    check("or.b64 %rd3, %rd2, 1; rem.s64 %rd9, %rd1, %rd3;", |a, b| {
        (a as i64).wrapping_rem(b as i64 | 1) as u64
    });
    check32("min.s16 %rs3, %rs1, %rs2; cvt.s32.s16 %r9, %rs3;", |a, b| {
        i32::from((a as i16).min(b as i16)) as u32
    });
    check32("slct.s32.s32 %r9, %r1, %r2, %r1;", |a, b| if a as i32 >= 0 { a } else { b });
    check32("mul24.lo.s32 %r9, %r1, %r2;", |a, b| {
        ((a as i32) << 8 >> 8).wrapping_mul((b as i32) << 8 >> 8) as u32
    });
}

#[test]
fn rarer_integers() {
    check32("mad.lo.u32 %r9, %r1, 3, WARP_SZ;", |a, _| a.wrapping_mul(3).wrapping_add(32));
    let (s24, u24) = (|a: u32| i64::from((a as i32) << 8 >> 8), |a: u32| i64::from(a & 0xff_ffff));
    check32("mad24.lo.s32 %r9, %r1, %r2, %r1;", |a, b| ((s24(a) * s24(b)) as u32).wrapping_add(a));
    check32("mad24.hi.s32 %r9, %r1, %r2, %r1;", |a, b| (((s24(a) * s24(b)) >> 16) as u32).wrapping_add(a));
    check32("mad24.hi.u32 %r9, %r1, %r2, 3;", |a, b| (((u24(a) * u24(b)) >> 16) as u32).wrapping_add(3));
    let dot = |a: u32, b: u32, from: u32| {
        let half = |at: u32| {
            i32::from((a >> (16 * at)) as i16).wrapping_mul(i32::from((b >> (from + 8 * at)) as i8))
        };
        (half(0).wrapping_add(half(1)) as u32).wrapping_add(5)
    };
    check32("dp2a.lo.s32.s32 %r9, %r1, %r2, 5;", |a, b| dot(a, b, 0));
    check32("dp2a.hi.s32.s32 %r9, %r1, %r2, 5;", |a, b| dot(a, b, 16));
    check32("dp2a.hi.u32.s32 %r9, %r1, %r2, 0;", |a, b| {
        let half =
            |at: u32| ((a >> (16 * at)) & 0xffff).wrapping_mul(i32::from((b >> (16 + 8 * at)) as i8) as u32);
        half(0).wrapping_add(half(1))
    });
    check32("cnot.b32 %r9, %r1;", |a, _| u32::from(a == 0));
    check("cnot.b64 %rd9, %rd1;", |a, _| u64::from(a == 0));
    let extended = |a: u32, bits: u32| match bits {
        0 => 0,
        bits => ((a as i32) << (32 - bits) >> (32 - bits)) as u32,
    };
    check32("szext.clamp.s32 %r9, %r1, %r2;", |a, b| extended(a, b.min(32)));
    check32("szext.wrap.s32 %r9, %r1, %r2;", |a, b| extended(a, b & 31));
    check32("szext.wrap.u32 %r9, %r1, %r2;", |a, b| a & ((1 << (b & 31)) - 1));
    let mask = |from: u32, bits: u32| ((((1u64 << bits) - 1) as u128) << from) as u32;
    check32("bmsk.clamp.b32 %r9, %r1, %r2;", |a, b| mask(a.min(32), b.min(32)));
    check32("bmsk.wrap.b32 %r9, %r1, %r2;", |a, b| mask(a & 31, b & 31));
}

#[test]
fn rarer_accesses() {
    check("ldu.global.u64 %rd9, [%rd20];", |a, _| a);
    let slot = "shl.b32 %r3, %r19, 3; mov.u32 %r4, s; add.s32 %r3, %r3, %r4;";
    check(
        &format!(
            "{slot} st.shared.u64 [%r3], %rd1; fence.acq_rel.cta; red.shared.add.u64 [%r3], %rd2; fence.sc.gpu; membar.gl; \
             ld.shared.u64 %rd9, [%r3];"
        ),
        u64::wrapping_add,
    );
    check(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; nanosleep.u32 20; pmevent 3; brkpt; \
         prefetch.global.L1 [%rd20]; prefetchu.L1 [%rd20]; applypriority.global.L2::evict_normal [%rd20], 128; \
         createpolicy.fractional.L2::evict_last.b64 %rd3, 1.0; discard.global.L2 [%rd22], 128; \
         ld.global.L2::cache_hint.u64 %rd9, [%rd20], %rd3;",
        |a, _| a,
    );
}

#[test]
fn a_branch_by_an_index() {
    let body = "and.b32 %r3, %r1, 3; min.u32 %r3, %r3, 2; table: .branchtargets zero, one, two; brx.idx %r3, table;\n\
                zero: mov.u64 %rd9, 10; bra done; one: mov.u64 %rd9, %rd2; bra done; two: mov.u64 %rd9, 12; done:";
    check(body, |a, b| [10, b, 12, 12][(a & 3) as usize]);
}

#[test]
fn tanh_is_near_what_exponentials_give() {
    // tanh(x) = 1 - 2 / (exp(2x) + 1), where exp(2x) = 2^(2x log2(e)); to 2^-10.
    let body = "tanh.approx.f32 %f3, %f1; mul.f32 %f4, %f1, 0f4038AA3B; ex2.approx.f32 %f4, %f4; add.f32 %f4, %f4, 0f3F800000;\n\
                div.rn.f32 %f4, 0f40000000, %f4; sub.f32 %f4, 0f3F800000, %f4; sub.f32 %f5, %f3, %f4; abs.f32 %f5, %f5;\n\
                setp.ltu.f32 %p1, %f5, 0f3A800000; selp.b32 %r9, 1, 0, %p1;";
    check32(body, |_, _| 1);
}

/// Sums set the condition code register on a carry, differences clear it on a borrow (PTX ISA, Extended-Precision Integer Arithmetic
/// Instructions). nvcc's 128-bit division reads the flag of `sub.cc` with `addc`.
#[test]
fn carry_flag() {
    let flag = "addc.u32 %r9, 0, 0;";
    check32(&format!("sub.cc.u32 %r3, %r1, %r2; {flag}"), |a, b| u32::from(a >= b));
    check(&format!("sub.cc.u64 %rd3, %rd1, %rd2; {flag} cvt.u64.u32 %rd9, %r9;"), |a, b| u64::from(a >= b));
    check32("add.cc.u32 %r3, %r1, %r2; subc.u32 %r9, 100, 0;", |a, b| {
        99 + u32::from(a.checked_add(b).is_none())
    });
    check32(&format!("add.cc.u32 %r3, %r1, %r2; subc.cc.u32 %r3, %r1, %r2; {flag}"), |a, b| {
        u32::from(u64::from(a) >= u64::from(b) + u64::from(a.checked_add(b).is_some()))
    });
    check32(&format!("mad.hi.cc.u32 %r3, %r1, %r2, %r1; {flag}"), |a, b| {
        let high = ((u64::from(a) * u64::from(b)) >> 32) as u32;
        u32::from(high.checked_add(a).is_none())
    });
    // 128-bit sums and differences, with the flag that they leave.
    let wide = |code: &str| {
        format!(
            "{code}.cc.u64 %rd3, %rd1, %rd2; {code}c.cc.u64 %rd4, %rd2, %rd1; {flag} cvt.u64.u32 %rd5, %r9;\n\
            shl.b64 %rd4, %rd4, 1; xor.b64 %rd9, %rd3, %rd4; add.u64 %rd9, %rd9, %rd5;"
        )
    };
    let folded = |low: u64, high: u64, out: bool| (low ^ high << 1).wrapping_add(out.into());
    let pair = |low: u64, high: u64| u128::from(high) << 64 | u128::from(low);
    check(&wide("add"), |a, b| {
        let (sum, out) = pair(a, b).overflowing_add(pair(b, a));
        folded(sum as u64, (sum >> 64) as u64, out)
    });
    check(&wide("sub"), |a, b| {
        let (difference, out) = pair(a, b).overflowing_sub(pair(b, a));
        folded(difference as u64, (difference >> 64) as u64, !out)
    });
}

/// Only executed instructions with `.cc` change the flag: loads, stores and branches between writer and reader preserve it.
#[test]
fn carry_flag_between_instructions() {
    let carries = |a: u32, b: u32| u32::from(a.checked_add(b).is_none());
    let (set, read) = ("add.cc.u32 %r3, %r1, %r2;", "addc.u32 %r9, 0, 0;");
    let odd = "and.b32 %r4, %r1, 1; setp.ne.u32 %p1, %r4, 0; mov.u32 %r5, 0;";
    check32(&format!("{set} ld.global.u32 %r5, [%rd20]; {read}"), carries);
    check32(&format!("{odd} {set} @%p1 ld.global.u32 %r5, [%rd20]; {read}"), carries);
    check32(&format!("{odd} {set} @%p1 st.global.u32 [%rd22], %r5; {read}"), carries);
    check32(
        &format!("{odd} {set} @%p1 bra over; add.u32 %r5, %r5, %r2; over: {read} xor.b32 %r9, %r9, %r5;"),
        |a, b| carries(a, b) ^ if a & 1 == 1 { 0 } else { b },
    );
    // A skipped instruction preserves the flag.
    check32(&format!("{odd} {set} @%p1 add.cc.u32 %r5, %r2, %r2; {read}"), |a, b| match a & 1 {
        1 => carries(b, b),
        _ => carries(a, b),
    });
    check32(&format!("{odd} {set} @!%p1 bra over; sub.cc.u32 %r5, %r1, %r2; over: {read}"), |a, b| {
        match a & 1 {
            1 => u32::from(a >= b),
            _ => carries(a, b),
        }
    });
    check32(&format!("{odd} {set} @%p1 addc.cc.u32 %r5, %r1, 0; {read}"), |a, b| match a & 1 {
        1 => carries(a, carries(a, b)),
        _ => carries(a, b),
    });
    // A 128-bit difference, one word per iteration.
    let words = "st.local.v2.u32 [l], {%r1, %r2}; st.local.v2.u32 [l+8], {%r2, %r1}; mov.u64 %rd3, l; mov.u32 %r4, 0;\n\
        sub.cc.u32 %r5, 1, 1;\n\
        again: ld.local.u32 %r6, [%rd3]; subc.cc.u32 %r6, %r6, %r2; st.local.u32 [%rd3], %r6; add.u64 %rd3, %rd3, 4;\n\
        add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 4; @%p2 bra again;\n\
        ld.local.u32 %r5, [l+12]; addc.u32 %r9, %r5, 0;";
    check32(words, |a, b| {
        let (a, b) = (u128::from(a), u128::from(b));
        let difference = (a | b << 32 | b << 64 | a << 96).overflowing_sub(b | b << 32 | b << 64 | b << 96);
        ((difference.0 >> 96) as u32).wrapping_add(u32::from(!difference.1))
    });
    // Loads before a barrier become conditional if threads may return early.
    let barrier = "setp.ge.u32 %p2, %r19, 200; @%p2 ret;\n\
        add.cc.u32 %r3, %r1, %r2; ld.global.u32 %r5, [%rd20]; addc.u32 %r9, 0, 0;\n\
        bar.sync 0; shl.b32 %r6, %r19, 2; st.shared.u32 [%r6], %r5; bar.sync 0;";
    check32(barrier, carries);
}

#[test]
fn bits() {
    check32("bfe.u32 %r9, %r1, %r2, 5;", |a, b| if b & 255 > 31 { 0 } else { a >> (b & 255) & 31 });
    check32("bfe.u32 %r9, %r1, 3, %r2;", |a, b| {
        let count = b & 255;
        if count >= 32 { a >> 3 } else { a >> 3 & ((1 << count) - 1) }
    });
    check32("bfe.s32 %r9, %r1, 4, 9;", |a, _| ((a as i32) << 19 >> 23) as u32);
    check32("bfe.s32 %r9, %r1, %r2, 12;", |a, b| {
        let bit = |at: u32| if at > 31 { a >> 31 } else { a >> at & 1 };
        let at = b & 255;
        (0..32).fold(0, |bits, i| bits | bit(if i < 12 { at + i } else { (at + 11).min(31) }) << i)
    });
    check("bfi.b64 %rd9, %rd1, %rd2, 10, 20;", |a, b| b & !(0xfffff << 10) | (a & 0xfffff) << 10);
    check32("bfi.b32 %r9, %r1, 77, %r2, 8;", |a, b| {
        let at = b & 255;
        if at > 31 { 77 } else { 77 & !(255u32 << at) | (a & 255) << at }
    });
    check32("bfind.u32 %r9, %r1;", |a, _| if a == 0 { u32::MAX } else { 31 - a.leading_zeros() });
    check32("bfind.s64 %r3, %rd1; bfind.shiftamt.s32 %r4, %r1; add.s32 %r9, %r4, 0;", |a, _| {
        let a = if (a as i32) < 0 { !a } else { a };
        if a == 0 { u32::MAX } else { a.leading_zeros() }
    });
    check32("shl.b32 %r9, %r1, %r2;", |a, b| if b > 31 { 0 } else { a << b });
    check32("shr.u32 %r9, %r1, %r2;", |a, b| if b > 31 { 0 } else { a >> b });
    check32("shr.s32 %r9, %r1, %r2;", |a, b| (a as i32 >> b.min(31)) as u32);
    check("shl.b64 %rd9, %rd1, 70;", |_, _| 0);
    check("shr.s64 %rd9, %rd1, %r2;", |a, b| (a as i64 >> (b as u32).min(63)) as u64);
    check32("shf.l.clamp.b32 %r9, %r1, %r2, %r1;", |a, b| {
        (((u64::from(b) << 32 | u64::from(a)) << a.min(32)) >> 32) as u32
    });
    check32("shf.r.wrap.b32 %r9, %r1, %r2, %r1;", |a, b| {
        ((u64::from(b) << 32 | u64::from(a)) >> (a & 31)) as u32
    });
    for table in [0x1b, 0xd2, 0xe4, 0xca, 0, 0xff] {
        // By its definition: bit i of the table is for a, b and c as the bits of i.
        let by_table = move |a: u32, b: u32, c: u32| {
            (0..32).fold(0, |bits, at| {
                let row = (a >> at & 1) << 2 | (b >> at & 1) << 1 | c >> at & 1;
                bits | (table >> row & 1) << at
            })
        };
        check32(&format!("lop3.b32 %r9, %r1, %r2, 0x0f0f3355, {table};"), |a, b| by_table(a, b, 0x0f0f_3355));
    }
    check32("set.lt.u32.s32 %r9, %r1, %r2;", |a, b| if (a as i32) < b as i32 { u32::MAX } else { 0 });
    check32(
        "setp.lt.s32 %p1|%p2, %r1, %r2; selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 2, 0, %p2; or.b32 %r9, %r3, %r4;",
        |a, b| {
            if (a as i32) < b as i32 { 1 } else { 2 }
        },
    );
    check32(
        "setp.gt.u32 %p1, %r1, 9; setp.lo.or.u32 %p2, %r1, %r2, !%p1; selp.u32 %r9, 1, 0, %p2;",
        |a, b| u32::from(a < b || a <= 9),
    );
    check32("mov.b32 {%rs3, %rs4}, %r1; mov.b32 %r9, {%rs4, %rs3};", |a, _| a.rotate_left(16));
}

/// FP8, computed with OCP's definition: the nearest finite number, of two the even one.
fn to_fp8(value: f64, exponent_bits: i32, mantissa_bits: i32, most: f64) -> u32 {
    if value.is_nan() {
        return 0x7f;
    }
    let bias = (1 << (exponent_bits - 1)) - 1;
    let number = |bits: i32| {
        let (exponent, mantissa) = (bits >> mantissa_bits, bits & ((1 << mantissa_bits) - 1));
        let whole = f64::from(mantissa + if exponent > 0 { 1 << mantissa_bits } else { 0 });
        whole * 2f64.powi(exponent.max(1) - bias - mantissa_bits)
    };
    let size = value.abs().min(most);
    let all = (0..128).filter(|bits| number(*bits) <= most);
    let nearest = all.min_by(|a, b| {
        let apart = |bits: i32| (number(bits) - size).abs();
        apart(*a).total_cmp(&apart(*b)).then((a & 1).cmp(&(b & 1)))
    });
    nearest.unwrap() as u32 | if value.is_sign_negative() { 0x80 } else { 0 }
}

#[test]
fn fp8_conversions() {
    let e4m3 = |value: f64| to_fp8(value, 4, 3, 448.0);
    let e5m2 = |value: f64| to_fp8(value, 5, 2, 57344.0);
    let f32_of = |bits: u32| f64::from(f32::from_bits(bits));
    let half = |bits: u32| {
        let (exponent, mantissa) = (bits >> 10 & 31, f64::from(bits & 1023));
        let size = match exponent {
            31 if bits & 1023 != 0 => f64::NAN,
            31 => f64::INFINITY,
            0 => mantissa * 2f64.powi(-24),
            _ => (1024.0 + mantissa) * 2f64.powi(exponent as i32 - 25),
        };
        if bits & 0x8000 != 0 { -size } else { size }
    };
    let to16 = "cvt.u32.u16 %r9, %rs3;";
    check32(&format!("cvt.rn.satfinite.e4m3x2.f32 %rs3, %f1, %f2; {to16}"), |a, b| {
        e4m3(f32_of(a)) << 8 | e4m3(f32_of(b))
    });
    check32(&format!("cvt.rn.satfinite.e5m2x2.f32 %rs3, %f1, %f2; {to16}"), |a, b| {
        e5m2(f32_of(a)) << 8 | e5m2(f32_of(b))
    });
    let relu = |value: f64| if value < 0.0 { 0.0 } else { value };
    check32(&format!("cvt.rn.satfinite.relu.e5m2x2.f16x2 %rs3, %r1; {to16}"), |a, _| {
        e5m2(relu(half(a >> 16)).abs()) << 8 | e5m2(relu(half(a & 0xffff)).abs())
    });
    check32(&format!("cvt.rn.satfinite.e4m3x2.f16x2 %rs3, %r1; {to16}"), |a, _| {
        e4m3(half(a >> 16)) << 8 | e4m3(half(a & 0xffff))
    });
    // A conversion from FP8 and back is exact, except for NaN.
    for pair in ["e4m3x2", "e5m2x2"] {
        let body = format!(
            "cvt.rn.f16x2.{pair} %r3, %rs1; cvt.rn.satfinite.{pair}.f16x2 %rs3, %r3; xor.b16 %rs4, %rs3, %rs1;\n\
             and.b16 %rs5, %rs1, 0x7878; xor.b16 %rs5, %rs5, 0x7878; and.b16 %rs6, %rs5, 0x7800; and.b16 %rs7, %rs5, 0x78;\n\
             cvt.u32.u16 %r9, %rs4; cvt.u32.u16 %r4, %rs6; setp.eq.u32 %p1, %r4, 0; @%p1 mov.u32 %r9, 0;\n\
             cvt.u32.u16 %r4, %rs7; setp.eq.u32 %p1, %r4, 0; @%p1 mov.u32 %r9, 0;"
        );
        check32(&body, |_, _| 0);
    }
}

#[test]
fn relu_keeps_what_is_no_number() {
    let relu = |bits: u32| {
        let value = f32::from_bits(bits);
        if value.is_nan() {
            0x7fff_ffff
        } else if value > 0.0 {
            bits
        } else {
            0
        }
    };
    check32("cvt.rn.relu.bf16x2.f32 %r9, %f1, %f2; and.b32 %r9, %r9, 0x7f807f80;", |a, b| {
        // The exponents: those of what is rounded up may be greater.
        let exponent = |bits: u32| {
            let bits = relu(bits);
            let rounded = if bits > 0x7f80_0000 { 0x7fff } else { (bits + 0x7fff + (bits >> 16 & 1)) >> 16 };
            rounded & 0x7f80
        };
        exponent(a) << 16 | exponent(b)
    });
}

#[test]
fn conversions() {
    check("cvt.s64.s8 %rd9, %r1;", |a, _| i64::from(a as i8) as u64);
    check32("cvt.u8.u32 %r9, %r1;", |a, _| a & 255);
    check32("cvt.sat.u8.s32 %r9, %r1;", |a, _| (a as i32).clamp(0, 255) as u32);
    check("cvt.sat.s16.s64 %rs3, %rd1; cvt.s64.s16 %rd9, %rs3;", |a, _| {
        (a as i64).clamp(-32768, 32767) as u64
    });
    check32("cvt.rni.s32.f32 %r9, %f1;", |a, _| f32::from_bits(a).round_ties_even() as i32 as u32);
    check32("cvt.rzi.u32.f32 %r9, %f1;", |a, _| f32::from_bits(a) as u32);
    check32("cvt.rmi.s32.f32 %r9, %f1;", |a, _| f32::from_bits(a).floor() as i32 as u32);
    check32(
        "cvt.rpi.f32.f32 %f3, %f1; mov.b32 %r9, %f3; testp.notanumber.f32 %p1, %f3; selp.b32 %r9, 0, %r9, %p1;",
        |a, _| {
            let value = f32::from_bits(a).ceil();
            if value.is_nan() { 0 } else { value.to_bits() }
        },
    );
    for (rounding, way) in [("rz", 0), ("rm", -1), ("rp", 1)] {
        // The nearest, or its neighbour where that is on the wrong side.
        let directed = move |exact: f64| {
            let near = exact as f32;
            let beyond = match way {
                0 => f64::from(near).abs() > exact.abs(),
                -1 => f64::from(near) > exact,
                _ => f64::from(near) < exact,
            };
            let value = match (beyond, way) {
                (false, _) => near,
                (true, -1) => near.next_down(),
                (true, 1) => near.next_up(),
                (true, _) if near > 0.0 => near.next_down(),
                (true, _) => near.next_up(),
            };
            if value.is_nan() { 0 } else { value.to_bits() }
        };
        let number = "mov.b32 %r9, %f3; testp.notanumber.f32 %p1, %f3; selp.b32 %r9, 0, %r9, %p1;";
        check(&format!("cvt.{rounding}.f32.f64 %f3, %fd1; {number} cvt.u64.u32 %rd9, %r9;"), |a, _| {
            u64::from(directed(f64::from_bits(a)))
        });
        check32(&format!("mul.{rounding}.f32 %f3, %f1, %f2; {number}"), |a, b| {
            directed(f64::from(f32::from_bits(a)) * f64::from(f32::from_bits(b)))
        });
        check32(&format!("cvt.{rounding}.f32.s32 %f3, %r1; {number}"), |a, _| directed(f64::from(a as i32)));
    }
    check32("cvt.rn.f16x2.f32 %r9, 0f3FC00000, 0fC0000000;", |_, _| 0x3e00_c000);
    check32("setp.leu.f32 %p1, %f1, %f2; selp.u32 %r9, 1, 0, %p1;", |a, b| {
        let (a, b) = (f32::from_bits(a), f32::from_bits(b));
        u32::from(a.partial_cmp(&b) != Some(std::cmp::Ordering::Greater))
    });
    check32("copysign.f32 %f3, %f1, %f2; mov.b32 %r9, %f3;", |a, b| a & 1 << 31 | b & !(1 << 31));
    check32("add.sat.f32 %f3, %f1, %f2; mov.b32 %r9, %f3;", |a, b| {
        let sum = f32::from_bits(a) + f32::from_bits(b);
        if sum > 0.0 { sum.min(1.0).to_bits() } else { 0 }
    });
}

/// Numbers out of range are clamped. NaN converts to 0 if the source is not `.f64` and the destination has fewer than 64 bits, and to the
/// top bit alone otherwise (PTX ISA, Data Movement and Conversion Instructions: cvt).
#[test]
fn floats_to_integers() {
    for (rounding, rounds) in [("rzi", f64::trunc as fn(f64) -> f64), ("rni", f64::round_ties_even)] {
        for bits in [8u32, 16, 32, 64] {
            for (class, least, most) in
                [("s", -1i128 << (bits - 1), (1i128 << (bits - 1)) - 1), ("u", 0, (1i128 << bits) - 1)]
            {
                let (register, extend) = match bits {
                    64 => ("%rd9", ""),
                    16 => ("%rs3", "cvt.u64.u16 %rd9, %rs3;"),
                    _ => ("%r9", "cvt.u64.u32 %rd9, %r9;"),
                };
                let mask = u64::MAX >> (64 - bits);
                for source in ["%fd1", "%f1", "%rs1"] {
                    let (from, narrow) = match source {
                        "%fd1" => ("f64", false),
                        "%f1" => ("f32", bits < 64),
                        _ => ("f16", bits < 64),
                    };
                    let body = format!(
                        "cvt.{rounding}.{class}{bits}.{from} {register}, {source}; {extend} and.b64 %rd9, %rd9, {mask};"
                    );
                    check(&body, |a, _| {
                        let value = match source {
                            "%fd1" => f64::from_bits(a),
                            "%f1" => f32::from_bits(a as u32).into(),
                            _ => vm_ir::format::to_f64(vm_ir::Scalar::F16, a & 0xffff),
                        };
                        match (value.is_nan(), narrow) {
                            (true, true) => 0,
                            (true, false) => 1 << (bits - 1),
                            (false, _) => (rounds(value) as i128).clamp(least, most) as u64 & mask,
                        }
                    });
                }
            }
        }
    }
}

/// A sum of opposite numbers is -0 if it is rounded down, else +0; zeros of one sign keep it (IEEE 754-2019, 6.3).
#[test]
fn signs_of_zeros() {
    let number = "mov.b32 %r9, %f4; testp.notanumber.f32 %p1, %f4; selp.b32 %r9, 0, %r9, %p1;";
    let cancelled = [
        "neg.f32 %f3, %f1; add.ROUND.f32 %f4, %f1, %f3;",
        "sub.ROUND.f32 %f4, %f1, %f1;",
        "neg.f32 %f3, %f1; fma.ROUND.f32 %f4, %f1, 0f3F800000, %f3;",
        "neg.f32 %f3, %f1; fma.ROUND.f32 %f4, %f3, 0f3F800000, %f1;",
    ];
    let kept = [
        "and.b32 %r3, %r1, 0x80000000; mov.b32 %f3, %r3; add.ROUND.f32 %f4, %f3, %f3;",
        "and.b32 %r3, %r1, 0x80000000; mov.b32 %f3, %r3; neg.f32 %f5, %f3; sub.ROUND.f32 %f4, %f3, %f5;",
        "and.b32 %r3, %r1, 0x80000000; mov.b32 %f3, %r3; fma.ROUND.f32 %f4, %f3, 0f3F800000, %f3;",
        "and.b32 %r3, %r1, 0x80000000; mov.b32 %f3, %r3; mul.ROUND.f32 %f4, %f3, 0f3F800000;",
    ];
    for rounding in ["rn", "rz", "rm", "rp"] {
        for body in cancelled {
            check32(&format!("{} {number}", body.replace("ROUND", rounding)), |a, _| {
                if rounding == "rm" && f32::from_bits(a).is_finite() { 1 << 31 } else { 0 }
            });
        }
        for body in kept {
            check32(&format!("{} {number}", body.replace("ROUND", rounding)), |a, _| a & 1 << 31);
        }
    }
}

#[test]
fn control() {
    let table = "and.b32 %r3, %r1, 3;\nbrx.idx %r3, targets;\ntargets: .branchtargets one, two, two, three;\n\
        one: mov.u64 %rd9, 100; bra done;\ntwo: add.s64 %rd9, %rd2, 2; bra done;\nthree: mov.u64 %rd9, 300;\ndone:";
    check(table, |a, b| match a & 3 {
        0 => 100,
        3 => 300,
        _ => b.wrapping_add(2),
    });
    // A loop that ends in two places, with a call in it.
    let walk = "mov.u64 %rd9, 0; and.b32 %r3, %r1, 31; mov.u32 %r4, 0;\n\
        again: setp.ge.u32 %p1, %r4, %r3; @%p1 bra over;\n add.u64 %rd9, %rd9, 3; add.u32 %r4, %r4, 1;\n\
        setp.eq.u32 %p2, %r4, 17; @!%p2 bra again;\n add.u64 %rd9, %rd9, 1000;\nover: @%p1 add.u64 %rd9, %rd9, 1;";
    check(walk, |a, _| match a & 31 {
        steps @ 0..17 => steps * 3 + 1,
        _ => 17 * 3 + 1000,
    });
}

#[test]
fn ways_out() {
    // More of them than regions can be nested.
    let mut body = "and.b32 %r3, %r1, 127; mov.u64 %rd9, 0;\n".to_owned();
    for step in 0..100 {
        body += &format!("setp.eq.u32 %p1, %r3, {step}; @%p1 bra over; add.u64 %rd9, %rd9, {step};\n");
    }
    check(&(body + "over:"), |a, _| (0..(a & 127).min(100)).sum());
    // A loop in the depth of conditions.
    let mut body = "and.b32 %r3, %r1, 63; mov.u64 %rd9, 0;\n".to_owned();
    for step in 0..40 {
        body += &format!("setp.eq.u32 %p1, %r3, {step}; @%p1 bra over; add.u64 %rd9, %rd9, 1;\n");
    }
    body +=
        "again: add.u64 %rd9, %rd9, 2; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 70; @%p2 bra again;\nover:";
    check(&body, |a, _| match a & 63 {
        exit @ 0..40 => exit,
        other => 40 + 2 * (70 - other),
    });
}

#[test]
fn memory() {
    // An address that is of shared, of local or of global memory, which only the run tells.
    let generic = "mov.u64 %rd3, s; mul.wide.u32 %rd4, %r19, 8; add.u64 %rd3, %rd3, %rd4; cvta.shared.u64 %rd3, %rd3;\n\
        mov.u64 %rd5, l; cvta.local.u64 %rd5, %rd5; add.u64 %rd5, %rd5, 16;\n\
        setp.lt.s32 %p1, %r1, 0; setp.lt.s32 %p2, %r2, 0; selp.b64 %rd6, %rd3, %rd5, %p1; selp.b64 %rd6, %rd22, %rd6, %p2;\n\
        st.u64 [%rd6], %rd1; ld.u64 %rd7, [%rd6]; isspacep.shared %p3, %rd6; isspacep.local %p4, %rd6;\n\
        selp.u64 %rd8, 1, 0, %p3; selp.u64 %rd10, 2, 0, %p4; add.u64 %rd9, %rd7, %rd8; add.u64 %rd9, %rd9, %rd10;";
    check(generic, |a, b| match ((a as i32) < 0, (b as i32) < 0) {
        (_, true) => a,
        (true, _) => a.wrapping_add(1),
        (false, _) => a.wrapping_add(2),
    });
    check(
        "st.local.v2.u32 [l+8], {%r1, %r2}; ld.local.u8 %r3, [l+9]; ld.local.s16 %r4, [l+12]; mov.b64 %rd9, {%r3, %r4};",
        |a, b| a >> 8 & 255 | u64::from(i32::from(b as i16) as u32) << 32,
    );
    check(
        "ld.global.u64 %rd9, [word]; mov.u64 %rd3, word; ld.global.u32 %r3, [%rd3+4]; add.u64 %rd9, %rd9, 1;",
        |_, _| 6,
    );
}

/// A generic pointer that was split into parts and joined again still refers to its memory.
#[test]
fn pointers_in_parts() {
    let swap = |of: &str, to: &str| format!("shfl.sync.bfly.b32 {to}, {of}, 1, 31, -1;");
    let bytes: String =
        (0..8).map(|i| format!("ld.local.u8 %r4, [l+{i}]; st.local.u8 [l+{}], %r4;\n", i + 8)).collect();
    let shuffled =
        [("%r4", "%r6"), ("%r5", "%r7"), ("%r6", "%r4"), ("%r7", "%r5")].map(|(of, to)| swap(of, to));
    let parts = [
        "mov.b64 %rd6, %rd4;".to_owned(),
        "mov.b64 {%r4, %r5}, %rd4; mov.b64 %rd6, {%r4, %r5};".to_owned(),
        "mov.b64 {%rs3, %rs4, %rs5, %rs6}, %rd4; mov.b64 %rd6, {%rs3, %rs4, %rs5, %rs6};".to_owned(),
        "mov.b64 {%f3, %f4}, %rd4; mov.b64 %rd6, {%f3, %f4};".to_owned(),
        // As `__shfl_xor_sync` of a pointer does, there and back.
        format!("mov.b64 {{%r4, %r5}}, %rd4; {} mov.b64 %rd6, {{%r4, %r5}};", shuffled.concat()),
        "st.local.u64 [l], %rd4; ld.local.u64 %rd6, [l];".to_owned(),
        "st.local.u64 [l], %rd4; ld.local.v2.u32 {%r4, %r5}, [l]; mov.b64 %rd6, {%r4, %r5};".to_owned(),
        "mov.b64 {%r4, %r5}, %rd4; st.local.v2.u32 [l], {%r4, %r5}; ld.local.u64 %rd6, [l];".to_owned(),
        format!("st.local.u64 [l], %rd4;\n{bytes} ld.local.u64 %rd6, [l+8];"),
        "shr.u64 %rd5, %rd4, 32; cvt.u32.u64 %r5, %rd5; cvt.u32.u64 %r4, %rd4; cvt.u64.u32 %rd5, %r5;\n\
         shl.b64 %rd5, %rd5, 32; cvt.u64.u32 %rd6, %r4; or.b64 %rd6, %rd6, %rd5;"
            .to_owned(),
        // Through an atomic exchange, a select and a predicated move.
        "mov.b64 {%r4, %r5}, %rd4; shl.b32 %r6, %r19, 2; add.u32 %r6, %r6, 1024; atom.shared.exch.b32 %r7, [%r6], %r5;\n\
         ld.shared.u32 %r5, [%r6]; setp.lt.s32 %p1, %r1, 0; mov.u32 %r8, 7; selp.b32 %r8, %r5, %r8, %p1;\n\
         @!%p1 mov.b32 %r8, %r5; mov.b64 %rd6, {%r4, %r8};"
            .to_owned(),
        // Through a function that returns the halves in a struct.
        "{ .param .b64 whole; .param .align 4 .b8 halves[8]; st.param.b64 [whole], %rd4;\n\
         call (halves), by_halves, (whole); ld.param.b32 %r4, [halves]; ld.param.b32 %r5, [halves+4]; }\n\
         mov.b64 %rd6, {%r4, %r5};"
            .to_owned(),
    ];
    let homes = [
        "mov.u64 %rd3, s; mul.wide.u32 %rd4, %r19, 8; add.u64 %rd3, %rd3, %rd4; cvta.shared.u64 %rd4, %rd3;",
        "mov.u64 %rd3, l; cvta.local.u64 %rd4, %rd3; add.u64 %rd4, %rd4, 32;",
        "mov.u64 %rd4, %rd22;",
    ];
    for home in homes {
        for part in &parts {
            check(
                &format!(
                    "{home} st.u64 [%rd4], %rd1;\n{part}\n ld.u64 %rd9, [%rd6]; st.u64 [%rd6], %rd2; ld.u64 %rd10, [%rd4];\n\
                xor.b64 %rd9, %rd9, %rd10;"
                ),
                |a, b| a ^ b,
            );
        }
    }
}

/// The same of a global pointer, where a shared one may take its place.
#[test]
fn joined_or_shared_pointers() {
    let joins = [
        "mov.b64 %rd6, {%r4, %r5};",
        "shl.b64 %rd6, %rd6, 32; or.b64 %rd6, %rd6, %rd5;",
        "shl.b64 %rd6, %rd6, 16; shl.b64 %rd6, %rd6, 16; add.u64 %rd6, %rd6, %rd5;",
        "mov.u32 %r6, 32; shl.b64 %rd6, %rd6, %r6; xor.b64 %rd6, %rd6, %rd5;",
        "mul.lo.u64 %rd6, %rd6, 0x100000000; or.b64 %rd6, %rd6, %rd5;",
        "mov.u64 %rd7, 0x100000000; mad.lo.u64 %rd6, %rd6, %rd7, %rd5;",
        "bfi.b64 %rd6, %rd6, %rd5, 32, 32;",
    ];
    for join in joins {
        check(
            &format!(
                "mov.u64 %rd3, s; mul.wide.u32 %rd4, %r19, 8; add.u64 %rd3, %rd3, %rd4; cvta.shared.u64 %rd4, %rd3;\n\
                 st.shared.u64 [%rd3], %rd1; st.global.u64 [%rd22], %rd2; mov.b64 {{%r4, %r5}}, %rd22;\n\
                 cvt.u64.u32 %rd5, %r4; cvt.u64.u32 %rd6, %r5; {join}\n\
                 setp.lt.s32 %p1, %r1, 0; selp.b64 %rd6, %rd4, %rd6, %p1; ld.u64 %rd9, [%rd6];"
            ),
            |a, b| if (a as i32) < 0 { a } else { b },
        );
    }
}

/// `fence.sc` is sequentially consistent, and `membar` is another name for it (PTX ISA, Parallel Synchronization and Communication
/// Instructions: membar, fence).
#[test]
fn fences() {
    let fences = [
        ("fence.sc.cta", "fence.seqcst.block"),
        ("fence.sc.gpu", "fence.seqcst.device"),
        ("fence.sc.sys", "fence.seqcst.system"),
        ("membar.cta", "fence.seqcst.block"),
        ("membar.gl", "fence.seqcst.device"),
        ("membar.sys", "fence.seqcst.system"),
        ("fence.acq_rel.gpu", "fence.acqrel.device"),
        ("fence.cta", "fence.acqrel.block"),
    ];
    for (fence, expect) in fences {
        let text = format!(
            ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry k() {{ {fence}; ret; }}\n"
        );
        let kernel = Program::of(&text).translate("k", [32, 1, 1], 0).unwrap();
        let printed = vm_ir::text::print(&kernel.module);
        assert!(printed.contains(&format!("{expect}\n")), "{fence}: {printed}");
    }
}

/// Two blocks each store a word, then load the other's. Sequentially consistent fences in between guarantee that one of them loads what
/// the other stored.
#[test]
fn stores_before_loads() {
    let text = ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry k(.param .u64 x, .param .u64 y, .param .u64 seen) {\n\
        .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<9>;\n\
        ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u64 %rd3, [seen]; mov.u32 %r1, %ctaid.x; and.b32 %r2, %r1, 1;\n\
        setp.ne.u32 %p1, %r2, 0; selp.b64 %rd4, %rd1, %rd2, %p1; selp.b64 %rd5, %rd2, %rd1, %p1;\n\
        mul.wide.u32 %rd6, %r1, 8192; add.u64 %rd3, %rd3, %rd6; shr.u32 %r2, %r1, 1; mul.wide.u32 %rd6, %r2, 8192;\n\
        add.u64 %rd4, %rd4, %rd6; add.u64 %rd5, %rd5, %rd6; mov.u32 %r3, 0; mov.u32 %r5, 1;\n\
        again: st.relaxed.gpu.global.u32 [%rd4], %r5; fence.sc.gpu; ld.relaxed.gpu.global.u32 %r4, [%rd5];\n\
        st.global.u32 [%rd3], %r4; add.u64 %rd3, %rd3, 4; add.u64 %rd4, %rd4, 4; add.u64 %rd5, %rd5, 4; add.u32 %r3, %r3, 1;\n\
        setp.lt.u32 %p2, %r3, 2048; @%p2 bra again; ret;\n}\n";
    const PAIRS: usize = 16;
    for machine in Machine::all() {
        let mut program = Program::on(text, machine);
        let words = vec![0u32; 2048 * PAIRS];
        let (x, y) = (program.put(&words), program.put(&words));
        let seen = program.put(&[words.clone(), words].concat());
        program.launch("k", [2 * PAIRS as u32, 1, 1], [1, 1, 1], &[x.into(), y.into(), seen.into()]);
        for (pair, seen) in program.get::<u32>(seen, 4096 * PAIRS).chunks(4096).enumerate() {
            let (first, second) = seen.split_at(2048);
            let missed = first.iter().zip(second).filter(|(first, second)| **first == 0 && **second == 0);
            assert_eq!(missed.count(), 0, "pair {pair} on {machine:?}");
        }
    }
}

/// Structs of 4 bytes lie closer to each other than the words that they are passed in are wide.
#[test]
fn small_structs_as_parameters() {
    let text = ".version 8.0\n.target sm_75\n.address_size 64\n\
        .visible .entry k(.param .u64 out, .param .align 4 .b8 a[4], .param .align 4 .b8 b[4], .param .u32 c) {\n\
        .reg .b32 %r<9>; .reg .b64 %rd<9>;\n\
        ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [a]; ld.param.u32 %r2, [b]; ld.param.u32 %r3, [c];\n\
        st.global.u32 [%rd1], %r1; st.global.u32 [%rd1+4], %r2; st.global.u32 [%rd1+8], %r3; ret;\n}\n";
    for machine in Machine::all() {
        let mut program = Program::on(text, machine);
        let out = program.put(&[0u32; 3]);
        let bytes = |n: u32| n.to_le_bytes().to_vec().into();
        program.launch("k", [1, 1, 1], [1, 1, 1], &[out.into(), bytes(7), bytes(8), 9u32.into()]);
        assert_eq!(program.get::<u32>(out, 3), [7, 8, 9], "{machine:?}");
    }
}

/// Runs `copy` on 32 threads and returns the 16 bytes of shared memory of each, which are 0xff before. `%r1` is the thread's shared
/// address, `%rd1` its global one, `%r2` its number, and `%p1` is true if that is odd.
#[track_caller]
fn tile(copy: &str, size: usize, source: &[u8], machine: Machine) -> Vec<u8> {
    let text = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 from, .param .u64 out) {{\n\
         .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>; .shared .align 16 .b8 tile[512];\n\
         ld.param.u64 %rd1, [from]; ld.param.u64 %rd2, [out]; mov.u32 %r2, %tid.x; mov.u32 %r1, tile;\n\
         and.b32 %r3, %r2, 1; setp.ne.u32 %p1, %r3, 0; mad.wide.u32 %rd2, %r2, 16, %rd2; mad.lo.u32 %r1, %r2, 16, %r1;\n\
         mad.wide.u32 %rd1, %r2, {size}, %rd1; mov.u32 %r4, -1; st.shared.v4.u32 [%r1], {{%r4, %r4, %r4, %r4}};\n\
         {copy}\n cp.async.commit_group; cp.async.wait_group 0;\n\
         ld.shared.v4.u32 {{%r5, %r6, %r7, %r8}}, [%r1]; st.global.v4.u32 [%rd2], {{%r5, %r6, %r7, %r8}}; ret;\n}}\n"
    );
    let mut program = Program::on(&text, machine);
    let out = program.put(&[0u8; 512]);
    // The last bytes of the memory, so that a read beyond them yields zeros.
    let from = program.put(source);
    program.launch("k", [1, 1, 1], [32, 1, 1], &[from.into(), out.into()]);
    program.get::<u8>(out, 512)
}

/// `cp.async` reads a number of bytes and fills the rest of its size with zeros (PTX ISA, Data Movement and Conversion Instructions:
/// cp.async). Each case computes that number from the thread and the size; `None` stands for threads that skip the instruction.
#[test]
fn asynchronous_copies() {
    let hint = "mov.b64 %rd3, 0x14F0000000000000; cp.async.ca.shared.global.L2::cache_hint.L2::128B";
    type Reads = fn(usize, usize) -> Option<usize>;
    let cases: &[(&str, Reads)] = &[
        ("cp.async.ca.shared.global [%r1], [%rd1], SIZE;", |_, size| Some(size)),
        ("cp.async.ca.shared::cta.global.L2::256B [%r1], [%rd1], SIZE, SIZE;", |_, size| Some(size)),
        ("cp.async.ca.shared.global [%r1], [%rd1], SIZE, 3;", |_, _| Some(3)),
        ("cp.async.ca.shared.global [%r1], [%rd1], SIZE, 0;", |_, _| Some(0)),
        ("cp.async.ca.shared.global [%r1], [%rd1], SIZE, %p1;", |thread, size| Some(size * (1 - thread % 2))),
        ("rem.u32 %r3, %r2, SIZE+1; cp.async.ca.shared.global [%r1], [%rd1], SIZE, %r3;", |thread, size| {
            Some(thread % (size + 1))
        }),
        ("@%p1 cp.async.ca.shared.global [%r1], [%rd1], SIZE;", |thread, size| {
            (thread % 2 == 1).then_some(size)
        }),
        ("@!%p1 cp.async.ca.shared.global [%r1], [%rd1], SIZE, 2;", |thread, _| {
            (thread % 2 == 0).then_some(2)
        }),
        ("HINT [%r1], [%rd1], SIZE, %rd3;", |_, size| Some(size)),
        ("HINT [%r1], [%rd1], SIZE, %r2, %rd3;", |thread, size| Some(thread.min(size))),
        ("HINT [%r1], [%rd1], SIZE, %p1, %rd3;", |thread, size| Some(size * (1 - thread % 2))),
        // Threads that returned before a barrier must not copy.
        (
            "setp.ge.u32 %p2, %r2, 8; @%p2 st.global.u32 [%rd2], %r4; @%p2 ret;\n\
             cp.async.ca.shared.global [%r1], [%rd1], SIZE; bar.sync 0;",
            |thread, size| (thread < 8).then_some(size),
        ),
    ];
    for size in [4usize, 8, 16] {
        for (copy, reads) in cases {
            let copy = copy.replace("HINT", hint).replace("SIZE+1", &(size + 1).to_string());
            let copy = copy.replace("SIZE", &size.to_string());
            let of = |thread: usize| reads(thread, size);
            let last = (0..32).map(|thread| thread * size + of(thread).unwrap_or(0)).max().unwrap();
            let source: Vec<u8> = (0..last).map(|at| (at % 250) as u8 + 1).collect();
            let mut expect = vec![0xffu8; 512];
            for thread in (0..32).filter(|thread| of(*thread).is_some()) {
                let copied = of(thread).unwrap_or(0);
                let to = &mut expect[16 * thread..][..size];
                to.fill(0);
                to[..copied].copy_from_slice(&source[thread * size..][..copied]);
            }
            for machine in Machine::all() {
                let mut found = tile(&copy, size, &source, machine);
                if copy.contains("ret") {
                    found[16 * 8..].fill(0xff);
                }
                assert_eq!(found, expect, "{copy} on {machine:?}");
            }
        }
    }
}
