//! Directives to cases.

use super::compare::Tolerance;
use crate::format::{from_f64, read_literal};
use crate::interp::{Argument, Launch, Tensor};
use crate::limits::MAX_MODULE_BYTES;
use crate::module::{Kernel, Module, ParamKind};
use crate::types::Scalar;
use crate::valid::Trust;

/// A directive that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct DirectiveError {
    /// Its line.
    pub line: u32,
    /// What is wrong.
    pub what: String,
}

/// One run of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The line of its `; run:`.
    pub line: u32,
    /// What to run.
    pub launch: Launch,
    /// As whose.
    pub trust: Trust,
    /// What must come out.
    pub expectations: Vec<Expectation>,
    /// A part of the error that it must end in.
    pub error: Option<String>,
}

/// What must come out of a view.
#[derive(Clone, Debug, PartialEq)]
pub struct Expectation {
    /// Its line.
    pub line: u32,
    /// The view's name.
    pub name: String,
    /// Which parameter it is.
    pub parameter: usize,
    /// What it must hold.
    pub wanted: Wanted,
    /// How exactly.
    pub tolerance: Tolerance,
}

/// Where an expected result comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// The file.
    Tensor(Tensor),
    /// The reference for the kernel's name.
    Reference,
}

/// The cases of a file.
///
/// # Errors
///
/// The first directive that cannot be read.
pub fn cases(text: &str, module: &Module) -> Result<Vec<Case>, DirectiveError> {
    let mut cases = Vec::new();
    let mut lines = text.lines().enumerate().peekable();
    while let Some((number, line)) = lines.next() {
        let Some(head) = line.trim().strip_prefix("; run:") else { continue };
        let mut reader = CaseReader::head(number as u32 + 1, head, module)?;
        while let Some((number, line)) = lines.peek() {
            let directive = line.trim().strip_prefix(';').map(str::trim).unwrap_or("");
            if !directive.starts_with(['@', '%']) && !directive.starts_with("expect ") {
                break;
            }
            reader.line = *number as u32 + 1;
            reader.directive(directive)?;
            lines.next();
        }
        cases.push(reader.finish()?);
    }
    Ok(cases)
}

struct CaseReader<'m> {
    kernel: &'m Kernel,
    first_line: u32,
    line: u32,
    grid: [u32; 3],
    trust: Trust,
    arguments: Vec<Option<Argument>>,
    expectations: Vec<Expectation>,
    error: Option<String>,
}

impl<'m> CaseReader<'m> {
    fn head(line: u32, head: &str, module: &'m Module) -> Result<CaseReader<'m>, DirectiveError> {
        let fail = |what: String| DirectiveError { line, what };
        let form = || fail("expected `; run: @kernel grid(x, y, z)`, then maybe `trusted`".to_owned());
        let (name, rest) = head.trim().strip_prefix('@').and_then(|h| h.split_once(' ')).ok_or_else(form)?;
        let kernel = module.kernel(name).ok_or_else(|| fail(format!("the file has no kernel @{name}")))?;
        let (sizes, rest) =
            rest.trim().strip_prefix("grid(").and_then(|r| r.split_once(')')).ok_or_else(form)?;
        let mut grid = [1; 3];
        for (slot, size) in grid.iter_mut().zip(sizes.split(',')) {
            *slot = size.trim().parse().map_err(|_| form())?;
        }
        let trust = match rest.trim() {
            "" => Trust::Guest,
            "trusted" => Trust::Trusted,
            _ => return Err(form()),
        };
        Ok(CaseReader {
            kernel,
            first_line: line,
            line,
            grid,
            trust,
            arguments: vec![None; kernel.params().len()],
            expectations: Vec::new(),
            error: None,
        })
    }

    fn fail<T>(&self, what: impl Into<String>) -> Result<T, DirectiveError> {
        Err(DirectiveError { line: self.line, what: what.into() })
    }

    fn finish(self) -> Result<Case, DirectiveError> {
        let missing = self.arguments.iter().position(Option::is_none);
        if let Some(i) = missing {
            let what = format!("no argument for {}", self.kernel.params()[i].name);
            return Err(DirectiveError { line: self.first_line, what });
        }
        if self.expectations.is_empty() && self.error.is_none() {
            let what = "a case that expects nothing tests nothing".to_owned();
            return Err(DirectiveError { line: self.first_line, what });
        }
        Ok(Case {
            line: self.first_line,
            launch: Launch {
                kernel: self.kernel.name().to_owned(),
                grid: self.grid,
                arguments: self.arguments.into_iter().flatten().collect(),
            },
            trust: self.trust,
            expectations: self.expectations,
            error: self.error,
        })
    }

    fn parameter(&self, name: &str) -> Result<usize, DirectiveError> {
        let name = name.trim();
        let found = self.kernel.params().iter().position(|p| {
            let mark = if matches!(p.kind, ParamKind::View(_)) { '@' } else { '%' };
            name.strip_prefix(mark) == Some(&p.name)
        });
        found.map_or_else(|| self.fail(format!("the kernel has no parameter {name}")), Ok)
    }

    fn directive(&mut self, directive: &str) -> Result<(), DirectiveError> {
        if let Some(error) = directive.strip_prefix("expect error ") {
            self.error = Some(error.trim().to_owned());
            return Ok(());
        }
        let expected = directive.strip_prefix("expect ");
        let Some((name, value)) = expected.unwrap_or(directive).split_once('=') else {
            return self.fail("expected `=`");
        };
        let parameter = self.parameter(name)?;
        let value = value.trim();
        if expected.is_some() {
            return self.expectation(parameter, value);
        }
        let kernel = self.kernel;
        let argument = match &kernel.params()[parameter].kind {
            ParamKind::Scalar { value: v, .. } => {
                let scalar = kernel.type_of(*v).scalar();
                match read_literal(scalar, value) {
                    Some(bits) => Argument::Bits(bits),
                    None => return self.fail(format!("{value} is no {scalar}")),
                }
            }
            ParamKind::View(view) => Argument::Tensor(self.tensor(view.element, parameter, value)?),
        };
        self.arguments[parameter] = Some(argument);
        Ok(())
    }

    fn expectation(&mut self, parameter: usize, value: &str) -> Result<(), DirectiveError> {
        let (value, tolerance) = match value.split_once("within") {
            None => (value, Tolerance::Exact),
            Some((value, bound)) => match bound.trim().strip_suffix("ulps") {
                Some(ulps) => match ulps.trim().parse() {
                    Ok(ulps) => (value.trim(), Tolerance::Ulps(ulps)),
                    Err(_) => return self.fail("expected a number of ulps"),
                },
                None => match bound.trim().parse() {
                    Ok(bound) => (value.trim(), Tolerance::Relative(bound)),
                    Err(_) => return self.fail("expected a bound"),
                },
            },
        };
        let wanted = if value == "reference" {
            Wanted::Reference
        } else {
            let Some(Argument::Tensor(given)) = &self.arguments[parameter] else {
                return self.fail("the view has no argument above");
            };
            let extents = given.extents.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
            Wanted::Tensor(self.tensor(given.element, parameter, &format!("[{extents}] {value}"))?)
        };
        let name = self.kernel.params()[parameter].name.to_string();
        self.expectations.push(Expectation { line: self.line, name, parameter, wanted, tolerance });
        Ok(())
    }

    /// `[extents] elements`.
    fn tensor(&self, element: Scalar, parameter: usize, text: &str) -> Result<Tensor, DirectiveError> {
        let Some((extents, elements)) = text.strip_prefix('[').and_then(|t| t.split_once(']')) else {
            return self.fail("expected the extents in brackets, then the elements");
        };
        let mut count = 1usize;
        let mut sizes = Vec::new();
        for extent in extents.split(',') {
            let Ok(extent) = extent.trim().parse::<u64>() else { return self.fail("expected an extent") };
            let within = usize::try_from(extent).ok().and_then(|e| count.checked_mul(e));
            match within.filter(|n| *n <= MAX_MODULE_BYTES) {
                Some(n) => count = n,
                None => return self.fail("too many elements"),
            }
            sizes.push(extent);
        }
        let bits = self.elements(element, parameter, count, elements.trim())?;
        Ok(Tensor::from_bits(element, &sizes, bits))
    }

    fn elements(
        &self,
        element: Scalar,
        parameter: usize,
        count: usize,
        text: &str,
    ) -> Result<Vec<u64>, DirectiveError> {
        let Some((name, arguments)) = text.strip_suffix(')').and_then(|t| t.split_once('(')) else {
            let words = text.split([' ', ',']).filter(|w| !w.is_empty());
            let bits: Option<Vec<u64>> = words.map(|w| literal(element, w)).collect();
            return match bits {
                Some(bits) if bits.len() == count => Ok(bits),
                Some(bits) => self.fail(format!("{} elements, expected {count}", bits.len())),
                None => self.fail(format!("an element is no {element}")),
            };
        };
        let arguments: Option<Vec<f64>> = arguments.split(',').map(|a| a.trim().parse().ok()).collect();
        let Some(arguments) = arguments else { return self.fail("a generator takes numbers") };
        let mut random = Random::new(parameter as u64 + 1);
        let number = |value: f64| from_f64(element, value);
        Ok(match (name.trim(), &arguments[..]) {
            ("fill", [a]) => vec![number(*a); count],
            ("iota", [a, b]) => (0..count).map(|i| number(a + b * i as f64)).collect(),
            ("uniform", [a, b]) => (0..count).map(|_| number(a + (b - a) * random.unit())).collect(),
            ("integers", [a, b]) => {
                (0..count).map(|_| number((a + (b - a + 1.0) * random.unit()).floor())).collect()
            }
            _ => {
                return self.fail(format!(
                    "no generator `{text}`: fill(a), iota(a, b), uniform(a, b), integers(a, b)"
                ));
            }
        })
    }
}

fn literal(element: Scalar, word: &str) -> Option<u64> {
    if word == "nan" && !element.is_int() {
        return Some(from_f64(element, f64::NAN));
    }
    read_literal(element, word)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// From 0 to below 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
