//! Modules of one kernel that are changed until they are others, and launches for what comes of it.

use super::Mutator;
use crate::binary::{Lines, decode, encode};
use crate::interp::{Argument, Launch, Tensor};
use crate::module::{Kernel, Module, ParamKind};
use crate::view::{Dim, ViewType};
use crate::{Trust, text, validate};
use std::collections::{HashMap, HashSet};

/// The most bytes of a tensor.
const BYTES: u64 = 1 << 20;

/// What is changed, in the binary form and in text.
#[derive(Clone, Debug, Default)]
pub struct Modules {
    binaries: Vec<Vec<u8>>,
    texts: Vec<Vec<u8>>,
    /// Those in it that are valid as they are.
    whole: HashSet<Vec<u8>>,
}

impl Modules {
    /// Takes each kernel by itself, so that what is changed is what runs.
    pub fn take(&mut self, module: &Module) {
        for kernel in module.kernels() {
            let one = Module::new(vec![kernel.clone()]);
            let binary = encode(&one, Lines::Strip);
            self.whole.insert(binary.clone());
            self.binaries.push(binary);
            if let Ok(valid) = validate(one, Trust::Guest) {
                self.texts.push(text::print(&valid).into_bytes());
            }
        }
    }

    /// Takes a text; one that is no module may become one by a change.
    pub fn take_text(&mut self, source: &str) {
        match text::parse(source) {
            Ok(module) => self.take(&module),
            Err(_) => self.texts.push(source.as_bytes().to_vec()),
        }
    }

    /// One of them, changed, as a module if it is one, and another than before.
    pub fn changed(&self, mutator: &mut Mutator) -> Option<Module> {
        let module = self.change(mutator)?;
        (!self.whole.contains(&encode(&module, Lines::Strip))).then_some(module)
    }

    fn change(&self, mutator: &mut Mutator) -> Option<Module> {
        if mutator.below(2) == 0 {
            let mut bytes = self.binaries.get(mutator.below(self.binaries.len()))?.clone();
            let other = &self.binaries[mutator.below(self.binaries.len())];
            mutator.binary(&mut bytes, other);
            decode(&bytes).ok()
        } else {
            let mut bytes = self.texts.get(mutator.below(self.texts.len()))?.clone();
            let other = &self.texts[mutator.below(self.texts.len())];
            mutator.text(&mut bytes, other);
            text::parse(std::str::from_utf8(&bytes).ok()?).ok()
        }
    }
}

/// A tensor for a view, if one of few bytes fits it. `named` are the extents that have names, by those.
fn tensor<'k>(
    view: &'k ViewType,
    named: &mut HashMap<&'k str, u64>,
    mutator: &mut Mutator,
) -> Option<Tensor> {
    let bytes = u64::from(view.element.bytes());
    let last = view.dims.len().saturating_sub(1);
    let extents: Vec<u64> = view
        .dims
        .iter()
        .enumerate()
        .map(|(place, dim)| match *dim {
            Dim::Fixed(extent) => extent,
            Dim::Any { multiple } => {
                // Rows begin where the view says.
                let rows = place == last && last > 0;
                let step = u64::from(multiple) * if rows { u64::from(view.align).div_ceil(bytes) } else { 1 };
                let wanted = [0u64, 1, 2, 5, 8, 33, 64, 100][mutator.below(8)];
                let extent = wanted.next_multiple_of(step);
                let name = view.names.get(place).and_then(Option::as_deref);
                name.map_or(extent, |name| *named.entry(name).or_insert(extent))
            }
        })
        .collect();
    extents.iter().try_fold(bytes, |sum, extent| sum.checked_mul(*extent)).filter(|sum| *sum <= BYTES)?;
    let mut tensor = Tensor::zeros(view.element, &extents);
    match mutator.below(3) {
        0 => {}
        // Small numbers, which are good indices.
        1 => (0..tensor.len()).for_each(|at| tensor.set_bits(at, mutator.below(9) as u64)),
        _ => tensor.bytes.iter_mut().for_each(|byte| *byte = mutator.number() as u8),
    }
    Some(tensor)
}

/// A launch of a kernel with arguments as kernels often meet them, small indices among them, if one of little memory fits it.
pub fn launch(kernel: &Kernel, mutator: &mut Mutator) -> Option<Launch> {
    let (mut arguments, mut named) = (Vec::new(), HashMap::new());
    for param in kernel.params() {
        arguments.push(match &param.kind {
            ParamKind::View(view) => Argument::Tensor(tensor(view, &mut named, mutator)?),
            ParamKind::Scalar { value, range } => {
                let scalar = kernel.type_of(*value).scalar();
                let number = match mutator.below(4) {
                    0 => mutator.number(),
                    1 => u64::MAX - mutator.below(3) as u64,
                    _ => mutator.below(100) as u64,
                };
                let within = |(least, greatest): (i64, i64)| (number as i64).clamp(least, greatest) as u64;
                Argument::Bits(range.map_or(number, within) & scalar.mask())
            }
        });
    }
    let grid = [kernel.cluster().checked_mul(1 + mutator.below(2) as u32)?, 1 + mutator.below(2) as u32, 1];
    let launch = Launch { kernel: kernel.name().to_owned(), grid, arguments };
    launch.check(kernel).is_ok().then_some(launch)
}
