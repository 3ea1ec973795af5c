//! Kernels that are large for the code generator: each gives what the interpreter gives, or is refused as too large, and so
//! is each larger one of its kind.
//!
//! `VM_CPU_LARGE=FROM..TO cargo test -p vm-cpu --test large random -- --nocapture` compiles as many random kernels as wanted, of up
//! to 2^16 ops, with the code generator's debug assertions on.

mod common;

use common::Machine;
use common::large::{Outcome, check, compiled};
use std::collections::HashMap;
use std::fmt::Write;
use vm_ir::interp::{Argument, Launch, Tensor};
use vm_ir::{Scalar, Trust, ValidModule, text, validate};

/// SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `count` rotations of vectors from two views, and then `tail` numbers from places that a third says.
fn rotations(count: usize, tail: usize) -> (ValidModule, Launch) {
    let mut text = String::from(
        "vir 1\nkernel @large(@x: view<i64, [?], read>, @y: view<i64, [?], read>, @at: view<i64, [?], read>, \
         @out: view<i64, [?], write>) at 0x1000 block(1) {\n  %i = global_id.x : i64\n  \
         %r0 = load @x[%i] : vec16<i64>\n  %r1 = load @y[%i] : vec16<i64>\n  %any = load @at[%i] : i64\n  \
         %few = const 15 : i64\n  %at = and %any, %few : i64\n",
    );
    for n in 0..count {
        writeln!(text, "  %r{} = rotl %r{}, %r{n} : vec16<i64>", n + 2, n + 1).unwrap();
    }
    writeln!(text, "  store @out[%i], %r{}", count + 1).unwrap();
    for n in 0..tail {
        writeln!(text, "  %c{n} = const {n} : i64\n  %at{n} = add %at, %c{n} : i64").unwrap();
        writeln!(text, "  %l{n} = load @x[%at{n}] : i64\n  %o{n} = const {} : i64", 16 + n).unwrap();
        writeln!(text, "  store @out[%o{n}], %l{n}").unwrap();
    }
    text.push_str("}\n");
    let mut state = 1;
    let arguments = [17, 17, 1, 400].map(|count| {
        let bits: Vec<u64> = (0..count).map(|_| random(&mut state)).collect();
        Argument::Tensor(Tensor::from_bits(Scalar::I64, &[count], bits))
    });
    let launch = Launch { kernel: "large".into(), grid: [1, 1, 1], arguments: arguments.into() };
    (validate(text::parse(&text).unwrap(), Trust::Guest).unwrap(), launch)
}

fn chains(sizes: &[(usize, usize)]) {
    let machine = Machine::new();
    for (count, tail) in sizes {
        let (module, launch) = rotations(*count, *tail);
        let outcome = compiled(&machine, &module, launch);
        assert_eq!(outcome, Ok(Outcome::Equal), "{count} rotl and {tail} loads");
    }
}

/// Chains that the optimiser rewrites in more ways than its numbers could count, where one value became a hundred: such as are
/// optimised, such as it makes too large, and such as it never sees, as it would make them larger than what is refused.
#[test]
fn long_chains_are_right() {
    chains(&[(40, 100), (300, 0), (1_000, 200)]);
}

/// Those that became wrong code without an error.
#[test]
fn the_longest_chains_are_right() {
    chains(&[(5_000, 0), (10_000, 0), (11_625, 300), (11_700, 200), (11_900, 200)]);
}

/// What the code generator can't number is refused, and nothing is written past that.
#[test]
fn too_large_is_refused() {
    let machine = Machine::new();
    let refused = machine.compile(&rotations(40_000, 0).0, "large").unwrap_err();
    assert!(refused.contains("instructions or more, 524288 are allowed; split it"), "{refused}");
}

/// Random kernels of several sizes; or those of the seeds that are asked for.
#[test]
fn random_kernels_are_right() {
    let given = std::env::var("VM_CPU_LARGE").ok();
    let range = given.as_deref().and_then(|text| text.split_once(".."));
    let (seeds, most) = match range {
        Some((from, to)) => (from.parse().unwrap()..to.parse().unwrap(), 16),
        None => (0..12, 10),
    };
    let machine = Machine::new();
    let mut outcomes: HashMap<Outcome, u32> = HashMap::new();
    for seed in seeds {
        let statements = 1 << (8 + seed % (most - 7));
        let outcome = check(&machine, seed, statements).unwrap_or_else(|error| panic!("{error}"));
        *outcomes.entry(outcome).or_default() += 1;
        if given.is_some() {
            println!("seed {seed}, {statements} statements: {outcome:?}");
        }
    }
    assert!(outcomes.contains_key(&Outcome::Equal), "{outcomes:?}");
    println!("{outcomes:?}");
}
