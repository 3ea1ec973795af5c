//! How each function crosses the bridge: `calls.txt`, parsed.

use std::sync::LazyLock;

use vm_cuda_api::{FUNCTIONS, number};

/// How a function crosses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Mode {
    /// It does not.
    Unsupported,
    /// Sent, and not waited for.
    Posted,
    /// Sent, and its answer waited for.
    Asked,
    /// Asked, while the calls of other threads go on.
    Waits,
    /// Asked once.
    Kept,
    /// Packed by hand.
    Hand,
    /// Answered in the program.
    Here,
}

impl Mode {
    /// What a list of functions calls it.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Unsupported => "not supported",
            Self::Posted | Self::Asked | Self::Waits | Self::Kept => "forwarded",
            Self::Hand => "by hand",
            Self::Here => "answered in the program",
        }
    }
}

/// The mode of each function, by its number.
///
/// # Panics
/// Never: a test parses the table.
pub static MODES: LazyLock<Vec<Mode>> =
    LazyLock::new(|| parse(include_str!("../calls.txt")).expect("calls.txt is well formed"));

/// Says what is wrong with a line.
fn parse(text: &str) -> Result<Vec<Mode>, String> {
    let mut modes = vec![Mode::Unsupported; FUNCTIONS.len()];
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (mode, name) = line.split_once(' ').ok_or(line)?;
        let mode = match mode {
            "posted" => Mode::Posted,
            "asked" => Mode::Asked,
            "waits" => Mode::Waits,
            "kept" => Mode::Kept,
            "hand" => Mode::Hand,
            "here" => Mode::Here,
            _ => return Err(line.to_owned()),
        };
        let at = number(name).ok_or(line)?;
        if modes[at] != Mode::Unsupported {
            return Err(line.to_owned());
        }
        modes[at] = mode;
        for suffix in ["_ptsz", "_ptds"] {
            if let Some(at) = number(&format!("{name}{suffix}")) {
                modes[at] = mode;
            }
        }
    }
    Ok(modes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_cuda_api::Kind;

    /// How many of the functions that a runtime of CUDA 13 asks for, and that PyTorch 2.11 comes to by it, cross in each way.
    #[test]
    fn as_many_cross_as_are_told() {
        let count = |mode: &str| MODES.iter().filter(|known| known.text() == mode).count();
        let counts = ["forwarded", "by hand", "answered in the program", "not supported"].map(count);
        assert_eq!(counts.iter().sum::<usize>(), FUNCTIONS.len());
        assert_eq!(counts, [272, 172, 33, 281]);
        for name in include_str!("../tests/pytorch.txt").lines().filter(|line| !line.starts_with('#')) {
            let at = number(name).expect(name);
            assert_ne!(MODES[at], Mode::Unsupported, "{name}");
        }
    }

    #[test]
    fn what_is_forwarded_has_parameters_that_can_be_packed() {
        for (function, mode) in FUNCTIONS.iter().zip(MODES.iter()) {
            let forwarded = matches!(mode, Mode::Posted | Mode::Asked | Mode::Waits | Mode::Kept);
            for parameter in function.parameters.iter().filter(|_| forwarded) {
                let packs = !matches!(parameter.kind, Kind::Float | Kind::Value(_) | Kind::Other);
                assert!(packs, "{} {}", function.name, parameter.name);
                let returns = matches!(
                    parameter.kind,
                    Kind::OutText
                        | Kind::Pointer { way: vm_cuda_api::Way::Out | vm_cuda_api::Way::InOut, .. }
                );
                assert!(*mode != Mode::Posted || !returns, "{} {}", function.name, parameter.name);
            }
        }
    }
}
