//! Steps over named arrays.

use vm_ir::Scalar;
use vm_kernels::call::Function;

/// Arrays of a device's memory, which steps name by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The arrays.
    pub arrays: Vec<Array>,
}

/// An array; zeros at first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// Its name.
    pub name: String,
    /// What it holds.
    pub element: Scalar,
    /// Its elements.
    pub len: u64,
}

/// A part of an array, from an element on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The array's number.
    pub array: usize,
    /// The element.
    pub first: u64,
}

impl Part {
    /// What begins so many elements behind it.
    pub fn at(self, offset: u64) -> Part {
        Part { first: self.first + offset, ..self }
    }
}

impl Memory {
    /// A new array.
    pub fn array(&mut self, name: impl Into<String>, element: Scalar, extents: &[u64]) -> Part {
        self.arrays.push(Array { name: name.into(), element, len: extents.iter().product() });
        Part { array: self.arrays.len() - 1, first: 0 }
    }

    /// That a step has a part for each buffer, of as many elements and of its type.
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(&self, step: &Step) -> Result<(), String> {
        let buffers = step.function.buffers();
        if buffers.len() != step.parts.len() {
            return Err(format!("{} buffers given, {} wanted", step.parts.len(), buffers.len()));
        }
        for (buffer, part) in buffers.iter().zip(&step.parts) {
            let name = buffer.name;
            let Some(array) = self.arrays.get(part.array) else {
                return Err(format!("{name}: there is no array {}", part.array));
            };
            if array.element != buffer.element {
                return Err(format!("{name} is of {}, {} of {}", buffer.element, array.name, array.element));
            }
            let end = buffer.len().and_then(|len| len.checked_add(part.first));
            if end.is_none_or(|end| end > array.len) {
                return Err(format!("{name} ends behind {}, which has {} elements", array.name, array.len));
            }
        }
        Ok(())
    }

    /// Bytes of all arrays.
    pub fn bytes(&self) -> u64 {
        self.arrays.iter().map(|array| array.len * u64::from(array.element.bytes())).sum()
    }
}

/// A function of the library, and what its buffers are, in its order.
#[derive(Debug)]
pub struct Step {
    /// The function.
    pub function: Box<dyn Function>,
    /// Its buffers.
    pub parts: Vec<Part>,
}

/// Steps, one after the other.
#[derive(Debug, Default)]
pub struct Steps(pub Vec<Step>);

impl Steps {
    /// One more.
    pub fn call(&mut self, function: impl Function + 'static, parts: impl Into<Vec<Part>>) {
        self.0.push(Step { function: Box::new(function), parts: parts.into() });
    }
}
