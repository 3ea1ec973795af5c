//! The kernel library: LLVM takes every kernel for each chip, and an emulator computes a small call of each function within the bounds
//! that its case states.
//!
//! `AMDGCN_CASE` has only cases run whose names contain it. Without, of those of tiles some of bf16 and few of f16 run alone: each takes seconds.

use std::collections::{BTreeMap, HashSet};
use std::time::Instant;
use vm_ir::{GuestAddr, Module, Trust, validate};
use vm_jit::backend::amdgcn::Chip;
use vm_jit::compile;
use vm_kernels::call::{Call, CallError};
use vm_kernels::cases::{Case, all};
use vm_kernels::family::{Kind, Resources};

use super::{EMULATED, Emulation, assembler, chips, sweep, target, wanted};

/// Of each thread: more than any kernel needs.
const FUEL: u64 = 1 << 40;
/// With a seed, of how many kernels one is assembled, and of how many of tiles, which take some seconds.
const PARTS: u64 = 8;
const TILE_PARTS: u64 = 16;
/// Elements that a call has at least where there is one with so many, so that more than one thread has work.
const ENOUGH: usize = 64;

/// Of its halves some are in registers beyond the 128th, where RDNA's instructions have the upper halves of others.
const MANY_REGISTERS: &str = "of f16, fp8 None, bias true, 2/1 x 5 x 7 x 8";

/// What a chip has, as tables of variants ask; few compute units, so that small calls have several blocks too.
fn resources(chip: Chip) -> Resources {
    Resources { compute_units: 4, shared_bytes: chip.shared_bytes() as u32, kind: Kind::Gpu, cluster: 1 }
}

/// The launches of a case; `None` where a chip has not the shared memory for any variant.
fn call(case: &Case, chip: Chip) -> Option<Call> {
    match case.function.call(&resources(chip)) {
        Err(CallError::NoRoom { .. }) => None,
        call => Some(call.unwrap()),
    }
}

#[test]
fn llvm_takes_the_kernel_library() {
    let Some(assembler) = assembler() else { return };
    let (mut taken, mut failures) = (0, String::new());
    let cases = all();
    for chip in chips(&Chip::ALL) {
        let mut seen = HashSet::new();
        for case in cases.iter().filter(|case| wanted("AMDGCN_CASE", &case.name)) {
            let Some(call) = call(case, chip) else { continue };
            for step in call.launches {
                let kernel = step.entry.kernel(GuestAddr(0)).unwrap();
                let name = kernel.name().to_owned();
                let parts = if kernel.tile().is_some() { TILE_PARTS } else { PARTS };
                if !seen.insert(name.clone()) || !sweep::part(&name, parts) {
                    continue;
                }
                let module = validate(Module::from(kernel), Trust::Guest).unwrap();
                let assembled = compile(&module, &target(chip))
                    .map_err(|rejected| rejected.to_string())
                    .and_then(|artifact| {
                        assembler.assemble(&artifact.code, chip.name()).map_err(|error| error.to_string())
                    });
                match assembled {
                    Ok(_) => taken += 1,
                    Err(error) => failures += &format!("{name} for {chip}: {error}\n"),
                }
            }
        }
    }
    println!("{taken} kernels were assembled");
    assert!(failures.is_empty(), "{failures}");
}

/// A small case of each function on each kind of element: of those whose names differ in numbers alone.
fn small(cases: Vec<Case>) -> Vec<Case> {
    let mut smallest: BTreeMap<String, Case> = BTreeMap::new();
    let size = |case: &Case| {
        let elements = case.buffers.iter().map(|tensor| tensor.len()).sum::<usize>();
        (elements < ENOUGH, elements)
    };
    for case in cases {
        let key: String = case.name.chars().filter(|letter| !letter.is_ascii_digit()).collect();
        match smallest.get(&key) {
            Some(other) if size(other) <= size(&case) => {}
            _ => drop(smallest.insert(key, case)),
        }
    }
    smallest.into_values().filter(|case| wanted("AMDGCN_CASE", &case.name)).collect()
}

#[test]
fn the_kernel_library_computes_emulated_what_it_should() {
    let Some(mut emulation) = Emulation::start() else { return };
    let (mut ran, mut failures) = (0, String::new());
    let cases = small(all());
    for chip in chips(&EMULATED) {
        for case in cases.iter().filter(|case| call(case, chip).is_some()) {
            let (begin, mut left_out) = (Instant::now(), false);
            let few = case.name.contains("of bf16, ") && !case.name.contains("strided")
                || case.name.contains(MANY_REGISTERS);
            let wanted = few || std::env::var_os("AMDGCN_CASE").is_some();
            let checked = case.check(&resources(chip), Trust::Guest, &mut |module, launch, strides| {
                if !wanted && module.kernels().iter().any(|kernel| kernel.tile().is_some()) {
                    left_out = true;
                    return Err("left out".into());
                }
                let artifact = compile(module, &target(chip)).map_err(|rejected| rejected.to_string())?;
                match emulation.run(&artifact, chip, launch, strides, FUEL)? {
                    0 => Ok(()),
                    stop => Err(format!("stopped with {stop:#x}")),
                }
            });
            println!("{} on {chip}: {:.1} s", case.name, begin.elapsed().as_secs_f64());
            match checked {
                Ok(()) => ran += 1,
                Err(_) if left_out => {}
                Err(error) => {
                    println!("{error}");
                    failures += &format!("{error}, on {chip}\n");
                }
            }
        }
    }
    println!("{ran} calls ran");
    assert!(failures.is_empty(), "{failures}");
}
