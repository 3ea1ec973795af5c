//! What is done to each element, of arrays with strided rows.

use super::Rule;
use crate::call::kernel_name;
use crate::row::{Layout, View, each_row, matrix};
use vm_ir::builder::{BuildError, IRBlock};
use vm_ir::{GuestAddr, Kernel};

/// A kernel that does to each element of matrices what a rule says that has no numbers, by rows. Its parameters: the views of the
/// [rule](Rule::ports), `[rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlatRows {
    /// What is done.
    pub rule: Rule,
    /// How rows are divided.
    pub layout: Layout,
}

impl FlatRows {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        format!("{}_rows_{}", self.rule.name(), self.layout.name())
    }

    /// Its kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let FlatRows { rule, layout } = *self;
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&kernel_name(&self.name()));
        let views =
            rule.ports().into_iter().map(|port| matrix(k, layout, port.name, port.element, port.access));
        let views: Vec<View<'_>> = views.collect();
        let (written, read): (Vec<_>, Vec<_>) = views.iter().copied().partition(|view| view.written);
        if let Some(first) = views.first() {
            each_row(k, layout, *first, |row| {
                row.hold(&read).each(|piece| {
                    let values: Vec<_> = (0..read.len()).map(|at| piece[at]).collect();
                    for (view, value) in written.iter().zip(rule.compute(&values, &[])) {
                        piece.store(*view, value);
                    }
                });
            });
        }
        block.kernel()
    }
}
