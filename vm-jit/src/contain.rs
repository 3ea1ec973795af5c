//! The boundary behind which everything is done with a guest's module: a panic there is the kernel's error.
//!
//! What a panic left half-done is never used again: all that work is done on belongs to the call.

use crate::reject::{Reject, RejectKind, Rejected};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use vm_ir::{GuestAddr, Kernel, Module};

thread_local! {
    /// The number of the kernel that this thread is at.
    static AT: Cell<usize> = const { Cell::new(0) };
    /// Its name.
    #[cfg(feature = "faults")]
    static NAME: std::cell::RefCell<String> = const { std::cell::RefCell::new(String::new()) };
}

/// The name of the kernel that this thread is at, by which a fault may be asked for.
#[cfg(feature = "faults")]
pub(crate) fn name() -> String {
    NAME.with_borrow(String::clone)
}

/// What is done with a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The target's table is asked.
    Judge,
    /// It is rewritten.
    Legalise,
    /// It is made code of.
    Write,
}

/// The kernels of a module, each of which is named if the work on it panics.
pub(crate) fn each(module: &Module, phase: Phase) -> impl Iterator<Item = &Kernel> {
    module.kernels().iter().enumerate().map(move |(number, kernel)| {
        AT.set(number);
        fault(kernel, phase);
        kernel
    })
}

/// Does work on a module.
pub(crate) fn contained<T>(
    module: &Module,
    work: impl FnOnce() -> Result<T, Rejected>,
) -> Result<T, Rejected> {
    AT.set(0);
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        let kind = RejectKind::Generator { what: format!("it panicked: {text}") };
        let kernel = module.kernels().get(AT.get());
        let (name, guest, line) = kernel
            .map_or(("", GuestAddr(0), 0), |kernel| (kernel.name(), kernel.guest_address(), kernel.line().0));
        Err(Rejected(vec![Reject { kernel: name.to_owned(), guest, line, kind }]))
    })
}

/// Panics at a kernel whose name asks for it: `panics_in_legalise`.
#[cfg(feature = "faults")]
fn fault(kernel: &Kernel, phase: Phase) {
    NAME.set(kernel.name().to_owned());
    let asked = format!("{phase:?}").to_lowercase();
    assert!(kernel.name().strip_prefix("panics_in_") != Some(&asked), "planted to {asked}");
}

#[cfg(not(feature = "faults"))]
fn fault(_: &Kernel, _: Phase) {}
