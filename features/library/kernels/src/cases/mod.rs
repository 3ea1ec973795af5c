//! Calls of every function with what they must come to, for tests of backends and devices.
//!
//! What is expected is computed in f64 from the function's definition, by other code than any kernel's. [`all`] has every case;
//! a test runs each by [`Case::check`] with what launches a kernel in its place. Small cases are there a second time with strided rows,
//! which what launches kernels must place as it is told.

mod attention;
mod decode;
mod elementwise;
mod gemm;
mod loss;
mod norm;
mod plain;
mod quantise;
mod sample;
mod self_attention;
mod softmax;
mod strided;
mod tables;
mod tokens;
mod training;

use std::rc::Rc;
use vm_ir::interp::{Argument, Launch, Tensor};
use vm_ir::{GuestAddr, Module, Scalar, Trust, ValidModule, validate};

use crate::call::{Buffer, Function, Operand, Region};
use crate::family::Resources;

/// A call.
pub struct Case {
    /// Its name, which tells it from all others.
    pub name: String,
    /// What is called.
    pub function: Rc<dyn Function>,
    /// What the buffers hold before.
    pub buffers: Vec<Tensor>,
    /// What some of them hold behind.
    pub expected: Vec<Expected>,
}

/// What a buffer holds behind a call.
#[derive(Clone)]
pub struct Expected {
    /// The buffer's number.
    pub buffer: usize,
    /// The elements.
    pub values: Vec<f64>,
    /// How far an element may be off, of the greater of its magnitude and [`scale`](Self::scale).
    pub tolerance: f64,
    /// The magnitude below which the tolerance is an absolute one.
    pub scale: f64,
}

impl Expected {
    /// Elements that may be off by a part of their magnitude, or of 1 where that is less.
    pub fn new(buffer: usize, values: Vec<f64>, tolerance: f64) -> Expected {
        Expected { buffer, values, tolerance, scale: 1.0 }
    }

    /// Elements that must be just these.
    pub fn exact(buffer: usize, values: Vec<f64>) -> Expected {
        Expected::new(buffer, values, 0.0)
    }
}

/// What runs the kernel of a module and leaves in the tensors of its launch what came out. By argument it is told how the rows lie: the elements
/// from one of each dimension to the next, none of a number.
pub type Launcher<'a> = dyn FnMut(&ValidModule, &mut Launch, &[Vec<u64>]) -> Result<(), String> + 'a;

/// All cases.
pub fn all() -> Vec<Case> {
    let mut all = dense();
    all.extend(strided::cases(&all));
    all
}

/// The cases of rows that lie one behind the other.
fn dense() -> Vec<Case> {
    let areas = [
        gemm::cases(),
        attention::cases(),
        self_attention::cases(),
        decode::cases(),
        training::cases(),
        tables::cases(),
        tokens::cases(),
        elementwise::cases(),
        softmax::cases(),
        norm::cases(),
        quantise::cases(),
        plain::cases(),
        loss::cases(),
        sample::cases(),
    ];
    areas.into_iter().flatten().collect()
}

fn case(
    name: String,
    function: impl Function + 'static,
    buffers: Vec<Tensor>,
    expected: Vec<Expected>,
) -> Case {
    Case { name, function: Rc::new(function), buffers, expected }
}

impl Case {
    /// Calls it on a device by `launch`, and compares.
    ///
    /// # Errors
    /// What differs, or what `launch` said.
    pub fn check(
        &self,
        resources: &Resources,
        trust: Trust,
        launch: &mut Launcher<'_>,
    ) -> Result<(), String> {
        self.compare(&self.run(resources, trust, launch)?)
    }

    /// Compares what the buffers hold behind a call with what they should.
    ///
    /// # Errors
    /// What differs.
    pub fn compare(&self, buffers: &[Tensor]) -> Result<(), String> {
        let specified = self.function.buffers();
        for expected in &self.expected {
            let name = specified[expected.buffer].name;
            expected
                .compare(&buffers[expected.buffer])
                .map_err(|what| format!("{}: {name}: {what}", self.name))?;
        }
        Ok(())
    }

    /// Calls it as [`check`](Self::check) does, and gives what the buffers then hold.
    ///
    /// # Errors
    /// What `launch` said, or that something between rows was written.
    pub fn run(
        &self,
        resources: &Resources,
        trust: Trust,
        launch: &mut Launcher<'_>,
    ) -> Result<Vec<Tensor>, String> {
        let name = &self.name;
        let said = |what: String| format!("{name}: {what}");
        let specified = self.function.buffers();
        assert_eq!(specified.len(), self.buffers.len(), "{name}: its buffers");
        for (buffer, tensor) in specified.iter().zip(&self.buffers) {
            assert_eq!(
                (buffer.element, &buffer.extents),
                (tensor.element, &tensor.extents),
                "{name}: {}",
                buffer.name
            );
        }
        let call = self.function.call(resources).map_err(|error| said(error.to_string()))?;
        let mut buffers: Vec<_> =
            specified.iter().zip(&self.buffers).map(|(buffer, tensor)| strided(buffer, tensor)).collect();
        // Its contents don't matter: ones in every bit are NaN.
        let mut workspace =
            Tensor::from_bits(Scalar::I8, &[call.workspace], vec![0xff; call.workspace as usize]);
        for step in &call.launches {
            let kernel = step.entry.kernel(GuestAddr(0)).map_err(|error| said(format!("{error:?}")))?;
            let entry = kernel.name().to_owned();
            let module = validate(Module::from(kernel), trust)
                .map_err(|errors| said(format!("{entry}: {errors:?}")))?;
            let arguments = step.operands.iter().map(|operand| match operand {
                Operand::Buffer(index, region) => Argument::Tensor(read(&buffers[*index], region)),
                Operand::Workspace(region) => Argument::Tensor(read(&workspace, region)),
                Operand::Number(bits, _) => Argument::Bits(*bits),
            });
            let mut run = Launch { kernel: entry.clone(), grid: step.grid, arguments: arguments.collect() };
            let strides = step.operands.iter().map(|operand| match operand {
                Operand::Buffer(_, region) | Operand::Workspace(region) => region.strides.clone(),
                Operand::Number(..) => Vec::new(),
            });
            launch(&module, &mut run, &strides.collect::<Vec<_>>())
                .map_err(|error| said(format!("{entry}: {error}")))?;
            for (operand, argument) in step.operands.iter().zip(&run.arguments) {
                match (operand, argument) {
                    (Operand::Buffer(index, region), Argument::Tensor(tensor)) => {
                        write(&mut buffers[*index], region, tensor)
                    }
                    (Operand::Workspace(region), Argument::Tensor(tensor)) => {
                        write(&mut workspace, region, tensor)
                    }
                    _ => {}
                }
            }
        }
        let found = specified.iter().zip(buffers);
        found.map(|(buffer, memory)| together(buffer, memory).map_err(&said)).collect()
    }
}

/// What is between rows: no number that comes of any.
const CANARY: u64 = 0xc5c5_c5c5_c5c5_c5c5;

/// The memory of a buffer with strided rows.
fn strided(buffer: &Buffer, tensor: &Tensor) -> Tensor {
    if !buffer.is_strided() {
        return tensor.clone();
    }
    let len = buffer.len().unwrap_or(0);
    let mut memory = Tensor::from_bits(tensor.element, &[len], vec![CANARY; len as usize]);
    for at in 0..tensor.len() as u64 {
        memory.set_bits(
            (at / buffer.row() * buffer.stride + at % buffer.row()) as usize,
            tensor.bits(at as usize),
        );
    }
    memory
}

/// The rows of such memory, between which nothing may have been written.
fn together(buffer: &Buffer, memory: Tensor) -> Result<Tensor, String> {
    if !buffer.is_strided() {
        return Ok(memory);
    }
    let canary = Tensor::from_bits(memory.element, &[1], [CANARY]).bits(0);
    let (inside, between): (Vec<_>, Vec<_>) =
        (0..memory.len()).partition(|at| *at as u64 % buffer.stride < buffer.row());
    if let Some(at) = between.into_iter().find(|at| memory.bits(*at) != canary) {
        return Err(format!("{}: element {at}, which is between rows, was written", buffer.name));
    }
    let bits = inside.into_iter().map(|at| memory.bits(at));
    Ok(Tensor::from_bits(memory.element, &buffer.extents, bits))
}

impl Expected {
    fn compare(&self, found: &Tensor) -> Result<(), String> {
        let found = found.to_f64s();
        if found.len() != self.values.len() {
            return Err(format!("{} elements, not {}", found.len(), self.values.len()));
        }
        for (at, (found, expected)) in found.iter().zip(&self.values).enumerate() {
            let same = found == expected || found.is_nan() && expected.is_nan();
            let close = (found - expected).abs() <= self.tolerance * expected.abs().max(self.scale);
            if !(same || close && expected.is_finite()) {
                return Err(format!("element {at} is {found}, not {expected}"));
            }
        }
        Ok(())
    }
}

/// The bytes of a region, by its elements in order: where each begins.
fn places(region: &Region) -> impl Iterator<Item = usize> + '_ {
    let count: u64 = region.extents.iter().product();
    (0..count).map(|mut index| {
        let mut at = 0;
        for (extent, stride) in region.extents.iter().zip(&region.strides).rev() {
            at += index % extent * stride;
            index /= extent;
        }
        (region.offset + at * u64::from(region.element.bytes())) as usize
    })
}

fn read(memory: &Tensor, region: &Region) -> Tensor {
    let width = region.element.bytes() as usize;
    let bits = places(region).map(|at| {
        (0..width).fold(0, |bits, byte| bits | u64::from(byte_of(memory, at + byte)) << (8 * byte))
    });
    Tensor::from_bits(region.element, &region.extents, bits)
}

fn write(memory: &mut Tensor, region: &Region, tensor: &Tensor) {
    let width = region.element.bytes() as usize;
    let of = memory.element.bytes() as usize;
    for (index, at) in places(region).enumerate() {
        let bits = tensor.bits(index);
        for byte in 0..width {
            let (element, shift) = ((at + byte) / of, 8 * ((at + byte) % of));
            let other = memory.bits(element) & !(0xff << shift);
            memory.set_bits(element, other | (bits >> (8 * byte) & 0xff) << shift);
        }
    }
}

fn byte_of(memory: &Tensor, at: usize) -> u8 {
    let of = memory.element.bytes() as usize;
    (memory.bits(at / of) >> (8 * (at % of))) as u8
}

/// How far a function of elements of such a type may be off: what rounding its result takes, and as much again for f32's own sums.
fn tolerance(element: Scalar) -> f64 {
    match element {
        Scalar::Bf16 => 5e-3,
        Scalar::F16 => 1e-3,
        Scalar::F8E4M3 => 6.3e-2,
        Scalar::F8E5M2 => 0.126,
        _ => 2e-5,
    }
}

/// Rows and columns: one element, tails, primes, the first row that a layout for a GPU can't hold as the one before, and the types of
/// one buffer's elements and another's.
fn shapes() -> Vec<([u64; 2], Scalar, Scalar)> {
    use Scalar::{Bf16, F16, F32};
    let mut shapes = Vec::new();
    // Parts of a warp, a warp, a block.
    for (at, columns) in [1, 2, 7, 24, 64, 129, 257, 768, 1025, 2056].into_iter().enumerate() {
        let (input, output) = [(F32, F32), (Bf16, Bf16), (F16, F16), (F32, Bf16), (Bf16, F32)][at % 5];
        shapes.push(([3, columns], input, output));
    }
    shapes.extend([([37, 8], Bf16, Bf16), ([5, 1000], F32, F32), ([2, 4096], F32, F32)]);
    shapes
}

/// Such shapes of rows of odd numbers of columns, which begin anywhere: of a warp, a block, a cluster.
fn odd_shapes() -> Vec<([u64; 2], Scalar, Scalar)> {
    use Scalar::{Bf16, F16, F32};
    vec![
        ([8, 131], Bf16, Bf16),
        ([4, 65], F32, F32),
        ([8, 1023], F16, F16),
        ([8, 641], F32, Bf16),
        ([4, 1801], Bf16, F32),
        ([8, 4099], Bf16, Bf16),
        ([4, 17_001], F32, F32),
    ]
}

/// Columns of long rows, and what they hold: held by clusters, with the most that a thread holds, and by nothing.
const LONG: [(u64, Scalar); 4] =
    [(65_536, Scalar::F32), (131_072, Scalar::Bf16), (262_144, Scalar::F32), (262_143, Scalar::F16)];

/// Numbers from -1 to 1, the same everywhere.
pub fn numbers(seed: u64, count: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A tensor of such numbers.
pub fn random(seed: u64, element: Scalar, extents: &[u64]) -> Tensor {
    Tensor::from_f64s(element, extents, numbers(seed, extents.iter().product()))
}
