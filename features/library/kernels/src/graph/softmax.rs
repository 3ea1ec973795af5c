//! Softmax and its gradient.

use vm_ir::view::Access;

use super::{Draft, Drawn};
use crate::call::Function as _;
use crate::softmax::{Softmax, SoftmaxBackward};

/// Softmax of rows, or its logarithm.
pub(crate) fn forward(of: &Softmax) -> Drawn {
    let mut buffers = of.buffers();
    // It is read only where it has been written.
    buffers[1].access = Access::Write;
    let mut g = Draft::of("softmax", buffers)?;
    let x = g.float("x")?;
    let y = if of.log { g.log_softmax(x, 1)? } else { g.softmax(x, 1)? };
    g.put("y", y)?;
    g.finish()
}

/// Its gradient.
pub(crate) fn backward(of: &SoftmaxBackward) -> Drawn {
    let mut g = Draft::of("softmax_backward", of.buffers())?;
    let (y, dy) = (g.float("y")?, g.float("dy")?);
    let dx = if of.log {
        let sum = g.sum(dy, &[1])?;
        let power = g.exp(y)?;
        let share = g.mul(power, sum)?;
        g.sub(dy, share)?
    } else {
        let products = g.mul(dy, y)?;
        let sum = g.sum(products, &[1])?;
        let less = g.sub(dy, sum)?;
        g.mul(y, less)?
    };
    g.put("dx", dx)?;
    g.finish()
}
