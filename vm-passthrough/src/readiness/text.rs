//! What is found of a function as text. Evidence quotes what others write (names of processes, of devices, of files), so control
//! characters are replaced: a line is one line, and a terminal only shows it.

use std::fmt::{self, Display, Write as _};

use super::{Blocker, Readiness, Severity};
use crate::PciAddress;
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

/// What was found, once where it is the same of several functions, each with those functions.
fn findings(blockers: &[Blocker]) -> Vec<(&Blocker, Vec<PciAddress>)> {
    let mut findings: Vec<(&Blocker, Vec<PciAddress>)> = Vec::new();
    for blocker in blockers {
        let is_same = |(other, _): &&mut (&Blocker, _)| {
            Blocker { function: other.function, ..blocker.clone() } == **other
        };
        match findings.iter_mut().find(is_same) {
            Some((_, functions)) => functions.push(blocker.function),
            None => findings.push((blocker, vec![blocker.function])),
        }
    }
    findings
}

impl Display for Readiness {
    /// The verdict, the companions, and for each reason a line of what it is, what shows it and what to do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let findings = findings(&self.blockers);
        let count = |severity| findings.iter().filter(|(blocker, _)| blocker.severity == severity).count();
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
        for (Blocker { code, severity, evidence, remedy, .. }, functions) in findings {
            write!(f, "\n  {severity} {code}")?;
            if functions != [self.address] {
                let functions: Vec<_> = functions.iter().map(ToString::to_string).collect();
                write!(f, " of {}", functions.join(", "))?;
            }
            write!(f, ": {}", code.summary())?;
            write!(f, "\n    found   {}\n    remedy  {}", OneLine(evidence), OneLine(remedy))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iommu::DriverChoice;
    use crate::readiness::BlockerCode;

    #[test]
    fn drivers_of_companions_are_printed_if_they_are_variants() {
        let functions =
            ["0000:01:00.0", "0000:01:00.1", "0000:01:00.2"].map(|text| text.parse::<PciAddress>().unwrap());
        let choice = |driver: &str, reason| DriverChoice { driver: driver.into(), reason };
        let [target, plain, variant] = functions;
        let readiness = Readiness {
            address: target,
            name: "GPU".into(),
            functions: functions.to_vec(),
            drivers: vec![
                (target, choice("vfio-pci", DriverReason::NoVariant)),
                (plain, choice("vfio-pci", DriverReason::NoVariant)),
                (variant, choice("x_vfio_pci", DriverReason::Bound)),
            ],
            blockers: Vec::new(),
        };
        let expect = "0000:01:00.0 GPU: ready
  goes with 0000:01:00.1, 0000:01:00.2
  driver  vfio-pci, as no variant of it is made for this device
  driver of 0000:01:00.2  x_vfio_pci, which has it already";
        assert_eq!(readiness.to_string(), expect);
    }

    /// The functions of an eGPU are behind one tunnel: the reason is printed, and counted, once.
    #[test]
    fn the_same_evidence_of_several_functions_is_printed_once() {
        let [gpu, audio]: [PciAddress; 2] =
            ["0000:01:00.0", "0000:01:00.1"].map(|text| text.parse().unwrap());
        let found = |function, evidence: &str| Blocker {
            code: BlockerCode::Tunnelled,
            severity: Severity::Warning,
            function,
            evidence: evidence.into(),
            remedy: "wait".into(),
        };
        let readiness = Readiness {
            address: gpu,
            name: "GPU".into(),
            functions: vec![gpu, audio],
            drivers: Vec::new(),
            blockers: vec![found(gpu, "a tunnel"), found(audio, "its own"), found(audio, "a tunnel")],
        };
        let summary = BlockerCode::Tunnelled.summary();
        let expect = format!(
            "0000:01:00.0 GPU: ready, 2 warnings
  goes with 0000:01:00.1
  warning tunnelled of 0000:01:00.0, 0000:01:00.1: {summary}
    found   a tunnel
    remedy  wait
  warning tunnelled of 0000:01:00.1: {summary}
    found   its own
    remedy  wait"
        );
        assert_eq!(readiness.to_string(), expect);
    }
}
