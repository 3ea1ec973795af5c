//! Functions of f32 in machine code: near to the truth, and the same for older machines, to the bit.
//!
//! `VM_CPU_EXP_STEP=1 cargo test --release -p vm-cpu --test exp` asks for every number that there is.

mod common;

use common::Machine;
use vm_ir::interp::{Argument, Launch, Tensor};
use vm_ir::{Scalar, Trust, text, validate};

/// The step between numbers; a prime.
const STEP: u64 = 1021;
/// Numbers of a launch. Not a multiple of the block, so that some threads come last and alone.
const COUNT: usize = (1 << 20) - 3;

/// An op, what it should come to, and how many of the numbers there are between the two at most. Of `erf` others know the truth
/// (`accuracy.rs`).
type Definition = (&'static str, Option<fn(f64) -> f64>, u32);
const OPS: [Definition; 4] = [
    ("exp", Some(f64::exp), 1),
    ("exp2", Some(f64::exp2), 1),
    ("tanh", Some(f64::tanh), 2),
    ("erf", None, 0),
];

const KERNEL: &str = "vir 1
kernel @k(@x: view<f32, [?], read>, @y: view<f32, [?], write>) at 0x0 block(64) {
  %i = global_id.x : i64
  %x = load @x[%i] : f32
  %y = OP %x : f32
  store @y[%i], %y
}";

#[test]
fn the_same_on_all() {
    OPS.into_iter().for_each(check);
}

fn check((op, truth, within): Definition) {
    let machines = Machine::all();
    let valid = validate(text::parse(&KERNEL.replace("OP", op)).unwrap(), Trust::Guest).unwrap();
    let artifacts: Vec<_> = machines.iter().map(|machine| machine.compile(&valid, "k").unwrap()).collect();
    let step = std::env::var("VM_CPU_EXP_STEP").map_or(STEP, |step| step.parse().unwrap());
    let mut numbers = (0..1u64 << 32).step_by(step as usize).map(|bits| bits as u32).peekable();
    let mut ran = 0u64;
    while numbers.peek().is_some() {
        let some: Vec<u32> = numbers.by_ref().take(COUNT).collect();
        let tensor = |all: &[u32]| {
            let bits = all.iter().map(|bits| u64::from(*bits));
            Argument::Tensor(Tensor::from_bits(Scalar::F32, &[all.len() as u64], bits))
        };
        let arguments = vec![tensor(&some), tensor(&vec![0; some.len()])];
        let launch = Launch { kernel: "k".into(), grid: [some.len().div_ceil(64) as u32, 1, 1], arguments };
        let results: Vec<Vec<u8>> = machines
            .iter()
            .zip(&artifacts)
            .map(|(machine, artifact)| {
                let mut launch = launch.clone();
                let time = std::time::Duration::from_secs(60);
                assert_eq!(machine.launch(artifact, &mut launch, 1, time), Ok(0));
                launch.arguments[1].tensor().unwrap().bytes.clone()
            })
            .collect();
        let floats = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let first = floats(&results[0]);
        for (other, machine) in results[1..].iter().zip(&machines[1..]) {
            for ((x, ours), theirs) in some.iter().zip(&first).zip(floats(other)) {
                let same = ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan();
                let x = f32::from_bits(*x);
                assert!(
                    same,
                    "{op} {x:e} is {ours:e} on {}, {theirs:e} on {}",
                    machines[0].name(),
                    machine.name()
                );
            }
        }
        for (x, y) in some.iter().map(|bits| f32::from_bits(*bits)).zip(&first) {
            let Some(truth) = truth else { break };
            // Floats of one sign are in the order of their bits.
            let truth = truth(f64::from(x)) as f32;
            let near = truth.to_bits().abs_diff(y.to_bits()) <= within;
            let right = truth.is_nan() == y.is_nan() && (x.is_nan() || near);
            assert!(right, "{op} {x:e} is {y:e}");
        }
        ran += some.len() as u64;
    }
    println!("{op}: {ran} numbers on {} machines", machines.len());
    assert_eq!(ran, (1u64 << 32).div_ceil(step));
}
