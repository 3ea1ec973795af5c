//! What all threads of a block or a warp come to, where their ways differ.

mod common;

use common::{Machine, Program};
use vm_ptx::{Module, Options, limits};

const N: u32 = 64;

/// Runs a kernel of one block, in which `%r1` is the thread's number and `%r9` what it gives.
#[track_caller]
fn check(body: &str, expect: impl Fn(u32) -> u32) {
    check_of(N, body, expect);
}

/// The same of so many threads.
#[track_caller]
fn check_of(threads: u32, body: &str, expect: impl Fn(u32) -> u32) {
    let text = format!(
        ".version 8.0\n.target sm_75\n.address_size 64\n\
         .visible .entry k(.param .u64 out) {{\n\
         .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>; .shared .align 4 .b8 s[256];\n\
         ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;\n\
         mov.u32 %r9, 0; shl.b32 %r10, %r1, 2; mov.u32 %r11, s; add.s32 %r10, %r10, %r11;\n\
         add.s32 %r12, %r1, 1; and.b32 %r12, %r12, 63; shl.b32 %r12, %r12, 2; add.s32 %r12, %r12, %r11;\n\
         {body}\n st.global.u32 [%rd1], %r9; ret;\n}}\n"
    );
    let wanted: Vec<u32> = (0..threads).map(expect).collect();
    for machine in Machine::all() {
        let mut program = Program::on(&text, machine);
        let out = program.put(&vec![0u32; threads as usize]);
        program.launch("k", [1, 1, 1], [threads, 1, 1], &[out.into()]);
        assert_eq!(program.get::<u32>(out, threads as usize), wanted, "{machine:?}\n{body}");
    }
}

#[test]
fn a_barrier_in_a_loop_that_threads_leave_one_by_one() {
    let rounds = |thread: u32| thread % 5 + 1;
    let body = "rem.u32 %r2, %r1, 5; add.s32 %r2, %r2, 1; mov.u32 %r3, 0; st.shared.u32 [%r10], %r3; bar.sync 0;\n\
                loop: add.s32 %r3, %r3, 1; st.shared.u32 [%r10], %r3; bar.sync 0;\n\
                ld.shared.u32 %r4, [%r12]; add.s32 %r9, %r9, %r4; bar.sync 0;\n\
                setp.lt.u32 %p1, %r3, %r2;\n@%p1 bra loop;";
    check(body, |thread| (1..=rounds(thread)).map(|round| round.min(rounds((thread + 1) % N))).sum());
    // The same where who leaves the loop ends there.
    let ends = body.replace("@%p1 bra loop;", "@%p1 bra loop;\nst.global.u32 [%rd1], %r9; ret;");
    check(&ends, |thread| (1..=rounds(thread)).map(|round| round.min(rounds((thread + 1) % N))).sum());
}

#[test]
fn a_barrier_that_threads_pass_by() {
    let body = "st.shared.u32 [%r10], %r1; setp.ge.u32 %p1, %r1, 7;\n@%p1 bra past;\nbar.sync 0;\n\
                ld.shared.u32 %r9, [%r12]; bar.sync 0;\nadd.s32 %r9, %r9, 100;\npast: add.s32 %r9, %r9, 1;";
    check(body, |thread| if thread < 7 { thread + 102 } else { 1 });
}

/// The last step of many reductions: one warp adds halves by volatile accesses, without a barrier.
#[test]
fn volatile_accesses_of_a_warp_in_lockstep() {
    let add = |step: u32| {
        format!(
            "ld.volatile.shared.u32 %r2, [%r10+{}]; ld.volatile.shared.u32 %r3, [%r10]; add.u32 %r3, %r3, %r2;\n\
             st.volatile.shared.u32 [%r10], %r3;\n",
            4 * step
        )
    };
    let halves: String = [32, 16, 8, 4, 2, 1].map(add).concat();
    let body = format!(
        "st.shared.u32 [%r10], %r1; bar.sync 0; setp.gt.u32 %p1, %r1, 31;\n@%p1 bra past;\n{halves}\
         past: bar.sync 0; ld.shared.u32 %r9, [s];"
    );
    check(&body, |_| (0..N).sum());
    // In a loop, and on ways that lanes take alone.
    let body = "mov.u32 %r4, 64; st.shared.u32 [%r10], %r1; bar.sync 0; setp.gt.u32 %p1, %r1, 31;\n@%p1 bra past;\n\
        more: shl.b32 %r5, %r4, 1; add.u32 %r5, %r5, %r10; shr.u32 %r4, %r4, 1; setp.ge.u32 %p2, %r1, %r4;\n@%p2 bra over;\n\
        ld.volatile.shared.u32 %r2, [%r5]; ld.volatile.shared.u32 %r3, [%r10]; add.u32 %r3, %r3, %r2;\n\
        st.volatile.shared.u32 [%r10], %r3;\nover: setp.gt.u32 %p3, %r4, 1;\n@%p3 bra more;\n\
        past: bar.sync 0; ld.shared.u32 %r9, [s];";
    check(body, |_| (0..N).sum());
}

/// A block of one warp exchanges elements without barriers, as CuPy's partition does.
#[test]
fn one_warp_in_lockstep() {
    let exchange = "mov.u32 %r4, 16; st.shared.u32 [%r10], %r1;\n\
        more: xor.b32 %r5, %r1, %r4; shl.b32 %r5, %r5, 2; add.u32 %r5, %r5, %r11;\n\
        ld.shared.u32 %r2, [%r5]; ld.shared.u32 %r3, [%r10]; add.u32 %r3, %r3, %r2; st.shared.u32 [%r10], %r3;\n\
        shr.u32 %r4, %r4, 1; setp.ne.u32 %p1, %r4, 0;\n@%p1 bra more;\nld.shared.u32 %r9, [%r10];";
    check_of(32, exchange, |_| (0..32).sum());
    // A store to where the next lane has just loaded from.
    let shift = "add.u32 %r2, %r1, 7; st.shared.u32 [%r10], %r2; ld.shared.u32 %r3, [%r10]; add.u32 %r5, %r1, 1; and.b32 %r5, %r5, 15;\n\
        shl.b32 %r5, %r5, 2; add.u32 %r5, %r5, %r11; st.shared.u32 [%r5], %r3; ld.shared.u32 %r9, [%r10];";
    check_of(16, shift, |thread| (thread + 15) % 16 + 7);
    // The owner of a lock does not wait for the others before it releases the lock.
    let lock = "mov.u32 %r2, 0; setp.ne.u32 %p1, %r1, 0;\n@%p1 bra begin;\nst.shared.v2.u32 [s], {%r2, %r2};\nbegin: bar.sync 0;\n\
        again: atom.shared.cas.b32 %r2, [s], 0, 1; setp.ne.u32 %p1, %r2, 0;\n@%p1 bra over;\n\
        ld.volatile.shared.u32 %r3, [s+4]; add.u32 %r3, %r3, 1; st.volatile.shared.u32 [s+4], %r3; atom.shared.exch.b32 %r4, [s], 0;\n\
        over:\n@%p1 bra again;\nbar.sync 0; ld.shared.u32 %r9, [s+4];";
    check_of(32, lock, |_| 32);
}

#[test]
fn loops_that_nobody_comes_to() {
    let before = "setp.gt.u32 %p1, %r1, 40; selp.u32 %r2, 0, 3, %p1; st.global.u32 [%rd1], %r2;\n@%p1 bra end;\n\
        mov.u32 %r3, %ntid.x; sub.u32 %r3, %r3, 64; setp.eq.u32 %p2, %r3, 0;\n@%p2 bra end;\n\
        more: bar.sync 0; sub.u32 %r3, %r3, 1; setp.ne.u32 %p3, %r3, 0;\n@%p3 bra more;\nbra last;\nend: ret;\nlast:";
    check(before, |thread| if thread > 40 { 0 } else { 3 });
    let inside = "mov.u32 %r3, 0; st.global.u32 [%rd1], %r1; setp.gt.u32 %p1, %r1, 40;\n@%p1 bra end;\n\
        more: bar.sync 0; add.u32 %r3, %r3, 1; setp.eq.u32 %p2, %r3, 5;\n@%p2 bra end;\n\
        setp.ne.u32 %p3, %r3, 0;\n@%p3 bra more;\nbra last;\nend: ret;\nlast:";
    check(inside, |thread| thread);
}

#[test]
fn shuffles_and_votes_of_some_lanes() {
    let body = "and.b32 %r2, %r1, 31; setp.ge.u32 %p1, %r2, 10;\n@%p1 bra past;\n\
                shfl.sync.bfly.b32 %r9, %r1, 1, 31, 0x3ff; and.b32 %r3, %r1, 1; setp.eq.s32 %p2, %r3, 0;\n\
                vote.sync.ballot.b32 %r4, %p2, 0x3ff; add.s32 %r9, %r9, %r4;\npast:";
    check(body, |thread| if thread % 32 < 10 { (thread ^ 1) + 0x155 } else { 0 });
}

/// A module of two kernels, of which one is no PTX, and as many comments as make it so long.
fn with_a_bad_one(length: usize) -> String {
    let comment = "// a brace { \n/* and } \n*/ ";
    format!(
        ".version 8.0\n.target sm_75\n.address_size 64\n\
         .visible .entry bad() {{\n {}\nadd.foo ) \n}}\n.visible .entry good() {{ .pragma \"}}\"; ret; }}\n",
        comment.repeat(length / comment.len())
    )
}

#[test]
fn functions_of_long_modules_are_read_when_they_are_needed() {
    let options = Options { block: [32, 1, 1], dynamic_shared: 0, data: 0 };
    let long = with_a_bad_one(limits::MAX_EAGER);
    let module = Module::parse(&long).unwrap();
    assert_eq!(module.kernels().collect::<Vec<_>>(), ["bad", "good"]);
    module.translate("good", &options).unwrap();
    let line = long.lines().position(|line| line.starts_with("add.foo")).unwrap() + 1;
    assert_eq!(module.translate("bad", &options).unwrap_err().line as usize, line);
    // Of a short one, it is known at once.
    let error = Module::parse(&with_a_bad_one(100)).unwrap_err();
    assert!(error.to_string().contains("expected"), "{error}");
    assert!(Module::parse(&long[..long.len() - 30]).is_err());
}
