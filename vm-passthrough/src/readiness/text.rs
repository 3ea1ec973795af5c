//! What is found of a function as text. Evidence quotes what others write (names of processes, of devices, of files), so control
//! characters are replaced: a line is one line, and a terminal only shows it.

use std::fmt::{self, Display, Write as _};

use super::{Blocker, Readiness, Severity};
use crate::iommu::DriverReason;

/// A text without control characters.
struct OneLine<'a>(&'a str);

impl Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .chars()
            .try_for_each(|c| f.write_char(if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }))
    }
}

impl Display for Blocker {
    /// In a line: the function, which reason, what shows it and what to do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, function, evidence, remedy, .. } = self;
        write!(f, "{function} {code}: {}; {}", OneLine(evidence), OneLine(remedy))
    }
}

impl Display for Readiness {
    /// The verdict, the companions, and for each reason a line of what it is, what shows it and what to do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |severity| self.blockers.iter().filter(|blocker| blocker.severity == severity).count();
        let counted = |count: usize, what| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        write!(f, "{} {}: ", self.address, OneLine(&self.name))?;
        match count(Severity::Blocker) {
            0 => f.write_str("ready")?,
            blockers => write!(f, "not ready, {}", counted(blockers, "blocker"))?,
        }
        match count(Severity::Warning) {
            0 => {}
            warnings => write!(f, ", {}", counted(warnings, "warning"))?,
        }
        if let [_, first, others @ ..] = &self.functions[..] {
            write!(f, "\n  goes with {first}")?;
            others.iter().try_for_each(|other| write!(f, ", {other}"))?;
        }
        for (function, choice) in &self.drivers {
            match *function == self.address {
                true => write!(f, "\n  driver  {}", OneLine(&choice.to_string()))?,
                false if choice.reason == DriverReason::NoVariant => {}
                false => write!(f, "\n  driver of {function}  {}", OneLine(&choice.to_string()))?,
            }
        }
        for Blocker { code, severity, function, evidence, remedy } in &self.blockers {
            write!(f, "\n  {severity} {code}")?;
            if *function != self.address {
                write!(f, " of {function}")?;
            }
            write!(f, ": {}", code.summary())?;
            write!(f, "\n    found   {}\n    remedy  {}", OneLine(evidence), OneLine(remedy))?;
        }
        Ok(())
    }
}
