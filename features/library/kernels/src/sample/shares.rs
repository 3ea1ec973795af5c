//! What the k greatest of a row have of its softmax.

use crate::call::kernel_name;
use crate::row::{Layout, Powers, Precision, View, each_row, matrix};
use vm_ir::builder::{BuildError, IRBlock};
use vm_ir::view::{Access, ViewType};
use vm_ir::{GuestAddr, Kernel, Scalar};

/// A variant. Parameters: `input`, `[rows, columns]`; `values`, of which the softmax is wanted, and `weights`, `[rows, k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shares {
    /// How rows are divided: not shifted, and without clusters.
    pub layout: Layout,
    /// What all of them hold: f32, bf16 or f16.
    pub element: Scalar,
}

impl Shares {
    /// Its name, which tells it from all others.
    pub fn name(&self) -> String {
        format!("softmax_shares_{}_{}", self.element, self.layout.name())
    }

    /// The kernel.
    ///
    /// # Errors
    /// A number that no kernel can have.
    pub fn kernel(&self, guest: GuestAddr) -> Result<Kernel, BuildError> {
        let Shares { layout, element } = *self;
        let block = IRBlock::new(guest);
        let k = block.builder();
        k.name(&kernel_name(&self.name()));
        let input = matrix(k, layout, "input", element, Access::Read);
        let few = |name, access| View::of(k, name, ViewType::new(element, 2, access).named(&["rows", "k"]));
        let (values, weights) = (few("values", Access::Read), few("weights", Access::Write));
        each_row(k, layout, input, |row| {
            let Powers { max, sum, .. } = Powers::of(row.hold(&[input]), Precision::of(element), |_, _| ());
            row.share(values.place.extent(1), |rank| {
                let value = values.place.at([row.number, rank]).load().to(Scalar::F32);
                weights.place.at([row.number, rank]).store(((value - max).exp() / sum).to(element));
            });
        });
        block.kernel()
    }
}
