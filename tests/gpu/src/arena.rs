//! All arguments of a launch in one buffer, with canaries around each: a kernel that touches a byte that is not its
//! own is found out.

use anyhow::{Context, bail, ensure};
use vm_accel::{Argument, Kernel, Launch, Worker};
use vm_cuda::CudaAccelerator;
use vm_ir::interp::{self, Tensor};
use vm_ir::module::ParamKind;

/// What every byte holds that no view has.
const CANARY: u8 = 0xc5;
/// Bytes of canary between views, and what views are aligned to.
const GAP: usize = 256;

/// How the rows of a tensor lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// One behind the other.
    Packed,
    /// With canaries between them, where the tensor has more than one dimension.
    Apart,
}

/// Where a tensor lies: its rows in bytes, and from one to the next.
#[derive(Clone, Debug)]
struct Place {
    start: usize,
    row: usize,
    pitch: usize,
    rows: usize,
    /// Bytes from one element of a dimension to the next, but for the last dimension.
    strides: Vec<u64>,
}

impl Place {
    /// The bytes of each row in memory.
    fn rows(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        (0..self.rows).map(|row| self.start + row * self.pitch).map(|start| start..start + self.row)
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
    pub(crate) fn new(arguments: &'a [interp::Argument], rows: Rows) -> Self {
        let mut image = vec![CANARY; GAP];
        let places = arguments
            .iter()
            .map(|argument| {
                let tensor = argument.tensor()?;
                let start = image.len();
                let row = tensor.extents.last().map_or(0, |extent| *extent as usize)
                    * tensor.element.bytes() as usize;
                let apart = rows == Rows::Apart && tensor.extents.len() > 1;
                let pitch = if apart { row.next_multiple_of(GAP) + GAP } else { row };
                let rows = tensor.bytes.len().checked_div(row).unwrap_or(0);
                let mut strides = vec![pitch as u64];
                for extent in tensor.extents.iter().skip(1).rev().skip(1) {
                    strides.push(strides.last().copied().unwrap_or(0) * extent);
                }
                strides.truncate(tensor.extents.len() - 1);
                strides.reverse();
                let place = Place { start, row, pitch, rows, strides };
                for bytes in tensor.bytes.chunks(row.max(1)) {
                    image.extend_from_slice(bytes);
                    image.resize(image.len() + pitch - row, CANARY);
                }
                image.resize(image.len().next_multiple_of(GAP) + GAP, CANARY);
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
        let buffer = worker.allocate(self.image.len() as u64)?;
        worker.write(&buffer, &self.image)?;
        let mut given = Vec::with_capacity(self.arguments.len());
        for ((argument, place), parameter) in self.arguments.iter().zip(&self.places).zip(kernel.params()) {
            given.push(match (argument, place, &parameter.kind) {
                (interp::Argument::Tensor(tensor), Some(place), _) => {
                    let bytes = place.rows().last().map_or(0, |row| row.end - place.start);
                    let view = buffer.view(place.start as u64, bytes as u64)?;
                    Argument::from(view.strided(&tensor.extents, &place.strides)?)
                }
                (interp::Argument::Bits(bits), _, ParamKind::Scalar { value, .. }) => {
                    let bytes = kernel.type_of(*value).scalar().bytes();
                    Argument::from(vm_accel::Scalar::from_bits(*bits, bytes))
                }
                _ => bail!("the argument for {} is of the other kind", parameter.name),
            });
        }
        worker.launch(loaded, launch, &given)?;
        let mut after = vec![0u8; self.image.len()];
        worker.read(&buffer, &mut after)?;
        self.results(&after)
    }

    /// The tensors in an image of the memory, whose canaries are looked at.
    fn results(&self, after: &[u8]) -> anyhow::Result<Vec<interp::Argument>> {
        let mut outside = 0;
        let mut results = Vec::with_capacity(self.arguments.len());
        for (argument, place) in self.arguments.iter().zip(&self.places) {
            let (Some(tensor), Some(place)) = (argument.tensor(), place) else {
                results.push(argument.clone());
                continue;
            };
            let mut bytes = Vec::with_capacity(tensor.bytes.len());
            for row in place.rows() {
                check_canary(after, outside..row.start)?;
                outside = row.end;
                bytes.extend_from_slice(after.get(row).context("a tensor's bytes")?);
            }
            let (element, extents) = (tensor.element, tensor.extents.clone());
            results.push(interp::Argument::Tensor(Tensor { element, extents, bytes }));
        }
        check_canary(after, outside..after.len())?;
        Ok(results)
    }
}

fn check_canary(bytes: &[u8], range: std::ops::Range<usize>) -> anyhow::Result<()> {
    let from = range.start;
    let touched = bytes.get(range).context("a canary")?.iter().position(|&byte| byte != CANARY);
    ensure!(
        touched.is_none(),
        "byte {} of the arena, which is no view's, was touched",
        from + touched.unwrap_or(0)
    );
    Ok(())
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
        for rows in [Rows::Packed, Rows::Apart] {
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
            let row = if rows == Rows::Packed { 32 } else { 512 };
            assert_eq!(strides.collect::<Vec<_>>().pop(), Some(vec![3 * row, row]));
        }
    }
}
