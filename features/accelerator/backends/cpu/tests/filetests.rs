//! Every run of `vm-ir/filetests/run`, `surface` and `tile`, and of the bench's own kernel, on this machine.

mod common;

use common::Machine;
use std::path::Path;
use vm_ir::filetest::{Ending, cases};
use vm_ir::{Trust, text, validate};

/// Fuel of each thread: more than any of the files needs, and few enough for those that never end.
const FUEL: u64 = 100_000;

#[test]
fn every_file() {
    let machines = Machine::all();
    let folders = ["run", "surface", "tile"]
        .map(|name| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../vm-ir/filetests").join(name));
    let (mut ran, mut failures) = (0, String::new());
    let only = std::env::var("VM_CPU_FILE").ok();
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/softmax_row.vir"));
    paths.sort();
    for path in paths {
        if only.as_ref().is_some_and(|only| !path.to_string_lossy().contains(only)) {
            continue;
        }
        let source = std::fs::read_to_string(&path).unwrap();
        let module = text::parse(&source).unwrap();
        for case in cases(&source, &module).unwrap() {
            let Some(ending @ (Ending::Well | Ending::OutOfFuel)) = case.ending() else { continue };
            let endless = ending == Ending::OutOfFuel;
            let valid = validate(module.clone(), case.trust).unwrap();
            for machine in &machines {
                let mut launch = case.launch.clone();
                let result = machine.run(&valid, &mut launch, FUEL);
                let file = path.file_name().unwrap().display();
                let place = format!("{file} line {} on {}", case.line, machine.name());
                match result {
                    Ok(stop) if endless => {
                        assert_eq!(stop, vm_jit::Guard::OUT_OF_FUEL, "{place}");
                        assert_eq!(case.trust, Trust::Guest);
                    }
                    Ok(0) => {
                        if let Err(failure) = case.check(&launch.arguments) {
                            failures += &format!("{place}: {failure}\n");
                        }
                    }
                    Ok(stop) => failures += &format!("{place}: stopped with {stop:#x}\n"),
                    Err(error) => failures += &format!("{place}: {error}\n"),
                }
                ran += 1;
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(ran > 0 && (only.is_some() || ran > 50), "{ran}");
}
