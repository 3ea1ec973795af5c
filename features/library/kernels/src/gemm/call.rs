//! A product as a function of the library.

use super::{Auxiliary, Batch, Product, Scales};
use crate::call::{Buffer, Call, CallError, Entry, Function, Launch, Operand};
use crate::family::{Kind, Problem, Resources, Sample};
use crate::graph::{self, NoGraph};
use crate::strided::aligned;
use vm_graph::ValidGraph;
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

impl Multiply {
    /// The product as one of a row, which a column and a row in memory are alike, and which of the buffers A and B are then: the transpose
    /// of a column is the transpose of B times that of A.
    fn of_row(&self, buffers: &[Buffer]) -> Option<(Product, [usize; 2])> {
        let Product { m, n, a_transposed, b_transposed, epilogue, .. } = self.product;
        let dense = |at: usize| buffers.get(at).is_some_and(|buffer| !buffer.is_strided());
        let (product, order) = if m == 1 && a_transposed && dense(0) {
            (Product { a_transposed: false, ..self.product }, [0, 1])
        } else if m > 1 && n == 1 && !epilogue.bias && (b_transposed || dense(1)) && dense(2) {
            let (a_transposed, b_transposed) = (false, !a_transposed);
            (Product { m: 1, n: m, a_transposed, b_transposed, ..self.product }, [1, 0])
        } else {
            return None;
        };
        product.is_line().then_some((product, order))
    }

    /// The launch, of buffers with these strides.
    fn launch(&self, given: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        let Product { m, n, matrices, epilogue, .. } = self.product;
        if [m, n, matrices].contains(&0) {
            return Ok(Call::default());
        }
        let of_row = self.of_row(given).filter(|_| resources.kind == Kind::Cpu);
        let (product, [a, b]) = of_row.unwrap_or((self.product, [0, 1]));
        let room = CallError::NoRoom { function: "gemm", shared_bytes: resources.shared_bytes };
        let variant = product.variants(resources).into_iter().next().ok_or(room)?;
        let [rows, columns, _] = variant.tile.map(u64::from);
        if variant.band > 0 && product.tiles(rows, columns) >= 1 << 31 {
            let what = format!("{matrices} products of {m} rows and {n} columns: fewer than 2^31 tiles");
            return Err(CallError::Unsupported { function: "gemm", what });
        }
        let grid = product.grid(&variant, resources);
        let views = Multiply { product, ..*self }.buffers();
        let view = |(index, buffer): (usize, &Buffer)| Operand::whole(index, buffer.element, &buffer.extents);
        let mut operands: Vec<Operand> = [a, b, 2].into_iter().zip(&views).map(view).collect();
        // The numbers stand behind C.
        operands.extend(epilogue.scaled.then_some(self.alpha).map(Operand::f32));
        operands.extend(epilogue.plus.then_some(self.beta).map(Operand::f32));
        operands.extend(views.iter().enumerate().skip(3).map(view));
        Ok(Call { launches: vec![Launch { entry: Entry::Gemm(variant), grid, operands }], workspace: 0 })
    }
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

    fn graph(&self) -> Result<ValidGraph, NoGraph> {
        graph::gemm::product(self)
    }

    fn call(&self, resources: &Resources) -> Result<Call, CallError> {
        self.launch(&self.buffers(), resources)
    }

    fn call_strided(&self, buffers: &[Buffer], resources: &Resources) -> Result<Call, CallError> {
        // Rows begin at multiples of 16 bytes, or anywhere.
        let as_c = |buffer: &&Buffer| ["a", "b", "c", "aux"].contains(&buffer.name);
        let matrices: Vec<Buffer> = buffers.iter().filter(as_c).cloned().collect();
        let align = if aligned(16, &matrices) == 16 { self.product.align } else { 1 };
        Multiply { product: Product { align, ..self.product }, ..*self }.launch(buffers, resources)
    }
}
