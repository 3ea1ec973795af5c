//! What was written, and how it is put back.

use super::{Cause, TuningError};
use crate::PciAddress;

/// Steps that were done, in order.
#[derive(Default)]
pub(super) struct Undo<'a>(Vec<Step<'a>>);

struct Step<'a> {
    /// What is so once it is undone, as in `its fan is driven by temperature again`.
    back: String,
    undo: Box<dyn FnOnce() -> Result<(), Cause> + 'a>,
}

impl<'a> Undo<'a> {
    /// Notes how what was just done is undone. An empty `back` is not worth a word.
    pub(super) fn push(&mut self, back: impl Into<String>, undo: impl FnOnce() -> Result<(), Cause> + 'a) {
        self.0.push(Step { back: back.into(), undo: Box::new(undo) });
    }

    /// Passes on how the steps went; where they failed, undoes them in reverse and says what came of that. Past a deadline nothing
    /// more is asked of the driver.
    pub(super) fn finish(
        self,
        address: PciAddress,
        what: impl Into<String>,
        result: Result<(), Cause>,
    ) -> Result<(), TuningError> {
        let Err(cause) = result else { return Ok(()) };
        let after = if matches!(cause, Cause::NoAnswer(_)) { self.left() } else { self.all() };
        tracing::info!(%address, "{cause}; {after}");
        Err(TuningError::Failed { address, what: what.into(), cause: cause.into(), after })
    }

    fn left(self) -> String {
        match self.0.is_empty() {
            true => "nothing else was changed".into(),
            false => "what was set before that stays set".into(),
        }
    }

    fn all(self) -> String {
        if self.0.is_empty() {
            return "nothing was changed".into();
        }
        let mut said = Vec::new();
        for Step { back, undo } in self.0.into_iter().rev() {
            match undo() {
                Ok(()) if back.is_empty() => {}
                Ok(()) => said.push(back),
                Err(cause) if back.is_empty() => {
                    said.push(format!("what was begun could not be undone: {cause}"))
                }
                Err(cause) => said.push(format!("it was NOT put back (wanted: {back}): {cause}")),
            }
        }
        if said.is_empty() { "all is as it was before".into() } else { said.join("; ") }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_was_done_is_undone_in_reverse_but_not_by_a_driver_that_hangs() {
        let address: PciAddress = "03:00.0".parse().expect("an address");
        let refused = || Cause::Refused { by: "it".into(), reason: "no".into(), remedy: String::new() };
        let check = |cause: Option<Cause>, fails: bool, order: &[u8], after: Option<&str>| {
            let done = RefCell::new(Vec::new());
            let step = |number: u8, result: Result<(), Cause>| {
                let done = &done;
                move || {
                    done.borrow_mut().push(number);
                    result
                }
            };
            let mut undo = Undo::default();
            undo.push("one is back", step(1, Ok(())));
            undo.push("", step(2, Ok(())));
            undo.push("three is back", step(3, if fails { Err(refused()) } else { Ok(()) }));
            let result = undo.finish(address, "do it", cause.map_or(Ok(()), Err));
            assert_eq!(*done.borrow(), order);
            let found = match result {
                Ok(()) => None,
                Err(TuningError::Failed { after, .. }) => Some(after),
                Err(error) => panic!("{error}"),
            };
            assert_eq!(found.as_deref(), after);
        };
        check(None, false, &[], None);
        check(Some(refused()), false, &[3, 2, 1], Some("three is back; one is back"));
        let left = "it was NOT put back (wanted: three is back): it: no; one is back";
        check(Some(refused()), true, &[3, 2, 1], Some(left));
        let late = Cause::NoAnswer(Duration::from_secs(1));
        check(Some(late), false, &[], Some("what was set before that stays set"));
    }
}
