//! A product as a function of the library.

use super::{Auxiliary, Batch, Product, Scales};
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand};
use crate::family::{Problem, Resources, Sample};
use crate::strided::aligned;
use vm_ir::view::Access;

/// A product with its numbers. Its buffers are `a`, `b` and `c`, and those behind them that [its parameters](super) name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multiply {
    /// What is multiplied.
    pub product: Product,
    /// α, where the epilogue scales; else 1 is meant.
    pub alpha: f32,
    /// β, where the epilogue adds what was in C.
    pub beta: f32,
}

impl Function for Multiply {
    fn buffers(&self) -> Vec<Buffer> {
        let epilogue = self.product.epilogue;
        let c = if epilogue.plus { Access::ReadWrite } else { Access::Write };
        let mut names = vec![("a", Access::Read), ("b", Access::Read), ("c", c)];
        if epilogue.scales != Scales::None {
            names.extend([("a_scale", Access::Read), ("b_scale", Access::Read)]);
        }
        names.extend(epilogue.bias.then_some(("bias", Access::Read)));
        names.extend(match epilogue.aux {
            Auxiliary::None => None,
            Auxiliary::Store => Some(("aux", Access::Write)),
            Auxiliary::Gradient => Some(("aux", Access::Read)),
        });
        names.extend((self.product.batch == Batch::Grouped).then_some(("offsets", Access::Read)));
        let views = self.product.arguments().into_iter().filter_map(|sample| match sample {
            Sample::Random { element, extents } => Some((element, extents)),
            Sample::Values(tensor) => Some((tensor.element, tensor.extents)),
            Sample::Number(..) => None,
        });
        let buffers = names.into_iter().zip(views);
        buffers
            .map(|((name, access), (element, extents))| Buffer::new(name, element, &extents, access))
            .collect()
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        let Product { m, n, matrices, epilogue, .. } = self.product;
        if [m, n, matrices].contains(&0) {
            return Ok(Call::default());
        }
        let room = CallError::NoRoom { function: "gemm", shared_bytes: resources.shared_bytes };
        let variant = self.product.variants(resources).into_iter().next().ok_or(room)?;
        let mut numbers =
            epilogue.scaled.then_some(self.alpha).into_iter().chain(epilogue.plus.then_some(self.beta));
        let mut operands = Vec::new();
        let mut buffers = self.buffers().into_iter().enumerate();
        // The numbers stand behind C.
        for (index, buffer) in buffers.by_ref().take(3) {
            operands.push(Operand::whole(index, buffer.element, &buffer.extents));
        }
        operands.extend(numbers.by_ref().map(Operand::f32));
        operands
            .extend(buffers.map(|(index, buffer)| Operand::whole(index, buffer.element, &buffer.extents)));
        let grid = self.product.grid(&variant, resources);
        Ok(Call { launches: vec![Launch { entry: Entry::Gemm(variant), grid, operands }], workspace: 0 })
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        // Rows begin at multiples of 16 bytes, or anywhere.
        let as_c = |buffer: &&Buffer| ["a", "b", "c", "aux"].contains(&buffer.name);
        let matrices: Vec<Buffer> = buffers.iter().filter(as_c).cloned().collect();
        let align = if aligned(16, &matrices) == 16 { self.product.align } else { 1 };
        Multiply { product: Product { align, ..self.product }, ..*self }.call(resources)
    }
}
