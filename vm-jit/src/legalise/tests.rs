//! A legalised kernel computes what the kernel does, on the interpreter: to the bit where an op is exact.

use super::legalise;
use crate::Target;
use crate::legal::types_of;
use std::borrow::Cow;
use std::path::Path;
use vm_ir::arbitrary::{Options, kernel};
use vm_ir::filetest::{
    FUEL, Random, Tolerance, cases, compare, is_on_values, op_kernel, op_launch, op_tolerance,
};
use vm_ir::format::to_f64;
use vm_ir::interp::{Launch, Limits, run};
use vm_ir::op::{Opcode, TABLE};
use vm_ir::{Trust, ValidModule, text, validate};

/// Targets that lack different things.
const TARGETS: [&str; 5] = ["ptx:sm_70", "ptx:sm_80", "ptx:sm_89", "ptx:sm_90a", "cpu:x86-64-v3"];

fn targets() -> Vec<Target> {
    TARGETS.iter().map(|target| target.parse().unwrap()).collect()
}

/// The module as the target wants it, if that is another.
fn legal(module: &ValidModule, target: &Target) -> Option<ValidModule> {
    match legalise(module, target).unwrap_or_else(|rejected| panic!("{target}: {rejected}")) {
        Cow::Owned(legal) => {
            // Values are numbered in the order of the text.
            let printed = text::print(&legal);
            let parsed = text::parse(&printed).unwrap_or_else(|error| panic!("{target}: {error}\n{printed}"));
            assert_eq!(&parsed, &*legal, "{target}\n{printed}");
            Some(legal)
        }
        Cow::Borrowed(_) => None,
    }
}

/// Does a run of the legalised module give what `wanted` holds?
fn same(
    legal: &ValidModule,
    mut launch: Launch,
    wanted: &Launch,
    tolerance: Tolerance,
) -> Result<(), String> {
    let limits = Limits { fuel: 100 * FUEL, races: false, ..Limits::default() };
    let given = launch.clone();
    run(legal, &mut launch, &limits).map_err(|error| error.to_string())?;
    let outputs = launch.arguments.iter().zip(&wanted.arguments);
    outputs.enumerate().try_for_each(|(number, (got, wanted))| match (got.tensor(), wanted.tensor()) {
        (Some(got), Some(wanted)) => compare(got, wanted, tolerance).map_err(|mismatch| {
            let inputs = given.arguments.iter().filter_map(|argument| argument.tensor());
            let at = mismatch.index;
            let inputs = inputs.filter(|t| at < t.len()).map(|t| (t.bits(at), to_f64(t.element, t.bits(at))));
            format!("argument {number}: {mismatch} for {:x?}", inputs.collect::<Vec<_>>())
        }),
        _ => Ok(()),
    })
}

#[test]
fn every_op_on_every_type() {
    let (mut random, mut expanded, mut failures) = (Random(11), 0, String::new());
    for row in TABLE.iter().filter(|row| is_on_values(row)) {
        // Lanes are independent, but where a branch asks for all of them.
        let branches = matches!(row.opcode, Opcode::Sin | Opcode::Cos);
        for (number, (from, to)) in types_of(row.opcode).into_iter().enumerate() {
            for lanes in [1, 4].into_iter().filter(|lanes| branches || (*lanes == 1) == (number % 2 == 0)) {
                let source = op_kernel(row, from, to, lanes);
                let valid = validate(text::parse(&source).unwrap(), Trust::Guest).unwrap();
                let launch = op_launch(&valid.kernels()[0], lanes, &mut random);
                let mut wanted = launch.clone();
                run(&valid, &mut wanted, &Limits::default()).unwrap();
                for target in targets() {
                    let Some(legal) = legal(&valid, &target) else { continue };
                    expanded += 1;
                    if let Err(error) = same(&legal, launch.clone(), &wanted, op_tolerance(row, from)) {
                        failures +=
                            &format!("{} {from} {to} in {lanes} for {target}: {error}\n", row.mnemonic);
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(expanded > 250, "{expanded}");
}

#[test]
fn files() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm-ir/filetests/run");
    let mut expanded = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let source = std::fs::read_to_string(&path).unwrap();
        let module = text::parse(&source).unwrap();
        for case in cases(&source, &module).unwrap().iter().filter(|case| case.error.is_none()) {
            let valid = validate(module.clone(), case.trust).unwrap();
            for target in targets() {
                let Some(legal) = legal(&valid, &target) else { continue };
                let mut launch = case.launch.clone();
                let limits = Limits { fuel: 100 * FUEL, ..Limits::default() };
                run(&legal, &mut launch, &limits)
                    .unwrap_or_else(|e| panic!("{} for {target}: {e}", path.display()));
                case.check(&launch.arguments)
                    .unwrap_or_else(|e| panic!("{} for {target}: {e}", path.display()));
                expanded += 1;
            }
        }
    }
    assert!(expanded > 10, "{expanded}");
}

#[test]
fn random_kernels() {
    let mut expanded = 0;
    for seed in 0..120 {
        let options = Options { vectors: seed % 2 == 0, ..Options::default() };
        let (module, launch) = kernel(seed, options);
        let valid = validate(module, Trust::Guest).unwrap();
        let limits = Limits { races: false, ..Limits::default() };
        let mut wanted = launch.clone();
        run(&valid, &mut wanted, &limits).unwrap();
        let targets = targets();
        let target = &targets[seed as usize / 2 % targets.len()];
        let Some(legal) = legal(&valid, target) else { continue };
        expanded += 1;
        if let Err(error) = same(&legal, launch, &wanted, Tolerance::Exact) {
            panic!("seed {seed} for {target}: {error}\n{}", text::print(&valid));
        }
    }
    assert!(expanded > 40, "{expanded}");
}
