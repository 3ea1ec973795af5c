//! The arguments of a launch as they are said on the command line, and how they become those of a kernel.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::str::FromStr;

use vm_graph::{Input, ValidGraph};
use vm_ir::Kernel;
use vm_ir::Scalar;
use vm_ir::format::read_literal;
use vm_ir::interp::{Argument, Tensor};
use vm_ir::limits::MAX_RANK;
use vm_ir::module::{Param, ParamKind};

use super::fill::Fill;
use super::{memory, npy};
use crate::failure::Failure;

/// `NAME=VALUE`: what a parameter is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ArgSpec {
    /// The parameter, without `@` or `%`.
    pub(crate) name: String,
    /// What it is given.
    pub(crate) value: ArgValue,
}

/// What a parameter is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ArgValue {
    /// `@FILE.npy`: the array in a file.
    File(PathBuf),
    /// `f32[3, 1000]=random:7`: an array of these extents.
    Filled {
        /// Its elements' type.
        element: Scalar,
        /// Its extents, slowest dimension first.
        extents: Vec<u64>,
        /// Its elements.
        fill: Fill,
    },
    /// A number, in the words of the IR's text.
    Number(String),
}

impl FromStr for ArgSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "write NAME=TYPE[EXTENTS], NAME=@FILE.npy or NAME=NUMBER";
        let (name, value) = text.split_once('=').ok_or(FORM)?;
        let name = parameter_name(name)?;
        let value = if let Some(path) = value.strip_prefix('@') {
            if path.is_empty() {
                return Err("there is no file behind the @".into());
            }
            ArgValue::File(path.into())
        } else if let Some((element, rest)) = value.split_once('[') {
            filled(element.trim(), rest)?
        } else if value.is_empty() {
            return Err(FORM.into());
        } else {
            ArgValue::Number(value.trim().into())
        };
        Ok(Self { name, value })
    }
}

fn filled(element: &str, rest: &str) -> Result<ArgValue, String> {
    let in_memory = |scalar: &Scalar| scalar.in_memory();
    let element = Scalar::from_name(element).filter(in_memory).ok_or_else(|| {
        let names: Vec<_> =
            Scalar::ALL.iter().filter(|scalar| in_memory(scalar)).map(|scalar| scalar.name()).collect();
        format!("`{element}` is no type of elements; there are {}", names.join(", "))
    })?;
    let (extents, fill) = rest.split_once(']').ok_or("there is no `]` behind the extents")?;
    let extents = extents
        .split(',')
        .map(|extent| {
            extent.trim().parse().map_err(|_| {
                format!("`{}` is no extent; write whole numbers, as in f32[3,1000]", extent.trim())
            })
        })
        .collect::<Result<Vec<u64>, _>>()?;
    if extents.len() > MAX_RANK {
        return Err(format!("{} extents; a view has at most {MAX_RANK}", extents.len()));
    }
    let fill = match fill.strip_prefix('=') {
        Some(fill) => fill.parse()?,
        None if fill.is_empty() => Fill::default(),
        None => {
            return Err(format!(
                "`{fill}` stands behind the extents; write =zeros, =ones, =arange or =random:SEED"
            ));
        }
    };
    Ok(ArgValue::Filled { element, extents, fill })
}

/// `NAME=@FILE.npy`: where a view goes after the launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OutSpec {
    /// The parameter, without `@`.
    pub(crate) name: String,
    /// The file.
    pub(crate) path: PathBuf,
}

impl FromStr for OutSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once("=@") {
            Some((name, path)) if !path.is_empty() => {
                Ok(Self { name: parameter_name(name)?, path: path.into() })
            }
            _ => Err("write NAME=@FILE.npy".into()),
        }
    }
}

fn parameter_name(name: &str) -> Result<String, String> {
    let name = name.trim();
    let name = name.strip_prefix(['@', '%']).unwrap_or(name);
    match vm_ir::module::is_name(name) {
        true => Ok(name.into()),
        false => Err(format!("`{name}` is no name of a parameter")),
    }
}

/// A parameter as the kernel's text writes it: `@x: view<f32, [?], read>`.
pub(crate) fn describe(kernel: &Kernel, param: &Param) -> String {
    match &param.kind {
        ParamKind::View(view) => format!("@{}: {view}", param.name),
        ParamKind::Scalar { value, range } => {
            let mut text = format!("%{}: {}", param.name, kernel.type_of(*value));
            if let Some((least, greatest)) = range {
                // Writing to a string does not fail.
                let _ = write!(text, " in [{least}, {greatest}]");
            }
            text
        }
    }
}

/// The arguments in the order of the kernel's parameters, each read or filled. What does not fit its parameter is said
/// before anything is read.
///
/// # Errors
/// The first that does not fit, is missing or can't be had.
pub(crate) fn bind(kernel: &Kernel, specs: &[ArgSpec], outs: &[OutSpec]) -> Result<Vec<Argument>, Failure> {
    let name = kernel.name();
    let known = |wanted: &str| {
        if kernel.params().iter().any(|param| &*param.name == wanted) {
            return Ok(());
        }
        let all: Vec<_> = kernel.params().iter().map(|param| describe(kernel, param)).collect();
        let all = if all.is_empty() { "none".into() } else { all.join(", ") };
        Err(Failure::usage(format_args!("kernel @{name} has no parameter {wanted}; it has {all}")))
    };
    for (index, spec) in specs.iter().enumerate() {
        known(&spec.name)?;
        if specs.iter().take(index).any(|earlier| earlier.name == spec.name) {
            return Err(Failure::usage(format_args!("argument {} is given twice; leave one out", spec.name)));
        }
    }
    for (index, out) in outs.iter().enumerate() {
        known(&out.name)?;
        if outs.iter().take(index).any(|earlier| earlier.path == out.path) {
            return Err(Failure::usage(format_args!(
                "{} is to be written twice; give each output a file of its own",
                out.path.display()
            )));
        }
        let param = kernel.params().iter().find(|param| *param.name == *out.name);
        if let Some(Param { kind: ParamKind::Scalar { .. }, .. }) = param {
            return Err(Failure::usage(format_args!(
                "{} is a number, which a kernel does not change",
                out.name
            )));
        }
    }
    let mut fitting = Vec::new();
    for param in kernel.params() {
        let spec = specs.iter().find(|spec| spec.name == *param.name);
        let spec = spec.ok_or_else(|| missing(kernel, param))?;
        check_kind(kernel, param, &spec.value)
            .map_err(|what| Failure::usage(format_args!("argument {}: {what}", param.name)))?;
        fitting.push((param, &spec.value));
    }
    let mut bytes = 0u64;
    fitting
        .into_iter()
        .map(|(param, value)| {
            let argument = make(kernel, param, value);
            let argument = argument.and_then(|argument| {
                bytes = bytes.saturating_add(argument.tensor().map_or(0, |tensor| tensor.bytes.len() as u64));
                memory::check(bytes).map(|()| argument)
            });
            argument.map_err(|what| Failure::usage(format_args!("argument {}: {what}", param.name)))
        })
        .collect()
}

/// The inputs of a model in their order, each read or filled.
///
/// # Errors
/// As [`bind`].
pub(crate) fn bind_model(
    graph: &ValidGraph,
    specs: &[ArgSpec],
    outs: &[OutSpec],
) -> Result<Vec<Tensor>, Failure> {
    let name = &graph.name;
    let inputs =
        || graph.inputs.iter().map(|input| format!("{}: {}", input.name, input.ty)).collect::<Vec<_>>();
    for (index, spec) in specs.iter().enumerate() {
        if !graph.inputs.iter().any(|input| input.name == spec.name) {
            let all = inputs().join(", ");
            return Err(Failure::usage(format_args!(
                "model {name} has no input {}; it has {all}",
                spec.name
            )));
        }
        if specs[..index].iter().any(|earlier| earlier.name == spec.name) {
            return Err(Failure::usage(format_args!("argument {} is given twice; leave one out", spec.name)));
        }
    }
    for (index, out) in outs.iter().enumerate() {
        if !graph.outputs.iter().any(|output| output.name == out.name) {
            let all: Vec<_> = graph.outputs.iter().map(|output| output.name.as_str()).collect();
            let all = all.join(", ");
            return Err(Failure::usage(format_args!(
                "model {name} has no output {}; it has {all}",
                out.name
            )));
        }
        if outs[..index].iter().any(|earlier| earlier.path == out.path) {
            return Err(Failure::usage(format_args!(
                "{} is to be written twice; give each output a file of its own",
                out.path.display()
            )));
        }
    }
    let bytes = graph.inputs.iter().fold(0u64, |bytes, input| bytes.saturating_add(input.ty.bytes()));
    memory::check(bytes).map_err(Failure::usage)?;
    let bound = graph.inputs.iter().map(|input| {
        let spec = specs.iter().find(|spec| spec.name == input.name).ok_or_else(|| {
            let extents: Vec<_> = input.ty.extents.iter().map(u64::to_string).collect();
            let (name, element) = (&input.name, input.ty.element.scalar());
            Failure::usage(format_args!(
                "there is no argument for {name}: {}; add --arg {name}={element}[{}] or --arg {name}=@FILE.npy",
                input.ty,
                extents.join(",")
            ))
        })?;
        input_of(input, &spec.value)
            .map_err(|what| Failure::usage(format_args!("argument {}: {what}", input.name)))
    });
    bound.collect()
}

fn input_of(input: &Input, value: &ArgValue) -> Result<Tensor, String> {
    let (scalar, ty) = (input.ty.element.scalar(), &input.ty);
    let tensor = match value {
        ArgValue::File(path) => npy::read(path, scalar).map_err(|error| error.to_string())?,
        ArgValue::Filled { element, extents, .. } if *element != scalar || *extents != ty.extents => {
            return Err(format!("{element}{extents:?} is not {ty}"));
        }
        ArgValue::Filled { element, extents, fill } => fill.tensor(*element, extents)?,
        ArgValue::Number(text) if ty.rank() == 0 => {
            let bits = read_literal(scalar, text).ok_or_else(|| format!("`{text}` is no {scalar}"))?;
            Tensor::from_bits(scalar, &[], vec![bits])
        }
        ArgValue::Number(text) => return Err(format!("`{text}` is a number, and this is {ty}")),
    };
    if tensor.extents != ty.extents {
        return Err(format!("its extents {:?} are not those of {ty}", tensor.extents));
    }
    Ok(tensor)
}

fn missing(kernel: &Kernel, param: &Param) -> Failure {
    let how = match &param.kind {
        ParamKind::View(view) => {
            let extents = vec!["EXTENT"; view.rank()].join(",");
            format!("--arg {0}={1}[{extents}] or --arg {0}=@FILE.npy", param.name, view.element)
        }
        ParamKind::Scalar { .. } => format!("--arg {}=NUMBER", param.name),
    };
    Failure::usage(format_args!(
        "kernel @{} has no argument for {}; add {how}",
        kernel.name(),
        describe(kernel, param)
    ))
}

/// Whether a value is of the parameter's kind and type.
fn check_kind(kernel: &Kernel, param: &Param, value: &ArgValue) -> Result<(), String> {
    match (&param.kind, value) {
        (ParamKind::View(view), ArgValue::Filled { element, .. }) if *element != view.element => {
            Err(format!("is of {element}, the view is of {}", view.element))
        }
        (ParamKind::View(view), ArgValue::Number(text)) => Err(format!(
            "`{text}` is a number, and {} wants an array: {}[EXTENTS] or @FILE.npy",
            describe(kernel, param),
            view.element
        )),
        (ParamKind::Scalar { .. }, ArgValue::File(_) | ArgValue::Filled { .. }) => {
            Err(format!("is an array, and {} wants a number", describe(kernel, param)))
        }
        (ParamKind::Scalar { value, .. }, ArgValue::Number(text)) => {
            let scalar = kernel.type_of(*value).scalar();
            read_literal(scalar, text).map(drop).ok_or_else(|| format!("`{text}` is no {scalar}"))
        }
        (ParamKind::View(_), ArgValue::File(_) | ArgValue::Filled { .. }) => Ok(()),
    }
}

fn make(kernel: &Kernel, param: &Param, value: &ArgValue) -> Result<Argument, String> {
    match (&param.kind, value) {
        (ParamKind::View(view), ArgValue::File(path)) => {
            npy::read(path, view.element).map(Argument::Tensor).map_err(|error| error.to_string())
        }
        (ParamKind::View(view), ArgValue::Filled { extents, fill, .. }) => {
            // Wrong extents are said by name before memory is taken for them.
            let admitted = extents.len() == view.rank()
                && extents.iter().zip(&view.dims).all(|(extent, dim)| dim.admits(*extent));
            if !admitted {
                return Err(format!("extents {extents:?} do not fit {view}"));
            }
            fill.tensor(view.element, extents).map(Argument::Tensor)
        }
        (ParamKind::Scalar { value, .. }, ArgValue::Number(text)) => {
            let scalar = kernel.type_of(*value).scalar();
            read_literal(scalar, text).map(Argument::Bits).ok_or_else(|| format!("`{text}` is no {scalar}"))
        }
        (ParamKind::View(_), ArgValue::Number(_))
        | (ParamKind::Scalar { .. }, ArgValue::File(_) | ArgValue::Filled { .. }) => {
            check_kind(kernel, param, value).map(|()| Argument::Bits(0))
        }
    }
}

/// A tensor's type and extents: `f32[3, 1000]`.
pub(crate) fn shape(tensor: &Tensor) -> String {
    let extents: Vec<_> = tensor.extents.iter().map(u64::to_string).collect();
    format!("{}[{}]", tensor.element, extents.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_written() {
        let check = |text: &str, expect: Result<ArgValue, &str>| match (text.parse::<ArgSpec>(), expect) {
            (Ok(spec), Ok(value)) => assert_eq!((spec.name.as_str(), spec.value), ("x", value), "{text}"),
            (Err(error), Err(part)) => assert!(error.contains(part), "{text}: {error}"),
            (got, expect) => panic!("{text}: {got:?}, not {expect:?}"),
        };
        let filled =
            |element, extents: &[u64], fill| Ok(ArgValue::Filled { element, extents: extents.into(), fill });
        check("x=@a.npy", Ok(ArgValue::File("a.npy".into())));
        check("@x=@a=b.npy", Ok(ArgValue::File("a=b.npy".into())));
        check("%x=-1.5", Ok(ArgValue::Number("-1.5".into())));
        check("x=f32[1024]", filled(Scalar::F32, &[1024], Fill::Zeros));
        check("x=bf16[3, 4]=ones", filled(Scalar::Bf16, &[3, 4], Fill::Ones));
        check("x=i8[2]=random:9", filled(Scalar::I8, &[2], Fill::Random(9)));
        check("x", Err("write NAME="));
        check("x=", Err("write NAME="));
        check("x=@", Err("no file"));
        check("1x=2", Err("`1x` is no name"));
        check("x=float[2]", Err("`float` is no type of elements; there are i8, i16"));
        check("x=bool[2]", Err("`bool` is no type"));
        check("x=f32[2", Err("no `]`"));
        check("x=f32[]", Err("`` is no extent"));
        check("x=f32[-1]", Err("`-1` is no extent"));
        check("x=f32[1,1,1,1,1]", Err("5 extents; a view has at most 4"));
        check("x=f32[2]zeros", Err("`zeros` stands behind the extents"));
        check("x=f32[2]=twos", Err("no elements are called `twos`"));
    }
}
