//! Compares random programs that use the carry flag with a model. The programs also have branches, a loop, predicates, loads and stores.
//! `VM_PTX_CARRIES` sets their number.

mod common;

use common::{Machine, Program, Random};

const THREADS: usize = 32;
const REGISTERS: u64 = 6;

/// The state of a thread.
#[derive(Clone, Copy)]
struct Thread {
    registers: [u32; REGISTERS as usize],
    carry: bool,
}

/// An instruction. Its predicate is a bit of the thread's input and the value that the bit must have.
#[derive(Clone, Copy, Debug)]
struct Step {
    code: &'static str,
    to: usize,
    sources: [usize; 3],
    guard: Option<(u32, bool)>,
    /// The distance of a branch, in steps.
    skip: usize,
}

const CODES: &[&str] = &[
    "add",
    "add.cc",
    "addc",
    "addc.cc",
    "sub",
    "sub.cc",
    "subc",
    "subc.cc",
    "mad.lo.cc",
    "mad.hi.cc",
    "madc.lo",
    "madc.hi.cc",
    "ld",
    "st",
    "bra",
];

impl Step {
    fn new(random: &mut Random, left: usize) -> Step {
        let mut register = || random.below(REGISTERS) as usize;
        let (to, sources) = (register().max(1), [register(), register(), register()]);
        let code = CODES[random.below(CODES.len() as u64) as usize];
        let guarded = code == "bra" || random.below(3) == 0;
        let guard = guarded.then(|| (random.below(4) as u32, random.below(2) == 0));
        Step { code, to, sources, guard, skip: 1 + random.below(left.min(5) as u64) as usize }
    }

    fn text(&self, at: usize) -> String {
        let guard = self
            .guard
            .map(|(bit, wanted)| format!("@{}%p{bit} ", if wanted { "" } else { "!" }))
            .unwrap_or_default();
        let [a, b, c] = self.sources;
        let to = self.to;
        let body = match self.code {
            "bra" => format!("bra step{}", at + self.skip),
            "ld" => format!("ld.global.u32 %r{to}, [%rd1]"),
            "st" => format!("st.global.u32 [%rd2], %r{a}"),
            code if code.starts_with('m') => format!("{code}.u32 %r{to}, %r{a}, %r{b}, %r{c}"),
            code => format!("{code}.u32 %r{to}, %r{a}, %r{b}"),
        };
        format!("step{at}: {guard}{body};\n")
    }

    /// Executes the step on a thread with this input. Returns the distance to the next one.
    fn run(&self, thread: &mut Thread, input: u32) -> usize {
        let skipped = self.guard.is_some_and(|(bit, wanted)| (input >> bit & 1 == 1) != wanted);
        if skipped {
            return 1;
        }
        let [a, b, c] = self.sources.map(|source| thread.registers[source]);
        let (opcode, modifiers) = self.code.split_once('.').unwrap_or((self.code, ""));
        let carry = u64::from(thread.carry);
        // All results are sums of two numbers and a carry.
        let (x, y, carry_in) = match opcode {
            "bra" => return self.skip,
            "st" => return 1,
            "ld" => (input, 0, 0),
            "add" => (a, b, 0),
            "addc" => (a, b, carry),
            "sub" => (a, !b, 1),
            "subc" => (a, !b, carry),
            _ => {
                let product = u64::from(a) * u64::from(b);
                let part = if modifiers.contains("hi") { product >> 32 } else { product };
                (part as u32, c, if opcode == "madc" { carry } else { 0 })
            }
        };
        let sum = u64::from(x) + u64::from(y) + carry_in;
        thread.registers[self.to] = sum as u32;
        if modifiers.ends_with("cc") {
            thread.carry = sum >> 32 == 1;
        }
        1
    }
}

#[test]
fn random_programs() {
    let count = std::env::var("VM_PTX_CARRIES").map_or(40, |count| count.parse().expect("a number"));
    for seed in 0..count {
        let mut random = Random::new(seed);
        let steps = 4 + random.below(24) as usize;
        let program: Vec<Step> = (0..steps).map(|at| Step::new(&mut random, steps - at)).collect();
        let rounds = random.below(4) as usize + 1;
        let input: Vec<u32> = (0..THREADS)
            .map(|_| {
                if random.below(2) == 0 {
                    random.next() as u32
                } else {
                    0u32.wrapping_sub(random.below(16) as u32)
                }
            })
            .collect();
        let body: String = program.iter().enumerate().map(|(at, step)| step.text(at)).collect();
        let text = format!(
            ".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry k(.param .u64 in, .param .u64 out) {{\n\
             .reg .pred %p<6>; .reg .b32 %r<10>; .reg .b64 %rd<4>;\n\
             ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; mov.u32 %r7, %tid.x; mad.wide.u32 %rd1, %r7, 4, %rd1;\n\
             mad.wide.u32 %rd2, %r7, 32, %rd2; ld.global.u32 %r0, [%rd1]; mov.u32 %r8, 0; not.b32 %r1, %r0; mov.u32 %r2, -1;\n\
             mov.u32 %r3, 1; mov.u32 %r4, %r7; mov.u32 %r5, 0x80000000;\n\
             and.b32 %r9, %r0, 1; setp.ne.u32 %p0, %r9, 0; and.b32 %r9, %r0, 2; setp.ne.u32 %p1, %r9, 0;\n\
             and.b32 %r9, %r0, 4; setp.ne.u32 %p2, %r9, 0; and.b32 %r9, %r0, 8; setp.ne.u32 %p3, %r9, 0;\n\
             add.cc.u32 %r9, %r0, %r0;\nagain:\n{body}step{steps}: add.u32 %r8, %r8, 1; setp.lt.u32 %p4, %r8, {rounds};\n\
             @%p4 bra again;\naddc.u32 %r9, 0, 0;\n\
             st.global.v4.u32 [%rd2], {{%r1, %r2, %r3, %r4}}; st.global.v2.u32 [%rd2+16], {{%r5, %r9}}; ret;\n}}\n"
        );
        let expect: Vec<u32> = (0..THREADS)
            .flat_map(|thread| {
                let input = input[thread];
                let mut model = Thread {
                    registers: [input, !input, u32::MAX, 1, thread as u32, 1 << 31],
                    carry: input >> 31 == 1,
                };
                for _ in 0..rounds {
                    let mut at = 0;
                    while at < steps {
                        at += program[at].run(&mut model, input);
                    }
                }
                let [_, registers @ ..] = model.registers;
                registers.into_iter().chain([u32::from(model.carry), 0, 0])
            })
            .collect();
        for machine in Machine::all() {
            let mut run = Program::on(&text, machine);
            let (input, out) = (run.put(&input), run.put(&[0u32; 8 * THREADS]));
            run.launch("k", [1, 1, 1], [THREADS as u32, 1, 1], &[input.into(), out.into()]);
            assert_eq!(run.get::<u32>(out, 8 * THREADS), expect, "seed {seed} on {machine:?}: {text}");
        }
    }
}
