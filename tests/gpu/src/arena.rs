//! All arguments of a launch in one buffer, with canaries around each: a kernel that touches a byte that is not its
//! own is found out.

use anyhow::{Context, bail, ensure};
use vm_accel::{Argument, Buffer, Error, Kernel, Launch, Worker};
use vm_cuda::CudaAccelerator;
use vm_ir::interp::{self, Tensor};
use vm_ir::module::ParamKind;

use crate::gpu::TIMEOUT;

/// What every byte holds that no view has.
const CANARY: u8 = 0xc5;
/// Bytes of canary between views, and what views are aligned to.
const GAP: usize = 256;

/// How the rows of a tensor lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows<'a> {
    /// One behind the other.
    Packed,
    /// With canaries between them, where the tensor has more than one dimension.
    Apart,
    /// By argument: the elements from one of each dimension to the next, with canaries in what is between rows.
    Strided(&'a [Vec<u64>]),
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
struct Place {
    start: usize,
    /// Bytes of a row, which is all that lies along the last dimension.
    row: usize,
    /// The extents of the others.
    counted: Vec<u64>,
    /// Bytes from one element of a dimension to the next, but for the last dimension.
    strides: Vec<u64>,
}

impl Place {
    /// The bytes of each row in memory.
    fn rows(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let rows = if self.row == 0 { 0 } else { self.counted.iter().product() };
        (0..rows).map(|mut number: u64| {
            let places = self.counted.iter().zip(&self.strides).rev().map(|(extent, stride)| {
                let index = number % extent;
                number /= extent;
                index * stride
            });
            let start = self.start + places.sum::<u64>() as usize;
            start..start + self.row
        })
    }

    /// Where the last of its bytes ends.
    fn end(&self) -> usize {
        self.rows().map(|row| row.end).max().unwrap_or(self.start)
    }
}

/// The arguments of a launch as one stretch of memory.
pub(crate) struct Arena<'a> {
    arguments: &'a [interp::Argument],
    image: Vec<u8>,
    /// By argument: where a tensor lies.
    places: Vec<Option<Place>>,
}

impl<'a> Arena<'a> {
    /// Lays out the arguments.
    pub(crate) fn new(arguments: &'a [interp::Argument], rows: Rows<'_>) -> Self {
        let mut image = vec![CANARY; GAP];
        let places = arguments
            .iter()
            .enumerate()
            .map(|(number, argument)| {
                let tensor = argument.tensor()?;
                let width = u64::from(tensor.element.bytes());
                let (last, counted) = tensor.extents.split_last()?;
                let row = last * width;
                let strides = match rows {
                    Rows::Strided(strides) => {
                        strides[number][..counted.len()].iter().map(|stride| stride * width).collect()
                    }
                    _ => {
                        let apart = rows == Rows::Apart && !counted.is_empty();
                        let pitch = if apart { row.next_multiple_of(GAP as u64) + GAP as u64 } else { row };
                        let mut strides = vec![pitch];
                        for extent in counted.iter().skip(1).rev() {
                            strides.push(strides.last().copied().unwrap_or(0) * extent);
                        }
                        strides.truncate(counted.len());
                        strides.reverse();
                        strides
                    }
                };
                let (row, counted) = (row as usize, counted.to_vec());
                let place = Place { start: image.len(), row, counted, strides };
                image.resize(place.end().next_multiple_of(GAP) + GAP, CANARY);
                for (row, bytes) in place.rows().zip(tensor.bytes.chunks(row.max(1))) {
                    image[row].copy_from_slice(bytes);
                }
                Some(place)
            })
            .collect();
        Self { arguments, image, places }
    }

    /// Launches a kernel on them and gives what is in the tensors afterwards.
    pub(crate) fn run(
        &self,
        worker: &Worker<CudaAccelerator>,
        loaded: &Kernel<CudaAccelerator>,
        kernel: &vm_ir::Kernel,
        launch: Launch,
    ) -> anyhow::Result<Vec<interp::Argument>> {
        let (buffer, ran) = self.launch(worker, loaded, kernel, launch)?;
        ran?;
        let mut after = vec![0u8; self.image.len()];
        worker.read(&buffer, &mut after)?;
        self.results(&after)
    }

    /// The same of a kernel that may be stopped: nothing then, but the canaries are looked at.
    pub(crate) fn run_or_stop(
        &self,
        worker: &Worker<CudaAccelerator>,
        loaded: &Kernel<CudaAccelerator>,
        kernel: &vm_ir::Kernel,
        launch: Launch,
    ) -> anyhow::Result<Option<Vec<interp::Argument>>> {
        let (buffer, ran) = self.launch(worker, loaded, kernel, launch)?;
        let mut after = vec![0u8; self.image.len()];
        // The first call that comes when the launch has been stopped reports it.
        let stopped = match ran.and_then(|()| worker.synchronize(TIMEOUT)) {
            Ok(()) => false,
            Err(Error::OutOfFuel { .. } | Error::DeadlineExceeded { .. }) => true,
            Err(error) => return Err(error.into()),
        };
        worker.read(&buffer, &mut after)?;
        let results = self.results(&after)?;
        Ok((!stopped).then_some(results))
    }

    fn launch(
        &self,
        worker: &Worker<CudaAccelerator>,
        loaded: &Kernel<CudaAccelerator>,
        kernel: &vm_ir::Kernel,
        launch: Launch,
    ) -> anyhow::Result<(Buffer<CudaAccelerator>, vm_accel::Result<()>)> {
        let buffer = worker.allocate(self.image.len() as u64)?;
        worker.write(&buffer, &self.image)?;
        let mut given = Vec::with_capacity(self.arguments.len());
        for ((argument, place), parameter) in self.arguments.iter().zip(&self.places).zip(kernel.params()) {
            given.push(match (argument, place, &parameter.kind) {
                (interp::Argument::Tensor(tensor), Some(place), _) => {
                    let view = buffer.view(place.start as u64, (place.end() - place.start) as u64)?;
                    Argument::from(view.strided(&tensor.extents, &place.strides)?)
                }
                (interp::Argument::Bits(bits), _, ParamKind::Scalar { value, .. }) => {
                    let bytes = kernel.type_of(*value).scalar().bytes();
                    Argument::from(vm_accel::Scalar::from_bits(*bits, bytes))
                }
                _ => bail!("the argument for {} is of the other kind", parameter.name),
            });
        }
        let ran = worker.launch(loaded, launch, &given);
        drop(given);
        Ok((buffer, ran))
    }

    /// The tensors in an image of the memory, whose canaries are looked at.
    fn results(&self, after: &[u8]) -> anyhow::Result<Vec<interp::Argument>> {
        let mut canaries = after.to_vec();
        let mut results = Vec::with_capacity(self.arguments.len());
        for (argument, place) in self.arguments.iter().zip(&self.places) {
            let (Some(tensor), Some(place)) = (argument.tensor(), place) else {
                results.push(argument.clone());
                continue;
            };
            let mut bytes = Vec::with_capacity(tensor.bytes.len());
            for row in place.rows() {
                let row = canaries.get_mut(row).context("a tensor's bytes")?;
                bytes.extend_from_slice(row);
                // What is left are the canaries.
                row.fill(CANARY);
            }
            let (element, extents) = (tensor.element, tensor.extents.clone());
            results.push(interp::Argument::Tensor(Tensor { element, extents, bytes }));
        }
        let touched = canaries.iter().position(|&byte| byte != CANARY);
        ensure!(
            touched.is_none(),
            "byte {} of the arena, which is no view's, was touched",
            touched.unwrap_or(0)
        );
        Ok(results)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_ir::Scalar;

    #[test]
    fn a_touched_canary_is_seen() {
        let arguments = [
            interp::Argument::Tensor(Tensor::zeros(Scalar::I32, &[3])),
            interp::Argument::Bits(7),
            interp::Argument::Tensor(Tensor::zeros(Scalar::I8, &[0])),
            interp::Argument::Tensor(Tensor::zeros(Scalar::I8, &[4, 0])),
            interp::Argument::Tensor(Tensor::from_f64s(Scalar::F64, &[2, 3, 4], (0..24).map(f64::from))),
        ];
        // Of the last one two matrices, side by side.
        let strides = [vec![1], vec![], vec![1], vec![0, 1], vec![4, 8, 1]];
        for rows in [Rows::Packed, Rows::Apart, Rows::Strided(&strides)] {
            let arena = Arena::new(&arguments, rows);
            assert_eq!(arena.results(&arena.image).unwrap(), arguments);
            let mut touched = 0;
            for byte in 0..arena.image.len() {
                let mut after = arena.image.clone();
                after[byte] ^= 1;
                touched += usize::from(arena.results(&after).is_err());
            }
            assert_eq!(touched, arena.image.len() - 3 * 4 - 24 * 8);
            let strides = arena.places.iter().flatten().map(|place| place.strides.clone());
            let wanted = match rows {
                Rows::Packed => [96, 32],
                Rows::Apart => [1536, 512],
                Rows::Strided(_) => [32, 64],
            };
            assert_eq!(strides.collect::<Vec<_>>().pop(), Some(wanted.to_vec()));
        }
    }
}
