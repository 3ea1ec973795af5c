//! Functions of the kernel library on arrays.

use std::sync::Arc;

use vm_ir::Scalar as Element;
use vm_runtime::kernels::attention::{DotProductAttention, Mask};
use vm_runtime::kernels::call::{Buffer as LibraryBuffer, CallError, Function, Operand, Region};
use vm_runtime::kernels::gemm::{Batch, Multiply, Product};
use vm_runtime::kernels::softmax::Softmax;
use vm_runtime::{Argument, Buffer, Scalar};

use crate::Accelerator;
use crate::device::{Device, same};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::evaluate;
use crate::launch::copied;
use crate::layout;
use crate::node::{Array, Storage};
use crate::op::{Binary, Reduction, Unary};
use crate::product::product;
use crate::sys::Held;

/// The type of arrays that the library calls so.
pub(crate) fn dtype(element: Element) -> DType {
    match element {
        Element::F16 => DType::Float16,
        Element::Bf16 => DType::BFloat16,
        Element::F64 => DType::Float64,
        Element::I64 => DType::Int64,
        Element::I32 => DType::Int32,
        Element::I16 => DType::Int16,
        Element::I8 => DType::Int8,
        _ => DType::Float32,
    }
}

/// Runs a function of the library: `inputs` are what it only reads, in the order of its buffers; what it writes is new, and holds anything before.
///
/// # Errors
/// [`Error::Shape`] for an array that is not as large as the function has it; [`Error::Type`]; what compiling and launching fail with.
pub fn call(device: &Device, function: &dyn Function, inputs: &[&Array]) -> Result<Vec<Array>> {
    let mut inputs = inputs.iter();
    let reads = |buffer: &LibraryBuffer| if buffer.access.writes() { None } else { inputs.next().copied() };
    let given: Vec<Option<&Array>> = function.buffers().iter().map(reads).collect();
    call_with(device, "a function of the kernel library", function, &given)
}

/// The same with an array or none for each buffer, in an error by the function's name. Of an array that is written, too, a copy is.
///
/// # Errors
/// As [`call`]; [`Error::Value`] if a buffer that is only read has none.
pub fn call_with(
    device: &Device,
    name: &'static str,
    function: &dyn Function,
    given: &[Option<&Array>],
) -> Result<Vec<Array>> {
    let unsupported = |error: CallError| Error::Value {
        function: name,
        what: match error {
            CallError::Unsupported { what, .. } => what,
            error => error.to_string(),
        },
    };
    let plan = function.call(device.resources()).map_err(unsupported)?;
    let (mut buffers, mut outputs): (Vec<Arc<Held>>, Vec<Array>) = Default::default();
    for (number, buffer) in function.buffers().into_iter().enumerate() {
        let (dtype, writes) = (dtype(buffer.element), buffer.access.writes());
        let storage = match given.get(number).copied().flatten() {
            Some(input) => {
                same(name, device, input.device())?;
                if input.size() != layout::elements(&buffer.extents) || input.dtype() != dtype {
                    let what = format!(
                        "{} is {:?} of {}, not {:?} of {dtype}",
                        buffer.name,
                        input.shape(),
                        input.dtype(),
                        buffer.extents
                    );
                    return Err(Error::Shape { function: name, what });
                }
                if writes { copied(input)? } else { evaluate::dense(input)? }
            }
            None if writes => evaluate::storage(&Array::empty(device, dtype, &buffer.extents)?)?,
            None => {
                return Err(Error::Value { function: name, what: format!("{} is not given", buffer.name) });
            }
        };
        buffers.push(Arc::clone(&storage.buffer));
        if writes {
            let storage = Storage::dense(storage.buffer, &buffer.extents);
            outputs.push(Array::ready(device, dtype, buffer.extents, storage));
        }
    }
    let workspace = device.allocate(plan.workspace)?;
    for launch in &plan.launches {
        let kernel = device.library(&launch.entry)?;
        let argument = |operand: &Operand| match operand {
            Operand::Number(bits, ty) => Ok(Scalar::from_bits(*bits, ty.scalar().bytes()).into()),
            Operand::Buffer(number, region) => view(&buffers[*number], region),
            Operand::Workspace(region) => view(&workspace, region),
        };
        let arguments = launch.operands.iter().map(argument).collect::<Result<Vec<_>>>()?;
        device.launch(&kernel, launch.grid, &arguments)?;
    }
    Ok(outputs)
}

fn view<'a>(buffer: &'a Buffer<Accelerator>, region: &Region) -> Result<Argument<'a, Accelerator>> {
    let bytes = u64::from(region.element.bytes());
    let rows = region.strides.split_last().map_or(&[][..], |(_, rows)| rows);
    let strides: Vec<u64> = rows.iter().map(|stride| stride * bytes).collect();
    let rest = buffer.view(region.offset, buffer.bytes().saturating_sub(region.offset))?;
    Ok(rest.strided(&region.extents, &strides)?.into())
}

/// What the library has as its elements: floats of up to four bytes.
fn of_library(dtype: DType) -> Option<Element> {
    matches!(dtype, DType::Float32 | DType::Float16 | DType::BFloat16).then(|| dtype.scalar())
}

impl Array {
    /// Rows and columns of a function along the last axis.
    fn rows(&self, function: &'static str) -> Result<(u64, u64)> {
        let Some((columns, rows)) = self.shape().split_last() else {
            return Err(Error::Shape { function, what: "it goes along an axis, and there is none".into() });
        };
        Ok((layout::elements(rows), *columns))
    }

    /// The axis brought to the end, and the order that brings it back.
    fn along(&self, function: &'static str, axis: i64) -> Result<(Array, Option<Vec<i64>>)> {
        let axis = layout::axis(function, axis, self.ndim())?;
        if axis + 1 == self.ndim() {
            return Ok((self.clone(), None));
        }
        let mut order: Vec<i64> = (0..self.ndim() as i64).filter(|d| *d != axis as i64).collect();
        order.push(axis as i64);
        let mut back: Vec<i64> = vec![0; order.len()];
        order.iter().zip(0..).for_each(|(from, to)| back[*from as usize] = to);
        Ok((self.permute(&order)?, Some(back)))
    }

    /// e^x over its sum along an axis.
    ///
    /// # Errors
    /// [`Error::Value`] for an axis that there is not; [`Error::Type`] for complex numbers.
    pub fn softmax(&self, axis: i64) -> Result<Array> {
        if self.dtype().is_complex() {
            return Err(Error::Type {
                function: "softmax",
                dtype: self.dtype(),
                what: "it takes real numbers",
            });
        }
        let x = self.cast(self.dtype().to_inexact())?;
        if x.size() == 0 {
            return Ok(x);
        }
        let (x, back) = x.along("softmax", axis)?;
        let (rows, columns) = x.rows("softmax")?;
        let result = match of_library(x.dtype()) {
            Some(element) => {
                let made = call(x.device(), &Softmax::of(rows, columns, element), &[&x])?;
                made.into_iter().next().map_or_else(|| Ok(x.clone()), |made| made.reshape(x.shape()))?
            }
            None => {
                let most = x.reduce(Reduction::Max, Some(&[-1]), true, None)?;
                let powers = x.binary(Binary::Subtract, &most)?.unary(Unary::Exp)?;
                let sum = powers.reduce(Reduction::Sum, Some(&[-1]), true, None)?;
                powers.binary(Binary::Divide, &sum)?
            }
        };
        back.map_or(Ok(result.clone()), |order| result.permute(&order))
    }

    /// softmax(scale · q kᵀ) v for each head: [batch, tokens, heads, dim] each.
    ///
    /// # Errors
    /// [`Error::Type`], [`Error::Shape`].
    pub fn attention(&self, k: &Array, v: &Array, causal: bool, scale: Option<f32>) -> Result<Array> {
        let function = "attention";
        let shape = |what: &str| Error::Shape { function, what: what.to_owned() };
        let (&[batch, tokens, heads, dim], &[_, keys, shared, _]) = (self.shape(), k.shape()) else {
            return Err(shape("q, k and v are [batch, tokens, heads, dim]"));
        };
        if v.shape() != k.shape() || k.shape()[0] != batch || k.shape()[3] != dim {
            return Err(shape("k and v are of one shape, and have q's batch and dim"));
        }
        let what = "it takes float32, float16 and bfloat16";
        let element = of_library(self.dtype()).ok_or(Error::Type { function, dtype: self.dtype(), what })?;
        let of = DotProductAttention {
            element,
            fp8: None,
            batch,
            heads: [heads, shared],
            lengths: [tokens, keys],
            dim,
            mask: if causal { Mask::Causal } else { Mask::Full },
            window: [0; 2],
            bias: false,
            log_sums: false,
            scale: scale.unwrap_or((dim as f32).sqrt().recip()),
            align: align(element, &[dim]),
        };
        let (k, v) = (k.cast(self.dtype())?, v.cast(self.dtype())?);
        first(call(self.device(), &of, &[self, &k, &v])?)
    }

    /// The product of matrices, or of vectors, of the last two axes; those before are repeated.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Type`], [`Error::Devices`].
    pub fn matmul(&self, other: &Array) -> Result<Array> {
        let function = "matmul";
        same(function, self.device(), other.device())?;
        let dtype = self.dtype().promote(other.dtype());
        if dtype == DType::Bool {
            return Err(Error::Type { function, dtype, what: "it takes numbers" });
        }
        if self.ndim() == 0 || other.ndim() == 0 {
            return Err(Error::Shape { function, what: "operands have one dimension or more".into() });
        }
        let (a, b) = (self.cast(dtype)?, other.cast(dtype)?);
        let a = if a.ndim() == 1 { a.reshape(&[1, a.size()])? } else { a };
        let b = if b.ndim() == 1 { b.reshape(&[b.size(), 1])? } else { b };
        let (lead_a, [m, k]) = matrix(&a);
        let (lead_b, [k_b, n]) = matrix(&b);
        if k != k_b {
            let what = format!(
                "{:?} and {:?}: {k} columns are multiplied with {k_b} rows",
                self.shape(),
                other.shape()
            );
            return Err(Error::Shape { function, what });
        }
        let lead = layout::broadcast(function, lead_a, lead_b)?;
        let whole = |last: [u64; 2]| lead.iter().copied().chain(last).collect::<Vec<u64>>();
        let mut shape = whole([m, n]);
        let result = if layout::elements(&shape) == 0 || k == 0 {
            Array::full(self.device(), dtype, &shape, crate::Number::Int(0))?
        } else if let Some(element) = of_library(dtype) {
            let matrices = layout::elements(&lead);
            // One matrix on the right serves all on the left as one.
            let joint = lead_b.iter().all(|extent| *extent == 1) && matrices > 1;
            let (matrices, m, a) = match joint {
                true => (1, m * matrices, a.broadcast_to(&whole([m, k]))?),
                false => (matrices, m, a.broadcast_to(&whole([m, k]))?),
            };
            let b = if joint { b.reshape(&[k, n])? } else { b.broadcast_to(&whole([k, n]))? };
            // A transposed one is taken as it lies.
            let turned = matrices == 1 && {
                let at = evaluate::storage(&b)?;
                let strides = &at.strides[at.strides.len() - 2..];
                strides[0] == 1 && strides[1] == k as i64 && n > 1 && k > 1
            };
            let b = if turned { b.permute(&last_two_turned(b.ndim()))? } else { b };
            let product = Product {
                element,
                output: element,
                b_transposed: turned,
                batch: if matrices == 1 { Batch::One } else { Batch::Batched },
                matrices,
                align: align(element, &[n, k]),
                ..Product::of(m, n, k)
            };
            let multiply = Multiply { product, alpha: 1.0, beta: 0.0 };
            first(call(self.device(), &multiply, &[&a, &b])?)?.reshape(&shape)?
        } else if dtype.is_complex() {
            let parts = |x: &Array| Ok::<_, Error>((x.unary(Unary::Real)?, x.unary(Unary::Imag)?));
            let ((ar, ai), (br, bi)) = (parts(&a)?, parts(&b)?);
            let re = ar.matmul(&br)?.binary(Binary::Subtract, &ai.matmul(&bi)?)?;
            re.complex(&ar.matmul(&bi)?.binary(Binary::Add, &ai.matmul(&br)?)?)?.reshape(&shape)?
        } else {
            let matrices = layout::elements(&lead);
            let a = a.broadcast_to(&whole([m, k]))?.reshape(&[matrices, m, k])?;
            let b = b.broadcast_to(&whole([k, n]))?.reshape(&[matrices, k, n])?;
            product(&a, &b, [matrices, m, k, n])?.reshape(&shape)?
        };
        if other.ndim() == 1 {
            shape.pop();
        }
        if self.ndim() == 1 {
            shape.remove(shape.len() - if other.ndim() == 1 { 1 } else { 2 });
        }
        result.reshape(&shape)
    }
}

fn last_two_turned(rank: usize) -> Vec<i64> {
    let mut order: Vec<i64> = (0..rank as i64).collect();
    order.swap(rank - 1, rank - 2);
    order
}

/// The axes before the last two, and those.
fn matrix(array: &Array) -> (&[u64], [u64; 2]) {
    let (lead, last) = array.shape().split_at(array.ndim() - 2);
    (lead, [last[0], last[1]])
}

/// 16 where rows of so many elements begin at multiples of 16 bytes.
fn align(element: Element, rows: &[u64]) -> u32 {
    let bytes = element.bytes();
    if rows.iter().all(|row| (row * u64::from(bytes)).is_multiple_of(16)) { 16 } else { bytes }
}

fn first(made: Vec<Array>) -> Result<Array> {
    made.into_iter().next().ok_or_else(nothing)
}

fn nothing() -> Error {
    Error::Device("a function of the kernel library wrote nothing; please report this".into())
}
