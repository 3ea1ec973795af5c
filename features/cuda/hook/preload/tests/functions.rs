//! The hook's kinds of functions are of the driver's functions, all of them.

use std::collections::BTreeSet;

use vm_cuda_api::FUNCTIONS;

/// Keeps the driver's library built.
use vm_cuda_fake as _;

#[test]
fn every_function_of_the_driver_has_a_kind() {
    let table = include_str!("../functions.txt");
    let lines = table.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let kinds: BTreeSet<&str> = lines.clone().filter_map(|line| line.split(' ').nth(1)).collect();
    let functions: BTreeSet<&str> = FUNCTIONS.iter().map(|function| function.name.as_str()).collect();
    assert_eq!(kinds, functions);
    for line in lines.filter(|line| line.starts_with("work ")) {
        let words: Vec<&str> = line.split(' ').collect();
        let function = FUNCTIONS.iter().find(|function| function.name == words[1]).expect("a function");
        let count: usize = words[2].parse().expect("a number");
        // Of some old forms the header tells nothing any more: they take at most as many.
        assert!(function.parameters.len() <= count, "{line}: {}", function.parameters.len());
    }
}
