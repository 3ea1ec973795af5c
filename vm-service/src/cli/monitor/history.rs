//! What a number was lately.

use std::collections::VecDeque;

/// Most numbers that are kept; a screen has fewer columns.
const MOST: usize = 512;

/// What a number was lately, the last one last; `None` where it was not known.
#[derive(Debug, Default)]
pub(crate) struct History(VecDeque<Option<u64>>);

impl History {
    /// Adds what it is now.
    pub(super) fn push(&mut self, value: Option<u64>) {
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }

    /// The last ones, as many as there are columns; before the first it was not known.
    pub(super) fn last(&self, columns: usize) -> impl Iterator<Item = Option<u64>> + '_ {
        let missing = columns.saturating_sub(self.0.len());
        let skipped = self.0.len().saturating_sub(columns);
        std::iter::repeat_n(None, missing).chain(self.0.iter().skip(skipped).copied())
    }

    /// The highest of them.
    pub(super) fn max(&self) -> u64 {
        self.0.iter().flatten().copied().max().unwrap_or(0)
    }
}
