//! `; run:` directives: how a `.vir` file says how its kernels are to be run and what must come out.
//!
//! ```text
//! ; run: @silu grid(4)
//! ;   @x = [1000] uniform(-8, 8)
//! ;   @y = [1000] fill(0)
//! ;   expect @y = reference within 2 ulps
//! ```
//!
//! `; run: @kernel grid(x, y, z)`, with `trusted` behind it for a run as the host's own, begins a case. The
//! comments behind it, one for each parameter, give the arguments: a number for a scalar; for a view its
//! extents in brackets and then its elements as literals or from a generator:
//!
//! | generator | elements |
//! | --- | --- |
//! | `fill(a)` | all `a` |
//! | `iota(a, b)` | `a`, `a + b`, `a + 2b` … |
//! | `uniform(a, b)` | random from `a` to `b`, the same on every machine, others in every argument |
//! | `integers(a, b)` | random integers from `a` to `b`, both included |
//!
//! `expect @view = …` gives what must come out: literals, a generator, or `reference`, which is
//! [`reference()`] for the kernel's name. Behind it `within 1e-5` (times the greater of 1 and the expected
//! magnitude) or `within 2 ulps`; else it must be exact. `expect error TEXT` wants a run that ends in an
//! error whose message holds the text.

mod compare;
mod directive;
mod ops;
mod reference;

pub use compare::{Mismatch, Tolerance, compare};
pub use directive::{Case, DirectiveError, Expectation, Wanted, cases};
pub use ops::{COUNT, Random, is_on_values, op_kernel, op_launch, op_tolerance};
pub use reference::reference;

use crate::interp::{Argument, Limits, run};
use crate::valid::{Trust, validate};

/// Steps that the interpreter gives a case. A file is a test, so it is small.
pub const FUEL: u64 = 2_000_000;

/// A case that failed, or a file that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The file's directives are wrong.
    #[error(transparent)]
    Directive(#[from] DirectiveError),
    /// The file is no valid module, the run ended in an error, or it should have and did not.
    #[error("line {line}: {what}")]
    Run {
        /// The line of the directive; 0 for the whole file.
        line: u32,
        /// What went wrong.
        what: String,
    },
    /// A view came out wrong.
    #[error("line {line}: @{view}: {mismatch}")]
    Output {
        /// The line of the expectation.
        line: u32,
        /// The view.
        view: String,
        /// How it is wrong.
        mismatch: Mismatch,
    },
}

/// How a case ends where compiled code runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Well, and [`Case::check`] says whether with the right results.
    Well,
    /// Without fuel, as it would never end by itself.
    OutOfFuel,
    /// Before it begins: whoever launches refuses the arguments.
    Refused,
}

impl Case {
    /// How it ends where compiled code runs it; `None` for what the interpreter alone sees: races, and accesses out of bounds
    /// of the host's own kernels.
    pub fn ending(&self) -> Option<Ending> {
        match self.error.as_deref() {
            None => Some(Ending::Well),
            Some("out of fuel") => Some(Ending::OutOfFuel),
            Some(error) if error.starts_with("argument ") || error.starts_with("the extents called ") => {
                Some(Ending::Refused)
            }
            Some(_) => None,
        }
    }

    /// Compares what came out of a run, by whatever ran it, with what the case expects.
    ///
    /// # Errors
    ///
    /// The first expectation that is not met.
    pub fn check(&self, outputs: &[Argument]) -> Result<(), Failure> {
        let fail = |line, what: &str| Failure::Run { line, what: what.to_owned() };
        for expectation in &self.expectations {
            let line = expectation.line;
            let got = outputs.get(expectation.parameter).and_then(Argument::tensor);
            let got = got.ok_or_else(|| fail(line, "the expectation is not of a view"))?;
            let wanted = match &expectation.wanted {
                Wanted::Tensor(tensor) => tensor.clone(),
                Wanted::Reference => reference(&self.launch.kernel, &self.launch)
                    .and_then(|all| all.into_iter().find(|(index, _)| *index == expectation.parameter))
                    .map(|(_, tensor)| tensor)
                    .ok_or_else(|| fail(line, "there is no reference for this kernel and view"))?,
            };
            compare(got, &wanted, expectation.tolerance).map_err(|mismatch| Failure::Output {
                line,
                view: expectation.name.clone(),
                mismatch,
            })?;
        }
        Ok(())
    }
}

/// Runs every case of a file on the interpreter and checks what comes out. Gives the number of cases.
///
/// # Errors
///
/// The first case that fails.
pub fn run_file(text: &str) -> Result<usize, Failure> {
    let whole = |what: String| Failure::Run { line: 0, what };
    let module = crate::text::parse(text).map_err(|e| whole(e.render(text)))?;
    let cases = cases(text, &module)?;
    for trust in [Trust::Guest, Trust::Trusted] {
        if !cases.iter().any(|c| c.trust == trust) {
            continue;
        }
        let valid = validate(module.clone(), trust).map_err(|e| whole(e.render(text)))?;
        for case in cases.iter().filter(|c| c.trust == trust) {
            let mut launch = case.launch.clone();
            let result = run(&valid, &mut launch, &Limits { fuel: FUEL, ..Limits::default() });
            match (result, &case.error) {
                (Ok(_), None) => case.check(&launch.arguments)?,
                (Err(error), Some(text)) if error.to_string().contains(text.as_str()) => {}
                (Err(error), _) => return Err(Failure::Run { line: case.line, what: error.render(text) }),
                (Ok(_), Some(text)) => {
                    let what = format!("it ended well; an error with {text:?} was expected");
                    return Err(Failure::Run { line: case.line, what });
                }
            }
        }
    }
    Ok(cases.len())
}
