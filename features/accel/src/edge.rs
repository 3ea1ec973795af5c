//! The edge to C: a status of 32 bits, and never a panic across it.

use std::cell::RefCell;

use crate::error::{Error, Result};
use crate::executor::guarded;

thread_local! {
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `f` for a C caller: 0 on success, else [`Error::code`]. A panic becomes [`Error::Panicked`]'s code.
///
/// The message of a failure is kept for [`last_error_message`] on the same thread; a success clears it.
pub fn edge(f: impl FnOnce() -> Result<()>) -> i32 {
    let result = guarded(f);
    let code = result.as_ref().err().map_or(0, Error::code);
    let message = result.err().map(|error| error.to_string());
    // A thread that is being torn down has no place left for the message.
    let _ = LAST.try_with(|last| *last.borrow_mut() = message);
    code
}

/// What the last [`edge`] on this thread failed with; `None` after a success.
pub fn last_error_message() -> Option<String> {
    LAST.try_with(|last| last.borrow().clone()).ok().flatten()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::panic_any;

    use super::*;

    /// Thrown by a panic, and panics again when it is dropped.
    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    #[test]
    fn a_c_caller_gets_a_status_whatever_happens() {
        let check = |f: fn() -> Result<()>, code: i32, message: Option<&str>| {
            assert_eq!(edge(f), code);
            let last = last_error_message();
            assert_eq!(last.is_some(), message.is_some(), "{last:?}");
            assert!(last.unwrap_or_default().contains(message.unwrap_or_default()));
        };
        check(|| Ok(()), 0, None);
        check(|| Err(Error::Cancelled), -13, Some("cancelled"));
        check(|| panic!("boom {}", 7), -15, Some("boom 7"));
        check(|| panic_any(Bomb), -15, Some("no message"));
        check(|| Ok(()), 0, None);
    }
}
