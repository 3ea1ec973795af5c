//! Kernels of a caller's own on arrays: launched in order with what arrays are computed by, and as safe as those.

use std::sync::Arc;

use vm_ir::module::ParamKind;
use vm_ir::{Kernel as Written, Module, Trust, text, validate};
use vm_runtime::{Argument, Buffer, Scalar};

use crate::Accelerator;
use crate::array::Number;
use crate::device::{Device, same};
use crate::dtype::DType;
use crate::error::{Error, Fault, Result};
use crate::evaluate::{self, Output};
use crate::layout::{self, Shape};
use crate::node::{Array, State, Storage};

/// A kernel in the IR, of which is known that it is valid.
///
/// It is compiled as a guest's: an index out of bounds loads 0 and stores nothing, and an endless loop is ended by the device's deadline.
#[derive(Clone, Debug)]
pub struct Kernel {
    written: Arc<Written>,
    text: Arc<str>,
}

/// What a kernel is given for one parameter.
#[derive(Debug)]
pub enum Given<'a> {
    /// An array that is read.
    Read(&'a Array),
    /// An array that is written. What the kernel doesn't write may hold anything afterwards.
    Write(&'a mut Array),
    /// An array that is read and written.
    Update(&'a mut Array),
    /// A number in a type.
    Number(Number, DType),
}

impl Given<'_> {
    fn array(&self) -> Option<&Array> {
        match self {
            Self::Read(array) => Some(array),
            Self::Write(array) | Self::Update(array) => Some(array),
            Self::Number(..) => None,
        }
    }
}

impl Kernel {
    /// Reads the text of one kernel.
    ///
    /// # Errors
    /// [`Error::Kernel`] with the lines of the text that are wrong.
    pub fn parse(source: &str) -> Result<Kernel> {
        let wrong = |line: u32, what: String| Error::Kernel(vec![Fault { line, what }]);
        let module = text::parse(source).map_err(|error| wrong(error.line, error.kind.to_string()))?;
        let [kernel] = module.kernels() else {
            return Err(wrong(0, format!("the text has {} kernels, not one", module.kernels().len())));
        };
        let kernel = kernel.clone();
        if let Err(errors) = validate(Module::from(kernel.clone()), Trust::Guest) {
            let fault = |error: &vm_ir::valid::ValidationError| Fault {
                line: error.line,
                what: error.op.map_or_else(|| error.kind.to_string(), |op| format!("{op}: {}", error.kind)),
            };
            return Err(Error::Kernel(errors.0.iter().map(fault).collect()));
        }
        let text = text::print_kernel(&kernel).into();
        Ok(Kernel { written: Arc::new(kernel), text })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.written.name()
    }

    /// Its text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Compiles it for a device, if that was not done yet.
    ///
    /// # Errors
    /// [`Error::Device`] for what the device can't run.
    pub fn compile(&self, device: &Device) -> Result<()> {
        device.written(&self.text, &self.written).map(drop)
    }

    /// Launches it with so many blocks along x, y and z, in order with all that was given to the device before.
    ///
    /// An array that is written is a value like any other: what shares its memory, such as a view of it, keeps its elements. It is
    /// written in place where nothing does, and else has memory of its own afterwards.
    ///
    /// # Errors
    /// [`Error::Value`] for arguments that are not those of the kernel; [`Error::Devices`], [`Error::OutOfMemory`], [`Error::Device`]. The arrays then are what they
    /// were.
    pub fn launch(&self, device: &Device, blocks: [u32; 3], mut given: Vec<Given<'_>>) -> Result<()> {
        let function = "launch";
        let params = self.written.params();
        if params.len() != given.len() {
            let what = format!("@{} takes {} arguments, not {}", self.name(), params.len(), given.len());
            return Err(Error::Value { function, what });
        }
        for (param, given) in params.iter().zip(&given) {
            let fits = match (&param.kind, given) {
                (ParamKind::View(view), Given::Read(array)) => {
                    !view.access.writes() && is_of(view.element, view.dims.len(), array)
                }
                (ParamKind::View(view), Given::Write(array)) => {
                    view.access.writes()
                        && !view.access.reads()
                        && is_of(view.element, view.dims.len(), array)
                }
                (ParamKind::View(view), Given::Update(array)) => {
                    view.access.writes() && is_of(view.element, view.dims.len(), array)
                }
                (ParamKind::Scalar { value, .. }, Given::Number(_, dtype)) => self
                    .written
                    .values()
                    .get(value.index())
                    .is_some_and(|def| def.ty == dtype.stored().into()),
                _ => false,
            };
            if !fits {
                let what =
                    format!("@{} can't have {} for its parameter {}", self.name(), kind(given), param.name);
                return Err(Error::Value { function, what });
            }
            if let Some(array) = given.array() {
                same(function, device, array.device())?;
            }
        }
        let kernel = device.written(&self.text, &self.written)?;
        if blocks.contains(&0) {
            return Ok(());
        }
        let places = given.iter().map(place).collect::<Result<Vec<_>>>()?;
        let arguments = places
            .iter()
            .map(|place| match place {
                Place::Number(number) => Ok(Argument::from(*number)),
                Place::Array(storage, shape) => {
                    let buffer: &Buffer<Accelerator> = &storage.buffer;
                    Ok(buffer.shaped(shape)?.into())
                }
            })
            .collect::<Result<Vec<Argument<'_, Accelerator>>>>()?;
        device.launch(&kernel, blocks, &arguments)?;
        for (given, place) in given.iter_mut().zip(&places) {
            if let (Given::Write(array) | Given::Update(array), Place::Array(storage, shape)) = (given, place)
            {
                **array = Array::ready(device, array.dtype(), shape.clone(), storage.clone());
            }
        }
        Ok(())
    }
}

enum Place {
    Array(Storage, Shape),
    Number(Scalar),
}

fn is_of(element: vm_ir::Scalar, rank: usize, array: &Array) -> bool {
    !array.dtype().is_complex() && array.dtype().stored() == element && array.ndim() == rank
}

fn kind(given: &Given<'_>) -> String {
    let array = |access: &str, array: &Array| {
        format!("an array of {} with {} dimensions that is {access}", array.dtype(), array.ndim())
    };
    match given {
        Given::Read(a) => array("read", a),
        Given::Write(a) => array("written", a),
        Given::Update(a) => array("read and written", a),
        Given::Number(_, dtype) => format!("a number of {dtype}"),
    }
}

/// The memory that an argument is in: of what is written, its own.
fn place(given: &Given<'_>) -> Result<Place> {
    let (array, storage) = match given {
        Given::Number(number, dtype) => {
            return Ok(Place::Number(Scalar::from_bits(number.bits(*dtype)[0], dtype.stored().bytes())));
        }
        Given::Read(array) => (&**array, evaluate::dense(array)?),
        Given::Update(array) => {
            array.evaluate()?;
            let storage = match owned(array)? {
                Some(storage) => storage,
                None => copied(array)?,
            };
            (&**array, storage)
        }
        Given::Write(array) => (&**array, owned(array)?.map_or_else(|| fresh(array), Ok)?),
    };
    Ok(Place::Array(storage, array.shape().to_vec()))
}

/// An array's elements one behind the other, in memory that nothing else has.
pub(crate) fn copied(array: &Array) -> Result<Storage> {
    let storage = fresh(array)?;
    if array.size() != 0 {
        let (dtype, shape) = (array.dtype(), array.shape().to_vec());
        evaluate::copy(array, Output { dtype, shape, storage: storage.clone() })?;
    }
    Ok(storage)
}

fn fresh(array: &Array) -> Result<Storage> {
    let buffer = array.device().allocate(array.size() * array.dtype().bytes())?;
    Ok(Storage::dense(buffer, array.shape()))
}

/// The memory of an array, if its elements are there, one behind the other, and nothing else has any of it.
fn owned(array: &Array) -> Result<Option<Storage>> {
    if Arc::strong_count(&array.0) != 1 || !matches!(array.state(), State::Ready(_)) {
        return Ok(None);
    }
    let storage = evaluate::storage(array)?;
    // One is the array's, one is here.
    let alone = Arc::strong_count(&storage.buffer) == 2;
    let dense = storage.offset == 0 && storage.strides == layout::dense(array.shape());
    Ok((alone && dense && !storage.buffer.is_lent()).then_some(storage))
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::op::Binary;

    const ADD: &str = "vir 1
kernel @add(@y: view<f32, [?], readwrite>, @x: view<f32, [?], read>, %by: f32) at 0x0 block(32) {
  %i = global_id.x : i64
  %v = load @x[%i] : f32
  %w = load @y[%i] : f32
  %s = add %v, %w : f32
  %t = add %s, %by : f32
  store @y[%i], %t
}
";

    fn cpu() -> Device {
        Device::new(Arc::new(Accelerator::open("cpu").unwrap())).unwrap()
    }

    fn floats(array: &Array) -> Vec<f32> {
        array.to_bytes().unwrap().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn of(device: &Device, values: &[f32]) -> Array {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Array::from_bytes(device, DType::Float32, &[values.len() as u64], &bytes).unwrap()
    }

    #[test]
    fn what_shares_memory_keeps_its_elements() {
        let device = cpu();
        let kernel = Kernel::parse(ADD).unwrap();
        let x = of(&device, &[1.0, 2.0, 3.0]);
        let add = |y: &mut Array| {
            let by = Given::Number(Number::Float(10.0), DType::Float32);
            kernel.launch(&device, [1, 1, 1], vec![Given::Update(y), Given::Read(&x), by]).unwrap();
        };
        let at = |array: &Array| Arc::as_ptr(&evaluate::storage(array).unwrap().buffer);

        let mut alone = of(&device, &[0.0; 3]);
        let before = at(&alone);
        add(&mut alone);
        assert_eq!((floats(&alone), at(&alone)), (vec![11.0, 12.0, 13.0], before), "in place");

        let mut shared = of(&device, &[0.0; 3]);
        let clone = shared.clone();
        add(&mut shared);
        assert_eq!((floats(&shared), floats(&clone)), (vec![11.0, 12.0, 13.0], vec![0.0; 3]));

        let mut seen = of(&device, &[0.0; 3]);
        let shared = seen.share().unwrap();
        let before = at(&seen);
        add(&mut seen);
        assert_ne!(at(&seen), before, "others see what was there");
        drop(shared);

        let base = of(&device, &[5.0, 6.0, 7.0]);
        let mut view = base.slice(&[crate::Slice::of(None, None, Some(-1), 3).unwrap()]).unwrap();
        add(&mut view);
        assert_eq!((floats(&view), floats(&base)), (vec![18.0, 18.0, 18.0], vec![5.0, 6.0, 7.0]));

        // What is not computed yet is computed first, and what is computed of it later sees the old elements.
        let mut lazy = base.binary(Binary::Add, &x).unwrap();
        let later = lazy.binary(Binary::Multiply, &lazy).unwrap();
        add(&mut lazy);
        assert_eq!((floats(&lazy), floats(&later)), (vec![17.0, 20.0, 23.0], vec![36.0, 64.0, 100.0]));
    }

    #[test]
    fn out_of_bounds_harms_nothing() {
        let device = cpu();
        let kernel = Kernel::parse(ADD).unwrap();
        let (mut y, x) = (of(&device, &[1.0; 5]), of(&device, &[1.0; 3]));
        let by = Given::Number(Number::Int(1), DType::Float32);
        kernel.launch(&device, [4, 1, 1], vec![Given::Update(&mut y), Given::Read(&x), by]).unwrap();
        assert_eq!(floats(&y), [3.0, 3.0, 3.0, 2.0, 2.0], "what is loaded beyond the end is 0");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let device = cpu();
        let kernel = Kernel::parse(ADD).unwrap();
        let x = of(&device, &[1.0]);
        let check = |given: Vec<Given<'_>>, expect: &str| {
            let error = kernel.launch(&device, [1, 1, 1], given).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        let by = || Given::Number(Number::Int(1), DType::Float32);
        let mut y = x.clone();
        check(vec![], "takes 3 arguments, not 0");
        check(
            vec![Given::Read(&x), Given::Read(&x), by()],
            "an array of float32 with 1 dimensions that is read for its parameter y",
        );
        check(vec![Given::Write(&mut y), Given::Read(&x), by()], "that is written for its parameter y");
        let mut other = x.cast(DType::Int32).unwrap();
        check(vec![Given::Update(&mut other), Given::Read(&x), by()], "an array of int32");
        let wide = Given::Number(Number::Int(1), DType::Float64);
        check(vec![Given::Update(&mut y), Given::Read(&x), wide], "a number of float64");
        let elsewhere = of(&cpu(), &[1.0]);
        check(vec![Given::Update(&mut y), Given::Read(&elsewhere), by()], "arrays of");
    }

    #[test]
    fn wrong_texts_have_lines() {
        let check = |text: &str, line: u32, expect: &str| match Kernel::parse(text) {
            Err(Error::Kernel(faults)) => {
                assert!(faults[0].line == line && faults[0].what.contains(expect), "{faults:?}");
            }
            other => panic!("{other:?}"),
        };
        check("vir 2", 1, "version 2");
        check("vir 1", 0, "0 kernels");
        check(&ADD.replace("add %v, %w", "add %v, %i"), 6, "operand 2 is i64");
    }
}
