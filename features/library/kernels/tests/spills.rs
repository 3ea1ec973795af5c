//! No variant that a table of products or attention has spills registers on Hopper. Assembled is what each kind of problem has first of the
//! largest tiles, as a guest's, and all that is first in a table; with a number in `SWEEP_SEED` half of the former and of a variant of every
//! third table.

#[path = "../../../../vm-jit/tests/ptxas/assembler.rs"]
#[allow(dead_code)]
mod assembler;
#[path = "common/problems.rs"]
#[allow(dead_code)]
mod problems;
#[path = "../../../../vm-jit/tests/ptxas/sweep.rs"]
mod sweep;

use problems::{EXTENTS, H200, attentions, by_registers, generations, gradients, kinds};
use std::collections::HashSet;
use vm_ir::{GuestAddr, Kernel, Module, Trust, ValidModule, validate};
use vm_kernels::family::{Problem, Variant};
use vm_kernels::gemm::Product;

/// The names of a variant and of its kernel, what makes that, and whether the table has the variant first.
type Choice = (String, Box<dyn Fn() -> Kernel>, bool);

fn choices<P: Problem>(problem: &P) -> impl Iterator<Item = Choice> + use<P> {
    let variants = problem.variants(&H200).into_iter().enumerate();
    variants.flat_map(|(place, variant)| {
        let count = variant.kernels(GuestAddr(0)).unwrap().len();
        (0..count).map(move |number| -> Choice {
            let (name, variant) = (format!("{}, {number}", variant.name()), variant.clone());
            (name, Box::new(move || variant.kernels(GuestAddr(0)).unwrap().swap_remove(number)), place == 0)
        })
    })
}

/// The choices of each kind of problem, those of the largest extents last.
fn tables() -> Vec<Vec<Choice>> {
    let of_kind = |kind: Product| {
        let problems = EXTENTS.map(|[m, n, k]| Product { m, n, k, ..kind });
        problems.iter().flat_map(choices).collect::<Vec<_>>()
    };
    let products = kinds().into_iter().chain(by_registers()).map(of_kind);
    let attentions = attentions().into_iter().map(|problem| choices(&problem).collect());
    let generations = generations().into_iter().map(|problem| choices(&problem).collect());
    let gradients = gradients().into_iter().map(|problem| choices(&problem).collect());
    products.chain(attentions).chain(generations).chain(gradients).collect()
}

fn module(choice: &Choice, trust: Trust) -> ValidModule {
    validate(Module::from(choice.1()), trust).unwrap()
}

fn check(modules: &[ValidModule]) {
    assembler::with_ptxas(|folder| {
        let all: Vec<_> = modules.iter().map(|module| ("sm_90a", "13.0", module)).collect();
        assembler::assemble_for_all(folder, "3", &all);
    });
}

#[test]
fn the_first_of_the_largest_tiles_does_not_spill() {
    let mut seen = HashSet::new();
    let mut modules = Vec::new();
    for table in tables() {
        let largest = table.iter().rev().find(|(.., first)| *first).unwrap();
        if seen.insert(largest.0.clone()) {
            modules.push(module(largest, Trust::Guest));
        }
    }
    assert!(modules.len() > 40, "{}", modules.len());
    check(&modules);
}

#[test]
fn no_variant_spills() {
    let both = [Trust::Guest, Trust::Trusted];
    let mut seen = HashSet::new();
    let mut modules = Vec::new();
    for (number, table) in tables().into_iter().enumerate() {
        let all = table.iter().flat_map(|choice| both.map(|trust| (choice, trust)));
        let taken = match sweep::seed() {
            Some(_) if !sweep::part(&format!("whether table {number}"), 3) => Vec::new(),
            Some(_) => sweep::taken(&format!("table {number}"), all),
            None => all.filter(|((.., first), trust)| *first && *trust == Trust::Guest).collect(),
        };
        for (choice, trust) in taken {
            if seen.insert((choice.0.clone(), trust)) {
                modules.push(module(choice, trust));
            }
        }
    }
    check(&modules);
}
