//! How something ends each time, as it was said beforehand.

use std::collections::VecDeque;

use super::Times;

/// How something ends, in turn: each so many times, the last one maybe always.
#[derive(Clone, Debug)]
pub(super) struct Outcomes<T>(VecDeque<(T, Times)>);

impl<T> Default for Outcomes<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T: Copy> Outcomes<T> {
    /// Has this come after what was said before.
    pub(super) fn push(&mut self, outcome: T, times: Times) {
        // Nothing comes after what is always so.
        if self.0.back().is_some_and(|(_, times)| times.is_none()) {
            self.0.pop_back();
        }
        self.0.push_back((outcome, times));
    }

    /// How it ends this time; `None` where nothing was said.
    pub(super) fn take(&mut self) -> Option<T> {
        let (outcome, times) = self.0.front_mut()?;
        let outcome = *outcome;
        if let Some(left) = times {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.0.pop_front();
            }
        }
        Some(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was said, and what comes of it in turn.
    fn check(said: &[(char, Times)], wanted: &str) {
        let mut outcomes = Outcomes::default();
        said.iter().for_each(|(outcome, times)| outcomes.push(*outcome, *times));
        let came: String = (0..6).map(|_| outcomes.take().unwrap_or('-')).collect();
        assert_eq!(came, wanted, "{said:?}");
    }

    #[test]
    fn what_was_said_comes_in_turn() {
        check(&[], "------");
        check(&[('a', Some(2))], "aa----");
        check(&[('a', Some(2)), ('b', Some(1)), ('c', None)], "aabccc");
        check(&[('a', None), ('b', Some(1))], "b-----");
        check(&[('a', Some(1)), ('b', None), ('c', None)], "accccc");
    }
}
