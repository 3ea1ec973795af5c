//! The validator.
//!
//! What it checks, each rule once, with a file for each under `filetests/validate`:
//!
//! * **The head.** Names are names and not used twice; block, views, parameters and shared arrays are
//!   sensible; shared memory is within a block's.
//! * **Form.** Every op has the operands, numbers, attributes, results, regions and place that its row says,
//!   and types that its shape admits. Counts and nesting are within [`limits`](crate::limits).
//! * **Scope.** An op sees the values defined before it in its own region and in those around it. In
//!   structured code that is dominance.
//! * **Access.** Loads from views that may be read, stores to those that may be written, atomics on both.
//! * **Convergence.** Ops that work on a whole block or warp are reached by all of its threads or by none.
//!   [`Uniformity`] says what is proved of each value, from what it depends on.
//! * **Channels.** Where a tile kernel fetches, a stage is free; where it uses or releases a stage, there is one; however
//!   the control flow goes.
//! * **Clusters.** Blocks that share the iterations of a loop, or tiles, go one way, and nothing tells whose they were.
//! * **Trust.** Some ops are for trusted modules only.
//!
//! It reads each op once, and then each value at most three times for convergence, so it is linear in the
//! module. After it, code generation does not fail on anything but what a target declares that it rejects.

mod check;
mod error;
mod head;
mod regions;
mod split;
#[cfg(test)]
mod tests;
mod tile;
mod types;
mod uniform;

pub use error::{Divergence, Rule, ValidationError, ValidationErrors};
pub use uniform::Uniformity;

use crate::limits::{Caps, MAX_KERNELS};
use crate::module::{Kernel, Module, Value};
use std::collections::HashSet;
use std::ops::Deref;

/// How far a module is trusted. The host decides; nothing in the module does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trust {
    /// It came from a guest: every access is checked, loops carry fuel, and no op may watch other tenants.
    Guest,
    /// It is the host's own: what the IR calls an error of the kernel is undefined.
    Trusted,
}

/// What validation learnt of a kernel, for those who compile or run it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFacts {
    /// How each value relates between threads, by the value's number.
    pub uniformity: Vec<Uniformity>,
    /// The same of what holds whatever a guest writes to views that its kernel only reads: what barriers are judged by.
    pub steady: Vec<Uniformity>,
    /// Bytes of shared memory, each array rounded up to 16.
    pub shared_bytes: u64,
    /// Ops in all regions.
    pub ops: usize,
    /// The deepest nesting of regions; the body alone is 1.
    pub depth: usize,
    /// Does it have a barrier of the block?
    pub block_barriers: bool,
    /// Does it have ops on whole warps?
    pub warp_ops: bool,
    /// Does it have atomics or fences?
    pub atomics: bool,
}

impl KernelFacts {
    /// How a value relates between threads.
    pub fn uniformity(&self, value: Value) -> Uniformity {
        self.uniformity.get(value.index()).copied().unwrap_or(Uniformity::Thread)
    }

    /// How a value relates between threads whatever a guest writes to views that its kernel only reads, while the kernel
    /// runs. Code that breaks where threads disagree goes by this.
    pub fn steady(&self, value: Value) -> Uniformity {
        self.steady.get(value.index()).copied().unwrap_or(Uniformity::Thread)
    }
}

/// A module that passed the validator, with what was learnt on the way. There is no other way to have one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidModule {
    module: Module,
    trust: Trust,
    facts: Vec<KernelFacts>,
}

impl ValidModule {
    /// The trust that it was validated for.
    pub fn trust(&self) -> Trust {
        self.trust
    }

    /// The kernels with their facts, in order.
    pub fn kernels_with_facts(&self) -> impl Iterator<Item = (&Kernel, &KernelFacts)> {
        self.module.kernels().iter().zip(&self.facts)
    }

    /// The kernel with this name, and its facts.
    pub fn find(&self, name: &str) -> Option<(&Kernel, &KernelFacts)> {
        self.kernels_with_facts().find(|(kernel, _)| kernel.name() == name)
    }

    /// The module without the proof.
    pub fn into_module(self) -> Module {
        self.module
    }
}

impl Deref for ValidModule {
    type Target = Module;

    fn deref(&self) -> &Module {
        &self.module
    }
}

/// Checks a module.
///
/// # Errors
///
/// The rules it breaks, the first [`MAX_ERRORS`](crate::limits::MAX_ERRORS) of each kernel.
pub fn validate(module: Module, trust: Trust) -> Result<ValidModule, ValidationErrors> {
    validate_within(module, trust, Caps::WRITTEN)
}

/// Checks a module with kernels that were [rewritten](Kernel::rewrite), which may be larger than others.
///
/// # Errors
///
/// As those of [`validate`].
pub fn validate_rewritten(module: Module, trust: Trust) -> Result<ValidModule, ValidationErrors> {
    validate_within(module, trust, Caps::REWRITTEN)
}

fn validate_within(module: Module, trust: Trust, caps: Caps) -> Result<ValidModule, ValidationErrors> {
    let mut errors = Vec::new();
    let mut facts = Vec::with_capacity(module.kernels.len());
    let mut names = HashSet::new();
    for (i, kernel) in module.kernels.iter().enumerate() {
        let head_error = |kind| ValidationError {
            kernel: kernel.name.to_string(),
            guest: kernel.guest,
            line: kernel.line.0,
            op: None,
            kind,
        };
        if i == MAX_KERNELS {
            let found = module.kernels.len() as u64;
            errors.push(head_error(Rule::TooMany { what: "kernels", found, limit: MAX_KERNELS as u64 }));
            break;
        }
        if !names.insert(&kernel.name) {
            errors.push(head_error(Rule::DuplicateName(format!("@{}", kernel.name))));
        }
        match validate_kernel(kernel, trust, caps) {
            Ok(kernel_facts) => facts.push(kernel_facts),
            Err(mut kernel_errors) => errors.append(&mut kernel_errors),
        }
    }
    if errors.is_empty() { Ok(ValidModule { module, trust, facts }) } else { Err(ValidationErrors(errors)) }
}

/// Checks one kernel. Convergence is looked at only when the rest is right, since it builds on it.
fn validate_kernel(kernel: &Kernel, trust: Trust, caps: Caps) -> Result<KernelFacts, Vec<ValidationError>> {
    let mut checker = check::Checker::new(kernel, trust, caps);
    checker.head();
    checker.body();
    if checker.errors.is_empty() {
        checker.balance();
        checker.split();
    }
    if !checker.errors.is_empty() {
        return Err(checker.errors);
    }
    let uniform::Found { uniformity, steady, errors } = uniform::analyse(kernel, trust);
    if !errors.is_empty() {
        return Err(errors);
    }
    debug_assert!(checker.facts.ops <= caps.ops);
    Ok(KernelFacts { uniformity, steady, ..checker.facts })
}
