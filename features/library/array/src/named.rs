//! The functions of the kernel library's table on arrays: extents are found of shapes, and what can't be given is refused by its name.

use vm_ir::Scalar as Element;
use vm_runtime::kernels::functions::table::{Argument, Extent, Parameter, Shape as Stated};
use vm_runtime::kernels::functions::{Arguments, Declared, FUNCTIONS, Kind};

use crate::array::Number;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::{self, Shape};
use crate::library::{self, call_with};
use crate::node::Array;

/// What a function of the table is given for an argument.
#[derive(Clone, Debug)]
pub enum Passed {
    /// Nothing: what is optional is left out, what has a default has that.
    Nothing,
    /// An array.
    Array(Array),
    /// A number or a flag.
    Number(Number),
    /// Something else, in words: it is refused.
    Other(String),
}

/// Runs the function of a name, that of C without `cuda_`. It is given the arguments that
/// [`arguments`](vm_runtime::kernels::functions::table::Function::arguments) names, and none of its arrays changes: what C changes in place is
/// among the results.
///
/// # Errors
/// [`Error::Argument`] for something of another type, [`Error::Value`] for a shape or a number that can't be, which name the argument;
/// [`Error::Devices`], [`Error::OutOfMemory`], [`Error::Device`].
pub fn call_by_name(name: &str, passed: &[Passed]) -> Result<Vec<Array>> {
    let Some(declared) = FUNCTIONS.iter().find(|one| one.name() == name) else {
        let what = format!("there is no function {name:?}");
        return Err(Error::Value { function: "the kernel library", what });
    };
    let arguments = declared.table.arguments();
    let mut call = Call {
        declared,
        element: None,
        arrays: vec![None; declared.table.parameters.len()],
        words: vec![0; declared.table.parameters.len()],
        extents: Vec::new(),
    };
    if arguments.len() != passed.len() {
        return Err(call.value(format!("it takes {} arguments, not {}", arguments.len(), passed.len())));
    }
    for (argument, passed) in arguments.iter().zip(passed) {
        if let Argument::Array { parameter, optional } = *argument {
            call.array(parameter, optional, passed)?;
        }
    }
    call.find_extents()?;
    for (argument, passed) in arguments.iter().zip(passed) {
        match *argument {
            Argument::Array { .. } => {}
            Argument::Number(parameter) => call.number(parameter, passed)?,
            Argument::Wanted(flag) => call.wanted(flag, passed)?,
        }
    }
    call.run()
}

/// Where memory is said to be: as aligned as all arrays' is.
const THERE: u64 = 16;

/// A call whose arguments are looked at.
struct Call<'a> {
    declared: &'static Declared,
    /// The type of all arrays of `T`, and the argument that told it.
    element: Option<(DType, String)>,
    /// By parameter.
    arrays: Vec<Option<&'a Array>>,
    words: Vec<u64>,
    /// What names of extents stand for: one extent, or those of any number of dimensions.
    extents: Vec<(&'static str, Vec<u64>)>,
}

/// An argument's name for who has arrays.
fn shown(parameter: &Parameter<'_>) -> String {
    parameter.name.to_lowercase()
}

/// The type of arrays that the table calls so; of `T` that of an element.
fn named(name: &str) -> DType {
    library::dtype(match name {
        "f16" => Element::F16,
        "bf16" => Element::Bf16,
        "int32_t" => Element::I32,
        "int64_t" => Element::I64,
        _ => Element::F32,
    })
}

/// Words of which one holds.
fn either(words: &[String]) -> String {
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => words.concat(),
    }
}

/// The dimensions that each extent of a shape has in another; none if those are too few or too many.
fn parts<'a>(stated: &Stated<'static>, of: &'a [u64]) -> Option<Vec<(Extent<'static>, &'a [u64])>> {
    let fixed = stated.extents.iter().filter(|one| !one.many).count();
    let more = of.len().checked_sub(fixed)?;
    let mut rest = of;
    let mut part = |one: &Extent<'static>| {
        let (part, behind) = rest.split_at(if one.many { more } else { 1 });
        rest = behind;
        (*one, part)
    };
    let has_many = fixed < stated.extents.len();
    (more == 0 || has_many).then(|| stated.extents.iter().map(&mut part).collect())
}

impl<'a> Call<'a> {
    fn name(&self) -> &'static str {
        self.declared.name()
    }

    fn parameter(&self, at: usize) -> &'static Parameter<'static> {
        &self.declared.table.parameters[at]
    }

    fn value(&self, what: String) -> Error {
        Error::Value { function: self.name(), what }
    }

    fn refused(&self, argument: &str, passed: &Passed, must: &str) -> Error {
        let is = match passed {
            Passed::Nothing => "None".to_owned(),
            Passed::Array(array) => format!("an array of {}", array.dtype()),
            Passed::Number(Number::Bool(_)) => "a bool".into(),
            Passed::Number(Number::Int(_)) => "an int".into(),
            Passed::Number(Number::Float(_)) => "a float".into(),
            Passed::Number(Number::Complex(..)) => "a complex number".into(),
            Passed::Other(what) => what.clone(),
        };
        let what = format!("{is}: it must be {must}");
        Error::Argument { function: self.name(), argument: argument.to_owned(), what }
    }

    /// Takes an array, whose type must be one that it can have.
    fn array(&mut self, at: usize, optional: bool, passed: &'a Passed) -> Result<()> {
        let parameter = self.parameter(at);
        let array = match passed {
            Passed::Array(array) => array,
            Passed::Nothing if optional => return Ok(()),
            _ => {
                let must = if optional { "an array or None" } else { "an array" };
                return Err(self.refused(&shown(parameter), passed, must));
            }
        };
        let dtype = array.dtype();
        let must = match (parameter.element(), &self.element) {
            ("T", None) => {
                let all: Vec<DType> = self.declared.table.elements.iter().map(|one| named(one)).collect();
                let words = all.iter().map(ToString::to_string).collect::<Vec<_>>();
                (!all.contains(&dtype)).then(|| either(&words))
            }
            ("T", Some((of, by))) => (dtype != *of).then(|| format!("{of}, as {by} is")),
            (other, _) => (dtype != named(other)).then(|| named(other).to_string()),
        };
        if let Some(must) = must {
            let what = format!("{dtype}: it must be {must}");
            return Err(Error::Argument { function: self.name(), argument: shown(parameter), what });
        }
        if parameter.element() == "T" && self.element.is_none() {
            self.element = Some((dtype, shown(parameter)));
        }
        self.arrays[at] = Some(array);
        self.words[at] = THERE;
        Ok(())
    }

    /// Finds extents of the arrays' shapes, which must go together.
    fn find_extents(&mut self) -> Result<()> {
        let arrays: Vec<_> =
            self.arrays.iter().enumerate().filter_map(|(at, one)| Some((at, (*one)?))).collect();
        let stated = |at: usize| self.declared.table.parameters[at].shape.as_ref();
        let shapes: Vec<_> =
            arrays.iter().filter_map(|(at, one)| Some((*at, one.shape(), stated(*at)?))).collect();
        for (at, shape, stated) in &shapes {
            let Some(parts) = parts(stated, shape) else {
                return Err(self.unfit(*at, shape, ""));
            };
            for (extent, part) in parts.into_iter().filter(|(extent, _)| extent.times == extent.by) {
                if self.known(extent.name).is_none() {
                    self.extents.push((extent.name, part.to_vec()));
                }
            }
        }
        for (at, shape, stated) in &shapes {
            let wanted = self.shape(stated)?;
            if wanted != *shape {
                return Err(self.unfit(*at, shape, &format!(", which is {wanted:?} here")));
            }
        }
        for (word, parameter) in self.words.iter_mut().zip(&self.declared.table.parameters) {
            if let Some((_, is)) = self.extents.iter().find(|(name, _)| *name == parameter.name) {
                *word = layout::elements(is);
            }
        }
        Ok(())
    }

    fn unfit(&self, at: usize, shape: &[u64], here: &str) -> Error {
        let parameter = self.parameter(at);
        let must = parameter.shape.as_ref().map_or("", |shape| shape.text);
        self.value(format!("{} is {shape:?}: it must be [{must}]{here}", shown(parameter)))
    }

    fn known(&self, name: &str) -> Option<&[u64]> {
        self.extents.iter().find(|(known, _)| *known == name).map(|(_, is)| &is[..])
    }

    /// A shape with the extents that are known.
    fn shape(&self, stated: &Stated<'static>) -> Result<Shape> {
        let mut shape = Shape::new();
        for extent in &stated.extents {
            let unknown = || self.value(format!("nothing tells what {} is", extent.name));
            match self.known(extent.name).ok_or_else(unknown)? {
                many if extent.many => shape.extend(many),
                one => shape.push(layout::elements(one).saturating_mul(extent.times) / extent.by),
            }
        }
        Ok(shape)
    }

    /// Takes a number, or what it is by default.
    fn number(&mut self, at: usize, passed: &Passed) -> Result<()> {
        let parameter = self.parameter(at);
        let is_float = parameter.kind == "float";
        let name = shown(parameter);
        let number = match passed {
            Passed::Number(number) => Some(*number),
            Passed::Nothing => self.default_of(parameter).map(Number::Float),
            _ => None,
        };
        self.words[at] = match (number, parameter.kind()) {
            (Some(number), Kind::Flag) => match number {
                Number::Bool(flag) => flag.into(),
                Number::Float(0.0) if matches!(passed, Passed::Nothing) => 0,
                _ => return Err(self.refused(&name, passed, "True or False")),
            },
            (Some(Number::Float(float)), _) if is_float => (float as f32).to_bits().into(),
            (Some(Number::Int(int)), _) if is_float => (int as f32).to_bits().into(),
            (Some(Number::Int(int)), _) if !is_float => {
                let most = if parameter.kind == "int" { i32::MAX.into() } else { i64::MAX };
                let fits = i64::try_from(int).ok().filter(|int| (-most..=most).contains(int));
                let must = || self.value(format!("{name} is {int}: it must be at most {most}"));
                let int = fits.ok_or_else(must)?;
                if parameter.kind() == Kind::Extent {
                    self.extents.push((parameter.name, vec![int.max(0).cast_unsigned()]));
                }
                int.cast_unsigned()
            }
            _ => {
                let must = if is_float { "a number" } else { "an integer" };
                return Err(self.refused(&name, passed, must));
            }
        };
        Ok(())
    }

    /// A number that the table says, or 1 over the root of an extent.
    fn default_of(&self, parameter: &Parameter<'static>) -> Option<f64> {
        let text = parameter.default?;
        let extent = text.strip_prefix("1 / sqrt(").and_then(|rest| rest.strip_suffix(')'));
        match extent {
            // Where it is 0 nothing is computed, but numbers are looked at.
            Some(name) => Some((layout::elements(self.known(name)?).max(1) as f64).sqrt().recip()),
            None => text.parse().ok(),
        }
    }

    /// Takes a flag that asks for results.
    fn wanted(&mut self, flag: &'static str, passed: &Passed) -> Result<()> {
        let wanted = match passed {
            Passed::Number(Number::Bool(wanted)) => *wanted,
            Passed::Nothing => false,
            _ => return Err(self.refused(flag, passed, "True or False")),
        };
        let table = &self.declared.table;
        for (word, parameter) in self.words.iter_mut().zip(&table.parameters) {
            if parameter.wanted() == Some(flag) {
                *word = u64::from(wanted) * THERE;
            }
        }
        Ok(())
    }

    fn run(mut self) -> Result<Vec<Array>> {
        let table = &self.declared.table;
        for (at, _) in table.results().filter(|(_, one)| one.wanted().is_none()) {
            self.words[at] = THERE;
        }
        let element = self.element.as_ref().map_or(Element::F32, |(dtype, _)| dtype.scalar());
        let (name, spec) = (self.name(), &self.declared.spec);
        let call = Arguments { spec, name, element, words: &self.words };
        let function =
            call.function().map_err(|error| self.value(format!("{} {}", error.parameter, error.what)))?;
        let mut given = Vec::new();
        for ((at, _), buffer) in call.pointers().zip(function.buffers()) {
            let parameter = self.parameter(at);
            let reads = parameter.is_given() && buffer.access.reads();
            let missing = || self.refused(&shown(parameter), &Passed::Nothing, "an array, as it is read");
            given.push(if reads { Some(self.arrays[at].ok_or_else(missing)?) } else { None });
        }
        let results = table.results().filter(|(at, _)| self.words[*at] != 0);
        let results: Vec<_> = results.filter_map(|(_, one)| Some((one, one.shape.as_ref()?))).collect();
        let shapes = results.iter().map(|(_, stated)| self.shape(stated)).collect::<Result<Vec<_>>>()?;
        let Some(device) = self.arrays.iter().flatten().next().map(|array| array.device()) else {
            return Err(self.value("it has no array".into()));
        };
        if shapes.iter().all(|shape| shape.contains(&0)) {
            let dtype = |one: &Parameter<'_>| match (one.element(), &self.element) {
                ("T", Some((dtype, _))) => *dtype,
                (other, _) => named(other),
            };
            let empty =
                |((one, _), shape): (&(&Parameter<'_>, _), &Shape)| Array::empty(device, dtype(one), shape);
            return results.iter().zip(&shapes).map(empty).collect();
        }
        let made = call_with(device, name, &*function, &given)?;
        made.iter().zip(&shapes).map(|(array, shape)| array.reshape(shape)).collect()
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Accelerator, Device};

    fn cpu() -> Device {
        Device::new(Arc::new(Accelerator::open("cpu").unwrap())).unwrap()
    }

    fn of(device: &Device, shape: &[u64], first: f64) -> Array {
        let n = layout::elements(shape);
        let all = Array::arange(device, DType::Float32, Number::Float(first), Number::Int(1), n);
        all.unwrap().reshape(shape).unwrap()
    }

    fn floats(array: &Array) -> Vec<f32> {
        array.to_bytes().unwrap().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn number(number: f64) -> Passed {
        Passed::Number(Number::Float(number))
    }

    #[test]
    fn what_is_changed_is_a_result() {
        let device = cpu();
        let (a, b, c) = (of(&device, &[2, 2], 0.0), of(&device, &[2, 2], 1.0), of(&device, &[2, 2], 2.0));
        c.evaluate().unwrap();
        let given = [&a, &b, &c].map(|one| Passed::Array(one.clone()));
        let [a, b, c_given] = given;
        let made = call_by_name("gemm", &[a.clone(), b.clone(), c_given, Passed::Nothing, number(1.0)]);
        assert_eq!(floats(&made.unwrap()[0]), [5.0, 7.0, 15.0, 21.0]);
        assert_eq!(floats(&c), [2.0, 3.0, 4.0, 5.0]);
        let made = call_by_name("gemm", &[a, b, Passed::Nothing, number(2.0), Passed::Nothing]).unwrap();
        assert_eq!((made.len(), floats(&made[0])), (1, vec![6.0, 8.0, 22.0, 32.0]));
    }

    #[test]
    fn shapes_are_found() {
        let device = cpu();
        let x = Passed::Array(of(&device, &[2, 3, 5], 0.0));
        let made = call_by_name("topk", &[x.clone(), Passed::Number(Number::Int(2))]).unwrap();
        assert_eq!(made.iter().map(Array::shape).collect::<Vec<_>>(), [[2, 3, 2]; 2]);
        let w = Passed::Array(of(&device, &[5], 0.0));
        let norm = |wanted| {
            let wanted = Passed::Number(Number::Bool(wanted));
            call_by_name("layernorm", &[x.clone(), w.clone(), w.clone(), Passed::Nothing, wanted]).unwrap()
        };
        assert_eq!(norm(false).len(), 1);
        assert_eq!(
            norm(true).iter().map(Array::shape).collect::<Vec<_>>(),
            [&[2, 3, 5][..], &[2, 3], &[2, 3]]
        );
        let none = call_by_name("silu", &[Passed::Array(of(&device, &[0, 3], 0.0))]).unwrap();
        assert_eq!(none[0].shape(), [0, 3]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let device = cpu();
        let check = |name: &str, passed: &[Passed], expect: &str| {
            assert_eq!(call_by_name(name, passed).unwrap_err().to_string(), expect);
        };
        let x = Passed::Array(of(&device, &[2, 3], 0.0));
        let wide = Passed::Array(of(&device, &[2, 3], 0.0).cast(DType::Float64).unwrap());
        check("none", &[], "the kernel library: there is no function \"none\"");
        check("silu", &[], "silu: it takes 1 arguments, not 0");
        check("silu", &[Passed::Nothing], "silu: input is None: it must be an array");
        check("silu", &[wide], "silu: input is float64: it must be float32, bfloat16 or float16");
        check(
            "gemm",
            &[x.clone(), x.clone(), Passed::Nothing, number(1.0), number(0.0)],
            "gemm: b is [2, 3]: it must be [K, N], which is [3, 3] here",
        );
        check(
            "topk",
            &[x.clone(), Passed::Number(Number::Int(9))],
            "topk: k is 9: it must be at most dim, which is 3",
        );
        check("topk", &[x.clone(), number(1.0)], "topk: k is a float: it must be an integer");
        check("scale", &[x, Passed::Other("a word".into())], "scale: scale is a word: it must be a number");
    }
}
