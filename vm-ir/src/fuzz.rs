//! Entry points for fuzzers: each takes any bytes and must neither panic nor hang.

use crate::binary::{Lines, decode, encode};
use crate::interp::{Argument, Launch, Limits, Tensor, run};
use crate::module::{Kernel, Module, ParamKind};
use crate::text::{parse, print};
use crate::valid::{Trust, ValidModule, validate};
use crate::view::Dim;

/// How far an input got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reached {
    /// It is no module.
    Nothing,
    /// It is a module that breaks a rule.
    Module,
    /// It is valid, and its kernels ran.
    Valid,
}

/// Any bytes as a binary module. What decodes must encode to the same bytes, print to text that parses to
/// the same module if it is valid, and run without a crash.
pub fn binary(bytes: &[u8]) -> Reached {
    if let Ok(module) = decode(bytes) {
        let kept = bytes.get(6).is_some_and(|flags| flags & 1 != 0);
        let lines = if kept { Lines::Keep } else { Lines::Strip };
        assert_eq!(encode(&module, lines), bytes, "a module has a second encoding");
        return valid(module);
    }
    Reached::Nothing
}

/// Any bytes as text. What parses must survive both forms unchanged, and run without a crash if it is valid.
pub fn text(bytes: &[u8]) -> Reached {
    let Ok(text) = std::str::from_utf8(bytes) else { return Reached::Nothing };
    if let Ok(module) = parse(text) {
        for lines in [Lines::Keep, Lines::Strip] {
            assert_eq!(decode(&encode(&module, lines)).as_ref(), Ok(&module), "the binary form changed it");
        }
        return valid(module);
    }
    Reached::Nothing
}

fn valid(module: Module) -> Reached {
    let Ok(valid) = validate(module, Trust::Guest) else { return Reached::Module };
    let printed = print(&valid);
    assert_eq!(parse(&printed).as_ref(), Ok(&*valid), "the text form changed it:\n{printed}");
    for kernel in valid.kernels() {
        execute(&valid, kernel);
    }
    Reached::Valid
}

/// Runs a guest's kernel on a little memory. It may end in a limit or a race, and in nothing else.
fn execute(module: &ValidModule, kernel: &Kernel) {
    let extent = |dim: &Dim| match dim {
        Dim::Any { multiple } => u64::from(*multiple) * 8u64.div_ceil(u64::from(*multiple)),
        Dim::Fixed(extent) => *extent,
    };
    let mut arguments = Vec::new();
    for param in kernel.params() {
        arguments.push(match &param.kind {
            ParamKind::Scalar { range, .. } => Argument::Bits(
                range.map_or(3, |(least, _)| least as u64) & kernel.type_of(value_of(param)).scalar().mask(),
            ),
            ParamKind::View(view) => {
                let extents: Vec<u64> = view.dims.iter().map(extent).collect();
                let elements =
                    extents.iter().try_fold(1u64, |n, e| n.checked_mul(*e)).filter(|n| *n <= 1 << 16);
                if elements.is_none() {
                    return;
                }
                Argument::Tensor(Tensor::zeros(view.element, &extents))
            }
        });
    }
    let mut launch = Launch { kernel: kernel.name().to_owned(), grid: [2, 1, 1], arguments };
    let limits = Limits { fuel: 20_000, deadline: None, memory: 8 << 20, races: true };
    let _ = run(module, &mut launch, &limits);
}

fn value_of(param: &crate::module::Param) -> crate::Value {
    match param.kind {
        ParamKind::Scalar { value, .. } => value,
        ParamKind::View(_) => crate::module::Value(0),
    }
}
