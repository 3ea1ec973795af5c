//! Kernels that are large for the code generator: each gives what the interpreter gives, or is refused as too large.

mod common;

use common::Machine;
use std::fmt::Write;
use vm_ir::filetest::{Tolerance, compare};
use vm_ir::interp::{Argument, Launch, Limits, Tensor, run};
use vm_ir::{Scalar, Trust, text, validate};

/// SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// `count` rotations of vectors from two views, and then `tail` numbers from places that a third says.
fn rotations(count: usize, tail: usize) -> String {
    let mut text = String::from(
        "vir 1\nkernel @large(@x: view<i64, [?], read>, @y: view<i64, [?], read>, @at: view<i64, [?], read>, \
         @out: view<i64, [?], write>) at 0x1000 block(1) {\n  %i = global_id.x : i64\n  \
         %r0 = load @x[%i] : vec16<i64>\n  %r1 = load @y[%i] : vec16<i64>\n  %any = load @at[%i] : i64\n  %few = const 15 : i64\n  %at = and %any, %few : i64\n",
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
    text + "}\n"
}

/// Does a kernel on random data give what it gives on the interpreter, or is it too large?
fn check(name: &str, text: &str, arguments: &[(Scalar, u64)]) -> Result<(), String> {
    let module = text::parse(text).unwrap_or_else(|error| panic!("{name}: {error}"));
    let valid = validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("{name}: {errors}"));
    let mut state = 1;
    let arguments = arguments.iter().map(|(scalar, count)| {
        let bits: Vec<u64> = (0..*count).map(|_| random(&mut state)).collect();
        Argument::Tensor(Tensor::from_bits(*scalar, &[*count], bits))
    });
    let mut ours = Launch { kernel: "large".into(), grid: [1, 1, 1], arguments: arguments.collect() };
    let mut theirs = ours.clone();
    run(&valid, &mut theirs, &Limits { races: false, ..Limits::default() }).unwrap();
    let machine = Machine::new();
    match machine.run(&valid, &mut ours, 1 << 40) {
        Err(error) if error.contains("[too-large]") => return Err(error),
        result => assert_eq!(result, Ok(0), "{name}"),
    }
    for (got, wanted) in ours.arguments.iter().zip(&theirs.arguments) {
        if let (Some(got), Some(wanted)) = (got.tensor(), wanted.tensor()) {
            compare(got, wanted, Tolerance::Exact).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
    Ok(())
}

/// Chains that the optimiser rewrites in more ways than its numbers could count: one value became a hundred.
#[test]
fn long_chains_are_right() {
    let views = [(Scalar::I64, 17), (Scalar::I64, 17), (Scalar::I64, 1), (Scalar::I64, 400)];
    for (count, tail) in [(5_000, 0), (10_000, 0), (11_625, 300), (11_700, 200), (11_900, 200)] {
        check(&format!("{count} rotl and {tail} loads"), &rotations(count, tail), &views).unwrap();
    }
}

/// What the code generator can't number is refused, and nothing is written past that.
#[test]
fn too_large_is_refused() {
    let views = [(Scalar::I64, 17), (Scalar::I64, 17), (Scalar::I64, 1), (Scalar::I64, 400)];
    let refused = check("40,000 rotl", &rotations(40_000, 0), &views).unwrap_err();
    assert!(refused.contains("instructions or more, 524288 are allowed; split it"), "{refused}");
}
