//! The arguments of launches that are measured: random numbers, in several sets.

use std::collections::HashMap;

use vm_accel::{Accelerator, Argument, Buffer, Error, Result, Scalar, Worker};
use vm_ir::Scalar as Element;
use vm_ir::interp::Tensor;
use vm_kernels::family::Sample;

/// Random numbers that a buffer repeats. A prime, so that neither rows nor columns of a matrix are alike.
const NUMBERS: u64 = 65_521;
/// What rows begin on multiples of, in bytes, so that they can be copied as boxes.
const ALIGN: u64 = 16;
/// Sets of arguments are made until they are larger than a device's cache, or so many.
const LARGER: u64 = 192 << 20;
const SETS: u64 = 4;

/// An argument of one set.
enum Held<A: Accelerator> {
    View { buffer: Buffer<A>, extents: Vec<u64>, strides: Vec<u64> },
    Number(Scalar),
}

/// Sets of arguments.
pub(super) struct Data<A: Accelerator>(Vec<Vec<Held<A>>>);

impl<A: Accelerator> Data<A> {
    /// Allocates and fills them.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if not even one set has room; [`Error::Extents`]; the device's.
    pub(super) fn prepare(worker: &Worker<A>, samples: &[Sample]) -> Result<Self> {
        let shapes = samples.iter().map(Shape::of).collect::<Result<Vec<_>>>()?;
        let bytes = shapes.iter().fold(0u64, |sum, shape| sum.saturating_add(shape.bytes()));
        let mut numbers = HashMap::new();
        let mut sets = vec![set(worker, &shapes, &mut numbers)?];
        for _ in 1..LARGER.div_ceil(bytes.max(1)).min(SETS) {
            match set(worker, &shapes, &mut numbers) {
                Ok(more) => sets.push(more),
                Err(Error::OutOfMemory { .. } | Error::PoolLimit { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(Self(sets))
    }

    /// How many sets there are, at least one.
    pub(super) fn sets(&self) -> usize {
        self.0.len()
    }

    /// The arguments of a launch, by their places: those of the set with this number, from the first again behind the last.
    pub(super) fn arguments(&self, number: usize, places: &[usize]) -> Result<Vec<Argument<'_, A>>> {
        let set = &self.0[number % self.0.len()];
        places
            .iter()
            .map(|place| match &set[*place] {
                Held::View { buffer, extents, strides } => Ok(buffer.strided(extents, strides)?.into()),
                Held::Number(number) => Ok(Argument::Scalar(*number)),
            })
            .collect()
    }
}

/// What an argument takes.
enum Shape<'a> {
    View { element: Element, extents: &'a [u64], strides: Vec<u64>, bytes: u64, values: Option<&'a Tensor> },
    Number(Scalar),
}

impl<'a> Shape<'a> {
    fn of(sample: &'a Sample) -> Result<Self> {
        let (element, extents, values) = match sample {
            Sample::Random { element, extents } => (*element, extents.as_slice(), None),
            Sample::Values(tensor) => (tensor.element, tensor.extents.as_slice(), Some(tensor)),
            Sample::Number(bits, ty) => {
                return Ok(Shape::Number(Scalar::from_bits(*bits, ty.bytes())));
            }
        };
        let large =
            || Error::Extents { reason: format!("{extents:?} elements are more than can be addressed") };
        let size = u64::from(element.bytes());
        let (mut strides, mut bytes) = (vec![0; extents.len().saturating_sub(1)], size);
        for (dimension, &extent) in extents.iter().enumerate().rev() {
            bytes = bytes.checked_mul(extent.max(1)).ok_or_else(large)?;
            if let Some(stride) = dimension.checked_sub(1).and_then(|before| strides.get_mut(before)) {
                bytes = bytes.checked_next_multiple_of(ALIGN).ok_or_else(large)?;
                *stride = bytes;
            }
        }
        Ok(Shape::View { element, extents, strides, bytes, values })
    }

    fn bytes(&self) -> u64 {
        match self {
            Shape::View { bytes, .. } => *bytes,
            Shape::Number(_) => 0,
        }
    }
}

/// One set. `numbers` has those that were made, by type.
fn set<A: Accelerator>(
    worker: &Worker<A>,
    shapes: &[Shape<'_>],
    numbers: &mut HashMap<Element, Vec<u8>>,
) -> Result<Vec<Held<A>>> {
    let held = |(number, shape): (usize, &Shape<'_>)| {
        let (element, extents, strides, bytes, values) = match shape {
            Shape::Number(number) => return Ok(Held::Number(*number)),
            Shape::View { element, extents, strides, bytes, values } => {
                (element, extents, strides, bytes, values)
            }
        };
        let buffer = worker.allocate(*bytes)?;
        match values {
            Some(tensor) => worker.write(&buffer, &spread(tensor, strides, *bytes))?,
            None => {
                let numbers = numbers.entry(*element).or_insert_with(|| random(*element));
                // Each argument begins at another.
                let element = element.bytes() as usize;
                let first = number * 7919 % (numbers.len() / element) * element;
                fill(worker, &buffer, &[&numbers[first..], &numbers[..first]].concat())?;
            }
        }
        Ok(Held::View { buffer, extents: extents.to_vec(), strides: strides.clone() })
    };
    shapes.iter().enumerate().map(held).collect()
}

/// The bytes of a tensor with room between its rows, as strides in bytes say, of all dimensions but the last.
fn spread(tensor: &Tensor, strides: &[u64], bytes: u64) -> Vec<u8> {
    let mut spread = vec![0; bytes as usize];
    let row = tensor.extents.last().map_or(1, |&extent| extent) as usize * tensor.element.bytes() as usize;
    for (number, source) in tensor.bytes.chunks_exact(row.max(1)).enumerate() {
        let (mut index, mut at) = (number as u64, 0);
        for (extent, stride) in tensor.extents.iter().zip(strides).rev() {
            at += index % extent * stride;
            index /= extent;
        }
        spread[at as usize..][..row].copy_from_slice(source);
    }
    spread
}

/// Fills a buffer with numbers, again and again: the first by the host, the others by the device.
fn fill<A: Accelerator>(worker: &Worker<A>, buffer: &Buffer<A>, numbers: &[u8]) -> Result<()> {
    let bytes = buffer.bytes();
    let mut filled = bytes.min(numbers.len() as u64);
    worker.write(buffer.view(0, filled)?, &numbers[..filled as usize])?;
    while filled < bytes {
        let more = filled.min(bytes - filled);
        worker.copy(buffer.view(filled, more)?, buffer.view(0, more)?)?;
        filled += more;
    }
    Ok(())
}

/// Numbers from -1 to 1, the same everywhere; integers from -100 to 100.
fn random(element: Element) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let unit = (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0;
        if element.is_int() { (unit * 100.0).round() } else { unit }
    };
    Tensor::from_f64s(element, &[NUMBERS], (0..NUMBERS).map(|_| next())).bytes
}
