//! What lanes of a warp do together, as the PTX ISA defines it: for whole warps, for some of their lanes, behind lanes that have ended, in loops that
//! lanes leave one by one, and in blocks whose last warp is not full. What that definition leaves open is not looked at.

mod common;

use common::{Machine, Program, Random};

/// A warp's lanes as an instruction finds them: what each has, and whether it comes to the instruction.
struct Warp<'a> {
    values: &'a [u32],
    comes: u32,
}

impl Warp<'_> {
    /// The lanes of a mask that come to it.
    fn members(&self, mask: u32) -> impl Iterator<Item = usize> + '_ {
        let members = mask & self.comes;
        (0..32).filter(move |lane| members >> lane & 1 != 0)
    }

    fn those(&self, mask: u32, is: impl Fn(u32) -> bool) -> u32 {
        self.members(mask).filter(|lane| is(self.values[*lane])).fold(0, |all, lane| all | 1 << lane)
    }

    fn fold(&self, mask: u32, with: fn(u32, u32) -> u32) -> Option<u32> {
        self.members(mask).map(|lane| self.values[lane]).reduce(with)
    }

    /// The value and the predicate of a shuffle.
    fn shuffle(&self, how: &str, lane: u32, by: u32, bounds: u32) -> Option<u32> {
        let (clamp, segment) = (bounds & 31, bounds >> 8 & 31);
        let (least, most) = (lane & segment, lane & segment | clamp & !segment);
        let (by, lane, least, most) = (by as i32 & 31, lane as i32, least as i32, most as i32);
        let (from, inside) = match how {
            "up" => (lane - by, lane - by >= most),
            "down" => (lane + by, lane + by <= most),
            "bfly" => (lane ^ by, lane ^ by <= most),
            _ => (least | by & !(segment as i32), (least | by & !(segment as i32)) <= most),
        };
        let from = if inside { from } else { lane };
        let known = self.comes >> from & 1 != 0;
        known.then(|| self.values[from as usize].wrapping_mul(2) | u32::from(inside))
    }
}

/// An instruction with what is around it, which reads a value in `%r3` and a mask in `%r4`, and has a predicate in `%p3`; and what comes of it in `%r9`
/// for a lane, given its mask.
type Row = (&'static str, fn(&Warp, u32, u32) -> Option<u32>);

const PREDICATE: &str = "selp.u32 %r9, 1, 0, %p2;";
/// `%r9` is twice the value and the predicate.
const BOTH: &str = "selp.u32 %r8, 1, 0, %p2; shl.b32 %r9, %r9, 1; or.b32 %r9, %r9, %r8;";

const ROWS: &[Row] = &[
    ("activemask.b32 %r9;", |warp, _, _| Some(warp.comes)),
    ("vote.sync.ballot.b32 %r9, %p3, %r4;", |warp, _, mask| Some(warp.those(mask, |v| v & 1 != 0))),
    ("vote.sync.ballot.b32 %r9, !%p3, %r4;", |warp, _, mask| Some(warp.those(mask, |v| v & 1 == 0))),
    ("vote.sync.any.pred %p2, %p3, %r4; P", |warp, _, mask| {
        Some((warp.those(mask, |v| v & 1 != 0) != 0).into())
    }),
    ("vote.sync.all.pred %p2, %p3, %r4; P", |warp, _, mask| {
        Some((warp.those(mask, |v| v & 1 == 0) == 0).into())
    }),
    ("vote.sync.uni.pred %p2, %p3, %r4; P", |warp, _, mask| {
        let of = |bit| warp.those(mask, |v| v & 1 == bit);
        Some((of(0) == 0 || of(1) == 0).into())
    }),
    ("redux.sync.add.s32 %r9, %r3, %r4;", |warp, _, mask| warp.fold(mask, u32::wrapping_add)),
    ("redux.sync.add.u32 %r9, %r3, %r4;", |warp, _, mask| warp.fold(mask, u32::wrapping_add)),
    ("redux.sync.and.b32 %r9, %r3, %r4;", |warp, _, mask| warp.fold(mask, |a, b| a & b)),
    ("redux.sync.or.b32 %r9, %r3, %r4;", |warp, _, mask| warp.fold(mask, |a, b| a | b)),
    ("redux.sync.xor.b32 %r9, %r3, %r4;", |warp, _, mask| warp.fold(mask, |a, b| a ^ b)),
    ("redux.sync.min.u32 %r9, %r3, %r4;", |warp, _, mask| warp.fold(mask, u32::min)),
    ("redux.sync.max.u32 %r9, %r3, %r4;", |warp, _, mask| warp.fold(mask, u32::max)),
    ("redux.sync.min.s32 %r9, %r3, %r4;", |warp, _, mask| {
        warp.fold(mask, |a, b| (a as i32).min(b as i32) as u32)
    }),
    ("redux.sync.max.s32 %r9, %r3, %r4;", |warp, _, mask| {
        warp.fold(mask, |a, b| (a as i32).max(b as i32) as u32)
    }),
    ("and.b32 %r5, %r3, 3; match.any.sync.b32 %r9, %r5, %r4;", |warp, lane, mask| {
        Some(warp.those(mask, |v| v & 3 == warp.values[lane as usize] & 3))
    }),
    (
        "and.b32 %r5, %r3, 1; cvt.u64.u32 %rd5, %r5; shl.b64 %rd5, %rd5, 40; match.any.sync.b64 %r9, %rd5, %r4;",
        |warp, lane, mask| Some(warp.those(mask, |v| v & 1 == warp.values[lane as usize] & 1)),
    ),
    // The mask where all are alike, and whether they are.
    ("and.b32 %r5, %r3, 1; match.all.sync.b32 %r9|%p2, %r5, %r4; B", |warp, _, mask| {
        let ones = warp.those(mask, |v| v & 1 != 0);
        let all = warp.those(mask, |_| true);
        Some(if ones == 0 || ones == all { all << 1 | 1 } else { 0 })
    }),
    ("elect.sync %r9|%p2, %r4; B", |warp, lane, mask| {
        let leader = (mask & warp.comes).trailing_zeros();
        Some(leader << 1 | u32::from(leader == lane))
    }),
    ("shfl.sync.idx.b32 %r9|%p2, %r3, 2, 31, %r4; B", |warp, lane, _| warp.shuffle("idx", lane, 2, 31)),
    ("shfl.sync.idx.b32 %r9|%p2, %r3, %r2, 31, %r4; B", |warp, lane, _| warp.shuffle("idx", lane, lane, 31)),
    ("shfl.sync.idx.b32 %r9|%p2, %r3, 1, 0x181f, %r4; B", |warp, lane, _| {
        warp.shuffle("idx", lane, 1, 0x181f)
    }),
    ("shfl.sync.up.b32 %r9|%p2, %r3, 1, 0, %r4; B", |warp, lane, _| warp.shuffle("up", lane, 1, 0)),
    ("shfl.sync.up.b32 %r9|%p2, %r3, 2, 0x1c00, %r4; B", |warp, lane, _| warp.shuffle("up", lane, 2, 0x1c00)),
    ("shfl.sync.down.b32 %r9|%p2, %r3, 4, 31, %r4; B", |warp, lane, _| warp.shuffle("down", lane, 4, 31)),
    ("shfl.sync.down.b32 %r9|%p2, %r3, 3, 0x181f, %r4; B", |warp, lane, _| {
        warp.shuffle("down", lane, 3, 0x181f)
    }),
    ("shfl.sync.bfly.b32 %r9|%p2, %r3, 1, 31, %r4; B", |warp, lane, _| warp.shuffle("bfly", lane, 1, 31)),
    ("shfl.sync.bfly.b32 %r9|%p2, %r3, 8, 0x1807, %r4; B", |warp, lane, _| {
        warp.shuffle("bfly", lane, 8, 0x1807)
    }),
    // What another lane of the mask wrote is there behind the barrier.
    (
        "st.shared.u32 [%r10], %r3; bar.warp.sync %r4; ld.shared.u32 %r9, [%r12]; bar.warp.sync %r4;",
        |warp, lane, mask| {
            let next = (lane + 1) & 31;
            let there = lane != 31 && (mask & warp.comes) >> next & 1 != 0;
            there.then(|| warp.values[next as usize])
        },
    ),
];

/// Who comes to the instructions, and by which mask.
struct Case {
    /// PTX around `{rows}`; in it `%r2` is the lane, `%r7` the round, `%p4` and `%p5` are free, and `past` is where results are written.
    around: &'static str,
    rounds: u32,
    comes: fn(lane: u32, round: u32) -> bool,
    /// The mask of a lane, of those that come.
    mask: fn(lane: u32, comes: u32) -> u32,
}

const WHOLE: fn(u32, u32) -> u32 = |_, comes| comes;

const CASES: &[Case] = &[
    Case { around: "{rows}", rounds: 1, comes: |_, _| true, mask: WHOLE },
    // Two halves at one instruction, each with a mask of its own.
    Case {
        around: "{rows}",
        rounds: 1,
        comes: |_, _| true,
        mask: |lane, comes| if lane < 16 { comes & 0xffff } else { comes & 0xffff_0000 },
    },
    Case {
        around: "setp.ge.u32 %p4, %r2, 10;\n@%p4 bra past;\n{rows}\npast:",
        rounds: 1,
        comes: |lane, _| lane < 10,
        mask: WHOLE,
    },
    Case {
        around: "and.b32 %r5, %r2, 1; setp.eq.u32 %p4, %r5, 0;\n@%p4 bra past;\n{rows}\npast:",
        rounds: 1,
        comes: |lane, _| lane % 2 == 1,
        mask: WHOLE,
    },
    // Lanes that have ended, of which the mask has some.
    Case {
        around: "rem.u32 %r5, %r2, 3; setp.eq.u32 %p4, %r5, 2;\n@%p4 exit;\n{rows}",
        rounds: 1,
        comes: |lane, _| lane % 3 != 2,
        mask: |_, _| u32::MAX,
    },
    // A loop that is left one by one.
    Case {
        around: "and.b32 %r6, %r2, 3;\nagain:\n{rows}\nadd.u32 %r7, %r7, 1; setp.le.u32 %p5, %r7, %r6;\n@%p5 bra again;",
        rounds: 4,
        comes: |lane, round| round <= lane & 3,
        mask: WHOLE,
    },
];

/// Runs all rows in a case with blocks of that shape, of which some are switched off.
fn check(case: &Case, block: [u32; 3]) {
    let threads: u32 = block.iter().product();
    let count = threads as usize;
    let mut text = String::new();
    for (at, (row, _)) in ROWS.iter().enumerate() {
        let row = row.replace(" P", PREDICATE).replace(" B", BOTH);
        // out[(round * rows + row) * threads + thread]
        text += &format!(
            "{row}\nmad.lo.u32 %r13, %r7, {}, {at}; mad.lo.u32 %r13, %r13, {threads}, %r1; mul.wide.u32 %rd3, %r13, 4;\n\
             add.s64 %rd3, %rd1, %rd3; st.global.u32 [%rd3], %r9;\n",
            ROWS.len()
        );
    }
    // Masks are of this round: mask[round * threads + thread].
    let rows = format!(
        "mad.lo.u32 %r13, %r7, {threads}, %r1; mul.wide.u32 %rd3, %r13, 4; add.s64 %rd3, %rd2, %rd3; ld.global.u32 %r4, [%rd3];\n{text}"
    );
    let body = case.around.replace("{rows}", &rows);
    let text = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n\
         .visible .entry k(.param .u64 out, .param .u64 masks, .param .u64 values) {{\n\
         .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>; .shared .align 4 .b8 s[4096];\n\
         ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [masks]; ld.param.u64 %rd4, [values];\n\
         mov.u32 %r1, %tid.z; mov.u32 %r2, %ntid.y; mov.u32 %r3, %tid.y; mad.lo.u32 %r1, %r1, %r2, %r3;\n\
         mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r1, %r1, %r2, %r3; and.b32 %r2, %r1, 31;\n\
         mul.wide.u32 %rd3, %r1, 4; add.s64 %rd3, %rd4, %rd3; ld.global.u32 %r3, [%rd3];\n\
         and.b32 %r5, %r3, 1; setp.ne.u32 %p3, %r5, 0; mov.u32 %r7, 0;\n\
         shl.b32 %r10, %r1, 2; mov.u32 %r11, s; add.s32 %r10, %r10, %r11;\n\
         add.s32 %r12, %r1, 1; and.b32 %r12, %r12, 31; and.b32 %r13, %r1, -32; or.b32 %r12, %r12, %r13; shl.b32 %r12, %r12, 2; add.s32 %r12, %r12, %r11;\n\
         {body}\n ret;\n}}\n"
    );
    let mut random = Random::new(u64::from(threads));
    let values: Vec<u32> = (0..threads).map(|_| random.next() as u32 & 0x8000_00ff).collect();
    let comes = |warp: u32, round: u32| {
        let lanes = (0..32).filter(|lane| warp * 32 + lane < threads && (case.comes)(*lane, round));
        lanes.fold(0, |all, lane| all | 1u32 << lane)
    };
    let masks: Vec<u32> = (0..case.rounds)
        .flat_map(|round| (0..threads).map(move |thread| (thread, round)))
        .map(|(thread, round)| (case.mask)(thread % 32, comes(thread / 32, round)))
        .collect();
    for machine in Machine::all() {
        let mut program = Program::on(&text, machine);
        let length = case.rounds as usize * ROWS.len() * count;
        let out = program.put(&vec![0xdead_beefu32; length]);
        let arguments = [out, program.put(&masks), program.put(&values)].map(Into::into);
        program.launch("k", [1, 1, 1], block, &arguments);
        let found = program.get::<u32>(out, length);
        for (at, found) in found.into_iter().enumerate() {
            let thread = at as u32 % threads;
            let (row, round) = (&ROWS[at / count % ROWS.len()], (at / count / ROWS.len()) as u32);
            let first = (thread / 32 * 32) as usize;
            let mut of_warp = values[first..count.min(first + 32)].to_vec();
            of_warp.resize(32, 0);
            let warp = Warp { values: &of_warp, comes: comes(thread / 32, round) };
            let wanted = match warp.comes >> (thread % 32) & 1 {
                0 => Some(0xdead_beef),
                _ => row.1(&warp, thread % 32, masks[(round * threads + thread) as usize]),
            };
            let there = format!(
                "{machine:?}, blocks of {block:?}, thread {thread}, round {round}: {}\n{}",
                row.0, case.around
            );
            assert!(wanted.is_none_or(|wanted| wanted == found), "{found:#x}, not {wanted:x?}: {there}");
        }
    }
}

#[test]
fn whole_warps() {
    CASES.iter().for_each(|case| check(case, [64, 1, 1]));
}

#[test]
fn a_last_warp_that_is_not_full() {
    for block in [[1, 1, 1], [40, 1, 1], [5, 3, 3]] {
        CASES.iter().for_each(|case| check(case, block));
    }
}

/// A block's barrier beside a warp that is not full, and how many it counts.
#[test]
fn barriers_of_blocks_that_do_not_fill_warps() {
    let text = ".version 8.0\n.target sm_75\n.address_size 64\n\
        .visible .entry k(.param .u64 out) {\n.reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<4>; .shared .align 4 .b8 s[400];\n\
        ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.s32 %r2, %r2, %r3;\n\
        st.shared.u32 [%r2], %r1; bar.warp.sync -1; bar.sync 0;\n\
        xor.b32 %r4, %r1, 1; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r3; ld.shared.u32 %r5, [%r4];\n\
        setp.lt.u32 %p1, %r1, 60; barrier.sync.aligned 2; bar.red.popc.u32 %r6, 0, %p1;\n\
        setp.lt.u32 %p1, %r1, 70; bar.red.and.pred %p2, 1, %p1; selp.u32 %r7, 1000, 0, %p2;\n\
        shl.b32 %r6, %r6, 16; add.s32 %r5, %r5, %r6; add.s32 %r5, %r5, %r7;\n\
        mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r5; ret;\n}\n";
    let wanted: Vec<u32> = (0..70).map(|thread| (thread ^ 1) + (60 << 16) + 1000).collect();
    for machine in Machine::all() {
        let mut program = Program::on(text, machine);
        let out = program.put(&[0u32; 70]);
        program.launch("k", [1, 1, 1], [70, 1, 1], &[out.into()]);
        assert_eq!(program.get::<u32>(out, 70), wanted, "{machine:?}");
    }
}
