//! Which contexts are current to this thread, as the server's thread of it has them.

use std::cell::RefCell;

thread_local! {
    static STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

fn with<T>(act: impl FnOnce(&mut Vec<u64>) -> T) -> Option<T> {
    STACK.try_with(|stack| act(&mut stack.borrow_mut())).ok()
}

/// The current context; 0 where there is none.
pub(crate) fn get() -> u64 {
    with(|stack| stack.last().copied()).flatten().unwrap_or(0)
}

/// One is put above the others.
pub(crate) fn push(context: u64) {
    with(|stack| stack.push(context));
}

/// The uppermost goes.
pub(crate) fn pop() {
    with(|stack| stack.pop());
}

/// The uppermost is another; none pops it.
pub(crate) fn set(context: u64) {
    pop();
    if context != 0 {
        push(context);
    }
}
