//! Every function of the table on the CPU: the cases of the kernel library, arguments that are refused, and forms that agree.

use std::collections::BTreeSet;

use vm_kernels::cases::all;
use vmkernels::checks::{Caller, SHAPES, agree, check_case, refused, run};
use vmkernels::sys::by_name::{Entry, OnCpu};

/// The functions, without types and forms.
fn functions() -> BTreeSet<&'static str> {
    Entry::all().map(Entry::function).collect()
}

#[test]
fn definitions() {
    let mut cpu = OnCpu::new().unwrap();
    let (mut called, mut count) = (BTreeSet::new(), 0);
    for case in all() {
        for aligned in [true, false] {
            if let Some(name) = check_case(&mut cpu, &case, aligned).unwrap() {
                called.insert(Entry::all().find(|entry| entry.name == name).unwrap().function());
                count += 1;
            }
        }
    }
    assert_eq!(functions().len(), 36);
    let without: Vec<_> = functions().difference(&called).copied().collect();
    assert!(without.is_empty(), "no case calls {without:?}; {count} calls");
}

#[test]
fn what_can_not_be_is_refused() {
    let mut cpu = OnCpu::new().unwrap();
    let mut refusing = BTreeSet::new();
    for entry in Entry::all() {
        if refused(&mut cpu, entry, &[]).unwrap() > 0 {
            refusing.insert(entry.function());
        }
        // There are no streams.
        let mut words = vmkernels::checks::words(&mut cpu, entry, SHAPES[0]).unwrap();
        *words.last_mut().unwrap() = 0x40;
        let status = cpu.call(entry.name, &words).unwrap();
        assert!(
            status == -2 && cpu.last().contains("stream is 0x40"),
            "{}: {status}: {}",
            entry.name,
            cpu.last()
        );
    }
    assert_eq!(refusing, functions());
}

#[test]
fn forms_of_a_function_agree() {
    let mut cpu = OnCpu::new().unwrap();
    let mut compared = 0;
    for entry in Entry::all() {
        for shape in SHAPES {
            let Some(found) = run(&mut cpu, entry, shape).unwrap() else { continue };
            let changed = run(&mut cpu, entry, shape).unwrap().unwrap();
            agree(entry, &found, &changed).unwrap();
            let with = format!("{}_ws", entry.name);
            if let Some(form) = Entry::all().find(|other| other.name == with) {
                agree(entry, &found, &run(&mut cpu, form, shape).unwrap().unwrap()).unwrap();
                compared += 1;
            }
        }
    }
    assert!(compared > 0, "no form with _ws was compared");
}
