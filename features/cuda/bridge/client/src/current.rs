//! Which contexts are current to this thread, as the server's thread of it has them.

use std::cell::Cell;

/// As many as are remembered: a program that pushes more has forgotten to pop.
const MOST: usize = 32;

thread_local! {
    // It has nothing to drop, so it is there as long as the thread is: libraries make calls when their own data of a thread ends.
    static STACK: Cell<([u64; MOST], usize)> = const { Cell::new(([0; MOST], 0)) };
}

/// The current context; 0 where there is none.
pub(crate) fn get() -> u64 {
    let (contexts, count) = STACK.get();
    if count == 0 { 0 } else { contexts[count - 1] }
}

/// One is put above the others.
pub(crate) fn push(context: u64) {
    let (mut contexts, mut count) = STACK.get();
    if count == MOST {
        // The lowest is forgotten.
        contexts.rotate_left(1);
        count -= 1;
    }
    contexts[count] = context;
    STACK.set((contexts, count + 1));
}

/// The uppermost goes.
pub(crate) fn pop() {
    let (contexts, count) = STACK.get();
    STACK.set((contexts, count.saturating_sub(1)));
}

/// The uppermost is another; none pops it.
pub(crate) fn set(context: u64) {
    pop();
    if context != 0 {
        push(context);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uppermost_is_current() {
        assert_eq!(get(), 0);
        push(1);
        push(2);
        set(3);
        assert_eq!(get(), 3);
        pop();
        assert_eq!(get(), 1);
        set(0);
        assert_eq!(get(), 0);
        (1..=40).for_each(push);
        (0..31).for_each(|_| pop());
        assert_eq!(get(), 9);
    }
}
